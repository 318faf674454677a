"""Models for LM Studio, in a home folder of the test."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest

from tests.conftest import call
from tests.export.gguf_files import fields
from tests.export.runs import make_run, printed
from your_ai.errors import UserError
from your_ai.export import lmstudio


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setattr(Path, "home", lambda: folder)
    return folder


@pytest.fixture
def opened(home):
    """The folder of LM Studio, which was opened once."""
    (home / ".lmstudio").mkdir()
    return home / ".lmstudio"


@pytest.fixture
def run(tiny_model):
    return make_run(tiny_model)


def test_the_home_is_the_one_that_lm_studio_uses(home, opened):
    assert lmstudio.models_folder() == home / ".lmstudio" / "models"
    (home / ".cache" / "lm-studio").mkdir(parents=True)
    assert lmstudio.models_folder() == home / ".cache" / "lm-studio" / "models"
    (home / "own").mkdir()
    (home / ".lmstudio-home-pointer").write_text(f"{home / 'own'}\n")
    assert lmstudio.models_folder() == home / "own" / "models"
    (home / "disk").mkdir()
    settings = {"downloadsFolder": str(home / "disk")}
    (home / "own" / "settings.json").write_text(json.dumps(settings))
    assert lmstudio.models_folder() == home / "disk"


@pytest.mark.parametrize("pointer", ["/nowhere/at/all", "relative", "a\0b", "~"])
def test_a_pointer_to_no_folder_is_reported(home, pointer):
    (home / ".lmstudio-home-pointer").write_text(pointer)
    with pytest.raises(UserError, match=r"\.lmstudio-home-pointer: names no folder; .* --out"):
        lmstudio.models_folder()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"x" * 5000])
def test_a_pointer_that_cannot_be_read_is_as_none(home, opened, content):
    (home / ".lmstudio-home-pointer").write_bytes(content)
    assert lmstudio.home_folder() == opened


@pytest.mark.parametrize("content", ["", "[]", "{", '{"downloadsFolder": 7}', "[" * 9999])
def test_settings_of_another_form_are_ignored(opened, content):
    (opened / "settings.json").write_text(content)
    assert lmstudio.models_folder() == opened / "models"


def test_a_models_folder_that_is_gone_is_reported(opened):
    (opened / "settings.json").write_text('{"downloadsFolder": "/nowhere/x"}')
    with pytest.raises(UserError, match=r"downloadsFolder is .*, which is not a folder"):
        lmstudio.models_folder()


def test_without_lm_studio_the_user_is_told(home, run, capsys):
    assert call("export", "r", "--to", "lmstudio") == 2
    assert printed(capsys) == (
        f"error: {home}/.lmstudio: does not exist; install LM Studio and open it once, or give "
        "--out\n"
    )


def test_a_gguf_model_is_written_where_lm_studio_looks(opened, run, capsys):
    assert call("export", "r", "--to", "lmstudio", "--dtype", "q8_0") == 0
    folder = opened / "models" / "your_ai" / "r"
    shown = capsys.readouterr().out.splitlines()
    assert shown == [str(folder), "LM Studio lists it under My Models"]
    assert [path.name for path in folder.iterdir()] == ["r-Q8_0.gguf"]
    assert fields(folder / "r-Q8_0.gguf")["general.file_type"] == 7
    assert [path.name for path in folder.parent.iterdir()] == ["r"]
    assert call("export", "r", "--to", "lmstudio") == 2
    assert "exists; choose another name, or replace it with --force" in printed(capsys)
    assert call("export", "r", "--to", "lmstudio", "--dtype", "q4_0", "--force") == 0
    assert [path.name for path in folder.iterdir()] == ["r-Q4_0.gguf"]


def test_a_model_of_mlx_is_a_fused_folder(opened, run, capsys):
    assert call("export", "r", "--to", "lmstudio", "--dtype", "mlx") == 0
    folder = opened / "models" / "your_ai" / "r"
    assert {"config.json", "model.safetensors", "chat_template.jinja"} <= {
        path.name for path in folder.iterdir()
    }
    assert [path.name for path in folder.parent.iterdir()] == ["r"]


@pytest.mark.parametrize(
    ("system", "machine", "wanted"),
    [("darwin", "arm64", "mlx"), ("darwin", "x86_64", "f16"), ("linux", "aarch64", "f16")],
)
def test_mlx_is_the_default_on_apple_silicon(monkeypatch, system, machine, wanted):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert lmstudio.default_form("f16") == wanted


def test_out_overrides_lm_studios_folder(home, run, capsys):
    assert call("export", "r", "--to", "lmstudio", "--out", "here") == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("LM Studio does not look there")
    assert [path.name for path in Path("here").iterdir()] == ["r-F16.gguf"]


def test_a_models_folder_that_cannot_be_written_is_reported(opened, run, capsys):
    (opened / "models").write_text("a file")
    assert call("export", "r", "--to", "lmstudio") == 2
    assert "cannot be written (" in printed(capsys)


def test_a_reward_model_is_refused(home, run, monkeypatch, capsys):
    monkeypatch.setattr("your_ai.nets.saved_adapter.has_score_head", lambda _: True)
    assert call("export", "r", "--to", "lmstudio", "--out", "x") == 2
    assert "is a reward model" in printed(capsys)
    assert not Path("x").exists()
