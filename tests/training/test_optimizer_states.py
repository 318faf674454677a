"""Optimizer states in 8 bits and on disk, and parameters in bfloat16."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from your_ai.config import TrainConfig
from your_ai.config.optimizers import OPTIMIZERS
from your_ai.engine.gradients import HeldGradients, SpilledGradients
from your_ai.run import checkpoint
from your_ai.training import optimizer
from your_ai.training.optimizer_states import IN_8_BITS, in_bfloat16


class Wide(nn.Module):
    """A block with one matrix whose states are quantized, and one that is too small for it."""

    def __init__(self, dtype: mx.Dtype = mx.float32) -> None:
        super().__init__()
        self.layers = [nn.Module()]
        self.layers[0].a = mx.random.normal((72, 64), key=mx.random.key(1)).astype(dtype)
        self.layers[0].b = mx.random.normal((3, 5), key=mx.random.key(2)).astype(dtype)


def gradients(step: int, scale: float = 1.0) -> dict[str, mx.array]:
    """Those of some elements are a thousand times those of others."""
    keys = mx.random.split(mx.random.key(step), 3)
    sizes = mx.exp(2 * mx.random.normal((72, 64), key=mx.random.key(9)))
    return {
        "layers.0.a": scale * sizes * mx.random.normal((72, 64), key=keys[0]),
        "layers.0.b": scale * mx.random.normal((3, 5), key=keys[1]),
    }


def trained(
    name: str, bits: int, steps: int, folder: Path | None = None, dtype: mx.Dtype = mx.float32
) -> Wide:
    network = Wide(dtype)
    config = TrainConfig(optimizer=name, optimizer_bits=bits, weight_decay=0.0)
    built = optimizer.build_optimizer(config, network.trainable_parameters(), folder)
    update = optimizer.make_update(network, built)
    for step in range(steps):
        total = HeldGradients() if folder is None else SpilledGradients(folder)
        total.add(gradients(step))
        update(total, 1.0, 1e-3)
    return network


@pytest.mark.parametrize("name", sorted(IN_8_BITS))
def test_updates_in_8_bits_follow_those_in_float32(name):
    """Over steps in which every moment decays and grows; no element runs away."""
    first, exact, rounded = Wide(), trained(name, 32, 40), trained(name, 8, 40)
    moved, apart = exact.layers[0].a - first.layers[0].a, rounded.layers[0].a - exact.layers[0].a
    assert mx.array_equal(rounded.layers[0].b, exact.layers[0].b)  # too small to be quantized
    error = mx.sqrt(mx.square(apart).mean() / mx.square(moved).mean()).item()
    assert 0 < error < (0.3 if name == "lion" else 0.2)  # lion's updates are signs
    assert mx.abs(apart).max().item() < 40 * 1e-3


def test_a_second_moment_that_changes_little_is_not_stuck():
    """Rounded to the nearest, it would keep the value of the first steps for ever."""
    results = []
    for bits in (32, 8):
        network = Wide()
        config = TrainConfig(optimizer_bits=bits, adam_beta2=0.99)
        built = optimizer.build_optimizer(config, network.trainable_parameters())
        update = optimizer.make_update(network, built)
        for step in range(150):
            grads = gradients(step)
            if step > 10:  # all elements but one of each block become smaller
                small = mx.arange(72 * 64).reshape(72, 64) % 256 > 0
                grads["layers.0.a"] = mx.where(small, 0.1, 1.0) * grads["layers.0.a"]
            update(HeldGradients(grads), 1.0, 0.0)
        form, states = built.form, built.states
        results.append(mx.sqrt(form.whole(states.get("layers.0.a"), (72, 64))["v"]))
    ratio = mx.median(results[1] / results[0]).item()
    assert ratio == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_in_bfloat16_follow_those_in_float32(name):
    """Their own rounding is far larger than an update of 1e-3, but its mean is 0."""
    first, exact = Wide(), trained(name, 32, 20)
    rounded = trained(name, 32, 20, dtype=mx.bfloat16)
    assert rounded.layers[0].a.dtype == mx.bfloat16
    moved = mx.abs(exact.layers[0].a - first.layers[0].a).mean().item()
    apart = rounded.layers[0].a - exact.layers[0].a
    assert mx.abs(apart).mean().item() < 0.02  # twenty roundings
    assert mx.abs(apart.mean()).item() < 0.1 * moved


def test_updates_that_bfloat16_cannot_represent_are_not_lost():
    """1 - 1e-4 is 1 in bfloat16, whose next smaller number is 1 - 2^-8."""
    model, steps = nn.Module(), 40
    model.w = mx.ones((100, 100), mx.bfloat16)
    built = optimizer.build_optimizer(TrainConfig(optimizer="sgd"), model.trainable_parameters())
    update = optimizer.make_update(model, built)
    for _ in range(steps):
        update(HeldGradients({"w": mx.ones((100, 100), mx.bfloat16)}), 1.0, 1e-4)
    mean = model.w.astype(mx.float32).mean().item()
    assert 1 - mean == pytest.approx(steps * 1e-4, rel=0.1)


def test_numbers_of_bfloat16_are_not_rounded():
    values = mx.random.normal((64,), key=mx.random.key(3)).astype(mx.bfloat16)
    noise = mx.full((64,), 1 - 2.0**-24)
    assert mx.array_equal(in_bfloat16(values.astype(mx.float32), noise), values)


@pytest.mark.parametrize(
    ("name", "bits"), [(name, 32) for name in OPTIMIZERS] + [(name, 8) for name in IN_8_BITS]
)
def test_states_on_disk_give_the_same_bytes_and_are_saved_and_restored(name, bits, tmp_path):
    for dtype in (mx.float32, mx.bfloat16):
        held, spilled = (trained(name, bits, 3, place, dtype) for place in (None, tmp_path))
        assert mx.array_equal(held.layers[0].a, spilled.layers[0].a)
    config = TrainConfig(optimizer=name, optimizer_bits=bits)
    results = []
    for folder in (None, tmp_path):
        network, file = Wide(), tmp_path / f"{folder is None}.safetensors"
        for part in range(2):
            built = optimizer.build_optimizer(config, network.trainable_parameters(), folder)
            if part:
                optimizer.restore_states(built, mx.load(str(file)))
            update = optimizer.make_update(network, built)
            for step in range(2):
                update(HeldGradients(gradients(2 * part + step)), 1.0, 1e-3)
            saved = optimizer.saved_states(built)
            saved(file) if callable(saved) else checkpoint.save_arrays(file, saved)
        results.append((dict(tree_flatten(network.parameters())), mx.load(str(file))))
    for ours, theirs in zip(*results, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(mx.array_equal(array, theirs[path]) for path, array in ours.items())
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".safetensors"]


def test_a_checkpoint_with_other_bits_is_refused():
    built = [
        optimizer.build_optimizer(TrainConfig(optimizer_bits=bits), Wide().trainable_parameters())
        for bits in (32, 8)
    ]
    with pytest.raises(ValueError, match="for another optimizer"):
        optimizer.restore_states(built[0], dict(optimizer.saved_states(built[1])))


@pytest.mark.memory
def test_states_on_disk_and_gradients_are_not_in_memory(tmp_path):
    network = Wide()
    built = optimizer.build_optimizer(TrainConfig(), network.trainable_parameters(), tmp_path)
    total = SpilledGradients(tmp_path)
    grads = gradients(1)
    mx.eval(grads, network.parameters())
    before = mx.get_active_memory()
    total.add(grads)
    assert grads == {}
    assert mx.get_active_memory() < before - 4 * 72 * 64 + 1000
    optimizer.make_update(network, built)(total, 1.0, 1e-3)
    assert mx.get_active_memory() < before - 4 * 72 * 64 + 1000
