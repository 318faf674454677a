"""What blocks may keep: the order in which more is kept, its bytes, and the work it saves."""

from __future__ import annotations

import itertools

import pytest

from your_ai.memory.estimate_kept import (
    at_rung,
    computed_again,
    everything,
    highest,
    kept_bytes,
    rung_of,
)
from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.mixer_facts import ATTENTION, MAMBA2, MixerFacts
from your_ai.memory.workload import NOTHING, Kept

LAYERS = {
    "self_attn.qkv_proj": (64, 96),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
HEADS = MixerFacts(kind=ATTENTION, heads=4, kv_heads=1, key_dim=16, value_dim=16)
LINEAR, OF_ATTENTION, GATE = 96 + 64 + 128 + 128, 4 * 16 + 4, 128  # numbers of a token


def facts_of(*kinds: BlockFacts, order: tuple[int, ...] = (0,) * 4, float_bytes: int = 4):
    return ModelFacts(kinds, order, 64, 256, 4, float_bytes, 1000, 64, 0, False)


PLAIN = facts_of(BlockFacts(LAYERS, 100, mixers=(HEADS,)))


def test_each_rung_keeps_one_kind_of_one_block_more():
    rungs = [at_rung(3, rung) for rung in range(highest(3) + 1)]
    assert rungs[0] == NOTHING
    assert rungs[3] == Kept(attention=3)
    assert rungs[6] == Kept(linear=3, attention=3)
    assert rungs[-1] == everything(3) == Kept(3, 3, 3)
    assert [rung_of(kept) for kept in rungs] == list(range(10))
    for less, more in itertools.pairwise(rungs):
        assert sum(b - a for a, b in zip(less, more, strict=True)) == 1
        assert all(b >= a for a, b in zip(less, more, strict=True))


def test_more_kept_is_less_computed_again():
    again = [computed_again(at_rung(3, rung), 3) for rung in range(highest(3) + 1)]
    assert again[0] == 3
    assert again == sorted(again, reverse=True)
    assert 0 < again[-1] < 0.3


def test_each_rung_saves_no_more_for_its_memory_than_those_below():
    """Measured of small at 512 tokens, to whose sizes the shares belong."""
    layers = {
        **{f"self_attn.{name}_proj": (1024, n) for name, n in (("q", 1024), ("k", 512))},
        **{f"self_attn.{name}_proj": (1024, n) for name, n in (("v", 512), ("o", 1024))},
        **{f"mlp.{name}_proj": (1024, 2816) for name in ("gate", "up")},
        "mlp.down_proj": (2816, 1024),
    }
    heads = MixerFacts(kind=ATTENTION, heads=16, kv_heads=8, key_dim=64, value_dim=64)
    kind = BlockFacts(layers, 100, mixers=(heads,))
    small = ModelFacts((kind,), (0,), 1024, 32000, 16, 4, 1000, 64, 0, False)
    rungs = [at_rung(1, rung) for rung in range(4)]
    gains = [
        (computed_again(less, 1) - computed_again(more, 1))
        / (kept_bytes(small, more, 1, 512) - kept_bytes(small, less, 1, 512))
        for less, more in itertools.pairwise(rungs)
    ]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [
        (NOTHING, 0),
        (Kept(attention=3), 3 * OF_ATTENTION),
        (Kept(linear=2), 2 * LINEAR),
        (Kept(linear=2, attention=4, activations=1), 2 * LINEAR + 4 * OF_ATTENTION + GATE),
    ],
)
def test_bytes_of_what_is_kept(kept, numbers):
    """Of all outputs but the last; of activations, those beyond the output of the gate."""
    assert kept_bytes(PLAIN, kept, 2, 128) == 2 * 128 * 4 * numbers


def test_blocks_whose_backward_pass_is_over_keep_nothing():
    found = [kept_bytes(PLAIN, Kept(2, 3), 1, 128, done) for done in range(4)]
    one = LINEAR + OF_ATTENTION
    assert found == [128 * 4 * n for n in (2 * one + OF_ATTENTION, one + OF_ATTENTION,
                                           OF_ATTENTION, 0)]  # fmt: skip


def test_short_rows_keep_no_attention():
    assert kept_bytes(PLAIN, Kept(attention=4), 8, 32) == 0


def test_log_sum_exps_are_float32():
    half = facts_of(BlockFacts(LAYERS, 100, mixers=(HEADS,)), float_bytes=2)
    assert kept_bytes(half, Kept(attention=1), 1, 128) == 128 * (2 * 64 + 4 * 4)


def test_only_attention_and_gated_mlps_keep_results_of_their_own():
    layers = {"mixer.in_proj": (64, 200), "mixer.out_proj": (128, 64), "mlp.gate_proj": (64, 9)}
    recurrent = BlockFacts(layers, 100, mixers=(MixerFacts(kind=MAMBA2, heads=4, value_dim=16),))
    mixed = facts_of(PLAIN.kinds[0], recurrent, order=(0, 1))
    assert kept_bytes(mixed, Kept(attention=1), 1, 128) == 0
    assert kept_bytes(mixed, Kept(1, 0, 1), 1, 128) == 128 * 4 * (200 + 9)
    assert kept_bytes(mixed, Kept(attention=2), 1, 128) == 128 * 4 * OF_ATTENTION


def test_routed_experts_keep_nothing():
    experts = {name: size for name, size in LAYERS.items() if name.startswith("mlp")}
    routed = facts_of(BlockFacts(LAYERS, 100, experts, mixers=(HEADS,)))
    assert kept_bytes(routed, Kept(1, 0, 1), 1, 128) == 128 * 4 * (96 + 64)
