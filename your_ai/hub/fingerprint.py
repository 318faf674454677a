"""Hashes of a model's files, cached on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from your_ai.files import sha256
from your_ai.hub.find import store

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
        name = path.relative_to(folder).as_posix()
        sums[name] = known.get(key) or sha256(path)
        if status.st_size > REMEMBERED_ABOVE_BYTES and key not in known:
            learned[key] = sums[name]
    if learned:
        with contextlib.suppress(OSError):  # without a cache, only the next call is slower
            memory.parent.mkdir(parents=True, exist_ok=True)
            temporary = memory.with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**known, **learned}), encoding="utf-8")
            os.replace(temporary, memory)
    return sums


def tokenizer_fingerprint(files: dict[str, str], ends: Iterable[int] = ()) -> str:
    """One sha256 over the files of a fingerprint that are not weights.

    ends: the end tokens of the tokenizer, if the result is the key of tokenized rows.
    """
    texts = {n: s for n, s in files.items() if not n.endswith(".safetensors")}
    key = json.dumps([texts, sorted(ends)], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()
