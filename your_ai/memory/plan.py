"""Choose the fastest plan that fits into the limit, by the estimates. Pure.

Plans are tried in this order: fused; staged; staged with the states of the optimizer spilled to
disk; streamed; streamed with spilling; both again without reading ahead. Staged and streamed are
tried while blocks keep less and less for their backward pass. Each is tried with whole
micro-batches first, then with fewer rows; streamed ones with fewer and fewer blocks whose weights
stay in memory. The first that fits then keeps as much as fits.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product

from your_ai.config import TrainConfig, defaults
from your_ai.errors import UserError
from your_ai.gates.text import size_text
from your_ai.memory.buffers import allowed, most_held, too_many
from your_ai.memory.estimate import Estimate, estimate, read_alone_bytes, weights_bytes
from your_ai.memory.estimate_generation import wave_sizes
from your_ai.memory.estimate_kept import at_rung, highest, rung_of, step_cost
from your_ai.memory.limit import VARIES_BYTES, MemoryLimit, rounded_up, with_headroom
from your_ai.memory.memoized import memoized
from your_ai.memory.sample import in_gb
from your_ai.memory.step_time import step_seconds
from your_ai.memory.workload import NOTHING, UNLIMITED, Kept, Plan, Workload, whole_groups

# The order of plans by time, and those that no other beats in both memory and time. Pure


ALIKE = 1.05  # of plans whose predicted seconds differ by less, the smaller one is better


def fastest_first(found: list[Option]) -> list[Option]:
    """The options by their predicted seconds; of those that are about as fast, the smallest first.

    As they are, if no seconds are predicted.
    """
    known = [(option.seconds, option) for option in found if option.seconds is not None]
    if len(known) < len(found):
        return found
    groups: list[list[Option]] = []
    fastest = 0.0
    for seconds, option in sorted(known, key=lambda each: each[0]):
        if not groups or seconds > ALIKE * fastest:
            fastest = seconds
            groups.append([])
        groups[-1].append(option)
    return [o for group in groups for o in sorted(group, key=lambda each: each.needed_bytes)]


def front_of(found: Sequence[Option]) -> list[Option]:
    """The options that no other beats in both memory and time, the fastest first.

    Without predicted seconds, time is the arithmetic of a step.
    """
    front: list[Option] = []
    for option in sorted(found, key=lambda each: (each.needed_bytes, time_of(each))):
        if not front or time_of(option) < time_of(front[-1]):
            front.append(option)
    return front[::-1]


def time_of(option: Option) -> float:
    return option.cost if option.seconds is None else option.seconds


ENGINES = (("fused", False), ("staged", False), ("staged", True), ("streamed", False),
           ("streamed", True))  # fmt: skip
# (engine, spill, blocks ahead): the last plans read nothing ahead.
READING = (*((*each, 1) for each in ENGINES), *((*each, 0) for each in ENGINES[-2:]))
RESIDENT_LEVELS = 16  # numbers of blocks of a streamed plan that are tried to stay in memory
KEPT_SHARES = (1.0, 2 / 3, 1 / 2, 1 / 3, 0.0)  # of the highest rung of `estimate_kept.at_rung`
SCORING_COST = 1 / 3  # of a pass without gradients, relative to a step of the fused engine
GUESS_MARGIN = 0.12  # share of transient activations: a guess may be a tenth too low
MEASURED_MARGIN = 0.05  # the same of measured costs
FAR = 10  # nothing needs to be measured if this multiple of the guessed activations fits
SPARE_BYTES = 10_000_000  # that a resumed process may need more than it did before
NOTICEABLY = 0.97  # a smaller plan needs at most this share of the memory of the one before


class DoesNotFit(UserError):
    """No plan fits into the memory limit."""

    def __init__(self, message: str, least_bytes: int) -> None:
        super().__init__(message)
        self.least_bytes = least_bytes
        """The least limit that is accepted."""


@dataclass(frozen=True)
class Option:
    """A plan, with the estimate of its largest micro-batch."""

    plan: Plan
    estimate: Estimate
    cost: float
    """Arithmetic of a step, relative to the fused engine."""
    needed_bytes: int
    """The smallest limit under which it is chosen."""
    seconds: float | None = None
    """Predicted, of a step on average; None if they are not predicted."""


def with_margin(found: Estimate, margin: float = GUESS_MARGIN) -> int:
    """The limit that an estimate asks for: with a margin, and the room that the guard leaves."""
    process_bytes = found.process_bytes
    return max(int(process_bytes + margin * found.work_bytes), with_headroom(process_bytes))


@memoized
def options(workload: Workload) -> list[Option]:
    """All plans that the run allows, the fastest first."""
    longest, together = max(workload.lengths), workload.rows_together
    rows = [whole_groups(workload.batch_size, together)]
    while rows[-1] > together:
        rows.append(whole_groups(rows[-1] // 2, together))
    if together > 1:
        rows.append(1)
    found: list[Option] = []
    most_buffers = workload.process.most_buffers
    is_unlimited = most_buffers == UNLIMITED
    reading = [each for each in READING if allows(workload, *each)]
    every = [(*each, kept) for each in reading for kept in kept_choices(workload, *each)]
    for waves, (engine, spill, blocks_ahead, kept) in product(waves_of(workload), every):
        for count in rows:
            if count < together and engine == "fused" and workload.engine == "auto":
                continue  # staged is faster than this, and smaller
            if count < together and kept:
                continue  # scoring the texts first costs more than kept outputs save
            plan = Plan(engine, count * longest, spill, kept=kept, blocks_ahead=blocks_ahead)
            for wave, (stay, ahead) in product(waves, teacher_choices(workload)):
                # blocks whose weights stay in memory change no count of buffers
                of_wave = replace(plan, wave=wave, teacher_blocks=stay, teacher_ahead=ahead)
                if is_unlimited or buffers_of(workload, of_wave) <= allowed(most_buffers):
                    found += options_of(workload, of_wave)
    return fastest_first(timed(workload, found))


def teacher_choices(workload: Workload) -> list[tuple[int, int]]:
    """The numbers of blocks of a teacher that may stay in memory, and that may be read ahead: all
    stay in the first choice, where its weights are its own and every step needs them."""
    teacher = workload.teacher
    if teacher is None:
        return [(0, 1)]
    if teacher.facts is None or not teacher.again:
        return [(0, 1), (0, 0)]
    return [(teacher.facts.blocks, 1), (0, 1), (0, 0)]


def allows(workload: Workload, engine: str, spill: bool, blocks_ahead: int) -> bool:
    """Return whether a run may have plans of this engine that keep block inputs in files (`spill`)
    and read so many blocks ahead."""
    if engine == "streamed" and not workload.can_stream:
        return False
    if workload.whole and workload.engine != "streamed":
        return engine == "fused"
    if workload.engine != "auto" and (engine, spill) != (workload.engine, workload.spill):
        return False
    if workload.soft is not None and (engine == "staged" or spill):
        return False
    if not (blocks_ahead or adjusts_reading(workload)):
        return False
    return not workload.forward if spill else not workload.spill


def buffers_of(workload: Workload, plan: Plan) -> int:
    """MLX's buffers that the process holds at once under a plan, at most."""
    rows, longest = rows_of(workload, plan, max(workload.lengths)), max(workload.lengths)
    return most_held(workload, plan, rows, longest)


