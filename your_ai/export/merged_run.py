"""Create a run whose adapter is merged from several adapters of one base model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from your_ai import __version__
from your_ai.errors import UserError
from your_ai.export import adapter_files, merging
from your_ai.export.adapter_files import AdapterFiles
from your_ai.export.merging import Factors, Reduced
from your_ai.export.untrained_run import Origin, check_new, create, settings_of
from your_ai.files import sha256
from your_ai.gates.text import counted, shortened, shown
from your_ai.nets import model
from your_ai.nets.saved_adapter import Adapter, check_generates
from your_ai.run import folder
from your_ai.run.folder import RunFolder

Method = Literal["linear", "ties"]
DENSITY = 0.5
LARGEST_WEIGHT = 1000.0
MOST_RANK = 65_536


@dataclass(frozen=True)
class MergeRequest:
    """What to merge, and how."""

    adapters: Sequence[tuple[str, float]]
    """Runs or folders of adapters, each with its weight."""
    method: Method = "linear"
    density: float = DENSITY
    """The share of values that TIES keeps of each adapter."""
    rank: int | None = None
    """The rank of the result; by default what the sum of the adapters needs."""


@dataclass(frozen=True)
class Merged:
    """A run with a merged adapter."""

    run: RunFolder
    rank: int
    relative_error: float
    """What the rank loses of the merged deltas: the norm of the difference over the norm."""


@dataclass(frozen=True)
class MergeInput:
    """An adapter that is to be merged."""

    name: str
    files: AdapterFiles
    adapter: Adapter
    weight: float


def merge(
    request: MergeRequest,
    base: str | None = None,
    name: str | None = None,
    on_layer: Callable[[int, int], object] = lambda done, total: None,
) -> Merged:
    """Merge adapters into a new run.

    base: the base model, if the first adapter does not name it or it is in another place.
    name: of the run.
    on_layer: called with the number of merged layers and of all layers.

    Raises UserError, before anything is written, for a request that makes no sense, and for
    adapters that are damaged, are DoRA, or are not of one base model.
    """
    check(request)
    if name is not None:
        check_new(name, "--to")
    inputs = [read_input(name, weight) for name, weight in request.adapters]
    check_one_base(inputs)
    first = inputs[0].files
    found = adapter_files.find_base_model(first.folder, base, first.base)
    inputs = [fitted_input(part, found) for part in inputs]
    rank, relative_error, arrays = merged_arrays(inputs, request, on_layer)
    network = adapter_files.load_base(first, found)
    linears = {path for path, layer in network.named_modules() if isinstance(layer, model.LINEAR)}
    layers = {path.rpartition(".")[0] for path in arrays}
    keys = adapter_files.keys_of(layers, linears)
    config = {
        "fine_tune_type": "lora",
        "model": base or first.base,
        "num_layers": adapter_files.blocks_of(layers, linears),
        "lora_parameters": {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": keys},
        "base_files": inputs[0].adapter.config["base_files"],
    }
    adapter = Adapter(first.folder, arrays, config)
    adapter_files.check_fit(first.file, network, adapter)
    settings = settings_of(adapter, name or "", first.config)
    name = name or folder.default_name(dataclasses.replace(settings, data="merged"))
    origin = Origin("merged", record_of(inputs, request, rank, relative_error), text_of(request))
    return Merged(create(name, settings, adapter, origin), rank, relative_error)


def check(request: MergeRequest) -> None:
    """Raise UserError for numbers out of range."""
    for name, weight in request.adapters:
        label = f"{shortened(name)}={weight:g}"
        if not 0 < abs(weight) <= LARGEST_WEIGHT:  # also true for NaN
            raise UserError(
                f"{label}: the weight must be at most {LARGEST_WEIGHT:g}, and not 0; leave out an "
                "adapter that is not wanted"
            )
        if request.method == "ties" and weight < 0:
            raise UserError(f"{label}: --method ties needs weights above 0; use linear")
    if not 0 < request.density <= 1:
        raise UserError(f"--density {request.density:g}: must be above 0 and at most 1")
    if request.rank is not None and not 1 <= request.rank <= MOST_RANK:
        raise UserError(f"--rank {request.rank}: must be from 1 to {MOST_RANK:,}")


def read_input(name: str, weight: float) -> MergeInput:
    """Read an adapter. Raises UserError if it is damaged, or is DoRA."""
    files = adapter_files.find_adapter(name, shortened(name))
    adapter = adapter_files.read(files)
    check_generates(adapter)
    if adapter.is_dora:
        raise UserError(
            f"{files.folder}: is a DoRA adapter, whose magnitudes cannot be added; merge LoRA "
            "adapters, or fuse it"
        )
    return MergeInput(name, files, adapter, weight)


def check_one_base(inputs: Sequence[MergeInput]) -> None:
    """Raise UserError if two adapters recorded different files of their base models."""
    recorded = [(part.name, part.adapter.config.get("base_files")) for part in inputs]
    known = [(name, files) for name, files in recorded if isinstance(files, dict)]
    for name, files in known[1:]:
        if files != known[0][1]:
            raise UserError(
                f"{shortened(known[0][0])} and {shortened(name)}: were trained on different base "
                "models; only adapters of the same model can be merged"
            )


def fitted_input(part: MergeInput, base: Path) -> MergeInput:
    """The adapter, compared with the model in `base`. Raises UserError if it does not fit."""
    network = adapter_files.load_base(part.files, base)
    adapter = adapter_files.fitted(part.files, part.adapter, base, network)
    adapter_files.check_fit(part.files.file, network, adapter)
    return dataclasses.replace(part, adapter=adapter)


def merged_arrays(
    inputs: Sequence[MergeInput],
    request: MergeRequest,
    on_layer: Callable[[int, int], object],
) -> tuple[int, float, dict[str, mx.array]]:
    """The rank, the relative error, and the arrays of the merge in mlx-lm's form, at scale 1.

    A layer that an adapter does not have is zero there, which changes neither method.
    """
    paths = sorted({path for part in inputs for path in part.adapter.layers})
    there = {path: [part for part in inputs if path in part.adapter.layers] for path in paths}
    rank = rank_of(request, [sizes_of(path, having) for path, having in there.items()])
    arrays, error, norm = {}, 0.0, 0.0
    for done, (path, having) in enumerate(there.items(), 1):
        weights = [part.weight for part in having]
        parts = [factors_of(part.adapter.layers[path], part.adapter.scale) for part in having]
        matrices = zip(*parts, strict=True)  # one, or one for each expert
        found = [merged_matrix(matrix, weights, request, rank) for matrix in matrices]
        error += sum(each.squared_error for each in found)
        norm += sum(each.squared_norm for each in found)
        a = np.stack([merging.padded(each.factors, rank).a for each in found])
        b = np.stack([merging.padded(each.factors, rank).b for each in found])
        if having[0].adapter.layers[path]["lora_a"].ndim == 2:
            a, b = a[0], b[0]
        else:
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        for name, array in (("lora_a", a), ("lora_b", b)):
            with np.errstate(over="ignore"):
                values = mx.array(array.astype(np.float32))
            if not mx.isfinite(values).all().item():
                raise UserError(f"{shown(path)}: the merged values are too large for float32")
            arrays[f"{path}.{name}"] = values
        on_layer(done, len(paths))
    return rank, math.sqrt(error / norm) if norm > 0 else 0.0, arrays


def sizes_of(path: str, having: Sequence[MergeInput]) -> tuple[int, int]:
    """The sum of the ranks of a layer, and the smaller of its inputs and outputs."""
    total, least = 0, 0
    for part in having:
        layer = part.adapter.layers[path]
        *_, x, y = layer["lora_a"].shape
        *_, z, w = layer["lora_b"].shape
        inputs, rank, outputs = (x, y, w) if layer["lora_a"].ndim == 2 else (y, x, z)
        total, least = total + rank, min(inputs, outputs)
    return total, least


def rank_of(request: MergeRequest, sizes: Sequence[tuple[int, int]]) -> int:
    """The rank of the merged adapter; sizes: of each layer, as `sizes_of` returns them.

    Raises UserError if --rank is higher than the merged deltas can have.
    """
    needed = max(min(total, least) for total, least in sizes)
    most = needed if request.method == "linear" else max(least for _, least in sizes)
    if request.rank is not None and request.rank > most:
        raise UserError(
            f"--rank {request.rank}: the merged adapter has rank {most}; more adds nothing"
        )
    return request.rank or needed


def factors_of(parts: dict[str, mx.array], scale: float) -> list[Factors]:
    """The factors of a layer in mlx-lm's form, or of each of its experts, with the scale in b.

    A layer has lora_a (I, r) and lora_b (r, O); experts have (E, r, I) and (E, O, r).
    """
    a, b = np.array(parts["lora_a"]), scale * np.array(parts["lora_b"]).astype(np.float64)
    if a.ndim == 2:
        return [Factors(a, b)]
    return [Factors(x.T, y.T) for x, y in zip(a, b, strict=True)]


def merged_matrix(
    layers: Sequence[Factors], weights: Sequence[float], request: MergeRequest, rank: int
) -> Reduced:
    """Merge the deltas of one matrix, with at most `rank`."""
    if request.method == "ties":
        return merging.factored(merging.ties(layers, weights, request.density), rank)
    found = merging.summed(layers, weights)
    if found.rank > rank:
        return merging.reduced(found, rank)
    return Reduced(found, 0.0, merging.squared_norm(found))


def record_of(
    inputs: Sequence[MergeInput], request: MergeRequest, rank: int, relative_error: float
) -> dict[str, Any]:
    """What merged.json says."""
    adapters = [
        {
            "from": part.files.run.name if part.files.run else part.files.folder.absolute().name,
            "weight": part.weight,
            "files": {path.name: sha256(path) for path in (part.files.file, part.files.config)},
        }
        for part in inputs
    ]
    density = {"density": request.density} if request.method == "ties" else {}
    return {
        "method": request.method,
        **density,
        "rank": rank,
        "relative_error": relative_error,
        "adapters": adapters,
        "your_ai": __version__,
    }


def text_of(request: MergeRequest) -> str:
    return f"merged from {counted(len(request.adapters), 'adapter')} ({request.method})"
