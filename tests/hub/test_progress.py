"""Display of a download."""

from __future__ import annotations

import io
from collections.abc import Generator
from pathlib import Path

import pytest
from rich.console import Console

from tests.hub.conftest import NAME, REPO
from tests.hub.server import Fault
from your_ai.commands.models import doing, line, show
from your_ai.errors import UserError
from your_ai.hub.download import DownloadProgress, downloading
from your_ai.hub.find import models_root

AT = DownloadProgress(
    name="llama-8b",
    doing="fetching",
    file="model.safetensors",
    done_files=1,
    files=5,
    done_bytes=1_200_000_000,
    total_bytes=4_520_000_000,
)


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, highlight=False)


def test_a_line_gives_bytes_and_files():
    assert line(AT) == "llama-8b: 1.20 GB of 4.52 GB, 1 of 5 files"


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (AT, "fetching 2/5 model.safetensors"),
        (DownloadProgress(name="x"), "asking"),
        (DownloadProgress(name="x", doing="waiting"), "waiting for another download of this model"),
        (DownloadProgress(name="x", doing="checking", done_files=5, files=5), "checking 5/5"),
    ],
)
def test_a_bar_gives_the_activity_and_the_file(at, text):
    assert doing(at) == text


def test_without_a_terminal_there_are_few_lines(hub):
    out = console()
    assert show(downloading(REPO), out) == models_root() / NAME
    lines = out.file.getvalue().splitlines()
    assert 3 <= len(lines) <= 12
    assert lines[0].startswith(f"{REPO}: 0 MB of 600 kB, 0 of 5 files")
    assert lines[-1] == f"600 kB in 5 files, each checked by its hash: {models_root() / NAME}"
    assert "\x1b" not in out.file.getvalue()


def test_a_terminal_shows_a_bar_and_keeps_the_notes(hub):
    hub.faults["config.json"] = Fault(statuses=[503])
    out = console(terminal=True)
    show(downloading(REPO), out)
    shown = out.file.getvalue()
    assert "the hub answered 503; trying again in" in shown
    assert "600 kB in 5 files" in shown
    assert "600.3/600.3 kB" in shown


def test_brackets_in_a_note_are_printed_literally():
    def steps() -> Generator[DownloadProgress, None, Path]:
        yield DownloadProgress(name="x", note="[red]a[/] [b")
        return Path("x")

    out = console()
    show(steps(), out)
    assert out.file.getvalue() == "[red]a[/] [b\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_prints_what_is_kept_and_how_to_continue(terminal):
    closed = []

    def steps() -> Generator[DownloadProgress, None, Path]:
        try:
            yield AT
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    out = console(terminal)
    with pytest.raises(KeyboardInterrupt):
        show(steps(), out)
    last = out.file.getvalue().splitlines()[-1]
    assert last.endswith("stopped; 1.20 GB are kept; continue with: your_ai download llama-8b")
    assert closed == [True]


def test_errors_are_raised_to_the_caller(hub):
    with pytest.raises(UserError):
        show(downloading("someone/else"), console())
