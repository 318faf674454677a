"""The quantized models of mlx-community on the hub, and those that are new since the last look."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from your_ai.errors import UserError
from your_ai.files import read_text, replace_text
from your_ai.gates.untrusted import JSON_BYTES, parse_json
from your_ai.hub import remote
from your_ai.hub.check import can_run
from your_ai.hub.find import REPO, models_root
from your_ai.hub.registry import alias_of

OWNER = "mlx-community"
MOST = 1000  # what the hub lists at once: the most downloaded ones
ASKED = ("config", "downloads", "tags")
SEEN = ".mlx-community.json"  # in the folder of models: the repositories of the last look
BITS = re.compile(r"([1-9])-?bit")


@dataclass(frozen=True, kw_only=True)
class OnlineModel:
    """A model of the hub that mlx-lm has code for."""

    repo: str
    alias: str | None
    model_type: str
    bits: int
    downloads: int
    """In the last 30 days."""
    is_new: bool
    """True if it was not there at the last look."""


def online_models() -> list[OnlineModel]:
    """Ask the hub for the models, the most downloaded first, and remember them.

    Raises UserError if the hub does not answer with a list of models.
    """
    try:
        found = parse_json(answer(), unique=True)
    except ValueError:
        found = None
    if not isinstance(found, list):
        raise UserError(f"{OWNER}: the hub gave no list of models; check HF_ENDPOINT")
    seen, types = seen_before(), dict[str, bool]()
    models = []
    for entry in found[:MOST]:
        model = model_of(entry, seen)
        if model is None:
            continue
        if model.model_type not in types:
            types[model.model_type] = can_run(model.model_type)
        if types[model.model_type]:
            models.append(model)
    remember({*seen, *(model.repo for model in models)})
    return models


def answer() -> bytes:
    """The hub's list of the owner's models. Raises UserError."""
    remote.check_endpoint()
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers

    asked = {"author": OWNER, "sort": "downloads", "limit": MOST, "expand": list(ASKED)}
    url = f"{constants.ENDPOINT}/api/models"
    try:
        return remote.read_answer(url, build_hf_headers(), remote.LISTING_BYTES, params=asked)
    except UserError as error:
        raise UserError(f"{OWNER}: {error}") from error
    except Exception as error:
        raise remote.explain(error, OWNER, "the list of its models", "") from error


def model_of(entry: Any, seen: set[str]) -> OnlineModel | None:
    """Return a model as the hub describes it; None if it is not quantized, or not described."""
    if not isinstance(entry, dict):
        return None
    repo, config, downloads = (entry.get(key) for key in ("id", "config", "downloads"))
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(repo, str) or not REPO.fullmatch(repo) or not isinstance(model_type, str):
        return None
    tags = entry.get("tags")
    words = [repo, *(tag for tag in tags if isinstance(tag, str))] if type(tags) is list else [repo]
    bits = next((int(match[1]) for word in words if (match := BITS.search(word))), None)
    if bits is None or not repo.startswith(f"{OWNER}/"):
        return None
    return OnlineModel(
        repo=repo,
        alias=alias_of(repo),
        model_type=model_type,
        bits=bits,
        downloads=downloads if type(downloads) is int else 0,
        is_new=repo not in seen,
    )


def seen_before() -> set[str]:
    """The repositories of earlier looks; empty at the first, and if the file is damaged."""
    try:
        found = parse_json(read_text(models_root() / SEEN, JSON_BYTES).encode())
    except (OSError, ValueError, RecursionError, UserError):
        return set()
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def remember(repos: set[str]) -> None:
    """Keep the repositories for the next look. Raises UserError if they cannot be written."""
    path = models_root() / SEEN
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(sorted(repos), indent=0) + "\n")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror or error}); set YOUR_AI_HOME to a folder "
            "of yours"
        ) from error
