"""What a process does and how, as far as its memory and its time depend on it. No mlx here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from your_ai.config import DISTILL, REWARD, SOFT, ByLayer, TrainConfig, defaults
from your_ai.config.adapter_facts import LORA, AdapterFacts
from your_ai.config.by_layer import OUTSIDE, LayerPattern
from your_ai.config.divergences import JSD
from your_ai.gates.text import counted
from your_ai.memory.costs import Costs, MeasuredCosts
from your_ai.memory.facts import ModelFacts, vocabulary_held

PYTHON_BYTES = 250_000_000  # a process without a model: 140 MB on Linux, plus a GPU's share
# MLX's ring allocates this when a process joins it: two buffers for each of two directions.
RING_BYTES = 2 * 2 * (8 << 20)
# Architectures whose blocks cannot run one at a time, so that only the fused engine trains them.
WHOLE = ("afm7", "deepseek_v41", "iquestloopcoder", "kimi_k3")
SCORED_FIRST = ("kto",)  # objectives whose texts are all scored before any is trained
UNLIMITED = sys.maxsize  # buffers


@dataclass(frozen=True)
class RolloutSizes:
    """The completions that each step generates."""

    prompt_tokens: int
    """Of the longest prompt."""
    new_tokens: int
    """Maximum tokens of a completion."""
    group: int
    """Completions of a prompt."""
    rows: int
    """Completions of a step."""
    converses: bool = False
    """Whether they go on after answers, which are read beside the others. Prompt and new tokens
    then say how long they may become."""

    @property
    def most_tokens(self) -> int:
        """Maximum tokens of a prompt with its completion."""
        return self.prompt_tokens + self.new_tokens


class VocabularyArray(NamedTuple):
    """Trained arrays outside of the blocks: rows of an embedding or a head, or LoRA on one."""

    rows: int
    width: int
    step: int
    """Rows of each array that they are cut into."""
    is_whole: bool
    """Whether it has all the rows, in the dtype of the adapters, and not some in float32."""
    is_embedding: bool
    """Whether its gradient needs that of the input of the first block."""
    is_tied: bool = False
    """Whether the head uses it, too."""
    low_rank: str = ""
    """The path of a layer with LoRA; "" if its rows are trained."""

    def matrices(self, ranks: ByLayer) -> list[tuple[int, int, int]]:
        """(rows, columns) of its arrays, and how many there are of these. ranks: of layers."""
        if self.low_rank:
            rank = int(ranks.at((OUTSIDE, self.low_rank)))
            return [(self.rows, rank, 1), (rank, self.width, 1)]
        count, rest = divmod(self.rows, self.step)
        return [(self.step, self.width, count), (rest, self.width, int(rest > 0))]


@dataclass(frozen=True, kw_only=True)
class Training:
    """The adapters: `rank`, on the layers named in `targets`, in the last `blocks` blocks."""

    blocks: int
    rank: int
    """Of layers that no pattern selects."""
    targets: tuple[str, ...]
    patterns: tuple[LayerPattern, ...] = ()
    """The ranks of other layers; the last that selects a layer counts."""
    alphas: tuple[LayerPattern, ...] = ()
    """The alphas of layers, where they differ: blocks of other scales are compiled separately."""
    optimizer: str = "adamw"
    optimizer_bits: int = 32
    adapter: AdapterFacts = LORA
    adapter_dtype: str = "float32"
    """Of the matrices A and B, and of their gradients: float32 or bfloat16."""
    experts: bool = False
    """Whether names without a dot select routed experts, too: --lora-experts."""
    rounding: str = ""
    """The format that adapted weights are rounded to, as of `--qat`; "" for none."""
    vocabulary: tuple[VocabularyArray, ...] = ()
    """What is trained of the embedding and the head."""
    at_a_time: int | None = None
    """Blocks of which there are gradients and optimizer states at a time; None for all."""

    def reach(self, facts: ModelFacts) -> int:
        """The number of blocks, from the last, that gradients pass through."""
        trains_embedding = any(array.is_embedding for array in self.vocabulary)
        return facts.blocks if trains_embedding else self.blocks

    @property
    def ranks(self) -> ByLayer:
        """The rank of each layer."""
        return ByLayer(self.rank, self.patterns)

    @property
    def active(self) -> Training:
        """The same with only those blocks."""
        count = self.blocks if self.at_a_time is None else min(self.at_a_time, self.blocks)
        return replace(self, blocks=count, at_a_time=None)


class Kept(NamedTuple):
    """The arrays that the last trained blocks keep from the forward pass to the backward pass, so
    that they are not computed again: for how many of them, counted from the last."""

    linear: int = 0
    """The outputs of the linear layers."""
    attention: int = 0
    """The outputs of attention, and the log-sum-exps of its scores."""
    activations: int = 0
    """The product of an MLP's gate and its derivatives, in place of the outputs of two layers; at
    most `linear`."""

    def __bool__(self) -> bool:
        """Return whether anything is kept."""
        return any(self)


NOTHING = Kept()
KeptAt = Callable[[int, int], Kept]  # (rows, tokens per row) of a micro-batch -> what is kept


@dataclass(frozen=True)
class Plan:
    """The way a step is computed."""

    engine: str
    """fused, staged or streamed."""
    micro_tokens: int
    """Maximum tokens, with padding, of a micro-batch of more than one row."""
    spill: bool = False
    """Keep the states of the optimizer on disk, too."""
    wave: int = 0
    """Completions that are generated together; 0 if the run generates none."""
    kept: Kept = NOTHING
    """What blocks keep for the backward pass, of a staged or streamed plan; for the longest rows,
    as shorter ones may keep more."""
    resident: int = 0
    """Blocks, from the last, whose weights stay in memory; of a streamed plan."""
    blocks_ahead: int = 1
    """Blocks whose weights are read while the block before them runs, 0 or 1; of a streamed
    plan."""
    teacher_blocks: int = 0
    """Blocks of a teacher with weights of its own that stay in memory: all or none."""
    teacher_ahead: int = 1
    """Blocks of a teacher that are read while the block before them runs, 0 or 1. With 0, few texts
    go through it together."""

    @property
    def gradients_on_disk(self) -> bool:
        """True if the gradients of a block are written to disk as soon as they are there."""
        return self.engine != "fused"

    @property
    def inputs_on_disk(self) -> bool:
        """True if the inputs of blocks are on disk between their passes: the gradients are, and
        nothing that is larger is kept in memory."""
        return self.gradients_on_disk and not self.kept

    @property
    def weights_on_disk(self) -> bool:
        """True if weights are on disk, those that are trained, too."""
        return self.engine == "streamed"

    @property
    def states_on_disk(self) -> bool:
        """True if the states of the optimizer are kept on disk."""
        return self.spill

    @property
    def family(self) -> str:
        """Plans that need the same memory for activations: fused, staged (and streamed), kept."""
        if self.engine == "fused":
            return "fused"
        return "kept" if self.kept.linear else "staged"

    def rows(self, tokens: int, batch_size: int) -> int:
        """Rows of `tokens` tokens per micro-batch."""
        return max(1, min(batch_size, self.micro_tokens // tokens))


def whole_groups(rows: int, rows_together: int) -> int:
    """Round `rows` down to whole groups. Less than one group stays as it is."""
    return rows // rows_together * rows_together if rows >= rows_together else rows


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The sizes of a run's steps on which their time depends and memory does not."""

    rows_of_length: tuple[tuple[int, int], ...] = ()
    """(T, rows of the data that are padded to T); empty if all are as long as the longest."""
    trained_share: float = 1.0
    """Of the tokens with padding, those that are targets."""
    steps: int = 0
    """Of the whole run; 0 if it is not known."""
    cached_prefix: bool = False
    """Whether the frozen blocks below the first adapter only run in the first epoch."""
    unpredicted: str = ""
    """Why the time of such steps is not predicted; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class RewardModelSizes:
    """A trained reward model, which scores the completions of each step."""

    training: Training
    """Its adapter."""
    facts: ModelFacts | None = None
    """Of its base; None if that is the model that is trained, whose weights it shares."""


NO_ADAPTER = Training(blocks=1, rank=1, targets=())


@dataclass(frozen=True, kw_only=True)
class TeacherSizes:
    """The teacher of a distillation."""

    training: Training = NO_ADAPTER
    """Its adapter."""
    facts: ModelFacts | None = None
    """None if it shares the weights of the model that is trained."""
    step_tokens: int = 0
    """Trained tokens whose states are in memory during a step; 0 if they are on disk."""
    longest: int = 0
    """Tokens of the longest text that it reads instead of the student's; 0 if it reads the same."""
    again: bool = False
    """Whether its weights are needed in every step."""
    softmax: bool = False
    """Whether the softmax of its logits is kept beside its states."""


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """Facts about the process that runs a workload, and about its machine."""

    python_bytes: int = 0
    """Memory of the process without a model."""
    sliced: bool = False
    """Whether quantized weights are dequantized in slices, as on the CPU, so that graphs are
    larger."""
    most_buffers: int = UNLIMITED
    """MLX's buffers that it may hold: Metal has a limit."""
    mixes_whole: bool = False
    """Whether attention without a window and the gated delta rule train by operations of MLX, and
    not in slices."""


