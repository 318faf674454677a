"""The memory governor in a run: the gauges it reads, its actions, and its events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import (
    chat,
    events_of,
    losses_of,
    notices_of,
    resume,
    train,
    train_once,
    with_functions,
    write_rows,
)
from your_ai.config import TrainConfig
from your_ai.memory import governor, plan, probe
from your_ai.memory.governor import LARGE, MemoryAction, MemoryObservation, Watch
from your_ai.memory.probe import Highest
from your_ai.memory.sample import MemorySample
from your_ai.memory.workload import Workload
from your_ai.run import events, folder
from your_ai.run.events import EventLog
from your_ai.run.folder import RunFolder
from your_ai.training import memory_actions, planned, prepare, steps
from your_ai.training.memory_actions import Governor, action_event

pytestmark = pytest.mark.memory

MB, GB = 10**6, 10**9
SAMPLE = MemorySample(
    active_bytes=100 * MB, peak_bytes=150 * MB, cache_bytes=10 * MB, process_bytes=300 * MB,
    available_bytes=8 * GB, swap_bytes=0, pressure=1,
)  # fmt: skip


class Sampler:
    """Replaces the sampler thread, with a fixed peak."""

    highest_bytes: int | None = 350 * MB

    def highest(self) -> Highest:
        return Highest(process_bytes=self.highest_bytes, mlx_bytes=None)


class Governed(NamedTuple):
    governor: Governor
    calls: list[str]
    run: RunFolder


@pytest.fixture
def governed(configure, data_folder, monkeypatch) -> Callable[..., Governed]:
    """Make the governor of a prepared run; its calls are recorded."""
    write_rows(data_folder / "train.jsonl", [chat("Ask", "Yes" + " please" * i) for i in range(4)])
    monkeypatch.setattr(plan, "NOTICEABLY", 0.9999)
    closing: list[EventLog] = []

    def make(level: int = 0, **settings: Any) -> Governed:
        run = folder.create(configure(**settings))
        log = EventLog(run.events)
        closing.append(log)
        prepared = prepare.prepare(run.read_config(), log, run.path, level)
        calls: list[str] = []
        prepared = with_functions(prepared, drop=lambda: calls.append("drop"))
        monkeypatch.setattr(probe, "read", lambda: SAMPLE)

        def free(collect: bool = True) -> None:
            calls.append("collect" if collect else "clear")

        def reload_adapted(*_: Any) -> int:
            calls.append("reload")
            return 7

        monkeypatch.setattr(memory_actions.allocator, "free", free)
        monkeypatch.setattr(memory_actions, "reload_adapted", reload_adapted)
        return Governed(memory_actions.govern(prepared, Sampler(), log, Watch()), calls, run)

    yield make
    for log in closing:
        log.close()


@pytest.fixture
def decided(monkeypatch) -> Callable[..., list[MemoryObservation]]:
    """Replace the policy's decisions with given ones; return the observations it receives."""
    seen: list[MemoryObservation] = []

    def let(*kinds: str, notices: tuple[str, ...] = ()) -> list[MemoryObservation]:
        def decide(policy: Any, watch: Watch, observation: MemoryObservation) -> Any:
            seen.append(observation)
            actions = [MemoryAction(kind=kind, cause=f"because of {kind}") for kind in kinds]
            return dataclasses.replace(watch, decisions=77), actions, list(notices)

        monkeypatch.setattr(memory_actions, "decide", decide)
        return seen

    return let


def batches_of(governor: Governor, step: int = 0) -> list[Any]:
    return governor.trainer.schedule.batches_of(step, governor.rows_at)


def boundary(made: Governed, step: int = 1, **seen: int | None) -> MemoryAction | None:
    """What the governor wants between two steps, after `step`, in which it saw this."""
    made.governor.look()
    if seen:
        made.governor.seen = dataclasses.replace(SAMPLE, **seen), None
    return made.governor.after_step(step, batches_of(made.governor))


def actions_of(run: RunFolder) -> list[events.Action]:
    """The actions that were not scheduled."""
    return [a for a in events_of(run, events.Action) if not a.cause.startswith("every ")]


# -- one boundary


