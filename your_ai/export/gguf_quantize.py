"""How a GGUF file is made: by our writer or llama.cpp's converter, then by its llama-quantize.

The latter makes the types that only llama.cpp computes, from a file of the former.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from your_ai.errors import UserError
from your_ai.export import gguf, gguf_convert
from your_ai.export.llama_cpp import read_back, run_program
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
VALUE_BYTES = 4  # of a float32; the program converts a tensor to float32, and then from it


@dataclass(frozen=True)
class Way:
    """The programs that make a file."""

    tool: Path | None
    """The program llama-quantize; None if the type needs none."""
    script: Path | None = None
    """llama.cpp's converter; None for our own writer."""

    def texts(self, kind: str) -> list[str]:
        """Say how a file of the type `kind` is made, where there is a choice."""
        found = [] if self.script is None else [f"converted by {self.script}"]
        if kind in TOOL_KINDS:
            found.append(f"{kind}: quantized by {self.tool or 'the library gguf'}")
        return found


def way_of(kind: str, chosen: Path | None = None, script: Path | None = None) -> Way:
    """Choose how to compute the type `kind`, one of gguf.KINDS or TOOL_KINDS.

    chosen: the program that the user named; default: the one on PATH.
    script: the converter that is needed, as of `gguf_convert.script_for`.
    Raises UserError if the type needs the program and it is missing, or if `chosen` is not a
    program.
    """
    made = tuple(gguf.KINDS) if script is None else tuple(gguf_convert.DTYPES)
    if chosen is not None and not (chosen.is_file() and os.access(chosen, os.X_OK)):
        raise UserError(f"--llama-quantize {chosen}: is not a program; give the path of {PROGRAM}")
    if kind not in TOOL_KINDS:
        if chosen is not None:
            raise UserError(
                f"--llama-quantize: {kind} does not need it; leave it out, or give a --dtype of "
                f"{', '.join(TOOL_KINDS)}"
            )
        return Way(None, script)
    found = chosen or (Path(place) if (place := shutil.which(PROGRAM)) else None)
    if found is None and kind not in made:
        raise UserError(
            f"--dtype {kind}: needs llama.cpp's {PROGRAM}, which is not on PATH; install "
            f"llama.cpp (on a Mac: brew install llama.cpp), name it with --llama-quantize, or "
            f"take a type that needs no program: {', '.join(made)}"
        )
    return Way(found and found.absolute(), script)


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
    write = gguf.write_model
    if way.script is not None:
        write = functools.partial(gguf_convert.write_model, script=way.script)
    if way.tool is None:
        yield from write(trained, target, kind, max_memory_gb, draft)
        return
    with gguf.replacing(target, draft) as result, gguf.temporary_file(draft or target) as wide:
        yield from write(trained, target, BETWEEN, max_memory_gb, wide, DISK_SHARE)
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
    instead = f"try it by hand, or take a --dtype of {', '.join(gguf.KINDS)}"
    return run_program(tool, command, result, source.stat().st_size, instead)


def check_result(tool: Path, source: Path, result: Path, file_type: str) -> None:
    """Raise UserError if `result` is not the model of `source` in the wanted type."""
    from gguf import GGUFReader

    wide, found = GGUFReader(source), read_back(tool, result, file_type)
    shapes = [{t.name: t.shape.tolist() for t in file.tensors} for file in (wide, found)]
    if shapes[0] != shapes[1] or wide.fields.keys() - found.fields.keys():
        raise UserError(f"{tool}: wrote other tensors or settings than it was given")
