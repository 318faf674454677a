from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from your_ai.errors import UserError
from your_ai.serving import live_pages, wire
from your_ai.serving.live_pages import LivePage, PageServer, listen

TEXT = '<html><body data-version="">shown</body></html>'
PATIENCE_S = 10.0


@pytest.fixture
def page(monkeypatch):
    monkeypatch.setattr(live_pages, "FRESH_S", 0.05)
    page = LivePage()
    page.publish(TEXT, "title", {"head": "one", "tail": "two"})
    return page


@pytest.fixture
def server(page) -> Iterator[PageServer]:
    server = listen(None, page, "default-src 'none'")
    server.start()
    yield server
    server.stop()


def ask(
    server: PageServer, path: str = "/", method: str = "GET", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE_S)
    connection.request(method, path, headers={n.replace("_", "-"): v for n, v in headers.items()})
    return connection.getresponse()


def frames(response: http.client.HTTPResponse) -> Iterator[tuple[str, dict[str, object]]]:
    """The version and the data of each event."""
    version = ""
    while line := response.readline().decode():
        if line.startswith("id: "):
            version = line[4:].strip()
        elif line.startswith("data: "):
            yield version, json.loads(line[6:])


def wait_for(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_page_has_its_version_and_strict_headers(server, page):
    response = ask(server)
    body = response.read().decode()
    assert response.status == 200
    assert body == TEXT.replace('""', f'"{page.token}-1"')
    assert response.headers["Content-Security-Policy"] == "default-src 'none'"
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Cache-Control"] == "no-store"
    assert not [name for name in response.headers if name.startswith("Access-Control")]


def test_head_has_no_body(server):
    for path in ("/", "/events"):
        response = ask(server, path, "HEAD")
        assert (response.status, response.read()) == (200, b"")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_other_methods_are_refused(server, method):
    response = ask(server, "/", method)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/x", "/events/", "/../events.jsonl", "/%2e%2e/config.yaml"])
def test_nothing_is_at_other_paths(server, path):
    response = ask(server, path)
    assert response.status == 404
    assert response.headers["Content-Type"].startswith("text/plain")


@pytest.mark.parametrize("path", ["/", "/events"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "192.168.0.7:8765"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "http://localhost:9999"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
    ],
)
def test_other_hosts_and_pages_are_refused(server, path, headers):
    assert ask(server, path, **headers).status == 403


def test_a_link_on_another_page_may_open_this_one(server):
    assert ask(server, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:8765", "LOCALHOST"])
def test_names_of_this_machine_are_accepted(server, host):
    assert ask(server, Host=host, Origin=f"http://{host}").status == 200


def test_a_new_reader_gets_all_parts_and_then_those_that_change(server, page):
    events = frames(ask(server, "/events"))
    first, all_parts = next(events)
    assert all_parts == {"title": "title", "parts": {"head": "one", "tail": "two"}}
    page.publish(TEXT, "title", {"head": "one", "tail": "<p>\n</p>\u2028"})
    second, changed = next(events)
    assert changed["parts"] == {"tail": "<p>\n</p>\u2028"}
    assert [v.split("-")[1] for v in (first, second)] == ["1", "2"]


@pytest.mark.parametrize("by_header", [False, True])
def test_a_reader_that_comes_back_gets_what_it_missed(server, page, by_header):
    page.publish(TEXT, "title", {"head": "three", "tail": "two"})
    seen = f"{page.token}-1"
    path, headers = (
        ("/events", {"Last_Event_ID": seen}) if by_header else (f"/events?since={seen}", {})
    )
    assert next(frames(ask(server, path, **headers)))[1]["parts"] == {"head": "three"}


@pytest.mark.parametrize("seen", ["other-1", "-", "{token}-99", "{token}-x", "{token}-" + "9" * 40])
def test_versions_of_another_server_mean_nothing(page, seen):
    assert len(json.loads(page.changes(seen.format(token=page.token))[1])["parts"]) == 2


def test_nothing_is_sent_for_the_version_a_reader_has(page):
    now, _ = page.changes("")
    assert page.changes(now) == (now, "")
    page.publish(TEXT, "title", {"head": "one", "tail": "two"})
    assert page.changes(now) == (now, "")


def test_events_are_lines_of_ascii_whatever_the_text(server, page):
    page.publish(TEXT, "\n\ndata: x", {"head": "a\r\n\r\nid: 7\ndata: </script>\u2028\x00"})
    response = ask(server, "/events")
    lines = [response.readline() for _ in range(4)]
    assert [line[:5] for line in lines] == [
        b"retry",
        b"\n",
        b"id: " + page.token[:1].encode(),
        b"data:",
    ]
    assert lines[3].isascii()
    assert json.loads(lines[3][6:])["parts"]["head"].endswith("</script>\u2028\x00")


def test_several_readers_get_the_same_and_a_slow_one_delays_nobody(server, page):
    page.publish(TEXT, "title", {"head": "x" * 20_000_000, "tail": "two"})
    slow = ask(server, "/events")  # does not read its answer
    wait_for(lambda: page.readers == 1)
    now = page.changes("")[0]
    readers = [frames(ask(server, f"/events?since={now}")) for _ in range(3)]
    wait_for(lambda: page.readers == 4)
    began = time.monotonic()
    page.publish(TEXT, "title", {"head": "x" * 20_000_000, "tail": "three"})
    assert [next(reader)[1]["parts"] for reader in readers] == [{"tail": "three"}] * 3
    assert time.monotonic() - began < 5
    slow.close()


def test_readers_that_leave_are_noticed(server, page, monkeypatch):
    monkeypatch.setattr(live_pages, "LOOK_S", 0.05)
    response = ask(server, "/events")
    wait_for(lambda: page.readers == 1)
    assert page.has_audience
    response.close()
    wait_for(lambda: page.readers == 0)


def test_a_silent_page_sends_comments(server, page, monkeypatch):
    monkeypatch.setattr(live_pages, "SILENCE_S", 0.0)
    response = ask(server, f"/events?since={page.token}-1")
    assert [response.readline() for _ in range(3)] == [b"retry: 1000\n", b"\n", b":\n"]


def test_stop_ends_all_threads_and_connections(page, monkeypatch):
    monkeypatch.setattr(live_pages, "GRACE_S", 0.2)
    before = threading.active_count()
    server = listen(None, page, "")
    server.start()
    response = ask(server, "/events")
    page.publish(TEXT, "", {"head": "x" * 50_000_000})
    stuck = ask(server, "/events")
    idle = socket.create_connection(("127.0.0.1", server.server_port))
    wait_for(lambda: len(server.open) == 3)
    server.stop()
    assert threading.active_count() == before
    with contextlib.suppress(http.client.HTTPException, OSError):
        response.read()
    for connection in (stuck, idle):
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.server_port), 1)


