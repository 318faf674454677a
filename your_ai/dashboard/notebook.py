"""A run's screen in the output of a notebook cell."""

from __future__ import annotations

import io
from typing import Any

from rich.text import Text

from your_ai.gates.console import open_console

WIDTH, HEIGHT = 100, 30  # size of a frame, in characters
HTML = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25; '
    'font-family: ui-monospace, Menlo, Consolas, monospace">{code}</pre>'
)


class NotebookScreen:
    """Shows one frame after another in the same place, without flicker. The last frame stays.

    Has the part of the interface of `rich.live.Live` that the dashboard uses.
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
    """Return a frame as an HTML element, escaped, with inline styles."""
    console = open_console(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
    console.print(frame)
    return console.export_html(inline_styles=True, code_format=HTML)
