from __future__ import annotations

import pytest

from tests.conftest import wait_until
from your_ai.errors import RunError, UserError
from your_ai.gates.programs import end
from your_ai.studio.worker import Worker


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
