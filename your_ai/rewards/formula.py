"""Formulas of a rubric: arithmetic over the grades of a judge. Parsed, never run as Python code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from your_ai.gates.text import nearest, shown
from your_ai.gates.untrusted import is_number

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
