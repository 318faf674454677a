"""A text of any length -> tokens, in bounded memory and exactly as if it were tokenized whole.

The `tokenizers` library holds some 200 bytes for each byte of a text. So a long text is
tokenized in windows that overlap, and two windows are joined only at a place where both give
the same tokens for some way to either side, and where one of these holds:

- the pre-tokenizer splits there in both windows. What follows a split does not depend on what
  comes before it, and the model tokenizes the parts on their own.
- the model is BPE. A sequence of its tokens is the encoding of their text if every pair of
  neighbors is (Berglund and van der Merwe, 2023), and each pair stands in one of the windows.

Where no such place is found the windows grow up to a limit. Lengths and places are in
characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

GROWTH = 8  # how many times as long windows may become


class Unjoinable(Exception):
    """Two windows do not agree anywhere, however long they are."""


@dataclass(frozen=True)
class Tokens:
    """T tokens of a text.

    ids: (T,) uint32; starts, ends: (T,) int32, the characters that each token is of.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class Sizes(NamedTuple):
    """window, overlap: in characters; agreement: tokens to either side of a join."""

    window: int
    overlap: int
    agreement: int


SIZES = Sizes(window=1 << 14, overlap=1 << 11, agreement=24)


@dataclass(frozen=True)
class Window:
    """The tokens of a part of a text, and where the part ends.

    words: (T,) int64, equal where tokens are of the same pre-token.
    """

    tokens: Tokens
    words: np.ndarray
    end: int

    @cached_property
    def splits(self) -> np.ndarray:
        """(T,) bool: whether the pre-tokenizer splits before the token."""
        return np.append(True, np.diff(self.words) != 0)[: len(self.words)]


def tokenize(backend: Any, text: str, special: bool, sizes: Sizes = SIZES) -> Tokens:
    """The tokens of `text`: those of `backend.encode(text)`.

    backend: of the `tokenizers` library, set to neither cut nor pad; special: add what the
    tokenizer always adds, whose places are 0. Raises Unjoinable for a long text that has to
    be tokenized at once, and TypeError for one that holds half of a character.
    """
    return Tokens(*gathered(backend, text, special, sizes, ("ids", "starts", "ends")))


def tokenize_ids(backend: Any, text: str, special: bool, sizes: Sizes = SIZES) -> np.ndarray:
    """The ids alone, (T,) uint32, as `tokenize` has them. Holds a fifth of the memory."""
    (ids,) = gathered(backend, text, special, sizes, ("ids",))
    return ids


def gathered(
    backend: Any, text: str, special: bool, sizes: Sizes, names: tuple[str, ...]
) -> list[np.ndarray]:
    """The arrays of these names, of all tokens of the text."""
    if len(text) <= sizes.window:
        encoding = backend.encode(text, add_special_tokens=special)
        if names == ("ids",):
            return [np.array(encoding.ids, np.uint32)]
        tokens = read_tokens(encoding)
        return [getattr(tokens, name) for name in names]
    before = after = special_tokens([])
    if special:
        before, after = added(backend, text[: sizes.overlap])
    grown = sizes
    while True:
        # Buffers that grow in place: joining arrays at the end would hold all of them twice.
        buffers = [bytearray(getattr(before, name)) for name in names]
        try:
            for part in joined(backend, text, grown):
                for name, buffer in zip(names, buffers, strict=True):
                    buffer += memoryview(getattr(part, name)).cast("B")
            break
        except Unjoinable:
            if grown.window >= GROWTH * sizes.window:
                raise
            grown = Sizes(2 * grown.window, 4 * grown.overlap, grown.agreement)
    for name, buffer in zip(names, buffers, strict=True):
        buffer += getattr(after, name).tobytes()
    types = [getattr(after, name).dtype for name in names]
    return [np.frombuffer(b, kind) for b, kind in zip(buffers, types, strict=True)]


def arrays_of(tokens: Tokens) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return tokens.ids, tokens.starts, tokens.ends


def read_tokens(encoding: Any, start: int = 0) -> Tokens:
    """The tokens of an encoding of the `tokenizers` library, of a text that begins at `start`."""
    places = np.array(encoding.offsets, np.int32).reshape(-1, 2) + np.int32(start)
    return Tokens(np.array(encoding.ids, np.uint32), places[:, 0], places[:, 1])


