"""Models with learned positions: no text is longer than their table, which MLX does not check.

The checker of indices (tests/indices.py) fails each test that reads beyond it.
"""

from __future__ import annotations

import math
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
from your_ai.evaluation.reward_model import load_reward_model, score_rows
from your_ai.evaluation.rows import choose_file
from your_ai.export.fuse_difference import difference
from your_ai.nets.saved_adapter import Trained, open_trained
from your_ai.rewards.rollout import Rollout
from your_ai.run import events
from your_ai.run.folder import RunFolder
from your_ai.training.reward_models import score_rollouts


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


def test_a_fused_model_is_measured_on_no_row_beyond_the_positions(train_on, data_folder):
    """The file may have changed since the run checked it."""
    run = open_trained(str(train_on(64, SHORT).path))
    write_rows(data_folder / "valid.jsonl", [LONG])
    with pytest.raises(UserError, match=r"valid\.jsonl: .* 64 position embeddings; use --max-seq"):
        difference(run, Path("gpt2"))
    write_rows(data_folder / "valid.jsonl", SHORT)
    assert difference(run, Path("gpt2")).positions > 0


@pytest.mark.parametrize("settings", [{}, {"distill_on": "student"}], ids=["data", "student"])
def test_a_teacher_reads_no_text_beyond_its_positions(configure, data_folder, settings):
    """Its prompt makes texts longer than those of the student."""
    for name in ("train", "valid"):
        write_rows(data_folder / f"{name}.jsonl", SHORT)
    Path("prompt.txt").write_text("please " * 60)
    given = {"objective": "distill", "teacher_prompt": "prompt.txt", "max_steps": 1, **settings}
    if settings:
        given["max_new_tokens"] = 8
    with pytest.raises(UserError, match=r"^--teacher-prompt: the longest .* 64 position embedding"):
        train(configure(model=model_with(64), lora_targets=["c_attn"], **given))


@pytest.fixture
def reward_model(configure, data_folder):
    """A function that trains a reward model whose table has this many positions."""

    def run(positions: int) -> Trained:
        rows = [{"prompt": "Ask", "completion": "yes", "score": i / 4} for i in range(4)]
        for name in ("train", "valid", "test"):
            write_rows(data_folder / f"{name}.jsonl", rows)
        settings = {"objective": "reward", "max_steps": 1, "lora_targets": ["c_attn"]}
        return open_trained(str(train(configure(model=model_with(positions), **settings)).path))

    return run


def text_of(words: int) -> dict[str, str]:
    return {"prompt": "please " * words, "completion": "yes"}


def test_padding_of_a_scored_text_ends_where_the_positions_do(reward_model):
    """544 positions: the next length that texts are padded to is 576."""
    (row,) = score_rows(reward_model(544), [text_of(520)], "error", 2, None)
    assert math.isfinite(row["reward"])


def test_a_text_that_is_longer_than_the_positions_is_not_scored(reward_model):
    """The run's --max-seq-length allows more."""
    run = reward_model(64)
    with pytest.raises(UserError, match=r"row 1: .* more than the 64 position embeddings of r; "):
        list(score_rows(run, [text_of(90)], "error", 2, None))
    (row,) = score_rows(run, [{**text_of(3), "completion": "yes " * 90}], "truncate", 2, None)
    assert math.isfinite(row["reward"])


@pytest.mark.parametrize(("count", "scored"), [(64, True), (65, False)])
def test_a_completion_that_ends_after_the_positions_has_no_score(reward_model, count, scored):
    model = load_reward_model(reward_model(64))
    rollout = Rollout("Ask", [], "Yes", 2, True, None, {}, "p:1", 0, ids=(5,) * count)
    (found,) = score_rollouts(model, True, [rollout])
    assert (found is not None) == scored


def test_padding_of_rollouts_ends_where_the_positions_do(configure, data_folder):
    """544 positions: the next length that rollouts are padded to is 576."""
    rows = [{"prompt": "please " * words} for words in (3, 515)]
    for name in ("train", "valid", "test"):
        write_rows(data_folder / f"{name}.jsonl", rows)
    settings = {"objective": "grpo", "reward": ["length:3"], "rollouts": 2, "prompts_per_step": 2}
    settings |= {"max_new_tokens": 4, "kl_beta": 0.1, "max_steps": 1, "lora_targets": ["c_attn"]}
    run = train(configure(model=model_with(544), batch_size=1, **settings))
    assert len(events_of(run, events.Step)) == 1
