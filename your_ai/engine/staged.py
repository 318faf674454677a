"""The staged engine: the same gradients as the fused engine, block by block, in less memory.

It keeps only the input of each trained block; the backward pass recomputes the block.

Shapes: B rows, T tokens per row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from your_ai.data.batches import Batch
from your_ai.engine import tiled_head
from your_ai.engine.compiled import Graphs, GraphShape, shape_of
from your_ai.engine.fused import row_keys
from your_ai.engine.kept import Keeps
from your_ai.engine.prefix import Span, Store, assemble, missing, padded, spans_of
from your_ai.engine.programs import (
    Extras,
    KeepingProgram,
    Program,
    Programs,
    first_trained,
    frozen_arrays,
    trained_arrays,
)
from your_ai.engine.protocol import Engine
from your_ai.engine.spill import Inputs, Stack
from your_ai.engine.tiled_head import TargetPart, in_order, target_parts
from your_ai.engine.tiles import TiledBlock, TiledBlocks, cut, joined
from your_ai.engine.weights import FileTensor, Streamed, reads_file, streams_vocabulary
from your_ai.memory.sizes import tiles_of
from your_ai.memory.workload import NOTHING, Kept, KeptAt
from your_ai.nets.adapter_kinds import normed_layers, norms_of
from your_ai.nets.head import (
    Head,
    LinearHead,
    ScoreHead,
    put_in,
    teacher_state,
    trained_in,
)
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import DropoutKeys, KeyedDropout, TokenKeys
from your_ai.nets.neftune import Neftune, noise_added
from your_ai.nets.parts import Parts, structure
from your_ai.nets.vocabulary import vocabulary_trained
from your_ai.objectives.objective import Objective, Scores, Sums, Targets

FEWEST_BYTES = 16 << 20  # minimum bytes of hidden states per read of the frozen blocks
R = TypeVar("R")


class Weights(Protocol):
    """The source of the frozen arrays of the blocks.

    streamed: whether they are read from files.
    """

    @property
    def streamed(self) -> bool: ...

    def read(self, index: int) -> Arrays: ...

    def ahead(self, indices: Iterable[int]) -> None:
        """Start to load the blocks that are needed next, in this order."""

    def again(self, index: int, arrays: Arrays) -> None:
        """Keep the arrays of block `index`, which `read` returned: it is the next to be read."""


class BatchRows(NamedTuple):
    """Rows that go through the blocks together, with the other inputs of the blocks."""

    tokens: np.ndarray
    """(B, T) int32"""
    shape: GraphShape
    """The key of their compiled graphs."""
    extras: Extras
    noise: Extras
    """The keys and lengths of NEFTune's noise; empty without it, and outside training."""
    context: list[Extras]
    """For each block, its arrays that depend on the tokens."""

    def extras_of(self, index: int) -> Extras:
        return self.extras | self.context[index]


@dataclass
class Resident:
    """Weights that stay in memory."""

    blocks: list[nn.Module]
    streamed: bool = False

    def read(self, index: int) -> Arrays:
        return frozen_arrays(self.blocks[index])

    def ahead(self, indices: Iterable[int]) -> None:
        pass

    def again(self, index: int, arrays: Arrays) -> None:
        pass


