"""Documents -> chunks: parts of a bounded number of tokens, each with its place in its document."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from your_ai.data.documents import DOCUMENT_SUFFIXES, Passage
from your_ai.errors import UserError, named_errors
from your_ai.gates.paths import missing_text
from your_ai.gates.text import shortened

JOINT = "\n\n"  # between two passages
# Where texts are cut: between paragraphs, else sentences or lines, else words.
CUTS = tuple(
    re.compile(cut)
    for cut in (r"\n\s*\n", r"(?<=[.!?\u2026])[\"')\]\u201d\u00bb]*\s+|(?<=[。！？])|\n", r"\s+")
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document."""

    text: str
    file: str
    place: str
    """Page or heading, or the first and the last of several."""
    start: int
    """The first of its characters in the text of the document, from 0."""
    end: int

    @property
    def where(self) -> str:
        """`guide.pdf: page 3, characters 4,210 to 5,998`"""
        return f"{self.file}: {self.place}, characters {self.start + 1:,} to {self.end:,}"


def documents_in(paths: Sequence[str | os.PathLike[str]]) -> list[tuple[Path, bool]]:
    """The documents that paths name, and those below folders, by name, without hidden ones; and
    whether each was named itself. Raises UserError if there are none."""
    found: dict[Path, bool] = {}
    for given in paths:
        path = Path(given).expanduser()
        if path.is_dir():
            with named_errors(path, "read"):
                for place, folders, names in os.walk(path):
                    folders[:] = sorted(name for name in folders if not name.startswith("."))
                    for name in sorted(names):
                        if Path(name).suffix.lower() in DOCUMENT_SUFFIXES and name[0] != ".":
                            found.setdefault(Path(place, name), False)
        elif path.is_file():
            found[path] = True
        else:
            raise UserError(f"{given}: {missing_text(path)}")
    if not found:
        kinds = ", ".join(sorted(DOCUMENT_SUFFIXES))
        raise UserError(f"{shortened(paths[0]) if paths else 'DOCS'}: no documents there ({kinds})")
    return list(found.items())


def chunks_of(
    file: str, passages: Sequence[Passage], most: int, count: Callable[[str], int]
) -> Iterator[Chunk]:
    """Yield the chunks of a document. Together they have all its text but blanks at their ends.

    most: tokens of a chunk; count: the tokens of a text. Short passages are joined, but a chunk
    that is half full ends where a passage does.
    """
    text = JOINT.join(passage.text for passage in passages)
    starts = list(accumulate((len(p.text) + len(JOINT) for p in passages), initial=0))
    places = [passage.place for passage in passages]

    def chunk(start: int, end: int) -> Chunk:
        part = text[start:end]
        start += len(part) - len(part.lstrip())
        first, last = (places[bisect_right(starts, at) - 1] for at in (start, end - 1))
        place = first if first == last else f"{first} to {last}"
        return Chunk(part.strip(), file, place, start, start + len(part.strip()))

    begin, at, size = 0, 0, 0  # of the chunk that is filled, in characters and tokens
    for number in range(len(passages)):
        ends_half_full = size >= most / 2
        end_of_passage = min(starts[number + 1], len(text))
        for start, end, tokens in parts_of_text(text, starts[number], end_of_passage, most, count):
            if size + tokens > most or (ends_half_full and start == starts[number]):
                if text[begin:at].strip():
                    yield chunk(begin, at)
                begin, size = start, 0
            at, size = end, size + tokens
    if text[begin:at].strip():
        yield chunk(begin, at)


def parts_of_text(
    text: str, start: int, end: int, most: int, count: Callable[[str], int], level: int = 0
) -> Iterator[tuple[int, int, int]]:
    """Yield (start, end, tokens) of the parts between two characters, cut as coarsely as fits.

    A character is a part, however many tokens it has.
    """
    if level < len(CUTS):
        cuts = [found.end() for found in CUTS[level].finditer(text, start, end)]
    else:
        cuts = [(start + end) // 2]
    for first, last in pairwise([start, *cuts, end]):
        if first == last:
            continue
        tokens = count(text[first:last])
        if tokens <= most or last - first == 1:
            yield first, last, tokens
        else:
            yield from parts_of_text(text, first, last, most, count, level + 1)
