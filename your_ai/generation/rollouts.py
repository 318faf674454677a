"""Sample several completions of each of many prompts, many rows at a time.

The tokens of a row are a pure function of the model, its prompt and its seed: each token has a
random key made of the seed and its position. They do not depend on the other rows, unless rounding
decides between two tokens.

Shapes: B rows in a wave, V vocabulary.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from your_ai.engine.weights import last_position_only
from your_ai.memory import allocator
from your_ai.memory.sizes import BATCH_STEP, PREFILL_TOKENS
from your_ai.nets.row_batches import can_merge, groups_heads, grow_by, merged

MOST_CACHED = 128 << 20  # bytes of freed buffers
TURNS_APART = 8  # tokens until rows join the batch again, which copies its cache
POLL_S = 0.05  # between two calls of `step` while all rows wait
Sampler = Callable[[mx.array, mx.array], mx.array]  # ((B, V) logits, (B, 2) keys) -> (B,) tokens
LEAST_TEMPERATURE = 1e-30  # above 0; what is divided by less may be beyond float32


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt, and the seeds of its completions: one completion for each."""

    tokens: np.ndarray
    """(T,), at least one; none if `Answering` gives each completion its prompt."""
    seeds: tuple[int, ...]
    """Each from 0 to 2^64 - 1."""
    max_new_tokens: int | None = None
    """Of each of its completions, at least one, if it has a smaller limit than the others."""
    ends: Callable[[Sequence[int]], bool] | None = None
    """Says whether a completion ends with these tokens, instead of the stop tokens of all."""


@dataclass(frozen=True)
class Completion:
    """The tokens that were sampled for a row."""

    prompt: int
    """The index of its prompt."""
    sample: int
    """The index of its seed."""
    tokens: tuple[int, ...]
    """As they were sampled, with the stop token if there is one."""
    stopped: bool
    """Whether it ended with a stop token, and not at the limit of tokens."""
    spoken: tuple[tuple[int, int], ...] = ()
    """The spans of `tokens` that were sampled; the others are answers."""
    own_prompt: tuple[int, ...] = ()
    """The tokens before `tokens`, if they are not those of its prompt. Its prompt may have none."""
    more: tuple[Completion, ...] = ()
    """The later parts of a conversation, each with a prompt of its own."""


def sampler_of(temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampler:
    """A function that samples a token for each row.

    temperature: divides the logits; 0, or less than `LEAST_TEMPERATURE`, takes the most likely
    token. top_k: sample from the most likely `top_k` tokens; 0 for all. top_p: then from the most
    likely ones whose total probability is at least this.
    """
    if temperature < LEAST_TEMPERATURE:
        return lambda logits, keys: logits.argmax(-1)

    def sample(logits: mx.array, keys: mx.array) -> mx.array:
        logits = logits.astype(mx.float32) * (1 / temperature)
        if 0 < top_k < logits.shape[-1]:
            least = -mx.partition(-logits, top_k - 1, axis=-1)[:, top_k - 1 : top_k]
            logits = mx.where(logits < least, -mx.inf, logits)
        if top_p < 1:
            shares = mx.sort(mx.softmax(logits, axis=-1), axis=-1)[:, ::-1]
            before = mx.cumsum(shares, axis=-1) - shares
            least = mx.where(before < top_p, shares, mx.inf).min(-1, keepdims=True)
            logits = mx.where(mx.softmax(logits, axis=-1) < least, -mx.inf, logits)
        return mx.vmap(draw)(logits, keys)

    return sample


def draw(logits: mx.array, key: mx.array) -> mx.array:
    """A token of a row, (V,) -> ()."""
    return mx.random.categorical(logits, key=key)


def seed_keys(seeds: Sequence[int]) -> mx.array:
    """(B, 2) uint32 random keys of the rows."""
    return mx.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], mx.uint32)


def keys_at(keys: mx.array, positions: mx.array) -> mx.array:
    """(B, 2) the keys of the tokens at these positions, (B,) uint32, of the completions."""
    return keys ^ mx.stack([positions, mx.zeros_like(positions)], axis=1)


@dataclass(frozen=True)
class Reply:
    """Tokens with which a conversation goes on after a turn."""

    tokens: tuple[int, ...]
    """To append, at least one."""
    most: int
    """Of the next turn, in tokens; at least one."""
    is_prompt: bool = False
    """Whether they are all that is read next: a new part, which shares no tokens with the others.
    """


