"""A malicious hub: every response ends soon, in a one-line error, and changes no other files."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import json_values
from tests.hub.conftest import FIRST, NAME, REPO, download, model_files, safetensors
from tests.hub.repos import git_hash
from tests.hub.server import Answerer, Hub, described
from tests.hub.test_download import assert_whole
from your_ai import cli
from your_ai.errors import UserError
from your_ai.hub import download as module
from your_ai.hub import remote
from your_ai.hub.find import models_root

MOST_S = 10.0
WAITS_S = module.WAITS_S  # the real waits; the fixture `hub` shortens them
CANARY = "/CANARY"  # a placeholder for the path of a file of the user
CLOSED = "http://127.0.0.1:9"


def honest() -> dict[str, Any]:
    """The hub's valid file list of the model."""
    siblings = [
        described(p, content, "rfilename", "blobId") for p, content in model_files().items()
    ]
    return {"id": REPO, "sha": "a" * 40, "siblings": siblings, "tags": [], "private": False}


def entry(answer: dict[str, Any], name: str = "config.json") -> dict[str, Any]:
    return next(s for s in answer["siblings"] if s["rfilename"] == name)


def with_keys(answer: dict[str, Any] | None = None, **changes: Any) -> Callable[[str], bytes]:
    """A file list with other keys."""
    text = json.dumps({**(answer or honest()), **changes})
    return lambda canary: text.replace(CANARY, canary).encode()


def with_entry(name: str = "config.json", **changes: Any) -> Callable[[str], bytes]:
    """A file list with a changed description of one file."""
    answer = honest()
    entry(answer, name).update(changes)
    return with_keys(answer)


def with_file(name: Any) -> Callable[[str], bytes]:
    """A file list with one additional file."""
    answer = honest()
    return with_keys(siblings=[*answer["siblings"], {**entry(answer), "rfilename": name}])


def raw(text: bytes) -> Callable[[str], bytes]:
    return lambda canary: text


