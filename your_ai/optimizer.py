"""The update: schedule, clipping, loss scaling, and mlx's optimizers.

A step has two halves, so that nothing changes unless all of it is finite: the
gradients' norm is measured first, and only then are they applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from your_ai.config import TrainConfig
from your_ai.run.checkpoint import TrainState

FIRST_LOSS_SCALE = 2.0**15
LOSS_SCALE_GROWS_AFTER = 2000  # finite steps
MAX_LOSS_SCALE = 2.0**24

Update = Callable[[Any, float, float], None]  # (gradients, factor, learning rate)


def build_optimizer(config: TrainConfig, parameters: dict) -> optim.Optimizer:
    """The configured optimizer, its state made for `parameters`.

    AdamW and Adam correct their bias, as the papers and every other library do; the
    learning rate is set before each update.
    """
    rate, decay = config.learning_rate, config.weight_decay
    makers: dict[str, Callable[[], optim.Optimizer]] = {
        "adamw": lambda: optim.AdamW(rate, weight_decay=decay, bias_correction=True),
        "adam": lambda: optim.Adam(rate, bias_correction=True),
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
    """The rate of step `step` (from 0) of `steps`: linear warm-up, then the schedule.

    linear and cosine fall to 0 just after the last step.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    if config.lr_schedule == "linear":
        return peak * (1 - progress)
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


def global_norm(grads: Any) -> mx.array:
    """The Euclidean norm of all gradients together, in float32."""
    return mx.sqrt(sum(mx.square(g.astype(mx.float32)).sum() for _, g in tree_flatten(grads)))


def clip_factor(norm: float, max_norm: float) -> float:
    """What gradients of norm `norm` are multiplied with; max_norm 0 never clips."""
    return min(1.0, max_norm / (norm + 1e-6)) if max_norm > 0 else 1.0


def make_update(
    model: nn.Module, optimizer: optim.Optimizer
) -> Callable[[Any, float, float], None]:
    """update(grads, factor, rate): one step of the optimizer on factor x grads, evaluated."""
    state = [optimizer.state]

    def apply(grads: Any, parameters: Any, factor: mx.array) -> Any:
        grads = tree_map(lambda g: g * factor.astype(g.dtype), grads)
        return optimizer.apply_gradients(grads, parameters)

    compiled = mx.compile(apply, inputs=state, outputs=state)

    def update(grads: Any, factor: float, rate: float) -> None:
        optimizer.learning_rate = rate
        parameters = model.trainable_parameters()
        model.update(compiled(grads, parameters, mx.array(factor, mx.float32)))
        mx.eval(model.trainable_parameters(), optimizer.state)

    return update


def optimizer_arrays(optimizer: optim.Optimizer) -> dict[str, mx.array]:
    """The optimizer's state by name, for a checkpoint."""
    return dict(tree_flatten(optimizer.state))


def set_optimizer_arrays(optimizer: optim.Optimizer, arrays: dict[str, mx.array]) -> None:
    """Put back what `optimizer_arrays` gave. Raises ValueError where the names differ."""
    if set(arrays) != set(optimizer_arrays(optimizer)):
        raise ValueError("the checkpoint's optimizer state is of another optimizer or model")
    for name, array in arrays.items():
        *path, leaf = name.split(".")
        node = optimizer.state  # filled in place: compiled updates refer to it
        for part in path:
            node = node[int(part) if isinstance(node, list) else part]
        node[leaf] = array


def first_state(dtype: mx.Dtype) -> TrainState:
    """The state of a run that has not begun; float16 needs its loss scaled."""
    return TrainState(loss_scale=FIRST_LOSS_SCALE if dtype == mx.float16 else 1.0)


def after_finite_step(state: TrainState, dtype: mx.Dtype) -> TrainState:
    state = replace(state, skipped_in_a_row=0, good_steps=state.good_steps + 1)
    if dtype == mx.float16 and state.good_steps >= LOSS_SCALE_GROWS_AFTER:
        scale = min(MAX_LOSS_SCALE, state.loss_scale * 2)
        return replace(state, loss_scale=scale, good_steps=0)
    return state


def after_skipped_step(state: TrainState, loss: float) -> TrainState:
    """A step of a non-finite loss or gradient.

    In float16 a finite loss means that its scale was too high: halving it is the normal
    search for one that fits, so that it does not count towards giving up.
    """
    searching = math.isfinite(loss) and state.loss_scale > 1
    return replace(
        state,
        skipped=state.skipped + 1,
        skipped_in_a_row=state.skipped_in_a_row + (0 if searching else 1),
        loss_scale=max(1.0, state.loss_scale / 2),
        good_steps=0,
    )
