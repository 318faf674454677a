"""Which rank says how a run ended, and what the logs say of a lost one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys

import pytest

from tests.conftest import wait_until
from tests.session.test_machines import TWO
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.run.child import DONE, OUT_OF_MEMORY, PEER_LOST, USER, Child
from your_ai.run.folder import SUPERVISOR_LOCK, RunFolder, locked
from your_ai.run.heartbeat import write_report
from your_ai.session import ranks
from your_ai.session.ranks import (
    LaunchedGroup,
    RankGroup,
    cause_of,
    check_processes,
    failed_in,
    free_ports,
    is_users_error,
    launched_rank,
    lost_in,
    refused_in,
)
from your_ai.session.supervisor import Life, after_death, with_ranks


@pytest.mark.parametrize(
    ("statuses", "killed", "cause"),
    [
        ([DONE, DONE], set(), 0), ([DONE, 1], set(), 0), ([PEER_LOST, -9], set(), 1),
        ([PEER_LOST, PEER_LOST, OUT_OF_MEMORY], set(), 2), ([PEER_LOST, -9], {1}, 0),
        ([-9, PEER_LOST], {0}, 1), ([USER, USER], set(), 0), ([-9, -9], {0, 1}, 0),
    ],
)  # fmt: skip
def test_the_rank_that_ended_by_itself_is_the_cause(statuses, killed, cause):
    assert cause_of(statuses, killed) == cause


def test_the_log_says_which_rank_was_lost():
    log = "[ring] Socket 3\nlost: [ring] peer\nlost: rank 1 on mac2: its process ended\nlost: rank"
    assert lost_in(log) == "rank 1 on mac2: its process ended"
    assert lost_in("[WARN] Node with rank 2 exited with code -9") == "rank 2: it ended with code -9"
    said = "bash: python: No such file or directory\n[WARN] Node with rank 1 exited with code 127"
    assert lost_in(said, ["mac1", "mac2"]) == "rank 1 on mac2: it ended with code 127"
    assert lost_in("nothing") == ""


def test_an_error_before_the_ranks_have_met_is_the_users():
    exited = "[WARN] Node with rank 1 exited with code"
    said = f"error: rank 1 on mac2: a port is in use there\n{exited} "
    assert is_users_error(f"{said}2 \n")
    assert not is_users_error(f"{said}1 \n")
    assert not is_users_error(f"{exited} 2 \n")


def test_the_log_says_whose_error_ended_all():
    log = "x\nerror: rank 1 on mac2: out of memory (a: b)\nend"
    assert failed_in(log) == "rank 1 on mac2"
    assert failed_in("error: data/train.jsonl: is empty") == ""


def test_ports_differ_and_are_free():
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as each:
            each.bind(("127.0.0.1", port))


@pytest.mark.parametrize(
    ("processes", "max_memory", "force", "message"),
    [
        (2, None, False, ""),
        (57, None, False, "--processes 57: .* at most 56"),
        (2, 9.0, False, "--max-memory 9: 2 processes share .* at most 8"),
        (2, 9.0, True, ""),
    ],
)
def test_more_processes_than_the_memory_is_for_are_not_started(
    processes, max_memory, force, message
):
    config = TrainConfig(processes=processes, max_memory=max_memory, force=force)
    with pytest.raises(UserError, match=message) if message else contextlib.nullcontext():
        check_processes(config, 16 * 10**9)


SLEEP = "import time; time.sleep(60)"


def group_of(*codes: str) -> tuple[list[subprocess.Popen], RankGroup]:
    """Processes that run Python code, as the ranks of a group."""
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    return processes, RankGroup([Child(process, None) for process in processes])


def test_a_stopped_process_is_killed_when_another_died(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    processes, group = group_of(SLEEP, SLEEP)
    processes[1].send_signal(signal.SIGSTOP)
    processes[0].kill()
    processes[0].wait()
    wait_until(lambda: group.look() or None not in group.statuses, 5)
    assert group.statuses == [-9, -9]
    assert group.killed == {1}
    assert group.result == (-9, 0)


@pytest.mark.parametrize(("first", "patience"), [("pass", "LEAVE_S"), ("exit(1)", "GRACE_S")])
def test_the_others_have_time_to_end_after_rank_0(monkeypatch, first, patience):
    for name in ("LEAVE_S", "GRACE_S"):
        monkeypatch.setattr(ranks, name, 0.0 if name == patience else 60.0)
    processes, group = group_of(first, SLEEP)
    processes[0].wait()
    group.end()
    assert processes[1].returncode == -9


def test_a_rank_that_ends_by_itself_after_rank_0_is_not_killed():
    processes, group = group_of("pass", "import time; time.sleep(0.3)")
    processes[0].wait()
    group.end()
    assert group.statuses == [DONE, DONE]
    assert group.killed == set()


def test_the_rank_is_that_of_mlx_launch_or_mpi(monkeypatch):
    for name in ("MLX_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert launched_rank() is None
    monkeypatch.setenv("MLX_RANK", "1")
    assert launched_rank() == 1


def launched(tmp_path) -> LaunchedGroup:
    process = subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True)
    return LaunchedGroup(Child(process, None), RunFolder(tmp_path), tmp_path / "status")


def test_the_status_of_rank_0_comes_from_its_report(tmp_path):
    group = launched(tmp_path)
    assert group.result == (PEER_LOST, 0)  # it was killed before it could write one
    write_report(group.report, USER)
    assert group.result == (USER, 0)
    group.end()
    assert group.first.process.returncode == -9


def test_the_supervisor_is_not_taken_for_rank_0(tmp_path):
    """It holds a lock of the run, too, and would send the signal to itself."""
    group = launched(tmp_path)
    with locked(group.folder, SUPERVISOR_LOCK):
        group.look()
        assert not group.was_running
        assert group.pid == group.first.process.pid
        with locked(group.folder):
            assert group.pid == os.getpid()
        group.pass_on([signal.SIGUSR1], patience=2)  # there is no rank 0 yet
        assert group.first.process.wait(5) == -signal.SIGKILL


def test_mlx_launch_that_starts_nothing_is_the_users_to_mend(tmp_path):
    group = launched(tmp_path)
    group.end()
    assert group.result == (PEER_LOST, 0)  # it was killed
    group.first.process = subprocess.Popen([sys.executable, "-c", "exit(2)"])
    group.first.process.wait()
    assert group.result == (USER, 0)
    said = "usage: mlx.launch [-h]\nmlx.launch: error: The hostfile is malformed: b\n"
    assert refused_in(said) == "The hostfile is malformed: b"
    assert refused_in(f"error: no data\n{said}") == ""


def test_mlx_launch_is_killed_if_rank_0_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_S", 0.1)
    group, holder = launched(tmp_path), 1234
    monkeypatch.setattr(ranks, "owner", lambda *_: holder)
    group.look()
    holder = None
    wait_until(lambda: group.look() or group.first.process.poll() is not None, 5)
    assert group.first.process.poll() == -9


def test_a_signal_goes_to_rank_0_and_the_third_kills_all(tmp_path, monkeypatch):
    group, sent = launched(tmp_path), []
    monkeypatch.setattr(ranks, "owner", lambda *_: 1234)
    monkeypatch.setattr(ranks.os, "kill", lambda pid, number: sent.append((pid, number)))
    group.pass_on([signal.SIGTERM], patience=2)
    group.pass_on([signal.SIGTERM, signal.SIGTERM, signal.SIGTERM], patience=2)
    assert sent == [(1234, signal.SIGTERM)] * 2
    assert group.first.process.wait(5) == -9


@pytest.mark.parametrize(
    ("status", "output", "machines", "rank", "lost"),
    [
        (PEER_LOST, "", None, "rank 1", ""),
        (PEER_LOST, "", TWO, "rank 1", "mlx.launch, or rank 0"),
        (PEER_LOST, "lost: rank 0: x", TWO, "rank 1", "rank 0: x"),
        (PEER_LOST, "[WARN] Node with rank 1 exited with code 9", TWO, "rank 1",
         "rank 1 on mac2: it ended with code 9"),
        (-9, "lost: rank 0: x\nerror: rank 0 on mac1: out of memory", TWO, "rank 0 on mac1", ""),
    ],
)  # fmt: skip
def test_a_life_of_several_ranks_names_the_one_that_ended_it(status, output, machines, rank, lost):
    found = with_ranks(Life(status=status), 1, output, machines)
    assert (found.rank, found.lost) == (rank, lost)


def test_three_losses_without_progress_end_the_run_with_host_and_reason():
    lost = "rank 1 on mac2: no heartbeat for 30 s"
    death = Life(status=PEER_LOST, rank="rank 0", lost=lost, checkpoint=5, step=7, moved=True)
    first = after_death([], death)
    assert (first.level, first.reason) == (0, f"lost {lost}; continuing from step 5")
    last = after_death([death, death], death)
    assert last.level is None
    assert last.reason == f"lost {lost}; 3 deaths in a row without a new checkpoint"
