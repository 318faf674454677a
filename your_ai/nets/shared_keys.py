"""Pass keys and values on to the blocks that share them, also where there is no cache.

The last blocks of Gemma 3n attend to the keys and values of an earlier block. mlx-lm hands them
over in its cache only: without one, as in training, these blocks compute keys and values of their
own, with weights that the model does not use. So here a block returns what others share beside its
hidden states, and the blocks after it pass it on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

CACHES = "layer_idx_to_cache_idx"  # in the trunk: the block whose keys each block attends to
KeysAndValues = tuple[mx.array, mx.array]


class PassedKeys:
    """The keys and values of one block, in the form of a cache of mlx-lm."""

    def __init__(self, given: KeysAndValues | None) -> None:
        self.found = given

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> KeysAndValues:
        self.found = keys, values
        return self.found

    def keys_and_values(self) -> KeysAndValues | None:
        return self.found


def share_keys(network: nn.Module) -> None:
    """Let the blocks of a network share keys and values without a cache, in place, if they do so
    with one."""
    for _, trunk in network.named_modules():
        owners: list[int] = getattr(trunk, CACHES, [])
        shared = {owner for index, owner in enumerate(owners) if owner != index}
        for index, owner in enumerate(owners if shared else []):
            block: nn.Module = trunk.layers[index]
            block.owner, block.is_shared = str(owner), index in shared
            block.is_last = index == len(owners) - 1
            block.__class__ = sharing_class(type(block))  # its arrays and their names stay


@lru_cache
def sharing_class(kind: type) -> type:
    """A block as `kind`, which takes and returns the keys and values that blocks share."""

    def run(
        self: Any, x: Any, mask: Any = None, cache: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if cache is not None:
            return kind.__call__(self, x, mask, cache, *args, **kwargs)
        hidden, passed = x if isinstance(x, tuple) else (x, {})
        own = PassedKeys(passed.get(self.owner))
        result = kind.__call__(self, hidden, mask, own, *args, **kwargs)
        if self.is_shared:
            passed = passed | {self.owner: own.found}
        return result if self.is_last else (result, passed)

    return type(kind.__name__, (kind,), {"__call__": run, "__module__": __name__})
