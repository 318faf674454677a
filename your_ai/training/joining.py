"""The start and the end of a run on several ranks: they meet, agree on settings, and part."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import signal
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import mlx.core as mx

from your_ai.config import TrainConfig, build
from your_ai.data.sources import find_splits
from your_ai.errors import Interrupted, RunError, UserError
from your_ai.files import sha256
from your_ai.hub.find import find_model, fingerprint
from your_ai.run import child, heartbeat
from your_ai.run.heartbeat import Heartbeat
from your_ai.training.distributed import ALONE, PeerLost, Ranks

DEFAULT_TIMEOUT_S = TrainConfig.heartbeat_timeout_s
# Settings that need not be the same on all ranks.
OWN_SETTINGS = ("max_memory", "run", "hosts", "hostfile", "processes", "sync")


def versions() -> dict[str, str]:
    """The versions that decide what a step computes."""
    return {f"version of {name}": version(name) for name in ("your_ai", "mlx", "mlx-lm")}


def agreed_settings(ranks: Ranks, config: TrainConfig, recorded: TrainConfig) -> TrainConfig:
    """Rank 0's settings, but for the memory limit, after a comparison of all that all need.

    config: as given to this rank. recorded: with what the run chose before.
    Raises UserError naming the first host that differs.
    """
    if ranks.size == 1:
        return recorded
    given = {n: v for n, v in dataclasses.asdict(config).items() if n not in OWN_SETTINGS}
    ranks.check_same(versions() | {"settings": checksum(given)})
    config = build(ranks.of_first(lambda: dataclasses.asdict(recorded)), "--settings")
    config = ranks.with_own_limit(config)
    splits = find_splits(config).files.items()
    data = {path.name: sha256(path) for name, path in splits if name != "test"}
    files = fingerprint(find_model(config.model))
    ranks.check_same({"model": checksum(files), "data": checksum(data)})
    return config


def checksum(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def asked_backend() -> str | None:
    """The backend for which `mlx.launch` or MPI started this process; None if neither did."""
    if "MLX_IBV_DEVICES" in os.environ:
        return "jaccl"
    if os.path.exists(place := os.environ.get("MLX_HOSTFILE", "")) and os.path.getsize(place) > 1:
        return "ring"
    if "NCCL_HOST_IP" in os.environ:
        return "nccl"
    return "mpi" if int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1 else None


def own_address(backend: str) -> str:
    """The address at which this rank listens, as far as that is known."""
    if backend != "ring":
        return f"backend {backend}"
    with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as file:
        return ", ".join(json.load(file)[int(os.environ["MLX_RANK"])])


def address_of_first(backend: str) -> str:
    """The address at which the others can reach rank 0."""
    if backend == "ring":
        with open(os.environ["MLX_HOSTFILE"], encoding="utf-8") as file:
            return str(json.load(file)[0][0]).rpartition(":")[0].strip("[]")
    given = os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0]
    return given or os.environ.get("NCCL_HOST_IP") or platform.node()


def join(timeout_s: float) -> Ranks:
    """Meet the other ranks of this run, if `mlx.launch` started this process; else ALONE.

    timeout_s: without a heartbeat for so long, a rank is lost.
    Raises UserError if a port is in use, and RunError if another rank cannot be reached.
    """
    backend = asked_backend()
    if backend is None:
        return ALONE
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        where = f"rank {os.environ.get('MLX_RANK', '?')} on {platform.node()}"
        reason = " ".join(str(error).split())
        if "bind" in reason:
            raise UserError(
                f"{where}: a port is in use there, of {own_address(backend)}; end the program that "
                "uses it, or choose other ports with mlx.launch --starting-port"
            ) from error
        raise UserError(f"{where}: cannot connect to the other ranks ({reason})") from error
    if group.size() == 1:
        return ALONE
    found = Ranks(group.rank(), group.size(), ("",) * group.size(), shares=(1.0,) * group.size())
    listener = meeting = None
    if found.is_first:
        listener, meeting = heartbeat.listen(address_of_first(backend))
    about = [platform.node(), meeting and dataclasses.asdict(meeting)]
    gathered = found.gather(about)
    found.hosts = tuple(host for host, _ in gathered)
    if listener is not None and meeting is not None:
        links = heartbeat.accept(listener, meeting, found.size)
    else:
        links = heartbeat.connect(heartbeat.Meeting(**gathered[0][1]), found.rank)
    found.beats = Heartbeat(found.rank, found.hosts, timeout_s, links)
    found.beats.start()
    return found


@contextlib.contextmanager
def telling_others(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks how this one ends."""
    try:
        yield
    except PeerLost:
        raise
    except (UserError, RunError) as error:
        ranks.fail(str(error), child.USER if isinstance(error, UserError) else child.FAILED)
        raise
    except Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        ranks.fail(f"stopped by {name}", 128 + interrupted.number)
        raise
    except Exception as error:
        kind = type(error).__name__
        ranks.fail(f"failed because of a bug in your_ai ({kind})", child.CRASHED)
        raise
    ranks.leave()
