"""The gate to llama.cpp's own programs: how they run, and what they write is read back.

The programs are not ours, so nothing that they do is trusted: their output is read in bounded
pieces, they are stopped when they make no progress, and what they wrote is read before it is used.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from your_ai.errors import UserError
from your_ai.gates.programs import begun, end
from your_ai.gates.text import shown
from your_ai.modelfiles.shards import WriteProgress

if TYPE_CHECKING:
    from gguf import GGUFReader

IDLE_S = 300.0  # without output or a growing file for so long, a program hangs
POLL_S = 0.2
TAIL_BYTES = 4096  # of the output, kept for error messages


class ProgramFailed(UserError):
    """A program ended with a status other than 0."""

    def __init__(self, message: str, last_line: str) -> None:
        super().__init__(message)
        self.last_line = last_line


def run_program(
    program: Path,
    command: Sequence[str],
    result: Path,
    total: int,
    instead: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[WriteProgress]:
    """Run a program that writes `result`; yield how much of it is written, of `total` bytes.

    program: as it is named in errors. instead: what to do if it hangs.
    Raises ProgramFailed if it fails, UserError if it hangs or cannot be started. The program and
    what it started end with this.
    """
    try:
        process = begun(
            *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=cwd, env=env
        )
    except OSError as error:
        raise UserError(f"{program}: cannot be started ({error.strerror or error})") from error
    try:
        said = b""
        for tail in output_of(process, result):
            said = tail
            yield WriteProgress(min(total, size_of(result)), total, 0)
        status = process.wait(IDLE_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise UserError(
            f"{program}: made no progress for {IDLE_S:g} s and was stopped; {instead}"
        ) from None
    finally:
        end(process)
    if status != 0:
        ended = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines()]
        line = shown(next(filter(None, reversed(lines)), ""))
        raise ProgramFailed(f"{program}: failed ({ended}{': ' + line if line else ''})", line)


def output_of(process: subprocess.Popen[bytes], result: Path) -> Iterator[bytes]:
    """Yield the end of the program's output so far, until the program closes it.

    Raises TimeoutError if there is no output and the result does not grow for IDLE_S.
    """
    stream: IO[bytes] | None = process.stdout
    assert stream is not None
    tail, size, moved_at = b"", 0, time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if selector.select(POLL_S):
                data = os.read(stream.fileno(), TAIL_BYTES)
                if not data:
                    yield tail
                    return
                tail, moved_at = (tail + data)[-TAIL_BYTES:], time.monotonic()
            elif process.poll() is not None:  # a process that it started keeps the output open
                yield tail
                return
            if size_of(result) != size:
                size, moved_at = size_of(result), time.monotonic()
            if time.monotonic() - moved_at > IDLE_S:
                raise TimeoutError
            yield tail


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_back(program: Path, result: Path, file_type: str | None) -> GGUFReader:
    """Read the file that a program wrote. Raises UserError if it is no GGUF file of the type.

    file_type: gguf's name of it; None for an adapter, which has none.
    """
    from gguf import GGUFReader, LlamaFileType

    try:
        found = GGUFReader(result)
        kind = None if file_type is None else int(value_in(found, "general.file_type"))
        for tensor in found.tensors:
            tensor.shape.tolist()
    except Exception as error:  # the reader raises many kinds for a file that is not GGUF
        raise UserError(f"{program}: did not write a GGUF file ({shown(str(error))})") from error
    if file_type is not None and kind != LlamaFileType[file_type]:
        raise UserError(f"{program}: wrote a file of type {kind}, not {file_type}")
    return found


def value_in(file: GGUFReader, name: str) -> Any:
    """A setting of a GGUF file. Raises KeyError if it has none of this name."""
    return file.fields[name].contents()
