"""The task of a benchmark: the same weights, adapters and random rows for every contender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from your_ai.config import GRPO, TrainConfig, coerce, flag
from your_ai.data.batches import Batch, RowsAt, micro_batches
from your_ai.data.examples import Examples, RowCounts
from your_ai.objectives.chosen import objective_of
from your_ai.rng import derive_seed

OBJECTIVES = ("sft", "dpo", "ipo", "simpo", "orpo", GRPO)


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The task of every contender: `steps` updates with AdamW on the same batch."""

    folder: str
    dtype: str
    seq_len: int
    batch_size: int
    """Rows of a step, or pairs of rows, or with grpo prompts."""
    lora_rank: int
    lora_layers: str
    """Written as the option of `train`."""
    lora_targets: str
    """Written as the option of `train`."""
    supervised: float
    """The share of each row's tokens that is trained, at the end of the row."""
    steps: int
    max_memory: float | None = None
    """In GB, for each contender's process. Our plans split the batch; the peers get MLX's limit."""
    learning_rate: float = 1e-4
    optimizer_bits: int = 32
    """Of our plans; the peers have 32."""
    adapter_dtype: str = "float32"
    """Of our plans; the peers have float32."""
    objective: str = "sft"
    rollouts: int = 1
    """With grpo: completions of each prompt."""
    kl_beta: float = 0.0
    """With grpo."""
    lora_dropout: float = 0.0
    """Of our plans; the peers have none."""
    measures: bool = False
    """Whether the estimates of our named plans come from measured costs, and not from a guess."""

    @property
    def targets(self) -> int:
        """Trained tokens per row; with grpo, those of each completion."""
        return max(1, round(self.supervised * self.seq_len))

    @property
    def rows_together(self) -> int:
        """1, or 2 for pairs."""
        return objective_of(self.train_config()).rows_together

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return self.batch_size * self.rows_together * self.rollouts

    def train_config(self, plan: str = "auto") -> TrainConfig:
        """The settings for our engines. Raises UserError if the adapter options are invalid."""
        text = {"lora_layers": self.lora_layers, "lora_targets": self.lora_targets}
        grpo = dict[str, Any]()
        if self.objective == GRPO:
            grpo = {"rollouts": self.rollouts, "prompts_per_step": self.batch_size}
            grpo |= {"max_new_tokens": self.targets, "kl_beta": self.kl_beta, "kl": "k3"}
        return TrainConfig(
            lora_rank=self.lora_rank,
            **{name: coerce(name, value, flag(name)) for name, value in text.items()},
            learning_rate=self.learning_rate,
            optimizer_bits=coerce("optimizer_bits", self.optimizer_bits, "--optimizer-bits"),
            adapter_dtype=coerce("adapter_dtype", self.adapter_dtype, "--adapter-dtype"),
            lora_dropout=self.lora_dropout,
            warmup_steps=0,
            max_grad_norm=0,
            batch_size=self.batch_size * self.rollouts,
            max_memory=self.max_memory,
            plan=coerce("plan", plan, "--plan"),
            objective=coerce("objective", self.objective, "--objective"),
            **grpo,
        )

    def of_single_rows(self) -> Contest:
        """Supervised fine-tuning on the same rows."""
        return replace(self, objective="sft", batch_size=self.rows)


def contest_tokens(contest: Contest, vocabulary: int) -> np.ndarray:
    """(rows, T + 1) random tokens, the same for every contender. The rows of a pair have the
    same prompt."""
    rng = np.random.Generator(np.random.PCG64(derive_seed("bench tokens")))
    tokens = rng.integers(0, vocabulary, (contest.rows, contest.seq_len + 1), dtype=np.uint32)
    if contest.rows_together > 1:
        tokens[1::2, : -contest.targets] = tokens[::2, : -contest.targets]
    return tokens


def examples_of(tokens: np.ndarray, targets: int) -> Examples:
    """Rows of equal length, (rows, T + 1) tokens, of which the last `targets` are trained."""
    trained = np.zeros(tokens.shape, bool)
    trained[:, tokens.shape[1] - targets :] = True
    starts = np.arange(len(tokens) + 1) * tokens.shape[1]
    weights = np.ones(len(tokens), np.float32)
    return Examples(tokens.reshape(-1), trained.reshape(-1), starts, weights, RowCounts())


def contest_batches(contest: Contest, tokens: np.ndarray, rows_at: RowsAt) -> list[Batch]:
    """The micro-batches of a step, which trains every row."""
    examples, edges = examples_of(tokens, contest.targets), np.array([contest.seq_len])
    rows = np.arange(len(examples))
    return list(micro_batches(examples, rows, rows_at, edges, contest.rows_together))


def contest_prompts(contest: Contest, tokens: np.ndarray) -> np.ndarray:
    """(prompts, T + 1 - targets) what is completed; tokens: as `contest_tokens` returned them."""
    return tokens[:: contest.rollouts, : -contest.targets]


def contest_reward(tokens: Sequence[int] | np.ndarray) -> float:
    """The reward of a completion: the share of even tokens."""
    return 1 - float(np.mean(np.asarray(tokens) % 2))
