"""Read adapters of your_ai, mlx-lm and PEFT from their files into one form.

An adapter is read in two parts. What its files alone show is checked first, so that a bad adapter
is refused before its base model is looked for. What depends on the model is checked then.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.config import DEMO_STARTS
from your_ai.config.adapter_facts import FACTS, FULL, LORA, TITLES, VECTORS
from your_ai.config.adapter_starts import INIT
from your_ai.errors import UserError, first_line
from your_ai.export import peft
from your_ai.export.names import block_of, check_names, name_in_block
from your_ai.export.peft import PREFIX, SUFFIXES
from your_ai.export.peft_experts import all_paths, experts_of, with_stacks
from your_ai.export.peft_vocabulary import low_rank_names, taken_apart, with_tied_head
from your_ai.export.transformers_names import KNOWN, is_in_peft
from your_ai.files import packaged
from your_ai.gates.paths import missing_text
from your_ai.gates.text import shown
from your_ai.gates.untrusted import read_header, read_json
from your_ai.hub.find import Missing, find_model, fingerprint, is_local
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.nets import model
from your_ai.nets.layer_sizes import LayerSize, sizes_in_config
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.saved_adapter import (
    Adapter,
    base_files,
    check_base,
    choose_adapter,
    put_layers,
    read_adapter,
)
from your_ai.nets.vocabulary_lora import LOW_RANK, entries_of
from your_ai.run import checkpoint
from your_ai.run.checkpoint import PEFT_ADAPTERS
from your_ai.run.folder import RUNS, RunFolder

PICKLED = "adapter_model.bin"
# Tensor names of the various PEFT versions -> the part of an adapter layer.
PARTS = {
    **{suffix: part for part, suffix in SUFFIXES.items()},
    "lora_A.default.weight": "lora_a",
    "lora_B.default.weight": "lora_b",
    "lora_magnitude_vector.weight": "m",
    "lora_magnitude_vector.default.weight": "m",
}
LINEAR = (nn.Linear, nn.QuantizedLinear)


@dataclass(frozen=True)
class AdapterFiles:
    """The files of an adapter, of which adapter_config.json has been read."""

    folder: Path
    file: Path
    """The file with the arrays."""
    peft: peft.PeftSettings | None
    """The settings of a PEFT adapter; None for one in mlx-lm's format."""
    base: Any
    """The base model as the adapter names it, which may be anything."""
    run: RunFolder | None = None
    """The run that it belongs to, if it was found by the run."""

    @property
    def config(self) -> Path:
        return self.folder / checkpoint.ADAPTER_CONFIG


def find_adapter(name: str, label: str) -> AdapterFiles:
    """Find the adapter that a user names: by a run, the folder of an adapter, or its file.

    label: the beginning of the error message. Raises UserError, which lists the checkpoints of a
    run without a finished adapter.
    """
    path = Path(os.path.expanduser(name))
    for place in (RUNS / name, path):
        if os.path.isfile(place / checkpoint.ADAPTER_CONFIG):  # a pushed one has a config.yaml, too
            return files_in(place)
        run = RunFolder(place)
        if os.path.isfile(run.config):
            chosen, _ = choose_adapter(run, by_folder=True)
            return dataclasses.replace(files_in(chosen), base=run.read_config().model, run=run)
    if name in DEMO_STARTS:
        return files_in(packaged("models", "demo", DEMO_STARTS[name]))
    if os.path.isfile(path):
        return files_in(path.parent, path)
    if os.path.isdir(path):
        return files_in(path)
    runs = [run.parent.name for run in RUNS.glob("*/config.yaml")]
    raise UserError(f"{label}: {missing_text(name, 'run or folder', (*DEMO_STARTS, *runs))}")


