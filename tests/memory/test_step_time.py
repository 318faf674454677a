"""The work of a step, term by term, and what it does not count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.speeds import CORE
from your_ai.config.adapter_facts import DORA
from your_ai.memory.estimate_adapters import adapter_bytes, optimizer_bytes
from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.mixer_facts import ATTENTION, MAMBA2, SLIDING, MixerFacts
from your_ai.memory.step_time import StepOperations, head_bytes, mean_step, unpredicted
from your_ai.memory.workload import Kept, Plan, StepSizes, Training

ATTENDS = MixerFacts(kind=ATTENTION, heads=4, kv_heads=2, key_dim=16, value_dim=16)
LAYERS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (64, 32),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (64, 128),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
NUMBERS = sum(i * o for i, o in LAYERS.values())
MODEL = ModelFacts(
    kinds=(BlockFacts(LAYERS, 4 * NUMBERS, mixers=(ATTENDS,)),),
    order=(0,) * 4,
    hidden=64,
    vocabulary=1000,
    heads=4,
    float_bytes=4,
    vocabulary_bytes=4 * 64_000,
    rest_bytes=256,
    disk_bytes=10**6,
    quantized=False,
)
EVERY = Training(blocks=4, rank=8, targets=("all-linear",))
UPPER = replace(EVERY, blocks=1)
N = 256


def terms(plan: Plan, training: Training = EVERY, facts: ModelFacts = MODEL, **sizes: object):
    return StepOperations(facts, training, StepSizes(**sizes)).of_step(plan, 1, N)


def test_fused_computes_each_block_once():
    found = terms(Plan("fused", N))
    assert found["forward"]["matmul"] == 4 * N * NUMBERS
    assert not any(found["recompute"].values())
    assert found.keys() >= {"forward", "backward", "head", "update"}


def test_the_backward_pass_of_the_lowest_block_needs_no_gradient_of_its_input():
    inward = 64 * 64 + 2 * 64 * 32
    assert terms(Plan("fused", N))["backward"]["matmul"] == N * (4 * NUMBERS - inward)
    only_down = replace(UPPER, targets=("down_proj",))
    backward = terms(Plan("fused", N), only_down)["backward"]
    assert "matmul" not in backward
    assert "attention" not in backward


def test_staged_computes_trained_blocks_again_but_for_their_last_layer():
    found = terms(Plan("staged", N), UPPER)
    assert found["forward"]["matmul"] == 4 * N * NUMBERS
    assert found["recompute"]["matmul"] == N * (NUMBERS - 128 * 64)


def test_kept_outputs_are_not_computed_again():
    kept = (Kept(), Kept(1), Kept(4), Kept(4, 4), Kept(4, 4, 4))
    staged, some, linear, attention, every = (
        terms(Plan("staged", N, kept=each))["recompute"] for each in kept
    )
    assert some["matmul"] == staged["matmul"] * 3 / 4
    assert "matmul" not in linear
    assert linear["attention"] > 0
    assert "attention" not in attention
    assert 0 < every["elements"] < attention["elements"]


def test_streamed_reads_frozen_blocks_once_and_trained_ones_twice():
    found = terms(Plan("streamed", N), UPPER)["reading"]
    assert found == {"read": (3 + 1) * 4 * NUMBERS, "opened": (3 + 1) * 7}  # the last one once
    whole = terms(Plan("streamed", N))["reading"]
    assert whole["read"] == (2 * 4 - 1) * 4 * NUMBERS
    assert terms(Plan("streamed", N, resident=3))["reading"]["read"] == 2 * 4 * NUMBERS
    assert "reading" not in terms(Plan("staged", N))


def test_a_cached_prefix_spares_the_frozen_blocks():
    found = terms(Plan("streamed", N), UPPER, cached_prefix=True)
    assert found["forward"]["matmul"] == N * NUMBERS
    assert found["reading"] == {"read": 4 * NUMBERS, "opened": 7}


def test_spilled_block_inputs_are_written_and_read():
    inputs, gradients, arrays = 4 * N * 64 * 4, adapter_bytes(MODEL, EVERY), 2 * 4 * 7
    for engine in ("staged", "streamed"):
        found = terms(Plan(engine, N))["spilling"]
        assert found == {"spilled": 2 * inputs + gradients, "stored": 2 * 4 + arrays}
        kept = terms(Plan(engine, N, kept=Kept(attention=1)))["spilling"]
        assert kept == {"spilled": gradients, "stored": arrays}
    assert "spilling" not in terms(Plan("fused", N))


def test_an_update_reads_gradients_and_sums_from_disk_and_writes_states_there():
    gradients, arrays = adapter_bytes(MODEL, EVERY), 2 * 4 * 7
    work = StepOperations(MODEL, EVERY, StepSizes())
    assert "spilled" not in work.of_update(Plan("fused", N), 3)
    found = work.of_update(Plan("staged", N), 3)
    assert (found["spilled"], found["stored"]) == (3 * gradients, 3 * arrays)
    spilled = work.of_update(Plan("staged", N, spill=True), 3)
    states = 2 * optimizer_bytes(MODEL, EVERY)
    assert spilled["spilled"] - found["spilled"] == states
    assert spilled["stored"] - found["stored"] == 2 * 2 * arrays


def test_only_targets_meet_the_vocabulary():
    whole, half = (terms(Plan("fused", N), trained_share=s)["head"] for s in (1.0, 0.5))
    assert whole["logits"] == N * 1000 == 2 * half["logits"]
    assert whole["weights"] == half["weights"] == 64 * 1000
    assert "read_rows" not in whole
    assert terms(Plan("staged", N))["head"]["read_rows"] == 4 * 64_000
    assert terms(Plan("fused", N), has_vocabulary=False)["head"] == {}


def test_texts_that_are_scored_first_pass_the_model_once_more():
    found = terms(Plan("fused", N), scores_first=True)
    assert found["scoring"]["attention"] == found["forward"]["attention"]
    assert found["scoring"]["logits"] == found["head"]["logits"] / 2


def test_quantized_weights_are_counted_apart():
    found = terms(Plan("fused", N), facts=replace(MODEL, quantized=True))
    assert "matmul" not in found["forward"]
    assert found["forward"]["quantized_weights"] == 4 * NUMBERS


def test_adapters_cost_their_inputs_and_outputs_at_any_rank_and_multiply_adds_by_rank():
    low, high = (terms(Plan("fused", N), replace(EVERY, rank=rank))["forward"] for rank in (4, 64))
    sums = sum(inputs + outputs for inputs, outputs in LAYERS.values())
    assert low["adapted"] == high["adapted"] == 4 * N * sums
    assert (low["lora"], high["lora"]) == (4 * low["adapted"], 64 * low["adapted"])


def test_micro_batches_share_an_update():
    work = StepOperations(MODEL, EVERY, StepSizes())
    one, four = (work.of_step(Plan("fused", N), 1, N, count) for count in (1, 4))
    assert four["backward"] == {kind: 4 * n for kind, n in one["backward"].items()}
    assert one["update"]["parameters"] < four["update"]["parameters"]
    assert four["update"]["parameters"] < 2 * one["update"]["parameters"]


def test_sliding_windows_shorten_attention():
    slides = replace(ATTENDS, kind=SLIDING, window=32)
    facts = replace(MODEL, kinds=(replace(MODEL.kinds[0], mixers=(slides,)),))
    whole, near = (terms(Plan("fused", N), facts=f)["forward"]["scores"] for f in (MODEL, facts))
    assert near < whole


def test_the_head_is_one_of_one_or_two_matrices():
    untied = replace(MODEL, vocabulary_bytes=2 * MODEL.vocabulary_bytes)
    assert head_bytes(MODEL) == head_bytes(untied) == 4 * 64_000


def test_the_mean_step_weighs_lengths_by_their_rows():
    def seconds(*rows: tuple[int, int]) -> float:
        sizes = StepSizes(rows_of_length=rows)
        work = StepOperations(MODEL, EVERY, sizes)
        found = mean_step(work, Plan("fused", N), lambda tokens: N // tokens, 4, N)
        return sum(CORE.of(each) for each in found.values())

    short, long = seconds((64, 5)), seconds((256, 5))
    assert seconds() == long
    assert seconds((64, 3), (256, 1)) == pytest.approx((3 * short + long) / 4)


@pytest.mark.parametrize(
    ("facts", "training", "reason"),
    [
        ({"kinds": (replace(MODEL.kinds[0], mixers=(MixerFacts(kind=MAMBA2),)),)}, {}, "mamba2"),
        ({"kinds": (replace(MODEL.kinds[0], experts={"e": (1, 1)}),)}, {}, "routed experts"),
        ({"softcaps": True}, {}, "architecture"),
        ({"float_bytes": 2}, {}, "numbers of 4 bytes"),
        ({}, {"adapter": DORA}, "DoRA"),
        ({}, {"optimizer": "muon"}, "muon"),
    ],
)
def test_what_was_not_measured_is_not_predicted(facts, training, reason):
    assert reason in unpredicted(replace(MODEL, **facts), replace(EVERY, **training), CORE)
    assert unpredicted(MODEL, EVERY, CORE) == ""
