"""Optimizers, learning rate schedules, clipping and loss scaling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as mlx_optimizers
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from your_ai.config import TrainConfig
from your_ai.config.optimizers import OPTIMIZERS, OptimizerName
from your_ai.engine.gradients import HeldGradients
from your_ai.memory.estimate import Training, update_bytes
from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.workload import Plan
from your_ai.run.checkpoint import TrainState
from your_ai.training import optimizer
from your_ai.training.optimizer_states import IN_8_BITS

KERNELS = "measured"  # they make the peaks smaller


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = mx.arange(12, dtype=mx.float32).reshape(4, 3) / 10
        self.b = mx.array([1.0, -2.0])


def updating(network: nn.Module, **settings: Any) -> Callable[..., None]:
    """The function that updates a network with the configured optimizer."""
    built = optimizer.build_optimizer(TrainConfig(**settings), network.trainable_parameters())
    return optimizer.make_update(network, built)


def gradients(step: int) -> dict[str, mx.array]:
    mx.random.seed(step)
    return {"a": mx.random.normal((4, 3)), "b": mx.random.normal((2,))}


def test_adamw_matches_the_formulas_of_the_paper():
    network = Two()
    update = updating(network, optimizer="adamw", learning_rate=0.1, weight_decay=0.2)
    x = np.array(network.a, np.float64)
    m = v = np.zeros_like(x)
    for step in range(1, 6):
        g = np.array(gradients(step)["a"], np.float64) * 0.5
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x * (1 - 0.1 * 0.2)
        x = x - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        update(HeldGradients(gradients(step)), 0.5, 0.1)
    assert np.array(network.a) == pytest.approx(x, rel=1e-4)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_settings_of_adam_reach_mlx(name):
    values = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 0.1}
    network, reference = Two(), Two()
    update = updating(network, optimizer=name, adam_bias_correction=False, **values)
    kind = {"adam": mlx_optimizers.Adam, "adamw": mlx_optimizers.AdamW}[name]
    more = {"weight_decay": 0.0} if name == "adamw" else {}
    theirs = kind(0.1, betas=[0.8, 0.9], eps=0.1, **more)
    for step in range(3):
        update(HeldGradients(gradients(step)), 1.0, 0.1)
        theirs.update(reference, gradients(step))
    assert mx.allclose(network.a, reference.a, rtol=1e-5)


def test_each_optimizer_has_a_name_in_the_settings():
    assert set(get_args(OptimizerName)) == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_uses_the_given_learning_rate(name):
    def moved(rate: float) -> float:
        network = Two()
        before = mx.array(network.a)
        updating(network, optimizer=name)(HeldGradients(gradients(1)), 1.0, rate)
        return mx.abs(network.a - before).sum().item()

    assert moved(0.0) == pytest.approx(0, abs=1e-6)
    assert moved(0.02) == pytest.approx(2 * moved(0.01), rel=1e-3)


@pytest.mark.parametrize("name", [o for o in OPTIMIZERS if o != "adam"])
def test_every_optimizer_uses_weight_decay(name):
    def after(decay: float) -> mx.array:
        network = Two()
        update = updating(network, optimizer=name, weight_decay=decay)
        update(HeldGradients(gradients(1)), 1.0, 0.1)
        return network.a

    assert not mx.allclose(after(0.0), after(0.9), rtol=1e-4)


class Adapted(nn.Module):
    """Three blocks; the last two have a DoRA layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Module() for _ in range(3)]
        for index, block in enumerate(self.layers[1:]):
            mx.random.seed(index)
            block.q_proj = nn.Module()
            block.q_proj.lora_a = mx.random.normal((6, 2))
            block.q_proj.lora_b = mx.random.normal((2, 4))
            block.q_proj.m = mx.random.normal((4,))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_with_different_rates_are_updated_as_by_several_optimizers_of_mlx(name):
    settings = {"optimizer": name, "weight_decay": 0.0 if name == "adam" else 0.2}
    config = TrainConfig(loraplus_ratio=4.0, layerwise_lr_decay=0.5, **settings)
    network, theirs = Adapted(), Adapted()
    found = optimizer.rate_factors(config, network)
    assert found == {
        "layers.1.q_proj.lora_a": 0.5, "layers.1.q_proj.lora_b": 2.0, "layers.1.q_proj.m": 0.5,
        "layers.2.q_proj.lora_a": 1.0, "layers.2.q_proj.lora_b": 4.0, "layers.2.q_proj.m": 1.0,
    }  # fmt: skip
    built = optimizer.build_optimizer(config, network.trainable_parameters())
    update = optimizer.make_update(network, built, found)
    alone = {}
    for path, array in tree_flatten(theirs.parameters()):
        one = dataclasses.replace(config, learning_rate=0.1 * found[path])
        alone[path] = optimizer.build_optimizer(one, {"x": array})
    for step in range(3):
        mx.random.seed(step)
        grads = tree_map(lambda p: mx.random.normal(p.shape), network.parameters())
        update(HeldGradients(grads), 1.0, 0.1)
        for (path, array), (_, grad) in zip(
            tree_flatten(theirs.parameters()), tree_flatten(grads), strict=True
        ):
            changed = alone[path].rule.apply_gradients({"x": grad}, {"x": array})["x"]
            theirs.update(tree_unflatten([(path, changed)]))
    for path, array in tree_flatten(network.parameters()):
        expected = dict(tree_flatten(theirs.parameters()))[path]
        assert mx.allclose(array, expected, rtol=1e-5, atol=1e-6), path


