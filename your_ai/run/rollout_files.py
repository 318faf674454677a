"""The rollouts of a run, in runs/RUN/rollouts: one compressed file of JSON lines for each batch.

They are written before a step trains them, so a run that was killed goes on from there. A file is
whole or not there.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from your_ai.errors import RESUME, RunError
from your_ai.files import TEMPORARY, remedy_of
from your_ai.gates.untrusted import is_number

FOLDER = "rollouts"
NAME = re.compile(r"step-(\d{6,})\.jsonl\.gz")
MOST_BYTES = 1 << 30  # of a file, decompressed
MOST_TOKEN = (1 << 31) - 1


@dataclass(frozen=True)
class TokenPart:
    """Tokens of a conversation that the model reads one after the other."""

    prompt: list[int]
    """At least one."""
    tokens: list[int]
    """After it: what the model said, and what it was answered."""
    spoken: list[list[int]]
    """[start, end] of each turn of the model in `tokens`, in order, none of them empty."""


@dataclass(frozen=True)
class ConversationRecord:
    """The course of a conversation with an environment."""

    parts: list[TokenPart]
    """None if it never began. A new one begins where the chat template changed what was there."""
    said: list[dict[str, Any]]
    """Its messages after the prompt."""
    ended: str
    """How it ended; DONE: as the environment said."""
    rewards: list[float | None]
    """What the environment gave for each turn of the model."""
    advantages: list[float] | None = None
    """Of each turn, with --credit turn."""
    counts: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment told, summed."""

    @property
    def turns(self) -> list[int]:
        """The tokens of each turn of the model."""
        return [end - start for part in self.parts for start, end in part.spoken]


@dataclass(frozen=True)
class RolloutRecord:
    """A completion, and what it earned."""

    row: int
    """Index of its row in the training data."""
    sample: int
    """Index among the completions of its prompt."""
    where: str
    """File and line of the row."""
    question: str
    """The last message of the prompt."""
    expected: str | None
    """The expected answer, if the row has one."""
    completion: str
    """The text, without special tokens."""
    tokens: list[int]
    """As they were sampled, with the stop token if there is one; of a conversation, those of all
    turns of the model."""
    stopped: bool
    """Whether it ended by itself, and not at the limit of tokens."""
    rewards: dict[str, float | None]
    """By name, without the weight; None: missing."""
    reward: float | None
    """The weighted sum; None: missing."""
    advantage: float = 0.0
    """How much better than the others of its prompt."""
    reply: str | None = None
    """What the judge said."""
    old: list[float] | None = None
    """Log-probabilities of the tokens when they were sampled, if they are needed later."""
    reference: list[float] | None = None
    """Log-probabilities under the reference, if the loss needs them."""
    conversation: ConversationRecord | None = None
    """If it has several turns."""


DONE = "done"
NAMES = {each.name for each in fields(RolloutRecord)}


def rollout_file(run: Path, step: int) -> Path:
    """The file of the rollouts that step `step` (from 1) is the first to train."""
    return run / FOLDER / f"step-{step:06d}.jsonl.gz"


def rollout_steps(run: Path) -> list[int]:
    """The steps whose rollouts are there, in ascending order."""
    folder = run / FOLDER
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := NAME.fullmatch(name)))


def write_rollouts(path: Path, records: list[RolloutRecord]) -> None:
    """Write the rollouts of a step, over those that are there. Raises RunError."""
    lines = (json.dumps(asdict(record), ensure_ascii=False) + "\n" for record in records)
    data = gzip.compress("".join(lines).encode("utf-8", "surrogatepass"), mtime=0)
    partial = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        path.parent.mkdir(exist_ok=True)
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); {remedy_of(error)}, {RESUME}"
        ) from error


def read_rollouts(path: Path) -> list[RolloutRecord] | None:
    """The rollouts of a step; None if the file is missing, damaged or not such a file."""
    found, size = [], 0
    try:
        with gzip.open(path, "rb") as file:  # its lines end with "\n" and nothing else
            while line := file.readline(MOST_BYTES + 1 - size):
                size += len(line)
                if size > MOST_BYTES:
                    return None
                found.append(record_of(json.loads(line.decode("utf-8", "surrogatepass"))))
    except (OSError, EOFError, zlib.error, ValueError, TypeError, RecursionError):
        return None
    return found if found and len({kind_of(record) for record in found}) == 1 else None


