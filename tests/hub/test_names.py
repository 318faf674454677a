from __future__ import annotations

import pytest

from your_ai.hub.find import HubName, hub_name
from your_ai.hub.record import RECORD, FilesRecord, RecordedFile, write_record


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "copy").mkdir()
    return tmp_path / "copy"


def test_a_folder_without_a_record_has_no_hub_name(folder):
    assert hub_name(folder, str(folder)) is None


def test_the_record_gives_the_repository_and_revision(folder):
    files = {"config.json": RecordedFile(1, "0" * 64)}
    write_record(
        folder, FilesRecord(repo="org/model", asked="main", revision="c0ffee", files=files)
    )
    assert hub_name(folder, str(folder)) == HubName("org/model", "c0ffee")


def test_a_damaged_record_gives_no_hub_name(folder):
    (folder / RECORD).write_text("{")
    assert hub_name(folder, str(folder)) is None


def test_a_cache_path_gives_the_repository_and_revision(tmp_path):
    place = tmp_path / "models--org--a--b" / "snapshots" / "c0ffee"
    assert hub_name(place, str(place)) == HubName("org/a--b", "c0ffee")


@pytest.mark.parametrize(
    ("named", "repo"),
    [("org/model", "org/model"), ("llama-8b", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit")],
)
def test_the_name_in_the_run_gives_the_repository(folder, named, repo):
    assert hub_name(folder, named) == HubName(repo)


def test_a_local_folder_that_looks_like_an_id_has_no_hub_name(folder, tmp_path):
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub_name(folder, "org/model") is None
