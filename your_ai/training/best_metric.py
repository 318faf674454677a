"""What --keep-best and --patience compare: the validation loss, the accuracy or margin that a
validation of preferences finds with it, or what is measured here.

    exact_match       the share of the validation rows whose answer greedy decoding would reproduce
    module:function   the mean score of a function of the user's, as in `your_ai eval --metric`

Higher is better for both. Exact match needs one forward pass. A function of the user's needs
answers, which are generated for the first METRIC_ROWS rows only. Greedy decoding makes the values
a pure function of the adapter, so a resumed run measures the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from your_ai.config import EXACT_MATCH, LOSS, REWARD_METRICS, TrainConfig
from your_ai.data.encode import Encoder, SamplePrompt
from your_ai.data.examples import Examples
from your_ai.data.lines import RowLimit, files_of_rows
from your_ai.errors import UserError
from your_ai.evaluation import dataset_scores
from your_ai.evaluation.compare import Ready
from your_ai.evaluation.custom_metric import Metric, load_metric
from your_ai.evaluation.rows import EvaluationRows, load_rows
from your_ai.generation import generate
from your_ai.run.stopping import Stop

METRIC_ROWS = 64  # validation rows that are answered for a function of the user's


@dataclass(frozen=True)
class RowToAnswer:
    """A validation row to answer."""

    prompt: SamplePrompt
    content: dict[str, Any]
    """The JSON object of the row."""
    where: str
    """Its file and line."""


@dataclass(frozen=True)
class BestMetric:
    """The rows to measure, and how."""

    name: str
    """The value of --best-metric."""
    rows: EvaluationRows
    function: Metric | None = None
    """The user's function; None for exact match."""
    questions: tuple[RowToAnswer, ...] = ()
    """The rows to answer for the user's function."""

    @property
    def prompts(self) -> list[SamplePrompt]:
        """The prompts that are answered in each validation."""
        return [asked.prompt for asked in self.questions]


def best_metric_of(
    config: TrainConfig, valid: Path, encoder: Encoder, tokenizer_sha256: str
) -> BestMetric | None:
    """Load the validation rows that --best-metric measures; None for what a validation finds.

    Raises UserError if no row asks for an answer, or for a function that cannot be imported.
    """
    name = config.best_metric
    if name == LOSS or name in REWARD_METRICS:
        return None
    function = None if name == EXACT_MATCH else load_metric(name, "--best-metric")
    rows = load_rows(valid, config, encoder, tokenizer_sha256)
    asking = rows.has_answer if function is None else rows.asks
    if not asking.any():
        raise UserError(
            f"--best-metric {name}: no row of {files_of_rows(valid, encoder.limit)} asks for an "
            "answer; use validation rows with prompts, or --best-metric loss"
        )
    if function is None:
        return BestMetric(name, rows)
    questions = (
        RowToAnswer(prompt, content, row.where)
        for _, row, content, prompt in islice(rows.questions(), METRIC_ROWS)
    )
    return BestMetric(name, rows, function, tuple(questions))


def check_margin(config: TrainConfig, valid: Path, examples: Examples, limit: RowLimit) -> None:
    """Raise UserError for --best-metric margin if all validation rows have the same label."""
    labels = examples.labels
    if config.best_metric != "margin" or labels is None:
        return
    if len(set(labels[examples.weights > 0].tolist())) == 1:
        raise UserError(
            f"--best-metric margin: the labels of {files_of_rows(valid, limit)} are all the same, "
            "so there is no margin; use validation rows with both, or --best-metric accuracy"
        )


def measured(best: BestMetric, ready: Ready, stop: Stop) -> float | None:
    """The value for the current adapter; None if asked to stop.

    Raises UserError if the user's function fails.
    """
    if best.function is None:
        return exact_match(best.rows, ready, stop)
    scores = []
    for asked in best.questions:
        if stop:
            return None
        limit, _ = generate.answer_room(ready.network, ready.tokenizer, asked.prompt)
        answer = generate.answer(ready.network, ready.tokenizer, asked.prompt.rendered, limit)
        scores.append(
            best.function.score(answer, asked.prompt.expected, asked.content, asked.where)
        )
    return float(np.mean(scores))


def exact_match(rows: EvaluationRows, ready: Ready, stop: Stop) -> float | None:
    """The share of the rows with an answer of which every token is the most likely one."""
    answers = rows.answers
    exact = dataset_scores.exact_examples(ready.engine, answers.examples, ready.rows_at, stop)
    if exact is None:
        return None
    right = rows.has_answer.copy()
    right[answers.row_of[~exact]] = False
    return float(right.sum() / rows.has_answer.sum())
