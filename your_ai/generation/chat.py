"""A conversation with a run, turn by turn, and with its base model beside it.

What was said is a frozen `Conversation`. A `Talker` holds the model, and what it has read so
far: only what is new in a conversation is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from your_ai.config import nearest
from your_ai.engine.weights import put_layers, reads_its_vocabulary
from your_ai.errors import UserError
from your_ai.generation.generate import (
    SEEDS,
    Message,
    Sampling,
    context_tokens,
    load_run,
    prompt_tokens,
    respond,
    whole_text,
    with_system,
)
from your_ai.nets.saved_adapter import Trained

HELD_TOKENS = 4096  # of a conversation under --max-memory, beside an answer

Responses = Generator[GenerationResponse, None, None]

COMMANDS = {
    "reset": "begin a new conversation",
    "base": "answer the last question with the base model too",
    "base on": "answer every question with both, until /base off",
    "system TEXT": "set the system prompt; without TEXT there is none",
    "help": "show this",
    "exit": "leave, as Ctrl-D does",
}


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """What was said; the answers are the adapter's. compares: ask the base every time."""

    system: str = ""
    turns: tuple[Turn, ...] = ()
    compares: bool = False

    def messages(self, question: str) -> list[Message]:
        """For a chat template, up to the answer to `question`."""
        said = [
            message
            for turn in self.turns
            for message in (
                {"role": "user", "content": turn.question},
                {"role": "assistant", "content": turn.answer},
            )
        ]
        return with_system([*said, {"role": "user", "content": question}], self.system)

    def followed_by(self, question: str, answer: str) -> Conversation:
        return replace(self, turns=(*self.turns, Turn(question, answer)))

    def before_the_last(self) -> Conversation:
        return replace(self, turns=self.turns[:-1])


@dataclass(frozen=True)
class ChatLine:
    """What a user typed: a command and what follows it, or a question where `command` is ""."""

    command: str
    text: str


def parse(line: str) -> ChatLine:
    """Raises UserError for a command that there is not."""
    line = line.rstrip()
    if not line.startswith("/"):
        return ChatLine("", whole_text(line.strip(), "the question"))
    word, _, rest = line[1:].partition(" ")
    name = {"quit": "exit", "bye": "exit", "?": "help"}.get(word, word)
    known = {command.split()[0] for command in COMMANDS}
    if name not in known:
        hint = nearest(name, known) or "; /help lists them"
        raise UserError(f"/{word}: no such command{hint} (a space before it makes it a question)")
    rest = whole_text(rest.strip(), f"/{word}")
    if name == "base" and rest not in ("", "on", "off"):
        raise UserError(f"/base {rest}: give on, off, or nothing")
    return ChatLine(name, rest)


@dataclass
class CacheMemory:
    """What a model has read: `layers`, mlx-lm's cache, holds `tokens`; None: nothing."""

    tokens: list[int] = field(default_factory=list)
    layers: list[Any] | None = None

    def recall(self, model: nn.Module, prompt: list[int]) -> list[int]:
        """Keep what `prompt` begins with; the tokens that are left to read, at least one.

        A cache that cannot be cut there, as one of a sliding window, is begun anew.
        """
        shared = 0
        for ours, theirs in zip(self.tokens, prompt[:-1], strict=False):
            if ours != theirs:
                break
            shared += 1
        surplus = len(self.tokens) - shared
        if self.layers is None or trim_prompt_cache(self.layers, surplus) != surplus:
            self.layers, shared = make_prompt_cache(model), 0
        self.tokens = prompt[:shared]
        return prompt[shared:]

    def read_on(
        self, model: nn.Module, tokenizer: Any, prompt: list[int], sampling: Sampling
    ) -> Responses:
        """The answer to the whole of `prompt`, as `respond` has it.

        The caller may stop at any token; where it fails on the way, nothing is kept.
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
    """The model computes what its base does until the block ends; nothing is loaded for it."""
    adapted = {name: module for name, module in model.named_modules() if "lora_a" in module}
    base = {n: m["linear"] if "linear" in m else m["embedding"] for n, m in adapted.items()}
    put_layers(model, base)
    try:
        yield
    finally:
        put_layers(model, adapted)


@dataclass
class Talker:
    """A run's model, its base, and what each has read.

    base: of its own where weights are streamed, which holds next to nothing; None where it is
    `model` without its adapter. most_tokens: of prompt and answer, None for no limit; asked:
    the questions so far, each of which is drawn from a seed of its own.
    """

    model: nn.Module
    base: nn.Module | None
    tokenizer: Any
    sampling: Sampling
    most_tokens: int | None = None
    asked: int = 0
    memory: CacheMemory = field(default_factory=CacheMemory)
    base_memory: CacheMemory = field(default_factory=CacheMemory)

    def check(self, conversation: Conversation) -> None:
        """Raises UserError where the template does not take the system prompt, say."""
        whole_text(conversation.system, "--system")
        self.prompt(conversation, "Hello")

    def prompt(self, conversation: Conversation, question: str) -> list[int]:
        """Raises UserError where it leaves no room for an answer."""
        tokens = prompt_tokens(self.tokenizer, conversation.messages(question))
        if self.most_tokens is not None and len(tokens) >= self.most_tokens:
            raise UserError(
                f"the conversation has {len(tokens)} tokens and there is room for "
                f"{self.most_tokens}; /reset begins a new one"
            )
        return tokens

    def answer(self, conversation: Conversation, question: str, adapted: bool = True) -> Responses:
        """The answer of the run or, not `adapted`, of its base, to be stopped at any token."""
        tokens = self.prompt(conversation, question)
        sampling = replace(
            self.sampling,
            seed=(self.sampling.seed + self.asked) % SEEDS,
            max_tokens=self.room(tokens),
        )
        if adapted:
            yield from self.memory.read_on(self.model, self.tokenizer, tokens, sampling)
        elif self.base is not None:
            yield from self.base_memory.read_on(self.base, self.tokenizer, tokens, sampling)
        else:
            with without_adapter(self.model):
                yield from self.base_memory.read_on(self.model, self.tokenizer, tokens, sampling)

    def room(self, tokens: list[int]) -> int:
        """The most tokens of an answer to a prompt of these."""
        if self.most_tokens is None:
            return self.sampling.max_tokens
        return min(self.sampling.max_tokens, self.most_tokens - len(tokens))

    def is_full(self, count: int) -> bool:
        """Whether an answer cut at so many tokens was cut for want of room."""
        return count < self.sampling.max_tokens


def open_talker(trained: Trained, sampling: Sampling, max_memory_gb: float | None = None) -> Talker:
    """The model of a run, ready to talk. Raises UserError as `load_run` does."""
    most = context_tokens(trained.base)
    held = 0
    if max_memory_gb is not None:
        most = min(most or HELD_TOKENS, HELD_TOKENS + sampling.max_tokens)
        held = 2 * most  # of the base, too
    model, tokenizer = load_run(trained, True, max_memory_gb, held)
    base = None
    if reads_its_vocabulary(model):  # streamed: its blocks stand where they cannot be changed
        base, _ = load_run(trained, False, max_memory_gb, held)
    return Talker(model, base, tokenizer, sampling, most)
