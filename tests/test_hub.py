"""Models by name, and folders checked before anything is loaded."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from your_ai import hub
from your_ai.errors import UserError
from your_ai.hub import check_model, check_safetensors, find_model, fingerprint

REPO = "someone/some-model"


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


@pytest.fixture
def offline(monkeypatch) -> list[str]:
    """No name may reach the hub; those that would."""
    asked: list[str] = []

    def refuse(repo: str, **options: object) -> str:
        asked.append(repo)
        raise errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return asked


def refused(name: str) -> str:
    with pytest.raises(UserError) as caught:
        find_model(name)
    return str(caught.value)


def test_the_demo_is_found():
    assert check_model(find_model("demo"))["model_type"]


def test_a_folder_is_found(model):
    assert find_model(str(model)) == model
    assert find_model("model") == Path("model")


def test_a_folder_below_home_is_found(model, monkeypatch):
    monkeypatch.setenv("HOME", str(model.parent))
    assert find_model("~/model") == model


def test_a_folder_wins_over_an_alias(own_folder, offline):
    (own_folder / "llama-8b").mkdir()
    assert find_model("llama-8b") == Path("llama-8b")


@pytest.mark.parametrize("name", ["llama-8b", "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"])
def test_a_model_in_models_needs_no_hub(own_folder, offline, name):
    folder = Path("models") / "Meta-Llama-3.1-8B-Instruct-4bit"
    folder.mkdir(parents=True)
    assert find_model(name) == folder
    assert offline == []


def test_an_unknown_alias_is_refused_with_the_nearest(offline):
    assert "did you mean llama-8b?" in refused("lama-8b")
    assert offline == []


def test_an_alias_like_no_other_is_refused_with_the_known(offline):
    assert "aliases: demo, llama-8b" in refused("xyzzy")


@pytest.mark.parametrize("name", ["./nope", "../nope", "/nope", "~/nope", "a/b/c", "nope/"])
def test_a_path_that_is_not_there_is_refused(offline, name):
    assert f"--model {name}: no such folder" in refused(name)
    assert offline == []


def test_a_file_is_refused(model):
    file = model / "config.json"
    assert f"--model {file}: is a file" in refused(str(file))


def test_a_model_in_the_hubs_cache_is_not_fetched(model, monkeypatch):
    options = []

    def find(repo: str, **given: object) -> str:
        options.append((repo, given.get("local_files_only")))
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", find)
    assert find_model(REPO) == model
    assert options == [(REPO, True)]


def test_a_model_that_is_not_whole_in_the_cache_is_fetched(model, own_folder, monkeypatch):
    (own_folder / "cached").mkdir()

    def fetch(repo: str, **given: object) -> str:
        return str(own_folder / "cached" if given.get("local_files_only") else model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_model(REPO) == model


def test_a_model_not_in_the_cache_is_fetched(model, monkeypatch):
    def fetch(repo: str, **given: object) -> str:
        if given.get("local_files_only"):
            raise errors.LocalEntryNotFoundError("not here")
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_model(REPO) == model


class Response:
    """As much of an answer of the hub as its errors look at."""

    headers = types.MappingProxyType({})
    request = None
    status_code = 403


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: errors.GatedRepoError("gated", response=Response()), "is gated; accept"),
        (
            lambda: errors.RepositoryNotFoundError("none", response=Response()),
            f"no {REPO} on the hub",
        ),
        (lambda: ConnectionError("cut off\nsecond line"), r"could not be fetched .*\(cut off\)"),
        (lambda: RuntimeError(), r"could not be fetched .*\(RuntimeError\)"),
    ],
)
def test_what_the_hub_refuses_is_one_clear_line(monkeypatch, error, words):
    def fail(*args: object, **options: object) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=words) as caught:
        find_model(REPO)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "setting", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str
)
def test_without_a_network_it_is_said_at_once(own_folder, setting):
    """In a process of its own: the hub's client reads both when it is imported."""
    code = f"from your_ai.hub import find_model; find_model({REPO!r})"
    environment = {**os.environ, "HF_HOME": str(own_folder / "hf"), **setting}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert time.monotonic() - began < 20
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"your_ai.errors.UserError: --model {REPO}: no such folder here")


def test_a_whole_model_gives_its_config(model):
    assert check_model(model) == {"model_type": "llama"}


def test_a_model_of_one_file_needs_no_index(lone):
    assert check_model(lone) == {"model_type": "llama"}


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_model(folder)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_config_is_refused(lone):
    (lone / "config.json").unlink()
    assert_refused(lone, str(lone / "config.json"), "is missing")


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "lla', "\0", "[]", "null", '"text"'])
def test_a_broken_config_is_refused(lone, text):
    (lone / "config.json").write_text(text)
    assert_refused(lone, str(lone / "config.json"), "JSON")


def test_a_config_that_is_no_text_is_refused(lone):
    (lone / "config.json").write_bytes(b"\xff\xfe")
    assert_refused(lone, str(lone / "config.json"))


@pytest.mark.parametrize("config", [{}, {"model_type": None}, {"model_type": 3}])
def test_a_config_of_something_else_is_refused(lone, config):
    (lone / "config.json").write_text(json.dumps(config))
    assert_refused(lone, str(lone / "config.json"), "model_type")


