"""Names of models -> folders on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from your_ai.config import DEMO, nearest, packaged
from your_ai.errors import UserError
from your_ai.hub.check import check_model

ALIASES = {"llama-8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"}
WANTED = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


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
