"""Measure what a block of each kind and the head cost, by running the engine's own programs.

The weights are made (`skeleton.py`). Each phase runs at a few small shapes, and its peaks of MLX's
memory, and its seconds, become curves (`memory/costs.py`). Nothing is measured that may not fit.

Shapes: B rows, T tokens per row, N = B x T, D hidden size.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from your_ai.config import TrainConfig
from your_ai.data.batches import MULTIPLE, Batch, make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.engine.build import build_engine
from your_ai.engine.compiled import can_compile
from your_ai.engine.gradients import SpilledGradients
from your_ai.engine.kept import Keeps
from your_ai.engine.measure_generation import generation_costs
from your_ai.engine.peaks import Cost, Room, cost_of, no_cache
from your_ai.engine.programs import Extras
from your_ai.engine.skeleton import (
    SLICES,
    FewRows,
    MadeWeights,
    engine_of,
    make_weights,
    rows_of_vocabulary,
)
from your_ai.engine.staged import BatchRows, FusedAboveCache, Staged
from your_ai.engine.tiles import TiledBlock
from your_ai.engine.weights import FileTensor
from your_ai.errors import (
    Unsplittable,
    suppress_memory_errors,
    suppress_model_errors,
)
from your_ai.gates.untrusted import read_header
from your_ai.memory import costs
from your_ai.memory.costs import (
    BlockCosts,
    CostCurve,
    Costs,
    HeadCosts,
    MeasuredCosts,
    Shape,
    bytes_of,
)
from your_ai.memory.estimate import hidden_bytes
from your_ai.memory.facts import ModelFacts, head_step
from your_ai.memory.guess import guessed
from your_ai.memory.sizes import (
    HEAD_ROWS,
    HEAD_SLICE_BYTES,
    TILED_FROM,
    tiles_of,
)
from your_ai.memory.workload import Workload
from your_ai.nets.adapter_kinds import compute_magnitudes, norms_of
from your_ai.nets.head import LinearHead, ScoreHead, put_in, trained_in
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import TRIED_TOKENS, add_adapters
from your_ai.nets.parts import put, skeleton
from your_ai.nets.tiled_attention import Tile
from your_ai.objectives.objective import Targets

# N at which blocks are measured: few tokens, and more of them where rows are longer.
FEW_TOKENS, MOST_TOKENS = 96, 1024
USUAL_TOKENS = 512  # rows up to which more rows show more than longer ones
TILED_TOKENS = 1536  # of a row that runs on tiles, if rows are as long
MANY_MORE_ROWS = 1.5  # times as many as the fewest, from which tiles of more rows are measured, too
MOST_READ_BYTES = 64 << 20  # of the files, to measure their speed
# Of the parts of embeddings and heads that two skeletons have, and their copies.
MADE_VOCABULARY_BYTES = 6 * SLICES * HEAD_SLICE_BYTES
HEAD_SIZES = (128, 512, 1024, 2048)  # N
LONG = 2048  # tokens of a row that shows which blocks attend within a window, or have whole scores
EVERYTHING = Keeps(True, True, True)
GRAPH_BLOCKS = 3  # of a fused graph that is measured: the first saves more or less than others


def measure_costs(
    network: nn.Module,
    config: TrainConfig,
    workload: Workload,
    limit_bytes: int,
    tell: Callable[[str], object] = lambda _: None,
    tensors: Mapping[str, FileTensor] = MappingProxyType({}),
) -> MeasuredCosts | None:
    """Measure what the work of a run needs; return None if that is not possible here.

    network: with lazy weights and without adapters; it is not changed. tensors: its files, if there
        are any; one of them is read.
    config: has the adapters, but for the ranks and the layers, which `workload` has.
    limit_bytes: of this process, also while it measures. tell: receives what is measured.

    Raises Unsplittable if the model cannot be taken apart, and is too large to be measured whole.
    """
    training, score_head = workload.training, workload.score_head
    guess = guessed(workload.facts, training, score_head)
    config = replace(
        config,
        lora_rank=training.ranks.setting,
        lora_layers="all",
        lora_targets=training.targets,
    )
    room = Room(limit_bytes)
    block = max(kind.weights_bytes for kind in workload.facts.kinds)
    if not room.has(block + MADE_VOCABULARY_BYTES):
        return None
    with suppress_model_errors(), suppress_memory_errors(), no_cache():
        found = costs_of_model(network, config, workload, guess, room, tell)
        if found is not None:
            read_s = seconds_to_read(tensors, room)
            return replace(found, read_s=read_s, is_complete=room.was_enough)
    return None


def costs_of_model(
    network: nn.Module, config: TrainConfig, workload: Workload, guess: Costs, room: Room,
    tell: Callable[[str], object],
) -> MeasuredCosts | None:  # fmt: skip
    """The costs of a model's blocks and head. Where blocks cannot run one at a time, only those of
    its graphs. Raises Unsplittable if these may not fit."""
    graphs: MeasuredCosts | None = None
    if not can_compile(network):  # its code reads values, which come from all weights
        if not room.has(workload.facts.weights_bytes):
            return None
        network = made_copy(network)
        graphs = whole_costs(network, config, workload, guess, room, tell)
        if graphs is None:
            return None
        workload = replace(workload, engine="staged")
    hidden, score_head = workload.facts.hidden, workload.score_head
    try:
        staged = engine_of(network, config, Staged, hidden, score_head=score_head)
        fused = engine_of(network, config, FusedAboveCache, hidden, score_head=score_head)
    except Unsplittable:
        if not room.has(workload.facts.weights_bytes):
            raise
        whole = whole_costs(made_copy(network), config, workload, guess, room, tell)
        if whole is None:
            raise
        return replace(whole, is_whole=True)
    heads: dict[str, dict[int, Cost]] = {}
    # Other heads work on the whole vocabulary, of which a skeleton has a part.
    sliced = isinstance(staged.head, LinearHead | ScoreHead)
    if sliced and not score_head:
        tell("measuring the head")
        heads = head_costs(staged, fused, workload, guess, room)
    if isinstance(fused.head, LinearHead):  # graphs are measured without it
        fused.head = replace(fused.head, rows=FewRows(fused.head.rows))
    kinds: dict[tuple[Hashable, Hashable], int] = {}
    calls = staged.parts.calls(LONG)
    names = list(zip(staged.programs.kinds, (call.key for call in calls), strict=True))
    order = tuple(kinds.setdefault(name, len(kinds)) for name in names)
    found = []
    for place, name in enumerate(kinds):
        tell(f"measuring a block, kind {place + 1} of {len(kinds)}")
        index = names.index(name)
        own = guess.kinds[guess.order[index]]
        of_block = costs_of(staged, fused, index, own, room, workload, with_head=sliced)
        generation = generation_costs(network, index, workload, room)
        found.append((of_block[0].completed(generation), of_block[1]))
    memory, times = zip(*found, strict=True)
    of_heads, seconds = (
        {name: head_curve(costs, which) for name, costs in heads.items()} for which in (0, 1)
    )
    measured = MeasuredCosts(Costs(memory, order, of_heads), Costs(times, order, seconds))
    return measured if graphs is None else measured.with_graphs(graphs)


def whole_costs(
    network: nn.Module, config: TrainConfig, workload: Workload, guess: Costs, room: Room,
    tell: Callable[[str], object],
) -> MeasuredCosts | None:  # fmt: skip
    """The costs of fused graphs of a whole model, as if all were the work of a block; None if they
    may not fit. network: with weights in memory; it is not changed."""
    facts = workload.facts
    found: dict[Shape, tuple[Cost, Cost]] = {}
    if workload.score_head:
        return None
    tell("measuring the whole model")
    network = skeleton(network)
    keys = add_adapters(network, config).dropout_keys
    compute_magnitudes(network)
    mx.eval(network.parameters())
    engine = build_engine(network, keys, "fused").engine
    gradients = 4 * sum(array.size for _, array in tree_flatten(network.trainable_parameters()))

    def train(batch: Batch, _: Any) -> Any:
        return engine.gradients(batch, 1.0, 0)

    def score(batch: Batch, _: Any) -> Any:
        return engine.score(batch)

    for shape in shapes_for(workload):
        batch = batch_of(shape, packing=False)
        saved = guess.sum("saved", *shape, facts.blocks, is_long=False)
        expected = max(gradients, saved) + guess.largest("working", *shape, facts.blocks)
        expected += guess.heads[costs.FUSED_TRAINED].at(shape.size)
        if room.has(expected, "whole"):
            trained = cost_of(list, partial(train, batch), varies=True)
            room.learn("whole", trained.bytes, expected)
            found[shape] = trained, cost_of(list, partial(score, batch))
    if not found:
        return None

    def curve(value: Callable[[Shape, Cost, Cost], float]) -> CostCurve:
        return CostCurve.through({s: max(0.0, value(s, *own)) for s, own in found.items()})

    memory = BlockCosts(
        saved=CostCurve(),
        working=curve(lambda s, t, _: t.bytes - gradients - hidden_bytes(facts, *s)),
        evaluated=curve(lambda s, _, e: e.bytes - hidden_bytes(facts, *s)),
    )
    seconds = BlockCosts(
        saved=curve(lambda _, t, e: t.seconds / facts.blocks),
        evaluated=curve(lambda _, t, e: e.seconds / facts.blocks),
    )
    order, none = (0,) * facts.blocks, HeadCosts((1, 2), (0.0, 0.0))
    heads = {costs.FUSED_TRAINED: none, costs.FUSED_SCORES: none}
    return MeasuredCosts(Costs((memory,), order, heads), Costs((seconds,), order, heads))


def made_copy(network: nn.Module) -> nn.Module:
    """A copy of a network whose weights are lazy, with all of them made."""
    network = skeleton(network)
    make_weights(network)
    return network


def seconds_to_read(tensors: Mapping[str, FileTensor], room: Room) -> float:
    """The seconds in which a byte of a model's files is read, measured on one of them; 0 if there
    is none."""
    if not tensors:
        return 0.0
    file = next(iter(tensors.values())).file
    sizes = {entry.name: entry.end - entry.start for entry in read_header(file)}
    of_size = {sizes.get(t.name, 0): t for t in tensors.values() if t.file == file}
    fitting = [size for size in of_size if 0 < size <= MOST_READ_BYTES and room.has(3 * size)]
    if not fitting:
        return 0.0
    tensor = of_size[max(fitting)]
    tensor.rows(0, 1)
    began = time.perf_counter()
    tensor.rows(0, tensor.shape[0])
    seconds = time.perf_counter() - began
    return seconds / tensor.nbytes


def engines_of(workload: Workload) -> tuple[bool, bool]:
    """Return whether the run may be fused, and whether it may be staged or streamed."""
    return workload.engine in ("auto", "fused"), workload.engine != "fused"


def scores_of(workload: Workload) -> bool:
    """Return whether the run also computes losses without gradients before it trains any row."""
    return workload.forward or workload.scores or bool(workload.reward_models)


def padded(tokens: int) -> int:
    """The tokens of a row as batches are padded."""
    return -(-tokens // MULTIPLE) * MULTIPLE


def longest_rows(workload: Workload) -> Shape:
    """The largest micro-batch of the run, padded as batches are."""
    rows, longest = max(1, workload.batch_size), max(workload.lengths)
    if workload.packed:  # texts are one row
        rows, longest = 1, rows * longest
    return Shape(rows, padded(longest))


def shapes_for(workload: Workload) -> list[Shape]:
    """The shapes at which blocks are measured: of one row as far as rows are that long, and none
    larger than a micro-batch of the run. Two rows beside a long one show what pairs of tokens
    need."""
    rows, longest = longest_rows(workload)
    if longest <= USUAL_TOKENS:
        sizes = FEW_TOKENS, MOST_TOKENS
        wanted = [Shape(min(rows, -(-size // longest)), min(size, longest)) for size in sizes]
        return list(dict.fromkeys(wanted))
    most = min(longest // (2 * MULTIPLE) * 2 * MULTIPLE, MOST_TOKENS)
    pairs = [] if workload.packed else [Shape(2, most // 2)]
    return [Shape(1, FEW_TOKENS), Shape(1, most), *pairs]


def longer_shapes(workload: Workload) -> list[Shape]:
    """A row that is longer than those of `shapes_for`; none if no row is."""
    _, longest = longest_rows(workload)
    return [Shape(1, min(longest, LONG))] * (longest > MOST_TOKENS)


def tiled_shapes(workload: Workload) -> list[Shape]:
    """The fewest rows of the run that run on tiles, of each of which a tile has most tokens, and
    the most if these are many more, the shortest with tiles as large as those of the run."""
    rows, longest = most = longest_rows(workload)
    fewest = TILED_FROM // longest + 1
    shapes = [Shape(fewest, min(TILED_TOKENS, longest))]
    if rows >= MANY_MORE_ROWS * fewest:
        lengths, tile = range(padded(TILED_FROM // rows + 1), longest, MULTIPLE), tiles_of(*most)[0]
        alike = (tokens for tokens in lengths if tiles_of(rows, tokens)[0].stop >= tile.stop)
        shapes.append(Shape(rows, next(alike, longest)))
    return shapes


def largest_size(workload: Workload) -> int:
    """N of the largest micro-batch of the run."""
    return max(1, workload.batch_size) * max(workload.lengths)


def costs_of(
    staged: Staged, fused: FusedAboveCache, index: int, guess: BlockCosts, room: Room,
    workload: Workload, *, with_head: bool,
) -> tuple[BlockCosts, BlockCosts]:  # fmt: skip
    """The bytes and the seconds of a block, of the phases that the run may have; with_head: whether
    the head can be measured with it."""
    assert isinstance(staged.weights, MadeWeights)
    fused.weights = staged.weights
    with staged.weights.of(index):
        arrays, own = staged.arrays_at(index)
        mx.eval(arrays, own)
        block = MeasuredBlock(
            staged, fused, index, guess, room, workload.packed, arrays, own,
            shapes_for(workload), longer_shapes(workload),
        )  # fmt: skip
        tile_tokens = guess.tile_tokens
        is_fused, is_staged = engines_of(workload)
        block.norms_costs()
        if is_staged:
            block.forward_costs()
        if is_staged and not workload.forward:
            block.backward_costs()
        if is_fused and with_head and not workload.forward:
            block.graph_costs()
        if is_fused:
            block.evaluation_costs()
        if is_staged and largest_size(workload) > TILED_FROM:
            tile_tokens = block.tile_costs(tiled_shapes(workload), workload.forward)
        memory, seconds = block.memory, block.seconds
        del arrays, own, block
        gc.collect()
    found = (BlockCosts(**curves, tile_tokens=tile_tokens) for curves in (memory, seconds))
    return next(found), next(found)


@dataclass
class MeasuredBlock:
    """A block of one kind, in the engines whose programs are measured."""

    staged: Staged
    fused: FusedAboveCache
    index: int
    guess: BlockCosts
    room: Room
    packed: bool
    arrays: Arrays
    own: Arrays
    """Its trained arrays."""
    shapes: list[Shape]
    longer: list[Shape]
    """One more, if rows are longer than those of `shapes`."""
    batches: dict[Shape, BatchRows] = field(default_factory=dict)
    memory: dict[str, CostCurve] = field(default_factory=dict)
    """The curves that were found, by phase: bytes."""
    seconds: dict[str, CostCurve] = field(default_factory=dict)

    def states(self, shape: Shape, *places: int) -> list[mx.array]:
        """Hidden states, (B, T, F) each: before the block for place 0, after it for 1."""
        features = [self.staged.parts.features(self.index + place) for place in places]
        return [mx.random.normal((*shape, f)).astype(self.staged.dtype) for f in features]

    def measure(self, shapes: list[Shape], **phases: Callable[[Shape], Cost]) -> None:
        """Find the curves of phases, one after another at each shape, through those shapes that
        fit, if any does."""
        found: dict[str, dict[Shape, Cost]] = {phase: {} for phase in phases}
        for shape, (phase, cost_at) in product(shapes, phases.items()):
            guess = bytes_of(self.guess, phase, *shape)
            states = 3 * 4 * shape.size * self.staged.features
            if self.room.has(guess + states, phase):
                found[phase][shape] = cost_at(shape)
                self.room.learn(phase, found[phase][shape].bytes, guess)
        for phase, costs_at in found.items():
            if costs_at:
                first, *more = costs_at
                if not more or costs_at[first].seconds >= costs_at[more[0]].seconds:
                    costs_at[first] = phases[phase](first)  # kernels were compiled
                self.memory[phase] = CostCurve.through({s: c.bytes for s, c in costs_at.items()})
                self.seconds[phase] = CostCurve.through({s: c.seconds for s, c in costs_at.items()})

    def rows(self, shape: Shape) -> BatchRows:
        if shape not in self.batches:
            batch = batch_of(shape, self.packed)
            self.batches[shape] = self.staged.rows_of(batch, 0)
        return self.batches[shape]

    def extras(self, shape: Shape) -> Extras:
        extras = self.rows(shape).extras_of(self.index)
        mx.eval(extras)
        return extras

    def norms_costs(self) -> None:
        """Measure computing the norms of the block's adapted weights."""
        layers, block = self.staged.normed[self.index], self.staged.blocks[self.index]
        if not layers or not self.room.has(bytes_of(self.guess, "norms", *costs.USUAL)):
            return

        def adapted() -> list[mx.array]:
            """Other arrays with the same adapter, as norms of the last one are kept."""
            copies = {name: array + 0 for name, array in self.own.items()}
            put(block, copies)
            return list(copies.values())

        cost = cost_of(adapted, lambda _: norms_of(layers, self.arrays), varies=True)
        self.memory["norms"] = CostCurve(cost.bytes)
        put(block, self.own)

    def forward_costs(self) -> None:
        """Measure the forward pass of the block alone."""
        self.measure(self.shapes, forward=partial(self.forward, self.staged))

    def evaluation_costs(self) -> None:
        """Measure the block in a fused graph without gradients."""
        self.measure(self.shapes, evaluated=partial(self.forward, self.fused))

    def forward(self, engine: Staged, shape: Shape) -> Cost:
        program = engine.programs.of(self.index, self.rows(shape).shape)
        run, extras = partial(program.forward, self.arrays, self.own), self.extras(shape)
        return cost_of(lambda: self.states(shape, 0), lambda g: run(g.pop(), extras))

    def backward_costs(self) -> None:
        """Measure the backward pass of the block alone."""
        arrays, own, index, staged = self.arrays, self.own, self.index, self.staged
        kept: list[list[mx.array]] = []  # of the last forward pass, for one backward pass

        def backward(shape: Shape) -> Cost:
            program, extras = staged.programs.of(index, self.rows(shape).shape), self.extras(shape)

            def run(given: list[Any]) -> Any:
                cotangent, hidden = given.pop(), given.pop()
                return program.backward(arrays, own, hidden, extras, cotangent)

            return cost_of(lambda: self.states(shape, 0, 1), run)

        def kept_forward(shape: Shape) -> Cost:
            program = staged.programs.keeping(index, self.rows(shape).shape, EVERYTHING)
            extras = self.extras(shape)

            def prepare() -> list[Any]:
                kept.clear()
                return self.states(shape, 0)

            def run(given: list[Any]) -> Any:  # its input stays, as that of a trained block does
                result, results = program.forward(arrays, own, given[0], extras)
                mx.eval(results)
                kept.append(results)
                return result

            return cost_of(prepare, run)

        def kept_backward(shape: Shape) -> Cost:
            program = staged.programs.keeping(index, self.rows(shape).shape, EVERYTHING)
            extras, (hidden,) = self.extras(shape), self.states(shape, 0)

            def prepare() -> list[Any]:
                results = kept.pop() if kept else program.forward(arrays, own, hidden, extras)[1]
                return [*self.states(shape, 0, 1), results]

            def run(given: list[Any]) -> Any:
                results, cotangent, hidden = given.pop(), given.pop(), given.pop()
                return program.backward(results, arrays, own, hidden, extras, cotangent)

            return cost_of(prepare, run)

        def storing() -> Cost:
            with tempfile.TemporaryDirectory() as folder:
                disk = SpilledGradients(Path(folder))

                def add(given: list[Any]) -> None:
                    disk.add({str(i): given.pop() for i in range(len(given))})

                return cost_of(lambda: [a + 0 for a in own.values()], add)

        self.measure(self.shapes, backward=backward)
        if staged.graphs.compiles:  # else they would keep what depends on the values of arrays
            # Longer rows run whole where blocks keep something, and else on tiles.
            kept_shapes = [*self.shapes, *self.longer]
            self.measure(kept_shapes, kept_forward=kept_forward, kept_backward=kept_backward)
        size = 2 * sum(array.nbytes for array in own.values())
        stored = storing() if own and self.room.has(size) else Cost(size, 0.0)
        self.memory["storing"] = CostCurve(stored.bytes)
        self.seconds["storing"] = CostCurve(stored.seconds)

    def graph_costs(self) -> None:
        """Measure what one more such block saves in a fused graph, and a graph of GRAPH_BLOCKS.

        What is saved does not depend on threads, as peaks do. A block that passes on another state
        than it gets cannot follow itself: it is guessed.
        """
        parts = self.staged.parts
        places = self.index, self.index + 1, len(parts.blocks)
        if len({parts.features(place) for place in places}) > 1:
            return
        saved: dict[Shape, float] = {}
        found: dict[Shape, Cost] = {}
        gradients = sum(array.nbytes for array in self.own.values())
        for shape in [*self.shapes, *self.longer]:
            guess = costs.graph_bytes(self.guess, GRAPH_BLOCKS, gradients, *shape)
            if self.room.has(guess, "fused"):
                held: list[int] = []
                given = self.states(shape, 0)
                mx.eval(given)
                self.graph(1, shape, held)(given)  # its gradients are not computed
                run = self.graph(GRAPH_BLOCKS, shape, held)
                found[shape] = cost_of(partial(self.states, shape, 0), run, varies=True)
                saved[shape] = max(0.0, (held[-1] - held[0]) / (GRAPH_BLOCKS - 1))
                self.room.learn("fused", found[shape].bytes, guess)
        if not found:
            return
        self.memory["saved"] = CostCurve.through(saved)
        working = {
            shape: max(0.0, cost.bytes - GRAPH_BLOCKS * max(gradients, saved[shape]))
            for shape, cost in found.items()
        }
        self.memory["working"] = CostCurve.through(working, max(c.bytes for c in found.values()))
        seconds = {shape: cost.seconds / GRAPH_BLOCKS for shape, cost in found.items()}
        self.seconds["saved"] = CostCurve.through(seconds)

    def graph(self, count: int, shape: Shape, held: list[int]) -> Callable[[list[Any]], Any]:
        """A graph of `count` such blocks, forward and backward, of the input in a list.

        held: receives the bytes that wait for the backward pass once the loss is there.
        """
        fused = self.fused
        fused.trained = [self.index] * count
        rows, batch = self.rows(shape), batch_of(shape, self.packed)
        run = fused.graphs.compile(partial(fused.trained_gradients, rows.shape), fused.state)
        trained = [{name: array + 0 for name, array in self.own.items()} for _ in range(count)]
        of_head = trained_in(fused.head)
        scale = mx.array(1.0, mx.float32)
        rest = [self.extras(shape)] * count, Targets.of(batch), scale
        mx.eval(trained)

        def run_graph(given: list[Any]) -> Any:
            mx.synchronize()
            before = mx.get_active_memory()
            sums, gradients = run(trained, of_head, [self.arrays] * count, given.pop(), *rest)
            put_in(fused.head, of_head)  # tracing replaced it with a placeholder
            mx.eval(sums)
            mx.synchronize()
            held.append(mx.get_active_memory() - before)
            return gradients

        return run_graph

    def tile_costs(self, shapes: list[Shape], forward_only: bool) -> int:
        """Measure the block on tiles of such rows; return the tokens of a tile of the first, 0 if
        it does not run on them."""
        tiles, phases = zip(*(self.on_tiles(shape, forward_only) for shape in shapes), strict=True)
        for phase, first in phases[0].items():
            measured = zip(tiles, phases, strict=True)
            of_tile = {tile: own[phase].fixed for tile, own in measured if phase in own}
            curve = costs.not_negative(of_tile, ("fixed", "of_pair"))
            self.memory[phase] = replace(curve, of_token=first.of_token)
        return int(tiles[0].size)

    def on_tiles(self, shape: Shape, forward_only: bool) -> tuple[Shape, dict[str, CostCurve]]:
        """A tile of such rows, and by phase the bytes of one and those of each token; none if the
        block does not run on tiles."""
        staged, rows, room = self.staged, self.rows(shape), self.room
        block = staged.tiled.of(self.index, rows.shape, self.arrays, self.own)
        if block is None:
            return Shape(0, 0), {}
        extras, reach = self.extras(shape), rows.shape.max_segment_tokens
        given = self.arrays, self.own

        def state_of(tile: slice) -> mx.array:
            features = staged.parts.features(self.index)
            return mx.zeros((shape.rows, tile.stop - tile.start, features), staged.dtype)

        def forward(block: TiledBlock, states: list[Any]) -> Any:
            block.forward(*given, states, extras, reach)
            return states

        def backward(block: TiledBlock, states: list[Any]) -> Any:
            inputs = MadeInputs(lambda place: state_of(block.tiles[place]), len(states))
            return block.backward(*given, inputs, extras, reach, states, False), states

        first = block.tiles[0]
        found: dict[str, CostCurve] = {}
        width = Shape(shape.rows, first.stop - first.start)
        keys = block.keys_of(*given, state_of(first), extras, Tile(first.start, first.stop))
        numbers = sum(array.size for array in keys) / width.size
        number = staged.dtype.size
        held = {"forward": numbers * number, "backward": numbers * (number + 4)}  # of a token
        few = [slice(0, MULTIPLE), slice(MULTIPLE, 2 * MULTIPLE)]  # for which kernels are compiled
        for name, run in (("forward", forward), ("backward", backward)):
            phase = f"tiled_{name}"
            states = 4 * shape.size * staged.features
            guess = states + costs.bytes_of(self.guess, phase, *shape)
            if (name == "backward" and forward_only) or not room.has(guess, phase):
                continue
            run(replace(block, tiles=few), [state_of(tile) for tile in few])
            cost = cost_of(lambda: [state_of(t) for t in block.tiles], partial(run, block))
            room.learn(phase, cost.bytes, guess)
            of_tile = max(0.0, cost.bytes - held[name] * shape.size)
            found[phase] = CostCurve(of_tile, held[name])
            whole = self.seconds.get(name, CostCurve(of_token=1.0))  # as attention grows
            self.seconds.setdefault(phase, whole.times(cost.seconds / whole.at(*shape)))
        return width, found


