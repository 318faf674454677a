"""Documents -> passages with their places; hostile ones harm nothing."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest

from tests import documents as made
from your_ai.data.documents import Passage, read_document
from your_ai.errors import UserError
from your_ai.gates import isolated


def read(path: Path, content: bytes | dict[str, Any]) -> list[Passage]:
    """The passages of a file with this content, or of a ZIP archive with these files."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        made.write_zip(path, content)
    return read_document(path)


def test_markdown_has_a_passage_for_each_heading_with_text(tmp_path):
    text = b"Intro.\n\n# A\n\n## B\n\n\n\nOne.\n```\n# no heading\n```\n# C #\nTwo.\n"
    assert read(tmp_path / "notes.md", text) == [
        Passage("Intro.", "beginning"),
        Passage("# A\n\n## B\n\nOne.\n```\n# no heading\n```", "B"),
        Passage("# C #\nTwo.", "C"),
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_text_is_one_passage_in_any_encoding_that_its_mark_names(tmp_path, encoding):
    text = "Grüße.\r\n\r\n\r\n\r\nEnde.\r\n".encode(encoding)
    assert read(tmp_path / "text.txt", text) == [Passage("Grüße.\n\nEnde.", "beginning")]


def test_html_is_text_without_scripts_in_the_encoding_that_it_names(tmp_path):
    page = (
        "<meta charset=latin1><title>T</title><script>no()</script><style>no{}</style>\n"
        "<p>Grüße  &amp;\n Küsse</p><h1>A<br></h1><h2>B</h2><ul><li>one<li>two</ul>"
        "<pre>a\n  b</pre><table><tr><td>1<td>2<tr><td>3</table><svg/>end"
    )
    assert read(tmp_path / "page.html", page.encode("latin-1")) == [
        Passage("Grüße & Küsse", "beginning"),
        Passage("A\n\nB\n\n- one\n- two\n\na\n  b\n\n1\t2\n3\n\nend", "B"),
    ]


def test_docx_has_a_passage_for_each_heading_by_its_style(tmp_path):
    def p(text: str, style: str = "", more: str = "") -> str:
        return f'<w:p><w:pPr><w:pStyle w:val="{style}"/>{more}</w:pPr><w:r>{text}</w:r></w:p>'

    def cell(text: str) -> str:
        return f"<w:tc>{p(f'<w:t>{text}</w:t>')}</w:tc>"

    body = (
        p("<w:t>Be</w:t></w:r><w:r><w:t>fore</w:t>")
        + p("<w:t>Eins</w:t>", "berschrift1")
        + p("<w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t>")
        + p("<w:t>item</w:t>", more="<w:numPr/>")
        + f"<w:tbl><w:tr>{cell('1')}{cell('2')}</w:tr><w:tr>{cell('3')}{cell('4')}</w:tr></w:tbl>"
        + "<w:p><w:del><w:r><w:t>gone</w:t></w:r></w:del></w:p>"
    )
    style = '<w:style w:styleId="berschrift1"><w:name w:val="heading 1"/></w:style>'
    assert read(tmp_path / "a.docx", made.docx(body, style)) == [
        Passage("Before", "beginning"),
        Passage("Eins\n\na\tb\nc\n\n- item\n1\t2\n3\t4", "Eins"),
    ]


def test_epub_has_the_chapters_in_the_order_of_the_book(tmp_path):
    doctype = '<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.1//EN" "x"><html><head><title/></head>'
    files = made.epub(b=f"{doctype}<p>Un&nbsp;deux</p></html>", a="<h1>Last</h1><p>End</p>")
    assert read(tmp_path / "a.epub", files) == [
        Passage("Un deux", "chapter 1"),
        Passage("Last\n\nEnd", "Last"),
    ]


@pytest.mark.parametrize("name", ["a.pdf", "a.docx"], ids=["by its name", "by its content"])
def test_pdf_has_the_pages_with_text(tmp_path, name):
    pytest.importorskip("pypdf")
    pages = made.pdf_pages(made.shown("One", "two"), made.stream(b""), made.shown("End"))
    assert read(tmp_path / name, pages) == [Passage("One\ntwo", "page 1"), Passage("End", "page 3")]


BOMB = zlib.compress(bytes(200_000_000))
NESTED = "".join(f'<!ENTITY e{n} "{f"&e{n - 1};" * 10}">' for n in range(1, 10))
LAUGHS = f'<!DOCTYPE x [<!ENTITY e0 "ha">{NESTED}]><x>&e9;</x>'
ENDLESS = "<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2>>"
DOUBLING = [f"<</Type/Pages/Kids[{n} 0 R {n} 0 R]/Count 9>>" for n in range(3, 40)]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("empty.txt", b" \n", "has no text"),
        ("null.txt", b"a\0b", "is not text"),
        (
            "latin.txt",
            "One.\nÜ".encode("latin-1"),
            "latin.txt:2: is not UTF-8 text; save it as UTF",
        ),
        ("a.docx", b"plain", "is not DOCX, though its name says so"),
        ("old.docx", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "is an encrypted or old Office file"),
        ("laughs.docx", made.docx("") | {"word/document.xml": LAUGHS}, "document type definition"),
        ("deep.docx", made.docx("<a>" * 9_000), "is nested deeper than 256"),
        ("none.docx", made.docx(""), "has no text"),
        ("gone.epub", made.epub(a="x") | {"OPS/p.opf": "<p><itemref idref='y'/></p>"}, "missing"),
        ("zip.epub", {"a.docx": b"PK"}, "is a ZIP archive; unpack it"),
        ("scan.pdf", made.pdf_pages(made.stream(b"")), "has no text, only images"),
        ("cut.pdf", made.pdf_pages(made.shown("One"))[:60], "is damaged"),
        ("bomb.pdf", made.pdf_pages(made.stream(BOMB, "/Filter/FlateDecode")), "page 1"),
        ("endless.pdf", made.pdf(ENDLESS), "endless.pdf: "),
        ("doubling.pdf", made.pdf(*DOUBLING), "doubling.pdf: "),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch, name, content, error):
    if name.endswith("pdf"):
        pytest.importorskip("pypdf")
    monkeypatch.setattr(isolated, "QUIET_S", 3)
    with pytest.raises(UserError, match=error) as raised:
        read(tmp_path / name, content)
    assert str(tmp_path / name) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_actions_of_a_pdf_are_not_run(tmp_path):
    pytest.importorskip("pypdf")
    script = f"app.launchURL('file://{tmp_path}/ran')"
    catalog = (
        f"<</Type/Catalog/Pages 2 0 R/OpenAction<</S/JavaScript/JS({script})>>"
        f"/AA<</WC<</S/Launch/F(/usr/bin/touch)/Win<</F(touch)/P({tmp_path}/ran)>>>>>>>>"
    )
    pages = made.pdf_pages(made.shown("One"), catalog=catalog)
    assert read(tmp_path / "a.pdf", pages) == [Passage("One", "page 1")]
    assert [each.name for each in tmp_path.iterdir()] == ["a.pdf"]


@pytest.mark.parametrize(
    "unit", ["<a ", "<!--", "<![CDATA[", "</a ", "<div>", "&a", "<svg>", "<a x='"]
)
def test_pages_that_are_slow_to_parse_end(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(isolated, "QUIET_S", 2)
    try:
        read(tmp_path / "a.html", unit.encode() * 100_000)
    except UserError as error:
        assert "takes too long to read" in str(error) or "has no text" in str(error)  # noqa: PT017
