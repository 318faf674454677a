"""Start the processes of a run that trains on several ranks, and end them together.

On one machine the supervisor starts them itself, with the two environment variables by which
`mlx.launch` tells a process its rank: so it has their exit statuses, which `mlx.launch` does not
pass on, and none is left behind. This module does not import mlx.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import psutil

from your_ai.config import TrainConfig
from your_ai.errors import RunError, UserError, named_errors
from your_ai.files import read_text
from your_ai.gates.text import shown, size_text
from your_ai.memory.limit import MachineMemory, find_limit
from your_ai.memory.workload import PYTHON_BYTES, RING_BYTES
from your_ai.run.child import DONE, PEER_LOST, POLL_S, USER, Child, errors_in, started
from your_ai.run.folder import LOCK, RunFolder, owner
from your_ai.run.heartbeat import LOST
from your_ai.session.machines import FIRST_PORT, LAUNCHER, Machines, free_first_port, launch_command

REPORT = "ranks.status"  # in the run folder: the exit status of rank 0, for the supervisor
REPORT_BYTES = 1000
HOSTFILE = "ranks.json"  # in the run folder: addresses and ports of the ranks
LOOPBACK = "127.0.0.1"
LAUNCHER_SAYS = re.compile(r"Node with rank (\d+) exited with code (-?\d+)")
FAILED_RANK = re.compile(r"^error: (rank \d+ on .+?): ", re.MULTILINE)
GRACE_S = 8.0  # for the other ranks to find out that one is gone, and end
LEAVE_S = 20.0  # for the other ranks to end after rank 0 is done


@dataclass
class RankGroup:
    """The processes of a run, by rank."""

    children: list[Child]
    killed: set[int] = field(default_factory=set)
    """The ranks that were killed here, so that their status says nothing."""
    ends_at: float | None = None
    """When those that are left are killed."""

    @property
    def first(self) -> Child:
        return self.children[0]

    @property
    def pid(self) -> int:
        """The process of rank 0."""
        return self.first.process.pid

    @property
    def statuses(self) -> list[int | None]:
        return [child.process.poll() for child in self.children]

    def pass_on(self, received: Sequence[int], patience: int) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.pass_on(received, patience)

    def look(self) -> None:
        """Kill the rest if one ended badly, and the others have had time to notice."""
        if all(status in (None, DONE) for status in self.statuses):
            return
        self.ends_at = self.ends_at or time.monotonic() + GRACE_S
        if time.monotonic() >= self.ends_at:
            self.kill()

    def kill(self) -> None:
        for rank, child in enumerate(self.children):
            if child.process.poll() is None:
                self.killed.add(rank)
                child.process.kill()

    def end(self) -> None:
        """After rank 0 ended: wait for the others, then kill them."""
        is_done = self.first.process.poll() == DONE
        deadline = time.monotonic() + (LEAVE_S if is_done else GRACE_S)
        while None in self.statuses and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self.kill()
        for child in self.children:
            child.process.wait()

    @property
    def result(self) -> tuple[int, int]:
        """The status that says how the run ended, and the rank that it is of."""
        statuses = [status or 0 for status in self.statuses]
        rank = cause_of(statuses, self.killed)
        return statuses[rank], rank


@dataclass
class LaunchedGroup:
    """The processes of a run that `mlx.launch` started, on several hosts.

    It passes neither signals nor exit statuses on. So signals go to rank 0, which is on this
    machine, and rank 0 writes its status to a file.
    """

    first: Child
    """mlx.launch."""
    folder: RunFolder
    report: Path
    passed_on: int = 0
    was_running: bool = False
    """Whether rank 0 has held the lock of the run folder."""
    ends_at: float | None = None

    @property
    def pid(self) -> int:
        """The process of rank 0; before it has locked the run, that of mlx.launch."""
        return owner(self.folder, [LOCK]) or self.first.process.pid

    def pass_on(self, received: Sequence[int], patience: int) -> None:
        pid = owner(self.folder, [LOCK])
        for number in received[self.passed_on :]:
            if self.passed_on >= patience:
                self.kill()
            elif pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            elif self.was_running:
                return
            else:  # there is no rank 0 yet, so there is nothing to save
                self.kill()
            self.passed_on += 1

    def look(self) -> None:
        """Kill all if rank 0 is gone, and mlx.launch has had time to end the others."""
        is_running = owner(self.folder, [LOCK]) is not None
        self.was_running |= is_running
        if is_running or not self.was_running:
            self.ends_at = None
            return
        self.ends_at = self.ends_at or time.monotonic() + GRACE_S
        if time.monotonic() >= self.ends_at:
            self.kill()

    def kill(self) -> None:
        """Kill mlx.launch with all that it started on this machine; the other hosts notice."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.first.process.pid, signal.SIGKILL)

    def end(self) -> None:
        self.kill()
        self.first.process.wait()
        if self.first.process.stdin is not None:
            self.first.process.stdin.close()

    @property
    def result(self) -> tuple[int, int]:
        """The status that rank 0 wrote. If it wrote none, it was killed, or never started."""
        try:
            return int(json.loads(read_text(self.report, REPORT_BYTES))["status"]), 0
        except (OSError, ValueError, LookupError, TypeError):
            refused = not self.was_running and (self.first.process.poll() or 0) > 0
            return (USER if refused else PEER_LOST), 0


