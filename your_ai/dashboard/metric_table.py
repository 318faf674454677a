"""The metrics of a run that trains on rewards: their names, and how views show them.

This is the only place of the dashboard that knows these names. Metrics of other runs, and metrics
that are not listed here, are shown by their own names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from your_ai.run import events

REWARD = "reward"
SPREAD = "reward_std"
LENGTH = "completions/mean_length"
CUT_OFF = "completions/clipped_ratio"
SECONDS, PEAK_BYTES = "seconds/", "peak_bytes/"  # before the name of a phase
UPDATE = "update"  # the phase that is left of a step
NAMED, MEAN, STD = "rewards/", "/mean", "/std"  # around the name of a reward
JUDGE = "judge/"


def plain(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def percent(share: float) -> str:
    """Format a share as 0%, 0.4% or 25%."""
    if not math.isfinite(share):
        return str(share)
    return f"{100 * share:.{1 if 0 < abs(share) < 0.1 else 0}f}%"


@dataclass(frozen=True)
class Look:
    """The name of a metric on the screen, and its format."""

    row: str
    """The label of its row in the screen; empty for the rows of the rewards."""
    name: str
    text: Callable[[float], str] = plain


LOOKS = {
    REWARD: Look("", "reward"),
    SPREAD: Look("", "spread"),
    "rewards/missing": Look("", "missing"),
    "kl": Look("policy", "KL"),
    "entropy": Look("policy", "entropy"),
    "clip_ratio/low_mean": Look("policy", "clipped low", percent),
    "clip_ratio/high_mean": Look("policy", "clipped high", percent),
    "credit/residual": Look("policy", "credit left out", percent),
    "temperature": Look("policy", "temperature"),
    "reward_relaxed": Look("policy", "relaxed reward"),
    LENGTH: Look("rollouts", "length"),
    CUT_OFF: Look("rollouts", "cut off", percent),
    "frac_reward_zero_std": Look("rollouts", "no spread", percent),
    "generation/tokens_per_s": Look("rollouts", "tokens/s"),
}
# Preferences and reward models: the most telling first, by short names.
PAIRS = {
    "rewards/accuracies": "accuracy",
    "rewards/margins": "margin",
    "rewards/error": "error",
    "rewards/chosen": "chosen",
    "rewards/rejected": "rejected",
    "kl": "KL",
    "scores/mean": "mean score",
    "scores/std": "spread",
    "logps/chosen": "logp chosen",
    "logps/rejected": "logp rejected",
}
IN_LINES = {
    REWARD: "reward",
    SPREAD: "reward_std",
    "rewards/missing": "missing",
    "kl": "kl",
    "entropy": "entropy",
    "credit/residual": "residual",
    LENGTH: "length",
    CUT_OFF: "cut off",
}
OWN_ROWS = ("conversation", "judge")  # of what is measured by names that begin so


def is_rewarded(metrics: Mapping[str, float]) -> bool:
    """Return whether these are the metrics of a step that trained on rewards."""
    return REWARD in metrics or LENGTH in metrics


def line_texts(metrics: Mapping[str, float]) -> list[str]:
    """The metrics of a step as its line shows them: `reward 0.84`.

    Of a step that trained on rewards, only those in IN_LINES.
    """
    if not is_rewarded(metrics):
        return [f"{name} {value:.4g}" for name, value in metrics.items()]
    return [
        f"{short} {LOOKS[name].text(metrics[name])}"
        for name, short in IN_LINES.items()
        if name in metrics
    ]


def other_values(validation: events.Validation) -> dict[str, float]:
    """Return what a validation measured besides its loss or its reward, by the name that is shown.

    A single named reward is the reward itself.
    """
    if validation.reward is None:
        return dict(validation.metrics)
    named = {name: mean for name, (mean, _) in named_rewards(validation.metrics).items()}
    return named if len(named) > 1 else {}


def named_rewards(metrics: Mapping[str, float]) -> dict[str, tuple[float, float | None]]:
    """The mean of each named reward, and its standard deviation."""
    names = [
        name.removeprefix(NAMED).removesuffix(MEAN)
        for name in metrics
        if name.startswith(NAMED) and name.endswith(MEAN)
    ]
    return {
        name: (metrics[f"{NAMED}{name}{MEAN}"], metrics.get(f"{NAMED}{name}{STD}"))
        for name in names
    }


def texts_of(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The name and the text of each metric of a step, the most telling first."""
    first = [name for name in PAIRS if name in metrics]
    others = [name for name in metrics if name not in PAIRS]
    return [(PAIRS.get(name, name), f"{metrics[name]:.4g}") for name in (*first, *others)]


def metric_rows(metrics: Mapping[str, float]) -> dict[str, list[tuple[str, str]]]:
    """The rows of the screen by their label: the name and the text of each metric.

    The rewards and the phases have functions of their own.
    """
    labels = ("policy", "rollouts", *OWN_ROWS, "metrics")
    rows: dict[str, list[tuple[str, str]]] = {label: [] for label in labels}
    for name, value in metrics.items():
        look, is_reward = LOOKS.get(name), name.startswith(NAMED) and name.endswith((MEAN, STD))
        if look is not None:
            if look.row:
                rows[look.row].append((look.name, look.text(value)))
        elif (label := name.partition("/")[0]) in OWN_ROWS:
            shown = percent(value) if "ended_by" in name else plain(value)
            rows[label].append((name.removeprefix(f"{label}/").replace("_", " "), shown))
        elif not name.startswith((SECONDS, PEAK_BYTES)) and not is_reward:
            rows["metrics"].append((name, f"{value:.4g}"))
    order = [look.name for look in LOOKS.values()]
    for label in ("policy", "rollouts"):
        rows[label].sort(key=lambda shown: order.index(shown[0]))
    return {label: shown for label, shown in rows.items() if shown}


def is_charted(name: str) -> bool:
    """Say whether a report draws a metric among others; the reward has a chart of its own."""
    return name != REWARD and not name.startswith((SECONDS, PEAK_BYTES, JUDGE))


def phase_seconds(step: events.Step) -> dict[str, float]:
    """The seconds of each phase of a step; the update has what the others leave."""
    found = of_phases(step.metrics, SECONDS)
    return found and {**found, UPDATE: max(0.0, step.seconds - sum(found.values()))}


def phase_peaks(step: events.Step) -> dict[str, float]:
    """MLX's peak memory in each phase of a step, in bytes."""
    found = {phase: size for phase, size in of_phases(step.metrics, PEAK_BYTES).items() if size > 0}
    return {**found, UPDATE: step.peak_bytes} if found and step.peak_bytes else found


def phases_of(steps: Sequence[events.Step]) -> list[tuple[str, float | None, float | None]]:
    """Each phase, with its mean seconds per step and its highest peak; None if not known."""
    seconds, peaks = dict[str, list[float]](), dict[str, float]()
    for step in steps:
        for phase, value in phase_seconds(step).items():
            seconds.setdefault(phase, []).append(value)
        for phase, size in phase_peaks(step).items():
            peaks[phase] = max(size, peaks.get(phase, 0.0))
    names = dict.fromkeys((*seconds, *peaks))
    means = {phase: sum(found) / len(found) for phase, found in seconds.items()}
    return [(phase, means.get(phase), peaks.get(phase)) for phase in names]


def of_phases(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): value
        for name, value in metrics.items()
        if name.startswith(prefix)
    }
