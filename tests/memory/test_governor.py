"""The memory policy: which actions it takes on simulated processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from your_ai.config import TrainConfig
from your_ai.memory import governor
from your_ai.memory.governor import (
    CHEAP,
    KINDS,
    LARGE,
    MemoryAction,
    MemoryObservation,
    Policy,
    Watch,
    acted,
    decide,
    policy_of,
)
from your_ai.memory.sample import MemorySample

MB, GB = 10**6, 10**9
QUIET = Policy(limit_bytes=10 * GB, clear_cache_every=0)  # nothing is scheduled


@dataclass
class Process:
    """A simulated process."""

    held: Callable[[int], float] = lambda n: 3 * GB
    """Memory between steps n and n + 1, without leaks."""
    peak: Callable[[int], float] = lambda n: GB
    """The peak of step n, above the memory between steps."""
    leak: float = 0.0
    """Growth per step, from step `leak_from`."""
    leak_from: int = 1
    noise: float = 0.0
    cache_a_step: float = 0.0
    pressure: Callable[[int], int | None] = lambda n: 1
    can_shrink: bool = False
    can_grow: bool = False
    change: Callable[[MemorySample], MemorySample] = lambda sample: sample
    """Simulates gauges that fail."""
    seen: bool = True
    """Whether the sampler thread sees the peak."""
    leaked: float = 0.0
    cache: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def sample(self, n: int) -> MemorySample:
        now = int(self.held(n) + self.leaked + self.rng.uniform(-self.noise, self.noise))
        cache = int(self.cache)
        return MemorySample(
            active_bytes=now - GB // 4, peak_bytes=now + int(self.peak(n)), cache_bytes=cache,
            process_bytes=now + cache, available_bytes=8 * GB, swap_bytes=0,
            pressure=self.pressure(n),
        )  # fmt: skip

    def observe(self, n: int) -> MemoryObservation:
        self.leaked += self.leak if n >= self.leak_from else 0
        self.cache += self.cache_a_step
        sample = self.sample(n)
        highest = sample.process_bytes + int(self.peak(n))
        return MemoryObservation(
            step=n,
            sample=self.change(sample),
            highest_process_bytes=highest if self.seen else None,
            can_shrink=self.can_shrink,
            can_grow=self.can_grow,
            baseline_bytes=GB // 4,
        )

    def do(self, kind: str, n: int) -> None:
        if kind in ("clear_cache", "reload_lora"):
            self.cache = 0


@dataclass
class Story:
    """The result of a simulation."""

    done: list[tuple[int, MemoryAction]] = field(default_factory=list)
    """Actions, as (step, action)."""
    told: list[tuple[int, str]] = field(default_factory=list)
    """Notices, as (step, text)."""
    over: list[int] = field(default_factory=list)
    """Steps that reached the limit."""
    watch: Watch = field(default_factory=Watch)

    @property
    def kinds(self) -> list[str]:
        return [action.kind for _, action in self.done]

    def steps(self, kind: str) -> list[int]:
        return [step for step, action in self.done if action.kind == kind]


def play(policy: Policy, process: Process, steps: int, first: int = 1) -> Story:
    """Simulate up to `steps` steps; stop at a large action."""
    story = Story()
    for n in range(first, first + steps):
        observation = process.observe(n)
        if (observation.highest_process_bytes or 0) >= policy.limit_bytes:
            story.over.append(n)
        story.watch, actions, notices = decide(policy, story.watch, observation)
        story.told += [(n, text) for text in notices]
        for action in actions:
            before = observation.sample
            process.do(action.kind, n)
            after = process.change(process.sample(n))
            story.watch = acted(policy, story.watch, action, before, after)
            story.done.append((n, action))
        if actions and actions[-1].kind in LARGE:
            break
    return story


def at(step: int = 1, **fields) -> MemoryObservation:
    """An observation with working gauges; `fields` replaces values."""
    ours = {"highest_process_bytes", "can_shrink", "can_grow", "baseline_bytes", "kept_bytes"}
    sample = {"active_bytes": 3 * GB, "peak_bytes": 4 * GB, "cache_bytes": 0, "pressure": 1}
    sample |= {"process_bytes": 4 * GB} | {k: v for k, v in fields.items() if k not in ours}
    known = {"highest_process_bytes": None, "can_shrink": False, "can_grow": False}
    known |= {k: v for k, v in fields.items() if k in ours}
    return MemoryObservation(step=step, sample=MemorySample(**sample), **known)


def follow(policy: Policy, observations: list[MemoryObservation]) -> list[list[str]]:
    """The kinds of actions after each observation."""
    watch, kinds = Watch(), []
    for observation in observations:
        watch, actions, _ = decide(policy, watch, observation)
        kinds.append([action.kind for action in actions])
    return kinds


def flat(kinds: list[list[str]]) -> list[str]:
    return [kind for several in kinds for kind in several]


# Settings


@pytest.mark.parametrize(
    ("limit_gb", "given", "every"), [(9.9, None, 5), (10, None, 10), (9.9, 0, 0), (64, 7, 7)]
)
def test_cache_is_cleared_more_often_under_a_small_limit(limit_gb, given, every):
    policy = policy_of(TrainConfig(clear_cache_every=given), int(limit_gb * GB))
    assert policy.clear_cache_every == every


def test_policy_defaults_equal_the_default_settings():
    assert policy_of(TrainConfig(), 10 * GB) == Policy(limit_bytes=10 * GB)
    policy = policy_of(TrainConfig(leak_threshold_mb=1.5), GB)
    assert policy.leak_threshold_bytes == 1_500_000


# Scheduled actions


def test_constant_memory_causes_only_scheduled_actions():
    policy = Policy(limit_bytes=10 * GB, clear_cache_every=10, reload_interval=25)
    story = play(policy, Process(noise=20 * MB), 1000)
    assert story.steps("reload_lora") == list(range(25, 1001, 25))
    assert story.steps("clear_cache") == [n for n in range(10, 1001, 10) if n % 25]
    assert set(story.kinds) == {"clear_cache", "reload_lora"}
    assert story.told == []


def test_schedule_counts_the_steps_of_the_run_after_a_resume():
    story = play(replace(QUIET, clear_cache_every=10), Process(), 20, first=487)
    assert story.steps("clear_cache") == [490, 500]


def test_scheduled_actions_do_not_climb_the_ladder():
    policy = Policy(limit_bytes=10 * GB, clear_cache_every=1)
    watch = play(policy, Process(), 5).watch
    assert all(ladder.taken == 0 for ladder in watch.ladders.values())


def test_reload_replaces_a_scheduled_clear_cache():
    policy = replace(QUIET, clear_cache_every=3)
    high = [at(n, process_bytes=8 * GB) for n in (1, 2, 3)]
    assert follow(policy, high) == [["clear_cache"], ["drop_compiled"], ["reload_lora"]]


# Near the limit


def test_high_constant_memory_takes_the_cheap_rungs_only_once():
    process = Process(peak=lambda n: 5.5 * GB, noise=50 * MB, can_shrink=True)
    story = play(QUIET, process, 1000)
    assert story.kinds == list(CHEAP)
    assert [step for step, _ in story.done] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"process_bytes": 71 * GB // 10}, "7.10 GB"),
        ({"highest_process_bytes": 71 * GB // 10}, "7.10 GB within the step"),
    ],
)
def test_cause_names_the_memory_and_the_limit(fields, where):
    _, actions, _ = decide(QUIET, Watch(), at(**fields))
    assert actions[0].cause == f"process {where} is over 70% of the limit of 10.00 GB"


def test_growth_beyond_the_need_of_the_plan_triggers_again():
    seen = [at(process_bytes=int(8 * GB))] * 10 + [at(process_bytes=int(8.4 * GB))] * 10
    assert flat(follow(QUIET, seen)) == list(CHEAP)
    kinds = follow(QUIET, [*seen, *[at(process_bytes=int(8.6 * GB))] * 10])
    assert flat(kinds[20:]) == list(CHEAP)


def test_effective_action_starts_the_ladder_at_the_bottom_again():
    story = play(QUIET, Process(cache_a_step=0.1 * GB), 400)
    assert set(story.kinds) == {"clear_cache"}
    assert story.steps("clear_cache") == list(range(30, 401, 30))


def test_occasional_high_peaks_do_not_cause_actions_forever():
    story = play(QUIET, Process(peak=lambda n: 5.5 * GB if n % 37 == 0 else GB), 5000)
    assert len(story.done) <= 24
    assert not set(story.kinds) & set(LARGE)


@pytest.mark.parametrize("share", [0.5, 0.91, 1.0])
def test_actions_start_at_reload_at(share):
    policy = replace(QUIET, reload_at=share)
    line = int(min(share, governor.DANGER) * 10 * GB)
    seen = [at(process_bytes=line - 1), at(process_bytes=line)]
    assert follow(policy, seen) == [[], ["clear_cache"]]


# Danger


def test_danger_leads_to_a_smaller_plan_if_there_is_one():
    story = play(QUIET, Process(peak=lambda n: 6.3 * GB, can_shrink=True), 100)
    assert story.kinds == [*CHEAP, "smaller_plan"]
    assert [step for step, _ in story.done] == [1, 2, 3, 4]


def test_all_cheap_rungs_are_taken_together_at_the_limit():
    story = play(QUIET, Process(peak=lambda n: 7 * GB, can_shrink=True), 100)
    assert [(step, a.kind) for step, a in story.done] == [
        *((1, kind) for kind in CHEAP),
        (2, "smaller_plan"),
    ]


@pytest.mark.parametrize("can_shrink", [False, True])
@pytest.mark.parametrize(("foreseen_gb", "is_too_large"), [(9.9, False), (11.0, True)])
def test_rows_foreseen_above_the_limit_lead_to_a_smaller_plan(
    foreseen_gb, is_too_large, can_shrink
):
    observed = replace(Process(can_shrink=can_shrink).observe(1), foreseen_bytes=foreseen_gb * GB)
    _, actions, notices = decide(QUIET, Watch(), observed)
    expected = ["smaller_plan"] if is_too_large and can_shrink else []
    assert [action.kind for action in actions] == expected
    assert not notices


@pytest.mark.parametrize("peak_gb", [6.5, 7.5])
def test_constant_peak_gives_one_notice_and_no_restart(peak_gb):
    story = play(QUIET, Process(peak=lambda n: peak_gb * GB, noise=30 * MB), 2000)
    assert "restart" not in story.kinds
    assert len(story.done) <= 24
    assert [step for step, _ in story.told] == [2 if peak_gb > 7 else 4]
    assert "--max-memory" in story.told[0][1]


@pytest.mark.parametrize("early", [30, 300])
def test_single_jump_into_danger_causes_no_restart(early):
    """For example a first validation. After a restart, memory would jump again."""
    process = Process(held=lambda n: 6 * GB if n < early else 8.5 * GB, noise=10 * MB)
    assert "restart" not in play(QUIET, process, 1000).kinds


@pytest.mark.parametrize("can_shrink", [False, True])
@pytest.mark.parametrize("leak_from", [1, 400])
@pytest.mark.parametrize("leak_mb", [2, 10, 40])
def test_slow_leak_ends_in_a_large_action_before_the_limit(leak_mb, leak_from, can_shrink):
    process = Process(leak=leak_mb * MB, leak_from=leak_from, noise=10 * MB, can_shrink=can_shrink)
    story = play(QUIET, process, 5000)
    assert story.kinds[-1] == ("smaller_plan" if can_shrink else "restart")
    assert story.kinds[:3] == list(CHEAP)
    assert story.over == []


def test_restart_is_requested_only_once():
    """If nothing restarts the process, it continues."""
    process = Process(held=lambda n: 3 * GB + 70 * MB * n)
    kinds = flat(follow(QUIET, [process.observe(n) for n in range(1, 200)]))
    assert kinds.count("restart") == 1


# Leaks


@pytest.mark.parametrize("noise_mb", [0, 15])
@pytest.mark.parametrize("leak_from", [1, 200])
@pytest.mark.parametrize("leak_mb", [60, 100, 300])
def test_leak_is_noticed_and_ends_in_a_restart_before_the_limit(leak_mb, leak_from, noise_mb):
    process = Process(leak=leak_mb * MB, leak_from=leak_from, noise=noise_mb * MB, can_shrink=True)
    story = play(QUIET, process, 1000)
    noticed, text = story.told[0]
    assert leak_from <= noticed < leak_from + 10
    assert text.startswith("memory grows by ")
    assert len(story.told) == 1
    assert story.over == []
    assert list(dict.fromkeys(story.kinds)) == [*CHEAP, "restart"]


def test_leak_takes_one_rung_per_step():
    story = play(replace(QUIET, limit_bytes=100 * GB), Process(leak=60 * MB), 25)
    assert [(step, a.kind) for step, a in story.done] == [
        (10, "clear_cache"),
        (11, "drop_compiled"),
        (12, "reload_lora"),
    ]
    cause = "memory grows by 60 MB a step, more than the leak threshold of 50 MB"
    assert {action.cause for _, action in story.done} == {cause}


def test_leak_far_from_the_limit_delays_the_restart():
    story = play(QUIET, Process(leak=60 * MB), 1000)
    assert story.steps("restart")[0] > 70


def test_leak_close_to_the_limit_causes_an_immediate_restart():
    policy = replace(QUIET, limit_bytes=20 * GB, reload_at=0.9)
    story = play(policy, Process(held=lambda n: 12 * GB, leak=600 * MB, leak_from=1), 100)
    assert story.done[-1][1].kind == "restart"
    assert story.done[-1][0] == 10
    assert "20.00 GB" in story.done[-1][1].cause


@pytest.mark.parametrize(
    "freed", [("drop_compiled", 200 * MB), ("reload_lora", 200 * MB)], ids=lambda f: f[0]
)
def test_action_that_frees_little_does_not_hide_a_leak(freed):
    process = Process(leak=100 * MB)
    kind, size = freed
    plain = process.do

    def do(done: str, n: int) -> None:
        plain(done, n)
        process.leaked -= size if done == kind else 0

    process.do = do
    story = play(QUIET, process, 14)
    assert story.kinds == list(CHEAP)
    assert governor.leak_bytes(QUIET, story.watch.recent) == pytest.approx(100 * MB)


def test_noise_only_delays_the_notice_of_a_leak():
    for seed in range(10):
        process = Process(leak=70 * MB, noise=100 * MB, rng=random.Random(seed))
        told = play(replace(QUIET, limit_bytes=100 * GB), process, 40).told
        assert told
        assert told[0][0] < 30


def test_old_readings_cause_no_leak_once_the_gauges_fail():
    observations = [at(n, process_bytes=3 * GB + 100 * MB * n) for n in range(1, 11)]
    watch = Watch()
    for observation in observations:
        watch, actions, _ = decide(QUIET, watch, observation)
    assert actions[0].kind == "clear_cache"
    gone = replace(observations[-1], sample=MemorySample())
    for _ in range(5):
        watch, actions, _ = decide(QUIET, watch, gone)
        assert [action.cause for action in actions] == ["no gauge shows the memory of the process"]


def test_action_that_frees_the_leaked_memory_ends_the_leak():
    process = Process(leak=100 * MB)

    def do(done: str, n: int) -> None:
        if done == "drop_compiled":
            process.leaked, process.leak = 0, 0

    process.do = do
    assert play(QUIET, process, 1000).kinds == ["clear_cache", "drop_compiled"]


FIRST_SEEN = [1, 2, 3, 4, 6, 7, 9, 10, 13, 15, 21, 34]  # steps with a new shape


def lengths(n: int) -> float:
    return 20.0 if n % 13 == 0 else 1.0


HARMLESS = {
    "noise": Process(noise=100 * MB),
    "peaks": Process(peak=lambda n: 0.1 * GB * lengths(n), noise=20 * MB),
    "sawtooth": Process(held=lambda n: 3 * GB + 20 * MB * lengths(n), noise=20 * MB),
    "alternating": Process(held=lambda n: 3 * GB + (200 * MB if n % 2 else 0)),
    "start": Process(held=lambda n: 3 * GB - 1.5 * GB * 0.7**n),
    "shapes": Process(held=lambda n: 3 * GB + 150 * MB * min(12, n // 3), noise=10 * MB),
    "many shapes": Process(held=lambda n: 3 * GB + 300 * MB * sum(n >= s for s in FIRST_SEEN)),
    "cache": Process(cache_a_step=20 * MB),
    "slow": Process(leak=40 * MB, noise=10 * MB),
}


@pytest.mark.parametrize("process", HARMLESS.values(), ids=HARMLESS)
def test_harmless_patterns_are_not_reported_as_leaks(process):
    policy = Policy(limit_bytes=100 * GB)
    story = play(policy, process, 1000)
    assert story.told == []
    assert set(story.kinds) == {"clear_cache"}
    assert len(story.done) == 100


def test_fast_growing_cache_is_not_a_leak():
    policy = Policy(limit_bytes=20 * GB)
    assert play(policy, Process(cache_a_step=300 * MB), 200).told == []


def test_growing_prefix_cache_is_not_a_leak():
    watch, told = Watch(), []
    for n in range(1, 100):
        kept = 64 * MB * n
        observation = at(n, process_bytes=3 * GB + kept, kept_bytes=kept)
        watch, _, notices = decide(replace(QUIET, limit_bytes=30 * GB), watch, observation)
        told += notices
    assert told == []


def test_leak_warmup_counts_from_the_start_of_the_process():
    held = [3 * GB + 200 * MB * min(n, 4) for n in range(30)]
    process = Process(held=lambda n: held[n - 500])
    assert play(QUIET, process, 30, first=500).told == []


# Pressure


BOTH = ["clear_cache", "reload_lora"]


@pytest.mark.parametrize(
    ("levels", "can_shrink", "kinds"),
    [
        ([1, 1, 2, 4, 4, 1], True, [[], [], BOTH[:1], BOTH[1:], ["smaller_plan"], []]),
        ([2] * 49, True, [BOTH[:1], BOTH[1:], *[[]] * 47]),  # a warning leaves the plan
        ([4] * 2, True, [BOTH, ["smaller_plan"]]),
        ([4] * 49, False, [BOTH, *[[]] * 48]),
        ([None] * 4, False, [[]] * 4),
    ],
)
def test_pressure_takes_one_rung_per_step_or_both_if_it_is_critical(levels, can_shrink, kinds):
    assert follow(QUIET, [at(pressure=p, can_shrink=can_shrink) for p in levels]) == kinds


def test_lasting_pressure_repeats_actions_after_a_while():
    kinds = follow(QUIET, [at(pressure=2)] * 500)
    assert len(flat(kinds)) == 20


def test_alternating_pressure_counts_as_one_episode():
    kinds = follow(QUIET, [at(pressure=1 + n % 2) for n in range(50)])
    assert flat(kinds) == ["clear_cache", "reload_lora"]


# Gauges


def test_mlx_gauge_replaces_an_unreadable_process_gauge():
    process = Process(
        held=lambda n: 8 * GB, change=lambda s: replace(s, process_bytes=None), seen=False
    )
    story = play(QUIET, process, 100)
    assert story.kinds == list(CHEAP)
    assert story.done[0][1].cause.startswith("process 8.00 GB is over 70%")  # with the baseline
    assert len(story.told) == 1
    assert "cannot be read: using MLX's own count plus 250 MB" in story.told[0][1]


def test_process_gauge_below_the_count_of_mlx_is_ignored():
    assert follow(QUIET, [at(process_bytes=GB, active_bytes=8 * GB)]) == [["clear_cache"]]


@pytest.mark.parametrize("process_bytes", [None, 0, 4 * GB])
def test_active_gauge_of_0_gives_a_notice_and_no_larger_plan(process_bytes):
    def lie(sample: MemorySample) -> MemorySample:
        return replace(sample, active_bytes=0, process_bytes=process_bytes)

    story = play(QUIET, Process(change=lie, can_grow=True, seen=False), 200)
    assert story.kinds == []
    texts = [text for _, text in story.told]
    assert sum("MLX reports 0 bytes" in text for text in texts) == 1
    assert len(texts) == (1 if process_bytes else 2)


def test_peak_gauge_replaces_an_active_gauge_of_0():
    process = at(process_bytes=None, active_bytes=0, peak_bytes=8 * GB)
    assert follow(QUIET, [process]) == [["clear_cache"]]


def test_cache_is_cleared_every_step_if_no_gauge_works():
    process = Process(change=lambda s: MemorySample(), can_grow=True, can_shrink=True, seen=False)
    story = play(Policy(limit_bytes=10 * GB), process, 200)
    assert story.kinds == ["clear_cache"] * 200
    assert len(story.told) == 1
    assert "no gauge" in story.told[0][1]


def test_occasional_gauge_failures_are_not_a_leak():
    rng = random.Random(1)

    def fail(sample: MemorySample) -> MemorySample:
        gone = {name: None for name in vars(sample) if rng.random() < 0.2}
        return replace(sample, **gone)

    story = play(Policy(limit_bytes=40 * GB), Process(change=fail, noise=20 * MB), 1000)
    assert set(story.kinds) == {"clear_cache"}
    assert not any("grows" in text for _, text in story.told)


# Headroom


def test_low_memory_for_many_steps_restores_a_larger_plan_once():
    story = play(QUIET, Process(can_grow=True), 200)
    assert [(step, action.kind) for step, action in story.done] == [(50, "larger_plan")]
    watch, later = story.watch, []
    for n in range(51, 200):
        watch, actions, _ = decide(QUIET, watch, Process(can_grow=True).observe(n))
        later += actions
    assert later == []


UNCERTAIN = {
    "no larger plan": {"can_grow": False},
    "peaks": {"peak": lambda n: 3 * GB if n % 40 == 0 else GB},
    "unseen": {"seen": False},
    "unread": {"change": lambda s: replace(s, process_bytes=None)},
    "lie": {"change": lambda s: replace(s, active_bytes=0)},
    "pressure": {"pressure": lambda n: 2 if n % 40 == 0 else 1},
    "leak": {"held": lambda n: 0.5 * GB + 55 * MB * min(n, 60), "noise": MB},
}


@pytest.mark.parametrize("changes", UNCERTAIN.values(), ids=UNCERTAIN)
def test_no_larger_plan_if_headroom_is_uncertain(changes):
    assert "larger_plan" not in play(QUIET, Process(**{"can_grow": True, **changes}), 60).kinds


def test_large_action_gives_a_new_watch_that_repeats_no_notice():
    watch = play(QUIET, Process(leak=100 * MB), 12).watch
    action = MemoryAction(kind="smaller_plan", cause="x")
    assert acted(QUIET, watch, action, MemorySample(), MemorySample()) == Watch(told=watch.told)
    assert "leak" in watch.told


# Random input

gauges = st.none() | st.integers(0, 20 * GB) | st.sampled_from([0, 7 * GB, 10 * GB])
samples = st.builds(
    MemorySample, active_bytes=gauges, peak_bytes=gauges, cache_bytes=gauges, process_bytes=gauges,
    available_bytes=gauges, swap_bytes=gauges, pressure=st.sampled_from([None, 0, 1, 2, 3, 4]),
)  # fmt: skip
observations = st.builds(
    MemoryObservation, step=st.integers(1, 100), sample=samples, highest_process_bytes=gauges,
    can_shrink=st.booleans(), can_grow=st.booleans(), baseline_bytes=st.integers(0, GB),
    kept_bytes=st.integers(0, GB),
)  # fmt: skip
policies = st.builds(
    Policy, limit_bytes=st.integers(1, 20 * GB), reload_interval=st.integers(0, 5),
    reload_at=st.floats(0.01, 1.0), clear_cache_every=st.integers(0, 5),
    leak_threshold_bytes=st.integers(1, GB), leak_warmup=st.integers(0, 8),
)  # fmt: skip


@settings(deadline=None)
@given(policies, st.lists(observations, max_size=40), samples)
def test_any_input_gives_ordered_actions_with_causes(policy, seen, after):
    watch = twin = Watch()
    told: list[str] = []
    for observation in seen:
        decided = decide(policy, watch, observation)
        assert decided == decide(policy, twin, observation)
        watch, actions, notices = decided
        kinds = [action.kind for action in actions]
        assert kinds == sorted(set(kinds), key=KINDS.index)
        assert sum(kind in LARGE for kind in kinds) <= 1
        assert all(a.cause and "\n" not in a.cause for a in actions)
        assert observation.can_shrink or "smaller_plan" not in kinds
        assert observation.can_grow or "larger_plan" not in kinds
        told += notices
        for action in actions:
            if action.kind in CHEAP:
                watch = acted(policy, watch, action, observation.sample, after)
        twin = watch
    assert all(told)
    assert len([text for text in told if "no gauge" in text]) <= 1


@given(st.lists(observations, min_size=1, max_size=40))
def test_rungs_of_a_trigger_are_taken_in_order(seen):
    watch = Watch()
    for observation in seen:
        before = watch.ladders
        watch, actions, _ = decide(QUIET, watch, observation)
        kinds = {action.kind for action in actions}
        for trigger, rungs in governor.RUNGS.items():
            was, now = before[trigger].taken, watch.ladders[trigger].taken
            assert kinds >= set(rungs[was if now >= was else 0 : now])
