"""A web server: routes of Starlette behind a gate, run by uvicorn in a thread.

A request is read strictly: bounded in size and time, and with only one interpretation. It has one
head, of which every line is checked before h11 parses it, and one body, whose length is given in
digits. A connection has one request, which reaches the routes when it is complete.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from your_ai import __version__
from your_ai.gates.text import shortened

REQUEST_S = 8.0  # for a whole request, head and body
ANSWER_S = 8.0  # for a client to receive a piece of its answer
LINGER_S = 1.0  # for the rest of a request that was refused early
GRACE_S = 2.0  # for answers in progress when the server stops
LINE_BYTES = 1 << 13
HEAD_BYTES = 1 << 16
HEADERS = 100
BODY_BYTES = 1 << 24  # of a request, which is only text
BODIES_BYTES = 1 << 26  # of all requests that are answered at the same time
CONNECTIONS = 64  # open at the same time

END_OF_HEAD = re.compile(rb"\r?\n\r?\n")
REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) /[\x21-\x7e]* HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):([\t\x20-\x7e\x80-\xff]*)")
ONCE = (b"host", b"origin", b"content-length", b"transfer-encoding", b"content-type", b"expect")
WITHOUT_BODY = ("GET", "HEAD", "OPTIONS", "DELETE")
# Headers about the connection and the body: this module acts on them, and h11 does not get them.
OWN_HEADERS = (b"connection", b"upgrade", b"expect", b"transfer-encoding", b"content-length")
DIGITS = re.compile(r"[0-9]{1,20}")
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
LOCAL_NAMES = ("localhost",)
LOCAL_ENDINGS = (".localhost", ".internal")  # nobody can register these domains


class RequestRefused(BaseException):
    """A request is refused: the HTTP status, and why.

    Not an Exception, since mlx-lm would catch it and answer in its own format.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


@dataclass(frozen=True)
class Gate:
    """The rule by which requests reach the routes of a server, and the refusal of all others."""

    methods: tuple[str, ...]
    check: Callable[[RequestHead], None]
    """Raises RequestRefused for a sender that may not use the server: its host, origin or token."""
    refusal: Callable[[RequestRefused, Headers], Response]
    """The answer to a request with these headers that is refused, in the format of the clients."""


# Hosts and origins


@dataclass(frozen=True)
class Origins:
    """The web pages that may use the server: those of this machine, and those named.

    A container, because mlx-lm's handler tests `origin in origins`.
    """

    named: tuple[str, ...] = ()
    """Origins such as http://HOST:PORT; `*` stands for all."""

    def __contains__(self, origin: object) -> bool:
        named = "*" in self.named or origin in self.named
        return named or (isinstance(origin, str) and is_loopback(host_of_origin(origin)))


