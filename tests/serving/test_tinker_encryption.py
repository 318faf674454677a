"""Encryption of saved models; tests/interop/tinker/test_saved.py has what is written."""

from __future__ import annotations

import importlib.util

import pytest

from your_ai.serving.tinker_encryption import encrypt_files, recipients_of


def test_without_pyrage_nothing_is_promised_to_be_encrypted(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert recipients_of(None) == recipients_of([]) == []
    with pytest.raises(ValueError, match="pyrage"):
        recipients_of(["age1x"])


def test_without_recipients_files_stay_as_they_are(tmp_path):
    (tmp_path / "a").write_text("a")
    encrypt_files([], "b", tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "a")]
