"""The work that a server of Tinker's API is asked for: in order, on one thread.

A request is answered at once with the id of its job, and its result is fetched later. The jobs of a
model are done in the order of their numbers, whatever the order in which they come. Samples that
wait are made together. A job that is asked for again, under the same id, is the same job.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from your_ai.errors import RunError, UserError, first_line
from your_ai.gates.text import shortened

MOST_WAITING = 2048
MOST_WAITING_BYTES = 1 << 25
POLL_S = 0.2  # between two looks at whether it is over
MOST_KEPT_BYTES = 1 << 25  # of results that were not fetched, or may be asked for again
Category = Literal["user", "server"]


@dataclass(frozen=True)
class Result:
    """The result of a job, as it is sent."""

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
    size: int = 0
    """Bytes of the request."""
    done: threading.Event = field(default_factory=threading.Event)
    result: Result | None = None


class Full(Exception):
    """Too many jobs wait."""


class Jobs:
    """The queue, and the thread that works it off."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.known: OrderedDict[str, QueuedJob] = OrderedDict()
        self.ready: list[QueuedJob] = []
        self.early: dict[str, dict[int, QueuedJob]] = {}
        """By model, those whose turn has not come."""
        self.next: dict[str, int] = {}
        """By model, the number of the job whose turn is next."""

    def add(self, job: QueuedJob, model: str | None = None, number: int = 0) -> QueuedJob:
        """Add a job, or return the one that has its id. Raises Full, ValueError.

        model, number: whose turn it waits for, from 1 on.
        """
        with self.lock:
            if job.id in self.known:
                return self.known[job.id]
            waiting = [*self.ready, *(j for own in self.early.values() for j in own.values())]
            held = sum(each.size for each in waiting)
            if len(waiting) >= MOST_WAITING or (held and held + job.size > MOST_WAITING_BYTES):
                raise Full
            if model is None:
                self.ready.append(job)
            else:
                if number < self.next.setdefault(model, 1):
                    raise ValueError(f"seq_id {number}: was done, and its result is forgotten")
                self.early.setdefault(model, {})[number] = job
                self.in_turn(model)
            self.known[job.id] = job
            self.lock.notify_all()
            return job

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
            first = self.ready[0]
            together = first.together
            same = [j for j in self.ready if j is first or (together and j.together == together)]
            self.ready = [job for job in self.ready if job not in same]
            return same

    def work(self, jobs: list[QueuedJob]) -> None:
        try:
            results = jobs[0].work([job.asked for job in jobs])
        except (UserError, ValueError) as error:
            results = [Result.failed(shortened(first_line(error), 500), "user")] * len(jobs)
        except RunError as error:
            results = [Result.failed(shortened(first_line(error), 500), "server")] * len(jobs)
        with self.lock:
            for job, result in zip(jobs, results, strict=True):
                self.finish(job, result)

    def finish(self, job: QueuedJob, result: Result) -> None:
        job.result, job.asked, job.work = result, None, done  # frees what they hold
        job.done.set()
        kept = sum(len(each.result.body) for each in self.known.values() if each.result)
        for id, each in list(self.known.items()):
            if kept <= MOST_KEPT_BYTES:
                break
            if each.result is not None and each is not job:
                kept -= len(each.result.body)
                del self.known[id]


def done(_: Sequence[Any]) -> Sequence[Result]:
    """The work of a job that was done."""
    return []