def kind_of(record: RolloutRecord) -> tuple[Any, ...]:
    """The form that all rollouts of a step share."""
    of_turns = record.conversation and record.conversation.advantages is None
    return tuple(record.rewards), record.old is None, record.reference is None, of_turns


def record_of(content: Any) -> RolloutRecord:
    """A record from JSON. Raises ValueError or TypeError if it is none."""
    if not isinstance(content, dict):
        raise ValueError("not an object")
    known = {name: value for name, value in content.items() if name in NAMES}
    if known.get("conversation") is not None:
        known["conversation"] = conversation_of(known["conversation"])
    record = RolloutRecord(**known)
    if not has_types(record):
        raise ValueError("not a rollout")
    numbers = (record.reward, *record.rewards.values())
    if not all(is_number(n) and math.isfinite(n) for n in numbers if n is not None):
        raise ValueError("a reward is no number")
    if not (is_number(record.advantage) and math.isfinite(record.advantage)):
        raise ValueError("the advantage is no number")
    for scores in (record.old, record.reference):
        if scores is not None and not (
            isinstance(scores, list)
            and len(scores) == len(record.tokens)
            and all(map(is_number, scores))
        ):
            raise ValueError("not a log-probability for each token")
    return record


def conversation_of(content: dict[str, Any]) -> ConversationRecord:
    """A conversation from JSON. Raises ValueError or TypeError if it is none."""
    parts = [TokenPart(**part) for part in content["parts"]]
    found = ConversationRecord(**{**content, "parts": parts})
    for part in parts:
        if not (part.prompt and are_tokens(part.prompt) and are_tokens(part.tokens)):
            raise ValueError("not the tokens of a part")
        last = 0
        for start, end in part.spoken:
            if not (type(start) is type(end) is int and last <= start < end <= len(part.tokens)):
                raise ValueError("not the turns of a part")
            last = end
    numbers = [n for n in (*found.rewards, *found.counts.values()) if n is not None]
    advantages = found.advantages or []
    known = all(is_number(n) and math.isfinite(n) for n in (*numbers, *advantages))
    lengths = {len(found.rewards), len(found.turns)} | ({len(advantages)} if advantages else set())
    texts = isinstance(found.ended, str) and all(isinstance(m, dict) for m in found.said)
    if not (known and texts and len(lengths) == 1):
        raise ValueError("not a conversation")
    return found


def are_tokens(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(token) is int and 0 <= token <= MOST_TOKEN for token in values
    )


def has_types(record: RolloutRecord) -> bool:
    """Return whether its texts, indices and tokens are such, as JSON does not ensure."""
    texts = [record.where, record.question, record.completion]
    texts += [text for text in (record.expected, record.reply) if text is not None]
    if not all(isinstance(text, str) for text in texts) or type(record.stopped) is not bool:
        return False
    if not all(type(index) is int and index >= 0 for index in (record.row, record.sample)):
        return False
    found = record.conversation
    if found is not None and sum(found.turns) != len(record.tokens):
        return False
    never_began = found is not None and not found.parts
    has_tokens = are_tokens(record.tokens) and bool(record.tokens or never_began)
    return isinstance(record.rewards, dict) and has_tokens


def missing_in_a_row(run: Path, group: int) -> int:
    """The last prompts of a run, in a row, with more than half of their rewards missing.

    group: completions of a prompt.
    """
    found = 0
    for step in reversed(rollout_steps(run)):
        records = read_rollouts(rollout_file(run, step)) or []
        for end in range(len(records), 0, -group):
            rewards = [record.reward for record in records[max(0, end - group) : end]]
            if 2 * rewards.count(None) <= len(rewards):
                return found
            found += 1
    return found


def by_reward(records: Sequence[RolloutRecord], highest: bool) -> list[RolloutRecord]:
    """Sort by reward; equal ones stay in the order of the file, missing ones come last."""
    sign = -1 if highest else 1

    def key(record: RolloutRecord) -> tuple[bool, float]:
        reward = known_reward(record.reward)
        return reward is None, sign * (reward or 0.0)

    return sorted(records, key=key)


def known_reward(value: float | None) -> float | None:
    """A value from a file if it is finite, else None."""
    return value if value is not None and math.isfinite(value) else None
