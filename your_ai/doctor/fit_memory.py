"""Fit the coefficients of memory estimates to measured peaks. No mlx here.

tools/fit_memory.py does so for the packaged coefficients, `your_ai doctor --fit-memory` for those
of the machine it runs on (`measure_memory.py` measures its peaks).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from your_ai.memory.coefficients import Coefficients
from your_ai.memory.estimate import estimate
from your_ai.memory.estimate_tiles import is_tiled
from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.mixer_facts import MixerFacts
from your_ai.memory.workload import NOTHING, Kept, Plan, ProcessFacts, Training, Workload

# The tables that measured peaks can decide, by the engine and kind of the peaks that need them.
FITTED: dict[tuple[str, str], tuple[str, ...]] = {
    ("fused", "training"): ("fused", "fused_head"),
    ("staged", "training"): ("forward", "forward_lora", "backward", "backward_lora", "head"),
    ("kept", "training"): ("kept",),
    ("tiled", "training"): ("tiles",),
    ("fused", "evaluation"): ("evaluation", "evaluation_unsliced", "scores"),
    ("staged", "evaluation"): ("forward", "forward_lora", "scores"),
}
TOO_LOW = 2.0  # an estimate that is too low counts as much more than one that is too high
SMALL_BYTES = 2_000_000  # differences far below this do not matter
RIDGE = 0.8  # how strongly coefficients stay near where they were, against overfitting
ROUNDS = 60
DAMPING = (1e-2, 1e-9, 1e9)  # first, least and most
CLOSE_ENOUGH = 1e-4  # smaller gains in a round end the fit
# How much more or less of everything a machine may need; the first wins a tie.
FACTORS = (1.0, 0.25, 0.35, 0.5, 0.7, 1.4, 2.0, 2.8, 4.0)
STEP = 1e-3  # of a coefficient, for its derivative


PeakKind = Literal["step", "gradients", "evaluation"]


@dataclass(frozen=True, kw_only=True)
class Peak:
    """MLX's measured peak memory over one micro-batch, or over whole steps of one each."""

    facts: ModelFacts
    training: Training
    engine: str
    rows: int
    tokens: int
    kind: PeakKind
    """step: of whole steps, everything included; gradients: what the gradients of a micro-batch
    need in addition to weights, adapters and optimizer; evaluation: of scored rows, everything
    included."""
    peak_bytes: int
    kept: Kept = NOTHING
    """What blocks kept for the backward pass."""


def estimated_bytes(peak: Peak, coefficients: Coefficients) -> int:
    """Return what the estimate says of a peak."""
    workload = Workload(
        facts=peak.facts,
        training=peak.training,
        forward=peak.kind == "evaluation",
        process=ProcessFacts(coefficients=coefficients),
    )
    plan = Plan(peak.engine, peak.rows * peak.tokens, kept=peak.kept)
    only = peak.kind == "gradients"
    found = estimate(workload, plan, peak.rows, peak.tokens, gradients_only=only)
    held = ("weights", "adapters", "optimizer") if only else ()
    return found.mlx_bytes - sum(found.components[name] for name in held)


def errors(peaks: Sequence[Peak], coefficients: Coefficients) -> np.ndarray:
    """(n,) estimated over measured bytes, minus 1. Differences far below 2 MB count less."""
    estimates = np.array([estimated_bytes(peak, coefficients) for peak in peaks], float)
    measured = np.array([peak.peak_bytes for peak in peaks], float)
    relative: np.ndarray = (estimates - measured) / (measured + SMALL_BYTES)
    return relative


def fit(peaks: Sequence[Peak], start: Coefficients) -> Coefficients:
    """The coefficients that estimate these peaks best, near `start` where the peaks do not decide.

    Damped least squares (Levenberg-Marquardt) on relative errors, those of low estimates doubled.
    First all coefficients are multiplied by the best of FACTORS, then each is fitted. An estimate
    is a maximum of sums, so a step is only taken if it lowers the cost.
    """
    keys = decided(peaks, start)
    packaged = np.array([getattr(start, table)[key] for table, key in keys])

    def cost(factor: float) -> float:
        found = errors(peaks, with_values(start, keys, factor * packaged))
        return float((np.where(found < 0, TOO_LOW * found, found) ** 2).sum())

    first = min(FACTORS, key=cost) * packaged
    scale = np.maximum(first, 0.1)

    def residuals(values: np.ndarray) -> np.ndarray:
        found = errors(peaks, with_values(start, keys, values))
        weighed = np.where(found < 0, TOO_LOW * found, found)
        return np.concatenate([weighed, RIDGE * (values - first) / scale])

    values, current = first, residuals(first)
    damping, least, most = DAMPING
    for _ in range(ROUNDS):
        step = STEP * scale
        columns = [(residuals(values + step * one) - current) / STEP for one in np.eye(len(values))]
        slopes = np.stack(columns, axis=1)  # by values / scale
        normal, gradient = slopes.T @ slopes, slopes.T @ current
        gain = 0.0
        while damping <= most:
            moved = np.linalg.solve(normal + damping * np.eye(len(values)), gradient)
            tried = np.maximum(0.0, values - scale * moved)
            there = residuals(tried)
            gain = float(current @ current - there @ there)
            if gain > 0:
                values, current, damping = tried, there, max(least, damping / 4)
                break
            damping *= 4
        if gain <= CLOSE_ENOUGH * float(current @ current):
            break
        damping = min(damping, most)
    return with_values(start, keys, np.round(values, 3))


