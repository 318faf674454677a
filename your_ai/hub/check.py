"""Whether a model's folder is whole, before anything is loaded from it."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from your_ai.errors import UserError

AGAIN = "; fetch the model again"
WEIGHTS = "model*.safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHERS = (".gguf", ".npz", ".onnx", ".msgpack", ".h5", ".safetensors")  # weights in other ways
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken"),
    *("vocab.json", "vocab.txt"),
)


def check_model(folder: Path) -> dict[str, Any]:
    """The model's config.json, once the folder looks whole. Loads no weight.

    Raises UserError for a missing or broken config, missing shards, weights that are not
    safetensors, and files cut short.
    """
    config = read_json(folder / "config.json", "a model folder has one")
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'}: has no model_type; is it a language model?")
    shards = sorted(folder.glob(WEIGHTS))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index, "it lists the shards").get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise UserError(f"{index}: its weight_map is damaged{AGAIN}")
        for name in sorted(set(weight_map.values()) - {p.name for p in shards}):
            raise UserError(f"{folder / name}: is missing{AGAIN}")
    if not shards:
        found = found_instead(p.name for p in folder.iterdir())
        raise UserError(f"{folder}: has no {WEIGHTS}, {found}; convert it to safetensors")
    for shard in shards:
        check_safetensors(shard)
    return config


def found_instead(names: Iterable[str]) -> str:
    """What a model without WEIGHTS has: `only model.bin, which is not safe to load`."""
    names = sorted(names)
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        return f"only {pickled[0]}, which is not safe to load"
    others = [name for name in names if name.endswith(OTHERS)]
    return f"only {others[0]}" if others else "no weights"


def has_tokenizer(names: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for name in names for pattern in TOKENIZERS)


def can_run(model_type: str) -> bool:
    """Whether mlx-lm has code for a model_type of a config.json."""
    found = importlib.util.find_spec("mlx_lm")
    places = found.submodule_search_locations if found is not None else None
    if not places or not model_type.replace("-", "_").isidentifier():
        return False
    if (Path(places[0]) / "models" / f"{model_type}.py").is_file():
        return True
    from mlx_lm.utils import MODEL_REMAPPING  # late: it loads mlx, and few models need it

    return model_type in MODEL_REMAPPING


def read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path}: is missing; {why}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


def check_safetensors(path: Path) -> None:
    """Raise UserError unless the file's size is what its header promises.

    Format: 8 bytes of header length (little-endian), the header as JSON, the tensors.
    """
    broken = UserError(f"{path}: is cut short or damaged{AGAIN}")
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    with file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise broken
        (length,) = struct.unpack("<Q", prefix)
        if length > size - 8:
            raise broken
        try:
            header = json.loads(file.read(length))
            tensors = [t for name, t in header.items() if name != "__metadata__"]
            end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
            whole = size == 8 + length + end
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise broken from None
    if not whole:
        raise broken
