"""Memory limits of recorded machines and of random ones."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.errors import UserError
from your_ai.memory.limit import MachineMemory, bounds, detect, find_limit, requested, text

GIB = 2**30
GB = 10**9

# RAM and recommended working sets reported by Macs, in GiB, with older and newer systems.
MACS = [
    *[(8, 5.33), (16, 10.67), (24, 16.0), (32, 21.33), (64, 48.0), (96, 72.0), (128, 96.0)],
    *[(192, 144.0), (256, 208.0)],
    *[(16, 11.84), (24, 17.76), (32, 24.96), (36, 28.08), (48, 37.44), (64, 51.84)],
    *[(128, 107.52), (256, 222.7), (512, 464.0)],
]


def machine(ram: float, **others: float) -> MachineMemory:
    """A machine from its RAM and other fields (without `_bytes`), all in GiB."""
    return MachineMemory(
        ram_bytes=int(ram * GIB), **{f"{k}_bytes": int(v * GIB) for k, v in others.items()}
    )


def limit_gib(machine: MachineMemory) -> float:
    return detect(machine).limit_bytes / GIB


# Machines


@pytest.mark.parametrize(("ram", "working_set"), MACS)
def test_limit_of_a_mac_is_its_recommended_working_set_or_its_free_memory(ram, working_set):
    idle = machine(ram, working_set=working_set, available=ram - 1)
    busy = machine(ram, working_set=working_set, available=working_set / 2)
    assert limit_gib(idle) == pytest.approx(0.95 * working_set)
    assert limit_gib(busy) == pytest.approx(0.95 * working_set / 2)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (machine(64, working_set=64, available=64), 60),  # if all may be wired, macOS needs some
        (machine(64, available=63), 60),  # so does Linux
        (machine(2, available=2), 1.5),  # but at most a quarter
        (machine(24, available=20, container=4, container_used=0.2, held=0.3), 4),
        (machine(24, available=20, container=4, container_used=1.5, held=0.5), 3),  # beside others
        (machine(24, available=20, container=4), 4),  # whose use is unknown
    ],
)
def test_limit_leaves_memory_for_the_system_and_for_others_in_the_container(found, expected):
    assert limit_gib(found) == pytest.approx(0.95 * expected)


def test_memory_already_in_use_by_the_process_counts_as_available():
    """The same limit before and after a model is loaded."""
    before = machine(32, working_set=24.96, available=12)
    after = replace(before, available_bytes=4 * GIB, held_bytes=8 * GIB)
    assert detect(after).limit_bytes == detect(before).limit_bytes


# The text


def test_reason_names_the_two_smallest_bounds_and_the_margin():
    mac = MachineMemory(
        ram_bytes=34 * GB, working_set_bytes=24 * GB, available_bytes=22_400_000_000
    )
    expected = "limit 21.3 GB: 24.0 GB recommended working set, 22.4 GB free now, less 5% margin"
    assert text(detect(mac)) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"held_bytes": GB}, "16.0 GB recommended working set, 7.0 GB free now or already in use"),
        (
            {"working_set_bytes": None, "available_bytes": 23 * GB},
            "23.0 GB free now, 24.0 GB RAM minus 2.0 GB for the system",
        ),
        (
            {"container_bytes": 4 * GB, "container_used_bytes": 800_000_000},
            "6.0 GB free now, 4.0 GB container limit minus 800 MB used by others",
        ),
        ({"container_bytes": 4 * GB}, "6.0 GB free now, 4.0 GB container limit"),
        ({"available_bytes": GB // 2}, "16.0 GB recommended working set, 500 MB free now"),
    ],
)
def test_reason_describes_each_bound(change, expected):
    mac = MachineMemory(ram_bytes=24 * GB, working_set_bytes=16 * GB, available_bytes=6 * GB)
    assert detect(replace(mac, **change)).reason == f"{expected}, less 5% margin"


def test_only_unreadable_free_memory_gives_a_notice():
    assert detect(machine(24, available=20)).notices == ()
    assert detect(machine(24)).notices == ("the amount of free memory cannot be read",)


# Limits requested by the user


MAC = MachineMemory(ram_bytes=24 * GB, working_set_bytes=16 * GB, available_bytes=12 * GB)
CONTAINED = replace(MAC, container_bytes=4 * GB)


def test_limit_without_a_request_is_detected():
    assert find_limit(MAC, None, force=False) == detect(MAC)


@pytest.mark.parametrize("asked_gb", [0.5, 7.0, 11.9])
def test_requested_limit_is_used_without_a_margin(asked_gb):
    found = find_limit(MAC, asked_gb, force=False)
    assert (found.limit_bytes, found.notices) == (int(asked_gb * GB), ())


def test_reason_of_a_requested_limit_is_the_option():
    assert text(requested(MAC, 7, force=False)) == "limit 7.0 GB: --max-memory 7"


@pytest.mark.parametrize(
    ("available_gb", "asked_gb", "exceeded"),
    [
        (12, 14, "12.0 GB free now"),
        (22, 20, "16.0 GB recommended working set"),
        (12, 20, "16.0 GB recommended working set and 12.0 GB free now"),
    ],
)
def test_request_above_what_is_free_gives_a_notice_of_all_bounds(available_gb, asked_gb, exceeded):
    found = requested(replace(MAC, available_bytes=available_gb * GB), asked_gb, force=False)
    assert found.limit_bytes == asked_gb * GB
    more = f"--max-memory {asked_gb} is more than {exceeded}"
    assert found.notices == (f"{more}; the machine may swap or kill the run",)


@pytest.mark.parametrize(
    ("asked", "asked_gb", "where", "most_gb"),
    [
        (MAC, 30, "machine", 24),
        (CONTAINED, 5, "container", 4),
        (replace(MAC, container_bytes=64 * GB), 30, "machine", 24),  # a limit above the RAM
    ],
)
def test_request_above_all_memory_is_refused(asked, asked_gb, where, most_gb):
    with pytest.raises(UserError) as caught:
        requested(asked, asked_gb, force=False)
    has = f"this {where} has {most_gb} GB of memory; use at most {most_gb}, or --force"
    assert str(caught.value) == f"--max-memory {asked_gb}: {has}"


@given(ram=st.integers(GB // 10, 600 * GB))
def test_maximum_named_in_a_refusal_is_accepted(ram):
    with pytest.raises(UserError) as caught:
        requested(MachineMemory(ram_bytes=ram), 1000, force=False)
    most_gb = float(str(caught.value).split("at most ")[1].split(",")[0])
    assert requested(MachineMemory(ram_bytes=ram), most_gb, force=False).limit_bytes <= ram


@pytest.mark.parametrize(("asked", "where"), [(MAC, "machine"), (CONTAINED, "container")])
def test_force_accepts_a_request_above_the_maximum(asked, where):
    found = requested(asked, 30, force=True)
    assert found.limit_bytes == 30 * GB
    assert f"this {where} has only" in found.notices[0]


def test_force_does_not_change_an_accepted_request():
    assert requested(MAC, 14, force=True) == requested(MAC, 14, force=False)


# Random machines

SIZES = st.integers(1, 700 * GIB)


def maybe(sizes: st.SearchStrategy[int]) -> st.SearchStrategy[int | None]:
    return st.none() | sizes


MACHINES = st.builds(
    MachineMemory,
    ram_bytes=st.integers(1 << 20, 600 * GIB),
    working_set_bytes=maybe(SIZES),
    available_bytes=maybe(st.integers(0, 700 * GIB)),
    held_bytes=st.integers(2, 700 * GIB),  # a process always uses memory
    container_bytes=maybe(SIZES),
    container_used_bytes=maybe(st.integers(0, 700 * GIB)),
)


@given(any_machine=MACHINES)
def test_limit_is_positive_and_within_every_bound(any_machine):
    found = detect(any_machine).limit_bytes
    assert 0 < found <= max(1, min(bound.size_bytes for bound in bounds(any_machine)))
    assert found < any_machine.ram_bytes
    assert found <= (any_machine.container_bytes or found)
    assert found <= (any_machine.working_set_bytes or found)
    if any_machine.available_bytes is not None:
        assert found <= any_machine.available_bytes + any_machine.held_bytes


@given(any_machine=MACHINES, name=st.sampled_from(sorted({*vars(MAC)} - {"place"})), more=SIZES)
def test_more_memory_never_lowers_the_limit(any_machine, name, more):
    """More memory used by others in the container never raises it."""
    value = getattr(any_machine, name)
    if value is None:
        return
    less, most = detect(any_machine), detect(replace(any_machine, **{name: value + more}))
    if name == "container_used_bytes":
        less, most = most, less
    assert less.limit_bytes <= most.limit_bytes


@given(any_machine=MACHINES)
def test_text_of_a_limit_is_one_line(any_machine):
    assert "\n" not in text(detect(any_machine))


@pytest.mark.parametrize("asked_gb", [math.nan, math.inf, 0.0, -1.0])
def test_request_that_is_no_size_is_refused(asked_gb):
    for force in (False, True):
        with pytest.raises(UserError, match=r"--max-memory .*: must be a number of GB above 0"):
            requested(MAC, asked_gb, force=force)
