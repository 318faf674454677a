"""Decide what to do about memory between two steps. A pure policy: numbers in, actions out.

The actions form a ladder, the cheapest first: clear_cache, drop_compiled, reload_lora; then
smaller_plan and restart, which cost speed or time. Each trigger climbs the ladder separately: one
rung per decision while its cause lasts, or all cheap rungs together if it is urgent. A trigger
that took no rung for a while starts at the bottom again. That wait doubles each time, so that
actions that do not help are not repeated forever.

- near: the process reached `reload_at` of the limit. Takes the cheap rungs. The memory in use
  after them is what the plan needs; the trigger fires again only if memory grows clearly beyond.
- danger: the process reached DANGER of the limit; at the limit it is urgent. Takes the cheap
  rungs, then a smaller plan. If there is none, a restart, but only if memory grew steadily: a
  constant peak would come back after a restart, so the user gets a notice instead, once.
- leak: memory grows by more than `leak_threshold_bytes` per step. Takes the cheap rungs. If the
  limit is a few steps away, an immediate restart: a smaller plan does not fix a leak.
- foreseen: longer rows than were trained so far are expected to exceed the limit, since shorter
  ones used much more than estimated. Takes a smaller plan at once, if there is one.
- pressure: the system is short of memory. At a warning, clear_cache, then reload_lora. If
  critical, both together, then a smaller plan. Repeats only if the pressure lasts.

In addition: clear_cache and reload_lora on schedule, and a return to a larger plan after memory
use was low for many steps. After a change of plan the caller continues with the Watch from
`acted`: a new one that does not repeat notices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from statistics import median
from typing import Literal, get_args

from your_ai.config import TrainConfig
from your_ai.gates.text import counted, size_text
from your_ai.memory.limit import headroom_bytes
from your_ai.memory.sample import MemorySample

ActionKind = Literal[
    "clear_cache", "drop_compiled", "reload_lora", "smaller_plan", "restart", "larger_plan"
]
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
CHEAP, LARGE = KINDS[:3], KINDS[3:]  # a decision has at most one large action, the last one
RUNGS: dict[str, tuple[ActionKind, ...]] = {
    "danger": CHEAP,
    "leak": CHEAP,
    "pressure": ("clear_cache", "reload_lora"),
    "near": CHEAP,
}
MB, GB = 10**6, 10**9
DANGER = 0.92  # share of the limit
NOTICEABLE = 0.05  # share of the limit by which memory must exceed the known need of the plan
PATIENCE = 20  # decisions without a rung after which a trigger starts at the bottom again
PRESSURE_PATIENCE = 50  # the same for pressure; never doubled, as other processes cause pressure
# Leaks are searched in the last WINDOW boundaries, at least LEAST. At least REGULAR of the steps
# between them must grow, so that new shapes do not count as a leak.
WINDOW, LEAST = 10, 6
REGULAR = 0.85
LONG, OFTEN = 20, 0.5  # a longer window and a smaller share, for noisy memory
LOOKAHEAD = 5  # a leak that would reach the limit within this many steps needs a restart
WINDOW_MEDIANS, LEAST_MEDIANS = 10, 4  # windows in which steady growth is searched: max, min
STEADY = 0.01  # share of the limit; less growth over these windows is not steady growth
PLENTY = 0.55  # share of the limit below which there is headroom
HEADROOM_STEPS = 50  # steps with headroom before a larger plan is tried
WARNING, CRITICAL = 2, 4  # values of memory pressure


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Resolved settings of TrainConfig; 0 means never."""

    limit_bytes: int
    reload_interval: int = 0
    reload_at: float = 0.70
    clear_cache_every: int = 10
    leak_threshold_bytes: int = 50 * MB
    leak_warmup: int = 5


@dataclass(frozen=True, kw_only=True)
class MemoryObservation:
    """The state of memory after a step."""

    step: int
    """Counted from 1."""
    sample: MemorySample
    """The gauges now, between two steps."""
    highest_process_bytes: int | None
    """The peak that the sampler thread saw since the last boundary."""
    can_shrink: bool
    """Whether a smaller plan exists."""
    can_grow: bool
    """Whether the run left a larger plan before."""
    baseline_bytes: int = 0
    """Expected memory outside MLX, for when the gauge of the process fails."""
    kept_bytes: int = 0
    """Memory that grows on purpose, and is not a leak: hidden states of the prefix cache."""
    foreseen_bytes: int = 0
    """What longer rows than were trained so far are expected to need, of the whole process."""


@dataclass(frozen=True, kw_only=True)
class MemoryAction:
    """The action to take, and the reason."""

    kind: ActionKind | Literal["measured"]
    cause: str
    """One line of text with figures."""


