"""Shows a run as a live page to browsers of this machine. Loads no MLX, and writes nothing.

The page is the report's. This process reads the run's events and renders the page; the training
process knows nothing of it. The server answers only GET and HEAD, of two paths: the page, and its
changes as server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from your_ai.dashboard.report import live_policy, parts_of
from your_ai.errors import UserError
from your_ai.gates.console import echo
from your_ai.run.child import DONE
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import recorded_signals
from your_ai.serving import web
from your_ai.serving.live_run import DrawnRun, LiveRun
from your_ai.serving.web import Gate, RequestHead, RequestRefused, WebServer

HOST = "127.0.0.1"
FIRST_PORT, PORTS = 8765, 20  # tried if the user asked for none; then any free one
FRESH_S = 3.0  # a reader of the page waits so long for its latest state
LOOK_S = 0.05  # between two looks of one thread at what the other has done
SILENCE_S = 15.0  # after so long without a change, a comment shows that the server is there
SEEN_S = 10.0  # the page has an audience for so long after it was read
RETRY_MS = 1000  # a browser connects again after this time
VERSION = 'data-version=""'  # in the page, at the first place: which version it is

POLL_S = 0.3
REST = 9  # rendering takes at most one part in ten of the time of a processor


# The page, and the server of it


@dataclass(frozen=True)
class Published:
    """A version of the page."""

    number: int = 0
    text: str = ""
    title: str = ""
    parts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """The parts by their names, each with the number of the version that changed it."""


class LivePage:
    """The current page. One thread publishes it; the server's thread reads it.

    Neither waits for the other with a lock: what both see is replaced as a whole, and each number
    is written by one of them.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(8)  # versions of another server mean nothing to this one
        self.now = Published()
        self.asked = 0
        self.answered = 0
        self.readers = 0
        self.read_at = 0.0
        self.is_closed = False

    def publish(self, text: str, title: str, parts: Mapping[str, str]) -> None:
        """Set the page and its parts by their names. Readers get the parts that have changed."""
        before = self.now
        old = {name: part for name, (_, part) in before.parts.items()}
        if old == dict(parts) and title == before.title:
            self.now = replace(before, text=text)
            return
        number = before.number + 1
        changed = {
            name: before.parts[name] if old.get(name) == part else (number, part)
            for name, part in parts.items()
        }
        self.now = Published(number, text, title, changed)

    def confirm(self, asked: int) -> None:
        """Say that the page is as new as the request `asked` for it."""
        self.answered = asked

    def wait(self, seconds: float) -> int:
        """Wait until someone wants the page, or some seconds; return the number for `confirm`."""
        until = time.monotonic() + seconds
        while self.asked == self.answered and time.monotonic() < until:
            time.sleep(LOOK_S)
        return self.asked

    @property
    def has_audience(self) -> bool:
        return self.readers > 0 or time.monotonic() - self.read_at < SEEN_S

    async def fresh(self) -> str:
        """The page, as new as it can be within FRESH_S."""
        self.asked += 1
        asked, self.read_at = self.asked, time.monotonic()
        until = self.read_at + FRESH_S
        while self.answered < asked and not self.is_closed and time.monotonic() < until:
            await asyncio.sleep(LOOK_S)
        now = self.now
        return now.text.replace(VERSION, f'data-version="{self.token}-{now.number}"', 1)

    def changes(self, since: str) -> tuple[str, str]:
        """The current version, and the parts that changed since another as JSON; "" if none did.

        since: a version of this page; for any other text, all parts.
        """
        now, seen = self.now, self.number_of(since)
        version = f"{self.token}-{now.number}"
        if seen == now.number:
            return version, ""
        found = {name: part for name, (at, part) in now.parts.items() if at > seen}
        return version, json.dumps({"title": now.title, "parts": found})

    def number_of(self, version: str) -> int:
        token, _, number = version.partition("-")
        is_own = token == self.token and web.DIGITS.fullmatch(number)
        return int(number) if is_own and int(number) <= self.now.number else 0

    def close(self) -> None:
        """Let all readers leave."""
        self.is_closed = True

    async def events(self, since: str) -> AsyncIterator[str]:
        """Yield the parts that change, as server-sent events, until the page is closed.

        A reader gets the latest state whenever it is ready, so one that is slow skips states.
        """
        self.readers += 1
        self.asked += 1
        said_at = time.monotonic()
        try:
            yield f"retry: {RETRY_MS}\n\n"
            while not self.is_closed:
                now, changes = self.changes(since)
                if changes:
                    # JSON has no line breaks outside of escapes, so this is one line.
                    yield f"id: {now}\ndata: {changes}\n\n"
                elif time.monotonic() - said_at > SILENCE_S:
                    yield ":\n\n"
                else:
                    await asyncio.sleep(LOOK_S)
                    continue
                since, said_at = now, time.monotonic()
        finally:
            self.readers -= 1


