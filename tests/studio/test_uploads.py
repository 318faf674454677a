from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.studio.client import Client
from your_ai.errors import UserError
from your_ai.studio.uploads import GIVEN, given_files, place_of

UPLOAD = "upload?gift=0123456789abcdef&name="


def send(client: Client, name: str, content: bytes, piece: int = 7) -> list[int]:
    found = []
    for at in range(0, max(1, len(content)), piece):
        path = f"{UPLOAD}{name}&at={at}&size={len(content)}"
        found.append(client.post(path, content[at : at + piece]).status)
    return found


def finish(client: Client) -> str:
    """End a gift; the name by which the page of data shows it."""
    return str(json.loads(client.post(UPLOAD.replace("?", "/done?"), b"").text)["data"])


def give(client: Client, **files: str) -> str:
    """Give files, whose names have _ for a dot."""
    for name, text in files.items():
        assert {*send(client, name.replace("_", "."), text.encode(), 1 << 20)} == {200}
    return finish(client)


@pytest.mark.parametrize("content", [b"", b"x", b"0123456", b"01234567", bytes(range(100))])
def test_pieces_become_the_file(client: Client, content):
    assert set(send(client, "a.csv", content)) == {200}
    assert finish(client) == "a.csv"
    assert (GIVEN / "a.csv").read_bytes() == content
    assert [path.name for path in GIVEN.iterdir()] == ["a.csv"]


def test_a_file_is_there_only_when_it_is_whole(client: Client):
    client.post(UPLOAD + "a.csv&at=0&size=10", b"01234")
    assert not (GIVEN / "a.csv").exists()
    assert client.post(UPLOAD + "a.csv&at=7&size=10", b"789").status == 422
    done = client.post(UPLOAD.replace("?", "/done?"), b"")
    assert done.fault == "a.csv: a piece is missing; give the file again"
    assert set(send(client, "a.csv", b"new")) == {200}
    assert finish(client) == "a.csv"
    assert (GIVEN / "a.csv").read_bytes() == b"new"


def test_no_file_has_the_name_of_installed_data(client: Client):
    assert set(send(client, "demo", b"prompt,completion")) == {200}
    assert finish(client) == "demo-2"


def test_files_of_a_folder_stay_in_it(client: Client):
    send(client, "docs/a.txt", b"a")
    assert finish(client) == "docs"
    assert (GIVEN / "docs" / "a.txt").read_bytes() == b"a"


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/../../x", "/etc/x", "a//b", ".hidden", "a/.git/config"),
        *("a%00b", "a%0ab", "a%5Cb", "~", "a" * 130, "/".join("abcdefghijk"), "%20"),
    ],
)
def test_names_that_lead_elsewhere(client: Client, name):
    got = client.post(f"{UPLOAD}{name}&at=0&size=1", b"x")
    if name == "~":  # an ordinary name
        assert got.status == 200
    else:
        assert got.status == 422
        assert "rename" in got.fault
    written = {path for path in Path().rglob("*") if path.is_file()}
    assert all(GIVEN in path.parents or "home" in path.parts for path in written)


def test_another_file_of_the_same_name_gets_a_number(client: Client):
    assert give(client, a_csv="1") == "a.csv"
    assert give(client, a_csv="1") == "a.csv"
    assert give(client, a_csv="2") == "a-2.csv"
    assert (GIVEN / "a.csv").read_text() == "1"


def test_files_of_splits_that_are_given_together_are_one_folder(client: Client):
    assert give(client, train_jsonl="1", valid_jsonl="2") == "data"
    assert {path.name for path in (GIVEN / "data").iterdir()} == {"train.jsonl", "valid.jsonl"}


def test_others_that_are_given_together_are_named_together(client: Client):
    assert give(client, b_md="1", a_md="2") == "a.md,b.md"


@pytest.mark.parametrize("query", ["", "&at=0", "&at=x&size=1", "&at=-1&size=1", "&at=0&size=-5"])
def test_pieces_without_a_place(client: Client, query):
    assert client.post(f"{UPLOAD}a.csv{query}", b"x").status == 422
    assert not (GIVEN / "a.csv").exists()


def test_links_are_not_followed(client: Client, own_folder):
    GIVEN.mkdir(parents=True)
    (own_folder / "secret").write_text("s")
    (GIVEN / "a.csv").symlink_to(own_folder / "secret")
    (GIVEN / "dir").symlink_to(own_folder)
    (GIVEN / "broken").symlink_to("nowhere")
    assert given_files() == []
    assert give(client, a_csv="x") == "a-2.csv"
    send(client, "dir/secret", b"x")
    assert finish(client) == "dir-2"
    for name in ("a.csv", "dir/secret", "../secret"):
        assert client.post("data/remove", name=name).status == 422
    assert (own_folder / "secret").read_text() == "s"


@given(st.text(max_size=40))
def test_any_name_is_a_place_in_the_folder_or_refused(name):
    try:
        path = place_of(name)
    except UserError:
        return
    assert GIVEN in path.parents
    assert ".." not in path.parts
