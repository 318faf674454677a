"""Relative paths of a file of settings are tried in the current folder, and then beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from your_ai.config import resolve
from your_ai.config.reading import found_beside
from your_ai.errors import UserError


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


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        *((n, "no/x", "no/x") for n in ("valid", "prompt_template", "hostfile", "judge_rubric")),
        ("data", "a.csv,no/x=2", "no/x"),
        ("model", "./no/x", "no/x"),
        ("from_adapter", "../no/x", "../no/x"),
    ],
)
def test_an_error_names_all_the_paths_that_were_tried(project, name, value, path):
    file = project / "my.yaml"
    file.write_text(f"{name}: {value}\n")
    with pytest.raises(UserError) as caught:
        resolve({}, str(file))
    assert str(caught.value).startswith(f"{file}: {name} ")
    for folder in (Path.cwd(), project):
        assert os.path.abspath(folder / path) in str(caught.value)


@pytest.mark.parametrize("text", ["model: qwen3-4b", "model: a/b", "data: hf:a/b", "data: demo"])
def test_names_are_no_paths(project, text):
    (project / "my.yaml").write_text(f"{text}\n")
    resolve({}, str(project / "my.yaml"), needs_data=False)


def test_a_comma_in_the_name_of_a_file_separates_nothing(project):
    (project / "a, b.csv").touch()
    (project / "my.yaml").write_text("data: a, b.csv\n")
    assert resolve({}, str(project / "my.yaml")).data == str(project / "a, b.csv")


def test_a_path_that_a_flag_replaces_need_not_be_there(project):
    (project / "my.yaml").write_text("data: nowhere\nmodel: demo\n")
    assert resolve({"data": "demo"}, str(project / "my.yaml")).data == "demo"


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