class Answering(Protocol):
    """Answers the turns of conversations. place: the indices of a prompt and a seed."""

    def ask(self, place: tuple[int, int], turn: tuple[int, ...], stopped: bool) -> Future[Any]:
        """Ask for what follows a turn; returns at once. A turn without tokens asks for a prompt.

        stopped: whether the turn ended with a stop token.
        """

    def reply(self, place: tuple[int, int], found: Future[Any]) -> Reply | None:
        """Return what follows, or None if nothing does. found: is done. A prompt comes first, if
        the conversation can begin."""

    def waited(self, seconds: float) -> None:
        """Note how long nothing could be sampled because every row waited for an answer."""


def complete(
    model: nn.Module,
    prompts: Sequence[RolloutPrompt],
    sampler: Sampler,
    stop_tokens: Collection[int],
    max_new_tokens: int,
    rows_at_once: int,
    step: Callable[[int], None] = lambda _: None,
    answering: Answering | None = None,
) -> Iterator[Completion]:
    """Yield the completions of all prompts, each when it is finished.

    stop_tokens: the ids that end a turn. max_new_tokens: of the first turn, at least one.
    rows_at_once: rows that are in memory together. Models whose caches cannot be batched generate
        one row at a time.
    step: is called with the number of rows before each token, with 0 while all rows wait for
        answers, and may raise.
    answering: answers each turn, so that completions are conversations. Without it they have one.

    Each prompt goes through the model once, and what was sampled is not read again. Whoever changes
    the model must not do so before all completions were yielded.
    """
    batchable = can_merge(model)
    stops = frozenset(stop_tokens)

    def by_default(tokens: Sequence[int]) -> bool:
        return tokens[-1] in stops

    rows = [
        SampledRow(
            (number, sample), seed, parts_of(prompt),
            min(max_new_tokens, prompt.max_new_tokens or max_new_tokens), prompt.ends or by_default,
        )
        for number, prompt in enumerate(prompts)
        for sample, seed in enumerate(prompt.seeds)
    ]  # fmt: skip
    at_once = max(1, rows_at_once) if batchable else 1
    with last_position_only(model):
        yield from Rollouts(model, rows, sampler, at_once, step, answering, batchable).run()


