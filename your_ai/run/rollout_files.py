"""The rollouts of a run, in runs/RUN/rollouts: one compressed file of JSON lines for each batch.

They are written before a step trains them, so a run that was killed goes on from there. A file is
whole or not there.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from your_ai.errors import RunError
from your_ai.files import TEMPORARY

FOLDER = "rollouts"
NAME = re.compile(r"step-(\d{6,})\.jsonl\.gz")
MOST_BYTES = 1 << 32  # of a file, decompressed


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
    """As they were sampled, with the stop token if there is one."""
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


NAMES = {field.name for field in fields(RolloutRecord)}


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
        partial.unlink(missing_ok=True)
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); free some disk space, then resume the "
            "run"
        ) from error


def read_rollouts(path: Path) -> list[RolloutRecord] | None:
    """The rollouts of a step; None if the file is missing, damaged or not such a file."""
    try:
        with gzip.open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            return None
        # Texts may contain other ends of lines, such as U+2028, which splitlines() knows.
        lines = data.decode("utf-8", "surrogatepass").split("\n")
        return [record_of(json.loads(line)) for line in lines if line] or None
    except (OSError, EOFError, zlib.error, ValueError, TypeError, RecursionError):
        return None


def record_of(content: Any) -> RolloutRecord:
    """A record from JSON. Raises ValueError or TypeError if it is none."""
    if not isinstance(content, dict):
        raise ValueError("not an object")
    record = RolloutRecord(**{name: value for name, value in content.items() if name in NAMES})
    texts = [record.where, record.question, record.completion]
    texts += [text for text in (record.expected, record.reply) if text is not None]
    if not isinstance(record.rewards, dict):
        raise ValueError("not a rollout")
    numbers = [n for n in (record.reward, *record.rewards.values()) if n is not None]
    ok = all(isinstance(text, str) for text in texts)
    ok = ok and type(record.row) is type(record.sample) is int and type(record.stopped) is bool
    ok = ok and isinstance(record.tokens, list) and all(type(t) is int for t in record.tokens)
    ok = ok and all(isinstance(n, int | float) for n in (record.advantage, *numbers))
    for values in (record.old, record.reference):
        ok = ok and (values is None or len(values) == len(record.tokens))
    if not (ok and record.tokens):
        raise ValueError("not a rollout")
    return replace(record, rewards=dict(record.rewards))


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
