"""The description of tokenizers for llama.cpp; test_gguf_llama_cpp tokenizes texts with it."""

from __future__ import annotations

import json

import gguf
import pytest
from gguf import TokenType
from tokenizers import Regex, Tokenizer, decoders, models, normalizers
from tokenizers.pre_tokenizers import (
    ByteLevel,
    Digits,
    Punctuation,
    Sequence,
    Split,
    Whitespace,
)
from transformers import PreTrainedTokenizerFast

from tests.export.gguf_files import ROWS, TEMPLATE, byte_level, sentencepiece, with_tokenizer
from your_ai.errors import UserError
from your_ai.export.gguf_tokenizer import (
    PROBE,
    SPLITTERS,
    add_tokenizer,
    pre_of,
    splitter_of,
    vocabulary_of,
)
from your_ai.nets.tokenizer import open_tokenizer

KNOWN = {name: (ignores, splitter_of(patterns)) for name, ignores, patterns in SPLITTERS}
GPT2 = ByteLevel(add_prefix_space=False)


def wrapped(tokenizer, **named):
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def vocabulary(tokenizer, rows=ROWS, **named):
    return vocabulary_of("base", wrapped(tokenizer, **named), rows)


def metadata_of(base, rows=ROWS, tokenizer=None):
    """The GGUF metadata of a tokenizer, by default the one in the folder."""
    writer = gguf.GGUFWriter(None, "llama")
    add_tokenizer(writer, base, tokenizer or open_tokenizer(base), rows)
    return {name: value.value for name, value in writer.kv_data[0].items()}


# How text is split


@pytest.mark.parametrize("name", KNOWN)
def test_a_splitter_is_recognized_by_how_it_splits(name):
    ignores, splitter = KNOWN[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignores))
    tokenizer.pre_tokenizer = Sequence([splitter])  # the same splitter, serialized differently
    tokenizer.decoder, tokenizer.normalizer = decoders.ByteLevel(), normalizers.Sequence([])
    assert pre_of(Tokenizer.from_str(tokenizer.to_str())) == name


def test_the_probe_text_distinguishes_all_splitters():
    found = [str(splitter.pre_tokenize_str(PROBE)) for _, splitter in KNOWN.values()]
    assert len(set(found)) == len(found) - 1  # llama-bpe and smaug-bpe differ in their merges


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": Sequence([Whitespace(), GPT2])},
        {"pre_tokenizer": ByteLevel(add_prefix_space=True)},
        {"pre_tokenizer": KNOWN["llama-bpe"][1], "normalizer": normalizers.Lowercase()},
        {"decoder": None},
    ],
)
def test_an_unknown_splitter_is_refused(change):
    tokenizer = byte_level(GPT2)
    for name, value in change.items():
        setattr(tokenizer, name, value)
    with pytest.raises(UserError, match=r"does not support \(supported: gpt-2, smollm"):
        vocabulary(tokenizer)


def test_ignoring_merges_is_refused_only_if_it_makes_a_difference():
    tokenizer = byte_level(KNOWN["qwen2"][1], ignores_merges=True)
    assert vocabulary(tokenizer).pre == "qwen2"
    parts = json.loads(tokenizer.to_str())
    parts["model"]["vocab"]["Xqj"] = len(parts["model"]["vocab"])  # no merges lead to it
    with pytest.raises(UserError, match="splits text in a way that GGUF export does not support"):
        vocabulary(Tokenizer.from_str(json.dumps(parts)))


@pytest.mark.parametrize(
    ("name", "splitters"),
    [
        ("smollm", [Digits(individual_digits=True), GPT2]),
        ("falcon", [Punctuation("contiguous"), GPT2, Split(Regex("[0-9]{3}"), "isolated")]),
    ],
)
def test_a_splitter_is_recognized_however_it_is_written(name, splitters):
    assert vocabulary(byte_level(Sequence(splitters))).pre == name


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (Tokenizer(models.WordPiece(unk_token="x")), "its tokenizer is WordPiece; GGUF supports o"),
        (Tokenizer(models.Unigram()), "its tokenizer is Unigram; GGUF supports only"),
        (Tokenizer(models.BPE(end_of_word_suffix="</w>")), "GGUF supports only byte-level BPE"),
        (sentencepiece(complete=False), "falls back to bytes, but is not a SentencePiece tokenize"),
    ],
    ids=["WordPiece", "Unigram", "ends of words", "bytes without SentencePiece's merges"],
)
def test_tokenizers_other_than_byte_level_bpe_and_sentencepiece_are_refused(tokenizer, message):
    with pytest.raises(UserError, match=message):
        vocabulary(tokenizer)


# Tokens


def test_each_embedding_row_gets_a_token_and_a_type():
    tokenizer = byte_level(GPT2)
    found = vocabulary(tokenizer)
    size = tokenizer.get_vocab_size()
    assert (found.model, found.pre) == ("gpt2", "gpt-2")
    assert len(found.tokens) == len(found.types) == ROWS
    assert all(tokenizer.token_to_id(token) == i for i, token in enumerate(found.tokens[:size]))
    assert found.tokens[size:] == [f"[PAD{i}]" for i in range(size, ROWS)]
    assert set(found.types[size:]) == {TokenType.UNUSED}
    assert found.types[found.tokens.index("<|end|>")] == TokenType.CONTROL
    assert found.types[found.tokens.index("<tool>")] == TokenType.USER_DEFINED
    assert found.types[found.tokens.index("e")] == TokenType.NORMAL


