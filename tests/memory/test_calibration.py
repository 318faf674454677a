"""Measuring before training: it stays under the limit and finds the plan of exact estimates."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.budget import LEAST
from tests.memory.test_estimate import any_facts, any_training
from tests.memory.test_plan import WORKLOAD
from your_ai.errors import UserError
from your_ai.memory import calibration as measurements
from your_ai.memory.calibration import (
    FAR,
    FIRST,
    SECOND,
    SLACK,
    Calibration,
    Measurement,
    Shape,
    extrapolated,
    next_shape,
)
from your_ai.memory.calibration_steps import (
    MicroBatchPeak,
    is_certain,
    measure_and_choose,
    measured,
)
from your_ai.memory.estimate import Plan
from your_ai.memory.limit import VARIES_BYTES, with_headroom
from your_ai.memory.plan import (
    ENGINES,
    DoesNotFit,
    choose,
    estimate_of,
    estimate_rows,
    largest_shape,
    options,
)
from your_ai.memory.workload import ProcessFacts, Workload, with_calibration

MB = 10**6
CLOSE = 0.93  # share of the limit
SLOW = bool(os.environ.get("YOUR_AI_SLOW"))


def one(tokens: int, work_mb: float, rows: int = 1, engine: str = "staged", ratio: float = 1.0):
    return Measurement(
        engine=engine, rows=rows, tokens=tokens, work_bytes=int(work_mb * MB), ratio=ratio
    )


@st.composite
def workloads(draw) -> Workload:
    facts = draw(any_facts())
    longest = 32 * draw(st.integers(2, 64))
    return Workload(
        facts=facts,
        training=draw(any_training(facts)),
        lengths=tuple(sorted({32, longest})),
        batch_size=draw(st.integers(1, 8)),
        rows_per_step=8,
        process=ProcessFacts(python_bytes=100 * MB),
    )


class Machine:
    """A machine where activations use `factor` times what the coefficients say."""

    def __init__(self, workload: Workload, factor: float, limit_bytes: int) -> None:
        self.workload, self.factor, self.limit_bytes = workload, factor, limit_bytes
        self.above: list[Shape] = []
        self.shapes: list[Shape] = []

    def process_bytes(self, plan: Plan, shape: Shape) -> int:
        return estimate_of(self.workload, plan, *shape, work_ratio=self.factor).process_bytes

    def peak_of(self, plan: Plan, shape: Shape) -> MicroBatchPeak:
        """The memory of gradients; records shapes that exceed the limit."""
        found = estimate_of(
            self.workload, plan, *shape, work_ratio=self.factor, gradients_only=True
        )
        self.shapes.append(shape)
        if found.process_bytes > self.limit_bytes:
            self.above.append((plan, shape, found.process_bytes / self.limit_bytes))
        return MicroBatchPeak(found.mlx_bytes)


def settled(machine: Machine, workload: Workload, limit_bytes: int) -> tuple[Workload, Plan]:
    """Choose and measure as a run does: it starts again whenever another engine is better."""
    for _ in range(8):
        choice = choose(workload, limit_bytes)
        before = choice.option.plan
        workload, choice = measure_and_choose(workload, choice, limit_bytes, 0, machine.peak_of)
        plan = choice.option.plan
        if (plan.engine, plan.spill) == (before.engine, before.spill):
            return workload, plan
    raise AssertionError("the plan never settles")


@settings(max_examples=60 if SLOW else 4, derandomize=True)
@given(workloads(), st.sampled_from([0.1, 0.2, 0.35, 0.7, 1.5, 3.0]), st.floats(1.3, 4.0))
def test_wrong_coefficients_lead_to_a_good_plan_without_exceeding_the_limit(
    workload, wrong_factor, room
):
    """Estimates are `wrong_factor` times the truth, as on a device without fitted coefficients.

    The plan is no slower than the best one under a slightly lower limit.
    """
    factor = 1 / wrong_factor
    points = []  # the truth: every option at its largest shape and at smaller ones
    for option in options(workload):
        largest = largest_shape(workload, option.plan)
        for shape in (Shape(1, 32), Shape(1, largest.tokens), largest):
            found = estimate_of(
                workload, option.plan, *shape, work_ratio=factor, gradients_only=True
            )
            points.append(measured(workload, option.plan, shape, MicroBatchPeak(found.mlx_bytes)))
    true = with_calibration(workload, Calibration(tuple(points)))
    floors = [min(o.needed_bytes for o in options(either)) for either in (workload, true)]
    limit_bytes = int(room * max(floors))
    machine = Machine(workload, factor, limit_bytes)
    found, plan = settled(machine, workload, limit_bytes)
    assert not machine.above
    assert machine.process_bytes(plan, largest_shape(found, plan)) <= limit_bytes
    order = [(engine, spill) for engine, spill in ENGINES]
    best = choose(true, int(CLOSE * limit_bytes)).option.plan
    assert order.index((plan.engine, plan.spill)) <= order.index((best.engine, best.spill))


@settings(max_examples=15 if SLOW else 5, derandomize=True)
@given(workloads(), st.sampled_from([0.1, 0.35]))
def test_limit_found_too_low_is_refused_without_exceeding_it(workload, wrong_factor):
    least = min(option.needed_bytes for option in options(workload))
    machine = Machine(workload, 1 / wrong_factor, least)
    smallest = min(options(workload), key=lambda option: option.needed_bytes).plan
    shape = Shape(1, FIRST)
    assume(machine.process_bytes(smallest, shape) <= least)
    with contextlib.suppress(UserError):  # it may know by then that nothing fits
        settled(machine, workload, least)
    assert all(found.tokens <= SECOND for _, found, _ in machine.above)


@settings(max_examples=200 if SLOW else 5)
@given(workloads())
def test_nothing_is_measured_if_the_limit_is_far_away(workload):
    largest = max(option.needed_bytes for option in options(workload))
    machine = Machine(workload, 1.0, 2 * int(FAR) * largest)
    settled(machine, workload, machine.limit_bytes)
    assert machine.shapes == []


@pytest.mark.parametrize("room", [1.05, 1.1, 1.2, 1.5])
def test_measured_shapes_are_not_measured_again(room):
    facts_demand = of_two_lengths()
    limit_bytes = int(2 * room * min(option.needed_bytes for option in options(facts_demand)))
    machine = Machine(facts_demand, 1.2, limit_bytes)
    known, plan = settled(machine, facts_demand, limit_bytes)
    assert machine.shapes
    again = Machine(facts_demand, 1.2, limit_bytes)
    known, as_before = settled(again, known, limit_bytes)
    assert as_before == plan
    assert not set(again.shapes) & set(machine.shapes)
    assert len(again.shapes) <= 1  # one that was too close to the limit before
    assert is_certain(known, choose(known, limit_bytes).option, limit_bytes)


def of_two_lengths() -> Workload:
    return replace(WORKLOAD, lengths=(32, 512), batch_size=4, rows_per_step=4)


def much_room(_: Shape) -> int:
    return 10**9


def zero_bytes(_: Shape) -> int:
    return 0


def test_first_measurement_is_one_short_row():
    assert next_shape(Calibration(), "fused", Shape(4, 512), much_room, zero_bytes) == (1, FIRST)
    short = next_shape(Calibration(), "fused", Shape(4, 8), much_room, zero_bytes)
    assert short == (1, 8)


def test_row_length_grows_before_the_number_of_rows():
    calibration, seen = Calibration(), []
    while shape := next_shape(calibration, "staged", Shape(4, 512), much_room, zero_bytes):
        seen.append(shape)
        calibration = calibration.with_one(one(shape.tokens, shape.size / 100, shape.rows))
    assert [shape.rows for shape in seen] == sorted(shape.rows for shape in seen)
    assert seen[-1] == (4, 512)
    assert Shape(1, 512) in seen
    assert len(seen) <= 10


def test_next_shape_fits_even_with_steeper_growth():
    calibration = Calibration((one(16, 10), one(32, 20), one(64, 40)))

    def expected(shape: Shape) -> int:
        return 40 * MB * shape.size // 64

    assert next_shape(calibration, "staged", Shape(1, 512), lambda _: 41 * MB, expected) is None
    shape = next_shape(calibration, "staged", Shape(1, 512), lambda _: 75 * MB, expected)
    assert 64 < shape.tokens < 128
    found = calibration.of("staged")
    assert extrapolated(found, shape.size, expected(shape), SLACK) <= 75 * MB


@pytest.mark.parametrize(("size", "ratio"), [(8, 3.0), (16, 3.0), (24, 3.0), (32, 2.0), (64, 2.0)])
def test_ratio_between_two_measurements_is_the_larger_one(size, ratio):
    calibration = Calibration((one(16, 1, ratio=3.0), one(32, 1, ratio=2.0)))
    assert calibration.ratio("staged", size, 10**6) == ratio


@pytest.mark.parametrize(
    ("first_mb", "expected_mb", "work_mb"),
    [
        (3, 5, 5),  # growth as estimated: from 3 to 4 MB in 16 tokens, and 1 MB more in 32
        (2, 5, 7),  # the estimate missed 1 MB in 16 tokens, so 2 MB are added for 32
        (4, 5, 4.5),  # no growth, where it was estimated: then as the estimate alone grows
        (3, 4, 4),  # the estimate levels off
    ],
)
def test_extrapolation_adds_the_growth_that_estimates_missed(first_mb, expected_mb, work_mb):
    first = one(16, first_mb, ratio=2.0 * first_mb / 3)  # the estimate was 1.5 MB
    calibration = Calibration((first, one(32, 4, ratio=2.0)))
    ratio = calibration.ratio("staged", 64, expected_mb * MB)
    assert ratio * expected_mb / 2.0 == pytest.approx(work_mb)


def test_unmeasured_engine_uses_the_ratio_of_the_other_family():
    calibration = Calibration((one(16, 1, ratio=2.5),))
    assert calibration.ratio("fused", 16, 1.0) == 2.5
    assert calibration.largest("fused") == 0


def test_measurements_correct_the_estimates():
    workload = of_two_lengths()
    plan = Plan("staged", 2048)
    before = estimate_rows(workload, plan, 1, 512).work_bytes
    peak = estimate_of(workload, plan, 1, 512, work_ratio=2.0, gradients_only=True).mlx_bytes
    found = measured(workload, plan, Shape(1, 512), MicroBatchPeak(peak))
    assert found.ratio == pytest.approx(2.0, rel=1e-3)
    corrected = with_calibration(workload, Calibration((found,)))
    assert estimate_rows(corrected, plan, 1, 512).work_bytes > 1.5 * before


def with_beside(workload, plan, more: int) -> Workload:
    """The workload after a measurement that found `more` bytes outside MLX than estimated."""
    shape = Shape(1, 512)
    expected = estimate_of(workload, plan, *shape, gradients_only=True)
    peak = MicroBatchPeak(expected.mlx_bytes, expected.beside_bytes + more)
    found = measured(workload, plan, shape, peak)
    return with_calibration(workload, workload.process.calibration.with_one(found))


def test_measured_memory_outside_mlx_is_planned():
    workload, plan = of_two_lengths(), Plan("staged", 2048)
    known = with_beside(workload, plan, 0)
    needed = estimate_rows(known, plan, 1, 512).process_bytes
    more = with_beside(workload, plan, 7 * MB)
    assert estimate_rows(more, plan, 1, 512).process_bytes == needed + 7 * MB
    again = with_beside(more, plan, 2 * MB)  # beyond what was known; of the same size, the larger
    assert estimate_rows(again, plan, 1, 512).process_bytes == needed + 9 * MB
    less = with_beside(workload, plan, -7 * MB)
    assert estimate_rows(less, plan, 1, 512).process_bytes == needed


def test_plan_without_margins_is_chosen_only_within_what_was_measured():
    """The estimate outside MLX's buffers counts 10 MB for what is not known."""
    workload = replace(of_two_lengths(), engine="staged")
    least = min(
        o.estimate.process_bytes for o in options(with_beside(workload, Plan("staged", 1), 0))
    )
    for beside, lower, fits in ((None, 9, True), (0, 1, False), (-6, 5, True), (-6, 7, False)):
        known = with_beside(workload, Plan("staged", 2048), (beside or 0) * MB)
        if beside is None:
            there = known.process.calibration.measurements
            alone = tuple(replace(m, excess_bytes=None) for m in there)
            known = with_calibration(known, Calibration(alone))
        limit_bytes = with_headroom(least - lower * MB)  # so that the guard does not end it
        if fits:
            choose(known, limit_bytes)
        else:
            with pytest.raises(DoesNotFit):
                choose(known, limit_bytes)


