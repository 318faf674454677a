"""Sentences of a model card about the training."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from your_ai.config import GRPO, REWARD, SFT, SOFT
from your_ai.rewards.names import RUN, WITH_ARGUMENT, is_function, parse_rewards

if TYPE_CHECKING:  # it loads MLX
    from your_ai.nets.saved_adapter import Trained

# The paper of each objective but supervised fine-tuning, at arXiv.
PAPERS = {
    "dpo": "2305.18290",
    "ipo": "2310.12036",
    "simpo": "2405.14734",
    "orpo": "2403.07691",
    "kto": "2402.01306",
    GRPO: "2402.03300",
    REWARD: "2203.02155",
    SOFT: "1611.01144",
}
ROWS = {  # what the rows of the data are, by their kind
    "answers": "answers",
    "pairs": "pairs of answers",
    "labels": "answers labeled as good or bad",
    "prompts": "its own completions of prompts",
    "rated": "answers that were compared or scored",
}
OBJECTIVE_NAMES = {
    "simpo": "SimPO",
    REWARD: "as a reward model",
    SOFT: "straight-through Gumbel softmax",
}


def objective_of(trained: Trained) -> str:
    """The objective of the run; that of supervised fine-tuning for one that trained nothing."""
    return SFT if trained.folder.untrained else trained.config.objective


def origin_notes(trained: Trained) -> list[str]:
    """Sentences about how the adapter was made, beyond supervised fine-tuning of the base."""
    if trained.folder.untrained == "merged":
        return ["It was merged from other adapters."]
    notes, objective = [], objective_of(trained)
    if objective != SFT:
        rows = ROWS[trained.config.row_kind]
        name = OBJECTIVE_NAMES.get(objective, objective.upper())
        paper = PAPERS[objective]
        link = f"[arXiv:{paper}](https://arxiv.org/abs/{paper})"
        how = name if objective == REWARD else f"with {name}"
        notes.append(f"It was trained {how} ({link}) on {rows}.")
    if objective == SOFT:
        notes.append(
            f"They were scored by the reward model {code(named_run(trained.config.reward_model))}."
        )
    if objective == GRPO and trained.config.reward:
        notes.append(f"They were rewarded for {rewards_text(trained.config.reward)}.")
    if trained.config.from_adapter:
        notes.append("Its training began from another adapter.")
    return notes


def end_note(token: str) -> str:
    """A sentence about the end token that training added to those of the base; empty if none."""
    if not token:
        return ""
    text = "".join(token.replace("`", "").split())  # code keeps its brackets, as `code` does not
    return (
        f"Answers end with `{text}`, which is no end token of the base: generate with "
        "`--extra-eos-token` in mlx-lm, or with `eos_token_id` in transformers."
    )


def named_run(reward: str) -> str:
    """A reward `run:PATH` as `run:NAME`, without the folders of this machine; others stay."""
    kind, colon, path = reward.partition(":")
    return f"{kind}:{Path(path).name}" if colon and kind.strip() == RUN else reward


def rewards_text(texts: Sequence[str]) -> str:
    """Rewards with their weights. Of a function, only its own name."""
    found = []
    for each in parse_rewards(texts):
        found.append(f"{code(without_module(named_run(each.name)))} (weight {each.weight:g})")
    return ", ".join(found)


def without_module(name: str) -> str:
    """The name of a reward or a metric; of a function, without the user's module."""
    own = name.partition(":")[0] not in WITH_ARGUMENT and is_function(name)
    return name.rpartition(":")[2] if own else name


def code(text: str) -> str:
    return f"`{cell(text).replace('`', '')}`"


def cell(text: str) -> str:
    """A text that cannot end a table cell or begin markup."""
    return re.sub(r"[|<>\[\]\s]+", " ", text).strip()
