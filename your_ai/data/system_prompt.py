"""The system prompt that all training rows of a run have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from your_ai.data.lines import RowLimit
from your_ai.data.preferences import parser_of
from your_ai.data.rows import Chat, Labeled, Preference, Question, Scored, read_rows
from your_ai.data.sources import find_splits, is_dataset
from your_ai.errors import UserError

if TYPE_CHECKING:
    from your_ai.config import TrainConfig
    from your_ai.data.rows import Row


def common_system_prompt(config: TrainConfig) -> str:
    """The system prompt of every training row of a run; "" if they differ or are not known.

    Reads the rows where the run found them. Data of the hub is not fetched again.
    """
    if not config.data or any(is_dataset(name.strip()) for name in config.data.split(",")):
        return ""
    found: set[str] = set()
    try:
        path = find_splits(config).files["train"]
        for row in read_rows(path, RowLimit(config.max_row_bytes), parser_of(config.row_kind)):
            found.add(system_prompt_of(row))
            if "" in found or len(found) > 1:
                return ""
    except (UserError, OSError):
        return ""
    return found.pop() if found else ""


def system_prompt_of(row: Row) -> str:
    """The system prompt with which a row begins; "" if it has none."""
    content = row.content
    if isinstance(content, Preference):
        content = content.chosen
    elif isinstance(content, Labeled | Scored):
        content = content.answer
    elif isinstance(content, Question) and isinstance(content.prompt, Chat):
        content = content.prompt
    if not isinstance(content, Chat) or not content.messages:
        return ""
    first = content.messages[0]
    text = first.get("content")
    return text if first.get("role") == "system" and isinstance(text, str) else ""
