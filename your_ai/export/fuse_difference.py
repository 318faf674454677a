"""Measure how close a fused model is to its base with the adapter, on rows of the run.

Shapes: B rows, T tokens per row, S supervised positions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.losses import cross_entropy
from mlx_lm.models.cache import make_prompt_cache

from your_ai.data.batches import Batch, bucket_edges, micro_batches
from your_ai.data.encode import Encoder
from your_ai.data.examples import Examples, load_examples
from your_ai.data.sources import find_splits
from your_ai.engine.weights import open_model, prepare_for_generation, start_vocabulary
from your_ai.errors import UserError
from your_ai.export.fused_weights import base_of
from your_ai.gates.token_ids import vocabulary_of
from your_ai.hub.find import store, tokenizer_fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import limit_of, python_bytes, row_limit
from your_ai.memory.estimate import weights_bytes
from your_ai.memory.estimate_generation import generation_bytes
from your_ai.memory.facts import ModelFacts, facts_of
from your_ai.memory.limit import MemoryLimit, rounded_up
from your_ai.memory.sample import in_gb
from your_ai.memory.sizes import PREFILL_TOKENS
from your_ai.nets.model import check_positions
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.saved_adapter import (
    Adapter,
    Trained,
    put_adapter,
    put_trained_rows,
    read_first,
)
from your_ai.nets.split import Split, split

SPLITS = ("valid", "test", "train")  # the first existing one is used
ROWS, TOKENS = 64, 4096  # maximum to measure on
ROWS_AT_ONCE = 16  # maximum rows that go through the blocks together
POSITIONS_AT_ONCE, FEWEST_POSITIONS = 512, 16  # limits of positions that share one head call
LOGITS_HELD = 10  # arrays of logits in memory at the same time, of all three models
LOSSES = ("base_loss", "adapted_loss", "fused_loss")
LEAST_KEPT = 0.5  # if less of the adapter's effect survives, it counts as erased


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences of the logits of three models at the supervised positions of the same rows."""

    file: str
    """Where the rows are from."""
    rows: int
    positions: int
    mean: float
    """Mean absolute change from base + adapter to the fused model."""
    largest: float
    """Largest absolute change from base + adapter to the fused model."""
    effect: float
    """Mean absolute change from the base to base + adapter."""
    kept: float
    """Share of the adapter's change that the fused model shows; 1 is all of it."""
    agreement: float
    """Share of positions where fused model and base + adapter have the same most likely token."""
    base_loss: float
    """Mean cross-entropy of the base."""
    adapted_loss: float
    """Mean cross-entropy of base + adapter."""
    fused_loss: float
    """Mean cross-entropy of the fused model."""

    @property
    def erased(self) -> bool:
        """True if fusing changed the model as much as training did, or undid most of training."""
        return self.effect > 0 and (self.mean >= self.effect or self.kept < LEAST_KEPT)


@dataclass(frozen=True)
class DifferenceRoom:
    """The portions in which the models are run, to stay below the memory limit."""

    streams: bool
    """Whether the models are read from disk block by block."""
    rows: int
    """Rows that go through the blocks together."""
    positions: int
    """Positions that go through the heads together."""


@dataclass(frozen=True)
class Places:
    """The supervised positions of a batch, in the order in which the model reaches them."""

    rows: np.ndarray
    """(S,): the row of the input token that predicts the target."""
    columns: np.ndarray
    """(S,): the column of the input token that predicts the target."""
    targets: np.ndarray
    """(S,)"""
    weights: np.ndarray
    """(S,)"""


@dataclass
class DifferenceSums:
    numbers: int = 0
    """Count of single logits."""
    positions: int = 0
    agreed: int = 0
    error: float = 0.0
    largest: float = 0.0
    effect: float = 0.0
    effect_squared: float = 0.0
    shown: float = 0.0
    weight: float = 0.0
    losses: np.ndarray = field(default_factory=lambda: np.zeros(3))
    """Of base, base + adapter and fused model."""


