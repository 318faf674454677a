"""The memory limit of a run, and the plan that fits: chosen before any weight is loaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from your_ai.config import TrainConfig
from your_ai.data.lines import RowLimit
from your_ai.errors import Unsplittable, UserError
from your_ai.hub.find import store
from your_ai.memory import allocator, probe
from your_ai.memory.buffers import allowed, of_wave
from your_ai.memory.costs import MeasuredCosts, Shape, costs_file, keep_costs, read_costs
from your_ai.memory.estimate import weights_bytes
from your_ai.memory.estimate_generation import generation_bytes, rollout_phases, wave_sizes
from your_ai.memory.facts import ModelFacts, facts_of
from your_ai.memory.limit import MemoryLimit, find_limit, rounded_up
from your_ai.memory.plan import Budget, DoesNotFit, choose, is_far, largest_that_fits
from your_ai.memory.sample import in_gb
from your_ai.memory.workload import (
    UNLIMITED,
    Kept,
    Plan,
    ProcessFacts,
    RolloutSizes,
    TeacherSizes,
    Training,
    Workload,
)
from your_ai.nets.numerics import METAL_VJP, mlx_version
from your_ai.run import events

# Variables that limit the threads of products.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "MKL_NUM_THREADS")
BLAS = re.compile(r"blas|mkl_rt|blis")  # names of libraries
# Threads, BLAS or driver buffers that appear in the first step. A guess on macOS.
LATER_BYTES = 30_000_000 if probe.is_macos() else 20_000_000


@dataclass(frozen=True)
class PriorPlans:
    """The earlier plan and costs of a run that is resumed."""

    plan: Plan | None = None
    """The plan it had at this level, with the same settings."""
    costs: Path | None = None
    """The file with its costs."""
    begun: bool = False
    """Whether training has begun. If so, newer costs must not change how it splits batches."""


@dataclass(frozen=True)
class Measuring:
    """The way in which costs are measured where they are not known."""

    measure: Callable[[Workload, int], MeasuredCosts | None]
    """(workload, limit of the process in bytes) -> its costs, if they can be measured; raises
    Unsplittable"""
    always: bool = False
    """Whether it is called where the limit is far away, too, so that a guess does."""


HOPELESS = 2.0  # nothing is measured if the guess needs more than this multiple of the limit
# What may change costs: the engines, and what they run.
SOURCES = ("engine", "nets", "objectives", "memory/sizes.py", "memory/costs.py", "memory/facts.py")
LARGEST = Shape(4, 4096)  # rows and tokens beyond which measured shapes are the same


def limit_of(max_memory_gb: float | None, force: bool = False, processes: int = 1) -> MemoryLimit:
    """The limit of this process. Raises UserError if it is more than the machine has.

    processes: of the run on this machine, each with such a limit.
    """
    return find_limit(probe.machine(), max_memory_gb, force, processes)


def run_limit(config: TrainConfig) -> MemoryLimit:
    """The limit of the training process of a run. Raises UserError as `limit_of` does.

    It depends on the memory that is free now, so it is derived once, and passed on.
    """
    return limit_of(config.max_memory, config.force, config.processes)


@cache
def python_bytes() -> int:
    """Memory of this process without a model.

    Measured once, at the first call: memory left over from an earlier plan does not count, nor
    does what reading the tokenizer freed.
    """
    allocator.free()
    return (probe.process_bytes() or 0) + LATER_BYTES


def empty_bytes() -> int | None:
    """Memory of this process before it read rows and weights; None if it has not measured that."""
    return python_bytes() - LATER_BYTES if python_bytes.cache_info().currsize else None


def row_limit(max_row_bytes: int, limit: MemoryLimit) -> RowLimit:
    """The maximum length of a row of data, so that reading stays under the limit.

    Call it before reading data: it measures `python_bytes`, which must not include the data.
    """
    python_bytes()
    return RowLimit(max_row_bytes, limit.limit_bytes - (probe.process_bytes() or 0))


def process_here() -> ProcessFacts:
    return ProcessFacts(
        python_bytes=python_bytes(),
        sliced=mx.default_device().type == mx.cpu,
        most_buffers=probe.most_buffers() or UNLIMITED,
        mixes_whole=mlx_version() >= METAL_VJP,
    )


def plan_of(event: events.Planned) -> Plan:
    """The plan that an event recorded."""
    kept = Kept(event.kept, event.kept_attention, event.kept_activations)
    reading = event.resident, event.blocks_ahead, event.teacher_blocks, event.teacher_ahead
    return Plan(event.plan, event.micro_tokens, event.spill, event.wave, kept, *reading)


def budget_of(
    config: TrainConfig,
    workload: Workload,
    dtype: mx.Dtype,
    limit: MemoryLimit,
    level: int = 0,
    past: PriorPlans | None = None,
    measuring: Measuring | None = None,
) -> Budget:
    """The budget of a run inside `limit`, with the largest adapters that fit.

    Where rank or blocks are automatic, `training` of its workload has those that were chosen. Every
    plan is tried before smaller adapters: a plan costs time, but does not change what is learned.

    past: earlier plan and costs of the run, if it is resumed. level: as in `choose`.
    measuring: None to guess costs that are not known.
    Raises DoesNotFit if nothing fits.
    """
    past = past or PriorPlans()
    larger: list[MeasuredCosts] = []  # of adapters that were tried before, which need no less

    def budget_with(asked: Workload) -> Budget:
        asked, key = with_costs(
            asked, dtype, limit, past, None if larger else measuring, config.lora_dropout > 0
        )
        larger.extend([asked.costs] if asked.costs is not None else [])
        asked = replace(asked, costs=larger[-1] if larger else None)
        choice = choose(asked, limit.limit_bytes, level, past.plan)
        return Budget(limit, asked, choice, key, past.begun and choice.option.plan == past.plan)

    return largest_that_fits(config, workload, budget_with)


def with_costs(
    workload: Workload,
    dtype: mx.Dtype,
    limit: MemoryLimit,
    past: PriorPlans,
    measuring: Measuring | None,
    has_dropout: bool = False,
) -> tuple[Workload, tuple[str, ...]]:
    """The workload with its costs on this machine, and what they depend on. One of a model that
    cannot be taken apart is `whole`."""
    key = costs_key(workload, dtype, has_dropout=has_dropout)
    try:
        found = costs_here(workload, key, limit, past, measuring)
    except Unsplittable:
        return replace(workload, whole=True), key
    whole = workload.whole or (found is not None and found.is_whole)
    return replace(workload, costs=found, whole=whole), key


def fused_budget(budget: Budget, level: int = 0, kept: Plan | None = None) -> Budget:
    """The budget of a model that turned out to have no parts. level, kept: as in `choose`. Raises
    UserError if none fits."""
    workload = replace(budget.workload, whole=True)
    choice = choose(workload, budget.limit.limit_bytes, level, kept)
    return replace(budget, workload=workload, choice=choice)


def costs_here(
    workload: Workload,
    key: tuple[str, ...],
    limit: MemoryLimit,
    past: PriorPlans,
    measuring: Measuring | None,
) -> MeasuredCosts | None:
    """The costs of a workload on this machine: those that its run had, or that were measured
    before, or are measured now; None if a guess does."""
    blocks = workload.facts.blocks
    if past.begun:  # also on another machine, or after an update: it must split batches as before
        return None if past.costs is None else read_costs(past.costs, None, blocks)
    kept = costs_file(store() / "costs", key)
    found = read_costs(kept, key, blocks)
    if found is not None or measuring is None:
        return found
    limit_bytes = limit.limit_bytes
    if not (measuring.always or is_close(workload, limit_bytes)):
        return None
    found = measuring.measure(workload, limit_bytes)
    if found is not None and found.is_complete and found.read_s:  # there were files
        keep_costs(kept, key, found)
    return found


def is_close(workload: Workload, limit_bytes: int) -> bool:
    """Return whether it may depend on an error of a guess what fits into a limit."""
    try:
        return not is_far(workload, choose(workload, limit_bytes).option, limit_bytes)
    except DoesNotFit as refusal:
        return refusal.least_bytes <= HOPELESS * limit_bytes


def costs_key(workload: Workload, dtype: mx.Dtype, *, has_dropout: bool = False) -> tuple[str, ...]:
    """Everything that costs depend on: the machine, the engines, the model, the adapters, and the
    shapes at which they are measured."""
    facts, training = workload.facts, workload.training
    kinds = [
        replace(kind, linears=in_order(kind.linears), experts=in_order(kind.experts))
        for kind in facts.kinds
    ]
    model = replace(facts, kinds=tuple(kinds))
    adapters = replace(training, optimizer="", optimizer_bits=0, blocks=0)
    longest = max(workload.lengths)
    shape = Shape(min(workload.batch_size, LARGEST.rows), min(longest, LARGEST.tokens))
    size = min(workload.batch_size * longest, LARGEST.tokens)
    passes = workload.forward, workload.scores, bool(workload.reward_models)
    read = min(workload.read_tokens, LARGEST.tokens)
    settings = workload.packed, has_dropout, workload.score_head, workload.engine, read, *passes
    parts = (sources_digest(), dtype, model, adapters, shape, size, *settings, workload.rollouts)
    return (*machine_key(), *map(str, parts))


def in_order(sizes: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """The sizes by name: files have them in any order."""
    return dict(sorted(sizes.items()))


@cache
def sources_digest() -> str:
    """The digest of the code that decides costs."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for name in SOURCES:
        place = package / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def machine_key() -> list[str]:
    """Facts that costs depend on: the device, its name, the versions of mlx and mlx-lm, the CPUs
    and threads, and the BLAS library."""
    device, name = mx.default_device().type, mx.device_info().get("device_name")
    parts = [str(part) for part in (device, name, version("mlx"), version("mlx-lm"))]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = [f"{name}={os.environ[name]}" for name in THREADS if name in os.environ]
    return [*parts, f"{cpus} CPUs", *threads, *blas_libraries()]