def check_reader(head: RequestHead) -> None:
    """Raise RequestRefused for another page, or a host name that may mean another machine.

    A web page could let its own domain resolve to 127.0.0.1 and read the answers.
    """
    headers = head.headers
    host = headers.get("host", "")
    web.check_host(host, web.is_loopback)
    web.check_origin(headers, (f"http://{host}",))
    site = headers.get("sec-fetch-site", "none")
    if site not in ("none", "same-origin") and headers.get("sec-fetch-mode") != "navigate":
        raise RequestRefused(403, "other pages may not use this server")


def serve_on(listener: socket.socket, page: LivePage, policy: str) -> WebServer:
    """Serve a page until the server is stopped. policy: its Content-Security-Policy."""

    def refusal(refused: RequestRefused, asked: Headers) -> Response:
        return PlainTextResponse(f"{refused.message}\n", refused.status, headers_of(policy))

    async def whole(request: Request) -> Response:
        return await page_answer(page, policy)

    async def changes(request: Request) -> Response:
        return changes_answer(page, request, policy)

    routes = [Route("/", whole), Route("/events", changes)]
    return WebServer(listener, routes, Gate(("GET", "HEAD"), check_reader, refusal))


async def page_answer(page: LivePage, policy: str) -> Response:
    """The page, as new as it can be."""
    return Response(await page.fresh(), 200, headers_of(policy), "text/html")


def changes_answer(page: LivePage, request: Request, policy: str) -> Response:
    """The changes of the page since the version that a request names, as server-sent events."""
    since = request.headers.get("last-event-id") or request.query_params.get("since", "")
    kind = {"Content-Type": "text/event-stream", **headers_of(policy)}
    if request.method == "HEAD":
        return Response(None, 200, kind)
    return StreamingResponse(page.events(since), 200, kind)


def headers_of(policy: str) -> dict[str, str]:
    """The headers of all answers. policy: the Content-Security-Policy."""
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def listen(port: int | None, first: int = FIRST_PORT) -> socket.socket:
    """Return a listening socket of this machine. port: None for a free one, `first` if it is.

    Raises UserError if the port that was asked for is not available.
    """
    tried = [port] if port is not None else [*range(first, first + PORTS), 0]
    for number in tried:
        try:
            return web.listen(HOST, number)
        except OSError as error:
            fault = error
    raise UserError(
        f"--port {tried[-1]}: cannot be used ({fault.strerror}); choose another, or none"
    ) from fault


# The page of a run


def serve_page(folder: RunFolder, port: int | None) -> int:
    """Serve the page of a run until a signal; return the exit status.

    port: None for a free one. Raises UserError if the port cannot be used.
    """
    page, run = LivePage(), LiveRun(folder)
    with recorded_signals() as received:
        server = serve_on(listen(port), page, live_policy())
        try:
            echo(f"{folder.name}: {server.url}")
            echo("Ctrl-C ends the page; the run goes on without it")
            sys.stdout.flush()
            follow(run.draw, page, lambda: bool(received))
        finally:
            page.close()
            server.stop()
    return DONE if received[0] == signal.SIGINT else 128 + received[0]


def follow(
    draw: Callable[[], DrawnRun | None], page: LivePage, is_over: Callable[[], bool]
) -> None:
    """Keep the page up to date while somebody reads it, until it is over.

    draw: returns the page if it has changed.
    """
    due_at, is_whole = 0.0, True
    while not is_over():
        is_first = page.now.number == 0  # drawn while nobody waits for it yet
        asked = page.asked if is_first else page.wait(POLL_S)
        began_at = time.monotonic()
        if is_first or (began_at >= due_at and (asked > page.answered or page.has_audience)):
            if (drawn := draw()) is not None:
                page.publish(drawn.text, drawn.title, parts_of(drawn.text))
                is_whole = drawn.is_whole
            rest = REST if is_whole else 0
            due_at = time.monotonic() + rest * (time.monotonic() - began_at)
        page.confirm(page.asked if is_first else asked)
