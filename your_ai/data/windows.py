"""Tokenize a text of any length in bounded memory, exactly as if it were tokenized as a whole.

The `tokenizers` library uses about 200 bytes for each byte of a text. So a long text is tokenized
in overlapping windows. Two windows are joined only at a place where both give the same tokens for
some distance on both sides, and where one of these conditions is true:

- The pre-tokenizer splits there in both windows. The tokens after a split do not depend on the
  text before it, and the model tokenizes the parts separately.
- The model is BPE. A sequence of its tokens is the encoding of their text if every pair of
  neighbors is (Berglund and van der Merwe, 2023), and each pair is inside one of the windows.

If no such place is found, the windows grow, up to a limit. Lengths and offsets are in characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

GROWTH = 8  # maximum factor by which windows grow


class CannotJoin(Exception):
    """Two windows have no place where they can be joined, even at the maximum size."""


@dataclass(frozen=True)
class Tokens:
    """The T tokens of a text."""

    ids: np.ndarray
    """(T,) uint32."""
    given: tuple[np.ndarray, np.ndarray] | None = None
    """`starts` and `ends`; None if they are to be read from the encoding."""
    encoding: Any = None
    """Of the `tokenizers` library. A few places are found there much faster than all of them."""

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        return places_of(self.encoding, 0) if self.given is None else self.given

    @property
    def starts(self) -> np.ndarray:
        """(T,) int32, the offset of each token's first character."""
        return self.places[0]

    @property
    def ends(self) -> np.ndarray:
        """(T,) int32, the offset after each token's last character."""
        return self.places[1]

    def end_of(self, index: int) -> int:
        """The offset after a token's last character."""
        return int(self.ends[index] if self.given else self.encoding.token_to_chars(index)[1])

    def before(self, place: int) -> int | None:
        """The number of tokens that begin before a place in the text; None if one ends after it."""
        if self.encoding is not None:
            index: int | None = self.encoding.char_to_token(place)
            if index and self.encoding.token_to_chars(index)[0] == place:
                start, end = self.encoding.token_to_chars(index - 1)
                if start < end <= place:  # else a token without characters may be near
                    return index
        count = int(self.starts.searchsorted(np.int32(place)))
        return None if count and self.ends[:count].max() > place else count

    def moved(self, characters: int) -> Tokens:
        """The tokens with other offsets, as part of a longer text."""
        return Tokens(self.ids, (self.starts + characters, self.ends + characters))

    def without_first(self) -> Tokens:
        return Tokens(self.ids[1:], (self.starts[1:], self.ends[1:]))


def joined_tokens(parts: list[Tokens]) -> Tokens:
    ids, starts, ends = (np.concatenate(each) for each in zip(*map(arrays_of, parts), strict=True))
    return Tokens(ids, (starts, ends))


class Sizes(NamedTuple):
    """The sizes used to tokenize in windows."""

    window: int
    """In characters."""
    overlap: int
    """In characters."""
    agreement: int
    """Equal tokens required on each side of a join."""


SIZES = Sizes(window=1 << 14, overlap=1 << 11, agreement=24)


@dataclass(frozen=True)
class Window:
    """The tokens of a part of a text."""

    tokens: Tokens
    words: np.ndarray
    """(T,) int64, equal for tokens of the same pre-token."""
    end: int
    """The offset where the part ends."""

    @cached_property
    def splits(self) -> np.ndarray:
        """(T,) bool: whether the pre-tokenizer splits before the token."""
        return np.append(True, np.diff(self.words) != 0)[: len(self.words)]


def tokenize(backend: Any, text: str, special: bool, sizes: Sizes = SIZES) -> Tokens:
    """Return the same tokens as `backend.encode(text)`.

    backend: from the `tokenizers` library, with truncation and padding off.
    special: add the tokenizer's special tokens, with offsets 0.
    Raises CannotJoin for a long text that cannot be tokenized in windows, and TypeError for a text
    with half of a surrogate pair.
    """
    ids, starts, ends = gathered(backend, text, special, sizes, ("ids", "starts", "ends"))
    return Tokens(ids, (starts, ends))


def tokenize_all(backend: Any, texts: list[str]) -> list[Tokens]:
    """`tokenize` for many short texts, on all processors, without special tokens."""
    return [
        Tokens(np.array(encoding.ids, np.uint32), encoding=encoding)
        for encoding in backend.encode_batch(texts, add_special_tokens=False)
    ]


