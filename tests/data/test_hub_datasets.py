"""Datasets of a local hub become folders that --data takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import call
from tests.data.test_records import written
from tests.hub.conftest import hub, no_hub  # noqa: F401
from tests.hub.repos import Fault, Repo
from tests.hub.server import Hub
from your_ai.config import TrainConfig
from your_ai.data import hub_datasets
from your_ai.data.hub_datasets import downloading, find_dataset, parse_name, remote_listing
from your_ai.data.rows import read_rows
from your_ai.data.sources import find_splits
from your_ai.errors import UserError
from your_ai.hub.download import result_of

REPO = "someone/some-data"
NAME = f"hf:{REPO}"


def rows(start: int, count: int = 2) -> list[dict[str, str]]:
    return [{"prompt": f"p{i}", "completion": "c"} for i in range(start, start + count)]


def content(suffix: str, start: int = 0) -> bytes:
    path = written(f"made{suffix}", rows(start))
    data = path.read_bytes()
    path.unlink()
    return data


def fetched(name: str = NAME) -> Path:
    return result_of(downloading(name))


def prompts(name: str = NAME) -> dict[str, list[str]]:
    files = find_splits(TrainConfig(data=name, valid="")).files
    return {split: [row.content.prompt for row in read_rows(p)] for split, p in files.items()}


@pytest.fixture
def dataset(hub: Hub) -> Repo:  # noqa: F811
    """A dataset of two Parquet files to train on and one to validate."""
    repo = Repo(
        {
            ".gitattributes": b"",
            "README.md": b"# Data",
            "data/train-00000-of-00002.parquet": content(".parquet", 0),
            "data/train-00001-of-00002.parquet": content(".parquet", 2),
            "data/validation-00000-of-00001.parquet": content(".parquet", 4),
            "extra.jsonl": content(".jsonl", 9),
        }
    )
    hub.repos[f"datasets/{REPO}"] = repo
    return repo


def test_a_dataset_is_downloaded_once_and_trained_like_a_folder(hub, dataset):  # noqa: F811
    folder = fetched()
    assert sorted(path.suffix for path in folder.iterdir() if path.name[0] != ".") == [
        ".parquet", ".parquet", ".parquet",
    ]  # fmt: skip
    assert prompts() == {"train": ["p0", "p1", "p2", "p3"], "valid": ["p4", "p5"]}
    count = len(hub.requests)
    assert fetched() == folder == find_dataset(NAME)
    assert len(hub.requests) == count
    assert not any("extra" in request.path for request in hub.requests)


def test_an_interrupted_download_continues(hub, dataset):  # noqa: F811
    file = "data/train-00001-of-00002.parquet"
    hub.faults[file] = Fault(cuts=[100, 300])
    fetched()
    assert len(hub.gets(file)) == 3
    assert prompts()["train"] == ["p0", "p1", "p2", "p3"]


def test_damaged_bytes_are_refused(hub, dataset):  # noqa: F811
    file = "data/train-00001-of-00002.parquet"
    hub.faults[file] = Fault(content=bytes(len(dataset.files[file])))
    with pytest.raises(UserError, match="has another hash than the hub says"):
        fetched()
    with pytest.raises(hub_datasets.MissingDataset):
        find_dataset(NAME)


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".json", ".jsonl.gz"])
def test_other_forms_are_taken_where_there_is_no_parquet(hub, suffix):  # noqa: F811
    hub.repos[f"datasets/{REPO}"] = Repo({f"some{suffix}": content(suffix), "a.txt": b"no"})
    fetched()
    assert prompts() == {"train": ["p0", "p1"]}


def test_configurations_are_chosen_by_name(hub):  # noqa: F811
    files = {
        f"{config}/{split}-0.parquet": content(".parquet", start)
        for start, (config, split) in enumerate([("en", "train"), ("de", "train"), ("de", "test")])
    }
    hub.repos[f"datasets/{REPO}"] = Repo(files)
    with pytest.raises(UserError, match="has several configurations; choose one of: de, en"):
        remote_listing(NAME)
    with pytest.raises(UserError, match="has no configuration fr; choose one of: de, en"):
        remote_listing(f"{NAME}:fr")
    fetched(f"{NAME}:de")
    assert prompts(f"{NAME}:de") == {"train": ["p1", "p2"], "test": ["p2", "p3"]}


def test_the_hubs_own_conversion_is_used_for_other_forms(hub):  # noqa: F811
    converted = Repo({"default/train/0000.parquet": content(".parquet")}, sha="b" * 40)
    repo = Repo({"script.py": b""}, branches={hub_datasets.CONVERTED: converted})
    hub.repos[f"datasets/{REPO}"] = repo
    fetched()
    assert prompts() == {"train": ["p0", "p1"]}


def test_a_revision_has_its_own_folder(hub, dataset):  # noqa: F811
    dataset.branches["v1"] = Repo({"train.csv": content(".csv", 7)}, sha="c" * 40)
    fetched(f"{NAME}@v1")
    assert prompts(f"{NAME}@v1") == {"train": ["p7", "p8"]}
    fetched()
    assert len(prompts()["train"]) == 4


@pytest.mark.parametrize(
    "name",
    ["hf:", "hf:one", "hf:a/b/c", "hf:a/b:", "hf:a/b@", "hf:a/../b", "hf:a/b@../c", "hf:a /b"],
)
def test_other_names_are_refused(name):
    with pytest.raises(UserError, match="expected hf:OWNER/NAME"):
        parse_name(name)


@pytest.mark.parametrize(
    ("path", "more", "reason"),
    [
        ("../train.csv", {}, "points outside its folder"),
        ("train.csv", {"size": -1}, "does not describe it"),
        ("train.csv", {"blobId": "x"}, "does not describe it"),
        ("train.csv", {"lfs": {"sha256": "a" * 40}}, "has a hash"),
        ("train.csv", {"lfs": [1]}, "has a hash|does not describe"),
    ],
)
def test_a_malicious_list_is_refused(hub, dataset, path, more, reason):  # noqa: F811
    sibling = {"rfilename": path, "size": 3, "blobId": "a" * 40, **more}
    answer = {"sha": "a" * 40, "siblings": [sibling]}
    hub.odd["api"] = lambda answerer: answerer.answer(answer)
    with pytest.raises(UserError, match=reason):
        fetched()


def test_a_missing_dataset_says_how_to_get_it(hub, dataset, tiny_model, capsys):  # noqa: F811
    options = ("--data", NAME, "--model", tiny_model, "--max-steps", 1, "--lora-layers", 1)
    assert call("train", *options) == 2
    assert f"your_ai download {NAME}" in capsys.readouterr().err
    assert call("data", NAME, "--model", tiny_model, "--yes", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["splits"]["train"]["rows"] == 4
    assert call("train", *options, "--run", "r", "--no-supervise") == 0
    assert call("download", NAME) == 0
    assert call("download", NAME, "--to", "x") == 2


def test_an_unknown_dataset_is_one_line(hub):  # noqa: F811
    with pytest.raises(UserError, match="is not on the hub; if it is private"):
        fetched("hf:nobody/nothing")
