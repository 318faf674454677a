"""Data as the studio shows it: read in the worker, row by row, also past rows with problems."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

from your_ai.config import DEMO, DEMO_DATA, TYPES, TrainConfig, coerce, joined_parts, words_of
from your_ai.data.column_hints import (
    ROLES_OF,
    UnknownColumns,
    likely_columns,
    names_pair,
    opened,
    roles_of,
)
from your_ai.data.columns import layout_of
from your_ai.data.encode import Encoder
from your_ai.data.folders import SPLITS
from your_ai.data.lines import Fields, RowLimit
from your_ai.data.look import BY_ROWS, parsed_for
from your_ai.data.notes import Notes, not_used
from your_ai.data.preferences import parser_of
from your_ai.data.records import form_of, records_and_faults
from your_ai.data.rows import Row
from your_ai.data.sources import (
    Source,
    Splits,
    are_documents,
    asked_in,
    decided_by_rows,
    files_in,
    sources_of,
)
from your_ai.data.survey import BAD, QUANTILES, REJECTED, SplitSurvey, count, draw_row
from your_ai.errors import UserError
from your_ai.files import atomic_folder
from your_ai.gates.text import shortened, shown, size_text
from your_ai.hub.find import find_model
from your_ai.hub.local import local_models
from your_ai.nets.tokenizer import open_tokenizer

PROBLEMS, FIRST_ROWS, COLUMNS, NAMES, FILES = 100, 5, 40, 500, 20  # that are shown
KB = 1000  # the least size that is shown of a file
VALUES, VALUE_CHARACTERS, REASON_CHARACTERS = 3, 80, 500
HEADS = 20  # first records, which say what the data is for
ENCODED = 20_000  # rows whose tokens are counted
LOOK_S = 10.0  # after so long, the rest of the rows is left to the training, which reads all
LOOKS = 8  # that are kept, so that a page is shown again at once
OTHER_ROLES = {
    "answers": ("text", "messages", "system", "weight"),
    "pairs": ("system", "weight"),
    "labels": ("chosen", "rejected", "system", "weight"),
    "rated": ("chosen", "rejected", "margin", "messages", "system"),
    "prompts": ("completion", "messages", "system"),
    "tasks": ("completion", "messages", "system"),
}


@dataclass(frozen=True)
class Examined:
    """A record of the data, and whether it can be trained."""

    split: str
    number: int
    """Among the records of its split, from 0."""
    where: str
    record: dict[str, Any] | None
    """None if it cannot be read."""
    row: Row | None
    fault: str

    @property
    def name(self) -> str:
        return f"{self.split}:{self.number}"


def examined(sources: Sequence[Source], config: TrainConfig) -> Iterator[Examined]:
    """Yield all records, also those with faults. Raises UserError if none can be read."""
    layout = layout_of(config.columns, "", config.row_kind)
    limit, parse = RowLimit(config.max_row_bytes), parser_of(config.row_kind)
    for split in SPLITS:
        found = records(sources, split, limit)
        if layout.asks_texts:
            found = cast("Iterator[tuple[Path, str, Any]]", asked_in(found))
        number = -1
        try:
            for number, (_, where, record) in enumerate(found):
                if isinstance(record, UserError):
                    yield Examined(split, number, where, None, None, str(record))
                    continue
                try:
                    row, fault = parse(Fields(layout.row_of(record, where)), where), ""
                except UserError as error:
                    row, fault = None, str(error)
                yield Examined(split, number, where, record, row, fault)
        except UserError as error:  # the reader cannot go on
            if number < 0:
                raise
            fault = f"{error}; nothing after it in this file can be read"
            yield Examined(split, number + 1, "", None, None, fault)


def records(
    sources: Sequence[Source], split: str, limit: RowLimit
) -> Iterator[tuple[Path, str, Any]]:
    for source in sources:
        for path in source.splits.get(split, ()):
            for where, record in records_and_faults(path, limit):
                yield path, where, record


def plain_sources(data: str) -> list[Source]:
    """The files that data names. Raises UserError for what the page cannot show."""
    sources = sources_of(data)
    if any(source.rows is not None or source.share != 1 for source in sources):
        raise UserError(f"{shortened(data)}: has shares or parts of a dataset; plan a run with it")
    return sources


def state_of(sources: Sequence[Source]) -> str:
    """A text that changes when one of the files does."""
    found = ((path, path.stat()) for path in files_in(sources))
    return repr(hash(tuple((str(p), s.st_size, s.st_mtime_ns, s.st_ino) for p, s in found)))


def chosen(
    sources: Sequence[Source], columns: tuple[str, ...], objective: str
) -> tuple[str, tuple[str, ...], bool]:
    """The objective that trains such rows, their columns, and whether a user must name these.

    What is given stays as it is.
    """
    heads, unknown = list[tuple[str, dict[str, Any]]](), False
    every = records(sources, "train", RowLimit())
    with contextlib.suppress(UserError):
        for _, where, record in islice(every, HEADS):
            heads += [] if isinstance(record, UserError) else [(where, record)]
    for each in (objective,) if objective else BY_ROWS:
        for where, record in heads:
            try:
                parsed_for(cast("Any", each), record, where, columns)
            except UserError as error:
                unknown = unknown or isinstance(error, UnknownColumns)
            else:
                return each, columns, False
    first = heads[0][1] if heads else {}
    each = objective or ("dpo" if names_pair(first) else "sft")
    kind = TrainConfig(objective=cast("Any", each)).row_kind
    if unknown and not columns:
        likely = likely_columns(kind, opened(first))
        if set(likely) == set(roles_of(kind, opened(first))):
            return each, tuple(f"{role}={column}" for role, column in likely.items()), False
    return each, columns, unknown


def look(data: str, columns: str, objective: str, model: str) -> dict[str, Any]:
    """Show data as the page does. columns, objective, model: "" for what suits the data.

    Raises UserError if nothing of it can be read.
    """
    return looked(data, columns, objective, model, state_of(plain_sources(data)))[0]


class ExaminedRows:
    """The findings in the records of data, one after the other, for at most LOOK_S."""

    def __init__(self, config: TrainConfig, encoder: Encoder) -> None:
        self.config, self.encoder = config, encoder
        self.until = time.monotonic() + LOOK_S
        self.unseen = ""
        """The place from which on no record was examined; empty if all were."""
        self.heads = list[dict[str, Any]]()
        self.splits, self.tokens = dict[str, SplitSurvey](), SplitSurvey()
        self.seen: dict[str, set[bytes]] = {split: set() for split in SPLITS}
        self.problems, self.drawn = list[dict[str, Any]](), list[dict[str, Any]]()
        self.refused: list[str] = []
        """The names of all rows with problems, in their order."""

    def add(self, each: Examined) -> bool:
        """Examine a record; return whether there was time for it."""
        if time.monotonic() > self.until:
            self.unseen = each.where
            return False
        if each.record is not None and len(self.heads) < VALUES:
            self.heads.append(opened(each.record))
        fault = self.fault_of_row(each) or each.fault
        if fault:
            self.refused.append(each.name)
            if len(self.problems) < PROBLEMS:
                reason = shortened(fault.removeprefix(f"{each.where}: "), REASON_CHARACTERS)
                problem = {"name": each.name, "where": each.where, "reason": reason}
                self.problems.append({**problem, "is_lost": each.record is None})
        return True

    def fault_of_row(self, each: Examined) -> str:
        """Count a row that can be read, and show it if it is one of the first."""
        split = self.splits.setdefault(each.split, SplitSurvey())
        if each.row is None:
            return ""
        config, seen = self.config, self.seen
        for column in each.row.unused:
            self.encoder.notes.add(not_used(column), each.where)
        fault = fault_of(split, each.row, None, config, seen[each.split], seen["train"])
        if each.split != "train":
            return fault
        if not fault and each.number < ENCODED:
            fault = fault_of(self.tokens, each.row, self.encoder, config, set(), set())
        if len({row["name"] for row in self.drawn}) < FIRST_ROWS:
            self.drawn += drawn_rows(each, replace(self.encoder, notes=Notes()), config)
        return fault


@lru_cache(LOOKS)
def looked(
    data: str, columns: str, objective: str, model: str, state: str
) -> tuple[dict[str, Any], list[str]]:
    """Return what `look` returns, and the names of all rows with problems, in their order."""
    sources = plain_sources(data)
    given = coerce("columns", columns, "--columns") if columns else ()
    objective, roles, is_unknown = chosen(sources, tuple(given), objective)
    files, is_document = files_in(sources), are_documents(sources)
    config = TrainConfig(data=data, objective=cast("Any", objective), columns=roles)
    config = decided_by_rows(config, Splits({}, are_passages=is_document))
    here = [*(m.alias or m.name for m in local_models() if m.fault is None), DEMO]
    model, folder = model_for(model, data, here)
    noticed = Notes()
    encoder = Encoder(
        open_tokenizer(folder), config.mask_prompt, kind=config.row_kind, notes=noticed
    )
    rows = ExaminedRows(config, encoder)
    for each in examined(sources, config):
        if not rows.add(each):
            break
    heads, splits = rows.heads, rows.splits
    names = list(dict.fromkeys(name for head in heads for name in head))
    notes = [note for source in sources for note in source.notes]
    if roles and not given:
        notes.append(f"columns, as their names and contents suggest: {', '.join(roles)}")
    found = {
        "objective": objective,
        "objectives": list(words_of(TYPES["objective"])),
        "columns": joined_parts(roles),
        "roles": roles_shown(config.row_kind, roles),
        "names": names[:NAMES],
        "values": [
            [name, [shown(values_of(head.get(name, "")), VALUE_CHARACTERS) for head in heads]]
            for name in names[:COLUMNS]
        ],
        "more_columns": len(names[COLUMNS:]),
        "splits": {name: split_shown(split) for name, split in splits.items()},
        "tokens": {**split_shown(rows.tokens), "too_long": rows.tokens.too_long},
        "model": model,
        "models": list(dict.fromkeys([model, *here])),
        "max_seq_length": config.max_seq_length,
        "notes": [*notes, *noticed.lines()],
        "drawn": rows.drawn,
        "unseen": rows.unseen,
        "is_unknown": is_unknown,
        "problems": rows.problems,
        "refused": len(rows.refused),
        "files": [
            {
                "name": path.name,
                "size": size_text(max(KB, path.stat().st_size)),
                "form": form_of(path),
            }
            for path in files[:FILES]
        ],
        "more_files": len(files[FILES:]),
        "is_document": is_document,
        "state": state,
    }
    return found, rows.refused


def fault_of(
    split: SplitSurvey,
    row: Row,
    encoder: Encoder | None,
    config: TrainConfig,
    seen: set[bytes],
    trained: set[bytes],
) -> str:
    """Count a row; why training refuses it, or ""."""
    split.problem = ""
    count(split, row, encoder, config, seen, trained)
    return split.problem


def model_for(name: str, data: str, here: Sequence[str]) -> tuple[str, Path]:
    """The model whose tokens are counted: the one that is named, or one that is here."""
    if name:
        return name, find_model(name)
    for each in (DEMO if data in DEMO_DATA else TrainConfig().model, *here):
        with contextlib.suppress(UserError):
            return each, find_model(each)
    raise AssertionError  # the demo model is always here


def drawn_rows(each: Examined, encoder: Encoder, config: TrainConfig) -> list[dict[str, Any]]:
    assert each.row is not None
    return [
        {
            "name": each.name,
            "where": drawn.where,
            "answer": drawn.answer,
            "is_rejected": drawn.answer in (REJECTED, BAD),
            "problem": shortened(drawn.problem, REASON_CHARACTERS),
            "parts": drawn.parts,
        }
        for drawn in draw_row(each.row, encoder, config)
    ]


def roles_shown(kind: str, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The roles that columns may have, with the column that has each."""
    named = dict(part.split("=", 1) for part in columns)
    roles = dict.fromkeys((*ROLES_OF[kind], *OTHER_ROLES[kind], *named))
    return [
        {"role": role, "column": named.get(role, ""), "is_usual": role in (*ROLES_OF[kind], *named)}
        for role in roles
    ]


