"""Our plans on the task of a benchmark."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.config import GRPO
from your_ai.data.batches import Batch, RowsAt, few_edges, make_schedule, micro_batches
from your_ai.data.examples import Examples, RowCounts
from your_ai.doctor.contest import (
    Contest,
    batches_of,
    contest_prompts,
    contest_reward,
    contest_tokens,
    examples_of,
)
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import Gradients, gradients_in
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import open_model
from your_ai.errors import RunError, UserError
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation.rollouts import RolloutPrompt, complete, sampler_of
from your_ai.memory import allocator
from your_ai.memory.budget import budget_of, process_here, run_limit
from your_ai.memory.estimate_kept import everything
from your_ai.memory.facts import facts_of
from your_ai.memory.plan import (
    MEASURED_MARGIN,
    Option,
    estimate_rows,
    fastest,
    rows_of,
)
from your_ai.memory.workload import NOTHING, DataSizes, Plan, Workload, workload_of
from your_ai.nets import model
from your_ai.objectives.chosen import needs_reference, objective_of
from your_ai.objectives.grpo import advantages_of, completion_weights
from your_ai.rng import derive_seed
from your_ai.training import optimizer
from your_ai.training.optimizer import Update
from your_ai.training.reference import computed
from your_ai.training.rollouts import completion_examples
from your_ai.training.steps import accumulate

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
        return examples_of(contest, contest_tokens(contest, vocabulary))
    rng = np.random.Generator(np.random.PCG64(derive_seed("bench rows")))
    starts = np.cumsum([0, *rng.integers(SHORTEST, LONGEST + 1, SHORT_ROWS)])
    tokens = rng.integers(0, vocabulary, starts[-1], dtype=np.uint32)
    weights = np.ones(SHORT_ROWS, np.float32)
    return Examples(tokens, np.ones(len(tokens), bool), starts, weights, RowCounts())


def updates_of(
    contest: Contest, contender: str, examples: Examples, rows_at: RowsAt
) -> list[list[Batch]]:
    """The micro-batches of each update of a step. Only unpacked has several updates per step."""
    together = contest.rows_together
    if contender == "packed":
        packed = make_schedule(examples, SHORT_ROWS, SHORT_ROWS, 0, contest.seq_len, together)
        return [packed.batches_of(0)]
    if contender == "unpacked":
        one_by_one = make_schedule(examples, together, together, 0, rows_together=together)
        return [one_by_one.batches_of(step) for step in range(one_by_one.steps_per_epoch)]
    return [batches_of(contest, examples, rows_at)]


@dataclass(frozen=True)
class PreparedSteps:
    """Steps that train rows of random tokens."""

    contest: Contest
    network: nn.Module
    engine: Engine
    update: Update
    gradients: Gradients
    estimated_bytes: int | None
    """The estimate of MLX's peak memory, if there is one for this plan."""
    updates: list[list[Batch]]
    """The micro-batches of each update of a step."""

    def step(self) -> tuple[float, float, int]:
        began = time.perf_counter()
        losses = [
            one_update(self.engine, self.update, self.gradients, each, self.contest)
            for each in self.updates
        ]
        seconds = time.perf_counter() - began
        tokens = sum(batch.real_tokens for batches in self.updates for batch in batches)
        return statistics.mean(losses), seconds, tokens


