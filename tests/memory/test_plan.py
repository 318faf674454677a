"""Plans: which one a limit allows, the error if none fits, and corrections from steps."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memory.test_estimate import any_facts, any_training, in_process
from your_ai.errors import UserError
from your_ai.memory.corrections import Corrections
from your_ai.memory.costs import HEADS as HEAD_NAMES
from your_ai.memory.costs import BlockCosts, CostCurve, Costs, HeadCosts, MeasuredCosts
from your_ai.memory.estimate import WORK, Plan, Training, read_bytes
from your_ai.memory.estimate_generation import GOOD_WAVE, RolloutSizes
from your_ai.memory.estimate_kept import at_rung, computed_again, highest, rung_of
from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.guess import guessed
from your_ai.memory.limit import VARIES_BYTES, MachineMemory, find_limit, rounded_up
from your_ai.memory.mixer_facts import ATTENTION, MixerFacts
from your_ai.memory.plan import (
    ALIKE,
    ENGINES,
    NOTICEABLY,
    choose,
    estimate_rows,
    front_of,
    front_points,
    largest,
    may_keep,
    not_predicted,
    option_of,
    options,
    rows_of,
    seconds_of,
    time_of,
    waves_of,
    with_margin,
)
from your_ai.memory.sample import in_gb
from your_ai.memory.workload import NOTHING, Kept, ProcessFacts, StepSizes, Workload, words

MB, GB = 10**6, 10**9

# 4-bit Llama-3.1-8B: 32 blocks of 123 MB, and 590 MB for the vocabulary
LAYERS = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (4096, 1024),
    "self_attn.v_proj": (4096, 1024), "self_attn.o_proj": (4096, 4096),
    "mlp.gate_proj": (4096, 14336), "mlp.up_proj": (4096, 14336), "mlp.down_proj": (14336, 4096),
}  # fmt: skip
HEADS = MixerFacts(kind=ATTENTION, heads=32, kv_heads=8, key_dim=128, value_dim=128, cached=2048)
LLAMA = ModelFacts(
    kinds=(BlockFacts(LAYERS, 123 * MB, mixers=(HEADS,)),), order=(0,) * 32, hidden=4096,
    vocabulary=128256, heads=32, float_bytes=2, vocabulary_bytes=590 * MB, rest_bytes=MB,
    quantized=True,
)  # fmt: skip
WORKLOAD = Workload(
    facts=LLAMA,
    training=Training(blocks=16, rank=16, targets=("all-linear",)),
    lengths=(256, 1024, 2048),
    batch_size=8,
    rows_per_step=16,
    process=ProcessFacts(python_bytes=200 * MB),
)


@st.composite
def workloads(draw) -> Workload:
    facts = draw(any_facts())
    batch_size = draw(st.integers(1, 16))
    engine = draw(st.sampled_from(["auto", "auto", "fused", "staged", "streamed"]))
    return Workload(
        facts=facts,
        training=draw(any_training(facts)),
        lengths=tuple(draw(st.lists(st.integers(1, 4096), min_size=1, max_size=4))),
        batch_size=batch_size,
        rows_per_step=batch_size * draw(st.integers(1, 4)),
        engine=engine,
        spill=engine != "fused" and draw(st.booleans()),
        can_stream=engine == "streamed" or draw(st.booleans()),
        process=ProcessFacts(python_bytes=draw(st.integers(0, GB))),
        prefix_bytes=draw(st.sampled_from([0, GB])),
    )


def least_of(workload: Workload) -> int:
    return min(option.needed_bytes for option in options(workload))


def most_of(workload: Workload) -> int:
    return max(option.needed_bytes for option in options(workload))


@st.composite
def limited(draw, of=workloads) -> tuple[Workload, int]:
    """A workload, and a limit between its minimum and more than any plan needs."""
    workload = draw(of())
    return workload, draw(st.integers(least_of(workload), 2 * most_of(workload)))


def plans_at(limit_bytes: int, workload: Workload = WORKLOAD) -> list[Plan]:
    """The plans of all levels, down to the smallest."""
    found: list[Plan] = []
    while True:
        plan = choose(workload, limit_bytes, len(found)).option.plan
        if plan in found:
            return found
        found.append(plan)


# The choice


@given(limited(), st.integers(0, 30))
def test_chosen_plan_fits(drawn, level):
    workload, limit_bytes = drawn
    choice = choose(workload, limit_bytes, level)
    needed = choice.option.needed_bytes
    assert choice.option.estimate.process_bytes <= needed <= limit_bytes
    assert 0 <= choice.level <= level
    if choice.smaller is not None:
        assert choice.smaller.needed_bytes <= NOTICEABLY * needed
    if choice.larger is not None:
        assert choice.larger.needed_bytes > needed
    assert (choice.level > 0) <= (choice.larger is not None)


@given(limited())
def test_every_bucket_fits_with_its_margin(drawn):
    """Not only the bucket that needs the most memory."""
    workload, limit_bytes = drawn
    option = choose(workload, limit_bytes).option
    for tokens in workload.lengths:
        rows = option.plan.rows(tokens, workload.batch_size)
        found = estimate_rows(workload, option.plan, rows, tokens)
        assert with_margin(found) <= option.needed_bytes


@given(limited())
def test_fastest_plan_that_fits_is_chosen(drawn):
    workload, limit_bytes = drawn
    fitting = [o for o in options(workload) if o.needed_bytes <= limit_bytes]
    expected, chosen = fitting[0], choose(workload, limit_bytes).option
    assert replace(chosen.plan, kept=expected.plan.kept) == expected.plan
    assert chosen.cost <= expected.cost


@given(limited())
def test_as_much_is_kept_as_fits(drawn):
    workload, limit_bytes = drawn
    option = choose(workload, limit_bytes).option
    plan, blocks = option.plan, workload.training.blocks
    if not may_keep(workload, plan) or rung_of(plan.kept) == highest(blocks):
        return
    more = replace(plan, kept=at_rung(blocks, rung_of(plan.kept) + 1))
    assert with_margin(largest(workload, more)) > limit_bytes


def test_plans_are_tried_in_order_of_speed():
    """Engine by engine, with less and less kept, and fewer and fewer rows."""
    every = [o for o in options(WORKLOAD) if not o.plan.resident]
    tried = [(o.plan.engine, o.plan.spill, o.plan.kept, o.plan.rows(2048, 8)) for o in every]
    of_last = (Kept(16, 16, 16), Kept(16, 16), Kept(8, 16), Kept(0, 16), Kept())
    kept = dict.fromkeys((("staged", False), ("streamed", False)), of_last)
    plans = [(*engine, count) for engine in ENGINES for count in kept.get(engine, (Kept(),))]
    plans += [("streamed", False, Kept()), ("streamed", True, Kept())]  # which read nothing ahead
    assert tried == [(*plan, rows) for plan in plans for rows in (8, 4, 2, 1)]
    assert [o.plan.blocks_ahead for o in every] == [1] * (len(every) - 8) + [0] * 8
    for engine in ENGINES:
        costs = [o.cost for o in every if (o.plan.engine, o.plan.spill) == engine]
        assert costs == sorted(costs)
    assert every[0].cost == 1


def test_streamed_plans_are_tried_with_fewer_and_fewer_blocks_in_memory():
    """From nearly all, which need nearly what staged needs, to two; each block counts exactly."""
    every = options(WORKLOAD)
    found = [o for o in every if replace(o.plan, resident=0) == Plan("streamed", 2048)]
    assert [o.plan.resident for o in found] == list(range(30, -2, -2))
    crossed = 0
    for more, less in itertools.pairwise(found[:-1]):
        added = more.estimate.process_bytes - less.estimate.process_bytes
        if more.plan.resident >= WORKLOAD.training.blocks > less.plan.resident:
            assert added < 2 * 123 * MB  # here on, the backward pass reads no block
            crossed += 1
        else:
            assert added == 2 * 123 * MB
        reads = [read_bytes(LLAMA, WORKLOAD.training, o.plan) for o in (more, less)]
        assert reads[0] < reads[1]
    assert crossed == 1
    (staged,) = (o for o in every if o.plan == Plan("staged", 2048))
    on_disk = staged.estimate.components["block inputs"]
    assert 0 < staged.needed_bytes - on_disk - found[0].needed_bytes < 2 * 123 * MB
    alone = next(o for o in every if o.plan == Plan("streamed", 2048, blocks_ahead=0))
    assert alone.estimate.components["weights"] == 123 * MB + LLAMA.rest_bytes
    assert alone.needed_bytes < found[-1].needed_bytes


def test_a_limit_between_streamed_and_staged_keeps_blocks_in_memory():
    workload = replace(WORKLOAD, lengths=(512,), batch_size=1, rows_per_step=1)
    every = options(workload)
    (staged,) = (o for o in every if o.plan == Plan("staged", 512, spill=True))
    plan = choose(workload, staged.needed_bytes - 1).option.plan
    assert plan.engine == "streamed"
    assert plan.resident == 20  # of 32, beside all that blocks keep
    smaller = choose(workload, staged.needed_bytes - 1, level=1).option.plan
    assert 0 < smaller.resident < plan.resident
    assert "blocks in memory" in words(plan, 512)


def test_more_kept_outputs_take_more_memory_and_less_time():
    for engine in ("staged", "streamed"):
        found = [o for o in options(WORKLOAD) if o.plan == Plan(engine, 2048, kept=o.plan.kept)]
        assert len(found) == 5
        for more, less in itertools.pairwise(found):
            assert more.needed_bytes > less.needed_bytes
            assert more.cost < less.cost


@pytest.mark.parametrize("changes", [{"spill": True}, {"forward": True}])
def test_outputs_are_not_kept_by_plans_that_spill_or_only_evaluate(changes):
    assert {option.plan.kept for option in options(replace(WORKLOAD, **changes))} == {Kept()}


def test_more_memory_never_gives_a_slower_plan():
    limits = range(least_of(WORKLOAD), most_of(WORKLOAD) + GB, 250 * MB)
    plans = [choose(WORKLOAD, limit).option.plan for limit in limits]
    places = [(-ENGINES.index((plan.engine, plan.spill)), rung_of(plan.kept)) for plan in plans]
    before_rows = [(engine, rung // 8) for engine, rung in places]  # of those that `options` tries
    assert before_rows == sorted(before_rows)
    assert plans[-1].engine == "fused"
    assert len(set(places)) > 8


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8, 12])
def test_rows_per_micro_batch_are_halved_down_to_one(batch_size):
    workload = replace(WORKLOAD, batch_size=batch_size, rows_per_step=batch_size, engine="staged")
    plans = [option.plan for option in options(workload) if not option.plan.kept]
    rows = [plan.rows(2048, batch_size) for plan in plans]
    assert rows[0] == batch_size
    assert rows[-1] == 1
    assert rows == sorted(set(rows), reverse=True)


def test_short_rows_form_larger_micro_batches():
    """A plan limits the tokens of a micro-batch, so shorter rows are more per micro-batch."""
    workload = replace(WORKLOAD, engine="staged")
    plan = options(workload)[2].plan
    assert [plan.rows(tokens, 8) for tokens in (2048, 1024, 256)] == [2, 4, 8]


# Levels


@given(limited())
def test_each_level_needs_noticeably_less(drawn):
    workload, limit_bytes = drawn
    needs, level = [], 0
    while True:
        choice = choose(workload, limit_bytes, level)
        needs.append(choice.option.needed_bytes)
        if choice.smaller is None:
            break
        assert choose(workload, limit_bytes, level + 1).option == choice.smaller
        level += 1
    for before, after in itertools.pairwise(needs):
        assert after <= NOTICEABLY * before


def test_levels_end_at_the_smallest_plan():
    plans = plans_at(most_of(WORKLOAD))
    assert len(plans) > 5
    last = choose(WORKLOAD, most_of(WORKLOAD), 1000)
    assert (last.level, last.smaller) == (len(plans) - 1, None)
    assert last.option.plan == plans[-1]
    assert last.option.needed_bytes <= least_of(WORKLOAD) / NOTICEABLY


def test_choice_names_the_next_larger_and_smaller_plan():
    first, second = (choose(WORKLOAD, most_of(WORKLOAD), level) for level in (0, 1))
    assert first.larger is None
    assert second.larger == first.option
    assert first.smaller == second.option
    tight = choose(WORKLOAD, least_of(WORKLOAD))
    assert tight.smaller is None
    assert tight.larger.needed_bytes > least_of(WORKLOAD)
    assert tight.level == 0


# The plan of a resumed run


@pytest.mark.parametrize("place", [0, 5, -1])
def test_kept_plan_needs_no_margin(place):
    """A process may use slightly more memory when it resumes, also under the smallest plan."""
    option = sorted(options(WORKLOAD), key=lambda o: -o.needed_bytes)[place]
    least = option.estimate.process_bytes
    assert least < option.needed_bytes
    for limit_bytes in (least, option.needed_bytes, 100 * GB):
        kept = choose(WORKLOAD, limit_bytes, 2, option.plan)
        assert (kept.option, kept.level) == (option, 2)


def test_kept_plan_has_a_smaller_and_a_larger_one():
    for option in options(WORKLOAD):
        kept = choose(WORKLOAD, option.needed_bytes - 1, 0, option.plan)
        assert kept.option == option
        if kept.smaller is not None:
            assert kept.smaller.needed_bytes <= NOTICEABLY * option.needed_bytes
        if kept.larger is not None:
            assert kept.larger.needed_bytes > option.needed_bytes


def test_plan_that_does_not_fit_is_not_kept():
    chosen = choose(WORKLOAD, 5 * GB).option
    limit_bytes = chosen.estimate.process_bytes - 1
    assert choose(WORKLOAD, limit_bytes, 0, chosen.plan) == choose(WORKLOAD, limit_bytes)


def test_plan_with_another_batch_is_not_kept():
    assert choose(WORKLOAD, 5 * GB, 0, Plan("staged", 12345)) == choose(WORKLOAD, 5 * GB)


# Plans requested by the user


@pytest.mark.parametrize(("engine", "spill"), ENGINES)
def test_requested_engine_is_the_only_one_tried(engine, spill):
    workload = replace(WORKLOAD, engine=engine, spill=spill)
    assert {(o.plan.engine, o.plan.spill) for o in options(workload)} == {(engine, spill)}
    assert {plan.engine for plan in plans_at(most_of(workload), workload)} == {engine}


def test_spill_option_gives_only_plans_that_spill():
    plans = [option.plan for option in options(replace(WORKLOAD, spill=True))]
    assert all(plan.spill for plan in plans)
    plans = [plan.engine for plan in plans if not plan.resident]
    assert plans == 4 * ["staged"] + 8 * ["streamed"]


def test_model_converted_on_load_is_not_streamed():
    workload = replace(WORKLOAD, can_stream=False)
    assert {option.plan.engine for option in options(workload)} == {"fused", "staged"}
    with pytest.raises(UserError, match=r"^--plan streamed: .* or use --plan staged$"):
        choose(replace(workload, engine="streamed"), 100 * GB)


def test_model_converted_on_load_keeps_its_vocabulary_in_memory():
    """Otherwise the staged plan leaves the vocabulary in the files."""

    def weights(engine: str, can_stream: bool) -> list[int]:
        every = options(replace(WORKLOAD, engine=engine, can_stream=can_stream))
        return [option.estimate.components["weights"] for option in every]

    assert weights("staged", False)[0] - weights("staged", True)[0] == LLAMA.vocabulary_bytes
    assert {*weights("fused", True), *weights("fused", False)} == {LLAMA.weights_bytes}


# Refusals


def refused(workload: Workload, limit_bytes: int) -> str:
    with pytest.raises(UserError) as caught:
        choose(workload, limit_bytes)
    return str(caught.value)


def gb_in(refusal: str) -> str:
    """The minimum limit, as printed."""
    found = re.search(r"at least ([0-9.]+) GB is needed", refusal)
    assert found is not None, refusal
    return found[1]


@given(st.data())
def test_limit_named_in_a_refusal_is_enough(data):
    """It also works as --max-memory in a process that uses slightly more memory."""
    workload = data.draw(workloads())
    text = refused(workload, data.draw(st.integers(1, least_of(workload) - 1)))
    asked = float(gb_in(text))
    limit = find_limit(MachineMemory(ram_bytes=10**15), asked, force=False)
    next_time = in_process(workload, python_bytes=workload.process.python_bytes + MB)
    assert choose(next_time, limit.limit_bytes).option.needed_bytes <= limit.limit_bytes
    assert asked * GB < least_of(workload) + 13 * MB  # hardly more than enough


def test_refusal_is_one_line_with_advice():
    text = refused(WORKLOAD, GB // 10)
    assert "\n" not in text
    assert text.startswith("--max-memory: nothing fits into 0.1 GB; at least ")
    assert "--max-seq-length, now up to 2048 tokens" in text
    assert "--lora-rank" in text
    assert "--plan auto" not in text
    assert "4-bit" not in text


def test_refusal_advises_only_what_would_change_something():
    small = replace(
        WORKLOAD,
        engine="fused",
        training=Training(blocks=1, rank=8, targets=("q_proj",)),
        facts=replace(LLAMA, quantized=False),
    )
    text = refused(small, GB)
    assert "use --plan auto" in text
    assert "use a 4-bit model" in text
    assert "--lora-rank" not in text
    assert "--lora-rank" not in refused(replace(WORKLOAD, given_adapter=True), GB // 10)


def test_refusal_names_the_largest_components():
    workload = replace(WORKLOAD, engine="fused", batch_size=1, lengths=(64,))
    named = re.search(r"needed \((.*?)\)", refused(workload, GB))[1]
    units = {"GB": 1e9, "MB": 1e6}
    sizes = [float(n) * units[unit] for n, unit in re.findall(r"(\d+\.?\d*) (GB|MB)", named)]
    assert named.startswith("weights 4.53 GB, ")
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == 3


@given(st.integers(1, 10**12))
def test_rounded_up_limit_is_enough(size_bytes):
    named = int(float(in_gb(rounded_up(size_bytes)).removesuffix(" GB")) * GB)
    assert size_bytes < named
    assert named < 1.01 * size_bytes + VARIES_BYTES + 100_000


# Plans as text


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (Plan("fused", 4096), "fused, micro-batches of 8 x 512 tokens"),
        (Plan("staged", 512), "staged, micro-batches of 1 x 512 tokens"),
        (
            Plan("staged", 512, kept=Kept(attention=1)),
            "staged, micro-batches of 1 x 512 tokens, attention of 1 block kept",
        ),
        (
            Plan("staged", 512, kept=Kept(linear=3, attention=4)),
            "staged, micro-batches of 1 x 512 tokens, attention of 4 and linear layers of 3 blocks "
            "kept",
        ),
        (Plan("staged", 100), "staged, micro-batches of 1 x 512 tokens"),
        (
            Plan("streamed", 1024, True),
            "streamed, micro-batches of 2 x 512 tokens, optimizer on disk",
        ),
    ],
)
def test_words_describe_a_plan(plan, text):
    assert words(plan, 512) == text


# Corrections from the first steps


def corrections(limit_bytes: int | None = None) -> Corrections:
    """Corrections of a plan of 8 rows of 256 tokens, or 1 row of 2048, under its exact limit."""
    option = next(o for o in options(WORKLOAD) if o.plan == Plan("staged", 2048))
    return Corrections(WORKLOAD, option.plan, limit_bytes or option.needed_bytes)


def measured(found: Corrections, rows: int, tokens: int, ratio: float) -> int:
    """The peak of a step whose work used `ratio` times its estimate."""
    estimated = estimate_rows(found.workload, found.plan, rows, tokens)
    return int(estimated.mlx_bytes + (ratio - 1) * estimated.work_bytes)


@given(limited())
def test_rows_follow_the_plan_if_a_measurement_agrees(drawn):
    workload, limit_bytes = drawn
    plan = choose(workload, limit_bytes).option.plan
    found = Corrections(workload, plan, limit_bytes, {workload.lengths[0]: 1.0})
    for tokens in workload.lengths:
        assert found.rows(tokens) == plan.rows(tokens, workload.batch_size)


@given(limited())
def test_first_step_fits_even_if_its_work_is_twice_the_estimate(drawn):
    """Or else it needs the least possible, without exceeding the limit if estimates are right."""
    workload, limit_bytes = drawn
    plan = choose(workload, limit_bytes).option.plan
    found = Corrections(workload, plan, limit_bytes)
    for tokens in workload.lengths:
        rows = found.rows(tokens)
        first = estimate_rows(workload, replace(plan, kept=found.kept(rows, tokens)), rows, tokens)
        assert first.process_bytes <= found.most_bytes
        if first.process_bytes + first.work_bytes > found.most_bytes:
            for fewer in range(1, rows):
                least = estimate_rows(workload, replace(plan, kept=NOTHING), fewer, tokens)
                doubled = least.process_bytes + least.work_bytes
                assert max(doubled, least.process_bytes) > found.most_bytes


@pytest.mark.parametrize(("ratio", "is_above"), [(1.0, False), (1.25, False), (2.0, True)])
def test_longer_rows_are_foreseen_above_the_limit_if_shorter_ones_used_much_more(ratio, is_above):
    option = next(o for o in options(WORKLOAD) if o.plan == Plan("fused", 2048))
    found = Corrections(WORKLOAD, option.plan, option.needed_bytes)
    assert found.foreseen_bytes() == 0  # nothing was measured
    found.learn(8, 256, measured(found, 8, 256, ratio))
    assert (found.foreseen_bytes() > found.most_bytes) == is_above
    found.learn(1, 2048, 1)
    assert found.foreseen_bytes() == 0  # theirs was measured


def test_nothing_is_foreseen_by_a_few_bytes_of_short_rows():
    """How many operations begin together adds as much to any peak."""
    kind = BlockFacts({"self_attn.q_proj": (64, 64)}, MB)
    facts = replace(LLAMA, kinds=(kind,), hidden=64, heads=1, vocabulary=1000)
    workload, plan = replace(WORKLOAD, facts=facts), Plan("fused", 2048)
    found = Corrections(workload, plan, option_of(workload, plan, 0).needed_bytes)
    assert found.learn(1, 32, estimate_rows(workload, plan, 1, 32).mlx_bytes + 9 * MB)
    assert found.ratio(32) > 2
    assert found.foreseen_bytes() <= found.most_bytes


def test_correct_estimates_change_nothing():
    found = corrections()
    for rows, tokens in ((8, 256), (2, 1024), (1, 2048)):
        found.learn(rows, tokens, measured(found, rows, tokens, 1.0))
        assert found.ratio(tokens) == pytest.approx(1, abs=1e-6)
    assert [found.rows(tokens) for tokens in (256, 1024, 2048)] == [8, 2, 1]


def test_rows_shrink_if_steps_use_more_than_estimated():
    found, seen = corrections(), []
    for ratio in (1.0, 1.5, 2.0, 4.0, 100.0):
        found.learn(8, 256, measured(found, 8, 256, ratio))
        assert found.ratio(256) == pytest.approx(ratio, abs=1e-3)
        seen.append(found.rows(256))
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == 8
    assert seen[-1] == 1
    assert len(set(seen)) > 2


def test_corrected_rows_are_the_maximum_that_fits():
    found = corrections()
    found.learn(8, 256, measured(found, 8, 256, 1.3))
    rows = found.rows(256)
    assert 1 < rows < 8
    assert found.expected_bytes(rows, 256) <= found.most_bytes
    assert found.expected_bytes(rows + 1, 256) > found.most_bytes


def test_bucket_without_measurement_uses_the_worst_ratio():
    found = corrections()
    found.learn(2, 1024, measured(found, 2, 1024, 1.5))
    found.learn(1, 2048, measured(found, 1, 2048, 3.0))
    assert found.ratio(256) == pytest.approx(3, abs=1e-3)
    assert found.ratio(1024) == pytest.approx(1.5, abs=1e-3)
    assert found.rows(256) < 8


def test_largest_ratio_of_a_bucket_is_kept():
    found = corrections()
    for ratio in (3.0, 1.0):
        found.learn(8, 256, measured(found, 8, 256, ratio))
    assert found.ratio(256) == pytest.approx(3, abs=1e-3)


def test_smaller_peaks_do_not_add_rows():
    found = corrections()
    found.learn(1, 2048, 0)
    assert found.ratio(256) == 1
    assert [found.rows(tokens) for tokens in (256, 1024, 2048)] == [8, 2, 1]


@given(st.data())
def test_there_is_always_at_least_one_row(data):
    """For any measurements and any sequence length."""
    workload = data.draw(workloads())
    plan = data.draw(st.sampled_from(options(workload))).plan
    found = Corrections(workload, plan, data.draw(st.integers(1, 10**11)))
    for _ in range(data.draw(st.integers(0, 3))):
        tokens, rows = data.draw(st.sampled_from(workload.lengths)), data.draw(st.integers(1, 16))
        found.learn(rows, tokens, data.draw(st.integers(0, 10**12)))
    for tokens in (*workload.lengths, data.draw(st.integers(1, 8192))):
        assert 1 <= found.rows(tokens) <= plan.rows(tokens, workload.batch_size)


@given(st.data())
def test_fewer_rows_never_need_more_unless_they_fit(data):
    """Several micro-batches also need the sum of their gradients."""
    workload = data.draw(workloads())
    plan = data.draw(st.sampled_from(options(workload))).plan
    found = Corrections(workload, plan, data.draw(st.integers(1, 10**11)))
    found.learn(1, workload.lengths[0], data.draw(st.integers(0, 10**12)))
    for tokens in workload.lengths:
        needed = found.expected_bytes(found.rows(tokens), tokens)
        whole = found.expected_bytes(rows_of(workload, plan, tokens), tokens)
        assert needed <= max(found.most_bytes, whole)


def test_a_peak_of_the_update_says_nothing_about_the_work(monkeypatch):
    found = corrections()
    whole = estimate_rows(WORKLOAD, found.plan, 1, 256)
    update = replace(whole, components=whole.components | dict.fromkeys(WORK, 0))
    monkeypatch.setattr(found, "_estimate", lambda *shape: update)
    assert not found.learn(1, 256, whole.mlx_bytes + 10**7)
    assert not found.ratios


KEEPING = Plan("staged", 2048, kept=Kept(linear=4, attention=16))


def kept_corrections(room: int | None = None) -> Corrections:
    """Corrections of a plan that keeps something of the longest rows, under its exact limit.

    Its estimate was right for these rows.
    """
    option = option_of(WORKLOAD, KEEPING, 0)
    return Corrections(WORKLOAD, KEEPING, option.needed_bytes, {2048: 1.0}, room_bytes=room)


def test_without_room_shorter_rows_keep_what_the_longest_do():
    found = kept_corrections(room=0)
    assert {found.kept(1, tokens) for tokens in (2048, 1024, 256)} == {KEEPING.kept}


def test_shorter_rows_keep_more_and_need_no_more_than_the_longest():
    found = kept_corrections()
    kept = [found.kept(1, tokens) for tokens in (2048, 1024, 256)]
    assert kept[0] == KEEPING.kept
    assert rung_of(kept[0]) < rung_of(kept[1]) < rung_of(kept[2]) == highest(16)
    for tokens in (2048, 1024, 256):
        assert found.expected_bytes(1, tokens) <= found.limit_bytes


def test_less_is_kept_before_there_are_fewer_rows_if_steps_use_more_than_estimated():
    first = kept_corrections()
    first.ratios.clear()
    assert rung_of(first.kept(8, 256)) < rung_of(KEEPING.kept)
    found, kept = kept_corrections(), []
    assert [found.rows(256), found.kept(8, 256)] == [8, KEEPING.kept]
    for ratio in (1.2, 1.5, 2.0):
        estimated = estimate_rows(WORKLOAD, replace(KEEPING, kept=found.kept(8, 256)), 8, 256)
        measured = estimated.mlx_bytes + (ratio - 1) * estimated.work_bytes
        found.learn(8, 256, int(measured))
        assert found.ratio(256) == pytest.approx(ratio, abs=1e-3)
        assert found.rows(256) == 8
        assert found.expected_bytes(8, 256) <= found.limit_bytes
        kept.append(rung_of(found.kept(8, 256)))
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0] < rung_of(KEEPING.kept)


def test_rows_keep_no_more_than_the_room_of_the_plan():
    """A plan may be smaller than the limit: larger ones proved too large."""
    found = kept_corrections(room=1)
    assert {found.kept(1, tokens) for tokens in (256, 1024, 2048)} == {KEEPING.kept}


@pytest.mark.parametrize("plan", [Plan("fused", 2048), Plan("staged", 2048, spill=True)])
def test_plans_that_may_keep_nothing_keep_nothing_of_short_rows(plan):
    assert Corrections(WORKLOAD, plan, 10**12).kept(1, 256) == NOTHING


def test_a_plan_of_an_older_version_is_kept():
    """It kept the outputs of linear layers alone. As much memory may hold more of both."""
    plan = Plan("staged", 2048, kept=Kept(linear=4))
    option = option_of(WORKLOAD, plan, 0)
    chosen = choose(WORKLOAD, option.needed_bytes, 0, plan)
    assert chosen.option == option
    found = Corrections(WORKLOAD, plan, option.needed_bytes, {2048: 1.0})
    assert found.expected_bytes(1, 2048) <= option.needed_bytes
    assert computed_again(found.kept(1, 2048), 16) <= computed_again(plan.kept, 16)


def test_plans_include_memory_for_long_answers():
    without = options(WORKLOAD)[-1].estimate
    with_them = options(replace(WORKLOAD, answer_tokens=200_000))[-1].estimate
    assert with_them.process_bytes > without.process_bytes
    assert options(replace(WORKLOAD, answer_tokens=1))[-1].estimate == without


# Evaluation


@given(workloads(), st.booleans())
def test_plans_for_evaluation_are_chosen_as_for_training(workload, sliced):
    workload = replace(in_process(workload, sliced=sliced), forward=True, spill=False)
    least = least_of(workload)
    chosen = choose(workload, least).option
    assert chosen.needed_bytes == least
    assert {option.plan.spill for option in options(workload)} == {False}
    with pytest.raises(UserError, match="evaluating does not fit into"):
        choose(workload, least - 1)


def test_evaluation_needs_less_memory_than_training():
    """It has no gradients, optimizer and backward pass, but it reads a block ahead."""
    forward = replace(WORKLOAD, forward=True)
    ahead = [option.needed_bytes for option in options(WORKLOAD) if option.plan.blocks_ahead]
    assert least_of(forward) < min(ahead)
    assert choose(forward, least_of(forward)).option.plan.engine == "streamed"


def test_refusal_of_an_evaluation_names_a_limit_that_is_enough():
    forward = replace(WORKLOAD, forward=True)
    text = refused(forward, 300 * MB)
    choose(forward, int(float(gb_in(text)) * GB))
    assert "shorten the rows (now up to 2048 tokens)" in text


PAIRS = replace(WORKLOAD, batch_size=4, rows_per_step=8, lengths=(2048,), rows_together=2)


def test_pairs_are_split_after_everything_else_of_an_engine():
    every = [o.plan for o in options(PAIRS) if not (o.plan.kept or o.plan.resident)]
    tried = [(plan.engine, plan.spill, rows_of(PAIRS, plan, 2048)) for plan in every]
    others = [*ENGINES[1:], *ENGINES[3:]]  # the last ones twice, the second time not read ahead
    of_others = [(engine, spill, rows) for engine, spill in others for rows in (4, 2, 1)]
    assert tried == [("fused", False, 4), ("fused", False, 2), *of_others]
    only_fused = options(replace(PAIRS, engine="fused"))
    assert [rows_of(PAIRS, o.plan, 2048) for o in only_fused] == [4, 2, 1]


def test_no_pair_is_split_so_that_blocks_can_keep_outputs():
    kept = [o.plan for o in options(PAIRS) if o.plan.kept]
    assert kept
    assert min(rows_of(PAIRS, plan, 2048) for plan in kept) == PAIRS.rows_together


def test_a_limit_under_which_only_one_answer_fits_splits_the_pairs():
    plans = [Plan("staged", rows * 2048) for rows in (2, 1)]
    pair, single = (o for o in options(PAIRS) if o.plan in plans)
    assert single.needed_bytes < pair.needed_bytes
    assert single.cost > pair.cost
    assert choose(PAIRS, pair.needed_bytes).option == pair
    assert choose(PAIRS, pair.needed_bytes - 1).option == single


def test_short_pairs_stay_together_under_a_plan_that_splits_long_ones():
    workload = replace(PAIRS, lengths=(512, 1024, 2048))
    plan = Plan("staged", 2048)
    assert [rows_of(workload, plan, tokens) for tokens in workload.lengths] == [4, 2, 1]


def test_measurements_may_split_pairs():
    found = Corrections(PAIRS, Plan("staged", 2 * 2048), limit_bytes=0)
    assert found.rows(2048) == 1


# Completions that a step generates

ROLLOUTS = replace(
    WORKLOAD,
    lengths=(512,),
    batch_size=1,
    rows_per_step=64,
    rollouts=RolloutSizes(prompt_tokens=256, new_tokens=256, group=8, rows=64),
)


@st.composite
def generating(draw) -> Workload:
    """Waves are whole groups, or whole parts of one: then a smaller one has no more prompts."""
    workload, group = draw(workloads()), draw(st.sampled_from([2, 4, 8, 16]))
    sizes = RolloutSizes(
        prompt_tokens=draw(st.integers(1, 2000)),
        new_tokens=draw(st.integers(1, 2000)),
        group=group,
        rows=group * draw(st.sampled_from([1, 2, 4])),
    )
    return replace(workload, rollouts=sizes, rows_per_step=sizes.rows)


@given(st.integers(1, 200))
def test_waves_are_halved_down_to_one(rows):
    workload = replace(ROLLOUTS, rollouts=replace(ROLLOUTS.rollouts, rows=rows))
    waves = [wave for part in waves_of(workload) for wave in part]
    assert (waves[0], waves[-1]) == (rows, 1)
    assert all(b == a // 2 for a, b in itertools.pairwise(waves))
    assert all(wave >= min(GOOD_WAVE, rows) for wave in waves_of(workload)[0])
    assert all(wave < GOOD_WAVE for part in waves_of(workload)[1:] for wave in part)


def test_without_rollouts_there_are_no_waves():
    assert {option.plan.wave for option in options(WORKLOAD)} == {0}


def test_with_enough_memory_all_completions_are_generated_together():
    assert choose(ROLLOUTS, most_of(ROLLOUTS)).option.plan == Plan("fused", 512, wave=64)


def limits_down(workload: Workload) -> list[Plan]:
    """The plans that are chosen as the limit falls, each once."""
    limits = sorted({option.needed_bytes for option in options(workload)}, reverse=True)
    return list(dict.fromkeys(choose(workload, limit).option.plan for limit in limits))


def test_the_wave_is_as_large_as_fits():
    every = options(ROLLOUTS)
    for option in every[::4]:
        plan = choose(ROLLOUTS, option.needed_bytes).option.plan
        alike = [o for o in every if o.plan == replace(plan, wave=o.plan.wave)]
        larger = [o.needed_bytes for o in alike if o.plan.wave > plan.wave]
        assert all(needed > option.needed_bytes for needed in larger)


def test_a_smaller_wave_comes_before_a_slower_engine_until_it_is_too_small():
    plans = limits_down(ROLLOUTS)
    order = [engine for engine, _ in ENGINES]
    good = [plan for plan in plans if plan.wave >= GOOD_WAVE]
    assert good == plans[: len(good)]
    assert good == sorted(good, key=lambda plan: order.index(plan.engine))
    assert {plan.engine for plan in good} == {"fused", "staged", "streamed"}
    assert [p.wave for p in good if p.engine == "fused"][-1] < 64
    assert min(plan.wave for plan in plans) < GOOD_WAVE


@settings(max_examples=6)
@given(generating())
def test_a_larger_wave_never_needs_less_memory(workload):
    needed: dict[Plan, dict[int, int]] = {}
    for option in options(workload):
        each = needed.setdefault(replace(option.plan, wave=0), {})
        each[option.plan.wave] = option.needed_bytes
    for each in needed.values():
        sizes = [each[wave] for wave in sorted(each)]
        assert sizes == sorted(sizes)


@settings(max_examples=6)
@given(generating())
def test_the_least_limit_that_a_refusal_names_is_enough(workload):
    text = refused(workload, least_of(workload) - 1)
    assert "lower --max-new-tokens" in text
    choose(workload, round(float(gb_in(text)) * GB))


@settings(max_examples=6)
@given(limited(generating))
def test_the_largest_phase_is_the_estimate(drawn):
    """Of those that need the most at their peaks: to generate, to score, to update."""
    found = choose(*drawn).option.estimate
    assert set(found.phases) == {"generate", "update"}
    assert abs(max(found.phases.values()) - found.process_bytes) <= len(found.components)


def test_scoring_is_a_phase_if_rows_are_scored():
    (option, *_) = options(replace(ROLLOUTS, scores=True))
    assert set(option.estimate.phases) == {"generate", "score", "update"}


def test_a_step_has_room_for_its_margin_beside_the_generation():
    """Also where generating needs a little more, which has no margin of its own."""
    for option in options(ROLLOUTS):
        alone = replace(ROLLOUTS, rollouts=None)
        update = estimate_rows(alone, replace(option.plan, wave=0), 1, 512)
        assert option.needed_bytes >= with_margin(update)


def test_plans_that_need_the_same_activations_are_one_family():
    plans = Plan("fused", 64), Plan("staged", 64), Plan("streamed", 64, spill=True)
    assert [plan.family for plan in plans] == ["fused", "staged", "staged"]
    assert {Plan(engine, 64, kept=Kept(linear=2)).family for engine in ("staged", "streamed")} == {
        "kept"
    }


# Options by predicted seconds


# Seconds of each phase for a token, of a block.
PHASES_S = {
    "forward": 1e-4, "backward": 3e-4, "kept_forward": 1.1e-4, "kept_backward": 2e-4,
    "tiled_forward": 1.2e-4, "tiled_backward": 3.4e-4, "saved": 2.8e-4, "evaluated": 1e-4,
}  # fmt: skip


def timed(read_s: float = 1e-9, **phases: float) -> Workload:
    """The workload, with guessed bytes and these seconds, as if they were measured."""
    curves = {name: CostCurve(of_token=s) for name, s in (PHASES_S | phases).items()}
    heads = dict.fromkeys(HEAD_NAMES, HeadCosts((1, 1000), (0.001, 1.0)))
    seconds = Costs((BlockCosts(**curves),), LLAMA.order, heads)
    memory = guessed(LLAMA, WORKLOAD.training)
    return replace(WORKLOAD, costs=MeasuredCosts(memory, seconds, read_s))


TIMED = timed()


def test_without_measured_costs_options_keep_their_order():
    assert [option.seconds for option in options(WORKLOAD)] == [None] * len(options(WORKLOAD))
    assert options(WORKLOAD)[0].plan.engine == "fused"
    assert {option.plan for option in options(WORKLOAD)} == {o.plan for o in options(TIMED)}


def test_options_are_in_the_order_of_their_seconds():
    seconds = [option.seconds for option in options(TIMED)]
    assert all(later >= earlier / ALIKE for earlier, later in itertools.pairwise(seconds))


def test_of_options_that_are_about_as_fast_the_smallest_is_chosen():
    still = timed(0.0, **dict.fromkeys(PHASES_S, 0.0))
    chosen = choose(still, 2 * most_of(still)).option
    assert chosen.needed_bytes == least_of(still)


def test_states_on_disk_and_weights_that_are_not_read_ahead_take_time():
    plans = [Plan("streamed", 2048, spill, blocks_ahead=ahead) for spill, ahead in
             ((False, 1), (False, 0), (True, 0))]  # fmt: skip
    seconds = [seconds_with(TIMED, plan) for plan in plans]
    assert seconds == sorted(set(seconds))


def test_the_seconds_of_a_plan_that_keeps_more_are_predicted():
    staged = replace(TIMED, engine="staged")
    limits = range(least_of(staged), 2 * most_of(staged), 10**8)
    options_of_limits = [choose(staged, limit).option for limit in limits]
    assert any(option.plan.kept for option in options_of_limits)
    assert all(option.seconds is not None for option in options_of_limits)


def test_blocks_keep_nothing_if_what_they_keep_was_not_measured():
    measured, memory = TIMED.costs, TIMED.costs.memory
    without = replace(memory, kinds=tuple(replace(k, kept_forward=None) for k in memory.kinds))
    workload = replace(TIMED, costs=replace(measured, memory=without))
    assert {option.plan.kept for option in options(workload)} == {NOTHING}
    assert {option.plan.kept for option in options(TIMED)} > {NOTHING}


def test_what_was_not_measured_has_the_margin_of_a_guess():
    measured, memory = TIMED.costs, TIMED.costs.memory
    without = replace(memory, kinds=tuple(replace(k, saved=None) for k in memory.kinds))
    whole, part, no_graphs, guess = (
        most_of(replace(TIMED, engine="fused", costs=costs))
        for costs in (measured, replace(measured, is_complete=False),
                      replace(measured, memory=without), None)
    )  # fmt: skip
    assert whole < part == no_graphs == guess


def test_slow_files_make_streaming_the_last_choice():
    slow = timed(read_s=1e-6)
    assert {option.plan.engine for option in options(slow)[-5:]} == {"streamed"}
    assert choose(slow, 10**12).option.plan.engine != "streamed"


def test_slow_fused_graphs_make_other_plans_the_first_choice():
    assert options(timed(saved=1e-2))[0].plan.engine != "fused"


def test_a_resumed_run_keeps_its_plan_although_another_is_faster():
    limit = 2 * most_of(TIMED)
    best = choose(TIMED, limit).option.plan
    other = next(o.plan for o in options(TIMED) if o.plan.engine != best.engine)
    assert choose(TIMED, limit, kept=other).option.plan == other


def test_the_front_gets_slower_as_it_gets_smaller():
    for workload in (TIMED, WORKLOAD):
        front = front_of(options(workload))
        needed = [option.needed_bytes for option in front]
        assert needed == sorted(set(needed), reverse=True)
        times = [time_of(option) for option in front]
        assert times == sorted(set(times))
    found = {option.plan for option in front_of(options(TIMED))}
    assert choose(TIMED, least_of(TIMED)).option.plan in found
    assert front_points(WORKLOAD) == []
    assert len(front_points(TIMED)) == len(found)


def test_why_seconds_are_not_predicted():
    assert not_predicted(TIMED) == ""
    assert "nothing was measured" in not_predicted(WORKLOAD)
    part = replace(TIMED, costs=replace(TIMED.costs, is_complete=False))
    assert "not everything" in not_predicted(part)
    generates = replace(TIMED, steps=StepSizes(unpredicted="generates"))
    assert not_predicted(generates) == "generates"
    assert options(generates)[0].seconds is None


def test_seconds_are_a_sum_of_named_terms():
    for option in options(TIMED):
        terms = seconds_of(TIMED, option.plan)
        assert sum(terms.values()) == pytest.approx(option.seconds)
        assert {"forward", "backward", "head"} <= terms.keys()


# The seconds of a step


def seconds_with(workload: Workload, plan: Plan) -> float:
    return sum(seconds_of(workload, plan).values())


def test_a_staged_step_takes_what_its_blocks_and_its_head_take():
    one_row = replace(TIMED, lengths=(512,), batch_size=1, rows_per_step=2)
    terms = seconds_of(one_row, Plan("staged", 512))
    trained, every = WORKLOAD.training.blocks, LLAMA.blocks
    assert terms["forward"] == pytest.approx(2 * 512 * every * PHASES_S["forward"])
    assert terms["backward"] == pytest.approx(2 * 512 * trained * PHASES_S["backward"])
    assert terms["head"] == pytest.approx(2 * 0.512, rel=1e-2)


def test_what_blocks_keep_is_not_computed_again():
    plans = [Plan("staged", 2048, kept=at_rung(16, rung)) for rung in range(0, 49, 8)]
    seconds = [seconds_with(replace(TIMED, lengths=(512,)), plan) for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < 0.9 * seconds[0]


def test_long_rows_take_the_time_of_tiles():
    one_row = replace(TIMED, lengths=(2048,), batch_size=1, rows_per_step=1)
    terms = seconds_of(one_row, Plan("staged", 2048))
    assert terms["backward"] == pytest.approx(2048 * 16 * PHASES_S["tiled_backward"])


def test_a_cached_prefix_takes_no_time():
    cached = replace(TIMED, steps=StepSizes(cached_prefix=True))
    for plan in (Plan("fused", 2048), Plan("staged", 2048)):
        assert seconds_with(cached, plan) < seconds_with(TIMED, plan)


def test_scoring_takes_time():
    plan = Plan("staged", 2048)
    assert seconds_with(replace(TIMED, scores=True), plan) > seconds_with(TIMED, plan)


def test_the_mean_step_weighs_lengths_by_their_rows():
    def seconds(*lengths: tuple[int, int]) -> float:
        steps = StepSizes(rows_of_length=lengths)
        return seconds_with(replace(TIMED, steps=steps), Plan("staged", 512))

    assert seconds((256, 3), (512, 1)) == pytest.approx(
        (3 * seconds((256, 1)) + seconds((512, 1))) / 4
    )
