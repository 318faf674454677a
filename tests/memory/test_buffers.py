"""MLX's buffers: how many a plan holds, by live arrays and graphs, and which plans are left."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.architectures import write_model
from tests.memory.test_plan import GB, WORKLOAD
from your_ai.config import TrainConfig
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import HeldGradients
from your_ai.engine.measure_costs import batch_of
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import open_model
from your_ai.hub.registry import known
from your_ai.memory import budget, probe
from your_ai.memory.buffers import METAL_BUFFERS, allowed, most_held, of_model, of_tracing
from your_ai.memory.costs import Shape
from your_ai.memory.estimate_kept import everything
from your_ai.memory.facts import ModelFacts, facts_of, facts_of_known
from your_ai.memory.plan import DoesNotFit, choose, options
from your_ai.memory.workload import (
    NOTHING,
    UNLIMITED,
    Plan,
    ProcessFacts,
    RolloutSizes,
    Training,
    Workload,
)
from your_ai.nets.model import add_adapters
from your_ai.training.optimizer import build_optimizer, make_update

METAL = ProcessFacts(most_buffers=METAL_BUFFERS, mixes_whole=True)


class Trained(NamedTuple):
    """A small model with adapters on all linear layers, ready to train."""

    facts: ModelFacts
    training: Training
    network: Any
    engine: Engine
    config: TrainConfig


def trained(folder: Path, plan: str = "fused", blocks: int = 4, **more: Any) -> Trained:
    config = TrainConfig(lora_layers=blocks, lora_rank=2, lora_targets=("all-linear",), **more)
    training = Training(
        blocks=blocks, rank=2, targets=config.lora_targets, adapter=config.adapter_kind,
        optimizer=config.optimizer, optimizer_bits=config.optimizer_bits,
    )  # fmt: skip
    facts, opened = facts_of(folder, mx.float32.size), open_model(folder, mx.float32)
    adapters = add_adapters(opened.network, config)
    kept = everything(blocks) if plan == "kept" else NOTHING
    built = build_engine(
        opened.network,
        adapters.dropout_keys,
        "staged" if plan == "kept" else plan,
        tensors=opened.tensors,
        kept=kept,
    )
    return Trained(facts, training, opened.network, built.engine, config)


def live_arrays() -> int:
    gc.collect()
    return sum(isinstance(found, mx.array) for found in gc.get_objects())


@pytest.fixture
def uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


def constants_of_graph(found: Trained, tokens: int) -> int:
    """The arrays that a graph begins with, without those of the model."""
    sums, grads = found.engine.gradients(batch_of(Shape(1, tokens), packing=False), 1.0, 0)
    results = [x for x in sums if isinstance(x, mx.array)] + [x for _, x in tree_flatten(grads)]
    file = io.StringIO()
    mx.export_to_dot(file, *results)
    return file.getvalue().count("rank=source") - len(tree_flatten(found.network.parameters()))


# Query blocks of 64 and of 32, windows and sinks, experts, and every kind of chunk.
KINDS = (
    *("llama", "qwen3_moe", "gpt_oss", "gemma3n", "mamba", "mamba2", "qwen3_next", "kimi_linear"),
    *("rwkv7", "minimax", "bailing_moe_linear"),
)


@pytest.mark.parametrize("blocks", [4, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fused_graph_has_at_most_the_constants_that_are_counted(
    kind, blocks, tmp_path, uncompiled
):
    found = trained(write_model(tmp_path / kind, kind), blocks=blocks)
    workload = Workload(facts=found.facts, training=found.training)
    for tokens in (32, 256):
        counted = of_tracing(workload, Plan("fused", tokens), 1, tokens)
        there = constants_of_graph(found, tokens)
        assert there <= counted
        if tokens == 256:  # else most is what each graph may have
            assert counted <= 5 * there


@pytest.mark.parametrize(
    "more", [{}, {"optimizer_bits": 8}, {"use_dora": True}, {"optimizer": "adafactor"}], ids=str
)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_next"])
def test_a_model_its_gradients_and_states_are_at_most_the_arrays_that_are_counted(
    kind, more, tmp_path
):
    folder, before = write_model(tmp_path / kind, kind, hidden_size=64), live_arrays()
    found = trained(folder, **more)
    gradients = HeldGradients()
    optimizer = build_optimizer(found.config, found.network.trainable_parameters())
    update = make_update(found.network, optimizer)
    add = partial(found.engine.add_gradients, batch_of(Shape(1, 32), packing=False), 1.0, 0)
    add(gradients)
    update(gradients, 1.0, 1e-4)
    add(gradients)
    add(gradients)
    held = live_arrays() - before
    counted = of_model(Workload(facts=found.facts, training=found.training))
    assert held <= counted <= 3 * held


@pytest.mark.parametrize("plan", ["fused", "staged", "kept"])
def test_no_moment_of_a_step_has_more_arrays_than_are_counted(plan, tiny_model, monkeypatch):
    blocks = facts_of(tiny_model, 4).blocks
    before, most = live_arrays(), 0
    found = trained(tiny_model, plan, blocks)
    evaluate = mx.eval

    def counting(*arrays: Any) -> None:
        nonlocal most
        most = max(most, live_arrays() - before)
        evaluate(*arrays)
        most = max(most, live_arrays() - before)

    monkeypatch.setattr(mx, "eval", counting)
    gradients = HeldGradients()
    for _ in range(3):
        batch = batch_of(Shape(1, 128), packing=False)
        found.engine.add_gradients(batch, 1.0, 0, gradients)
    kept = everything(blocks) if plan == "kept" else NOTHING
    counted = most_held(
        Workload(facts=found.facts, training=found.training),
        Plan("staged" if plan == "kept" else plan, 128, kept=kept),
        1,
        128,
    )
    assert 0 < most <= counted


def test_rank_on_all_layers_of_70b_is_far_from_the_limit_of_metal():
    facts = facts_of_known(known()["llama-70b"], 2)
    training = Training(blocks=facts.blocks, rank=16, targets=("all-linear",))
    workload = Workload(facts=facts, training=training, process=METAL)
    assert of_model(workload) < 0.03 * METAL_BUFFERS
    assert most_held(workload, Plan("fused", 4096), 1, 4096) < 0.06 * METAL_BUFFERS


def test_long_rows_in_slices_leave_fused_plans_out():
    training = replace(WORKLOAD.training, blocks=32)
    sliced = replace(METAL, mixes_whole=False)
    long = replace(WORKLOAD, training=training, lengths=(8192,), process=sliced)
    assert {o.plan.engine for o in options(long)} == {"staged", "streamed"}
    whole = replace(long, process=METAL)
    assert choose(whole, 512 * GB).option.plan.engine == "fused"
    assert choose(long, 512 * GB).option.plan.engine == "staged"


def test_a_prefix_cache_of_too_many_texts_is_refused_with_what_to_do():
    cached = replace(WORKLOAD, prefix_texts=450_000, process=METAL)
    expected = r"every plan needs 45\d,\d+ of MLX's buffers .* 499,000; use --prefix-cache disk"
    with pytest.raises(DoesNotFit, match=expected):
        choose(cached, 512 * GB)
    assert options(replace(cached, prefix_texts=400_000))


def test_waves_of_many_prompts_are_made_smaller(monkeypatch):
    facts = facts_of_known(known()["qwen2.5-0.5b"], 2)
    sizes = RolloutSizes(prompt_tokens=8, new_tokens=8, group=1, rows=16_000)
    monkeypatch.setattr(probe, "machine", lambda: probe.MachineMemory(ram_bytes=512 * GB))
    assert budget.plan_waves(facts, sizes, None, can_stream=False).wave == 16_000
    monkeypatch.setattr(probe, "most_buffers", lambda: METAL_BUFFERS)
    assert budget.plan_waves(facts, sizes, None, can_stream=False).wave == 8_000


def test_the_limit_is_that_of_the_device(monkeypatch):
    assert budget.process_here().most_buffers == UNLIMITED
    monkeypatch.setattr(probe, "most_buffers", lambda: 1000)
    assert allowed(budget.process_here().most_buffers) == 900