@pytest.mark.parametrize(
    ("kind", "calls", "read_bytes"),
    [
        ("clear_cache", ["clear"], 0),
        ("drop_compiled", ["drop", "collect"], 0),
        ("reload_lora", ["drop", "reload", "collect"], 7),
    ],
)
def test_each_cheap_action_frees_its_memory(governed, decided, kind, calls, read_bytes):
    decided(kind)
    made = governed()
    assert boundary(made, 3) is None
    assert made.calls == calls
    (action,) = events_of(made.run, events.Action)
    assert (action.step, action.kind, action.cause) == (3, kind, f"because of {kind}")
    assert (action.before_bytes, action.after_bytes) == (300 * MB, 300 * MB)
    assert action.read_bytes == read_bytes


@pytest.mark.parametrize("kind", LARGE)
def test_large_action_is_returned_to_the_caller(governed, decided, kind):
    decided("clear_cache", kind)
    made = governed()
    assert boundary(made, 3) == MemoryAction(kind=kind, cause=f"because of {kind}")
    assert made.calls == ["clear"]
    assert [action.kind for action in events_of(made.run, events.Action)] == ["clear_cache"]


def test_watch_is_updated_by_the_policy_and_after_each_action(governed, decided, monkeypatch):
    decided("clear_cache", "reload_lora")
    made = governed()
    given: list[tuple[Any, ...]] = []

    def acted(policy: Any, watch: Watch, action: MemoryAction, *samples: MemorySample) -> Watch:
        given.append((watch.decisions, action.kind, samples))
        return dataclasses.replace(watch, decisions=watch.decisions + 1)

    monkeypatch.setattr(memory_actions, "acted", acted)
    boundary(made)
    assert given == [(77, "clear_cache", (SAMPLE, SAMPLE)), (78, "reload_lora", (SAMPLE, SAMPLE))]
    assert made.governor.watch.decisions == 79


def test_notices_of_the_policy_are_written_as_events(governed, decided):
    decided(notices=("first", "second"))
    made = governed()
    boundary(made)
    assert notices_of(made.run)[-2:] == ["first", "second"]


def test_policy_receives_the_latest_readings(governed, decided):
    seen = decided()
    made = governed()
    assert made.governor.look() == (SAMPLE, 350 * MB)
    made.governor.after_step(5, batches_of(made.governor))
    (observation,) = seen
    assert (observation.step, observation.sample) == (5, SAMPLE)
    assert observation.highest_process_bytes == 350 * MB
    assert observation.baseline_bytes == made.governor.trainer.budget.workload.process.python_bytes
    assert observation.kept_bytes == 0


@pytest.mark.parametrize(
    ("level", "shrink", "grow"), [(0, True, False), (1, True, True), (99, False, True)]
)
def test_policy_knows_whether_other_plans_exist(governed, decided, level, shrink, grow):
    seen = decided()
    boundary(governed(level))
    assert (seen[0].can_shrink, seen[0].can_grow) == (shrink, grow)


@pytest.mark.parametrize(("where", "counts"), [("off", False), ("memory", True), ("disk", False)])
def test_only_a_prefix_cache_in_memory_counts_as_kept_bytes(governed, decided, where, counts):
    seen = decided()
    made = governed(prefix_cache=where, lora_layers=1)
    batches = batches_of(made.governor)
    for batch in batches:
        made.governor.trainer.engine.gradients(batch, 1.0, 0)
    made.governor.look()
    made.governor.after_step(1, batches)
    assert (seen[0].kept_bytes > 0) == counts


def test_policy_uses_the_settings_and_the_limit(governed):
    settings = {"reload_interval": 3, "reload_at": 0.5, "clear_cache_every": 7, "max_memory": 9}
    policy = governed(leak_threshold_mb=20, leak_warmup=2, **settings).governor.policy
    assert policy.limit_bytes == 9 * GB
    assert (policy.reload_interval, policy.reload_at, policy.clear_cache_every) == (3, 0.5, 7)
    assert (policy.leak_threshold_bytes, policy.leak_warmup) == (20 * MB, 2)


