"""The checks of the self-test that need MLX. Each runs in its own process, which may be killed.

`python -m your_ai.doctor.checks NAME FOLDER ...` runs one in a folder in which the check `model`
ran first, and prints an Outcome as JSON. The rest are arguments of this check.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from your_ai.config import TrainConfig
from your_ai.data.batches import Batch
from your_ai.doctor import bench, our_plans
from your_ai.doctor.contest import Contest, contest_batches, contest_tokens
from your_ai.doctor.machine import SHARED, device, read_machine
from your_ai.doctor.shapes import built_with_adapters, make_shape
from your_ai.engine.protocol import Engine
from your_ai.engine.reload import reload_adapted
from your_ai.engine.weights import Opened, open_model
from your_ai.files import packaged
from your_ai.gates.console import echo_json
from your_ai.gates.token_ids import vocabulary_of
from your_ai.memory import allocator, probe
from your_ai.nets import model
from your_ai.nets.numerics import compute_dtype
from your_ai.run.checkpoint import ADAPTERS

SHAPE, SHAPE_OF_A_GPU = "tiny", "small"  # the second is used only to measure speed
BITS = 4
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")  # of the demo model
PLANS = ("fused", "staged", "streamed")
VARIANTS = ("spilled", "kept")  # of streamed and of staged, named as in `bench`
WAYS = (*PLANS, "kept", "resident")  # plans that compute gradients in different ways
ROWS, TOKENS = 2, 192  # long enough for attention in blocks on any device
FEW_TOKENS = 64  # for checks that do not depend on the length
STEPS = 4
LONG_TOKENS, LONG_TOKENS_OF_A_CPU = 8192, 2048  # of rows that run through blocks in tiles
ARRAY_BYTES = 64 << 20
RETURN_S = 2.0  # a system that is busy counts freed memory a moment later
# Tolerated differences of gradients between plans. On the CPU: 1e-6, and 8e-3 in bfloat16.
AGREE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.05}
# Newer GPUs keep 10 bits of float32 in products otherwise, which is not the fault of a plan.
FULL_FLOAT32 = {"MLX_ENABLE_TF32": "0"}
COMPARED = ("gradients", "plain", "tiles")  # the checks that need it
# A peak may be this many times its estimate, and at least that part of it. On the CPU: 0.8 to 1.0.
PEAK_AT_MOST, PEAK_AT_LEAST = 1.1, 0.8
PLANS_BY_PLAIN = 1.5  # how much more than plain autograd in the same dtype they may differ

LossAndGradients = tuple[float, dict[str, mx.array]]
"""The mean loss, and the gradients by name."""


@dataclass(frozen=True)
class Outcome:
    ok: bool
    measured: str
    """The measurements in words."""
    figures: dict[str, Any] = field(default_factory=dict)
    """The measured numbers by name."""


class MadeModel(NamedTuple):
    """A model with nonzero adapters, and an engine for it."""

    network: nn.Module
    engine: Engine
    batches: list[Batch]


def make_model(folder: Path) -> Outcome:
    """Create the model for all other checks, with a tokenizer. Reports device and dtype."""
    path = make_shape(SHAPE, BITS, "float32", folder)
    for name in TOKENIZER:
        shutil.copy(packaged("models", "demo") / name, path / name)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    kind, dtype = device(), dtype_name(compute_dtype("auto"))
    figures = {"device": kind, "dtype": dtype, "folder": str(path), "bytes": size}
    return Outcome(True, f"{SHAPE}, {size / 1e6:.1f} MB, on {kind} in {dtype}", figures)


def dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def count_memory(folder: Path) -> Outcome:
    """Check that MLX's counters and the system's count follow one array."""
    mx.set_cache_limit(4 * ARRAY_BYTES)
    allocator.free()  # the C library may hold freed memory, which the array would take
    mx.reset_peak_memory()
    before = probe.read()
    array = mx.arange(ARRAY_BYTES // 4)
    mx.eval(array)
    held = probe.read()
    del array
    dropped = probe.read()
    allocator.free()

    def rise(now: Any, name: str) -> int:
        was, found = getattr(before, name), getattr(now, name)
        return 0 if was is None or found is None else found - was

    much, little = 0.9 * ARRAY_BYTES, 0.1 * ARRAY_BYTES
    cleared, deadline = probe.read(), time.monotonic() + RETURN_S
    while rise(cleared, "process_bytes") > little and time.monotonic() < deadline:
        time.sleep(0.02)
        cleared = probe.read()
    figures = {
        "active": rise(held, "active_bytes"),
        "peak": (held.peak_bytes or 0) - (before.active_bytes or 0),
        "active when dropped": rise(dropped, "active_bytes"),
        "cache when dropped": rise(dropped, "cache_bytes"),
        "cache when cleared": rise(cleared, "cache_bytes"),
        "process": rise(held, "process_bytes"),
        "process when cleared": rise(cleared, "process_bytes"),
    }
    wrong = [n for n in ("active", "peak", "cache when dropped") if figures[n] < much]
    wrong += [n for n in ("active when dropped", "cache when cleared") if figures[n] > little]
    if device() != "cuda":  # a card's memory does not count for the process
        wrong += ["process"] if figures["process"] < much else []
        wrong += ["process when cleared"] if figures["process when cleared"] > little else []
    shown = ", ".join(f"{name} {size / 1e6:+.0f}" for name, size in figures.items())
    failed = f"; wrong: {', '.join(wrong)}" if wrong else ""
    return Outcome(not wrong, f"an array of {ARRAY_BYTES / 1e6:.0f} MB: {shown}{failed}", figures)


def compare_gradients(folder: Path) -> Outcome:
    """Compare each plan's gradients with the fused ones, with dropout and nonzero adapters."""
    figures: dict[str, float] = {}
    dtypes = dict.fromkeys(("float32", dtype_name(compute_dtype("auto"))))
    for dtype in dtypes:
        contest = contest_of(model_in(folder), dtype, TOKENS)
        expected = step_of(made(folder, "fused", contest))
        for plan in (*PLANS[1:], "kept"):
            figures[f"{plan} {dtype}"] = difference(step_of(made(folder, plan, contest)), expected)
    ok = all(found <= AGREE[name.split()[1]] for name, found in figures.items())
    shown = ", ".join(f"{name} {found:.1e}" for name, found in figures.items())
    return Outcome(ok, f"worst relative difference to fused: {shown}", figures)


