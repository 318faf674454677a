"""Compare the formulas for the memory of mixers with measurements."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.nets.mixers import plain
from your_ai.memory.mixer_facts import (
    gated_delta_sizes,
    lightning_sizes,
    lru_sizes,
    rwkv7_sizes,
    selective_sizes,
    state_space_sizes,
    transient_bytes,
)
from your_ai.nets.mixers.gated_delta import gated_delta
from your_ai.nets.mixers.rwkv7 import rwkv7
from your_ai.nets.mixers.scans import real_gated_lru, selective_scan

pytestmark = pytest.mark.memory

SIZES = {
    "delta": lambda *sizes: gated_delta_sizes(*sizes, vector=False),
    "vector_delta": lambda *sizes: gated_delta_sizes(*sizes, vector=True),
    "rwkv": rwkv7_sizes,
    "ssm": state_space_sizes,
    "gla": lightning_sizes,
    "selective": selective_sizes,
    "lru": lru_sizes,
}
# Kind, sizes, rows, {tokens: MB}: MLX 0.32.4 on a CPU with 2 cores, float32, compiled.
MEASURED = [
    ("delta", (4, 8, 128, 128), 1, {512: 16.8, 1024: 23.6, 2048: 38.8, 4096: 84.1}),
    ("vector_delta", (8, 8, 128, 128), 1, {512: 29.9, 1024: 43.0, 2048: 67.2, 4096: 151.3}),
    ("rwkv", (16, 64), 1, {512: 44.7, 1024: 59.4, 2048: 113.6, 4096: 218.1}),
    ("ssm", (1, 24, 128, 64), 1, {512: 21.6, 1024: 33.1, 2048: 58.3, 4096: 108.6}),
    ("gla", (16, 64), 1, {512: 17.9, 1024: 29.4, 2048: 64.0, 4096: 117.7}),
    ("selective", (1536, 16), 1, {512: 38.7, 1024: 48.2, 2048: 67.3, 4096: 127.1}),
    ("lru", (2560,), 1, {512: 58.1, 1024: 83.1, 2048: 135.5, 4096: 240.4}),
    ("delta", (2, 2, 64, 64), 2, {512: 5.4, 1024: 9.0}),
    ("delta", (16, 32, 128, 128), 1, {512: 67.3, 1024: 98.6}),
    ("vector_delta", (4, 4, 64, 64), 2, {512: 15.4, 1024: 19.7}),
    ("rwkv", (32, 64), 1, {512: 89.8, 1024: 118.9}),
    ("ssm", (8, 64, 64, 64), 1, {512: 47.7, 1024: 72.8}),
    ("gla", (8, 128), 1, {512: 20.2, 1024: 32.3}),
    ("selective", (512, 16), 2, {512: 25.8, 1024: 32.3}),
    ("lru", (1024,), 2, {512: 47.5, 1024: 67.5}),
]


@pytest.mark.parametrize(("kind", "sizes", "rows", "peaks"), MEASURED)
def test_formulas_are_within_15_percent_of_measurements(kind, sizes, rows, peaks):
    for tokens, megabytes in peaks.items():
        estimate = transient_bytes(SIZES[kind](*sizes), rows, tokens, 4) / 1e6
        assert estimate == pytest.approx(megabytes, rel=0.15), tokens


def test_half_precision_takes_less_and_more_tokens_take_more():
    for kind, sizes, rows, _ in MEASURED:
        found = SIZES[kind](*sizes)
        assert transient_bytes(found, rows, 512, 2) < transient_bytes(found, rows, 512, 4)
        few, many = (transient_bytes(found, rows, tokens, 4) for tokens in (1, 2048))
        assert 0 < few < many


LIVE = [
    ("delta", (1, 2, 32, 34), gated_delta, lambda: plain.delta_inputs(512, False, 1, 1, 2, 32)),
    (
        "vector_delta",
        (1, 2, 32, 34),
        gated_delta,
        lambda: plain.delta_inputs(512, True, 1, 1, 2, 32),
    ),
    ("rwkv", (2, 32), rwkv7, lambda: plain.rwkv_inputs(512, 1, 2, 32)),
    ("selective", (128, 3), selective_scan, lambda: plain.selective_inputs(512, 1, 128)),
    ("lru", (256,), real_gated_lru, lambda: plain.lru_inputs(512, 1, 256)),
]


@pytest.mark.parametrize(("kind", "sizes", "mixer", "inputs"), LIVE)
def test_formulas_hold_for_the_code_as_it_is(kind, sizes, mixer, inputs):
    """Roughly: how far MLX runs ahead depends on the load of the machine."""
    arrays = inputs()
    cotangent = mx.ones_like(mixer(*arrays)[0])
    mx.eval(arrays, cotangent)
    mx.clear_cache()
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.vjp(lambda *given: mixer(*given)[0], arrays, [cotangent]))
    peak = mx.get_peak_memory() - held
    assert 0.5 < transient_bytes(SIZES[kind](*sizes), 1, 512, 4) / peak < 2
