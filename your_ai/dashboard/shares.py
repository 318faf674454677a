"""Shares of rows, such as exact match, and their confidence intervals."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

from your_ai.run import events

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
