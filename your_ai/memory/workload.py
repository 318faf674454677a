"""What a process does and how, as far as its memory depends on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from your_ai.gates.text import counted
from your_ai.memory.coefficients import PACKAGED, Coefficients
from your_ai.memory.facts import ModelFacts


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


@dataclass(frozen=True, kw_only=True)
class Training:
    """The adapters: `rank`, on the layers named in `targets`, in the last `blocks` blocks."""

    blocks: int
    rank: int
    targets: tuple[str, ...]
    optimizer: str = "adamw"
    optimizer_bits: int = 32
    dora: bool = False
    adapter_dtype: str = "float32"
    """Of the matrices A and B, and of their gradients: float32 or bfloat16."""
    experts: bool = False
    """Whether names without a dot select routed experts, too: --lora-experts."""


class Kept(NamedTuple):
    """What the last trained blocks keep from the forward pass to the backward pass, so that it is
    not computed again: for how many of them, counted from the last."""

    linear: int = 0
    """The outputs of the linear layers."""
    attention: int = 0
    """The outputs of attention, and the log-sum-exps of its scores."""
    activations: int = 0
    """The product of an MLP's gate and its derivatives, in place of the outputs of two layers; at
    most `linear`."""

    def __bool__(self) -> bool:
        """Whether anything is kept."""
        return any(self)


NOTHING = Kept()
KeptAt = Callable[[int, int], Kept]  # (rows, tokens per row) of a micro-batch -> what is kept


@dataclass(frozen=True)
class Plan:
    """How a step is computed."""

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

    @property
    def gradients_on_disk(self) -> bool:
        """Whether the gradients of a block are written to disk as soon as they are there."""
        return self.engine != "fused"

    @property
    def inputs_on_disk(self) -> bool:
        """Whether the inputs of blocks are on disk between their passes: the gradients are, and
        nothing that is larger is kept in memory."""
        return self.gradients_on_disk and not self.kept

    @property
    def states_on_disk(self) -> bool:
        """Whether the states of the optimizer are kept on disk."""
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
    """What the steps of a run compute, as far as their time depends on it and memory does not."""

    rows_of_length: tuple[tuple[int, int], ...] = ()
    """(T, rows of the data that are padded to T); empty if all are as long as the longest."""
    trained_share: float = 1.0
    """Of the tokens with padding, those that are targets."""
    steps: int = 0
    """Of the whole run; 0 if it is not known."""
    on_cpu: bool = True
    """Whether the device is a CPU, on which attention is computed in blocks of queries."""
    cached_prefix: bool = False
    """Whether the frozen blocks below the first adapter only run in the first epoch."""
    scores_first: bool = False
    """Whether all rows are scored before they are trained."""
    has_vocabulary: bool = True
    """Whether the head gives logits."""
    unpredicted: str = ""
    """Why the time of such steps is not predicted; empty if it is."""


@dataclass(frozen=True, kw_only=True)
class RewardModelSizes:
    """A trained reward model, which scores the completions of each step."""

    training: Training
    """Its adapter."""
    facts: ModelFacts | None = None
    """Of its base; None if that is the model that is trained, whose weights it shares."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a process does, independent of the plan and of the micro-batch."""

    facts: ModelFacts
    training: Training
    python_bytes: int = 0
    """Memory of the process without a model."""
    cache_bytes: int = 0
    """MLX's cache of freed buffers."""
    prefix_bytes: int = 0
    """A frozen-prefix cache in memory."""
    answer_tokens: int = 0
    """Longest sample prompt plus its answer, in tokens; 0 without samples."""
    rollouts: RolloutSizes | None = None
    """The completions that each step generates before it trains them, if it does."""
    forward: bool = False
    """Evaluation only: no gradients and no optimizer."""
    scores: bool = False
    """The step also scores its rows without gradients."""
    noise: bool = False
    """Noise is added to the embeddings."""
    score_head: bool = False
    """The head gives one number per text, and not logits."""
    reward_models: tuple[RewardModelSizes, ...] = ()
    """Those that score the completions of each step."""
    soft: RolloutSizes | None = None
    """The completions that the step trains through, by columns if the weights are resident."""
    reduces: bool = False
    """Gradients are summed over several processes."""
    sliced: bool = False
    """Quantized weights are dequantized in slices, as on the CPU, so that graphs are larger."""
    coefficients: Coefficients = PACKAGED

    @cached_property
    def alone(self) -> tuple[Workload, ...]:
        """For each kind of block, the workload of a model that only has blocks of this kind."""
        return tuple(replace(self, facts=facts) for facts in self.facts.alone)

    @cached_property
    def parts(self) -> list[tuple[Workload, int, int]]:
        """For each size of block: the workload of a model that only has such blocks, how many the
        model has, and how many of them are trained."""
        facts, training = self.facts, self.training
        trained = facts.counts_of_last(training.blocks)
        every = facts.counts_of_last(facts.blocks)
        return [(self.alone[kind], count, trained.get(kind, 0)) for kind, count in every.items()]

    @property
    def vocabulary(self) -> int:
        """V, or 0 if no logits are computed."""
        return 0 if self.score_head else self.facts.vocabulary


# A memory plan in words


def words(plan: Plan, longest: int) -> str:
    """A plan as text: `streamed, micro-batches of 2 x 512 tokens`."""
    rows = max(1, plan.micro_tokens // longest)
    disk = ", optimizer on disk" if plan.spill else ""
    kept = f", {kept_words(plan.kept)}" if plan.kept else ""
    stay = f", weights of {counted(plan.resident, 'block')} in memory" if plan.resident else ""
    alone = "" if plan.blocks_ahead else ", one block read at a time"
    waves = f", {counted(plan.wave, 'completion')} at a time" if plan.wave else ""
    return (
        f"{plan.engine}, micro-batches of {rows} x {longest} tokens{disk}{kept}{stay}{alone}{waves}"
    )


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
