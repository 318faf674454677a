"""Import adapters of PEFT and mlx-lm as runs.

Like a trained run, an imported run has a config.yaml and an adapter. It also has
`imported.json`, which says where the adapter came from. It cannot be resumed, because it has no
data and no optimizer state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai import __version__
from your_ai.config import TrainConfig
from your_ai.errors import RunError, UserError
from your_ai.export import peft_config
from your_ai.export.names import block_of, check_names, name_in_block
from your_ai.export.peft import ADAPTER_MODEL, PREFIX, SUFFIXES
from your_ai.files import sha256, sync
from your_ai.gates.untrusted import read_header, read_json
from your_ai.hub.find import Missing, find_model
from your_ai.hub.fingerprint import fingerprint
from your_ai.modelfiles.targets import write_error
from your_ai.nets import model
from your_ai.nets.saved_adapter import Adapter, base_files, check_base, put_layers, read_adapter
from your_ai.run import checkpoint, events, folder
from your_ai.run.folder import RunFolder

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


def import_adapter(source: Path, base: str | None = None, name: str | None = None) -> RunFolder:
    """Create a run from the adapter in `source`, at step 0.

    base: the base model, if the adapter does not name it or it is in another place.
    name: of the run.
    Raises UserError, before anything is written, if the adapter is damaged, does not fit the
    model, or needs something that mlx-lm adapters cannot do.
    """
    path = source / checkpoint.ADAPTER_CONFIG
    config = read_json(path, "an adapter has one")
    if "peft_type" in config:
        settings = peft_config.read(path, config)
        named = settings.base
        file = source / ADAPTER_MODEL
    elif "lora_parameters" in config:
        settings, named = None, config.get("model")
        file = source / checkpoint.ADAPTERS
    else:
        raise UserError(
            f"{path}: is not a PEFT or mlx-lm adapter config; give the folder of such an adapter"
        )
    found = find_base_model(source, base, named)
    if settings is not None:
        check_names(found)
    network, _ = model.load_network(found, mx.float32)
    if settings is not None:
        adapter = from_peft(file, settings, network)
    else:
        adapter = read_adapter(source)
        check_base(adapter, found)
    adapter = in_float32(file, adapter)
    check_fit(file, network, adapter)
    files = {"base_files": base_files(fingerprint(found)), "model": base or named}
    adapter = dataclasses.replace(adapter, config={**adapter.config, **files})
    return write(source, file, adapter, name)


def find_base_model(source: Path, given: str | None, named: Any) -> Path:
    """The folder of the base model: `given`, or else the model that the adapter names."""
    if given is not None:
        return find_model(given)
    if not isinstance(named, str) or not named:
        raise UserError(f"{source}: does not name its base model; give it with --model")
    try:
        return find_model(named)
    except Missing as error:
        raise UserError(
            f"{source}: its base model {named} is not on this machine; run: your_ai download "
            f"{named}, or give the model with --model"
        ) from error
    except UserError as error:
        reason = str(error).removeprefix(f"--model {named}: ")
        raise UserError(
            f"{source}: its base model {named}: {reason}; give the model with --model"
        ) from error


def from_peft(file: Path, settings: peft_config.PeftSettings, network: nn.Module) -> Adapter:
    """Convert the adapter in PEFT's `file` to mlx-lm's form.

    Raises UserError, naming the file, if a tensor is missing or superfluous, does not have the
    shape that the settings give, or belongs to a layer that the model does not have.
    """
    arrays = read_arrays(file)
    layers: dict[str, dict[str, mx.array]] = {}
    for name, array in arrays.items():
        path, part = parse(file, name)
        layers.setdefault(path, {})[part] = check_array(file, name, part, array, settings)
    linears = {path for path, module in network.named_modules() if isinstance(module, LINEAR)}
    for path in sorted(layers.keys() - linears):
        raise UserError(
            f"{file}: adapts {path}, a layer that the model does not have; is it for another "
            "--model?"
        )
    peft_config.check_targets(settings, linears)
    for path in sorted(peft_config.targeted(settings, linears) ^ layers.keys()):
        what = "has tensors for" if path in layers else "has no tensors for"
        which = "does not name" if path in layers else "names"
        raise UserError(f"{file}: {what} {path}, which target_modules {which}")
    return Adapter(
        folder=file.parent,
        arrays={f"{path}.{part}": a for path, parts in layers.items() for part, a in parts.items()},
        config=mlx_config(settings, set(layers), linears),
    )


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
        return mx.load(str(file))
    except UserError as error:
        raise UserError(f"{error}; get the adapter again") from error
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({model.first_line(error)})") from error


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
    raise UserError(f"{file}: contains {name}, which is not a LoRA or DoRA tensor")


def check_array(
    file: Path, name: str, part: str, array: mx.array, settings: peft_config.PeftSettings
) -> mx.array:
    """Check the dtype, shape and rank of an array, and return it in mlx-lm's form."""
    if not mx.issubdtype(array.dtype, mx.floating):
        raise UserError(f"{file}: {name} has dtype {array.dtype}, not a floating-point dtype")
    if part == "m":
        if not settings.dora:
            raise UserError(f"{file}: contains {name}, but use_dora is not set")
        if array.ndim != 1:
            raise UserError(f"{file}: {name} is {model.text_of_shape(array.shape)}, not a vector")
        return array
    shape = model.text_of_shape(array.shape)
    if array.ndim != 2:
        raise UserError(f"{file}: {name} is {shape}, not a matrix")
    if array.shape[0 if part == "lora_a" else 1] != settings.rank:
        raise UserError(f"{file}: {name} is {shape}, but r is {settings.rank}")
    return array.T


