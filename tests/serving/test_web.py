from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.conftest import wait_until
from your_ai.serving import web
from your_ai.serving.web import Gate, Origins, RequestRefused, WebServer


@pytest.mark.parametrize(
    "origin",
    [
        *("http://localhost", "https://127.0.0.1:443", "http://[::1]:8080", "http://127.9.9.9"),
        *("http://LOCALHOST:3000", "http://chat.example"),
    ],
)
def test_allowed_origins(origin):
    assert origin in Origins(("http://chat.example",))


@pytest.mark.parametrize(
    "origin",
    [
        *("http://chat.example:8080", "http://localhost.evil.example", "https://localhost.evil"),
        *("http://127.0.0.1.evil.example", "http://127.0.0.1@evil.example", "localhost", "", "*"),
        *("http://localhost:80@evil.example", "http://evil.example#http://localhost", None, "null"),
        *("http://localhost@evil.example", "http://user@localhost"),
        *("http://localhost\\@evil.example", "ftp://localhost"),
        *("http://evil.example\\@localhost", "http://[::1", "http://[::1].evil.example", "file://"),
        *("http://[::1]evil.example", "http://[::ffff:127.0.0.1]", "http://[::1%25lo]"),
        *("http://localhost.", "http://localhost/", "http://localhost:", "http://localhost:x"),
        *("http://localhost:99999", "http://localhost\n", "http://\uff4cocalhost"),
        *("http://127.1", "http://0x7f.0.0.1", "http://0177.0.0.1", "http://2130706433"),
        *("http://0x7f000001", "http://017700000001"),
    ],
)
def test_other_origins(origin):
    assert origin not in Origins(("http://chat.example",))
    assert origin in Origins(("*",))


@pytest.mark.parametrize(
    ("own", "hosts"),
    [
        (True, ["localhost:8080", "127.0.0.1", "[::1]:8080", "192.168.1.5:8080", "a.internal:80"]),
        (False, ["", "[::1].evil.example", "mac.local", "127.1", "0x7f.1", "2130706433", "a b"]),
        (False, ["evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"]),
        (False, ["a@localhost", "localhost@a.b", "localhost.", "localhost:99999999", "a.b:80:80"]),
    ],
)
def test_own_host_names(own, hosts):
    for host in hosts:
        assert web.is_own(web.host_of(host)) == own, host


def test_host_name_of_this_machine_is_its_own(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "Mac.local")
    assert web.is_own(web.host_of("mac.local:8080"))


@given(st.text(max_size=30))
def test_body_length_is_plain_digits_or_refused(text):
    with contextlib.suppress(RequestRefused):
        length = web.body_length(Headers({"Content-Length": text.encode().decode("latin-1")}))
        assert 0 <= length <= web.BODY_BYTES
        assert set(text) <= set("0123456789")


LINES = st.lists(
    st.sampled_from(
        [
            *(b"Host: a", b"X-A:  b\t", b"Cookie: \xff=1", b"Connection: Upgrade"),
            *(b"Upgrade: websocket", b"Transfer-Encoding: chunked", b"Content-Length: 99"),
        ]
    )
    | st.binary(max_size=20),
    max_size=6,
).map(lambda lines: b"\r\n".join([b"POST /a?b HTTP/1.1", *lines, b"", b""]))


@given(st.binary(max_size=300) | LINES)
def test_any_bytes_give_a_head_that_h11_reads_alike_or_are_refused(data):
    with contextlib.suppress(RequestRefused):
        head = web.read_head(data)
        if head is None:
            return
        assert not set(data[: head.size]) & (set(range(32)) - set(b"\r\n\t"))
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(head.for_h11(3) + b"abc")
        request = connection.next_event()
        assert request.method + b" " + request.target == head.line.rpartition(b" ")[0]
        own = {name for name, _ in head.headers.raw} - {*web.OWN_HEADERS}
        assert {*Headers(raw=list(request.headers)).keys()} == {
            *(name.decode() for name in own), "connection", "content-length",
        }  # fmt: skip
        assert connection.next_event().data == b"abc"
        assert isinstance(connection.next_event(), h11.EndOfMessage)
        assert connection.our_state is h11.SEND_RESPONSE


# A server


