"""Show a download on a terminal or in a log file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from your_ai.gates.text import counted, size_text
from your_ai.hub.download import DownloadProgress, how_to_continue

LINE_PERCENT = 10  # progress between two lines, when there is no bar

Show = Callable[[DownloadProgress], None]


def show(steps: Generator[DownloadProgress, None, Path], console: Console) -> Path:
    """Run a download, with a bar on a terminal and lines elsewhere. Returns the model's folder.

    On KeyboardInterrupt, prints what is kept and how to continue, and raises it again.
    """
    last = None
    try:
        display = bar(console) if console.is_terminal else lines(console)
        with contextlib.closing(steps), display as shown:
            while True:
                try:
                    last = next(steps)
                except StopIteration as end:
                    folder: Path = end.value
                    return folder
                shown(last)
    except KeyboardInterrupt:
        if last is not None:
            text = f"stopped; {how_to_continue(last.name, last.done_bytes)}"
            console.print(text, markup=False, highlight=False)
        raise


@contextlib.contextmanager
def bar(console: Console) -> Iterator[Show]:
    """Show a bar for all bytes, removed at the end. Notes are printed above it."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def shown(at: DownloadProgress) -> None:
            if at.note:
                console.print(at.note, markup=False, highlight=False)
            bars.update(
                task,
                description=doing(at),
                completed=at.done_bytes,
                total=at.total_bytes or None,
            )

        yield shown


@contextlib.contextmanager
def lines(console: Console) -> Iterator[Show]:
    """Print notes, and a line at each LINE_PERCENT."""
    printed = -1

    def shown(at: DownloadProgress) -> None:
        nonlocal printed
        if at.note:
            console.print(at.note, markup=False, highlight=False, soft_wrap=True)
        tenth = at.done_bytes * 100 // at.total_bytes // LINE_PERCENT if at.total_bytes else -1
        if at.doing == "fetching" and tenth > printed:
            printed = tenth
            console.print(line(at), markup=False, highlight=False, soft_wrap=True)

    yield shown


def doing(at: DownloadProgress) -> str:
    """`fetching 2/5 model.safetensors`."""
    if at.doing == "waiting":
        return "waiting for another download of this model"
    count = f" {min(at.done_files + 1, at.files)}/{at.files}" if at.files else ""
    return f"{at.doing}{count} {at.file}".rstrip()


def line(at: DownloadProgress) -> str:
    """`llama-8b: 1.20 GB of 4.52 GB, 2 of 5 files`."""
    size = f"{size_text(at.done_bytes)} of {size_text(at.total_bytes)}"
    return f"{at.name}: {size}, {at.done_files} of {counted(at.files, 'file')}"
