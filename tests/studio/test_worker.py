from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import wait_until
from your_ai.errors import RunError, UserError
from your_ai.gates.programs import end
from your_ai.studio.worker import Superseded, Worker


@pytest.fixture
def worker(own_folder):
    found = Worker()
    yield found
    found.end()


def test_errors_are_those_of_the_functions(worker: Worker):
    with pytest.raises(UserError, match="nothing"):
        worker.ask("resume", run="nothing", changes={})
    with pytest.raises(RunError, match="KeyError"):
        worker.ask("no such call")


def test_it_starts_again_when_it_has_died(worker: Worker):
    worker.ask("plan", settings={"model": "demo"})
    end(worker.running())
    with pytest.raises(UserError):
        worker.ask("resume", run="nothing", changes={})


def test_it_ends_when_it_is_idle(worker: Worker):
    worker.idle_s = 0.0
    with pytest.raises(UserError):
        worker.ask("resume", run="nothing", changes={})
    assert worker.process is not None
    wait_until(lambda: worker.process.poll() is not None)


def test_it_ends_with_its_studio(own_folder):
    found = Worker()
    process = found.running()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(20) == 0


def test_only_the_last_of_many_questions_waits(worker: Worker):
    with worker.lock, ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(worker.ask_last, "plan", "a", settings={}) for _ in range(20)]
        wait_until(lambda: sum(each.done() for each in asked) == 19)
        assert all(isinstance(each.exception(), Superseded) for each in asked if each.done())
        worker.last = None  # and now another one
        wait_until(lambda: all(each.done() for each in asked))
    assert all(isinstance(each.exception(), Superseded) for each in asked)


def test_long_work_that_nobody_asks_for_any_more_is_ended(worker: Worker, monkeypatch):
    monkeypatch.setattr("your_ai.studio.worker.LONG_S", 0.0)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(worker.ask_last, "plan", "a", settings={"model": "demo"})
        wait_until(lambda: worker.topic and worker.process is not None)
        with pytest.raises(UserError, match="nothing"):
            worker.ask_last("resume", "b", run="nothing", changes={})
        assert isinstance(first.exception(), Superseded)


def test_nothing_begins_after_the_end(own_folder):
    found = Worker()
    found.end()
    with pytest.raises(RunError, match="ended"):
        found.ask("plan", settings={})
    assert found.process is None