@pytest.mark.compiled
def test_blocks_with_different_rates_share_a_compiled_update(monkeypatch):
    config = TrainConfig(loraplus_ratio=4.0, layerwise_lr_decay=0.5)
    network, traced = Adapted(), []
    built = optimizer.build_optimizer(config, network.trainable_parameters())
    apply_single = built.rule.apply_single
    monkeypatch.setattr(
        built.rule, "apply_single", lambda *given: traced.append(1) or apply_single(*given)
    )
    update = optimizer.make_update(network, built, optimizer.rate_factors(config, network))
    update(HeldGradients(tree_map(mx.ones_like, network.parameters())), 1.0, 0.1)
    assert len(traced) == 3  # the parameters of one block


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_restored_optimizer_continues_bit_for_bit(name):
    def start() -> tuple:
        network = Two()
        built = optimizer.build_optimizer(TrainConfig(optimizer=name), network.parameters())
        return network, built, optimizer.make_update(network, built)

    network, built, update = start()
    for step in range(6):
        if step == 3:
            saved = network.parameters(), dict(optimizer.saved_states(built))
        update(HeldGradients(gradients(step)), 1.0, 0.1)
    other, other_built, other_update = start()
    other_update(HeldGradients(gradients(9)), 1.0, 0.1)  # compiled before the state is restored
    other.update(saved[0])
    optimizer.restore_states(other_built, saved[1])
    for step in range(3, 6):
        other_update(HeldGradients(gradients(step)), 1.0, 0.1)
    assert mx.array_equal(network.a, other.a)
    assert mx.array_equal(network.b, other.b)


def test_gradient_norm_is_global_and_in_float32():
    grads = {"a": mx.full((300,), 300.0, mx.float16), "b": [mx.array([4.0]), {}]}
    norm = optimizer.global_norm(HeldGradients(grads))
    assert norm.item() == pytest.approx(math.sqrt(300 * 300.0**2 + 16), rel=1e-6)


@pytest.mark.parametrize(
    ("norm", "most", "factor"), [(10, 1, 0.1), (0.5, 1, 1), (0, 1, 1), (1e9, 0, 1)]
)
def test_clip_factor_limits_the_norm(norm, most, factor):
    assert optimizer.clip_factor(norm, most) == pytest.approx(factor, rel=1e-5)


def rates(**settings) -> list[float]:
    config = TrainConfig(learning_rate=1.0, **{"warmup_steps": 0, **settings})
    return [optimizer.learning_rate(config, step, 10) for step in range(10)]


def test_learning_rate_schedules_have_the_right_values():
    assert rates() == [1.0] * 10
    assert rates(lr_schedule="linear") == pytest.approx([1 - i / 10 for i in range(10)])
    cosine = rates(lr_schedule="cosine")
    assert cosine[0] == 1.0
    assert cosine[5] == pytest.approx(0.5)
    assert 0 < cosine[9] < 0.05