def test_rows_shrink_after_a_step_that_needs_more_than_estimated(governed, decided):
    decided()
    made = governed(batch_size=4, max_memory=1.0)
    batches = batches_of(made.governor)
    rows, tokens = batches[0].tokens.shape
    assert (rows, made.governor.rows_at(tokens)) == (4, 4)
    boundary(made, peak_bytes=3 * GB)
    assert 1 <= made.governor.rows_at(tokens) < 4
    assert len(batches_of(made.governor)) > 1


def test_policy_learns_what_longer_rows_will_need_once_shorter_ones_need_more(governed, decided):
    seen = decided()
    made = governed(batch_size=4)
    trained = max(batch.tokens.shape[1] for batch in batches_of(made.governor))
    corrections = made.governor.corrections
    lengths = (trained, trained + 32)
    corrections.workload = dataclasses.replace(corrections.workload, lengths=lengths)
    for step, peak_bytes in ((1, 600 * MB), (2, 500 * MB)):
        boundary(made, step, peak_bytes=peak_bytes)
    first, second = (observation.foreseen_bytes for observation in seen)
    assert first == corrections.foreseen_bytes() > 0
    assert second == 0  # nothing was learned


def test_unreadable_peak_changes_no_correction(governed, decided):
    decided()
    made = governed(batch_size=4)
    for peak_bytes in (None, 0):
        boundary(made, peak_bytes=peak_bytes)
    assert made.governor.corrections.ratios == {}


def test_resumed_run_has_the_corrections_learned_up_to_its_step(governed, decided):
    decided()
    made = governed(batch_size=4)
    governor = made.governor
    for step, peak_bytes in ((1, 60 * MB), (2, 50 * MB), (3, 70 * MB)):
        boundary(made, step, peak_bytes=peak_bytes)
    seen = events_of(made.run, events.Corrected)
    assert [event.step for event in seen] == [1, 3]  # the second peak was not higher

    def ratios(step: int) -> dict[int, float]:
        again = memory_actions.govern(governor.trainer, Sampler(), governor.log, Watch(), step)
        return again.corrections.ratios

    assert ratios(3) == governor.corrections.ratios
    assert ratios(2) == {seen[0].tokens: seen[0].ratio}
    assert ratios(0) == {}
    plan = governor.trainer.budget.choice.option.plan
    other = dataclasses.replace(plan, micro_tokens=plan.micro_tokens + 1)
    planned = events_of(made.run, events.Planned)[-1]
    governor.log.write(dataclasses.replace(planned, micro_tokens=other.micro_tokens))
    assert ratios(3) == {}  # they belong to another plan


def test_short_rows_keep_no_more_than_long_ones_after_the_run_ran_out_of_memory(governed, decided):
    decided()
    made = governed(batch_size=4)
    governor, log = made.governor, made.governor.log

    def room_bytes() -> int | None:
        return memory_actions.govern(
            governor.trainer, Sampler(), log, Watch()
        ).corrections.room_bytes

    assert room_bytes() == governor.trainer.budget.choice.option.needed_bytes
    log.write(events.Died(step=0, reason=f"rank 1 {events.RAN_OUT} before its first step", level=0))
    assert room_bytes() == 0
    log.write(events.Died(step=0, reason="killed by SIGKILL", level=0))
    assert room_bytes() > 0


def test_peak_is_reset_before_each_step(governed):
    made = governed()
    mx.eval(mx.ones(40 * MB // 4))
    assert mx.get_peak_memory() >= 40 * MB
    made.governor.before_step()
    mx.eval(mx.ones(2))
    assert mx.get_peak_memory() < 40 * MB


def test_action_event_reports_0_bytes_for_an_unreadable_gauge():
    action = action_event(
        MemoryAction(kind="clear_cache", cause="c"), 3, MemorySample(), SAMPLE, 0.5
    )
    assert (action.before_bytes, action.after_bytes) == (0, 300 * MB)
    assert (action.step, action.kind, action.seconds) == (3, "clear_cache", 0.5)
    assert action.read_bytes == 0


# -- gauges that fail or show wrong values


@pytest.fixture
def quick(configure, data_folder, monkeypatch) -> Callable[..., Any]:
    """A config of a few short steps, for which a smaller plan exists."""
    monkeypatch.setattr(plan, "NOTICEABLY", 0.9999)
    write_rows(data_folder / "train.jsonl", [chat(f"Ask {i}", "Yes") for i in range(8)])
    (data_folder / "valid.jsonl").unlink()
    return partial(configure, lora_layers=1, max_steps=4, batch_size=4)


PROCESS = "the memory of the process cannot be read"
ACTIVE = "MLX reports 0 bytes in use"
BLIND = "no gauge shows the memory of the process"


def without_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "process_bytes", lambda: None)


def process_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("resident_bytes", "rusage"):
        monkeypatch.setattr(probe, name, Mock(side_effect=OSError(5, "Input/output error")))


def without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "mlx_bytes", lambda name, mlx=None: None)


