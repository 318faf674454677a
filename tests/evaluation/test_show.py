from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from your_ai.evaluation.compare import EvaluationProgress
from your_ai.evaluation.show import SYSTEMS, evaluation_report, progress_bar
from your_ai.gates.console import open_console

INTERVAL = {"value": 1.5, "low": 1.25, "high": 1.75}
SHARE = {"value": 0.5, "low": 0.25, "high": 1.0}
NONE = {"value": None, "low": None, "high": None}
FOUND = {
    "version": 1, "data": "test.jsonl", "rows": 1234, "trained_tokens": 56789, "confidence": 0.95,
    "resamples": 2000, "step": 60,
    "measures": {
        "loss": {"base": INTERVAL, "adapter": NONE, "difference": INTERVAL},
        "exact_match": {"base": SHARE, "adapter": SHARE, "difference": SHARE},
        "metric": {"base": INTERVAL, "adapter": INTERVAL, "difference": INTERVAL},
    },
    "metric_name": "metrics:fields", "better": 1200, "worse": 30, "equal": 4,
    "worst": [
        {
            "where": "test.jsonl:7", "by": ["loss", "change"], "base_loss": 1.0,
            "adapter_loss": 2.5, "prompt": "[bold]Which?[/bold]", "expected": "This " * 40,
            "base_answer": None, "answer": "red \x1b[31m",
        },
        {
            "where": "test.jsonl:9", "by": ["loss"], "base_loss": 1.0, "adapter_loss": None,
            "prompt": "", "expected": "a text", "base_answer": None, "answer": None,
        },
    ],
}  # fmt: skip


def lines_of(found: dict[str, Any]) -> list[str]:
    """The lines of the report on 80 columns."""
    console = open_console(file=io.StringIO())
    console.width = 80
    console.print(evaluation_report(found, "first"))
    return console.file.getvalue().splitlines()


@pytest.fixture
def shown() -> list[str]:
    return lines_of(FOUND)


def test_the_first_line_names_run_data_and_counts(shown):
    assert shown[0] == "first, step 60, on test.jsonl: 1,234 rows, 56,789 supervised tokens"


def test_base_and_adapter_are_shown_side_by_side(shown):
    table = [" ".join(line.split()) for line in shown[2:6]]
    assert table == [
        "base adapter difference",
        "loss 1.500 [1.250, 1.750] ? [?, ?] +1.500 [1.250, 1.750]",
        "exact match 50.0% [25.0, 100.0] 50.0% [25.0, 100.0] +50.0% [25.0, 100.0]",
        "fields 1.500 [1.250, 1.750] 1.500 [1.250, 1.750] +1.500 [1.250, 1.750]",
    ]


def test_the_report_fits_80_columns_and_names_the_kinds_of_intervals(shown):
    assert max(map(len, shown)) <= 80
    assert "In brackets: 95% confidence intervals, from 2,000 resamples of the rows." in shown
    assert "Those of the shares of base and adapter are Wilson intervals." in shown


def test_large_numbers_do_not_cut_the_labels():
    large = {"value": 35944.865, "low": -30123.456, "high": 41999.123}
    whole = {"value": 1.0, "low": 1.0, "high": 1.0}
    small = {"value": 1.8011, "low": 1.5891, "high": 2.2211}
    columns = {"loss": small, "perplexity": large, "exact_match": whole}
    found = {**FOUND, "measures": {n: dict.fromkeys(SYSTEMS, c) for n, c in columns.items()}}
    lines = lines_of({**found, "confidence": 0.999})
    cells, text = [" ".join(line.split()) for line in lines[3:6]], "\n".join(lines)
    assert cells[0].startswith("loss 1.801 [1.589, 2.221] 1.801 [")
    assert cells[1].startswith("perplexity 35945 [-30123, 41999] 35945 [")
    assert cells[2].endswith("+100.0% [100.0, 100.0]")
    assert "\u2026" not in text.split("Highest")[0]
    assert "99.9% confidence intervals" in text


def test_the_report_counts_rows_that_got_better_and_worse(shown):
    text = "With the adapter the loss is lower in 1,200 rows, higher in 30, the same in 4."
    assert text in shown


def test_quoted_rows_are_shown_without_markup_or_escape_codes(shown):
    """Markup in the data is not interpreted, and escape codes are removed."""
    text = "\n".join(shown)
    assert text.count("test.jsonl:7  loss 1.000 -> 2.500") == 2
    assert text.count("test.jsonl:9  loss 1.000 -> ?") == 1
    assert "[bold]Which?[/bold]" in text
    assert "\x1b" not in text


