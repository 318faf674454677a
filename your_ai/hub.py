"""Names of models -> folders on this machine, checked before anything is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from your_ai.config import DEMO, nearest, packaged
from your_ai.errors import UserError
from your_ai.files import sha256

ALIASES = {"llama-8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"}
WANTED = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]
FINGERPRINTED = [
    *("config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*.tiktoken", "chat_template*"),
    "model*.safetensors",
]
REMEMBERED_ABOVE_BYTES = 16 << 20


def store() -> Path:
    """Where your_ai keeps what it can make again: $YOUR_AI_HOME, or ~/.cache/your_ai."""
    home = os.environ.get("YOUR_AI_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "your_ai"


def find_model(name: str) -> Path:
    """The folder of a model: `demo`, a folder, an alias, or a Hugging Face id.

    An id is looked for in ./models, then in the hub's cache, then fetched.
    Raises UserError where it cannot be had.
    """
    if name == DEMO:
        return packaged("models", "demo")
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise UserError(f"--model {name}: is a file; give the folder with config.json")
    repo = ALIASES.get(name, name)
    if name.startswith((".", "/", "~")) or name.endswith("/") or repo.count("/") > 1:
        raise UserError(f"--model {name}: no such folder")
    if repo.count("/") == 0:
        known = ", ".join([DEMO, *ALIASES])
        hint = nearest(name, [DEMO, *ALIASES])
        raise UserError(f"--model {name}: no such folder or alias{hint}; aliases: {known}")
    local = Path("models") / repo.split("/")[1]
    return local if local.is_dir() else _fetch(name, repo)


def _fetch(name: str, repo: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        cached = Path(snapshot_download(repo, allow_patterns=WANTED, local_files_only=True))
        check_model(cached)
        return cached
    except Exception:  # not in the cache, or not whole there: fetch what is missing
        pass
    try:
        return Path(snapshot_download(repo, allow_patterns=WANTED))
    except errors.GatedRepoError as error:
        raise UserError(
            f"--model {name}: {repo} is gated; accept its licence on the hub, then `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"--model {name}: no such folder here, and no {repo} on the hub") from error
    except Exception as error:  # the hub client lets its transport's errors through
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"--model {name}: no such folder here, and {repo} could not be fetched from the hub "
            f"({reason}); check the network and try again"
        ) from error


def check_model(folder: Path) -> dict[str, Any]:
    """The model's config.json, once the folder looks whole. Loads no weight.

    Raises UserError for a missing or broken config, missing shards, weights that are not
    safetensors, and files cut short.
    """
    config = read_json(folder / "config.json", "a model folder has one")
    if not isinstance(config.get("model_type"), str):
        raise UserError(f"{folder / 'config.json'}: has no model_type; is it a language model?")
    shards = sorted(folder.glob("model*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index, "it lists the shards").get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise UserError(f"{index}: its weight_map is damaged; fetch the model again")
        for name in sorted(set(weight_map.values()) - {p.name for p in shards}):
            raise UserError(f"{folder / name}: is missing; fetch the model again")
    if not shards:
        pickled = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth")]
        found = f"only {pickled[0]}, which is not safe to load" if pickled else "no weights"
        raise UserError(f"{folder}: has no model*.safetensors, {found}; convert it to safetensors")
    for shard in shards:
        check_safetensors(shard)
    return config


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
    broken = UserError(f"{path}: is cut short or damaged; fetch the model again")
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


def fingerprint(folder: Path) -> dict[str, str]:
    """A sha256 for each file that decides what the model computes, by name.

    Those of large files are remembered in the store for as long as a file's size, time
    and place stay what they are.
    """
    files = sorted({p for pattern in FINGERPRINTED for p in folder.glob(pattern) if p.is_file()})
    memory = store() / "cache" / "sha256.json"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    known = known if isinstance(known, dict) else {}
    sums, learned = {}, {}
    for path in files:
        status = path.stat()
        key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        sums[path.name] = known.get(key) or sha256(path)
        if status.st_size > REMEMBERED_ABOVE_BYTES and key not in known:
            learned[key] = sums[path.name]
    if learned:
        with contextlib.suppress(OSError):  # slower the next time, and no more
            memory.parent.mkdir(parents=True, exist_ok=True)
            temporary = memory.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**known, **learned}), encoding="utf-8")
            os.replace(temporary, memory)
    return sums


def tokenizer_fingerprint(files: dict[str, str]) -> str:
    """One sha256 over the files of a fingerprint that are not weights."""
    texts = {n: s for n, s in files.items() if not n.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
