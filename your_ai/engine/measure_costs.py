"""Measure what a block of each kind and the head need, by running the engine's own programs.

Nothing is read: the weights are made (`skeleton.py`). Each phase runs at a few small shapes, and
its peak of MLX's memory becomes a curve (`memory/costs.py`). Nothing is measured that may not fit.

Shapes: B rows, T tokens per row, N = B x T, D hidden size.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.config import TrainConfig
from your_ai.data.batches import Batch, make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.engine.gradients import SpilledGradients
from your_ai.engine.kept import Keeps
from your_ai.engine.programs import Extras, trained_arrays
from your_ai.engine.skeleton import MadeWeights, engine_of
from your_ai.engine.staged import BatchRows, FusedAboveCache, Staged
from your_ai.engine.tiles import TiledBlock
from your_ai.errors import suppress_model_errors
from your_ai.memory import allocator, costs, probe
from your_ai.memory.costs import BlockCosts, CostCurve, Costs, HeadCosts, Shape, bytes_of
from your_ai.memory.guess import guessed
from your_ai.memory.sizes import HEAD_ROWS, TILED_FROM, tiles_of
from your_ai.memory.workload import Workload
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import TRIED_TOKENS
from your_ai.objectives.objective import Targets

SHAPES = (Shape(1, 128), Shape(2, 128), Shape(1, 384), Shape(1, 1024))
TILED_TOKENS = (1536, 2560)  # of rows that run on tiles
HEAD_SIZES = (128, 256, 512, 1024, 2048)  # N
LONG = 2048  # tokens of a row that shows which blocks attend within a window
EVERYTHING = Keeps(True, True, True)
# Peaks depend on how far MLX's threads compute ahead, so the largest of some counts.
REPEATS, ENOUGH_S = 4, 0.4
UNSURE, SURER = 1.25, 1.1  # factors on what may be needed, before and after something was measured


@dataclass
class Room:
    """The bytes that measuring may use."""

    limit_bytes: int
    """Of the process."""
    off: float = 1.0
    """Measured bytes over those guessed, the largest so far."""
    factor: float = UNSURE

    def has(self, needed_bytes: float) -> bool:
        """Return whether this process may need so many bytes more, if that is a guess."""
        expected = needed_bytes * self.off * self.factor
        return (probe.process_bytes() or 0) + expected <= self.limit_bytes

    def learn(self, measured: float, guess: float) -> None:
        if guess > 0:
            self.off, self.factor = max(self.off, measured / guess), SURER


@dataclass(frozen=True)
class Subject:
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


def measure_costs(
    network: nn.Module,
    config: TrainConfig,
    workload: Workload,
    limit_bytes: int,
    tell: Callable[[str], object] = lambda _: None,
) -> Costs | None:
    """What the work of a run needs on this machine; None if the model cannot be taken apart.

    network: with lazy weights and without adapters; it is not changed.
    config: has the adapters, but for the rank, which `workload` has.
    limit_bytes: of this process, also while it measures. tell: receives what is measured.
    """
    training, score_head = workload.training, workload.score_head
    guess = guessed(workload.facts, training, score_head)
    config = replace(config, lora_rank=training.rank, lora_layers="all")
    room = Room(limit_bytes)
    with suppress_model_errors(), no_cache():
        staged = engine_of(network, config, Staged, score_head=score_head)
        fused = engine_of(network, config, FusedAboveCache, score_head=score_head)
        if staged is None or fused is None:
            return None
        heads = {}
        if not score_head:
            heads = head_costs(staged, fused, workload, guess, room)
        kinds: dict[tuple[Hashable, Hashable], int] = {}
        calls = staged.parts.calls(LONG)
        names = list(zip(staged.programs.kinds, (call.key for call in calls), strict=True))
        order = tuple(kinds.setdefault(name, len(kinds)) for name in names)
        found = []
        for place, name in enumerate(kinds):
            tell(f"measuring a block, kind {place + 1} of {len(kinds)}")
            index = names.index(name)
            own = guess.kinds[guess.order[index]]
            subject = Subject(staged, fused, index, own, room, workload.packed)
            found.append(costs_of(subject, workload, heads.get(costs.FUSED)))
        return Costs(tuple(found), order, heads, is_measured=True).completed(guess)
    return None


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


def shapes_for(workload: Workload) -> list[Shape]:
    """The shapes at which blocks are measured: none is larger than a micro-batch of the run."""
    longest = max(workload.lengths)
    most_rows = max(1, workload.batch_size)
    wanted = [Shape(min(s.rows, most_rows), min(s.tokens, longest)) for s in SHAPES]
    return list(dict.fromkeys(wanted))


def largest_of(workload: Workload) -> int:
    """N of the largest micro-batch of the run."""
    return max(1, workload.batch_size) * max(workload.lengths)


def peak_of(prepare: Callable[[], list[Any]], run: Callable[[list[Any]], Any]) -> float:
    """The peak of MLX's memory while `run` computes, beyond what was there before, in bytes.

    prepare: makes the arrays that a phase begins with, which `run` takes off the list.
    """
    most, began, count = 0, time.perf_counter(), 0
    while count == 0 or (count < REPEATS and time.perf_counter() - began < ENOUGH_S):
        given = prepare()
        mx.eval(given)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        result = run(given)
        mx.eval(result)
        mx.synchronize()
        most = max(most, mx.get_peak_memory() - before)
        del result, given
        count += 1
    return float(most)


def costs_of(subject: Subject, workload: Workload, head: HeadCosts | None) -> BlockCosts:
    """The costs of a block, of the phases that the run may have."""
    weights = subject.staged.weights
    assert isinstance(weights, MadeWeights)
    subject.fused.weights = weights
    with weights.of(subject.index):
        arrays = subject.staged.arrays_at(subject.index)
        own = trained_arrays(subject.staged.blocks[subject.index])
        mx.eval(arrays, own)
        measuring = Measuring(subject, arrays, own, shapes_for(workload))
        found = measuring.forward_costs()
        if not workload.forward:
            found |= measuring.backward_costs()
            found |= measuring.graph_costs(head)
        tiles = subject.guess.tiles
        if largest_of(workload) > TILED_FROM:
            of_tiles, tiles = measuring.tile_costs(max(workload.lengths), workload.forward)
            found |= of_tiles
        del arrays, own, measuring
        gc.collect()
    return BlockCosts(**found, tiles=tiles)


@dataclass
class Measuring:
    """The phases of one block."""

    subject: Subject
    arrays: Arrays
    own: Arrays
    """Its trained arrays."""
    shapes: list[Shape]
    batches: dict[Shape, BatchRows] = field(default_factory=dict)

    def curve(
        self, phase: str, cost_at: Callable[[Shape], float], shapes: Sequence[Shape] = ()
    ) -> dict[str, CostCurve]:
        """The curve of a phase through those shapes that fit; empty if none does."""
        found = self.points(phase, cost_at, shapes)
        return {phase: CostCurve.through(found)} if found else {}

    def points(
        self, phase: str, cost_at: Callable[[Shape], float], shapes: Sequence[Shape] = ()
    ) -> dict[Shape, float]:
        found: dict[Shape, float] = {}
        room = self.subject.room
        for shape in shapes or self.shapes:
            guess = bytes_of(self.subject.guess, phase, *shape)
            states = 3 * 4 * shape.size * self.subject.staged.features
            if room.has(guess + states):
                found[shape] = cost_at(shape)
                room.learn(found[shape], guess)
        return found

    def rows(self, shape: Shape) -> BatchRows:
        if shape not in self.batches:
            self.batches[shape] = self.subject.rows_of(self.subject.staged, shape)
        return self.batches[shape]

    def extras(self, shape: Shape) -> Extras:
        extras = self.rows(shape).extras_of(self.subject.index)
        mx.eval(extras)
        return extras

    def forward_costs(self) -> dict[str, CostCurve]:
        subject, arrays, own = self.subject, self.arrays, self.own

        def forward(engine: Staged, shape: Shape) -> float:
            program = engine.programs.of(subject.index, self.rows(shape).shape)
            extras = self.extras(shape)
            run = partial(program.forward, arrays, own)
            return peak_of(lambda: subject.states(shape, 0), lambda g: run(g.pop(), extras))

        found = self.curve("forward", partial(forward, subject.staged))
        return found | self.curve("evaluated", partial(forward, subject.fused))

    def backward_costs(self) -> dict[str, CostCurve]:
        subject, arrays, own, index = self.subject, self.arrays, self.own, self.subject.index
        staged = subject.staged

        def backward(shape: Shape) -> float:
            program, extras = staged.programs.of(index, self.rows(shape).shape), self.extras(shape)

            def run(given: list[Any]) -> Any:
                cotangent, hidden = given.pop(), given.pop()
                return program.backward(arrays, own, hidden, extras, cotangent)

            return peak_of(lambda: subject.states(shape, 0, 1), run)

        def kept_forward(shape: Shape) -> float:
            program = staged.programs.keeping(index, self.rows(shape).shape, EVERYTHING)
            run, extras = partial(program.forward, arrays, own), self.extras(shape)
            return peak_of(lambda: subject.states(shape, 0), lambda g: run(g.pop(), extras))

        def kept_backward(shape: Shape) -> float:
            program = staged.programs.keeping(index, self.rows(shape).shape, EVERYTHING)
            extras, (hidden,) = self.extras(shape), subject.states(shape, 0)

            def prepare() -> list[Any]:
                kept = program.forward(arrays, own, hidden, extras)[1]
                return [*subject.states(shape, 0, 1), kept]

            def run(given: list[Any]) -> Any:
                kept, cotangent, hidden = given.pop(), given.pop(), given.pop()
                return program.backward(kept, arrays, own, hidden, extras, cotangent)

            return peak_of(prepare, run)

        def storing() -> float:
            with tempfile.TemporaryDirectory() as folder:
                disk = SpilledGradients(Path(folder))

                def add(given: list[Any]) -> None:
                    disk.add({str(i): given.pop() for i in range(len(given))})

                return peak_of(lambda: [a + 0 for a in own.values()], add)

        found = self.curve("backward", backward)
        found |= self.curve("kept_forward", kept_forward)
        found |= self.curve("kept_backward", kept_backward)
        return found | {"storing": CostCurve(storing() if own else 0.0)}

    def graph_costs(self, head: HeadCosts | None) -> dict[str, CostCurve]:
        """What blocks add to a fused graph, from graphs of one block, of two, and with the head."""
        one = self.points("working", partial(self.of_graph, 1))
        if not one:
            return {}
        two = {shape: self.of_graph(2, shape) for shape in one}
        scale = max(two.values())
        saved = {shape: max(0.0, two[shape] - one[shape]) for shape in one}
        working = {shape: max(0.0, 2 * one[shape] - two[shape]) for shape in one}
        found = {
            "saved": CostCurve.through(saved, scale),
            "working": CostCurve.through(working, scale),
        }
        if head is not None:
            joined = {
                shape: max(0.0, self.with_head(shape) - saved[shape] - head.at(shape.size))
                for shape in one
            }
            found["joined"] = CostCurve.through(joined, scale)
        return found

    def of_graph(self, count: int, shape: Shape) -> float:
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
        return peak_of(
            lambda: subject.states(shape, 0, 1),
            lambda given: run(trained, given.pop(0), self.arrays, given.pop()),
        )

    def with_head(self, shape: Shape) -> float:
        """One graph of the block and the head."""
        subject, fused = self.subject, self.subject.fused
        fused.trained = range(subject.index, subject.index + 1)
        rows, batch = self.rows(shape), batch_of(shape, subject.packed)
        function = partial(fused.trained_gradients, rows.shape)
        run = fused.graphs.compile(function, fused.state)
        targets, scale = Targets.of(batch), mx.array(1.0, mx.float32)
        rest = ([self.extras(shape)], targets, scale)
        return peak_of(
            lambda: subject.states(shape, 0),
            lambda given: run([self.own], {}, [self.arrays], given.pop(), *rest),
        )

    def tile_costs(self, longest: int, forward_only: bool) -> tuple[dict[str, CostCurve], bool]:
        """Of the block on tiles, and whether it runs on them."""
        subject, staged = self.subject, self.subject.staged
        long = [Shape(1, tokens) for tokens in TILED_TOKENS]
        rows = self.rows(long[0])
        block = staged.tiled.of(subject.index, rows.shape, self.arrays, self.own)
        if block is None:
            return {}, False
        shapes = [shape for shape in long if shape.tokens <= max(longest, long[0].tokens)]

        def parts(shape: Shape) -> TiledBlock:
            found = staged.tiled.of(subject.index, self.rows(shape).shape, self.arrays, self.own)
            assert found is not None
            return found

        def state_of(tile: slice) -> mx.array:
            return mx.zeros((1, tile.stop - tile.start, staged.features), staged.dtype)

        def forward(shape: Shape) -> float:
            block, extras = parts(shape), self.extras(shape)
            reach = self.rows(shape).shape.max_segment_tokens

            def run(given: list[Any]) -> Any:
                block.forward(self.arrays, self.own, given, extras, reach)
                return given

            return peak_of(lambda: [state_of(tile) for tile in block.tiles], run)

        def backward(shape: Shape) -> float:
            block, extras = parts(shape), self.extras(shape)
            reach = self.rows(shape).shape.max_segment_tokens

            def run(given: list[Any]) -> Any:
                inputs = MadeInputs(lambda place: state_of(block.tiles[place]), len(given))
                return block.backward(
                    self.arrays, self.own, inputs, extras, reach, given, False
                ), given

            return peak_of(lambda: [state_of(tile) for tile in block.tiles], run)

        found = self.curve("tiled_forward", forward, shapes)
        if not forward_only:
            found |= self.curve("tiled_backward", backward, shapes)
        return found, True


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
) -> dict[str, HeadCosts]:
    """Of the head with its losses, and with gradients if the run trains."""
    most = largest_of(workload)
    found = {}
    for name, engine, scores in (
        (costs.STAGED, staged, False),
        (costs.FUSED, fused, False),
        (costs.STAGED_SCORES, staged, True),
        (costs.FUSED_SCORES, fused, True),
    ):
        if workload.forward and not scores:
            continue
        measured: dict[int, float] = {}
        for size in HEAD_SIZES:
            size = min(size, most)
            is_cut = size > HEAD_ROWS and name == costs.STAGED and guess.is_tiled
            if size > HEAD_ROWS and not is_cut:
                continue
            expected = guess.heads[name].at(size)
            if size not in measured and room.has(expected):
                measured[size] = head_peak(engine, size, scores=scores)
                room.learn(measured[size], expected)
        if len(measured) == 1:  # the smallest one that there can be
            measured = {1: 0.0} | measured
        if measured:
            found[name] = HeadCosts(tuple(measured), tuple(measured.values()))
    return found


def head_peak(engine: Staged, tokens: int, *, scores: bool) -> float:
    """The peak of the head on one row; scores: without gradients."""
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

    return peak_of(states, run)


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
