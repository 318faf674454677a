"""Finding models by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest

from tests.hub.conftest import NAME, REPO, error_of
from your_ai.hub.check import RECORD, FilesRecord, RecordedFile, check_model, write_record
from your_ai.hub.find import HubName, Missing, find_model, hub_name, models_root

LLAMA = "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"


@pytest.fixture
def offline(monkeypatch) -> list[str]:
    """The repositories that were searched in the cache. Requests to the hub fail."""
    asked: list[str] = []

    def refuse(repo: str, **options: object) -> str:
        asked.append(repo)
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return asked


@pytest.fixture
def recorded(model) -> Path:
    """The model in the store, as if it was downloaded."""
    folder = Path(shutil.copytree(model, models_root() / NAME))
    files = {p.name: RecordedFile(p.stat().st_size, "0" * 64) for p in folder.iterdir()}
    write_record(folder, FilesRecord(repo=REPO, asked="main", revision="a" * 40, files=files))
    return folder


def test_the_demo_is_found():
    assert check_model(find_model("demo"))["model_type"]


def test_a_folder_is_found(model):
    assert find_model(str(model)) == model
    assert find_model("model") == Path("model")


def test_a_folder_in_the_home_directory_is_found(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert find_model("~/model") == model


def test_a_folder_takes_precedence_over_an_alias(own_folder, offline):
    (own_folder / "llama-8b").mkdir()
    assert find_model("llama-8b") == Path("llama-8b")


@pytest.mark.parametrize("root", [Path("models"), Path("home/models")], ids=str)
@pytest.mark.parametrize("name", ["llama-8b", LLAMA, LLAMA.split("/")[1]])
def test_a_model_in_models_is_found_without_the_hub(model, offline, name, root):
    folder = root / LLAMA.split("/")[1]
    shutil.copytree(model, folder)
    assert find_model(name).resolve() == folder.resolve()
    assert offline == []


def test_the_store_takes_precedence_over_local_models(model, offline):
    shutil.copytree(model, Path("models") / NAME)
    shutil.copytree(model, models_root() / NAME)
    assert find_model(REPO) == models_root() / NAME


def test_without_a_store_models_go_to_the_current_folder(monkeypatch):
    monkeypatch.delenv("YOUR_AI_HOME")
    assert models_root() == Path("models")


def test_a_model_is_not_found_under_another_owner(recorded, offline):
    assert find_model(REPO) == recorded
    with pytest.raises(Missing):
        find_model(f"someone-else/{NAME}")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: is missing"),
        (lambda folder: (folder / "tokenizer.json").write_text("{ }"), "has 3 of 2 bytes"),
        (lambda folder: (folder / RECORD).write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / RECORD).write_text("{}"), "is damaged"),
    ],
)
def test_a_model_damaged_after_download_is_refused(recorded, offline, damage, words):
    damage(recorded)
    text = error_of(find_model, REPO)
    assert words in text
    assert text.endswith(f"; download it again: your_ai download {REPO}")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_without_a_record_is_refused_if_a_file_is_missing(lone, offline, missing):
    (lone / "tokenizer.json").write_text("{}")
    folder = Path(shutil.copytree(lone, models_root() / NAME))
    assert find_model(REPO) == folder
    (folder / missing).unlink()
    assert "--model" in error_of(find_model, REPO)


def test_the_error_for_a_dissimilar_alias_is_short(offline):
    error = error_of(find_model, "xyzzy")
    assert error.endswith("no such folder or alias; `your_ai models` lists the aliases")


def test_one_wrong_letter_suggests_the_model(offline):
    Path("models/mine-3b").mkdir(parents=True)
    assert error_of(find_model, "demmo").endswith("did you mean demo?")
    assert "did you mean mine-3b" in error_of(find_model, "mine-3c")
    assert "did you mean llama-8b" in error_of(find_model, "lama-8b")
    repo = "mlx-community/Llama-3.2-1B-Instruct-4bit"
    assert f"did you mean {repo}?" in error_of(find_model, repo.replace("mm", "m"))
    assert "did you mean" not in error_of(find_model, "someone/another-model")


@pytest.mark.parametrize(
    ("name", "repo"),
    [
        ("qwen3-30b", "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit"),
        ("qwen3.6-35b", "mlx-community/Qwen3.6-35B-A3B-4bit"),
        ("gemma4-26b", "mlx-community/gemma-4-26b-a4b-it-4bit"),
        ("Qwen3-30B", "mlx-community/Qwen3-30B-A3B-Instruct-2507-4bit"),
        ("phi4", "mlx-community/phi-4-4bit"),
    ],
)
def test_the_beginning_of_one_alias_stands_for_it(offline, name, repo):
    with pytest.raises(Missing) as caught:
        find_model(name)
    assert caught.value.repo == repo
    assert f"your_ai download {name}" in str(caught.value)


def test_the_beginning_of_several_aliases_lists_them(offline):
    assert (
        error_of(find_model, "qwen3-3")
        == "--model qwen3-3: begins 2 aliases: qwen3-32b, qwen3-30b-a3b"
    )


def test_a_folder_takes_precedence_over_the_beginning_of_an_alias(model, offline):
    shutil.copytree(model, Path("models") / "qwen3-30b")
    assert find_model("qwen3-30b") == Path("models") / "qwen3-30b"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "no such folder") for name in ("./nope", "../nope", "/nope", "~/nope")),
        *((name, "no such folder") for name in ("a/b/c", "nope/")),
        *((name, "") for name in ("a/../b", "a/..", "a b/c")),
        ("model/config.json", "is a file"),
    ],
)
def test_a_missing_path_a_file_or_an_invalid_repository_id_is_refused(model, offline, name, words):
    assert f"--model {name}: {words}" in error_of(find_model, name)
    assert offline == []


@pytest.mark.parametrize("name", [REPO, "llama-8b"])
def test_an_absent_model_raises_Missing_and_is_not_downloaded(hub, name):
    with pytest.raises(Missing) as caught:
        find_model(name)
    assert caught.value.repo == (LLAMA if name == "llama-8b" else REPO)
    text = str(caught.value)
    assert text.startswith(f"--model {name}: is not on this machine; download it")
    assert text.endswith(f"your_ai download {name}")
    assert caught.value.size_text == ("4.52 GB" if name == "llama-8b" else "")
    assert caught.value.size_text in text
    assert hub.requests == []


def test_only_a_readable_record_gives_the_repository_and_revision(model, recorded):
    assert hub_name(recorded, str(recorded)) == HubName(REPO, "a" * 40)
    (recorded / RECORD).write_text("{")
    for folder in (model, recorded):
        assert hub_name(folder, str(folder)) is None


def test_a_cache_path_gives_the_repository_and_revision(tmp_path):
    place = tmp_path / "models--org--a--b" / "snapshots" / "c0ffee"
    assert hub_name(place, str(place)) == HubName("org/a--b", "c0ffee")


@pytest.mark.parametrize(
    ("named", "name"),
    [("org/model", HubName("org/model")), ("llama-8b", HubName(LLAMA)), ("org/local", None)],
    ids=["an id", "an alias", "a local folder that looks like an id"],
)
def test_the_name_in_the_run_gives_the_repository(model, named, name):
    Path("org/local").mkdir(parents=True)
    assert hub_name(model, named) == name
