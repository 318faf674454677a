"""What blocks need while prompts are read: what they add up to, beside whole models."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.architectures import write_model
from tests.conftest import make_model, peak_of
from tests.scheduling import compute_in_order
from your_ai.config import TrainConfig
from your_ai.engine import measure_generation as measuring
from your_ai.engine.measure_costs import measure_costs
from your_ai.engine.measure_generation import for_generation, generation_costs, reading_of
from your_ai.engine.peaks import Room
from your_ai.engine.weights import open_model, prepare_for_generation
from your_ai.generation.rollouts import RolloutPrompt, complete, prefill, sampler_of
from your_ai.memory.costs import Costs, MeasuredCosts
from your_ai.memory.estimate_generation import GENERATION_BYTES, generation_bytes, rollout_phases
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import (
    NO_ADAPTER,
    DataSizes,
    ProcessFacts,
    RolloutSizes,
    Workload,
    workload_of,
)

TOKENS = 512  # read in two parts
FAR = 1 << 40  # bytes
CONFIG = TrainConfig(lora_rank=4, lora_layers="all")


def generating(folder: Path, **work: Any) -> Costs:
    """The costs of the blocks of a model, for nothing but generation."""
    network, facts = open_model(folder, mx.float32).network, facts_of(folder, 4)
    workload = Workload(facts=facts, training=NO_ADAPTER, **work)
    every = range(facts.blocks)
    kinds = [generation_costs(network, index, workload, Room(FAR)) for index in every]
    return Costs(tuple(kinds), tuple(every), {})


def check_sum(folder: Path, real: Callable[[nn.Module], int], composed: Callable[[], float],
              least: float, most: float) -> None:  # fmt: skip
    """Check that what measured blocks add up to is between so many times the real peak.

    real: the peak of the model with its weights in memory. Beside other load, a few operations
    begin together, or later.
    """
    compute_in_order()
    network = prepare_for_generation(open_model(folder, mx.float32), False)
    mx.eval(network.parameters())
    mx.set_cache_limit(0)
    for _ in range(3):
        expected = composed() - GENERATION_BYTES
        gc.collect()
        found = real(network)
        if least * found <= expected <= most * found:
            return
    assert least * found <= expected <= most * found


@pytest.mark.memory
@pytest.mark.parametrize(
    "architecture",
    [
        "llama",
        "deepseek_v3",
        "glm_moe_dsa",
        "mamba2",
        "falcon_h1",
        "nemotron_h",
        "jamba",
        "kimi_linear",
    ],
)
def test_blocks_add_up_to_what_reading_a_prompt_takes(tmp_path, architecture):
    """Also where attention has whole scores, or where MLX computes states of all blocks at the end.

    The last of the few blocks computes no output, so the sum is higher.
    """
    folder = write_model(tmp_path / "m", architecture)

    def real(network: nn.Module) -> int:
        return peak_of(lambda: prefill(network, np.arange(TOKENS) % 60))

    def composed() -> float:
        costs = generating(folder, answer_tokens=TOKENS)
        return generation_bytes(facts_of(folder, 4), TOKENS, costs, step=1)

    check_sum(folder, real, composed, 0.95, 1.3)


@pytest.mark.memory
@pytest.mark.parametrize("architecture", ["gpt_oss", "deepseek_v3", "mamba2", "rwkv7", "falcon_h1"])
@pytest.mark.parametrize("rows", [8, 32])
def test_blocks_add_up_to_what_sampling_a_wave_takes(tmp_path, architecture, rows):
    """Also where what is held of recurrences is more than their states; of more rows than blocks
    were measured with, too."""
    folder = write_model(tmp_path / "m", architecture)
    sizes = RolloutSizes(prompt_tokens=200, new_tokens=40, group=rows, rows=rows)
    prompt = RolloutPrompt(np.arange(200) % 60, tuple(range(rows)))

    def real(network: nn.Module) -> int:
        before, steps = mx.get_active_memory(), 0

        def step(_: int) -> None:
            nonlocal steps
            if not steps:  # the prompt was read
                mx.reset_peak_memory()
            steps += 1

        list(complete(network, [prompt], sampler_of(1.0), (), 40, rows, step))
        return mx.get_peak_memory() - before

    def composed() -> float:
        costs = generating(folder, rollouts=sizes)
        return sum(rollout_phases(facts_of(folder, 4), sizes, rows, costs)[1].values())

    check_sum(folder, real, composed, 0.92, 1.15)


def test_quantized_layers_are_measured_as_generation_computes_them(tmp_path):
    """On a CPU in slices that are dequantized, which must be in memory."""
    folder = make_model(tmp_path / "m", "llama", 4, hidden_size=256, intermediate_size=1024)
    network = for_generation(open_model(folder, mx.float32).network)
    opened = open_model(folder, mx.float32)
    expected = {name: type(m) for name, m in prepare_for_generation(opened, False).named_modules()}
    assert {name: type(module) for name, module in network.named_modules()} == expected


@pytest.fixture
def workload(tmp_path) -> Workload:
    folder = make_model(tmp_path / "m", num_hidden_layers=3)
    data = DataSizes(lengths=(64,), answer_tokens=80)
    return workload_of(CONFIG, facts_of(folder, 4), data, ProcessFacts())


def measured(folder, workload: Workload) -> Costs:
    found = measure_costs(open_model(folder, mx.float32).network, CONFIG, workload, FAR)
    assert isinstance(found, MeasuredCosts)
    return found.memory


def test_what_reads_prompts_is_measured_at_their_length(tmp_path, workload, monkeypatch):
    lengths, real = [], measuring.reading_of

    def noting(network, index, tokens):
        lengths.append(tokens)
        return real(network, index, tokens)

    monkeypatch.setattr(measuring, "reading_of", noting)
    sizes = RolloutSizes(prompt_tokens=3000, new_tokens=8, group=2, rows=4)
    assert measured(tmp_path / "m", workload).has("reading")
    assert not measured(tmp_path / "m", replace(workload, answer_tokens=0)).has("reading")
    assert measured(tmp_path / "m", replace(workload, rollouts=sizes)).has("reading")
    assert lengths == [80, 128, 1024, 2048]


def test_a_model_whose_caches_fail_is_measured_but_for_reading(tmp_path, workload, monkeypatch):
    def failing(*_):
        raise AttributeError("property 'state' has no setter")

    monkeypatch.setattr(measuring, "reading_of", failing)
    found = measured(tmp_path / "m", workload)
    assert found.has("forward")
    assert not found.has("reading")
    facts = workload.facts
    assert generation_bytes(facts, 80, found) == generation_bytes(facts, 80)


def test_nothing_of_a_network_is_changed_by_reading(tmp_path):
    network = open_model(write_model(tmp_path / "m", "llama"), mx.float32).network
    before = network(mx.array([[1, 2, 3]]))
    reading_of(network, 1, 300)
    assert mx.array_equal(network(mx.array([[1, 2, 3]])), before)


@pytest.mark.parametrize(
    ("text", "complete"), [("no setter", True), ("[malloc] Unable to allocate 9 bytes", False)]
)
def test_costs_without_reading_are_only_final_if_there_was_enough_memory(
    tmp_path, workload, monkeypatch, text, complete
):
    """Those that are not complete are measured again the next time."""

    def failing(*_):
        raise RuntimeError(text)

    monkeypatch.setattr(measuring, "reading_of", failing)
    network = open_model(tmp_path / "m", mx.float32).network
    found = measure_costs(network, CONFIG, workload, FAR)
    assert found is not None
    assert found.is_complete == complete
