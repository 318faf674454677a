"""The model that a run of whole weights leaves: the files of its base with the trained arrays."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from your_ai.config.adapter_facts import FULL
from your_ai.engine.masters import KIND
from your_ai.engine.spill import COPIED_BYTES, bytes_of
from your_ai.engine.weights import DTYPES, FileTensor, Opened
from your_ai.errors import RESUME, RunError
from your_ai.export.fused_weights import with_turn_end
from your_ai.files import atomic_folder, remedy_of
from your_ai.gates.text import now_and_then, size_text
from your_ai.gates.untrusted import Entry, links_outside, read_header, read_json
from your_ai.hub.check import INDEX
from your_ai.hub.find import fingerprint
from your_ai.modelfiles.shards import Lazy, save_tokenizer
from your_ai.nets.saved_adapter import base_files
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder

SLICE_BYTES = 4 << 20  # of a trained array, read and written at a time
COPIED = ("*.py", "generation_config.json", INDEX)
Tensors = dict[tuple[str, str], FileTensor]  # by the name of the file and of the tensor in it


def write_result(folder: RunFolder, opened: Opened, step: int, log: events.EventLog) -> None:
    """Write the model of a checkpoint to the run's folder, a few rows at a time, over an older one.
    Then write an adapter without arrays, by which commands find it.

    opened: the model that was trained. Raises RunError if a file cannot be read or written.
    """
    place, base = checkpoint.path_at(folder.checkpoints, step), opened.folder
    replaced: Tensors = {}
    for file in sorted(place.glob(f"{KIND}-*.safetensors")):
        for entry in read_header(file):
            stored = opened.tensors[entry.name]
            replaced[stored.file.name, stored.name] = FileTensor(file, entry.name, stored.dtype)
    sources = sorted(base.glob("model*.safetensors"))
    total, done = sum(file.stat().st_size for file in sources), 0
    report = now_and_then(lambda text: log.write(events.Stage(text=text)), lambda text: text)

    def tell(size: int) -> None:
        nonlocal done
        done += size
        report(f"writing the model: {size_text(done)} of {size_text(total)}")

    config = read_json(base / "config.json", "a model folder has one")
    found = with_turn_end(Lazy({}, 0, config, False, {}), base)
    texts = {"config.json": json.dumps(found.config, indent=4), **found.texts}
    try:
        with atomic_folder(folder.model) as target:
            for file in sources:
                write_like(file, target / file.name, replaced, tell)
            save_tokenizer(opened.tokenizer(), target)
            for path in (path for pattern in COPIED for path in base.glob(pattern)):
                if path.is_file() and not links_outside(path, base):
                    shutil.copyfile(path, target / path.name)
            for name, text in texts.items():
                (target / name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"cannot be written ({error.strerror or error})"
        raise RunError(f"{folder.model}: {reason}; {remedy_of(error)}, {RESUME}") from error
    files = base_files(fingerprint(folder.model))
    checkpoint.save_adapter(
        folder.adapter, {}, {"fine_tune_type": FULL.name, "base_files": files}, step
    )


def write_like(source: Path, target: Path, replaced: Tensors, tell: Callable[[int], None]) -> None:
    """Write a file like `source`, in which the tensors that are `replaced` have other numbers.

    tell: is called with the bytes that were written. Raises OSError.
    """
    with source.open("rb") as old, target.open("wb") as new:
        entries = read_header(source)
        new.write(old.read(entries[0].start if entries else source.stat().st_size))
        for entry in entries:
            tensor = replaced.get((source.name, entry.name))
            old.seek(entry.start)
            for part in copied(entry, old.read) if tensor is None else rows_of(tensor, entry):
                new.write(part)
            tell(entry.end - entry.start)


def copied(entry: Entry, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The bytes of a tensor, a part at a time."""
    left = entry.end - entry.start
    while left:
        part = read(min(left, COPIED_BYTES))
        if not part:
            raise OSError("the file of the model is now shorter")
        left -= len(part)
        yield part


def rows_of(tensor: FileTensor, entry: Entry) -> Iterator[memoryview]:
    """The bytes of a trained array in the dtype of the tensor that it replaces."""
    cast = FileTensor(tensor.file, tensor.name, DTYPES[entry.kind])
    of_row = math.prod(cast.shape[1:]) * cast.dtype.size
    step = max(1, SLICE_BYTES // of_row)
    for start in range(0, cast.shape[0], step):
        yield bytes_of(cast.rows(start, start + step))
