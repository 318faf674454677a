"""Rewards that are computed from the text of a completion. Each is a function of a rollout.

A completion is untrusted: it may be any text, and no text raises an error here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import shown
from your_ai.gates.untrusted import parse_json
from your_ai.rewards.names import ENVIRONMENT, NEEDS_EXPECTED, WeightedName
from your_ai.rewards.rollout import Rollout

FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*)\n?[ \t]*```", re.DOTALL)

TextReward = Callable[[Rollout], float | None]


def exact_match(rollout: Rollout) -> float:
    """1 if the completion is the expected answer, without surrounding white space; else 0."""
    return float(rollout.completion.strip() == (rollout.expected or "").strip())


def json_valid(rollout: Rollout) -> float:
    """1 if the whole completion is JSON; else 0. A program must be able to parse it as it is."""
    try:
        parse_strict(rollout.completion)
    except ValueError:
        return 0.0
    return 1.0


def json_fields(rollout: Rollout) -> float:
    """The share of the expected object's fields that the completion has with an equal value.

    The completion may be in a code fence. Further fields in it do not count. 0 if it is not a
    JSON object.
    """
    expected = expected_fields(rollout.expected, rollout.where)
    try:
        found = parse_strict(without_fence(rollout.completion))
    except ValueError:
        return 0.0
    if not isinstance(found, dict):
        return 0.0
    right = sum(name in found and is_same(found[name], value) for name, value in expected.items())
    return right / len(expected)


def regex(pattern: str) -> TextReward:
    """1 if the pattern is found anywhere in the completion; else 0."""
    search = re.compile(pattern).search
    return lambda rollout: float(search(rollout.completion) is not None)


def length(tokens: int) -> TextReward:
    """1 up to this number of tokens, then falling linearly, to 0 at twice the number."""
    return lambda rollout: min(1.0, max(0.0, 2 - rollout.tokens / tokens))


def contains(text: str) -> TextReward:
    """1 if the completion contains the text, with the same case; else 0."""
    return lambda rollout: float(text in rollout.completion)


def environment(rollout: Rollout) -> float | None:
    """The sum of the rewards that the environment of the conversation gave."""
    return rollout.earned


PLAIN_REWARDS: dict[str, TextReward] = {
    ENVIRONMENT: environment,
    "exact_match": exact_match,
    "json_valid": json_valid,
    "json_fields": json_fields,
}
REWARDS_OF: dict[str, Callable[[str], TextReward]] = {
    "regex": regex,
    "length": lambda argument: length(int(argument)),
    "contains": contains,
}


def builtin(name: WeightedName) -> TextReward | None:
    """The function of a built-in reward; None for a function of the user and for the judge."""
    if name.kind in PLAIN_REWARDS:
        return PLAIN_REWARDS[name.kind]
    make = REWARDS_OF.get(name.kind)
    return None if make is None else make(name.argument)


# The expected answer


def check_expected(names: Iterable[WeightedName], expected: str | None, where: str) -> None:
    """Raise UserError, beginning with `where`, if a row lacks what a reward compares with."""
    for name in names:
        if name.kind in NEEDS_EXPECTED and expected is None:
            raise UserError(
                f"{where}: has no expected answer, which --reward {name.name} needs; add it to "
                "the row, or choose another reward"
            )
        if name.kind == "json_fields":
            expected_fields(expected, where)


def expected_fields(expected: str | None, where: str) -> dict[str, Any]:
    """The object that json_fields compares with. Raises UserError, beginning with `where`."""
    try:
        found = parse_strict(expected or "")
    except ValueError as error:
        found, reason = None, shown(str(error))
    else:
        reason = "it is empty" if found == {} else f"it is a JSON {type(found).__name__}"
    if not isinstance(found, dict) or not found:
        raise UserError(
            f"{where}: --reward json_fields needs an expected answer that is a JSON object with "
            f"fields ({reason})"
        )
    return found


# JSON


def parse_strict(text: str) -> Any:
    """Parse JSON as the standard has it: without NaN, and no name twice in an object.

    Raises ValueError with a reason.
    """
    return parse_json(text.encode(), unique=True, standard=True)


def without_fence(text: str) -> str:
    """The text inside one surrounding code fence (```), or the text itself."""
    text = text.strip()
    found = FENCE.fullmatch(text)
    return text if found is None else found.group(1)


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values of `parse_strict` are equal. 1 equals 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)