def host_of_origin(origin: str) -> str:
    """Return the host of `http://host[:port]` as browsers write it; "" for anything else."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or origin != f"{parts.scheme}://{parts.netloc}":
        return ""  # it has a path, a query or a spelling that browsers do not send
    return host_of(parts.netloc)


def host_of(text: str) -> str:
    """Return the host of `host[:port]`, in lower case, without brackets; "" for anything else."""
    found = HOST.fullmatch(text)
    if found is None or int(found[3] or 0) > 65535:
        return ""
    return (found[1] or found[2]).lower()


def is_loopback(host: str) -> bool:
    """Say whether a name or address can only mean this machine."""
    address = address_of(host)
    return host in LOCAL_NAMES if address is None else address.is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_own(host: str) -> bool:
    """Say whether a request to `host` meant this machine, by a name that others cannot assign.

    Otherwise a web page could let its own domain resolve to 127.0.0.1 and read the answers.
    """
    named = is_loopback(host) or host.endswith(LOCAL_ENDINGS)
    return named or address_of(host) is not None or host == socket.gethostname().lower()


def check_host(host: str, is_allowed: Callable[[str], bool]) -> None:
    """Raise RequestRefused if a Host header is not an allowed name of this machine."""
    if not is_allowed(host_of(host)):
        raise RequestRefused(403, f"{shortened(host)} is not a name of this machine")


def check_origin(headers: Headers, allowed: Container[str]) -> None:
    """Raise RequestRefused for a request of a web page that is not among the allowed ones."""
    origin = headers.get("origin")
    if origin is not None and origin not in allowed:
        raise RequestRefused(403, f"pages from {shortened(origin)} may not use this server")


# Reading a request


@dataclass(frozen=True)
class RequestHead:
    """The checked head of a request."""

    line: bytes
    """The request line."""
    headers: Headers
    size: int
    """Bytes of the head, including the empty line at its end."""

    @property
    def method(self) -> str:
        return self.line.split(b" ")[0].decode()

    @property
    def target(self) -> str:
        """The path with its query, as it was sent."""
        return self.line.split(b" ")[1].decode()

    def for_h11(self, length: int) -> bytes:
        """Return the head of the only request of its connection, with a body of `length` bytes.

        Written again from what was checked, so that h11 cannot read anything else in it.
        """
        kept = [(name, text) for name, text in self.headers.raw if name not in OWN_HEADERS]
        own = [(b"connection", b"close"), (b"content-length", b"%d" % length)]
        return head_bytes(self.line, [*kept, *own])


def head_bytes(first: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    return b"\r\n".join([first, *(b"%s: %s" % header for header in headers), b"", b""])


def read_head(data: bytes | bytearray) -> RequestHead | None:
    """Return the head of a request that begins with `data`; None if its end is not there yet.

    Raises RequestRefused for a head that ordinary clients do not send.
    """
    end = END_OF_HEAD.search(data, 0, HEAD_BYTES)
    lines = bytes(data[: end.start() if end else HEAD_BYTES]).split(b"\n")
    if len(lines[0]) > LINE_BYTES:
        raise RequestRefused(414, "the request's headers are too long")
    too_long = len(lines) > HEADERS + 1 or any(len(line) > LINE_BYTES for line in lines)
    if too_long or (end is None and len(data) >= HEAD_BYTES):
        raise RequestRefused(431, "the request's headers are too long")
    if end is None:
        return None
    lines = [line.removesuffix(b"\r") for line in lines]
    return RequestHead(lines[0], check_head(lines), end.end())


def check_head(lines: Sequence[bytes]) -> Headers:
    """Return the headers. Raises RequestRefused for a line that is not strictly valid."""
    version = lines[0].rpartition(b" ")[2]
    if re.fullmatch(rb"HTTP/[2-9]\.[0-9]", version):
        raise RequestRefused(505, "the server only supports HTTP/1.1")
    if not REQUEST_LINE.fullmatch(lines[0]):
        raise RequestRefused(400, "the request line is not METHOD /path HTTP/1.1")
    headers: list[tuple[bytes, bytes]] = []
    for line in lines[1:]:
        found = HEADER.fullmatch(line)
        if found is None:
            raise RequestRefused(400, "a header is not `name: value`")
        name = found[1].lower()
        if name in ONCE and any(name == other for other, _ in headers):
            raise RequestRefused(400, f"{name.decode()} is given twice")
        headers.append((name, found[2].strip(b" \t")))
    if version == b"HTTP/1.1" and not any(name == b"host" for name, _ in headers):
        raise RequestRefused(400, "the Host header is missing")
    return Headers(raw=headers)


def body_length(headers: Headers) -> int:
    """Return the length of the body in bytes. Raises RequestRefused if unknown or too large."""
    length, encoding = headers.get("content-length"), headers.get("transfer-encoding")
    if encoding is not None and length is not None:
        raise RequestRefused(400, "give Content-Length or Transfer-Encoding, not both")
    if length is None:
        raise RequestRefused(411, "the Content-Length header is required")
    if not DIGITS.fullmatch(length):
        raise RequestRefused(400, "Content-Length must be a number in digits")
    if int(length) > BODY_BYTES:
        raise RequestRefused(413, f"a request may have at most {BODY_BYTES} bytes")
    return int(length)


class StrictProtocol(H11Protocol):
    """A connection with one request, which is passed on to uvicorn's protocol when it is complete.

    uvicorn itself sets no limit to the size of a request and to the time that it takes, nor to
    the time that a client takes to read its answer.
    """

    def __init__(
        self,
        gate: Gate,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.gate = gate
        self.received = bytearray()
        self.head: RequestHead | None = None
        self.length = 0
        """Bytes of the body."""
        self.is_read = False
        """Whether the request is complete or refused; what follows it is not read."""
        self.deadline = self.stalled = self.loop.call_later(REQUEST_S, self.refuse_slow)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # pause_writing is called for any unsent data
        if len(self.connections) > CONNECTIONS:
            self.refuse(RequestRefused(503, "too many connections; try again"))

    def data_received(self, data: bytes) -> None:
        if self.is_read:
            return
        self.received += data
        try:
            # Not for every byte of a line that trickles, since each time reads all lines.
            if self.head is None and (b"\n" in data or len(self.received) >= HEAD_BYTES):
                self.head = read_head(self.received)
                if self.head is not None:
                    self.admit(self.head)
        except RequestRefused as refused:
            self.refuse(refused)
            return
        if self.head is not None and len(self.received) >= self.head.size + self.length:
            self.is_read = True
            self.stop_timers()
            body = self.received[self.head.size : self.head.size + self.length]
            self.received = bytearray()
            super().data_received(self.head.for_h11(self.length) + body)

    def admit(self, head: RequestHead) -> None:
        """Raise RequestRefused if the request is not allowed or its body is too large."""
        self.gate.check(head)
        expected = head.headers.get("expect")
        if expected is not None and expected.lower() != "100-continue":
            raise RequestRefused(417, "the server only supports Expect: 100-continue")
        if head.method not in self.gate.methods:
            use = " or ".join(method for method in self.gate.methods if method != "OPTIONS")
            raise RequestRefused(405, f"{head.method} is not allowed; use {use}")
        if head.method in WITHOUT_BODY:
            return
        length = body_length(head.headers)
        others = sum(each.length for each in self.connections if isinstance(each, StrictProtocol))
        if length + others > BODIES_BYTES:
            raise RequestRefused(503, "the server is busy with large requests; try again")
        self.length = length
        if expected is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def refuse_slow(self) -> None:
        self.refuse(RequestRefused(408, f"the request took more than {REQUEST_S:.0f} s"))

    def send_400_response(self, msg: str) -> None:
        """Refuse what h11 does not accept, though it passed the checks of its head."""
        self.refuse(RequestRefused(400, msg))

    def refuse(self, refused: RequestRefused) -> None:
        """Answer, and discard for a moment what else the client sends.

        Otherwise the system would discard the answer together with the unread data.
        """
        self.is_read = True
        self.received = bytearray()
        self.stop_timers()
        line = self.head.line.decode() if self.head else ""
        logging.info('"%s" %d', line, refused.status)
        answer = self.gate.refusal(refused, self.head.headers if self.head else Headers())
        answer.headers["connection"] = "close"
        if refused.status == 405:
            answer.headers["allow"] = ", ".join(self.gate.methods)
        headers = [*self.server_state.default_headers, *answer.raw_headers]
        status = HTTPStatus(refused.status)
        first = f"HTTP/1.1 {status.value} {status.phrase}".encode()
        body = b"" if line.startswith("HEAD ") else answer.body
        self.transport.write(head_bytes(first, headers) + body)
        self.transport.write_eof()
        self.deadline = self.loop.call_later(LINGER_S, self.transport.abort)

    def eof_received(self) -> None:
        """Refuse a body that ends early. The client has left if its request is complete."""
        if self.head is not None and not self.is_read:
            sent = len(self.received) - self.head.size
            self.refuse(RequestRefused(400, f"the body ends after {sent} of {self.length} bytes"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stalled = self.loop.call_later(ANSWER_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.stalled.cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.stop_timers()

    def stop_timers(self) -> None:
        self.deadline.cancel()
        self.stalled.cancel()

    def shutdown(self) -> None:
        """End the connection soon, even if the client does not read its answer."""
        super().shutdown()
        self.loop.call_later(GRACE_S, self.transport.abort)


# Running a server


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 for a free one. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, _, _, address = found[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket) -> str:
    """Return the address of a listening socket as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_local(listener: socket.socket) -> bool:
    """Say whether only this machine can reach a listening socket."""
    return is_loopback(listener.getsockname()[0])


