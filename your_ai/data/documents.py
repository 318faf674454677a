"""Documents -> passages of plain text, each with its place: a page, or the heading it is under.

PDF, DOCX, EPUB and HTML are read in a process of its own: `python -m your_ai.data.documents`.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from your_ai.errors import UserError, named_errors
from your_ai.gates.archives import Archive, open_archive, resolved
from your_ai.gates.isolated import answer, run_isolated
from your_ai.gates.text import shortened
from your_ai.gates.untrusted import open_file, read_bytes

DOCUMENT_FORMS = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".epub": "epub",
    **dict.fromkeys((".html", ".htm", ".xhtml"), "html"),
    **dict.fromkeys((".txt", ".md"), "text"),
}
DOCUMENT_SUFFIXES = frozenset(DOCUMENT_FORMS)
TEXT_BYTES = 64_000_000  # of a text, or of a chapter, which is in memory as a whole
PDF_PAGES = 20_000
MODULE = "your_ai.data.documents"
PDF, ZIP, OLD_OFFICE = b"%PDF-", b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
EPUB_MARK = "META-INF/container.xml"
OFFICE_FOLDERS = {"word/": "docx", "xl/": "xlsx"}

HEADING = re.compile(r" {0,3}#{1,6}[ \t]+")
FENCE = re.compile(r" {0,3}(```+|~~~+)")
CHARSET = re.compile(
    rb"""<(?:meta|\?xml)\b[^>]{0,200}?(?:charset|encoding)=["']?([\w-]{1,40})""", re.I
)
STYLE_OF_HEADING = re.compile(r"heading \d|title")
BREAKS = {"tab": ["\t"], "br": ["\n"], "cr": ["\n"]}
DELETED = ("del", "moveFrom", "Fallback", "rPr")  # by tracked changes, or there twice
HIDDEN = ("script", "style", "template", "noscript", "title", "svg")
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
PARAGRAPHS = (*HEADINGS, *"p blockquote pre table ul ol dl figure section article hr".split())
BLOCKS = (
    *PARAGRAPHS,
    *"address aside body br caption dd details div dt figcaption footer form header".split(),
    *"li main nav option summary tr".split(),
)

Line = tuple[str, str]  # the heading that a line is, or ""; the line


@dataclass(frozen=True, slots=True)
class Passage:
    """A part of a document that belongs together."""

    text: str
    """Not blank."""
    place: str
    """Its place in the document: `page 3`, a heading, or `beginning` before the first one."""


def read_document(path: Path) -> list[Passage]:
    """The passages of a document, in order; its suffix is one of DOCUMENT_SUFFIXES.

    Raises UserError with the file for one that cannot be read, or that has no text.
    """
    return list(passages_in(path, document_form(path)))


def passages_in(path: Path, form: str) -> Iterator[Passage]:
    """Yield the passages of a document of this form. Raises UserError as `read_document` does."""
    found = False
    if form == "text":
        passages: Iterable[Passage] = text_passages(path)
    else:
        passages = (Passage(*each) for each in run_isolated(MODULE, path, form) if each)
    for passage in passages:
        found = True
        yield passage
    if not found and form == "pdf":
        raise UserError(f"{path}: has no text, only images; recognize it first (OCR)")
    if not found:
        raise UserError(f"{path}: has no text")


def document_form(path: Path) -> str:
    """The form of a document, by its content where that is unmistakable, or else by its name.

    Raises UserError if neither tells, or they contradict each other.
    """
    with named_errors(path, "read"), open_file(path) as (file, _):
        head = file.read(1024)
    by_name = DOCUMENT_FORMS.get(path.suffix.lower())
    form = binary_form(path, head) or (by_name if by_name in ("text", "html") else None)
    if form in DOCUMENT_FORMS.values():
        return str(form)
    if by_name is not None and form is None:
        raise UserError(f"{path}: is not {by_name.upper()}, though its name says so")
    raise UserError(f"{path}: is no document; give {', '.join(sorted(DOCUMENT_SUFFIXES))}")


def binary_form(path: Path, head: bytes) -> str | None:
    """The form of a PDF, or of an archive; None for anything else. head: how the file begins.

    Raises UserError for archives and Office files that are not read.
    """
    if head.lstrip().startswith(PDF):
        return "pdf"
    if head.startswith(OLD_OFFICE):
        raise UserError(
            f"{path}: is an encrypted or old Office file; save it as .docx, .xlsx or .csv, without "
            "a password"
        )
    if not head.startswith(ZIP):
        return None
    with open_archive(path) as archive:
        if EPUB_MARK in archive.names:
            return "epub"
        for folder, form in OFFICE_FOLDERS.items():
            if any(name.startswith(folder) for name in archive.names):
                return form
    raise UserError(f"{path}: is a ZIP archive; unpack it and give the files")


