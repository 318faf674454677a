"""The help of commands: panels, and whole names in 80 characters."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.conftest import call
from your_ai.cli import parser
from your_ai.commands.options import PANELS
from your_ai.config import FIELDS

COMMANDS = parser().commands
ALL = {(name,): command for name, command in COMMANDS.items()} | {
    (name, inner): command
    for name, group in COMMANDS.items()
    for inner, command in getattr(group, "commands", {}).items()
}


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch, *command: str, width: int = 80) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    assert call(*command, "--help") == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ALL, ids=" ".join)
def test_no_name_is_cut_at_80_columns(command, capsys, monkeypatch):
    page = help_of(capsys, monkeypatch, *command)
    assert max(map(len, page.splitlines())) <= 80
    shown = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", page))
    params = ALL[command].params
    names = {n for each in params for n in (*each.opts, *each.secondary_opts) if n[0] == "-"}
    assert names - shown == set()


def test_a_command_is_parsed_without_the_others():
    assert parser("train").commands.keys() == {"train"}
    assert parser("eval").commands.keys() == {"eval"}
    assert parser("models").commands.keys() == {"models"}
    for mistake in ("trian", "--help", ""):
        assert parser(mistake).commands.keys() == COMMANDS.keys()


def test_a_narrow_terminal_wraps_names_and_cuts_none(capsys, monkeypatch):
    page = help_of(capsys, monkeypatch, "train", width=40)
    columns = [line[2:18].strip() for line in page.splitlines() if line.startswith("│")]
    assert "".join(["--grad-accumulation", "N"]) in "".join(columns).replace(" ", "")
    assert max(map(len, page.splitlines())) <= 40


def test_each_setting_is_in_one_panel():
    counts = Counter(name for names in PANELS.values() for name in names)
    assert counts == Counter(list(FIELDS))


def test_panels_of_train_are_shown_with_their_titles(capsys, monkeypatch):
    page = help_of(capsys, monkeypatch, "train")
    titles = re.findall(r"^╭─ (.*?) ─", page, re.M)
    assert sorted(titles) == sorted(["Options", *PANELS])


def test_defaults_and_required_options_are_said(capsys, monkeypatch):
    assert "[required]" in help_of(capsys, monkeypatch, "export")
    assert "[default: fused]" in help_of(capsys, monkeypatch, "bench")
