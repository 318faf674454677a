"""Folders that look like models."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest


def safetensors(data: bytes = bytes(range(24)), header: object = None) -> bytes:
    """A safetensors file with one tensor; header: another header than its own."""
    own = {"a": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    text = json.dumps(own if header is None else header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture
def model(own_folder) -> Path:
    """A folder that looks like a model of two shards."""
    folder = own_folder / "model"
    folder.mkdir()
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in shards:
        (folder / name).write_bytes(safetensors())
    index = {"weight_map": {"a": shards[0], "b": shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def lone(own_folder) -> Path:
    """A model of one file without an index."""
    folder = own_folder / "lone"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(safetensors())
    return folder