@dataclass(frozen=True)
class RolloutSteps:
    """Steps of GRPO: completions are generated, rewarded, scored and trained."""

    contest: Contest
    network: nn.Module
    engine: Engine
    update: Update
    gradients: Gradients
    estimated_bytes: int | None
    prompts: np.ndarray
    """As `contest_prompts` returned them."""
    rows_at: RowsAt
    wave: int
    """Completions that are generated together."""
    first: dict[str, mx.array]
    """The adapters before the first step, which make the model the reference."""
    counter: Iterator[int]

    def step(self) -> tuple[float, float, int]:
        """Do a step; return (mean reward, seconds, tokens)."""
        began = time.perf_counter()
        texts = self.generated(next(self.counter))
        allocator.free(collect=False)
        rewards = np.array([contest_reward(completion) for _, completion in texts])
        advantages = advantages_of(rewards.reshape(len(self.prompts), -1), "group").reshape(-1)
        lengths = np.array([len(completion) for _, completion in texts])
        counts = np.ones(len(texts), bool)
        weights = completion_weights(lengths, counts, "dapo", self.contest.targets)
        examples = completion_examples(texts, weights, {"advantages": advantages})
        edges = few_edges(int(examples.lengths.max()))
        if self.contest.kl_beta:
            examples = examples.with_columns({"reference": self.reference(examples, edges)})
        order = np.argsort(-examples.lengths, kind="stable")
        batches = list(micro_batches(examples, order, self.rows_at, edges))
        one_update(self.engine, self.update, self.gradients, batches, self.contest)
        allocator.free(collect=False)
        return float(rewards.mean()), time.perf_counter() - began, int(lengths.sum())

    def generated(self, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """The tokens of each prompt and of each of its completions."""
        samples = range(self.contest.rollouts)
        prompts = [
            RolloutPrompt(tokens, tuple(derive_seed("bench", step, row, s) for s in samples))
            for row, tokens in enumerate(self.prompts)
        ]
        new = self.contest.targets
        found = complete(self.network, prompts, sampler_of(1.0), (), new, self.wave)
        by_place = {(each.prompt, each.sample): np.array(each.tokens, np.uint32) for each in found}
        return [(prompts[prompt].tokens, by_place[prompt, s]) for prompt, s in sorted(by_place)]

    def reference(self, examples: Examples, edges: np.ndarray) -> np.ndarray:
        """The log-probabilities under the model with its first adapters."""
        current = model.adapter_arrays(self.network)
        model.set_adapters(self.network, self.first)
        found = computed(examples, self.engine, self.rows_at, lambda _: None, edges)
        model.set_adapters(self.network, current)
        return found


Steps = PreparedSteps | RolloutSteps


def run_ours(contest: Contest, contender: str) -> Iterator[tuple[float, float, int]]:
    """Yield (loss, seconds, tokens) of each step of one of our plans."""
    ready = prepare_ours(contest, contender)
    for _ in range(contest.steps):
        yield ready.step()


def prepare_ours(contest: Contest, contender: str, beside: Steps | None = None) -> Steps:
    """Load the model for one of our plans. From here on, MLX's peak memory is counted.

    auto: the fastest plan that fits --max-memory or the machine; auto@GB: as `mlx_room` says.
    kept: staged, and all blocks with adapters keep all that they may. resident: streamed, with the
    weights of half the blocks in memory, and one block read ahead. streamed: one block's weights at
    a time. staged-spilled, spilled: staged and streamed, with --spill. prefix: fused, with a prefix
    cache in memory. unpacked, packed: fused, on short rows; one row or pair per update, or rows
    joined up to --seq-len.
    beside: shares its weights in memory.
    """
    plan = ENGINES.get(contender, "fused")
    spill = contender in SPILLED
    opened = open_model(Path(contest.folder), getattr(mx, contest.dtype))
    network, config = opened.network, contest.train_config()
    adapters = model.add_adapters(network, config)
    if beside is not None and plan != "streamed":
        network.update(beside.network.parameters())
    is_grpo = contest.objective == GRPO
    wave, kept = contest.rows if is_grpo else 0, NOTHING
    if contender == "kept":
        kept = everything(adapters.config["num_layers"])
    resident = len(network.layers) // 2 if contender == "resident" else 0
    blocks_ahead = int(contender not in ("streamed", "spilled"))
    size = contest.rows * contest.seq_len
    wanted = Plan(plan, size, spill, wave, kept, resident, blocks_ahead)
    prompt_tokens = contest.seq_len + 1 - contest.targets if is_grpo else 0
    facts = facts_of(opened.folder, opened.dtype.size)
    sizes = DataSizes(lengths=(contest.seq_len,), prompt_tokens=prompt_tokens)
    if plan == "auto" or contest.max_memory is not None:
        asked = dataclasses.replace(contest.train_config(plan), spill=spill)
        workload = workload_of(asked, facts, sizes, process_here())
        budget = budget_of(asked, workload, opened.dtype, run_limit(asked))
        chosen = budget.choice.option
        wanted, estimate = chosen.plan, chosen.estimate
        rows_at: RowsAt = partial(wanted.rows, batch_size=contest.rows)
        allocator.set_limits(budget.limit.limit_bytes, chosen.needed_bytes, estimate.beside_bytes)
    else:
        workload = workload_of(config, facts, sizes, process_here(), can_stream=opened.can_stream)
        room = mlx_room(contender)
        if room is not None:
            workload = dataclasses.replace(workload, batch_size=contest.rows)
            wanted = fastest_within(workload, room).plan
        estimate = estimate_rows(workload, wanted, contest.rows, contest.seq_len)
        rows_at = lambda _: contest.rows  # noqa: E731
    temporary = Path(tempfile.gettempdir())
    built = build_engine(
        network,
        adapters.dropout_keys,
        wanted.engine,
        packing=contender == "packed",
        tensors=opened.tensors,
        make_store=(lambda _: MemoryStore()) if contender == "prefix" else None,
        spill=temporary if wanted.gradients_on_disk else None,
        kept=wanted.kept,
        resident=wanted.resident,
        blocks_ahead=wanted.blocks_ahead,
        objective=objective_of(config),
    )
    if built.notices:
        raise RunError(built.notices[-1])
    allocator.free()
    engine = built.engine
    adamw = optimizer.build_optimizer(
        config, network.trainable_parameters(), temporary if wanted.states_on_disk else None
    )
    update = optimizer.make_update(network, adamw)
    gradients = gradients_in(temporary if wanted.gradients_on_disk else None)
    known = contender not in (*SHORT, "prefix")
    ready = (contest, network, engine, update, gradients, estimate.mlx_bytes if known else None)
    vocabulary = vocabulary_of(network) or opened.config["vocab_size"]
    mx.reset_peak_memory()
    if is_grpo:
        prompts = contest_prompts(contest, contest_tokens(contest, vocabulary))
        first = model.adapter_arrays(network)
        return RolloutSteps(*ready, prompts, rows_at, wanted.wave, first, itertools.count())
    examples = examples_for(contest, contender, vocabulary)
    updates = updates_of(contest, contender, examples, rows_at)
    if needs_reference(config):
        updates = [[with_reference(engine, batch) for batch in batches] for batches in updates]
        engine.drop()
    return PreparedSteps(*ready, updates)


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


def with_reference(engine: Engine, batch: Batch) -> Batch:
    """The batch with log-probabilities under the model as it is now."""
    losses, _ = engine.score(batch)
    return batch.with_columns({"reference": -np.array(losses)})


def one_update(
    engine: Engine, update: Update, gradients: Gradients, batches: list[Batch], contest: Contest
) -> float:
    """Do one update and return the mean loss before it. gradients: for the sums of the step."""
    denominator = engine.objective.denominator(batches)
    sums = accumulate(engine, batches, 1 / denominator, 0, gradients)
    update(gradients, 1.0, contest.learning_rate)
    return sums.loss / denominator