def compare_with_plain(folder: Path, dtype: str, *chosen: str) -> Outcome:
    """Compare each plan's gradients with those of mlx-lm's model, in float32 on the CPU, where
    nothing of ours is between the model and its loss. The weights have 4 bits, or all of theirs.

    In `dtype`, that model differs from itself in float32. The plans may do so little more.
    chosen: the plans to compare; all of WAYS by default.
    """
    figures: dict[str, float] = {}
    ok, slow = True, device() == "cpu" and dtype != "float32"
    tokens, ways = (FEW_TOKENS, WAYS[:2]) if slow else (TOKENS, chosen or WAYS)
    for bits, named in ((BITS, f" {BITS}-bit"), (0, "")):
        contest = contest_of(make_shape(SHAPE, bits, "float32", folder), dtype, tokens)
        expected = plain_step(contest, "float32")
        most = AGREE["float32"]
        if dtype != "float32":
            figures[f"plain{named}"] = apart = difference(plain_step(contest, dtype), expected)
            most = PLANS_BY_PLAIN * apart
        for plan in ways:
            found = difference(step_of(made(folder, plan, contest, dropout=0.0)), expected)
            figures[f"{plan}{named}"], ok = found, ok and found <= most
    shown = ", ".join(f"{name} {found:.1e}" for name, found in figures.items())
    text = f"{ROWS} rows of {tokens} tokens, worst relative difference to plain float32: {shown}"
    return Outcome(ok, text, {**figures, "tokens": tokens})


