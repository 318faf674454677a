"""What data seems to be for: the form of its rows, how many there are, and what they can train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from your_ai.config import TrainConfig
from your_ai.config.settings import ObjectiveName
from your_ai.data.columns import layout_of
from your_ai.data.lines import RowLimit
from your_ai.data.preferences import parser_of
from your_ai.data.rows import Chat, Labeled, Preference, Question, Row, Scored, Text, read_rows
from your_ai.data.sources import Progress, find_splits, is_dataset, records_in, sources_of
from your_ai.data.survey import survey
from your_ai.errors import UserError

if TYPE_CHECKING:
    from your_ai.config import TrainConfig
    from your_ai.data.rows import Row

# The first whose rows the data has is what it seems to be for.
BY_ROWS: tuple[ObjectiveName, ...] = ("sft", "dpo", "kto", "reward", "grpo")


@dataclass(frozen=True)
class DataLook:
    """The findings in data."""

    objective: str
    """The value of --objective that trains such rows."""
    form: str
    """The form of the training rows in words, such as `chat`; several are joined by commas."""
    rows: int
    """Training rows, without those that are held out."""
    problems: int
    """Rows that training refuses."""
    problem: str
    """Why it refuses the first of them; empty if none."""
    expected: bool
    """Whether the first row has an answer that a completion can be compared with."""
    notes: tuple[str, ...]


def look(
    data: str,
    objective: ObjectiveName | None = None,
    progress: Progress = lambda *_: None,
    columns: Sequence[str] = (),
) -> DataLook:
    """Read all rows of --data once. columns: the value of --columns.

    objective: what the rows are for; None: what their columns say.
    Raises UserError for data that cannot be read, or that the objective cannot train.
    """
    objective = objective_of(data, columns) if objective is None else objective
    config = TrainConfig(data=data, objective=objective, columns=tuple(columns))
    found = survey(find_splits(config, progress=progress), config, None, 0)
    train = found.splits["train"]
    return DataLook(
        objective=objective,
        form=", ".join(train.kinds),
        rows=train.rows,
        problems=train.empty + train.refused,
        problem=train.problem,
        expected=has_expected(data, columns),
        notes=found.notes,
    )


def objective_of(data: str, columns: Sequence[str] = ()) -> ObjectiveName:
    """The objective that trains the first row of --data. Raises UserError if none does."""
    where, record = first_record(data)
    fault = None
    for objective in BY_ROWS:
        try:
            parsed_for(objective, record, where, columns)
        except UserError as error:
            fault = fault or error  # that of sft says what is expected
        else:
            return objective
    raise fault or UserError(f"{where}: unknown row format")


def has_expected(data: str, columns: Sequence[str] = ()) -> bool:
    """Return whether the first row has an expected answer for rewards."""
    where, record = first_record(data)
    try:
        content = parsed_for("grpo", record, where, columns).content
    except UserError:
        return False
    return isinstance(content, Question) and content.expected is not None


def parsed_for(
    objective: ObjectiveName, record: dict[str, Any], where: str, columns: Sequence[str] = ()
) -> Row:
    """A record as a row that the objective trains. Raises UserError if it is none."""
    kind = TrainConfig(objective=objective).row_kind
    layout = layout_of(columns, "", kind)
    return parser_of(kind)(layout.row_of(record, where), where)


def first_record(data: str) -> tuple[str, dict[str, Any]]:
    """The place and content of the first training record. Raises UserError if there is none."""
    for found in first_records(data, 1):
        return found
    raise UserError(f"--data {data}: has no rows")


def first_records(data: str, most: int) -> list[tuple[str, dict[str, Any]]]:
    """The places and contents of at most `most` training records. Raises UserError."""
    limit, found = RowLimit(), list[tuple[str, dict[str, Any]]]()
    for source in sources_of(data):
        records = records_in(replace(source, rows=None), "train", limit, lambda *_: None)
        found += [(where, record) for _, where, record in islice(records, most - len(found))]
    return found


# What the training rows of a run have in common


@dataclass(frozen=True)
class CommonForm:
    """Properties that all rows of a run share, which its prompts then should have, too."""

    system: str = ""
    """The system prompt; "" if they differ or are not known."""
    is_text: bool = False
    """Whether they are plain texts, which no chat template renders."""
    tools: list[Any] | None = None
    """The tools of a chat; None if they differ or are not known."""
    is_known: bool = True
    """Whether the rows could be read again."""


def common_form(config: TrainConfig) -> CommonForm:
    """Properties that the training rows of a run share; nothing if they are not known.

    Reads the rows where the run found them, until they have nothing in common. Data of the hub is
    not fetched again.
    """
    if not config.data:  # a run that was imported
        return CommonForm()
    if any(is_dataset(name.strip()) for name in config.data.split(",")):
        return CommonForm(is_known=False)
    systems, texts, tools = set[str](), set[bool](), set[str]()
    try:
        path = find_splits(config).files["train"]
        rows = read_rows(path, RowLimit(config.max_row_bytes), parser_of(config.row_kind))
        for row in rows:
            systems.add(system_prompt_of(row))
            texts.add(isinstance(row.content, Text))
            tools.add(json.dumps(chat.tools if (chat := chat_of(row)) else None))
            if differ(systems, "") and differ(tools, "null") and False in texts:
                break
    except (UserError, OSError):
        return CommonForm(is_known=False)
    return CommonForm(
        system="" if differ(systems, "") else systems.pop(),
        is_text=texts == {True},
        tools=None if differ(tools, "null") else json.loads(tools.pop()),
    )


def differ(found: set[str], nothing: str) -> bool:
    """Return whether rows with these values have no value in common but `nothing`."""
    return len(found) != 1 or found == {nothing}


def chat_of(row: Row) -> Chat | None:
    """The chat of a row, of a pair the chosen one; None if it has none."""
    content = row.content
    if isinstance(content, Preference):
        content = content.chosen
    elif isinstance(content, Labeled | Scored):
        content = content.answer
    elif isinstance(content, Question) and isinstance(content.prompt, Chat):
        content = content.prompt
    return content if isinstance(content, Chat) else None


def system_prompt_of(row: Row) -> str:
    """The system prompt with which a row begins; "" if it has none."""
    chat = chat_of(row)
    if chat is None or not chat.messages:
        return ""
    first = chat.messages[0]
    text = first.get("content")
    return text if first.get("role") == "system" and isinstance(text, str) else ""
