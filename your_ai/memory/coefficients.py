"""The fitted coefficients of memory estimates: the packaged ones, or those of this machine.

`coefficients.json` has the values that come with the package. tools/fit_memory.py fits them to
the peaks in tools/memory_measurements.json. `your_ai doctor --fit-memory` measures such peaks on
this machine, fits its own coefficients, and keeps them in the store, where the planner reads
them. No mlx here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from your_ai.files import read_text

FILE = "memory.json"  # in the store
MOST_BYTES = 1 << 20  # of that file
LARGEST = 1e9
Table = Mapping[str, float]


@dataclass(frozen=True)
class Coefficients:
    """Multiples of array sizes, by the part of a step that they describe.

    `memory/estimate.py` says which array each key multiplies.
    """

    fused: Table
    """Fused engine, backward pass at the last block."""
    fused_head: Table
    """Fused engine, vocabulary head."""
    forward: Table
    """Staged engines, forward pass of one block."""
    forward_lora: Table
    """The same if the widest layer of the block has an adapter."""
    backward: Table
    """Staged engines, backward pass of one block."""
    backward_lora: Table
    """The same if the widest layer of the block has an adapter."""
    kept: Table
    """Staged engines, backward pass of one block that keeps the outputs of its linear layers."""
    tiles: Table
    """Blocks on tiles: the work on a tile relative to that on rows as long as a tile, and scores of
    attention."""
    head: Table
    """Staged engines, vocabulary head."""
    evaluation: Table
    """Fused engine, evaluation without gradients; of a staged one, it is its forward pass."""
    evaluation_unsliced: Table
    """The same if every weight is dequantized in one slice."""
    scores: Table
    """The head that gives predictions as well as losses."""
    gemma: Table
    """What Gemma's blocks and head need in addition: more norms, and softcaps."""
    vectors: Table
    """Outputs that the gradients of an adapter's vectors need."""
    generation: Table
    """Prompt and KV cache."""
    rollouts: Table
    """Sampling many rows together: the part of a KV cache that grows, and arrays of logits, of
    which models that are not quantized have fewer."""
    soft: Table
    """Gradients through sampled tokens: a block, slices of the head, and arrays of each token."""
    streamed: Table
    """Blocks whose weights are in memory together; alone: where none is read ahead."""
    fused_graph: Table
    """Bytes of a compiled fused graph, per block."""
    staged_graph: Table
    """Bytes of the compiled graphs of one kind of block."""
    first_graph: Table
    """Bytes of the graph of the first trained block, which has no gradient of its input."""


def parse(content: Any, like: Coefficients | None = None) -> Coefficients:
    """Coefficients from JSON. Raises ValueError if a table, a key or a value is not valid.

    like: coefficients that must have the same keys.
    """
    names = [each.name for each in fields(Coefficients)]
    if not isinstance(content, dict) or sorted(content) != sorted(names):
        raise ValueError("not the tables of coefficients")
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ValueError(f"{name}: not a table")
        if like is not None and sorted(table) != sorted(getattr(like, name)):
            raise ValueError(f"{name}: other keys than {', '.join(getattr(like, name))}")
        for key, value in table.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and 0 <= value <= LARGEST):
                raise ValueError(f"{name}.{key}: not a coefficient")
    return Coefficients(**content)


def read_packaged() -> Coefficients:
    file = Path(__file__).with_name("coefficients.json")
    return parse(json.loads(file.read_text(encoding="utf-8"))["coefficients"])


PACKAGED = read_packaged()
# Tables that older files do not have, and keys that their tables do not have.
LATER = {
    "rollouts": PACKAGED.rollouts,
    "kept": PACKAGED.kept,
    "tiles": PACKAGED.tiles,
    "backward_lora": PACKAGED.backward_lora,
}
LATER_KEYS = {"streamed": ("alone",), "kept": ("quantized_whole",)}


def renamed(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables and their keys with the names of today: `vectors` was `dora`."""
    return {
        {"dora": "vectors"}.get(name, name): renamed(value) if isinstance(value, dict) else value
        for name, value in tables.items()
    }


def with_later(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a file of any version, with what was added later."""
    found = LATER | renamed(dict(tables))
    for name, keys in LATER_KEYS.items():
        if isinstance(found.get(name), dict):
            found[name] = {key: getattr(PACKAGED, name)[key] for key in keys} | found[name]
    return found


@dataclass(frozen=True)
class Fitted:
    """Coefficients that were fitted on a machine, and how well they estimate what it measured."""

    coefficients: Coefficients
    machine: tuple[str, ...]
    """The device, its name, and the versions of mlx and mlx-lm."""
    date: str
    peaks: int
    """Number of measured peaks."""
    lowest: float
    """The lowest estimate, as a fraction of the measured peak minus 1."""
    highest: float
    """The highest one."""


def read_fitted(path: Path) -> Fitted | None:
    """The coefficients in a file with a `fitted_text`; None if there are no valid ones."""
    try:
        content = json.loads(read_text(path, MOST_BYTES))
        errors = [float(content[name]) for name in ("lowest", "highest")]
        if not all(map(math.isfinite, errors)):
            return None
        return Fitted(
            coefficients=parse(with_later(content["coefficients"]), PACKAGED),
            machine=tuple(map(str, content["machine"])),
            date=str(content["date"])[:10],
            peaks=int(content["peaks"]),
            lowest=errors[0],
            highest=errors[1],
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
        return None


def fitted_text(fitted: Fitted, measurements: Any) -> str:
    """The file's text. measurements: the peaks, kept so that they can be looked at."""
    return json.dumps(asdict(fitted) | {"measurements": measurements}, indent=1) + "\n"


def for_machine(path: Path, machine: Iterable[str]) -> Coefficients:
    """The coefficients fitted on this machine, if it is the same one, else the packaged ones."""
    found = read_fitted(path)
    return found.coefficients if found and found.machine == tuple(machine) else PACKAGED
