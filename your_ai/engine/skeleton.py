"""A model without its weights, whose blocks run one at a time on made ones.

MLX's arrays are lazy, so a network whose files are only opened takes no memory. A copy of it gets
made weights of the right shapes, of one block at a time and of a part of the vocabulary: the head
works in slices, and all cost the same. So the engine's own programs can be measured before a
weight is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from your_ai.config import TrainConfig
from your_ai.engine.build import split_model
from your_ai.engine.compiled import Graphs, can_compile
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.programs import frozen_arrays
from your_ai.engine.spill import Stack
from your_ai.engine.staged import Resident, Staged
from your_ai.engine.weights import FileTensor, stream_vocabulary
from your_ai.errors import Unsplittable
from your_ai.memory.facts import VOCABULARY
from your_ai.memory.sizes import HEAD_SLICE_BYTES
from your_ai.nets.adapter_kinds import compute_magnitudes, normed_layers, use_any_norms
from your_ai.nets.head import HeadRows, HeadSlice, put_score_head
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import add_adapters
from your_ai.nets.parts import put, skeleton
from your_ai.nets.split import blocks_path, trunk_path
from your_ai.nets.vocabulary import VocabularyLayer
from your_ai.objectives.sft import SUPERVISED

SLICES = 4  # of the vocabulary: more need no more memory
FEW_ROWS = 32  # of a head, where only blocks are measured
SPREAD = 0.02  # standard deviation of made weights
E = TypeVar("E", bound=Staged)


@dataclass(frozen=True)
class MadeTensor(FileTensor):
    """Rows of a layer that are in no file, but are read as if they were."""

    data: Any = None
    """All rows, as a numpy array."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def _array(self, runs: list[tuple[int, int]], count: int) -> mx.array:
        found = np.concatenate([self.data[start : start + rows] for start, rows in runs])
        array = mx.array(found).view(self.dtype)
        mx.eval(array)
        return array


def made_tensor(name: str, array: mx.array) -> MadeTensor:
    """A tensor like an array, whose numbers numpy may not know, such as bfloat16."""
    whole = {2: mx.uint16, 4: mx.uint32}.get(array.dtype.size, mx.uint8)
    return MadeTensor(Path(), name, array.dtype, np.array(array.view(whole)))


def random_like(array: mx.array, length: int | None = None) -> mx.array:
    """Small random numbers of the same kind, zeros where these are not floating-point, since they
    may be indices. length: of the first axis, if it is shorter."""
    shape = array.shape
    if length is not None:
        shape = (min(length, shape[0]), *shape[1:])
    if mx.issubdtype(array.dtype, mx.floating):
        return SPREAD * mx.random.normal(shape, array.dtype)
    return mx.zeros(shape, array.dtype)


def make_weights(module: nn.Module) -> None:
    """Put made arrays in the place of all parameters of a module, and its magnitudes."""
    for name, array in tree_flatten(module.parameters()):
        made = random_like(array)
        mx.eval(made)  # one at a time: they may be large in float32
        put(module, {name: made})
    compute_magnitudes(module)
    mx.eval(module)


@dataclass(frozen=True)
class FewRows:
    """The first rows of a head, so that it takes next to nothing; implements `head.HeadRows`."""

    rows: HeadRows

    @property
    def shape(self) -> tuple[int, int]:
        count, width = self.rows.shape
        return min(FEW_ROWS, count), width

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        return self.rows.part(start, stop, after)

    def gather(self, tokens: mx.array) -> mx.array:
        return self.rows.gather(tokens)


@dataclass
class MadeWeights(Resident):
    """The frozen arrays of the one block that runs, made."""

    made: dict[int, Arrays] = field(default_factory=dict)

    def read(self, index: int) -> Arrays:
        return self.made[index]

    @contextlib.contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Until the `with` block ends, block `index` has arrays."""
        block = self.blocks[index]
        lazy = {name: array for name, array in tree_flatten(block) if isinstance(array, mx.array)}
        try:
            make_weights(block)
            self.made[index] = frozen_arrays(block)
            yield
        finally:
            self.made.pop(index, None)
            put(block, lazy)


def engine_of(
    network: nn.Module, config: TrainConfig, kind: type[E], hidden: int, *, score_head: bool = False
) -> E:
    """An engine whose weights are `MadeWeights`, of a copy of a network whose weights are lazy.

    Every block has the adapters of `config`. A staged engine has its vocabulary in files, a fused
    one in memory. Nothing of `network` is evaluated, but for what is outside of blocks and
    vocabulary, unless the model's code reads values of arrays. hidden: D.

    Raises Unsplittable.
    """
    network = skeleton(network)
    graphs, path = Graphs(), trunk_path(network)
    graphs.compiles = can_compile(network)
    keys = add_adapters(network, config).dropout_keys
    vocabulary = cut_vocabulary(network, rows_of_vocabulary(hidden))
    if score_head:
        put_score_head(network, hidden, config.seed)
    dequantize_on_the_cpu(network)
    if kind is Staged:
        stream_vocabulary(network, {name: made_tensor(name, a) for name, a in vocabulary.items()})
    with use_any_norms(normed_layers(network)):
        found = split_model(network, None, path)
    if found.parts is None:
        raise Unsplittable(found.reason)
    weights = MadeWeights(found.parts.blocks)
    return kind(
        network, found.parts, keys, SUPERVISED, found.head, weights=weights, inputs=Stack(),
        graphs=graphs,
    )  # fmt: skip


def rows_of_vocabulary(hidden: int) -> int:
    """The rows of the embedding and the head that a skeleton has, at most; hidden: D."""
    return SLICES * HEAD_SLICE_BYTES // (4 * hidden)


def cut_vocabulary(network: nn.Module, tokens: int) -> Arrays:
    """Keep at most `tokens` rows of the embedding and the head, made ones; return them by path."""
    blocks, found = ".".join(map(str, blocks_path(network))), {}
    for name, module in network.named_modules():
        in_files = name.removesuffix(".linear")  # of a layer of which something is trained
        if name.startswith(f"{blocks}.") or in_files.rpartition(".")[2] not in VOCABULARY:
            continue
        if isinstance(module, VocabularyLayer):
            module.cut(tokens)
            continue
        for leaf, array in list(module.items()):
            if isinstance(array, mx.array) and array.ndim:
                module[leaf] = found[f"{in_files}.{leaf}"] = random_like(array, tokens)
    mx.eval(found)
    return found