def test_too_many_clients_get_503(server, page, monkeypatch):
    held = [ask(server, "/events") for _ in range(wire.CONNECTIONS)]
    wait_for(lambda: page.readers == wire.CONNECTIONS)
    assert ask(server).status == 503
    for response in held:
        response.close()


@pytest.mark.parametrize(
    "request_text",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ],
)
def test_malformed_requests_are_refused(server, request_text):
    with socket.create_connection(("127.0.0.1", server.server_port), PATIENCE_S) as connection:
        connection.sendall(request_text)
        assert re.match(rb"HTTP/1\.0 400 ", connection.recv(100))


def test_a_port_in_use_is_named_and_a_free_one_is_found(server, page):
    port = server.server_port
    with pytest.raises(UserError, match=rf"^--port {port}: cannot be used \([^\n]+\)"):
        listen(port, page, "")
    other = listen(None, page, "")
    assert other.server_port != port
    assert other.url == f"http://127.0.0.1:{other.server_port}"
    other.server_close()


def test_a_reader_of_the_page_gets_its_latest_state(page, monkeypatch):
    monkeypatch.setattr(live_pages, "FRESH_S", PATIENCE_S)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(page.fresh()))
    reader.start()
    asked = page.wait(PATIENCE_S)
    page.publish("new", "title", {"head": "new"})
    page.confirm(asked)
    reader.join()
    assert found == ["new"]
