"""Models with learned positions: no text is longer than their table, which MLX does not check.

The checker of indices (tests/indices.py) fails each test that reads beyond it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.architectures import write_model
from tests.conftest import (
    DEMO_FOLDER,
    TOKENIZER_FILES,
    VOCABULARY,
    chat,
    events_of,
    train,
    write_rows,
)
from tests.evaluation.conftest import carry_out
from your_ai.errors import UserError
from your_ai.evaluation.compare import Request, compare
from your_ai.evaluation.custom_metric import Metric
from your_ai.evaluation.rows import choose_file
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import events
from your_ai.run.folder import RunFolder


def model_with(positions: int) -> str:
    """The folder of a small GPT-2 with the demo's tokenizer."""
    changes = {"n_positions": positions, "n_ctx": positions, "vocab_size": VOCABULARY}
    folder = write_model(Path("gpt2"), "gpt2", **changes)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO_FOLDER / name, folder / name)
    return str(folder.absolute())


SHORT = [chat("Ask please", "Answer yes")] * 4
LONG = chat("please " * 60, "Answer yes")  # its prompt alone has more than 64 tokens


@pytest.fixture
def train_on(configure, data_folder):
    """A function that trains a step on short rows, with the rows to test."""

    def run(positions: int, tested: list[dict], **settings: Any) -> RunFolder:
        for name in ("train", "valid"):
            write_rows(data_folder / f"{name}.jsonl", SHORT)
        write_rows(data_folder / "test.jsonl", tested)
        model = model_with(positions)
        return train(configure(model=model, lora_targets=["c_attn"], max_steps=1, **settings))

    return run


def test_sample_answers_end_where_the_positions_do(train_on):
    """Twice the expected answer, and 128 tokens more, would be beyond the 64 positions."""
    run = train_on(64, SHORT, samples=1)
    assert all(len(found.answers) == 1 for found in events_of(run, events.Samples))
    assert len(events_of(run, events.Samples)) > 0


def test_a_prompt_that_leaves_no_position_for_an_answer_is_refused_at_the_start(train_on):
    with pytest.raises(UserError, match=r"the prompt 'please .* 64 position embeddings, and none"):
        train_on(64, [LONG], samples=1)


def test_measured_answers_end_where_the_positions_do(train_on):
    run = open_trained(str(train_on(64, SHORT).path))
    path = choose_file(None, run.config)
    for most in (None, 500):
        metric = Metric("m:f", lambda answer, *_: len(answer))
        request = Request(batch_size=2, metric=metric, max_tokens=most)
        found = carry_out(compare(run, path, request))
        assert (found.base.scores > 0).all()
