"""mlx-lm's caches of several rows that are generated together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache


def can_merge(model: nn.Module) -> bool:
    """Return whether the caches of rows can be made one; else rows are generated one at a time."""
    return all(hasattr(cache, "merge") for cache in make_prompt_cache(model))


def merged(caches: Sequence[Any], grouped: bool) -> Any:
    """The cache of a block for all rows, lazily, from one for each. grouped: as in
    `groups_heads`."""
    found = caches[0].merge(list(caches))
    if grouped:
        found.__class__ = GroupedHeads  # `merge` makes plain ones of empty caches in any case
    return found


def grow_by(tokens: int, cache: list[Any]) -> None:
    """Let arrays of a cache have room for a multiple of so many tokens, not of mlx-lm's number."""
    for layer in cache:
        for part in getattr(layer, "caches", (layer,)):
            part.step = tokens


class GroupedHeads(BatchKVCache):
    """A cache whose masks fit scores of (B, key heads, query heads of each, 1, T)."""

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(*args, **kwargs)
        return mask[:, :, None]


def groups_heads(model: nn.Module) -> bool:
    """Return whether it is mlx-lm's attention of gemma2, whose masks lack dimensions in batches.

    It would fail, or mask heads instead of rows if there are as many.
    """
    args: Any = getattr(model, "args", None)
    return (
        getattr(args, "model_type", "") == "gemma2"
        and args.num_attention_heads > args.num_key_value_heads
    )
