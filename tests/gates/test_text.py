from __future__ import annotations

import pytest

from your_ai.gates.text import counted


@pytest.mark.parametrize(
    ("count", "noun", "plural", "text"),
    [
        (0, "row", "", "0 rows"),
        (1, "row", "", "1 row"),
        (2, "row", "", "2 rows"),
        (2000, "row", "", "2,000 rows"),
        (1, "batch", "batches", "1 batch"),
        (3, "batch", "batches", "3 batches"),
        (1, "byte does", "bytes do", "1 byte does"),
        (12, "byte does", "bytes do", "12 bytes do"),
    ],
)
def test_one_is_singular_and_thousands_are_separated(count, noun, plural, text):
    assert counted(count, noun, plural) == text
