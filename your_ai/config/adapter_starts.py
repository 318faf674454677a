"""The first values of adapters that `--init` names, as text and as facts. No MLX here."""

from __future__ import annotations

import re
from dataclasses import dataclass

INIT = "init"  # in adapter_config.json: the text of `--init`
ADJUSTED = "adjusted_base"  # in adapter_config.json: checksums of the copy with adjusted weights
LOFTQ, PISSA = "loftq", "pissa"
MOST_ROUNDS = 100
FORMAT = re.compile(rf"{PISSA}|{LOFTQ}(:(?P<rounds>[0-9]{{1,3}}))?")
KNOWN = f"{LOFTQ}, {LOFTQ}:N with N from 2 to {MOST_ROUNDS}, or {PISSA}"


@dataclass(frozen=True)
class AdapterStart:
    """A way to begin, other than with random A and zero B."""

    name: str
    rounds: int = 1
    """How often loftq factorizes what quantization takes away."""

    @property
    def adjusts_base(self) -> bool:
        """True if the run has base weights of its own, to which its adapter belongs."""
        return self.name == PISSA or self.rounds > 1


def starting_of(text: str) -> AdapterStart | None:
    """The start of `--init`; None for "". Raises ValueError, which says what is known."""
    if not text:
        return None
    found = FORMAT.fullmatch(text)
    rounds = int((found and found["rounds"]) or 1)
    if found is None or not 1 <= rounds <= MOST_ROUNDS:
        raise ValueError(f"give {KNOWN}")
    return AdapterStart(text.partition(":")[0], rounds)
