"""Guessed costs: what must hold of any, and that there are some for every architecture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.architectures import model_types, write_model
from tests.memory.test_estimate import any_facts, any_training
from your_ai.config.adapter_facts import DORA, LORA
from your_ai.memory.costs import (
    HEADS,
    PHASES,
    BlockCosts,
    CostCurve,
    Costs,
    MeasuredCosts,
    bytes_of,
)
from your_ai.memory.facts import ModelFacts, facts_of
from your_ai.memory.guess import can_tile, costs_of, guessed, is_tiled
from your_ai.memory.sizes import HEAD_ROWS, TILED_FROM
from your_ai.memory.workload import Training, Workload

ALL = Training(blocks=4, rank=4, targets=("all-linear",), experts=True)
SAME = "storing", "norms"  # phases that do not depend on tokens
# Models that mlx-lm, or this package without a GPU, cannot make from sizes alone.
UNMADE = ("muse_spark", "olmo", "prism_hadamard_qwen35", "recurrent_gemma", "spark2_5")


@st.composite
def cases(draw) -> tuple[ModelFacts, Training]:
    facts = draw(any_facts())
    return facts, draw(any_training(facts))


# Generation is guessed where it is needed (memory/estimate_generation.py).
GUESSED = [phase for phase in PHASES if not phase.startswith(("read", "sampl"))]


def of_blocks(costs: Costs, rows: int, tokens: int) -> dict[str, float]:
    """The bytes of all phases of all kinds of blocks, by name."""
    return {
        f"{phase} of kind {place}": bytes_of(kind, phase, rows, tokens)
        for place, kind in enumerate(costs.kinds)
        for phase in GUESSED
    }


def every_cost(costs: Costs, rows: int, tokens: int) -> dict[str, float]:
    """The same, and those of the heads, which run in slices of about the same bytes."""
    return of_blocks(costs, rows, tokens) | {
        name: head.at(rows * tokens) for name, head in costs.heads.items()
    }


def none_is_larger(fewer: dict[str, float], more: dict[str, float]) -> bool:
    return all(size <= more[name] * (1 + 1e-9) + 1 for name, size in fewer.items())


@given(cases(), st.integers(1, 8), st.integers(1, 4096), st.integers(1, 512))
def test_more_or_longer_rows_never_need_less(case, rows, tokens, more):
    costs = guessed(*case)
    fewer = of_blocks(costs, rows, tokens)
    assert none_is_larger(fewer, of_blocks(costs, rows + 1, tokens))
    assert none_is_larger(fewer, of_blocks(costs, rows, tokens + more))


@given(cases(), st.integers(1, 64))
def test_a_larger_rank_never_needs_less(case, more):
    facts, training = case
    larger = replace(training, rank=training.rank + more)
    fewer = every_cost(guessed(facts, training), 2, 512)
    assert none_is_larger(fewer, every_cost(guessed(facts, larger), 2, 512))


@given(cases())
def test_gradients_of_a_larger_rank_need_more_to_be_stored(case):
    facts, training = case
    costs, larger = (guessed(facts, replace(training, rank=rank)) for rank in (8, 16))
    sizes = [c.largest("storing", 1, 1, 1) for c in (costs, larger)]
    assert sizes[1] == 2 * sizes[0] > 0


@given(cases(), st.integers(1, 8), st.integers(1, 2048))
def test_dora_never_needs_less_than_lora(case, rows, tokens):
    facts, training = case
    found = [
        every_cost(guessed(facts, replace(training, adapter=kind)), rows, tokens)
        for kind in (LORA, DORA)
    ]
    assert none_is_larger(*found)


@given(cases(), st.integers(1, 8), st.integers(1, 2048))
def test_every_phase_of_a_block_needs_something(case, rows, tokens):
    found = every_cost(guessed(*case), rows, tokens)
    norms = {name: found.pop(name) for name in list(found) if name.startswith("norms")}
    assert all(size > 0 for size in found.values())
    assert all((size > 0) == case[1].adapter.has_norms for size in norms.values())


@given(cases(), st.integers(1, HEAD_ROWS))
def test_a_head_of_one_number_needs_no_logits(case, tokens):
    plain, score = (guessed(*case, score_head).heads for score_head in (False, True))
    assert all(score[name].at(tokens) < plain[name].at(tokens) for name in HEADS)


@given(cases())
def test_measured_costs_come_before_guessed_ones(case):
    facts, training = case
    measured = BlockCosts(forward=CostCurve(3.0), tile_tokens=0)
    costs = Costs((measured,), (0,) * facts.blocks, {})
    guess = guessed(facts, training)
    both = MeasuredCosts(costs, costs)
    found = costs_of(Workload(facts=facts, training=training, costs=both))
    assert found.kinds == (measured.completed(guess.kinds[0]),)
    assert found.heads == guess.heads
    assert costs_of(Workload(facts=facts, training=training)) == guess


@pytest.mark.parametrize(("rows", "tokens"), [(1, TILED_FROM), (1, TILED_FROM + 1), (2, 1024)])
def test_long_rows_run_on_tiles_unless_a_measured_block_does_not(tmp_path, rows, tokens):
    facts = facts_of(write_model(tmp_path / "m", "llama"), 4)
    workload = Workload(facts=facts, training=ALL)
    assert is_tiled(workload, rows, tokens) == (rows * tokens > TILED_FROM)
    whole = Costs((BlockCosts(tile_tokens=0),), facts.order, {})
    both = MeasuredCosts(whole, whole)
    assert not is_tiled(replace(workload, costs=both), rows, tokens)


# Every architecture


@pytest.fixture(scope="module")
def facts_by_type(tmp_path_factory) -> dict[str, ModelFacts]:
    folder = tmp_path_factory.mktemp("architectures")
    names = [name for name in model_types() if name not in UNMADE]
    return {name: facts_of(write_model(folder / name, name), 4) for name in names}


def test_the_hidden_size_of_every_architecture_is_known(facts_by_type):
    assert [name for name, facts in facts_by_type.items() if not facts.hidden] == []


def test_every_phase_is_guessed_for_every_architecture(facts_by_type):
    assert len(facts_by_type) > 100
    for name, facts in facts_by_type.items():
        costs = guessed(facts, replace(ALL, blocks=facts.blocks, adapter=DORA))
        assert (len(costs.order), set(costs.heads)) == (facts.blocks, set(HEADS)), name
        assert costs.is_tiled == can_tile(facts), name
        for phase, size in every_cost(costs, 2, 512).items():
            assert 0 < size < 1e9, (name, phase)


def test_more_tokens_need_more_in_every_architecture(facts_by_type):
    """Of gradients that are stored and of norms, there are no more."""
    for name, facts in facts_by_type.items():
        costs = guessed(facts, replace(ALL, blocks=facts.blocks))
        fewer, more = (of_blocks(costs, 1, tokens) for tokens in (512, 1024))
        grows = {phase for phase, size in fewer.items() if size < more[phase]}
        assert grows == {phase for phase in fewer if not phase.startswith(SAME)}, name


def test_architectures_with_recurrences_softcaps_or_shared_keys_are_not_cut(facts_by_type):
    cut = {name for name, facts in facts_by_type.items() if can_tile(facts)}
    assert {"llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "minicpm3"} <= cut
    assert not cut & {"gemma2", "mamba2", "qwen3_next", "gemma4_text", "gemma3n", "baichuan_m1"}
