"""Documents -> passages of plain text, each with its place: a page, or the heading it is under."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from your_ai.errors import UserError, named_errors
from your_ai.gates.text import shortened
from your_ai.gates.untrusted import read_bytes

DOCUMENT_SUFFIXES = frozenset({".txt", ".md"})
TEXT_BYTES = 64_000_000  # of a document's text, which is in memory as a whole
HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(.*?)[ \t#]*")
FENCE = re.compile(r" {0,3}(```+|~~~+)")
BLANKS = re.compile(r"[ \t]*\n(?:[ \t]*\n){2,}")


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
    text = decoded(path)
    sections = markdown_sections(text) if path.suffix.lower() == ".md" else [("", text)]
    found = [Passage(t, shortened(p) or "beginning") for p, raw in sections if (t := tidy(raw))]
    if not found:
        raise UserError(f"{path}: has no text")
    return found


def tidy(text: str) -> str:
    """A text without blank lines around it, and with one at most between two paragraphs."""
    return BLANKS.sub("\n\n", text).strip("\n").rstrip()


def decoded(path: Path) -> str:
    """The text of a file, which is UTF-8, or UTF-16 with a byte order mark. Raises UserError."""
    with named_errors(path, "read"):
        data = read_bytes(path, TEXT_BYTES)
    encoding = "utf-16" if data.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig"
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: is not UTF-8 text; save it as UTF-8") from error
    if "\0" in text:
        raise UserError(f"{path}: is not text")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def markdown_sections(text: str) -> Iterator[tuple[str, str]]:
    """Each heading and the text from it up to the next one; of headings alone, the last names all."""
    heading, lines, has_body, fence = "", list[str](), False, ""
    for line in text.split("\n"):
        mark = FENCE.match(line)
        if mark and (not fence or line.strip().startswith(fence)):
            fence = "" if fence else mark[1]
        if not fence and (found := HEADING.fullmatch(line)):
            if has_body:
                yield heading, "\n".join(lines)
                lines = []
            heading, has_body = found[1], False
        else:
            has_body = has_body or bool(line.strip())
        lines.append(line)
    yield heading, "\n".join(lines)
