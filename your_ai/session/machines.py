"""The machines of a run: who they are, whether they can be reached, and how `mlx.launch` is called.

This module does not import mlx.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from your_ai.config import DEMO, TrainConfig, gigabytes
from your_ai.errors import UserError
from your_ai.files import read_text
from your_ai.gates.paths import unreadable_text
from your_ai.gates.text import nearest, shortened, shown
from your_ai.gates.untrusted import is_number
from your_ai.run.host import WATCHDOG

LAUNCHER = "mlx.launch"
HERE = "127.0.0.1"  # what `mlx.launch` starts without ssh
FIRST_PORT = 32323  # of mlx.launch
PORTS_TRIED = 50
HOSTFILE_BYTES = 1 << 20
REACH_S = 10  # for ssh to connect
HOST = re.compile(r"[\w.:\[][\w.:@%+/\[\]-]*")  # a name, an address, user@host or ssh://host:port
LIMIT_KEY = "max_memory"
HOST_KEYS = ("ssh", "ips", "rdma", LIMIT_KEY)
# Environment variables that all ranks get from this machine, unless the hostfile sets them: where
# models are, and what the GPU needs.
PASSED_ON = (WATCHDOG, "YOUR_AI_HOME", "HF_HOME", "HF_HUB_CACHE")
HUB_REPOSITORY = re.compile(r"(models|datasets)--.+")  # a folder in the Hugging Face cache
BACKENDS = ("ring", "jaccl", "jaccl-ring", "mpi", "nccl")


@dataclass(frozen=True)
class Machine:
    ssh: str
    """What ssh connects to."""
    ips: tuple[str, ...] = ()
    """The addresses over which the ranks communicate."""
    rdma: tuple[Any, ...] = ()
    """For JACCL: the device to each host."""
    max_memory: float | None = None
    """The limit of its rank, in GB; None: that of --max-memory."""


@dataclass(frozen=True)
class Machines:
    """The hosts of a run, this machine first."""

    hosts: tuple[Machine, ...]
    backend: str = "ring"
    envs: tuple[str, ...] = ()
    """Environment variables for every rank, as NAME=VALUE."""
    option: str = "--hosts"
    """The option that named them, for messages."""

    def as_json(self) -> str:
        """The hostfile of `mlx.launch`, in which the first host is started without ssh."""
        hosts = [
            {"ssh": host.ssh, "ips": list(host.ips), "rdma": list(host.rdma)} for host in self.hosts
        ]
        hosts[0]["ssh"] = HERE
        named = {each.partition("=")[0] for each in self.envs}
        own = [name for name in PASSED_ON if name in os.environ and name not in named]
        envs = [*self.envs, *(f"{name}={os.environ[name]}" for name in own)]
        return json.dumps({"backend": self.backend, "envs": envs, "hosts": hosts})


def run_program(command: Sequence[str]) -> tuple[int, str]:
    """Run a program that asks nothing."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    lines = done.stdout.decode("utf-8", "replace").strip().splitlines()
    return done.returncode, lines[-1].strip() if lines else ""


class Tools(NamedTuple):
    """Programs of the machine that this module uses; tests give others."""

    run: Callable[[Sequence[str]], tuple[int, str]] = run_program
    """command -> its exit status, and the last line it wrote."""
    which: Callable[[str], str | None] = shutil.which


TOOLS = Tools()


def machines_of(config: TrainConfig) -> Machines | None:
    """The hosts of --hosts or --hostfile; None if the run is for this machine alone.

    Raises UserError for a file that is none, an unknown name, or another first host.
    """
    if config.hostfile:
        found = from_file(config.hostfile)
    elif config.hosts:
        found = Machines(tuple(Machine(name, (address_of(name),)) for name in config.hosts))
    else:
        return None
    option = found.option
    if len(found.hosts) < 2:
        raise UserError(f"{option}: names one host; name this machine and at least one other")
    check_different(found.hosts, option)
    if found.backend == "ring":
        check_ring(found)
    if found.backend != "mpi":
        check_first(found)
    return found


def check_different(hosts: Sequence[Machine], option: str) -> None:
    """Raise UserError for a host that is there twice, under the same or another name."""
    known: dict[str, Machine] = {}
    for host in hosts:
        for place in (host.ssh.casefold().removesuffix("."), *host.ips):
            other = known.setdefault(place, host)
            if other is not host:
                as_what = "" if other.ssh == host.ssh else f", as {shortened(other.ssh)} as well"
                raise UserError(
                    f"{option}: {shortened(host.ssh)} is there twice{as_what}; for several "
                    "processes on one machine use --processes"
                )


