"""Tokenizing in windows gives the same tokens as tokenizing the whole text."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from tests.conftest import DEMO_FOLDER
from your_ai.data.windows import CannotJoin, Sizes, tokenize, tokenize_ids

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = (
    *("the", "order", "of", "twelve", "boxes", "naïve", "übergröße", "日本語", "русский", "don't"),
    *("x=y+1;", "http://a.b/c?d=1", "1234567", "3.14159", "foo_bar"),
    *("😀", "👨‍👩‍👧", "e\u0301", "ﬁne"),
    *("<|end|>", "<tool>", "\u00a0", "CamelCaseWord"),
)
GAPS = (*[" "] * 10, "\n", "\n\n", "  ", "\t", "        ", "   \n ", "")
SMALL = Sizes(window=2048, overlap=512, agreement=8)


def text_of(rng: random.Random, length: int) -> str:
    """Words in many scripts, and sometimes a long run of one kind of character."""
    parts: list[str] = []
    while sum(map(len, parts)) < length:
        if rng.random() < 0.95:
            part = rng.choice(WORDS)
        else:
            kind = rng.choice(["a", "0123456789", " ", "\n", "abcXYZ", "日本語テ", "=-"])
            part = "".join(rng.choice(kind) for _ in range(rng.randrange(1, 300)))
        parts += [part, rng.choice(GAPS)]
    return "".join(parts)[:length]


def split(pattern: str) -> pre.PreTokenizer:
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre.Sequence([pre.Split(Regex(pattern), "isolated"), byte_level])


@cache
def texts() -> list[str]:
    return [text_of(random.Random(seed), 4000) for seed in range(8)]


def byte_level(before: pre.PreTokenizer, normalizer: normalizers.Normalizer | None = None):
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = before
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre.ByteLevel.alphabet()
    made.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def sentence_piece() -> Tokenizer:
    """Like Llama 2: no pre-tokenizer, and spaces are a character."""
    learned = Tokenizer(models.BPE(unk_token="<unk>"))
    learned.pre_tokenizer = pre.Metaspace()
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    learned.train_from_iterator(
        texts(), trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    )
    described = json.loads(learned.to_str())
    described["model"] |= {"fuse_unk": True, "byte_fallback": True}
    described["pre_tokenizer"] = None
    made = Tokenizer.from_str(json.dumps(described))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre.Metaspace()
    made.train_from_iterator(
        texts(), trainers.UnigramTrainer(vocab_size=600, unk_token="<unk>",
                                         special_tokens=["<unk>"], show_progress=False)
    )  # fmt: skip
    return made


def word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre.BertPreTokenizer()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    made.train_from_iterator(
        texts(), trainers.WordPieceTrainer(vocab_size=900, special_tokens=special,
                                           show_progress=False)
    )  # fmt: skip
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


KINDS = {
    "demo": lambda: Tokenizer.from_file(str(DEMO_FOLDER / "tokenizer.json")),
    "gpt-2": lambda: byte_level(pre.ByteLevel(add_prefix_space=True)),
    "llama-3": lambda: byte_level(split(LLAMA_3)),
    "qwen": lambda: byte_level(split(LLAMA_3.replace("{1,3}", "")), normalizers.NFC()),
    "llama-2": sentence_piece,
    "unigram": unigram,
    "word-piece": word_piece,
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    made = KINDS[kind]()
    made.add_special_tokens([AddedToken("<|end|>", special=True)])
    made.add_tokens([AddedToken("<tool>", lstrip=True, rstrip=True)])
    return made


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**32), length=st.integers(2000, 12_000), special=st.booleans())
@settings(max_examples=5)
def test_windows_give_the_same_tokens_as_the_whole_text(kind, seed, length, special):
    text = text_of(random.Random(seed), length)
    whole = tokenizer(kind).encode(text, add_special_tokens=special)
    found = tokenize(tokenizer(kind), text, special, SMALL)
    assert found.ids.tolist() == whole.ids
    assert list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)) == whole.offsets
    assert tokenize_ids(tokenizer(kind), text, special, SMALL).tolist() == whole.ids


RUNS = {
    "letters": "a",
    "digits": "1234567890",
    "spaces": " ",
    "lines": "\n",
    "ideographs": "日本語",
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", ["demo", "gpt-2", "llama-3", "qwen", "llama-2"])
def test_a_text_without_a_split_gives_the_same_tokens(kind, run):
    """One pre-token, or digits in groups of three that depend on the start of the run."""
    text = "x " + RUNS[run] * (12_000 // len(RUNS[run])) + "1"
    whole = tokenizer(kind).encode(text, add_special_tokens=False)
    assert tokenize_ids(tokenizer(kind), text, False, SMALL).tolist() == whole.ids


@pytest.mark.parametrize("kind", ["unigram", "word-piece"])
def test_windows_that_cannot_be_joined_safely_are_refused(kind):
    with pytest.raises(CannotJoin):
        tokenize_ids(tokenizer(kind), "abc" * 20_000, False, SMALL)


def test_arrays_have_the_documented_dtypes():
    found = tokenize(tokenizer("demo"), text_of(random.Random(1), 5000), True, SMALL)
    assert (found.ids.dtype, found.starts.dtype, found.ends.dtype) == (
        np.uint32,
        np.int32,
        np.int32,
    )
    assert tokenize(tokenizer("demo"), "", False).ids.shape == (0,)
