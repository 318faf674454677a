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
from your_ai.export import adapter_files
from your_ai.export.adapter_files import AdapterFiles
from your_ai.export.untrained_run import Origin, check_new, create, settings_of
from your_ai.files import sha256
from your_ai.gates.text import counted, shortened, shown
from your_ai.nets import model
from your_ai.nets.saved_adapter import Adapter, check_generates, check_no_vocabulary
from your_ai.run import folder
from your_ai.run.folder import RunFolder

# Merge the LoRA layers of several adapters: the arithmetic, without files and models


Array = np.ndarray[Any, np.dtype[Any]]

EXACT_SIZE = 512  # smaller sides than this are decomposed exactly
EXTRA, ITERATIONS = 16, 6  # of the randomized decomposition: more columns, and power iterations


@dataclass(frozen=True)
class Factors:
    """delta = a @ b"""

    a: Array
    """(I, r)"""
    b: Array
    """(r, O)"""

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


@dataclass(frozen=True)
class Reduced:
    """The best approximation of a delta with a lower rank."""

    factors: Factors
    squared_error: float
    """Sum of the squared differences from the delta."""
    squared_norm: float
    """Sum of the squared values of the delta."""


def squared_norm(factors: Factors) -> float:
    """Sum of the squared values of the delta, without the delta."""
    a, b = factors.a.astype(np.float64), factors.b.astype(np.float64)
    return max(0.0, float(np.sum((a.T @ a) * (b @ b.T))))