def values_of(value: Any) -> Any:
    return json.dumps(value, default=str) if isinstance(value, list | dict) else value


def split_shown(split: SplitSurvey) -> dict[str, Any]:
    return {
        "rows": split.rows,
        "kinds": ", ".join(f"{count:,} {kind}" for kind, count in split.kinds.items()),
        "duplicates": split.duplicates,
        "in_training": split.in_training,
        "lengths": dict(zip(QUANTILES, split.quantiles(), strict=False)),
    }


def leave_out(
    data: str,
    columns: str,
    objective: str,
    model: str,
    state: str,
    rows: str,
    others: bool,
    into: str,
) -> int:
    """Write the data without some rows as JSON lines: a file for each split, in a new folder.

    rows: their names, separated by commas. others: also all with problems that are not listed.
    Rows that cannot be read are left out, too. into: the folder. Returns how many rows were left
    out. Raises UserError, also if the files have changed since `state`.
    """
    sources = plain_sources(data)
    if state != state_of(sources):
        raise UserError(f"{shortened(data)}: has changed since it was shown; look at it again")
    found, refused = looked(data, columns, objective, model, state)
    roles = tuple(found["columns"].split(",")) if found["columns"] else ()
    config = TrainConfig(data=data, objective=found["objective"], columns=roles)
    left = set(rows.split(",")) | set(refused[PROBLEMS:] if others else ())
    count = 0
    with atomic_folder(Path(into)) as folder, contextlib.ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for each in examined(sources, config):
            if each.record is None or each.name in left:
                count += 1
                continue
            if each.split not in files:
                path = folder / f"{each.split}.jsonl"
                files[each.split] = stack.enter_context(path.open("wb"))
            text = json.dumps(each.record, ensure_ascii=False, default=str)
            # Half of a character stays as JSON escapes it.
            files[each.split].write(text.encode(errors="backslashreplace") + b"\n")
        if not count:
            raise UserError("choose the rows that are to be left out")
        if "train" not in files:
            raise UserError("no row would be left to train")
    return count