def passages_of(lines: Iterable[Line], first: str = "beginning") -> Iterator[Passage]:
    """Yield each heading and the lines from it up to the next one.

    Headings without text are one passage with the next that has some, and the last names it.
    first: the place of what is before all headings.
    """
    place, texts, has_body = first, list[str](), False
    for heading, line in lines:
        if heading.strip():
            if has_body:
                yield Passage(tidy(texts), place)
                texts, has_body = [], False
            place = shortened(" ".join(heading.split()))
        else:
            has_body = has_body or bool(line.strip())
        texts.append(line)
    if text := tidy(texts):
        yield Passage(text, place)


def tidy(lines: Iterable[str]) -> str:
    """Lines without blanks at their ends, with one blank line at most between two paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in lines)).strip("\n")


# Text, Markdown and HTML


def text_passages(path: Path) -> Iterator[Passage]:
    with named_errors(path, "read"):
        text = decoded(read_bytes(path, TEXT_BYTES), str(path))
    is_markdown = path.suffix.lower() == ".md"
    return passages_of(markdown_lines(text) if is_markdown else [("", text)])


def decoded(data: bytes, where: str, encoding: str = "utf-8") -> str:
    """A text that is UTF-8, or what its byte order mark or `encoding` says. Raises UserError."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "utf-16"
    try:
        text = data.decode(encoding).removeprefix("\ufeff")
    except UnicodeError as error:
        start = error.start if isinstance(error, UnicodeDecodeError) else 0
        line = data.count(b"\n", 0, start) + 1
        name = encoding.upper()
        raise UserError(f"{where}:{line}: is not {name} text; save it as UTF-8") from error
    if "\0" in text:
        raise UserError(f"{where}: is not text (it has null characters)")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def markdown_lines(text: str) -> Iterator[Line]:
    fence = ""
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark[1]
        found = None if fence else HEADING.match(line)
        yield line[found.end() :].strip().rstrip("#") if found else "", line


def html_passages(path: Path) -> Iterator[Passage]:
    with named_errors(path, "read"):
        return passages_of(html_lines(read_bytes(path, TEXT_BYTES), str(path)))


def html_lines(data: bytes, where: str) -> list[Line]:
    """The lines of a page. Raises UserError if it is not in the encoding that it names."""
    named = CHARSET.search(data[:2048])
    encoding = named[1].decode().lower() if named else "utf-8"
    try:
        "".encode(encoding)
    except LookupError:
        encoding = "utf-8"
    if encoding in ("iso-8859-1", "latin1", "latin-1", "us-ascii", "ascii"):
        encoding = "cp1252"  # as in browsers
    page = HtmlPage()
    page.feed(decoded(data, where, encoding))
    page.close()
    page.end_line()
    return page.lines


class HtmlPage(HTMLParser):
    """The text of a page as lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []
        self.parts: list[str] = []
        """Those of the line that has begun."""
        self.hidden = 0
        """The number of elements without text around this place."""
        self.pre = 0
        self.is_heading = False

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in HIDDEN:
            self.hidden += 1
        elif tag in BLOCKS:
            self.end_line(blank=tag in PARAGRAPHS)
            self.is_heading = tag in HEADINGS
            self.pre += tag == "pre"
            self.parts += ["- "] * (tag == "li")
        elif tag in ("td", "th") and self.parts:
            self.parts.append("\t")

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag in BLOCKS:  # a hidden one, such as <script/> of XHTML, is empty
            self.end_line()

    def handle_endtag(self, tag: str) -> None:
        if tag in HIDDEN:
            self.hidden = max(0, self.hidden - 1)
        elif tag in BLOCKS:
            self.end_line(blank=tag in PARAGRAPHS)
            self.pre = max(0, self.pre - (tag == "pre"))
            self.is_heading = False

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))

    def end_line(self, blank: bool = False) -> None:
        text = "".join(self.parts)
        if not self.pre:
            text = re.sub(r" ?(\t) ?| {2,}", lambda found: found[1] or " ", text).strip()
        if text.strip():
            self.lines.append((text if self.is_heading else "", text))
        if blank:
            self.lines.append(("", ""))
        self.parts.clear()


# DOCX, EPUB and PDF


def docx_passages(path: Path) -> Iterator[Passage]:
    with open_archive(path) as archive:
        main = next((n for kind, n in archive.relations().values() if kind == "officeDocument"), "")
        parts = dict(archive.relations(main).values())
        headings = heading_styles(archive, parts.get("styles", ""))
        yield from passages_of(docx_lines(archive, main, headings))
        for kind in ("footnotes", "endnotes"):
            if kind in parts:
                yield from passages_of(docx_lines(archive, parts[kind], headings), kind)


def heading_styles(archive: Archive, name: str) -> set[str]:
    """The ids of a document's styles of headings; these depend on its language, names do not."""
    found, style = set[str](), ""
    for event, tag, given in archive.xml(name) if name in archive.names else ():
        if event == "start" and tag == "style":
            style = given.get("styleId", "")
        is_name = tag == "name" and STYLE_OF_HEADING.fullmatch(given.get("val", "").lower())
        if event == "start" and (is_name or tag == "outlineLvl"):
            found.add(style)
    return found


