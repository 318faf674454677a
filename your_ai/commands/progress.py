"""How far a command is: bytes written, rows read, layers done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from your_ai.gates.console import echo_error
from your_ai.gates.text import now_and_then

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.modelfiles.shards import WriteProgress


def show_bytes(doing: str, steps: Iterable[WriteProgress], console: Console) -> None:
    """Run `steps`, with a progress bar on a terminal; the bar disappears at the end."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    doing_column = TextColumn("{task.description}", markup=False)
    columns = (doing_column, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        for step in steps:
            bar.update(task, completed=step.done_bytes, total=step.total_bytes)


def rows_read() -> Callable[[str, int], None]:
    """A function of (file, rows) that prints a line on stderr every few seconds."""
    return now_and_then(echo_error, lambda name, rows: f"reading {name}: {rows:,} rows")


def layers_done(doing: str) -> Callable[[int, int], None]:
    """A function of (done, total) that prints a line on stderr every few seconds."""
    return now_and_then(echo_error, lambda done, total: f"{doing}: {done:,} of {total:,} layers")