def active_is_0(monkeypatch: pytest.MonkeyPatch) -> None:
    mlx_bytes = probe.mlx_bytes

    def zero(name: str, *mlx: Any) -> int | None:
        return 0 if name == "get_active_memory" else mlx_bytes(name, *mlx)

    monkeypatch.setattr(probe, "mlx_bytes", zero)


def ramp(monkeypatch: pytest.MonkeyPatch, run: RunFolder, *pressures: int | None) -> None:
    """Simulate the system's pressure at the end of each step; normal after the last value."""
    read = probe.read

    def pressed() -> MemorySample:
        done = len(events_of(run, events.Step))
        return dataclasses.replace(read(), pressure=dict(enumerate(pressures)).get(done, 1))

    monkeypatch.setattr(probe, "read", pressed)


def trained(config: TrainConfig, *pressures: int | None, failures: Any = ()) -> RunFolder:
    """A run whose gauges fail, or show this pressure at the end of each step."""
    run = folder.create(config)
    with pytest.MonkeyPatch.context() as patch:
        for fail in failures:
            fail(patch)
        if pressures:
            ramp(patch, run, *pressures)
        assert resume(run) == 0
    return run


@pytest.mark.parametrize(
    ("failures", "notices"),
    [
        ([], []),
        ([without_process], [PROCESS]),
        ([process_that_raises], [PROCESS]),
        ([active_is_0], [ACTIVE]),
        ([without_process, active_is_0], [PROCESS, ACTIVE]),
        ([without_mlx], []),
        ([without_process, without_mlx], [BLIND]),
    ],
    ids=lambda value: "-".join(getattr(v, "__name__", "") for v in value) or "none",
)
def test_failing_gauges_give_one_notice_and_do_not_end_the_run(quick, failures, notices):
    whole = train_once(quick(run="whole"))
    run = trained(quick(), failures=failures)
    found = [text for text in notices_of(run) if text.startswith((PROCESS, ACTIVE, BLIND))]
    assert len(found) == len(notices)
    for text, beginning in zip(sorted(found), sorted(notices), strict=True):
        assert text.startswith(beginning)
    assert losses_of(run) == losses_of(whole)


def test_step_events_contain_none_for_unreadable_gauges(quick):
    run = trained(quick(), failures=[without_process])
    for step in events_of(run, events.Step):
        assert (step.process_bytes, step.highest_bytes) == (None, None)
        assert step.active_bytes > 0


def test_gauge_that_fails_during_the_run_gives_a_notice_then(quick, monkeypatch):
    run = folder.create(quick(max_steps=6))
    process_bytes = probe.process_bytes

    def failing() -> int | None:
        return None if len(events_of(run, events.Step)) > 2 else process_bytes()

    with monkeypatch.context() as patch:
        patch.setattr(probe, "process_bytes", failing)
        resume(run)
    kinds = [(type(e), getattr(e, "text", "")) for e in events_of(run, events.Step, events.Notice)]
    place = next(i for i, (_, text) in enumerate(kinds) if text.startswith(PROCESS))
    assert 0 < place < len(kinds) - 1


# -- rising memory pressure


def test_rising_pressure_takes_the_actions_in_order(quick):
    run = trained(quick(max_steps=9), 1, 1, 2, 2, 2, 4)
    assert [(a.step, a.kind, a.cause) for a in actions_of(run)] == [
        (3, "clear_cache", "the system's memory pressure is 2 (warning)"),
        (4, "reload_lora", "the system's memory pressure is 2 (warning)"),
        (6, "smaller_plan", "the system's memory pressure is 4 (critical)"),
    ]
    assert [event.level for event in events_of(run, events.Planned)] == [0, 1]
    assert [event.step for event in events_of(run, events.Step)] == list(range(1, 10))