def plain_step(contest: Contest, dtype: str) -> LossAndGradients:
    """The mean loss and the gradients by name, from all logits, uncompiled."""
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            opened, config, rows = opened_for(contest, dtype, dropout=0.0)
            network, tokens = opened.network, mx.array(rows)
            model.add_adapters(network, config)
            shake(network)

            def mean_loss() -> mx.array:
                logits = network(tokens[:, :-1])[:, -contest.targets :]
                targets = tokens[:, -contest.targets :]
                return nn.losses.cross_entropy(logits.astype(mx.float32), targets).mean()

            loss, grads = nn.value_and_grad(network, mean_loss)()
            mx.eval(loss, grads)
    finally:
        mx.enable_compile()
    value = loss.item()
    assert isinstance(value, float)
    return value, dict(tree_flatten(grads))


def compare_tiles(folder: Path) -> Outcome:
    """Compare gradients of long rows that run through blocks in tiles with the fused ones."""
    figures: dict[str, float] = {}
    tokens = LONG_TOKENS_OF_A_CPU if device() == "cpu" else LONG_TOKENS
    for dtype in dict.fromkeys(("float32", dtype_name(compute_dtype("auto")))):
        contest = contest_of(model_in(folder), dtype, tokens)
        expected = step_of(made(folder, "fused", contest, dropout=0.0))
        for plan in ("staged", "kept"):
            mx.reset_peak_memory()
            found = step_of(made(folder, plan, contest, dropout=0.0))
            figures[f"{plan} {dtype}"] = difference(found, expected)
            figures[f"{plan} {dtype} peak MB"] = mx.get_peak_memory() / 1e6
    differences = {name: each for name, each in figures.items() if not name.endswith("MB")}
    ok = all(found <= AGREE[name.split()[1]] for name, found in differences.items())
    shown = ", ".join(f"{name} {found:.1e}" for name, found in differences.items())
    text = f"{ROWS} rows of {tokens} tokens, worst relative difference to fused: {shown}"
    return Outcome(ok, text, {**figures, "tokens": tokens})


def compare_peak(folder: Path, plan: str, bits: str, tokens: str, dtype: str) -> Outcome:
    """Compare the peak of MLX's memory in two steps with its estimate, from costs of blocks that
    are measured here. plan: as in `bench`. dtype: on a GPU; a CPU computes in float32."""
    on_cpu = device() == "cpu"
    shape, dtype = (SHAPE, "float32") if on_cpu else (SHAPE_OF_A_GPU, dtype)
    path = make_shape(shape, int(bits), dtype, folder / "peaks")
    contest = dataclasses.replace(contest_of(path, dtype, int(tokens)), steps=2, measures=True)
    found = bench.run_contender(contest, plan)
    ratio = found["peak_bytes"] / found["estimated_bytes"]
    figures = {name: found[name] for name in ("peak_bytes", "estimated_bytes", "process_bytes")}
    figures |= {"shape": shape, "dtype": dtype, "seconds": min(found["seconds"][1:])}
    return Outcome(PEAK_AT_LEAST <= ratio <= PEAK_AT_MOST, f"{ratio:.2f}", figures)


def describe_machine(folder: Path) -> Outcome:
    """Read what may be shared about this machine: no paths, no names of its owner."""
    found = read_machine()
    shared = {name: getattr(found, name) for name in SHARED}
    shared["blas"] = found.blas and Path(found.blas).parent.name
    # Its owner may name a kernel.
    shared["release"] = re.split(r"[^\d.]", found.release or "", maxsplit=1)[0]
    text = ", ".join(str(part) for part in (found.gpu or found.chip, found.device) if part)
    return Outcome(found.mlx_fault is None, found.mlx_fault or text, shared)


