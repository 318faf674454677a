"""A completion to reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rollout:
    """A sampled completion, and the row that its prompt comes from."""

    prompt: str
    """The last question, as text."""
    messages: list[dict[str, Any]]
    """The whole prompt, as messages with `role` and `content`."""
    completion: str
    """The decoded text, without special tokens."""
    tokens: int
    """Length of the completion, in tokens."""
    truncated: bool
    """Whether the completion was cut off at the limit of new tokens."""
    expected: str | None
    """The expected answer, if the row has one."""
    row: dict[str, Any]
    """The whole JSON object of the row."""
    where: str
    """file:line of the row, for messages."""
    group: int
    """Index of the prompt in the step. The completions of a prompt have the same."""
    said: list[dict[str, Any]] | None = None
    """Of a conversation with an environment: its messages after the prompt; `completion` is the
    last of the model's."""
    earned: float | None = None
    """The sum of the rewards that an environment gave; None if it gave none, or failed."""
    failure: str = ""
    """Why its environment failed, if it did: then its rewards are missing."""
    ids: tuple[int, ...] = ()
    """The tokens of prompt and completion, as the model read and sampled them."""
