"""The summary and notes that are made from measured rows, on made-up measurements."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.conftest import chat, write_rows
from your_ai.config import TrainConfig
from your_ai.config.requests import EvaluateRequest
from your_ai.dashboard.measures import wilson
from your_ai.data.encode import Encoder
from your_ai.evaluation import record
from your_ai.evaluation.compare import Comparison, RowMeasures
from your_ai.evaluation.rows import load_rows
from your_ai.evaluation.summary import evaluation_notes, excerpt, summarize
from your_ai.files import sha256
from your_ai.nets.saved_adapter import Adapter, Trained
from your_ai.run.folder import RunFolder

SETTINGS = EvaluateRequest("r", resamples=200, confidence=0.9, seed=3, worst=2)
ROWS = [
    chat("one", "a b c"),
    chat("two", "a", weight=3),
    {"text": "a text"},
    chat("four", "b " * 300),
    chat("five", "c", weight=0),
]
BASE = np.array([2.0, 1.0, 3.0, 1.0, 2.0])  # losses a token
ADAPTER = np.array([1.0, 1.5, 3.0, 1.0 + 1e-7, 4.0])


@pytest.fixture
def rows(own_folder, demo_tokenizer):
    path = write_rows(own_folder / "rows.jsonl", ROWS)
    return load_rows(path, TrainConfig(), Encoder(demo_tokenizer), "t")


@pytest.fixture
def found(rows) -> Comparison:
    def measured(losses: np.ndarray, exact: list[bool]) -> RowMeasures:
        return RowMeasures(losses * rows.trained_tokens, np.array(exact))

    base = measured(BASE, [False, True, True, False, False])
    adapter = measured(ADAPTER, [True, True, True, False, True])
    return Comparison(rows, base, adapter, None, 0, "fused", ())


@pytest.fixture
def run(own_folder) -> Trained:
    folder = RunFolder(own_folder / "runs" / "r")
    adapter = Adapter(folder.adapter, {}, {"step": 40})
    return Trained(folder, TrainConfig(), adapter, own_folder)


def value(summary, measure, system):
    return summary["measures"][measure][system]["value"]


def test_the_loss_is_the_mean_over_tokens_weighted_by_row(run, found):
    tokens, weights = found.rows.trained_tokens, np.array([1, 3, 1, 1, 0])
    summary = summarize(run, found, SETTINGS)
    for system, losses in (("base", BASE), ("adapter", ADAPTER)):
        mean = (weights * tokens * losses).sum() / (weights * tokens).sum()
        assert value(summary, "loss", system) == pytest.approx(mean)
        assert value(summary, "perplexity", system) == pytest.approx(math.exp(mean))


def test_exact_match_counts_only_rows_that_ask_for_an_answer(run, found):
    summary = summarize(run, found, SETTINGS)
    assert value(summary, "exact_match", "base") == 1 / 4
    assert value(summary, "exact_match", "adapter") == 3 / 4
    assert value(summary, "exact_match", "difference") == 1 / 2


def test_shares_have_wilson_intervals_and_their_difference_a_bootstrap(run, found):
    measured = summarize(run, found, SETTINGS)["measures"]["exact_match"]
    for system, share in (("base", 1 / 4), ("adapter", 3 / 4)):
        low, high = wilson(share, 4, 0.9)
        assert measured[system] == {"value": share, "low": low, "high": high}
    assert measured["difference"]["low"] == 0  # of 4 rows, 2 got better
    assert measured["difference"]["high"] == 1


@pytest.mark.parametrize(("one", "is_share"), [(1.0, True), (0.5, False)])
def test_a_metric_of_zeros_and_ones_is_a_share(run, found, one, is_share):
    base = replace(found.base, scores=np.array([0, 0, np.nan, one, 0]), answers={})
    adapter = replace(found.adapter, scores=np.array([1, 1, np.nan, 1, 1]), answers={})
    found = replace(found, base=base, adapter=adapter, metric_name="m:f")
    measured = summarize(run, found, SETTINGS)["measures"]["metric"]["adapter"]
    assert measured["value"] == 1
    assert measured["high"] == 1
    assert (measured["low"] < 1) is is_share


def test_a_metric_is_the_mean_over_rows_that_ask_for_an_answer(run, found):
    base = replace(found.base, scores=np.array([1, 2, np.nan, 3, 4]), answers={0: "base says"})
    adapter = replace(found.adapter, scores=np.array([2, 3, np.nan, 4, 7]), answers={4: "so"})
    found = replace(found, base=base, adapter=adapter, metric_name="m:f")
    summary = summarize(run, found, SETTINGS)
    assert summary["metric_name"] == "m:f"
    assert value(summary, "metric", "base") == 2.5
    assert value(summary, "metric", "adapter") == 4


def test_the_rows_with_the_lowest_scores_come_first_with_both_answers(run, found):
    base = replace(found.base, scores=np.array([1, 2, np.nan, 3, 4]), answers={3: "base says"})
    adapter = replace(found.adapter, scores=np.array([9, 3, np.nan, 0, 7]), answers={3: "so"})
    summary = summarize(run, replace(found, base=base, adapter=adapter), SETTINGS)
    first, second, third = summary["worst"]
    assert [row["where"] for row in (first, second)] == ["rows.jsonl:4", "rows.jsonl:2"]
    assert (first["base_answer"], first["answer"], first["by"]) == ("base says", "so", ["score"])
    assert (first["base_score"], first["adapter_score"]) == (3, 0)
    assert third["by"] == ["change"]


def test_rows_are_counted_as_better_worse_or_equal(run, found):
    """Differences as small as rounding count as equal."""
    summary = summarize(run, found, SETTINGS)
    assert [summary[kind] for kind in ("better", "worse", "equal")] == [1, 2, 2]


def test_the_worst_rows_are_listed_with_prompt_and_expected_answer(run, found):
    worst = summarize(run, found, SETTINGS)["worst"]
    assert [(row["where"], row["by"]) for row in worst] == [
        ("rows.jsonl:5", ["loss", "change"]),
        ("rows.jsonl:3", ["loss"]),
        ("rows.jsonl:2", ["change"]),
    ]
    assert worst[0] | {"by": None} == {
        "where": "rows.jsonl:5", "by": None, "base_loss": 2.0, "adapter_loss": 4.0,
        "prompt": "five", "expected": "c", "base_answer": None, "answer": None,
    }  # fmt: skip
    assert worst[1]["expected"] == "a text"


def test_if_the_file_is_deleted_only_the_quotes_are_missing(run, found):
    expected = summarize(run, found, SETTINGS)
    found.rows.path.unlink()
    summary = summarize(run, found, SETTINGS)
    gone = {"prompt": None, "expected": None}
    assert summary == expected | {"worst": [row | gone for row in expected["worst"]]}


def test_worst_zero_lists_no_rows(run, found):
    assert summarize(run, found, replace(SETTINGS, worst=0))["worst"] == []


def test_the_summary_has_exactly_the_documented_keys(run, found):
    summary = summarize(run, found, SETTINGS)
    assert list(summary) == [
        "version", "data", "data_sha256", "rows", "trained_tokens", "confidence", "resamples",
        "seed", "step", "checkpoint", "measures", "metric_name", "better", "worse", "equal",
        "in_training_data", "worst",
    ]  # fmt: skip
    assert summary["data"] == "rows.jsonl"
    assert summary["data_sha256"] == sha256(found.rows.path)
    assert (summary["rows"], summary["step"], summary["checkpoint"]) == (5, 40, None)
    assert set(summary["measures"]) == {"loss", "perplexity", "exact_match"}
    for systems in summary["measures"].values():
        assert list(systems) == ["base", "adapter", "difference"]
        assert all(list(interval) == ["value", "low", "high"] for interval in systems.values())
    assert json.loads(record.evaluation_text(summary)) == summary


def test_the_summary_names_the_checkpoint(run, found):
    place = run.folder.checkpoints / "step-000120"
    run = replace(run, adapter=replace(run.adapter, folder=place))
    assert summarize(run, found, SETTINGS)["checkpoint"] == "step-000120"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_noted_and_not_averaged(run, found, bad):
    losses = found.adapter.losses.copy()
    losses[0] = bad
    found = replace(found, adapter=replace(found.adapter, losses=losses))
    summary = summarize(run, found, SETTINGS)
    for measure in ("loss", "perplexity"):
        assert value(summary, measure, "adapter") is None
        assert value(summary, measure, "difference") is None
        assert value(summary, measure, "base") > 0
    assert value(summary, "exact_match", "adapter") == 3 / 4
    assert summary["worst"][0]["where"] == "rows.jsonl:1"
    assert summary["worst"][0]["adapter_loss"] is None
    assert [summary[kind] for kind in ("better", "worse", "equal")] == [0, 3, 2]
    (text,) = evaluation_notes(found)
    assert "adapter: 1 of 5 rows has a loss that is not finite, the first is rows.jsonl:1" in text
    record.evaluation_text(summary)


def test_rows_not_finite_for_both_count_as_equal(run, found):
    broken = (replace(m, losses=np.full(5, np.nan)) for m in (found.base, found.adapter))
    found = replace(found, base=next(broken), adapter=next(broken))
    assert summarize(run, found, SETTINGS)["equal"] == 5
    assert len(evaluation_notes(found)) == 2


def test_rows_from_the_training_data_are_noted(found):
    assert evaluation_notes(found) == []
    for leaked, text in (
        (2, "2 of 5 rows are also in the run's training data"),
        (None, "training rows cannot be read"),
    ):
        assert text in evaluation_notes(replace(found, leaked=leaked))[0]


@pytest.mark.parametrize(("text", "shown"), [(None, None), ("", ""), (" a\n b\t", "a b")])
def test_an_excerpt_is_one_line(text, shown):
    assert excerpt(text) == shown


def test_a_long_excerpt_is_cut():
    assert excerpt("word " * 100) == "word " * 39 + "w ..."
