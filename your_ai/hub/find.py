"""Find the folder of a model on this machine by its name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from your_ai.config import DEMO
from your_ai.errors import UserError
from your_ai.files import packaged, sha256
from your_ai.gates.paths import missing_text
from your_ai.gates.text import closest, counted
from your_ai.hub.check import AGAIN, fault_of, read_record
from your_ai.hub.registry import alias_of, aliases_like, download_text, known, nearest_aliases

ALIKE = 0.9  # least similarity of a repository to a known one, from 0 to 1, to suggest that

WANTED = (
    *("*.json", "model*.safetensors", "tokenizer.model", "tiktoken.model", "*.tiktoken"),
    *("*.txt", "*.jinja"),
)
PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
REPO = re.compile(f"{PART}/{PART}")
FOLDER = re.compile(PART)


class Missing(UserError):
    """The model is not on this machine, but can be downloaded.

    repo: the repository id on the hub.
    size_text: the size of the download, or empty if not known.
    """

    def __init__(self, message: str, repo: str, size_text: str = "") -> None:
        super().__init__(message)
        self.repo = repo
        self.size_text = size_text


def store() -> Path:
    """The folder for caches: $YOUR_AI_HOME, or ~/.cache/your_ai."""
    home = os.environ.get("YOUR_AI_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "your_ai"


def models_root() -> Path:
    """The folder for downloaded models: $YOUR_AI_HOME/models, or ./models."""
    home = os.environ.get("YOUR_AI_HOME")
    return (Path(home).expanduser() if home else Path()) / "models"


def model_roots() -> list[Path]:
    """The folders to search for models, `models_root()` first."""
    return list(dict.fromkeys([models_root(), Path("models")]))


def repo_of(name: str, label: str) -> str:
    """Return the repository id for an alias, the beginning of one alias, or a repository id.

    Raises UserError, whose message begins with `label`, for anything else.
    """
    found = aliases_like(name)
    if len(found) == 1:
        return known()[found[0]].repo
    if found:
        raise UserError(
            f"{label}: begins {counted(len(found), 'alias', 'aliases')}: {', '.join(found)}"
        )
    if REPO.fullmatch(name):
        return name
    if "/" in name:
        raise UserError(f"{label}: is not a repository id; those have the form OWNER/NAME")
    folders = (path.name for root in model_roots() if root.is_dir() for path in root.iterdir())
    near = nearest_aliases(name, (DEMO, *folders))
    *others, last = near or [""]
    listed = f"{', '.join(others)} or {last}" if others else last
    hint = f"did you mean {listed}?" if near else "`your_ai models` lists the aliases"
    raise UserError(f"{label}: no such folder or alias; {hint}")


def find_model(name: str) -> Path:
    """Return the folder of a model: `demo`, a folder, an alias, or a repository id.

    Searches for an alias or id in `models_root()`, in ./models, then in the Hugging Face cache.
    Raises Missing if it is in none of them, and UserError if the name is unknown or the model is
    incomplete. Downloads nothing.
    """
    if name == DEMO:
        return packaged("models", "demo")
    path = Path(os.path.expanduser(name))  # os.path does not raise if this is not a valid path
    if os.path.isdir(path):
        return path
    if os.path.isfile(path):
        raise UserError(f"--model {name}: is a file; give the folder with config.json")
    if FOLDER.fullmatch(name) and name not in known():
        for root in model_roots():
            if (root / name).is_dir():
                return whole(root / name, f"--model {name}")
    if name.startswith((".", "/", "~")) or name.endswith("/") or name.count("/") > 1:
        raise UserError(f"--model {name}: {missing_text(name, 'folder')}")
    repo = repo_of(name, f"--model {name}")
    found = put_model(repo)
    if found is not None:
        return whole(found, f"--model {name}", name)
    cached = cached_model(repo)
    if cached is not None:
        return cached
    alias = alias_of(repo)
    size = download_text(known()[alias]) if alias is not None else ""
    fetch = f"download it ({size})" if size else "download it"
    message = f"--model {name}: is not on this machine; {fetch}: your_ai download {name}"
    repos = [model.repo for model in known().values()]
    if repo not in repos and (near := closest(repo, repos, ALIKE)):
        message += f" (did you mean {near}?)"
    raise Missing(message, repo, size)


def is_local(name: str) -> bool:
    """Return whether `find_model` finds the model. Raises UserError for what is no model's name."""
    try:
        find_model(name)
    except Missing:
        return False
    return True


