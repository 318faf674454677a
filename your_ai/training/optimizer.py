"""The update: learning rate schedule, clipping, loss scaling, and MLX's optimizers.

The norm of the gradients is measured first, and they are applied only if it is finite. So a step
that is not finite changes nothing.

An update is computed in float32. The new values of parameters in bfloat16 are rounded at random, in
proportion: an update is often less than half the distance of two such numbers, and would be lost if
it was rounded to the nearest. The random numbers depend on the step and the parameter alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten

from your_ai.config import Resolved, TrainConfig
from your_ai.config.optimizers import OPTIMIZERS
from your_ai.engine.block_files import Like, Writer, by_file, write_arrays
from your_ai.engine.gradients import Gradients
from your_ai.engine.masters import Masters, ModelArrays
from your_ai.memory.sizes import UPDATE_BYTES, UPDATE_BYTES_ROUNDED
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.vocabulary import LEAVES
from your_ai.run.checkpoint import TrainState
from your_ai.training.optimizer_states import (
    FLOAT32,
    IN_8_BITS,
    KIND,
    FileStates,
    HeldStates,
    SpilledStates,
    State,
    StateForm,
    States,
    in_bfloat16,
    rounding_key,
)

FIRST_LOSS_SCALE = 2.0**15
LOSS_SCALE_GROWS_AFTER = 2000  # finite steps
MAX_LOSS_SCALE = 2.0**24

COUNTERS = ("step", "learning_rate")  # what an optimizer of MLX keeps besides the states
Update = Callable[[Gradients, float, float], None]  # (gradients, factor, learning rate)


@dataclass(frozen=True)
class StatefulOptimizer:
    """An optimizer of MLX, and the states of the parameters, which are kept beside it."""

    rule: optim.Optimizer
    """Has only the step and the learning rate in its own state."""
    states: States
    form: StateForm
    first: Callable[[str], State]
    """Makes the first state of a parameter, by its name."""


def build_optimizer(
    config: TrainConfig, parameters: dict[str, Any], folder: Path | None = None
) -> StatefulOptimizer:
    """The configured optimizer, with its states initialized for `parameters`.

    folder: of the files that keep the states; without it they are in memory.

    The learning rate is set before each update.
    """
    kind = OPTIMIZERS[config.optimizer]
    options = dict(kind.options)
    if kind.decays:
        options["weight_decay"] = config.weight_decay
    if kind.has_betas:
        options |= {
            "betas": [config.adam_beta1, config.adam_beta2],
            "eps": config.adam_epsilon,
            "bias_correction": config.adam_bias_correction,
        }
    rule = getattr(optim, kind.class_name)(config.learning_rate, **options)
    mx.eval(rule.state)
    form = IN_8_BITS[config.optimizer] if config.optimizer_bits == 8 else FLOAT32
    likes = {name: Like.of(parameter) for name, parameter in tree_flatten(parameters)}

    def first(name: str) -> State:
        state: State = {}
        rule.init_single(mx.zeros(likes[name].shape), state)  # only the shape is used
        return form.stored(state, rounding_key(name, 0))

    if folder is not None and config.adapter_kind.is_whole:
        return StatefulOptimizer(rule, FileStates(folder, likes, first), form, first)
    states = HeldStates() if folder is None else SpilledStates(folder)
    built = StatefulOptimizer(rule, states, form, first)
    if config.blocks_per_period is None:  # else each period has states of its own
        put_first(built, likes)
    return built


def put_first(optimizer: StatefulOptimizer, names: Iterable[str]) -> None:
    """Give parameters their first states."""
    for name in names:
        stored = optimizer.first(name)
        optimizer.states.put({name: stored})
        mx.eval(stored)


def restart(optimizer: StatefulOptimizer, names: Iterable[str]) -> None:
    """Begin anew, with the states of these parameters alone, which are whole weights."""
    optimizer.rule.state["step"] = mx.array(0, mx.uint64)
    optimizer.states.clear()
    if not isinstance(optimizer.states, FileStates):  # which makes them when they are needed
        put_first(optimizer, names)


def learning_rate(config: Resolved, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: linear warm-up, then the schedule.

    Without --lr-decay-steps, the linear and cosine schedules reach --lr-end just after the last
    step. With --warmup-init, the first and the last step of the warm-up have that rate and the
    peak; without it, 0 and the peak would be one step outside of it.
    """
    peak, end = config.learning_rate, config.lr_end
    warmup, first = config.warmup_steps, config.warmup_init
    if step < warmup:
        if first is None:
            return peak * (step + 1) / (warmup + 1)
        return first + (peak - first) * step / max(1, warmup - 1)
    decayed, length = step - warmup, config.lr_decay_steps or max(1, steps - warmup)
    progress = min(1.0, decayed / length)
    if config.lr_schedule == "linear":
        return end + (peak - end) * (1 - progress)
    if config.lr_schedule == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "exponential":
        return float(peak * config.lr_decay_rate ** (decayed / length))
    if config.lr_schedule == "step":
        return float(peak * config.lr_decay_rate ** (decayed // length))
    return peak


def global_norm(grads: Gradients) -> mx.array:
    """The Euclidean norm of all gradients together, in float32."""
    total, waiting = mx.array(0.0), 0
    for size, square in zip(grads.sizes().values(), grads.squares(), strict=True):
        total, waiting = total + square, waiting + size
        if waiting >= UPDATE_BYTES_ROUNDED:  # MLX would square ten arrays at the same time
            mx.eval(total)
            waiting = 0
    return mx.sqrt(total)


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor on gradients of norm `norm`; max_norm 0 never clips."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def rate_factors(config: TrainConfig, model: nn.Module) -> dict[str, float]:
    """The learning rate of each trained parameter, relative to that of the step.

    LoRA+ (Hayou et al., 2024) raises the rate of B alone, which begins at 0. Magnitudes
    begin at the norms of the base's weights, so they learn as fast as A.

    Layer-wise decay (Howard and Ruder, 2018) counts from the last block of the model, so that a
    block has the same rate however many blocks are adapted.
    """
    names = {id(module): name for name, module in model.named_modules()}
    blocks = [f"{names[id(block)]}." for block in model.layers]
    last, found = len(blocks) - 1, {}
    for name, _ in tree_flatten(model.trainable_parameters()):
        index = next((i for i, block in enumerate(blocks) if name.startswith(block)), last)
        ratio = config.loraplus_ratio if name.endswith(".lora_b") else 1.0
        if {*LEAVES} & {*name.split(".")} and config.embedding_learning_rate is not None:
            ratio = config.embedding_learning_rate / config.learning_rate
        found[name] = ratio * config.layerwise_lr_decay ** (last - index)
    return found


def make_update(
    model: nn.Module,
    optimizer: StatefulOptimizer,
    factors: Mapping[str, float] | None = None,
    masters: Masters | None = None,
) -> Update:
    """Return update(grads, factor, rate): one optimizer step on factor x grads, evaluated.

    factors: of the learning rate of each parameter, as from `rate_factors`; default: 1.
    masters: the parameters to update; default: those of the model.

    It updates a few parameters of one block at a time. So the old and new state of all
    parameters never exist together, and blocks of the same shape share compiled updates. MLX's
    optimizers treat each parameter separately, so the result is the same.
    """
    rule, states, form = optimizer.rule, optimizer.states, optimizer.form
    factors, masters = factors or {}, masters or ModelArrays(model)
    is_float32 = form == FLOAT32 and mx.bfloat16 not in masters.dtypes()
    together = UPDATE_BYTES if is_float32 else UPDATE_BYTES_ROUNDED

    def apply(
        grads: Any, parameters: Any, stored: Any, keys: Any, step: Any, rates: Any, factor: Any
    ) -> tuple[dict[str, mx.array], dict[str, State]]:
        kept = {name: rule.state[name] for name in COUNTERS}
        changed, after = {}, {}
        for name, grad in grads.items():
            grad, parameter = grad.astype(mx.float32) * factor, parameters[name]
            state = form.whole(stored[name], parameter.shape)
            rule.state.update(step=step, learning_rate=rates[name])
            changed[name] = rule.apply_single(grad, parameter.astype(mx.float32), state)
            if parameter.dtype == mx.bfloat16:
                key = mx.random.split(keys[name])[1]  # `stored` uses the whole key
                noise = mx.random.uniform(shape=parameter.shape, key=key)
                changed[name] = in_bfloat16(changed[name], noise)
            after[name] = form.stored(state, keys[name])
        rule.state.update(kept)
        return changed, after

    compiled = mx.compile(apply)

    def update(grads: Gradients, factor: float, rate: float) -> None:
        rule.learning_rate = rate
        rule.state["step"] = step = rule.state["step"] + 1
        number = step.item()
        for names in groups(grads.sizes(), together):
            short = {name: name[len(block) :] for block, name in names}
            found = grads.take(short)
            changed, after = compiled(
                {short[name]: found.pop(name) for name in short},
                {short[name]: masters.get(name) for name in short},
                {short[name]: states.get(name) for name in short},
                {short[name]: rounding_key(name, number) for name in short},
                step,
                {short[name]: mx.array(rate * factors.get(name, 1.0)) for name in short},
                mx.array(factor, mx.float32),
            )
            now = {name: changed.pop(short[name]) for name in short}
            new = {name: after.pop(short[name]) for name in short}
            masters.put(now)  # in place of the old ones, which are freed when used
            states.put(new, now)
            mx.eval(new, now)
            masters.keep(now)

    return update


def groups(sizes: Mapping[str, int], together: int) -> list[list[tuple[str, str]]]:
    """Group the parameters to update together: of one block, and of about `together` bytes at most.

    sizes: bytes of each parameter, by name. A parameter over `together` is a group by itself.
    Returns groups of (prefix of the name that belongs to the block, name).
    """
    found: list[list[tuple[str, str]]] = []
    last, room = None, 0
    for name, size in sizes.items():
        numbered = re.match(r".*?\blayers\.\d+\.", name)
        block = "" if numbered is None else numbered.group()
        if block != last or size > room:
            found.append([])
            last, room = block, together
        found[-1].append((block, name))
        room -= size
    return found


def saved_states(optimizer: StatefulOptimizer) -> dict[str, mx.array] | Callable[[Path], None]:
    """The states for a checkpoint: arrays by name, or a function that writes them to a file."""
    return optimizer.states.saved(saved_counters(optimizer))


def restore_states(optimizer: StatefulOptimizer, arrays: dict[str, mx.array]) -> None:
    """Restore what was saved; `arrays` is emptied. Raises ValueError if the names differ."""
    if set(arrays) != {*COUNTERS, *optimizer.states.names()}:
        raise ValueError("the optimizer state in the checkpoint is for another optimizer or model")
    optimizer.rule.state.update({name: arrays.pop(name) for name in COUNTERS})
    mx.eval(optimizer.rule.state)
    by_parameter: dict[str, State] = {}
    for name in list(arrays):
        parameter, _, leaf = name.rpartition(".")
        by_parameter.setdefault(parameter, {})[leaf] = arrays.pop(name)
    for parameter in list(by_parameter):
        state = by_parameter.pop(parameter)
        mx.eval(state)
        optimizer.states.put({parameter: state})


def saved_counters(optimizer: StatefulOptimizer) -> dict[str, mx.array]:
    """The arrays of the optimizer beside the states, for a checkpoint."""
    return {name: optimizer.rule.state[name] for name in COUNTERS}


def saved_files(optimizer: StatefulOptimizer) -> dict[str, Writer]:
    """Functions that write the states of whole weights to files of a checkpoint, by name; none
    before the first step."""
    if isinstance(optimizer.states, FileStates):
        return optimizer.states.files.saved()
    if not optimizer.rule.state["step"].item():
        return {}
    arrays = optimizer.states.saved({})
    assert isinstance(arrays, dict)  # they are in memory
    return {file: partial(write_arrays, own) for file, own in by_file(KIND, arrays).items()}


def restore_files(
    optimizer: StatefulOptimizer, counters: dict[str, mx.array], folder: Path
) -> None:
    """Restore the states of whole weights from a checkpoint; those that it has none of are the
    first ones. Raises ValueError if they are of another optimizer or model."""
    if isinstance(optimizer.states, FileStates):
        restore_states(optimizer, counters)
        optimizer.states.files.restore(folder)
        return
    arrays = optimizer.states.saved(counters)
    assert isinstance(arrays, dict)
    for path in sorted(folder.glob(f"{KIND}-*.safetensors")):
        arrays |= load_arrays(path)
    restore_states(optimizer, arrays)


def first_state(dtype: mx.Dtype) -> TrainState:
    """The state before the first step; float16 needs loss scaling."""
    return TrainState(loss_scale=FIRST_LOSS_SCALE if dtype == mx.float16 else 1.0)


def after_finite_step(state: TrainState, dtype: mx.Dtype) -> TrainState:
    state = replace(state, skipped_in_a_row=0, good_steps=state.good_steps + 1)
    if dtype == mx.float16 and state.good_steps >= LOSS_SCALE_GROWS_AFTER:
        scale = min(MAX_LOSS_SCALE, state.loss_scale * 2)
        return replace(state, loss_scale=scale, good_steps=0)
    return state


def after_skipped_step(state: TrainState, loss: float) -> TrainState:
    """The state after a step with a non-finite loss or gradient.

    In float16, a finite loss means that the loss scale was too high. Halving it is the normal
    search for a good scale, so such a step does not count towards giving up.
    """
    searching = math.isfinite(loss) and state.loss_scale > 1
    return replace(
        state,
        skipped=state.skipped + 1,
        skipped_in_a_row=state.skipped_in_a_row + (0 if searching else 1),
        loss_scale=max(1.0, state.loss_scale / 2),
        good_steps=0,
    )
