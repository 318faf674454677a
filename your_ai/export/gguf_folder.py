"""A folder around one GGUF file, complete or not there: for Ollama and LM Studio.

The files are written in `.NAME.exporting` next to the target, under a lock. What a killed process
left there is deleted by the next export to the same target.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from your_ai.errors import UserError
from your_ai.export import gguf_convert, gguf_quantize
from your_ai.files import sync
from your_ai.modelfiles.shards import WriteProgress, put_in_place
from your_ai.modelfiles.targets import GGUF, Work, check_target, clear, locked, write_error
from your_ai.nets.saved_adapter import Trained

RECORD = ""  # nothing of an interrupted export is kept
UNFIT = re.compile(r"[^A-Za-z0-9._-]+")
LONGEST = 80  # characters of a name in Ollama, and of a publisher's model on the hub about as many


def plain_name(name: str) -> str:
    """A run's name as other programs take it: letters, digits, dots, dashes, underscores."""
    return UNFIT.sub("-", name).lstrip("._-")[:LONGEST] or "model"


def model_file(name: str, kind: str) -> str:
    """The name of a GGUF file, from which LM Studio and the hub read the type."""
    return f"{plain_name(name)}-{kind.upper()}{GGUF}"


def write_model(
    trained: Trained,
    target: Path,
    name: str,
    kind: str,
    way: gguf_quantize.Way,
    max_memory_gb: float | None = None,
    force: bool = False,
    texts: Mapping[str, str] | None = None,
) -> Iterator[WriteProgress]:
    """Write the fused model as the file `name` in the folder `target`, beside `texts`.

    texts: other files, by name. force: replace an existing model once the new one is complete.
    Raises UserError if memory or disk is too small, or the target cannot be written.
    """

    def write(file: Path) -> Iterator[WriteProgress]:
        return gguf_quantize.write_model(trained, target, kind, way, max_memory_gb, draft=file)

    yield from write_folder(target, name, write, force, texts or {})


def write_adapter(
    trained: Trained,
    target: Path,
    name: str,
    force: bool,
    texts: Mapping[str, str],
    script: Path | None = None,
) -> Iterator[WriteProgress]:
    """Write the run's adapter as the file `name` in the folder `target`, beside `texts`.

    script: as for `gguf_convert.write_adapter`.
    """

    def write(file: Path) -> Iterator[WriteProgress]:
        return gguf_convert.write_adapter(trained, file, script)

    yield from write_folder(target, name, write, force, texts)


def write_folder(
    target: Path,
    name: str,
    write: Callable[[Path], Iterator[WriteProgress]],
    force: bool,
    texts: Mapping[str, str],
) -> Iterator[WriteProgress]:
    check_target(target, force)
    work = Work(target, "exporting", RECORD)
    try:
        with locked(work.folder, waits=False, creates=True):
            try:
                clear(work.folder)
                yield from write(work.folder / name)
                for other, text in texts.items():
                    (work.folder / other).write_text(text, encoding="utf-8")
                for path in (*work.folder.iterdir(), work.folder):
                    sync(path)
                if os.path.lexists(target) and not force:
                    raise UserError(f"{target}: exists; choose another name, or use --force")
                put_in_place(work, replaces=force)
            except BaseException:
                clear(work.folder)
                raise
    except OSError as error:
        raise write_error(target, error) from error