class WebServer:
    """Answers requests in a thread of its own, from its creation until it is stopped."""

    def __init__(self, listener: socket.socket, routes: Sequence[BaseRoute], gate: Gate) -> None:
        """listener: from `listen`; the server closes it."""
        self.url = url_of(listener)

        async def unknown(request: Request, error: Exception) -> Response:
            path = shortened(request.scope["raw_path"].decode())
            return gate.refusal(RequestRefused(404, f"there is nothing at {path}"), request.headers)

        app = Starlette(routes=routes, exception_handlers={HTTPException: unknown})
        app.router.redirect_slashes = False
        config = uvicorn.Config(
            app,
            loop="asyncio",
            # uvicorn calls this as the class of each connection, with keywords.
            http=cast(Any, functools.partial(StrictProtocol, gate)),
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            proxy_headers=False,
            server_header=False,
            headers=[("Server", f"your_ai/{__version__}")],
            backlog=CONNECTIONS,
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(
            target=self.server.run, args=([listener],), name="web-server", daemon=True
        )
        self.thread.start()

    def ask_to_stop(self) -> None:
        """Stop listening, and end all connections within GRACE_S; return at once."""
        self.server.should_exit = True

    def stop(self) -> None:
        """Stop listening, end all connections within GRACE_S, and wait for the thread."""
        self.ask_to_stop()
        self.thread.join()