def test_warmup_rises_to_the_peak_and_is_never_0():
    warm = rates(lr_schedule="linear", warmup_steps=4)
    assert warm[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert warm[9] == pytest.approx(1 - 5 / 6)
    assert min(rates(warmup_steps=50)) > 0


def test_a_decay_ends_at_its_rate_and_stays_there():
    assert rates(lr_schedule="linear", lr_end=0.5)[5] == pytest.approx(0.75)
    assert rates(lr_schedule="linear", lr_end=0.5, lr_decay_steps=4)[3:6] == [0.625, 0.5, 0.5]
    assert rates(lr_schedule="cosine", lr_end=0.5, lr_decay_steps=4)[4:] == [0.5] * 6
    assert rates(lr_schedule="cosine", lr_end=0.5, lr_decay_steps=4)[2] == pytest.approx(0.75)


def test_exponential_and_step_multiply_the_rate():
    smooth = rates(lr_schedule="exponential", lr_decay_rate=0.25, lr_decay_steps=4)
    assert smooth == pytest.approx([0.25 ** (i / 4) for i in range(10)])
    steps = rates(lr_schedule="step", lr_decay_rate=0.5, lr_decay_steps=4)
    assert steps == [1.0] * 4 + [0.5] * 4 + [0.25] * 2
    assert rates(lr_schedule="step", warmup_steps=2)[2:] == [1.0] * 8


def test_warmup_init_is_the_rate_of_the_first_step():
    warm = rates(warmup_steps=5, warmup_init=0.2, lr_schedule="linear")
    assert warm[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates(warmup_steps=1, warmup_init=0.2)[:2] == [0.2, 1.0]


def learning_rate_before(config: TrainConfig, step: int, steps: int) -> float:
    """The formulas of the runs before there were --lr-end, --lr-decay-steps and --warmup-init."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup)
    if config.lr_schedule == "linear":
        return peak * (1 - progress)
    if config.lr_schedule == "cosine":
        return peak * 0.5 * (1 + math.cos(math.pi * progress))
    return peak


@given(
    schedule=st.sampled_from(["constant", "linear", "cosine"]),
    peak=st.floats(1e-9, 10),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 60),
)
def test_learning_rates_of_older_runs_are_the_same_to_the_bit(schedule, peak, warmup, steps):
    config = TrainConfig(lr_schedule=schedule, learning_rate=peak, warmup_steps=warmup)
    for step in range(steps):
        before = learning_rate_before(config, step, steps)
        assert optimizer.learning_rate(config, step, steps) == before


def test_overflow_in_float16_halves_the_loss_scale_without_giving_up():
    state = optimizer.first_state(mx.float16)
    first = state.loss_scale
    for _ in range(8):
        state = optimizer.after_skipped_step(state, loss=1.0)
    assert (state.loss_scale, state.skipped, state.skipped_in_a_row) == (first / 256, 8, 0)


def test_non_finite_loss_counts_towards_giving_up():
    state = optimizer.after_skipped_step(optimizer.first_state(mx.float16), loss=math.nan)
    assert state.skipped_in_a_row == 1
    state = optimizer.after_skipped_step(TrainState(), loss=1.0)  # float32 has no loss scale
    assert state.skipped_in_a_row == 1


def test_loss_scale_grows_again_only_in_float16():
    state = TrainState(loss_scale=8.0, good_steps=optimizer.LOSS_SCALE_GROWS_AFTER - 1)
    assert optimizer.after_finite_step(state, mx.float16).loss_scale == 16.0
    assert optimizer.after_finite_step(state, mx.bfloat16).loss_scale == 8.0
    assert optimizer.first_state(mx.bfloat16).loss_scale == 1.0


@pytest.mark.memory
def test_norm_of_large_gradients_needs_the_memory_of_one():
    grads = HeldGradients([mx.ones((1024, 1024)) for _ in range(16)])
    mx.eval(grads.arrays)
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    assert float(optimizer.global_norm(grads)) == 4096.0
    assert mx.get_peak_memory() - held < 1.1 * 4 * 1024**2


@pytest.mark.compiled
@pytest.mark.memory
@pytest.mark.parametrize(
    ("name", "rank", "bits", "dtype"),
    [
        *((name, rank, 32, "float32") for name in sorted(OPTIMIZERS) for rank in (16, 256)),
        *((name, 16, 8, "float32") for name in sorted(IN_8_BITS)),
        ("adamw", 256, 8, "float32"),
        *((name, 16, 32, "bfloat16") for name in sorted(OPTIMIZERS)),
        *((name, 256, 8, "bfloat16") for name in ("adamw", "lion")),
    ],
)
def test_memory_of_an_update_is_within_its_estimate(name, rank, bits, dtype):
    layers = {"q_proj": (512, 512), "up_proj": (512, 1536), "down_proj": (1536, 512)}
    blocks, updates = 3, 2
    if (name, rank) == ("muon", 256):  # seconds for each matrix; those of one layer go together
        layers = {"up_proj": layers["up_proj"]}
        blocks = updates = 1
    model = nn.Module()
    model.layers = [nn.Module() for _ in range(blocks)]
    for block in model.layers:
        for layer, (inputs, outputs) in layers.items():
            block[layer] = nn.Module()
            block[layer].lora_a = mx.random.normal((inputs, rank)).astype(getattr(mx, dtype))
            block[layer].lora_b = mx.random.normal((rank, outputs)).astype(getattr(mx, dtype))
    parameters = model.trainable_parameters()
    grads = tree_map(lambda p: mx.random.normal(p.shape).astype(p.dtype), parameters)
    config = TrainConfig(optimizer=name, optimizer_bits=bits)
    built = optimizer.build_optimizer(config, parameters)
    mx.eval(parameters, grads)
    update = optimizer.make_update(model, built)
    del parameters, block
    held, peaks = mx.get_active_memory(), []
    for _ in range(updates):
        mx.reset_peak_memory()
        update(HeldGradients(grads), 1.0, 1e-4)
        peaks.append(mx.get_peak_memory() - held)
    facts = ModelFacts((BlockFacts(layers, 1),), (0,) * blocks, 512, 768, 8, 4, 1, 1, 1, False)
    training = Training(
        blocks=blocks, rank=rank, targets=("all-linear",), optimizer=name, optimizer_bits=bits,
        adapter_dtype=dtype,
    )  # fmt: skip
    assert max(peaks) <= 1.1 * update_bytes(facts, training, Plan("fused", 512)) + 200_000
