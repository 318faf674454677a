# ruff: noqa: F811 (fixtures of other folders)
"""`your_ai push` and `train --push-to`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.conftest import events_of, refused
from tests.fault.processes import call
from tests.hub.conftest import account, hub, no_hub  # noqa: F401
from tests.hub.repos import Fault
from tests.publish.conftest import PRIVATE, finished  # noqa: F401
from your_ai.config import to_yaml
from your_ai.errors import RunError
from your_ai.run import child, events
from your_ai.run.checkpoint import ADAPTERS
from your_ai.run.child import DONE, FAILED
from your_ai.run.folder import RUNS, RunFolder, is_running
from your_ai.session import attach, supervisor

REPO = "someone/mine"


@pytest.fixture
def preset(configure):
    """The options of a short run."""
    Path("preset.yaml").write_text(to_yaml(configure(run="", max_steps=2, supervise=True)))
    return ["train", "--config", "preset.yaml", "--run", "r"]


def your_ai(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "your_ai", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_pushes_the_adapter_of_a_run_and_no_private_data(hub, account, finished, capsys):
    status, out, error = call(capsys, "push", str(finished.path), REPO)
    assert (status, out, error) == (0, f"pushed to {hub.url}/{REPO} (private)\n", "")
    files = hub.repos[REPO].files
    assert files[ADAPTERS] == (finished.adapter / ADAPTERS).read_bytes()
    assert set(files) == {
        *(".gitattributes", "README.md", "adapter_config.json", "adapters.safetensors"),
        "config.yaml",
    }
    sent = b"".join([*files.values(), *(r.body for r in hub.requests)]).decode(errors="replace")
    assert [word for word in (*PRIVATE, str(finished.path)) if word in sent] == []


def test_dry_run_sends_no_requests_to_the_hub(hub, finished, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    status, out, _ = call(capsys, "push", str(finished.path), REPO, "--dry-run")
    assert status == 0
    folder = Path(out.strip())
    assert (folder / ADAPTERS).read_bytes() == (finished.adapter / ADAPTERS).read_bytes()
    assert json.loads((folder / "adapter_config.json").read_text())["step"] == 3
    assert hub.requests == []


def test_pushes_an_adapter_folder(hub, account, finished, capsys):
    status, _, error = call(capsys, "push", str(finished.adapter), REPO)
    assert (status, error) == (0, "")
    assert set(hub.repos[REPO].files) == {
        *(".gitattributes", "README.md", "adapter_config.json", "adapters.safetensors")
    }


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("nothing", REPO), "no run named nothing"),
        (("RUN", "mine"), "is not a repository name"),
        (("RUN", REPO, "--checkpoint", "9"), "no such checkpoint; checkpoints: step-000003"),
        (("ADAPTER", REPO, "--checkpoint", "9"), "only works with a run"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(hub, account, finished, capsys, arguments, word):
    places = {"RUN": str(finished.path), "ADAPTER": str(finished.adapter)}
    assert word in refused(capsys, "push", *(places.get(a, a) for a in arguments))
    assert hub.requests == []


def test_failed_push_prints_the_complete_command_to_repeat_it(hub, account, finished, capsys):
    hub.faults["commit"] = Fault(statuses=[500])
    options = ("--public", "--message", "a try", "--checkpoint", "2")
    status, _, error = call(capsys, "push", str(finished.path), REPO, *options)
    assert status == 1
    assert f"your_ai push {finished.path} {REPO} --checkpoint 2 --message 'a try' --public" in error


# train --push-to


@pytest.mark.slow
def test_train_with_push_to_pushes_the_finished_run(hub, account, preset):
    done = your_ai(*preset, "--push-to", REPO)
    assert (done.returncode, done.stderr) == (0, "")
    run = RunFolder(RUNS / "r")
    notices = [event.text for event in events_of(run, events.Notice)]
    assert notices[-2:] == [f"pushing to {REPO}", f"pushed to {hub.url}/{REPO} (private)"]
    assert f"note: pushed to {hub.url}/{REPO}" in done.stdout
    repo = hub.repos[REPO]
    assert repo.private
    assert repo.files[ADAPTERS] == (run.adapter / ADAPTERS).read_bytes()
    assert b"| steps | 2 |" in repo.files["README.md"]


@pytest.fixture
def done_run(own_folder):
    """The run r, for tests with a supervisor that only reports how a push ended."""
    run = RunFolder(RUNS / "r")
    run.path.mkdir(parents=True)
    return run


DONE_BUT_NOT_PUSHED = """
import sys
from pathlib import Path
from your_ai.run import events
log = events.EventLog(Path(sys.argv[1]) / "events.jsonl")
log.write(events.Finished(step=2, reason="done", adapter="there", seconds=1.0))
print("error: not pushed; push it with: your_ai push r someone/mine")
sys.exit(1)
"""


def test_failed_push_is_reported_after_the_result(done_run, configure, monkeypatch, capsys):
    started = child.started

    def start(command, folder, log):
        run = command[command.index("your_ai.session.supervisor") + 1]
        return started([sys.executable, "-c", DONE_BUT_NOT_PUSHED, run], folder, log)

    monkeypatch.setattr(child, "started", start)
    with pytest.raises(RunError, match="not pushed; push it with: your_ai push r someone/mine"):
        attach.train(done_run, configure(push_to=REPO), Console())
    assert "done: 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(("ended", "asked"), [(DONE, ["r"]), (143, [])])
def test_supervisor_pushes_only_a_finished_run(
    done_run, configure, monkeypatch, capsys, ended, asked
):
    pushed = []

    def push_finished(folder, repo, received):
        pushed.append(folder.name)
        assert is_running(folder)  # so that watchers see how the push ends
        raise RunError("not pushed")

    done_run.write_config(configure(push_to=REPO))
    monkeypatch.setattr(supervisor, "supervise", lambda *_: ended)
    monkeypatch.setattr(supervisor, "push_finished", push_finished)
    status = supervisor.supervise_run("r", "", None, [])
    assert pushed == asked
    assert status == (FAILED if asked else ended)
    assert capsys.readouterr().err == ("error: not pushed\n" if asked else "")


@pytest.mark.parametrize(
    ("repo", "token", "word"),
    [
        ("mine", "right", "is not a repository name"),
        (REPO, "", "hf auth login"),
        (REPO, "wrong", "does not take your token"),
        ("nobody/mine", "right", "may not write to nobody"),
    ],
)
def test_invalid_push_to_is_refused_before_training(
    hub, account, preset, capsys, monkeypatch, repo, token, word
):
    monkeypatch.setenv("HF_TOKEN", token)
    assert word in refused(capsys, *preset, "--push-to", repo)
    assert not RUNS.exists()


def test_push_to_also_works_without_a_supervisor(hub, account, preset, capsys, monkeypatch):
    asked = []

    def push_finished(folder, repo, received):
        asked.append((folder.name, repo, (folder.adapter / ADAPTERS).exists()))
        raise RunError("not pushed")

    monkeypatch.setattr("your_ai.publish.after_training.push_finished", push_finished)
    status, out, error = call(capsys, *preset, "--push-to", REPO, "--no-supervise")
    assert asked == [("r", REPO, True)]
    assert (status, error) == (1, "error: not pushed\n")
    assert "done: 2 steps" in out
