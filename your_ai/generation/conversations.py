"""Conversations: what environments say to the model, as tokens, and what it earns.

The environments run in other processes (`environments/pool.py`); only what they said is here.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from your_ai.config import TrainConfig
from your_ai.data.encode import Encoder
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import Chat, Question, Row
from your_ai.data.sampled_chat import REWRITTEN, CannotGoOn, Heard, SampledChat
from your_ai.data.turns import ASSISTANT
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import EnvironmentFailed, HostOptions, Observation
from your_ai.errors import UserError
from your_ai.gates.text import counted
from your_ai.gates.untrusted import is_number
from your_ai.generation.rollouts import Completion, Reply
from your_ai.generation.tool_calls import check_can_call, shows_tools
from your_ai.rewards.rollout import Rollout
from your_ai.run.rollout_files import DONE, ConversationRecord, RolloutRecord, TokenPart

MOST_CHARACTERS = 32  # of a token, on average
NO_ROOM = "--max-seq-length"  # how conversations end that the environment does not end
CUT_OFF = "--max-new-tokens"
NO_TURNS = "--max-turns"


class Environments(Protocol):
    """Environments in processes of their own, by the keys of their conversations."""

    def start(self, key: int, row: Mapping[str, Any], seed: int) -> Future[Observation]: ...
    def step(self, key: int, message: Mapping[str, Any]) -> Future[Observation]: ...
    def close(self, key: int) -> Future[None]: ...


@dataclass(frozen=True)
class Task:
    """A row of the data, for the environment of a conversation."""

    row: Mapping[str, Any]
    where: str
    seed: int
    """Of the environment, from 0 to 2^32 - 1."""


def task_of(config: TrainConfig, content: Mapping[str, Any], row: Row, seed: int) -> Task:
    """The task of a row, with the JSON object that it was parsed from: an environment gets this,
    and tools the messages of its prompt."""
    if config.tools:
        assert isinstance(row.content, Question)
        content = {"messages": row.content.messages}
    return Task(content, row.where, seed % (1 << 32))


@dataclass
class SampledConversation:
    """A conversation that is being sampled. Its turns are the answers of the model."""

    key: int
    task: Task
    chat: SampledChat | None = None
    """None before it has begun."""
    begins: int = 0
    """Messages before the first turn."""
    read: int = 0
    """Tokens of the part that is being sampled."""
    last: int = 0
    """The token that ended the last turn."""
    states: list[str] = field(default_factory=list)
    """What the model heard before each turn."""
    rewards: list[float | None] = field(default_factory=list)
    """By turn, as the environment gave them."""
    ended: str = ""
    """DONE, or why it ended before; empty while it goes on."""
    failed: bool = False
    """Whether its environment failed, so that it earned nothing that is known."""
    counts: dict[str, float] = field(default_factory=dict)
    """Numbers that the environment told, summed."""

    @property
    def begun(self) -> SampledChat:
        assert self.chat is not None
        return self.chat

    @property
    def said(self) -> list[dict[str, Any]]:
        """The messages since the first turn."""
        return [] if self.chat is None else self.chat.messages[self.begins :]

    @property
    def earned(self) -> float | None:
        """The sum of the rewards; None if the environment failed, or ended it without any."""
        known = [reward for reward in self.rewards if reward is not None]
        is_known = not self.failed and (known or self.ended != DONE)
        return float(sum(known)) if is_known else None

    def record(self, completion: Completion) -> ConversationRecord:
        """The form in which it is written."""
        parts = [
            TokenPart(list(part.own_prompt), list(part.tokens), [list(s) for s in part.spoken])
            for part in (completion, *completion.more)
            if part.own_prompt
        ]
        malformed = 0 if self.chat is None else self.chat.malformed
        counts = self.counts | {"malformed_calls": float(malformed)}
        return ConversationRecord(parts, self.said, self.ended, self.rewards, counts=counts)


class Conversations:
    """Answers the turns of conversations: an `Answering` of `generation/rollouts.py`."""

    keys = itertools.count()

    def __init__(
        self,
        environments: Environments,
        encoder: Encoder,
        config: TrainConfig,
        tasks: Sequence[Task],
    ) -> None:
        """tasks: by prompt."""
        self.environments, self.encoder, self.config = environments, encoder, config
        self.tasks = tasks
        self.of: dict[tuple[int, int], SampledConversation] = {}
        """By the indices of prompt and seed."""
        self.shown: dict[str, bool] = {}
        """Whether the chat template shows tools, by these as JSON."""
        self.waited_s = 0.0
        """While every conversation waited for its environment."""

    def ask(self, place: tuple[int, int], turn: tuple[int, ...], stopped: bool) -> Future[Any]:
        if place not in self.of:
            task = self.tasks[place[0]]
            found = self.of[place] = SampledConversation(next(self.keys), task)
            return self.environments.start(found.key, task.row, task.seed)
        found = self.of[place]
        found.read += len(turn)
        found.last = turn[-1]
        message = found.begun.hear(turn, stopped)
        if stopped:
            return self.environments.step(found.key, message)
        found.ended = NO_ROOM if found.read >= self.config.max_seq_length else CUT_OFF
        return done(None)

    def reply(self, place: tuple[int, int], found: Future[Any]) -> Reply | None:
        own = self.of[place]
        hear = self.heard if own.chat else self.begin
        try:
            seen = None if own.ended else found.result()
            heard = None if seen is None else hear(own, seen)
        except EnvironmentFailed as error:
            own.ended, own.failed, seen, heard = str(error), True, None, None
        if seen is not None and heard is not None:
            own.read = len(heard.ids) + own.read * (not heard.is_prompt)
            room = min(self.config.max_new_tokens, self.config.max_seq_length - own.read)
            if room > 0:
                own.states.append(state_of(seen))
                return Reply(tuple(heard.ids.tolist()), room, heard.is_prompt)
            own.ended = NO_ROOM
        own.rewards += [None] * (len(own.states) - len(own.rewards))
        self.environments.close(own.key)
        return None

    def heard(self, own: SampledConversation, seen: Observation) -> Heard | None:
        """The tokens that the model reads after its turn; None if the conversation ends.

        Raises EnvironmentFailed, UserError.
        """
        own.rewards.append(seen.reward)
        self.count(own, seen)
        if seen.tools:
            raise EnvironmentFailed("step gave tools, which only reset may give")
        if any(message["role"] == ASSISTANT for message in seen.messages):
            raise EnvironmentFailed("step gave a message of the assistant, which is the model")
        if seen.done or len(own.rewards) >= self.config.max_turns:
            own.begun.append(seen.messages)
            own.ended = DONE if seen.done else NO_TURNS
            return None
        if not seen.messages:
            raise EnvironmentFailed("it gave no message, and did not say that it is done")
        if is_too_long(seen.messages, self.config):
            own.ended = NO_ROOM
            return None
        try:
            heard = own.begun.see(seen.messages, own.last)
        except CannotGoOn as error:
            own.ended = str(error)
            return None
        except UserError as error:  # such as roles that the template refuses
            raise EnvironmentFailed(str(error)) from error
        return heard

    def begin(self, own: SampledConversation, seen: Observation) -> Heard:
        """The prompt of a conversation. Raises EnvironmentFailed."""
        if seen.done or seen.reward is not None:
            raise EnvironmentFailed("reset gave a reward, or said that it is done, before a turn")
        self.count(own, seen)
        where = own.task.where
        if self.config.environment and not self.shows(seen.tools):
            raise EnvironmentFailed("the model's chat template does not show its tools")
        try:
            own.chat, ids = begun(self.encoder, self.config, seen.messages, seen.tools, where)
        except UserError as error:
            raise EnvironmentFailed(str(error)) from error
        own.begins = len(own.chat.messages)
        return Heard(ids, is_prompt=True)

    def shows(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether the model is shown the tools of an environment; they are looked at once,
        as most conversations have the same."""
        text = json.dumps(tools, sort_keys=True)
        if text not in self.shown:
            self.shown[text] = not tools or shows_tools(self.encoder.template, tools)
        return self.shown[text]

    def count(self, own: SampledConversation, seen: Observation) -> None:
        for name, value in seen.info.items():
            if is_number(value):
                own.counts[name] = own.counts.get(name, 0.0) + value

    def waited(self, seconds: float) -> None:
        self.waited_s += seconds

    def recorded(
        self, records: Sequence[RolloutRecord], completions: Sequence[Completion]
    ) -> list[RolloutRecord]:
        """The records of completions with how they went as conversations.

        Raises UserError if no conversation has begun, or if the template ended more than half.
        """
        every = [self.of[place] for place in sorted(self.of)]
        if all(own.chat is None for own in every):
            first = every[0]
            raise UserError(f"{first.task.where}: the environment cannot begin: {first.ended}")
        rewritten = [own for own in every if own.ended == REWRITTEN]
        if 2 * len(rewritten) > len(every):
            raise UserError(f"{rewritten[0].task.where}: {REWRITTEN}")
        found = []
        for record, completion in zip(records, completions, strict=True):
            talk = self.of[completion.prompt, completion.sample].record(completion)
            said = [t for part in talk.parts for a, b in part.spoken for t in part.tokens[a:b]]
            found.append(replace(record, tokens=said, conversation=talk))
        return found

    @property
    def states(self) -> list[list[str]]:
        """Texts that each conversation heard before each of its turns, in the order of records."""
        return [self.of[place].states for place in sorted(self.of)]

    def rollout(self, place: tuple[int, int], rollout: Rollout, completion: Completion) -> Rollout:
        """The same completion, with what it said as a conversation."""
        own = self.of[place]
        said = own.said
        messages = rollout.messages if own.chat is None else own.chat.messages[: own.begins]
        answers = [str(message["content"]) for message in said if message["role"] == ASSISTANT]
        return replace(
            rollout,
            prompt=str(messages[-1]["content"]),
            messages=messages,
            completion=answers[-1] if answers else "",
            tokens=sum(b - a for part in (completion, *completion.more) for a, b in part.spoken),
            truncated=own.ended != DONE,
            said=said,
            earned=own.earned,
            failure=own.ended if own.failed else "",
        )


