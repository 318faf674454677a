"""Spreadsheets (XLSX) -> rows of text, as a CSV file of the same table has them.

They are read in a process of its own: `python -m your_ai.data.workbooks`.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from your_ai.errors import UserError
from your_ai.gates.archives import Archive, open_archive
from your_ai.gates.isolated import answer
from your_ai.gates.text import shown

TEXTS_BYTES = 500_000_000  # of all different texts together, which are in memory
COLUMNS = 16_384  # of a sheet, by its format
DATE_FORMATS = frozenset((*range(14, 23), *range(27, 37), *range(45, 48), *range(50, 59)))
NO_DATE = re.compile(r'"[^"]*"|\\.|_.|\[(?!h+\]|m+\]|s+\])[^\]]*\]', re.I)  # parts of a format
FIRST_DAY, FIRST_DAY_OF_MACS = datetime.datetime(1899, 12, 30), datetime.datetime(1904, 1, 1)
MS_PER_DAY = 86_400_000
CELL = re.compile(r"([A-Z]{1,3})\d{1,7}")
WRONG = "is damaged"

Cells = dict[int, str]  # by the number of their column, from 0; without empty ones


def sheet_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield (number, cells) of the rows of the first sheet that has some; first of its header.

    Hidden sheets and empty rows do not count. Raises UserError with file, sheet and row.
    """
    with open_archive(path) as archive:
        main = next((n for kind, n in archive.relations().values() if kind == "officeDocument"), "")
        related = archive.relations(main)
        parts = dict(related.values())
        sheets, first_day = list[tuple[str, str]](), FIRST_DAY
        for event, tag, given in archive.xml(main):
            if event == "start" and tag == "sheet" and given.get("state", "visible") == "visible":
                kind, name = related.get(given.get("id", ""), ("", ""))
                if kind == "worksheet":
                    sheets.append((given.get("name", ""), name))
            elif (
                event == "start" and tag == "workbookPr" and given.get("date1904") in ("1", "true")
            ):
                first_day = FIRST_DAY_OF_MACS
        texts = shared_texts(archive, parts.get("sharedStrings", ""))
        dates = date_styles(archive, parts.get("styles", ""))
        for title, name in sheets:
            where = f"{path}: sheet {shown(title)}"
            rows = table(cells_of(archive, name, where, texts, dates, first_day), where)
            header = next(rows, None)
            first = next(rows, None)
            if header and first:
                yield from (header, first)
                yield from rows
                return


def table(rows: Iterator[tuple[int, Cells]], where: str) -> Iterator[tuple[int, list[str]]]:
    """Yield rows as wide as their header, the first that is not empty. Raises UserError."""
    names: Cells = {}
    for number, cells in rows:
        names = names or cells
        for column in cells.keys() - names.keys():
            raise UserError(
                f"{where}: row {number} has a cell in column {letters(column)}, which has no name "
                "in the first row"
            )
        if cells:
            yield number, [cells.get(column, "") for column in names]


def cells_of(
    archive: Archive,
    name: str,
    where: str,
    texts: list[str],
    dates: set[int],
    first_day: datetime.datetime,
) -> Iterator[tuple[int, Cells]]:
    """Yield (number, cells) of the rows of a sheet.

    texts: those that cells name by number. dates: the styles of cells that are dates, from
    `first_day`.
    """
    number, column, cells, cell, is_phonetic = 0, -1, Cells(), SheetCell(), False

    def at() -> str:
        return f"{where}: cell {letters(column)}{number}"

    for event, tag, given in archive.xml(name):
        is_start = event == "start"
        if event == "text":
            cell.parts += [tag] * (cell.is_value and not is_phonetic)
        elif tag == "rPh":
            is_phonetic = is_start
        elif tag in ("v", "t"):
            cell.is_value, cell.has_value = is_start, True
        elif tag == "f":
            cell.has_formula = True
        elif is_start and tag == "row":
            number, column, cells = whole(given.get("r"), number + 1, where), -1, {}
        elif is_start and tag == "c":
            column = column_of(given.get("r"), column + 1, where)
            cell = SheetCell(given.get("t", "n"), whole(given.get("s"), 0, where))
        elif tag == "c":
            if cell.is_unknown:
                raise UserError(
                    f"{at()}: has a formula without its value; open and save it in a spreadsheet "
                    "program"
                )
            day = first_day if cell.style in dates else None
            raw = value_of("".join(cell.parts), cell.kind, texts, day, at)
            if raw.strip():
                cells[column] = raw
        elif event == "end" and tag == "row":
            yield number, dict(sorted(cells.items()))


