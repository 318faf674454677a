"""Find out within seconds that another process of a run on several ranks is gone.

Rank 0 listens, and every other rank holds one connection to it. Both ends send a beat every
second. The kernel closes a connection when its process dies, however it dies; a process that is
stopped, or a network that is gone, shows in missing beats. All of this runs in a thread, because
the main thread may wait in a collective operation of MLX, which never ends without its peers.

A line ends with "\\n": `.` is a beat, `bye` says that the end of the connection is no fault, and
`{"text": ..., "status": ...}` ends all ranks with that reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from your_ai.errors import RunError
from your_ai.gates.console import echo_error
from your_ai.run.child import PEER_LOST

LOST = "lost: "  # begins the line, in the log of each process, that says which rank was lost
BEAT_S = 1.0
LINE_BYTES = 1 << 16
JOIN_S = 60.0  # for all ranks to connect


@dataclass(frozen=True)
class Loss:
    """The reason why the step ends on all ranks."""

    text: str
    """`rank 1 on mac2: its process ended`."""
    status: int = PEER_LOST
    """The exit status of the ranks that are told."""


def end_process(loss: Loss, rank: int, report: Path | None = None) -> None:
    """Say why, and end this process at once: the main thread may never return from MLX.

    report: where rank 0 writes its exit status, if that would be lost otherwise.
    Rank 0 alone tells of an error of another rank; all tell of a lost one, which rank 0 may be.
    """
    word = LOST if loss.status == PEER_LOST else "error: "
    with contextlib.suppress(Exception):
        if loss.status == PEER_LOST or rank == 0:
            echo_error(f"{word}{loss.text}")
        if report is not None and rank == 0:
            write_report(report, loss.status)
    os._exit(loss.status)


def write_report(report: Path, status: int) -> None:
    """Write the exit status of this process, for a supervisor that is not its parent."""
    with contextlib.suppress(OSError):
        report.write_text(json.dumps({"status": status}), encoding="utf-8")


@dataclass
class Link:
    """The connection to another rank."""

    rank: int
    socket: socket.socket
    heard_at: float
    unread: bytes = b""
    over: bool = False
    """Whether it said goodbye."""

    def lines(self) -> list[bytes] | None:
        """The whole lines that have arrived; None at the end of the connection."""
        try:
            data = self.socket.recv(LINE_BYTES)
        except OSError:
            return None
        if not data:
            return None
        *whole, self.unread = (self.unread + data).split(b"\n")
        return whole


@dataclass
class Heartbeat:
    """The connections of one rank, watched in a thread."""

    rank: int
    names: Sequence[str]
    """The host of each rank."""
    timeout_s: float
    links: list[Link]
    on_loss: Callable[[Loss, int], None] = end_process
    _ended: threading.Event = field(default_factory=threading.Event)
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.names[rank]}"

    def leave(self) -> None:
        """Say goodbye: this rank has done its part."""
        self._end(b"bye")

    def fail(self, text: str, status: int = PEER_LOST) -> None:
        """Tell the other ranks that this one ends, and why; they end as well."""
        text = text if text.startswith("rank ") else f"{self.name(self.rank)}: {text}"
        self._end(json.dumps({"text": text, "status": status}).encode())

    def _end(self, line: bytes) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self._tell(line)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for link in self.links:
            link.socket.close()

    def _tell(self, line: bytes, but: Link | None = None) -> None:
        with self._sending:
            for link in self.links:
                if link is not but and not link.over:
                    with contextlib.suppress(OSError):  # the reader finds out
                        link.socket.sendall(line + b"\n")

    def _watch(self) -> None:
        beat_s = min(BEAT_S, self.timeout_s / 4)
        looked_at = beaten_at = time.monotonic()
        while not self._ended.is_set():
            open_links = [link for link in self.links if not link.over]
            if not open_links:
                return
            ready = select.select([link.socket for link in open_links], [], [], beat_s / 4)[0]
            now = time.monotonic()
            if now - looked_at > self.timeout_s / 2:  # this process was stopped, not the others
                for link in open_links:
                    link.heard_at = now
            looked_at = now
            if now - beaten_at >= beat_s:
                self._tell(b".")
                beaten_at = now
            for link in open_links:
                loss = self._look(link, link.socket in ready, now)
                if loss is not None and not self._ended.is_set():
                    about = {"text": loss.text, "status": loss.status}
                    self._tell(json.dumps(about).encode(), but=link)
                    self._ended.set()
                    self.on_loss(loss, self.rank)
                    return

    def _look(self, link: Link, is_ready: bool, now: float) -> Loss | None:
        if is_ready:
            lines = link.lines()
            if lines is None:
                return Loss(f"{self.name(link.rank)}: its process ended")
            for line in lines:
                if line.startswith(b"{"):
                    about = json.loads(line)
                    return Loss(about["text"], about["status"])
                link.over |= line == b"bye"
            link.heard_at = now
        if not link.over and now - link.heard_at > self.timeout_s:
            return Loss(f"{self.name(link.rank)}: no heartbeat for {self.timeout_s:g} s")
        return None


@dataclass(frozen=True)
class Meeting:
    """The address at which the other ranks connect to rank 0."""

    address: str
    port: int
    token: str
    """What they say first, so that nobody else is taken for a rank."""


def listen(address: str) -> tuple[socket.socket, Meeting]:
    """Listen on a free port of rank 0's address. Raises RunError if it is not this machine's."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        listener.bind((address, 0))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RunError(
            f"{address}: cannot listen for the other ranks ({error.strerror})"
        ) from error
    return listener, Meeting(address, listener.getsockname()[1], secrets.token_hex(16))


def accept(listener: socket.socket, meeting: Meeting, size: int) -> list[Link]:
    """Rank 0's side: wait for all other ranks. Raises RunError if one does not come."""
    links: dict[int, Link] = {}
    deadline = time.monotonic() + JOIN_S
    with listener:
        while len(links) < size - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
                connection.settimeout(5.0)
                token, _, rank = connection.recv(256).decode("ascii", "replace").partition(" ")
            except OSError as error:
                missing = sorted(set(range(1, size)) - set(links))
                if time.monotonic() >= deadline:
                    raise RunError(f"rank {missing[0]} did not connect to rank 0") from error
                continue
            if not secrets.compare_digest(token.encode(), meeting.token.encode()):
                connection.close()
                continue
            links[int(rank)] = Link(int(rank), connection, time.monotonic())
    return [links[rank] for rank in sorted(links)]


def connect(meeting: Meeting, rank: int) -> list[Link]:
    """The side of the other ranks. Raises RunError if rank 0 cannot be reached."""
    try:
        connection = socket.create_connection((meeting.address, meeting.port), JOIN_S)
        connection.sendall(f"{meeting.token} {rank}".encode())
    except OSError as error:
        place = f"{meeting.address}:{meeting.port}"
        raise RunError(f"rank {rank} cannot reach rank 0 at {place} ({error.strerror})") from error
    connection.settimeout(5.0)
    return [Link(0, connection, time.monotonic())]