@dataclass(frozen=True, kw_only=True)
class LadderState:
    """The position of a trigger on the ladder."""

    taken: int = 0
    """Rungs taken."""
    idle: int = 0
    """Decisions since the last rung."""
    patience: int = PATIENCE
    """Idle decisions after which the trigger starts at the bottom again."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The state of the policy between steps."""

    decisions: int = 0
    ladders: Mapping[str, LadderState] = field(
        default_factory=lambda: dict.fromkeys(RUNGS, LadderState())
    )
    level_bytes: int | None = None
    """Memory that the plan needs, known once the cheap rungs did not help."""
    recent: tuple[int, ...] = ()
    """Memory in use at the last boundaries, in bytes."""
    window_medians: tuple[int, ...] = ()
    """Medians of windows of `recent`."""
    steps_with_headroom: int = 0
    """Decisions in a row with low memory use."""
    told: frozenset[str] = frozenset()
    """Keys of notices and large actions that must not be repeated."""


def policy_of(config: TrainConfig, limit_bytes: int) -> Policy:
    every = config.clear_cache_every
    return Policy(
        limit_bytes=limit_bytes,
        reload_interval=config.reload_interval,
        reload_at=config.reload_at,
        clear_cache_every=every if every is not None else 5 if limit_bytes < 10 * GB else 10,
        leak_threshold_bytes=round(config.leak_threshold_mb * MB),
        leak_warmup=config.leak_warmup,
    )


def decide(
    policy: Policy, watch: Watch, observation: MemoryObservation
) -> tuple[Watch, list[MemoryAction], list[str]]:
    """Return the new watch, the actions in order, and notices for the user."""
    watch = remember(policy, watch, observation)
    watch, causes = triggers(policy, watch, observation)
    due = scheduled(policy, observation.step)
    large = large_action(policy, watch, observation, causes)
    notes = gauge_notes(observation)
    if "leak" in causes:
        notes["leak"] = f"{causes['leak']}: freeing memory"
    if large is None:
        if "danger" in exhausted(watch, causes):
            advice = "raise --max-memory or lower --max-seq-length"
            notes["peak"] = f"{causes['danger']}, and nothing more can be freed: {advice}"
        watch, rungs = climb(policy, watch, observation, causes)
        if "reload_lora" in rungs:
            due.pop("clear_cache", None)
        due |= rungs
    actions = [MemoryAction(kind=kind, cause=due[kind]) for kind in CHEAP if kind in due]
    once = set(notes)
    if large is not None:
        actions.append(large)
        once.add(large.kind)
    notices = [text for key, text in notes.items() if key not in watch.told]
    return replace(watch, told=watch.told | once), actions, notices


def acted(
    policy: Policy, watch: Watch, action: MemoryAction, before: MemorySample, after: MemorySample
) -> Watch:
    """Return the watch after an action was carried out; a new one after a large action.

    Memory freed by a cheap action must not hide a leak, and memory it adds must not look like
    one, so the earlier boundaries are shifted by the difference. If the action freed most of the
    growth, they are forgotten. After an action that freed much, the patience is reset.
    """
    if action.kind in LARGE:
        return Watch(told=watch.told)
    was, now = process_bytes(before), process_bytes(after)
    if was is None or now is None:
        return watch
    if was - now >= NOTICEABLE * policy.limit_bytes:
        ladders = {trigger: replace(c, patience=PATIENCE) for trigger, c in watch.ladders.items()}
        watch = replace(watch, ladders=ladders)
    freed = was - now - (before.cache_bytes or 0) + (after.cache_bytes or 0)
    grown = watch.recent[-1] - watch.recent[0] if watch.recent else 0
    fixed = 0 < grown <= 2 * freed
    return replace(watch, recent=() if fixed else tuple(b - freed for b in watch.recent))


def remember(policy: Policy, watch: Watch, observation: MemoryObservation) -> Watch:
    """Return the watch after one more decision."""
    ladders = {}
    for trigger, now in watch.ladders.items():
        patience = PRESSURE_PATIENCE if trigger == "pressure" else now.patience
        ladders[trigger] = replace(now, idle=now.idle + 1)
        if now.taken and now.idle + 1 >= patience:
            ladders[trigger] = LadderState(patience=2 * patience)

    decisions, recent, window_medians = watch.decisions + 1, watch.recent, watch.window_medians
    held = held_bytes(observation.sample, observation.baseline_bytes)
    if held is not None and decisions >= policy.leak_warmup:
        recent = (*recent, held - observation.kept_bytes)[-LONG:]
        if len(recent) >= WINDOW and decisions % WINDOW == 0:
            window_medians = (*window_medians, int(median(recent[-WINDOW:])))[-WINDOW_MEDIANS:]
    steps_with_headroom = watch.steps_with_headroom + 1 if has_headroom(policy, observation) else 0
    return replace(
        watch,
        decisions=decisions,
        ladders=ladders,
        recent=recent,
        window_medians=window_medians,
        steps_with_headroom=steps_with_headroom,
    )


