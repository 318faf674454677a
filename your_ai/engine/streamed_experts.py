"""Streamed experts: of a layer with many experts, read only those that its tokens are routed to.

It pays where few tokens run at once, as in generation: a token of a model with 8 of 128 experts
needs a sixteenth of the weights. The rows of a training step use nearly all experts (of 128, all
but one or two for 64 tokens), so the staged engine reads whole blocks.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.nets.model import EXPERTS

MOST_READ = 0.5  # share of the experts; if more are used, the layer is read as a whole

ReadExperts = Callable[[np.ndarray], mx.array]
"""(n,) indices of experts -> the rows (n, ...) of a tensor."""


class RoutedExperts(nn.Module):
    """Replaces a layer of experts while it runs.

    readers: for each of the layer's arrays, by name, what reads experts of it.
    """

    layer: nn.Module
    readers: dict[str, ReadExperts]

    def __init__(self, layer: nn.Module, readers: dict[str, ReadExperts]) -> None:
        super().__init__()
        vars(self).update(layer=layer, readers=readers)  # not children: their arrays stay unread

    def __call__(self, x: mx.array, indices: mx.array, **options: Any) -> mx.array:
        used, places = np.unique(np.array(indices), return_inverse=True)
        if len(used) > MOST_READ * self.layer.num_experts:
            return self.layer(x, indices, **options)
        twin = copy.copy(self.layer)
        for name, read in self.readers.items():
            twin[name] = read(used)
        return twin(x, mx.array(places.reshape(indices.shape).astype(np.uint32)), **options)


@contextlib.contextmanager
def only_routed(block: nn.Module, readers: dict[str, ReadExperts]) -> Iterator[None]:
    """Until the `with` block ends, the experts of a block are read as its tokens need them.

    readers: what reads experts of a tensor, by its path in the block.
    """
    modules = dict(block.named_modules())
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for path, layer in modules.items():
        own = {name: f"{path}.{name}" for name in layer if isinstance(layer[name], mx.array)}
        if isinstance(layer, EXPERTS) and readers.keys() >= set(own.values()):
            parent, _, leaf = path.rpartition(".")
            replaced.append((modules[parent], leaf, layer))
            routed = RoutedExperts(layer, {name: readers[path] for name, path in own.items()})
            modules[parent][leaf] = routed
    try:
        yield
    finally:
        for owner, leaf, layer in replaced:
            owner[leaf] = layer