def decided(peaks: Sequence[Peak], start: Coefficients) -> list[tuple[str, str]]:
    """(table, key) of the coefficients that these peaks can decide."""
    families = {
        (family_of(peak), "evaluation" if peak.kind == "evaluation" else "training")
        for peak in peaks
    }
    tables = dict.fromkeys(t for family in FITTED if family in families for t in FITTED[family])
    return [(table, key) for table in tables for key in getattr(start, table)]


def family_of(peak: Peak) -> str:
    """The plans whose activations need the same memory: fused, kept, tiled or staged."""
    if peak.kept or peak.engine == "fused":
        return "kept" if peak.kept else "fused"
    workload = Workload(facts=peak.facts, training=peak.training)
    return "tiled" if is_tiled(workload, peak.rows, peak.tokens) else "staged"


def with_values(
    start: Coefficients, keys: Sequence[tuple[str, str]], values: Sequence[float] | np.ndarray
) -> Coefficients:
    tables: dict[str, dict[str, float]] = {}
    for (table, key), value in zip(keys, values, strict=True):
        tables.setdefault(table, dict(getattr(start, table)))[key] = float(value)
    return dataclasses.replace(start, **tables)


def to_json(peaks: Sequence[Peak]) -> dict[str, Any]:
    """The peaks, with the facts of each model once."""
    models: dict[str, dict[str, Any]] = {}
    rows = []
    for peak in peaks:
        facts = asdict(peak.facts)
        names = [name for name, known in models.items() if known == facts]
        name = names[0] if names else f"model {len(models) + 1}"
        models[name] = facts
        training = peak.training
        rows.append(
            [name, training.blocks, training.rank, list(training.targets), peak.engine, peak.rows,
             peak.tokens, peak.kind, peak.peak_bytes, *(peak.kept or ())]
        )  # fmt: skip
    return {"models": models, "peaks": rows}


def from_json(content: dict[str, Any]) -> list[Peak]:
    """The reverse of `to_json`. Raises KeyError, TypeError or ValueError if it is not that."""
    models = {name: facts_from_json(facts) for name, facts in content["models"].items()}
    return [
        Peak(
            facts=models[name],
            training=Training(blocks=blocks, rank=rank, targets=tuple(targets), experts=True),
            engine=engine,
            rows=rows,
            tokens=tokens,
            kind=kind,
            peak_bytes=peak_bytes,
            kept=Kept(*kept),
        )
        for name, blocks, rank, targets, engine, rows, tokens, kind, peak_bytes, *kept in content[
            "peaks"
        ]
    ]


def facts_from_json(facts: dict[str, Any]) -> ModelFacts:
    """The reverse of asdict. Measurements of old versions have one kind of block."""
    if "linears" in facts:
        names = {"linears", "experts", "norms"}
        block = {name: facts[name] for name in names} | {"weights_bytes": facts["block_bytes"]}
        rest = facts.keys() - names - {"blocks", "block_bytes", "blocks_bytes"}
        facts = {name: facts[name] for name in rest} | {
            "kinds": [block] * facts["kinds"],
            "order": [0] * facts["blocks"],
        }
    kinds = tuple(block_from_json(block) for block in facts["kinds"])
    return ModelFacts(**(facts | {"kinds": kinds, "order": tuple(facts["order"])}))


def block_from_json(block: dict[str, Any]) -> BlockFacts:
    sizes = {
        name: {layer: tuple(size) for layer, size in block[name].items()}
        for name in ("linears", "experts")
    }
    mixers = tuple(MixerFacts(**mixer) for mixer in block.get("mixers", ()))
    dense = tuple(block.get("dense", ()))
    return BlockFacts(**(block | sizes | {"mixers": mixers, "dense": dense}))
