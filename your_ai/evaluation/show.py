"""Show an evaluation in a terminal: its progress and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from your_ai.evaluation import record
from your_ai.gates.text import counted, loss_text

if TYPE_CHECKING:  # it loads MLX
    from your_ai.evaluation.compare import EvaluationProgress

SYSTEMS = ("base", "adapter", "difference")
WIDTHS = (21, 21, 24)  # of their cells in 80 columns; the interval of a wider one gets its own line
LABELS = {  # of measures that are shown under another name than in the record
    "rewards/accuracies": "accuracy",
    "rewards/auc": "AUC",
    "rewards/margins": "margin",
    "rewards/chosen": "chosen reward",
    "rewards/rejected": "rejected reward",
    "logps/accuracies": "logp accuracy",
    "logps/mean_accuracies": "logp accuracy per token",
    "exact_match": "exact match",
    "scores/error": "mean error",
    "scores/correlation": "correlation",
    "scores/mean": "mean score",
    "unfinished": "ended early",
}
OF_LABELS = {"rewards/chosen": "good reward", "rewards/rejected": "bad reward"}
TIED = ("rewards/accuracies", "rewards/auc")  # a base that is its own reference decides nothing
MEANINGS = {
    "pairs": (
        "Accuracy: pairs whose chosen answer has the higher reward; a tie counts as half.",
        "Logp accuracy: pairs whose chosen answer is more likely.",
        "Loss, perplexity and exact match are of the chosen answers.",
    ),
    "labels": (
        "AUC: how often a good answer has a higher reward than a bad one.",
        "Loss, perplexity and exact match are of the good answers.",
    ),
}
REWARD_MODEL = {
    "pairs": (
        "Accuracy: pairs whose chosen answer has the higher score; a tie counts as half.",
        "The base has the same score head, and no adapter.",
    ),
    "scores": (
        "Mean error: how far the scores are from those of the rows.",
        "The base has the same score head, and no adapter.",
    ),
}
TITLES = {  # of the worst rows, by what they are the worst in
    "score": "Lowest score with the adapter:",
    "margin": "Lowest margin with the adapter:",
    "error": "Largest error with the adapter:",
    "loss": "Highest loss per token with the adapter:",
    "change": "Largest increase of the loss by the adapter:",
    "reward": "Most reward lost by the adapter:",
}
HIDDEN = ("logps/chosen", "logps/rejected")  # their means per token are losses


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[EvaluationProgress], None]]:
    """Give a function that updates a progress bar; remove the bar at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)
        doing = ""

        def update(at: EvaluationProgress) -> None:
            nonlocal doing
            if at.doing != doing:
                doing = at.doing
                bars.reset(task, description=doing)
            bars.update(task, completed=at.done, total=at.total or None)

        yield update


def evaluation_report(found: dict[str, Any], run: str) -> RenderableType:
    """Render the object that `record` stores. run: the name of the run."""
    preferences, is_reward = found.get("preferences"), found.get("reward_model", False)
    talks = found.get("conversations")
    has_losses = not is_reward and talks is None
    step = "" if found["step"] is None else f", step {found['step']}"
    lines: list[RenderableType] = [
        Text(
            f"{run}{step}, on {found['data']}: {row_counts(found['rows'], preferences)}"
            + (f", {counted(found['trained_tokens'], 'supervised token')}" if has_losses else "")
        ),
        "",
        measures_table(found),
        "",
        Text(
            f"In brackets: {100 * found['confidence']:g}% confidence intervals, from "
            f"{counted(found['resamples'], 'resample')} of the rows."
        ),
    ]
    if any(name in record.SHARES for name in found["measures"]):
        lines.append(Text("Those of the shares of base and adapter are Wilson intervals."))
    if talks is not None:
        lines += about_conversations(found, talks)
    elif is_reward:
        lines += [Text(line) for line in REWARD_MODEL["scores" if preferences is None else "pairs"]]
    else:
        lines += about_rewards(preferences)
        lines += about_teacher(found.get("teacher"))
        lines.append(
            Text(
                f"With the adapter the loss is lower in {counted(found['better'], 'row')}, higher "
                f"in {found['worse']:,}, the same in {found['equal']:,}."
            )
        )
    return Group(*lines, *worst(found["worst"]))


def about_conversations(found: dict[str, Any], talks: dict[str, Any]) -> list[Text]:
    """Return what the conversations were with, when they succeed, and how they ended."""
    lines = [
        f"Conversations with {talks['with']}, one for each row.",
        f"Success: a reward of at least {talks['success_reward']:g}.",
    ]
    for system in SYSTEMS[:2]:
        ended = ", ".join(f"{why} {count:,}" for why, count in talks[system]["ended"].items())
        missing = talks[system]["without_reward"]
        lines.append(f"Ended, {system}: {ended}; without a reward: {missing:,}.")
    lines.append(
        f"With the adapter the reward is higher in {counted(found['better'], 'row')}, lower in "
        f"{found['worse']:,}, the same in {found['equal']:,}."
    )
    return [Text(line) for line in lines]


def measures_table(found: dict[str, Any]) -> Table:
    """Each measure of base and adapter, and their difference."""
    measured = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # to fit 80 columns
    measured.add_column("", min_width=len("exact match"))
    for system in SYSTEMS:
        measured.add_column(system, justify="right", no_wrap=True)
    for label, cells in measures_cells(found).items():
        if any(len(text) > most for text, most in zip(cells, WIDTHS, strict=True)):
            cells = [text.replace(" [", "\n[") for text in cells]
        measured.add_row(Text(label), *map(Text, cells))
    return measured