class Staged:
    """Run one block at a time, so that only the working set of one block is in memory.

    store: a cache of the hidden states below the first trained block, so that the frozen blocks
        run only once per text.
    inputs: the stack of the inputs of the trained blocks, where blocks keep nothing else; where
        they do, it is in memory.
    graphs: the cache of compiled graphs.
    lean: save memory at the cost of time.
    neftune: noise on the embeddings in training; not with a store.
    kept: what blocks keep for the backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        dropout_keys: DropoutKeys,
        objective: Objective,
        head: Head,
        weights: Weights | None = None,
        store: Store | None = None,
        inputs: Inputs | None = None,
        graphs: Graphs | None = None,
        *,
        lean: bool = True,
        neftune: Neftune | None = None,
        kept: Kept = NOTHING,
    ) -> None:
        self.embeddings = [layer for layer in vocabulary_trained(model) if layer.is_embedding]
        if store is not None and (neftune is not None or self.embeddings):
            raise ValueError("cached hidden states would be those of one step in every step")
        self.objective, self.parts, self.neftune = objective, parts, neftune
        self.blocks, self.store = parts.blocks, store
        self.weights = weights or Resident(self.blocks)
        self.inputs = Stack() if inputs is None else inputs
        self.graphs = Graphs() if graphs is None else graphs
        self.programs = Programs(parts, dropout_keys, lean, self.graphs)
        self.tiled = TiledBlocks(parts, dropout_keys, self.graphs, self.programs.kinds)
        names = {id(module): name for name, module in model.named_modules()}
        self.names = [names[id(block)] for block in model.layers]
        self.normed = [normed_layers(block) for block in self.blocks]
        self.focus()
        self.keep(lambda rows, tokens: kept)
        self.reads_files = streams_vocabulary(model) or reads_file(head)
        self.has_dropout = any(isinstance(module, KeyedDropout) for module in model.modules())
        self.dtype = parts.embed(mx.zeros((1, 1), mx.int32)).dtype
        self.head = finished(parts, head)
        self.state: list[Any] = [parts.outside, *teacher_state(head)]
        if isinstance(head, ScoreHead):
            self.state.append(head.layer.state)
        self._embed = self._compiled(self._embedded)
        self._embed_gradient = self._compiled(self._gradients_of_embeddings)
        self._context = self._compiled(self._context_of)
        self._head_gradient = self._compiled(self._loss_and_gradient)
        self._head_loss = self._compiled(self._loss)
        self._head_scores = self._compiled(self._log_probabilities)
        self._most_likely = self._compiled(self._predictions)
        self.losses_and_predictions = self._compiled(self._score)

    def engine(self) -> Engine:
        ahead = self.weights.streamed and self.store is not None and self.first > 0
        fill = self.fill if ahead else None
        engine = Engine(
            self.objective, self.gradients, self.loss, self.log_probabilities, self.predictions,
            self.score, self.graphs.drop, fill, self.keep, refocus=self.refocus,
            by_block=self.gradients_by_block,
            head_inputs=self.head_inputs if isinstance(self.head, LinearHead) else None,
        )  # fmt: skip
        if not isinstance(self.weights, Streamed):
            return engine
        read = self.weights
        return replace(
            engine, hold=read.hold, forget=read.forget, waited=read.clock.take, moved=self.moved
        )

    def focus(self) -> None:
        """Note which blocks gradients pass through: those from the first that is trained, or all if
        the embedding is."""
        self.first = 0 if self.embeddings else first_trained(self.blocks)
        self.frozen = range(self.first)
        self.trained: Sequence[int] = range(self.first, len(self.blocks))
        self.features = self.parts.features(self.first)

    def refocus(self) -> None:
        """The same after other blocks can be trained. Their programs are other ones, too."""
        self.focus()
        self.graphs.drop()
        kinds = [structure(block) for block in self.blocks]
        self.programs.kinds[:] = kinds  # which the tiled blocks share

    def keep(self, kept_at: KeptAt) -> None:
        """Set what blocks keep, by the shape of a micro-batch."""
        self.kept_at = kept_at

    def gradients(self, batch: Batch, scale: float, step_seed: int) -> tuple[Sums, Any]:
        found: Arrays = {}

        def add(grads: Arrays) -> None:
            found.update(summed(grads, found))

        sums = self.gradients_by_block(batch, scale, step_seed, add)
        return sums, tree_unflatten(list(found.items()))

    def gradients_by_block(
        self, batch: Batch, scale: float, step_seed: int, add: Callable[[Arrays], None]
    ) -> Sums:
        """Call `add` with the gradients of the head, of each block, the last first, and then of the
        embedding, which has the name of the head's if they are tied."""
        rows = self.rows_of(batch, step_seed)
        hidden = self._below(batch, rows)
        kept = self.kept_at(rows.shape.rows, rows.shape.tokens)
        inputs = Stack() if kept else self.inputs
        inputs.clear()
        keeps = [Keeps.of(kept, place) for place in reversed(range(len(self.blocks)))]
        results: list[list[mx.array]] = []
        self._run([hidden], [rows], self.trained, inputs, results, keeps)
        factor = mx.array(scale, mx.float32)
        sums, cotangents, of_head = self.at_head(batch, rows, hidden, factor)
        mx.eval(sums, cotangents, of_head)
        if of_head:
            add(of_head)
        of_head = {}
        for index in reversed(self.trained):
            arrays, trained = self.arrays_at(index)
            self.weights.ahead(reversed(range(self.first, index)))
            lowest = index == self.first and not self.embeddings
            given: tuple[Any, ...]
            tiled = self._tiled(index, rows, arrays, trained, keeps[index])
            if tiled is not None:
                cotangents = cut(cotangents, tiled.tiles)
                where = (rows.extras_of(index), rows.shape.max_segment_tokens)
                given = (arrays, trained, inputs, *where)
                grads = tiled.backward(*given, cotangents, lowest)
            else:
                extras, cotangent = rows.extras_of(index), joined(cotangents)
                given = (arrays, trained, inputs.pop(), extras, cotangent)
                program: Program | KeepingProgram = self.programs.of(index, rows.shape)
                if keeps[index]:
                    program = self.programs.keeping(index, rows.shape, keeps[index])
                    given = (results.pop(), *given)
                if lowest:
                    grads = program.lowest(*given)
                else:
                    grads, cotangent = program.backward(*given)
                cotangents = [cotangent]
                del cotangent
            del arrays, trained, given
            mx.eval(grads, cotangents)
            grads = self._named(index, grads)
            add(grads)
            del grads
        if self.embeddings:
            given = (mx.array(rows.tokens), rows.noise, joined(cotangents))
            del cotangents
            add(self._embed_gradient(rows.shape, *given))
            del given
        return Sums(*sums)

    def loss(self, batch: Batch) -> Sums:
        rows = self.rows_of(batch)
        hidden, targets = self._forward(batch, rows), Targets.of(batch)
        if not self._is_cut(hidden):
            return Sums(*self._head_loss(rows.shape, joined(hidden), targets))
        if targets.teacher is not None:  # compared token by token, so that sums of parts add up
            parts = self._target_parts(batch, targets)
            of_parts = self._of_parts(self._head_loss, parts, rows, hidden)
            return Sums.over([Sums(*sums) for sums in of_parts])
        (scores,) = self._by_tile(self._head_scores, batch, rows, hidden)
        return self.objective.weigh(Scores(scores), targets).sums

    def log_probabilities(self, batch: Batch) -> mx.array:
        return self._above(self._head_scores, batch)[0]

    def predictions(self, batch: Batch) -> mx.array:
        return self._above(self._most_likely, batch)[0]

    def score(self, batch: Batch) -> tuple[mx.array, ...]:
        return self._above(self.losses_and_predictions, batch)

    def _above(self, function: Callable[..., Any], batch: Batch) -> tuple[mx.array, ...]:
        """The results of `function` for each target from the last hidden states, (S,) each."""
        rows = self.rows_of(batch)
        hidden = self._forward(batch, rows)
        if self._is_cut(hidden):
            return self._by_tile(function, batch, rows, hidden)
        return as_tuple(function(rows.shape, joined(hidden), Targets.of(batch)))

    def _is_cut(self, hidden: list[mx.array]) -> bool:
        """Return whether the head runs tile by tile. A ScoreHead needs few hidden states."""
        return len(hidden) > 1 and not isinstance(self.head, ScoreHead)

    def _by_tile(
        self, function: Callable[..., Any], batch: Batch, rows: BatchRows, hidden: list[mx.array]
    ) -> tuple[mx.array, ...]:
        parts = self._target_parts(batch, Targets.of(batch))
        found = map(as_tuple, self._of_parts(function, parts, rows, hidden))
        return tuple(in_order(parts, list(each)) for each in zip(*found, strict=True))

    def _of_parts(
        self,
        function: Callable[..., Any],
        parts: list[TargetPart],
        rows: BatchRows,
        hidden: list[mx.array],
    ) -> list[Any]:
        """The results of `function` for each part with targets, computed one after the other."""
        found: list[Any] = []
        for part in parts:
            if part.targets is not None:
                found.append(function(rows.shape, joined(hidden[part.tiles]), part.targets))
                mx.eval(found[-1])
        return found

    def _target_parts(self, batch: Batch, targets: Targets) -> list[TargetPart]:
        shape = batch.tokens.shape
        return target_parts(targets, batch.positions, shape, tiles_of(*shape))

    def at_head(
        self, batch: Batch, rows: BatchRows, hidden: list[mx.array], scale: mx.array
    ) -> tuple[Sums, list[mx.array], Arrays]:
        """The sums, the cotangents of `hidden`, which is emptied, and the gradients of the head."""
        targets = Targets.of(batch)
        if not self._is_cut(hidden):
            given = (joined(hidden), targets, scale)
            sums, cotangent, of_head = self._head_gradient(rows.shape, *given)
            return sums, [cotangent], of_head
        known = None
        if not self.objective.token_local and "given" not in targets.columns:
            # A weight may depend on all targets, so all are scored first.
            (scores,) = self._by_tile(self._head_scores, batch, rows, hidden)
            known = self.objective.weigh(Scores(scores), targets)
            targets = targets._replace(columns={**targets.columns, "given": known.weights})
            mx.eval(known.sums, known.weights)
        every: list[Sums] = []
        of_head = {}
        for part in self._target_parts(batch, targets):
            tiles = hidden[part.tiles]
            if part.targets is None:
                hidden[part.tiles] = map(mx.zeros_like, tiles)
                continue
            widths = [tile.shape[1] for tile in tiles]
            given = (joined(tiles), part.targets, scale)
            sums, cotangent, of_part = self._head_gradient(rows.shape, *given)
            of_head = summed(of_part, of_head)
            ends = np.cumsum(widths)
            parts = [
                slice(end - width, end) for end, width in zip(ends.tolist(), widths, strict=True)
            ]
            hidden[part.tiles] = cut([cotangent], parts)
            del cotangent, of_part
            every.append(Sums(*sums))
            mx.eval(sums, of_head)
        return Sums.over(every) if known is None else known.sums, hidden, of_head

    def _embedded(self, tokens: mx.array, noise: Extras) -> mx.array:
        """(B, T) -> (B, T, D) input of the first block."""
        keys = TokenKeys(noise["keys"], noise["places"]) if noise else None
        with noise_added(self.neftune, keys, noise.get("lengths")):
            return self.parts.embed(tokens)

    def _gradients_of_embeddings(
        self, tokens: mx.array, noise: Extras, cotangent: mx.array
    ) -> Arrays:
        """The gradients of what is trained of the embedding, by name in the model.

        cotangent: (B, T, D) of the input of the first block.
        """
        (layer,) = self.embeddings
        before = layer.trained

        def of(*arrays: mx.array) -> mx.array:
            layer.put(arrays)
            return self._embedded(tokens, noise)

        try:
            _, grads = mx.vjp(of, list(before.values()), [cotangent])
        finally:
            layer.put([*before.values()])
        return dict(zip(before, grads, strict=True))

    def _context_of(self, tokens: mx.array, noise: Extras) -> list[Extras]:
        keys = TokenKeys(noise["keys"], noise["places"]) if noise else None
        with noise_added(self.neftune, keys, noise.get("lengths")):
            return self.parts.context(tokens)

    def _loss_and_gradient(
        self, hidden: mx.array, targets: Targets, scale: mx.array
    ) -> tuple[Sums, mx.array, Arrays]:
        targets = Targets(*targets)  # which compiling makes a plain tuple
        return tiled_head.loss_and_gradient(hidden, targets, self.objective, scale, self.head)

    def _loss(self, hidden: mx.array, targets: Targets) -> Sums:
        return tiled_head.loss(hidden, Targets(*targets), self.objective, self.head)

    def _log_probabilities(self, hidden: mx.array, targets: Targets) -> mx.array:
        return tiled_head.log_probabilities(hidden, Targets(*targets), self.head)

    def _predictions(self, hidden: mx.array, targets: Targets) -> mx.array:
        return tiled_head.predictions(hidden, Targets(*targets), self.head)

    def _score(self, hidden: mx.array, targets: Targets) -> tuple[mx.array, ...]:
        return tiled_head.score(hidden, Targets(*targets), self.objective, self.head)

    def fill(self, batches: Iterable[Batch]) -> None:
        """Store the input of the first trained block for each text, group by group.

        The weights of the frozen blocks are read once per group. The hidden states of a group
        take about as much memory as the weights of a block.
        """
        assert self.store is not None
        block = sum(array.nbytes for array in self.weights.read(0).values())
        tokens = max(block, FEWEST_BYTES) // (self.features * self.dtype.size)
        texts = missing(self.store, (span.tokens for b in batches for span in texts_of(b)))
        for group in groups(texts, tokens):
            for text, hidden in zip(group, self._of_texts(group), strict=True):
                self.store.put(text, hidden)

    def _forward(self, batch: Batch, rows: BatchRows) -> list[mx.array]:
        """(B, T, D) after the last block, in tiles."""
        hidden = self._below(batch, rows)
        self._run([hidden], [rows], self.trained)
        return hidden

    def _below(self, batch: Batch, rows: BatchRows) -> list[mx.array]:
        """(B, T, D) input of the first trained block, taken from the store if it is there; in
        tiles."""
        if self.store is None:
            return self._from_tokens([rows], self.frozen)[0]
        shape = (*batch.tokens.shape, self.features)
        hidden = assemble(self._of_text, texts_of(batch), shape, self.dtype)
        mx.eval(hidden)
        return [hidden]

    def _of_text(self, tokens: np.ndarray) -> mx.array:
        """(n, D) input of the first trained block for a text of n tokens."""
        assert self.store is not None
        held = self.store.get(tokens)
        if held is None:
            (held,) = self._of_texts([tokens])
            self.store.put(tokens, held)
        return held

    def _of_texts(self, texts: list[np.ndarray]) -> list[mx.array]:
        """Same as `_of_text` for several texts. Each text is computed in a separate row.

        If the numbers depended on the batch, they would change when a resumed run fills its
        cache again.
        """
        every = [self._in_context(r, GraphShape(*r.shape), {}, {}) for r in map(padded, texts)]
        found = self._from_tokens(every, self.frozen)
        return [joined(hidden)[0, : len(text)] for text, hidden in zip(texts, found, strict=True)]

    def head_inputs(self, texts: Sequence[np.ndarray]) -> Iterator[mx.array]:
        """(n, D) inputs of the head's linear layer for each text of n tokens, each computed in a
        separate row, as by `_of_texts`."""
        assert isinstance(self.head, LinearHead)
        every = [self._in_context(r, GraphShape(*r.shape), {}, {}) for r in map(padded, texts)]
        found = self._from_tokens(every, range(len(self.blocks)))[::-1]
        for text in texts:
            yield self.head.inputs(joined(found.pop())[0, : len(text)])

    def _from_tokens(self, every: list[BatchRows], which: Sequence[int]) -> list[list[mx.array]]:
        """The output of the blocks `which`, the first ones, for each of `every`, in tiles."""
        hidden = [[self._embed(rows.shape, mx.array(rows.tokens), rows.noise)] for rows in every]
        mx.eval(hidden)
        self._run(hidden, every, which)
        return hidden

    def _run(
        self,
        hidden: list[list[mx.array]],
        every: list[BatchRows],
        which: Sequence[int],
        saved: Inputs | None = None,
        kept: list[list[mx.array]] | None = None,
        keeps: Sequence[Keeps] = (),
    ) -> None:
        """Run the blocks `which` and replace each of `hidden`, (B, T, D) in tiles, in place, with
        the result.

        The weights of a block are read once for all batches. The inputs of the blocks are
        appended to `saved`, and what blocks keep to `kept`, as `keeps` says of each.
        """
        self.weights.ahead(which)
        for index in which:
            arrays, trained = self.arrays_at(index)
            self.weights.ahead(range(index + 1, which[-1] + 1))
            for tiles, rows in zip(hidden, every, strict=True):
                extras = rows.extras_of(index)
                keep = keeps[index] if kept is not None else Keeps()
                tiled = self._tiled(index, rows, arrays, trained, keep)
                tiles[:] = [joined(tiles)] if tiled is None else cut(tiles, tiled.tiles)
                if saved is not None:
                    for tile in tiles:
                        saved.append(tile)
                if tiled is not None:
                    reach = rows.shape.max_segment_tokens
                    tiled.forward(arrays, trained, tiles, extras, reach)
                    continue
                given = (arrays, trained, tiles.pop(), extras)
                if keep and kept is not None:
                    result, found = self.programs.keeping(index, rows.shape, keep).forward(*given)
                    kept.append(found)
                    mx.eval(found)
                    del found
                else:
                    result = self.programs.of(index, rows.shape).forward(*given)
                tiles.append(result)
                del given
                mx.eval(result)
                del result
            if saved is not None and index == which[-1]:
                self.weights.again(index, arrays | trained)  # the backward pass begins with it
            del arrays, trained

    def _tiled(
        self, index: int, rows: BatchRows, arrays: Arrays, trained: Arrays, keeps: Keeps
    ) -> TiledBlock | None:
        """Block `index` as it runs on tiles, where it keeps nothing; None if it runs on whole rows,
        as one does that keeps the outputs of its linear layers."""
        if keeps.linear:
            return None
        return self.tiled.of(index, rows.shape, arrays, trained)

    def arrays_at(self, index: int) -> tuple[Arrays, Arrays]:
        """The frozen weights of block `index` with the norms of its adapted layers, and its trained
        arrays: those of the model, unless they are read like frozen ones."""
        arrays, trained = dict(self.weights.read(index)), trained_arrays(self.blocks[index])
        trained = {name: arrays.pop(name, array) for name, array in trained.items()}
        return arrays | norms_of(self.normed[index], arrays), trained

    def moved(self, tensors: Mapping[str, FileTensor]) -> None:
        """Read trained arrays, by their names in the model, from other files from now on."""
        if isinstance(self.weights, Streamed):
            for index, name in enumerate(self.names):
                own = {n: t for n, t in tensors.items() if n.startswith(f"{name}.")}
                self.weights.move(index, {n.removeprefix(f"{name}."): t for n, t in own.items()})

    def rows_of(self, batch: Batch, step_seed: int | None = None) -> BatchRows:
        """The rows of a batch; step_seed: the seed of dropout and noise, None outside training."""
        found: Extras = {}
        keys: Extras = {}
        noise: Extras = {}
        if batch.segments is not None:
            found["segments"] = mx.array(batch.segments)
        if step_seed is not None:
            keys["keys"] = mx.array(row_keys(step_seed, batch.rows))
            keys["places"] = mx.array(batch.places)
            if self.has_dropout:
                found |= keys
            if self.neftune is not None:
                noise = {**keys, "lengths": mx.array(batch.text_lengths)}
        shape = shape_of(batch, trained=True)._replace(targets=0)  # blocks see no targets
        return self._in_context(batch.tokens, shape, found, noise)

    def _in_context(
        self, tokens: np.ndarray, shape: GraphShape, extras: Extras, noise: Extras
    ) -> BatchRows:
        if not self.parts.has_context:
            return BatchRows(tokens, shape, extras, noise, [{} for _ in self.blocks])
        context = self._context(shape, mx.array(tokens), noise)
        return BatchRows(tokens, shape, extras, noise, context)

    def _named(self, index: int, grads: Arrays) -> Arrays:
        """The gradients of block `index` by the names that the parameters have in the model."""
        return {f"{self.names[index]}.{path}": grad for path, grad in grads.items()}

    def _compiled(self, function: Callable[..., R]) -> Callable[..., R]:
        """Make f(shape, *args), which runs `function` compiled for rows of that shape.

        A function that reads a file must run every time, so it is not compiled.
        """

        def run(shape: GraphShape, *args: Any) -> R:
            if self.reads_files:
                return function(*args)
            make = partial(self.graphs.compile, function, self.state)
            return self.graphs.get(shape, function, make)(*args)

        return run


