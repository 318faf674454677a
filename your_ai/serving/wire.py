"""Reads HTTP requests strictly: bounded in size and time, and with only one interpretation.

A request has one head, of which every line is checked before it is parsed, and one body, whose
length is given in digits. Each connection has one request.
"""

from __future__ import annotations

import contextlib
import io
import ipaddress
import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from http.server import ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

REQUEST_S = 8.0  # for a whole request, head and body
ANSWER_S = 8.0  # for a client to receive a piece of its answer
LINGER_S = 1.0  # for the rest of a request that was refused early
LINE_BYTES = 1 << 13
HEAD_BYTES = 1 << 16
HEADERS = 100
BODY_BYTES = 1 << 24  # of a request, which is only text
BODIES_BYTES = 1 << 26  # of all requests that are answered at the same time
CONNECTIONS = 64  # open at the same time

REQUEST_LINE = re.compile(rb"[A-Z]{1,16} /[\x21-\x7e]* HTTP/1\.[01]")
HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t\x20-\x7e\x80-\xff]*")
ONCE = (b"host", b"origin", b"content-length", b"transfer-encoding", b"content-type", b"expect")
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
    """Whether a name or address can only mean this machine."""
    address = address_of(host)
    return host in LOCAL_NAMES if address is None else address.is_loopback


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_own(host: str) -> bool:
    """Whether a request to `host` meant this machine, by a name that others cannot assign.

    Otherwise a web page could let its own domain resolve to 127.0.0.1 and read the answers.
    """
    named = is_loopback(host) or host.endswith(LOCAL_ENDINGS)
    return named or address_of(host) is not None or host == socket.gethostname().lower()


class TimedReader(io.RawIOBase):
    """Reads from a client until a deadline for the whole request; then raises TimeoutError."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self.connection = connection
        self.deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self.connection.settimeout(left_s)
        return self.connection.recv_into(buffer)


def read_head(file: io.BufferedIOBase) -> tuple[bytes, bytes]:
    """Return the request line and the header lines, checked; empty if the client left early.

    Raises RequestRefused for a head that ordinary clients do not send.
    """
    lines: list[bytes] = []
    size = 0
    while True:
        line = file.readline(LINE_BYTES + 1)
        size += len(line)
        if len(line) > LINE_BYTES or size > HEAD_BYTES or len(lines) > HEADERS + 1:
            long_path = not lines
            raise RequestRefused(414 if long_path else 431, "the request's headers are too long")
        if not line.endswith(b"\n"):
            return b"", b""
        if line in (b"\r\n", b"\n"):
            break
        lines.append(line)
    if not lines:
        raise RequestRefused(400, "the request has no request line")
    check_head([line.removesuffix(b"\n").removesuffix(b"\r") for line in lines])
    return lines[0], b"".join(lines[1:]) + b"\r\n"


def check_head(lines: list[bytes]) -> None:
    """Raise RequestRefused for a request line or header that is not strictly valid."""
    version = lines[0].rpartition(b" ")[2]
    if re.fullmatch(rb"HTTP/[2-9]\.[0-9]", version):
        raise RequestRefused(505, "the server only supports HTTP/1.1")
    if not REQUEST_LINE.fullmatch(lines[0]):
        raise RequestRefused(400, "the request line is not METHOD /path HTTP/1.1")
    seen = set()
    for line in lines[1:]:
        found = HEADER.fullmatch(line)
        if found is None:
            raise RequestRefused(400, "a header is not `name: value`")
        name = found[1].lower()
        if name in seen and name in ONCE:
            raise RequestRefused(400, f"{name.decode()} is given twice")
        seen.add(name)
    if b"host" not in seen and version == b"HTTP/1.1":
        raise RequestRefused(400, "the Host header is missing")


def body_length(headers: Message) -> int:
    """Return the length of the body in bytes. Raises RequestRefused if unknown or too large."""
    length, encoding = headers.get("Content-Length"), headers.get("Transfer-Encoding")
    if encoding is not None and length is not None:
        raise RequestRefused(400, "give Content-Length or Transfer-Encoding, not both")
    if length is None:
        raise RequestRefused(411, "the Content-Length header is required")
    length = length.strip(" \t")
    if not DIGITS.fullmatch(length):
        raise RequestRefused(400, "Content-Length must be a number in digits")
    if int(length) > BODY_BYTES:
        raise RequestRefused(413, f"a request may have at most {BODY_BYTES} bytes")
    return int(length)


def read_body(file: io.BufferedIOBase, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise RequestRefused(400, f"the body ends after {len(data)} of {length} bytes")
    return data


class Allowance:
    """Bytes that all threads together may use at the same time."""

    def __init__(self, total: int) -> None:
        self.left = total
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def taken(self, count: int) -> Iterator[None]:
        """Reserve `count` bytes for the block. Raises RequestRefused if too few are left."""
        with self.lock:
            if count > self.left:
                raise RequestRefused(503, "the server is busy with large requests; try again")
            self.left -= count
        try:
            yield
        finally:
            with self.lock:
                self.left += count


def has_left(connection: socket.socket) -> bool:
    """Whether the client has closed its connection."""
    before = connection.gettimeout()
    try:
        connection.settimeout(0)
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        with contextlib.suppress(OSError):
            connection.settimeout(before)


def linger(connection: socket.socket) -> None:
    """Continue to read briefly after an answer that was sent before the end of the request.

    Otherwise the system would discard the answer together with the unread data.
    """
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        file = TimedReader(connection, LINGER_S)
        buffer, read = bytearray(1 << 16), 0
        while read < BODY_BYTES and (count := file.readinto(buffer)):
            read += count


# A server with a thread per connection, and a limit of connections


class LimitedServer(ThreadingHTTPServer):
    """Listens when it is created. More than CONNECTIONS clients at once get `busy`."""

    request_queue_size = CONNECTIONS

    def __init__(self, host: str, port: int, handler: Any, busy: bytes) -> None:
        """busy: the whole answer to a client too many."""
        self.busy = busy
        self.bodies = Allowance(BODIES_BYTES)
        self.connections = threading.BoundedSemaphore(CONNECTIONS)
        self.is_local = is_loopback(host)
        address: Any
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind as HTTPServer does, without looking up the host's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self.connections.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:
                self.connections.release()
                raise
            return
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(self.busy)
            request.recv(1 << 16)  # unread data would make the system discard the answer
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logging.debug("a request failed, or its client left", exc_info=True)

    @property
    def url(self) -> str:
        host = self.server_name
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}"