def cause_of(statuses: Sequence[int], killed: set[int]) -> int:
    """The rank whose exit status says how all ended.

    That is rank 0 if it is done, or else the first that ended by itself, not because it lost
    another one. killed: the ranks that the supervisor killed.
    """
    if statuses[0] == DONE:
        return 0
    ranks = [rank for rank in range(len(statuses)) if rank not in killed]
    own = [rank for rank in ranks if statuses[rank] not in (DONE, PEER_LOST)]
    return (own or ranks or [0])[0]


def lost_in(output: str, names: Sequence[str] = ()) -> str:
    """Find which rank was lost and how, as the first process to notice said; empty if none did.

    names: the host of each rank, for what `mlx.launch` says, which is without.
    """
    said = [line for line in output.splitlines() if line.startswith(LOST)]
    named = [line for line in said if line.startswith(f"{LOST}rank ")]
    if not named and (found := LAUNCHER_SAYS.search(output)):
        where = f" on {names[int(found[1])]}" if int(found[1]) < len(names) else ""
        return f"rank {found[1]}{where}: it ended with code {found[2]}"
    return (named or said or [""])[0].removeprefix(LOST)


def is_users_error(output: str) -> bool:
    """Say whether `mlx.launch` ended because a rank reported an error of the user before it could
    tell the others."""
    found = LAUNCHER_SAYS.search(output)
    return found is not None and int(found[2]) == USER and bool(errors_in(output))


def refused_in(output: str) -> str:
    """Say why `mlx.launch` started no rank: its last line, without an error of ours."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if errors_in(output) or not lines:
        return ""
    return shown(lines[-1].removeprefix(f"{LAUNCHER}: error: "))


def failed_in(output: str) -> str:
    """The rank whose error ended the others, with its host, as rank 0 said; empty if none did."""
    found = FAILED_RANK.findall(output)
    return found[-1] if found else ""


def launched_rank() -> int | None:
    """The rank of this process if `mlx.launch` or MPI started it with others; else None."""
    for size, rank in (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("", "MLX_RANK")):
        if os.environ.get(rank, "").isdigit() and (not size or os.environ.get(size) != "1"):
            return int(os.environ[rank])
    return None


def check_processes(config: TrainConfig, ram_bytes: int | None = None) -> None:
    """Raise UserError if this machine's memory is not for so many processes, before they start.

    Later, each plans by itself.
    """
    count, least = config.processes, PYTHON_BYTES + RING_BYTES
    if count == 1:
        return
    ram_bytes = psutil.virtual_memory().total if ram_bytes is None else ram_bytes
    if config.max_memory is not None:
        find_limit(MachineMemory(ram_bytes=ram_bytes), config.max_memory, config.force, count)
    if count * least > ram_bytes:
        raise UserError(
            f"--processes {count}: each needs at least {size_text(least)} without a model, and "
            f"this machine has {size_text(ram_bytes)}; use at most {max(1, ram_bytes // least)}"
        )


@contextlib.contextmanager
def started_group(
    arguments: list[str],
    folder: RunFolder,
    log: BinaryIO,
    processes: int,
    machines: Machines | None = None,
) -> Iterator[RankGroup | LaunchedGroup]:
    """Start `processes` ranks on this machine, or one on each of several machines.

    None of them is left on this machine when the block ends. Raises RunError if one cannot be
    started.
    """
    with contextlib.ExitStack() as stack:
        if machines is not None:
            yield stack.enter_context(launched_group(arguments, folder, log, machines))
            return
        if processes == 1:
            yield RankGroup([stack.enter_context(started(arguments, folder, log))])
            return
        place = folder.path / HOSTFILE
        with named_errors(place, "written", RunError):
            hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(processes)]
            place.write_text(json.dumps(hosts), encoding="utf-8")
        stack.callback(place.unlink, missing_ok=True)
        group = RankGroup([])
        stack.callback(group.kill)  # before the pipes close
        for rank in range(processes):
            named = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(place.resolve())}
            group.children.append(stack.enter_context(started(arguments, folder, log, named)))
        yield group


@contextlib.contextmanager
def launched_group(
    arguments: list[str], folder: RunFolder, log: BinaryIO, machines: Machines
) -> Iterator[LaunchedGroup]:
    """Start a rank on each machine with mlx.launch."""
    place, report = folder.path / HOSTFILE, folder.path / REPORT
    with named_errors(place, "written", RunError):
        report.unlink(missing_ok=True)
        place.write_text(machines.as_json(), encoding="utf-8")
    limits = json.dumps([host.max_memory for host in machines.hosts])
    own = ["--report", str(report.resolve()), "--parent-pid", str(os.getpid())]
    ips = machines.hosts[0].ips
    port = free_first_port(ips[0]) if ips else FIRST_PORT
    command = [*arguments, "--memory-of-ranks", limits, *own]
    command = launch_command(machines, place, command, port)
    try:
        # mlx.launch reads its input all the time, and takes a processor for that at its end
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
    except OSError as error:
        raise RunError(f"{command[0]}: cannot be started ({error.strerror})") from error
    with open(os.devnull, "wb", buffering=0) as nothing:
        group = LaunchedGroup(Child(process, nothing), folder, report)
        try:
            yield group
        finally:
            group.end()
            place.unlink(missing_ok=True)
            report.unlink(missing_ok=True)


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
