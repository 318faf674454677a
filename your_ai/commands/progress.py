"""A progress bar of the bytes written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

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
