"""Replies with questions and answers, in the forms that models write them, and their checks."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.chunks import Chunk
from your_ai.data.questions import (
    Answered,
    ask_for_questions,
    ask_for_verdict,
    fault_of,
    is_yes,
    parse_answered,
)

TWO = [
    Answered("Where does Lumen make lamps?", "Lumen makes them in Oslo."),
    Answered("When was the first one sold?", "In 1987.\nFor 40 crowns."),
]
(Q1, A1), (Q2, A2) = TWO
OBJECTS = [{"question": q, "answer": a} for q, a in TWO]
FORMS = {
    "labels": f"Q1: {Q1}\nA1: {A1}\nQ2: {Q2}\nA2: {A2}",
    "bold words": f"Sure!\n\n**Question 1:** {Q1}\n**Answer:** {A1}\n\n**Question 2:** {Q2}\n"
    f"**Answer:** {A2}",
    "bold lines": f"**Q1: {Q1}**\nA1: {A1}\n\n---\n\n**Q2: {Q2}**\nA2: {A2}",
    "headings": f"### Question 1\n: {Q1}\n### Answer 1: {A1}\n### Q2. {Q2}\n### A2. {A2}",
    "numbers and labels": f"1. Q: {Q1}\n   A: {A1}\n2. Q: {Q2}\n   A: {A2}",
    "one line": f"1. Q: {Q1} A: {A1}\n2. Q: {Q2} A: {A2}",
    "numbers": f"Here they are:\n1. {Q1}\n   {A1}\n\n2) **{Q2}**\n{A2}",
    "dashes": f"1. **{Q1}**\n   - Answer: {A1}\n2. **{Q2}**\n   - Answer: {A2}",
    "JSON": json.dumps(OBJECTS),
    "JSON in an object": f"```json\n{json.dumps({'questions': OBJECTS}, indent=2)}\n```\nDone.",
    "JSON lines": "\n".join(json.dumps({"Q": q, "A": a}) for q, a in TWO),
    "reasoning": f"<think>Q1: no\nA1: no</think>\nQ1: {Q1}\nA1: {A1}\nQ2: {Q2}\nA2: {A2}",
}


@pytest.mark.parametrize("form", FORMS)
def test_questions_and_answers_are_found_in_every_form(form):
    assert parse_answered(FORMS[form], is_whole=True) == (TWO, False)


@pytest.mark.parametrize("form", ["labels", "numbers", "JSON"])
def test_the_last_answer_of_a_reply_that_was_cut_off_is_left_out(form):
    assert parse_answered(FORMS[form][:-8], is_whole=False) == (TWO[:1], True)


@given(st.text(st.sampled_from('QA1:.?\n{}[]"* ,question')), st.booleans())
def test_any_reply_is_read(text, is_whole):
    parse_answered(text, is_whole)


@pytest.mark.parametrize("text", ["", "I cannot do that.", "{" * 3000, '{"a":' * 3000])
def test_replies_without_questions_give_none(text):
    assert parse_answered(text, is_whole=True) == ([], False)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("Yes", True),
        ("yes.", True),
        ("**Yes**, it is", True),
        ("No, yes would be wrong", False),
        ("no", False),
        ("", False),
        ("Yesterday", False),
        ("<think>no, well</think>\n\nYes", True),
    ],
)
def test_a_verdict_is_its_first_yes_or_no(reply, expected):
    assert is_yes(reply) is expected


TEXT = (
    "In 1987 Lumen sold 1,200 lamps for 40.50 crowns each, on 3 May. Anna Berg leads three Germans "
    "who repair the LX-20 in Oslo's workshop."
)
CHUNK = Chunk(TEXT, "manual/guide.md", "Repair", 0, len(TEXT))


@pytest.mark.parametrize(
    "answer",
    [
        "It sold 1200 lamps for 40.5 crowns.",
        "Anna Berg leads 3 people. She works in Oslo.",
        "1. The LX-20.\n2. Lamps.",
        "They are led by Berg, a German.",
    ],
)
def test_answers_whose_numbers_and_names_are_in_the_text_are_kept(answer):
    assert fault_of(Answered("What about it?", answer), CHUNK) is None


@pytest.mark.parametrize(
    ("answer", "reason", "detail"),
    [
        ("It sold 12,000 lamps.", "a number of the answer is not in the text", "12,000"),
        ("In 1988, of course.", "a number of the answer is not in the text", "1988"),
        ("It sold 405 of them.", "a number of the answer is not in the text", "405"),
        ("She is called Anna Bergmann.", "a name of the answer is not in the text", "Bergmann"),
        ("The LX-30 is repaired.", "a name of the answer is not in the text", "LX-30"),
        ("NASA did.", "a name of the answer is not in the text", "NASA"),
        ("...", "no answer", ""),
    ],
)
def test_answers_with_other_numbers_and_names_are_dropped(answer, reason, detail):
    assert fault_of(Answered("What about it?", answer), CHUNK) == (reason, detail)


def test_prompts_have_the_text_between_marks_that_it_cannot_have():
    prompts = [ask_for_questions(CHUNK, 2), ask_for_verdict(CHUNK, TWO[0])]
    for prompt in prompts:
        mark = next(line for line in prompt.splitlines() if line.startswith("======"))
        assert f"{mark}\n{TEXT}\n{mark}" in prompt
    assert "Write 2 questions" in prompts[0]
    assert "guide.md, Repair" in prompts[0]
    assert f"Question: {Q1}\nAnswer: {A1}" in prompts[1]
