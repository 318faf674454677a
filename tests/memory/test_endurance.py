"""What whole weights write to the disk."""

from __future__ import annotations

import pytest

from tests.conftest import TINY, make_model
from your_ai.config.adapter_facts import FULL
from your_ai.memory.endurance import Writes, writes_of
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import Plan, Training, Workload

FLOATS = 28_032  # numbers of all blocks of the model below


@pytest.fixture
def workload(tmp_path) -> Workload:
    facts = facts_of(make_model(tmp_path / "m", "qwen2", None, **TINY), 4)
    training = Training(blocks=3, rank=1, targets=("all-linear",), adapter=FULL)
    return Workload(facts=facts, training=training, lengths=(64,), batch_size=2, rows_per_step=4)


def test_a_step_on_disk_writes_gradients_states_weights_and_block_inputs(workload):
    found = writes_of(workload, Plan("streamed", 128, spill=True), 10, 5)
    inputs = 3 * 2 * 64 * TINY["hidden_size"] * 4
    assert found.step_bytes == 2 * (4 * FLOATS + inputs) + 3 * 4 * FLOATS
    assert found.checkpoint_bytes == 0  # links
    assert found.total_bytes == 10 * found.step_bytes + workload.facts.weights_bytes


def test_a_run_in_memory_writes_its_checkpoints(workload):
    found = writes_of(workload, Plan("fused", 128), 10, 5)
    assert (found.step_bytes, found.checkpoint_bytes) == (0, 3 * 4 * FLOATS)
    assert found.total_bytes == 3 * found.checkpoint_bytes + workload.facts.weights_bytes


def test_the_share_is_of_600_times_the_disk():
    assert Writes(0, 0, 0, 60 * 10**12, 1).share(10**12) == pytest.approx(0.1)