def files_in(source: Path, file: Path | None = None) -> AdapterFiles:
    """The adapter in a folder; file: the file with its arrays, if it has an unusual name.

    Raises UserError if adapter_config.json has settings that mlx-lm adapters cannot have, or if
    the folder is one of your_ai and was damaged.
    """
    path = source / checkpoint.ADAPTER_CONFIG
    config = read_json(path, "an adapter has one")
    if "peft_type" in config:
        settings = peft.read_settings(path, config)
        return AdapterFiles(source, file or source / PEFT_ADAPTERS, settings, settings.base)
    if config.get("fine_tune_type") == FULL.name:
        raise UserError(f"{path}: is of a run that trained whole weights; its result is a model")
    if "lora_parameters" not in config:
        raise UserError(
            f"{path}: is not a PEFT or mlx-lm adapter config; give the folder of such an adapter"
        )
    if config.get(INIT) is not None:
        raise UserError(
            f"{source}: began with --init {shown(str(config[INIT]))}, so it is added to other "
            "weights than those of the base; use what your_ai export RUN --to mlx makes of it"
        )
    file = file or source / checkpoint.ADAPTERS
    ours = os.path.isfile(source / checkpoint.CHECKSUMS) and file.name == checkpoint.ADAPTERS
    names = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG)
    if ours and (problem := checkpoint.fault(source, names)) is not None:
        raise UserError(f"{problem}; use another adapter or checkpoint")
    return AdapterFiles(source, file, None, config.get("model"))


def read(files: AdapterFiles) -> Adapter:
    """Read the arrays in mlx-lm's form, as float32 like those of trained adapters.

    The config of a PEFT adapter lacks what only the model shows; `fitted` adds it.
    Raises UserError if the arrays are damaged, not finite, or contradict the settings.
    """
    if files.peft is None:
        found = read_adapter(files.folder, files.file)
        if found.vocabulary:
            raise UserError(
                f"{files.folder}: has trained embeddings; go on with its run (--resume), or train "
                "the fused model: your_ai fuse"
            )
        return in_float32(files.file, found)
    arrays, vocabulary, entries = taken_apart(
        files.file, read_arrays(files.file), PREFIX, files.peft.saved, files.peft.tokens
    )
    outside = low_rank_names(arrays, PREFIX)
    named = {name: outside.get(name) or parse(files.file, name) for name in arrays}
    sizes = peft.sizes_of(files.peft, {path for path, _ in named.values()})
    checked = {}
    for name, (path, part) in named.items():
        array = check_array(files, name, part, arrays[name], sizes[path][0])
        checked[f"{path}.{part}"] = array
    own = {path: sizes.pop(path) for path, _ in outside.values() if path in sizes}
    if own and (files.peft.kind is not LORA or not sizes):
        what = f"with {files.peft.kind.title}" if sizes else "and no layer of a block"
        raise UserError(f"{files.file}: adapts {shown(min(own))} {what}, which is not supported")
    config = {
        "fine_tune_type": files.peft.kind.name,
        "lora_parameters": {
            **sizes_in_config(sizes or {"": LayerSize(files.peft.rank, files.peft.scale)}),
            "dropout": files.peft.dropout,
        },
        **entries,
        **entries_of(own),
    }
    found = in_float32(files.file, Adapter(files.folder, checked, config, vocabulary))
    for path, part in outside.values():
        vocabulary[f"{path}.{LOW_RANK}.{part}"] = found.arrays.pop(f"{path}.{part}")
    return found


def load_base(files: AdapterFiles, base: Path) -> nn.Module:
    """The model in `base` with lazy weights. Raises UserError if PEFT names its layers differently.

    Only then do the names in `files` say which layers they are.
    """
    if files.peft is not None:
        check_names(base)
    return model.load_network(model_folder(base, None), mx.float32)[0]