async def size(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def endless(request: Request) -> Response:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 1_000_000
            await asyncio.sleep(0)

    return StreamingResponse(pieces())


def refusal(refused: RequestRefused, asked: Headers) -> Response:
    return PlainTextResponse(refused.message, refused.status)


@pytest.fixture
def server() -> Iterator[WebServer]:
    def check(head: web.RequestHead) -> None:
        web.check_host(head.headers.get("host", ""), web.is_loopback)

    routes = [Route("/size", size, methods=["POST"]), Route("/endless", endless)]
    server = WebServer(web.listen("127.0.0.1", 0), routes, Gate(("GET", "POST"), check, refusal))
    yield server
    server.stop()


def connect(server: WebServer) -> socket.socket:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    return socket.create_connection(address, timeout=10)


def answer(server: WebServer, data: bytes) -> tuple[int, str]:
    """The status and the body of the answer to a request, which may be refused before its end."""
    with connect(server) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.status, response.read().decode()


def post(length: int, path: str = "/size", more: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n"
    return head.encode()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (post(3) + b"abc", (200, "3")),
        (post(3) + b"abc" + post(4) + b"abcd", (200, "3")),
        (b"POST /size HTTP/1.0\nHost: localhost\nContent-Length: 3\n\nabc", (200, "3")),
        (post(3, more="Connection: Upgrade\r\nUpgrade: websocket\r\n") + b"abc", (200, "3")),
        (post(0, "/other"), (404, "there is nothing at /other")),
        (post(0, "/size/"), (404, "there is nothing at /size/")),
        (b"GET /size HTTP/1.1\r\nHost: localhost\r\n\r\n", (404, "there is nothing at /size")),
        (b"PUT /size HTTP/1.1\r\nHost: a\r\n\r\n", (403, "a is not a name of this machine")),
        (b"GET /\r\n\r\n", (400, "the request line is not METHOD /path HTTP/1.1")),
        (b"GET / HTTP/1.1\r\n\r\n", (400, "the Host header is missing")),
        (post(1 << 60), (413, "a request may have at most 16777216 bytes")),
    ],
    ids=str,
)
def test_a_connection_has_one_request_of_one_interpretation(server, data, expected):
    assert answer(server, data) == expected


def test_a_client_that_waits_with_its_body_is_told_to_go_on(server):
    with connect(server) as connection:
        connection.sendall(post(3, more="Expect: 100-continue\r\n"))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"abc")
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, response.read()) == (200, b"3")


@pytest.mark.parametrize("sent", [b"", post(9)[:40], post(9), post(9) + b"abc"])
def test_a_slow_request_is_refused(server, monkeypatch, sent):
    monkeypatch.setattr(web, "REQUEST_S", 0.2)
    began = time.monotonic()
    assert answer(server, sent)[0] == 408
    assert time.monotonic() - began < 5


def test_a_client_that_does_not_read_loses_its_connection(server, monkeypatch):
    monkeypatch.setattr(web, "ANSWER_S", 0.2)
    with connect(server) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: len(server.server.server_state.tasks) == 1)
        wait_until(lambda: len(server.server.server_state.tasks) == 0)


def test_a_client_that_leaves_at_once_is_no_error(server, caplog):
    for _ in range(20):
        with connect(server) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(post(3) + b"abc")
    wait_until(lambda: not server.server.server_state.tasks)
    assert answer(server, post(3) + b"abc") == (200, "3")
    assert caplog.text == ""


def test_large_bodies_share_one_allowance(server, monkeypatch):
    monkeypatch.setattr(web, "BODIES_BYTES", 10)
    with connect(server) as first:
        first.sendall(post(6))
        wait_until(lambda: len(server.server.server_state.connections) == 1)
        time.sleep(0.1)
        assert answer(server, post(6))[0] == 503
        assert answer(server, post(4) + b"abcd") == (200, "4")
    wait_until(lambda: not server.server.server_state.connections)
    assert answer(server, post(10) + b"a" * 10) == (200, "10")


def test_too_many_connections_are_refused(server):
    held = [connect(server) for _ in range(web.CONNECTIONS)]
    wait_until(lambda: len(server.server.server_state.connections) == web.CONNECTIONS)
    assert answer(server, post(3) + b"abc")[0] == 503
    for connection in held:
        connection.close()
    wait_until(lambda: not server.server.server_state.connections)
    assert answer(server, post(3) + b"abc") == (200, "3")


def test_stop_ends_all_connections_and_the_thread(monkeypatch):
    monkeypatch.setattr(web, "GRACE_S", 0.2)
    before = threading.active_count()
    gate = Gate(("GET",), lambda head: None, refusal)
    server = WebServer(web.listen("127.0.0.1", 0), [Route("/endless", endless)], gate)
    idle, stuck = connect(server), connect(server)
    stuck.sendall(b"GET /endless HTTP/1.1\r\nHost: localhost\r\n\r\n")
    wait_until(lambda: len(server.server.server_state.tasks) == 1)
    server.stop()
    assert threading.active_count() == before
    assert idle.recv(1) == b""
    for connection in (stuck, idle):
        connection.close()
    with pytest.raises(ConnectionRefusedError):
        connect(server)
