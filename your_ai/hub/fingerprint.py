"""Hashes of a model's files, cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path

from your_ai.files import sha256
from your_ai.hub.find import store

FINGERPRINTED = [
    *("config.json", "generation_config.json", "tokenizer*", "vocab.json", "merges.txt"),
    *("special_tokens_map.json", "added_tokens.json", "*.tiktoken", "chat_template*"),
    "model*.safetensors",
]
REMEMBERED_ABOVE_BYTES = 16 << 20


def fingerprint(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file that affects what the model computes, by file name.

    Hashes of large files are cached in the store. A cached hash is valid while the path, size,
    modification time and inode of the file stay the same.
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
        with contextlib.suppress(OSError):  # without a cache, only the next call is slower
            memory.parent.mkdir(parents=True, exist_ok=True)
            temporary = memory.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**known, **learned}), encoding="utf-8")
            os.replace(temporary, memory)
    return sums


def tokenizer_fingerprint(files: dict[str, str]) -> str:
    """One sha256 over the files of a fingerprint that are not weights."""
    texts = {n: s for n, s in files.items() if not n.endswith(".safetensors")}
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()
