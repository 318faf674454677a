"""Measures of a run that screen, reports and cards share, from its events. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import sqrt
from statistics import NormalDist

from your_ai.gates.text import counted, size_text
from your_ai.run import events
from your_ai.run.events import Action, Validation


@dataclass(frozen=True)
class FoldedAction:
    """Actions of one kind for one cause, as one line.

    Sums are of all of them. A cause with figures (`process 4.95 GB ... is over 70%`) is another
    one each time, so only routine actions (`every 10 steps`) have a count above 1.
    """

    last: Action
    """The latest."""
    first_step: int
    count: int
    freed_bytes: int
    """Negative if memory grew."""
    read_bytes: int
    seconds: float

    @property
    def kind(self) -> str:
        """The kind in words: `clear cache`."""
        return self.last.kind.replace("_", " ")

    @property
    def where(self) -> str:
        """`step 40`, or `steps 10-40`."""
        if self.count == 1 or self.first_step == self.last.step:
            return f"step {self.last.step}"
        return f"steps {self.first_step}-{self.last.step}"

    @property
    def mean_seconds(self) -> float:
        return self.seconds / self.count

    @property
    def change_text(self) -> str:
        """Return what one of them changed, on average: `-203 MB`, or `0 MB`."""
        size = size_text(abs(self.freed_bytes) / self.count)
        sign = "-" if self.freed_bytes > 0 else "+"
        return size if size == "0 MB" else f"{sign}{size}"

    @property
    def times_text(self) -> str:
        """`4 times`; empty for one action."""
        return counted(self.count, "time") if self.count > 1 else ""


def with_action(folded: tuple[FoldedAction, ...], action: Action) -> tuple[FoldedAction, ...]:
    """Add an action to the lines, which are in the order of their latest action."""
    freed = action.before_bytes - action.after_bytes
    new = FoldedAction(action, action.step, 1, freed, action.read_bytes, action.seconds)
    for old in folded:
        if (old.last.kind, old.last.cause) == (action.kind, action.cause):
            new = FoldedAction(
                action,
                old.first_step,
                old.count + 1,
                old.freed_bytes + new.freed_bytes,
                old.read_bytes + new.read_bytes,
                old.seconds + new.seconds,
            )
            return (*(each for each in folded if each is not old), new)
    return (*folded, new)


def folded_actions(actions: Iterable[Action]) -> tuple[FoldedAction, ...]:
    """The actions of a run, with those of the same kind and cause in one line.

    Lines are in the order of their latest action.
    """
    found: dict[tuple[str, str], FoldedAction] = {}
    for action in actions:
        key = action.kind, action.cause
        before = found.pop(key, None)
        [found[key]] = with_action(() if before is None else (before,), action)
    return tuple(found.values())


# The best validation of a run: one definition for every view. The mean of training losses has a
# best one too, which views always call the best mean


def is_better(found: Validation, best: Validation | None) -> bool:
    """Return whether a validation takes the place of the best one so far.

    The run marks each that is, by --best-metric: it keeps that adapter. Of a run that marks none,
    the one with the lowest loss is the best.
    """
    if found.best or (best is not None and best.best):
        return found.best
    return math.isfinite(found.loss) and (best is None or found.loss < best.loss)


# The running mean of a loss or a reward, and the best one so far: one definition for all views


WINDOW = 20  # maximum number of values in a mean
LARGEST = 1e30  # a larger value counts as infinite


@dataclass(frozen=True)
class RunningMean:
    """The mean of the newer half of the values, of WINDOW at most.

    So the high losses of a run's first steps are soon out of it, while an exponential mean keeps
    a share of them, which is more than the loss itself where the loss falls a hundredfold.
    """

    highest: bool = False
    """Whether the highest mean is the best one, or else the lowest."""
    newest: tuple[float, ...] = ()
    """The newest values, WINDOW at most."""
    count: int = 0
    """Number of values so far."""
    best: float | None = None
    """The best mean since there are WINDOW values; before that, the latest mean."""
    best_at: float = 0
    """The step of `best`."""

    @property
    def value(self) -> float | None:
        size = min(WINDOW, (self.count + 1) // 2)
        return sum(self.newest[-size:]) / size if size else None

    @property
    def is_settled(self) -> bool:
        """Return whether there are enough values for a best mean."""
        return self.count >= WINDOW

    def add(self, value: float, at: float = 0) -> RunningMean:
        """The mean with the value of step `at`; the same one if the value is not finite."""
        if not abs(value) < LARGEST:
            return self
        found = replace(self, newest=(*self.newest, value)[-WINDOW:], count=self.count + 1)
        mean = found.value
        assert mean is not None
        early = found.count <= WINDOW  # the first means are of few values, and noisy
        if early or self.best is None or (mean > self.best if self.highest else mean < self.best):
            return replace(found, best=mean, best_at=at)
        return found


# Shares of rows, such as exact match, and their confidence intervals


CONFIDENCE = 0.95
NARROW = 0.02  # an interval narrower than this is shown with a decimal


def wilson(share: float, rows: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the score interval of a share of `rows` independent rows (Wilson 1927).

    The interval has every true share p that the measured one does not contradict:
    |share - p| <= z sqrt(p (1 - p) / rows). Unlike a bootstrap, it has a positive width for 0 of
    n and n of n, and it never leaves [0, 1].

    E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal
    of the American Statistical Association 22 (1927), pages 209-212.
    """
    if rows < 1:
        return 0.0, 1.0
    z = -NormalDist().inv_cdf((1 - confidence) / 2)  # accurate even for a confidence close to 1
    scale = 1 + z * z / rows
    center = (share + z * z / (2 * rows)) / scale
    half = z / scale * sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    # The bounds, against rounding: 0 and 1 are exact, and the share is always inside.
    return max(0.0, min(share, center - half)), min(1.0, max(share, center + half))


def match_share(match: events.ExactMatch) -> str:
    """Format an exact match with its interval: `97% [89, 99]`."""
    share = min(1.0, max(0.0, match.correct / max(1, match.rows)))  # events are not trusted
    low, high = wilson(share, match.rows)
    digits = 1 if high - low < NARROW else 0
    return f"{100 * share:.{digits}f}% [{100 * low:.{digits}f}, {100 * high:.{digits}f}]"
