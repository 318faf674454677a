"""What a run asks of memory, and the plan that fits: from its settings and sizes. No mlx here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from your_ai.config import GRPO, REWARD, SOFT, TrainConfig, defaults
from your_ai.memory.buffers import NO_LIMIT, BufferLimit
from your_ai.memory.coefficients import PACKAGED, Coefficients
from your_ai.memory.facts import ModelFacts
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import Choice, Demand, DoesNotFit
from your_ai.memory.speed import UNKNOWN, KnownSpeed
from your_ai.memory.workload import RewardModelSizes, RolloutSizes, StepSizes, Training

PYTHON_BYTES = 250_000_000  # a process without a model: 140 MB on Linux, plus a GPU's share
# MLX's ring allocates this when a process joins it: two buffers for each of two directions.
RING_BYTES = 2 * 2 * (8 << 20)
# Architectures whose blocks cannot run one at a time, so that only the fused engine trains them.
WHOLE = ("afm7", "deepseek_v41", "iquestloopcoder", "kimi_k3")
SCORED_FIRST = ("kto",)  # objectives whose texts are all scored before any is trained


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """What memory depends on besides the run and the model."""

    python_bytes: int
    """Memory of the process without a model."""
    sliced: bool = False
    """Whether weights are dequantized in slices, as on the CPU."""
    coefficients: Coefficients = PACKAGED
    speed: KnownSpeed = UNKNOWN
    """How fast it computes."""
    buffers: BufferLimit = NO_LIMIT


@dataclass(frozen=True)
class Budget:
    """The limit of a process, its demand, and the plan that fits."""

    limit: MemoryLimit
    demand: Demand
    choice: Choice
    measurements: Path | None = None
    """The file with the measurements of this model on this machine."""
    kept: bool = False
    """Whether the run continues under the plan it had before."""

    @property
    def graphs_room_bytes(self) -> int:
        """Room for compiled graphs: those of one shape, plus a quarter of the unused limit."""
        option = self.choice.option
        left = max(0, self.limit.limit_bytes - option.needed_bytes)
        return option.estimate.components["graphs"] + left // 4


def demand_of(
    config: TrainConfig,
    facts: ModelFacts,
    lengths: Sequence[int],
    process: ProcessFacts,
    *,
    can_stream: bool = True,
    prefix_tokens: int = 0,
    prefix_texts: int = 0,
    answer_tokens: int = 0,
    prompt_tokens: int = 0,
    before_bytes: int = 0,
    reward_models: tuple[RewardModelSizes, ...] = (),
    steps: StepSizes | None = None,
    joined: bool = False,
    adapters: tuple[int, int] | None = None,
) -> Demand:
    """The demand of a training run.

    lengths: the sequence length T of every bucket.
    prefix_tokens, prefix_texts: tokens of all texts in the prefix cache, and their number.
    answer_tokens: tokens of the longest sample prompt with its answer.
    prompt_tokens: tokens of the longest prompt, if each step generates completions.
    before_bytes, reward_models: as in Demand.
    steps: what the data says about the steps; by default, all rows are as long as the longest.
    joined: whether this process has met others that train with it, even if the settings name none;
        its memory includes what that takes.
    adapters: rank and blocks of the adapters; by default, as if memory were no limit.
    """
    rank, blocks = adapters or defaults.largest(config, facts.blocks)
    # Where texts are scored first, those of a group need not be in one micro-batch.
    scored_first = config.objective in SCORED_FIRST
    together = 1 if scored_first else config.texts_together
    lengths = tuple(sorted(set(lengths)))
    batch_size = defaults.batch_size(config, rows=0) * together
    if config.packing:  # count a packed row as several rows of the longest text
        lengths = lengths[-1:]
        batch_size = max(1, -(-config.max_seq_length // lengths[0]))
    rollouts = rollout_sizes(config, prompt_tokens) if config.generates else None
    kept, texts = (prefix_tokens, prefix_texts) if config.prefix_cache == "memory" else (0, 0)
    mixes_whole = process.buffers.mixes_whole and not config.packing
    return Demand(
        facts=facts,
        training=Training(
            blocks=blocks,
            rank=rank,
            targets=config.lora_targets,
            optimizer=config.optimizer,
            optimizer_bits=config.optimizer_bits,
            dora=config.use_dora,
            adapter_dtype=config.adapter_dtype,
            experts=config.lora_experts,
        ),
        lengths=lengths,
        batch_size=batch_size,
        rows_per_step=defaults.rows_per_step(config, rows=0) * together
        if rollouts is None
        else rollouts.rows,
        engine=config.plan,
        spill=config.spill,
        can_stream=can_stream,
        python_bytes=process.python_bytes + RING_BYTES * (config.has_ranks and not joined),
        prefix_bytes=kept * facts.hidden * facts.float_bytes,
        answer_tokens=answer_tokens,
        rollouts=rollouts,
        sliced=process.sliced,
        reduces=joined or config.has_ranks,
        rows_together=together,
        scores=scored_first or config.scores_completions,
        noise=config.neftune_alpha > 0,
        score_head=config.objective == REWARD,
        given_adapter=bool(config.from_adapter),
        before_bytes=before_bytes,
        reward_models=reward_models,
        soft=rollouts if config.objective == SOFT else None,
        coefficients=process.coefficients,
        steps=replace(
            steps or StepSizes(),
            on_cpu=process.sliced,
            cached_prefix=config.prefix_cache != "off",
            has_vocabulary=config.objective != REWARD,
            unpredicted=unpredicted_steps(config),
        ),
        speed=process.speed,
        buffers=replace(process.buffers, texts=texts, mixes_whole=mixes_whole),
    )


def unpredicted_steps(config: TrainConfig) -> str:
    """Why the time of the steps of such a run is not predicted; empty if it is."""
    if config.generates:
        return "the time of generated completions is not predicted"
    return "the time of packed rows is not predicted" if config.packing else ""


def rollout_sizes(config: TrainConfig, prompt_tokens: int) -> RolloutSizes:
    """The completions of each step of a run that generates some."""
    group = config.rollouts if config.objective == GRPO else 1
    rows = group * config.prompts_per_step
    return RolloutSizes(prompt_tokens, config.max_new_tokens, group, rows)


def largest_that_fits(
    config: TrainConfig, blocks: int, budget_with: Callable[[tuple[int, int]], Budget]
) -> Budget:
    """The budget with the largest adapters that fit; blocks: of the model. Raises DoesNotFit.

    Where larger adapters were measured and smaller ones were not, the larger may need less.
    """
    refusals = []
    for size in defaults.adapters(config, blocks):
        try:
            return budget_with(size)
        except DoesNotFit as refusal:
            refusals.append(refusal)
    raise min(reversed(refusals), key=lambda refusal: refusal.least_bytes)