def fitted(
    files: AdapterFiles,
    adapter: Adapter,
    base: Path,
    network: nn.Module,
    on_note: Callable[[str], object] = lambda text: None,
) -> Adapter:
    """The adapter with a complete config, checked against its base model.

    network: from `load_base`, without adapters. on_note: called with what the user should know.

    Raises UserError if the adapter was trained on other files, or if its settings or names do not
    fit the model. `check_fit` then compares the shapes.
    """
    if files.peft is None:
        check_base(adapter, base)
        config = with_keys(adapter, network)
    else:
        linears = {path for path, module in network.named_modules() if isinstance(module, LINEAR)}
        kind, layers = check_names(base), {*adapter.layers, *adapter.low_rank}
        experts = experts_of(network, kind)
        every = linears | adapter.low_rank.keys()
        known = {path for path in every if path in layers or is_in_peft(KNOWN[kind], path)}
        if note := check_layers(files.file, layers, files.peft, all_paths(known, experts)):
            on_note(note)
        adapter = with_stacks(files.file, adapter, experts)
        linears |= experts.keys()
        keys = keys_of(set(adapter.layers), linears)
        parameters = {**adapter.config["lora_parameters"], "keys": keys}
        config = {
            **adapter.config,
            "num_layers": blocks_of(set(adapter.layers), linears),
            "lora_parameters": parameters,
        }
        config = with_tied_head(config, network) if files.peft.ties else config
    record = {"base_files": base_files(fingerprint(base))}
    return dataclasses.replace(adapter, config={**config, **record})


def with_keys(adapter: Adapter, network: nn.Module) -> dict[str, Any]:
    """The config of an adapter in mlx-lm's format, with `keys` if it adapts only some layers.

    Without `keys`, mlx-lm adapts all linear layers; it used to adapt those of queries and values.
    """
    parameters, layers = adapter.config["lora_parameters"], set(adapter.layers)
    linears = {path for path, module in network.named_modules() if isinstance(module, model.LINEAR)}
    if parameters.get("keys") is not None or not layers <= linears:
        return adapter.config
    parameters = {**parameters, "keys": keys_of(layers, linears)}
    count = blocks_of(layers, linears)
    return {**adapter.config, "num_layers": count, "lora_parameters": parameters}


def find_base_model(source: Path, given: str | None, named: Any) -> Path:
    """The folder of the base model: `given`, or else the model that the adapter names."""
    if given is not None:
        return find_model(given)
    name = base_name(source, named)
    try:
        return find_model(name)
    except Missing as error:
        raise UserError(
            f"{source}: its base model {name} is not on this machine; run: your_ai download "
            f"{name}, or give the model with --model"
        ) from error


def base_name(source: Path, named: Any) -> str:
    """The base model that an adapter names, which is on this machine or can be downloaded.

    Raises UserError if it names none, or one that does not exist.
    """
    if not isinstance(named, str) or not named:
        raise UserError(f"{source}: does not name its base model; give it with --model")
    try:
        is_local(named)
    except UserError as error:
        reason = str(error).removeprefix(f"--model {named}: ")
        raise UserError(
            f"{source}: its base model {shown(named)}: {shown(reason)}; give the model with --model"
        ) from error
    return named


def check_layers(
    file: Path, layers: set[str], settings: peft.PeftSettings, linears: set[str]
) -> str:
    """Raise UserError if the adapted layers are not those that PEFT's settings select.

    linears: the linear layers of the model. Returns what to say of targets that match none.
    """
    for path in sorted(layers - linears):
        raise UserError(
            f"{file}: adapts {path}, a layer that the model does not have; is it for another "
            "--model?"
        )
    note = peft.missing_targets(settings, linears)
    for path in sorted(peft.targeted(settings, linears) ^ layers):
        what = "has tensors for" if path in layers else "has no tensors for"
        which = "does not name" if path in layers else "names"
        raise UserError(f"{file}: {what} {path}, which target_modules {which}")
    return note


def read_arrays(file: Path) -> dict[str, mx.array]:
    if not file.exists() and (pickled := file.with_name(PICKLED)).exists():
        raise UserError(
            f"{pickled}: is a pickle file, which is not safe to load; if you trust it, load it "
            "with PEFT and save it again, which writes safetensors"
        )
    if not file.exists():
        raise UserError(f"{file}: is missing; every PEFT adapter has this file")
    try:
        read_header(file)
        return load_arrays(file)
    except UserError as error:
        raise UserError(f"{error}; get the adapter again") from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({first_line(error)})") from error


