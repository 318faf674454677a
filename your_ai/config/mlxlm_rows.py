"""How the rows that are trained differ from those of mlx-lm, for users of its config files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LINE_BYTES = 1 << 20  # longer first rows are not looked at
PAIR, CHATS, ALPACA = ("prompt", "completion"), ("messages", "conversations"), "instruction"


def row_differences(path: Path) -> list[str]:
    """A line for each difference in the first row of a JSONL file; none if it cannot be read.

    mlx-lm takes prompt and completion before messages before text, knows no other formats, and no
    system prompt beside them.
    """
    try:
        with path.open("rb") as file:
            row: Any = json.loads(file.readline(LINE_BYTES))
    except (OSError, ValueError, RecursionError):  # whoever reads the rows will say it
        return []
    if not isinstance(row, dict):
        return []
    has_pair = all(key in row for key in PAIR)
    chat = next((key for key in CHATS if key in row), None)
    ours = chat or (has_pair and "prompt and completion") or (ALPACA in row and ALPACA) or "text"
    theirs = (
        "prompt and completion" if has_pair
        else "messages" if "messages" in row
        else "text" if "text" in row else None
    )  # fmt: skip
    notes = []
    if theirs is not None and ours != theirs:
        notes.append(f"rows: {ours} is trained, where mlx-lm takes {theirs}")
    if row.get("system") and ours != "text":
        notes.append("rows: the system prompt in the column system is shown, which mlx-lm ignores")
    return notes
