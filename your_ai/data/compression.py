"""Open files that may be compressed; their content decides, not their names."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from your_ai.errors import UserError

SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
HEAD_BYTES = 10


def open_zstd(path: Path) -> BinaryIO:
    import pyarrow as pa  # slow to import

    if not pa.Codec.is_available("zstd"):
        raise UserError(
            f"{path}: is compressed with zstd, which this pyarrow cannot read; run: pip install "
            "--force-reinstall pyarrow, or give .gz, .bz2 or .xz"
        )
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))


OPENERS: dict[re.Pattern[bytes], Callable[[Path], BinaryIO]] = {
    re.compile(rb"\x1f\x8b"): gzip.open,  # type: ignore[dict-item]
    re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"): bz2.open,  # type: ignore[dict-item]
    re.compile(rb"\xfd7zXZ\x00"): lzma.open,  # type: ignore[dict-item]
    re.compile(rb"\x28\xb5\x2f\xfd"): open_zstd,
}


def without_compression(name: str) -> str:
    """A file name in lower case, without the suffix of a compression."""
    name = name.lower()
    return next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)


def opener_of(path: Path) -> Callable[[Path], BinaryIO] | None:
    """How to open a compressed file; None if it is not compressed. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    return next((opener for magic, opener in OPENERS.items() if magic.match(head)), None)


def is_compressed(path: Path) -> bool:
    """Raises UserError if the file cannot be read."""
    try:
        return opener_of(path) is not None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed. It may not be able to seek. Raises UserError."""
    opener = None
    try:
        opener = opener_of(path)
        with path.open("rb") if opener is None else opener(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: is damaged or cut short ({error})") from error
    except OSError as error:
        if opener is not None and error.errno is None:  # of bz2 and zstd
            raise UserError(f"{path}: is damaged or cut short ({error})") from error
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
