"""A setting is declared once: all that is known of it is in the metadata of its field."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from your_ai.config.names import flag
from your_ai.errors import UserError
from your_ai.gates.text import quoted

LARGEST = 1_000_000_000  # no setting needs a larger value
ALWAYS: Any = object()  # of a setting that was there from the beginning
# What a text names, for whoever decides whether an agent may set it (`serving/mcp_gate.py`).
Reach = Literal[
    "text", "model", "data", "file", "name", "run or path", "reward", "metric", "tracker",
    "network", "refused",
]  # fmt: skip


class Bounds(NamedTuple):
    """What a number may be."""

    least: float
    most: float
    above: bool = False
    """Whether it must be above the least."""
    under: bool = False
    """Whether it must be under the most."""

    def fault(self, value: float) -> str:
        """What is wrong with a value, in words; empty for a good one."""
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.under else value <= self.most
        if low and high:  # both are false for NaN
            return ""
        if self.above or self.under:
            least = f"{'above' if self.above else 'at least'} {self.least}"
            return f"must be {least} and {'under' if self.under else 'at most'} {self.most:,}"
        return f"must be at most {self.most:,}" if low else f"must be at least {self.least}"


@dataclasses.dataclass(frozen=True)
class About:
    """What is known of a setting."""

    help: str
    bounds: Bounds | None = None
    """Of a number; words and None are free."""
    objectives: tuple[str, ...] = ()
    """The objectives that use it; empty for all."""
    resumes: bool = False
    """Whether it may change when a run is resumed."""
    before: Any = ALWAYS
    """The value with which runs trained before there was this setting; ALWAYS for an old one."""
    agents: Reach | None = None
    """Of a text: what it names. Of another setting: None, unless agents must not set it."""
    in_card: bool = False
    """Whether model cards show it."""
    of_adapter: bool = False
    """Whether it decides which adapter layers a model has."""
    mlxlm: str = ""
    """Its name in mlx-lm."""

    def used_by(self, objective: str) -> bool:
        return objective in (self.objectives or (objective,))


def setting(default: Any, help: str, **about: Any) -> Any:
    """A field of a dataclass of settings; about: the fields of `About`."""
    return dataclasses.field(default=default, metadata={"about": About(help, **about)})


@cache
def settings_of(kind: type) -> dict[str, About]:
    """What is known of the settings that a dataclass declares, by name."""
    return {field.name: field.metadata["about"] for field in dataclasses.fields(kind)}


def check_used(known: Mapping[str, About], names: Iterable[str], objective: str) -> None:
    """Raise UserError if one of the settings is only for other objectives."""
    for name in names:
        if not known[name].used_by(objective):
            raise UserError(
                f"{flag(name)}: --objective {objective} does not use it; it is for "
                f"{', '.join(known[name].objectives)}"
            )


def fault_of(about: About, value: Any) -> str:
    """What is wrong with the value of a setting, in words that follow it; empty for a good one."""
    if about.bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    fault = about.bounds.fault(value)
    return fault and f"{quoted(value)}: {fault}"
