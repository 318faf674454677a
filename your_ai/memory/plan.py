"""Limit and estimates -> the fastest plan that fits. Pure.

Plans are tried from the fastest on: fused, staged, staged with spilled block inputs, streamed,
streamed and spilled; each with whole micro-batches first, then with fewer and fewer rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from your_ai.errors import UserError
from your_ai.memory.estimate import Estimate, Plan, Training, estimate, step_cost
from your_ai.memory.facts import ModelFacts, vocabulary_held
from your_ai.memory.sample import in_gb

ENGINES = (("fused", False), ("staged", False), ("staged", True), ("streamed", False),
           ("streamed", True))  # fmt: skip
WORK_MARGIN = 0.12  # of what comes and goes: an estimate may be a tenth too low
NOTICEABLY = 0.97  # a smaller plan needs at most this share of the one before
VARIES_BYTES = 2_000_000  # of one and the same process, from one start to the next


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a run asks for.

    lengths: T of every bucket; batch_size: rows of a micro-batch as the user wants them;
    rows_per_step: of all micro-batches; engine: auto, or the only one allowed; spill: block
    inputs must be spilled; can_stream: the files hold the weights as the model has them;
    python_bytes: what the process holds without a model; prefix_bytes: of a cache in memory;
    answer_tokens: of the longest sample prompt with its answer, 0 where there are none;
    forward: rows are evaluated, and nothing is trained; sliced: as `estimate` has it.
    """

    facts: ModelFacts
    training: Training
    lengths: tuple[int, ...]
    batch_size: int
    rows_per_step: int
    engine: str = "auto"
    spill: bool = False
    can_stream: bool = True
    python_bytes: int = 0
    prefix_bytes: int = 0
    answer_tokens: int = 0
    forward: bool = False
    sliced: bool = False


@dataclass(frozen=True)
class Option:
    """A plan with the estimate of its largest micro-batch. cost: arithmetic over fused's."""

    plan: Plan
    estimate: Estimate
    cost: float

    @property
    def needed_bytes(self) -> int:
        """The least limit under which it is chosen."""
        return with_margin(self.estimate)


def with_margin(found: Estimate) -> int:
    work = found.work_bytes + found.components["block inputs"]
    return int(found.process_bytes + WORK_MARGIN * work)


