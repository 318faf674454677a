"""The running mean of a loss or a reward, and the best one so far: one definition for all views."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
        """Whether there are enough values for a best mean."""
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
