"""Checks of a model folder before loading."""

from __future__ import annotations

import json
import os
from pathlib import Path

import huggingface_hub
import pytest

from tests.conftest import flip
from tests.hub.conftest import FIRST, REPO, SECOND, error_of, safetensors
from your_ai.errors import UserError
from your_ai.hub.check import (
    RECORD,
    can_run,
    check_model,
    fault_of,
    has_tokenizer,
    hash_like,
    read_record,
    verify,
)


@pytest.mark.parametrize("name", ["model", "lone"], ids=["with an index", "of a single file"])
def test_check_model_returns_the_config(request, name):
    assert check_model(request.getfixturevalue(name)) == {"model_type": "llama"}


def assert_refused(folder: Path, *words: str) -> None:
    text = error_of(check_model, folder)
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("word", "content"),
    [
        ("is missing", None),
        *(("JSON", text) for text in (b"", b"{", b'{"model_type": "lla', b"\0", b"\xff\xfe")),
        *(("JSON", text) for text in (b"[]", b"null", b'"text"')),
        *(("model_type", b"{%s}" % text) for text in (b"", b'"model_type": null')),
        ("model_type", b'{"model_type": 3}'),
    ],
)
def test_a_missing_or_broken_config_or_one_without_a_valid_model_type_is_refused(
    lone, word, content
):
    (lone / "config.json").unlink()
    if content is not None:
        (lone / "config.json").write_bytes(content)
    assert_refused(lone, str(lone / "config.json"), word)


def test_a_model_without_weights_is_refused(lone):
    (lone / "model.safetensors").unlink()
    assert_refused(lone, str(lone), "no model*.safetensors", "no weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(lone, name):
    (lone / "model.safetensors").rename(lone / name)
    assert_refused(lone, name, "not safe", "convert it to safetensors")


def test_the_error_names_a_missing_shard(model):
    (model / SECOND).unlink()
    assert_refused(model, SECOND, "is missing")


WEIGHT_MAPS = ([], None, "text", {"a": 3}, {"a": []}, {"a": None})


@pytest.mark.parametrize("text", ["{", *(json.dumps({"weight_map": each}) for each in WEIGHT_MAPS)])
def test_a_broken_index_is_refused(model, text):
    (model / "model.safetensors.index.json").write_text(text)
    assert_refused(model, "model.safetensors.index.json")


def test_the_error_names_a_shard_that_is_a_dangling_link(model):
    """As in the Hugging Face cache, where files are links to blobs that may be deleted."""
    shard = model / SECOND
    shard.unlink()
    shard.symlink_to(model / "blobs" / "gone")
    assert_refused(model, shard.name)


SIZE = len(safetensors())


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40, SIZE - 25, SIZE - 24, SIZE - 1])
def test_the_error_names_a_truncated_shard(model, size):
    shard = model / SECOND
    os.truncate(shard, size)
    assert_refused(model, str(shard), "cut short")


def test_the_error_names_a_shard_with_trailing_bytes(lone):
    with (lone / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert_refused(lone, str(lone / "model.safetensors"), "damaged")


@pytest.mark.parametrize(
    ("model_type", "can"),
    [
        ("llama", True),
        ("mistral", True),  # uses llama's code
        ("gemma3_text", True),
        ("phi-msft", True),
        ("clip", False),
        ("../utils", False),
        ("", False),
    ],
)
def test_can_run_matches_the_architectures_of_mlx_lm(model_type, can):
    assert can_run(model_type) == can


@pytest.mark.parametrize(
    ("names", "has"),
    [(["tokenizer.json"], True), (["qwen.tiktoken"], True), (["config.json"], False), ([], False)],
)
def test_has_tokenizer_looks_for_tokenizer_files(names, has):
    assert has_tokenizer(names) == has


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
