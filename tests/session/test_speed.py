"""How fast the newest run was."""

from __future__ import annotations

import pytest

from tests.dashboard.frames import step
from your_ai.config import TrainConfig
from your_ai.run import events
from your_ai.run.events import Record
from your_ai.run.folder import create
from your_ai.session.run_list import seconds_for


def ran(model: str, *seconds: float) -> None:
    folder = create(TrainConfig(model=model, data="data", run="r"))
    steps = [step(n, tokens=200, seconds=each) for n, each in enumerate(seconds, 1)]
    records = [Record(1e9 + n, each) for n, each in enumerate(steps)]
    folder.events.write_text("".join(events.to_line(record) for record in records))


def test_it_is_the_median_of_the_steps(own_folder):
    ran("org/m", 1.0, 2.0, 9.0)
    assert seconds_for(1000, "elsewhere/m") == pytest.approx(10.0)


def test_an_alias_is_its_repository(own_folder):
    ran("llama-8b", 2.0)
    repo = "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"
    assert seconds_for(1000, repo) == seconds_for(1000, "llama-8b") == pytest.approx(10.0)


@pytest.mark.parametrize("seconds", [(), (0.0,)])
def test_a_run_without_measured_steps_gives_none(own_folder, seconds):
    ran("org/m", *seconds)
    assert seconds_for(1000, "org/m") is None


def test_runs_of_other_models_and_no_runs_give_none(own_folder):
    assert seconds_for(1000, "org/m") is None
    ran("org/m", 1.0)
    assert seconds_for(1000, "org/other") is None
