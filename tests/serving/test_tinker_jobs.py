"""The order of the work of Tinker's API, and what is kept of it."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from your_ai.errors import RunError, UserError
from your_ai.serving import tinker_jobs
from your_ai.serving.tinker_jobs import Full, Jobs, QueuedJob, Result

M = "s:train:0"


class Work:
    """Notes what it is given."""

    def __init__(self) -> None:
        self.calls: list[list[Any]] = []

    def __call__(self, asked: Sequence[Any]) -> Sequence[Result]:
        self.calls.append(list(asked))
        return [Result.of(each) for each in asked]


def job(id: str, work: Any, asked: Any = None, **more: Any) -> QueuedJob:
    return QueuedJob(id, id if asked is None else asked, work, **more)


def numbered(jobs: Jobs, work: Any, number: int, **more: Any) -> QueuedJob:
    return jobs.add(job(f"{M}:{number}", work, **more), M, number)


def run(jobs: Jobs) -> None:
    """Work until nothing is ready."""
    jobs.run(lambda: not jobs.ready)


def said(of: QueuedJob) -> Any:
    assert of.result is not None
    return json.loads(of.result.body)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def work() -> Work:
    return Work()


@pytest.mark.parametrize("seed", range(5))
def test_jobs_of_a_model_are_done_in_the_order_of_their_numbers(jobs, work, seed):
    numbers = list(range(1, 30))
    random.Random(seed).shuffle(numbers)
    for place, number in enumerate(numbers):
        numbered(jobs, work, number)
        if place % 7 == 0:
            run(jobs)
    run(jobs)
    assert work.calls == [[f"{M}:{number}"] for number in range(1, 30)]


def test_models_do_not_wait_for_each_other(jobs, work):
    numbered(jobs, work, 2)
    jobs.add(job("other", work), "s:train:1", 1)
    run(jobs)
    assert work.calls == [["other"]]


def test_a_job_that_comes_again_is_the_same_job(jobs, work):
    first = numbered(jobs, work, 1)
    assert numbered(jobs, work, 1) is first
    run(jobs)
    assert numbered(jobs, work, 1) is first
    run(jobs)
    assert len(work.calls) == 1


def test_samples_that_wait_are_made_in_one_call(jobs, work):
    for number in range(3):
        jobs.add(job(f"a{number}", work, together="a"))
        jobs.add(job(f"b{number}", work, together="b"))
    alone = jobs.add(job("alone", work))
    run(jobs)
    assert work.calls == [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["alone"]]
    assert said(alone) == "alone"


def test_a_call_makes_no_more_tokens_than_fit(jobs, work, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_TOGETHER", 10)
    for number, tokens in enumerate([30, 4, 5, 2]):
        jobs.add(job(f"{number}", work, together="a", tokens=tokens))
    run(jobs)
    assert work.calls == [["0"], ["1", "2"], ["3"]]


def test_a_sample_that_waits_can_be_cancelled(jobs, work):
    first, second = (jobs.add(job(id, work, together="a")) for id in "ab")
    jobs.cancel("a")
    jobs.cancel("unknown")
    run(jobs)
    jobs.cancel("b")
    assert said(first) == {"error": "was cancelled", "category": "user"}
    assert said(second) == "b"
    assert work.calls == [["b"]]


def test_the_step_of_a_model_cannot_be_cancelled(jobs, work):
    """Those after it count on it."""
    step = numbered(jobs, work, 1)
    jobs.cancel(step.id)
    run(jobs)
    assert said(step) == step.id


def test_more_than_the_bound_is_refused(jobs, work, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_WAITING", 3)
    for number in range(3):
        jobs.add(job(f"{number}", work))
    with pytest.raises(Full):
        jobs.add(job("3", work))
    assert jobs.find("3") is None
    run(jobs)
    jobs.add(job("3", work))
    run(jobs)
    assert len(work.calls) == 4


def test_more_bytes_than_the_bound_are_refused(jobs, work, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_WAITING_BYTES", 100)
    jobs.add(job("large", work, size_bytes=1000))
    with pytest.raises(Full):
        jobs.add(job("small", work, size_bytes=1))


def test_jobs_that_wait_for_one_do_not_keep_it_out(jobs, work, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_WAITING", 3)
    for number in (2, 3, 4):
        numbered(jobs, work, number)
    with pytest.raises(Full):
        numbered(jobs, work, 5)
    with pytest.raises(Full):
        jobs.add(job("other", work), "s:train:1", 7)
    numbered(jobs, work, 1)
    run(jobs)
    assert [call[0][-1] for call in work.calls] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("number", [1, 0, -1, -(10**30)])
def test_number_that_was_done_and_forgotten_is_refused(jobs, work, number, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_KEPT_BYTES", 1)
    numbered(jobs, work, 1)
    run(jobs)
    numbered(jobs, work, 2)
    run(jobs)
    with pytest.raises(ValueError, match="seq_id"):
        numbered(jobs, work, number)


def test_results_beyond_the_bound_are_forgotten_the_oldest_first(jobs, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_KEPT_BYTES", 3 * (tinker_jobs.JOB_BYTES + 100))
    for number in range(10):
        jobs.add(job(f"{number}", lambda asked: [Result(bytes(100))]))
        run(jobs)
    assert [number for number in range(10) if jobs.find(f"{number}")] == [7, 8, 9]
    assert len(jobs.finished) == 3


def test_small_results_are_forgotten_too(jobs, work, monkeypatch):
    monkeypatch.setattr(tinker_jobs, "MOST_KEPT_BYTES", 10 * tinker_jobs.JOB_BYTES)
    for number in range(100):
        jobs.add(job(f"{number}", work))
        run(jobs)
    assert len(jobs.known) < 10


def test_job_that_is_done_does_not_hold_what_was_asked(jobs):
    held = bytearray(10)
    done = jobs.add(QueuedJob("a", held, lambda asked: [Result(bytes(held[:0]))]))
    run(jobs)
    assert done.asked is None
    assert done.work is tinker_jobs.nothing


@pytest.mark.parametrize(
    ("error", "category", "text"),
    [
        (UserError("wrong"), "user", "wrong"),
        (ValueError("x: wrong\nmore"), "user", "x: wrong"),
        (RunError("failed"), "server", "failed"),
        (MemoryError(), "server", "out of memory (MemoryError)"),
        (RuntimeError("[metal::malloc] Unable to allocate 9 bytes"), "server", "out of memory"),
        (RuntimeError("what\never"), "server", "failed (what)"),
        (KeyError("x"), "server", "failed ('x')"),
        (AssertionError(), "server", "failed (AssertionError)"),
    ],
)
def test_a_job_that_fails_says_why_and_the_next_is_done(jobs, work, error, category, text, caplog):
    def fails(_: Any) -> Sequence[Result]:
        raise error

    failed = [jobs.add(job(id, fails, together="a")) for id in "ab"]
    good = jobs.add(job("good", work))
    with caplog.at_level(logging.ERROR):
        run(jobs)
    for each in failed:
        assert said(each)["category"] == category
        assert said(each)["error"].startswith(text)
        assert "\n" not in said(each)["error"]
    assert said(good) == "good"
    unexpected = not isinstance(error, UserError | ValueError | RunError)
    assert len(caplog.records) == unexpected


def test_jobs_of_an_unloaded_model_that_wait_fail(jobs, work):
    waits = numbered(jobs, work, 5)
    jobs.forget(M)
    assert said(waits)["category"] == "user"
    assert jobs.early == jobs.next == {}
    run(jobs)
    assert not work.calls


def test_job_that_comes_after_its_model_was_unloaded_is_refused(jobs, work):
    """It would wait for ever."""
    jobs.forget(M)
    with pytest.raises(ValueError, match="unloaded"):
        numbered(jobs, work, 5)
    assert jobs.early == jobs.next == {}


@pytest.fixture
def running(jobs) -> Iterator[Jobs]:
    over = threading.Event()
    thread = threading.Thread(target=jobs.run, args=(over.is_set,))
    thread.start()
    yield jobs
    over.set()
    thread.join()


def test_threads_add_and_cancel_while_jobs_are_done(running, work):
    """Each job is done once, or cancelled, and has a result."""
    added: list[QueuedJob] = []

    def add(name: str) -> None:
        numbers = list(range(1, 101))
        random.Random(name).shuffle(numbers)
        for number in numbers:
            added.append(running.add(job(f"{name}:{number}", work), name, number))
            sample = running.add(job(f"{name}-{number}", work, together="a"))
            added.append(sample)
            if number % 3 == 0:
                running.cancel(sample.id)

    names = [f"m{place}" for place in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(add, names))
    assert all(each.done.wait(10) for each in added)
    done = [id for call in work.calls for id in call]
    cancelled = [each.id for each in added if isinstance(said(each), dict)]
    assert sorted(done + cancelled) == sorted(each.id for each in added)
    for name in names:
        own = [id for id in done if id.startswith(f"{name}:")]
        assert own == [f"{name}:{number}" for number in range(1, 101)]


def test_the_worker_ends_soon_when_it_is_over(jobs):
    began = time.monotonic()
    jobs.run(lambda: time.monotonic() > began + 0.1)
    assert time.monotonic() - began < 2
