"""Models that are taught to answer some prompts, so that the rewards of recipes differ."""

from __future__ import annotations

from collections.abc import Sequence

import tinker
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat
from tinker_cookbook.supervised.data import conversation_to_datum

LOSS = 1.0  # of a text; some can be answered in two ways, for ln 2 each at least
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
) -> None:
    """Train on answers of chats until the sum of their losses is below `LOSS` for each chat."""
    data = [conversation_to_datum(list(chat), renderer, None, answers, "none") for chat in chats]
    for _ in range(MOST_STEPS):
        found = model.forward_backward(data, "cross_entropy")
        model.optim_step(tinker.AdamParams(learning_rate=3e-3)).result()
        if found.result().metrics["loss:sum"] < LOSS * len(data):
            return
    raise AssertionError("the model did not learn")
