"""`your_ai bench --calibrate`: measure this machine's speed with small models, in 20 seconds.

It times gradients and updates of small models with random weights, with 4 bits and without
quantization, under each engine. `fit_speed` finds the seconds of one operation of each kind.
"""

from __future__ import annotations

import gc
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table

from your_ai.config import ALL_LINEAR, TrainConfig
from your_ai.data.batches import Batch
from your_ai.doctor import kernel_times
from your_ai.doctor.fit_speed import TimedWork, errors, fitted_seconds
from your_ai.doctor.shapes import built_with_adapters, llama, write_shape
from your_ai.engine.gradients import Gradients, gradients_in
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import open_model
from your_ai.errors import RunError
from your_ai.files import replace_text
from your_ai.gates.text import counted
from your_ai.hub.find import store
from your_ai.memory import budget, speed
from your_ai.memory.calibration import Shape
from your_ai.memory.facts import facts_of
from your_ai.memory.speed import MachineSpeed
from your_ai.memory.step_time import StepOperations, Work, add
from your_ai.memory.workload import Kept, Plan, StepSizes, Training
from your_ai.nets import model
from your_ai.rng import derive_seed
from your_ai.training import optimizer
from your_ai.training.measure_peaks import batch_of
from your_ai.training.optimizer import Update

BITS = (0, 4)
SHOWN = {  # by kind of operation: what the table says
    "matmul": ("products with dense weights", "multiply-adds"),
    "quantized_matmul": ("products with 4-bit weights", "multiply-adds"),
    "quantized_weights": ("preparing 4-bit weights", "weights"),
    "attention": ("products of attention", "multiply-adds"),
    "logits": ("losses", "logits"),
    "parameters": ("updates", "parameters"),
}
REPEATS = 3  # after one step that compiles; fewer if the time is used up
LONGEST_S = 20.0  # of the whole calibration
MOST_ERROR = 0.15  # median of the relative errors of the fit, on a machine that is calm
FAST = 2e10  # multiply-adds per second from which the larger models are quick


@dataclass(frozen=True)
class SpeedCase:
    """Gradients of micro-batches of a model, to be timed."""

    engine: str
    shapes: tuple[Shape, ...]
    blocks: int = 2
    targets: tuple[str, ...] = (ALL_LINEAR,)
    kept: int = 0
    spill: bool = False
    rank: int = 16

    @property
    def plan(self) -> Plan:
        most = max(shape.size for shape in self.shapes)
        return Plan(self.engine, most, self.spill, kept=Kept(linear=self.kept))


@dataclass(frozen=True)
class SpeedModels:
    """The models that are measured on fast or on slow machines.

    Their heads differ in size and number, and so do their blocks and vocabularies: each costs time
    of its own. In the smallest one that is mostly the time of what does not depend on sizes.
    """

    configs: tuple[dict[str, Any], ...]
    long: int
    """Tokens of the longest row."""
    kernels: kernel_times.Kernels


ON_FAST = SpeedModels(
    (
        llama(128, 3, 2, 2, 256, 500),
        llama(256, 2, 4, 4, 704, 12000),
        llama(1024, 2, 8, 2, 2816, 4000),
    ),
    384,
    kernel_times.FAST,
)
ON_SLOW = SpeedModels(
    (llama(128, 2, 4, 4, 384, 4000), llama(384, 2, 4, 1, 1024, 1000)), 128, kernel_times.SLOW
)


