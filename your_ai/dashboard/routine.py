"""Actions of the memory governor that repeat, folded into one line each. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from your_ai.gates.text import counted, size_text
from your_ai.run.events import Action


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
    def change_text(self) -> str:
        """What they changed in all: `-203 MB`, or `0 MB`."""
        size = size_text(abs(self.freed_bytes))
        sign = "-" if self.freed_bytes > 0 else "+"
        return size if size == "0 MB" else f"{sign}{size}"

    @property
    def times_text(self) -> str:
        """`4 times`; empty for one action."""
        return counted(self.count, "time") if self.count > 1 else ""


def folded_once(action: Action) -> FoldedAction:
    freed = action.before_bytes - action.after_bytes
    return FoldedAction(action, action.step, 1, freed, action.read_bytes, action.seconds)


def with_action(folded: tuple[FoldedAction, ...], action: Action) -> tuple[FoldedAction, ...]:
    """Add an action to the lines, which are in the order of their latest action."""
    new = folded_once(action)
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