def is_too_long(messages: Sequence[Mapping[str, Any]], config: TrainConfig) -> bool:
    """Return whether messages cannot fit, so that they need not be tokenized to find out."""
    characters = sum(len(str(message["content"])) for message in messages)
    return characters > MOST_CHARACTERS * config.max_seq_length


def done(value: Any) -> Future[Any]:
    found: Future[Any] = Future()
    found.set_result(value)
    return found


def state_of(seen: Observation) -> str:
    """The messages of an observation as one text, to compare states: without ids, which only say
    which call a result is of."""
    messages = [{k: v for k, v in each.items() if k != "tool_call_id"} for each in seen.messages]
    return json.dumps(messages, sort_keys=True, ensure_ascii=False)


def begun(
    encoder: Encoder,
    config: TrainConfig,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    where: str,
) -> tuple[SampledChat, np.ndarray]:
    """A conversation that begins with these messages, and the tokens of its prompt.

    Raises UserError if it cannot be, or has no room for an answer.
    """
    chat = SampledChat(
        encoder, [dict(tool) for tool in tools] or None, [], where, config.rewritten_turns
    )
    chat.append(messages)
    ids = chat.begin()
    total = len(ids) + config.max_new_tokens
    if total > config.max_seq_length:
        raise UserError(
            f"{where}: the conversation begins with {counted(len(ids), 'token')}, {total:,} with "
            f"--max-new-tokens {config.max_new_tokens}, more than --max-seq-length "
            f"{config.max_seq_length}; raise it, lower --max-new-tokens, or leave this row out"
        )
    return chat, ids


