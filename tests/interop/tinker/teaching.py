"""Models that are taught to answer some prompts, so that the rewards of recipes differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import tinker
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.data import conversation_to_datum

LOSS = 0.1  # of a text, at which a model often answers right
MOST_STEPS = 80


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def teach(
    model: tinker.TrainingClient,
    renderer: Renderer,
    chats: Sequence[Sequence[Message]],
    answers: TrainOnWhat = TrainOnWhat.LAST_ASSISTANT_MESSAGE,
    reduction: Literal["mean", "none"] = "mean",
    loss: float = LOSS,
) -> None:
    """Train on answers of chats until their mean loss is below `loss`.

    reduction: of the losses of tokens to that of a chat.
    """
    data = [conversation_to_datum(list(chat), renderer, None, answers, reduction) for chat in chats]
    for _ in range(MOST_STEPS):
        found = model.forward_backward(data, "cross_entropy")
        model.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
        if found.result().metrics["loss:sum"] < loss * len(data):
            return
    raise AssertionError("the model did not learn")
