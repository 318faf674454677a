"""Near-duplicates among questions: as a comparison of all pairs finds them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.near_duplicates import NearDuplicates, shingles_of

SENTENCES = st.lists(st.sampled_from("what is the big red lamp made of".split()), max_size=8)


@given(st.lists(SENTENCES.map(" ".join), max_size=12), st.sampled_from([0.5, 0.7, 1.0]))
def test_the_first_like_text_is_found(texts, like):
    seen, kept = NearDuplicates(like), list[int]()
    for number, text in enumerate(texts):
        own = {*shingles_of(text)}

        def likeness(other: int, own: set[int] = own) -> float:
            theirs = {*shingles_of(texts[other])}
            return len(own & theirs) / len(own | theirs)

        expected = next((other for other in kept if likeness(other) >= like), None)
        assert seen.add(text, number) == expected
        if expected is None:
            kept.append(number)


@pytest.mark.parametrize(
    ("first", "second", "like"),
    [
        ("How long does a repair take at Lumen?", "how long does a repair take at Lumen", True),
        ("How long does the repair of a lamp take?", "How long does repair of a lamp take?", True),
        ("What did Lumen earn in all of 2020?", "What did Lumen earn in all of 2021?", False),
        ("In which town does Anna Berg work now?", "In which town does Anna Holm work now?", False),
        ("Where are lamps made?", "Who repairs lamps?", False),
    ],
)
def test_questions_for_other_numbers_and_names_are_no_duplicates(first, second, like):
    seen = NearDuplicates()
    assert seen.add(first, 7) is None
    assert seen.add(second, 8) == (7 if like else None)
