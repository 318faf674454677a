"""Relative paths of a file of settings are tried in the current folder, and then beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from your_ai.config import resolve
from your_ai.config.beside import found_beside


@pytest.fixture
def project(tmp_path, own_folder) -> Path:
    """A folder that is not the current one."""
    folder = tmp_path / "project"
    (folder / "rows").mkdir(parents=True)
    for name in ("a.csv", "b.csv", "p.jinja"):
        (folder / name).touch()
    return folder


def test_paths_are_found_beside_the_file(project):
    given = {"data": "a.csv, b.csv=2,hf:a/b", "prompt_template": "p.jinja", "valid": "none"}
    (project / "none").touch()
    file = project / "my.yaml"
    file.write_text("".join(f"{name}: {value!r}\n" for name, value in given.items()))
    config = resolve({}, str(file))
    assert config.data == f"{project / 'a.csv'},{project / 'b.csv'}=2,hf:a/b"
    assert config.prompt_template == str(project / "p.jinja")
    assert config.valid == "none"


def test_current_folder_comes_first_and_what_is_nowhere_stays(project):
    Path("a.csv").touch()
    given = {"data": "a.csv", "valid": "nowhere.csv", "model": "llama-8b", "hostfile": "~/x"}
    assert found_beside(given, project) == given


def test_only_the_settings_that_are_paths_are_looked_for(project):
    (project / "mine").touch()
    assert found_beside({"run": "mine", "data": ["mine"]}, project) == {
        "run": "mine",
        "data": ["mine"],
    }


def test_a_file_of_mlx_lm_too(project):
    (project / "rows" / "train.jsonl").write_text('{"text": "a"}\n' * 3)
    file = project / "lora.yaml"
    file.write_text("model: demo\ntrain: true\ndata: rows\niters: 3\nfine_tune_type: lora\n")
    assert resolve({}, str(file)).data.startswith(str(project / "rows"))
