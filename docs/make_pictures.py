"""Draw the pictures of README.md, in a folder with runs and data:

    PYTHONPATH=REPOSITORY python REPOSITORY/docs/make_pictures.py runs/NAME "model=demo&data=FILE"

The second is what the studio plans, for whose picture Chromium is needed.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI, TerminalTheme

from tests.browser import browser_tab
from tests.studio.client import opened
from your_ai.dashboard.screen import screen
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.run import events

OUT = Path(__file__).parent / "images"
WIDTH, HEIGHT = 84, 24
SHOWN = 0.8
PAGE = 1024, 720  # pixels
PLANNED_S = 300.0
LIGHT = TerminalTheme(
    (255, 255, 255),
    (31, 35, 40),
    [(31, 35, 40), (192, 39, 58), (26, 122, 72), (154, 103, 0), (31, 95, 191), (130, 80, 223),
     (27, 124, 131), (110, 119, 129)],
    [(87, 96, 106), (164, 14, 38), (26, 127, 55), (99, 60, 1), (33, 139, 255), (165, 117, 248),
     (49, 146, 170), (140, 149, 159)],
)  # fmt: skip


def draw(folder: Path, theme: TerminalTheme) -> str:
    """The dashboard of a run after SHOWN of its steps, as an SVG that loads nothing else."""
    records, _ = events.tail(folder / "events.jsonl")
    steps = [i for i, record in enumerate(records) if isinstance(record.event, events.Step)]
    last = steps[int(SHOWN * len(steps))]
    state = fold_all(ViewState(), records[: last + 1])
    console = Console(
        record=True, width=WIDTH, height=HEIGHT, file=io.StringIO(), force_terminal=True
    )
    console.print(
        screen(
            state,
            folder.name,
            WIDTH,
            HEIGHT,
            records[last].time,
            keys="q detach   c checkpoint   p pause",
        )
    )
    svg = console.export_svg(title=f"your_ai train --run {folder.name}", theme=theme)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.S)
    return svg.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")


def shoot(query: str) -> None:
    """Save pictures of the page of the studio that plans a run. query: its settings."""
    with (
        tempfile.TemporaryDirectory() as folder,
        browser_tab(Path(folder)) as tab,
        opened() as studio,
    ):
        for scheme in ("light", "dark"):
            tab.look(*PAGE, scheme)
            tab.call("Emulation.setScrollbarsHidden", hidden=True)
            tab.open(f"{studio.server.url}{studio.studio.root}plan?{query}")
            tab.wait_for("!!document.querySelector('#shown .figures')", PLANNED_S)
            tab.screenshot(OUT / f"studio-{scheme}.png")


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for name, theme in (("light", LIGHT), ("dark", DIMMED_MONOKAI)):
        (OUT / f"dashboard-{name}.svg").write_text(draw(Path(sys.argv[1]), theme))
    shoot(sys.argv[2])


if __name__ == "__main__":
    main()
