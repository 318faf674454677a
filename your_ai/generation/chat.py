"""A conversation with a run, and optionally with its base model for comparison.

The conversation is a frozen `Conversation`. A `ChatSession` has the model and its KV cache, so only
the new part of a conversation is prefilled; and the tools that the model may call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from your_ai.config import nearest
from your_ai.data.encode import Encoder
from your_ai.data.sampled_chat import SampledChat
from your_ai.engine.weights import put_layers, streams_vocabulary
from your_ai.environments.pool import EnvironmentPool
from your_ai.errors import UserError
from your_ai.gates.text import counted
from your_ai.generation.generate import (
    SEEDS,
    Message,
    Sampling,
    check_text,
    context_tokens,
    load_run,
    prompt_tokens,
    respond,
    with_system,
)
from your_ai.generation.tool_calls import (
    NO_TURNS,
    AnswerPiece,
    ToolCaller,
    check_can_call,
    shown_characters,
)
from your_ai.nets.saved_adapter import Trained
from your_ai.rng import derive_seed

HELD_TOKENS = 4096  # conversation length under --max-memory, in addition to an answer

Responses = Generator[GenerationResponse, None, None]
Pieces = Generator[AnswerPiece, None, None]

COMMANDS = {
    "reset": "start a new conversation",
    "base": "answer the last question with the base model too",
    "base on": "answer every question with both models, until /base off",
    "system TEXT": "set the system prompt; without TEXT, remove it",
    "help": "show this list",
    "exit": "leave; Ctrl-D does the same",
}


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    between: tuple[Message, ...] = ()
    """Calls of tools and their results, before the answer."""

    @property
    def messages(self) -> list[Message]:
        asked = {"role": "user", "content": self.question}
        return [asked, *self.between, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True)
class Conversation:
    """The system prompt and all turns so far."""

    system: str = ""
    turns: tuple[Turn, ...] = ()
    """The answers are those of the model with the adapter."""
    compares: bool = False
    """Whether the base model answers every question too."""
    tools: list[Any] | None = None
    """Those that the model is shown."""

    def messages(self, question: str) -> list[Message]:
        """The messages for a chat template, ending with `question`."""
        said = [message for turn in self.turns for message in turn.messages]
        return with_system([*said, {"role": "user", "content": question}], self.system)

    def followed_by(
        self, question: str, answer: str, between: Sequence[Message] = ()
    ) -> Conversation:
        return replace(self, turns=(*self.turns, Turn(question, answer, tuple(between))))

    def before_the_last(self) -> Conversation:
        return replace(self, turns=self.turns[:-1])


@dataclass(frozen=True)
class ChatLine:
    """An input line: a command and its argument, or a question."""

    command: str
    """Empty for a question."""
    text: str


def parse(line: str) -> ChatLine:
    """Parse an input line. Raises UserError for an unknown command."""
    line = line.rstrip()
    if not line.startswith("/"):
        return ChatLine("", check_text(line.strip(), "the question"))
    word, _, rest = line[1:].partition(" ")
    name = {"quit": "exit", "bye": "exit", "?": "help"}.get(word, word)
    known = {command.split()[0] for command in COMMANDS}
    if name not in known:
        hint = nearest(name, known) or "; /help lists them"
        raise UserError(f"/{word}: no such command{hint} (to send it as text, begin with a space)")
    rest = check_text(rest.strip(), f"/{word}")
    if name == "base" and rest not in ("", "on", "off"):
        raise UserError(f"/base {rest}: use /base, /base on or /base off")
    return ChatLine(name, rest)


@dataclass
class CacheMemory:
    """The KV cache of a model between answers."""

    tokens: list[int] = field(default_factory=list)
    """The tokens in the cache."""
    layers: list[Any] | None = None
    """mlx-lm's KV cache; None if it is empty."""

    def recall(self, model: nn.Module, prompt: list[int]) -> list[int]:
        """Keep the common prefix with `prompt`; return the remaining tokens, at least one.

        If the cache cannot be trimmed there, for example with a sliding window, start a new one.
        """
        shared = 0
        for ours, theirs in zip(self.tokens, prompt[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        surplus = len(self.tokens) - shared
        if self.layers is None or cast(int, trim_prompt_cache(self.layers, surplus)) != surplus:
            self.layers, shared = make_prompt_cache(model), 0
        self.tokens = prompt[:shared]
        return prompt[shared:]

    def read_on(
        self, model: nn.Module, tokenizer: Any, prompt: list[int], sampling: Sampling
    ) -> Responses:
        """Generate the answer to `prompt`, as `respond` does, and reuse the cache.

        The caller may stop at any token. If generation fails, the cache is discarded.
        """
        rest = self.recall(model, prompt)
        layers, self.layers = self.layers, None
        self.tokens = list(prompt)
        for response in respond(model, tokenizer, rest, sampling, layers):
            self.tokens.append(response.token)
            self.layers = layers
            yield response
            self.layers = None
        self.layers = layers


@contextlib.contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Turn the adapter off until the `with` block ends, without loading anything."""
    adapted = {name: module for name, module in model.named_modules() if "lora_a" in module}
    base = {n: m["linear"] if "linear" in m else m["embedding"] for n, m in adapted.items()}
    put_layers(model, base)
    try:
        yield
    finally:
        put_layers(model, adapted)


@dataclass
class ChatSession:
    """The model of a run, its base model, and the KV cache of each."""

    model: nn.Module
    base: nn.Module | None
    """A separate base model if weights are streamed, which needs little memory, or if the run
    changed more than its adapter; None if the base is `model` with the adapter off."""
    tokenizer: Any
    sampling: Sampling
    most_tokens: int | None = None
    """Maximum tokens of prompt and answer together; None for no limit."""
    asked: int = 0
    """Number of questions so far; each question has its own sampling seed."""
    memory: CacheMemory = field(default_factory=CacheMemory)
    base_memory: CacheMemory = field(default_factory=CacheMemory)
    tools: Mapping[bool, ToolCaller] = field(default_factory=dict)
    """Those of the model with its adapter (True), and of its base; empty for none."""
    max_turns: int = 1
    """Turns of the model in an answer; all but the last may call tools."""

    def check(self, conversation: Conversation) -> None:
        """Raise UserError if the conversation cannot be used, e.g. if the template refuses it."""
        check_text(conversation.system, "--system")
        self.prompt(conversation, "Hello")

    def forget(self) -> None:
        """Let the tools begin anew."""
        for each in self.tools.values():
            each.forget()

    def prompt(
        self, conversation: Conversation, question: str, between: Sequence[Message] = ()
    ) -> list[int]:
        """The tokens of the prompt. Raises UserError if they leave no room for an answer.

        between: the calls and results after the question, so far.
        """
        messages = [*conversation.messages(question), *between]
        tokens = prompt_tokens(self.tokenizer, messages, tools=conversation.tools)
        if self.most_tokens is not None and len(tokens) >= self.most_tokens:
            shorter = "a lower --tool-output-characters leaves more room, " if between else ""
            raise UserError(
                f"the conversation has {counted(len(tokens), 'token')}, and the limit is "
                f"{self.most_tokens}; {shorter}/reset starts a new one"
            )
        return tokens

    def converse(self, conversation: Conversation, question: str, adapted: bool = True) -> Pieces:
        """Generate an answer as `answer` does, run the tools that it calls, and let the model go on
        with their results, up to an answer without calls.

        The caller may stop at any piece. Raises UserError, RunError.
        """
        tools = self.tools.get(adapted)
        if tools is None:
            with contextlib.closing(self.answer(conversation, question, adapted)) as responses:
                _, _, ended = yield from self.said(responses, may_call=False)
            yield AnswerPiece(ended=ended)
            return
        asked = conversation.messages(question)
        chat = SampledChat(
            Encoder(self.tokenizer), conversation.tools, [*asked], "the conversation"
        )
        for turn in range(1, self.max_turns + 1):
            between = chat.messages[len(asked) :]
            with contextlib.closing(
                self.answer(conversation, question, adapted, between)
            ) as responses:
                ids, rest, ended = yield from self.said(responses, may_call=True)
            message = chat.hear(ids, stopped=True) if ended == "stop" else {}
            if not message.get("tool_calls"):
                yield AnswerPiece(rest, ended=ended)
                return
            yield AnswerPiece(between=message)
            if turn < self.max_turns:
                known = len(chat.messages)
                chat.append((yield from tools.results(message)))
                yield from (AnswerPiece(between=each) for each in chat.messages[known:])
        yield AnswerPiece(ended=NO_TURNS)

    def said(
        self, responses: Responses, may_call: bool
    ) -> Generator[AnswerPiece, None, tuple[list[int], str, str]]:
        """Yield the text of a turn of the model, but no calls. Return its tokens, the text that was
        not yielded, and why it ended."""
        text, shown, ids, ended = "", 0, list[int](), ""
        for response in responses:
            text += response.text
            ids.append(response.token)
            ended = response.finish_reason or ""
            ready = shown_characters(self.tokenizer, text) if may_call else len(text)
            yield AnswerPiece(text[shown:ready], 1)
            shown = ready
        return ids, text[shown:], ended

    def answer(
        self,
        conversation: Conversation,
        question: str,
        adapted: bool = True,
        between: Sequence[Message] = (),
    ) -> Responses:
        """Generate the answer of the run, or of its base model if not `adapted`.

        The caller may stop at any token. between: as for `prompt`.
        """
        tokens = self.prompt(conversation, question, between)
        seed = (self.sampling.seed + self.asked) % SEEDS
        if between:
            seed = derive_seed(seed, "turn", len(between))
        sampling = replace(self.sampling, seed=seed, max_tokens=self.room(tokens))
        yield from self.read_on(tokens, sampling, adapted)

    def read_on(self, tokens: list[int], sampling: Sampling, adapted: bool) -> Responses:
        """Generate the answer of the run to a prompt, or of its base model if not `adapted`."""
        if adapted:
            yield from self.memory.read_on(self.model, self.tokenizer, tokens, sampling)
        elif self.base is not None:
            yield from self.base_memory.read_on(self.base, self.tokenizer, tokens, sampling)
        else:
            with without_adapter(self.model):
                yield from self.base_memory.read_on(self.model, self.tokenizer, tokens, sampling)

    def room(self, tokens: list[int]) -> int:
        """Maximum tokens of an answer to the prompt `tokens`."""
        if self.most_tokens is None:
            return self.sampling.max_tokens
        return min(self.sampling.max_tokens, self.most_tokens - len(tokens))

    def is_full(self, count: int) -> bool:
        """Return whether an answer cut off after `count` tokens hit the conversation's limit."""
        return count < self.sampling.max_tokens


def has_own_base(trained: Trained) -> bool:
    """Return whether the base is another model than that of the run with its adapter turned off."""
    adapter = trained.adapter
    return adapter.kind.is_whole or trained.is_adjusted or bool(adapter.trained_rows)


def open_talker(
    trained: Trained,
    sampling: Sampling,
    max_memory_gb: float | None = None,
    pool: EnvironmentPool | None = None,
    max_turns: int = 1,
) -> ChatSession:
    """Load the model of a run for a conversation. Raises UserError like `load_run`.

    pool: the tools that it may call, if any, in all but the last of `max_turns`.
    """
    most = context_tokens(trained.base)
    held = 0
    if max_memory_gb is not None:
        most = min(most or HELD_TOKENS, HELD_TOKENS + sampling.max_tokens)
        held = 2 * most  # for the model and its base
    apart = has_own_base(trained)
    if apart and max_memory_gb is not None:
        max_memory_gb /= 2
    model, tokenizer = load_run(trained, True, max_memory_gb, held)
    base = None
    # Streamed: the adapter cannot be turned off in its blocks.
    if apart or streams_vocabulary(model):
        base, _ = load_run(trained, False, max_memory_gb, held)
    tools = dict[bool, ToolCaller]()
    if pool is not None:
        check_can_call(tokenizer, pool.tools)
        tools = {adapted: ToolCaller(pool) for adapted in (True, False)}
    return ChatSession(model, base, tokenizer, sampling, most, tools=tools, max_turns=max_turns)
