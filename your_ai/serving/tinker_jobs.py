"""The work that a server of Tinker's API is asked for: in order, on one thread.

A request is answered at once with the id of its job, and its result is fetched later. The jobs of a
model are done in the order of their numbers, whatever the order in which they come. Samples that
wait are made together. A job that is asked for again, under the same id, is the same job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from your_ai.errors import RunError, UserError, explain, first_line, is_memory_error
from your_ai.gates.text import shortened

MOST_WAITING = 2048
MOST_WAITING_BYTES = 1 << 24  # of their requests
GATHER_S = 0.02  # in which more jobs may come that are done with the first
POLL_S = 0.2  # between two looks at whether it is over
MOST_KEPT_BYTES = 1 << 24  # of results that were not fetched, or may be asked for again
JOB_BYTES = 2000  # of a job that is done, beside its result
MOST_TOGETHER = 1 << 20  # tokens that the jobs of one call may make
Category = Literal["user", "server"]


@dataclass(frozen=True)
class Result:
    """The bytes that a job gave."""

    body: bytes
    is_proto: bool = False

    @staticmethod
    def of(value: object) -> Result:
        return Result(json.dumps(value).encode())

    @staticmethod
    def failed(message: str, category: Category) -> Result:
        return Result.of({"error": message, "category": category})


@dataclass(eq=False)
class QueuedJob:
    """A piece of work.

    Jobs with equal `together`, if it is not None, are given to one call of `work`.
    """

    id: str
    asked: Any
    work: Callable[[Sequence[Any]], Sequence[Result]]
    """The requests of jobs -> their results."""
    together: Any = None
    size_bytes: int = 0
    """Of what is asked."""
    tokens: int = 0
    """That it may make, at most."""
    done: threading.Event = field(default_factory=threading.Event)
    waiters: list[Callable[[], object]] = field(default_factory=list)
    """Called once it is done, in the thread of the worker."""
    result: Result | None = None


class Full(Exception):
    """Too many jobs wait."""


class Jobs:
    """The queue, and the thread that works it off."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.known: dict[str, QueuedJob] = {}
        self.finished: deque[QueuedJob] = deque()
        """Those of `known` that have results, the oldest first."""
        self.kept_bytes = 0
        """Of `finished`."""
        self.ready: list[QueuedJob] = []
        self.early: dict[str, dict[int, QueuedJob]] = {}
        """By model, those whose turn has not come."""
        self.next: dict[str, int] = {}
        """By model, the number of the job whose turn is next."""
        self.forgotten: set[str] = set()
        """Models whose jobs would never have their turn."""

    def add(self, job: QueuedJob, model: str | None = None, number: int = 0) -> QueuedJob:
        """Add a job, or return the one that has its id. Raises Full, ValueError.

        model, number: whose turn it waits for, from 1 on.
        """
        with self.lock:
            if job.id in self.known:
                return self.known[job.id]
            if model in self.forgotten:
                raise ValueError(f"model {shortened(str(model))}: was unloaded")
            if model is not None and number < self.next.get(model, 1):
                raise ValueError(f"seq_id {number}: was done, and its result is forgotten")
            # Where nothing is ready, those that wait may wait for this one.
            is_next = not self.ready and (model is None or number == self.next.get(model, 1))
            if not is_next and self.is_full(job):
                raise Full
            if model is None:
                self.ready.append(job)
            else:
                self.next.setdefault(model, 1)
                self.early.setdefault(model, {})[number] = job
                self.in_turn(model)
            self.known[job.id] = job
            self.lock.notify_all()
            return job

    def is_full(self, job: QueuedJob) -> bool:
        waiting = [*self.ready, *(each for early in self.early.values() for each in early.values())]
        size_bytes = job.size_bytes + sum(each.size_bytes for each in waiting)
        return len(waiting) >= MOST_WAITING or size_bytes > MOST_WAITING_BYTES

    def forget(self, model: str) -> None:
        """Fail the jobs of a model whose turn will not come."""
        with self.lock:
            self.forgotten.add(model)
            self.next.pop(model, None)
            for job in self.early.pop(model, {}).values():
                self.finish(job, Result.failed("its model was unloaded", "user"))

    def in_turn(self, model: str) -> None:
        """Make the jobs of a model ready whose turn has come."""
        early = self.early.get(model, {})
        while (job := early.pop(self.next[model], None)) is not None:
            self.ready.append(job)
            self.next[model] += 1

    def cancel(self, id: str) -> None:
        """Forget a job that has not begun."""
        with self.lock:
            job = self.known.get(id)
            if job is not None and job in self.ready and job.together is not None:
                self.ready.remove(job)
                self.finish(job, Result.failed("was cancelled", "user"))

    def find(self, id: str) -> QueuedJob | None:
        with self.lock:
            return self.known.get(id)

    @contextlib.contextmanager
    def telling(self, job: QueuedJob, tell: Callable[[], object]) -> Iterator[None]:
        """Meanwhile, call a function once a job is done; at once, if it is."""
        with self.lock:
            if job.done.is_set():
                tell()
            job.waiters.append(tell)
        try:
            yield
        finally:  # clients that left must not be kept
            with self.lock, contextlib.suppress(ValueError):
                job.waiters.remove(tell)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Work until `is_over`, in this thread."""
        while (jobs := self.take(is_over)) is not None:
            self.work(jobs)

    def take(self, is_over: Callable[[], bool]) -> list[QueuedJob] | None:
        """The next job, and those that are done with it; None when it is over."""
        with self.lock:
            while not self.ready and not is_over():
                self.lock.wait(POLL_S)
            if is_over():
                return None
            first, seen = self.ready[0], 0
            while first.together is not None and len(self.ready) > seen and not is_over():
                seen = len(self.ready)  # clients send one request after the other
                self.lock.wait(GATHER_S)
            same, others, tokens = [], [], 0
            for job in self.ready:
                fits = first.together is not None and tokens + job.tokens <= MOST_TOGETHER
                if job is first or (fits and job.together == first.together):
                    same.append(job)
                    tokens += job.tokens
                else:
                    others.append(job)
            self.ready = others
            return same

    def work(self, jobs: list[QueuedJob]) -> None:
        try:
            results = jobs[0].work([job.asked for job in jobs])
        except (UserError, ValueError) as error:
            results = [Result.failed(shortened(first_line(error), 500), "user")] * len(jobs)
        except RunError as error:
            results = [Result.failed(shortened(first_line(error), 500), "server")] * len(jobs)
        except Exception as error:  # MLX and models may raise anything; other jobs go on
            reason = shortened(first_line(error), 400)
            reason = explain(reason) if is_memory_error(error) else f"failed ({reason})"
            logging.exception("%s: %s", shortened(jobs[0].id), reason)
            results = [Result.failed(reason, "server")] * len(jobs)
        with self.lock:
            for job, result in zip(jobs, results, strict=True):
                self.finish(job, result)

    def finish(self, job: QueuedJob, result: Result) -> None:
        job.result, job.asked, job.work = result, None, nothing  # which hold what was asked
        job.done.set()
        for tell in job.waiters:
            tell()
        job.waiters.clear()
        self.finished.append(job)
        self.kept_bytes += JOB_BYTES + len(result.body)
        while self.kept_bytes > MOST_KEPT_BYTES and len(self.finished) > 1:
            old = self.finished.popleft()
            assert old.result is not None
            self.kept_bytes -= JOB_BYTES + len(old.result.body)
            del self.known[old.id]


def nothing(_: Sequence[Any]) -> Sequence[Result]:
    """The work of a job that is done."""
    return []