def mlx_config(
    settings: peft_config.PeftSettings, layers: set[str], linears: set[str]
) -> dict[str, Any]:
    """mlx-lm's adapter_config.json for these layers of a model.

    If each of the last blocks has the same adapted layers, the keys are layer names inside a
    block, as mlx-lm itself writes them. Otherwise they are full paths, which mlx-lm also reads.
    """
    blocks = {block for path in linears if (block := block_of(path)) is not None}
    first = min((block for path in layers if (block := block_of(path)) is not None), default=0)
    last = {block for block in blocks if block >= first}
    names = {name_in_block(path) for path in layers}
    alike = {path for path in linears if block_of(path) in last and name_in_block(path) in names}
    return {
        "fine_tune_type": "dora" if settings.dora else "lora",
        "num_layers": len(last),
        "lora_parameters": {
            "rank": settings.rank,
            "scale": settings.scale,
            "dropout": settings.dropout,
            "keys": sorted(names if layers == alike else layers),
        },
    }


def in_float32(file: Path, adapter: Adapter) -> Adapter:
    """Cast the adapter to float32, like trained ones. Raises UserError for NaN or infinity."""
    arrays = {name: array.astype(mx.float32) for name, array in adapter.arrays.items()}
    for name, array in arrays.items():
        try:
            finite = mx.isfinite(array).all().item()
        except RuntimeError as error:  # the lazy arrays are read only here
            raise UserError(f"{file}: cannot be read ({model.first_line(error)})") from error
        if not finite:
            raise UserError(f"{file}: {name} contains NaN or infinity; the adapter is unusable")
    return dataclasses.replace(adapter, arrays=arrays)


def check_fit(file: Path, network: nn.Module, adapter: Adapter) -> None:
    """Raise UserError if a name or a shape does not match the model."""
    put_layers(network, adapter)
    try:
        model.set_adapters(network, adapter.arrays)
    except UserError as error:
        raise UserError(f"{file}: {error}; is it for another --model?") from error


def write(source: Path, file: Path, adapter: Adapter, name: str | None) -> RunFolder:
    """Create the run's folder, completely or not at all."""
    try:
        config = config_of(adapter, name or "")
    except UserError as error:  # training refuses such a setting
        raise UserError(f"{source / checkpoint.ADAPTER_CONFIG}: {error}") from error
    name = name or folder.default_name(dataclasses.replace(config, data=str(source.absolute())))
    record = {
        "from": source.absolute().name,
        "files": {path.name: sha256(path) for path in (file, source / checkpoint.ADAPTER_CONFIG)},
        "your_ai": __version__,
    }
    target = folder.place_of(name)
    if os.path.lexists(target.path):
        raise UserError(f"--run {name}: {target.path} exists; choose another name")
    try:
        with folder.creating(name, config) as new:
            checkpoint.save_adapter(new.adapter, adapter.arrays, adapter.config, step=0)
            checkpoint.write_json(new.imported, record)
            sync(new.imported)
            log_import(new, target, record["from"])
    except RunError as error:  # its text explains how to resume, which is impossible here
        cause = error.__cause__ or error
        number = getattr(cause, "errno", errno.ENOSPC)  # MLX gives no errno if the disk is full
        reason = OSError(number, getattr(cause, "strerror", None) or model.first_line(cause))
        raise write_error(target.path, reason) from error
    return target


def config_of(adapter: Adapter, name: str) -> TrainConfig:
    """The settings with which training would have created this adapter."""
    parameters, count = adapter.config["lora_parameters"], int(adapter.config["num_layers"])
    keys = parameters.get("keys") or {name_in_block(path) for path in adapter.layers}
    return TrainConfig(
        model=adapter.config["model"],
        run=name,
        lora_rank=adapter.rank,
        lora_alpha=adapter.scale * adapter.rank,
        lora_layers=count if count > 0 else "all",
        lora_targets=tuple(sorted(keys)),
        lora_dropout=float(parameters.get("dropout", 0.0)),
        use_dora=adapter.is_dora,
    )


def log_import(new: RunFolder, target: RunFolder, source: str) -> None:
    """Log that the run has finished, so that watching it ends immediately."""
    end = events.Finished(step=0, reason="done", adapter=str(target.adapter), seconds=0.0)
    with contextlib.closing(events.EventLog(new.events)) as log:
        log.write(events.Notice(text=f"imported from {source}; nothing was trained here"))
        log.write(end)
