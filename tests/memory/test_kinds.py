"""Guesses of the memory of other architectures, compared with their measured peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mlx_lm.models import gemma3n

from tests.architectures import write_model
from your_ai.config import TrainConfig
from your_ai.engine.mlp import can_be_sliced
from your_ai.memory.costs import BlockCosts, Costs, MeasuredCosts
from your_ai.memory.estimate import Plan, Training, Workload, estimate, weights_bytes
from your_ai.memory.estimate_graphs import graphs_bytes
from your_ai.memory.facts import facts_of, facts_of_config, sparse_blocks
from your_ai.memory.guess import slices_mlp
from your_ai.memory.workload import DataSizes, Kept, ProcessFacts, workload_of

PEAKS = Path(__file__).parents[2] / "tools" / "architecture_peaks.json"
RECORDED = json.loads(PEAKS.read_text(encoding="utf-8"))
TOO_LOW, TOO_HIGH = -0.12, 0.3  # plans add a margin of 12%


@pytest.mark.parametrize("name", RECORDED["models"])
def test_gradients_of_other_architectures_are_estimated(name):
    model, rows, tokens = RECORDED["models"][name], RECORDED["rows"], RECORDED["tokens"]
    facts = facts_of_config(model["config"], 4)
    training = Training(blocks=facts.blocks, rank=RECORDED["rank"], targets=("all-linear",))
    workload, off = Workload(facts=facts, training=training), {}
    for plan, peak in model["peaks"].items():
        kept = Kept(linear=facts.blocks if plan == "kept" else 0)
        wanted = Plan("staged" if kept else plan, rows * tokens, kept=kept)
        found = estimate(workload, wanted, rows, tokens, gradients_only=True)
        needed = found.mlx_bytes - found.components["optimizer"]  # none was made
        off[plan] = needed / peak - 1
    assert set(off) == {"fused", "staged", "streamed", "kept"}
    assert min(off.values()) > TOO_LOW, off
    assert max(off.values()) < TOO_HIGH, off


def test_a_large_block_beside_small_ones_is_streamed_with_one_of_them():
    facts = facts_of_config(RECORDED["models"]["ministral3"]["config"], 4)
    (kind,) = facts.kinds
    large = replace(kind, weights_bytes=10 * kind.weights_bytes)
    between = replace(facts, kinds=(kind, large), order=(0, 1, 0, 0))
    apart = 2 * large.weights_bytes + facts.rest_bytes
    beside = large.weights_bytes + kind.weights_bytes + facts.rest_bytes
    assert weights_bytes(between, "streamed") == beside < apart
    assert weights_bytes(replace(between, order=(0, 1, 1, 0)), "streamed") == apart


def test_sparse_mlps_are_those_that_the_engine_does_not_slice():
    config = RECORDED["models"]["gemma3n"]["config"]
    facts = facts_of_config(config, 4)
    network = gemma3n.Model(gemma3n.ModelArgs.from_dict(config))
    sliced = [can_be_sliced(block.mlp) for block in network.layers]
    assert sliced == [slices_mlp(facts.alone[kind]) for kind in facts.order]
    assert sliced == [False, False, True, True, True, True]


@pytest.mark.parametrize("pattern", [None, [], "0.95", 0.95, ["0.95"], [None, [0.95]], {"0": 1}])
def test_other_patterns_of_sparsity_are_of_no_block(pattern):
    assert sparse_blocks({"activation_sparsity_pattern": pattern}) == frozenset()


# MB by which a process grew with the graphs of one row of 768 tokens, as measured.
GRAPHS_MB = {
    "mamba": (86.4, 38.7),
    "falcon_h1": (40.7, 17.9),
    "qwen3_next": (25.9, 18.8),
    "kimi_linear": (28.7, 28.4),
    "rwkv7": (67.3, 56.8),
    "llama": (9.9, 8.2),
}


@pytest.mark.parametrize("name", GRAPHS_MB)
def test_graphs_of_recurrences_are_not_underestimated(tmp_path, name):
    facts = facts_of(write_model(tmp_path / "m", name), 4)
    config = TrainConfig(lora_targets=("all-linear",), lora_layers="all", lora_rank=8)
    workload = workload_of(config, facts, DataSizes(lengths=(768,)), ProcessFacts(sliced=True))
    found = [graphs_bytes(workload, engine, 1, 768) / 1e6 for engine in ("fused", "staged")]
    pairs = zip(found, GRAPHS_MB[name], strict=True)
    assert all(mb >= 0.98 * measured for mb, measured in pairs), found


def test_blocks_that_are_called_in_two_ways_have_two_graphs():
    """As those with a window and without, where the config gives them no names."""
    facts = facts_of_config(RECORDED["models"]["ministral3"]["config"], 4)
    assert set(facts.order) == {0}
    workload = Workload(facts=facts, training=Training(blocks=4, rank=4, targets=("q_proj",)))
    found = []
    for kinds in (1, 2):
        order = tuple(index % kinds for index in range(facts.blocks))
        costs = Costs((BlockCosts(),) * kinds, order, {})
        measured = replace(workload, costs=MeasuredCosts(costs, costs))
        found.append([graphs_bytes(measured, engine, 1, 512) for engine in ("staged", "fused")])
    (staged, fused), (more_staged, same_fused) = found
    assert 1.5 * staged < more_staged < 2 * staged
    assert same_fused == fused