def check_first(machines: Machines) -> None:
    """Raise UserError if the first host is another machine, or the others cannot connect to it.

    All may have addresses of this machine only, to try several hosts without any.
    """
    first, *others = machines.hosts
    option, name = machines.option, shortened(first.ssh)
    if not any(is_mine(ip) for ip in first.ips):
        raise UserError(
            f"{option}: the first host must be this machine, which owns the run folder; "
            f"{name} is not"
        )
    for other in others:
        if all(is_loopback(ip) for ip in other.ips):
            continue
        if is_loopback(first.ips[0]):
            raise UserError(
                f"{option}: {name} has the address {first.ips[0]}, at which {shortened(other.ssh)} "
                "does not reach this machine; give its name or address in your network"
            )
        if any(is_mine(ip) for ip in other.ips):
            raise UserError(
                f"{option}: {shortened(other.ssh)} is this machine, as {name} is; for several "
                "processes on one machine use --processes"
            )


def check_ring(machines: Machines) -> None:
    """Raise UserError for addresses that the ring of MLX does not take."""
    for host in machines.hosts:
        name = shortened(host.ssh)
        if not host.ips:
            raise UserError(
                f"{machines.option}: {name} has no ips, over which the ranks communicate"
            )
        for ip in host.ips:
            if ":" in ip:
                raise UserError(
                    f"{machines.option}: {name}: the ring of MLX needs an IPv4 address without a "
                    f"port, and {shortened(ip)} is none"
                )
        if len(host.ips) != len(machines.hosts[0].ips):
            raise UserError(
                f"{machines.option}: all hosts need equally many ips for the ring of MLX; "
                f"{name} has {len(host.ips)}, and {shortened(machines.hosts[0].ssh)} has "
                f"{len(machines.hosts[0].ips)}"
            )


def is_loopback(ip: str) -> bool:
    return ip == "localhost" or ip == "::1" or ip.startswith("127.")


def from_file(name: str) -> Machines:
    """Read a hostfile in the format of `mlx.launch`, with `max_memory` per host in addition."""
    option = f"--hostfile {shortened(name)}"
    try:
        text = read_text(Path(os.path.expanduser(name)), HOSTFILE_BYTES)
        content = json.loads(text.removeprefix("\ufeff"))
        if isinstance(content, list):
            content = {"hosts": content}
        hosts = tuple(machine_of(host) for host in content["hosts"])
        backend, envs = content.get("backend") or "ring", content.get("envs") or []
        if not (is_texts(envs) and all("=" in each for each in envs)):
            raise ValueError("envs must be a list of NAME=VALUE")
    except OSError as error:
        raise UserError(f"{option}: {unreadable_text(name, error)}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{option}: is not a hostfile of mlx.launch ({error}); expected "
            '{"hosts": [{"ssh": "mac1", "ips": ["10.0.0.1"]}, ...]}'
        ) from error
    if backend not in BACKENDS:
        raise UserError(
            f"{option}: backend {shown(backend)} is unknown; use one of {', '.join(BACKENDS)}"
        )
    check_names(hosts, option)
    return Machines(hosts, backend, tuple(envs), option)


def machine_of(content: Any) -> Machine:
    """A host of a hostfile. Raises ValueError, TypeError or LookupError if it is none."""
    if not isinstance(content, dict):
        raise ValueError("a host must be an object")
    for key in content:
        if key not in HOST_KEYS and nearest(key, [LIMIT_KEY]):  # other keys are for other programs
            raise ValueError(f"unknown key {shortened(key)}; did you mean {LIMIT_KEY}?")
    limit = content.get(LIMIT_KEY)
    if isinstance(limit, str):
        limit = gigabytes(limit) or 0
    name, ips, rdma = content["ssh"], content.get("ips") or [], content.get("rdma") or []
    if not (isinstance(name, str) and is_texts(ips)):
        raise ValueError("ssh must be text, and ips must be a list of texts")
    if limit is not None and not (is_number(limit) and 0 < limit < 1e9):
        raise ValueError("max_memory must be a number of GB above 0")
    return Machine(name, tuple(ips), tuple(rdma), limit)


def is_texts(content: Any) -> bool:
    return isinstance(content, list) and all(isinstance(each, str) for each in content)


def check_names(hosts: Sequence[Machine], option: str) -> None:
    """Raise UserError for a name or an address that ssh would take for an option, or a shell for
    more than a word."""
    for name in (place for host in hosts for place in (host.ssh, *host.ips)):
        if not HOST.fullmatch(name) or "@-" in name:
            raise UserError(f"{option}: {shown(name) or 'an empty name'} is no host")


def address_of(name: str) -> str:
    """The IPv4 address of a host, given as for ssh. Raises UserError if the name is not known."""
    check_names([Machine(name)], "--hosts")
    place = name.removeprefix("ssh://").rpartition("@")[2]
    if name.startswith("ssh://"):
        place = place.partition("/")[0].partition(":")[0]
    try:
        found = socket.getaddrinfo(place, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--hosts: {shortened(name)} has no IPv4 address that is known here ({error}); a name "
            "from ssh's configuration needs a --hostfile with its address"
        ) from error
    return str(found[0][4][0])


