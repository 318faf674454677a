"""Safetensors files with any header, for tests of what reads them."""

from __future__ import annotations

import json
import struct
from pathlib import Path


def with_header(header: object, data: bytes = b"") -> bytes:
    """A file: 8 bytes of header length, the header (as JSON unless it is bytes), the data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_with_header(path: Path, header: object, size: int) -> Path:
    """Such a file whose data are `size` zero bytes, which take no room on the disk."""
    with path.open("wb") as file:
        file.write(with_header(header))
        file.truncate(file.tell() + size)
    return path
