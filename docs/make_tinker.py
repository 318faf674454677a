"""Write the paths of the training API into docs/tinker.md, from the routes of its server.

python docs/make_tinker.py
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from your_ai.serving.tinker_server import routes_of

PAGE = Path(__file__).parent / "tinker.md"
PREFIX = "/api/v1/"


class Unused(SimpleNamespace):
    """A service of which no method is called."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def page(text: str) -> str:
    """The page with the paths of all routes; text: the page as it is."""
    routes = routes_of(Unused(outside=SimpleNamespace(longest=0), saved=Unused(), name=""))
    paths = sorted({f"`{route.path.removeprefix(PREFIX)}`" for route in routes})
    made = textwrap.fill(
        f"Paths, below `{PREFIX}`: {', '.join(paths)}.", 120, break_on_hyphens=False
    )
    between = re.compile("(<!-- paths -->\n).*?(\n<!-- /paths -->)", re.DOTALL)
    return between.sub(lambda found: found[1] + made + found[2], text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