def difference(trained: Trained, fused: Path, max_memory_gb: float | None = None) -> Difference:
    """Compare the model in the folder `fused` with the run.

    max_memory_gb: limit of the process; if the models are larger, they are read from disk block
    by block. Raises UserError if that does not fit either, or if the run's data is gone.
    """
    limit = limit_of(max_memory_gb)
    source = base_of(trained, max_memory_gb)
    dtype = compute_dtype(trained.config.dtype)
    models = [open_model(folder, dtype) for folder in (source, source, fused)]
    networks = [opened.network for opened in models]
    for network in networks[:2]:
        put_trained_rows(network, trained.adapter)
    start_vocabulary(models[0], {})
    base, tokenizer = networks[0], models[0].tokenizer(trained.tokenizer_files)
    path, examples = examples_of(trained, base, tokenizer, limit)
    chosen = choose(examples)
    streamable = all(opened.can_stream for opened in models)
    facts = [facts_of(folder, dtype.size) for folder in (source, fused)]
    longest = int(examples.lengths[chosen].max())
    check_positions(base, longest, f"{path}: --max-seq-length {trained.config.max_seq_length}")
    adapters = [trained.adapter]
    if trained.is_adjusted:  # the weights and the first adapter together make up the base
        adapters.append(read_first(trained.folder))
    room = hold(facts, adapters, longest, limit.limit_bytes, streamable)

    if not room.streams:
        networks[1].update(base.parameters())  # share the weights of the base
    for network, adapter in zip((networks[1], base), adapters, strict=False):
        put_adapter(network, adapter)
    for opened in models:
        prepare_for_generation(opened, room.streams)
    halves = [split(network) for network in networks]
    sums = DifferenceSums()
    edges = bucket_edges(examples.lengths - 1)
    rows_at_once = min(room.rows, len(chosen))  # what is missing to them would be padding
    for batch in micro_batches(examples, chosen, lambda _: rows_at_once, edges):
        places = places_of(batch)
        hidden = [
            hidden_at(network, half, batch, places)
            for network, half in zip(networks, halves, strict=True)
        ]
        add(sums, [half.head for half in halves], hidden, places, room.positions)
    return Difference(
        file=path.name,
        rows=len(chosen),
        positions=sums.positions,
        mean=sums.error / sums.numbers,
        largest=sums.largest,
        effect=sums.effect / sums.numbers,
        kept=sums.shown / sums.effect_squared if sums.effect_squared else 1.0,
        agreement=sums.agreed / sums.positions,
        **dict(zip(LOSSES, (sums.losses / sums.weight).tolist(), strict=True)),
    )


def examples_of(
    trained: Trained, network: nn.Module, tokenizer: Any, memory: MemoryLimit
) -> tuple[Path, Examples]:
    """Return the run's validation file, or else another of its files, and the rows in it."""
    config = trained.config
    if not config.data:
        raise UserError(f"{trained.folder.path}: has no data")
    splits = find_splits(config).files
    name = next(name for name in SPLITS if name in splits)
    limit = row_limit(config.max_row_bytes, memory)
    masked = config.mask_prompt or name == "test"
    return splits[name], load_examples(
        splits[name],
        Encoder(tokenizer, masked, vocabulary_of(network), limit, config.measured_kind),
        tokenizer_fingerprint(trained.files(), tokenizer.eos_token_ids),
        config.max_seq_length,
        config.too_long,
        store() / "cache",
    )


def choose(examples: Examples) -> np.ndarray:
    """Choose a few rows from the whole file, always the same ones, longest first."""
    rows = np.flatnonzero(examples.weights)
    if not len(rows):
        raise UserError("every row has weight 0: there is nothing to measure on")
    rows = np.random.Generator(np.random.PCG64(0)).permutation(rows)[:ROWS]
    fits = np.cumsum(examples.lengths[rows]) <= TOKENS
    rows = rows[: max(1, int(fits.sum()))]
    return rows[np.argsort(-examples.lengths[rows], kind="stable")]


