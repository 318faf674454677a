"""Trained reward models as rewards of completions: `--reward run:NAME`.

A reward model of the same base shares the weights with the model that is trained: it is the same
base with another adapter. One of another base is a second, frozen model under the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from your_ai.config import SOFT, TrainConfig
from your_ai.data.encode import EncodedRow
from your_ai.data.rows import Chat, Pair, Row, Scored
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import UserError
from your_ai.evaluation.reward_model import (
    RewardModel,
    check_reward_run,
    encoder_of,
    engine_of,
    put_reward_model,
    weights_of,
)
from your_ai.files import sha256
from your_ai.hub.find import fingerprint, tokenizer_fingerprint
from your_ai.memory.budget import limit_of
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import Plan, RewardModelSizes
from your_ai.nets.model import learned_positions
from your_ai.nets.parts import skeleton
from your_ai.nets.saved_adapter import Trained, open_trained, shares_weights, training_of
from your_ai.rewards.chosen import ScoreRollouts
from your_ai.rewards.names import RUN, parse_rewards, reward_texts
from your_ai.rewards.rollout import Rollout
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS, SCORE_HEAD


@dataclass(frozen=True)
class RewardRun:
    """A run that is a reward model."""

    name: str
    """As in --reward: `run:NAME`."""
    trained: Trained
    shares_base: bool
    """Whether its base is the model that is trained, with the same weights."""
    shares_tokenizer: bool

    @property
    def checksums(self) -> dict[str, str]:
        """The checksums of the files that decide its scores."""
        folder = self.trained.adapter.folder
        names = (ADAPTERS, ADAPTER_CONFIG, SCORE_HEAD)
        base = {} if self.shares_base else fingerprint(self.trained.base)
        return base | {name: sha256(folder / name) for name in names}

    def sizes(self, base: Path, float_bytes: int) -> RewardModelSizes:
        """The sizes that the memory estimate needs; base: the folder of the trained model."""
        source = base if self.shares_base else weights_of(self.trained)
        facts = facts_of(source, float_bytes)
        adapter = training_of(self.trained.adapter, self.trained.config, facts.blocks)
        return RewardModelSizes(training=adapter, facts=None if self.shares_base else facts)


def reward_runs(config: TrainConfig, files: dict[str, str]) -> list[RewardRun]:
    """The reward models among the rewards of a run.

    files: the checksums of the files of its model. Raises UserError if one is not a reward model.
    """
    found = []
    texts = reward_texts(config)
    for each in parse_rewards(texts) if texts else ():
        if each.kind != RUN:
            continue
        is_trained_against = config.objective == SOFT and each.name == parse_rewards(texts)[0].name
        label = f"{'--reward-model' if is_trained_against else '--reward'} {each.name}"
        try:
            trained = open_trained(each.argument)
        except UserError as error:
            raise UserError(f"{label}: {error}") from error
        check_reward_run(trained, label)
        theirs = fingerprint(trained.base)
        new = config.add_tokens or config.add_special_tokens
        other_tokens = new or trained.tokenizer_files is not None
        found.append(
            RewardRun(
                each.name,
                trained,
                shares_weights(trained, config, files),
                not other_tokens and tokenizer_fingerprint(theirs) == tokenizer_fingerprint(files),
            )
        )
    return found


def open_reward_model(run: RewardRun, policy: Opened) -> Opened:
    """The network of a reward model, with its adapter and score head.

    policy: the model that is trained, before it gets adapters, so that its weights can be shared.
    """
    if run.shares_base:
        opened = replace(policy, network=skeleton(policy.network))
    else:
        opened = open_model(weights_of(run.trained), policy.dtype)
    put_reward_model(opened, run.trained)
    return opened


def scorer_of(run: RewardRun, opened: Opened, plan: Plan, batch_size: int) -> ScoreRollouts:
    """The function that scores completions, with the engine of the plan."""
    trained = run.trained
    engine = "streamed" if plan.engine == "streamed" and opened.can_stream else plan.engine
    model = RewardModel(
        run.name,
        encoder_of(trained, opened, opened.tokenizer(trained.tokenizer_files), limit_of(None)),
        engine_of(opened, engine),
        partial(plan.rows, batch_size=batch_size),
        trained.config.max_seq_length,
        learned_positions(opened.network),
    )
    return partial(score_rollouts, model, run.shares_tokenizer)


def score_rollouts(
    model: RewardModel, shares_tokenizer: bool, rollouts: Sequence[Rollout]
) -> list[float | None]:
    """The scores of the completions; None for one that is empty, or has no finite score.

    shares_tokenizer: the tokens are used as they were sampled; else the texts are encoded again.
    """
    texts = [encoded(model, shares_tokenizer, rollout) for rollout in rollouts]
    there = {place: text for place, text in enumerate(texts) if text is not None}
    found: list[float | None] = [None] * len(rollouts)
    scores = model.scores([*there.values()]) if there else ()
    for place, score in zip(there, scores, strict=True):
        found[place] = float(score) if np.isfinite(score) else None
    model.engine.drop()  # its graphs; the next step may have other lengths
    return found


def encoded(model: RewardModel, shares_tokenizer: bool, rollout: Rollout) -> EncodedRow | None:
    """A completion as the reward model reads it; None if it cannot be read."""
    if shares_tokenizer:
        if model.positions is not None and len(rollout.ids) > model.positions:
            return None
        tokens = np.array([*rollout.ids, 0], np.uint32)
        return EncodedRow(tokens, np.arange(len(tokens)) == len(rollout.ids))
    answer = [{"role": "assistant", "content": rollout.completion}]
    content: Chat | Pair = Chat([*rollout.messages, *answer], None, len(rollout.messages))
    if not model.encoder.tokenizer.has_chat_template:
        content = Pair(rollout.prompt, rollout.completion)
    try:
        (text,) = model.encode(Row(rollout.where, Scored(content, 0.0), 1.0), "truncate")
    except UserError:
        return None
    ends = model.encoder.tokenizer.eos_token_ids
    if rollout.truncated and len(text.tokens) > 2 and int(text.tokens[-2]) in ends:
        tokens = np.delete(text.tokens, -2)  # it was cut off, so it has no end
        text = EncodedRow(tokens, np.arange(len(tokens)) == len(tokens) - 1)
    return text
