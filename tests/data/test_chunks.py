"""Documents cut into chunks that together have all their text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.chunks import JOINT, chunks_of, documents_in
from your_ai.data.documents import Passage
from your_ai.errors import UserError

TEXTS = st.lists(
    st.text(st.sampled_from("ab. \n!?é。"), min_size=1).filter(str.strip), min_size=1, max_size=5
)


def words(text: str) -> int:
    """Tokens of a word each, or of 4 characters of a long one."""
    return sum(-(-len(word) // 4) for word in text.split())


@given(TEXTS, st.integers(1, 12))
def test_chunks_have_all_text_in_order_and_are_bounded(texts, most):
    passages = [Passage(text, f"page {n}") for n, text in enumerate(texts, 1)]
    whole = JOINT.join(texts)
    found = list(chunks_of("a.txt", passages, most, words))
    assert "".join(re.sub(r"\s", "", c.text) for c in found) == re.sub(r"\s", "", whole)
    for chunk in found:
        assert whole[chunk.start : chunk.end] == chunk.text
        assert words(chunk.text) <= most


def test_cuts_are_at_paragraphs_else_sentences_else_words():
    def count(text: str) -> int:
        return len(text.split())

    text = "One two three.\n\nFour five. Six seven eight nine.\n\nNine ten"
    found = [c.text for c in chunks_of("a", [Passage(text, "p")], 3, count)]
    assert found == ["One two three.", "Four five. Six", "seven eight nine.", "Nine ten"]


def test_a_chunk_names_the_places_that_it_spans():
    pages = [Passage("a a", "page 1"), Passage("b b", "page 2"), Passage("c c", "page 3")]
    found = list(chunks_of("m.pdf", pages, 6, words))
    assert [c.where for c in found] == [
        "m.pdf: page 1 to page 2, characters 1 to 8",
        "m.pdf: page 3, characters 11 to 13",
    ]


def test_folders_give_their_documents_by_name(own_folder):
    for name in ("d/b.md", "d/a.txt", "d/.hidden.md", "d/rows.jsonl", "d/.git/x.md", "own.md"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("text")
    found = [(str(path), named) for path, named in documents_in(["d", "own.md", "d/a.txt"])]
    assert sorted(found) == [("d/a.txt", True), ("d/b.md", False), ("own.md", True)]
    with pytest.raises(UserError, match="nowhere: no such"):
        documents_in(["nowhere"])
    Path("d/.git/x.md").unlink()
    with pytest.raises(UserError, match=r"\.git: no documents there"):
        documents_in(["d/.git"])