@dataclass
class MadeInputs:
    """Inputs of the tiles of a block, made when they are taken, as if they were read from disk;
    implements `spill.SavedInputs`."""

    make: Callable[[int], mx.array]
    left: int
    """How many were not taken."""

    def pop(self) -> mx.array:
        self.left -= 1
        return self.below_top(-1)

    def below_top(self, count: int) -> mx.array:
        array = self.make(self.left - 1 - count)
        mx.eval(array)
        return array


def head_costs(
    staged: Staged, fused: FusedAboveCache, workload: Workload, guess: Costs, room: Room
) -> dict[str, dict[int, Cost]]:
    """The costs of the head with its losses, and with gradients if the run trains, at some N."""
    most = largest_size(workload)
    found = {}
    is_fused, is_staged = engines_of(workload)
    wanted: list[tuple[str, Staged, bool]] = []
    if not workload.forward:
        wanted.append((costs.TRAINED, staged, False))
        wanted += [(costs.FUSED_TRAINED, fused, False)] * is_fused
    if scores_of(workload):
        wanted += [(costs.STAGED_SCORES, staged, True)] * is_staged
        wanted += [(costs.FUSED_SCORES, fused, True)] * is_fused
    for name, engine, scores in wanted:
        measured: dict[int, Cost] = {}
        for size in HEAD_SIZES:
            size = padded(min(size, most))
            is_cut = size > HEAD_ROWS and name == costs.TRAINED and guess.is_tiled
            if size > HEAD_ROWS and not (is_cut or name == costs.FUSED_TRAINED):
                continue
            expected = guess.heads[name].at(size)
            if size not in measured and room.has(expected, name):
                cost = head_cost(engine, size, scores=scores)
                room.learn(name, cost.bytes, expected)
                slices = of_vocabulary(workload.facts, size)
                measured[size] = cost._replace(seconds=slices * cost.seconds)
        if measured:
            found[name] = measured
    return found


