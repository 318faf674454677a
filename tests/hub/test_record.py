"""Whether a model's files are still what they were."""

from __future__ import annotations

import os
from pathlib import Path

import huggingface_hub
import pytest

from tests.hub.conftest import REPO
from your_ai.errors import UserError
from your_ai.hub.download import download
from your_ai.hub.record import RECORD, fault_of, hash_like, read_record, verify

FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def fetched(hub) -> Path:
    return download(REPO)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_whole_model_has_no_faults(fetched):
    verdict = verify(fetched)
    assert (verdict.faults, verdict.checked) == ((), "every byte")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", FIRST])
@pytest.mark.parametrize("at", [0, -1])
def test_a_flipped_bit_is_named(fetched, name, at):
    flip(fetched / name, at)
    assert verify(fetched).faults == (f"{fetched / name}: is not what was fetched",)


def test_a_bit_flipped_among_the_weights_shows_to_verify_alone(fetched):
    flip(fetched / FIRST, -1)
    assert fault_of(fetched) is None


def test_a_file_cut_short_is_named_with_both_sizes(fetched):
    os.truncate(fetched / FIRST, 5)
    assert verify(fetched).faults == (f"{fetched / FIRST}: has 5 of 300078 bytes",)
    assert fault_of(fetched) == f"{fetched / FIRST}: has 5 of 300078 bytes"


def test_every_fault_is_told(fetched):
    (fetched / "config.json").unlink()
    flip(fetched / FIRST, 9)
    assert len(verify(fetched).faults) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"files": []}'])
def test_a_damaged_record_is_a_fault(fetched, content):
    (fetched / RECORD).write_bytes(content)
    assert RECORD in verify(fetched).faults[0]
    with pytest.raises(UserError):
        read_record(fetched)


def test_a_folder_without_a_record_is_looked_at_and_that_is_said(model):
    verdict = verify(model)
    assert verdict.faults == ()
    assert verdict.checked.startswith("sizes and headers: it has no")


def test_a_folder_without_a_record_that_lacks_a_file_has_a_fault(model):
    (model / FIRST).unlink()
    assert "is missing" in verify(model).faults[0]


def test_the_hubs_cache_is_checked_by_its_names(hub):
    folder = Path(huggingface_hub.snapshot_download(REPO))
    assert verify(folder).checked == "every byte"
    assert verify(folder).faults == ()
    for name in (FIRST, "tokenizer.json"):
        flip((folder / name).resolve(), -1)
    assert verify(folder).faults == (
        f"{folder / FIRST}: is not what was fetched",
        f"{folder / 'tokenizer.json'}: is not what was fetched",
    )


def test_a_blobs_hash_is_gits(own_folder):
    (own_folder / "file").write_bytes(b"hello\n")  # as `git hash-object` has it
    assert hash_like(own_folder / "file", "0" * 40) == "ce013625030ba8dba906f756967f9e9ca394464a"