def summed(layers: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """The factors of the weighted sum of deltas, exactly; their rank is the sum of the ranks."""
    a = np.concatenate([layer.a for layer in layers], axis=1)
    b = np.concatenate([w * layer.b for layer, w in zip(layers, weights, strict=True)], axis=0)
    return Factors(a, b)


def ties(layers: Sequence[Factors], weights: Sequence[float], density: float) -> Array:
    """The deltas merged with TIES: (I, O) float32.

    weights: above 0; only their ratio counts.
    density: the share of the values of each delta that is kept.

    Holds a few deltas in memory, however many layers there are: each is computed three times.
    """
    shares = list(map(np.float32, weights))
    least = [least_kept(single(layer), density) for layer in layers]
    every = list(zip(layers, shares, least, strict=True))
    total = np.zeros((len(layers[0].a), layers[0].b.shape[1]), np.float32)
    for layer, share, bound in every:
        total += share * trimmed(single(layer), bound)
    sign = np.sign(total, out=total)
    values, counted = np.zeros_like(sign), np.zeros_like(sign)
    for layer, share, bound in every:
        delta = trimmed(single(layer), bound)
        agrees = delta * sign > 0
        values += share * np.where(agrees, delta, 0)
        counted += share * agrees
    return np.divide(values, counted, out=values, where=counted > 0)


def single(layer: Factors) -> Array:
    """The delta in float32."""
    return layer.a.astype(np.float32) @ layer.b.astype(np.float32)


def least_kept(delta: Array, density: float) -> float:
    """The size of the smallest value that is kept: of a share of `density`, at least one value."""
    place = delta.size - max(1, int(density * delta.size))
    return float(np.partition(np.abs(delta), place, axis=None)[place])


def trimmed(delta: Array, least: float) -> Array:
    """The delta, with 0 in place of the values smaller than `least`."""
    delta[np.abs(delta) < np.float32(least)] = 0
    return delta


def reduced(factors: Factors, rank: int) -> Reduced:
    """The best approximation of the factors' delta with `rank`; never computes the delta."""
    q_a, r_a = np.linalg.qr(factors.a.astype(np.float64))
    q_b, r_b = np.linalg.qr(factors.b.astype(np.float64).T)
    u, sizes, v = np.linalg.svd(r_a @ r_b.T, full_matrices=False)
    lost = float(np.sum(sizes[rank:] ** 2))
    return Reduced(balanced(q_a @ u, sizes, v @ q_b.T, rank), lost, float(np.sum(sizes**2)))


def factored(delta: Array, rank: int) -> Reduced:
    """The approximation of a delta with `rank`, by its largest singular values.

    A large delta is decomposed in a random subspace (Halko et al., 2011, arXiv:0909.4061), from a
    fixed seed.
    """
    columns = min(rank + EXTRA, *delta.shape)
    basis = None
    if min(delta.shape) > max(EXACT_SIZE, columns):
        start = np.random.default_rng(0).standard_normal((delta.shape[1], columns))
        basis, _ = np.linalg.qr(delta @ start.astype(delta.dtype))
        for _ in range(ITERATIONS):
            other, _ = np.linalg.qr(delta.T @ basis)
            basis, _ = np.linalg.qr(delta @ other)
    inside = delta if basis is None else basis.T @ delta
    u, sizes, v = np.linalg.svd(inside.astype(np.float64), full_matrices=False)
    u = u if basis is None else basis @ u
    norm = float(np.sum(np.square(delta, dtype=np.float64)))
    lost = max(0.0, norm - float(np.sum(sizes[:rank] ** 2)))
    return Reduced(balanced(u, sizes, v, rank), lost, norm)


def balanced(u: Array, sizes: Array, v: Array, rank: int) -> Factors:
    """The first `rank` of u @ diag(sizes) @ v, with the sizes shared by both factors."""
    roots = np.sqrt(sizes[:rank])
    return Factors(u[:, :rank] * roots, roots[:, None] * v[:rank])


def padded(factors: Factors, rank: int) -> Factors:
    """The same delta with a higher rank, by zeros."""
    more = rank - factors.rank
    return Factors(np.pad(factors.a, ((0, 0), (0, more))), np.pad(factors.b, ((0, more), (0, 0))))


Method = Literal["linear", "ties"]
DENSITY = 0.5
LARGEST_WEIGHT = 1000.0
MOST_RANK = 65_536


@dataclass(frozen=True)
class MergeRequest:
    """The adapters to merge, and how."""

    adapters: Sequence[tuple[str, float]]
    """Runs or folders of adapters, each with its weight."""
    method: Method = "linear"
    density: float = DENSITY
    """The share of values that TIES keeps of each adapter."""
    rank: int | None = None
    """The rank of the result; by default what the sum of the adapters needs."""


@dataclass(frozen=True)
class Merged:
    run: RunFolder
    rank: int
    relative_error: float
    """What the rank loses of the merged deltas: the norm of the difference over the norm."""


@dataclass(frozen=True)
class MergeInput:
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
    adapters that are damaged, have vectors, or are not of one base model.
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
    """Read an adapter. Raises UserError if it is damaged, or has vectors."""
    files = adapter_files.find_adapter(name, shortened(name))
    adapter = adapter_files.read(files)
    check_generates(adapter)
    check_no_vocabulary(adapter, "a merged adapter")
    if not adapter.kind.is_sum:
        raise UserError(
            f"{files.folder}: is a {adapter.kind.title} adapter, whose magnitudes cannot be "
            "added; merge LoRA adapters, or fuse it"
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
        adapters = [part.adapter for part in having]
        parts = [factors_of(each.layers[path], each.sizes[path].scale) for each in adapters]
        matrices = zip(*parts, strict=True)  # one, or one for each expert
        found = [merged_matrix(matrix, weights, request, rank) for matrix in matrices]
        error += sum(each.squared_error for each in found)
        norm += sum(each.squared_norm for each in found)
        a = np.stack([padded(each.factors, rank).a for each in found])
        b = np.stack([padded(each.factors, rank).b for each in found])
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
        return factored(ties(layers, weights, request.density), rank)
    found = summed(layers, weights)
    if found.rank > rank:
        return reduced(found, rank)
    return Reduced(found, 0.0, squared_norm(found))


def record_of(
    inputs: Sequence[MergeInput], request: MergeRequest, rank: int, relative_error: float
) -> dict[str, Any]:
    """The content of merged.json."""
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
