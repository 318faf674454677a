"""Programs that tests put on PATH in the place of others."""

from __future__ import annotations

import sys
from pathlib import Path


def program(folder: Path, name: str, source: str, language: str = sys.executable) -> Path:
    """Write a program to `folder`. language: what runs it, by default Python."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{language}\n{source}\n")
    path.chmod(0o755)
    return path


def script(folder: Path, name: str, lines: str) -> Path:
    """Write a shell script to `folder`."""
    return program(folder, name, lines, "/bin/sh")
