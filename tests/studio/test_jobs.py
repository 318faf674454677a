from __future__ import annotations

import os
import signal

import pytest

from tests.conftest import wait_until
from tests.studio.client import Client
from your_ai.errors import UserError
from your_ai.studio import jobs


def ended(job: jobs.StudioJob) -> jobs.StudioJob:
    wait_until(lambda: not jobs.read(job.folder).pid)
    return jobs.read(job.folder)


def test_a_job_keeps_its_output_and_status(own_folder):
    job = ended(jobs.begin("The runs", "runs"))
    assert (job.state, job.status) == ("finished", 0)
    assert "no runs here" in job.lines[-1]
    assert job.command == "your_ai runs"


def test_a_job_that_fails_says_why(own_folder):
    job = ended(jobs.begin("Look", "export", "nothing", "--to", "gguf"))
    assert job.state == "failed"
    assert "nothing" in job.fault
    assert job.fault not in "".join(job.said)
    assert not job.can_continue  # the same words would fail again


def test_a_job_that_is_killed_can_continue(own_folder):
    job = jobs.begin("Wait", "studio", "--no-open")
    assert job.state == "running"
    os.killpg(job.pid, signal.SIGKILL)
    job = ended(job)
    assert (job.state, job.can_continue) == ("failed", True)


def test_a_job_is_stopped_once(own_folder):
    job = jobs.begin("Wait", "studio", "--no-open")
    wait_until(lambda: "studio:" in "".join(jobs.read(job.folder).lines))
    jobs.stop(job)
    assert ended(job).state in ("stopped", "finished")
    with pytest.raises(UserError, match="has ended"):
        jobs.stop(jobs.read(job.folder))


def test_the_page_of_a_job_shows_it_and_begins_it_again(client: Client):
    job = ended(jobs.begin("The <runs>", "runs"))
    text = client.get(f"jobs/{job.name}").text
    assert "The &lt;runs&gt;" in text
    assert "data-every" not in text
    assert client.post(f"jobs/{job.name}/again").place.startswith("jobs/")
    assert client.post(f"jobs/{job.name}/stop").fault == "The <runs>: has ended"


def test_folders_that_are_no_jobs_are_left_out(own_folder):
    for content in ("", "[]", '{"title": 1}', "{"):
        folder = jobs.JOBS / f"{abs(hash(content)):x}"
        folder.mkdir(parents=True)
        (folder / jobs.COMMAND).write_text(content)
    assert jobs.found() == []


def test_only_so_many_are_kept(own_folder, monkeypatch):
    monkeypatch.setattr(jobs, "MOST_KEPT", 1)
    first, second = (ended(jobs.begin("The runs", "runs")) for _ in range(2))
    third = jobs.begin("The runs", "runs")
    assert {job.name for job in jobs.found()} == {second.name, third.name}
    assert not first.folder.exists()
