"""Check that a model folder is complete and safe before loading anything from it.

A model that was downloaded has a record of its files, to check later that they are the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.gates.text import shown
from your_ai.gates.untrusted import (
    INDEX_BYTES,
    JSON_BYTES,
    MB,
    Entry,
    TooLarge,
    is_hash,
    is_large,
    name_fault,
    parse_json,
    read_bytes,
    read_header,
    read_json,
)
from your_ai.hub.config_values import check_config_values

AGAIN = "; download the model again"
WEIGHTS = "model*.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
OTHERS = (".gguf", ".npz", ".onnx", ".msgpack", ".h5", ".safetensors")  # other weight formats
TOKENIZERS = (
    *("tokenizer.json", "tokenizer.model", "tiktoken.model", "*.tiktoken"),
    *("vocab.json", "vocab.txt"),
)
LARGE, LARGE_BYTES = (*TOKENIZERS, "merges.txt"), 512 * MB
# JSON files that transformers or mlx-lm read, in addition to config.json and tokenizer.json.
READ = (
    *("tokenizer_config.json", "generation_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.json", "processor_config.json"),
    *("preprocessor_config.json", "hf_quant_config.json"),
)
CODE = ("tokenizer_object", "gguf_file")  # these build the tokenizer from other sources
TEMPLATES = "additional_chat_templates"  # a folder of chat templates, by name
MODULES = ("chat_template_type", "tool_parser_type")  # these name a module that mlx-lm imports
MODULE = re.compile(r"[A-Za-z0-9_]{1,100}")
FILE_LISTS = ("fast_tokenizer_files", "configuration_files")


def model_file_fault(name: object) -> str | None:
    """Say why an untrusted value cannot be the name of a file of a model; None if it can.

    Files are in the model's folder, and chat templates also in that of more templates.
    """
    inside = name.removeprefix(f"{TEMPLATES}/") if isinstance(name, str) else name
    return name_fault(inside)


def check_model(folder: Path) -> dict[str, Any]:
    """Check a model folder and return its config.json. Loads no weights.

    Raises UserError for a missing or broken config, sizes that no real model has, custom code,
    missing shards, weights that are not safetensors, and damaged files.
    """
    config_path = folder / "config.json"
    config = read_json(config_path, "a model folder has one")
    check_config_values(config_path, config)
    check_references(config_path, config)
    check_tokenizer_files(folder)
    shards = sorted(folder.glob(WEIGHTS))
    index = folder / INDEX
    if index.is_file():
        for name in sorted(indexed(index) - {p.name for p in shards}):
            raise UserError(f"{folder / name}: is missing{AGAIN}")
    if not shards:
        instead = found_instead(p.name for p in folder.iterdir())
        raise UserError(f"{folder}: has no {WEIGHTS}, {instead}; convert it to safetensors")
    entries: dict[str, Entry] = {}
    for shard in shards:
        try:
            found = read_header(shard)
        except UserError as error:
            raise UserError(f"{error}{AGAIN}") from error
        for entry in found:
            if entry.name in entries:
                raise UserError(
                    f"{shard}: tensor {shown(entry.name)} is also in another file of the model; "
                    "keep only one of these files"
                )
            entries[entry.name] = entry
    check_config_values(config_path, config, entries.values())
    return config


def indexed(index: Path) -> set[str]:
    """Return the file names in a shard index. Raises UserError for one that is not a file name."""
    weight_map = read_json(index, "it lists the shards", INDEX_BYTES, unique=True).get(
        "weight_map", {}
    )
    if not isinstance(weight_map, dict):
        raise UserError(f"{index}: its weight_map is damaged{AGAIN}")
    names = set()
    for name in weight_map.values():
        if isinstance(name, str) and name in names:
            continue
        fault = name_fault(name)
        if fault is not None:
            raise UserError(f"{index}: its weight_map names {shown(name)}, which {fault}{AGAIN}")
        names.add(name)
    return names


def check_tokenizer_files(folder: Path) -> None:
    """Raise UserError for a tokenizer or config file that is too large, or names code or paths.

    transformers and mlx-lm read these files, open the files that they name, and import the
    modules that they name. Files that are not valid JSON are left to these libraries.
    """
    for path in (*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja")):
        small = path.name in READ or path.suffix == ".jinja"
        if not small and not any(fnmatch(path.name, pattern) for pattern in LARGE):
            continue
        most = JSON_BYTES if small else LARGE_BYTES
        if path.exists() and is_large(path, most):
            raise UserError(f"{path}: must be a file of at most {most // MB} MB; is it damaged?")
    for name in READ:
        path = folder / name
        if path.is_file():
            with contextlib.suppress(OSError, ValueError):
                try:
                    content = parse_json(read_bytes(path, JSON_BYTES))
                except TooLarge as error:
                    raise UserError(f"{path}: cannot be read as JSON ({error})") from error
                check_references(path, content)


def check_references(path: Path, content: Any) -> None:
    """Raise UserError if a file of a model makes transformers or mlx-lm open or run other files."""
    if not isinstance(content, dict):
        return
    for key in CODE:
        if content.get(key):
            raise UserError(f"{path}: {key} is not supported; is this a tokenizer's config file?")
    for key in MODULES:
        value = content.get(key)
        if value is not None and not (isinstance(value, str) and MODULE.fullmatch(value)):
            raise UserError(f"{path}: {key} {shown(value)}: is not a name that mlx-lm knows")
    for key in FILE_LISTS:
        names = content.get(key)
        for name in names if isinstance(names, list) else [] if names is None else [names]:
            if (fault := name_fault(name)) is not None:
                raise UserError(f"{path}: {key} names {shown(name)}, which {fault}")
    templates = content.get("chat_template")
    for template in templates if isinstance(templates, list) else []:
        name = template.get("name") if isinstance(template, dict) else None
        if (fault := name_fault(name)) is not None:
            raise UserError(f"{path}: chat_template has the name {shown(name)}, which {fault}")


def found_instead(names: Iterable[str]) -> str:
    """Describe what a model has instead of WEIGHTS: `only x.bin, which is not safe to load`."""
    names = sorted(names)
    pickled = [name for name in names if name.endswith(PICKLED)]
    if pickled:
        return f"only {pickled[0]}, which is not safe to load"
    others = [name for name in names if name.endswith(OTHERS)]
    return f"only {others[0]}" if others else "no weights"


def has_tokenizer(names: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for name in names for pattern in TOKENIZERS)


def can_run(model_type: str) -> bool:
    """Return whether mlx-lm has code for this model_type (from a config.json)."""
    found = importlib.util.find_spec("mlx_lm")
    places = found.submodule_search_locations if found is not None else None
    if not places or not model_type.replace("-", "_").isidentifier():
        return False
    if (Path(places[0]) / "models" / f"{model_type}.py").is_file():
        return True
    from mlx_lm.utils import MODEL_REMAPPING  # imported here: it loads mlx, and few models need it

    return model_type in MODEL_REMAPPING


# The record of a model's files as they were downloaded


RECORD = ".your_ai.json"


@dataclass(frozen=True)
class RecordedFile:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FilesRecord:
    """The origin of a model, and its files."""

    repo: str
    asked: str
    """The revision that the user asked for: a branch, tag or commit."""
    revision: str
    """The commit."""
    files: dict[str, RecordedFile]


@dataclass(frozen=True)
class Verdict:
    """The result of checking a model's files."""

    faults: tuple[str, ...]
    """One line each; empty if the model is complete."""
    checked: str
    """What was checked, in words."""