def read_window(backend: Any, text: str, start: int, size: int) -> Window:
    """The tokens of `size` characters of the text from `start`."""
    part = text[start : start + size]
    encoding = backend.encode(part, add_special_tokens=False)
    words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
    return Window(read_tokens(encoding, start), words, start + len(part))


def joined(backend: Any, text: str, sizes: Sizes) -> Iterator[Tokens]:
    """The tokens of a text, window by window, as parts of its arrays. Raises Unjoinable."""
    is_bpe = type(backend.model).__name__ == "BPE" and not backend.model.dropout
    window, begin = read_window(backend, text, 0, sizes.window), 0
    while window.end < len(text):
        start = next_start(window, sizes)
        following = read_window(backend, text, start, sizes.window)
        ours, theirs = find_join(window, following, sizes.agreement, is_bpe)
        yield part_of(window.tokens, begin, ours)
        window, begin = following, theirs
    yield part_of(window.tokens, begin, len(window.tokens))


def part_of(tokens: Tokens, begin: int, end: int) -> Tokens:
    return Tokens(*(np.ascontiguousarray(array[begin:end]) for array in arrays_of(tokens)))


def next_start(window: Window, sizes: Sizes) -> int:
    """Where the window after this one starts: at a split, so that both have the same splits."""
    tokens = window.tokens
    early = window.end - sizes.overlap
    late = np.flatnonzero((tokens.starts >= early) & (tokens.starts < early + sizes.overlap // 4))
    late = late[(late > 0) & (tokens.starts[late] >= tokens.ends[late - 1])]
    split = late[window.splits[late]]
    chosen = split if len(split) else late
    # The end of the token before: some tokenizers leave a leading space out of a token's place.
    return max(int(tokens.ends[chosen[0] - 1]), early) if len(chosen) else early


def find_join(first: Window, second: Window, agreement: int, is_bpe: bool) -> tuple[int, int]:
    """Where the two may be joined: the first token from `second`, by its index in each.

    Raises Unjoinable where there is no such place.
    """
    start = int(second.tokens.starts[0]) if len(second.tokens) else first.end
    middle = (start + first.end) // 2
    ours, theirs = (int(np.searchsorted(w.tokens.starts, middle)) for w in (first, second))
    before = agreeing(first.tokens, second.tokens, ours, theirs, -1)
    after = agreeing(first.tokens, second.tokens, ours, theirs, 1)
    if min(before, after) < agreement:
        raise Unjoinable
    near = np.arange(agreement - before, after - agreement + 1)  # as far from where they differ
    both = first.splits[ours + near] & second.splits[theirs + near]
    if both.any():
        shift = min(near[both].tolist(), key=abs)
    elif is_bpe:
        shift = 0
    else:
        raise Unjoinable
    return ours + shift, theirs + shift


def agreeing(first: Tokens, second: Tokens, ours: int, theirs: int, step: int) -> int:
    """How many tokens are equal from the two places on, or before them where step is -1."""
    if step > 0:
        count = min(len(first) - ours, len(second) - theirs)
        parts = slice(ours, ours + count), slice(theirs, theirs + count)
    else:
        count = min(ours, theirs)
        parts = slice(ours - count, ours), slice(theirs - count, theirs)
    same = np.ones(count, bool)
    for mine, other in zip(arrays_of(first), arrays_of(second), strict=True):
        same &= mine[parts[0]] == other[parts[1]]
    same = same[::step]
    return count if same.all() else int(same.argmin())


def added(backend: Any, text: str) -> tuple[Tokens, Tokens]:
    """What the tokenizer always adds before and after a text."""
    plain = backend.encode(text, add_special_tokens=False).ids
    whole = backend.encode(text, add_special_tokens=True).ids
    extra = len(whole) - len(plain)
    for count in range(extra + 1):
        if whole[count : count + len(plain)] == plain:
            return special_tokens(whole[:count]), special_tokens(whole[count + len(plain) :])
    raise Unjoinable


def special_tokens(ids: list[int]) -> Tokens:
    nowhere = np.zeros(len(ids), np.int32)
    return Tokens(np.array(ids, np.uint32), nowhere, nowhere)