def triggers(
    policy: Policy, watch: Watch, observation: MemoryObservation
) -> tuple[Watch, dict[str, str]]:
    """Return the active triggers, each with its cause in words, and the updated watch."""
    sample, limit = observation.sample, policy.limit_bytes
    causes: dict[str, str] = {}
    highest, level = highest_bytes(observation), watch.level_bytes
    if highest is None:
        causes["blind"] = "no gauge shows the memory of the process"
    elif highest >= min(DANGER, policy.reload_at) * limit:
        near = highest < DANGER * limit
        in_step = highest != process_bytes(sample, observation.baseline_bytes)
        cause = (
            f"process {size_text(highest)}{' within the step' if in_step else ''} is over "
            f"{policy.reload_at if near else DANGER:.0%} of the limit of {size_text(limit)}"
        )
        if not near:
            causes["danger"] = cause
        elif level is None and watch.ladders["near"].taken == len(CHEAP):
            level = highest
        elif level is None:
            causes["near"] = cause
        elif highest >= level + NOTICEABLE * limit:
            causes["near"], level = cause, None
            watch = replace(watch, ladders={**watch.ladders, "near": LadderState()})
    leak = leak_bytes(policy, watch.recent)
    if leak and held_bytes(sample) is not None:
        threshold = f"{policy.leak_threshold_bytes / MB:g}"
        growth = f"memory grows by {leak / MB:.0f} MB a step"
        causes["leak"] = f"{growth}, more than the leak threshold of {threshold} MB"
    pressure = sample.pressure or 0
    if pressure >= WARNING:
        word = "critical" if pressure >= CRITICAL else "warning"
        causes["pressure"] = f"the system's memory pressure is {pressure} ({word})"
    return replace(watch, level_bytes=level), causes


def climb(
    policy: Policy, watch: Watch, observation: MemoryObservation, causes: Mapping[str, str]
) -> tuple[Watch, dict[ActionKind, str]]:
    """Take the next rung of each trigger, or all its rungs if urgent; return the actions."""
    actions: dict[ActionKind, str] = {}
    if "blind" in causes:
        actions["clear_cache"] = causes["blind"]  # every step, to be safe
    urgent = {
        "danger": (highest_bytes(observation) or 0) >= policy.limit_bytes,
        "pressure": (observation.sample.pressure or 0) >= CRITICAL,
    }
    ladders = dict(watch.ladders)
    for trigger in (t for t in RUNGS if t in causes):
        now = ladders[trigger]
        rungs = RUNGS[trigger][now.taken :][: None if urgent.get(trigger) else 1]
        if rungs:
            ladders[trigger] = replace(now, taken=now.taken + len(rungs), idle=0)
        for kind in rungs:
            actions.setdefault(kind, causes[trigger])
    return replace(watch, ladders=ladders), actions


def exhausted(watch: Watch, causes: Mapping[str, str]) -> set[str]:
    """The triggers that are still active after all their cheap rungs."""
    return {t for t, rungs in RUNGS.items() if t in causes and watch.ladders[t].taken == len(rungs)}


def large_action(
    policy: Policy, watch: Watch, observation: MemoryObservation, causes: Mapping[str, str]
) -> MemoryAction | None:
    """A change of plan or a restart, if one is needed now and would help."""
    limit, stuck = policy.limit_bytes, exhausted(watch, causes)
    restart_left = "restart" not in watch.told
    if "leak" in causes and restart_left:
        ahead = (highest_bytes(observation) or 0) + LOOKAHEAD * leak_bytes(policy, watch.recent)
        if ahead >= limit or "danger" in stuck:
            forecast = f"{size_text(ahead)} in {LOOKAHEAD} steps"
            cause = f"{causes['leak']}: {forecast}, the limit is {size_text(limit)}"
            return MemoryAction(kind="restart", cause=cause)
    too_large = proof_of_size(policy, observation, causes, stuck)
    if too_large and observation.can_shrink:
        return MemoryAction(kind="smaller_plan", cause=too_large)
    grown = steady_growth_bytes(watch.window_medians)
    if "danger" in stuck and grown >= STEADY * limit and restart_left:
        return MemoryAction(
            kind="restart", cause=f"{causes['danger']}, after growing by {size_text(grown)}"
        )
    calm = not causes and watch.steps_with_headroom >= HEADROOM_STEPS
    if calm and observation.can_grow and "larger_plan" not in watch.told:
        cause = f"process stayed under {PLENTY:.0%} of the limit of {size_text(limit)}"
        return MemoryAction(
            kind="larger_plan", cause=f"{cause} for {counted(watch.steps_with_headroom, 'step')}"
        )
    return None