def test_answers_of_base_and_adapter_are_below_what_was_expected_and_cut_to_the_width():
    row = {
        "where": "test.jsonl:4", "by": ["score"], "base_loss": 1.0, "adapter_loss": 0.5,
        "base_score": 0.25, "adapter_score": 0.0, "prompt": "Which?", "expected": "red",
        "base_answer": "Let me think " * 10, "answer": "",
    }  # fmt: skip
    assert lines_of({**FOUND, "worst": [row]})[-6:] == [
        "Lowest score with the adapter:",
        "  test.jsonl:4  score 0.250 -> 0.000",
        "    prompt:   Which?",
        "    expected: red",
        f"    base:     {'Let me think ' * 5}\u2026",
        "    adapter:  ",
    ]


def test_progress_bar_is_only_drawn_on_a_terminal():
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=80)
        with progress_bar(console) as update:
            update(EvaluationProgress("reading [x]"))
            update(EvaluationProgress("base: losses", 3, 8))
        assert ("base: losses" in console.file.getvalue()) is terminal


def test_intervals_of_small_losses_keep_their_digits_in_80_columns():
    small = {"value": 0.0004123, "low": 0.0003801, "high": 0.0004456}
    base = {"value": 1.5, "low": 1.25, "high": 1.75}
    losses = {"base": base, "adapter": small, "difference": small}
    found = lines_of({**FOUND, "measures": {"loss": losses}, "worst": []})
    assert [" ".join(line.split()) for line in found[3:5]] == [
        "loss 1.500 0.000412 +0.000412",
        "[1.250, 1.750] [0.000380, 0.000446] [0.000380, 0.000446]",
    ]


# Preferences

PAIR = {
    "where": "test.jsonl:3", "by": ["margin"], "base_loss": 1.0, "adapter_loss": 1.0,
    "prompt": "Which?", "expected": "This", "base_answer": None, "answer": None,
    "base_margin": 0.0, "adapter_margin": -0.4, "rejected": "That",
}  # fmt: skip
NAMES = (
    *("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
    *("logps/accuracies", "logps/mean_accuracies", "logps/chosen", "logps/rejected", "loss"),
)
ABOUT = {"objective": "dpo", "reference": "base", "pairs": 1234, "good": 0, "bad": 0}


def shown_preferences(names: tuple[str, ...] = NAMES, **about) -> list[str]:
    measures = dict.fromkeys(names, dict.fromkeys(SYSTEMS, SHARE))
    found = {**FOUND, "measures": measures, "preferences": {**ABOUT, **about}, "worst": [PAIR]}
    return [" ".join(line.split()) for line in lines_of(found)]


def test_accuracy_and_margin_are_shown_and_the_base_is_a_tie():
    shown = shown_preferences()
    assert shown[0].endswith("test.jsonl: 1,234 pairs, 56,789 supervised tokens")
    share, number = "50.0% [25.0, 100.0]", "0.500 [0.250, 1.000]"
    assert shown[3:8] == [
        f"accuracy tie {share} +{share}",
        f"margin 0 {number} +{number}",
        f"chosen reward 0 {number} +{number}",
        f"rejected reward 0 {number} +{number}",
        f"logp accuracy {share} {share} +{share}",
    ]
    assert not [line for line in shown if line.startswith("logps")]
    assert "Rewards are those of dpo, relative to the base, whose own are 0." in shown


def test_the_reference_of_the_rewards_is_named():
    text = " ".join(shown_preferences(reference="start", start={"logps/accuracies": 0.612}))
    assert "relative to the adapter that the run started from, whose logp accuracy is 61.2%" in text
    shown = shown_preferences(objective="simpo", reference=None)
    assert "Rewards are those of simpo, without a reference." in shown
    assert "accuracy 50.0% [25.0, 100.0] 50.0% [25.0, 100.0] +50.0% [25.0, 100.0]" in shown


def test_labels_are_shown_with_good_and_bad_answers():
    names = ("rewards/auc", "rewards/chosen", "rewards/rejected")
    shown = shown_preferences(names, pairs=0, good=1000, bad=234)
    assert "test.jsonl: 1,234 rows (1,000 good, 234 bad), 56,789" in shown[0]
    assert [line.split(" ")[0] for line in shown[4:7]] == ["AUC", "good", "bad"]
    assert "Loss, perplexity and exact match are of the good answers." in shown


def test_both_answers_of_a_pair_with_a_low_margin_are_quoted():
    shown = shown_preferences()
    at = shown.index("Lowest margin with the adapter:")
    assert shown[at + 1 : at + 5] == [
        "test.jsonl:3 margin 0.000 -> -0.400",
        "prompt: Which?",
        "chosen: This",
        "rejected: That",
    ]


def test_an_unknown_base_is_not_called_a_tie():
    measures = {"rewards/margins": {**dict.fromkeys(SYSTEMS, SHARE), "base": NONE}}
    found = lines_of({**FOUND, "measures": measures, "preferences": ABOUT})
    assert "? [?, ?]" in "\n".join(found)
