"""Which rows are measured, and which line each example comes from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import DEMO_FOLDER, chat, write_rows
from your_ai.config import DEMO, TrainConfig
from your_ai.data.answers import ChatAnswers
from your_ai.data.encode import Encoder
from your_ai.data.rows import read_rows
from your_ai.data.sources import find_splits
from your_ai.errors import UserError
from your_ai.evaluation.rows import (
    asked_and_expected,
    asks,
    choose_file,
    cut_text,
    digests,
    in_training_data,
    load_rows,
)

LONG = chat("Short question", "word " * 60)


def config_of(path, **settings) -> TrainConfig:
    return TrainConfig(data=str(path), **settings)


def load(path, tokenizer, **settings):
    """The rows of a file, or given ones, which are in t.jsonl."""
    path = write_rows(Path("t.jsonl"), path) if isinstance(path, list) else path
    config = config_of(path, **settings)
    return load_rows(path, config, Encoder(tokenizer, config.mask_prompt), "t")


# Which file


def test_a_folder_gives_its_test_file_or_else_its_valid_file(own_folder):
    for name, expected in (("train", None), ("valid", "valid"), ("test", "test")):
        write_rows(own_folder / "d" / f"{name}.jsonl", [chat("a", "b")])
        if expected is None:
            with pytest.raises(UserError, match=r"no rows for a test or for validation"):
                choose_file("d", config_of("elsewhere"))
        else:
            assert choose_file("d", config_of("elsewhere")).name == f"{expected}.jsonl"
            assert choose_file(None, config_of("d")).name == f"{expected}.jsonl"


def test_a_given_file_is_used_directly(own_folder):
    path = write_rows(own_folder / "other.jsonl", [chat("a", "b")])
    assert choose_file("other.jsonl", config_of("d")).resolve() == path


def test_the_demo_has_test_rows():
    assert choose_file(None, config_of(DEMO)) == DEMO_FOLDER / "data" / "test.jsonl"
    assert choose_file(DEMO, config_of("d")) == DEMO_FOLDER / "data" / "test.jsonl"


def test_a_run_trained_on_a_single_file_is_measured_on_the_rows_held_out(own_folder):
    rows = [chat(f"a{i}", "b") for i in range(60)]
    write_rows(own_folder / "rows.jsonl", rows)
    assert choose_file(None, config_of("rows.jsonl")).name == "valid.jsonl"
    write_rows(own_folder / "rows.jsonl", rows[:3])
    with pytest.raises(UserError, match=r"--data rows.jsonl: has no rows for a test"):
        choose_file(None, config_of("rows.jsonl"))


def test_missing_data_is_an_error(own_folder):
    with pytest.raises(UserError, match="--data gone: no such file or folder"):
        choose_file(None, config_of("gone"))


# Which line


def test_line_numbers_count_the_empty_lines_of_the_file(own_folder, demo_tokenizer):
    rows = [chat("a", "one"), "", chat("b", "two"), "  ", "", {"text": "three"}]
    found = load(rows, demo_tokenizer)
    assert [found.where(place) for place in range(3)] == ["t.jsonl:1", "t.jsonl:3", "t.jsonl:6"]
    assert found.asks.tolist() == found.has_answer.tolist() == [True, True, False]
    read = list(found.read(np.array([2, 0])))
    assert [(place, content) for place, _, content in read] == [(0, rows[0]), (2, rows[5])]


def test_converted_rows_name_the_file_of_the_user(own_folder, demo_tokenizer):
    (own_folder / "mine.csv").write_text("prompt,completion\na,b\n")
    config = TrainConfig(data="mine.csv", valid="none")
    converted = load(find_splits(config).files["train"], demo_tokenizer)
    assert converted.files == "mine.csv"
    assert load([chat("a", "b")], demo_tokenizer).files == "t.jsonl"


def test_a_byte_order_mark_is_skipped(own_folder, demo_tokenizer):
    path = own_folder / "t.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(chat("a", "b")).encode() + b"\n")
    found = load(path, demo_tokenizer)
    assert [content for *_, content in found.read([0])] == [chat("a", "b")]


def test_measures_of_a_split_row_are_added_up(own_folder, demo_tokenizer):
    rows = [chat("a", "one"), LONG, chat("b", "two")]
    path = write_rows(own_folder / "t.jsonl", rows)
    whole = load(path, demo_tokenizer, max_seq_length=512)
    split = load(path, demo_tokenizer, max_seq_length=32, too_long="split")
    assert len(split.trained.row_of) > 3
    assert split.lines.tolist() == [1, 2, 3]
    assert split.trained_tokens.tolist() == whole.trained_tokens.tolist()
    ones = np.ones(len(split.trained.row_of))
    counted = np.bincount(split.trained.row_of)
    assert split.trained.summed(ones, 3).tolist() == counted.tolist()


def test_a_row_without_trained_tokens_after_truncation_is_left_out(own_folder, demo_tokenizer):
    rows = [chat("a", "one"), chat("word " * 60, "never reached"), chat("b", "two", weight=3)]
    settings = {"max_seq_length": 32, "too_long": "truncate"}
    found = load(rows, demo_tokenizer, **settings)
    assert found.lines.tolist() == [1, 3]
    assert found.weights.tolist() == [1, 3]
    text = cut_text(found, config_of("t.jsonl", **settings))
    assert "1 of 3 rows was longer" in text
    assert "1 has nothing left to measure" in text


def test_exact_match_uses_only_answers_when_prompts_are_trained_too(own_folder, demo_tokenizer):
    rows = [chat("word " * 60, "never reached"), chat("b", "two"), {"text": "three"}]
    settings = {"max_seq_length": 32, "too_long": "truncate", "mask_prompt": False}
    found = load(rows, demo_tokenizer, **settings)
    assert found.lines.tolist() == [1, 2, 3]
    assert found.answers.row_of.tolist() == [1, 2]
    assert found.has_answer.tolist() == [False, True, False]
    assert found.trained_tokens[1] > found.answers.examples[0].trained.sum()


def test_exact_match_is_skipped_if_the_template_hides_the_answers(
    own_folder, demo_tokenizer, monkeypatch
):
    def hidden(*_):
        raise UserError("the template does not show it")

    monkeypatch.setattr(ChatAnswers, "framed", lambda *_: None)
    monkeypatch.setattr(ChatAnswers, "spans", hidden)
    found = load([chat("a", "b")], demo_tokenizer, mask_prompt=False)
    assert found.answers is found.trained
    assert not found.has_answer.any()


def test_a_file_with_only_zero_weights_is_refused(own_folder, demo_tokenizer):
    with pytest.raises(UserError, match="every row has weight 0"):
        load([chat("a", "b", weight=0)], demo_tokenizer)


def test_a_file_that_changes_while_it_is_read_is_an_error(own_folder, demo_tokenizer):
    found = load([chat("a", "b"), chat("c", "d")], demo_tokenizer)
    write_rows(Path("t.jsonl"), [chat("a", "b")])
    with pytest.raises(UserError, match="was changed while it was read"):
        list(found.read([0, 1]))


@pytest.mark.parametrize(
    ("content", "expected", "asking"),
    [
        (chat("ask", "answer"), ("ask", "answer"), True),
        ({"prompt": "ask", "completion": "answer"}, ("ask", "answer"), True),
        ({"text": "a text"}, ("", "a text"), False),
        ({"messages": [*chat("a", "b")["messages"], {"role": "user", "content": "c"}]},
         ("b", "c"), False),
        ({"messages": [{"role": "user", "content": "a"},
                       {"role": "assistant", "tool_calls": [{"name": "f"}]}]},
         ("a", '[{"type": "function", "function": {"name": "f", "arguments": {}}}]'), True),
        ({"messages": [{"role": "assistant", "content": "alone"}]}, ("", "alone"), True),
    ],
)  # fmt: skip
def test_question_and_expected_answer_of_each_row_format(own_folder, content, expected, asking):
    (row,) = read_rows(write_rows(own_folder / "t.jsonl", [content]))
    assert asked_and_expected(row) == expected
    assert asks(row) == asking


# Leaks


def test_rows_that_are_in_the_training_data_are_counted(own_folder, demo_tokenizer):
    training = [chat(f"q{i}", "word " * i) for i in range(1, 9)]
    write_rows(own_folder / "d" / "train.jsonl", training)
    rows = [training[2], chat("new", "row"), training[2], chat("q3", "another answer"), training[7]]
    path = write_rows(own_folder / "d" / "test.jsonl", rows)
    config = config_of(own_folder / "d")
    found = load_rows(path, config, Encoder(demo_tokenizer), "t")
    assert in_training_data(found, config, "t") == 3


@pytest.mark.parametrize("data", ["gone", ""])
def test_missing_training_data_gives_an_unknown_count(own_folder, demo_tokenizer, data):
    found = load([chat("a", "b")], demo_tokenizer)
    assert in_training_data(found, config_of(data), "t") is None


def test_rows_are_compared_by_all_of_their_tokens(own_folder, demo_tokenizer):
    rows = [chat("a", "b c"), chat("a", "b"), chat("a b", "c"), chat("a", "b c", weight=2)]
    found = list(digests(load(rows, demo_tokenizer).trained.examples))
    assert len(set(found)) == 3
    assert found[0] == found[3]
