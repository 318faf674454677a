"""Start a run from an adapter (--from).

The settings of the adapter become the run's, and its arrays are copied into the run's folder
`start/`, so that the run no longer depends on where they came from. Training begins from them,
and an objective can use them as its frozen reference.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from your_ai.config import DEMO_STARTS, REWARD, TrainConfig, flag
from your_ai.config.adapter_facts import MATRICES, settings_choosing
from your_ai.errors import UserError
from your_ai.export import adapter_files
from your_ai.export.adapter_files import AdapterFiles
from your_ai.export.names import block_of, name_in_block
from your_ai.export.untrained_run import creating_with_arrays
from your_ai.files import packaged
from your_ai.gates.text import shortened, shown
from your_ai.hub.find import find_model
from your_ai.memory import allocator
from your_ai.nets import model
from your_ai.nets.saved_adapter import (
    Adapter,
    check_no_vocabulary,
    has_score_head,
    read_score_head,
)
from your_ai.run import checkpoint
from your_ai.run.folder import RUNS, RunFolder, default_name, place_of

ALIKE = "training adapts the same layers in each of the last blocks"


def label_of(source: str) -> str:
    return f"{flag('from_adapter')} {shortened(source)}"


def settings_of(source: str, base: str | None) -> dict[str, Any]:
    """The settings that a run takes over from the adapter that the user calls `source`.

    base: the base model, if the user named it.

    Reads only the files of the adapter. Raises UserError if they are damaged, or if training
    cannot go on from such an adapter.
    """
    files = adapter_files.find_adapter(source, label_of(source))
    adapter = adapter_files.read(files)
    check_trainable(files, adapter)
    found = base or adapter_files.base_name(files.folder, files.base)
    return {
        "from_adapter": lasting_name(source, files),
        "model": found,
        "lora_rank": adapter.ranks.setting,
        "lora_alpha": adapter.alphas.setting,
        "use_rslora": False,  # alpha has its scale
        "lora_layers": blocks_counted(adapter),
        "lora_targets": tuple(sorted({name_in_block(path) for path in adapter.layers})),
        **settings_choosing(adapter.kind),
        "qat": adapter.rounding,
    }


def lasting_name(source: str, files: AdapterFiles) -> str:
    """The source so that it means the same in any folder, except for runs in `runs`."""
    if files.run is not None and files.run.path.parent == RUNS:
        return files.run.name
    for name, folder in DEMO_STARTS.items():
        if files.folder == packaged("models", "demo", folder):
            return name
    return os.path.realpath(os.path.expanduser(source))


def check_trainable(files: AdapterFiles, adapter: Adapter) -> None:
    """Raise UserError for an adapter that training cannot express."""
    check_no_vocabulary(adapter, "a run that starts from it")
    sizes = adapter.sizes
    for path, parts in adapter.layers.items():
        rank, scale = sizes[path]
        if scale <= 0:
            raise UserError(f"{files.config}: scale {scale:g}: must be above 0 to be trained")
        if block_of(path) is None:
            raise UserError(
                f"{files.file}: adapts {shown(path)}, which is outside of the model's blocks; "
                f"{ALIKE}"
            )
        wanted = {*MATRICES, *adapter.kind.vectors}
        if parts.keys() != wanted:
            have, need = (", ".join(sorted(names)) for names in (parts, wanted))
            raise UserError(f"{files.file}: {shown(path)} has {have}, but needs {need}")
        found = rank_of(parts)
        if found != rank:
            raise UserError(
                f"{files.file}: {shown(path)} has rank {found}, but adapter_config.json says {rank}"
            )


def rank_of(parts: dict[str, mx.array]) -> int:
    """The rank of the adapter of a layer: (in, r), or (experts, r, in) for experts."""
    shape = parts["lora_a"].shape
    return shape[1] if len(shape) > 1 else 1


def blocks_counted(adapter: Adapter) -> int:
    """The number of last blocks with adapters, as far as the adapter alone shows it.

    mlx-lm's num_layers may be above the number of blocks, or 0 or less for all blocks. Where the
    config has none, the model's last block is taken to be the last one with adapters. `create`
    compares the result with the model.
    """
    blocks = [block_of(path) or 0 for path in adapter.layers]
    count = adapter.config.get("num_layers")
    if count is None:
        return max(blocks) + 1 - min(blocks)
    return min(count, max(blocks) + 1) if count > 0 else max(blocks) + 1


def create(config: TrainConfig, on_note: Callable[[str], object] = lambda text: None) -> RunFolder:
    """Create the folder of a new run that starts from the adapter `config.from_adapter`.

    on_note: called with what the user should know.

    Raises UserError if the adapter does not fit the model or the settings, or if the folder
    cannot be written.
    """
    source = config.from_adapter
    files = adapter_files.find_adapter(source, label_of(source))
    base = find_model(config.model)
    network = adapter_files.load_base(files, base)
    adapter = adapter_files.fitted(files, adapter_files.read(files), base, network, on_note)
    check_trainable(files, adapter)
    try:
        added = model.add_adapters(network, config)
    except UserError as error:
        raise UserError(f"{label_of(source)}: {error}") from error
    check_same_layers(source, model.adapter_arrays(network).keys(), adapter.arrays.keys())
    check_same_sizes(source, Adapter(files.folder, adapter.arrays, added.config), adapter)
    try:
        model.set_adapters(network, adapter.arrays)
    except UserError as error:
        raise UserError(f"{label_of(source)}: {error}; is it for another --model?") from error
    name = config.run or default_name(config)
    record = {**added.config, "base_files": adapter.config["base_files"]}
    with creating_with_arrays(name, config) as new:
        arrays = dict(adapter.arrays)
        if config.objective == REWARD and has_score_head(adapter):
            arrays[checkpoint.SCORE_WEIGHT] = read_score_head(adapter)
        checkpoint.save_adapter(new.start, arrays, record, step=0)
    del network, adapter
    allocator.free()  # this process may go on to train
    return place_of(name)


def check_same_layers(source: str, ours: Iterable[str], theirs: Iterable[str]) -> None:
    """Raise UserError if the settings adapt other layers than the adapter.

    ours, theirs: names of arrays.
    """
    layers = {name.rpartition(".")[0] for name in ours}
    adapted = {name.rpartition(".")[0] for name in theirs}
    if extra := sorted(adapted - layers):
        raise UserError(
            f"{label_of(source)}: adapts {shown(extra[0])}, and the settings do not (or the model "
            f"has no such layer); {ALIKE}"
        )
    if missing := sorted(layers - adapted):
        raise UserError(
            f"{label_of(source)}: has nothing for {missing[0]}, which the settings adapt; {ALIKE}"
        )


def check_same_sizes(source: str, ours: Adapter, theirs: Adapter) -> None:
    """Raise UserError if the settings give a layer another rank or scale than the adapter has."""
    sizes = theirs.sizes
    for path, (rank, scale) in ours.sizes.items():
        own = sizes[path]
        if rank != own.rank or not math.isclose(scale, own.scale):
            raise UserError(
                f"{label_of(source)}: {path} has rank {own.rank} and scale {own.scale:g}, and the "
                f"settings give it {rank} and {scale:g}; leave --lora-rank and --lora-alpha out"
            )
