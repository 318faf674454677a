"""Attention that is computed again in the backward pass, and keeps its input alone.

A block's backward pass begins with its MLP. What the attention before it computed would
wait for its turn: queries, keys, values, what goes into the output layer.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.blocks import arrays_of, put
from your_ai.model import DropoutKeys


class Recomputed(nn.Module):
    """A module by the same children: __call__(x, ...) is differentiable in x, and in what
    of the module is trained."""

    @staticmethod
    def from_base(base: nn.Module, dropout_keys: DropoutKeys) -> Recomputed:
        twin = Recomputed()
        dict.update(twin, base)
        vars(twin).update(_inside=base, _dropout_keys=dropout_keys)
        return twin

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        trained = tree_flatten(self.trainable_parameters())
        names, arrays = [name for name, _ in trained], [array for _, array in trained]
        frozen = arrays_of(self)

        def run(x: mx.array, *arrays: mx.array) -> mx.array:
            put(self._inside, frozen | dict(zip(names, arrays, strict=True)))
            return self._inside(x, *args, **kwargs)

        run = self._dropout_keys.kept(run)
        forward = mx.custom_function(run)

        @forward.vjp
        def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
            *again, given = mx.depends([*primals, cotangent], [cotangent])  # and not before
            return tuple(mx.vjp(run, again, [given])[1])

        return forward(x, *arrays)


def put_recomputed(block: nn.Module, dropout_keys: DropoutKeys) -> None:
    """Put these in place of a block's attention."""
    if isinstance(block.get("self_attn"), nn.Module):
        block["self_attn"] = Recomputed.from_base(block["self_attn"], dropout_keys)