def not_predicted(workload: Workload) -> str:
    """Say why the seconds of its steps are not predicted; empty if they are."""
    if workload.costs is None:
        return "seconds are not predicted: nothing was measured here"
    if not workload.costs.is_complete:
        return "seconds are not predicted: not everything that was to be measured fitted"
    if workload.engine in ("auto", "fused") and not workload.costs.time.has("saved"):
        return "seconds are not predicted: a graph of some of this model's blocks is no model"
    return workload.steps.unpredicted


def timed(workload: Workload, found: list[Option]) -> list[Option]:
    """The options with their predicted seconds, if those are predicted."""
    if workload.forward or not_predicted(workload):
        return found
    return [
        replace(option, seconds=sum(seconds_of(workload, option.plan).values())) for option in found
    ]


def seconds_of(workload: Workload, plan: Plan) -> dict[str, float]:
    """The predicted seconds of a step under a plan by term, of a workload that is predicted."""
    assert workload.costs is not None
    scored = plan.rows(max(workload.lengths), workload.batch_size) < workload.rows_together
    rows_at = partial(rows_of, workload, plan)
    return step_seconds(workload, workload.costs, plan, rows_at, scored or workload.scores)


def front_points(workload: Workload) -> list[list[float]]:
    """The bytes and the predicted seconds of each option of the front; none without prediction."""
    if not_predicted(workload):
        return []
    front = front_of(options(workload))
    return [[o.needed_bytes, round(o.seconds, 4)] for o in front if o.seconds is not None]


