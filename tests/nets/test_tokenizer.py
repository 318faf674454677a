"""One function opens a tokenizer, with its chat template and its end tokens."""

from __future__ import annotations

import json
import shutil

import pytest
from mlx_lm.utils import load_tokenizer

from tests.conftest import DEMO_FOLDER, TOKENIZER_FILES, change_json
from your_ai.nets.tokenizer import end_notes, first_difference, open_tokenizer, turn_end_of

PLAIN = (DEMO_FOLDER / "chat_template.jinja").read_text()
PAD, END, SYSTEM, USER = 0, 1, 2, 3
CHAT = [{"role": "user", "content": "a"}]
TOKENS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|pad|>"]


@pytest.fixture
def folder(tmp_path):
    """A model whose texts end with <|pad|>, and whose chat template ends turns with <|end|>."""
    for name in ("config.json", *TOKENIZER_FILES):
        shutil.copy(DEMO_FOLDER / name, tmp_path / name)
    change_json(tmp_path, "config.json", eos_token_id=PAD)
    own = {"eos_token": "<|pad|>", "pad_token": None, "extra_special_tokens": TOKENS[:4]}
    change_json(tmp_path, "tokenizer_config.json", **own)
    return tmp_path


def write_template(folder, text):
    (folder / "chat_template.jinja").write_text(text)


def ends_of(folder):
    return sorted(open_tokenizer(folder).eos_token_ids)


def test_end_tokens_of_the_files_are_those_that_mlx_lm_uses(folder):
    write_template(folder, "{{ messages[-1].content }}")
    change_json(folder, "config.json", eos_token_id=[SYSTEM, USER])
    assert ends_of(folder) == [PAD, SYSTEM, USER]
    (folder / "generation_config.json").write_text("{")
    assert ends_of(folder) == [PAD, SYSTEM, USER]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": USER}))
    assert ends_of(folder) == [PAD, USER]


def test_the_token_that_ends_a_turn_is_an_end_token_and_is_named(folder):
    tokenizer = open_tokenizer(folder)
    assert sorted(tokenizer.eos_token_ids) == [PAD, END]
    (note,) = end_notes(folder, tokenizer)
    assert "<|end|>" in note
    change_json(folder, "config.json", eos_token_id=[PAD, END])
    assert end_notes(folder, open_tokenizer(folder)) == []


ENDS = {
    "a line after the token": (PLAIN.replace("<|end|>'", "<|end|>\n'"), END),
    "a token that ends the whole text": (PLAIN + "<|pad|>", END),
    "the same token after every answer": (PLAIN.replace("<|end|>", "<|pad|>"), PAD),
    "a generation prompt that is always there": (PLAIN + "<|assistant|>", END),
    "parts that have ends of their own": (PLAIN.replace("<|end|>", "<|system|><|pad|>"), PAD),
    "another token at the end of the chat": (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{{ '<|pad|>' if loop.last else '<|end|>' }}{% endfor %}",
        None,
    ),
    "no token": ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", None),
    "a text that is no token": (PLAIN.replace("<|end|>", "<|stop|>"), None),
    "a template that refuses chats": ("{{ raise_exception('no') }}", None),
    "a template that shows no answer": ("{{ messages[0].content }}", None),
}


@pytest.mark.parametrize(("template", "turn_end"), ENDS.values(), ids=ENDS)
def test_the_end_of_a_turn_is_found_by_rendering(folder, template, turn_end):
    write_template(folder, template)
    assert turn_end_of(open_tokenizer(folder)) == turn_end


@pytest.mark.parametrize(("end", "written"), [("", "nothing"), ("<|stop|>", "'<|stop|>'")])
def test_a_template_without_a_token_at_the_end_is_named(folder, end, written):
    write_template(folder, PLAIN.replace("<|end|>", end))
    (note,) = end_notes(folder, open_tokenizer(folder))
    assert f"ends the last answer with {written}," in note


def test_a_model_without_a_chat_template_keeps_its_end_tokens(folder):
    (folder / "chat_template.jinja").unlink()
    assert ends_of(folder) == [PAD]
    assert end_notes(folder, open_tokenizer(folder)) == []


@pytest.mark.parametrize("name", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor_is_used_if_the_tokenizer_has_none(folder, name):
    (folder / name).write_text(json.dumps({"chat_template": "{{ 'processor' }}"}))
    assert open_tokenizer(folder).chat_template == PLAIN
    (folder / "chat_template.jinja").unlink()
    tokenizer = open_tokenizer(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "processor"
    change_json(folder, "tokenizer_config.json", chat_template=PLAIN)
    assert open_tokenizer(folder).chat_template == PLAIN


def test_additional_templates_are_opened_too(folder):
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
    tokenizer = open_tokenizer(folder)
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False) == "tools"
    assert turn_end_of(tokenizer) == END


def test_the_first_difference_of_vocabularies_names_both_tokens_of_its_id():
    mine, its = {"a": 0, "c": 1, "b": 2}, {"a": 0, "b": 1, "c": 2}
    assert first_difference(mine, its) == "token 1 is b in one and c in the other"


def streamed(tokenizer, tokens):
    """The segments of the text of tokens as they come."""
    detokenizer, found = tokenizer.detokenizer, []
    for token in tokens:
        detokenizer.add_token(token)
        found.append(detokenizer.last_segment)
    detokenizer.finalize()
    return [*found, detokenizer.last_segment]


def test_text_is_streamed_as_by_mlx_lm(folder):
    ours, theirs = open_tokenizer(folder), load_tokenizer(folder)
    tokens = [*ours.encode("Ein Käse, 3 €, please"), END, len(ours), len(ours) + 5]
    assert streamed(ours, tokens) == streamed(theirs, tokens)


def test_no_copy_of_the_vocabulary_is_kept_beside_the_one_that_encodes(folder):
    tokenizer = open_tokenizer(folder)
    parts = vars(tokenizer)["_tokenizer"], vars(tokenizer)["_detokenizer"]
    kept = [name for part in parts for name, value in vars(part).items()
            if isinstance(value, dict | list) and len(value) > len(tokenizer) // 2]  # fmt: skip
    assert kept == []


def test_a_tokenizer_is_saved_whole(folder, tmp_path):
    tokenizer = open_tokenizer(folder)
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.get_vocab() == tokenizer.get_vocab()
    text = "please send 9 red jackets"
    assert saved.encode(text) == tokenizer.encode(text)