def write_record(folder: Path, record: FilesRecord) -> None:
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> FilesRecord | None:
    """Return the record of a model; None if it has none. Raises UserError if it is damaged."""
    path = folder / RECORD
    if not path.is_file():
        return None
    content = read_json(path, "it lists the files", INDEX_BYTES)
    try:
        files = {name: RecordedFile(**entry) for name, entry in content.pop("files").items()}
        record = FilesRecord(files=files, **content)
        texts = (record.repo, record.asked, record.revision, *(f.sha256 for f in files.values()))
        sizes = [file.size_bytes for file in files.values()]
        sound = all(isinstance(text, str) and text.isprintable() for text in texts)
        sound = sound and all(type(size) is int and size >= 0 for size in sizes) and bool(files)
        sound = sound and all(model_file_fault(name) is None and name[0] != "." for name in files)
        sound = sound and all(is_hash(file.sha256) for file in files.values())
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: is damaged{AGAIN}")
    return record


def fault_of(folder: Path) -> str | None:
    """Return the first fault found without reading weights; None if the model looks complete."""
    try:
        record = read_record(folder)
        if record is None:
            check_model(folder)
            if not has_tokenizer(path.name for path in folder.iterdir()):
                return f"{folder}: has no tokenizer{AGAIN}"
            return None
    except UserError as error:
        return str(error)
    faults = (size_fault(folder, record, name) for name in record.files)
    return next((fault for fault in faults if fault is not None), None)


def size_fault(folder: Path, record: FilesRecord, name: str) -> str | None:
    """Say what is wrong with the size of a file; None if it is right."""
    path, expected = folder / name, record.files[name].size_bytes
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path}: is missing"
    return f"{path}: has {found} of {expected} bytes" if found != expected else None


def file_fault(folder: Path, record: FilesRecord, name: str) -> str | None:
    """Say what is wrong with a file; None if it is right. Reads the whole file."""
    fault = size_fault(folder, record, name)
    if fault is not None:
        return fault
    try:
        same = sha256(folder / name) == record.files[name].sha256
    except OSError as error:
        return f"{folder / name}: cannot be read ({error.strerror})"
    return None if same else f"{folder / name}: has changed since it was downloaded"


def verify(folder: Path) -> Verdict:
    """Compare every file of a model with its record, or with its hash in the Hugging Face cache.

    The cache names files by their hashes. Without a record or such a name, only sizes and headers
    are checked.
    """
    try:
        record = read_record(folder)
    except UserError as error:
        return Verdict((str(error),), "only the record")
    if record is not None:
        checked = (file_fault(folder, record, name) for name in sorted(record.files))
        return Verdict(tuple(fault for fault in checked if fault is not None), "every byte")
    looked = fault_of(folder)
    if looked is not None:
        return Verdict((looked,), "sizes and headers")
    hashes = {path: blob_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    if not all(hashes.values()):
        return Verdict((), f"sizes and headers; there is no {RECORD} to compare the bytes with")
    faults = [
        f"{path}: has changed since it was downloaded"
        for path, expected in hashes.items()
        if expected is not None and hash_like(path, expected) != expected
    ]
    return Verdict(tuple(faults), "every byte")


def blob_of(path: Path) -> str | None:
    """The hash in the name of a file in the Hugging Face cache; None for other files."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and is_hash(blob.name) else None


def hash_like(path: Path, expected: str) -> str:
    """Return a file's hash of the same kind as `expected`: sha256, or git's blob hash (40 digits).

    Raises OSError if the file cannot be read.
    """
    if len(expected) == 64:
        return sha256(path)
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
