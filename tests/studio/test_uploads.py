from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.studio.client import Client
from your_ai.errors import UserError
from your_ai.studio.uploads import GIVEN, place_of


def send(client: Client, name: str, content: bytes, piece: int = 7) -> list[int]:
    found = []
    for at in range(0, max(1, len(content)), piece):
        path = f"upload?name={name}&at={at}&size={len(content)}"
        found.append(client.post(path, content[at : at + piece]).status)
    return found


@pytest.mark.parametrize("content", [b"", b"x", b"0123456", b"01234567", os.urandom(100)])
def test_pieces_become_the_file(client: Client, content):
    assert set(send(client, "a.csv", content)) == {200}
    assert (GIVEN / "a.csv").read_bytes() == content
    assert [path.name for path in GIVEN.iterdir()] == ["a.csv"]


def test_a_file_is_there_only_when_it_is_whole(client: Client):
    client.post("upload?name=a.csv&at=0&size=10", b"01234")
    assert not (GIVEN / "a.csv").exists()
    assert client.post("upload?name=a.csv&at=7&size=10", b"789").status == 422
    assert set(send(client, "a.csv", b"new")) == {200}
    assert (GIVEN / "a.csv").read_bytes() == b"new"


def test_files_of_a_folder_stay_in_it(client: Client):
    send(client, "docs/a.txt", b"a")
    assert (GIVEN / "docs" / "a.txt").read_bytes() == b"a"


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/../../x", "/etc/x", "a//b", ".hidden", "a/.git/config"),
        *("a%00b", "a%0ab", "a%5Cb", "~", "a" * 130, "/".join("abcdefghijk"), "%20"),
    ],
)
def test_names_that_lead_elsewhere(client: Client, name):
    got = client.post(f"upload?name={name}&at=0&size=1", b"x")
    if name == "~":  # an ordinary name
        assert got.status == 200
    else:
        assert got.status == 422
        assert "rename" in got.fault
    written = {path for path in Path().rglob("*") if path.is_file()}
    assert all(GIVEN in path.parents or "home" in path.parts for path in written)


@pytest.mark.parametrize("query", ["", "&at=0", "&at=x&size=1", "&at=-1&size=1", "&at=0&size=-5"])
def test_pieces_without_a_place(client: Client, query):
    assert client.post(f"upload?name=a.csv{query}", b"x").status == 422
    assert not (GIVEN / "a.csv").exists()


def test_links_are_not_followed(client: Client, own_folder):
    GIVEN.mkdir(parents=True)
    (own_folder / "secret").write_text("s")
    (GIVEN / "a.csv").symlink_to(own_folder / "secret")
    (GIVEN / "dir").symlink_to(own_folder)
    for name in ("a.csv", "dir/secret"):
        assert client.post(f"upload?name={name}&at=0&size=1", b"x").status == 422
    assert (own_folder / "secret").read_text() == "s"


@given(st.text(max_size=40))
def test_any_name_is_a_place_in_the_folder_or_refused(name):
    try:
        path = place_of(name)
    except UserError:
        return
    assert GIVEN in path.parents
    assert ".." not in path.parts
