"""Ask which columns of a table are the question and the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from your_ai.config import SFT, TrainConfig, coerce
from your_ai.data.column_hints import MEANINGS, UnknownColumns, likely_columns, names_pair, roles_of
from your_ai.errors import UserError
from your_ai.gates.console import ask, echo, echo_error
from your_ai.gates.text import nearest, shortened, shown

RECORDS = 3  # shown before the questions
ABOUT_OBJECTIVE = "What for (sft, dpo, kto, reward, grpo ...)"


def show_records(data: str) -> None:
    """Show the first records of --data as they are, since it is unknown what they mean."""
    from your_ai.data.look import first_records

    for where, record in first_records(data, RECORDS):
        echo(where)
        for name, value in record.items():
            echo(f"  {shortened(name, 30)}: {shown(value, 100)}")
        echo()


def ask_columns(
    data: str, unknown: UnknownColumns, objective: str | None
) -> tuple[str, tuple[str, ...]]:
    """Show rows, and ask what the columns are until each answer is one. Return the objective, and
    the value of --columns.

    objective: None asks for it, too.
    """
    echo(f"  data: the names of the columns do not tell what they are: {', '.join(unknown.record)}")
    show_records(data)
    record = unknown.record
    while objective is None:
        text = ask(ABOUT_OBJECTIVE, "dpo" if names_pair(record) else SFT)
        try:
            objective = coerce("objective", text.strip(), "--objective")
        except UserError as error:
            echo_error(f"error: {error}")
    kind = TrainConfig(objective=objective).row_kind  # type: ignore[arg-type]
    likely = likely_columns(kind, record)
    found: dict[str, str] = {}
    for role in roles_of(kind, record):
        left = [name for name in record if name not in found.values()]
        if not left:
            raise UserError(f"--data {shortened(data)}: has no column left for {MEANINGS[role]}")
        guess = likely.get(role)
        default = guess if guess in left else left[0]
        found[role] = ask_column(f"Which column is {MEANINGS[role]}", default, record, found)
    return objective, tuple(f"{role}={column}" for role, column in found.items())


def ask_column(
    question: str, default: str, record: Mapping[str, Any], taken: Mapping[str, str]
) -> str:
    """Ask until the answer is a column that has no role yet."""
    while True:
        name = ask(question, default).strip()
        column = next((c for c in record if name in (c, c.strip())), None)
        if column is None:
            hint = nearest(name, record) or f"; columns: {', '.join(record)}"
            echo_error(f"error: no column {shortened(name)}{hint}")
        elif column in taken.values():
            role = next(role for role, other in taken.items() if other == column)
            echo_error(f"error: {shortened(column)} is already {MEANINGS[role]}")
        else:
            return column
