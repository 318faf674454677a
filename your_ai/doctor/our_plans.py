"""Our plans on the task of a benchmark: steps of the recipe of training, on random tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from your_ai.config import GRPO, TrainConfig, defaults
from your_ai.dashboard.metric_table import REWARD, phase_peaks
from your_ai.data.examples import Examples, RowCounts
from your_ai.data.prompts import PromptRows
from your_ai.doctor.contest import (
    Contest,
    contest_prompts,
    contest_reward,
    contest_tokens,
    examples_of,
)
from your_ai.engine.gradients import gradients_in
from your_ai.engine.measure_costs import measure_costs
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import RunError, Unsplittable, UserError
from your_ai.gates.token_ids import vocabulary_of
from your_ai.memory import allocator, probe
from your_ai.memory.budget import limit_of, process_here, run_limit
from your_ai.memory.corrections import Corrections
from your_ai.memory.estimate_kept import everything
from your_ai.memory.facts import facts_of
from your_ai.memory.governor import Watch, policy_of
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import (
    MEASURED_MARGIN,
    Budget,
    Choice,
    Option,
    estimate_rows,
    fastest,
    rows_of,
    with_margin,
)
from your_ai.memory.workload import NOTHING, DataSizes, Plan, Workload, workload_of
from your_ai.objectives.chosen import needs_reference
from your_ai.rewards.chosen import Rewards
from your_ai.rewards.names import parse_rewards
from your_ai.rng import derive_seed
from your_ai.run import events
from your_ai.run.checkpoint import TrainState
from your_ai.run.events import EventLog
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.training import optimizer
from your_ai.training.distributed import ALONE, Ranks
from your_ai.training.job import Job, schedule_of
from your_ai.training.memory_actions import Governor
from your_ai.training.planned import budget_of_job
from your_ai.training.reference import computed
from your_ai.training.rollouts import keep_first_adapters
from your_ai.training.run_data import RunData
from your_ai.training.train import Loop, source_of, train_step
from your_ai.training.trainer import (
    Beside,
    Trainer,
    add_adapters,
    build,
    graphs_within,
    whole_weights,
)

MLX_ROOM = "@"
SHORT = ("unpacked", "packed")
SPILLED = ("staged-spilled", "spilled")
ENGINES = {"auto": "auto", "staged": "staged", "kept": "staged", "staged-spilled": "staged",
           "resident": "streamed", "streamed": "streamed", "spilled": "streamed"}  # fmt: skip
"""The engine of a contender; of all others, fused."""
# These train SHORT_ROWS rows of SHORTEST to LONGEST tokens, each once per step.
SHORT_ROWS, SHORTEST, LONGEST = 16, 40, 120


def mlx_room(contender: str) -> int | None:
    """The bytes of `auto@GB`, the fastest plan whose MLX peak is at most so many GB by the
    estimate; None for another contender."""
    name, _, size = contender.partition(MLX_ROOM)
    if name != "auto" or not re.fullmatch(r"\d{1,4}(\.\d{1,3})?", size):
        return None
    return round(1e9 * float(size))


def examples_for(contest: Contest, contender: str, vocabulary: int) -> Examples:
    """The rows of a step. Those of unpacked and packed are short, and all their tokens trained."""
    if contender not in SHORT:
        return examples_of(contest_tokens(contest, vocabulary), contest.targets)
    rng = np.random.Generator(np.random.PCG64(derive_seed("bench rows")))
    starts = np.cumsum([0, *rng.integers(SHORTEST, LONGEST + 1, SHORT_ROWS)])
    tokens = rng.integers(0, vocabulary, starts[-1], dtype=np.uint32)
    trained, weights = np.ones(len(tokens), bool), np.ones(SHORT_ROWS, np.float32)
    trained[starts[:-1]] = False  # nothing predicts the first token
    return Examples(tokens, trained, starts, weights, RowCounts())


@dataclass(frozen=True)
class RandomTokens:
    """Stands for the tokenizer of random tokens, none of which ends a completion."""

    backend_tokenizer: str = "none"
    eos_token_ids: tuple[int, ...] = ()

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, tokens))


EVEN = "run:even"  # stands for the name of a reward


@dataclass
class OurSteps:
    """Steps of one of our plans, which are those of a training run."""

    contest: Contest
    loop: Loop
    estimated_bytes: int | None
    """The estimate of MLX's peak memory, if there is one for this plan."""
    place: tempfile.TemporaryDirectory[str]
    """The folder of the run, which is removed with this object."""
    state: TrainState
    peak_bytes: int
    """MLX's peak memory so far, with the computation of the reference."""
    waited_s: float | None = None
    """Time in which the last step waited for weights; None if all are in memory."""
    offset: int = 0
    """Bytes of the events file that were read."""

    def step(self) -> tuple[float, float, int]:
        """Do a step; return (loss, seconds, tokens), with grpo the mean reward as the loss."""
        trainer = self.loop.trainer
        updates = trainer.schedule.steps_per_epoch  # only unpacked has several
        for _ in range(updates):
            self.state, _ = train_step(self.loop, self.state)
        records, self.offset = events.tail(self.loop.log.path, self.offset)
        done = events.of(events.Step, (record.event for record in records))
        if len(done) < updates:
            raise RunError(f"step {self.state.step}: the loss or its gradients are not finite")
        peaks = [size for step in done for size in (step.peak_bytes, *phase_peaks(step).values())]
        self.peak_bytes = max(self.peak_bytes, *(int(size or 0) for size in peaks))
        waits = [step.read_wait_s for step in done if step.read_wait_s is not None]
        self.waited_s = sum(waits) if waits else None
        losses, tokens = [step.loss for step in done], sum(step.tokens for step in done)
        if self.contest.objective == GRPO:
            losses = [step.metrics.get(REWARD, math.nan) for step in done]
            tokens = self.contest.rows * self.contest.targets
        return statistics.mean(losses), sum(step.seconds for step in done), tokens


