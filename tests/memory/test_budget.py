"""The budget of a run from its settings, on simulated machines."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.conftest import make_model
from your_ai.config import TrainConfig
from your_ai.config.adapter_facts import DORA
from your_ai.data.lines import RowLimit
from your_ai.errors import UserError
from your_ai.hub.row_caches import RowCache
from your_ai.memory import allocator, probe
from your_ai.memory.budget import (
    LATER_BYTES,
    WavePlan,
    budget_of,
    budget_of_evaluation,
    limit_generation,
    limit_of,
    plan_of,
    plan_waves,
    process_here,
    python_bytes,
    row_limit,
    run_limit,
)
from your_ai.memory.estimate import Training, weights_bytes
from your_ai.memory.estimate_generation import RolloutSizes, generation_bytes, rollout_phases
from your_ai.memory.facts import BlockFacts, ModelFacts, facts_of
from your_ai.memory.limit import MachineMemory
from your_ai.memory.plan import Budget, DoesNotFit, options
from your_ai.memory.workload import DataSizes, Kept, Plan, Workload, workload_of
from your_ai.run import events

MB, GB = 10**6, 10**9
HELD = 100 * MB


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """A machine with 16 GB, half of it free; this process uses 100 MB."""
    memory = MachineMemory(ram_bytes=16 * GB, available_bytes=8 * GB, held_bytes=HELD)
    monkeypatch.setattr(probe, "machine", lambda: memory)
    monkeypatch.setattr(probe, "process_bytes", lambda: HELD)


@pytest.fixture
def facts(tiny_model) -> ModelFacts:
    return facts_of(tiny_model, 4)


def found(tiny_model, level: int = 0, **settings) -> Budget:
    config = TrainConfig(**settings)
    facts = facts_of(tiny_model, 4, config.quantize)
    workload = asked_by(config, facts, (64, 256))
    return budget_of(config, workload, mx.float32, run_limit(config), level)


def asked_by(config: TrainConfig, facts: ModelFacts, lengths=(64,), **sizes) -> Workload:
    """The workload of a run in this process."""
    return workload_of(config, facts, DataSizes(lengths=lengths, **sizes), process_here())


# Rows


def test_memory_left_by_reading_rows_does_not_count_as_python(monkeypatch):
    python_bytes.cache_clear()
    assert row_limit(1000, limit_of(1.0)) == RowLimit(row_bytes=1000, room_bytes=GB - HELD)
    monkeypatch.setattr(probe, "process_bytes", lambda: 9 * HELD)
    assert python_bytes() == HELD + LATER_BYTES


# The limit


def test_limit_without_max_memory_comes_from_the_machine(tiny_model):
    assert limit_of(None).limit_bytes == (8 * GB + HELD) * 95 // 100
    assert found(tiny_model).limit == limit_of(None)


def test_max_memory_above_the_machines_ram_needs_force(tiny_model):
    with pytest.raises(UserError, match="--max-memory 20: this machine has 16 GB"):
        found(tiny_model, max_memory=20)
    assert found(tiny_model, max_memory=20, force=True).limit.limit_bytes == 20 * GB


# The workload


@pytest.mark.parametrize(("layers", "blocks"), [(None, 3), (2, 2), ("all", 3), ("auto", 3)])
def test_lora_layers_decides_the_number_of_adapted_blocks(facts, layers, blocks):
    """The model has three blocks; None is four in old runs, limited to all blocks."""
    config = TrainConfig(lora_layers=layers)
    assert asked_by(config, facts).training.blocks == blocks


def test_workload_contains_the_settings(facts):
    config = TrainConfig(
        batch_size=3, grad_accumulation=5, lora_rank=7, lora_targets=("v_proj",), use_dora=True,
        optimizer="lion", plan="staged", spill=True,
    )  # fmt: skip
    sizes = DataSizes(lengths=(256, 64, 256))
    asked = workload_of(config, facts, sizes, process_here(), can_stream=False)
    assert asked.lengths == (64, 256)
    assert (asked.batch_size, asked.rows_per_step) == (3, 15)
    assert (asked.engine, asked.spill, asked.can_stream) == ("staged", True, False)
    training = asked.training
    assert (training.rank, training.targets) == (7, ("v_proj",))
    assert (training.adapter, training.optimizer) == (DORA, "lion")


def test_python_bytes_is_measured_only_once(facts, monkeypatch):
    assert asked_by(TrainConfig(), facts).process.python_bytes == HELD + LATER_BYTES
    monkeypatch.setattr(probe, "process_bytes", lambda: 2 * HELD)  # with a model
    assert asked_by(TrainConfig(), facts).process.python_bytes == HELD + LATER_BYTES


def test_python_bytes_without_a_gauge_is_only_the_constant(facts, monkeypatch):
    monkeypatch.setattr(probe, "process_bytes", lambda: None)
    assert asked_by(TrainConfig(), facts).process.python_bytes == LATER_BYTES


@pytest.mark.parametrize(("kind", "kept"), [("off", 0), ("memory", 1000 * 32 * 4), ("disk", 0)])
def test_only_a_prefix_cache_in_memory_is_counted(facts, kind, kept):
    """The cache has 1000 tokens, each of 32 numbers of 4 bytes."""
    config = TrainConfig(prefix_cache=kind)
    workload = asked_by(config, facts, prefix_tokens=1000)
    assert workload.prefix_bytes == kept
    budget = budget_of(config, workload, mx.float32, run_limit(config))
    assert budget.choice.option.estimate.components["prefix cache"] == kept


@pytest.mark.parametrize(("longest", "rows"), [(2048, 1), (1000, 3), (100, 21)])
def test_packed_row_counts_as_several_rows_of_the_longest_text(facts, longest, rows):
    asked = asked_by(TrainConfig(packing=True, batch_size=4), facts, (32, longest))
    assert asked.lengths == (longest,)
    assert asked.batch_size == rows
    assert rows * longest >= TrainConfig().max_seq_length


# The budget


def needed(tiny_model, **settings) -> float:
    """The smallest limit, in GB, for the smallest plan of a run with these settings."""
    every = options(found(tiny_model, **settings).workload)
    return (min(option.needed_bytes for option in every) + 1) / GB


def adapters(tiny_model, limit_gb, **settings) -> tuple[int, int]:
    training = found(tiny_model, max_memory=limit_gb, **settings).workload.training
    return training.rank, training.blocks


def test_every_plan_is_tried_before_a_smaller_rank_and_fewer_blocks_come_last(tiny_model):
    full = needed(tiny_model, lora_rank=16, lora_layers="all")
    rank_4 = needed(tiny_model, lora_rank=4, lora_layers="all")
    one_block = needed(tiny_model, lora_rank=4, lora_layers=1)
    assert one_block < rank_4 < full
    assert adapters(tiny_model, full) == (16, 3)
    assert found(tiny_model, max_memory=full).choice.option.plan.engine == "streamed"
    assert adapters(tiny_model, full - 1e-6)[0] in (8, 4)
    assert adapters(tiny_model, rank_4) == (4, 3)
    assert adapters(tiny_model, rank_4 - 1e-6) == (4, 1)
    with pytest.raises(DoesNotFit):
        adapters(tiny_model, one_block - 1e-6)


@pytest.mark.parametrize("settings", [{"lora_rank": 16}, {"lora_layers": "all"}])
def test_settings_that_were_given_are_not_reduced(tiny_model, settings):
    other = {"lora_rank": 4, "lora_layers": 1}  # the smallest that automatic settings become
    given = needed(tiny_model, **{**other, **settings})
    with pytest.raises(DoesNotFit):
        adapters(tiny_model, given - 1e-6, **settings)
    rank, blocks = adapters(tiny_model, given, **settings)
    assert settings in ({"lora_rank": rank}, {"lora_layers": "all" if blocks == 3 else blocks})


def test_plan_is_fused_if_memory_is_plentiful(tiny_model):
    choice = found(tiny_model, batch_size=2).choice
    assert (choice.option.plan.engine, choice.level, choice.larger) == ("fused", 0, None)
    assert choice.option.plan.rows(256, 2) == 2


def test_estimate_depends_on_the_compute_dtype(tiny_model):
    config = TrainConfig()
    workloads = [asked_by(config, facts_of(tiny_model, size)) for size in (2, 4)]
    sizes = [
        budget_of(config, workload, mx.float32, run_limit(config)).choice.option.estimate.mlx_bytes
        for workload in workloads
    ]
    assert sizes[0] < sizes[1]


def test_limit_below_every_plan_is_refused(tiny_model):
    with pytest.raises(UserError, match=r"nothing fits into 0\.1 GB; at least 0\.\d+ GB is"):
        found(tiny_model, max_memory=0.1)
    least = min(option.needed_bytes for option in options(found(tiny_model).workload))
    assert found(tiny_model, max_memory=(least + 1) / GB).choice.option.needed_bytes == least


def test_quantizing_on_load_reduces_the_weights(tmp_path):
    folder = make_model(tmp_path / "m", bits=None, hidden_size=128)
    sizes = [
        found(folder, quantize=bits).choice.option.estimate.components["weights"]
        for bits in (None, 8, 4)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[0] / 4


# Generation


@pytest.fixture
def held(monkeypatch) -> list[tuple[int, int, int]]:
    """The arguments of each call of `allocator.set_limits`, which is replaced."""
    calls: list[tuple[int, int, int]] = []
    monkeypatch.setattr(allocator, "set_limits", lambda *sizes: calls.append(sizes))
    monkeypatch.setattr(allocator, "return_freed_buffers", lambda: None)
    return calls


@pytest.fixture
def large() -> ModelFacts:
    """A model with 4 GB of weights in 40 blocks."""
    layers = {"self_attn.k_proj": (1024, 1024), "mlp.up_proj": (1024, 4096)}
    return ModelFacts(
        kinds=(BlockFacts(layers, 90 * MB),), order=(0,) * 40, hidden=1024, vocabulary=32000,
        heads=16, float_bytes=2, vocabulary_bytes=400 * MB, rest_bytes=MB,
        quantized=True, known_caches=(RowCache(0, 2048),) * 40,
    )  # fmt: skip


@pytest.mark.parametrize(("limit_gb", "streamed"), [(6, False), (2, True)])
def test_generation_streams_weights_only_if_they_do_not_fit(large, held, limit_gb, streamed):
    assert limit_generation(large, 512, limit_gb, can_stream=True) == streamed
    kept = weights_bytes(large, "streamed") if streamed else large.weights_bytes
    needed = HELD + LATER_BYTES + generation_bytes(large, 512) + kept
    assert held == [(limit_gb * GB, needed, HELD + LATER_BYTES)]


@pytest.mark.parametrize(("can_stream", "limit_gb"), [(True, 0.2), (False, 3)])
def test_generation_error_names_a_limit_that_is_enough(large, held, can_stream, limit_gb):
    with pytest.raises(UserError, match="--max-tokens") as caught:
        limit_generation(large, 512, limit_gb, can_stream)
    text = str(caught.value)
    assert text.startswith(f"--max-memory {limit_gb}: generating with this model needs at least ")
    asked = float(text.split("needs at least ")[1].split(" GB")[0])
    assert limit_generation(large, 512, asked, can_stream) == can_stream
    assert len(held) == 1


SIZES = RolloutSizes(prompt_tokens=200, new_tokens=256, group=4, rows=64)


def bytes_of_wave(facts: ModelFacts, wave: int, streams: bool) -> int:
    """The least limit for a wave, of the whole process."""
    phases = rollout_phases(facts, SIZES, wave)
    weights = weights_bytes(facts, "streamed") if streams else facts.weights_bytes
    return HELD + LATER_BYTES + weights + int(max(sum(phase.values()) for phase in phases))


@pytest.mark.parametrize(
    ("wave", "streams", "smaller"),
    [
        (64, False, (32, False)),
        (8, False, (64, True)),  # rather than few rows with weights in memory
        (8, True, (4, True)),
    ],
)
def test_the_largest_wave_that_fits_is_generated(large, held, wave, streams, smaller):
    needed = bytes_of_wave(large, wave, streams)
    assert plan_waves(large, SIZES, needed / GB, can_stream=True) == WavePlan(wave, streams)
    assert held == [(needed, needed, HELD + LATER_BYTES)]
    assert plan_waves(large, SIZES, (needed - 1) / GB, True) == WavePlan(*smaller)


def test_the_error_about_waves_names_a_limit_that_is_enough_for_one_row(large, held):
    with pytest.raises(UserError, match=r"--max-memory 0\.2: generating with this model") as caught:
        plan_waves(large, SIZES, 0.2, can_stream=True)
    assert not held
    asked = float(str(caught.value).split("needs at least ")[1].split(" GB")[0])
    assert plan_waves(large, SIZES, asked, can_stream=True) == WavePlan(1, streams=True)


def test_without_a_limit_waves_fit_into_the_machine(large, held, monkeypatch):
    assert plan_waves(large, SIZES, None, can_stream=True) == WavePlan(64, streams=False)
    tiny = MachineMemory(ram_bytes=GB, available_bytes=150 * MB, held_bytes=HELD)
    monkeypatch.setattr(probe, "machine", lambda: tiny)
    assert plan_waves(large, SIZES, None, can_stream=True) == WavePlan(1, streams=False)
    assert not held


# Evaluation

TRAINING = Training(blocks=2, rank=4, targets=("q_proj",))


def evaluated(tiny_model, max_memory_gb=None, **options) -> Budget:
    args = (TRAINING, tiny_model, mx.float32, [64, 256, 64], 4, limit_of(max_memory_gb))
    return budget_of_evaluation(*args, **options)


def test_workload_of_an_evaluation_contains_its_arguments(tiny_model):
    budget = evaluated(tiny_model, 2.0, engine="staged", can_stream=False, answers=SIZES)
    asked = budget.workload
    assert budget.limit.limit_bytes == 2 * GB
    assert (asked.lengths, asked.batch_size, asked.engine) == ((64, 256), 4, "staged")
    assert (asked.can_stream, asked.rollouts) == (False, SIZES)
    assert asked.forward
    assert asked.process.python_bytes == HELD + LATER_BYTES


def test_evaluation_fits_into_a_limit_that_is_too_small_for_training(tiny_model):
    least = min(option.needed_bytes for option in options(evaluated(tiny_model).workload))
    limit_gb = (least + 1) / GB
    assert evaluated(tiny_model, limit_gb).choice.option.needed_bytes == least
    with pytest.raises(UserError, match="nothing fits"):
        found(tiny_model, max_memory=limit_gb)


def test_slices_are_counted_only_on_the_cpu(tiny_model, monkeypatch):
    assert evaluated(tiny_model).workload.process.sliced == (mx.default_device().type == mx.cpu)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert not evaluated(tiny_model).workload.process.sliced


def test_the_plan_of_an_event_is_read_also_from_older_versions():
    recorded = {"plan": "staged", "micro_tokens": 512, "spill": False, "level": 0, "text": "",
                "estimate_bytes": 1, "kept": 3}  # fmt: skip
    assert plan_of(events.Planned(**recorded)) == Plan("staged", 512, kept=Kept(linear=3))
    recorded |= {"kept_attention": 8, "kept_activations": 1}
    assert plan_of(events.Planned(**recorded)) == Plan("staged", 512, kept=Kept(3, 8, 1))
