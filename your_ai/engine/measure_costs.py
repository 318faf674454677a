"""Measure what a block of each kind and the head cost, by running the engine's own programs.

The weights are made (`skeleton.py`). Each phase runs at a few small shapes, and its peaks of MLX's
memory, and its seconds, become curves (`memory/costs.py`). Nothing is measured that may not fit.

Shapes: B rows, T tokens per row, N = B x T, D hidden size.
"""

from __future__ import annotations

import contextlib
import gc
import math
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.config import TrainConfig
from your_ai.data.batches import MULTIPLE, Batch, make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.engine.gradients import SpilledGradients
from your_ai.engine.kept import Keeps
from your_ai.engine.programs import Extras, trained_arrays
from your_ai.engine.skeleton import SLICES, MadeWeights, engine_of, rows_of_vocabulary
from your_ai.engine.staged import BatchRows, FusedAboveCache, Staged
from your_ai.engine.tiles import TiledBlock
from your_ai.engine.weights import FileTensor
from your_ai.errors import suppress_model_errors
from your_ai.memory import allocator, costs, probe
from your_ai.memory.costs import (
    BlockCosts,
    CostCurve,
    Costs,
    HeadCosts,
    MeasuredCosts,
    Shape,
    bytes_of,
)
from your_ai.memory.facts import ModelFacts, head_step
from your_ai.memory.guess import guessed
from your_ai.memory.sizes import HEAD_ROWS, HEAD_SLICE_BYTES, TILED_FROM, tiles_of
from your_ai.memory.workload import Workload
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import TRIED_TOKENS
from your_ai.objectives.objective import Targets

SHAPES = (Shape(1, 128), Shape(2, 128), Shape(1, 384), Shape(1, 1024))
TILED_SIZES = (1536, 2048)  # N of rows that run on tiles
MOST_READ_BYTES = 64 << 20  # of the files, to measure their speed
# Of the parts of embeddings and heads that two skeletons have, and their copies.
MADE_VOCABULARY_BYTES = 6 * SLICES * HEAD_SLICE_BYTES
HEAD_SIZES = (128, 256, 512, 1024, 2048)  # N
LONG = 2048  # tokens of a row that shows which blocks attend within a window
EVERYTHING = Keeps(True, True, True)
# Peaks of large graphs depend on how far MLX's threads compute ahead: the largest of some counts.
# The first time, kernels are compiled: the least time of some counts.
REPEATS, VARYING_REPEATS = 2, 6
ENOUGH_S, MOST_S = 0.6, 1.5  # after so long, two runs of a block are enough, or one
BESIDE_BYTES = 10_000_000  # that graphs, and kernels while they are compiled, may take
UNSURE, SURER = 1.25, 1.1  # factors on what may be needed, before and after something was measured


@dataclass
class Room:
    """The bytes that measuring may use."""

    limit_bytes: int
    """Of the process."""
    off: dict[str, float] = field(default_factory=dict)
    """Measured bytes over those guessed by phase, the largest so far."""
    was_enough: bool = True

    def has(self, needed_bytes: float, phase: str = "") -> bool:
        """Return whether this process may need so many bytes more, if that is a guess."""
        factor = max(1.0, self.off[phase]) * SURER if phase in self.off else UNSURE
        expected = needed_bytes * factor + BESIDE_BYTES
        fits = (probe.process_bytes() or 0) + expected <= self.limit_bytes
        self.was_enough = self.was_enough and fits
        return fits

    def learn(self, phase: str, measured: float, guess: float) -> None:
        if guess > 0:
            self.off[phase] = max(self.off.get(phase, 0.0), measured / guess)


@dataclass(frozen=True)
class MeasuredBlock:
    """A block of one kind, in the engines whose programs are measured."""

    staged: Staged
    fused: FusedAboveCache
    index: int
    guess: BlockCosts
    room: Room
    packed: bool

    def rows_of(self, engine: Staged, shape: Shape) -> BatchRows:
        return engine.rows_of(batch_of(shape, self.packed), 0)

    def states(self, shape: Shape, *places: int) -> list[mx.array]:
        """Hidden states, (B, T, F) each: before the block for place 0, after it for 1."""
        features = [self.staged.parts.features(self.index + place) for place in places]
        return [mx.random.normal((*shape, f)).astype(self.staged.dtype) for f in features]


class Cost(NamedTuple):
    """The cost of a phase, beside what was in memory before it."""

    bytes: float
    seconds: float


