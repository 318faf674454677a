"""What to do about memory at the boundary of two steps: pure policy, numbers in, actions out.

The ladder, cheapest first: clear_cache, drop_compiled, reload_lora; then what costs speed or
time, smaller_plan and restart. Each trigger climbs by itself, one rung a decision while it
lasts, or all the cheap ones at once where it is urgent. A trigger that took no rung for a
while begins at the bottom again, after twice as long each time: what does not help is not
tried for ever.

- near: the process reached `reload_at` of the limit. The cheap rungs; what it holds after
  them is what the plan needs, and counts again only when it is clearly more.
- danger: it reached DANGER of the limit; at the limit it is urgent. The cheap rungs, then a
  smaller plan; without one a restart, but only where memory grew steadily. A peak that does
  not grow comes back after a restart too: the user is told, once.
- leak: it grows by more a step than `leak_threshold_bytes`. The cheap rungs; where the limit
  is a few steps away a restart at once, since a smaller plan mends no leak.
- pressure: the system is short of memory. Warning: clear_cache, then reload_lora. Critical:
  both at once, then a smaller plan. Again only if it lasts.

Besides: clear_cache and reload_lora every so many steps, and a larger plan that was given up
before, once there has been plenty of memory for long. Under a new plan the caller goes on
with the Watch that `acted` gives: a new one, which repeats no notice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise
from statistics import median
from typing import Literal, get_args

from your_ai.config import TrainConfig
from your_ai.memory.sample import MemorySample, in_gb

ActionKind = Literal[
    "clear_cache", "drop_compiled", "reload_lora", "smaller_plan", "restart", "larger_plan"
]
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)
CHEAP, LARGE = KINDS[:3], KINDS[3:]  # a decision has one large action at most, its last
RUNGS: dict[str, tuple[ActionKind, ...]] = {
    "danger": CHEAP,
    "leak": CHEAP,
    "pressure": ("clear_cache", "reload_lora"),
    "near": CHEAP,
}
MB, GB = 10**6, 10**9
DANGER = 0.92  # share of the limit
NOTICEABLE = 0.05  # share of the limit by which a plan outgrows what it was seen to need
PATIENCE = 20  # decisions without a rung after which a trigger begins at the bottom again
PRESSURE_PATIENCE = 50  # the same for pressure, and always the same: it is not of our making
WINDOW, LEAST = 10, 6  # boundaries over which a leak is looked for, at most and at least,
REGULAR = 0.85  # share of the steps between them that must grow, so that new shapes are none;
LONG, OFTEN = 20, 0.5  # the same where noise hides that
LOOKAHEAD = 5  # steps: a leak that reaches the limit in so many needs a restart now
WINDOW_MEDIANS, LEAST_MEDIANS = 10, 4  # windows over which steady growth is looked for
STEADY = 0.01  # share of the limit that steady growth comes to over them
PLENTY = 0.55  # share of the limit
HEADROOM_STEPS = 50
WARNING, CRITICAL = 2, 4  # pressure


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Settings, resolved: as TrainConfig has them, 0 = never."""

    limit_bytes: int
    reload_interval: int = 0
    reload_at: float = 0.70
    clear_cache_every: int = 10
    leak_threshold_bytes: int = 50 * MB
    leak_warmup: int = 5


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What is known after step `step` (from 1).

    sample: now, between two steps; highest_process_bytes: the most that a thread saw since
    the last boundary; can_shrink: a smaller plan exists; can_grow: a larger one that was
    given up; baseline_bytes: what the process should hold outside MLX, for when its gauge
    fails; kept_bytes: what it keeps on purpose and more of with each step, which is no leak
    (hidden states of the prefix cache).
    """

    step: int
    sample: MemorySample
    highest_process_bytes: int | None
    can_shrink: bool
    can_grow: bool
    baseline_bytes: int = 0
    kept_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryAction:
    """kind: what to do; cause: why, one line in words with figures."""

    kind: ActionKind
    cause: str


@dataclass(frozen=True, kw_only=True)
class LadderState:
    """Where a trigger is on the ladder: rungs taken, and decisions since the last of them."""

    taken: int = 0
    idle: int = 0
    patience: int = PATIENCE


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the policy remembers between steps.

    level_bytes: what the plan needs, learned when the cheap rungs did not help; recent: held
    at the last boundaries; window_medians: the medians of windows of them;
    steps_with_headroom: decisions in a row with plenty of memory; told: what is said or asked
    for only once.
    """

    decisions: int = 0
    ladders: Mapping[str, LadderState] = field(
        default_factory=lambda: dict.fromkeys(RUNGS, LadderState())
    )
    level_bytes: int | None = None
    recent: tuple[int, ...] = ()
    window_medians: tuple[int, ...] = ()
    steps_with_headroom: int = 0
    told: frozenset[str] = frozenset()


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
    policy: Policy, watch: Watch, observation: Observation
) -> tuple[Watch, list[MemoryAction], list[str]]:
    """What to remember, the actions in the order to do them, and what to tell the user."""
    watch = remember(policy, watch, observation)
    watch, causes = triggers(policy, watch, observation)
    due = scheduled(policy, observation.step)
    large = large_action(policy, watch, observation, causes)
    notes = gauge_notes(observation)
    if "leak" in causes:
        notes["leak"] = f"{causes['leak']}: freeing what can be freed"
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
    """The watch after an action was carried out; a new one after a large action.

    What a cheap action freed must not hide a leak, nor what it brought back look like one:
    the boundaries before it move along. If it freed most of what had grown, they are
    forgotten. One that freed much may be taken again without more patience.
    """
    if action.kind in LARGE:
        return Watch(told=watch.told)
    held = held_bytes(before), held_bytes(after)
    if None in held:
        return watch
    if process_bytes(before) - process_bytes(after) >= NOTICEABLE * policy.limit_bytes:
        ladders = {trigger: replace(c, patience=PATIENCE) for trigger, c in watch.ladders.items()}
        watch = replace(watch, ladders=ladders)
    freed, grown = held[0] - held[1], watch.recent[-1] - watch.recent[0] if watch.recent else 0
    mended = 0 < grown <= 2 * freed
    return replace(watch, recent=() if mended else tuple(b - freed for b in watch.recent))