def test_a_model_without_weights_is_refused(lone):
    (lone / "model.safetensors").unlink()
    assert_refused(lone, str(lone), "no model*.safetensors", "no weights")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(lone, name):
    (lone / "model.safetensors").rename(lone / name)
    assert_refused(lone, name, "not safe", "convert it to safetensors")


def test_a_missing_shard_is_named(model):
    (model / "model-00002-of-00002.safetensors").unlink()
    assert_refused(model, "model-00002-of-00002.safetensors", "is missing")


def test_a_broken_index_is_refused(model):
    (model / "model.safetensors.index.json").write_text("{")
    assert_refused(model, "model.safetensors.index.json")


@pytest.mark.parametrize("weight_map", [[], None, "text", {"a": 3}, {"a": []}, {"a": None}])
def test_an_index_of_another_shape_is_refused(model, weight_map):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_refused(model, "model.safetensors.index.json")


def test_a_shard_that_points_nowhere_is_named(model):
    """As in the hub's cache, where files are links and may lose what they link to."""
    shard = model / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to(model / "blobs" / "gone")
    assert_refused(model, shard.name)


SIZE = len(safetensors())


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 40, SIZE - 25, SIZE - 24, SIZE - 1])
def test_a_shard_cut_short_is_named(model, size):
    shard = model / "model-00002-of-00002.safetensors"
    os.truncate(shard, size)
    assert_refused(model, str(shard), "cut short")


def test_a_shard_with_more_than_it_says_is_named(lone):
    with (lone / "model.safetensors").open("ab") as file:
        file.write(b"\0")
    assert_refused(lone, str(lone / "model.safetensors"), "damaged")


@pytest.mark.parametrize(
    "header",
    [
        [],
        None,
        "text",
        {"a": None},
        {"a": {}},
        {"a": {"data_offsets": []}},
        {"a": {"data_offsets": None}},
        {"a": {"data_offsets": [0, "24"]}},
        {"a": {"data_offsets": [0, None]}},
    ],
    ids=str,
)
def test_a_header_of_another_shape_is_named(lone, header):
    text = json.dumps(header).encode()
    (lone / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(24))
    assert_refused(lone, str(lone / "model.safetensors"), "damaged")


def test_a_header_of_nothing_but_brackets_is_named(lone):
    text = b"[" * 100_000
    (lone / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert_refused(lone, str(lone / "model.safetensors"), "damaged")


def test_a_header_longer_than_any_file_is_named(lone):
    (lone / "model.safetensors").write_bytes(struct.pack("<Q", 2**64 - 1) + bytes(24))
    assert_refused(lone, str(lone / "model.safetensors"), "damaged")


def test_no_flipped_bit_of_a_header_is_more_than_a_refusal(own_folder):
    file, whole = own_folder / "file", safetensors()
    refusals = 0
    for bit in range(8 * (SIZE - 24)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        file.write_bytes(content)
        try:
            check_safetensors(file)
        except UserError:
            refusals += 1
    assert refusals > SIZE


def test_a_safetensors_file_may_hold_no_tensor(own_folder):
    (own_folder / "file").write_bytes(safetensors(b"", {"__metadata__": {"format": "mlx"}}))
    check_safetensors(own_folder / "file")


def test_the_fingerprint_is_of_all_that_decides(model):
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
    """A model whose weights are large enough to be remembered."""
    monkeypatch.setattr(hub, "REMEMBERED_ABOVE_BYTES", 256)
    (lone / "model.safetensors").write_bytes(safetensors(bytes(10_000)))
    return lone


def test_the_checksum_of_a_large_file_is_remembered(large, monkeypatch):
    before = fingerprint(large)
    read = []
    monkeypatch.setattr(hub, "sha256", lambda path: read.append(path.name) or "read again")
    assert fingerprint(large)["model.safetensors"] == before["model.safetensors"]
    assert "model.safetensors" not in read
    assert "config.json" in read


def test_a_large_file_that_changes_is_read_again(large):
    weights = large / "model.safetensors"
    before = fingerprint(large)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    later = weights.stat().st_mtime_ns + 1
    os.utime(weights, ns=(later, later))
    assert fingerprint(large) != before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff"])
def test_a_damaged_memory_of_checksums_is_no_harm(large, content):
    before = fingerprint(large)
    (hub.store() / "cache" / "sha256.json").write_bytes(content)
    assert fingerprint(large) == before


def test_a_store_that_cannot_be_written_is_no_harm(large, own_folder, monkeypatch):
    (own_folder / "file").write_text("")
    monkeypatch.setenv("YOUR_AI_HOME", str(own_folder / "file"))
    assert fingerprint(large) == fingerprint(large)


def test_an_added_file_changes_the_fingerprint(model):
    before = fingerprint(model)
    (model / "generation_config.json").write_text("{}")
    assert fingerprint(model) != before


def test_the_tokenizers_fingerprint_is_not_of_the_weights(model):
    before = hub.tokenizer_fingerprint(fingerprint(model))
    (model / "model-00001-of-00002.safetensors").write_bytes(safetensors(b"other"))
    assert hub.tokenizer_fingerprint(fingerprint(model)) == before


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "config.json"])
def test_the_tokenizers_fingerprint_is_of_all_its_files(model, name):
    before = hub.tokenizer_fingerprint(fingerprint(model))
    (model / name).write_text("other")
    assert hub.tokenizer_fingerprint(fingerprint(model)) != before