def measure_costs(
    network: nn.Module,
    config: TrainConfig,
    workload: Workload,
    limit_bytes: int,
    tell: Callable[[str], object] = lambda _: None,
    tensors: Mapping[str, FileTensor] = MappingProxyType({}),
) -> MeasuredCosts | None:
    """Measure what the work of a run needs; return None if the model cannot be taken apart.

    network: with lazy weights and without adapters; it is not changed. tensors: its files, if there
        are any; one of them is read.
    config: has the adapters, but for the rank and the layers, which `workload` has.
    limit_bytes: of this process, also while it measures. tell: receives what is measured.
    """
    training, score_head = workload.training, workload.score_head
    guess = guessed(workload.facts, training, score_head)
    config = replace(
        config, lora_rank=training.rank, lora_layers="all", lora_targets=training.targets
    )
    room = Room(limit_bytes)
    block = max(kind.weights_bytes for kind in workload.facts.kinds)
    if not room.has(block + MADE_VOCABULARY_BYTES):
        return None
    with suppress_model_errors(), no_cache():
        staged = engine_of(network, config, Staged, score_head=score_head)
        fused = engine_of(network, config, FusedAboveCache, score_head=score_head)
        if staged is None or fused is None:
            return None
        heads: dict[str, dict[int, Cost]] = {}
        if not score_head:
            tell("measuring the head")
            heads = head_costs(staged, fused, workload, guess, room)
        of_heads = {name: head_curve(found, 0) for name, found in heads.items()}
        kinds: dict[tuple[Hashable, Hashable], int] = {}
        calls = staged.parts.calls(LONG)
        names = list(zip(staged.programs.kinds, (call.key for call in calls), strict=True))
        order = tuple(kinds.setdefault(name, len(kinds)) for name in names)
        found = []
        for place, name in enumerate(kinds):
            tell(f"measuring a block, kind {place + 1} of {len(kinds)}")
            index = names.index(name)
            own = guess.kinds[guess.order[index]]
            subject = MeasuredBlock(staged, fused, index, own, room, workload.packed)
            found.append(costs_of(subject, workload, of_heads.get(costs.FUSED)))
        memory, times = zip(*found, strict=True)
        seconds = {name: head_curve(found, 1) for name, found in heads.items()}
        return MeasuredCosts(
            Costs(memory, order, of_heads),
            Costs(times, order, seconds),
            seconds_to_read(tensors),
            room.was_enough,
        )
    return None


