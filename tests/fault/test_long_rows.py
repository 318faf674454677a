"""Rows of several megabytes are tokenized under the memory limit."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.conftest import write_rows
from tests.hostile_inputs import Case, judge
from your_ai.data.encode import Encoder
from your_ai.data.examples import load_examples
from your_ai.data.windows import SIZES

WORDS = "the order of twelve boxes was sent to Mr. Smith, who had asked for it".split()
LIMIT_GB = 0.2


def long_text(characters: int) -> str:
    rng = random.Random(0)
    return " ".join(rng.choice(WORDS) for _ in range(characters // 3))[:characters]


@pytest.mark.slow
def test_long_row_is_trained_below_the_limit(own_folder):
    """Tokenized in one piece, it would need 362 MB."""
    rows = write_rows(own_folder / "d.jsonl", [{"text": long_text(1_800_000)}, {"text": "Short"}])
    command = [
        *("train", "--model", "demo", "--data", str(rows), "--too-long", "split"),
        *("--max-seq-length", "128", "--max-steps", "1", "--batch-size", "1"),
        *("--max-memory", str(LIMIT_GB)),
    ]
    verdict = judge(Case("long row", command, harmless=True, keeps=True), own_folder)
    assert verdict.status == 0, verdict.stderr
    assert verdict.peak_bytes < LIMIT_GB * 1e9


@pytest.mark.parametrize("length", [SIZES.window - 1, SIZES.window + 1, 10 * SIZES.window])
def test_pieces_of_a_long_row_have_the_tokens_of_its_text(own_folder, demo_tokenizer, length):
    text = long_text(length)
    path = write_rows(own_folder / "d.jsonl", [{"text": text}])
    found = load_examples(path, Encoder(demo_tokenizer), "t", 64, "split", own_folder / "c")
    pieces = [found[index].tokens for index in range(len(found))]
    joined = np.concatenate([pieces[0], *(piece[1:] for piece in pieces[1:])])
    whole = demo_tokenizer.backend_tokenizer.encode(text).ids
    assert joined.tolist() == [*whole, demo_tokenizer.eos_token_id]


def test_only_the_answer_of_a_long_row_is_trained(own_folder, demo_tokenizer):
    answer = long_text(3 * SIZES.window)
    asked = [{"role": "user", "content": long_text(2 * SIZES.window)}]
    row = {"messages": [*asked, {"role": "assistant", "content": answer}]}
    path = write_rows(own_folder / "d.jsonl", [row])
    found = load_examples(path, Encoder(demo_tokenizer), "t", 1 << 20, "error", own_folder / "c")
    tokens, trained = found[0].tokens, found[0].trained
    end = demo_tokenizer.eos_token_id
    whole = demo_tokenizer.backend_tokenizer.encode(answer).ids
    assert tokens[trained].tolist() == [*whole, end]