def parse(file: Path, name: str) -> tuple[str, str]:
    """Split PEFT's tensor name into the path of the layer in the model and the part."""
    for suffix, part in PARTS.items():
        if name.startswith(PREFIX) and name.endswith(f".{suffix}"):
            return name[len(PREFIX) : -len(suffix) - 1], part
    if "lora_embedding_" in name:
        raise UserError(
            f"{file}: adapts an embedding ({name}), which mlx-lm adapts in a different way"
        )
    if ".base_layer." in name or not any(mark in name for mark in ("lora_", "LORA_")):
        raise UserError(
            f"{file}: contains {name}, a weight of the base model; save the adapter without it "
            "(save_embedding_layers=False)"
        )
    raise UserError(f"{file}: contains {name}, which is not a {TITLES} tensor")


def check_array(files: AdapterFiles, name: str, part: str, array: mx.array, rank: int) -> mx.array:
    """Check the dtype, shape and rank of an array of PEFT, and return it in mlx-lm's form."""
    file = files.file
    if not mx.issubdtype(array.dtype, mx.floating):
        raise UserError(f"{file}: {name} has dtype {array.dtype}, not a floating-point dtype")
    if part in VECTORS:
        if files.peft is not None and part not in files.peft.kind.vectors:
            needed = next(facts.setting for facts in FACTS.values() if part in facts.vectors)
            raise UserError(f"{file}: contains {name}, but {needed} is not set")
        if array.ndim != 1:
            raise UserError(f"{file}: {name} is {model.text_of_shape(array.shape)}, not a vector")
        return array
    shape = model.text_of_shape(array.shape)
    if array.ndim != 2:
        raise UserError(f"{file}: {name} is {shape}, not a matrix")
    if array.shape[0 if part == "lora_a" else 1] != rank:
        raise UserError(f"{file}: {name} is {shape}, but r is {rank}")
    return array.T


def blocks_of(layers: set[str], linears: set[str]) -> int:
    """The number of last blocks that contain all adapted `layers` of a model's `linears`."""
    blocks = {block for path in linears if (block := block_of(path)) is not None}
    first = min((block for path in layers if (block := block_of(path)) is not None), default=0)
    return sum(block >= first for block in blocks)


def keys_of(layers: set[str], linears: set[str]) -> list[str]:
    """The `keys` with which mlx-lm adapts exactly `layers` out of a model's `linears`.

    If each of the last blocks has the same adapted layers, these are layer names inside a block,
    as mlx-lm itself writes them. Otherwise they are full paths, which mlx-lm also reads.
    """
    blocks = {block for path in linears if (block := block_of(path)) is not None}
    first = min((block for path in layers if (block := block_of(path)) is not None), default=0)
    last = {block for block in blocks if block >= first}
    names = {name_in_block(path) for path in layers}
    alike = {path for path in linears if block_of(path) in last and name_in_block(path) in names}
    return sorted(names if layers == alike else layers)


def in_float32(file: Path, adapter: Adapter) -> Adapter:
    """Cast the adapter to float32, like trained ones. Raises UserError for NaN or infinity."""
    arrays = {}
    for name, array in adapter.arrays.items():
        if not mx.issubdtype(array.dtype, mx.floating):
            raise UserError(
                f"{file}: {shown(name)} has dtype {array.dtype}, not a floating-point dtype"
            )
        arrays[name] = array.astype(mx.float32)
        try:
            finite = mx.isfinite(arrays[name]).all().item()
        except RuntimeError as error:  # the lazy arrays are read only here
            raise UserError(f"{file}: cannot be read ({first_line(error)})") from error
        if not finite:
            raise UserError(
                f"{file}: {shown(name)} contains NaN or infinity; the adapter is unusable"
            )
    return dataclasses.replace(adapter, arrays=arrays)


def check_fit(file: Path, network: nn.Module, adapter: Adapter) -> None:
    """Raise UserError if a name or a shape does not match the model."""
    put_layers(network, adapter)
    try:
        model.set_adapters(network, adapter.arrays | adapter.vocabulary)
    except UserError as error:
        raise UserError(f"{file}: {error}; is it for another --model?") from error