@dataclass
class RowPart:
    """Tokens of a row that the model reads one after the other."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    """After the prompt."""
    spoken: list[tuple[int, int]] = field(default_factory=list)
    """The spans of `tokens` that were sampled."""

    def unread(self, read: int) -> list[int]:
        """The tokens after the first `read` ones."""
        before = len(self.prompt)
        return [*self.prompt[read:], *self.tokens[max(0, read - before) :]]


def parts_of(prompt: RolloutPrompt) -> list[RowPart]:
    """The parts that its completions begin with."""
    return [RowPart(tuple(prompt.tokens.tolist()))] if len(prompt.tokens) else []


@dataclass(eq=False)
class SampledRow:
    """A completion that is being sampled."""

    place: tuple[int, int]
    """The indices of its prompt and seed."""
    seed: int
    parts: list[RowPart]
    """The last is being sampled; there is none before there is a prompt."""
    most: int
    """Of this turn, in tokens."""
    ends: Callable[[Sequence[int]], bool]
    turn: list[int] = field(default_factory=list)
    """What it said since it was last answered."""
    sampled: int = 0
    """Tokens that were sampled, in all parts."""
    read: int = 0
    """Tokens of its last part that are in the cache."""
    cache: list[Any] | None = None
    """Its own, while it is not in the batch."""
    stopped: bool = False

    def __post_init__(self) -> None:
        self.has_own_prompt = not self.parts

    def may_begin_with(self, prompt: tuple[int, ...]) -> bool:
        return not self.parts or self.parts[0].prompt == prompt

    def hear(self, token: int) -> bool:
        """Append a token that was sampled; return whether the turn is over."""
        self.parts[-1].tokens.append(token)
        self.turn.append(token)
        self.sampled += 1
        self.stopped = self.ends(self.turn)
        return self.stopped or len(self.turn) >= self.most

    def end_turn(self) -> tuple[int, ...]:
        """Note the span of the turn; return its tokens."""
        part, turn = self.parts[-1], tuple(self.turn)
        part.spoken.append((len(part.tokens) - len(turn), len(part.tokens)))
        self.turn.clear()
        return turn

    def go_on(self, reply: Reply) -> None:
        self.most = reply.most
        if reply.is_prompt:
            self.parts.append(RowPart(reply.tokens))
            self.read, self.cache = 0, None
        else:
            self.parts[-1].tokens.extend(reply.tokens)

    @property
    def completion(self) -> Completion:
        """The first part, with the later ones; one without tokens if there was no prompt."""
        first, *more = [
            Completion(
                *self.place, tuple(part.tokens), self.stopped, tuple(part.spoken),
                part.prompt if number or self.has_own_prompt else (),
            )
            for number, part in enumerate(self.parts or [RowPart(())])
        ]  # fmt: skip
        return replace(first, more=tuple(more))


class Rollouts:
    """Samples rows in one batch. They join it when there is room, and leave it after each turn."""

    def __init__(
        self,
        model: nn.Module,
        rows: Sequence[SampledRow],
        sampler: Sampler,
        at_once: int,
        step: Callable[[int], None],
        answering: Answering | None,
        batchable: bool,
    ) -> None:
        self.model, self.sampler, self.step, self.answering = model, sampler, step, answering
        self.at_once, self.batchable = at_once, batchable
        self.queued = deque(rows)
        self.asked: dict[Future[Any], SampledRow] = {}
        """Rows that wait for an answer."""
        self.ready: list[SampledRow] = []
        """Rows that are to join the batch."""
        self.batch: list[SampledRow] = []
        self.cache: list[Any] = []
        """That of the batch."""
        self.prompt: tuple[tuple[int, ...], list[Any]] = (), []
        """The last prompt that was read, and its cache."""

    def run(self) -> Iterator[Completion]:
        while self.queued or self.asked or self.ready or self.batch:
            self.admit()
            yield from self.answered()
            self.join()
            if self.batch:
                yield from self.sample()

    def admit(self) -> None:
        """Begin as many rows as there is room for."""
        room = self.at_once - len(self.asked) - len(self.ready) - len(self.batch)
        for _ in range(min(room, len(self.queued))):
            row = self.queued.popleft()
            if row.parts:
                self.ready.append(row)
            else:
                assert self.answering is not None
                self.asked[self.answering.ask(row.place, (), False)] = row

    def answered(self) -> Iterator[Completion]:
        """Take the answers that are there; wait for one if there is nothing else to do."""
        if not self.asked:
            return
        is_idle, began = not (self.ready or self.batch), time.perf_counter()
        while not (done := wait(self.asked, POLL_S * is_idle, FIRST_COMPLETED).done) and is_idle:
            self.step(0)
        assert self.answering is not None
        if is_idle:
            self.answering.waited(time.perf_counter() - began)
        for future in sorted(done, key=lambda future: self.asked[future].place):
            row = self.asked.pop(future)
            if (reply := self.answering.reply(row.place, future)) is None:
                row.cache = None
                yield row.completion
            else:
                row.go_on(reply)
                self.ready.append(row)

    def join(self) -> None:
        """Let the rows that are ready read what is new, and join the batch."""
        rows, self.ready = self.ready, []
        by_prompt = dict[tuple[int, ...], list[SampledRow]]()
        for row in rows:
            if row.cache is None:
                by_prompt.setdefault(row.parts[-1].prompt, []).append(row)
        for row in chain.from_iterable(by_prompt.values()):
            self.read_prompt(row)
        if not (self.queued and self.queued[0].may_begin_with(self.prompt[0])):
            self.prompt = (), []
        unread = {row: row.parts[-1].unread(row.read)[:-1] for row in rows}
        for group in read_together([len(unread[row]) for row in rows]):
            joining = [rows[place] for place in group]
            caches = [row.cache or [] for row in joining]
            for row in joining:
                row.cache = None
            merged = batched(caches, self.batchable, groups_heads(self.model))
            read(self.model, merged, [unread[row] for row in joining])
            if self.batch:
                for number, layer in enumerate(self.cache):
                    layer.extend(merged[number])
                    mx.eval(layer.state)
                    merged[number] = None
                allocator.free(collect=False)
            else:
                self.cache = merged
            self.batch += joining

    def read_prompt(self, row: SampledRow) -> None:
        """Give a row the cache of its prompt. Rows with equal prompts share what was read."""
        tokens = row.parts[-1].prompt
        if self.prompt[0] != tokens:
            self.prompt = (), []  # free it first
            self.prompt = tokens, prefill(self.model, np.array(tokens[:-1]))
        row.cache, row.read = list(self.prompt[1]), len(tokens) - 1

    def sample(self) -> Iterator[Completion]:
        """Sample tokens until rows may join or leave.

        While the tokens of a step are looked at, those of the next are being computed.
        """
        may_join = self.queued or self.answering is not None
        keys = seed_keys([row.seed for row in self.batch])
        last = [row.parts[-1].unread(0)[-1] for row in self.batch]
        tokens = self.next_tokens(mx.array(last, mx.int32), keys, 0)
        for count in itertools.count(1):
            goes_on = any(len(row.turn) + 1 < row.most for row in self.batch)
            is_last = not goes_on or (may_join and count >= TURNS_APART)
            following = None if is_last else self.next_tokens(tokens, keys, 1)
            if mx.get_cache_memory() > MOST_CACHED:  # arrays grow: old buffers fit few new ones
                allocator.free(collect=False)
            keep, left = list[int](), list[int]()
            for place, token in enumerate(np.array(tokens).tolist()):
                row = self.batch[place]
                (left if row.hear(token) else keep).append(place)
                part = row.parts[-1]
                row.read = len(part.prompt) + len(part.tokens) - (following is None)
            if left:
                yield from self.leave(left, keep)
                if following is not None and keep:
                    keys, following = keys[mx.array(keep)], following[mx.array(keep)]
            if following is None or not keep:
                return
            tokens = following

    def next_tokens(self, tokens: mx.array, keys: mx.array, ahead: int) -> mx.array:
        """Read tokens, (B,), and sample the next ones; ahead: tokens not yet counted."""
        self.step(len(self.batch))
        logits = self.model(tokens[:, None], cache=self.cache)[:, -1]
        places = mx.array([row.sampled + ahead for row in self.batch], mx.uint32)
        sampled = self.sampler(logits, keys_at(keys, places)).astype(mx.int32)
        mx.async_eval(sampled)
        return sampled

    def leave(self, left: Sequence[int], keep: list[int]) -> Iterator[Completion]:
        """End the turns of rows of the batch, by their places; `keep` are the others."""
        rows = [self.batch[place] for place in left]
        self.batch = [self.batch[place] for place in keep]
        self.cut(rows if self.answering is not None else [], left, keep)
        for row in rows:
            turn = row.end_turn()
            if self.answering is None:
                yield row.completion
            else:
                self.asked[self.answering.ask(row.place, turn, row.stopped)] = row

    def cut(self, rows: Sequence[SampledRow], left: Sequence[int], keep: list[int]) -> None:
        """Give rows their part of the batch's cache, one layer at a time; keep those of others."""
        if not self.batchable:  # one row, or none
            for row in rows:
                row.cache = self.cache
            self.cache = []
            return
        caches: list[list[Any]] = [[] for _ in rows]
        for layer in self.cache:
            for cache, place in zip(caches, left, strict=False):
                cache.append(layer.extract(place))
            if keep:
                layer.filter(mx.array(keep))
            mx.eval([part.state for part in (*(cache[-1] for cache in caches), layer)])
        for row, cache in zip(rows, caches, strict=True):
            row.cache = cache
        if not keep:
            self.cache = []


