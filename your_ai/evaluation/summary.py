"""Turn the measurements of each row into the summary that is shown and stored (see `record`)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from your_ai.config import REWARD
from your_ai.config.requests import EvaluateRequest
from your_ai.dashboard.measures import wilson
from your_ai.data.rows import Chat, Pair, Text
from your_ai.errors import UserError
from your_ai.evaluation import record, rewards
from your_ai.evaluation.bootstrap import Interval, Paired, paired
from your_ai.evaluation.compare import Comparison, RowMeasures
from your_ai.evaluation.rewards import Judged, judge
from your_ai.evaluation.rows import EvaluationRows, answer_of, asked_and_expected, rejected_answer
from your_ai.evaluation.teacher import compared_as
from your_ai.gates.text import counted
from your_ai.nets.saved_adapter import Trained

# Tolerance for equal losses per token, absolute and relative: plans and batch sizes may differ
# by this much in rounding.
ALIKE = 1e-5
EXCERPT_CHARACTERS = 200


def summarize(run: Trained, found: Comparison, settings: EvaluateRequest) -> dict[str, Any]:
    """Return the object that is stored as evaluation.json."""
    rows = found.rows
    judged = judge(run.config, found)
    losses = row_losses(found)
    is_reward = run.config.objective == REWARD
    return {
        **head(
            run,
            settings,
            measures(found, judged, settings),
            data=rows.files,
            data_sha256=rows.sha256,
            rows=len(rows),
            trained_tokens=int(rows.trained_tokens.sum()),
        ),
        "metric_name": found.metric_name,
        "better": int((losses.lost < 0).sum()),
        "worse": int((losses.lost > 0).sum()),
        "equal": losses.equal,
        "in_training_data": found.leaked,
        "worst": worst_rows(found, judged, losses, settings),
        **({} if judged is None else {"preferences": preferences(found, judged)}),
        **({"reward_model": True} if is_reward else {}),
        **({} if found.teacher is None else {"teacher": teacher_json(run, found.teacher)}),
    }


def head(
    run: Trained,
    settings: EvaluateRequest,
    found: Mapping[str, Mapping[str, Interval]],
    **rows: Any,
) -> dict[str, Any]:
    """Return what every evaluation.json begins with. found: the measures, by name. rows: what it
    says of the rows."""
    folder = run.adapter.folder
    return {
        "version": record.VERSION,
        **rows,
        "confidence": settings.confidence,
        "resamples": settings.resamples,
        "seed": settings.seed,
        "step": run.adapter.step,
        "checkpoint": folder.name if folder.parent == run.folder.checkpoints else None,
        "measures": {
            name: {system: interval_json(interval) for system, interval in intervals.items()}
            for name, intervals in found.items()
        },
    }


def teacher_json(run: Trained, name: str) -> dict[str, Any]:
    """Return what the predictions are compared with, and how."""
    how = compared_as(run.config)
    return {
        "name": name,
        "divergence": how.divergence.text,
        "temperature": how.temperature,
        "prompt": bool(run.config.teacher_prompt),
    }


@dataclass(frozen=True)
class RowLosses:
    """The mean loss per token of m rows."""

    base: np.ndarray
    """(m,) float64, infinite if it is NaN; NaN without a token."""
    adapter: np.ndarray
    """(m,) float64, as `base`."""
    lost: np.ndarray
    """(m,) float64: what the adapter adds; 0 if both are equal, or if there is no loss."""
    equal: int
    """How many rows have equal losses."""


def row_losses(found: Comparison) -> RowLosses:
    rows = found.rows
    base, adapter = token_losses(rows, found.base), token_losses(rows, found.adapter)
    if rows.encoder.kind == "rated":  # a reward model has scores, and no losses
        return RowLosses(base, adapter, np.zeros(len(rows)), 0)
    alike = np.isclose(base, adapter, rtol=ALIKE, atol=ALIKE)
    changed = ~alike & (rows.trained_tokens > 0)
    lost = np.subtract(adapter, base, out=np.zeros(len(rows)), where=changed)
    return RowLosses(base, adapter, lost, int(alike.sum()))


def token_losses(rows: EvaluationRows, measured: RowMeasures) -> np.ndarray:
    """(m,): the mean loss per token of each row, infinite if it is NaN; NaN without a token."""
    losses = np.full(len(rows), np.nan)
    has_tokens = rows.trained_tokens > 0
    found = measured.losses[has_tokens] / rows.trained_tokens[has_tokens]
    losses[has_tokens] = np.nan_to_num(found, nan=np.inf, posinf=np.inf)
    return losses


def preferences(found: Comparison, judged: Judged) -> dict[str, Any]:
    """Return what the rewards are, and the rows that they are measured on."""
    labeled, good = found.rows.is_labeled, found.rows.trained_tokens > 0
    about: dict[str, Any] = {
        "objective": judged.objective,
        "reference": judged.reference,
        "pairs": int(judged.is_pair.sum()),
        "good": int((labeled & good).sum()),
        "bad": int((labeled & ~good).sum()),
    }
    pairs = judged.is_pair & judged.counts
    if "start" in judged.logps and pairs.any():
        about["start"] = {
            "logps/accuracies": finite_or_none(judged.likelier("start")[pairs].mean())
        }
    return about


def measures(
    found: Comparison, judged: Judged | None, settings: EvaluateRequest
) -> dict[str, dict[str, Interval]]:
    """The means over all rows of base, adapter and their difference, by measure.

    The loss is the validation loss: the mean over trained tokens, each with its row's weight.
    Exact match and the metric are unweighted means over the rows that ask for an answer. Shares,
    which are accuracies, exact match and a metric that is 0 or 1 in every row, have Wilson
    intervals.
    """
    rows, base, adapter = found.rows, found.base, found.adapter

    def over(chosen: np.ndarray, sizes: np.ndarray, *sums: np.ndarray) -> Paired:
        of_base, of_adapter = (values[chosen] for values in sums)
        return paired(of_base, of_adapter, sizes[chosen], settings.resamples, settings.seed)

    weights, ones = rows.weights, np.ones(len(rows))
    sizes = weights * rows.trained_tokens
    pairs = (
        {}
        if judged is None
        else rewards.preference_measures(judged, settings.resamples, settings.seed)
    )
    is_reward = rows.encoder.kind == "rated"
    if is_reward and judged is None:
        pairs |= rewards.score_measures(found, settings.resamples, settings.seed)
    if (sizes > 0).any() and not is_reward:
        loss = over(sizes > 0, sizes, weights * base.losses, weights * adapter.losses)
        pairs |= {"loss": loss, "perplexity": loss.exp()}
    of_teacher = {
        "divergence": (base.divergences, adapter.divergences),
        "agreement": (base.agreements, adapter.agreements),
    }
    for name, (of_base, of_adapter) in of_teacher.items():
        if of_base is not None and of_adapter is not None and (sizes > 0).any():
            pairs[name] = over(sizes > 0, sizes, weights * of_base, weights * of_adapter)
    if rows.has_answer.any() and not is_reward:
        pairs["exact_match"] = over(rows.has_answer, ones, base.exact, adapter.exact)
    if base.scores is not None and adapter.scores is not None:
        pairs["metric"] = over(rows.asks, ones, base.scores, adapter.scores)
    means = {name: pair.intervals(settings.confidence) for name, pair in pairs.items()}
    return with_intervals_of_shares(means, found, judged, settings)


def with_intervals_of_shares(
    means: dict[str, dict[str, Interval]],
    found: Comparison,
    judged: Judged | None,
    settings: EvaluateRequest,
) -> dict[str, dict[str, Interval]]:
    """The means, those that are shares of rows with the intervals of shares."""
    rows, base, adapter = found.rows, found.base, found.adapter
    if "exact_match" in means:
        means["exact_match"] |= share_intervals(means["exact_match"], rows.has_answer, settings)
    for name in record.ACCURACIES:
        if judged is not None and name in means:
            of = share_intervals(means[name], judged.is_pair & judged.counts, settings)
            if judged.reference == "base" and name.startswith("rewards/"):
                of = against_ties(means[name]["base"], of)
            means[name] |= of
    if "metric" in means and are_shares(rows.asks, base.scores, adapter.scores):
        means["metric"] |= share_intervals(means["metric"], rows.asks, settings)
    return means


def are_shares(chosen: np.ndarray, *scores: np.ndarray | None) -> bool:
    """Return whether all scores of the chosen rows are 0 or 1."""
    return all(values is not None and np.isin(values[chosen], (0, 1)).all() for values in scores)


def share_intervals(
    found: dict[str, Interval], chosen: np.ndarray, settings: EvaluateRequest
) -> dict[str, Interval]:
    """The Wilson intervals of base and adapter; their difference keeps its paired bootstrap."""
    rows, confidence = int(chosen.sum()), settings.confidence
    values = {system: found[system].value for system in rewards.SYSTEMS}
    return {
        name: Interval(v, *wilson(v, rows, confidence))
        for name, v in values.items()
        if math.isfinite(v)
    }


def against_ties(base: Interval, shares: dict[str, Interval]) -> dict[str, Interval]:
    """The intervals of the adapter and of the difference to a base that is its own reference.

    base: ties, without any doubt, so the difference has the adapter's interval, moved.
    """
    if (adapter := shares.get("adapter")) is None:
        return {}
    moved = (bound - base.value for bound in (adapter.value, adapter.low, adapter.high))
    return {"adapter": adapter, "difference": Interval(*moved)}


def interval_json(interval: Interval) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in asdict(interval).items()}


def finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def worst_places(run: Trained, worst: int, found: Comparison) -> list[int]:
    """The indices of the rows that `summarize` lists, if no metric scores answers."""
    return listed(worst_by(found, judge(run.config, found), row_losses(found), worst))


def listed(kinds: dict[str, list[int]]) -> list[int]:
    return list(dict.fromkeys(place for places in kinds.values() for place in places))


def worst_by(
    found: Comparison, judged: Judged | None, losses: RowLosses, worst: int
) -> dict[str, list[int]]:
    """The indices of the `worst` rows, by what they are the worst in.

    Those with the highest loss with the adapter, and those whose loss rose the most. Those with the
    lowest scores of the metric come instead of those with the highest loss if there is one, or
    else, if there are pairs, those with the lowest margins.
    """
    if found.adapter.scores is not None:
        by, values = "score", -found.adapter.scores
    elif judged is not None and judged.rewards and judged.is_pair.any():
        by, values = "margin", -judged.margins["adapter"]
    elif found.rows.encoder.kind == "rated":
        by, values = "error", np.abs(rewards.score_errors(found)["adapter"])
    else:
        by, values = "loss", losses.adapter
    highest = [at for at in np.argsort(-values, kind="stable").tolist() if not np.isnan(values[at])]
    most = [at for at in np.argsort(-losses.lost, kind="stable").tolist() if losses.lost[at] > 0]
    return {by: highest[:worst], "change": most[:worst]}


def worst_rows(
    found: Comparison, judged: Judged | None, losses: RowLosses, settings: EvaluateRequest
) -> list[dict[str, Any]]:
    """The rows of `worst_by`, each once, with what was measured and a quote of their texts."""
    is_pair = np.zeros(len(found.rows), bool) if judged is None else judged.is_pair
    kinds = worst_by(found, judged, losses, settings.worst)
    chosen = listed(kinds)
    errors = rewards.score_errors(found) if "error" in kinds else {}
    scores = {"base": found.base.scores, "adapter": found.adapter.scores}
    texts: dict[int, tuple[str | None, ...]] = dict.fromkeys(chosen, (None, None, None))
    judgeable: dict[int, dict[str, Any]] = {}
    answers = {"base": found.base.answers or {}, "adapter": found.adapter.answers or {}}
    with contextlib.suppress(UserError):  # if the file is gone, only the quotes are missing
        for place, row, _ in found.rows.read(chosen):
            texts[place] = (*asked_and_expected(row), rejected_answer(row))
            given = {system: of[place] for system, of in answers.items() if place in of}
            if given:
                judgeable[place] = {"asked": prompt_json(answer_of(row)), "answers": given}

    def of_pair(judged: Judged, place: int) -> dict[str, Any]:
        margins = {f"{s}_margin": finite_or_none(m[place]) for s, m in judged.margins.items()}
        return {**margins, "rejected": excerpt(texts[place][2])}

    return [
        {
            "where": found.rows.where(place),
            "by": [name for name, places in kinds.items() if place in places],
            "base_loss": finite_or_none(losses.base[place]),
            "adapter_loss": finite_or_none(losses.adapter[place]),
            "prompt": excerpt(texts[place][0]),
            "expected": excerpt(texts[place][1]),
            "base_answer": excerpt(answers["base"].get(place)),
            "answer": excerpt(answers["adapter"].get(place)),
            **judgeable.get(place, {}),
            **({} if judged is None or not is_pair[place] else of_pair(judged, place)),
            **{f"{system}_error": finite_or_none(each[place]) for system, each in errors.items()},
            **{
                f"{s}_score": finite_or_none(each[place])
                for s, each in scores.items()
                if each is not None
            },
        }
        for place in chosen
    ]


def prompt_json(content: Chat | Pair | Text) -> dict[str, Any]:
    """The whole prompt of a row, with the columns that a row of preferences has for it."""
    if not isinstance(content, Chat):
        return {} if isinstance(content, Text) else {"prompt": content.prompt}
    tools = {} if content.tools is None else {"tools": content.tools}
    return {"prompt": content.messages[:-1], **tools}


def excerpt(text: str | None) -> str | None:
    """A text on one line, cut to EXCERPT_CHARACTERS."""
    if text is None:
        return None
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARACTERS else line[: EXCERPT_CHARACTERS - 4] + " ..."


def evaluation_notes(found: Comparison) -> list[str]:
    """Messages for the user about the measurements."""
    texts, rows = list(found.notes), found.rows
    systems = {"base": found.base, "start": found.start, "adapter": found.adapter}
    for name, measured in systems.items():
        if measured is None:
            continue
        losses, what = measured.losses, "mean loss is"
        if measured.bad_losses is not None:
            losses, what = losses + measured.bad_losses, "means are"
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad):
            verb = "has" if len(bad) == 1 else "have"
            texts.append(
                f"{name}: {len(bad):,} of {counted(len(rows), 'row')} {verb} a loss that is not "
                f"finite, the first is {rows.where(bad[0])}: the {what} unknown"
            )
    if found.leaked is None:
        texts.append(
            "the run's training rows cannot be read: it is unknown whether these rows are among "
            "them"
        )
    elif found.leaked:
        verbs = ("is", "it says") if found.leaked == 1 else ("are", "they say")
        texts.append(
            f"{found.leaked:,} of {counted(len(rows), 'row')} {verbs[0]} also in the run's "
            f"training data: {verbs[1]} little about new rows"
        )
    return texts
