"""Listing and removing the models on this machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest

from tests.hub.conftest import FIRST, NAME, REPO, download, error_of, model_files
from tests.hub.server import Fault, Repo
from your_ai.errors import UserError
from your_ai.hub.download import open_lock, taken
from your_ai.hub.find import models_root
from your_ai.hub.local import folder_to_remove, local_models, remove_model


@pytest.fixture
def stopped(hub) -> Path:
    """The folder of a stopped download."""
    hub.faults[FIRST] = Fault(cuts=[100_000] + [0] * 50)
    error_of(download, REPO)
    hub.faults.clear()
    return models_root() / f".incomplete-{NAME}"


def test_no_models_are_listed_at_first():
    assert local_models() == []


def test_a_downloaded_model_is_listed(fetched):
    (local,) = local_models()
    assert (local.name, local.folder, local.where) == (NAME, fetched, "models")
    assert (local.repo, local.alias, local.bits, local.fault) == (REPO, None, None, None)
    wanted = {n for n in model_files() if n not in (".gitattributes", "README.md")}
    least = sum(len(model_files()[name]) for name in wanted if "/" not in name)
    assert least < local.size_bytes < least + 2_000


def test_the_alias_and_bits_are_listed(hub):
    config = {"model_type": "llama", "quantization": {"bits": 4, "group_size": 64}}
    hub.repos["mlx-community/Qwen3-4B-4bit"] = Repo(
        model_files() | {"config.json": json.dumps(config).encode()}
    )
    download("qwen3-4b")
    (local,) = local_models()
    assert (local.alias, local.bits) == ("qwen3-4b", 4)


def test_a_damaged_model_is_listed_with_its_fault(fetched):
    os.truncate(fetched / FIRST, 5)
    (local,) = local_models()
    assert "has 5 of 300078 bytes" in local.fault


def test_a_stopped_download_is_listed(stopped):
    (local,) = local_models()
    assert (local.name, local.folder) == (NAME, stopped)
    assert local.fault == "its download stopped at 100 kB"


def test_other_folders_are_not_listed(fetched):
    (models_root() / "notes").mkdir()
    (models_root() / "file").write_text("")
    (models_root() / ".tmp-x").mkdir()
    assert [local.name for local in local_models()] == [NAME]


def test_local_models_are_listed_after_those_in_the_store(fetched, model):
    shutil.copytree(model, Path("models") / "own")
    assert [local.name for local in local_models()] == [NAME, "own"]


def test_a_cached_model_is_listed(hub):
    folder = Path(huggingface_hub.snapshot_download(REPO))
    (local,) = local_models()
    assert (local.name, local.folder, local.where, local.fault) == (REPO, folder, "cache", None)


def test_an_incomplete_cached_model_is_listed_with_its_fault(hub):
    folder = Path(huggingface_hub.snapshot_download(REPO))
    (folder / FIRST).unlink()
    assert "is missing" in local_models()[0].fault


@pytest.mark.parametrize("config", [b'{"model_type": "clip"}', b"{}", b"{"])
def test_cached_repositories_without_a_language_model_are_not_listed(hub, config):
    hub.repos[REPO].files["config.json"] = config
    huggingface_hub.snapshot_download(REPO)
    assert local_models() == []


@pytest.mark.parametrize("name", [REPO, NAME])
def test_remove_deletes_the_model_and_returns_its_size(fetched, name):
    (local,) = local_models()
    assert remove_model(folder_to_remove(name)) == local.size_bytes
    assert local_models() == []
    assert [p.name for p in models_root().iterdir()] == [f".lock-{NAME}"]


def test_a_model_is_removed_by_its_alias(hub):
    hub.repos["mlx-community/Qwen3-4B-4bit"] = Repo(model_files())
    folder = download("qwen3-4b")
    remove_model(folder_to_remove("qwen3-4b"))
    assert not folder.exists()


def test_a_stopped_download_is_removed(stopped):
    assert remove_model(folder_to_remove(REPO)) == 100_000 + sum(
        len(model_files()[name])
        for name in ("config.json", "tokenizer.json", "model.safetensors.index.json")
    )
    assert not stopped.exists()


def test_leftovers_of_a_killed_removal_are_deleted(fetched):
    left = models_root() / ".tmp-x"
    left.mkdir()
    os.utime(left, (0, 0))
    remove_model(folder_to_remove(REPO))
    assert not left.exists()


def test_a_cached_model_is_not_removed(hub):
    folder = huggingface_hub.snapshot_download(REPO)
    assert f"hf cache rm model/{REPO}" in error_of(folder_to_remove, REPO)
    assert Path(folder).exists()


@pytest.mark.parametrize("name", ["../x", "/etc", ".", "..", "models/../x", ".incomplete-x", ""])
def test_a_path_outside_the_models_folder_is_not_removed(own_folder, model, name):
    assert name in error_of(folder_to_remove, name)
    assert model.exists()


def test_the_demo_is_not_removed():
    assert "comes with your_ai" in error_of(folder_to_remove, "demo")


@pytest.mark.parametrize("name", [REPO, NAME, "llama-8b", "notes"])
def test_an_absent_model_is_not_removed(own_folder, name):
    (models_root() / "notes").mkdir(parents=True)
    (models_root() / "notes" / "a.txt").write_text("mine")
    assert "no such " in error_of(folder_to_remove, name)
    assert (models_root() / "notes" / "a.txt").exists()


def test_a_link_to_a_model_is_not_removed(model):
    models_root().mkdir(parents=True)
    (models_root() / NAME).symlink_to(model)
    assert "is a link" in error_of(folder_to_remove, NAME)
    assert (model / "config.json").exists()


def test_a_model_is_not_removed_during_its_download(stopped):
    with open_lock(models_root() / NAME) as lock:
        assert taken(lock)
        with pytest.raises(UserError, match="is being downloaded; stop the download first"):
            remove_model(folder_to_remove(REPO))
    assert stopped.exists()
