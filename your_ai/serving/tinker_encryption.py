"""Encryption of saved models for those who give public keys (age, filippo.io/age)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from your_ai.errors import RunError, first_line
from your_ai.files import is_plain_file, sync

MOST_KEYS, KEY_CHARACTERS = 10, 2000


def recipients_of(keys: Any) -> list[Any]:
    """The public keys, of age or SSH, of a request. Raises ValueError for anything else."""
    if not keys:
        return []
    if importlib.util.find_spec("pyrage") is None:
        raise ValueError(
            "age_encryption_recipients: the server needs the Python package pyrage; leave it out"
        )
    import pyrage

    refusal = ValueError(
        f"age_encryption_recipients: give at most {MOST_KEYS} public keys, age1... or of SSH"
    )
    if not isinstance(keys, list) or len(keys) > MOST_KEYS:
        raise refusal
    if not all(isinstance(key, str) and len(key) <= KEY_CHARACTERS for key in keys):
        raise refusal
    kinds = [pyrage.ssh if key.startswith("ssh-") else pyrage.x25519 for key in keys]
    try:
        return [kind.Recipient.from_str(key) for kind, key in zip(kinds, keys, strict=True)]
    except pyrage.RecipientError as error:
        raise refusal from error


def encrypt_files(recipients: Sequence[Any], kept: str, folder: Path) -> None:
    """Replace each file in a folder but `kept` by NAME.age, which the recipients can read; none
    if there are no recipients. Raises RunError if they cannot be written."""
    files = [path for path in folder.rglob("*") if is_plain_file(path) and path.name != kept]
    for path in files if recipients else ():
        import pyrage

        target = path.with_name(f"{path.name}.age")
        try:
            pyrage.encrypt_file(str(path), str(target), recipients)
        except pyrage.EncryptError as error:
            raise RunError(f"{path}: cannot be encrypted ({first_line(error)})") from error
        sync(target)
        path.unlink()
