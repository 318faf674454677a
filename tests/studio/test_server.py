from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest

from tests.studio.client import Client, opened
from your_ai.config import TrainConfig
from your_ai.hub.find import store
from your_ai.run.folder import RunFolder
from your_ai.studio.server import TOKEN, own_token

SEEN = ("models", "plan", "runs", "ship")
PATHS = (
    *("", "/", "/plan", "/runs", "//plan", "/%2e%2e/plan", "/x/plan", "/static/studio.css"),
    *("/0123456789abcdef0123456789abcdef/plan", "/plan?token=x", "/..%2fruns", "/runs/x/stop"),
)


def run_named(name: str) -> RunFolder:
    folder = RunFolder(Path("runs") / name)
    folder.path.mkdir(parents=True)
    folder.write_config(TrainConfig(model="m", data="d.jsonl"))
    return folder


@pytest.mark.parametrize("page", SEEN)
def test_pages_are_whole_and_strict(client: Client, page):
    got = client.get(page)
    assert got.status == 200
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert got.text.count("<h1>") == 1
    assert 'aria-current="page"' in got.text
    assert not [
        text for text in ("style=", "onclick", "<script>", "javascript:") if text in got.text
    ]


@pytest.mark.parametrize(("path", "method"), [*itertools.product(PATHS, ("GET", "POST", "HEAD"))])
def test_nothing_is_there_without_the_token(client: Client, path, method):
    got = client.ask(method, path or "/", Origin=client.server.url, Content_Length="0")
    assert got.status in (403, 404)
    assert got.text.count("\n") <= 1


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1"},
        {"Host": "evil.example"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["runs", "runs/r/remove", "models/remove", "upload?name=x"])
def test_other_pages_can_do_nothing(client: Client, headers, path):
    run_named("r")
    own = {"Origin": client.server.url} if headers else {}
    got = client.ask("POST", client.studio.root + path, **{"Content_Length": "0"} | own | headers)
    assert got.status == 403
    assert Path("runs/r").is_dir()
    assert not Path("studio").exists()


@pytest.mark.parametrize("path", ["runs/r/stop", "runs/r/remove", "models/remove", "upload?name=x"])
def test_a_get_changes_nothing(client: Client, path):
    run_named("r")
    assert client.get(path).status in (404, 405)
    assert Path("runs/r").is_dir()


@pytest.mark.parametrize(
    "name", ["nothing", "..", "%2e%2e", "..%2f..", "r%00", "<script>", "a" * 3000, "r%0d%0aX:1"]
)
@pytest.mark.parametrize("path", ["runs/{}", "runs/{}/live/", "ship?run={}", "jobs/{}"])
def test_names_that_are_none(client: Client, name, path):
    got = client.get(path.format(name))
    assert got.status in (400, 404, 422)
    if "html" in got.headers["content-type"]:
        assert "<script>" not in got.text
    assert "Traceback" not in got.text


@pytest.mark.parametrize("body", [b"\xff" * 10, b"a=%ff", b"x=1&" * 5000, b"=" * 100, b"%"])
def test_forms_that_cannot_be_read(client: Client, body):
    kind = {"Origin": client.server.url, "Content_Type": "application/x-www-form-urlencoded"}
    got = client.ask("POST", client.studio.root + "plan/preview", body, **kind)
    assert got.status in (422, 200)
    assert "Traceback" not in got.text


def test_the_token_is_private_and_stays(own_folder):
    token = own_token()
    assert own_token() == token
    assert stat.S_IMODE(os.stat(store() / TOKEN).st_mode) == 0o600
    (store() / TOKEN).write_text("../../x")
    assert own_token() not in ("../../x", token)


def test_a_page_stays_valid_when_the_studio_is_started_again(own_folder):
    with opened() as first:
        root = first.studio.root
    with opened() as second:
        assert second.studio.root == root


def test_a_fault_of_ours_is_one_line(client: Client, monkeypatch):
    monkeypatch.setattr("your_ai.session.run_list.run_rows", lambda **_: 1 / 0)
    got = client.get("runs")
    assert got.status == 500
    assert got.fault.startswith("ZeroDivisionError")
    assert "doctor --report" in got.fault