def test_merges_keep_their_order():
    tokenizer = byte_level(GPT2)
    first, second = vocabulary(tokenizer).merges[:2]
    ids = [tokenizer.token_to_id(merge.replace(" ", "")) for merge in (first, second)]
    assert ids == [ids[0], ids[0] + 1]


def test_tokens_beyond_the_embedding_rows_are_left_out():
    tokenizer = byte_level(GPT2)
    rows = tokenizer.get_vocab_size() - 1
    assert "<tool>" not in vocabulary(tokenizer, rows).tokens


def test_sentencepiece_scores_follow_the_order_of_the_merges():
    tokenizer = sentencepiece()
    found = vocabulary(tokenizer, unk_token="<unk>")
    assert (found.model, found.pre, found.merges) == ("llama", "default", [])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    made = list(dict.fromkeys("".join(pair) for pair in merges))
    scores = [found.scores[found.tokens.index(piece)] for piece in made]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(made) > 100
    assert found.types[found.tokens.index("<0x0A>")] == TokenType.BYTE
    assert found.types[found.tokens.index("<unk>")] == TokenType.UNKNOWN
    assert found.types[found.tokens.index("</s>")] == TokenType.CONTROL
    assert found.types[found.tokens.index("▁")] == TokenType.NORMAL


def test_added_tokens_of_spaces_stay_normal_tokens():
    tokenizer = sentencepiece("never")
    tokenizer.add_tokens(["▁▁", "\n\n"])
    found = vocabulary(tokenizer)
    assert found.types[found.tokens.index("▁▁")] == TokenType.NORMAL
    assert found.types[found.tokens.index("\n\n")] == TokenType.USER_DEFINED


@pytest.mark.parametrize(
    ("prefix", "template", "wanted"),
    [
        ("always", TEMPLATE, True),
        ("normalizer", TEMPLATE, True),
        ("never", TEMPLATE, False),
        ("first", None, True),
        # A chat begins with a special token, and llama.cpp would put a space after it.
        ("first", TEMPLATE, False),
    ],
)
def test_adds_space_follows_the_tokenizer(prefix, template, wanted):
    tokenizer = wrapped(sentencepiece(prefix))
    tokenizer.chat_template = template
    assert vocabulary_of("base", tokenizer, ROWS).adds_space is wanted


# Tokens at the start and end of a text


def test_the_demo_model_gets_its_template_and_its_end_token(tiny_model):
    found = metadata_of(tiny_model, 768)
    assert found["tokenizer.chat_template"] == (tiny_model / "chat_template.jinja").read_text()
    assert found["tokenizer.ggml.eos_token_id"] == 1
    assert found["tokenizer.ggml.bos_token_id"] == 1  # it has none, so the eos token is used
    assert found["tokenizer.ggml.padding_token_id"] == 0
    assert found["tokenizer.ggml.add_bos_token"] is False
    assert found["tokenizer.ggml.add_eos_token"] is False


def test_a_bos_token_before_every_text_is_recorded(tmp_path):
    named = {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    base = with_tokenizer(tmp_path / "m", byte_level(GPT2, begins=True), **named)
    found = metadata_of(base)
    assert found["tokenizer.ggml.bos_token_id"] == 2
    assert found["tokenizer.ggml.add_bos_token"] is True


def test_tokens_before_every_text_may_be_those_that_begin_the_template(tmp_path):
    template = f"<|user|>{TEMPLATE}"
    tokenizer = byte_level(GPT2, begins=True)
    base = with_tokenizer(tmp_path / "m", tokenizer, template, eos_token="<|end|>")
    assert metadata_of(base)["tokenizer.ggml.add_bos_token"] is False


def test_an_unnamed_token_before_every_text_is_refused(tmp_path):
    base = with_tokenizer(tmp_path / "m", byte_level(GPT2, begins=True), eos_token="<|end|>")
    with pytest.raises(UserError, match="adds other tokens around a text"):
        metadata_of(base)


@pytest.mark.parametrize("named", [{"eos_token": "<|end|>"}, {}])
def test_a_second_end_token_is_recorded_as_the_end_of_turn(tmp_path, named):
    base = with_tokenizer(tmp_path / "m", byte_level(GPT2), **named)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2]}))
    found = metadata_of(base)
    assert found["tokenizer.ggml.eos_token_id"] == 1
    assert found["tokenizer.ggml.eot_token_id"] == 2


def test_several_templates_are_recorded_by_name(tmp_path):
    base = with_tokenizer(tmp_path / "m", byte_level(GPT2), eos_token="<|end|>")
    tokenizer = open_tokenizer(base)
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    found = metadata_of(base, tokenizer=tokenizer)
    assert found["tokenizer.chat_template"] == "a"
    assert found["tokenizer.chat_template.tool_use"] == "b"
