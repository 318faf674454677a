"""A setting is declared once: all that is known of it is in the metadata of its field.

The same is true of the requests of commands, `requests.py`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
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
    "text", "model", "data", "file", "page", "name", "run", "run or path", "reward", "metric",
    "code", "tracker", "network", "refused",
]  # fmt: skip


class Bounds(NamedTuple):
    """The limits of a number."""

    least: float
    most: float = math.inf
    above: bool = False
    """Whether it must be above the least."""
    under: bool = False
    """Whether it must be under the most."""

    def fault(self, value: float) -> str:
        """The fault of a value, in words; empty for a good one."""
        low = value > self.least if self.above else value >= self.least
        high = value < self.most if self.under else value <= self.most
        if low and high:  # both are false for NaN
            return ""
        if self.above or self.under:
            least = f"{'above' if self.above else 'at least'} {self.least}"
            return f"must be {least} and {'under' if self.under else 'at most'} {self.most:,}"
        return f"must be at most {self.most:,}" if low else f"must be at least {self.least}"


class Tool(NamedTuple):
    """The form in which a tool of `mcp` offers a setting to agents."""

    help: str
    bounds: Bounds | None = None


@dataclasses.dataclass(frozen=True)
class About:
    """The facts about a setting, or about a field of a request."""

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
    tool: Tool | None = None
    """How a tool of `mcp` offers it; None: it does not."""
    argument: bool = False
    """Whether it is given by its place on the command line."""
    option: tuple[str, ...] = ()
    """Its names on the command line, if they are not made of its name."""
    metavar: str = ""
    """What stands for its value in the help of a command, if not its type."""
    words: tuple[str, ...] = ()
    """Values that a shell completes, of a text."""

    def used_by(self, objective: str) -> bool:
        return objective in (self.objectives or (objective,))


def setting(default: Any, help: str | About, **about: Any) -> Any:
    """A field of a dataclass of settings, or of a request.

    help: the text, or all that is known of a field that several requests have. about: the fields
    of `About`. What only some objectives use is in cards, and came later: older runs trained with
    its default. Both are so unless they are given.
    """
    if about.get("objectives"):
        about = {"before": default, "in_card": True} | about
    whole = About(help, **about) if isinstance(help, str) else help
    return dataclasses.field(default=default, metadata=known(whole))


def changeable(default: Any, help: str, **about: Any) -> Any:
    """A setting that may change when a run is resumed."""
    return setting(default, help, resumes=True, **about)


def known(about: About) -> dict[str, About]:
    """The metadata of a field, for one whose default must not hide that it is required."""
    return {"about": about}


@cache
def settings_of(kind: type) -> dict[str, About]:
    """The facts about the fields that a dataclass declares with `setting`, by name."""
    fields = dataclasses.fields(kind)
    return {f.name: f.metadata["about"] for f in fields if "about" in f.metadata}


@cache
def types_of(kind: type) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    return typing.get_type_hints(kind)


def check_used(known: Mapping[str, About], names: Iterable[str], objective: str) -> None:
    """Raise UserError if one of the settings is only for other objectives."""
    for name in names:
        if not known[name].used_by(objective):
            raise UserError(
                f"{flag(name)}: --objective {objective} does not use it; it is for "
                f"{', '.join(known[name].objectives)}"
            )


def check_bounds(settings: Any) -> None:
    """Raise UserError if a number of a dataclass of settings is out of its bounds."""
    for name, about in settings_of(settings.__class__).items():
        value = getattr(settings, name)
        if about.bounds is None or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if fault := about.bounds.fault(value):
            raise UserError(f"{flag(name)} {quoted(value)}: {fault}")