class FusedAboveCache(Staged):
    """One compiled graph of the trained blocks and the head, above a prefix cache.

    No block is computed twice. For runs with enough memory.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, lean=False, **kwargs)

    def engine(self) -> Engine:
        return replace(super().engine(), by_block=None)

    def gradients(self, batch: Batch, scale: float, step_seed: int) -> tuple[Sums, Any]:
        rows = self.rows_of(batch, step_seed)
        hidden = joined(self._below(batch, rows))
        trained = [trained_arrays(self.blocks[index]) for index in self.trained]
        frozen = [self.arrays_at(index)[0] for index in self.trained]
        factor = mx.array(scale, mx.float32)
        function = partial(self.trained_gradients, rows.shape)
        run = self.graphs.get(
            rows.shape, "joined", lambda: self.graphs.compile(function, self.state)
        )
        before = trained_in(self.head)
        targets = Targets.of(batch)
        extras = [rows.extras_of(index) for index in self.trained]
        sums, (grads, of_head) = run(trained, before, frozen, hidden, extras, targets, factor)
        put_in(self.head, before)  # tracing replaced it with a placeholder
        found: Arrays = {}
        for index, of_block in zip(self.trained, grads, strict=True):
            found |= self._named(index, of_block)
        found |= of_head
        return Sums(*sums), tree_unflatten(list(found.items()))

    def trained_gradients(
        self, shape: GraphShape, trained: list[Arrays], of_head: Arrays, frozen: list[Arrays],
        hidden: mx.array, extras: list[Extras], targets: Targets, scale: mx.array,
    ) -> tuple[Sums, tuple[list[Arrays], Arrays]]:  # fmt: skip
        """The sums of the objective, and the gradients of the trained blocks, from their input,
        and of the head.
        """
        targets = Targets(*targets)

        def scaled(trained: list[Arrays], of_head: Arrays) -> Sums:
            h = hidden
            put_in(self.head, of_head)
            blocks = zip(self.trained, frozen, trained, extras, strict=True)
            for index, block_frozen, block_trained, given in blocks:
                h = self.programs.of(index, shape).run(block_frozen, block_trained, h, given)
            return tiled_head.trainable_loss(h, targets, self.objective, scale, self.head)

        return mx.value_and_grad(scaled, argnums=(0, 1))(trained, of_head)


def finished(parts: Parts, head: Head) -> Head:
    """Convert `head`, which takes finished hidden states, to take the output of the last block."""
    if not isinstance(head, LinearHead | ScoreHead):
        return lambda hidden: head(parts.finish(hidden))
    return replace(head, before=lambda rows: head.inputs(parts.finish(rows[None])[0]))


def summed(first: Arrays, second: Arrays) -> Arrays:
    """The arrays of `first`, by name, with those of `second` added where it has them."""
    return {n: array + second[n] if n in second else array for n, array in first.items()}


def as_tuple(found: Any) -> tuple[mx.array, ...]:
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def texts_of(batch: Batch) -> list[Span]:
    return spans_of(batch.tokens, batch.rows, batch.lengths)


def groups(texts: Iterable[np.ndarray], tokens: int) -> Iterator[list[np.ndarray]]:
    """Split texts into groups of at least `tokens` tokens with padding; the last may be smaller."""
    group: list[np.ndarray] = []
    for text in texts:
        group.append(text)
        if sum(padded(t).size for t in group) >= tokens:
            yield group
            group = []
    if group:
        yield group
