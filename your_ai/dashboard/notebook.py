"""A run's screen in the output of a notebook's cell."""

from __future__ import annotations

import io
from typing import Any

from rich.text import Text

from your_ai.gates.console import open_console

WIDTH, HEIGHT = 100, 30  # of a frame, in characters
HTML = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25; '
    'font-family: ui-monospace, Menlo, Consolas, monospace">{code}</pre>'
)


class NotebookScreen:
    """Shows one frame after another in the same place, without clearing: nothing flickers.

    Has what the dashboard uses of `rich.live.Live`. The last frame stays.
    """

    def __init__(self) -> None:
        self.is_started = False
        self._shown: Any = None

    def start(self) -> None:
        self.is_started = True

    def stop(self) -> None:
        self.is_started = False

    def update(self, frame: Text, refresh: bool = True) -> None:
        from IPython.display import HTML as AsHTML
        from IPython.display import display

        drawn = AsHTML(as_html(frame))
        if self._shown is None:
            self._shown = display(drawn, display_id=True)
        else:
            self._shown.update(drawn)


def as_html(frame: Text) -> str:
    """A frame as an element of a page, escaped, with its styles inline."""
    console = open_console(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
    console.print(frame)
    return console.export_html(inline_styles=True, code_format=HTML)