@dataclass(frozen=True, kw_only=True)
class DataSizes:
    """The data of a run, as far as memory depends on it."""

    lengths: tuple[int, ...]
    """The sequence length T of every bucket, in any order."""
    prefix_tokens: int = 0
    """Tokens of all texts, which a prefix cache keeps."""
    prefix_texts: int = 0
    """The number of those texts."""
    answer_tokens: int = 0
    """Tokens of the longest sample prompt with its answer; 0 without samples."""
    prompt_tokens: int = 0
    """Tokens of the longest prompt, if each step generates completions."""
    steps: StepSizes = field(default=StepSizes())
    """What the data says about the steps; by default, all rows are as long as the longest."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The work of a process, independent of the plan."""

    facts: ModelFacts
    training: Training
    lengths: tuple[int, ...] = ()
    """The sequence length T of every bucket, sorted; empty if no plan is chosen."""
    batch_size: int = 1
    """Rows of a micro-batch, as requested by the user."""
    rows_per_step: int = 1
    """Rows of all micro-batches of a step."""
    rows_together: int = 1
    """Rows of a group, which is only split if nothing else fits."""
    packed: bool = False
    """Whether a row holds several texts."""
    engine: str = "auto"
    """`auto`, or the only engine allowed."""
    spill: bool = False
    """Whether the optimizer's states must be spilled to disk."""
    can_stream: bool = True
    """Whether the files contain the weights in the form the model uses."""
    whole: bool = False
    """Whether its blocks cannot run one at a time, so that it is fused where staged is allowed."""
    prefix_bytes: int = 0
    """A frozen-prefix cache in memory."""
    prefix_texts: int = 0
    """Texts in that cache."""
    answer_tokens: int = 0
    """Longest sample prompt plus its answer, in tokens; 0 without samples."""
    rollouts: RolloutSizes | None = None
    """The completions that each step generates before it trains them, if it does."""
    soft: RolloutSizes | None = None
    """The completions that the step trains through, by columns if the weights are resident."""
    reward_models: tuple[RewardModelSizes, ...] = ()
    """Those that score the completions of each step."""
    teacher: TeacherSizes | None = None
    """The teacher whose predictions the step compares."""
    forward: bool = False
    """Evaluation only: no gradients and no optimizer."""
    scores: bool = False
    """The step also scores its rows without gradients."""
    noise: bool = False
    """Noise is added to the embeddings."""
    score_head: bool = False
    """The head gives one number per text, and not logits."""
    reduces: bool = False
    """Gradients are summed over several processes."""
    given_adapter: bool = False
    """Whether the run starts from an adapter, whose size is given."""
    before_bytes: int = 0
    """Peak memory before training, if the model is quantized first."""
    limit_option: str = "--max-memory"
    """The option that changes the limit, for errors."""
    steps: StepSizes = field(default=StepSizes())
    """What the steps compute, as far as their time depends on it."""
    process: ProcessFacts = field(default=ProcessFacts())
    costs: MeasuredCosts | None = None
    """Its costs, as measured on this machine. Without, bytes are guessed, and plans are ordered by
    their arithmetic."""

    @property
    def measured(self) -> Costs | None:
        """The measured costs in bytes, if there are any."""
        return None if self.costs is None else self.costs.memory

    @property
    def read_tokens(self) -> int:
        """Tokens of the longest text that is read to generate what follows; 0 if none is."""
        prompt = 0 if self.rollouts is None else self.rollouts.prompt_tokens
        return max(self.answer_tokens, prompt)

    @cached_property
    def alone(self) -> tuple[Workload, ...]:
        """The workload of a model that only has blocks of one kind, for each kind of block."""
        return tuple(replace(self, facts=facts, costs=None) for facts in self.facts.alone)

    @cached_property
    def parts(self) -> list[tuple[Workload, int, int]]:
        """The parts of the model, for each size of block: the workload of a model that only has
        such blocks, how many the model has, and how many of them are trained."""
        facts, training = self.facts, self.training
        trained = facts.counts_of_last(training.reach(facts))
        every = facts.counts_of_last(facts.blocks)
        return [(self.alone[kind], count, trained.get(kind, 0)) for kind, count in every.items()]

    @cached_property
    def loaded(self) -> ModelFacts:
        """The facts, with embedding and head in memory if they cannot be read from the files."""
        return self.facts if self.can_stream else vocabulary_held(self.facts)

    @property
    def vocabulary(self) -> int:
        """V, or 0 if no logits are computed."""
        return 0 if self.score_head else self.facts.vocabulary