def compare_reloads(folder: Path) -> Outcome:
    """Compare updates with and without reloads. Two runs without show what varies anyway."""
    dtype = dtype_name(compute_dtype("auto"))
    contest = contest_of(model_in(folder), dtype, FEW_TOKENS)
    found, read, same_weights = [], 0, True
    for plan in PLANS[:2]:
        plain, again, reloaded = (updated(plan, contest, r) for r in (False, False, True))
        read, same_weights = reloaded.read_bytes, same_weights and reloaded.same_weights
        found.append((plan, same(plain, again), same(plain, reloaded)))
    texts = [
        f"{plan}: {'bit-identical' if reloaded == 0 else f'differs by {reloaded:.1e}'}"
        + ("" if alike == 0 else f" (two runs without a reload differ by {alike:.1e})")
        for plan, alike, reloaded in found
    ]
    weights = "the weights are the same" if same_weights else "weights are not the same"
    ok = read > 0 and same_weights
    ok = ok and all(reloaded <= 10 * alike for _, alike, reloaded in found)
    text = f"{STEPS} updates, {read / 1e6:.2f} MB read before each: {', '.join(texts)}; {weights}"
    figures = {plan: {"alike": alike, "reloaded": again} for plan, alike, again in found}
    return Outcome(ok, text, {"read_bytes": read, **figures})


def time_plans(folder: Path) -> Outcome:
    """Time a step under each plan, without the first step, and check that the losses agree."""
    kind, dtype = device(), dtype_name(compute_dtype("auto"))
    shape = SHAPE if kind == "cpu" else SHAPE_OF_A_GPU
    path = make_shape(shape, BITS, dtype, folder / "speed")
    contest = contest_of(path, dtype, TOKENS)
    figures, losses = {}, {}
    for plan in (*PLANS, *VARIANTS):
        steps = list(our_plans.run_ours(contest, plan))
        figures[plan] = min(seconds for _, seconds, _ in steps[1:])
        losses[plan] = [loss for loss, *_ in steps]
    rounding = AGREE[dtype]
    ok = all(
        math.isclose(loss, expected, rel_tol=rounding)
        for found in losses.values()
        for loss, expected in zip(found, losses["fused"], strict=True)
    )
    shown = ", ".join(f"{plan} {seconds:.3f}" for plan, seconds in figures.items())
    text = f"seconds per step of {ROWS} x {TOKENS} tokens of {shape}, {dtype}: {shown}"
    return Outcome(ok, text + ("" if ok else f"; the losses differ: {losses}"), figures)


def compare_adapters(folder: Path) -> Outcome:
    """Compare the finished adapters of the runs `whole` and `killed`."""
    files = [folder / "runs" / run / "adapter" / ADAPTERS for run in ("whole", "killed")]
    if files[0].read_bytes() == files[1].read_bytes():
        return Outcome(True, "the adapter has the same bytes", {"differs": 0.0})
    loaded: list[Any] = [mx.load(str(file)) for file in files]
    ours, theirs = loaded
    worst = max(relative(ours[name], theirs[name]) for name in ours)
    exact = device() == "cpu"  # sums on a GPU may depend on the order
    return Outcome(
        not exact and worst <= AGREE["float32"], f"the adapter differs by {worst:.1e}",
        {"differs": worst},
    )  # fmt: skip


CHECKS: dict[str, Callable[..., Outcome]] = {
    "machine": describe_machine,
    "model": make_model,
    "counters": count_memory,
    "gradients": compare_gradients,
    "plain": compare_with_plain,
    "tiles": compare_tiles,
    "peak": compare_peak,
    "reload": compare_reloads,
    "speed": time_plans,
    "adapters": compare_adapters,
}


# A model and its steps


def contest_of(path: Path, dtype: str, tokens: int) -> Contest:
    return Contest(
        folder=str(path),
        dtype=dtype,
        seq_len=tokens,
        batch_size=ROWS,
        lora_rank=8,
        lora_layers="all",
        lora_targets="all-linear",
        supervised=0.5,
        steps=STEPS,
        learning_rate=1e-3,
    )


def model_in(folder: Path) -> Path:
    return folder / f"{SHAPE}-{BITS}bit-float32"


