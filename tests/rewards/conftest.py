"""A fake server of a judge, and a clock that does not wait."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.rewards.server import JudgeServer
from your_ai.rewards.judge import Clock, Judge, JudgeSettings


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No key, address or proxy of the machine's own."""
    for name in [n for n in os.environ if n.startswith("OPENAI_") or "PROXY" in n.upper()]:
        monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    pytest.importorskip("openai")
    server = JudgeServer()
    yield server
    server.stop()


class FakeTime:
    """A clock that only `sleep` moves. 2026-01-01 is its wall clock's start."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.slept: list[float] = []
        self.before_waking: Callable[[], None] = lambda: None
        self.lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        with self.lock:
            self.slept.append(seconds)
            self.seconds += seconds
            self.before_waking()

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.seconds, lambda: 1767225600 + self.seconds, self.sleep)


@pytest.fixture
def fake_time() -> FakeTime:
    return FakeTime()


@pytest.fixture
def make_judge(server, own_folder, fake_time) -> Iterator[Callable[..., Judge]]:
    """A function that makes a judge on the server, whose clock does not wait."""
    made = []

    def make(calls_before: int = 0, clock: Clock | None = None, **settings: Any) -> Judge:
        given = {"model": "fake", "url": server.url, "timeout_s": 5.0, **settings}
        clock = clock or fake_time.clock
        judge = Judge(JudgeSettings(**given), own_folder / "cache", calls_before, clock)
        made.append(judge)
        return judge

    yield make
    server.go_on.set()
    for judge in made:
        judge.close()
