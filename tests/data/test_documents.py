"""Documents -> passages with their places."""

from __future__ import annotations

import pytest

from your_ai.data.documents import Passage, read_document
from your_ai.errors import UserError


def test_markdown_has_a_passage_for_each_heading_with_text(tmp_path):
    path = tmp_path / "notes.md"
    path.write_text("Intro.\n\n# A\n\n## B\n\n\n\nOne.\n```\n# no heading\n```\n# C #\nTwo.\n")
    assert read_document(path) == [
        Passage("Intro.", "beginning"),
        Passage("# A\n\n## B\n\nOne.\n```\n# no heading\n```", "B"),
        Passage("# C #\nTwo.", "C"),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_text_is_one_passage_in_any_encoding_that_its_mark_names(tmp_path, encoding):
    path = tmp_path / "text.txt"
    path.write_bytes("Grüße.\r\n\r\n\r\n\r\nEnde.\r\n".encode(encoding))
    assert read_document(path) == [Passage("Grüße.\n\nEnde.", "beginning")]


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes("One.\nGrüße.".encode("latin-1"))
    with pytest.raises(UserError, match=r"text\.txt:2: is not UTF-8 text; save it as UTF-8"):
        read_document(path)
