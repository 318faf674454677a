"""Spreadsheets -> the rows that a CSV file of them has."""

from __future__ import annotations

import pytest

from tests import documents as made
from your_ai.data.lines import RowLimit
from your_ai.data.records import read_records
from your_ai.errors import UserError

HEADER = (
    '<row r="2"><c r="B2" t="s"><v>0</v></c><c r="C2" t="inlineStr"><is><t>b</t></is></c></row>'
)
TEXTS = "<si><r><t>a</t></r><rPh><t>aa</t></rPh></si><si><t>Text &amp; </t></si>"
STYLES = (
    '<numFmts><numFmt numFmtId="170" formatCode="[$-409]yyyy\\-mm"/>'
    '<numFmt numFmtId="171" formatCode="0.0&quot;days&quot;[Red]"/></numFmts><cellXfs>'
    '<xf numFmtId="0"/><xf numFmtId="14"/><xf numFmtId="170"/><xf numFmtId="171"/></cellXfs>'
)


def rows_of(tmp_path, rows: str, **more: str) -> list[tuple[str, dict[str, str]]]:
    path = tmp_path / "a.xlsx"
    made.write_zip(path, made.xlsx(rows, **{"texts": TEXTS, "styles": STYLES, **more}))
    found = read_records(path, RowLimit(row_bytes=1000))
    return [(where.removeprefix(f"{path}: "), row) for where, row in found]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ('t="s"><v>1</v>', "Text & "),
        ("><v>5.0</v>", "5"),
        ("><v>0.30000000000000004</v>", "0.3"),
        ('t="b"><v>1</v>', "TRUE"),
        ('t="str"><f>A1</f><v>x</v>', "x"),
        ('t="str"><f>A1</f><v></v>', ""),
        ('s="1"><v>45322</v>', "2024-01-31"),
        ('s="2"><v>45322.25</v>', "2024-01-31 06:00:00"),
        ('s="1"><v>0.4375</v>', "10:30:00"),
        ('s="3"><v>45322.5</v>', "45322.5"),
        (">", ""),
    ],
)
def test_cells_are_the_text_that_csv_has(tmp_path, cell, text):
    rows = f'{HEADER}<row/><row r="4"><c r="C4"><v>1</v></c><c r="B4" {cell}</c></row>'
    assert rows_of(tmp_path, rows) == [("row 4", {"a": text, "b": "1"})]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ('<c r="B3" t="s"><v>9</v></c>', r"sheet One: cell B3: is damaged \(no text 9\)"),
        ('<c r="B3"><f>A1</f></c>', "sheet One: cell B3: has a formula without its value"),
        ('<c r="D3"><v>1</v></c>', "sheet One: row 3 has a cell in column D, which has no name"),
        ('<c r="ZZZ3"><v>1</v></c>', "there is no cell ZZZ3"),
        ('<c r="B3" s="1"><v>1e300</v></c>', "cell B3: 1e300 is no number or date"),
        (f'<c r="B3" t="str"><v>{"x" * 1001}</v></c>', "row 3: the row has more than 1,000 bytes"),
        ("", "the file is empty"),
    ],
)
def test_a_cell_that_cannot_be_read_is_named(tmp_path, row, error):
    with pytest.raises(UserError, match=error):
        rows_of(tmp_path, f'{HEADER}<row r="3">{row}</row>')


def test_the_first_visible_sheet_with_rows_is_read(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    book.create_sheet("Hidden").sheet_state = "hidden"
    for sheet, text in ((book["Hidden"], "no"), (book.create_sheet("Shown"), "yes")):
        sheet.append(["text"])
        sheet.append([text])
    book.save(tmp_path / "a.xlsx")
    assert [row for _, row in read_records(tmp_path / "a.xlsx", RowLimit())] == [{"text": "yes"}]