def made(folder: Path, plan: str, contest: Contest, dropout: float = 0.1) -> MadeModel:
    """Load the model with nonzero adapters. plan: as in `bench`."""
    opened, config, tokens = opened_for(contest, contest.dtype, dropout)
    blocks = len(opened.network.layers)
    wanted = our_plans.named_plan(contest, plan, blocks, blocks)
    built = built_with_adapters(opened, config, wanted, folder / "spill")
    shake(opened.network)
    batches = contest_batches(contest, tokens, lambda _: ROWS)
    return MadeModel(opened.network, built.engine, batches)


def opened_for(
    contest: Contest, dtype: str, dropout: float
) -> tuple[Opened, TrainConfig, np.ndarray]:
    """The model without adapters, the settings of these, and the (rows, T + 1) tokens."""
    opened = open_model(Path(contest.folder), getattr(mx, dtype))
    config = dataclasses.replace(contest.train_config(), lora_dropout=dropout)
    vocabulary = vocabulary_of(opened.network) or opened.config["vocab_size"]
    return opened, config, contest_tokens(contest, vocabulary)


def shake(network: nn.Module) -> None:
    """Move all adapters: lora_b starts at zero, which makes half the gradients zero."""
    mx.random.seed(1)
    trained = network.trainable_parameters()
    network.update(tree_map(lambda p: p + 0.05 * mx.random.normal(p.shape), trained))


def step_of(found: MadeModel) -> LossAndGradients:
    """The mean loss and the gradients by name."""
    (batch,) = found.batches
    sums, grads = found.engine.gradients(batch, 1 / batch.weight, 3)
    mx.eval(sums, grads)
    return float(sums.loss) / batch.weight, dict(tree_flatten(grads))


class Updated(NamedTuple):
    losses: list[float]
    adapters: dict[str, mx.array]
    read_bytes: int
    same_weights: bool


def updated(plan: str, contest: Contest, reloads: bool) -> Updated:
    """Do a few updates. With `reloads`, drop compiled functions and reload before each update."""
    ready = our_plans.prepare_ours(dataclasses.replace(contest, lora_dropout=0.1), plan)
    trainer = ready.loop.trainer
    network = trainer.model
    shake(network)
    losses, read, same_weights = [], 0, True
    for _ in range(contest.steps):
        if reloads:
            before = dict(tree_flatten(network.parameters()))
            trainer.engine.drop()
            read = reload_adapted(network, trainer.opened.tensors)
            after = dict(tree_flatten(network.parameters()))
            alike = [mx.array_equal(after[name], array) for name, array in before.items()]
            same_weights = same_weights and all(each.item() for each in alike)
        losses.append(ready.step()[0])
    return Updated(losses, model.adapter_arrays(network), read, same_weights)


def same(a: Updated, b: Updated) -> float:
    """The worst relative difference of losses and adapters; 0 if they are bit-identical."""
    by_loss = (abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True))
    return max(*by_loss, *(relative(a.adapters[name], b.adapters[name]) for name in b.adapters))


def difference(ours: LossAndGradients, theirs: LossAndGradients) -> float:
    """The worst relative difference of the loss and of the gradients by name."""
    by_loss = abs(ours[0] - theirs[0]) / abs(theirs[0])
    found = [by_loss, *(relative(ours[1][name], theirs[1][name]) for name in theirs[1])]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def relative(ours: mx.array, theirs: mx.array) -> float:
    """The norm of the difference divided by the norm of `theirs`."""
    ours, theirs = ours.astype(mx.float32), theirs.astype(mx.float32)
    size = float(mx.linalg.norm(theirs.reshape(-1)))
    difference = float(mx.linalg.norm((ours - theirs).reshape(-1)))
    return difference / max(size, 1e-12) if math.isfinite(difference) else math.inf


if __name__ == "__main__":
    name, place, *more = sys.argv[1:]
    if name in COMPARED:
        os.environ.update(FULL_FLOAT32)  # before MLX reads it
    tempfile.tempdir = place  # not through TMPDIR, where MLX stores compiled kernels
    echo_json(dataclasses.asdict(CHECKS[name](Path(place), *more)))