def run_ours(contest: Contest, contender: str) -> Iterator[tuple[float, float, int]]:
    """Yield (loss, seconds, tokens) of each step of one of our plans."""
    ready = prepare_ours(contest, contender)
    for _ in range(contest.steps):
        yield ready.step()


def prepare_ours(
    contest: Contest, contender: str, beside: OurSteps | None = None, ranks: Ranks = ALONE
) -> OurSteps:
    """Load the model for one of our plans. From here on, MLX's peak memory is counted.

    auto: the fastest plan that fits --max-memory or the machine; auto@GB: as `mlx_room` says.
    kept: staged, and all blocks with adapters keep all that they may. resident: streamed, with the
    weights of half the blocks in memory, and one block read ahead. streamed: one block's weights at
    a time. staged-spilled, spilled: staged and streamed, with --spill. prefix: fused, with a prefix
    cache in memory. unpacked, packed: fused, on short rows; one row or pair per update, or rows
    joined up to --seq-len.
    beside: shares its weights in memory. ranks: those that train together.
    """
    place = tempfile.TemporaryDirectory(prefix="bench-")
    folder = RunFolder(Path(place.name))
    opened = open_model(Path(contest.folder), getattr(mx, contest.dtype))
    network = opened.network
    asked = contest_job(contest, contender, opened, folder.path)
    budget = contest_budget(contest, contender, asked, opened)
    plan, facts = budget.choice.option.plan, budget.workload.facts
    training = budget.workload.training
    job = asked.with_adapters(training.rank, training.blocks, len(network.layers))
    adapters, start = add_adapters(job, opened, facts.hidden, folder)
    if beside is not None and plan.engine != "streamed":
        network.update(beside.loop.trainer.model.parameters())
    graphs = graphs_within(budget)
    built, _, _ = build(job, opened, adapters, Beside([], None), budget, graphs, folder.path)
    if built.notices:
        raise RunError(built.notices[-1])
    allocator.free()
    trained = network.trainable_parameters()
    trainer = Trainer(
        job=job,
        budget=budget,
        opened=opened,
        adapters=adapters,
        built=built,
        graphs=graphs,
        optimizer=optimizer.build_optimizer(
            job.config, trained, folder.path if plan.states_on_disk else None
        ),
        gradients=gradients_in(folder.path if plan.gradients_on_disk else None),
        whole=whole_weights(job.config, opened, built.engine, plan, folder.path),
        periods=None,
        depends_on=start,
        schedule=job.schedule,
        valid=None,
        beside=Beside([], None),
        rewards=contest_rewards() if contest.objective == GRPO else None,
        ranks=ranks,
    )
    mx.reset_peak_memory()
    if needs_reference(job.config):
        examples, engine = job.schedule.examples, trainer.engine
        reference = computed(examples, engine, trainer.rows_at, lambda _: None)
        examples = examples.with_columns({"reference": reference})
        schedule = dataclasses.replace(job.schedule, examples=examples)
        trainer = dataclasses.replace(trainer, schedule=schedule)
    known = contender not in (*SHORT, "prefix")
    return OurSteps(
        contest=contest,
        loop=contest_loop(trainer, folder),
        estimated_bytes=budget.choice.option.estimate.mlx_bytes if known else None,
        place=place,
        state=TrainState(),
        peak_bytes=mx.get_peak_memory(),
    )


def contest_loop(trainer: Trainer, folder: RunFolder) -> Loop:
    """The recipe's steps, without its checkpoints and changes of the plan."""
    log, stop, budget = EventLog(folder.events), Stop(), trainer.budget
    option, limit_bytes = budget.choice.option, budget.limit.limit_bytes
    corrections = Corrections(
        budget.workload, option.plan, limit_bytes, room_bytes=option.needed_bytes
    )
    policy = policy_of(trainer.config, limit_bytes)
    governor = Governor(trainer, policy, probe.Sampler(), log, corrections, Watch())
    keep_first_adapters(trainer, folder, 0)
    factors = optimizer.rate_factors(trainer.config, trainer.model)
    update = optimizer.make_update(trainer.model, trainer.optimizer, factors, trainer.masters)
    source = source_of(trainer, folder, log, stop)
    return Loop(folder, trainer, source, governor, update, log, stop, stop)


