"""A block's MLP in chunks of tokens, computed again in the backward pass.

What an MLP computes of a token depends on that token alone. In the backward pass of a
block that is computed again its output is most often not needed, and then nothing is
computed twice: so the chunks cost no arithmetic, and their arrays exist a chunk at a time.

Shapes: B rows, T tokens of a row, D hidden size.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.blocks import put
from your_ai.model import DropoutKeys, TokenKeys

CHUNK_BYTES = 2 << 20  # of each float32 array inside the MLP
FEWEST_TOKENS = 128  # at once, so that matrix products stay efficient


class Tokenwise(nn.Module):
    """An MLP by the same children, run chunk by chunk."""

    @staticmethod
    def from_base(base: nn.Module, dropout_keys: DropoutKeys) -> Tokenwise:
        twin = Tokenwise()
        vars(twin).update({n: v for n, v in vars(base).items() if n != "_no_grad"})
        dict.update(twin, base)
        twin._base, twin._dropout_keys = type(base), dropout_keys
        twin._width = max(a.shape[0] for name, a in tree_flatten(base) if name.endswith("weight"))
        return twin

    def __call__(self, x: mx.array) -> mx.array:
        """x: (B, T, D) -> (B, T, D)"""
        rows, tokens, _ = x.shape
        step = max(FEWEST_TOKENS, CHUNK_BYTES // (4 * self._width * rows))
        if step >= tokens:
            return self._base.__call__(self, x)
        count = -(-tokens // step)
        step = -(-tokens // count)
        names, trained = zip(*tree_flatten(self.trainable_parameters()), strict=True)
        keys = self._dropout_keys.current

        def run(part: slice, x: mx.array, *trained: mx.array) -> mx.array:
            put(self, dict(zip(names, trained, strict=True)))
            self._dropout_keys.set(None if keys is None else part_of(keys, part))
            try:
                return self._base.__call__(self, x)
            finally:
                self._dropout_keys.set(keys)

        parts = [slice(start, start + step) for start in range(0, tokens, step)]

        @mx.custom_function
        def forward(x: mx.array, *trained: mx.array) -> mx.array:
            found: list[mx.array] = []
            for part in parts:
                (chunk,) = mx.depends([x[:, part]], found[-1:]) if found else (x[:, part],)
                found.append(run(part, chunk, *trained))
            return mx.concatenate(found, axis=1)

        @forward.vjp
        def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
            x, *trained = primals
            found: list[mx.array] = []
            total: list[mx.array] = []
            for part in parts:
                chunk, given = x[:, part], cotangent[:, part]
                if found:
                    chunk, given = mx.depends([chunk, given], [found[-1], *total])

                def of(*values: mx.array, part: slice = part) -> mx.array:
                    return run(part, *values)

                _, (grad, *grads) = mx.vjp(of, [chunk, *trained], [given])
                found.append(grad)
                total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
            put(self, dict(zip(names, trained, strict=True)))
            return mx.concatenate(found, axis=1), *total

        result = forward(x, *trained)
        put(self, dict(zip(names, trained, strict=True)))
        return result


def part_of(keys: TokenKeys, part: slice) -> TokenKeys:
    """The keys of some of the tokens."""
    rows = keys.rows if keys.rows.shape[1] == 1 else keys.rows[:, part]
    return TokenKeys(rows, keys.places[:, part])


def put_tokenwise(block: nn.Module, dropout_keys: DropoutKeys) -> None:
    """Put these in place of a block's MLPs: modules of that name with linear layers alone."""
    for name in ("mlp", "feed_forward"):
        child = block.get(name)
        if child is not None and tree_flatten(child.trainable_parameters()) and _is_dense(child):
            block[name] = Tokenwise.from_base(child, dropout_keys)


def _is_dense(module: nn.Module) -> bool:
    layers = list(module.children().values())
    return bool(layers) and all(
        isinstance(layer, nn.Module) and ("weight" in layer or "lora_a" in layer)
        for layer in layers
    )
