"""Checks that a model's files have not changed."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
import pytest

from tests.hub.conftest import REPO, download
from your_ai.errors import UserError
from your_ai.hub.record import RECORD, fault_of, hash_like, read_record, verify

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def fetched(hub) -> Path:
    return download(REPO)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_complete_model_has_no_faults(fetched):
    verdict = verify(fetched)
    assert (verdict.faults, verdict.checked) == ((), "every byte")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", FIRST])
@pytest.mark.parametrize("at", [0, -1])
def test_verify_names_a_file_with_a_flipped_bit(fetched, name, at):
    flip(fetched / name, at)
    assert verify(fetched).faults == (f"{fetched / name}: has changed since it was downloaded",)


def test_fault_of_does_not_read_the_weights(fetched):
    flip(fetched / FIRST, -1)
    assert fault_of(fetched) is None


def test_the_fault_of_a_truncated_file_gives_both_sizes(fetched):
    os.truncate(fetched / FIRST, 5)
    assert verify(fetched).faults == (f"{fetched / FIRST}: has 5 of 300078 bytes",)
    assert fault_of(fetched) == f"{fetched / FIRST}: has 5 of 300078 bytes"


def test_verify_reports_every_fault(fetched):
    (fetched / "config.json").unlink()
    flip(fetched / FIRST, 9)
    assert len(verify(fetched).faults) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"files": []}'])
def test_a_damaged_record_is_reported(fetched, content):
    (fetched / RECORD).write_bytes(content)
    assert RECORD in verify(fetched).faults[0]
    with pytest.raises(UserError):
        read_record(fetched)


def test_without_a_record_verify_says_that_it_checked_less(model):
    verdict = verify(model)
    assert verdict.faults == ()
    assert verdict.checked.startswith("sizes and headers; there is no")


def test_without_a_record_verify_reports_a_missing_file(model):
    (model / FIRST).unlink()
    assert "is missing" in verify(model).faults[0]


def test_cached_files_are_compared_with_the_hashes_in_their_names(hub):
    folder = Path(huggingface_hub.snapshot_download(REPO))
    assert verify(folder).checked == "every byte"
    assert verify(folder).faults == ()
    for name in (FIRST, "tokenizer.json"):
        flip((folder / name).resolve(), -1)
    assert verify(folder).faults == (
        f"{folder / FIRST}: has changed since it was downloaded",
        f"{folder / 'tokenizer.json'}: has changed since it was downloaded",
    )


def test_hash_like_computes_the_git_blob_hash(own_folder):
    (own_folder / "file").write_bytes(b"hello\n")  # the hash is from `git hash-object`
    assert hash_like(own_folder / "file", "0" * 40) == "ce013625030ba8dba906f756967f9e9ca394464a"
