"""The plan of a run in its events, and what its steps record about reading."""

from __future__ import annotations

import json

import pytest

from tests.conftest import chat, events_of, resume, train, write_rows
from your_ai.memory.budget import plan_of
from your_ai.run import events


@pytest.fixture
def few_rows(data_folder):
    (data_folder / "valid.jsonl").unlink()
    write_rows(data_folder / "train.jsonl", [chat("Ask", "Yes") for _ in range(4)])


@pytest.mark.usefixtures("few_rows")
def test_a_streamed_run_records_its_plan_and_its_waits_and_resumes_with_both(configure):
    """2 of 3 blocks stay in memory, whatever a version without them recorded of the steps."""
    run = train(configure(plan="streamed", max_steps=2, save_every=1))
    (planned,) = events_of(run, events.Planned)
    assert (planned.resident, planned.blocks_ahead) == (2, 1)
    assert plan_of(planned).resident == 2
    waits = [step.read_wait_s for step in events_of(run, events.Step)]
    assert len(waits) == 2
    assert all(0 < seconds < 60 for seconds in waits)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    older = [{k: v for k, v in line.items() if k != "read_wait_s"} for line in lines]
    run.events.write_text("".join(json.dumps(line) + "\n" for line in older))
    assert resume(run) == 0
    assert events_of(run, events.Planned)[-1].resident == 2
    assert [step.read_wait_s for step in events_of(run, events.Step)][:2] == [None, None]


@pytest.mark.usefixtures("few_rows")
def test_a_step_with_all_blocks_in_memory_waits_for_nothing(configure):
    run = train(configure(plan="staged", max_steps=1))
    assert [step.read_wait_s for step in events_of(run, events.Step)] == [None]
