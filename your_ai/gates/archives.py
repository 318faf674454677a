"""Zip archives from outside (DOCX, XLSX, EPUB), and the XML in them.

Nothing is unpacked to disk. Sizes, ratios, names and the number of files are checked in the
archive's directory before a byte is unpacked, and no more is unpacked than the directory says. XML
with a DTD, which could define entities, is refused.
"""

from __future__ import annotations

import contextlib
import posixpath
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal, cast
from xml.parsers import expat

from your_ai.errors import UserError
from your_ai.gates.text import shown
from your_ai.gates.untrusted import MB, open_file, path_fault

ENTRIES = 20_000
UNPACKED_BYTES = 2_000 * MB  # of all files together; only XML and HTML are unpacked
RATIO, RATIO_FROM_BYTES = 150, 4 * MB  # of unpacked to packed bytes, for files from this size on
READ_BYTES = 8 * MB  # of one read: zipfile reads an archive's whole directory at once
BLOCK_BYTES = 1 << 18
DEPTH = 256  # of elements
NOT_ZIP = "is damaged, cut short, or no archive"
NOTHING: Mapping[str, str] = {}

XmlEvent = tuple[Literal["start", "end", "text"], str, Mapping[str, str]]
"""An element's name and attributes, without namespaces; its name; or a piece of text."""


class BoundedReads:
    """A file of which no read is large, as `zipfile` needs it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.seek, self.tell = file.seek, file.tell

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if size > READ_BYTES:
            raise zipfile.BadZipFile(f"a part of {size:,} bytes")
        return self.file.read(READ_BYTES if size < 0 else size)


@dataclass(frozen=True)
class Archive:
    """An open archive whose directory was checked."""

    path: Path
    content: zipfile.ZipFile
    names: frozenset[str]

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises UserError if it is missing or damaged."""
        if name not in self.names:
            part = shown(name) if name else "its main part"
            raise UserError(f"{self.path}: is damaged ({part} is missing)")
        try:
            with self.content.open(name) as file:
                while block := file.read(BLOCK_BYTES):
                    yield block
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError) as error:
            raise UserError(f"{self.path}: {shown(name)} in it is damaged ({error})") from error

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a file. Raises UserError also if there are more than `most`."""
        found = bytearray()
        for block in self.blocks(name):
            found += block
            if len(found) > most:
                raise UserError(f"{self.path}: {shown(name)} in it has more than {most:,} bytes")
        return bytes(found)

    def xml(self, name: str) -> Iterator[XmlEvent]:
        """Yield an XML file's elements and texts, in order. Raises UserError if it is not valid."""
        events: list[XmlEvent] = []
        depth = 0

        def refuse(*_: object) -> None:
            raise ValueError("it has a document type definition")

        def start(name: str, attributes: dict[str, str]) -> None:
            nonlocal depth
            depth += 1
            if depth > DEPTH:
                raise ValueError(f"it is nested deeper than {DEPTH}")
            events.append(("start", local(name), {local(n): v for n, v in attributes.items()}))

        def end(name: str) -> None:
            nonlocal depth
            depth -= 1
            events.append(("end", local(name), NOTHING))

        parser = expat.ParserCreate(namespace_separator=" ")
        parser.buffer_text = True
        parser.StartDoctypeDeclHandler = refuse
        parser.StartElementHandler, parser.EndElementHandler = start, end
        parser.CharacterDataHandler = lambda text: events.append(("text", text, NOTHING))
        try:
            for block in self.blocks(name):
                parser.Parse(block, False)
                yield from events
                events.clear()
            parser.Parse(b"", True)
        except (expat.ExpatError, ValueError) as error:
            raise UserError(f"{self.path}: {shown(name)} in it is refused ({error})") from error
        yield from events

    def relations(self, name: str = "") -> dict[str, tuple[str, str]]:
        """The parts that a part of an Office file names: id -> (kind, name). "": of the whole file.

        The kind is the last word of the type, such as `worksheet`.
        """
        folder, base = posixpath.split(name)
        listed = posixpath.join(folder, "_rels", f"{base}.rels")
        return {
            given.get("Id", ""): (
                given.get("Type", "").rpartition("/")[2],
                resolved(folder, given.get("Target", "")),
            )
            for event, tag, given in (self.xml(listed) if listed in self.names else ())
            if event == "start" and tag == "Relationship" and given.get("TargetMode") != "External"
        }


def resolved(folder: str, target: str) -> str:
    """The name in an archive of what a file in one of its folders names."""
    return posixpath.normpath(posixpath.join("/", folder, target)).lstrip("/")


@lru_cache(maxsize=1024)
def local(name: str) -> str:
    """The name of an element or attribute, without its namespace."""
    return name.rpartition(" ")[2]


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open an archive; its files are read in the block. Raises UserError if it is refused."""
    with contextlib.ExitStack() as stack:
        try:
            file, _ = stack.enter_context(open_file(path))
            bounded = cast(BinaryIO, BoundedReads(file))
            content = stack.enter_context(zipfile.ZipFile(bounded))
        except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
            raise UserError(f"{path}: {NOT_ZIP} ({error})") from error
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
        if (fault := fault_of(content.infolist())) is not None:
            raise UserError(f"{path}: {fault}; refused")
        names = frozenset(info.filename for info in content.infolist())
        yield Archive(path, content, names)


def fault_of(listed: list[zipfile.ZipInfo]) -> str | None:
    """Say why an archive with this directory is not read; None if it is."""
    if len(listed) > ENTRIES:
        return f"has {len(listed):,} files in it; the maximum is {ENTRIES:,}"
    for info in listed:
        name = f"the file {shown(info.filename)} in it"
        if (fault := path_fault(info.filename.rstrip("/"))) is not None:
            return f"{name} {fault}"
        if info.flag_bits & 1:
            return "is encrypted"
        if info.file_size > max(RATIO_FROM_BYTES, RATIO * info.compress_size):
            return f"{name} would unpack to {info.file_size:,} bytes from {info.compress_size:,}"
    total = sum(info.file_size for info in listed)
    if total > UNPACKED_BYTES:
        return f"would unpack to {total:,} bytes; the maximum is {UNPACKED_BYTES:,}"
    return None