def environments_of(
    config: TrainConfig, tokenizer: Any, rows: Mapping[str, PromptRows]
) -> EnvironmentPool | None:
    """Start the environments that the settings choose, and check that the conversations of the rows
    can begin; None if there are none.

    rows: by split. Raises UserError.
    """
    if not config.converses:
        return None
    if not tokenizer.has_chat_template:
        raise UserError(
            "--environment and --tools: the model's tokenizer has no chat template; use an "
            "instruct model"
        )
    found = EnvironmentPool(host_options(config))
    try:
        if config.tools:
            check_can_call(tokenizer, found.tools)
            check_begins(rows, found.tools, Encoder(tokenizer), config)
    except BaseException:
        found.shutdown()
        raise
    return found


def check_begins(
    rows: Mapping[str, PromptRows],
    tools: Sequence[Mapping[str, Any]],
    encoder: Encoder,
    config: TrainConfig,
) -> None:
    """Raise UserError for a row whose conversation with these tools cannot begin.

    rows: by split.
    """
    for found in rows.values():
        for index in range(len(found.offsets)):
            _, parsed = found.read(index)
            question = parsed.content
            assert isinstance(question, Question)
            if isinstance(question.prompt, Chat) and question.prompt.tools:
                raise UserError(
                    f"{parsed.where}: has tools of its own, and --tools gives others; leave one out"
                )
            begun(encoder, config, question.messages, tools, parsed.where)


def host_options(config: TrainConfig) -> HostOptions:
    """The environment or tools that the settings choose, with their limits."""
    return HostOptions(
        environment=config.environment,
        tools=config.tools,
        timeout_s=config.tool_timeout_s,
        output_characters=config.tool_output_characters,
        trust_code=config.trust_code,
    )
