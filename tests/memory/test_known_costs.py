"""Costs on this machine: where they are read from, and when they are measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.memory.test_plan import WORKLOAD, least_of, most_of
from your_ai.config import TrainConfig
from your_ai.config.adapter_facts import DORA
from your_ai.errors import Unsplittable
from your_ai.memory.budget import (
    HOPELESS,
    LARGEST,
    Measuring,
    PriorPlans,
    budget_of,
    costs_here,
    costs_key,
)
from your_ai.memory.costs import BlockCosts, CostCurve, Costs, MeasuredCosts, keep_costs
from your_ai.memory.facts import ModelFacts
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import FAR, DoesNotFit, options
from your_ai.memory.workload import Workload

KEY = ("machine", "model")
OF_BLOCKS = Costs((BlockCosts(forward=CostCurve(1.0)),), (0,) * 32, {})
COSTS = MeasuredCosts(OF_BLOCKS, OF_BLOCKS, read_s=1e-9)
CLOSE = MemoryLimit(least_of(WORKLOAD), "")


class Measured:
    """Counts how often costs are measured."""

    def __init__(self, costs: MeasuredCosts | None = COSTS, *, always: bool = False) -> None:
        self.costs, self.limits = costs, []
        self.how = Measuring(self.measure, always)

    def measure(self, workload: Workload, limit_bytes: int) -> MeasuredCosts | None:
        self.limits.append(limit_bytes)
        return self.costs


def known(
    measured: Measured | None, limit: MemoryLimit = CLOSE, past: PriorPlans | None = None
) -> MeasuredCosts | None:
    how = None if measured is None else measured.how
    return costs_here(WORKLOAD, KEY, limit, past or PriorPlans(), how)


def test_costs_are_measured_inside_the_limit_once_and_then_read():
    first, second = Measured(), Measured()
    assert known(first) == COSTS
    assert first.limits == [CLOSE.limit_bytes]
    assert known(second) == known(None) == COSTS
    assert second.limits == []


def test_costs_are_not_measured_where_nothing_can_measure_them():
    assert known(None) is None


@pytest.mark.parametrize("is_measured", [False, True])
@pytest.mark.parametrize(
    ("asked", "engines"),
    [("auto", {"fused"}), ("staged", {"fused"}), ("streamed", {"streamed"})],
)
def test_a_model_that_cannot_be_taken_apart_is_planned_whole(asked, engines, is_measured):
    def measure(workload: Workload, limit_bytes: int) -> MeasuredCosts:
        if not is_measured:
            raise Unsplittable
        return replace(COSTS, is_whole=True)

    workload, limit = replace(WORKLOAD, engine=asked), MemoryLimit(most_of(WORKLOAD), "")
    config = TrainConfig(lora_rank=8, lora_layers=1, plan=asked)
    measuring = Measuring(measure, always=True)
    budget = budget_of(config, workload, mx.bfloat16, limit, measuring=measuring)
    assert {option.plan.engine for option in options(budget.workload)} == engines
    least = min(option.needed_bytes for option in options(budget.workload))
    with pytest.raises(DoesNotFit) as refusal:
        budget_of(config, workload, mx.bfloat16, MemoryLimit(least // 2, ""), measuring=measuring)
    assert refusal.value.least_bytes == least


# Without files, as of a model before it is quantized, nobody knows how long they take to read.
@pytest.mark.parametrize(
    "found", [None, replace(COSTS, is_complete=False), replace(COSTS, read_s=0.0)]
)
def test_costs_that_are_not_complete_are_used_and_measured_again(found):
    for _ in range(2):
        measured = Measured(found)
        assert known(measured) == found
        assert len(measured.limits) == 1


@pytest.mark.parametrize("always", [False, True])
def test_far_limits_need_no_measuring_unless_it_is_asked_for(always):
    measured = Measured(always=always)
    assert known(measured, MemoryLimit(2 * FAR * most_of(WORKLOAD), "")) == (
        COSTS if always else None
    )
    assert len(measured.limits) == always


@pytest.mark.parametrize(("share", "is_measured"), [(0.9, False), (1.01, True)])
def test_limits_that_are_hopeless_by_the_guess_need_no_measuring(share, is_measured):
    """A guess may be twice too high."""
    measured = Measured()
    known(measured, MemoryLimit(int(share * least_of(WORKLOAD) / HOPELESS), ""))
    assert bool(measured.limits) == is_measured


# A run that is resumed


def begun(costs: Path | None) -> PriorPlans:
    return PriorPlans(costs=costs, begun=True)


def test_a_run_that_has_begun_uses_its_own_costs(tmp_path):
    own, measured = replace(COSTS, read_s=2.0), Measured(always=True)
    keep_costs(tmp_path / "costs.json", KEY, own)
    known(Measured())  # others, in the store
    assert known(measured, past=begun(tmp_path / "costs.json")) == own
    assert measured.limits == []


@pytest.mark.parametrize("content", [None, "", "{}"])
def test_a_run_that_has_begun_without_costs_guesses_them(tmp_path, content):
    measured, file = Measured(always=True), tmp_path / "costs.json"
    if content is not None:
        file.write_text(content)
    known(Measured())  # others, in the store
    assert known(measured, past=begun(file)) is None
    assert known(measured, past=begun(None)) is None
    assert measured.limits == []


def test_a_run_that_has_begun_keeps_its_costs_on_another_machine(tmp_path):
    """It splits batches as before, also after an update of MLX or of this package."""
    keep_costs(tmp_path / "costs.json", ("another machine", "model"), COSTS)
    assert known(Measured(), past=begun(tmp_path / "costs.json")) == COSTS


@pytest.mark.parametrize("blocks", [1, 31, 33])
def test_costs_of_another_number_of_blocks_are_not_used(tmp_path, blocks):
    other = replace(OF_BLOCKS, order=(0,) * blocks)
    keep_costs(tmp_path / "costs.json", KEY, MeasuredCosts(other, other))
    assert known(None, past=begun(tmp_path / "costs.json")) is None


def test_a_run_that_has_not_begun_may_measure(tmp_path):
    measured = Measured()
    assert known(measured, past=PriorPlans(costs=tmp_path / "costs.json")) == COSTS
    assert len(measured.limits) == 1


# The key


def key(workload: Workload = WORKLOAD, dtype: mx.Dtype = mx.bfloat16, **more) -> tuple[str, ...]:
    return costs_key(workload, dtype, **more)


def with_training(**changes) -> Workload:
    return replace(WORKLOAD, training=replace(WORKLOAD.training, **changes))


def with_facts(**changes) -> Workload:
    return replace(WORKLOAD, facts=replace(WORKLOAD.facts, **changes))


def reordered(facts: ModelFacts) -> ModelFacts:
    kinds = [replace(k, linears=dict(reversed(k.linears.items()))) for k in facts.kinds]
    return replace(facts, kinds=tuple(kinds))


def test_costs_depend_on_the_model_the_adapters_and_the_shapes():
    others = [
        with_training(rank=8),
        with_training(targets=("q_proj",)),
        with_training(adapter=DORA),
        with_training(experts=True),
        with_training(adapter_dtype="bfloat16"),
        with_facts(hidden=2048),
        with_facts(order=(0,) * 16),
        with_facts(float_bytes=4),
        with_facts(config_digest="another activation"),
        replace(WORKLOAD, batch_size=LARGEST.rows - 1),
        replace(WORKLOAD, lengths=(1024,)),
        replace(WORKLOAD, packed=True),
        replace(WORKLOAD, score_head=True),
        replace(WORKLOAD, forward=True),
        replace(WORKLOAD, scores=True),
        replace(WORKLOAD, engine="staged"),
    ]
    keys = [key(), key(dtype=mx.float32), key(has_dropout=True), *map(key, others)]
    assert len(set(keys)) == len(keys)


def test_costs_do_not_depend_on_what_is_not_measured():
    others = [
        with_training(optimizer="adafactor", optimizer_bits=8, blocks=3),
        replace(WORKLOAD, facts=reordered(WORKLOAD.facts)),
        replace(WORKLOAD, lengths=(7, 2048)),
        replace(WORKLOAD, costs=COSTS),
        replace(WORKLOAD, rows_per_step=64),
    ]
    assert {key(other) for other in others} == {key()}


def test_micro_batches_beyond_those_measured_have_the_same_costs():
    longest = LARGEST.tokens
    sizes = [(LARGEST.rows, longest), (64, longest), (LARGEST.rows, 4 * longest)]
    found = {key(replace(WORKLOAD, batch_size=b, lengths=(t,))) for b, t in sizes}
    assert len(found) == 1


def test_costs_without_tiles_are_not_those_of_a_run_with_tiles():
    """4 rows of 200 tokens are one tile, and 8 are two: other phases are measured."""
    few, many = (replace(WORKLOAD, batch_size=rows, lengths=(200,)) for rows in (4, 8))
    assert key(few) != key(many)


def test_adapters_of_any_rank_are_measured_once():
    """Smaller ones, which are tried if the largest do not fit, need no more."""
    config, measured = TrainConfig(max_memory=1), Measured(always=True)
    with pytest.raises(DoesNotFit):
        budget_of(config, WORKLOAD, mx.bfloat16, MemoryLimit(10**6, ""), measuring=measured.how)
    assert len(measured.limits) == 1