@pytest.mark.parametrize("engine", ["staged", "streamed"])  # measured or not
@pytest.mark.parametrize("beside", [0, -6])
def test_limit_named_after_a_measurement_is_the_least_that_is_accepted(engine, beside):
    workload = replace(of_two_lengths(), engine=engine)
    known = with_beside(workload, Plan("staged", 2048), beside * MB)
    with pytest.raises(DoesNotFit) as refused:
        choose(known, MB)
    named = int(float(LEAST.search(str(refused.value))[1]) * 1e9)
    choose(known, named)
    with pytest.raises(DoesNotFit):
        choose(known, named - VARIES_BYTES - 10 * MB)  # which were added and rounded up


def test_work_that_hardly_grows_is_extrapolated_as_the_estimate_grows():
    """Measured with rank 512: 36, 38 and 41 MB for 32, 64 and 96 tokens, where 16, 20 and 24 were
    estimated. For 128 tokens, where 28 are estimated, it was 41 MB: no reason to refuse 45."""
    works, estimates = (36, 38, 41), (16, 20, 24)
    found = [
        one(32 * (i + 1), work, ratio=work / estimate)
        for i, (work, estimate) in enumerate(zip(works, estimates, strict=True))
    ]
    expected = 28 * 41 / 24 * MB  # at the last ratio
    carried = extrapolated(found, 128, expected)
    assert carried == pytest.approx(45 * MB, rel=1e-3)
    ratio = Calibration(tuple(found)).ratio("staged", 128, expected)
    assert 28 * ratio == pytest.approx(45, rel=1e-3)


