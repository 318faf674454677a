"""Hashes of a model's files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import flip
from tests.hub.conftest import FIRST, safetensors
from your_ai.hub import find as fingerprints
from your_ai.hub.find import fingerprint, store, tokenizer_fingerprint


def test_the_fingerprint_covers_only_files_that_affect_the_model(model):
    others = {"README.md", "training_args.json", "model.safetensors.index.json"}
    for name in others:
        (model / name).write_text("{}")
    (model / "tokenizer").mkdir()
    assert set(fingerprint(model)) == {p.name for p in model.iterdir()} - others - {"tokenizer"}


def test_the_fingerprint_of_a_copy_is_the_same(model, own_folder):
    copy = shutil.copytree(model, own_folder / "copy")
    assert fingerprint(copy) == fingerprint(model)


def assert_every_byte_counts(folder: Path) -> None:
    before = fingerprint(folder)
    for name in before:
        path = folder / name
        content = path.read_bytes()
        for i in range(len(content)):
            path.write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
            after = fingerprint(folder)
            assert {n for n in before if before[n] != after[n]} == {path.name}
        path.write_bytes(content)


def test_every_byte_of_a_model_changes_its_fingerprint(model):
    assert_every_byte_counts(model)


@pytest.fixture
def large(lone, monkeypatch) -> Path:
    """A model whose weights are large enough that their hash is cached."""
    monkeypatch.setattr(fingerprints, "REMEMBERED_ABOVE_BYTES", 256)
    (lone / "model.safetensors").write_bytes(safetensors(bytes(10_000)))
    return lone


def test_the_hash_of_a_large_file_is_cached(large, monkeypatch):
    before = fingerprint(large)
    read = []
    monkeypatch.setattr(fingerprints, "sha256", lambda path: read.append(path.name) or "read again")
    assert fingerprint(large)["model.safetensors"] == before["model.safetensors"]
    assert "model.safetensors" not in read
    assert "config.json" in read


def test_a_large_file_that_changed_is_hashed_again(large):
    weights = large / "model.safetensors"
    before = fingerprint(large)
    flip(weights, -1)
    later = weights.stat().st_mtime_ns + 1
    os.utime(weights, ns=(later, later))
    assert fingerprint(large) != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_damaged_hash_cache_is_ignored(large, content):
    before = fingerprint(large)
    (store() / "cache" / "sha256.json").write_bytes(content)
    assert fingerprint(large) == before


def test_a_read_only_store_is_ignored(large, own_folder, monkeypatch):
    (own_folder / "file").write_text("")
    monkeypatch.setenv("YOUR_AI_HOME", str(own_folder / "file"))
    assert fingerprint(large) == fingerprint(large)


def test_an_added_file_changes_the_fingerprint(model):
    before = fingerprint(model)
    (model / "generation_config.json").write_text("{}")
    assert fingerprint(model) != before


def test_the_tokenizer_fingerprint_ignores_the_weights(model):
    before = tokenizer_fingerprint(fingerprint(model))
    (model / FIRST).write_bytes(safetensors(b"other"))
    assert tokenizer_fingerprint(fingerprint(model)) == before


@pytest.mark.parametrize(
    "name",
    [
        *("tokenizer.json", "chat_template.jinja", "config.json", "generation_config.json"),
        *("chat_template.json", "processor_config.json", "additional_chat_templates/tools.jinja"),
    ],
)
def test_the_tokenizer_fingerprint_covers_all_its_files(model, name):
    before = tokenizer_fingerprint(fingerprint(model))
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("other")
    assert tokenizer_fingerprint(fingerprint(model)) != before


def test_the_key_of_tokenized_rows_covers_the_end_tokens(model):
    files = fingerprint(model)
    keys = {tokenizer_fingerprint(files, ends) for ends in ([1, 2], {2, 1}, [1], [])}
    assert len(keys) == 3
