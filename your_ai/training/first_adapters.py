"""Make the first adapter of a run with `--init`, and the base weights that go with it.

    runs/NAME/start/       the first adapter, as with --from
    runs/NAME/subtracted/  with loftq:N, the adapter of the round before, which `base/` lacks
    runs/NAME/base/        the model with adjusted weights, if they are: pissa, loftq:N

W is a weight, Q what the run would train on without `--init`: W quantized, or W itself.

- loftq (Li et al., 2023, arXiv 2310.08659): s B A is the best approximation of W - Q with the rank
  of the adapter, so Q + s B A is closer to W. In more rounds, Q becomes quantize(W - s B A), and B
  and A are computed again.
- pissa (Meng et al., 2024, arXiv 2404.02948): s B A is the best approximation of W. The base gets
  the rest, W - s B A, quantized again if Q is quantized.

Layers are read one after the other, and computed in slices of rows. All is made before the first
step; what was interrupted is made again, or goes on, and gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.config.adapter_facts import DORA
from your_ai.config.adapter_starts import INIT, LOFTQ, PISSA, AdapterStart, starting_of
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import UserError
from your_ai.export.fused_weights import (
    Change,
    changed_rows,
    dense_rows,
    put_changed,
    slices,
    work_bytes,
)
from your_ai.files import sha256
from your_ai.memory import allocator
from your_ai.memory.limit import MemoryLimit
from your_ai.modelfiles.quantize import cast_as_told
from your_ai.modelfiles.shards import (
    Lazy,
    hold_memory,
    lazy_of,
    load_as_written,
    read_bytes,
    write_model,
)
from your_ai.modelfiles.targets import Work
from your_ai.nets import lora, model
from your_ai.nets.low_rank import RowsOf, factors_bytes, largest_part
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.rounding import MLX_PARTS, float32_weight, quantization_of
from your_ai.nets.saved_adapter import base_files, read_adapter
from your_ai.rng import derive_seed
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder
from your_ai.training.job import ResolvedJob

RECORD = "adjusted.json"
FILES = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG)


@dataclass(frozen=True)
class StartingLayer:
    """A layer whose adapter gets its first values."""

    weight: nn.Module
    """With the weight W."""
    base: nn.Module
    """With the weight Q."""
    rank: int
    scale: float
    dtype: mx.Dtype
    """Of A and B."""
    seed: int

    def weight_rows(self, rows: slice, after: Sequence[mx.array]) -> mx.array:
        """Rows of W."""
        return dense_rows(self.weight, rows, after)

    def base_rows(self, taken: Arrays | None, rows: slice, after: Sequence[mx.array]) -> mx.array:
        """Rows of Q, or without the product of the adapter `taken`."""
        if taken is None:
            return dense_rows(self.base, rows, after)
        change = self.without(taken)
        return float32_weight(changed_rows(change, rows, after), change.becomes)

    def lost_rows(self, taken: Arrays | None, rows: slice, after: Sequence[mx.array]) -> mx.array:
        """Rows of what the base lacks: W - Q."""
        return self.weight_rows(rows, after) - self.base_rows(taken, rows, after)

    def without(self, taken: Arrays) -> Change:
        """The change that takes the product of an adapter away from W, in the format of Q."""
        own, kept = quantization_of(self.base), self.weight
        dtype = self.base.scales.dtype if own else kept.weight.dtype
        if not mx.issubdtype(dtype, mx.floating):  # the mode decides it
            dtype = mx.float32
        return Change(kept, 0, taken, lora, -self.scale, own, dtype, trained_for=own)

    def best(self, rows_of: RowsOf) -> Arrays:
        """The adapter whose product s B A is the best approximation of a matrix."""
        shape = model.dimensions_of(self.weight)[::-1]
        a, b = largest_part(rows_of, slices(self.weight), shape, self.rank, self.seed)
        root = self.scale**-0.5
        found = {"lora_a": (root * a).astype(self.dtype), "lora_b": (root * b).astype(self.dtype)}
        mx.eval(found)
        return found

    def norms(self, found: Arrays, taken: Arrays | None) -> mx.array:
        """(O,) float32, the magnitudes of DoRA: the norms of the rows of the first weight."""
        norms: list[mx.array] = []
        for rows in slices(self.weight):
            weight = self.base_rows(taken, rows, norms[-1:])
            weight = lora.fused_rows(weight, found, self.scale, rows)
            norms.append(mx.linalg.norm(weight, axis=1))
        whole = mx.concatenate(norms)
        mx.eval(whole)
        return whole


Starts = Callable[[StartingLayer, int], tuple[Arrays, Arrays | None]]
"""f(layer, rounds): the first adapter, and the one whose product the base then lacks, if any."""


def loftq(layer: StartingLayer, rounds: int) -> tuple[Arrays, Arrays | None]:
    """The largest part of what quantization takes away, in turns with the quantized weight."""
    taken, found = None, layer.best(partial(layer.lost_rows, None))
    for _ in range(rounds - 1):
        taken, found = found, layer.best(partial(layer.lost_rows, found))
    return found, taken


def pissa(layer: StartingLayer, rounds: int) -> tuple[Arrays, Arrays | None]:
    """The largest part of the weight."""
    found = layer.best(layer.weight_rows)
    return found, found


STARTS: dict[str, Starts] = {LOFTQ: loftq, PISSA: pissa}


@dataclass(frozen=True)
class BothWeights:
    """The folders of W and Q, which may be the same."""

    exact: Path
    base: Path

    def load(self) -> tuple[nn.Module, nn.Module]:
        """The lazy models with Q and with W."""
        network, _ = load_as_written(self.base)
        network.freeze()
        if self.exact == self.base:
            return network, network
        exact, config = load_as_written(self.exact)
        cast_as_told(exact, config)
        return network, exact

    def needed_bytes(self, layers: dict[str, StartingLayer]) -> int:
        """Peak memory for the first adapter, and for the weights that go with it."""
        network, exact = self.load()
        sizes = read_bytes(self.base, flat(network))
        others = 2 * max(sizes.values())
        inputs = read_bytes(self.exact, flat(exact)) if exact is not network else {}
        most = 0
        for path, layer in layers.items():
            names = [f"{path}.{part}" for part in MLX_PARTS]
            held = sum(2 * sizes.get(name, 0) + inputs.get(name, 0) for name in names)
            held += 2 * work_bytes(layer.without({}))
            most = max(most, held + factors_bytes(model.dimensions_of(layer.weight), layer.rank))
        return max(most, others)


def with_first_adapter(
    job: ResolvedJob,
    base: Path,
    opened: Opened,
    folder: Path,
    limit: MemoryLimit,
    tell: Callable[[str], object],
) -> Opened:
    """The model that the run trains; makes its first adapter, unless it is there.

    base: the folder of the base model. opened: the model as it would be trained without `--init`.
    folder: of the run. tell: receives what is done. Raises UserError if a layer cannot start so, or
    if memory or disk is too small.
    """
    run, start = RunFolder(folder), starting_of(job.config.init)
    assert start is not None  # it is given
    weights = BothWeights(base if job.config.quantize else opened.folder, opened.folder)
    layers, config = starting_layers(job, *weights.load())
    record = {**config, "base_files": base_files(job.files), INIT: job.config.init}
    del record["model"]  # it may be in another place when the run is resumed
    if not is_made(run, record):
        hold_memory("--init of", weights.needed_bytes(layers), limit)
        clear(run)
        make(run, start, layers, record, tell)
    layers.clear()
    allocator.free()
    if not start.adjusts_base:
        return opened
    if not run.base.is_dir():
        tell("adjusting the base weights")
        write_base(run, weights, job, limit)
    opened = open_model(run.base, opened.dtype)
    model.train_vocabulary(opened.network, job.config, job.new)
    return opened


def flat(network: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(network.parameters()))


def starting_layers(
    job: ResolvedJob, network: nn.Module, exact: nn.Module
) -> tuple[dict[str, StartingLayer], dict[str, Any]]:
    """The layers that get adapters, by path, and the config of the adapters.

    network, exact: from `BothWeights.load`; the layers of `network` are wrapped. Raises UserError
    if a layer cannot start so.
    """
    given = dict(exact.named_modules())
    config = model.add_adapters(network, job.config).config
    found = {}
    for path, layer in network.named_modules():
        if "lora_a" not in layer:
            continue
        if not isinstance(layer.linear, nn.Linear | nn.QuantizedLinear):
            raise UserError(f"--init: is not supported on the expert layers {path}")
        weight = given[path] if exact is not network else layer.linear
        rank = layer.lora_a.shape[1]
        dtype = getattr(mx, job.config.adapter_dtype)
        seed = derive_seed(job.config.seed, INIT, path)
        found[path] = StartingLayer(weight, layer.linear, rank, float(layer.scale), dtype, seed)
    return found, config


def is_made(run: RunFolder, record: dict[str, Any]) -> bool:
    """Return whether the run has this first adapter, intact."""
    if checkpoint.fault(run.start, FILES) is not None:
        return False
    wanted = json.loads(json.dumps(record))
    return bool({**read_adapter(run.start).config, "step": None} == {**wanted, "step": None})


def clear(run: RunFolder) -> None:
    """Delete what an interrupted or a different start has left."""
    for place in (run.start, run.subtracted, run.base):
        shutil.rmtree(place, ignore_errors=True)


def make(
    run: RunFolder,
    start: AdapterStart,
    layers: dict[str, StartingLayer],
    record: dict[str, Any],
    tell: Callable[[str], object],
) -> None:
    """Write the first adapter of a run; layers: emptied, so that each weight is freed."""
    first, subtracted = Arrays(), Arrays()
    for number, (path, layer) in enumerate(taken_from(layers), 1):
        tell(f"computing the first adapter: layer {number} of {number + len(layers)}")
        found, taken = STARTS[start.name](layer, start.rounds)
        first |= {f"{path}.{name}": array for name, array in found.items()}
        if taken is not None and taken is not found:
            subtracted |= {f"{path}.{name}": array for name, array in taken.items()}
        if record["fine_tune_type"] == DORA.name:
            first[f"{path}.m"] = layer.norms(found, taken)
        layer.weight.clear()
        layer.base.clear()
        allocator.free(collect=False)
    if subtracted:
        checkpoint.save_adapter(run.subtracted, subtracted, record, step=0)
    checkpoint.save_adapter(run.start, first, record, step=0)  # last: it marks both


def taken_from(layers: dict[str, StartingLayer]) -> Iterator[tuple[str, StartingLayer]]:
    while layers:
        path = next(iter(layers))
        yield path, layers.pop(path)


def write_base(run: RunFolder, weights: BothWeights, job: ResolvedJob, limit: MemoryLimit) -> None:
    """Write the adjusted base of a run; goes on where it was interrupted."""
    taken = run.subtracted if run.subtracted.is_dir() else run.start
    settings = [sha256(taken / checkpoint.ADAPTERS)]
    lazy, work = adjusted(weights, job, taken), Work(run.base, "adjusting", RECORD)
    for _ in write_model(lazy, weights.base, work, settings, limit):
        pass


def adjusted(weights: BothWeights, job: ResolvedJob, taken: Path) -> Lazy:
    """The base model without the product of the adapter in the folder `taken`, not computed."""
    subtracted = read_adapter(taken).layers
    network, exact = weights.load()
    lazy = lazy_of(network, load_as_written(weights.base)[1], 0)
    layers, _ = starting_layers(job, network, exact)
    needed = weights.needed_bytes(layers)
    for path, layer in layers.items():
        put_changed(path, layer.without(subtracted[path]), lazy.arrays, lazy.pieces)
    return replace(lazy, input_bytes=needed)