def read_together(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Groups of texts of so many tokens, by index, each padded to at most PREFILL_TOKENS or alone.

    Those without tokens are a group, too.
    """
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    group: list[int] = []
    for place in order:
        is_new = group and lengths[group[0]] == 0 < lengths[place]
        if group and (is_new or (len(group) + 1) * lengths[place] > PREFILL_TOKENS):
            yield group
            group = []
        group.append(place)
    yield from [group] if group else []


def read(model: nn.Module, cache: list[Any], texts: Sequence[Sequence[int]]) -> None:
    """Read tokens of several rows into their cache; a group of `read_together`.

    The rows are padded at their ends, which mlx-lm's caches then move to the beginnings. That works
    in one call only.
    """
    lengths = [len(tokens) for tokens in texts]
    longest = max(lengths)
    if longest == 0:
        return
    padded = np.zeros((len(texts), longest), np.int32)
    for row, tokens in enumerate(texts):
        padded[row, : len(tokens)] = tokens
    pads = min(lengths) < longest
    for layer in cache if pads else ():
        layer.prepare(lengths=lengths, right_padding=[longest - each for each in lengths])
    for start in range(0, longest, PREFILL_TOKENS):
        model(mx.array(padded[:, start : start + PREFILL_TOKENS]), cache=cache)
        mx.eval([layer.state for layer in cache])
    for layer in cache if pads else ():
        layer.finalize()
    mx.eval([layer.state for layer in cache])
    allocator.free(collect=False)


def prefill(model: nn.Module, tokens: np.ndarray) -> list[Any]:
    """mlx-lm's cache of a prompt; it is empty if there are no tokens."""
    cache = make_prompt_cache(model)
    grow_by(1, cache)
    read(model, cache, [tokens.tolist()])
    return cache


def batched(caches: list[list[Any]], batchable: bool, grouped: bool = False) -> list[Any]:
    """One cache for all rows, from a cache for each, whose layers are taken out one by one.

    grouped: as in `groups_heads`.
    """
    if not batchable:
        (cache,) = caches
        one = copy.deepcopy(cache)
        grow_by(BATCH_STEP, one)
        return one
    found = []
    for number in range(len(caches[0])):
        layer = merged([cache[number] for cache in caches], grouped)
        if not layer.empty():
            mx.eval(layer.state)
        for cache in caches:
            cache[number] = None  # so that no more than a layer is there twice
        found.append(layer)
    grow_by(BATCH_STEP, found)
    return found
