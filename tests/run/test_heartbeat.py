"""A rank that is gone is noticed: its process ended, it is silent, or it said why it ends."""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from your_ai.errors import RunError
from your_ai.run import heartbeat
from your_ai.run.child import PEER_LOST, USER
from your_ai.run.heartbeat import (
    Heartbeat,
    Link,
    Loss,
    Meeting,
    accept,
    connect,
    end_process,
    listen,
)

NAMES = ("mac1", "mac2", "mac3")


def beating(rank: int, links: list[Link], timeout_s: float = 5.0):
    """A heartbeat that puts what it loses into a queue."""
    lost: queue.Queue = queue.Queue()
    beat = Heartbeat(rank, NAMES, timeout_s, links, lambda loss, rank: lost.put((loss, rank)))
    beat.start()
    return beat, lost


def linked(rank: int) -> tuple[Link, socket.socket]:
    ours, theirs = socket.socketpair()
    return Link(rank, ours, time.monotonic()), theirs


def test_a_process_that_ended_is_noticed_at_once_and_the_others_are_told():
    link, theirs = linked(1)
    other, listening = linked(2)
    _, lost = beating(0, [link, other])
    theirs.close()
    loss, _ = lost.get(timeout=3)
    assert (loss.text, loss.status) == ("rank 1 on mac2: its process ended", PEER_LOST)
    listening.settimeout(3)
    assert b'"rank 1 on mac2: its process ended"' in listening.recv(4096)


def test_a_silent_process_is_noticed():
    link, _theirs = linked(0)
    _, lost = beating(1, [link], timeout_s=0.4)
    loss, rank = lost.get(timeout=5)
    assert loss.text == "rank 0 on mac1: no heartbeat for 0.4 s"
    assert rank == 1


def test_a_rank_sends_beats():
    link, theirs = linked(0)
    beat, _ = beating(1, [link], timeout_s=1.0)
    theirs.settimeout(3)
    assert theirs.recv(2) == b".\n"
    beat.leave()


@pytest.mark.parametrize(
    ("looks", "is_lost"),
    [((1, 2, 3, 4, 5, 6), True), ((1, 60, 61, 62), False), ((1, 60, 61, 62, 63, 64, 65, 66), True)],
)
def test_a_process_that_was_stopped_does_not_take_the_others_for_silent(
    monkeypatch, looks, is_lost
):
    """looks: the seconds at which it looks at its connections; it hears nothing for 5 s or more."""
    link, _theirs = linked(0)
    link.heard_at, lost, clock = 0.0, [], iter([1e-9, *looks])
    beat = Heartbeat(1, NAMES, 5.0, [link], lambda loss, rank: lost.append(rank))

    def monotonic() -> float:
        now = next(clock, None)
        if now is None:
            beat._ended.set()
        return now or looks[-1]

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=monotonic))
    monkeypatch.setattr(heartbeat, "select", SimpleNamespace(select=lambda *_: ([], [], [])))
    beat._watch()
    assert lost == [1] * is_lost


def test_the_reason_of_an_error_arrives_with_its_host_and_status():
    first, second = socket.socketpair()
    _, lost = beating(0, [Link(1, first, time.monotonic())])
    failing, _ = beating(1, [Link(0, second, time.monotonic())])
    failing.fail("the model is another one", USER)
    loss, _ = lost.get(timeout=3)
    assert loss.text == "rank 1 on mac2: the model is another one"
    assert loss.status == USER


def test_a_goodbye_is_no_loss():
    link, theirs = linked(1)
    beat, lost = beating(0, [link], timeout_s=0.4)
    theirs.sendall(b".\nbye\n")
    theirs.close()
    beat._thread.join(3)
    assert not beat._thread.is_alive()
    assert lost.empty()


def test_ranks_meet_and_strangers_are_left_out():
    listener, meeting = listen("127.0.0.1")
    found: list[Link] = []
    thread = threading.Thread(target=lambda: found.extend(accept(listener, meeting, 2)))
    thread.start()
    with socket.create_connection((meeting.address, meeting.port)) as stranger:
        stranger.sendall(b"wrong 1")
        stranger.settimeout(3)
        assert stranger.recv(10) == b""
    mine = connect(meeting, 1)
    thread.join(5)
    assert [link.rank for link in found] == [1]
    for link in (*mine, *found):
        link.socket.close()


def test_rank_0_waits_for_the_others_as_long_as_agreed(monkeypatch):
    listener, meeting = listen("127.0.0.1")
    late = threading.Timer(0.1, lambda: connect(meeting, 1))
    late.start()
    assert [link.rank for link in accept(listener, meeting, 2)] == [1]
    monkeypatch.setattr(heartbeat, "JOIN_S", 0.1)
    listener, meeting = listen("127.0.0.1")
    connect(meeting, 2)
    with pytest.raises(RunError, match="rank 1 did not connect to rank 0"):
        accept(listener, meeting, 3)


@pytest.mark.parametrize(
    ("status", "rank", "line", "written"),
    [(PEER_LOST, 0, "lost: rank 1: x\n", PEER_LOST), (USER, 0, "error: rank 1: x\n", USER),
     (USER, 1, "", None)],
)  # fmt: skip
def test_a_process_ends_with_the_status_of_a_loss(
    monkeypatch, tmp_path, capfd, status, rank, line, written
):
    ended, report = [], tmp_path / "report"
    monkeypatch.setattr(heartbeat.os, "_exit", ended.append)
    end_process(Loss("rank 1: x", status), rank, report)
    assert ended == [status]
    assert capfd.readouterr().err == line
    assert report.exists() == (written is not None)
    assert written is None or json.loads(report.read_text()) == {"status": written}


def test_a_rank_that_cannot_reach_the_first_says_so():
    listener, meeting = listen("127.0.0.1")
    listener.close()
    with pytest.raises(RunError, match=r"rank 1 cannot reach rank 0 at 127\.0\.0\.1:"):
        connect(Meeting(meeting.address, meeting.port, ""), 1)
