"""Completions with what they earn: of a step of training, or of a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from your_ai.data.encode import Encoder, token_ids
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import Chat, Question
from your_ai.generation.conversations import Conversations
from your_ai.generation.rollouts import Completion, RolloutPrompt
from your_ai.rewards.chosen import Pending, Rewarded, Rewards
from your_ai.rewards.rollout import Rollout
from your_ai.run.rollout_files import RolloutRecord


@dataclass(frozen=True)
class Collected:
    """The completions of some prompts, in their order, whose rewards are being computed."""

    ordered: Sequence[tuple[int, Completion]]
    """Each with the index of its prompt."""
    pending: Pending
    talks: Conversations | None

    def records(self, rows: Sequence[int], result: Rewarded) -> list[RolloutRecord]:
        """The completions with what they earned. rows: by prompt. result: of `pending`."""
        found = [
            record_of(rows[place], completion, self.pending.rollouts[index], result, index)
            for index, (place, completion) in enumerate(self.ordered)
        ]
        if self.talks is None:
            return found
        return self.talks.recorded(found, [each for _, each in self.ordered])


def collect(
    encoder: Encoder,
    rewards: Rewards,
    asked: Sequence[Mapping[str, Any]],
    prompts: Sequence[RolloutPrompt],
    completions: Iterator[Completion],
    step: int,
    talks: Conversations | None,
) -> Collected:
    """Take the completions as they come, and begin to reward those of a prompt when all are there.

    asked: by prompt, as of `asked_of`. talks: the conversations, if completions are such. Raises
    UserError, and what `completions` raises.
    """
    groups: list[dict[int, Completion]] = [{} for _ in prompts]
    pending: dict[int, Pending] = {}
    for completion in completions:
        place = completion.prompt
        group = groups[place]
        group[completion.sample] = completion
        if len(group) == len(prompts[place].seeds):
            ids = prompts[place].tokens
            rollouts = [
                rollout_of(encoder.tokenizer, asked[place], group[sample], place, ids, talks)
                for sample in sorted(group)
            ]
            pending[place] = rewards.begin(rollouts, step)
    ordered = [(place, group[s]) for place, group in enumerate(groups) for s in sorted(group)]
    whole = Pending.joined([pending[place] for place in range(len(prompts))])
    return Collected(ordered, whole, talks)


def rollout_of(
    tokenizer: Any,
    asked: Mapping[str, Any],
    completion: Completion,
    group: int,
    prompt: np.ndarray,
    talks: Conversations | None,
) -> Rollout:
    """A completion as rewards receive it; prompt: its tokens."""
    tokens = completion.tokens[: -1 if completion.stopped else None]
    found = Rollout(
        completion=tokenizer.decode(list(tokens), skip_special_tokens=True),
        tokens=len(completion.tokens),
        truncated=not completion.stopped,
        group=group,
        ids=(*prompt.tolist(), *completion.tokens),
        **asked,
    )
    place = completion.prompt, completion.sample
    return found if talks is None else talks.rollout(place, found, completion)


def asked_of(questions: PromptRows, row: int, encoder: Encoder) -> dict[str, Any]:
    """The columns of a row that reward functions receive; the expected answer is decoded as
    completions are."""
    content, parsed = questions.read(row)
    question = parsed.content
    assert isinstance(question, Question)
    messages, expected = question.messages, encoder.expected_of(question, parsed.where)
    if isinstance(question.expected, Chat):
        ids = token_ids(encoder.tokenizer, expected or "", parsed.where, special=False)
        expected = encoder.tokenizer.decode(ids, skip_special_tokens=True)
    return {
        "prompt": messages[-1]["content"],
        "messages": messages,
        "expected": expected,
        "row": content,
        "where": parsed.where,
    }


def record_of(
    row: int, completion: Completion, rollout: Rollout, rewarded: Rewarded, place: int
) -> RolloutRecord:
    """A completion with what it earned; place: its index among those that were rewarded."""
    return RolloutRecord(
        row=int(row),
        sample=completion.sample,
        where=rollout.where,
        question=rollout.prompt,
        expected=rollout.expected,
        completion=rollout.completion,
        tokens=list(completion.tokens),
        stopped=not rollout.truncated,
        rewards={name: values[place] for name, values in rewarded.values.items()},
        reward=rewarded.totals[place],
        reply=rewarded.replies[place],
    )
