"""Shows a run as a live page to browsers of this machine. Loads no MLX, and writes nothing.

The page is the report's. This process reads the run's events and renders the page; the training
process knows nothing of it. The server answers only GET and HEAD, of two paths: the page, and its
changes as server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
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

from your_ai.config import TrainConfig
from your_ai.dashboard.history import HistoryReader, RunHistory, ending
from your_ai.dashboard.report import Presence, RolloutSample, live_policy, parts_of, report_page
from your_ai.errors import UserError, first_line
from your_ai.gates.console import echo
from your_ai.gates.text import printable, shortened
from your_ai.run.child import DONE
from your_ai.run.events import EventsTail
from your_ai.run.folder import RunFolder, is_running
from your_ai.run.stopping import recorded_signals
from your_ai.serving import web
from your_ai.serving.web import Gate, RequestHead, RequestRefused, WebServer
from your_ai.session.attach import GRACE_S
from your_ai.session.run_list import rollout_samples

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
SILENT_S = 20  # a time without events that is worth a word
SAMPLES_S = 5.0  # between two readings of completions
READ_S = 0.4  # a long run is shown as far as it was read in this time, and then further
PART_BYTES = 1 << 19  # of an events file, between two looks at the clock


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


# The run behind the page


MOST_FIRST_BYTES = 4096  # of the first line of an events file, which has its time


@dataclass
class LiveRun:
    """A run's folder, and what was read of it. What is deleted later stays here."""

    folder: RunFolder
    reader: HistoryReader = field(default_factory=HistoryReader)
    rest: EventsTail = field(init=False)
    """The part of the events file that is still to be read."""
    identity: object = None
    """Of the events file, with its first line: another is that of a new run with the same name,
    whose file may have the inode of the old one."""
    unread: float = 0.0
    """Share of the events file that is still to be read."""
    read_s: float = READ_S
    """Seconds of the next reading: the longer, the less of the time goes to rendering."""
    fault: str = ""
    """Why the events cannot be read or shown."""
    config: TrainConfig | None = None
    """None if the settings cannot be read."""
    config_text: str = ""
    config_changed_at: int = 0
    running_at: float = 0.0
    """When the run was last seen running."""
    samples: tuple[RolloutSample, ...] = ()
    samples_at: float = 0.0

    def __post_init__(self) -> None:
        self.rest = EventsTail(self.folder.events)

    def read_events(self) -> None:
        try:
            status, first = os.stat(self.folder.events), b""
        except OSError:
            return
        with contextlib.suppress(OSError), self.folder.events.open("rb") as file:  # named below
            first = file.readline(MOST_FIRST_BYTES)
        identity = status.st_dev, status.st_ino, first
        if self.identity not in (None, identity) or status.st_size < self.rest.offset:
            self.reader, self.samples_at = HistoryReader(), 0.0
            self.rest = EventsTail(self.folder.events)
        self.identity, self.fault = identity, ""
        until = time.monotonic() + self.read_s
        try:
            while (at := self.rest.offset) < status.st_size and time.monotonic() < until:
                self.reader.add(self.rest.read(PART_BYTES))
                if self.rest.offset == at:  # a line that is not whole yet
                    self.unread = 0.0
                    break
            else:
                self.unread = 1 - self.rest.offset / max(1, status.st_size)
        except UserError as error:
            self.fault = str(error)
        self.read_s = 4 * self.read_s if self.unread else READ_S

    def read_settings(self) -> None:
        try:
            changed_at = os.stat(self.folder.config).st_mtime_ns
            if changed_at == self.config_changed_at:
                return
            self.config_changed_at, self.config = changed_at, None
            self.config_text = self.folder.config_text("replace")
            self.config = self.folder.read_config()
        except (OSError, UserError):
            return

    def presence(self, now: float) -> Presence:
        """Facts about the run beyond its events."""
        if not self.folder.path.exists():
            return Presence(is_running=False, is_deleted=True)
        state = self.reader.state
        if is_running(self.folder):
            self.running_at = now
        has_ended = state.finished is not None or state.gave_up
        is_here = self.running_at == now or (not has_ended and now - self.running_at < GRACE_S)
        silent_s = int(max(0.0, now - (state.last_at or now))) // SILENT_S * SILENT_S
        return Presence(
            is_running=is_here,
            silent_s=silent_s if is_here else 0,
            unread=self.unread,
            resume=f"your_ai train --resume {self.folder.reference}",
        )


def refresh(run: LiveRun, page: LivePage, seen: object) -> object:
    """Publish the page if anything has changed since `seen`; return what is now seen."""
    now = time.time()
    run.read_events()
    run.read_settings()
    if now - run.samples_at >= SAMPLES_S:
        run.samples_at = now
        run.samples = tuple(rollout_samples(run.folder.path)) or run.samples
    presence = run.presence(now)
    found = run.identity, run.rest.offset, run.config_changed_at, run.samples, run.fault, presence
    if found == seen:
        return seen
    try:
        text = page_of(run, presence, run.reader.past)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        presence = replace(
            presence,
            fault=f"its events cannot be shown ({shortened(printable(first_line(error)))})",
        )
        text = page_of(run, presence, HistoryReader().past)
    page.publish(text, title_of(run, presence), parts_of(text))
    return found


def page_of(run: LiveRun, presence: Presence, past: RunHistory) -> str:
    presence = replace(presence, fault=presence.fault or run.fault)
    name = run.folder.name
    return report_page(past, name, run.config_text, run.config, run.samples, presence)


def title_of(run: LiveRun, presence: Presence) -> str:
    """The title of the page: how far the run is, and its name."""
    step, name = run.reader.state.step, printable(run.folder.name, one_line=True)
    if presence.is_running and step is not None and step.steps > 0:
        return f"{100 * step.step // step.steps}% {name}"
    word = "deleted" if presence.is_deleted else ending(run.reader.past)[0]
    return name if word == "open" else f"{name}: {word}"


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
            follow(run, page, lambda: bool(received))
        finally:
            page.close()
            server.stop()
    return DONE if received[0] == signal.SIGINT else 128 + received[0]


def follow(run: LiveRun, page: LivePage, is_over: Callable[[], bool]) -> None:
    """Keep the page up to date while somebody reads it, until it is over."""
    seen = refresh(run, page, None)  # while nobody waits for it yet
    due_at = 0.0
    while not is_over():
        asked = page.wait(POLL_S)
        began_at = time.monotonic()
        if began_at >= due_at and (asked > page.answered or page.has_audience):
            seen = refresh(run, page, seen)
            rest = 0 if run.unread else REST
            due_at = time.monotonic() + rest * (time.monotonic() - began_at)
        page.confirm(asked)