def seconds_to_read(tensors: Mapping[str, FileTensor]) -> float:
    """The seconds in which a byte of a model's files is read, measured on one of them."""
    large = [t for t in tensors.values() if t.nbytes <= MOST_READ_BYTES]
    if not large:
        return 0.0
    tensor = max(large, key=lambda t: t.nbytes)
    tensor.rows(0, 1)
    began = time.perf_counter()
    tensor.rows(0, tensor.shape[0])
    seconds = time.perf_counter() - began
    return seconds / tensor.nbytes


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Until the `with` block ends, MLX keeps no freed buffers, which would add to peaks."""
    allocator.return_freed_buffers()
    allocator.free()
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
        allocator.free()


def engines_of(workload: Workload) -> tuple[bool, bool]:
    """Return whether the run may be fused, and whether it may be staged or streamed."""
    return workload.engine in ("auto", "fused"), workload.engine != "fused"


def scores_of(workload: Workload) -> bool:
    """Return whether the run also computes losses without gradients before it trains any row."""
    return workload.forward or workload.scores or bool(workload.reward_models)


def shapes_for(workload: Workload) -> list[Shape]:
    """The shapes at which blocks are measured: none is larger than a micro-batch of the run."""
    longest = -(-max(workload.lengths) // MULTIPLE) * MULTIPLE  # as batches are padded
    most_rows = 1 if workload.packed else max(1, workload.batch_size)
    wanted = [Shape(min(s.rows, most_rows), min(s.tokens, longest)) for s in SHAPES]
    return list(dict.fromkeys(wanted))


def largest_size(workload: Workload) -> int:
    """N of the largest micro-batch of the run."""
    return max(1, workload.batch_size) * max(workload.lengths)


def cost_of(
    prepare: Callable[[], list[Any]],
    run: Callable[[list[Any]], Any],
    *,
    varies: bool = False,
    enough_s: float = ENOUGH_S,
    most_s: float = MOST_S,
) -> Cost:
    """The peak of MLX's memory and the seconds while `run` computes.

    prepare: makes the arrays that a phase begins with, which `run` takes off the list. varies:
        whether the peak depends on threads. enough_s, most_s: after so long, two runs are enough,
        or one.
    """
    most, seconds, count, began = 0, math.inf, 0, time.perf_counter()
    while count < (VARYING_REPEATS if varies else REPEATS):
        spent = time.perf_counter() - began
        if (count and spent > most_s) or (count >= REPEATS and spent > enough_s):
            break
        given = prepare()
        mx.eval(given)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        result = run(given)
        mx.eval(result)
        mx.synchronize()
        seconds = min(seconds, time.perf_counter() - started)
        most = max(most, mx.get_peak_memory() - before)
        del result, given
        count += 1
    return Cost(float(most), seconds)


def costs_of(
    subject: MeasuredBlock, workload: Workload, head: HeadCosts | None
) -> tuple[BlockCosts, BlockCosts]:
    """The bytes and the seconds of a block, of the phases that the run may have."""
    weights = subject.staged.weights
    assert isinstance(weights, MadeWeights)
    subject.fused.weights = weights
    with weights.of(subject.index):
        arrays = subject.staged.arrays_at(subject.index)
        own = trained_arrays(subject.staged.blocks[subject.index])
        mx.eval(arrays, own)
        measuring = BlockPhases(subject, arrays, own, shapes_for(workload))
        tiles = subject.guess.tiles
        is_fused, is_staged = engines_of(workload)
        if is_staged:
            measuring.forward_costs()
        if is_staged and not workload.forward:
            measuring.backward_costs()
        if is_fused and not workload.forward:
            measuring.graph_costs(head)
        if is_fused:
            measuring.evaluation_costs()
        if is_staged and largest_size(workload) > TILED_FROM:
            most_rows = 1 if workload.packed else min(2, workload.batch_size)
            for rows in range(1, most_rows + 1):
                tiles = measuring.tile_costs(rows, largest_size(workload), workload.forward)
        memory, seconds = measuring.memory, measuring.seconds
        del arrays, own, measuring
        gc.collect()
    return BlockCosts(**memory, tiles=tiles), BlockCosts(**seconds, tiles=tiles)


@dataclass
class BlockPhases:
    """The phases of one block."""

    subject: MeasuredBlock
    arrays: Arrays
    own: Arrays
    """Its trained arrays."""
    shapes: list[Shape]
    batches: dict[Shape, BatchRows] = field(default_factory=dict)
    memory: dict[str, CostCurve] = field(default_factory=dict)
    """The curves that were found, by phase: bytes."""
    seconds: dict[str, CostCurve] = field(default_factory=dict)

    def measure(
        self, phase: str, cost_at: Callable[[Shape], Cost], shapes: Sequence[Shape] = ()
    ) -> None:
        """Find the curves of a phase through those shapes that fit, if any does."""
        if found := self.points(phase, cost_at, shapes):
            self.memory[phase] = CostCurve.through({s: cost.bytes for s, cost in found.items()})
            self.seconds[phase] = CostCurve.through({s: cost.seconds for s, cost in found.items()})

    def points(
        self, phase: str, cost_at: Callable[[Shape], Cost], shapes: Sequence[Shape] = ()
    ) -> dict[Shape, Cost]:
        found: dict[Shape, Cost] = {}
        room = self.subject.room
        for shape in shapes or self.shapes:
            guess = bytes_of(self.subject.guess, phase, *shape)
            states = 3 * 4 * shape.size * self.subject.staged.features
            if room.has(guess + states, phase):
                found[shape] = cost_at(shape)
                room.learn(phase, found[shape].bytes, guess)
        return found

    def rows(self, shape: Shape) -> BatchRows:
        if shape not in self.batches:
            self.batches[shape] = self.subject.rows_of(self.subject.staged, shape)
        return self.batches[shape]

    def extras(self, shape: Shape) -> Extras:
        extras = self.rows(shape).extras_of(self.subject.index)
        mx.eval(extras)
        return extras

    def forward_costs(self) -> None:
        """Measure the forward pass of the block alone."""
        self.measure("forward", partial(self.forward, self.subject.staged))

    def evaluation_costs(self) -> None:
        """Measure the block in a fused graph without gradients."""
        self.measure("evaluated", partial(self.forward, self.subject.fused))

    def forward(self, engine: Staged, shape: Shape) -> Cost:
        program = engine.programs.of(self.subject.index, self.rows(shape).shape)
        run, extras = partial(program.forward, self.arrays, self.own), self.extras(shape)
        return cost_of(lambda: self.subject.states(shape, 0), lambda g: run(g.pop(), extras))

    def backward_costs(self) -> None:
        """Measure the backward pass of the block alone."""
        subject, arrays, own, index = self.subject, self.arrays, self.own, self.subject.index
        staged = subject.staged

        def backward(shape: Shape) -> Cost:
            program, extras = staged.programs.of(index, self.rows(shape).shape), self.extras(shape)

            def run(given: list[Any]) -> Any:
                cotangent, hidden = given.pop(), given.pop()
                return program.backward(arrays, own, hidden, extras, cotangent)

            return cost_of(lambda: subject.states(shape, 0, 1), run)

        def kept_forward(shape: Shape) -> Cost:
            program = staged.programs.keeping(index, self.rows(shape).shape, EVERYTHING)
            run, extras = partial(program.forward, arrays, own), self.extras(shape)
            return cost_of(lambda: subject.states(shape, 0), lambda g: run(g.pop(), extras))

        def kept_backward(shape: Shape) -> Cost:
            program = staged.programs.keeping(index, self.rows(shape).shape, EVERYTHING)
            extras, (hidden,) = self.extras(shape), subject.states(shape, 0)

            def prepare() -> list[Any]:
                kept = program.forward(arrays, own, hidden, extras)[1]
                return [*subject.states(shape, 0, 1), kept]

            def run(given: list[Any]) -> Any:
                kept, cotangent, hidden = given.pop(), given.pop(), given.pop()
                return program.backward(kept, arrays, own, hidden, extras, cotangent)

            return cost_of(prepare, run)

        def storing() -> Cost:
            with tempfile.TemporaryDirectory() as folder:
                disk = SpilledGradients(Path(folder))

                def add(given: list[Any]) -> None:
                    disk.add({str(i): given.pop() for i in range(len(given))})

                return cost_of(lambda: [a + 0 for a in own.values()], add)

        self.measure("backward", backward)
        self.measure("kept_forward", kept_forward)
        self.measure("kept_backward", kept_backward)
        size = 2 * sum(array.nbytes for array in own.values())
        stored = storing() if own and subject.room.has(size) else Cost(size, 0.0)
        self.memory["storing"] = CostCurve(stored.bytes)
        self.seconds["storing"] = CostCurve(stored.seconds)

    def graph_costs(self, head: HeadCosts | None) -> None:
        """Measure fused graphs: of one block, of two, and of one with the head."""
        room = self.subject.room
        found = self.points("working", partial(self.of_graph, 1))
        one = {s: cost for s, cost in found.items() if room.has(2 * cost.bytes)}
        if not one:
            return
        two = {shape: self.of_graph(2, shape) for shape in one}
        scale = max(cost.bytes for cost in two.values())
        saved = {s: max(0.0, two[s].bytes - one[s].bytes) for s in one}
        working = {s: max(0.0, 2 * one[s].bytes - two[s].bytes) for s in one}
        self.memory["saved"] = CostCurve.through(saved, scale)
        self.memory["working"] = CostCurve.through(working, scale)
        self.seconds["saved"] = CostCurve.through({s: two[s].seconds / 2 for s in two})
        if head is None:
            return
        joined = {
            s: max(0.0, self.with_head(s).bytes - saved[s] - head.at(s.size))
            for s, cost in one.items()
            if room.has(cost.bytes + head.at(s.size))
        }
        if joined:
            self.memory["joined"] = CostCurve.through(joined, scale)

    def of_graph(self, count: int, shape: Shape) -> Cost:
        """One graph of `count` such blocks, forward and backward, from a given cotangent."""
        subject, fused = self.subject, self.subject.fused
        program = fused.programs.of(subject.index, self.rows(shape).shape)
        extras, names = self.extras(shape), list(self.own)

        def loss(
            trained: list[list[mx.array]], state: mx.array, arrays: Arrays, cotangent: Any
        ) -> Any:
            for values in trained:
                state = program.run(arrays, dict(zip(names, values, strict=True)), state, extras)
            return (state * cotangent).sum()

        run = fused.graphs.compile(mx.grad(loss, argnums=(0, 1) if names else (1,)))
        trained = [[array + 0 for array in self.own.values()] for _ in range(count)]
        mx.eval(trained)
        return cost_of(
            lambda: subject.states(shape, 0, 1),
            lambda given: run(trained, given.pop(0), self.arrays, given.pop()),
            varies=True,
        )

    def with_head(self, shape: Shape) -> Cost:
        """One graph of the block and the head."""
        subject, fused = self.subject, self.subject.fused
        fused.trained = range(subject.index, subject.index + 1)
        rows, batch = self.rows(shape), batch_of(shape, subject.packed)
        function = partial(fused.trained_gradients, rows.shape)
        run = fused.graphs.compile(function, fused.state)
        targets, scale = Targets.of(batch), mx.array(1.0, mx.float32)
        rest = ([self.extras(shape)], targets, scale)
        return cost_of(
            lambda: subject.states(shape, 0),
            lambda given: run([self.own], {}, [self.arrays], given.pop(), *rest),
            varies=True,
        )

    def tile_costs(self, count: int, largest: int, forward_only: bool) -> bool:
        """Measure the block on tiles of `count` rows; return whether it runs on them.

        largest: N of the largest micro-batch of the run.
        """
        subject, staged = self.subject, self.subject.staged
        first, *longer = (Shape(count, size // count) for size in TILED_SIZES)
        shape = self.rows(first).shape
        if staged.tiled.of(subject.index, shape, self.arrays, self.own) is None:
            return False
        shapes = [first, *(shape for shape in longer if shape.size <= largest)]

        def parts(shape: Shape) -> TiledBlock:
            found = staged.tiled.of(subject.index, self.rows(shape).shape, self.arrays, self.own)
            assert found is not None
            return found

        def state_of(tile: slice) -> mx.array:
            return mx.zeros((count, tile.stop - tile.start, staged.features), staged.dtype)

        def forward(shape: Shape) -> Cost:
            block, extras = parts(shape), self.extras(shape)
            reach = self.rows(shape).shape.max_segment_tokens

            def run(given: list[Any]) -> Any:
                block.forward(self.arrays, self.own, given, extras, reach)
                return given

            return cost_of(lambda: [state_of(tile) for tile in block.tiles], run, most_s=0.0)

        def backward(shape: Shape) -> Cost:
            block, extras = parts(shape), self.extras(shape)
            reach = self.rows(shape).shape.max_segment_tokens

            def run(given: list[Any]) -> Any:
                inputs = MadeInputs(lambda place: state_of(block.tiles[place]), len(given))
                return block.backward(
                    self.arrays, self.own, inputs, extras, reach, given, False
                ), given

            return cost_of(lambda: [state_of(tile) for tile in block.tiles], run, most_s=0.0)

        self.measure(costs.on_tiles("forward", count), forward, shapes)
        if not forward_only:
            self.measure(costs.on_tiles("backward", count), backward, shapes)
        return True


@dataclass
class MadeInputs:
    """Inputs of the tiles of a block, made when they are taken, as if they were read from disk;
    implements `spill.Inputs`."""

    make: Callable[[int], mx.array]
    left: int
    """How many were not taken."""

    def append(self, array: mx.array) -> None:
        raise NotImplementedError("the inputs are made")

    def pop(self) -> mx.array:
        self.left -= 1
        return self.below_top(-1)

    def below_top(self, count: int) -> mx.array:
        array = self.make(self.left - 1 - count)
        mx.eval(array)
        return array

    def clear(self) -> None:
        self.left = 0


def head_costs(
    staged: Staged, fused: FusedAboveCache, workload: Workload, guess: Costs, room: Room
) -> dict[str, dict[int, Cost]]:
    """The costs of the head with its losses, and with gradients if the run trains, at some N."""
    most = largest_size(workload)
    found = {}
    is_fused, is_staged = engines_of(workload)
    wanted: list[tuple[str, Staged, bool]] = []
    if not workload.forward:
        wanted += [(costs.STAGED, staged, False)] * is_staged
        wanted += [(costs.FUSED, fused, False)] * is_fused
    if scores_of(workload):
        wanted += [(costs.STAGED_SCORES, staged, True)] * is_staged
        wanted += [(costs.FUSED_SCORES, fused, True)] * is_fused
    for name, engine, scores in wanted:
        measured: dict[int, Cost] = {}
        for size in HEAD_SIZES:
            size = min(size, most)
            is_cut = size > HEAD_ROWS and name == costs.STAGED and guess.is_tiled
            if size > HEAD_ROWS and not is_cut:
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
    widths = [tile.stop - tile.start for tile in tiles_of(*shape)]

    def states() -> list[Any]:
        return [mx.random.normal((1, w, features)).astype(engine.dtype) for w in widths]

    def run(given: list[Any]) -> Any:
        if scores:
            return engine.losses_and_predictions(rows.shape, given.pop(), targets)
        return engine.at_head(batch, rows, given, scale)

    return cost_of(states, run, varies=True, enough_s=MOST_S)  # it takes little


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
