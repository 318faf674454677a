"""Completion in bash, zsh and fish, as their scripts ask for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import call

SHELLS = ("bash", "zsh", "fish")


def completed(capsys, monkeypatch, shell: str, line: str) -> str:
    """What a shell is told for a command line whose last word is not complete."""
    words = line.split(" ")
    for name, value in {
        "_YOUR_AI_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }.items():
        monkeypatch.setenv(name, value)
    call()
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_and_options_are_completed(shell, capsys, monkeypatch):
    found = completed(capsys, monkeypatch, shell, "your_ai rec")
    assert "recommend" in found
    assert "generate" not in found
    assert "--grad-accumulation" in completed(capsys, monkeypatch, shell, "your_ai train --grad")


@pytest.mark.parametrize("command", ["watch", "eval", "runs rm", "compare", "train --resume"])
@pytest.mark.parametrize("shell", SHELLS)
def test_names_of_runs_are_completed(shell, command, own_folder, capsys, monkeypatch):
    for name in ("first", "final", "other", ".tmp-first", "not a run"):
        (own_folder / "runs" / name).mkdir(parents=True)
    Path("runs/file").touch()
    found = completed(capsys, monkeypatch, shell, f"your_ai {command} fi")
    assert ("first" in found, "final" in found) == (True, True)
    assert not any(name in found for name in ("other", "tmp", "not a", "file"))


def test_the_words_of_a_setting_are_completed(capsys, monkeypatch):
    found = completed(capsys, monkeypatch, "bash", "your_ai train --plan st")
    assert found.split() == ["staged", "streamed"]
    found = completed(capsys, monkeypatch, "bash", "your_ai export --dtype q8")
    assert found.split() == ["q8_0"]
    assert "auto" in completed(capsys, monkeypatch, "bash", "your_ai plan --lora-rank ")


@pytest.mark.parametrize("shell", SHELLS)
def test_a_folder_without_runs_completes_nothing(shell, own_folder, capsys, monkeypatch):
    assert "first" not in completed(capsys, monkeypatch, shell, "your_ai eval fi")


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_each_shell_asks_for_completion(shell, capsys, monkeypatch):
    monkeypatch.setenv("_YOUR_AI_COMPLETE", f"source_{shell}")
    call()
    script = capsys.readouterr().out
    assert "_YOUR_AI_COMPLETE" in script
    assert f"complete_{shell}" in script
