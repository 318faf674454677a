"""`your_ai doctor --fit-memory`: measure peaks on this machine, and fit the estimates to them.

`python -m your_ai.doctor.measure_memory MODEL BITS FOLDER` measures one small model with random
weights in a process of its own, and prints one peak per line as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from your_ai.config import TrainConfig
from your_ai.doctor import fit_memory
from your_ai.doctor.fit_memory import Peak, PeakKind
from your_ai.doctor.shapes import built_with_adapters, make_shape
from your_ai.engine.gradients import gradients_in
from your_ai.engine.weights import open_model
from your_ai.errors import RunError
from your_ai.files import replace_text
from your_ai.gates.console import echo_json
from your_ai.gates.programs import python_module
from your_ai.gates.text import counted
from your_ai.hub.find import store
from your_ai.memory import allocator, budget, coefficients
from your_ai.memory.calibration import FAR, Shape
from your_ai.memory.coefficients import Fitted
from your_ai.memory.estimate import estimate
from your_ai.memory.estimate_kept import everything
from your_ai.memory.facts import ModelFacts, facts_of
from your_ai.memory.workload import NOTHING, Kept, Plan, Training, Workload
from your_ai.nets import model
from your_ai.training import optimizer
from your_ai.training.measure_peaks import batch_of

MODULE = "your_ai.doctor.measure_memory"
MODELS = (("narrow", 4), ("narrow", 0), ("wide", 4))  # of doctor/shapes.py, with their bits
# Engines, and whether all adapted blocks keep all that they may. streamed differs from staged
# in its weights alone.
ENGINES = (("fused", False), ("staged", False), ("staged", True))
ADAPTED = ((2, "q_proj"), ("all", "all-linear"))  # blocks and layers with adapters
RANK = 16
TRAINED = (Shape(1, 64), Shape(1, 256), Shape(4, 256), Shape(1, 1024))
EVALUATED = (Shape(1, 256), Shape(4, 256))
FEWEST = 20  # peaks to fit to


def measured_peaks() -> Iterator[Peak]:
    """Measure every case that fits into this machine's memory, each model in its own process.

    Raises RunError if a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="your_ai-memory-") as place:
        for name, bits in MODELS:
            yield from peaks_of_process(name, bits, Path(place))


def peaks_of_process(name: str, bits: int, place: Path) -> Iterator[Peak]:
    """The peaks that a process of this module measures and prints. Raises RunError."""
    command = python_module(MODULE, name, str(bits), str(place))
    with (
        open(place / "errors.txt", "w+", encoding="utf-8") as errors,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        try:
            for line in process.stdout or ():
                yield from fit_memory.from_json(json.loads(line))
            if process.wait() != 0:
                errors.seek(0)
                lines = errors.read().strip().splitlines()
                reason = lines[-1] if lines else f"exit status {process.returncode}"
                raise RunError(f"measuring {name} at {bits} bits failed: {reason}")
        finally:
            process.kill()


def fitted_to(peaks: Sequence[Peak]) -> Fitted:
    """Fit this machine's coefficients. Raises RunError for too few peaks."""
    if len(peaks) < FEWEST:
        fitting = counted(len(peaks), "case fits", "cases fit")
        raise RunError(f"only {fitting} into this machine's free memory; close others")
    found = fit_memory.fit(peaks, coefficients.PACKAGED)
    off = fit_memory.errors(peaks, found)
    return Fitted(
        coefficients=found,
        machine=tuple(budget.machine_key()),
        date=time.strftime("%Y-%m-%d"),
        peaks=len(peaks),
        lowest=round(float(off.min()), 4),
        highest=round(float(off.max()), 4),
    )


def keep(fitted: Fitted, peaks: Sequence[Peak]) -> Path:
    """Write what was fitted to where plans read it; the file's path."""
    path = store() / coefficients.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, coefficients.fitted_text(fitted, fit_memory.to_json(peaks)))
    return path


