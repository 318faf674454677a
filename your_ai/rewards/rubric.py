"""Rubrics: what a judge grades, and how its grades become a reward."""

from __future__ import annotations

import ast
import keyword
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import counted, nearest, shown
from your_ai.gates.untrusted import is_number
from your_ai.gates.yaml_files import read_yaml

# Formulas of a rubric: arithmetic over the grades of a judge. Parsed, never run as Python code


FORMULA_CHARACTERS, FORMULA_NODES = 2000, 300
Number = float | complex
OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
CALLS: dict[str, Callable[[list[float]], float]] = {"min": min, "max": max}
ALLOWED = "numbers, names of criteria, + - * / **, parentheses, min and max"


@dataclass(frozen=True)
class Formula:
    """A formula whose every part is allowed."""

    text: str
    root: ast.expr

    def value(self, grades: Mapping[str, float]) -> float | None:
        """The value, in float64; None if it is not a finite number, as after a division by 0."""
        try:
            found = evaluate(self.root, grades)
        except ArithmeticError:
            return None
        return found if isinstance(found, float) and math.isfinite(found) else None


def parse_formula(text: str, names: Collection[str]) -> Formula:
    """Parse a formula over the criteria `names`. Raises ValueError with what is wrong."""
    if len(text) > FORMULA_CHARACTERS:
        raise ValueError(f"is longer than {FORMULA_CHARACTERS:,} characters")
    try:
        root = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise ValueError(f"is not a formula ({shown(reason)})") from error
    if sum(1 for _ in ast.walk(root)) > FORMULA_NODES:
        raise ValueError("is too long")
    check_part(root, names)
    return Formula(text.strip(), root)


def check_part(node: ast.expr, names: Collection[str]) -> None:
    """Raise ValueError if a part of a formula is not one of those that `evaluate` knows."""
    if isinstance(node, ast.Constant) and is_number(node.value):
        try:
            is_finite = math.isfinite(float(node.value))
        except OverflowError:
            is_finite = False
        if not is_finite:
            raise ValueError("has a number that is too large")
    elif isinstance(node, ast.Name):
        if node.id not in names:
            hint = nearest(node.id, names) or f"; the criteria are: {', '.join(names)}"
            raise ValueError(f"has the unknown name {shown(node.id)}{hint}")
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        check_part(node.left, names)
        check_part(node.right, names)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        check_part(node.operand, names)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
        if not node.args or node.keywords:
            raise ValueError(f"has {node.func.id} without values, e.g. {node.func.id}(a, 5)")
        for value in node.args:
            check_part(value, names)
    else:
        part = shown(ast.unparse(node), 60)
        raise ValueError(f"has {part}, which is not allowed; allowed are {ALLOWED}")


def evaluate(node: ast.expr, grades: Mapping[str, float]) -> Number:
    """The value of a part, in float64; complex for a root of a negative number.

    Raises ArithmeticError.
    """
    if isinstance(node, ast.Constant) and is_number(node.value):
        return float(node.value)
    if isinstance(node, ast.Name):
        return float(grades[node.id])
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](evaluate(node.left, grades), evaluate(node.right, grades))
    if isinstance(node, ast.UnaryOp):
        return SIGNS[type(node.op)](evaluate(node.operand, grades))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    values = [evaluate(value, grades) for value in node.args]
    real = [value for value in values if not isinstance(value, complex)]
    if len(real) < len(values):
        raise ArithmeticError("complex numbers have no order")
    return CALLS[node.func.id](real)


DEFAULT_RUBRIC = Path(__file__).parent / "default_rubric.yaml"
MAX_CRITERIA = 50
TEXT_CHARACTERS = 20_000  # maximum length of the instructions and of a description
DEFAULT_SCALE = (0.0, 10.0)
KEYS = ("criteria", "instructions", "formula", "range", "prices")
CRITERION_KEYS = ("name", "description", "scale")
PRICE_KEYS = ("input", "output")


@dataclass(frozen=True)
class Criterion:
    """One grade that the judge gives."""

    name: str
    """A Python identifier, so that formulas can use it."""
    description: str
    low: float
    """The least grade."""
    high: float
    """The best grade."""


@dataclass(frozen=True)
class Prices:
    """US dollars per million tokens."""

    input: float
    output: float


