"""Start the processes of a run that trains on several ranks, and end them together.

On one machine the supervisor starts them itself, with the two environment variables by which
`mlx.launch` tells a process its rank: so it has their exit statuses, which `mlx.launch` does not
pass on, and none is left behind. This module does not import mlx.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

from your_ai.errors import RunError
from your_ai.run.child import POLL_S, Child, started
from your_ai.run.exits import DONE, PEER_LOST
from your_ai.run.folder import RunFolder
from your_ai.run.heartbeat import LOST

HOSTFILE = "ranks.json"  # in the run folder: addresses and ports of the ranks
LOOPBACK = "127.0.0.1"
GRACE_S = 8.0  # for the other ranks to find out that one is gone, and end
LEAVE_S = 20.0  # for the other ranks to end after rank 0 is done


@dataclass
class Group:
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
    def cause(self) -> int:
        """The rank whose status says how the run ended."""
        return cause_of([status or 0 for status in self.statuses], self.killed)


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


def lost_in(output: str) -> str:
    """Which rank was lost and how, as the first process that noticed said; empty if none did."""
    told = [line for line in output.splitlines() if line.startswith(LOST)]
    named = [line for line in told if line.startswith(f"{LOST}rank ")]
    return (named or told or [""])[0].removeprefix(LOST)


@contextlib.contextmanager
def started_group(
    arguments: list[str], folder: RunFolder, log: BinaryIO, processes: int
) -> Iterator[Group]:
    """Start `processes` ranks on this machine; none of them is left when the block ends.

    Raises RunError if one cannot be started.
    """
    with contextlib.ExitStack() as stack:
        if processes == 1:
            yield Group([stack.enter_context(started(arguments, folder, log))])
            return
        place = folder.path / HOSTFILE
        try:
            hosts = [[f"{LOOPBACK}:{port}"] for port in free_ports(processes)]
            place.write_text(json.dumps(hosts), encoding="utf-8")
        except OSError as error:
            raise RunError(f"{place}: cannot be written ({error.strerror})") from error
        stack.callback(place.unlink, missing_ok=True)
        group = Group([])
        stack.callback(group.kill)  # before the pipes close
        for rank in range(processes):
            named = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(place.resolve())}
            group.children.append(stack.enter_context(started(arguments, folder, log, named)))
        yield group


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((LOOPBACK, 0))
        return [each.getsockname()[1] for each in sockets]
