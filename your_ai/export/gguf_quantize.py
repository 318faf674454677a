"""GGUF files in the types that only llama.cpp computes, by its own program llama-quantize.

The program is not ours, so nothing that it does is trusted: its output is read in bounded pieces,
it is stopped when it makes no progress, and its file is read back before it replaces anything.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from your_ai.errors import UserError
from your_ai.export import gguf
from your_ai.gates.programs import begun, end
from your_ai.gates.text import shown
from your_ai.memory.budget import limit_of
from your_ai.modelfiles.shards import WriteProgress, hold_memory
from your_ai.nets.saved_adapter import Trained

PROGRAM = "llama-quantize"
# Our name of a type -> the name of a file with such matrices, which is also llama.cpp's name
# of the type after its prefix.
TOOL_KINDS = {
    "q4_0": "MOSTLY_Q4_0",
    "q4_k_m": "MOSTLY_Q4_K_M",
    "q5_k_m": "MOSTLY_Q5_K_M",
    "q6_k": "MOSTLY_Q6_K",
}
BETWEEN = "f16"  # the type of the file that the program reads, as llama.cpp's manual has it
DISK_SHARE = 1.6  # of that file: itself, and the result with at most 9 bits per weight
IDLE_S = 300.0  # without output or a growing file for so long, the program hangs
POLL_S = 0.2
TAIL_BYTES = 4096  # of the output, kept for error messages
VALUE_BYTES = 4  # of a float32; the program converts a tensor to float32, and then from it


@dataclass(frozen=True)
class Way:
    """The tool that computes a type."""

    tool: Path | None
    """The program llama-quantize; None if the library gguf computes the type."""

    @property
    def text(self) -> str:
        return f"quantized by {self.tool}" if self.tool else "quantized by the library gguf"


def way_of(kind: str, chosen: Path | None = None) -> Way:
    """Choose how to compute the type `kind`, one of gguf.KINDS or TOOL_KINDS.

    chosen: the program that the user named; default: the one on PATH. Raises UserError if the
    type needs the program and it is missing, or if `chosen` is not a program.
    """
    if chosen is not None and not is_program(chosen):
        raise UserError(f"--llama-quantize {chosen}: is not a program; give the path of {PROGRAM}")
    if kind not in TOOL_KINDS:
        if chosen is not None:
            raise UserError(
                f"--llama-quantize: {kind} does not need it; leave it out, or give a --dtype of "
                f"{', '.join(TOOL_KINDS)}"
            )
        return Way(None)
    found = chosen or (Path(place) if (place := shutil.which(PROGRAM)) else None)
    if found is None and kind not in gguf.KINDS:
        raise UserError(
            f"--dtype {kind}: needs llama.cpp's {PROGRAM}, which is not on PATH; install "
            f"llama.cpp (on a Mac: brew install llama.cpp), name it with --llama-quantize, or "
            f"take a type that needs no program: {', '.join(gguf.KINDS)}"
        )
    return Way(found and found.absolute())


def is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def write_model(
    trained: Trained,
    target: Path,
    kind: str,
    way: Way,
    max_memory_gb: float | None = None,
    draft: Path | None = None,
) -> Iterator[WriteProgress]:
    """Write the model with the adapter fused in to the file `target`.

    kind: one of gguf.KINDS or TOOL_KINDS. draft: as in `gguf.write_model`.
    An existing file is replaced when the new one is complete.
    Raises what `gguf.write_model` does, and UserError if the program fails.
    """
    if way.tool is None:
        yield from gguf.write_model(trained, target, kind, max_memory_gb, draft)
        return
    with gguf.replacing(target, draft) as result, gguf.temporary_file(draft or target) as wide:
        yield from gguf.write_model(
            trained, target, BETWEEN, max_memory_gb, draft=wide, disk_share=DISK_SHARE
        )
        check_memory(wide, max_memory_gb)
        yield from run_tool(way.tool, wide, result, kind)
        check_result(way.tool, wide, result, TOOL_KINDS[kind])


def check_memory(wide: Path, max_memory_gb: float | None) -> None:
    """Raise UserError if the program's largest tensor, as float32 twice, is above the limit."""
    from gguf import GGUFReader

    largest = max(int(tensor.n_elements) for tensor in GGUFReader(wide).tensors)
    hold_memory("quantizing", 2 * VALUE_BYTES * largest, limit_of(max_memory_gb))


def run_tool(tool: Path, source: Path, result: Path, kind: str) -> Iterator[WriteProgress]:
    """Run llama-quantize; yield how much of the result is written, of the size of the source.

    Raises UserError if it fails or hangs. The program and what it started end with this.
    """
    # A temporary name cannot begin with a dash, so no path is taken for an option.
    command = [str(tool), str(source.absolute()), str(result.absolute()), kind.upper()]
    try:
        process = begun(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        raise UserError(f"{tool}: cannot be started ({error.strerror or error})") from error
    total = source.stat().st_size
    try:
        said = b""
        for tail in output_of(process, result):
            said = tail
            yield WriteProgress(min(total, size_of(result)), total, 0)
        status = process.wait(IDLE_S)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise UserError(
            f"{tool}: made no progress for {IDLE_S:g} s and was stopped; try it by hand, or take "
            f"a --dtype of {', '.join(gguf.KINDS)}"
        ) from None
    finally:
        end(process)
    if status != 0:
        ended = f"exit status {status}" if status > 0 else f"killed by signal {-status}"
        line = last_line(said)
        raise UserError(f"{tool}: failed ({ended}{': ' + line if line else ''})")


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


def last_line(output: bytes) -> str:
    """The last line of a program's output that is not empty, safe to show."""
    lines = output.decode("utf-8", "replace").splitlines()
    return shown(next((line.strip() for line in reversed(lines) if line.strip()), ""))


def check_result(tool: Path, source: Path, result: Path, file_type: str) -> None:
    """Raise UserError if `result` is not the model of `source` in the wanted type."""
    from gguf import GGUFReader, LlamaFileType

    try:
        wide, found = GGUFReader(source), GGUFReader(result)
        kind = int(found.fields["general.file_type"].contents())
        shapes = [{t.name: t.shape.tolist() for t in file.tensors} for file in (wide, found)]
        lost = wide.fields.keys() - found.fields.keys()
    except Exception as error:  # the reader raises many kinds for a file that is not GGUF
        raise UserError(f"{tool}: did not write a GGUF file ({shown(str(error))})") from error
    if kind != LlamaFileType[file_type]:
        raise UserError(f"{tool}: wrote a file of type {kind}, not {file_type}")
    if shapes[0] != shapes[1] or lost:
        raise UserError(f"{tool}: wrote other tensors or settings than it was given")
