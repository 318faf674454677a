from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.publish.test_card import SUBJECT
from your_ai.publish.card import BEGIN, END, card, front_matter, merged, split

NEW = card(SUBJECT)
OWN = "Describe your data here"
texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r"))


def test_an_unedited_card_stays_the_same():
    assert merged(NEW, NEW) == (NEW, "")


@given(texts)
def test_the_section_of_the_user_is_kept(text):
    begin, end = NEW.index(BEGIN) + len(BEGIN), NEW.index(END)
    old = NEW[:begin] + text + NEW[end:]
    assert merged(old, NEW) == (old, "")


def test_the_section_of_the_user_is_kept_in_a_newer_card():
    old = NEW.replace(OWN, "My data").replace("lora_rank", "old_rank")
    kept, _ = merged(old, NEW)
    assert kept == NEW.replace(OWN, "My data")


def test_line_ends_of_a_web_page_do_not_count_as_an_edit():
    assert merged(NEW.replace("\n", "\r\n"), NEW) == (NEW, "")


def test_an_edit_outside_of_the_section_is_replaced_with_a_note():
    old = NEW.replace("## Settings", "## My settings")
    assert old != NEW
    text, note = merged(old, NEW)
    assert text == NEW
    assert "outside of the marked section were replaced" in note


def test_the_licence_and_tags_of_the_user_are_kept_in_the_metadata():
    front, body = split(NEW)
    old = front_matter({"license": "mit", **front, "library_name": "x", "tags": ["mine"]}) + body
    data, _ = split(merged(old, NEW)[0])
    assert (data["license"], data["library_name"]) == ("mit", "mlx")
    assert set(data["tags"]) == {"mine", *front["tags"]}


@pytest.mark.parametrize(
    "old",
    ["", "# My own\r\n", f"---\n[\n---\n{BEGIN}x{END}", f"---\n- a\n---\n{BEGIN}x{END}", BEGIN],
)
def test_a_card_that_was_not_made_here_stays_unchanged(old):
    text, note = merged(old, NEW)
    assert text == old
    assert "and stays" in note