def put_model(repo: str) -> Path | None:
    """The folder of a repository's model in `model_roots()`, complete or not."""
    for root in model_roots():
        folder = root / repo.split("/")[1]
        if folder.is_dir():
            try:
                record = read_record(folder)
            except UserError:  # reported when the folder is checked
                return folder
            if record is None or record.repo == repo:
                return folder
    return None


def whole(folder: Path, label: str, name: str | None = None) -> Path:
    """Return the folder. Raises UserError if the model in it is incomplete.

    name: the model's name for `your_ai download`, if known.
    """
    fault = fault_of(folder)
    if fault is None:
        return folder
    again = f"; download it again: your_ai download {name}" if name is not None else AGAIN
    raise UserError(f"{label}: {fault.removesuffix(AGAIN)}{again}")


def cached_model(repo: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the Hugging Face cache; None if absent or incomplete."""
    from huggingface_hub import constants

    if not (Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import snapshot_download  # slow to import

    try:
        found = snapshot_download(
            repo, revision=revision, allow_patterns=list(WANTED), local_files_only=True
        )
    except Exception:  # huggingface_hub raises many kinds of errors for a missing model
        return None
    folder = Path(found)
    return folder if fault_of(folder) is None else None


def cached_file(repo: str, commit: str, name: str) -> Path | None:
    """The path of a file in the Hugging Face cache; None if absent."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo, name, revision=commit)
    return Path(found) if isinstance(found, str) else None


# Find the repository id of a model on this machine


@dataclass(frozen=True)
class HubName:
    """A model on the hub. revision: a commit, or None if not known."""

    repo: str
    revision: str | None = None


def hub_name(folder: Path, named: str) -> HubName | None:
    """Return the hub name of the model in `folder`; None if not known.

    named: the name of the model in the run's settings.
    """
    with contextlib.suppress(UserError):  # a damaged record gives no name
        record = read_record(folder)
        if record is not None:
            return HubName(record.repo, record.revision)
    snapshot = folder.absolute()
    cached = snapshot.parent.parent.name
    repo = cached.removeprefix("models--").replace("--", "/", 1)
    if snapshot.parent.name == "snapshots" and cached != repo and REPO.fullmatch(repo):
        return HubName(repo, snapshot.name)
    found = aliases_like(named)
    if len(found) == 1:
        return HubName(known()[found[0]].repo)
    if REPO.fullmatch(named) and not Path(named).exists():
        return HubName(named)
    return None


# Hashes of a model's files, cached on disk


FINGERPRINTED = [
    *("config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*.tiktoken", "chat_template*"),
    "model*.safetensors",
    # Only of the tokenizer and its chat template:
    *("processor_config.json", "additional_chat_templates/*.jinja", "vocab.txt", "*.model"),
]
REMEMBERED_ABOVE_BYTES = 16 << 20


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file that affects what the model computes, by path in the folder.

    Hashes of large files are cached in the store. A cached hash is valid while the path, size,
    modification time and inode of the file stay the same.
    """
    memory = store() / "cache" / "sha256.json"
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    known = known if isinstance(known, dict) else {}
    sums, learned = {}, {}
    for path, key in file_keys(folder).items():
        name = path.relative_to(folder).as_posix()
        sums[name] = known.get(key) or sha256(path)
        if path.stat().st_size > REMEMBERED_ABOVE_BYTES and key not in known:
            learned[key] = sums[name]
    if learned:
        with contextlib.suppress(OSError):  # without a cache, only the next call is slower
            memory.parent.mkdir(parents=True, exist_ok=True)
            temporary = memory.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**known, **learned}), encoding="utf-8")
            os.replace(temporary, memory)
    return sums


def file_keys(folder: Path) -> dict[Path, str]:
    """Return, for each file that affects what the model computes, a text that stays the same while
    its path, size, modification time and inode do."""
    found = {}
    for path in sorted({p for pattern in FINGERPRINTED for p in folder.glob(pattern)}):
        if path.is_file():
            status = path.stat()
            place = f"{path.resolve()}:{status.st_size}"
            found[path] = f"{place}:{status.st_mtime_ns}:{status.st_ino}"
    return found


def tokenizer_fingerprint(files: dict[str, str], ends: Iterable[int] = ()) -> str:
    """One sha256 over the files of a fingerprint that are not weights.

    ends: the end tokens of the tokenizer, if the result is the key of tokenized rows.
    """
    texts = {n: s for n, s in files.items() if not n.endswith(".safetensors")}
    key = json.dumps([texts, sorted(ends)], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()