def options(demand: Demand) -> list[Option]:
    """Every plan that the run allows, the fastest first."""
    longest, batch = max(demand.lengths), demand.batch_size
    rows = [batch]
    while rows[-1] > 1:
        rows.append(rows[-1] // 2)
    found = []
    for engine, spill in ENGINES:
        wanted = engine == demand.engine or demand.engine == "auto"
        if not wanted or (engine == "streamed" and not demand.can_stream):
            continue
        if demand.engine != "auto" and spill != demand.spill:
            continue
        if (demand.spill and not spill) or (demand.forward and spill):
            continue
        for count in rows:
            plan = Plan(engine, count * longest, spill)
            cost = 1.0 if demand.forward else step_cost(demand.facts, demand.training, plan)
            found.append(Option(plan, largest(demand, plan), cost))
    return found


def largest(demand: Demand, plan: Plan) -> Estimate:
    """The estimate of the bucket that needs the most under `plan`."""
    found = []
    for tokens in demand.lengths:
        rows = plan.rows(tokens, demand.batch_size)
        found.append(of_rows(demand, plan, rows, tokens))
    return max(found, key=with_margin)


def of_rows(demand: Demand, plan: Plan, rows: int, tokens: int) -> Estimate:
    return estimate(
        demand.facts if demand.can_stream else vocabulary_held(demand.facts),
        demand.training,
        plan,
        rows,
        tokens,
        micro_batches=-(-demand.rows_per_step // rows),
        python_bytes=demand.python_bytes,
        prefix_bytes=demand.prefix_bytes,
        answer_tokens=demand.answer_tokens,
        forward=demand.forward,
        sliced=demand.sliced,
    )


@dataclass(frozen=True)
class Choice:
    """The option in force, and those beside it that `your_ai plan` shows.

    level: how many options that fit were passed over; smaller, larger: what would need
    noticeably less or more, None where there is nothing.
    """

    option: Option
    level: int
    smaller: Option | None
    larger: Option | None


def choose(demand: Demand, limit_bytes: int, level: int = 0, kept: Plan | None = None) -> Choice:
    """The fastest option that fits into the limit, or the one `level` steps smaller.

    The smallest where there are not so many. kept: the plan that the run had at this level,
    which it goes on under where that fits without its margin: so a process that holds a
    little more when it resumes splits no batch in another way. Raises UserError where
    nothing fits.
    """
    every = options(demand)
    if not every:
        raise UserError(
            f"--plan {demand.engine}: this model's weights are changed when it is loaded, so that "
            "its files do not have them; write it with `mlx_lm.convert` first, or use --plan staged"
        )
    for index, option in enumerate(every):
        if option.plan == kept and option.estimate.process_bytes <= limit_bytes:
            above = [o for o in every[:index] if o.needed_bytes > option.needed_bytes]
            ladder = descending(every[index:])
            smaller = ladder[1] if len(ladder) > 1 else None
            return Choice(option, level, smaller, above[-1] if above else None)
    fitting = [option for option in every if option.needed_bytes <= limit_bytes]
    if not fitting:
        raise UserError(refusal(demand, every, limit_bytes))
    ladder = descending(every[every.index(fitting[0]) :])
    level = min(level, len(ladder) - 1)
    above = [o for o in every[: every.index(ladder[level])] if o not in ladder[:level]]
    larger = ladder[level - 1] if level else (above[-1] if above else None)
    smaller = ladder[level + 1] if level + 1 < len(ladder) else None
    return Choice(ladder[level], level, smaller, larger)


def descending(every: Sequence[Option]) -> list[Option]:
    """The first option, and after it each that needs noticeably less than all before."""
    ladder = [every[0]]
    for option in every[1:]:
        if option.needed_bytes <= NOTICEABLY * ladder[-1].needed_bytes:
            ladder.append(option)
    return ladder


def refusal(demand: Demand, every: list[Option], limit_bytes: int) -> str:
    least = min(every, key=lambda option: option.needed_bytes)
    parts = sorted(least.estimate.components.items(), key=lambda pair: -pair[1])
    largest = ", ".join(f"{name} {in_gb(size)}" for name, size in parts[:3] if size >= 5_000_000)
    if demand.forward:
        return (
            f"--max-memory: evaluating does not fit into {in_gb(limit_bytes)}; the least that "
            f"would do is {in_gb(rounded_up(least.needed_bytes))} ({largest}); give that, or "
            f"shorter rows than those of up to {max(demand.lengths)} tokens"
        )
    advice = [f"shorten the rows (--max-seq-length, now up to {max(demand.lengths)} tokens)"]
    if demand.engine != "auto":
        advice.insert(0, "use --plan auto")
    if demand.training.blocks > 1 or demand.training.rank > 8:
        advice.append("adapt less (--lora-rank, --lora-layers, --lora-targets)")
    if not demand.facts.quantized:
        advice.append("take a 4-bit model")
    return (
        f"--max-memory: nothing fits into {in_gb(limit_bytes)}; the least that would do is "
        f"{in_gb(rounded_up(least.needed_bytes))} ({largest}); give that, or "
        f"{', or '.join(advice)}"
    )


def rounded_up(size_bytes: int) -> int:
    """To the next hundredth of a GB, so that what is printed is enough the next time too."""
    return -(-(size_bytes + VARIES_BYTES) // 10_000_000) * 10_000_000


def words(plan: Plan, longest: int) -> str:
    """A plan as people read it: `staged, 2 rows of 512 tokens at once, spilling`."""
    rows = max(1, plan.micro_tokens // longest)
    counted = f"{rows} row{'s' if rows > 1 else ''} of {longest} tokens at once"
    return f"{plan.engine}, {counted}{', block inputs on disk' if plan.spill else ''}"


@dataclass
class Corrections:
    """What the first steps showed of each bucket: measured work over estimated, at most.

    A bucket that was not seen yet is as far off as the worst that was.
    """

    demand: Demand
    plan: Plan
    limit_bytes: int
    ratios: dict[int, float] = field(default_factory=dict)

    def learn(self, rows: int, tokens: int, measured_mlx_bytes: int) -> None:
        found = of_rows(self.demand, self.plan, rows, tokens)
        held = found.mlx_bytes - found.work_bytes
        ratio = (measured_mlx_bytes - held) / max(1, found.work_bytes)
        self.ratios[tokens] = max(ratio, self.ratios.get(tokens, 0.0))

    def ratio(self, tokens: int) -> float:
        return self.ratios.get(tokens, max([1.0, *self.ratios.values()]))

    def rows(self, tokens: int) -> int:
        """The most rows of so many tokens that fit, by what is known now; at least one."""
        rows = self.plan.rows(tokens, self.demand.batch_size)
        while rows > 1 and self.expected_bytes(rows, tokens) > self.limit_bytes:
            rows -= 1
        return rows

    def expected_bytes(self, rows: int, tokens: int) -> int:
        """Of the process, corrected."""
        found = of_rows(self.demand, self.plan, rows, tokens)
        excess = max(0.0, self.ratio(tokens) - 1) * found.work_bytes
        return int(found.process_bytes + excess)