def measures_cells(found: dict[str, Any]) -> dict[str, list[str]]:
    """The texts of base, adapter and difference, by the label of each measure."""
    preferences = found.get("preferences")
    is_tied = preferences is not None and preferences["reference"] == "base"
    labels = LABELS if preferences is None or preferences["pairs"] else LABELS | OF_LABELS
    rows = dict[str, list[str]]()
    for name, systems in found["measures"].items():
        if name in HIDDEN:
            continue
        label = labels.get(name, name.removeprefix("rewards/"))
        if name == "metric":  # show the function's name, from module:function
            label = found["metric_name"].rpartition(":")[2]
        cells = [cell(name, system, systems[system]) for system in SYSTEMS]
        if is_tied and name.startswith("rewards/") and systems["base"]["value"] is not None:
            cells[0] = "tie" if name in TIED else "0"
        rows[label] = cells
    return rows


def adapter_values(found: dict[str, Any] | None) -> dict[str, str]:
    """Return what an evaluation measured with the adapter, and on which rows, by label.

    found: what `record.read_evaluation` gives. Empty if there is none, or if it is of another form.
    """
    try:
        if found is None:
            return {}
        values = {"data": str(found["data"]), "rows": f"{int(found['rows']):,}"}
        if found["step"] is not None:
            values["step"] = f"{int(found['step']):,}"
        for name, systems in found["measures"].items():
            if name not in HIDDEN:
                label = str(found["metric_name"]) if name == "metric" else LABELS.get(name, name)
                values[label] = cell(name, "adapter", systems["adapter"])
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return {}
    return values


def row_counts(rows: int, preferences: dict[str, Any] | None) -> str:
    """The number of rows, by kind: `120 pairs`, or `120 rows (90 good, 30 bad)`."""
    if preferences is None:
        return counted(rows, "row")
    if preferences["pairs"] == rows:
        return counted(rows, "pair")
    names = {"pairs": "in pairs", "good": "good", "bad": "bad"}
    found = [f"{preferences[k]:,} {name}" for k, name in names.items() if preferences[k]]
    return f"{counted(rows, 'row')} ({', '.join(found)})"


def about_rewards(preferences: dict[str, Any] | None) -> list[Text]:
    """Return what the rewards compare, and which answers the other measures are of."""
    if preferences is None:
        return []
    if not preferences["objective"]:
        of_logps = MEANINGS["pairs" if preferences["pairs"] else "labels"][1:]
        return [Text(line) for line in of_logps]
    objective = f"Rewards are those of {preferences['objective']}"
    if preferences["reference"] == "base":
        text = f"{objective}, relative to the base, whose own are 0."
    elif preferences["reference"] == "start":
        text = f"{objective}, relative to the adapter that the run started from"
        share = preferences.get("start", {}).get("logps/accuracies")
        text += "." if share is None else f", whose logp accuracy is {percentage(share)}%."
        text += " The base has no adapter."
    else:
        text = f"{objective}, without a reference."
    meanings = MEANINGS["pairs" if preferences["pairs"] else "labels"]
    return [Text(line) for line in (text, *meanings)]


def about_teacher(teacher: dict[str, Any] | None) -> list[Text]:
    """Return what the divergence and the agreement compare with."""
    if teacher is None:
        return []
    kind = {"forward": "the forward KL divergence", "reverse": "the reverse KL divergence"}
    how = kind.get(teacher["divergence"], teacher["divergence"])
    if teacher["temperature"] != 1:
        how += f" at temperature {teacher['temperature']:g}"
    sees = ", which sees the run's --teacher-prompt" if teacher["prompt"] else ""
    return [
        Text(f"Divergence: {how} from {teacher['name']}{sees}."),
        Text("Agreement: supervised tokens where both find the same token the most likely one."),
    ]


def cell(name: str, system: str, interval: dict[str, float | None]) -> str:
    """`0.412 [0.380, 0.445]`, or `41.2% [38.0, 44.5]`."""
    share = name in record.PERCENTAGES
    bounds = (interval["value"], interval["low"], interval["high"])
    value, low, high = map(percentage if share else number, bounds)
    sign = "+" if system == "difference" and (interval["value"] or 0) > 0 else ""
    return f"{sign}{value}{'%' if share else ''} [{low}, {high}]"


def percentage(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f}"


def number(value: float | None) -> str:
    """Format a loss, perplexity or metric in few characters: `12.34`, `0.412`, `0.000412`."""
    whole_digits = 1 if value is None else len(str(int(abs(value))))
    return loss_text(value, max(0, 4 - whole_digits))


def worst(rows: list[dict[str, Any]]) -> list[RenderableType]:
    """Render the worst rows, one below the other."""
    found: list[RenderableType] = []
    for kind, title in TITLES.items():
        chosen = [row for row in rows if kind in row["by"]]
        if not chosen:
            continue
        found += ["", Text(title)]
        for row in chosen:
            what = kind if kind in ("score", "margin", "error", "reward") else "loss"
            values = f"{number(row[f'base_{what}'])} -> {number(row[f'adapter_{what}'])}"
            found.append(Text(f"  {row['where']}  {what} {values}"))
            expected = "chosen" if "rejected" in row else "expected"
            texts = {"prompt": "prompt", "expected": expected, "rejected": "rejected"}
            for key, label in {**texts, "base_answer": "base", "answer": "adapter"}.items():
                quote = row.get(key)
                if quote or (quote == "" and key != "prompt"):
                    text = f"    {label + ':':<10}{quote}"
                    found.append(Text(text, overflow="ellipsis", no_wrap=True))
            for turn in row.get("turns", ()):
                found.append(Text(f"    {turn}", overflow="ellipsis", no_wrap=True))
    return found