def remember(policy: Policy, watch: Watch, observation: Observation) -> Watch:
    """The watch one decision later."""
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
    policy: Policy, watch: Watch, observation: Observation
) -> tuple[Watch, dict[str, str]]:
    """The triggers that are there, each with its cause in words, and the plan's level."""
    sample, limit = observation.sample, policy.limit_bytes
    causes: dict[str, str] = {}
    highest, level = highest_bytes(observation), watch.level_bytes
    if highest is None:
        causes["blind"] = "no gauge shows what the process holds"
    elif highest >= min(DANGER, policy.reload_at) * limit:
        near = highest < DANGER * limit
        in_step = highest != process_bytes(sample, observation.baseline_bytes)
        cause = (
            f"process {in_gb(highest)}{' within the step' if in_step else ''} is over "
            f"{policy.reload_at if near else DANGER:.0%} of the limit of {in_gb(limit)}"
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
        causes["leak"] = f"{growth}, over the {threshold} MB that count as a leak"
    if (sample.pressure or 0) >= WARNING:
        word = "critical" if sample.pressure >= CRITICAL else "a warning"
        causes["pressure"] = f"the system's memory pressure is {sample.pressure}, {word}"
    return replace(watch, level_bytes=level), causes


def climb(
    policy: Policy, watch: Watch, observation: Observation, causes: Mapping[str, str]
) -> tuple[Watch, dict[ActionKind, str]]:
    """The next rung of each trigger, all of them where it is urgent, with the cause."""
    actions: dict[ActionKind, str] = {}
    if "blind" in causes:
        actions["clear_cache"] = causes["blind"]  # at every step, to be safe
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
    """The triggers that are still there after all their cheap rungs."""
    return {t for t, rungs in RUNGS.items() if t in causes and watch.ladders[t].taken == len(rungs)}


def large_action(
    policy: Policy, watch: Watch, observation: Observation, causes: Mapping[str, str]
) -> MemoryAction | None:
    """A change of plan or a restart, where it is time for one and it helps."""
    limit, stuck = policy.limit_bytes, exhausted(watch, causes)
    restart_left = "restart" not in watch.told
    if "leak" in causes and restart_left:
        ahead = highest_bytes(observation) + LOOKAHEAD * leak_bytes(policy, watch.recent)
        if ahead >= limit or "danger" in stuck:
            forecast = f"{in_gb(ahead)} in {LOOKAHEAD} steps"
            cause = f"{causes['leak']}: {forecast}, the limit is {in_gb(limit)}"
            return MemoryAction(kind="restart", cause=cause)
    if "danger" in stuck and observation.can_shrink:
        return MemoryAction(kind="smaller_plan", cause=causes["danger"])
    grown = steady_growth_bytes(watch.window_medians)
    if "danger" in stuck and grown >= STEADY * limit and restart_left:
        return MemoryAction(
            kind="restart", cause=f"{causes['danger']}, having grown by {in_gb(grown)}"
        )
    critical = (observation.sample.pressure or 0) >= CRITICAL
    if "pressure" in stuck and critical and observation.can_shrink:
        return MemoryAction(kind="smaller_plan", cause=causes["pressure"])
    calm = not causes and watch.steps_with_headroom >= HEADROOM_STEPS
    if calm and observation.can_grow and "larger_plan" not in watch.told:
        cause = f"process stayed under {PLENTY:.0%} of the limit of {in_gb(limit)}"
        return MemoryAction(
            kind="larger_plan", cause=f"{cause} for {watch.steps_with_headroom} steps"
        )
    return None


def scheduled(policy: Policy, step: int) -> dict[ActionKind, str]:
    """What is due at this step whatever the memory; a reload clears the cache as well."""
    for kind, every in (
        ("reload_lora", policy.reload_interval),
        ("clear_cache", policy.clear_cache_every),
    ):
        if every and step % every == 0:
            return {kind: f"every {every} steps"}
    return {}


def leak_bytes(policy: Policy, recent: Sequence[int]) -> float:
    """Growth a step over `recent`, or 0.0 where it is under the threshold.

    The median slope of all pairs (Theil-Sen) is deaf to noise. New shapes let memory jump
    in many of the first steps, a leak in nearly every one.
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
    """Growth over the windows, were each step between them the median one: a jump is none."""
    if len(window_medians) < LEAST_MEDIANS:
        return 0.0
    return median(b - a for a, b in pairwise(window_medians)) * (len(window_medians) - 1)


def believed(gauge: int | None) -> int | None:
    """A gauge that cannot be 0 while a model is loaded: if it is, it lies."""
    return gauge if gauge is not None and gauge > 0 else None


def process_bytes(sample: MemorySample, baseline_bytes: int = 0) -> int | None:
    """What the process holds: the system's figure, and never less than MLX's own."""
    live, cache = believed(sample.active_bytes), sample.cache_bytes or 0
    process = believed(sample.process_bytes)
    if process is not None:
        return max(process, (live or 0) + cache)
    live = live or believed(sample.peak_bytes)
    return None if live is None else live + cache + baseline_bytes


def held_bytes(sample: MemorySample, baseline_bytes: int = 0) -> int | None:
    """What the process holds beside the cache, which can be had back at any time."""
    held = process_bytes(sample, baseline_bytes)
    return None if held is None else held - (sample.cache_bytes or 0)


def highest_bytes(observation: Observation) -> int | None:
    """The most that the process held since the last boundary, as far as is known."""
    now = process_bytes(observation.sample, observation.baseline_bytes)
    seen = believed(observation.highest_process_bytes)
    return max((b for b in (now, seen) if b is not None), default=None)


def has_headroom(policy: Policy, observation: Observation) -> bool:
    """Every gauge can be believed and shows that there is room."""
    sample, seen = observation.sample, believed(observation.highest_process_bytes)
    if None in (believed(sample.process_bytes), seen) or sample.active_bytes == 0:
        return False
    low = highest_bytes(observation) < PLENTY * policy.limit_bytes
    return low and (sample.pressure or 0) < WARNING


def gauge_notes(observation: Observation) -> dict[str, str]:
    """What to tell about gauges that fail, by key."""
    sample, notes = observation.sample, {}
    if highest_bytes(observation) is None:
        notes["blind"] = "no gauge shows what the process holds: clearing the cache every step"
    elif believed(sample.process_bytes) is None:
        notes["process"] = (
            "the memory of the process cannot be read: going by MLX's own count and "
            f"{in_gb(observation.baseline_bytes)} for the rest"
        )
    if sample.active_bytes == 0:
        notes["active"] = "MLX counts 0 bytes in use, which cannot be: not going by that gauge"
    return notes
