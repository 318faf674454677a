"""The credit of the turns of conversations: what each is the reason for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from your_ai.config import TrainConfig
from your_ai.objectives.grpo import AdvantageKind, advantages_of, discounted
from your_ai.run.rollout_files import RolloutRecord


def credited(
    records: Sequence[RolloutRecord],
    states: Sequence[Sequence[str]],
    config: TrainConfig,
    weight: float,
) -> list[RolloutRecord]:
    """The records with an advantage for each turn, as of GiGPO (Feng et al. 2025,
    arXiv:2505.10978): that of the conversation, and how much better the discounted rewards from
    the turn on are than those of turns of the group that began in the same state.

    What the conversation earned beside the rewards of its turns, such as that of a function, is
    earned by its last turn. records: with the advantages of conversations. states: what each heard
    before each of its turns. weight: of the environment's rewards.
    """
    returns = [discounted(turn_rewards(r, weight), config.discount) for r in records]
    alike: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for number, (record, own) in enumerate(zip(records, states, strict=True)):
        for turn, state in enumerate(own if record.reward is not None else ()):
            alike.setdefault((record.row, state), []).append((number, turn))
    found = [np.full(len(returns[i]), record.advantage) for i, record in enumerate(records)]
    kind: AdvantageKind = config.advantage
    for places in alike.values():
        values = np.array([[returns[number][turn] for number, turn in places]])
        for (number, turn), value in zip(places, advantages_of(values, kind)[0], strict=True):
            found[number][turn] += value
    return [
        replace(record, conversation=replace(record.conversation, advantages=own.tolist()))
        for record, own in zip(records, found, strict=True)
        if record.conversation is not None
    ]


def turn_rewards(record: RolloutRecord, weight: float) -> np.ndarray:
    """(n,) the rewards of the turns of a conversation, whose sum is its reward; 0 if missing.

    weight: of the environment's.
    """
    assert record.conversation is not None
    found = weight * np.array([reward or 0.0 for reward in record.conversation.rewards])
    found[-1:] += (record.reward or 0.0) - found.sum()  # a conversation may have no turn
    return found
