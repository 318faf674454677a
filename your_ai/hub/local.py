"""List and remove the models on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from your_ai.config import DEMO
from your_ai.errors import UserError
from your_ai.files import TEMPORARY, clean
from your_ai.gates.text import nearest, size_text
from your_ai.gates.untrusted import read_json
from your_ai.hub.check import RECORD, can_run, fault_of, read_record
from your_ai.hub.download import INCOMPLETE, open_lock, taken
from your_ai.hub.find import FOLDER, REPO, cached_model, model_roots, put_model, repo_of
from your_ai.hub.registry import alias_of, aliases_like, known

HOUR_S = 3600


@dataclass(frozen=True, kw_only=True)
class Local:
    """A model on this machine."""

    name: str
    """The name to use with --model."""
    folder: Path
    where: Literal["your_ai", "models", "cache"]
    """With your_ai, in one of `model_roots()`, or in the Hugging Face cache."""
    size_bytes: int
    repo: str | None = None
    """The repository id on the hub, if known."""
    alias: str | None = None
    bits: int | None = None
    """None if the model is not quantized, or if this is not known."""
    fault: str | None = None
    """What is missing or damaged; None if the model looks complete."""


def local_models() -> list[Local]:
    """List the models in `model_roots()` by name, then those in the Hugging Face cache."""
    found = []
    for root in model_roots():
        with contextlib.suppress(OSError):
            found += [local for path in sorted(root.iterdir()) if (local := put_at(path))]
    return [*found, *cached_models()]


def put_at(folder: Path) -> Local | None:
    """Return the model in a folder of `model_roots()`; None if the folder has no model."""
    if folder.name.startswith(INCOMPLETE) and folder.is_dir():
        name, size_bytes = folder.name.removeprefix(INCOMPLETE), size_of(folder)
        fault = f"its download stopped at {size_text(size_bytes)}"
        return Local(name=name, folder=folder, where="models", size_bytes=size_bytes, fault=fault)
    if folder.name.startswith(".") or not is_model(folder):
        return None
    repo = None
    with contextlib.suppress(UserError):  # reported as `fault`
        record = read_record(folder)
        repo = record.repo if record is not None else None
    return Local(
        name=folder.name,
        folder=folder,
        where="models",
        size_bytes=size_of(folder),
        repo=repo,
        alias=DEMO if folder.name == DEMO else alias_of(repo or ""),
        bits=bits_of(folder),
        fault=fault_of(folder),
    )


def cached_models() -> list[Local]:
    """List the language models in the Hugging Face cache, at the revision that would be used."""
    from huggingface_hub import constants

    if not any(Path(constants.HF_HUB_CACHE).glob("models--*")):
        return []
    from huggingface_hub import scan_cache_dir  # slow to import

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except Exception:  # the cache is missing or damaged, so no model is used from it either
        return []
    found = []
    for repo in sorted(repos, key=lambda repo: repo.repo_id):
        current = [revision for revision in repo.revisions if "main" in revision.refs]
        if repo.repo_type != "model" or not current:
            continue
        folder = current[0].snapshot_path
        try:
            kind = read_json(folder / "config.json", "").get("model_type")
        except UserError:
            continue
        if not (isinstance(kind, str) and can_run(kind)):
            continue
        whole = cached_model(repo.repo_id) is not None
        found.append(
            Local(
                name=repo.repo_id,
                folder=folder,
                where="cache",
                size_bytes=current[0].size_on_disk,
                repo=repo.repo_id,
                alias=alias_of(repo.repo_id),
                bits=bits_of(folder),
                fault=None if whole else fault_of(folder) or "some of its files are missing",
            )
        )
    return found


def bits_of(folder: Path) -> int | None:
    """The default bits per weight of a quantized model; single layers may differ."""
    try:
        config = read_json(folder / "config.json", "")
    except UserError:
        return None
    quantization = config.get("quantization") or config.get("quantization_config")
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    return bits if isinstance(bits, int) else None


def size_of(folder: Path) -> int:
    """Bytes of the readable files under a folder. Links are not followed."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size if path.is_file() and not path.is_symlink() else 0
    return total


def folder_to_remove(name: str) -> Path:
    """The folder of a model in `model_roots()`, by its name, alias, beginning of an alias, or id.

    Of a stopped download, the folder does not exist yet. Raises UserError for a model that is not
    there, and for the beginning of several aliases.
    """
    if name == DEMO:
        raise UserError(f"{name}: comes with your_ai and cannot be removed")
    folders, repo = [], ""
    if FOLDER.fullmatch(name) and name not in known():
        folders = [root / name for root in model_roots()]
    elif not REPO.fullmatch(name) and not aliases_like(name):
        raise UserError(f"{name}: is not in {model_roots()[0]}; delete it yourself")
    if not any(is_there(folder) for folder in folders):
        repo = repo_of(name, name)
        put = put_model(repo)
        places = [root / repo.split("/")[1] for root in model_roots()]
        folders = places if put is None else [put]
    for folder in folders:
        if folder.is_symlink():
            raise UserError(f"{folder}: is a link to a model; remove the link itself")
        if is_there(folder):
            return folder
    if cached_model(repo) is not None:
        raise UserError(
            f"{name}: is in the Hugging Face cache, which other programs use too; remove it "
            f"with: hf cache rm model/{repo}"
        )
    root = model_roots()[0]
    near = nearest(name, [path.name for path in root.iterdir()] if root.is_dir() else [])
    hint = near or "; list them with: your_ai models"
    raise UserError(f"{name}: no such model in {root.absolute()}{hint}")


def is_there(folder: Path) -> bool:
    """Return whether a model, a link to one, or a part of its download is there."""
    return is_model(folder) or incomplete_of(folder).is_dir()


def incomplete_of(folder: Path) -> Path:
    return folder.with_name(f"{INCOMPLETE}{folder.name}")


def is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (RECORD, "config.json"))


def remove_model(folder: Path) -> int:
    """Delete a model and its unfinished download, under the lock. Returns the bytes freed.

    If the process is killed, the model is either complete or gone.
    """
    root = folder.parent
    clean(root, older_than_s=HOUR_S)  # leftovers of a removal that was killed
    freed = 0
    with open_lock(folder) as lock:
        if not taken(lock):
            raise UserError(f"{folder}: is being downloaded; stop the download first")
        for path in (folder, incomplete_of(folder)):
            if not path.is_dir():
                continue
            size_bytes = size_of(path)
            try:
                temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=root))
                os.rename(path, temporary)
            except OSError as error:
                raise UserError(f"{path}: cannot be removed ({error.strerror})") from error
            shutil.rmtree(temporary, ignore_errors=True)
            if temporary.exists():
                raise UserError(f"{temporary}: cannot be removed completely; delete it yourself")
            freed += size_bytes
    return freed
