"""The measured speed of a machine: seconds of each kind of operation of a training step.

`your_ai bench --calibrate` measures it and keeps it in the store; `step_time.py` predicts the
seconds of a step from it. It has nothing to do with `calibration.py`, which measures memory.
No mlx here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from your_ai.files import read_text

FILE = "speed.json"  # in the store
MOST_BYTES = 1 << 20  # of that file
LONGEST_S = 1e3  # an operation that takes longer is not plausible
# The kinds of operations, and what one of them is.
KINDS = {
    "matmul": "multiply-add of tokens with a dense weight",
    "weights": "number of a dense weight, each time it is multiplied",
    "quantized_matmul": "multiply-add of tokens with a quantized weight",
    "quantized_weights": "number of a quantized weight, each time it is multiplied",
    "lora": "multiply-add of an adapter",
    "adapted": "number of the inputs and outputs of an adapter, in one pass",
    "elements": "number of the hidden states and outputs of layers, in one pass",
    "attention": "multiply-add of attention",
    "scores": "attention score",
    "copied": "number of the gradients of keys and values, for each block of queries",
    "logits": "logit",
    "slices": "slice of the vocabulary",
    "parameters": "trained number, in an update",
    "arrays": "trained array, in an update",
    "read": "byte of the blocks' weights read from files",
    "read_rows": "byte of the vocabulary's weights read from files",
    "opened": "array of a block read from files",
    "embedded": "row of an array of the vocabulary that is read by itself from files",
    "spilled": "byte of a block input, gradient or state written to or read from the disk",
    "stored": "array of them that is written or read",
    "products": "matrix product",
    "query_blocks": "block of queries of attention",
    "calls": "graph that is run",
    "steps": "update",
}


@dataclass(frozen=True)
class MachineSpeed:
    """The speed at which a machine computes."""

    seconds: Mapping[str, float]
    """Of one operation, by its kind in KINDS."""
    float_bytes: int
    """Size of a number of the dtype in which it was measured."""
    machine: tuple[str, ...]
    """The device, its name, its CPUs, the BLAS library, and the versions of mlx and mlx-lm."""
    date: str
    lowest: float
    """The lowest prediction of what was measured, as a fraction of it minus 1."""
    highest: float
    """The highest one."""

    def of(self, work: Mapping[str, float]) -> float:
        """The seconds of some work: amounts of operations by their kind."""
        return sum(amount * self.seconds[kind] for kind, amount in work.items())


@dataclass(frozen=True)
class KnownSpeed:
    """The speed of this machine, if it is known, and why it is not."""

    speed: MachineSpeed | None
    note: str = ""
    """What to do about it; one line."""


UNKNOWN = KnownSpeed(None)
NOT_MEASURED = "seconds are not predicted: measure this machine once with your_ai bench --calibrate"
CHANGED = (
    "the measured speed is of another machine, library or version ({date}), so it is not used; "
    "measure again: your_ai bench --calibrate"
)


def read_speed(path: Path) -> MachineSpeed | None:
    """The speed in a file that has the text of `speed_text`; None if there is no valid one."""
    try:
        content = json.loads(read_text(path, MOST_BYTES))
        seconds = {str(kind): float(content["seconds"][kind]) for kind in KINDS}
        errors = [float(content[name]) for name in ("lowest", "highest")]
        plausible = all(0 <= value <= LONGEST_S for value in seconds.values())
        if not (plausible and any(seconds.values()) and all(map(math.isfinite, errors))):
            return None
        return MachineSpeed(
            seconds=seconds,
            float_bytes=int(content["float_bytes"]),
            machine=tuple(map(str, content["machine"])),
            date=str(content["date"])[:10],
            lowest=errors[0],
            highest=errors[1],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def speed_text(speed: MachineSpeed, measurements: Any) -> str:
    """The file's text. measurements: the times, kept so that they can be looked at."""
    return json.dumps(asdict(speed) | {"measurements": measurements}, indent=1) + "\n"


def known_speed(path: Path, machine: Callable[[], Iterable[str]]) -> KnownSpeed:
    """The speed in a file, if it is of this machine, which is only asked for if there is one."""
    found = read_speed(path)
    if found is None:
        return KnownSpeed(None, NOT_MEASURED)
    if found.machine != tuple(machine()):
        return KnownSpeed(None, CHANGED.format(date=found.date))
    return KnownSpeed(found)
