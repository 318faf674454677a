"""The memory of generating completions: the estimate, beside MLX's measured peak."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_model, peak_of
from your_ai.engine.measure_generation import generation_costs
from your_ai.engine.peaks import Room
from your_ai.engine.weights import open_model, prepare_for_generation
from your_ai.generation.rollouts import RolloutPrompt, complete, sampler_of
from your_ai.memory.costs import Costs
from your_ai.memory.estimate_generation import prompts_of_wave, rollout_phases
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import NO_ADAPTER, RolloutSizes, Workload

pytestmark = pytest.mark.memory

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 2}  # fmt: skip


def estimated(folder: Path, wave: int, sizes: RolloutSizes) -> int:
    """The estimate from the measured costs of a block."""
    facts, network = facts_of(folder, 4), open_model(folder, mx.float32).network
    workload = Workload(facts=facts, training=NO_ADAPTER, rollouts=sizes)
    costs = generation_costs(network, 0, workload, Room(1 << 40))
    phases = rollout_phases(facts, sizes, wave, Costs((costs,), facts.order, {}))
    return int(max(sum(phase.values()) for phase in phases))


def measured(
    folder: Path, wave: int, sizes: RolloutSizes, streams: bool = False, first: int | None = None
) -> int:
    """MLX's peak beyond what is allocated before. first: the most tokens of the first prompt's."""
    network = prepare_for_generation(open_model(folder, mx.float32), streams)
    mx.eval(network.parameters())
    mx.set_cache_limit(0)
    rng, groups = np.random.default_rng(0), range(sizes.rows // sizes.group)
    prompts = [
        RolloutPrompt(rng.integers(3, 700, sizes.prompt_tokens), tuple(range(sizes.group)))
        for _ in groups
    ]
    prompts[0] = replace(prompts[0], max_new_tokens=first)
    gc.collect()
    mx.clear_cache()

    def run() -> None:
        for _ in range(3):  # where the machine is busy, MLX gets late to its largest buffers
            list(complete(network, prompts, sampler_of(1.0), (), sizes.new_tokens, wave))

    return peak_of(run)


@pytest.mark.parametrize(
    ("wave", "prompt", "vocabulary", "bits", "streams"),
    [
        (16, 60, 768, 4, False),
        (32, 60, 768, None, False),
        (16, 300, 768, 4, False),
        (64, 20, 8000, 4, False),
        (16, 60, 20_000, 4, False),
        (32, 60, 768, 4, True),
    ],
)
def test_the_peak_of_generating_is_estimated_within_a_tenth(
    tmp_path, wave, prompt, vocabulary, bits, streams
):
    folder = make_model(tmp_path / "m", bits=bits, vocab_size=vocabulary, **WIDE)
    sizes = RolloutSizes(prompt_tokens=prompt, new_tokens=3, group=8, rows=wave)
    found, expected = measured(folder, wave, sizes, streams), estimated(folder, wave, sizes)
    assert expected == pytest.approx(found, rel=0.1)


def prompts_in_waves(rows: int, group: int, wave: int) -> int:
    """The most prompts that have rows in one wave, counted."""
    waves = [range(start, min(start + wave, rows)) for start in range(0, rows, wave)]
    return max(len({row // group for row in rows_of_wave}) for rows_of_wave in waves)


@pytest.mark.parametrize(
    ("wave", "prompt", "new", "group"),
    [(4, 60, 240, 1), (8, 100, 100, 4), (8, 300, 30, 4), (16, 37, 33, 8)],
)
def test_the_peak_where_completions_join_others_is_estimated_within_a_tenth(
    tmp_path, wave, prompt, new, group
):
    """Of rows whose caches grow once more when they are longest, as estimates assume."""
    folder = make_model(tmp_path / "m", vocab_size=768, **WIDE)
    sizes = RolloutSizes(prompt_tokens=prompt, new_tokens=new, group=group, rows=4 * wave)
    found = measured(folder, wave, sizes, first=new // 2)
    assert found <= estimated(folder, wave, sizes) <= 1.1 * found


@given(st.integers(1, 9), st.integers(1, 40))
def test_the_prompts_of_a_wave_are_counted(group, wave):
    """In as many rows as it takes for every offset of a wave in a group."""
    assert prompts_of_wave(wave, group) == prompts_in_waves(group * wave, group, wave)