def blas_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The BLAS libraries that this process has loaded, on Linux; products depend on them most.

    Those that come with Python packages are not MLX's.
    """
    try:
        lines = maps.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    files = (Path(line[line.index("/") :]) for line in lines if "/" in line)
    found = {f for f in files if BLAS.search(f.name) and "site-packages" not in f.parts}
    return sorted({f"{file.parent.name}/{file.name}" for file in found})


def budget_of_evaluation(
    training: Training,
    folder: Path,
    dtype: mx.Dtype,
    lengths: Sequence[int],
    batch_size: int,
    limit: MemoryLimit,
    *,
    engine: str = "auto",
    can_stream: bool = True,
    answers: RolloutSizes | None = None,
    score_head: bool = False,
    teacher: TeacherSizes | None = None,
    measuring: Measuring | None = None,
) -> Budget:
    """The budget of an evaluation with the model in `folder`, without training.

    training: describes the adapter on the model. answers: those that are generated, if any are.
    score_head: whether it is a reward model. teacher: whose predictions are compared.
    measuring: as in `budget_of`. The other arguments are as in `workload_of`. Raises UserError if
    nothing fits.
    """
    workload = Workload(
        facts=facts_of(folder, dtype.size),
        training=training,
        lengths=tuple(sorted(set(lengths))),
        batch_size=batch_size,
        rows_per_step=batch_size,
        engine=engine,
        can_stream=can_stream,
        rollouts=answers,
        forward=True,
        score_head=score_head,
        teacher=teacher,
        process=process_here(),
    )
    workload, key = with_costs(workload, dtype, limit, PriorPlans(), measuring)
    return Budget(limit, workload, choose(workload, limit.limit_bytes), key)


def limit_generation(
    facts: ModelFacts, tokens: int, max_memory_gb: float, can_stream: bool
) -> bool:
    """Limit MLX's memory for generation; return whether the weights must be streamed.

    tokens: tokens of prompt and completion together.
    Raises UserError if neither resident nor streamed weights fit.
    """
    limit = limit_of(max_memory_gb).limit_bytes
    beside = python_bytes() + generation_bytes(facts, tokens)
    resident = beside + facts.weights_bytes
    streamed = beside + weights_bytes(facts, "streamed")
    least = min(resident, streamed) if can_stream else resident
    if least > limit:
        raise too_much_to_generate(max_memory_gb, least)
    streams = resident > limit
    allocator.set_limits(limit, streamed if streams else resident, python_bytes())
    return streams


def too_much_to_generate(max_memory_gb: float, least_bytes: int) -> UserError:
    return UserError(
        f"--max-memory {max_memory_gb:g}: generating with this model needs at "
        f"least {in_gb(rounded_up(least_bytes))}; raise the limit to that, or lower --max-tokens"
    )


@dataclass(frozen=True)
class WavePlan:
    """The number of completions generated together, and how the weights are read."""

    wave: int
    """Rows; at least one."""
    streams: bool
    """Whether the weights are read from their files for each token."""


def plan_waves(
    facts: ModelFacts, sizes: RolloutSizes, max_memory_gb: float | None, can_stream: bool
) -> WavePlan:
    """The fastest way to generate these completions that fits, as in training: streamed weights
    rather than waves of a few rows.

    max_memory_gb: MLX's memory is limited accordingly. Raises UserError if not even one row fits.
    None: as much as the machine has; if one row does not fit, it is tried all the same.
    """
    limit = limit_of(max_memory_gb).limit_bytes
    chosen, needed = waves_within(facts, sizes, limit, can_stream)
    if max_memory_gb is not None:
        if chosen is None:
            raise too_much_to_generate(max_memory_gb, needed)
        allocator.set_limits(limit, needed, python_bytes())
    return chosen or WavePlan(1, streams=False)


def waves_within(
    facts: ModelFacts, sizes: RolloutSizes, limit_bytes: int, can_stream: bool
) -> tuple[WavePlan | None, int]:
    """The fastest way to generate these completions inside a limit of the process, and the bytes
    that it needs; None, and the least that any way needs, if not even one row fits."""
    most = allowed(probe.most_buffers() or UNLIMITED)
    of_weights = {False: facts.weights_bytes}
    if can_stream:
        of_weights[True] = weights_bytes(facts, "streamed")

    def needed_bytes(wave: int, weights: int) -> int:
        phases = rollout_phases(facts, sizes, wave)
        return python_bytes() + weights + int(max(sum(phase.values()) for phase in phases))

    found = [
        (WavePlan(wave, streams), needed_bytes(wave, weights))
        for waves in wave_sizes(sizes.rows)
        for streams, weights in of_weights.items()
        for wave in waves
        if of_wave(facts, sizes, wave) <= most
    ]
    least = min(needed for _, needed in found)
    return next((each for each in found if each[1] <= limit_bytes), (None, least))