def workload_of(
    config: TrainConfig,
    facts: ModelFacts,
    data: DataSizes,
    process: ProcessFacts,
    *,
    can_stream: bool = True,
    before_bytes: int = 0,
    reward_models: tuple[RewardModelSizes, ...] = (),
    teacher: TeacherSizes | None = None,
    joined: bool = False,
    vocabulary: tuple[VocabularyArray, ...] = (),
) -> Workload:
    """The workload of a training run, with the adapters that it has if memory is no limit.

    before_bytes, reward_models, teacher: as in Workload. vocabulary: as in Training.
    joined: whether this process has met others that train with it, even if the settings name none;
        its memory includes what that takes.
    """
    rank, blocks = defaults.largest(config, facts.blocks)
    # Where texts are scored first, those of a group need not be in one micro-batch.
    scored_first = config.objective in SCORED_FIRST
    together = 1 if scored_first else config.texts_together
    lengths = tuple(sorted(set(data.lengths)))
    batch_size = defaults.batch_size(config, rows=0) * together
    if config.packing:  # count a packed row as several rows of the longest text
        lengths = lengths[-1:]
        batch_size = max(1, -(-config.max_seq_length // lengths[0]))
    rollouts = rollout_sizes(config, data.prompt_tokens) if config.samples_completions else None
    in_memory = config.prefix_cache == "memory"
    ring_bytes = RING_BYTES * (config.has_ranks and not joined)
    return Workload(
        facts=facts,
        training=Training(
            blocks=blocks,
            rank=rank,
            targets=config.lora_targets,
            patterns=ByLayer.of(config.lora_rank).patterns,
            alphas=ByLayer.of(config.lora_alpha).patterns,
            optimizer=config.optimizer,
            optimizer_bits=config.optimizer_bits,
            adapter=config.adapter_kind,
            adapter_dtype=config.adapter_dtype,
            experts=config.lora_experts,
            rounding=config.qat,
            vocabulary=vocabulary,
            at_a_time=config.blocks_per_period,
        ),
        lengths=lengths,
        batch_size=batch_size,
        rows_per_step=defaults.rows_per_step(config, rows=0) * together
        if rollouts is None
        else rollouts.rows,
        rows_together=together,
        packed=config.packing,
        engine=config.plan,
        spill=config.spill,
        can_stream=can_stream,
        prefix_bytes=in_memory * data.prefix_tokens * facts.hidden * facts.float_bytes,
        prefix_texts=in_memory * data.prefix_texts,
        answer_tokens=data.answer_tokens,
        rollouts=rollouts,
        soft=rollouts if config.objective == SOFT else None,
        reward_models=reward_models,
        teacher=teacher,
        scores=scored_first or config.scores_completions,
        noise=config.neftune_alpha > 0,
        score_head=config.objective == REWARD,
        reduces=joined or config.has_ranks,
        given_adapter=bool(config.from_adapter),
        before_bytes=before_bytes,
        steps=replace(
            data.steps,
            cached_prefix=config.prefix_cache != "off",
            unpredicted=unpredicted_steps(config),
        ),
        process=replace(process, python_bytes=process.python_bytes + ring_bytes),
    )


def in_steps(sizes: TeacherSizes, config: TrainConfig, longest: int) -> TeacherSizes:
    """The sizes of a teacher with what the steps of a run need; longest: tokens of its longest
    row."""
    again = config.samples_completions or config.teacher_cache == "off"
    tokens = defaults.rows_per_step(config, rows=0) * longest if again else 0
    return replace(sizes, step_tokens=tokens, again=again, softmax=keeps_softmax(config))


def keeps_softmax(config: TrainConfig) -> bool:
    """Return whether a divergence needs the normalization of the teacher's predictions first."""
    return config.objective == DISTILL and config.divergence.startswith(JSD)


def unpredicted_steps(config: TrainConfig) -> str:
    """Say why the time of the steps of such a run is not predicted; empty if it is."""
    if config.samples_completions:
        return "the time of generated completions is not predicted"
    return "the time of a teacher is not predicted" if config.objective == DISTILL else ""


def rollout_sizes(config: TrainConfig, prompt_tokens: int) -> RolloutSizes:
    """The completions of each step of a run that generates some."""
    group = config.completions_of_prompt
    rows = group * defaults.rows_per_step(config, rows=0)
    if config.converses:
        return RolloutSizes(config.max_seq_length, 1, group, rows, converses=True)
    return RolloutSizes(prompt_tokens, config.max_new_tokens, group, rows)


# A memory plan in words


def words(plan: Plan, longest: int) -> str:
    """A plan as text: `streamed, micro-batches of 2 x 512 tokens`."""
    rows = max(1, plan.micro_tokens // longest)
    disk = ", optimizer on disk" if plan.spill else ""
    kept = f", {kept_words(plan.kept)}" if plan.kept else ""
    stay = f", weights of {counted(plan.resident, 'block')} in memory" if plan.resident else ""
    alone = "" if plan.blocks_ahead else ", one block read at a time"
    waves = f", {counted(plan.wave, 'completion')} at a time" if plan.wave else ""
    teacher = ", teacher in memory" if plan.teacher_blocks else ""
    teacher += "" if plan.teacher_ahead else ", one block of the teacher read at a time"
    more = f"{disk}{kept}{stay}{alone}{waves}{teacher}"
    return f"{plan.engine}, micro-batches of {rows} x {longest} tokens{more}"


def kept_words(kept: Kept) -> str:
    """`attention of 16 and linear layers of 4 blocks kept`"""
    counts = {
        "attention": kept.attention,
        "linear layers": kept.linear,
        "activations": kept.activations,
    }
    *most, last = [f"{name} of {count:,}" for name, count in counts.items() if count]
    text = f"{', '.join(most)} and {last}" if most else last
    return f"{text} {'block' if set(kept) <= {0, 1} else 'blocks'} kept"
