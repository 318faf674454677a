"""Serves one live page to browsers of this machine, and its changes as server-sent events.

The server only answers GET and HEAD, of two paths. The page is text that its owner publishes;
the server neither reads files nor writes any. It loads no MLX.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

from your_ai import __version__
from your_ai.errors import UserError
from your_ai.gates.text import shortened
from your_ai.serving import wire
from your_ai.serving.wire import LimitedServer, RequestRefused

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 8765, 20  # tried if the user asked for none; then any free one
FRESH_S = 3.0  # a reader of the page waits so long for its latest state
LOOK_S = 1.0  # between two looks whether a reader of events has left
SILENCE_S = 15.0  # after so long without a change, a comment shows that the server is there
SEEN_S = 10.0  # the page has an audience for so long after it was read
RETRY_MS = 1000  # a browser connects again after this time
GRACE_S = 2.0  # for answers in flight when the server stops
VERSION = 'data-version=""'  # in the page, at the first place: which version it is
SINCE = re.compile(r"[?&]since=([0-9a-f]+-[0-9]+)")
BUSY = b"HTTP/1.0 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"


class LivePage:
    """The current page and its parts. One thread publishes it; others read it and wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.token = secrets.token_hex(8)  # versions of another server mean nothing to this one
        self.text = ""
        self.title = ""
        self.parts: dict[str, tuple[int, str]] = {}
        self.version = 0
        self.asked = 0
        self.answered = 0
        self.readers = 0
        self.read_at = 0.0
        self.is_closed = False

    def publish(self, text: str, title: str, parts: Mapping[str, str]) -> None:
        """Set the page and its parts by their names. Readers get the parts that have changed."""
        with self.changed:
            self.text = text
            old = {name: part for name, (_, part) in self.parts.items()}
            if old == dict(parts) and title == self.title:
                return
            self.version += 1
            self.title = title
            self.parts = {
                name: self.parts[name] if old.get(name) == part else (self.version, part)
                for name, part in parts.items()
            }
            self.changed.notify_all()

    def confirm(self, asked: int) -> None:
        """Say that the page is as new as the request `asked` for it."""
        with self.changed:
            self.answered = max(asked, self.answered)
            self.changed.notify_all()

    def wait(self, seconds: float) -> int:
        """Wait until someone wants the page, or some seconds; return the number for `confirm`."""
        with self.changed:
            self.changed.wait_for(lambda: self.asked > self.answered, seconds)
            return self.asked

    @property
    def has_audience(self) -> bool:
        return self.readers > 0 or time.monotonic() - self.read_at < SEEN_S

    def fresh(self) -> str:
        """The page, as new as it can be within FRESH_S."""
        with self.changed:
            self.asked += 1
            asked, self.read_at = self.asked, time.monotonic()
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.answered >= asked or self.is_closed, FRESH_S)
            return self.text.replace(VERSION, f'data-version="{self.token}-{self.version}"', 1)

    def changes(self, since: str) -> tuple[str, str]:
        """The current version, and the parts that changed since another as JSON; "" if none did.

        since: a version of this page; for any other text, all parts.
        """
        with self.changed:
            seen = self.number_of(since)
            now = f"{self.token}-{self.version}"
            if seen == self.version:
                return now, ""
            found = {name: part for name, (at, part) in self.parts.items() if at > seen}
            return now, json.dumps({"title": self.title, "parts": found})

    def number_of(self, version: str) -> int:
        token, _, number = version.partition("-")
        is_own = token == self.token and wire.DIGITS.fullmatch(number)
        return int(number) if is_own and int(number) <= self.version else 0

    def wait_for_change(self, since: str, seconds: float) -> None:
        seen = self.number_of(since)
        with self.changed:
            self.changed.wait_for(lambda: self.version != seen or self.is_closed, seconds)

    def close(self) -> None:
        """Let all readers leave."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader of events while the block runs."""
        with self.changed:
            self.readers += 1
            self.asked += 1
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self.readers -= 1


class PageServer(LimitedServer):
    """Listens on this machine when it is created."""

    daemon_threads = False  # server_close waits for them; `stop` ends their connections

    def __init__(self, port: int, page: LivePage, policy: str) -> None:
        self.page = page
        self.policy = policy
        self.open: set[socket.socket] = set()
        self.lock = threading.Lock()
        super().__init__(HOST, port, PageHandler, BUSY)

    def finish_request(self, request: Any, client_address: Any) -> None:
        with self.lock:
            self.open.add(request)
        try:
            super().finish_request(request, client_address)
        finally:
            with self.lock:
                self.open.discard(request)

    def start(self) -> None:
        threading.Thread(target=self.serve_forever, args=(0.1,), name="page-server").start()

    def stop(self) -> None:
        """Stop listening, end all connections, and wait for their threads."""
        self.page.close()
        self.shutdown()
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and self.open:
            time.sleep(0.02)
        with self.lock:
            for connection in self.open:  # a client that does not read its answer
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.server_close()


