"""evaluation.json in a run's folder: the results of its last evaluation. Written atomically.

{"version": 1, "data": name of the file, "data_sha256", "rows", "trained_tokens",
 "confidence", "resamples", "seed", "step": of the adapter, "checkpoint": its name or null,
 "measures": {"loss" | "perplexity" | "exact_match" | "metric":
              {"base" | "adapter" | "difference": {"value", "low", "high"}}},
 "metric_name": name or null, "better", "worse", "equal": counts of rows by their loss,
 "in_training_data": count of rows, or null if unknown, "worst": [...]}

If the rows have preferences, `measures` begins with those of `evaluation.rewards`, the others are
of the chosen or good answers, and there is also
"preferences": {"objective", "reference": "base" | "start" | null, "pairs", "good", "bad": counts
of rows, "start": {"logps/accuracies"} if it is the reference}, where good and bad are answers with
a label. The objective gives the rewards; it is empty, and there are no rewards and margins, if the
run trains on rewards of completions. Of a pair, an entry of `worst` also has "base_margin",
"adapter_margin", "rejected". If a metric scored answers, `worst` begins with the lowest scores, and
an entry has "base_score", "adapter_score".

Of a reward model, "reward_model" is true, and the base is the model with the same score head and
without the adapter. There are no losses: the measures are rewards/accuracies and others of pairs,
or scores/error, scores/correlation and scores/mean of rows with a score, whose entries of `worst`
have "base_error" and "adapter_error".

With a teacher, `measures` also has "divergence", the mean over trained tokens, and "agreement", the
share of tokens whose most likely token is the teacher's, and there is "teacher": {"name",
"divergence": its kind, "temperature", "prompt": whether it saw the run's --teacher-prompt}.

Of a policy in conversations with an environment or tools, the measures are success, reward,
rewards/NAME, turns and unfinished (`evaluation.conversations`); there are no losses, and "better",
"worse" and "equal" count rows by their reward. There is "conversations": {"with": the option that
names the environment or tools, "success_reward", "base" and "adapter": {"ended": counts by reason,
"without_reward": a count}}, and entries of `worst` have "base_reward", "adapter_reward", and
"turns", a line for each message of the adapter's conversation.

low and high are the bounds of the interval at `confidence`: of the paired bootstrap over rows, or
Wilson's for base and adapter where the measure is a share (SHARES, and a metric that is 0 or 1 in
every row). A number that is not finite is null. `worst` quotes the data;
an entry whose row was answered also has "asked": the whole prompt, with the columns of a row of
preferences, and "answers": {"base", "adapter"}: the whole answers.

Imports neither mlx nor numpy.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from your_ai.errors import RunError
from your_ai.files import read_text, remedy_of, replace_text, sync
from your_ai.run.folder import RunFolder

VERSION = 1
MOST_BYTES = 1 << 26
ACCURACIES = ("rewards/accuracies", "logps/accuracies", "logps/mean_accuracies")
SHARES = ("exact_match", *ACCURACIES, "success", "unfinished")  # measures that are shares of rows
PERCENTAGES = (*SHARES, "agreement")  # which is a share of tokens


class EvaluationNotKept(RunError):
    """The results could not be written."""

    def __init__(self, message: str, measured: dict[str, Any]) -> None:
        super().__init__(message)
        self.measured = measured
        """The content that evaluation.json would have."""


def evaluation_file(folder: RunFolder) -> Path:
    return folder.path / "evaluation.json"


def evaluation_text(found: dict[str, Any]) -> str:
    return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_evaluation(folder: RunFolder, found: dict[str, Any]) -> None:
    """Write evaluation.json. If that fails, raise EvaluationNotKept; the previous file stays."""
    target = evaluation_file(folder)
    text = evaluation_text(found).encode("utf-8", "replace").decode()  # without lone surrogates
    try:
        replace_text(target, text)
        sync(folder.path)
    except OSError as error:
        raise EvaluationNotKept(
            f"{target}: cannot be written ({error.strerror}); {remedy_of(error)}, then "
            "evaluate again",
            found,
        ) from error


def read_evaluation(folder: RunFolder) -> dict[str, Any] | None:
    """Read the last evaluation of a run; None if there is none of this version."""
    try:
        found = json.loads(read_text(evaluation_file(folder), MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("version") == VERSION else None
