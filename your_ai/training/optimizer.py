"""The update: learning rate schedule, clipping, loss scaling, and MLX's optimizers.

The norm of the gradients is measured first, and they are applied only if it is finite. So a step
that is not finite changes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from your_ai.config import TrainConfig
from your_ai.memory.sizes import UPDATE_BYTES
from your_ai.run.checkpoint import TrainState

FIRST_LOSS_SCALE = 2.0**15
LOSS_SCALE_GROWS_AFTER = 2000  # finite steps
MAX_LOSS_SCALE = 2.0**24

Update = Callable[[Any, float, float], None]  # (gradients, factor, learning rate)


def build_optimizer(config: TrainConfig, parameters: dict) -> optim.Optimizer:
    """The configured optimizer, with its state initialized for `parameters`.

    The learning rate is set before each update.
    """
    rate, decay = config.learning_rate, config.weight_decay
    adam: dict[str, Any] = {
        "betas": [config.adam_beta1, config.adam_beta2],
        "eps": config.adam_epsilon,
        "bias_correction": config.adam_bias_correction,
    }
    makers: dict[str, Callable[[], optim.Optimizer]] = {
        "adamw": lambda: optim.AdamW(rate, weight_decay=decay, **adam),
        "adam": lambda: optim.Adam(rate, **adam),
        "sgd": lambda: optim.SGD(rate, weight_decay=decay),
        "adafactor": lambda: optim.Adafactor(
            rate, weight_decay=decay, scale_parameter=False, relative_step=False
        ),
        "muon": lambda: optim.Muon(rate, weight_decay=decay),
        "lion": lambda: optim.Lion(rate, weight_decay=decay),
    }
    optimizer = makers[config.optimizer]()
    optimizer.init(parameters)
    mx.eval(optimizer.state)
    return optimizer


def learning_rate(config: TrainConfig, step: int, steps: int) -> float:
    """The learning rate of step `step` (from 0) of `steps`: linear warm-up, then the schedule.

    Without --lr-decay-steps, the linear and cosine schedules reach --lr-end just after the last
    step. With --warmup-init, the first and the last step of the warm-up have that rate and the
    peak; without it, 0 and the peak would be one step outside of it.
    """
    peak, end = config.learning_rate, config.lr_end
    warmup, first = config.warmup_steps, config.warmup_init
    if step < warmup and first is None:
        return peak * (step + 1) / (warmup + 1)
    if step < warmup:
        return first + (peak - first) * step / max(1, warmup - 1)
    decayed, length = step - warmup, config.lr_decay_steps or max(1, steps - warmup)
    progress = min(1.0, decayed / length)
    if config.lr_schedule == "linear":
        return end + (peak - end) * (1 - progress)
    if config.lr_schedule == "cosine":
        return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.lr_schedule == "exponential":
        return peak * config.lr_decay_rate ** (decayed / length)
    if config.lr_schedule == "step":
        return peak * config.lr_decay_rate ** (decayed // length)
    return peak


def global_norm(grads: Any) -> mx.array:
    """The Euclidean norm of all gradients together, in float32."""
    return mx.sqrt(sum(mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(grads)))


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor on gradients of norm `norm`; max_norm 0 never clips."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def rate_factors(config: TrainConfig, model: nn.Module) -> dict[str, float]:
    """The learning rate of each trained parameter, relative to that of the step.

    LoRA+ (Hayou et al., 2024) raises the rate of B alone, which begins at 0. DoRA's magnitudes
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
        found[name] = ratio * config.layerwise_lr_decay ** (last - index)
    return found