def tokenize_ids(backend: Any, text: str, special: bool, sizes: Sizes = SIZES) -> np.ndarray:
    """Return only the ids of `tokenize`, (T,) uint32. Uses a fifth of the memory."""
    (ids,) = gathered(backend, text, special, sizes, ("ids",))
    return ids


def gathered(
    backend: Any, text: str, special: bool, sizes: Sizes, names: tuple[str, ...]
) -> list[np.ndarray]:
    """Return the named arrays of `Tokens` for the whole text."""
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
        # Buffers that grow in place. Concatenating arrays at the end would need twice the memory.
        buffers = [bytearray(getattr(before, name)) for name in names]
        try:
            for part in joined(backend, text, grown):
                for name, buffer in zip(names, buffers, strict=True):
                    buffer += memoryview(getattr(part, name)).cast("B")
            break
        except CannotJoin:
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
    """Convert an encoding of the `tokenizers` library, for a text that begins at `start`."""
    return Tokens(np.array(encoding.ids, np.uint32), places_of(encoding, start))


def places_of(encoding: Any, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The offsets of the tokens of an encoding, for a text that begins at `start`."""
    places = np.fromiter(chain.from_iterable(encoding.offsets), np.int32) + np.int32(start)
    return places[::2].copy(), places[1::2].copy()


def read_window(backend: Any, text: str, start: int, size: int) -> Window:
    """Tokenize `size` characters of the text from `start`."""
    part = text[start : start + size]
    encoding = backend.encode(part, add_special_tokens=False)
    words = np.array([-1 if word is None else word for word in encoding.word_ids], np.int64)
    return Window(read_tokens(encoding, start), words, start + len(part))


def joined(backend: Any, text: str, sizes: Sizes) -> Iterator[Tokens]:
    """Yield the tokens of a text in parts, window by window. Raises CannotJoin."""
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
    ids, starts, ends = (np.ascontiguousarray(array[begin:end]) for array in arrays_of(tokens))
    return Tokens(ids, (starts, ends))


def next_start(window: Window, sizes: Sizes) -> int:
    """The start of the next window. It is at a split if possible, so both have the same splits."""
    tokens = window.tokens
    early = window.end - sizes.overlap
    late = np.flatnonzero((tokens.starts >= early) & (tokens.starts < early + sizes.overlap // 4))
    late = late[(late > 0) & (tokens.starts[late] >= tokens.ends[late - 1])]
    split = late[window.splits[late]]
    chosen = split if len(split) else late
    # The end of the token before: some tokenizers leave a leading space out of the offsets.
    return max(int(tokens.ends[chosen[0] - 1]), early) if len(chosen) else early


def find_join(first: Window, second: Window, agreement: int, is_bpe: bool) -> tuple[int, int]:
    """Find where to join two windows: the index, in each window, of the first token from `second`.

    Raises CannotJoin if there is no such place.
    """
    start = int(second.tokens.starts[0]) if len(second.tokens) else first.end
    middle = (start + first.end) // 2
    ours, theirs = (int(np.searchsorted(w.tokens.starts, middle)) for w in (first, second))
    before = agreeing(first.tokens, second.tokens, ours, theirs, -1)
    after = agreeing(first.tokens, second.tokens, ours, theirs, 1)
    if min(before, after) < agreement:
        raise CannotJoin
    near = np.arange(agreement - before, after - agreement + 1)  # far enough from differences
    both = first.splits[ours + near] & second.splits[theirs + near]
    if both.any():
        shift = min(near[both].tolist(), key=abs)
    elif is_bpe:
        shift = 0
    else:
        raise CannotJoin
    return ours + shift, theirs + shift


def agreeing(first: Tokens, second: Tokens, ours: int, theirs: int, step: int) -> int:
    """Count equal tokens from the two indices on (step 1), or before them (step -1)."""
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
    """Return the special tokens that the tokenizer adds before and after a text."""
    plain = backend.encode(text, add_special_tokens=False).ids
    whole = backend.encode(text, add_special_tokens=True).ids
    extra = len(whole) - len(plain)
    for count in range(extra + 1):
        if whole[count : count + len(plain)] == plain:
            return special_tokens(whole[:count]), special_tokens(whole[count + len(plain) :])
    raise CannotJoin


def special_tokens(ids: list[int]) -> Tokens:
    nowhere = np.zeros(len(ids), np.int32)
    return Tokens(np.array(ids, np.uint32), (nowhere, nowhere))
