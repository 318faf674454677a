"""Several runs at once get limits whose sum the machine has."""

from __future__ import annotations

import pytest

from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.memory.limit import GB, MachineMemory, detect
from your_ai.run.folder import create
from your_ai.session.room import MemoryUser, memory_user, share_gb

FREE = MachineMemory(ram_bytes=32 * GB, available_bytes=24 * GB)
CAPACITY_GB = detect(FREE).limit_bytes / GB


def user(limit_gb: float | None, held_gb: float = 0) -> MemoryUser:
    limit = None if limit_gb is None else int(limit_gb * GB)
    return MemoryUser("r1", limit, int(held_gb * GB))


def machine(held_gb: float) -> MachineMemory:
    """The same machine while others hold memory of it."""
    return MachineMemory(ram_bytes=32 * GB, available_bytes=int((24 - held_gb) * GB))


def test_first_run_gets_what_it_asks_for():
    assert share_gb(FREE, [], None) is None
    assert share_gb(FREE, [], 100) == 100  # train itself says what is wrong with it


@pytest.mark.parametrize("held_gb", [0, 3, 8])
def test_second_run_gets_what_is_left_whatever_the_first_holds_yet(held_gb):
    found = share_gb(machine(held_gb), [user(8, held_gb)], None)
    assert found == pytest.approx(CAPACITY_GB - 8, abs=0.02)
    assert found <= CAPACITY_GB - 8 + 1e-6


def test_sum_of_limits_stays_within_the_machine():
    most = int(CAPACITY_GB - 8)
    assert share_gb(FREE, [user(4), user(4)], most) == most
    with pytest.raises(UserError, match=r"r1 may use 8\.00 GB of the .* this needs 40 GB"):
        share_gb(FREE, [user(8)], 40)


def test_each_process_of_a_run_has_the_limit(own_folder):
    most = int(CAPACITY_GB / 3)
    assert share_gb(FREE, [user(most)], most, processes=2) == most
    with pytest.raises(UserError, match=r"this needs \d+ GB for each of 3 processes"):
        share_gb(FREE, [user(most)], most, processes=3)
    assert share_gb(FREE, [user(8)], None, 2) == pytest.approx((CAPACITY_GB - 8) / 2, abs=0.02)
    config = TrainConfig(data="d", run="r", processes=3, max_memory=2.0)
    assert memory_user(create(config), {}).limit_bytes == 6 * GB


def test_run_whose_limit_is_the_machine_leaves_nothing():
    for others in ([user(None)], [user(CAPACITY_GB)]):
        for asked in (None, 0.5):
            with pytest.raises(UserError, match="not enough memory: r1 may use"):
                share_gb(FREE, others, asked)