def option_of(workload: Workload, plan: Plan, update_bytes: int) -> Option:
    """update_bytes: as returned by `bytes_to_update`."""
    cost = 1.0 if workload.forward else step_cost(workload.facts, workload.training, plan)
    if rows_of(workload, plan, max(workload.lengths)) < workload.rows_together:
        cost += SCORING_COST
    most = largest(workload, plan)
    needed_bytes = with_margin(most, margin_of(workload, plan))
    return Option(plan, most, cost, max(workload.before_bytes, update_bytes, needed_bytes))


def may_keep(workload: Workload, plan: Plan) -> bool:
    """Return whether blocks may keep anything for their backward pass under a plan."""
    whole = plan.engine == "fused" or plan.spill or not plan.blocks_ahead
    if workload.costs is not None and not workload.costs.memory.has("kept_forward"):
        return False  # it was not measured, as it may not fit, or nobody knows what they keep
    return not (whole or workload.forward or workload.soft is not None)


def kept_by_some(workload: Workload, plan: Plan) -> Kept:
    """Something that only one block keeps, where that is possible: shorter rows may keep more than
    the plan says, so that a shape has graphs of two kinds."""
    return Kept(attention=1) if may_keep(workload, plan) else NOTHING


def kept_choices(workload: Workload, engine: str, spill: bool, blocks_ahead: int) -> list[Kept]:
    """The choices of what blocks keep under an engine, the most first: few of many possible."""
    if not may_keep(workload, Plan(engine, 0, spill, blocks_ahead=blocks_ahead)):
        return [NOTHING]
    blocks = workload.training.reach(workload.facts)
    rungs = (math.ceil(share * highest(blocks)) for share in KEPT_SHARES)
    return list(dict.fromkeys(at_rung(blocks, rung) for rung in rungs))


def with_more_kept(workload: Workload, option: Option, fits: Callable[[Option], bool]) -> Option:
    """The option, which fits, with as much kept as still fits."""
    plan = option.plan
    if not may_keep(workload, plan):
        return option
    if rows_of(workload, plan, max(workload.lengths)) < workload.rows_together:
        return option

    def at(rung: int) -> Option:
        more = replace(plan, kept=at_rung(workload.training.reach(workload.facts), rung))
        return option_of(workload, more, bytes_to_update(workload, more))

    low, high = rung_of(plan.kept), highest(workload.training.reach(workload.facts))
    best = option
    while low < high:  # all up to `low` fit, and none above `high`
        middle = (low + high + 1) // 2
        tried = at(middle)
        if fits(tried):
            best, low = tried, middle
        else:
            high = middle - 1
    return timed(workload, [best])[0]


def options_of(workload: Workload, plan: Plan) -> list[Option]:
    """The option of a plan; before it, if it is streamed, with blocks whose weights stay in memory,
    the most first. Those add the same bytes to every phase of a step, as long as each phase reads
    the same: if all trained blocks stay, the backward pass reads none.
    """
    found = [option_of(workload, plan, bytes_to_update(workload, plan))]
    if plan.engine != "streamed" or not plan.blocks_ahead or not adjusts_reading(workload):
        return found
    base, counted, known = found[0], 0, 0
    for resident, more in reversed(resident_bytes(workload)):
        wanted = replace(plan, resident=resident)
        reads = read_alone_bytes(workload.facts, workload.training, wanted)
        if reads != known:
            base, counted = option_of(workload, wanted, bytes_to_update(workload, wanted)), more
            known = reads
        added = more - counted
        larger = base.estimate.with_more("weights", added)
        needed_bytes = max(base.needed_bytes + added, with_headroom(larger.process_bytes))
        found.append(Option(wanted, larger, base.cost, needed_bytes))
    return found[::-1]