def contest_job(contest: Contest, contender: str, opened: Opened, folder: Path) -> Job:
    """The task as the job of a run. folder: for the file of the prompts."""
    config = contest_config(contest, contender)
    vocabulary = vocabulary_of(opened.network) or opened.config["vocab_size"]
    examples = examples_for(contest, contender, vocabulary)
    prompts = None
    if contest.objective == GRPO:
        tokens = contest_prompts(contest, contest_tokens(contest, vocabulary))
        examples = examples_of(tokens, targets=0)
        rows = folder / "prompts.jsonl"
        rows.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(len(tokens))))
        prompts = {"train": PromptRows(rows)}
    size = len(examples.tokens)
    data = RunData({"train": examples}, [], None, [contest.seq_len], size, 0, prompts)
    schedule = schedule_of(config, data)
    if contender not in SHORT:  # of one length, which needs no padding
        edges = np.array([int(examples.lengths.max()) - 1])
        schedule = dataclasses.replace(schedule, edges=edges)
    sized = defaults.sized(config, len(examples) // contest.rows_together)
    return Job(config, sized, data, schedule, contest.steps, {}, [], None, RandomTokens())


def contest_config(contest: Contest, contender: str) -> TrainConfig:
    """The settings of one of our plans. The plan is named where the budget chooses it."""
    chosen = ENGINES.get(contender, "fused") if contest.max_memory is not None else "auto"
    config = dataclasses.replace(contest.train_config(chosen), spill=contender in SPILLED)
    if contender == "prefix":
        return dataclasses.replace(config, prefix_cache="memory")
    if contender == "unpacked":
        return dataclasses.replace(config, batch_size=1)
    if contender == "packed":
        rows, tokens = SHORT_ROWS // contest.rows_together, contest.seq_len
        return dataclasses.replace(config, batch_size=rows, packing=True, max_seq_length=tokens)
    return config


def contest_budget(contest: Contest, contender: str, job: Job, opened: Opened) -> Budget:
    """The plan: the one that fits, or without a limit the one that is named."""
    if contender == "auto" or contest.max_memory is not None:
        budget = budget_of_job(job, opened, run_limit(job.config))
        chosen = budget.choice.option
        limit_bytes = budget.limit.limit_bytes
        allocator.set_limits(limit_bytes, chosen.needed_bytes, chosen.estimate.beside_bytes)
        return budget
    sizes = DataSizes(lengths=tuple(job.data.lengths), prompt_tokens=job.data.prompt_tokens)
    facts = facts_of(opened.folder, opened.dtype.size)
    workload = workload_of(job.config, facts, sizes, process_here(), can_stream=opened.can_stream)
    workload = dataclasses.replace(workload, batch_size=contest.rows)
    if contest.measures:
        limit_bytes = limit_of(None).limit_bytes
        with contextlib.suppress(Unsplittable):
            costs = measure_costs(opened.network, job.config, workload, limit_bytes)
            workload = dataclasses.replace(workload, costs=costs)
    room = mlx_room(contender)
    if room is None:
        plan = named_plan(contest, contender, workload.training.blocks, len(opened.network.layers))
    else:
        plan = fastest_within(workload, room).plan
    estimate = estimate_rows(workload, plan, contest.rows, contest.seq_len)
    option = Option(plan, estimate, 1.0, with_margin(estimate))
    limit_bytes = max(limit_of(None).limit_bytes, 2 * option.needed_bytes)
    return Budget(MemoryLimit(limit_bytes, "no limit"), workload, Choice(option, 0, None, None))


def named_plan(contest: Contest, contender: str, adapted: int, blocks: int) -> Plan:
    """The plan of a contender, with all rows in one micro-batch; adapted: blocks with adapters."""
    return Plan(
        ENGINES.get(contender, "fused"),
        contest.rows * contest.seq_len,
        contender in SPILLED,
        contest.rows if contest.objective == GRPO else 0,
        everything(adapted) if contender == "kept" else NOTHING,
        blocks // 2 if contender == "resident" else 0,
        int(contender not in ("streamed", "spilled")),
    )


def contest_rewards() -> Rewards:
    """The reward of a completion: the share of even tokens."""
    rewards = Rewards(parse_rewards([EVEN]), {})
    rewards.models[EVEN] = lambda rollouts: [contest_reward(r.ids[-r.tokens :]) for r in rollouts]
    return rewards


def fastest_within(workload: Workload, mlx_bytes: int) -> Option:
    """The fastest plan for whole batches whose estimated MLX peak is at most `mlx_bytes`. Raises
    UserError if there is none."""

    def fits(option: Option) -> bool:
        found = option.estimate
        whole = rows_of(workload, option.plan, max(workload.lengths)) == workload.batch_size
        return whole and found.mlx_bytes + MEASURED_MARGIN * found.work_bytes <= mlx_bytes

    found = fastest(workload, fits)
    if found is None:
        raise UserError(f"--plan auto{MLX_ROOM}{mlx_bytes / 1e9:g}: no plan fits; name more GB")
    return found
