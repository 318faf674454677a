"""The coefficients of memory estimates, which come with the package in `coefficients.json`.

They were fitted to peaks that were measured on MLX's CPU backend. No mlx here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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


def parse(content: Any) -> Coefficients:
    """Coefficients from JSON. Raises ValueError if a table or a value is not valid."""
    names = [each.name for each in fields(Coefficients)]
    if not isinstance(content, dict) or sorted(content) != sorted(names):
        raise ValueError("not the tables of coefficients")
    for name, table in content.items():
        if not isinstance(table, dict):
            raise ValueError(f"{name}: not a table")
        for key, value in table.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not (number and math.isfinite(value) and 0 <= value <= LARGEST):
                raise ValueError(f"{name}.{key}: not a coefficient")
    return Coefficients(**content)


def read_packaged() -> Coefficients:
    file = Path(__file__).with_name("coefficients.json")
    return parse(json.loads(file.read_text(encoding="utf-8"))["coefficients"])


PACKAGED = read_packaged()
