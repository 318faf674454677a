"""Rows of preferences, and their texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import write_rows
from your_ai.data.encode import Encoder
from your_ai.data.examples import Examples, load_examples
from your_ai.data.lines import Fields
from your_ai.data.preferences import (
    MOST_WAITING,
    parse_answers,
    parse_any,
    parse_labels,
    parse_pairs,
    parser_of,
    with_other_answers,
)
from your_ai.data.rows import Chat, Labeled, Pair, Preference, Row, parse_line
from your_ai.errors import UserError

ASKED = {"role": "user", "content": "Why?"}
YES, NO = ({"role": "assistant", "content": text} for text in ("Because.", "No idea."))


def chats(row: dict) -> tuple[Chat, Chat]:
    content = parse_pairs(row, "here").content
    return content.chosen, content.rejected


BRIEF = {"role": "system", "content": "Be brief."}
TEXTS = {"chosen": "Because.", "rejected": "No idea."}
WHOLE = {"chosen": [ASKED, YES], "rejected": [ASKED, NO]}
TURNS = {"chosen": [YES], "rejected": [NO]}


@pytest.mark.parametrize(
    ("row", "system"),
    [
        ({"prompt": [ASKED], **TURNS}, []),
        (WHOLE, []),
        ({"prompt": [ASKED], **WHOLE}, []),
        ({"prompt": "Why?", **WHOLE}, []),
        ({"prompt": "Why?", **TURNS}, []),
        ({"prompt": [ASKED], **TEXTS}, []),
        ({"prompt": "Why?", **TEXTS, "system": "Be brief."}, [BRIEF]),
        ({"prompt": [ASKED], **TURNS, "system": "Be brief."}, [BRIEF]),
        ({"prompt": [ASKED], **TEXTS, "system": "Be brief."}, [BRIEF]),
        ({**WHOLE, "system": "Be brief."}, [BRIEF]),
    ],
)
def test_every_form_of_chats_gives_the_same_pair_after_its_system_prompt(row, system):
    chosen, rejected = chats(row)
    assert [chosen.messages, rejected.messages] == [[*system, ASKED, YES], [*system, ASKED, NO]]
    assert (chosen.first_trained, rejected.first_trained) == (len(system) + 1,) * 2


def test_answers_of_several_turns_begin_where_they_differ():
    more = [YES, {"role": "user", "content": "And?"}, NO]
    chosen, rejected = chats({"chosen": [ASKED, *more], "rejected": [ASKED, YES, more[1], YES]})
    assert (chosen.first_trained, rejected.first_trained) == (3, 3)


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        ("Q: two? A: yes", "Q: two? A: no", "Q: two? A:", (" yes", " no")),
        ("Q: two? A:\nyes", "Q: two? A:\nno", "Q: two? A:\n", ("yes", "no")),
        ("Say yesterday", "Say yes", "Say", (" yesterday", " yes")),
    ],
)
def test_texts_without_a_prompt_are_split_before_the_first_different_word(
    chosen, rejected, prompt, answers
):
    found = chats({"chosen": chosen, "rejected": rejected})
    assert found == (Pair(prompt, answers[0]), Pair(prompt, answers[1]))


PAIR, ANSWER = {"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "completion": "c"}
WRONG = {
    parse_pairs: [
        ({**PAIR, "rejected": "a"}, "chosen equals rejected"),
        ({**PAIR, "rejected": " "}, "rejected: is empty"),
        ({"chosen": "yes", "rejected": "no"}, "have no common beginning, and no prompt"),
        ({"chosen": [YES], "rejected": [NO]}, "have no common beginning, and no prompt"),
        ({"chosen": [ASKED, YES], "rejected": [ASKED]}, "no common beginning"),
        ({"prompt": "p", "chosen": [YES], "rejected": "no"}, "two texts or two lists"),
        ({**PAIR, "prompt": 0.3}, "prompt: expected text"),
        ({**PAIR, "chosen": 0.3}, "chosen: expected text, found float"),
        ({**PAIR, "weight": -1}, "weight -1"),
        ({"prompt": [ASKED], "chosen": [ASKED], "rejected": [YES]}, "chosen: has no answer"),
        ({"prompt": None, "chosen": "A cat", "rejected": "A dog"}, "prompt: expected text"),
        (ANSWER, "such rows train with --objective sft"),
        ({**ANSWER, "label": True}, "rows train with --objective kto"),
        ({"question": "p"}, "unknown row format; keys found: question"),
    ],
    parse_any: [
        ({"prompt": "p", "chosen": "a"}, "7: unknown row format; keys found: prompt, cho"),
        ({"prompt": "p", "answer": "4"}, "7: has a prompt and no answer to measure; keys found: p"),
        ({**ANSWER, "label": "good"}, "label: expected true or false"),
        ({**PAIR, "rejected": "a"}, "chosen equals rejected"),
    ],
    parse_labels: [
        (ANSWER, "label is missing"),
        ({**ANSWER, "label": "good"}, "label: expected true or false"),
        ({**ANSWER, "label": None}, "label: expected true or false"),
        (PAIR, "rows train with --objective dpo"),
        ({"text": "t", "label": True},
         "7: a label needs a prompt and an answer; keys found: text, label; expected prom"),
        ({"prompt": "p", "label": True}, "completion is missing; keys found: prompt, label"),
        ({"completion": "c", "label": 1}, "prompt is missing; keys found: completion, label"),
    ],
    parse_answers: [
        (PAIR, "rows train with --objective dpo"),
        ({**ANSWER, "label": False}, "train such rows with --objective kto"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "row", "message"),
    [
        pytest.param(parse, *case, id=f"{parse.__name__}-{number}")
        for parse, cases in WRONG.items()
        for number, case in enumerate(cases)
    ],
)
def test_wrong_rows_are_named_in_one_line(parse, row, message):
    with pytest.raises(UserError, match=message) as error:
        parse(row, "d.jsonl:7")
    assert str(error.value).startswith("d.jsonl:7: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, Preference),
        ({"prompt": "p", "completion": "c", "label": False}, Labeled),
        ({"prompt": "p", "completion": "c"}, Pair),
        ({"messages": [ASKED, YES]}, Chat),
    ],
)
def test_rows_to_measure_may_have_any_form(row, kind):
    assert isinstance(parse_any(row, "here").content, kind)


def test_labels_say_whether_an_answer_is_good():
    good = parse_labels({"prompt": "p", "completion": "c", "label": True}, "here").content
    bad = parse_labels({"messages": [ASKED, NO], "label": False, "weight": 2}, "here")
    assert (good.answer, good.good) == (Pair("p", "c"), True)
    assert (bad.content.answer.messages, bad.content.good, bad.weight) == ([ASKED, NO], False, 2)


def test_supervised_rows_may_have_other_columns_of_the_names_of_preferences():
    assert parse_answers({**ANSWER, "label": "joy"}, "here")
    row = {"messages": [ASKED, YES], **TURNS}
    assert parse_answers(row, "here").content.messages == [ASKED, YES]


def load(folder: Path, tokenizer, rows, kind, size=256, too_long="error") -> Examples:
    path = write_rows(folder / "train.jsonl", rows)
    encoder = Encoder(tokenizer, mask_prompt=False, kind=kind)
    return load_examples(path, encoder, "tokenizer", size, too_long, folder / "cache")


def test_a_pair_becomes_two_texts_whose_answers_are_trained(own_folder, demo_tokenizer):
    rows = [{"prompt": "Why?", "chosen": "Because.", "rejected": "No idea.", "weight": 2}]
    found = load(own_folder, demo_tokenizer, rows, "pairs")
    texts = [demo_tokenizer.decode(found[i].tokens[found[i].trained].tolist()) for i in (0, 1)]
    end = demo_tokenizer.eos_token
    assert [text.strip() for text in texts] == [f"Because.{end}", f"No idea.{end}"]
    prompts = [found[i].tokens[~found[i].trained] for i in (0, 1)]
    assert np.array_equal(*prompts)
    assert found.weights.tolist() == [2, 2]
    assert (found.tally.rows, found.tally.examples, found.columns) == (1, 2, {})


SAME = "Yes, we will send them. " * 3
SHORT = {"prompt": "Why?", "chosen": "Yes.", "rejected": "No."}


@pytest.mark.parametrize(
    ("rows", "size", "truncated"),
    [
        ([{**SHORT, "chosen": "Because. " * 9}, {**SHORT, "prompt": "Why? " * 60}], 40, 2),
        ([{**SHORT, "chosen": SAME + "A", "rejected": SAME + "B"}, SHORT], 16, 1),
    ],
    ids=["prompt", "difference"],
)
def test_pairs_whose_prompt_or_difference_does_not_fit_are_dropped(
    own_folder, demo_tokenizer, rows, size, truncated
):
    found = load(own_folder, demo_tokenizer, rows, "pairs", size, "truncate")
    assert (len(found), found.tally.truncated, found.tally.dropped) == (2, truncated, 1)


@pytest.mark.parametrize(
    ("kind", "row", "ways"),
    [
        ("answers", {"prompt": "p", "completion": "c " * 99}, "use --too-long truncate or split"),
        ("pairs", {"prompt": "p", "chosen": "c " * 99, "rejected": "r"}, "use --too-long truncate"),
        ("labels", {**ANSWER, "completion": "c " * 99, "label": True}, "use --too-long truncate"),
        ("prompts", {"prompt": "p " * 99}, "leave this row out"),
    ],
)
def test_a_row_that_is_too_long_names_the_ways_that_its_objective_has(
    own_folder, demo_tokenizer, kind, row, ways
):
    with pytest.raises(UserError, match=f"raise it, or {ways}$"):
        load(own_folder, demo_tokenizer, [row, row], kind, 32)


def test_labeled_rows_with_the_same_answer_cannot_be_compared(own_folder, demo_tokenizer):
    rows = [{"prompt": f"p{i}", "completion": "Yes", "label": True} for i in range(3)]
    with pytest.raises(UserError, match=r"train\.jsonl: all answers are the same"):
        load(own_folder, demo_tokenizer, rows, "labels")


def test_labels_are_kept_with_the_texts(own_folder, demo_tokenizer):
    rows = [{"prompt": f"p{c}", "completion": c, "label": c == "good"} for c in ("good", "bad")]
    for _ in range(2):  # encoded, then from the cache
        found = load(own_folder, demo_tokenizer, rows, "labels")
        assert found.columns["labels"].tolist() == [True, True, False, False]


@pytest.mark.parametrize("label", [True, 1, 1.0, "1", "1.0", "true", "True", "TRUE"])
def test_labels_may_be_text_as_in_tables(label):
    assert parse_labels({"prompt": "p", "completion": "c", "label": label}, "here").content.good


def test_a_label_is_about_what_follows_the_last_question():
    first = [ASKED, NO, {"role": "user", "content": "And?"}]
    row = {"messages": [*first, YES], "label": True}
    assert parse_labels(row, "here").content.answer.first_trained == 3
    with pytest.raises(UserError, match="no answer of the assistant after the last question"):
        parse_labels({"messages": first, "label": True}, "here")


def labeled(prompt: str, answer: str, as_chat: bool = False) -> Row:
    row = {"prompt": prompt, "completion": answer, "label": True}
    if as_chat:
        row["prompt"] = [{"role": "user", "content": prompt}]
    return parse_labels(row, f"{prompt}:{answer}")


def others_of(rows: list[Row]) -> list[tuple[str, str]]:
    """(prompt, answer) of the second text of each row."""
    found = []
    for row in with_other_answers(iter(rows)):
        other = row.content.other
        if isinstance(other, Pair):
            found.append((other.prompt, other.completion))
        else:
            found.append(tuple(turn["content"] for turn in other.messages))
    return found


@given(prompts=st.lists(st.sampled_from("abc"), min_size=2, max_size=12), data=st.data())
def test_each_row_gets_an_answer_to_another_prompt_where_there_is_one(prompts, data):
    forms = data.draw(st.lists(st.booleans(), min_size=len(prompts), max_size=len(prompts)))
    rows = [labeled(p, f"{p}{i}", f) for i, (p, f) in enumerate(zip(prompts, forms, strict=True))]
    found = others_of(rows)
    assert [prompt for prompt, _ in found] == prompts
    answers = [answer for _, answer in found]
    assert set(answers) <= {f"{p}{i}" for i, p in enumerate(prompts)}
    for i, (prompt, answer) in enumerate(found):
        assert answer != f"{prompt}{i}"
        if len(set(prompts)) > 1 and not any(forms):
            assert answer[0] != prompt


def test_many_rows_of_one_prompt_do_not_wait_for_another():
    rows = (labeled("a", str(i)) for i in range(MOST_WAITING + 2))
    first = next(with_other_answers(rows))
    assert first.content.other == Pair("a", str(MOST_WAITING))
    assert next(rows).where == f"a:{MOST_WAITING + 1}"


def test_a_file_of_one_labeled_row_is_refused():
    with pytest.raises(UserError, match="the only row"):
        others_of([labeled("a", "b")])


def test_the_answer_of_another_row_is_shortened_where_it_does_not_fit(own_folder, demo_tokenizer):
    rows = [{"prompt": "Why?", "completion": "Yes. " * n, "label": True} for n in (1, 9)]
    rows[0]["prompt"] = "Why then, and how?"
    size = len(load(own_folder, demo_tokenizer, rows, "labels")[2].tokens)
    found = load(own_folder, demo_tokenizer, rows, "labels", size)
    assert found.lengths.max() == size
    assert (len(found), found.tally.truncated) == (4, 0)


def test_the_rows_of_one_file_may_differ_in_form(own_folder, demo_tokenizer):
    rows = [SHORT, WHOLE]
    assert len(load(own_folder, demo_tokenizer, rows, "pairs")) == 4
    with pytest.raises(UserError, match=r"train\.jsonl:3: expected chosen \+ rejected"):
        load(own_folder, demo_tokenizer, [*rows, json.loads('{"text": "t"}')], "pairs")


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "Yes indeed", "rejected": "No way"},
        {
            "chosen": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "Yes"}],
            "rejected": [{"role": "user", "content": "B"}, {"role": "assistant", "content": "No"}],
        },
    ],
)
def test_a_reward_model_compares_texts_that_have_nothing_in_common(row):
    content = parser_of("rated")(row, "d.jsonl:1").content
    assert content.chosen != content.rejected
    if isinstance(row["chosen"], str):
        assert (content.chosen.text, content.rejected.text) == (row["chosen"], row["rejected"])


@given(st.floats(allow_nan=True, allow_infinity=True) | st.text() | st.booleans() | st.none())
def test_any_score_is_a_number_or_refused_in_one_line(score):
    row = {"prompt": "a", "completion": "b", "score": score}
    found, text = None, ""
    try:
        found = parser_of("rated")(row, "d.jsonl:1").content.score
    except UserError as error:
        text = str(error)
    if found is None:
        assert text.startswith("d.jsonl:1: score: expected a number")
        assert "\n" not in text
    else:
        assert found == float(score)
        assert abs(found) <= 1e6


TURN = {"role": "user", "content": "q"}
OTHER_FORMS = {
    "OpenAI": {"input": {"messages": [TURN]},
               "preferred_output": [{"role": "assistant", "content": "good"}],
               "non_preferred_output": [{"role": "assistant", "content": "bad"}]},
    "LLaMA-Factory": {"conversations": [{"from": "human", "value": "q"}],
                      "chosen": {"from": "gpt", "value": "good"},
                      "rejected": {"from": "gpt", "value": "bad"}},
    "messages": {"messages": [TURN], "chosen": "good", "rejected": "bad"},
    "Alpaca": {"instruction": "q", "input": "", "chosen": "good", "rejected": "bad"},
    "context": {"context": "q", "chosen": "good", "rejected": "bad"},
    "HH-RLHF": {"chosen": "\n\nHuman: q\n\nAssistant: good",
                "rejected": "\n\nHuman: q\n\nAssistant: bad"},
    "HH-RLHF with a prompt": {"prompt": "\n\nHuman: q\n\nAssistant:", "chosen": " good",
                              "rejected": " bad"},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_FORMS)
def test_pairs_of_other_programs_have_their_question_and_answers(name):
    content = parse_pairs(OTHER_FORMS[name], "here").content
    for found, answer in ((content.chosen, "good"), (content.rejected, "bad")):
        if isinstance(found, Pair):
            assert (found.prompt, found.completion) == ("q", answer)
        else:
            assert [turn["content"] for turn in found.messages] == ["q", answer]
            assert found.first_trained == 1


@pytest.mark.parametrize(("prompt", "unused"), [("Why? ", ()), ("Another", ("prompt",))])
def test_a_prompt_beside_whole_chats_is_named_unless_it_is_in_them(prompt, unused):
    row = Fields({"prompt": prompt, **WHOLE})
    assert parse_pairs(row, "here").content.chosen.messages == [ASKED, YES]
    assert row.unused() == unused


def test_other_fields_of_the_input_of_a_pair_are_named():
    asked = {"messages": [ASKED], "context": "c"}
    row = {"input": asked, "preferred_output": [YES], "non_preferred_output": [NO]}
    line = json.dumps(row).encode()
    assert parse_line(line, "f.jsonl:1", parse=parse_pairs).unused == ("input.context",)
