"""A reward model scores rows, and an evaluation measures it."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

import your_ai
from tests.conftest import TINY, call, make_model, write_rows
from tests.evaluation.conftest import trained_run
from your_ai.errors import UserError
from your_ai.evaluation import record
from your_ai.evaluation.bootstrap import paired_correlation
from your_ai.evaluation.reward_model import load_reward_model
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder

PAIRS = [
    {"prompt": f"Question {i}", "chosen": f"Yes {i}", "rejected": "No " * (1 + i % 3)}
    for i in range(10)
]
SCORED = [
    {"prompt": f"Question {i // 2}", "completion": ("Yes", "No")[i % 2], "score": 3.0 * (i % 2)}
    for i in range(12)
]


def reward_run(root: Path, model: Path, rows: list[dict], **settings) -> Path:
    data = root / "rows"
    for split in ("train", "test"):
        write_rows(data / f"{split}.jsonl", rows)
    more = {"objective": "reward", "learning_rate": 1e-2, "valid": "none", "max_steps": 20}
    more["max_seq_length"] = 256
    return trained_run(root, model, data=str(data), **{**more, **settings})


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, tiny_model) -> Path:
    return reward_run(tmp_path_factory.mktemp("pairs"), tiny_model, PAIRS)


@pytest.fixture(scope="module")
def scores(tmp_path_factory, tiny_model) -> Path:
    root = tmp_path_factory.mktemp("scores")
    return reward_run(root, tiny_model, SCORED, reward_loss="scores", max_steps=40)


def scored(run: Path, rows: list[dict], folder: Path, **options) -> list[dict]:
    return list(your_ai.score(run, write_rows(folder / "rows.jsonl", rows), **options))


def test_pairs_and_answers_are_scored_in_their_order(pairs, tmp_path):
    rows = [*PAIRS, {"prompt": "Question 1", "completion": "Yes 1"}, {"text": "Yes"}]
    found = scored(pairs, rows, tmp_path)
    assert [{k: v for k, v in row.items() if not k.startswith("reward")} for row in found] == rows
    assert np.mean([row["reward_chosen"] > row["reward_rejected"] for row in found[:10]]) > 0.9
    assert found[10]["reward"] == pytest.approx(found[1]["reward_chosen"], abs=1e-4)
    assert np.isfinite(found[11]["reward"])


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"prompt": "Q", "completion": "A", "reward": 2.5}, "reward"),
        ({**PAIRS[0], "reward_rejected": None}, "reward_rejected"),
    ],
)
def test_a_row_that_has_the_column_of_its_score_is_refused(pairs, tmp_path, row, name):
    with pytest.raises(UserError, match=f"rows.jsonl:2: has the column {name} already") as found:
        scored(pairs, [PAIRS[1], row], tmp_path)
    assert "\n" not in str(found.value)


def test_a_number_that_json_lacks_is_null_in_what_score_prints(pairs, tmp_path, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "Yes", "own": [float("nan"), 1.0]}])
    assert call("score", pairs, rows) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed, parse_constant=pytest.fail)["own"] == [None, 1.0]


def test_the_score_of_a_text_depends_on_no_other_text(pairs, tmp_path):
    together = scored(pairs, PAIRS, tmp_path)
    alone = [scored(pairs, [row], tmp_path / str(i))[0] for i, row in enumerate(PAIRS[:3])]
    for one, other in zip(alone, together, strict=False):
        assert one["reward_chosen"] == pytest.approx(other["reward_chosen"], abs=1e-4)


@pytest.mark.parametrize("memory", [2.0, None])
def test_scores_are_the_same_inside_a_small_limit(pairs, tmp_path, memory):
    whole = scored(pairs, PAIRS[:2], tmp_path)
    found = scored(pairs, PAIRS[:2], tmp_path / "again", max_memory=memory, batch_size=1)
    for one, other in zip(found, whole, strict=True):
        assert one["reward_rejected"] == pytest.approx(other["reward_rejected"], abs=1e-4)


def test_an_evaluation_of_pairs_has_accuracy_and_no_loss(pairs):
    found = your_ai.evaluate(pairs)
    names = ["rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"]
    assert list(found["measures"]) == names
    accuracy = found["measures"]["rewards/accuracies"]["adapter"]
    assert accuracy["low"] < accuracy["value"] == 1.0
    assert found["reward_model"] is True
    assert record.read_evaluation(RunFolder(pairs)) == found
    rows = scored(pairs, PAIRS, pairs / "scored")
    margin = np.mean([row["reward_chosen"] - row["reward_rejected"] for row in rows])
    measured = found["measures"]["rewards/margins"]["adapter"]["value"]
    assert measured == pytest.approx(margin, abs=1e-3)


def test_an_evaluation_of_scores_has_error_and_correlation(scores):
    found = your_ai.evaluate(scores)
    measures = found["measures"]
    assert list(measures) == ["scores/error", "scores/correlation", "scores/mean"]
    assert measures["scores/correlation"]["adapter"]["value"] > 0.8
    assert measures["scores/error"]["adapter"]["value"] < measures["scores/error"]["base"]["value"]
    assert {row["by"][0] for row in found["worst"]} == {"error"}


def test_the_report_of_an_evaluation_speaks_of_scores(pairs, capsys):
    assert call("eval", pairs) == 0
    text = capsys.readouterr().out
    assert "Accuracy: pairs whose chosen answer has the higher score" in text
    assert "perplexity" not in text
    assert "loss" not in text


def test_a_metric_of_answers_is_refused(pairs):
    with pytest.raises(UserError, match="--metric: the run is a reward model"):
        your_ai.evaluate(pairs, metric="json:loads")


@pytest.mark.parametrize("command", [("generate", "--prompt", "a"), ("fuse",), ("serve",)])
def test_what_needs_answers_refuses_a_reward_model(pairs, capsys, command):
    name, *rest = command
    assert call(name, pairs, *rest) == 2
    assert "is a reward model, which scores answers and gives none" in capsys.readouterr().err


def test_the_command_prints_json_lines(pairs, tmp_path, capsys):
    file = write_rows(tmp_path / "rows.jsonl", PAIRS[:2])
    assert call("score", pairs, file) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == ["Question 0", "Question 1"]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"prompt": "a"}], "unknown row format"),
        ([{"prompt": "a", "completion": ""}], "no token to score"),
        ([{"prompt": "a", "completion": "b " * 400}], "more than the --max-seq-length"),
    ],
)
def test_bad_rows_are_named(pairs, tmp_path, rows, text):
    with pytest.raises(UserError, match=rf"rows\.jsonl:1: .*{text}"):
        scored(pairs, rows, tmp_path)


def test_a_long_row_can_be_truncated(pairs, tmp_path):
    rows = [{"prompt": "a", "completion": "b " * 400}]
    (row,) = scored(pairs, rows, tmp_path, too_long="truncate")
    assert np.isfinite(row["reward"])


def test_a_missing_file_is_refused(pairs, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(your_ai.score(pairs, tmp_path / "absent.jsonl"))


def test_a_run_that_is_no_reward_model_is_refused(tmp_path, tiny_model):
    run = trained_run(tmp_path, tiny_model)
    with pytest.raises(UserError, match=r"is not a reward model \(its objective is sft\)"):
        load_reward_model(open_trained(str(run)))


def test_a_head_for_another_width_is_refused(pairs, tmp_path):
    wide = {**TINY, "hidden_size": 2 * TINY.get("hidden_size", 64)}
    other = make_model(tmp_path / "other", **wide)
    trained = open_trained(str(pairs))
    with pytest.raises(UserError, match="was trained on a different model"):
        open_trained(str(pairs), base=str(other))
    assert trained.base != other


def test_a_correlation_is_pearsons():
    rng = np.random.default_rng(0)
    wanted = rng.normal(size=50)
    near = wanted + 0.3 * rng.normal(size=50)
    found = paired_correlation(rng.normal(size=50), near, wanted, 200, 0)
    assert found.adapter == pytest.approx(np.corrcoef(near, wanted)[0, 1])
    drawn = found.intervals(0.95)["adapter"]
    assert drawn.low < found.adapter < drawn.high < 1
    constant = paired_correlation(np.ones(50), near, wanted, 10, 0)
    assert np.isnan(constant.base)


def test_rows_in_memory_are_scored_like_those_of_a_file(pairs, tmp_path):
    assert list(your_ai.score(pairs, PAIRS[:2])) == scored(pairs, PAIRS[:2], tmp_path)
    assert next(your_ai.load_run(pairs).score(iter(PAIRS[:1])))["prompt"] == "Question 0"
    with pytest.raises(UserError, match="row 2: unknown row format"):
        list(your_ai.score(pairs, [PAIRS[0], {"prompt": "a"}]))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_memory": float("nan")}, "--max-memory nan"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"too_long": "split"}, "--too-long split: must be error or truncate"),
    ],
)
def test_wrong_arguments_are_refused_at_once(pairs, options, text):
    with pytest.raises(UserError, match=text):
        your_ai.score(pairs, PAIRS, **options)


def test_standard_input_is_not_kept(pairs, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    tempfile.tempdir = None
    for text in (json.dumps(PAIRS[0]), '{"prompt": "a"}'):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        call("score", pairs)
    printed = capsys.readouterr()
    assert "reward_chosen" in printed.out
    assert "error: standard input:1: unknown row format" in printed.err
    assert list(tmp_path.iterdir()) == []
    tempfile.tempdir = None


def test_columns_of_rows_to_score_are_named(pairs, tmp_path, capsys):
    known = {"prompt": "Question 0", "completion": "Yes"}
    file = write_rows(tmp_path / "rows.jsonl", [{"they": "Question 0", "we": "Yes"}])
    assert call("score", pairs, file) == 2
    assert "--columns prompt=they,completion=we" in capsys.readouterr().err
    assert call("score", pairs, file, "--columns", "prompt=they,completion=we") == 0
    reward = json.loads(capsys.readouterr().out)["reward"]
    assert reward == scored(pairs, [known], tmp_path)[0]["reward"]
