"""Tokens that a run adds: read from the settings, added to the tokenizer, and kept."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.files import packaged
from your_ai.nets.new_tokens import NewTokens, texts_of, tokenizer_with_new

DEMO = packaged("models", "demo")


def added(tmp_path, **settings):
    return tokenizer_with_new(TrainConfig(**settings), DEMO, tmp_path / "tokenizer")


def test_a_tokenizer_without_new_tokens_is_that_of_the_model(tmp_path, demo_tokenizer):
    tokenizer, new = added(tmp_path)
    assert new == NewTokens()
    assert len(tokenizer.get_vocab()) == len(demo_tokenizer.get_vocab())
    assert not list(tmp_path.iterdir())


def test_new_tokens_get_ids_and_are_read_and_written(tmp_path, demo_tokenizer):
    before = demo_tokenizer
    tokenizer, new = added(tmp_path, add_tokens="<one>, <two>", add_special_tokens="<tool>")
    ids = tokenizer.convert_tokens_to_ids(["<one>", "<two>", "<tool>"])
    assert list(new.spelled) == ids
    assert new.spelled[ids[0]] == tuple(before.encode("<one>", add_special_tokens=False))
    assert tokenizer.encode("a<two>b", add_special_tokens=False).count(ids[1]) == 1
    assert tokenizer.decode(ids) == "<one><two><tool>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<one><two>"
    assert tokenizer.chat_template == before.chat_template
    assert tokenizer.eos_token_ids == before.eos_token_ids


def test_a_tokenizer_that_is_there_is_used_though_the_list_changed(tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_text("<one>\n<two>\n", encoding="utf-8")
    _, first = added(tmp_path, add_tokens=str(file))
    file.write_text("<other>\n", encoding="utf-8")
    tokenizer, again = added(tmp_path, add_tokens=str(file))
    assert again == first
    assert "<one>" in tokenizer.get_vocab()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("<one>,<one>", "<one> is there twice"),
        (",", "names no token"),
        ("no/such/file.txt", "there is no such file"),
        ("tokens.txt", "there is no such file"),
        (str(DEMO), "is a folder"),
        ("<|end|>", "is already a token of this model"),
    ],
)
def test_lists_that_cannot_be_added_are_refused(tmp_path, value, message):
    with pytest.raises(UserError, match=rf"^--add-tokens.*{message}".replace("|", r"\|")):
        added(tmp_path, add_tokens=value)
    assert not (tmp_path / "tokenizer").exists()


def test_a_token_may_not_be_plain_and_special(tmp_path):
    with pytest.raises(UserError, match="there twice"):
        added(tmp_path, add_tokens="<one>", add_special_tokens="<one>")


def test_a_damaged_record_is_named(tmp_path):
    added(tmp_path, add_tokens="<one>")
    (tmp_path / "tokenizer" / "new_tokens.json").write_text('{"spelled": {"x": 1}}')
    with pytest.raises(UserError, match=r"new_tokens.json: is damaged"):
        added(tmp_path, add_tokens="<one>")
    shutil.rmtree(tmp_path / "tokenizer")


@given(st.sets(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 2000))
def test_trained_rows_are_the_new_ones_and_all_that_the_base_lacks(ids, vocabulary):
    found = NewTokens(dict.fromkeys(sorted(ids), (1,))).trained(vocabulary)
    assert list(found) == sorted(set(found))
    assert ids <= set(found)
    count = max(vocabulary, 1 + max(found))
    assert set(found) == ids | set(range(vocabulary, count))
    assert count == vocabulary or (count % 64 == 0 and count - max(ids) <= 64)


@given(st.lists(st.text("ab<>|_ é", min_size=1).filter(str.strip), min_size=1, unique=True))
def test_a_file_has_a_token_in_each_line(tmp_path_factory, texts):
    file = tmp_path_factory.mktemp("lists") / "tokens.txt"
    file.write_text("\n".join(texts) + "\n\n", encoding="utf-8")
    assert texts_of(TrainConfig(add_tokens=str(file)), "add_tokens") == texts


def test_a_file_may_have_the_marks_of_other_editors(tmp_path):
    file = tmp_path / "tokens.txt"
    file.write_bytes("\ufeff<one>\r\n<a\u2028b>\r\n".encode())
    assert texts_of(TrainConfig(add_tokens=str(file)), "add_tokens") == ["<one>", "<a\u2028b>"]
