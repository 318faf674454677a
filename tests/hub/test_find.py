"""Models by name."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from your_ai.errors import UserError
from your_ai.hub.check import check_model
from your_ai.hub.find import find_model

REPO = "someone/some-model"


@pytest.fixture
def offline(monkeypatch) -> list[str]:
    """No name may reach the hub; those that would."""
    asked: list[str] = []

    def refuse(repo: str, **options: object) -> str:
        asked.append(repo)
        raise errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return asked


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        find_model(name)
    return str(caught.value)


def test_the_demo_is_found():
    assert check_model(find_model("demo"))["model_type"]


def test_a_folder_is_found(model):
    assert find_model(str(model)) == model
    assert find_model("model") == Path("model")


def test_a_folder_below_home_is_found(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert find_model("~/model") == model


def test_a_folder_wins_over_an_alias(own_folder, offline):
    (own_folder / "llama-8b").mkdir()
    assert find_model("llama-8b") == Path("llama-8b")


@pytest.mark.parametrize("name", ["llama-8b", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"])
def test_a_model_in_models_needs_no_hub(own_folder, offline, name):
    folder = Path("models") / "Meta-Llama-3.1-8B-Instruct-4bit"
    folder.mkdir(parents=True)
    assert find_model(name) == folder
    assert offline == []


def test_an_unknown_alias_is_refused_with_the_nearest(offline):
    assert "did you mean llama-8b?" in refused("lama-8b")
    assert offline == []


def test_an_alias_like_no_other_is_refused_with_the_known(offline):
    assert "aliases: demo, llama-8b" in refused("xyzzy")


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "nope/"])
def test_a_path_that_is_not_there_is_refused(offline, name):
    assert f"--model {name}: no such folder" in refused(name)
    assert offline == []


def test_a_file_is_refused(model):
    file = model / "config.json"
    assert f"--model {file}: is a file" in refused(str(file))


def test_a_model_in_the_hubs_cache_is_not_fetched(model, monkeypatch):
    options = []

    def find(repo: str, **given: object) -> str:
        options.append((repo, given.get("local_files_only")))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", find)
    assert find_model(REPO) == model
    assert options == [(REPO, True)]


def test_a_model_that_is_not_whole_in_the_cache_is_fetched(model, own_folder, monkeypatch):
    (own_folder / "cached").mkdir()

    def fetch(repo: str, **given: object) -> str:
        return str(own_folder / "cached" if given.get("local_files_only") else model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_model(REPO) == model


def test_a_model_not_in_the_cache_is_fetched(model, monkeypatch):
    def fetch(repo: str, **given: object) -> str:
        if given.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not here")
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_model(REPO) == model


class Response:
    """As much of an answer of the hub as its errors look at."""

    headers = types.MappingProxyType({})
    request = None
    status_code = 403


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: errors.GatedRepoError("gated", response=Response()), "is gated; accept"),
        (
            lambda: errors.RepositoryNotFoundError("none", response=Response()),
            f"no {REPO} on the hub",
        ),
        (lambda: ConnectionError("cut off\nsecond line"), r"could not be fetched .*\(cut off\)"),
        (lambda: RuntimeError(), r"could not be fetched .*\(RuntimeError\)"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(monkeypatch, error, words):
    def fail(*args: object, **options: object) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=words) as caught:
        find_model(REPO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str
)
def test_without_a_network_it_is_said_at_once(own_folder, setting):
    """In a process of its own: the hub's client reads both when it is imported."""
    code = f"from your_ai.hub.find import find_model; find_model({REPO!r})"
    environment = {**os.environ, "HF_HOME": str(own_folder / "hf"), **setting}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - began < 20
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"your_ai.errors.UserError: --model {REPO}: no such folder here")
