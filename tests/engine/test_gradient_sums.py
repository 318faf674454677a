"""The gradients of a step, in memory and on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from your_ai.engine.gradients import Gradients, HeldGradients, SpilledGradients, in_order

KINDS: list[Callable[[Path], Gradients]] = [lambda _: HeldGradients(), SpilledGradients]


def part(seed: int, dtype: mx.Dtype = mx.float32) -> dict[str, mx.array]:
    names = ["model.layers.10.q.lora_a", "model.layers.2.q.lora_a", "model.layers.2.q.m"]
    return {
        name: mx.random.normal((3, 4), key=mx.random.key(10 * seed + index)).astype(dtype)
        for index, name in enumerate(names)
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_micro_batches_are_summed_in_their_order(kind, dtype, tmp_path):
    total = kind(tmp_path)
    for seed in range(3):
        total.add(part(seed, dtype))
    assert list(total.sizes()) == in_order(part(0))
    norm = mx.sqrt(sum(total.squares())).item()
    found = total.take(part(0))
    for name, array in found.items():
        first, second, third = (part(seed, dtype)[name].astype(mx.float32) for seed in range(3))
        assert array.dtype == mx.float32
        assert mx.array_equal(array, first + second + third)
    whole = mx.concatenate([array.astype(mx.float32) for array in found.values()])
    assert norm == pytest.approx(mx.linalg.norm(whole).item(), rel=1e-5)
    assert total.sizes() == {}


def test_both_kinds_give_the_same_bytes(tmp_path):
    held, spilled = (kind(tmp_path) for kind in KINDS)
    for seed in range(2):
        held.add(part(seed))
        spilled.add(part(seed))
    assert held.sizes() == spilled.sizes()
    assert [s.item() for s in held.squares()] == [s.item() for s in spilled.squares()]
    for name in list(held.sizes()):
        assert mx.array_equal(held.take([name])[name], spilled.take([name])[name])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradients_of_a_step_that_failed_are_forgotten(kind, tmp_path):
    total = kind(tmp_path)
    total.add(part(0))
    total.clear()
    assert total.sizes() == {}
    total.add(part(1))
    assert mx.array_equal(total.take(part(1))["model.layers.2.q.m"], part(1)["model.layers.2.q.m"])