def proof_of_size(
    policy: Policy, observation: MemoryObservation, causes: Mapping[str, str], stuck: set[str]
) -> str:
    """Say why the plan is too large; empty if it is not. stuck: as `exhausted` returns."""
    limit, foreseen = policy.limit_bytes, observation.foreseen_bytes
    if foreseen > limit - headroom_bytes(limit):
        needed = f"longer rows are expected to need {size_text(foreseen)}"
        return f"{needed}, the limit is {size_text(limit)}"
    if "danger" in stuck:
        return causes["danger"]
    critical = (observation.sample.pressure or 0) >= CRITICAL
    return causes["pressure"] if critical and "pressure" in stuck else ""


def scheduled(policy: Policy, step: int) -> dict[ActionKind, str]:
    """The action that is scheduled for this step. A reload also clears the cache."""
    intervals: dict[ActionKind, int] = {
        "reload_lora": policy.reload_interval,
        "clear_cache": policy.clear_cache_every,
    }
    for kind, every in intervals.items():
        if every and step % every == 0:
            return {kind: f"every {counted(every, 'step')}" if every > 1 else "every step"}
    return {}


def leak_bytes(policy: Policy, recent: Sequence[int]) -> float:
    """Growth per step over `recent`, or 0.0 if it is below the threshold.

    The median slope of all pairs (Theil-Sen) ignores noise. New shapes make memory jump in many
    of the first steps; a leak does so in nearly every step.
    """
    for values, least, share in ((recent[-WINDOW:], LEAST, REGULAR), (recent, LONG, OFTEN)):
        if len(values) < least:
            continue
        pairs = combinations(enumerate(values), 2)
        slope = median((b - a) / (j - i) for (i, a), (j, b) in pairs)
        growing = sum(b - a > policy.leak_threshold_bytes / 4 for a, b in pairwise(values))
        if slope > policy.leak_threshold_bytes and growing >= share * (len(values) - 1):
            return slope
    return 0.0


def steady_growth_bytes(window_medians: Sequence[int]) -> float:
    """Growth over all windows if each grew by the median difference, which ignores jumps."""
    if len(window_medians) < LEAST_MEDIANS:
        return 0.0
    return median(b - a for a, b in pairwise(window_medians)) * (len(window_medians) - 1)


def plausible(gauge: int | None) -> int | None:
    """The value of a gauge, or None if it is 0: impossible while a model is loaded."""
    return gauge if gauge is not None and gauge > 0 else None


def process_bytes(sample: MemorySample, baseline_bytes: int = 0) -> int | None:
    """Memory of the process: the system's figure, but at least MLX's own."""
    live, cache = plausible(sample.active_bytes), sample.cache_bytes or 0
    process = plausible(sample.process_bytes)
    if process is not None:
        return max(process, (live or 0) + cache)
    live = live or plausible(sample.peak_bytes)
    return None if live is None else live + cache + baseline_bytes


def held_bytes(sample: MemorySample, baseline_bytes: int = 0) -> int | None:
    """Memory of the process without MLX's cache, which can be freed at any time."""
    held = process_bytes(sample, baseline_bytes)
    return None if held is None else held - (sample.cache_bytes or 0)


def highest_bytes(observation: MemoryObservation) -> int | None:
    """Peak memory of the process since the last boundary; None if it cannot be read."""
    now = process_bytes(observation.sample, observation.baseline_bytes)
    seen = plausible(observation.highest_process_bytes)
    return max((b for b in (now, seen) if b is not None), default=None)


def has_headroom(policy: Policy, observation: MemoryObservation) -> bool:
    """Return whether all gauges are plausible and show low memory use."""
    sample, highest = observation.sample, highest_bytes(observation)
    gauges = plausible(sample.process_bytes), plausible(observation.highest_process_bytes)
    if highest is None or None in gauges or sample.active_bytes == 0:
        return False
    return highest < PLENTY * policy.limit_bytes and (sample.pressure or 0) < WARNING


def gauge_notes(observation: MemoryObservation) -> dict[str, str]:
    """Notices about gauges that fail, by key."""
    sample, notes = observation.sample, {}
    if highest_bytes(observation) is None:
        notes["blind"] = "no gauge shows the memory of the process: clearing the cache every step"
    elif plausible(sample.process_bytes) is None:
        notes["process"] = (
            "the memory of the process cannot be read: using MLX's own count plus "
            f"{size_text(observation.baseline_bytes)} for the rest"
        )
    if sample.active_bytes == 0:
        notes["active"] = "MLX reports 0 bytes in use, which is impossible: ignoring that gauge"
    return notes
