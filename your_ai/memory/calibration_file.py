"""Measurements of a model on this machine, kept in a file for the next run. No mlx here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from your_ai.files import read_text, replace_text
from your_ai.memory.calibration import LEAST_RATIO, MOST_RATIO, Calibration, Measurement

MOST_BYTES = 1 << 20  # a larger file was not written by this module


def file_of(folder: Path, key: Iterable[str]) -> Path:
    """The file of the measurements for `key`."""
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read(path: Path) -> Calibration:
    """Read a file of measurements; empty if it is missing or damaged."""
    try:
        content = json.loads(read_text(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return Calibration()
    return Calibration(tuple(valid_measurements(content if isinstance(content, list) else [])))


def valid_measurements(entries: Iterable[Any]) -> Iterator[Measurement]:
    """The valid measurements among `entries`."""
    for entry in entries:
        with contextlib.suppress(ValueError, TypeError):
            yield measurement_of(entry)


def measurement_of(entry: Any) -> Measurement:
    """A measurement from a file. Raises ValueError or TypeError if it is not valid."""
    found = Measurement(**entry)
    counts = (found.rows, found.tokens, found.work_bytes)
    whole = all(type(count) is int and 0 < count < 1 << 50 for count in counts)
    excess = found.excess_bytes
    whole &= excess is None or (type(excess) is int and abs(excess) < 1 << 50)
    if not (whole and type(found.ratio) is float and math.isfinite(found.ratio)):
        raise ValueError("not a measurement")
    if (
        found.engine not in ("fused", "staged", "kept")
        or not LEAST_RATIO <= found.ratio <= MOST_RATIO
    ):
        raise ValueError("not a measurement")
    return found


def keep(path: Path, calibration: Calibration) -> None:
    """Replace the file. If that fails, the next run measures again."""
    text = json.dumps([asdict(measured) for measured in calibration.measurements], indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text + "\n")