def cases_of(bits: int, long: int) -> tuple[SpeedCase, ...]:
    """The cases of a model; long: tokens of the longest row.

    Only the products differ between models with 4 bits and others.
    """
    short = Shape(1, 64)
    cases = (
        SpeedCase("fused", (short, Shape(1, long))),
        SpeedCase("staged", (short, Shape(1, long))),
    )
    if bits:
        return cases
    return (
        *cases,
        SpeedCase("fused", (Shape(4, long // 4),), blocks=1, targets=("q_proj",)),
        SpeedCase("staged", (Shape(1, long // 2),), kept=2),
        SpeedCase("streamed", (Shape(2, 64), Shape(1, long // 2)), spill=True),
    )


def measured_times(
    on_note: Callable[[str], object] = lambda _: None,
    now: Callable[[], float] = time.perf_counter,
    longest_s: float = LONGEST_S,
) -> list[TimedWork]:
    """Time every case on this machine; repeat them as long as `longest_s` seconds allow.

    A time is the median of the repetitions.
    """
    deadline = now() + longest_s
    measured = ON_FAST if multiply_adds_per_s(now) > FAST else ON_SLOW
    dtype = model.compute_dtype("auto")
    on_note("measuring speed: parts of a step")
    found = list(kernel_times.kernel_times(measured.kernels, dtype, now))
    with tempfile.TemporaryDirectory(prefix="your_ai-speed-") as place:
        turns = [
            (config, bits, case)
            for bits in BITS
            for config in measured.configs
            for case in cases_of(bits, measured.long)
        ]
        for number, (config, bits, case) in enumerate(turns, 1):
            on_note(f"measuring speed: steps ({number} of {len(turns)})")
            name = f"{config['hidden_size']}-{bits}bit"
            folder = Path(place) / name
            if not folder.is_dir():
                write_shape(config, name, bits, str(dtype).removeprefix("mlx.core."), folder)
            left_s = (deadline - now()) / (len(turns) - number + 1)
            found += times_of(folder, dtype, case, now, left_s)
    return found


def multiply_adds_per_s(now: Callable[[], float]) -> float:
    """About how many multiply-adds the device does in a second."""
    size = 256
    x = mx.random.normal((size, size), key=mx.random.key(0))
    mx.eval(x @ x)
    began = now()
    mx.eval((x @ x) @ x)
    return 2 * size**3 / max(1e-9, now() - began)


def times_of(
    folder: Path, dtype: mx.Dtype, case: SpeedCase, now: Callable[[], float], left_s: float
) -> Iterator[TimedWork]:
    """Time the gradients and the updates of one case; about `left_s` seconds."""
    training = Training(blocks=case.blocks, rank=case.rank, targets=case.targets)
    sizes = StepSizes(on_cpu=mx.default_device().type == mx.cpu)
    of_run = StepOperations(facts_of(folder, dtype.size), training, sizes)
    updates: list[float] = []
    stepper = prepared(folder, dtype, case)
    for shape in case.shapes:
        steps = stepper.steps(shape, REPEATS, now, left_s / len(case.shapes))
        work: Work = {}
        for term in of_run.of_micro_batch(case.plan, *shape).values():
            add(work, term)
        name = f"{folder.name} {case.engine} {case.kept or ''} {case.targets[0]} {shape.tokens}"
        yield TimedWork(name, work, statistics.median(gradients for gradients, _ in steps[1:]))
        updates += [seconds for _, seconds in steps[1:]]
    yield TimedWork(
        f"{folder.name} update", of_run.of_update(case.plan), statistics.median(updates)
    )


@dataclass(frozen=True)
class TimedSteps:
    """A model that is ready for the steps of a case."""

    engine: Engine
    update: Update
    gradients: Gradients
    vocabulary: int

    def steps(
        self, shape: Shape, repeats: int, now: Callable[[], float], left_s: float = math.inf
    ) -> list[tuple[float, float]]:
        """The seconds of the gradients and of the update of each step; the first one compiles.

        left_s: no step begins after so many seconds, but the second one.
        """
        batch, found = random_batch(shape, self.vocabulary), list[tuple[float, float]]()
        began = now()
        for repeat in range(1 + repeats):
            if repeat > 1 and now() - began > left_s:
                break
            start = now()
            mx.eval(self.engine.add_gradients(batch, 1.0, 0, self.gradients))
            middle = now()
            self.update(self.gradients, 1.0, 1e-5)
            found.append((middle - start, now() - middle))
        return found


def prepared(folder: Path, dtype: mx.Dtype, case: SpeedCase) -> TimedSteps:
    gc.collect()
    opened = open_model(folder, dtype)
    config = TrainConfig(
        lora_rank=case.rank, lora_layers=case.blocks, lora_targets=case.targets, max_grad_norm=0
    )
    plan = case.plan
    built = built_with_adapters(opened, config, plan, folder)
    adamw = optimizer.build_optimizer(
        config, opened.network.trainable_parameters(), folder if plan.states_on_disk else None
    )
    update = optimizer.make_update(opened.network, adamw)
    gradients = gradients_in(folder if plan.gradients_on_disk else None)
    return TimedSteps(built.engine, update, gradients, opened.config["vocab_size"])


def random_batch(shape: Shape, vocabulary: int) -> Batch:
    """A micro-batch of random tokens, all of them trained: rows of the vocabulary's weights are
    read for each different one."""
    batch = batch_of(shape, packing=False)
    rng = np.random.Generator(np.random.PCG64(derive_seed("speed")))
    tokens = rng.integers(0, vocabulary, batch.tokens.shape, dtype=np.int32)
    targets = rng.integers(0, vocabulary, batch.targets.shape, dtype=np.int32)
    return replace(batch, tokens=tokens, targets=targets)


def calibrated(measured: Sequence[TimedWork]) -> MachineSpeed:
    """The speed of this machine, fitted to these times.

    Raises RunError if they do not agree, as when other programs keep the machine busy.
    """
    seconds = fitted_seconds(measured)
    off = errors(measured, seconds)
    if (typical := float(np.median(np.abs(off)))) > MOST_ERROR:
        raise RunError(
            f"the measured times do not agree: half of them are {typical:.0%} off or more, so "
            "nothing is kept; other programs keep this machine busy: end them, and calibrate again"
        )
    return MachineSpeed(
        seconds=seconds,
        float_bytes=model.compute_dtype("auto").size,
        machine=tuple(budget.speed_key()),
        date=time.strftime("%Y-%m-%d"),
        lowest=round(float(off.min()), 4),
        highest=round(float(off.max()), 4),
    )


def keep_speed(found: MachineSpeed, measured: Sequence[TimedWork]) -> Path:
    """Write the speed to where plans read it; the file's path."""
    path = store() / speed.FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    times = [[each.name, each.seconds, each.work] for each in measured]
    replace_text(path, speed.speed_text(found, times))
    return path


def speed_table(found: MachineSpeed, measured: Sequence[TimedWork], path: Path) -> RenderableType:
    """Return what was measured, and how well the speed fits to it."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("")
    drawn.add_column("", justify="right")
    for kind, (text, unit) in SHOWN.items():
        if found.seconds[kind] > 0:
            drawn.add_row(text, f"{1e-9 / found.seconds[kind]:.2g} billion {unit} / s")
    return Group(
        drawn,
        "",
        f"{counted(len(measured), 'time')} measured; predictions of them are "
        f"{found.lowest:+.0%} to {found.highest:+.0%} off",
        f"plans on this machine predict seconds from now on; to go back, delete {path}",
    )
