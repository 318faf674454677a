"""The rewards of good and bad answers, and how well a model tells them apart.

A reward is what the objective of a run compares: for DPO, beta times the log-ratio to the
reference. A bad answer is the rejected one of a pair, or one with the label false.

Shapes: m rows; arrays of (2, m) have the values of the good and of the bad answers, NaN where a row
has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

import mlx.core as mx
import numpy as np

from your_ai.config import REWARD, TrainConfig
from your_ai.evaluation.bootstrap import (
    Paired,
    Statistic,
    mean_difference,
    paired,
    paired_apart,
    paired_correlation,
    ranked_right,
)
from your_ai.evaluation.compare import Comparison, RowMeasures
from your_ai.evaluation.rows import EvaluationRows
from your_ai.objectives.chosen import needs_reference, objective_of
from your_ai.objectives.dpo import DPO
from your_ai.objectives.pairs import TIE, PairObjective, Pairs

SYSTEMS = ("base", "adapter")


@dataclass(frozen=True)
class Judged:
    """Judgments of base and adapter on the good and the bad answers of the rows."""

    objective: str
    """Which gives the rewards; empty for a run that trains on rewards of completions."""
    reference: str | None
    """What the rewards compare with: base; start, the adapter that the run started from; None."""
    logps: dict[str, np.ndarray]
    """By system, also the start if it is the reference, (2, m): the sums of the log-probabilities
    of the answers; empty for a reward model."""
    rewards: dict[str, np.ndarray]
    """By system, (2, m); empty without an objective that gives them."""
    tokens: np.ndarray
    """(2, m): the number of tokens of each answer; 0 where there is none."""
    is_pair: np.ndarray
    """(m,) bool: whether the row has both answers."""
    is_labeled: np.ndarray
    """(m,) bool: whether the row has one answer with a label."""
    counts: np.ndarray
    """(m,) bool: whether the row counts; a row of weight 0 does not."""

    @cached_property
    def margins(self) -> dict[str, np.ndarray]:
        """The reward of the chosen answer minus that of the rejected one: (m,) by system."""
        return {name: good - bad for name, (good, bad) in self.rewards.items()}

    def likelier(self, system: str) -> np.ndarray:
        """(m,): 1 where the chosen answer is more likely than the rejected one, as in `right`."""
        good, bad = self.logps[system]
        return right(good - bad)

    def likelier_per_token(self, system: str) -> np.ndarray:
        """(m,): the same of the log-probabilities per token."""
        good, bad = self.logps[system] / np.maximum(self.tokens, 1)
        return right(good - bad)


def judge(config: TrainConfig, found: Comparison) -> Judged | None:
    """The rewards of the answers by the objective of the run; None if no row compares answers."""
    rows, name = found.rows, objective_name(config)
    if not rows.has_preferences:
        return None
    tokens = np.stack([rows.trained_tokens, rows.bad_tokens])
    measured = {"base": found.base, "adapter": found.adapter}
    if found.start is not None:
        measured["start"] = found.start
    logps = {system: logps_of(each, tokens) for system, each in measured.items()}
    reference, rewards = None, dict[str, np.ndarray]()
    if config.objective == REWARD:  # its scores; the base has the same head, but no adapter
        name, rewards, logps = REWARD, {system: logps[system] for system in SYSTEMS}, {}
    elif name:
        if needs_reference(config):
            reference = "base" if found.start is None else "start"
        of, objective = None if reference is None else logps[reference], rewarding(config)
        rewards = {s: rewards_of(objective, logps[s], of, tokens) for s in SYSTEMS}
    return Judged(
        objective=name,
        reference=reference,
        logps=logps,
        rewards=rewards,
        tokens=tokens,
        is_pair=rows.is_pair,
        is_labeled=rows.is_labeled,
        counts=rows.weights > 0,
    )


def score_measures(found: Comparison, resamples: int, seed: int) -> dict[str, Paired]:
    """Measure how far the scores of a reward model are from those of the rows: the mean of the
    absolute differences, and the correlation (Pearson's).
    """
    there, wanted = found.rows.weights > 0, wanted_scores(found.rows)
    base, adapter = (-system.losses[there] for system in (found.base, found.adapter))
    ones, wanted = np.ones(there.sum()), wanted[there]
    of_base, of_adapter = (np.abs(each[there]) for each in score_errors(found).values())
    return {
        "scores/error": paired(of_base, of_adapter, ones, resamples, seed),
        "scores/correlation": paired_correlation(base, adapter, wanted, resamples, seed),
        "scores/mean": paired(base, adapter, ones, resamples, seed),
    }


def wanted_scores(rows: EvaluationRows) -> np.ndarray:
    """(m,) the scores in the rows."""
    wanted = np.zeros(len(rows))
    wanted[rows.trained.row_of] = rows.trained.examples.columns["ratings"]
    return wanted


def score_errors(found: Comparison) -> dict[str, np.ndarray]:
    """The score that a reward model gives, minus that of the row: (m,) by system."""
    wanted = wanted_scores(found.rows)
    return {"base": -found.base.losses - wanted, "adapter": -found.adapter.losses - wanted}


def rewarding(config: TrainConfig) -> PairObjective:
    """The objective that gives the rewards of a run: its own, or DPO if it is not over pairs."""
    objective = objective_of(config)
    if isinstance(objective, PairObjective):
        return objective
    return DPO() if config.beta is None else DPO(beta=config.beta)


def objective_name(config: TrainConfig) -> str:
    """The objective that gives the rewards of a run, by its name.

    Empty if the run trains on rewards of completions, which are others than those of pairs.
    """
    if config.row_kind == "prompts":
        return ""
    return config.objective if config.row_kind in ("pairs", "labels") else "dpo"


def logps_of(measured: RowMeasures, tokens: np.ndarray) -> np.ndarray:
    """(2, m) the log-probabilities of the good and the bad answers; tokens: (2, m)."""
    bad = np.zeros_like(measured.losses) if measured.bad_losses is None else measured.bad_losses
    return np.where(tokens > 0, -np.stack([measured.losses, bad]), np.nan)


def rewards_of(
    objective: PairObjective, logps: np.ndarray, reference: np.ndarray | None, tokens: np.ndarray
) -> np.ndarray:
    """(2, m) float64: the rewards of the good and the bad answers, as in training.

    logps, reference, tokens: (2, m); without a reference, answers are not compared with anything.
    """
    reference = np.zeros_like(logps) if reference is None else reference
    with mx.stream(mx.cpu):  # the only device with float64
        columns = (*logps, *(logps - reference), *tokens, np.ones(len(logps[0])))
        pairs = Pairs(*(mx.array(column, mx.float64) for column in columns))
        found = objective.of_pairs(pairs)
        rewards = np.stack([np.array(found.chosen_rewards), np.array(found.rejected_rewards)])
    return np.where(tokens > 0, rewards, np.nan)


# Measures


def preference_measures(judged: Judged, resamples: int, seed: int) -> dict[str, Paired]:
    """The means of base and adapter by measure, most of them with TRL's names.

    rewards/accuracies, logps/accuracies and logps/mean_accuracies are the shares of pairs whose
    chosen answer has the higher reward, log-probability and log-probability per token. A tie, up to
    rounding, is half. rewards/auc is the share of all combinations of a good and a bad labeled
    answer whose good one has the higher reward. Of labels, rewards/margins is the difference of
    the two means.
    """
    there = judged.counts
    pairs, labeled = judged.is_pair & there, judged.is_labeled & there
    good, bad = ((pairs | labeled) & (counted > 0) for counted in judged.tokens)

    def over(chosen: np.ndarray, value_of: Callable[[str], np.ndarray]) -> Paired:
        base, adapter = (value_of(system)[chosen] for system in SYSTEMS)
        return paired(base, adapter, np.ones(chosen.sum()), resamples, seed)

    def apart(statistic: Statistic, value_of: Callable[[str], np.ndarray]) -> Paired:
        base, adapter = (value_of(system)[labeled] for system in SYSTEMS)
        return paired_apart(base, adapter, good[labeled], statistic, resamples, seed)

    def reward(system: str) -> np.ndarray:
        """(m,) the reward of the answer of each labeled row."""
        return np.asarray(np.where(good, *judged.rewards[system]))

    def at(place: int, values: Mapping[str, np.ndarray], system: str) -> np.ndarray:
        return np.asarray(values[system][place])

    found: dict[str, Paired] = {}
    if judged.rewards and pairs.any():
        found["rewards/accuracies"] = over(pairs, lambda s: right(judged.margins[s]))
        found["rewards/margins"] = over(pairs, lambda s: judged.margins[s])
    if judged.rewards and (labeled & good).any() and (labeled & bad).any():
        found["rewards/auc"] = apart(ranked_right, lambda s: np.round(reward(s) / TIE))
        found.setdefault("rewards/margins", apart(mean_difference, reward))
    for place, (name, rows) in enumerate({"chosen": good, "rejected": bad}.items()):
        if judged.rewards and rows.any():
            found[f"rewards/{name}"] = over(rows, partial(at, place, judged.rewards))
    if not judged.logps:
        return found
    if pairs.any():
        found["logps/accuracies"] = over(pairs, judged.likelier)
        found["logps/mean_accuracies"] = over(pairs, judged.likelier_per_token)
    for place, (name, rows) in enumerate({"chosen": good, "rejected": bad}.items()):
        if rows.any():
            found[f"logps/{name}"] = over(rows, partial(at, place, judged.logps))
    return found


def right(margins: np.ndarray) -> np.ndarray:
    """1 where a margin is above 0, 0.5 where it is 0 up to rounding, else 0; NaN where unknown."""
    found = (margins > TIE) + 0.5 * (np.abs(margins) <= TIE)
    return np.where(np.isfinite(margins), found, np.nan)