def listen(port: int | None, page: LivePage, policy: str) -> PageServer:
    """Return a listening server. port: None for a free one.

    policy: the Content-Security-Policy of the page.
    Raises UserError if the port that was asked for is not available.
    """
    tried = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + PORTS), 0]
    for number in tried:
        try:
            return PageServer(number, page, policy)
        except OSError as error:
            fault = error
    raise UserError(
        f"--port {tried[-1]}: cannot be used ({fault.strerror}); choose another, or none"
    ) from fault


class PageHandler(BaseHTTPRequestHandler):
    """A connection with one request."""

    server: PageServer
    server_version = f"your_ai/{__version__}"
    sys_version = ""

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(wire.TimedReader(self.connection, wire.REQUEST_S))
        self.command, self.path, self.requestline = "", "", ""
        self.request_version, self.headers = "HTTP/1.0", Message()
        self.has_answered = False
        self.close_connection = True

    def handle(self) -> None:
        try:
            self.handle_one_request()
        except RequestRefused as refused:
            self.refuse(refused.status, refused.message)
        except TimeoutError:
            self.refuse(408, "the request, or the reader of its answer, was too slow")
        except OSError:
            logging.debug("a client left")

    def handle_one_request(self) -> None:
        """Answer. Raises RequestRefused if it is not allowed, TimeoutError for a slow client."""
        self.raw_requestline, head = wire.read_head(self.rfile)
        if not head:
            return
        self.rfile = io.BytesIO(head)
        if not self.parse_request():
            return
        self.connection.settimeout(wire.ANSWER_S)
        self.check_sender()
        if self.command not in ("GET", "HEAD"):
            raise RequestRefused(405, "this page is only for reading")
        path = self.path.split("?")[0]
        if path == "/":
            self.send_page()
        elif path == "/events":
            self.send_events()
        else:
            raise RequestRefused(404, f"there is nothing at {shortened(self.path)}")

    def check_sender(self) -> None:
        """Raise RequestRefused for another page, or a host name that may mean another machine.

        A web page could let its own domain resolve to 127.0.0.1 and read the answers.
        """
        host = self.headers.get("Host", "")
        if not wire.is_loopback(wire.host_of(host)):
            raise RequestRefused(403, f"{shortened(host)} is not a name of this machine")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise RequestRefused(403, f"pages from {shortened(origin)} may not use this server")
        site = self.headers.get("Sec-Fetch-Site", "none")
        if site not in ("none", "same-origin") and self.headers.get("Sec-Fetch-Mode") != "navigate":
            raise RequestRefused(403, "other pages may not use this server")

    def send_page(self) -> None:
        self.send_answer(200, "text/html; charset=utf-8", self.server.page.fresh().encode())

    def send_events(self) -> None:
        """Send the parts that change, until the reader leaves or the server stops.

        A reader gets the latest state whenever it is ready, so one that is slow skips states.
        """
        page = self.server.page
        since = self.headers.get("Last-Event-ID") or self.asked_since()
        self.send_head(200, "text/event-stream")
        if self.command == "HEAD":
            return
        self.wfile.write(f"retry: {RETRY_MS}\n\n".encode())
        said_at = time.monotonic()
        with page.reading():
            while not page.is_closed and not wire.has_left(self.connection):
                now, changes = page.changes(since)
                if changes:
                    # JSON has no line breaks outside of escapes, so this is one line.
                    self.wfile.write(f"id: {now}\ndata: {changes}\n\n".encode())
                elif time.monotonic() - said_at > SILENCE_S:
                    self.wfile.write(b":\n\n")
                else:
                    page.wait_for_change(since, LOOK_S)
                    continue
                since, said_at = now, time.monotonic()

    def asked_since(self) -> str:
        found = SINCE.search(self.path)
        return found[1] if found else ""

    def refuse(self, status: int, message: str) -> None:
        """Send an error as a line of text; nothing after the beginning of an answer."""
        if self.has_answered:
            return
        with contextlib.suppress(OSError):
            self.connection.settimeout(wire.ANSWER_S)
            self.send_answer(status, "text/plain; charset=utf-8", f"{message}\n".encode())

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse in the same format what Python's handler refuses by itself."""
        self.refuse(code, message or "the request cannot be read")

    def send_answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_head(status, kind, len(body))
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_head(self, status: int, kind: str, length: int | None = None) -> None:
        self.has_answered = True
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Security-Policy": self.server.policy,
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()

    def finish(self) -> None:
        with contextlib.suppress(OSError):
            super().finish()
        if self.command not in ("GET", "HEAD"):
            wire.linger(self.connection)

    def log_message(self, format: str, *args: Any) -> None:
        logging.debug(format, *args)