@dataclass
class DocxLine:
    """A paragraph, or a row of a table, that is being read."""

    parts: list[str] = field(default_factory=list)
    is_heading: bool = False
    is_item: bool = False

    def begin(self, tag: str, given: Mapping[str, str], headings: set[str]) -> None:
        """Begin an element in it."""
        self.is_heading |= tag == "pStyle" and given.get("val") in headings
        self.is_item |= tag == "numPr"

    def ended(self, tag: str) -> Iterator[Line]:
        """Yield its lines, when the element that it is ends: p, or tr for a row."""
        text, is_row = "".join(self.parts), tag == "tr"
        if is_row:
            yield "", re.sub(r" *\t *", "\t", text).strip()
            return
        mark = "- " if self.is_item and not self.is_heading and text.strip() else ""
        yield text if self.is_heading else "", mark + text
        if not self.is_item:
            yield "", ""


def docx_lines(archive: Archive, name: str, headings: set[str]) -> Iterator[Line]:
    """Yield the paragraphs and the rows of tables, whose cells are separated by tabs."""
    line, in_text, deleted, tables = DocxLine(), False, 0, 0
    for event, tag, given in archive.xml(name):
        is_start = event == "start"
        if event == "text":
            line.parts += [tag] * (in_text and not deleted)
        elif tag in DELETED:
            deleted += 1 if is_start else -1
        elif tag == "t":
            in_text = is_start
        elif tag == "tbl":
            tables += 1 if is_start else -1
        elif is_start:
            line.begin(tag, given, headings)
            line.parts += BREAKS.get(tag, []) * (not deleted)
        elif tag == "tc" or (tag == "p" and tables):  # in a row
            line.parts.append("\t" if tag == "tc" else " ")
        elif tag == "p" or (tag == "tr" and tables == 1):
            yield from line.ended(tag)
            line = DocxLine()


def epub_passages(path: Path) -> Iterator[Passage]:
    """Yield the passages of each chapter, in the order of the book."""
    with open_archive(path) as archive:
        roots = [
            g.get("full-path", "") for e, t, g in archive.xml(EPUB_MARK) if t == "rootfile" and g
        ]
        package = next(iter(roots), "")
        items: dict[str, str] = {}
        chapters = list[str]()
        for event, tag, given in archive.xml(package):
            if event == "start" and tag == "item":
                target = unquote(given.get("href", ""))
                items[given.get("id", "")] = resolved(package.rpartition("/")[0], target)
            elif event == "start" and tag == "itemref":
                chapters.append(given.get("idref", ""))
        if archive.names & {"META-INF/rights.xml", "META-INF/license.lcpl"}:
            raise UserError(f"{path}: is protected (DRM); give a file that is not")
        for number, chapter in enumerate(dict.fromkeys(chapters), 1):
            place = f"chapter {number}"
            data = archive.read(items.get(chapter, chapter), TEXT_BYTES)
            yield from passages_of(html_lines(data, f"{path}: {place}"), place)


def pdf_passages(path: Path) -> Iterator[Passage | None]:
    """Yield the text of each page; None for one that has none."""
    try:
        import pypdf
        from pypdf.errors import DependencyError
    except ImportError as error:
        raise UserError(
            f"{path}: PDF needs the package pypdf; run: pip install 'your_ai[documents]'"
        ) from error
    with named_errors(path, "read"), open_file(path) as (file, _):
        reader = pypdf.PdfReader(file)
        try:
            is_shut = reader.is_encrypted and not reader.decrypt("")
        except DependencyError:
            is_shut = True
        if is_shut:
            raise UserError(f"{path}: is encrypted; save it without a password")
        if len(reader.pages) > PDF_PAGES:
            raise UserError(f"{path}: has more than {PDF_PAGES:,} pages; split it")
        for number, page in enumerate(reader.pages, 1):
            place = f"page {number}"
            try:
                text = tidy(page.extract_text().split("\n"))
            except MemoryError:
                raise
            except Exception as error:  # pypdf may raise anything for a damaged page
                reason = shortened(" ".join(str(error).split())) or type(error).__name__
                raise UserError(f"{path}: {place} cannot be read ({reason})") from error
            yield Passage(text, place) if text.strip() else None


READERS: dict[str, Callable[[Path], Iterator[Passage | None]]] = {
    "pdf": pdf_passages,
    "docx": docx_passages,
    "epub": epub_passages,
    "html": html_passages,
}


def results(path: Path, form: str) -> Iterator[tuple[str, str] | None]:
    """Yield (text, place) of each passage, for the process that asked."""
    for passage in READERS[form](path):
        yield (passage.text, passage.place) if passage else None


if __name__ == "__main__":
    answer(results)