def hold(
    facts: list[ModelFacts],
    adapters: Sequence[Adapter],
    tokens: int,
    limit: int,
    streamable: bool,
) -> DifferenceRoom:
    """Set MLX's memory limit and choose how to run the models.

    facts: of the base and the fused model; tokens: of the longest row; limit: of the memory, in
    bytes. Raises UserError if one
    such row does not fit.
    """
    row = max(generation_bytes(found, tokens) for found in facts)
    position = LOGITS_HELD * 4 * max(found.vocabulary for found in facts)
    every = (adapter.arrays | adapter.vocabulary for adapter in adapters)
    arrays = [array for arrays in every for array in arrays.values()]
    beside = sum(array.nbytes for array in arrays) + python_bytes()
    beside += row + FEWEST_POSITIONS * position
    resident = beside + sum(found.weights_bytes for found in facts)
    streamed = beside
    streamed += sum(weights_bytes(found, "streamed") for found in facts)
    streams = streamable and resident > limit
    least = streamed if streams else resident
    if least > limit:
        raise UserError(
            f"--max-memory: measuring the difference needs at least "
            f"{in_gb(rounded_up(least))}, more than {in_gb(limit)}"
        )
    half = (limit - least) // 2
    rows = min(ROWS_AT_ONCE, 1 + half // row)
    positions = min(POSITIONS_AT_ONCE, FEWEST_POSITIONS + half // position)
    allocator.set_limits(limit, least + (rows - 1) * row + positions * position, python_bytes())
    return DifferenceRoom(streams, rows, positions)


def places_of(batch: Batch) -> Places:
    count = batch.trained_tokens
    rows, columns = np.divmod(batch.positions[:count], batch.tokens.shape[1])
    order = np.argsort(columns // PREFILL_TOKENS, kind="stable")
    found = (rows, columns, batch.targets[:count], batch.weights[:count])
    return Places(*(array[order] for array in found))


def hidden_at(network: nn.Module, halves: Split, batch: Batch, places: Places) -> mx.array:
    """(S, D) hidden states before the head. PREFILL_TOKENS tokens go through together."""
    tokens, cache = mx.array(batch.tokens), make_prompt_cache(network)
    found: list[mx.array] = []
    for start in range(0, tokens.shape[1], PREFILL_TOKENS):
        hidden = halves.trunk(tokens[:, start : start + PREFILL_TOKENS], cache=cache)
        inside = places.columns // PREFILL_TOKENS == start // PREFILL_TOKENS
        if inside.any():
            rows, columns = places.rows[inside], places.columns[inside] - start
            found.append(hidden[mx.array(rows), mx.array(columns)])
        mx.eval(found[-1:], [layer.state for layer in cache])
    return mx.concatenate(found)


def add(
    sums: DifferenceSums,
    heads: Sequence[Callable[[mx.array], mx.array]],
    hidden: Sequence[mx.array],
    places: Places,
    step: int,
) -> None:
    """Add the positions of a batch to the sums, `step` positions at a time."""
    for start in range(0, len(places.targets), step):
        part = slice(start, start + step)
        logits = [
            head(states[None, part])[0].astype(mx.float32)
            for head, states in zip(heads, hidden, strict=True)
        ]
        base, adapted, fused = logits
        effect, error = adapted - base, mx.abs(fused - adapted)
        agreed = (mx.argmax(fused, axis=-1) == mx.argmax(adapted, axis=-1)).sum()
        targets, weights = mx.array(places.targets[part]), mx.array(places.weights[part])
        losses = mx.stack([(weights * cross_entropy(found, targets)).sum() for found in logits])
        measured = [
            error.sum(), error.max(), mx.abs(effect).sum(), (effect * effect).sum(),
            ((fused - base) * effect).sum(), agreed,
        ]  # fmt: skip
        mx.eval(measured, losses)
        error_sum, largest, effect_sum, squared, shown, agreements = map(float, measured)
        sums.numbers += base.size
        sums.positions += len(base)
        sums.agreed += int(agreements)
        sums.error += error_sum
        sums.largest = max(sums.largest, largest)
        sums.effect += effect_sum
        sums.effect_squared += squared
        sums.shown += shown
        sums.weight += float(weights.sum())
        sums.losses += np.array(losses, np.float64)
