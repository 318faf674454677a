"""Folders that look like models, and a local hub that serves them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from tests.headers import with_header
from tests.hub.repos import Account, Repo
from tests.hub.server import Hub
from your_ai.errors import UserError
from your_ai.hub import download as module
from your_ai.hub.download import downloading, result_of

REPO = "someone/some-model"
NAME = REPO.split("/")[1]
LARGE_BYTES = 300_000
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
INDEX = json.dumps({"weight_map": {"a": FIRST, "b": SECOND}})


def safetensors(data: bytes = bytes(range(24)), header: object = None, name: str = "a") -> bytes:
    """A safetensors file with one tensor of this name. header: replaces the right header."""
    own = {name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    return with_header(own if header is None else header, data)


def download(name: str, revision: str | None = None, to: str | Path | None = None) -> Path:
    """Download a model unless it is already on this machine. Returns its folder."""
    return result_of(downloading(name, revision, to))


def error_of(function: Callable[..., object], *arguments: object, **options: object) -> str:
    """The one line of the error with which a call must fail."""
    with pytest.raises(UserError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def model(own_folder) -> Path:
    """A folder that looks like a model with two shards."""
    folder = own_folder / "model"
    folder.mkdir()
    for tensor, name in zip("ab", (FIRST, SECOND), strict=True):
        (folder / name).write_bytes(safetensors(name=tensor))
    (folder / "model.safetensors.index.json").write_text(INDEX)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def lone(own_folder) -> Path:
    """A model with a single weights file and no index."""
    folder = own_folder / "lone"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder


def model_files(size_bytes: int = LARGE_BYTES) -> dict[str, bytes]:
    """The files of a model with two shards, and some files that are not needed."""
    data = (bytes(range(256)) * (size_bytes // 256 + 1))[:size_bytes]
    return {
        ".gitattributes": b"",
        "README.md": b"# A model",
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors.index.json": INDEX.encode(),
        "onnx/config.json": b"{}",
        "tokenizer.json": b'{"version": "1.0"}',
        FIRST: safetensors(data),
        SECOND: safetensors(data[::-1], name="b"),
    }


@pytest.fixture(autouse=True)
def no_hub(own_folder, monkeypatch) -> None:
    """Keep tests from the real hub and the user's cache, whose paths the client reads on import."""
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", nowhere + template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own_folder / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(own_folder / "hf" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def hub(no_hub, monkeypatch) -> Iterator[Hub]:
    """A hub with one model, which the client in this process uses instead of the real hub."""
    with Hub() as hub:
        hub.repos[REPO] = Repo(model_files())
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
        monkeypatch.setattr(module, "WAITS_S", (0.01,) * 5)
        monkeypatch.setattr(module, "sync", lambda path: None)  # for speed
        yield hub
        huggingface_hub.close_session()


@pytest.fixture
def fetched(hub) -> Path:
    """The folder of the model, which was downloaded."""
    return download(REPO)


@pytest.fixture
def account(hub, monkeypatch) -> Account:
    """The account that is logged in to the hub, in this process and its child processes."""
    account = Account("someone", orgs={"a-team": "write", "readers": "read"})
    hub.accounts["right"] = account
    monkeypatch.setenv("HF_TOKEN", "right")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    return account