def make_update(
    model: nn.Module, optimizer: optim.Optimizer, factors: Mapping[str, float] | None = None
) -> Update:
    """Return update(grads, factor, rate): one optimizer step on factor x grads, evaluated.

    factors: of the learning rate of each parameter, as from `rate_factors`; default: 1.

    It updates a few parameters of one block at a time. So the old and new state of all
    parameters never exist together, and blocks of the same shape share compiled updates. MLX's
    optimizers treat each parameter separately, so the result is the same.
    """
    states, factors = leaves(optimizer.state), factors or {}

    def apply(grads: Any, parameters: Any, state: Any, step: Any, rates: Any, factor: Any) -> Any:
        kept = {name: optimizer.state[name] for name in ("step", "learning_rate")}
        grads = {name: grad * factor.astype(grad.dtype) for name, grad in grads.items()}
        changed = {}
        for name, grad in grads.items():
            optimizer.state.update(step=step, learning_rate=rates[name])
            changed[name] = optimizer.apply_single(grad, parameters[name], state[name])
        optimizer.state.update(kept)
        return changed, state

    compiled = mx.compile(apply)

    def update(grads: Any, factor: float, rate: float) -> None:
        optimizer.learning_rate = rate
        step = optimizer.state["step"] + 1
        optimizer.state["step"] = step
        found = dict(tree_flatten(grads))
        parameters = dict(tree_flatten(model.trainable_parameters()))
        for names in groups({name: grad.nbytes for name, grad in found.items()}):
            short = {name: name[len(block) :] for block, name in names}
            changed, state = compiled(
                {short[name]: found[name] for name in short},
                {short[name]: parameters.pop(name) for name in short},
                {short[name]: states[name] for name in short},
                step,
                {short[name]: mx.array(rate * factors.get(name, 1.0)) for name in short},
                mx.array(factor, mx.float32),
            )
            for name in short:
                states[name].update(state[short[name]])
            model.update(tree_unflatten([(name, changed[short[name]]) for name in short]))
            mx.eval(changed, state)
        mx.eval(step)

    return update


def groups(sizes: Mapping[str, int]) -> list[list[tuple[str, str]]]:
    """Group the parameters to update together: of one block, and of about UPDATE_BYTES at most.

    sizes: bytes of each parameter, by name. A parameter over UPDATE_BYTES is a group by itself.
    Returns groups of (prefix of the name that belongs to the block, name).
    """
    found: list[list[tuple[str, str]]] = []
    last, room = None, 0
    for name, size in sizes.items():
        block = re.match(r"(.*?\blayers\.\d+\.)?", name).group()
        if block != last or size > room:
            found.append([])
            last, room = block, UPDATE_BYTES
        found[-1].append((block, name))
        room -= size
    return found


def leaves(state: dict[str, Any]) -> dict[str, dict[str, mx.array]]:
    """The optimizer state of each parameter, by path: the dicts themselves, to change in place."""
    found: dict[str, dict[str, mx.array]] = {}

    def walk(node: Any, path: str) -> None:
        children = enumerate(node) if isinstance(node, list) else node.items()
        if isinstance(node, dict) and node and all(isinstance(c, mx.array) for c in node.values()):
            found[path] = node
            return
        for name, child in children:
            if isinstance(child, (dict, list)):
                walk(child, f"{path}.{name}" if path else str(name))

    walk({n: c for n, c in state.items() if n not in ("step", "learning_rate")}, "")
    return found


def optimizer_arrays(optimizer: optim.Optimizer) -> dict[str, mx.array]:
    """The optimizer state as arrays by name, for a checkpoint."""
    return dict(tree_flatten(optimizer.state))


def set_optimizer_arrays(optimizer: optim.Optimizer, arrays: dict[str, mx.array]) -> None:
    """Restore the result of `optimizer_arrays`. Raises ValueError if the names differ."""
    if set(arrays) != set(optimizer_arrays(optimizer)):
        raise ValueError("the optimizer state in the checkpoint is for another optimizer or model")
    for name, array in arrays.items():
        *path, leaf = name.split(".")
        node = optimizer.state  # changed in place, because compiled updates refer to it
        for part in path:
            node = node[int(part) if isinstance(node, list) else part]
        node[leaf] = array


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
