"""The model that a run of whole weights leaves: the base with the trained arrays in it."""

from __future__ import annotations

from pathlib import Path

from mlx.utils import tree_flatten

from your_ai.config.adapter_facts import FULL
from your_ai.engine.masters import KIND
from your_ai.export.fused_weights import with_turn_end
from your_ai.files import sha256
from your_ai.gates.text import now_and_then, size_text
from your_ai.hub.find import fingerprint
from your_ai.memory.limit import MemoryLimit
from your_ai.modelfiles.shards import (
    Lazy,
    WriteProgress,
    lazy_of,
    load_as_written,
    read_bytes,
    write_model,
)
from your_ai.modelfiles.targets import Work
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.parts import put
from your_ai.nets.saved_adapter import base_files
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder

RECORD = "trained.json"


def write_result(
    folder: RunFolder, base: Path, step: int, limit: MemoryLimit, log: events.EventLog
) -> None:
    """Write the model of a checkpoint to the run's folder, tensor by tensor; continues interrupted
    work, and replaces an older result. Then write an adapter without arrays, by which commands find
    the model.

    base: the folder of the model that was trained. Raises UserError if memory or disk space is too
    small, and RunError if a file cannot be read.
    """
    place = checkpoint.path_at(folder.checkpoints, step)
    files = sorted(place.glob(f"{KIND}-*.safetensors"))

    def text_of(progress: WriteProgress) -> str:
        done, total = size_text(progress.done_bytes), size_text(progress.total_bytes)
        return f"writing the model: {done} of {total}"

    report = now_and_then(lambda text: log.write(events.Stage(text=text)), text_of)
    work = Work(folder.model, "writing", RECORD)
    settings = [step, *map(sha256, files)]
    lazy = with_turn_end(trained_lazily(base, files), base)
    for progress in write_model(lazy, base, work, settings, limit, replaces=True):
        report(progress)
    files_of_model = base_files(fingerprint(folder.model))
    config = {"fine_tune_type": FULL.name, "base_files": files_of_model}
    checkpoint.save_adapter(folder.adapter, {}, config, step)  # last: it marks a finished result


def trained_lazily(base: Path, files: list[Path]) -> Lazy:
    """The model in `base` with the arrays of these files, in the dtypes of its own."""
    network, config = load_as_written(base)
    sizes = read_bytes(base, dict(tree_flatten(network.parameters())))
    dtypes = {name: array.dtype for name, array in tree_flatten(network.parameters())}
    most = max(sizes.values())
    for file in files:
        for name, array in load_arrays(file).items():
            most = max(most, 2 * array.nbytes)
            put(network, {name: array.astype(dtypes[name])})
    return lazy_of(network, config, most)