MANY = b'{"sha": "' + b"a" * 40 + b'", "siblings": [' + b'{"rfilename": "a.json"},' * 1_000_000
LISTINGS: dict[str, Callable[[str], bytes]] = {
    "a blob that is an absolute path": with_entry(blobId=CANARY),
    "a blob that is a path to a parent folder": with_entry(blobId="../../../canary/kept.txt"),
    "a large file's hash that is a path": with_entry(FIRST, lfs={"sha256": CANARY, "size": 1}),
    "a large file with a git hash": with_entry(FIRST, lfs={"sha256": "a" * 40, "size": 1}),
    "a large file that is a list": with_entry(FIRST, lfs=[1]),
    "a negative size": with_entry(size=-1),
    "a size that is true": with_entry(size=True),
    "a size larger than any disk": with_entry(size=1 << 80),
    "a size larger than this disk": with_entry(FIRST, size=1 << 49),
    "a file in a parent folder": with_file("../../canary/kept.json"),
    "a file at an absolute path": with_file(f"{CANARY}.json"),
    "a file on a drive": with_file("C:\\kept.json"),
    "a file with an escape sequence": with_file("\x1b[2Jb.json"),
    "a file with an endless path": with_file("a/" * 5000 + "b.json"),
    "a file that differs in case": with_file("Config.json"),
    "a file twice": with_file("config.json"),
    "a file without a name": with_file(""),
    "a file whose name is null": with_file(None),
    "no files": with_keys(siblings=[]),
    "files that are an object": with_keys(siblings={"a": 1}),
    "files that are strings": with_keys(siblings=["config.json"]),
    "a commit that is a path to a parent folder": with_keys(sha="../../canary"),
    "a commit that is null": with_keys(sha=None),
    "a commit of a megabyte": with_keys(sha="a" * 1_000_000),
    "a list": raw(b"[]"),
    "not JSON": raw(b"<html>"),
    "deep nesting": raw(b'{"siblings": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"),
    "a key twice": raw(json.dumps(honest()).encode().replace(b'"tags": []', b'"sha": "b"')),
    "a million files": raw(MANY[:-1] + b"]}"),
}


def send(answerer: Answerer, status: int, body: bytes = b"", **headers: str) -> None:
    answerer.send_response(status)
    ours = {"Content_Length": str(len(body)), "Connection": "close"}
    for name, value in {**ours, **headers}.items():
        answerer.send_header(name.replace("_", "-"), value)
    answerer.end_headers()
    answerer.wfile.write(body)


def redirect(target: str) -> Callable[[Answerer], None]:
    return lambda answerer: send(answerer, 302, Location=target)


def endless(status: int, block: bytes, pause_s: float = 0.0) -> Callable[[Answerer], None]:
    def answer(answerer: Answerer) -> None:
        answerer.send_response(status)
        answerer.send_header("Content-Type", "application/json")
        answerer.send_header("Connection", "close")
        answerer.end_headers()
        for _ in itertools.count():
            answerer.wfile.write(block)
            time.sleep(pause_s)

    return answer


BOMB = gzip.compress(bytes(1_000_000)) * 50  # gzip's members are concatenated


def bomb(answerer: Answerer) -> None:
    send(answerer, 200, BOMB, Content_Encoding="gzip")


def raw_answer(text: bytes) -> Callable[[Answerer], None]:
    return lambda answerer: answerer.wfile.write(text)


ANSWERS: dict[str, tuple[str, Callable[[Answerer], None]]] = {
    "an endless file list": ("api", endless(200, b" " * (1 << 16))),
    "a file list byte by byte": ("api", endless(200, b" ", 0.1)),
    "a file list that is a zip bomb": ("api", bomb),
    "a redirect to a file": ("api", redirect("file:///etc/passwd")),
    "a redirect to another protocol": ("api", redirect("gopher://127.0.0.1/")),
    "a redirect without a host": ("api", redirect("http://")),
    "a redirect to a closed port": ("api", redirect(f"{CLOSED}/x")),
    "a redirect to itself": ("api", redirect(f"/api/models/{REPO}/revision/main")),
    "a redirect without a location": ("api", lambda answerer: send(answerer, 302)),
    "a response without a body": ("api", lambda answerer: send(answerer, 204)),
    "a response of not modified": ("api", lambda answerer: send(answerer, 304)),
    "a response that is not HTTP": ("api", raw_answer(b"\x00\x01\x02 SSH-2.0\r\n\r\n" * 100)),
    "endless headers": ("api", raw_answer(b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200_000)),
    "an endless error": ("api", endless(404, b"x" * (1 << 16))),
    "an error with deep nesting": ("api", lambda a: send(a, 403, b"[" * 100_000)),
    "an error that is a list": ("api", lambda a: send(a, 400, b"[1]")),
    "an endless file": ("config.json", endless(200, b" " * (1 << 16))),
    "a file that is a zip bomb": ("config.json", bomb),
    "a file redirected to a local file": ("config.json", redirect("file:///etc/passwd")),
    "a file redirected to a closed port": ("config.json", redirect(f"{CLOSED}/x")),
    "a file redirected to itself": (
        "config.json",
        redirect(f"/{REPO}/resolve/{'a' * 40}/config.json"),
    ),
    "a file that is not HTTP": ("config.json", raw_answer(b"\x00" * 1000)),
    "a file with other bytes": ("config.json", lambda a: send(a, 200, b'{"model_type": "LLAMA"}')),
    "a file of not modified": ("config.json", lambda answerer: send(answerer, 304)),
}

INDEX = "model.safetensors.index.json"
HUGE = {"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 24]}}
CONTENTS: dict[str, dict[str, bytes]] = {
    "a config with deep nesting": {"config.json": b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"},
    "a config with 10^8 blocks": {
        "config.json": b'{"model_type": "llama", "num_hidden_layers": 100000000}'
    },
    "a config with code": {"config.json": b'{"model_type": "llama", "model_file": "x.py"}'},
    "a config whose type is a path": {"config.json": b'{"model_type": "../../x"}'},
    "an index with a parent folder": {INDEX: b'{"weight_map": {"a": "../../canary/kept.txt"}}'},
    "an index of a wrong type": {INDEX: b'{"weight_map": 7}'},
    "a tokenizer that names a path": {
        "tokenizer_config.json": b'{"fast_tokenizer_files": ["/etc/tokenizer.4.0.json"]}'
    },
    "a tokenizer that names a module": {"tokenizer_config.json": b'{"tool_parser_type": "..x"}'},
    "weights with a header of a huge shape": {FIRST: safetensors(header=HUGE)},
    "weights with a header longer than the file": {FIRST: struct.pack("<Q", 1 << 62) + bytes(24)},
    "weights with the same tensor twice": {FIRST: safetensors(name="b")},
}


@pytest.fixture
def canary(hub, own_folder, monkeypatch) -> Path:
    """A file of the user, in one of several folders inside and next to the store."""
    monkeypatch.setattr(module, "WAITS_S", WAITS_S)
    models_root().mkdir(parents=True)
    for place in (own_folder / "canary", models_root() / "canary", models_root() / "other"):
        place.mkdir()
        (place / "kept.txt").write_text("kept")
        (place / "kept.json").write_text("{}")
    return own_folder / "canary" / "kept.txt"


def tree(folder: Path) -> dict[str, bytes | str]:
    """The content of a folder, except the files that a download of the model may write."""
    ours = (NAME, f".incomplete-{NAME}", f".lock-{NAME}")
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        if models_root() in path.parents and path.relative_to(models_root()).parts[0] in ours:
            continue
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else ""
    return found


def assert_refused(hub: Hub, canary: Path, capsys) -> str:
    """Run a download, check that it fails without changing other files, and return its error."""
    before, began = tree(canary.parent.parent), time.monotonic()
    with pytest.raises(SystemExit) as ended:
        cli.main(["download", REPO])
    assert time.monotonic() - began < MOST_S
    output = capsys.readouterr()
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert ended.value.code in (1, 2)
    assert len(errors) == 1
    assert len(errors[0]) < 1000
    assert errors[0].isprintable()
    assert "this is a bug in your_ai" not in errors[0]
    assert "Traceback" not in output.err + output.out
    assert tree(canary.parent.parent) == before
    assert not (models_root() / NAME).exists()
    return errors[0]


def assert_mended(hub: Hub) -> None:
    """Check that the download succeeds once the hub is well-behaved again."""
    hub.odd.clear()
    assert_whole(download(REPO))


@pytest.mark.parametrize("what", LISTINGS)
def test_a_malicious_file_list_is_refused(hub, canary, capsys, what):
    body = LISTINGS[what](str(canary))
    hub.odd["api"] = lambda answerer: send(answerer, 200, body)
    assert_refused(hub, canary, capsys)
    assert_mended(hub)


@pytest.mark.parametrize("what", ANSWERS)
def test_a_malicious_response_is_refused(hub, canary, capsys, what):
    name, answer = ANSWERS[what]
    hub.odd[name] = answer
    assert_refused(hub, canary, capsys)
    assert_mended(hub)


def silent(answerer: Answerer) -> None:
    answerer.hub.go_on.wait(30)


def drop_by_drop(answerer: Answerer) -> None:
    answerer.wfile.write(b"HTTP/1.1 200 OK\r\nA: ")
    while not answerer.hub.go_on.wait(0.1):
        answerer.wfile.write(b"b")


@pytest.mark.parametrize("answer", [silent, drop_by_drop, lambda answerer: send(answerer, 503)])
def test_a_hub_that_does_not_answer_times_out(hub, canary, capsys, monkeypatch, answer):
    monkeypatch.setattr(module, "ASKING_S", 2.5)
    hub.odd["api"] = answer
    error = assert_refused(hub, canary, capsys)
    assert "try again later" in error
    hub.go_on.set()
    assert_mended(hub)


@pytest.mark.parametrize("what", CONTENTS)
def test_malicious_files_create_no_model(hub, canary, capsys, what):
    hub.repos[REPO].files |= CONTENTS[what]
    assert_refused(hub, canary, capsys)
    hub.repos[REPO].files = model_files()
    assert_mended(hub)


# Links


@pytest.mark.parametrize("name", ["", "parts", "parts/HASH", "config.json", FIRST])
def test_nothing_is_written_or_deleted_through_a_link(hub, canary, name):
    hashed = git_hash(model_files()["config.json"])
    folder = models_root() / f".incomplete-{NAME}"
    link = folder / name.replace("HASH", hashed) if name else folder
    link.parent.mkdir(parents=True, exist_ok=True)
    target = canary.parent if name in ("", "parts") else canary
    link.symlink_to(target)
    before = tree(canary.parent.parent)
    assert_whole(download(REPO))
    assert tree(canary.parent.parent) == before
    assert not any(path.is_symlink() for path in (models_root() / NAME).rglob("*"))


def test_a_dangling_link_creates_no_file_elsewhere(hub, canary):
    parts = models_root() / f".incomplete-{NAME}" / "parts"
    parts.mkdir(parents=True)
    made = canary.with_name("made")
    (parts / git_hash(model_files()["config.json"])).symlink_to(made)
    assert_whole(download(REPO))
    assert not made.exists()


def test_a_lock_that_is_a_link_is_refused(hub, canary):
    (models_root() / f".lock-{NAME}").symlink_to(canary)
    with pytest.raises(UserError, match="cannot be written"):
        download(REPO)
    assert canary.read_text() == "kept"


def test_a_damaged_model_behind_a_link_is_not_changed(hub, canary):
    elsewhere = canary.parent / "model"
    shutil.move(download(REPO), elsewhere)
    (models_root() / NAME).symlink_to(elsewhere)
    (elsewhere / "config.json").write_text("{}")
    before = tree(canary.parent)
    with pytest.raises(UserError, match="is a link"):
        download(REPO)
    assert tree(canary.parent) == before


# The address


@pytest.mark.parametrize(
    "value",
    [
        *("", "hub", "file:///etc/passwd", "http://", "https:///x", "ftp://hub.example"),
        *("http://a b.example", "http://[bad", "http://a:99999", "http://a:0", "javascript:x"),
        *("https://a.example\n.b", "https://a.example?x", "https://a.example#x", "//a.example"),
        *("http://\u0430.example", "https://a\\b", "data:,x"),
    ],
)
def test_an_invalid_address_is_refused_immediately(hub, monkeypatch, capsys, value):
    monkeypatch.setenv("HF_ENDPOINT", value)
    began = time.monotonic()
    for command in (["download", REPO], ["push", "some-run", REPO]):
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 2
    assert time.monotonic() - began < MOST_S / 2  # nothing is tried again
    assert capsys.readouterr().err.count("HF_ENDPOINT") >= 1
    assert hub.requests == []


@pytest.mark.parametrize(
    "value",
    [
        "https://huggingface.co",
        "http://127.0.0.1:8080",
        "https://a.example/hub/",
        "http://[::1]:80",
    ],
)
def test_an_address_of_any_server_is_accepted(value):
    assert remote.address_fault(value) is None


# Anything


JSON = json_values(leaves=12)
NAMES = ["config.json", "tokenizer.json", "model.safetensors", "../a.json"]
FILE = st.fixed_dictionaries(
    {},
    optional={
        "rfilename": st.sampled_from(NAMES) | JSON,
        "size": st.integers(-1, 99) | JSON,
        "blobId": st.sampled_from(["a" * 40, "../a", "a" * 64]) | JSON,
        "lfs": st.none() | st.fixed_dictionaries({"sha256": st.just("b" * 64) | JSON}) | JSON,
    },
)


@settings(max_examples=50)
@given(siblings=st.lists(FILE | JSON, max_size=5) | JSON, sha=st.just("a" * 40) | JSON)
def test_any_accepted_file_list_has_safe_names_and_hashes(siblings, sha):
    answer = json.dumps({"siblings": siblings, "sha": sha}).encode()
    files = ()
    with contextlib.suppress(UserError):
        files = remote.listing_of(REPO, remote.object_in(REPO, answer)).files
    for file in files:
        assert "/" not in file.name
        assert file.name not in ("", ".", "..")
        assert len(file.hash) in (40, 64)
        assert set(file.hash) <= set("0123456789abcdef")
        assert file.size_bytes >= 0