# The file


@given(
    st.lists(
        st.builds(
            Measurement,
            engine=st.sampled_from(["fused", "staged"]),
            rows=st.integers(1, 99),
            tokens=st.integers(1, 9999),
            work_bytes=st.integers(1, 10**12),
            ratio=st.floats(0.1, 100.0),
        ),
        max_size=5,
    )
)
def test_measurements_survive_writing_and_reading(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("kept") / "folder" / "file.json"
    measurements.keep(path, Calibration(tuple(found)))
    assert measurements.read(path) == Calibration(tuple(found))


@pytest.mark.parametrize(
    "text",
    [
        "", "{}", "[1]", "[[]]", '[{"engine": "fused"}]', "[" * 5000, '"' + "x" * 2_000_000,
        '[{"engine": "fused", "rows": 1, "tokens": 1, "work_bytes": 1, "ratio": 0.0}]',
        '[{"engine": "fused", "rows": 1, "tokens": 1, "work_bytes": 1, "ratio": NaN}]',
        '[{"engine": "fused", "rows": -1, "tokens": 1, "work_bytes": 1, "ratio": 1.0}]',
        '[{"engine": "fused", "rows": true, "tokens": 1, "work_bytes": 1, "ratio": 1.0}]',
        '[{"engine": "other", "rows": 1, "tokens": 1, "work_bytes": 1, "ratio": 1.0}]',
        '[{"engine": "fused", "rows": 1, "tokens": 1, "work_bytes": 1e400, "ratio": 1.0}]',
    ],
)  # fmt: skip
def test_invalid_file_counts_as_empty(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert measurements.read(path) == Calibration()


def test_reading_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "file.json")
    assert measurements.read(tmp_path / "file.json") == Calibration()


def test_unwritable_folder_is_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    measurements.keep(tmp_path / "file" / "below.json", Calibration((one(1, 1),)))
    assert measurements.read(tmp_path / "file" / "below.json") == Calibration()