@dataclass
class SheetCell:
    """A cell that is being read."""

    kind: str = "n"
    """Its type in the file."""
    style: int = 0
    parts: list[str] = field(default_factory=list)
    """The text of its value."""
    is_value: bool = False
    """Whether its value is being read."""
    has_value: bool = False
    has_formula: bool = False

    @property
    def is_unknown(self) -> bool:
        """Say whether it has a formula whose value is not in the file: openpyxl writes an empty
        value, and Excel one of the type str for a formula that is "".
        """
        is_empty = not "".join(self.parts).strip()
        return self.has_formula and not (self.has_value and (self.kind == "str" or not is_empty))


def value_of(
    raw: str,
    kind: str,
    texts: list[str],
    first_day: datetime.datetime | None,
    at: Callable[[], str],
) -> str:
    """The value of a cell as a CSV file has it.

    kind: its type. first_day: as in `number_text`. at: names the cell. Raises UserError.
    """
    if kind == "s" and raw:
        index = whole(raw, 0, at())
        if index >= len(texts):
            raise UserError(f"{at()}: {WRONG} (no text {index})")
        return texts[index]
    if kind == "b":
        return "TRUE" if raw.strip() == "1" else "FALSE"
    if kind == "d":
        return raw.replace("T", " ").removesuffix(" 00:00:00")
    if kind == "n" and raw.strip():
        try:
            return number_text(raw, first_day)
        except (ValueError, OverflowError) as error:
            raise UserError(f"{at()}: {shown(raw)} is no number or date") from error
    return raw


def whole(text: str | None, default: int, where: str) -> int:
    """A number from 0 that a file has as text. Raises UserError."""
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise UserError(f"{where}: {WRONG} ({shown(text)} is no whole number)")
    return int(text)


def column_of(reference: str | None, default: int, where: str) -> int:
    """The number, from 0, of the column of a cell such as C7. Raises UserError."""
    column = default
    if reference is not None:
        found = CELL.fullmatch(reference)
        column = -1
        for letter in found[1] if found else "":
            column = 26 * (column + 1) + ord(letter) - ord("A")
    if not 0 <= column < COLUMNS:
        raise UserError(f"{where}: {WRONG} (there is no cell {shown(reference or column)})")
    return column


def letters(column: int) -> str:
    """The name of a column: A, B ... Z, AA ..."""
    return (letters(column // 26 - 1) if column >= 26 else "") + chr(ord("A") + column % 26)


def number_text(raw: str, first_day: datetime.datetime | None) -> str:
    """A number with the 15 digits that spreadsheets keep, or a date or time as ISO 8601 has it.

    first_day: what dates count from; None for a number that is no date.
    Raises ValueError or OverflowError.
    """
    value = float(raw)
    if first_day is None:
        return str(int(value)) if value == int(value) < 1e15 else f"{value:.15g}"
    at = first_day + datetime.timedelta(milliseconds=round(value * MS_PER_DAY))
    if 0 <= value < 1:
        return str(at.time())
    return str(at.date() if at.time() == datetime.time() else at)


def shared_texts(archive: Archive, name: str) -> list[str]:
    """The texts that cells name by number. Raises UserError if they need too much memory."""
    found, parts, is_text, is_phonetic, size = list[str](), list[str](), False, False, 0
    for event, tag, _ in archive.xml(name) if name in archive.names else ():
        if event == "text":
            if is_text and not is_phonetic:
                parts.append(tag)
                size += len(tag)
                if size > TEXTS_BYTES:
                    raise UserError(f"{archive.path}: has too much text; save it as CSV")
        elif tag == "t":
            is_text = event == "start"
        elif tag == "rPh":  # how a text is pronounced
            is_phonetic = event == "start"
        elif event == "end" and tag == "si":
            found.append("".join(parts))
            parts = []
    return found


def date_styles(archive: Archive, name: str) -> set[int]:
    """The numbers of the styles of cells that show a date or a time."""
    formats, found, number, is_list = set(DATE_FORMATS), set[int](), 0, False
    for event, tag, given in archive.xml(name) if name in archive.names else ():
        if event == "start" and tag == "numFmt":
            code = NO_DATE.sub("", given.get("formatCode", "")).lower()
            if re.search("[dmyhs]", code.replace("general", "")):
                formats.add(whole(given.get("numFmtId"), 0, str(archive.path)))
        elif tag == "cellXfs":
            is_list = event == "start"
        elif event == "start" and tag == "xf" and is_list:
            if whole(given.get("numFmtId"), 0, str(archive.path)) in formats:
                found.add(number)
            number += 1
    return found


if __name__ == "__main__":
    answer(sheet_rows)
