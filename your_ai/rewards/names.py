"""What `--reward` names: `exact_match`, `length:200=0.1`, `module:function`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from your_ai.config import SOFT, TrainConfig
from your_ai.errors import UserError
from your_ai.gates.text import nearest, shown

JUDGE, RUN, FUNCTION, ENVIRONMENT = "judge", "run", "function", "environment"
PLAIN = ("exact_match", "json_valid", "json_fields", JUDGE, ENVIRONMENT)  # without an argument
WITH_ARGUMENT = {  # with an argument after a colon -> an example of it
    "regex": "regex:[0-9]+",
    "length": "length:200",
    "contains": "contains:Thank you",
    RUN: "run:NAME",
}
NEEDS_EXPECTED = ("exact_match", "json_fields")
LENGTHS = (1, 1 << 24)  # of the argument of length, in tokens

NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf|infinity|nan)", re.IGNORECASE)


@dataclass(frozen=True)
class WeightedName:
    """One reward that the user chose."""

    name: str
    """As the user wrote it, without the weight: `length:200`."""
    kind: str
    """One of PLAIN and WITH_ARGUMENT, or FUNCTION."""
    argument: str
    """The text after the colon; of a function, the whole name; empty if there is none."""
    weight: float = 1.0
    """Finite and not 0. A negative weight is a penalty."""


def reward_texts(config: TrainConfig) -> tuple[str, ...]:
    """The rewards of a run's completions: by default, those that an environment gives. With soft,
    the reward model; others are only shown.

    Raises UserError if soft has no reward model.
    """
    if config.objective != SOFT:
        return config.reward or ((ENVIRONMENT,) if config.environment else ())
    if not config.reward_model:
        raise UserError("--reward-model is missing: what soft trains against, as run:NAME")
    shown = [f"{parse_reward(text).name}=0" for text in config.reward]
    return (f"{config.reward_model}=1", *shown)


def parse_rewards(texts: Sequence[str]) -> tuple[WeightedName, ...]:
    """Parse the rewards, each as `NAME`, `NAME:ARGUMENT`, either with `=WEIGHT`. Imports nothing.

    The weight is the part after the last `=`, if it is a number; the default is 1.

    Raises UserError for an unknown name, a wrong argument or weight, or a name given twice.
    """
    found = tuple(map(parse_reward, texts))
    if not found:
        raise UserError("--reward: names no reward; give e.g. --reward exact_match")
    if not any(one.weight for one in found):
        raise UserError(
            f"--reward {shown(texts[0])}: every weight is 0; give one that is not, to learn from"
        )
    seen: set[str] = set()
    for one in found:
        if one.name in seen:
            raise UserError(f"--reward {shown(one.name)}: is given twice")
        seen.add(one.name)
    return found


def parse_reward(text: str) -> WeightedName:
    name, equals, last = text.rpartition("=")
    weight = 1.0
    if equals and NUMBER.fullmatch(last.strip()):
        weight = float(last)
        if not math.isfinite(weight):
            raise UserError(f"--reward {shown(text)}: the weight must be a finite number")
    else:
        name = text
    kind, colon, argument = name.partition(":")
    kind = kind.strip()
    if kind in PLAIN and not colon:
        return WeightedName(kind, kind, "", weight)
    if kind in WITH_ARGUMENT and colon:
        fault = argument_fault(kind, argument)
        if fault:
            raise UserError(f"--reward {shown(text)}: {fault}")
        return WeightedName(f"{kind}:{argument}", kind, argument, weight)
    function = f"{kind}:{argument.strip()}"
    if kind not in PLAIN and colon and is_function(function):
        return WeightedName(function, FUNCTION, function, weight)
    raise UserError(f"--reward {shown(text)}: {name_fault(kind)}")


def is_function(name: str) -> bool:
    """Return whether a name has the form `package.module:function`."""
    module, _, function = name.partition(":")
    return function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def argument_fault(kind: str, argument: str) -> str:
    """The fault of a reward's argument; empty if there is none."""
    example = WITH_ARGUMENT[kind]
    if not argument:
        return f"needs something after the colon, e.g. {example}"
    if kind == "length":
        low, high = LENGTHS
        number = argument.strip()
        if not (number.isascii() and number.isdigit() and len(number) < 10):
            return f"needs a number of tokens, e.g. {example}"
        if not low <= int(number) <= high:
            return f"needs a number of tokens from {low} to {high:,}"
    if kind == "regex":
        try:
            re.compile(argument)
        except (re.error, RecursionError, OverflowError) as error:
            return f"is not a valid pattern ({error})"
    return ""


def name_fault(kind: str) -> str:
    if kind in WITH_ARGUMENT:
        return f"needs an argument, e.g. {WITH_ARGUMENT[kind]}"
    if kind in PLAIN:
        return f"{kind} takes no argument"
    known = (*PLAIN, *WITH_ARGUMENT)
    if not kind:
        return f"has no name; expected one of: {', '.join(known)}, module:function"
    hint = nearest(kind, known) or f"; expected one of: {', '.join(known)}, module:function"
    return f"no such reward{hint}"


def needs_expected(names: Iterable[WeightedName]) -> list[str]:
    """The names of those rewards that need the expected answer of each row."""
    return [each.name for each in names if each.kind in NEEDS_EXPECTED]