def is_mine(ip: str, port: int = 0) -> bool:
    """Return whether this machine has the address, and the port is free."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as each:
            each.bind((ip, port))
    except OSError:
        return False
    return True


def launcher(tools: Tools = TOOLS) -> str:
    """The path of mlx.launch. Raises UserError if it is missing."""
    beside = Path(sys.executable).with_name(LAUNCHER)
    found = str(beside) if beside.exists() else tools.which(LAUNCHER)
    if found is None:
        raise UserError("--hosts: mlx.launch is missing; install it with: pip install mlx")
    return found


def check_programs(machines: Machines, tools: Tools = TOOLS) -> None:
    """Raise UserError if a program that starts the ranks is missing here."""
    launcher(tools)
    if machines.backend == "mpi" and tools.which("mpirun") is None:
        raise UserError(f"{machines.option}: mpirun is missing, which backend mpi needs")


def check_reachable(machines: Machines, tools: Tools = TOOLS) -> None:
    """Raise UserError naming the first host that ssh cannot reach without a password, or where
    your_ai is not installed at the same path as here."""
    option = machines.option
    if tools.which("ssh") is None:
        raise UserError(f"{option}: ssh is missing, which starts the processes on the other hosts")
    for host in machines.hosts[1:]:
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH_S}"]
        ssh = ["ssh", *options, host.ssh]
        status, said = tools.run([*ssh, "true"])
        if status:
            reason = shown(said) or f"ssh status {status}"
            raise UserError(
                f"{option}: {host.ssh} cannot be reached ({reason}); try: ssh {host.ssh} true"
            )
        status, said = tools.run([*ssh, f"{shlex.quote(sys.executable)} -c 'import your_ai'"])
        if status:
            reason = shown(said) or f"status {status}"
            raise UserError(
                f"{option}: {host.ssh} has no your_ai for {sys.executable} ({reason}); install it "
                "at the same path on every host"
            )


def sync_hosts(machines: Machines, paths: Sequence[str], tools: Tools = TOOLS) -> None:
    """Copy files and folders to the same places on the other hosts, with rsync.

    Raises UserError if one cannot be copied.
    """
    if tools.which("rsync") is None:
        raise UserError("--sync: rsync is missing on this machine")
    for host in machines.hosts[1:]:
        for path in paths:
            slash = "/" if os.path.isdir(path) else ""
            parent = os.path.dirname(path)
            # macOS has an rsync without -s, which a name that the shell reads needs
            protect = ["-s"] if shlex.quote(path) != path else []
            links = "-a" if HUB_REPOSITORY.fullmatch(os.path.basename(path)) else "-aL"
            for command in (
                ["ssh", host.ssh, f"mkdir -p {shlex.quote(parent)}"],
                ["rsync", links, *protect, "--", f"{path}{slash}", f"{host.ssh}:{path}{slash}"],
            ):
                status, said = tools.run(command)
                if status:
                    raise UserError(
                        f"--sync: {path} cannot be copied to {host.ssh} "
                        f"({said or f'status {status}'})"
                    )


def paths_to_sync(config: TrainConfig, model: Path) -> list[str]:
    """List what --sync copies: the files of --data and --valid, which every rank reads as they are,
    and with `all` the model's folder."""
    from your_ai.data.sources import source_files

    if config.sync == "off":
        return []
    found = source_files(config)
    files = config.prompt_template, config.teacher_prompt
    found += [Path(name).expanduser() for name in files if name]
    if config.sync == "all" and config.model != DEMO:  # installed with your_ai
        found.append(model)
    return list(dict.fromkeys(os.path.abspath(in_hub_cache(path) or path) for path in found))


def in_hub_cache(path: Path) -> Path | None:
    """The folder of a whole repository, if the path is in one of the Hugging Face cache.

    Files there are links to others in that folder.
    """
    return next((each for each in path.parents if HUB_REPOSITORY.fullmatch(each.name)), None)


def free_first_port(ip: str) -> int:
    """A port for `mlx.launch` to start from, which is free on this machine.

    Raises UserError if all that are tried are in use.
    """
    for port in range(FIRST_PORT, FIRST_PORT + 100 * PORTS_TRIED, 100):
        if is_mine(ip, port):
            return port
    raise UserError(
        f"--hosts: the ports from {FIRST_PORT} on are in use on this machine; is another run on?"
    )


def launch_command(
    machines: Machines, hostfile: Path, command: Sequence[str], port: int
) -> list[str]:
    """The command that starts `command` on every host."""
    return [
        launcher(),
        *("--hostfile", str(hostfile), "--backend", machines.backend),
        *("--starting-port", str(port), "--cwd", os.getcwd(), "--"),
        *command,
    ]