def test_notices_are_not_repeated_under_the_next_plan(quick):
    run = trained(quick(), 4, 4, failures=[active_is_0])
    assert len(events_of(run, events.Planned)) == 2
    assert len([text for text in notices_of(run) if text.startswith(ACTIVE)]) == 1


def test_larger_plan_returns_after_many_steps_with_low_memory(quick, monkeypatch):
    monkeypatch.setattr(governor, "HEADROOM_STEPS", 6)
    run = trained(quick(max_steps=16), 4, 4)
    assert [event.level for event in events_of(run, events.Planned)] == [0, 1, 0]
    assert [a.kind for a in actions_of(run)][-2:] == ["smaller_plan", "larger_plan"]
    assert [event.step for event in events_of(run, events.Step)] == list(range(1, 17))


# -- rows of very different lengths under a small limit


@pytest.fixture
def uneven(configure, data_folder) -> Callable[..., Any]:
    """A config with rows whose lengths differ 20-fold, and a batch size of eight."""
    rows = [chat("Ask", "Yes") for _ in range(8)]
    rows += [chat("Ask", "Yes" + " please" * (380 + i)) for i in range(8)]
    write_rows(data_folder / "train.jsonl", rows)
    (data_folder / "valid.jsonl").unlink()
    return partial(configure, batch_size=8, max_steps=None, epochs=1, lora_layers=1)


@pytest.fixture
def shapes(monkeypatch) -> list[tuple[int, int]]:
    """The shape of every trained micro-batch."""
    found: list[tuple[int, int]] = []
    accumulate = steps.accumulate

    def watched(engine: Any, batches: list[Any], *args: Any) -> Any:
        found.extend(batch.tokens.shape for batch in batches)
        return accumulate(engine, batches, *args)

    monkeypatch.setattr(steps, "accumulate", watched)
    return found


def test_small_limit_splits_long_batches_and_drops_no_row(uneven, shapes, monkeypatch):
    workloads: list[Workload] = []
    planned_for = planned.workload_of

    def watched(*args: Any, **options: Any) -> Workload:
        """Keep what is known of the process constant, since it varies."""
        found = planned_for(*args, **options)
        if workloads:
            found = dataclasses.replace(found, process=workloads[-1].process)
        workloads.append(found)
        return found

    monkeypatch.setattr(planned, "workload_of", watched)
    whole = train(uneven(run="whole", plan="staged"))
    (short, most), (long, longest) = sorted(set(shapes), key=lambda shape: shape[1])
    assert (short, long) == (8, 8)
    assert longest >= 10 * most
    shapes.clear()

    found = [option for option in plan.options(workloads[0]) if not option.plan.spill]
    needed = {option.plan.rows(longest, 8): option.needed_bytes for option in found}
    limit = (needed[1] + needed[2]) / 2 / 1e9
    run = train(uneven(plan="staged", max_memory=limit, reload_at=1.0, clear_cache_every=0))
    rows = {tokens: max(b for b, t in shapes if t == tokens) for _, tokens in shapes}
    assert rows[most] == 8
    assert rows[longest] < 8
    total = {r.name: sum(e.tokens for e in events_of(r, events.Step)) for r in (run, whole)}
    assert total["r"] == total["whole"]
    trained = [[e.trained_tokens for e in events_of(r, events.Step)] for r in (run, whole)]
    assert trained[0] == trained[1]
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)


def test_split_batches_contain_each_row_once(governed, decided):
    """For every step of an epoch, whatever the corrections are."""
    decided()
    made = governed(batch_size=4, grad_accumulation=2, max_memory=1.0)
    plan_of_steps = made.governor.trainer.schedule
    for peak_bytes in (100 * MB, 2 * GB, 9 * GB):
        boundary(made, peak_bytes=peak_bytes)
        for step in range(plan_of_steps.steps_per_epoch):
            batches = batches_of(made.governor, step)
            lengths = np.concatenate([batch.lengths[batch.lengths > 0] for batch in batches])
            expected = plan_of_steps.examples.lengths[plan_of_steps.rows_of(step)] - 1
            assert lengths.tolist() == expected.tolist()