def of_vocabulary(facts: ModelFacts, size: int) -> float:
    """The slices of the whole vocabulary over those of the part that was measured."""
    measured, step = rows_of_vocabulary(facts.hidden), head_step(facts, min(size, HEAD_ROWS))
    return -(-facts.vocabulary // step) / -(-min(measured, facts.vocabulary) // step)


def head_curve(costs: Mapping[int, Cost], which: int) -> HeadCosts:
    """The bytes (0) or the seconds (1) of the head, by N."""
    values = {size: cost[which] for size, cost in costs.items()}
    if len(values) == 1:  # proportional to N
        (size,) = values
        values = {size: values[size], 2 * size: 2 * values[size]}
    return HeadCosts(tuple(values), tuple(values.values()))


def head_cost(engine: Staged, tokens: int, *, scores: bool) -> Cost:
    """The cost of the head on one row; scores: without gradients."""
    shape = Shape(1, tokens)
    batch, scale = batch_of(shape, False), mx.array(1.0, mx.float32)
    rows, targets = engine.rows_of(batch, 0), Targets.of(batch)
    features = engine.parts.features(len(engine.blocks))
    tiles = [slice(0, tokens)] if isinstance(engine, FusedAboveCache) else tiles_of(*shape)
    widths = [tile.stop - tile.start for tile in tiles]

    def states() -> list[Any]:
        return [mx.random.normal((1, w, features)).astype(engine.dtype) for w in widths]

    def run(given: list[Any]) -> Any:
        if scores:
            return engine.losses_and_predictions(rows.shape, given.pop(), targets)
        return engine.at_head(batch, rows, given, scale)

    return cost_of(states, run, varies=len(tiles) > 1)


def batch_of(shape: Shape, packing: bool) -> Batch:
    """A micro-batch of this shape; all its tokens are trained."""
    rows, tokens = shape
    text = np.arange(rows * (tokens + 1), dtype=np.uint32) % TRIED_TOKENS
    starts = np.arange(rows + 1) * (tokens + 1)
    trained = np.ones(len(text), bool)
    weights = np.ones(rows, np.float32)
    examples = Examples(text, trained, starts, weights, RowCounts())
    packed = rows * tokens if packing else None
    return make_schedule(examples, rows, rows, 0, packed).batches_of(0)[0]
