"""The order of plans by time, and those that no other beats in both memory and time. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

ALIKE = 1.01  # of plans whose predicted seconds differ by less, the smaller one is better


class Timed(Protocol):
    """What is known about a plan."""

    @property
    def needed_bytes(self) -> int: ...

    @property
    def cost(self) -> float:
        """Arithmetic of a step."""

    @property
    def seconds(self) -> float | None:
        """Predicted, of a step; None if they are not predicted."""


T = TypeVar("T", bound=Timed)


def fastest_first(found: list[T]) -> list[T]:
    """The options by their predicted seconds; of those that are about as fast, the smallest first.

    As they are, if no seconds are predicted.
    """
    known = [(option.seconds, option) for option in found if option.seconds is not None]
    if len(known) < len(found):
        return found
    groups: list[list[T]] = []
    fastest = 0.0
    for seconds, option in sorted(known, key=lambda each: each[0]):
        if not groups or seconds > ALIKE * fastest:
            fastest = seconds
            groups.append([])
        groups[-1].append(option)
    return [o for group in groups for o in sorted(group, key=lambda each: each.needed_bytes)]


def front_of(found: Sequence[T]) -> list[T]:
    """The options that no other beats in both memory and time, the fastest first.

    Without predicted seconds, time is the arithmetic of a step.
    """
    front: list[T] = []
    for option in sorted(found, key=lambda each: (each.needed_bytes, time_of(each))):
        if not front or time_of(option) < time_of(front[-1]):
            front.append(option)
    return front[::-1]


def time_of(option: Timed) -> float:
    return option.cost if option.seconds is None else option.seconds
