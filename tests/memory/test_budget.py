"""From the settings of a run to its budget, on machines as they are told."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from tests.conftest import make_model
from your_ai.config import TrainConfig
from your_ai.data.rows import RowLimit
from your_ai.errors import UserError
from your_ai.memory import allocator, probe
from your_ai.memory.budget import (
    LATER_BYTES,
    Budget,
    budget_of,
    budget_of_evaluation,
    demand_of,
    hold_generation,
    limit_of,
    python_bytes,
    row_limit,
)
from your_ai.memory.estimate import Training, generation_bytes, weights_bytes
from your_ai.memory.facts import ModelFacts, facts_of
from your_ai.memory.limit import MachineMemory
from your_ai.memory.plan import options

MB, GB = 10**6, 10**9
HELD = 100 * MB


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """One with 16 GB, half of them free, where this process holds 100 MB."""
    told = MachineMemory(ram_bytes=16 * GB, available_bytes=8 * GB, held_bytes=HELD)
    monkeypatch.setattr(probe, "machine", lambda: told)
    monkeypatch.setattr(probe, "process_bytes", lambda: HELD)


@pytest.fixture
def facts(tiny_model) -> ModelFacts:
    return facts_of(tiny_model, 4)


def found(tiny_model, level: int = 0, **settings) -> Budget:
    return budget_of(TrainConfig(**settings), tiny_model, mx.float32, [64, 256], level)


# Rows


def test_what_reading_the_rows_has_left_is_not_pythons(monkeypatch):
    python_bytes.cache_clear()
    assert row_limit(1000, 1.0) == RowLimit(row_bytes=1000, room_bytes=GB - HELD)
    monkeypatch.setattr(probe, "process_bytes", lambda: 9 * HELD)
    assert python_bytes() == HELD + LATER_BYTES


# The limit


def test_without_a_wish_the_limit_is_what_the_machine_gives(tiny_model):
    assert limit_of(None).limit_bytes == (8 * GB + HELD) * 95 // 100
    assert found(tiny_model).limit == limit_of(None)


def test_a_wish_is_the_limit_as_it_is(tiny_model):
    assert found(tiny_model, max_memory=2.5).limit.limit_bytes == 2.5 * GB


def test_more_than_the_machine_has_needs_force(tiny_model):
    with pytest.raises(UserError, match="--max-memory 20: this machine has 16 GB"):
        found(tiny_model, max_memory=20)
    assert found(tiny_model, max_memory=20, force=True).limit.limit_bytes == 20 * GB


# What is asked for


@pytest.mark.parametrize(("layers", "blocks"), [(None, 3), (2, 2), ("all", 3)])
def test_adapted_blocks(facts, layers, blocks):
    """Of three: four by default, or all there are."""
    config = TrainConfig(lora_layers=layers)
    assert demand_of(config, facts, [64]).training.blocks == blocks


def test_by_default_four_blocks_of_more_are_adapted(facts):
    assert demand_of(TrainConfig(), replace(facts, blocks=9), [64]).training.blocks == 4


def test_the_settings_arrive(facts):
    config = TrainConfig(
        batch_size=3,
        grad_accumulation=5,
        lora_rank=7,
        lora_targets=("v_proj",),
        use_dora=True,
        optimizer="lion",
        plan="staged",
        spill=True,
    )
    asked = demand_of(config, facts, [256, 64, 256], can_stream=False)
    assert asked.lengths == (64, 256)
    assert (asked.batch_size, asked.rows_per_step) == (3, 15)
    assert (asked.engine, asked.spill, asked.can_stream) == ("staged", True, False)
    training = asked.training
    assert (training.rank, training.targets) == (7, ("v_proj",))
    assert (training.dora, training.optimizer) == (True, "lion")


def test_what_the_process_holds_without_a_model(facts, monkeypatch):
    assert demand_of(TrainConfig(), facts, [64]).python_bytes == HELD + LATER_BYTES
    monkeypatch.setattr(probe, "process_bytes", lambda: 2 * HELD)  # with one
    assert demand_of(TrainConfig(), facts, [64]).python_bytes == HELD + LATER_BYTES


def test_an_unreadable_gauge_is_not_guessed(facts, monkeypatch):
    monkeypatch.setattr(probe, "process_bytes", lambda: None)
    assert demand_of(TrainConfig(), facts, [64]).python_bytes == LATER_BYTES


@pytest.mark.parametrize(("kind", "kept"), [("off", 0), ("memory", 1000 * 64 * 4), ("disk", 0)])
def test_a_prefix_cache_in_memory_is_counted(tiny_model, facts, kind, kept):
    """A thousand tokens, of 64 numbers of 4 bytes."""
    config = TrainConfig(prefix_cache=kind)
    assert demand_of(config, facts, [64], prefix_tokens=1000).prefix_bytes == kept
    budget = budget_of(config, tiny_model, mx.float32, [64], prefix_tokens=1000)
    assert budget.choice.option.estimate.components["prefix cache"] == kept


@pytest.mark.parametrize(("longest", "rows"), [(2048, 1), (1000, 3), (100, 21)])
def test_a_packed_row_counts_as_rows_of_the_longest_text(facts, longest, rows):
    asked = demand_of(TrainConfig(packing=True, batch_size=4), facts, [32, longest])
    assert asked.lengths == (longest,)
    assert asked.batch_size == rows
    assert rows * longest >= TrainConfig().max_seq_length


# The budget


def test_a_model_is_trained_in_the_fastest_way_where_memory_is_plenty(tiny_model):
    choice = found(tiny_model, batch_size=2).choice
    assert (choice.option.plan.engine, choice.level, choice.larger) == ("fused", 0, None)
    assert choice.option.plan.rows(256, 2) == 2


def test_the_type_computed_in_counts(tiny_model):
    sizes = [
        budget_of(TrainConfig(), tiny_model, dtype, [64]).choice.option.estimate.mlx_bytes
        for dtype in (mx.bfloat16, mx.float32)
    ]
    assert sizes[0] < sizes[1]


def test_levels_are_passed_over(tiny_model):
    needs = [found(tiny_model, level).choice.option.needed_bytes for level in range(3)]
    assert needs == sorted(needs, reverse=True)
    assert len(set(needs)) == 3
    assert found(tiny_model, 1).choice.larger == found(tiny_model).choice.option


def test_a_limit_below_every_plan_is_refused(tiny_model):
    with pytest.raises(UserError, match=r"nothing fits into 0\.10 GB; the least that would do is"):
        found(tiny_model, max_memory=0.1)
    least = min(option.needed_bytes for option in options(found(tiny_model).demand))
    assert found(tiny_model, max_memory=(least + 1) / GB).choice.option.needed_bytes == least


def test_a_model_quantized_on_load_takes_less(tmp_path):
    folder = make_model(tmp_path / "m", bits=None, hidden_size=128)
    sizes = [
        found(folder, quantize=bits).choice.option.estimate.components["weights"]
        for bits in (None, 8, 4)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 4


# Answering


@pytest.fixture
def held(monkeypatch) -> list[tuple[int, int, int]]:
    """What MLX would be told."""
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr(allocator, "hold", lambda *sizes: told.append(sizes))
    monkeypatch.setattr(allocator, "give_back_at_once", lambda: None)
    return told


@pytest.fixture
def large() -> ModelFacts:
    """With 4 GB of weights, in 40 blocks."""
    return ModelFacts(
        blocks=40,
        linears={"self_attn.k_proj": (1024, 1024), "mlp.up_proj": (1024, 4096)},
        hidden=1024,
        vocabulary=32000,
        heads=16,
        float_bytes=2,
        block_bytes=90 * MB,
        blocks_bytes=3600 * MB,
        vocabulary_bytes=400 * MB,
        rest_bytes=MB,
        disk_bytes=4 * GB,
        quantized=True,
    )


def test_weights_are_held_to_answer_where_they_fit(large, held):
    assert not hold_generation(large, 512, 6, can_stream=True)
    needed = HELD + LATER_BYTES + generation_bytes(large, 512) + large.weights_bytes
    assert held == [(6 * GB, needed, HELD + LATER_BYTES)]


def test_weights_are_streamed_to_answer_where_they_do_not(large, held):
    assert hold_generation(large, 512, 2, can_stream=True)
    streamed = weights_bytes(large, "streamed")
    needed = HELD + LATER_BYTES + generation_bytes(large, 512) + streamed
    assert held == [(2 * GB, needed, HELD + LATER_BYTES)]


@pytest.mark.parametrize(("can_stream", "limit_gb"), [(True, 0.2), (False, 3)])
def test_what_answering_takes_is_said_and_is_enough(large, held, can_stream, limit_gb):
    with pytest.raises(UserError, match="--max-tokens") as caught:
        hold_generation(large, 512, limit_gb, can_stream)
    text = str(caught.value)
    assert text.startswith(f"--max-memory {limit_gb}: answering with this model takes ")
    asked = float(text.split("takes ")[1].split(" GB")[0])
    assert hold_generation(large, 512, asked, can_stream) == can_stream
    assert len(held) == 1


# An evaluation

TRAINING = Training(blocks=2, rank=4, targets=("q_proj",))


def evaluated(tiny_model, max_memory_gb=None, **options) -> Budget:
    args = (TRAINING, tiny_model, mx.float32, [64, 256, 64], 4, max_memory_gb)
    return budget_of_evaluation(*args, **options)


def test_an_evaluation_is_asked_for_as_it_is(tiny_model):
    budget = evaluated(tiny_model, 2.0, engine="staged", can_stream=False, answer_tokens=99)
    asked = budget.demand
    assert budget.limit.limit_bytes == 2 * GB
    assert (asked.lengths, asked.batch_size, asked.engine) == ((64, 256), 4, "staged")
    assert (asked.can_stream, asked.answer_tokens) == (False, 99)
    assert asked.forward
    assert asked.python_bytes == HELD + LATER_BYTES


def test_an_evaluation_that_fits_is_not_refused_for_what_training_takes(tiny_model):
    least = min(option.needed_bytes for option in options(evaluated(tiny_model).demand))
    limit_gb = (least + 1) / GB
    assert evaluated(tiny_model, limit_gb).choice.option.needed_bytes == least
    with pytest.raises(UserError, match="nothing fits"):
        found(tiny_model, max_memory=limit_gb)


def test_slices_are_counted_on_the_cpu_alone(tiny_model, monkeypatch):
    assert evaluated(tiny_model).demand.sliced == (mx.default_device().type == mx.cpu)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert not evaluated(tiny_model).demand.sliced
