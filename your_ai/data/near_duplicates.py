"""Near-duplicates of short texts, by the Jaccard similarity of their pairs of words."""

from __future__ import annotations

import hashlib
import math
from array import array
from itertools import pairwise

from your_ai.data.facts_of_texts import WORD, normalized, numbers_and_names

LIKE = 0.7  # Jaccard similarity from which on two texts are near-duplicates


class NearDuplicates:
    """Texts that were seen. Those that name other numbers or names are never near-duplicates.

    A text is found by its rarest-looking shingles alone: two sets of n and m shingles with a
    similarity of t share one of the first n - ceil(t n) + 1, in any fixed order of all shingles.
    """

    def __init__(self, like: float = LIKE) -> None:
        self.like = like
        self.shingles: list[array[int]] = []
        self.facts: list[frozenset[str]] = []
        self.texts: list[int] = []
        self.holders: dict[int, list[int]] = {}
        """Shingle -> the texts that have it among their first."""

    def add(self, text: str, number: int) -> int | None:
        """Add a text, unless a near-duplicate was added before: return the number of that one."""
        own = shingles_of(text)
        facts = frozenset(numbers_and_names(text))
        first = own[: len(own) - math.ceil(self.like * len(own)) + 1]
        for other in sorted({each for s in first for each in self.holders.get(s, ())}):
            common = len(set(own).intersection(self.shingles[other]))
            union = len(own) + len(self.shingles[other]) - common
            if common >= self.like * union and self.facts[other] == facts:
                return self.texts[other]
        for shingle in first:
            self.holders.setdefault(shingle, []).append(len(self.texts))
        self.shingles.append(array("Q", own))
        self.facts.append(facts)
        self.texts.append(number)
        return None


def shingles_of(text: str) -> list[int]:
    """64-bit hashes of the pairs of neighboring words, sorted, with those at both ends."""
    words = ["^", *WORD.findall(normalized(text)), "$"]
    pairs = {" ".join(pair) for pair in pairwise(words)}
    digests = (hashlib.blake2b(pair.encode(), digest_size=8).digest() for pair in pairs)
    return sorted(int.from_bytes(digest, "little") for digest in digests)