def describe(peak: Peak) -> str:
    """`1 x 256 tokens, fused, 4 blocks, training: 123.4 MB`."""
    kind = "evaluation" if peak.kind == "evaluation" else "training"
    return (
        f"{peak.rows} x {peak.tokens} tokens, hidden size {peak.facts.hidden}, {peak.engine}, "
        f"{counted(peak.training.blocks, 'block')} adapted, {kind}: {peak.peak_bytes / 1e6:.1f} MB"
    )


# In the process that measures


def measure_model(name: str, bits: int, place: Path) -> Iterator[Peak]:
    """The peaks of one model, under every engine and set of adapters."""
    dtype = model.compute_dtype("auto")
    folder = make_shape(name, bits, str(dtype).removeprefix("mlx.core."), place)
    facts = facts_of(folder, dtype.size)
    limit_bytes = budget.limit_of(None).limit_bytes
    for engine, keeps in ENGINES:
        for blocks, targets in ADAPTED:
            count = facts.blocks if blocks == "all" else int(blocks)
            training = Training(blocks=count, rank=RANK, targets=(targets,), experts=True)
            kept = everything(count) if keeps else NOTHING
            yield from measure_engine(folder, dtype, facts, training, engine, limit_bytes, kept)


def measure_engine(
    folder: Path,
    dtype: mx.Dtype,
    facts: ModelFacts,
    training: Training,
    engine: str,
    limit: int,
    kept: Kept = NOTHING,
    cases: Sequence[tuple[PeakKind, Shape]] | None = None,
) -> Iterator[Peak]:
    """The peaks of one engine; cases that could exceed `limit` bytes are left out.

    cases: kinds and shapes of peaks, instead of those that are usually measured.
    """
    allocator.free()
    mx.set_cache_limit(0)
    empty_bytes = mx.get_active_memory()
    opened = open_model(folder, dtype)
    config = TrainConfig(
        lora_rank=training.rank,
        lora_layers=training.blocks,
        lora_targets=training.targets,
        lora_experts=training.experts,
    )
    plan, place = Plan(engine, 0, kept=kept), Path(tempfile.gettempdir())
    built = built_with_adapters(opened, config, plan, place)
    on_disk = place if plan.gradients_on_disk else None

    def peak(kind: PeakKind, shape: Shape, peak_bytes: int) -> Peak:
        rows, tokens = shape
        return Peak(
            facts=facts, training=training, engine=engine, rows=rows, tokens=tokens, kind=kind,
            peak_bytes=peak_bytes, kept=kept,
        )  # fmt: skip

    if cases is None:
        scored = () if kept else EVALUATED
        cases = [*(("gradients", s) for s in TRAINED), *(("evaluation", s) for s in scored)]
    update: optimizer.Update | None = None
    for kind, shape in cases:
        workload = Workload(facts=facts, training=training, forward=kind == "evaluation")
        plan = Plan(engine, shape.size, kept=kept)
        worst = estimate(workload, plan, *shape, work_ratio=FAR, gradients_only=True)
        if worst.process_bytes > limit:
            continue
        batch = batch_of(shape, packing=False)
        mx.synchronize()
        mx.reset_peak_memory()
        before_bytes = mx.get_active_memory() if kind == "gradients" else empty_bytes
        if kind == "evaluation":
            mx.eval(built.engine.score(batch))
        else:
            if kind == "step" and update is None:  # from here on, its states are in memory
                update = update_of(opened.network, config)
            gradients = gradients_in(on_disk)
            mx.eval(built.engine.add_gradients(batch, 1.0, 0, gradients))
            if kind == "step" and update is not None:
                update(gradients, 1.0, config.learning_rate)
            del gradients
        mx.synchronize()
        yield peak(kind, shape, mx.get_peak_memory() - before_bytes)
        built.engine.drop()


def update_of(network: nn.Module, config: TrainConfig) -> optimizer.Update:
    adamw = optimizer.build_optimizer(config, network.trainable_parameters())
    return optimizer.make_update(network, adamw)


if __name__ == "__main__":
    for found in measure_model(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])):
        echo_json(fit_memory.to_json([found]))
        sys.stdout.flush()