@memoized
def resident_bytes(workload: Workload) -> list[tuple[int, int]]:
    """The numbers of blocks of a streamed plan that may keep their weights in memory, the most
    first, and the bytes that each adds."""
    facts = workload.facts
    sized = partial(weights_bytes, facts, "streamed")
    levels = (facts.blocks * level // RESIDENT_LEVELS for level in range(RESIDENT_LEVELS))
    return [(n, sized(resident=n) - sized()) for n in sorted(set(levels) - {0}, reverse=True)]


def adjusts_reading(workload: Workload) -> bool:
    """Return whether a streamed plan may keep the weights of some blocks, or read none ahead."""
    return not workload.forward and workload.soft is None


def margin_of(workload: Workload, plan: Plan) -> float:
    """The share of the estimated work of a plan by which it may be too low."""
    costs = workload.costs
    if costs is None or not costs.is_complete:
        return GUESS_MARGIN
    name = ("evaluated", "forward") if workload.forward else ("saved", "backward")
    is_measured = costs.memory.has(name[plan.engine != "fused"])
    has_head = workload.score_head or costs.memory.heads
    return MEASURED_MARGIN if is_measured and has_head else GUESS_MARGIN


def is_far(workload: Workload, option: Option, limit_bytes: int) -> bool:
    """Return whether a plan fits however wrong a guess may be, so that nothing is measured."""
    found = option.estimate
    return found.process_bytes + (FAR - 1) * found.work_bytes <= limit_bytes


def bytes_to_update(workload: Workload, plan: Plan) -> int:
    """The bytes, with the margin, of a step beside the generation of its completions, if it has
    any: generating may need more without a margin, and less with it.
    """
    if workload.rollouts is None:
        return 0
    updating = replace(workload, rollouts=None)
    return with_margin(largest(updating, plan), margin_of(workload, plan))


def waves_of(workload: Workload) -> list[list[int]]:
    """The numbers of completions that may be generated together: larger waves, and such that are
    too small to be fast, which are only used if no plan fits otherwise."""
    return [[0]] if workload.rollouts is None else wave_sizes(workload.rollouts.rows)


def rows_of(workload: Workload, plan: Plan, tokens: int) -> int:
    """Rows of `tokens` tokens in a micro-batch; fewer than a group only if it does not fit."""
    return whole_groups(plan.rows(tokens, workload.batch_size), workload.rows_together)


def largest(workload: Workload, plan: Plan) -> Estimate:
    """The estimate of the bucket that needs the most memory under `plan`."""
    found = []
    for tokens in workload.lengths:
        rows = rows_of(workload, plan, tokens)
        found.append(estimate_rows(workload, plan, rows, tokens))
    return max(found, key=with_margin)


def estimate_rows(workload: Workload, plan: Plan, rows: int, tokens: int) -> Estimate:
    """The estimate of a micro-batch."""
    micro_batches = -(-workload.rows_per_step // rows)
    return estimate(workload, plan, rows, tokens, micro_batches=micro_batches)


def fastest(workload: Workload, fits: Callable[[Option], bool]) -> Option | None:
    """The fastest option that fits, with as much kept as fits; None if none does."""
    found = next((option for option in options(workload) if fits(option)), None)
    return None if found is None else with_more_kept(workload, found, fits)


@dataclass(frozen=True)
class Choice:
    """The chosen option, and its neighbors that `your_ai plan` shows."""

    option: Option
    level: int
    """The number of faster options that fit but were skipped."""
    smaller: Option | None
    """The next option that needs noticeably less memory."""
    larger: Option | None
    """The next option that needs more memory."""


@dataclass(frozen=True)
class Budget:
    """The limit of a process, its workload, and the plan that fits."""

    limit: MemoryLimit
    workload: Workload
    choice: Choice
    costs_key: tuple[str, ...] = ()
    """What the costs of the workload depend on, as text."""
    kept: bool = False
    """Whether the run continues under the plan it had before."""

    @property
    def graphs_room_bytes(self) -> int:
        """Room for compiled graphs: those of one shape, plus a quarter of the unused limit."""
        option = self.choice.option
        left = max(0, self.limit.limit_bytes - option.needed_bytes)
        return option.estimate.components["graphs"] + left // 4


def with_adapters(workload: Workload, sizes: Iterable[tuple[int, int]]) -> Iterator[Workload]:
    """The workload with adapters of each (rank, blocks)."""
    for rank, blocks in sizes:
        yield replace(workload, training=replace(workload.training, rank=rank, blocks=blocks))


def largest_that_fits(
    config: TrainConfig, workload: Workload, budget_with: Callable[[Workload], Budget]
) -> Budget:
    """The budget with the largest adapters that fit. Raises DoesNotFit.

    Where larger adapters were measured and smaller ones were not, the larger may need less.
    """
    refusals = []
    for each in with_adapters(workload, defaults.adapters(config, workload.facts.blocks)):
        try:
            return budget_with(each)
        except DoesNotFit as refusal:
            refusals.append(refusal)
    raise min(reversed(refusals), key=lambda refusal: refusal.least_bytes)


def choose(
    workload: Workload, limit_bytes: int, level: int = 0, kept: Plan | None = None
) -> Choice:
    """The fastest option that fits into the limit, or the one `level` steps smaller.

    level: if there are fewer smaller options, the smallest is chosen.
    kept: the plan that the run had at this level. It is chosen again if it fits without its
        margin, so that a process that uses a little more memory when it resumes splits batches
        in the same way.

    Raises DoesNotFit if nothing fits.
    """
    every = options(workload)
    if not every:
        raise no_option(workload)
    if kept is not None and (again := chosen_again(workload, every, kept, limit_bytes, level)):
        return again
    fitting = fitting_options(workload, every, limit_bytes)
    place = every.index(fitting[0])
    first = with_more_kept(workload, fitting[0], lambda option: option.needed_bytes <= limit_bytes)
    ladder = descending([first, *every[place:]])
    level = min(level, len(ladder) - 1)
    above = [o for o in every[:place] if o.needed_bytes > first.needed_bytes]
    larger = ladder[level - 1] if level else (above[-1] if above else None)
    smaller = ladder[level + 1] if level + 1 < len(ladder) else None
    return Choice(ladder[level], level, smaller, larger)


def no_option(workload: Workload) -> UserError:
    """The error if a workload has no plan, whatever the limit."""
    process = replace(workload.process, most_buffers=UNLIMITED)
    without = replace(workload, process=process)
    if found := [buffers_of(workload, option.plan) for option in options(without)]:
        return DoesNotFit(too_many(workload, min(found)), sys.maxsize)
    return UserError(
        f"--plan {workload.engine}: this model's weights are converted on load, so they "
        "cannot be streamed; convert it with `mlx_lm.convert` first, or use --plan staged"
    )


def fitting_options(workload: Workload, every: list[Option], limit_bytes: int) -> list[Option]:
    """Those that fit into the limit; at least one. Raises DoesNotFit."""
    fitting = [option for option in every if option.needed_bytes <= limit_bytes]
    if not fitting:
        least = min(every, key=lambda option: option.needed_bytes)
        raise DoesNotFit(refusal(workload, least, limit_bytes), least.needed_bytes)
    return fitting


def chosen_again(
    workload: Workload, every: list[Option], kept: Plan, limit_bytes: int, level: int
) -> Choice | None:
    """The plan that the run had, if it fits without its margin."""
    spare = 0 if workload.costs is None else SPARE_BYTES + VARIES_BYTES
    tried = with_plan(workload, every, kept)
    for index, option in enumerate(tried):
        if option.plan == kept and option.estimate.process_bytes - spare <= limit_bytes:
            above = [o for o in tried[:index] if o.needed_bytes > option.needed_bytes]
            ladder = descending(tried[index:])
            smaller = ladder[1] if len(ladder) > 1 else None
            return Choice(option, level, smaller, above[-1] if above else None)
    return None


def with_plan(workload: Workload, every: list[Option], plan: Plan) -> list[Option]:
    """These options, and that of `plan` in its place if it differs from one in what is kept."""
    if any(option.plan == plan for option in every):
        return every
    alike = [i for i, o in enumerate(every) if replace(o.plan, kept=plan.kept) == plan]
    if not alike or max(plan.kept) > workload.training.reach(workload.facts):
        return every
    (own,) = timed(workload, [option_of(workload, plan, bytes_to_update(workload, plan))])
    place = next((i for i in alike if every[i].needed_bytes < own.needed_bytes), alike[-1] + 1)
    return [*every[:place], own, *every[place:]]


def descending(every: Sequence[Option]) -> list[Option]:
    """The first option, then each that needs noticeably less memory than all before."""
    ladder = [every[0]]
    for option in every[1:]:
        if option.needed_bytes <= NOTICEABLY * ladder[-1].needed_bytes:
            ladder.append(option)
    return ladder


def refusal(workload: Workload, least: Option, limit_bytes: int) -> str:
    """The error if nothing fits; least: the option that needs least memory."""
    option, limit = workload.limit_option, in_gb(limit_bytes)
    sizes = workload.rollouts if workload.rollouts and not workload.rollouts.converses else None
    needed = f"at least {in_gb(rounded_up(least.needed_bytes))} is needed"
    parts = sorted(least.estimate.components.items(), key=lambda pair: -pair[1])[:3]
    largest = ", ".join(f"{name} {size_text(size)}" for name, size in parts if size >= 5_000_000)
    if workload.forward:
        shorter = f"shorten the rows (now up to {max(workload.lengths)} tokens)"
        if sizes is not None:
            shorter += f", or lower --max-tokens (now up to {sizes.new_tokens})"
        return (
            f"{option}: evaluating does not fit into {limit}; {needed} ({largest}); raise the "
            f"limit, or {shorter}"
        )
    if workload.before_bytes == least.needed_bytes:
        return (
            f"{option}: quantizing the model does not fit into {limit}; {needed}; raise the "
            "limit, or close other programs"
        )
    advice = [f"shorten the rows (--max-seq-length, now up to {max(workload.lengths)} tokens)"]
    if sizes is not None:
        advice = [f"lower --max-new-tokens (now {sizes.new_tokens})"]
    if workload.engine != "auto":
        advice.insert(0, "use --plan auto")
    if not workload.given_adapter and (workload.training.blocks > 1 or workload.training.rank > 8):
        advice.append("adapt less (--lora-rank, --lora-layers, --lora-targets)")
    if not workload.facts.quantized:
        advice.append("use a 4-bit model")
    ways = ", or ".join(advice)
    return f"{option}: nothing fits into {limit}; {needed} ({largest}); raise the limit, or {ways}"


# The longest row that fits into a memory limit, by the planner alone. Pure


BUDGETS_GB = (8, 16, 24, 32, 64)  # that are shown if no limit is given
STEP = 256  # tokens; lengths are multiples of it
MOST = 1 << 20  # tokens that are tried


@dataclass(frozen=True)
class LongestRow:
    """The longest row that fits into a limit."""

    limit_bytes: int
    tokens: int
    """A multiple of STEP; 0 if not even one STEP fits."""
    choice: Choice | None
    """The plan for rows of this length; None if none fits."""

    @property
    def is_most(self) -> bool:
        """True if longer rows, which were not tried, may fit as well."""
        return self.tokens == MOST


def longest_rows(workload: Workload, limits_bytes: Iterable[int]) -> Iterator[LongestRow]:
    """The longest row with which a run fits into each limit; one row, or one group, at a time.

    workload: of the run, whose lengths do not matter.
    """

    def with_rows_of(tokens: int) -> Workload:
        return replace(workload, lengths=(tokens,), batch_size=workload.rows_together)

    @cache
    def least_bytes(tokens: int) -> int:
        found = options(with_rows_of(tokens))  # none if the row needs too many buffers
        return min((option.needed_bytes for option in found), default=sys.maxsize)

    def fits(limit_bytes: int, tokens: int) -> bool:
        return least_bytes(tokens) <= limit_bytes

    for limit_bytes in limits_bytes:
        tokens = longest_of(partial(fits, limit_bytes))
        choice = choose(with_rows_of(tokens), limit_bytes) if tokens else None
        yield LongestRow(limit_bytes, tokens, choice)


def longest_of(fits: Callable[[int], bool]) -> int:
    """The largest multiple of STEP up to MOST that fits, 0 if none does.

    Memory falls at the length from which rows are tiled, so every doubling is tried.
    """
    doubled = [STEP << i for i in range((MOST // STEP).bit_length())]
    best = max(filter(fits, doubled), default=0)
    above = min(2 * best, MOST + STEP)
    while above - best > STEP:
        middle = (best + above) // (2 * STEP) * STEP
        best, above = (middle, above) if fits(middle) else (best, middle)
    return best