@dataclass(frozen=True)
class Rubric:
    """A rubric file."""

    criteria: tuple[Criterion, ...]
    instructions: str
    """Empty if there are none."""
    formula: Formula | None
    """None: the mean of the grades, each scaled to 0 to 1."""
    limits: tuple[float, float] | None
    """The total is clipped to these, if they are given."""
    prices: Prices | None

    def total(self, grades: Mapping[str, float]) -> float | None:
        """The reward of an answer with these grades; None if the formula has no finite value."""
        if self.formula is None:
            scaled = [(grades[c.name] - c.low) / (c.high - c.low) for c in self.criteria]
            found: float | None = math.fsum(scaled) / len(scaled)
        else:
            found = self.formula.value(grades)
        if found is None or self.limits is None:
            return found
        low, high = self.limits
        return min(max(found, low), high)


def read_rubric(path: Path) -> Rubric:
    """Read a rubric file. Raises UserError, naming the file and the key, if it is wrong."""
    content = read_yaml(path)
    refuse_unknown(content, KEYS, str(path))
    listed = content.get("criteria")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_CRITERIA:
        raise UserError(
            f"{path}: criteria must be a list of 1 to {MAX_CRITERIA} criteria, each with name, "
            "description and scale"
        )
    criteria = tuple(criterion_of(one, f"{path}: criteria {i}") for i, one in enumerate(listed, 1))
    names = [criterion.name for criterion in criteria]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{path}: two criteria have the name {name}")
    prices = content.get("prices")
    rubric = Rubric(
        criteria=criteria,
        instructions=text_of(content.get("instructions", ""), f"{path}: instructions"),
        formula=formula_of(content.get("formula"), names, path),
        limits=pair_of(content["range"], f"{path}: range") if "range" in content else None,
        prices=None if prices is None else prices_of(prices, f"{path}: prices"),
    )
    middle = {c.name: (c.low + c.high) / 2 for c in criteria}
    samples = ({c.name: c.low for c in criteria}, middle, {c.name: c.high for c in criteria})
    if all(rubric.total(grades) is None for grades in samples):
        raise UserError(
            f"{path}: formula has no finite value for the lowest, middle or highest grades"
        )
    return rubric


def criterion_of(value: Any, where: str) -> Criterion:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected name, description and scale, found {shown(value)}")
    refuse_unknown(value, CRITERION_KEYS, where)
    name = value.get("name")
    if not isinstance(name, str) or not name.isidentifier() or not name.isascii():
        raise UserError(
            f"{where}: name must be a word of letters, digits and _, found {shown(name)}"
        )
    if keyword.iskeyword(name) or name in CALLS:
        raise UserError(f"{where}: the name {name} has a meaning in formulas; choose another")
    scale = pair_of(value["scale"], f"{where}: scale") if "scale" in value else DEFAULT_SCALE
    description = text_of(value.get("description", ""), f"{where}: description")
    return Criterion(name, description, *scale)


def formula_of(value: Any, names: list[str], path: Path) -> Formula | None:
    if value is None:
        return None
    try:
        return parse_formula(str(value) if isinstance(value, int | float) else value, names)
    except (AttributeError, TypeError) as error:
        raise UserError(f"{path}: formula must be a text, found {shown(value)}") from error
    except ValueError as error:
        raise UserError(f"{path}: formula {error}") from error


def prices_of(value: Any, where: str) -> Prices:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected input and output, in US dollars per million tokens")
    refuse_unknown(value, PRICE_KEYS, where)
    found = [value.get(name, 0) for name in PRICE_KEYS]
    if not all(is_finite(price) and price >= 0 for price in found):
        raise UserError(f"{where}: expected US dollars per million tokens, 0 or more")
    return Prices(*map(float, found))


def pair_of(value: Any, where: str) -> tuple[float, float]:
    """Two finite numbers, the first less than the second."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(map(is_finite, value))
    if not is_pair or not value[0] < value[1]:
        raise UserError(f"{where}: expected two numbers, the lower first, e.g. [0, 10]")
    return float(value[0]), float(value[1])


def text_of(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: must be a text, found {shown(value)}")
    if len(value) > TEXT_CHARACTERS:
        raise UserError(f"{where}: has more than {counted(TEXT_CHARACTERS, 'character')}")
    return value.strip()


def refuse_unknown(found: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    for name in found:
        if name not in known:
            hint = nearest(str(name), known) or f"; expected one of: {', '.join(known)}"
            raise UserError(f"{where}: unknown key {shown(name)}{hint}")


def is_finite(value: Any) -> bool:
    """Return whether a value of YAML or JSON is a finite number."""
    if not is_number(value):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False
