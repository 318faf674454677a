"""The divergences between a teacher and a student that `--divergence` names. No MLX here."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORWARD, REVERSE, JSD, SAMPLED = "forward", "reverse", "jsd", "sampled"
FORMAT = re.compile(rf"{FORWARD}|{REVERSE}|{SAMPLED}|{JSD}(:(?P<share>[0-9.]{{1,20}}))?")
KNOWN = f"{FORWARD}, {REVERSE}, {JSD}:B with B between 0 and 1, or {SAMPLED}"


@dataclass(frozen=True)
class DivergenceKind:
    """A divergence of the student's predictions q from the teacher's p."""

    name: str
    share: float = 0.5
    """Of jsd: that of p in the mixture."""

    @property
    def text(self) -> str:
        """The name of it in `--divergence`."""
        return f"{JSD}:{self.share:g}" if self.name == JSD else self.name


def divergence_of(text: str) -> DivergenceKind:
    """The divergence of `--divergence`. Raises ValueError, which says what is known."""
    found = FORMAT.fullmatch(text)
    try:
        share = float((found and found["share"]) or 0.5)
    except ValueError:
        share = 0.0
    if found is None or not 0 < share < 1:
        raise ValueError(f"give {KNOWN}")
    return DivergenceKind(text.partition(":")[0], share)
