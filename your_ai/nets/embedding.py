"""The input embedding of a model as rows -> after, for soft tokens.

A soft token is a distribution over the vocabulary. Its embedding is the mean of the rows of the
embedding layer, and `after` is what the model does with the output of that layer before its
first block, such as gemma's factor sqrt(D). It must be linear, because the gradient of a soft
token is then a product with the rows.

Shapes: B rows, T tokens per row, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import UserError, suppress_model_errors
from your_ai.nets.block_calls import Trunk
from your_ai.nets.head import HeadRows, LayerRows
from your_ai.nets.parts import Parts
from your_ai.nets.split import StandIn


@dataclass(frozen=True)
class InputEmbedding:
    """block input = after(rows of the embedding layer)."""

    parts: Parts
    rows: HeadRows
    name: str
    """Of the embedding layer, in the trunk."""

    def trunk_of(self, rows: mx.array) -> Trunk:
        """A copy of the trunk whose embedding layer returns `rows`, (B, T, D), for any tokens."""
        shell = copy.copy(self.parts.trunk.module)
        # A new object for each call: some trunks scale what they get in place.
        shell[self.name] = StandIn(shell[self.name], lambda tokens: rows.astype(rows.dtype))
        return replace(self.parts.trunk, module=shell)

    def after(self, rows: mx.array) -> mx.array:
        """(B, T, D) rows of the embedding layer -> (B, T, D) input of the first block."""
        parts = replace(self.parts, trunk=self.trunk_of(rows))
        return parts.embed(mx.zeros(rows.shape[:2], mx.int32))

    def cotangent(self, of_inputs: mx.array) -> mx.array:
        """The cotangent of rows, (B, T, D), from the cotangent of the first block's input."""
        (found,) = mx.vjp(self.after, [mx.zeros_like(of_inputs)], [of_inputs])[1]
        return found

    def hard(self, tokens: mx.array) -> mx.array:
        """(B, T, D) rows of the tokens, (B, T)."""
        return self.rows.gather(tokens.reshape(-1)).reshape(*tokens.shape, -1)


def input_embedding(parts: Parts, label: str) -> InputEmbedding:
    """Find the embedding layer of a model. label: the model in messages.

    Raises UserError if there is none, or if the first block's input is not linear in its rows.
    """
    tokens = mx.array([[3, 1, 2, 0]])
    wanted = parts.embed(tokens)
    for name, layer in _candidates(parts.trunk.module):
        with suppress_model_errors():  # an architecture with another layout
            found = InputEmbedding(parts, getattr(layer, "rows", None) or LayerRows(layer), name)
            if _agrees(found, found.hard(tokens), wanted):
                return found
    raise UserError(
        f"{label}: the input of its first block is not a linear function of its token embeddings, "
        "which soft tokens need"
    )


def same_rows(first: HeadRows, second: HeadRows) -> bool:
    """Return whether both read the same arrays: a head that is tied to the embedding, or two
    networks that share a base."""
    if first is second:
        return True
    if not (isinstance(first, LayerRows) and isinstance(second, LayerRows)):
        return False
    ours, theirs = first.layer, second.layer
    return ours is theirs or (
        ours.keys() == theirs.keys() and all(ours[name] is theirs[name] for name in ours)
    )


def _candidates(trunk: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, layer in trunk.items():
        if isinstance(layer, nn.Module) and (hasattr(layer, "rows") or "weight" in layer):
            yield name, layer


def _agrees(found: InputEmbedding, rows: mx.array, wanted: mx.array) -> bool:
    """Return whether the parts give the model's own block inputs, and are linear."""
    if rows.shape != wanted.shape:
        return False
    other = mx.random.normal(rows.shape, key=mx.random.key(0)).astype(rows.dtype)
    mixed = found.after(2 * rows - 3 * other)
    apart = 2 * found.after(rows) - 3 * found.after(other)
    tolerance = 1e-4 if rows.dtype == mx.float32 else 2e-2
    return _close(found.after(rows), wanted, tolerance) and _close(mixed, apart, tolerance)


def _close(first: mx.array, second: mx.array, tolerance: float) -> bool:
    first, second = first.astype(mx.float32), second.astype(mx.float32)
    return bool(mx.abs(first - second).max() <= tolerance * mx.abs(second).max())
