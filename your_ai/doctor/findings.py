"""`your_ai doctor`: find what is missing or risky on a machine, and the command that fixes it.

Pure functions of a MachineInfo.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from your_ai.doctor.machine import MIB, MachineInfo, limit_of
from your_ai.gates.text import counted
from your_ai.memory import limit as limits
from your_ai.memory.limit import GB, roughly, system_bytes

PYTHON_NEEDED, MLX_NEEDED, MLX_LM_NEEDED = "3.10", "0.32.3", "0.32.2"  # as in pyproject.toml
# 0.32.1 and 0.32.2 compute sorted `gather_qmm` of MoE models wrong on M5 GPUs, without an error;
# older ones end the process where memory runs out.
MLX_FAULTS = "which fixes wrong results of mixtures of experts on M5 GPUs, and other faults"
MLX_VJP = "0.32.4"  # the first with its own backward pass for causal attention on Metal
MACOS_NEEDED = "14"  # for MLX's packages
MAC, LINUX = "Darwin", "Linux"
DEVICES = {"metal": "Metal", "cuda": "CUDA", "cpu": "the CPU only"}
PRESSURES = {1: "normal", 2: "warning", 4: "critical"}
LEAST_RAM_BYTES = 7 * GB
SYSTEM_ROOM_BYTES, SYSTEM_ROOM_SHARE = 8 << 30, 8  # left for macOS when its limit is raised
WORTH_BYTES = 1 << 30  # advise a higher limit only if it gives this much more
MUCH_SWAP_SHARE, SOME_SWAP_BYTES = 4, GB
DISK_RISK_BYTES, DISK_NOTE_BYTES = 5 * GB, 20 * GB  # an 8B model at 4 bits takes 4.5 GB
LEVELS = ("risk", "note", "ok")
STYLES = {"risk": "red", "note": "yellow", "ok": "green"}


Level = Literal["ok", "note", "risk"]


@dataclass(frozen=True)
class Finding:
    level: Level
    """ok, note (it could be better) or risk (a run may fail or be slow)."""
    what: str
    command: str = ""
    """The command that fixes it, if there is one."""


# Finding


def findings(machine: MachineInfo) -> list[Finding]:
    """Find all facts: risks first, then notes, then what is ok."""
    found = [
        *of_versions(machine),
        *of_device(machine),
        *of_memory(machine),
        *of_disk(machine),
        *of_surroundings(machine),
    ]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def of_versions(machine: MachineInfo) -> Iterator[Finding]:
    mac = machine.system == MAC
    if machine.python and older(machine.python, PYTHON_NEEDED):
        command = "brew install python" if mac else "sudo apt install python3 python3-venv"
        needed = f"Python {machine.python} is too old: your_ai needs {PYTHON_NEEDED} or newer"
        yield Finding("risk", needed, command)
    if mac and machine.release and older(machine.release, MACOS_NEEDED):
        needed = f"macOS {machine.release}: MLX needs {MACOS_NEEDED} or newer"
        yield Finding("risk", needed, "softwareupdate --list")
    for name, label, have, need in (
        ("mlx", "MLX", machine.mlx, MLX_NEEDED),
        ("mlx-lm", "mlx-lm", machine.mlx_lm, MLX_LM_NEEDED),
    ):
        command = f"pip install --upgrade '{name}>={need}'"
        if have is None:
            yield Finding("risk", f"{label} is not installed", command)
        elif older(have, need):
            why = f", {MLX_FAULTS}" if label == "MLX" else ""
            yield Finding("risk", f"{label} {have} is older than {need}{why}", command)
        else:
            yield Finding("ok", f"{label} {have}")
    if machine.mlx and machine.mlx_fault:
        what = f"MLX {machine.mlx} cannot be loaded ({machine.mlx_fault})"
        yield Finding("risk", what, "pip install --force-reinstall mlx")
    elif (
        machine.device == "metal"
        and machine.mlx
        and older(machine.mlx, MLX_VJP)
        and not older(machine.mlx, MLX_NEEDED)
    ):
        what = f"MLX {machine.mlx}: with {MLX_VJP} or newer, attention over long rows trains faster"
        yield Finding("note", what, f"pip install --upgrade 'mlx>={MLX_VJP}'")
    if machine.missing:
        names = ", ".join(machine.missing)
        what = f"packages for these optional features are not installed: {names}"
        yield Finding("note", what, f"pip install '.[{','.join(machine.missing)}]'")


def of_device(machine: MachineInfo) -> Iterator[Finding]:
    if machine.translated:
        what = "this Python is built for Intel and translated by Rosetta: MLX cannot use the GPU"
        yield Finding("risk", what, "arch -arm64 /bin/zsh -c 'brew install python'")
    elif machine.system == MAC and machine.architecture == "x86_64":
        yield Finding("risk", "this Mac has an Intel chip; MLX needs an Apple chip")
    elif machine.device in ("metal", "cuda"):
        yield Finding("ok", f"MLX computes on {DEVICES[machine.device]}")
    elif machine.device == "cpu" and machine.system == MAC:
        yield Finding("risk", "MLX finds no GPU (in a virtual machine?): steps are very slow")
    elif machine.device == "cpu" and machine.nvidia:
        what = "this machine has an NVIDIA card, but this MLX computes only on the CPU"
        yield Finding("risk", what, "pip install '.[cuda]'")
    elif machine.device == "cpu":
        what = "no GPU: models with more than about 100 million parameters train very slowly"
        yield Finding("note", what)
    if machine.system == LINUX and machine.device == "cpu" and machine.blas is None:
        what = "MLX uses its bundled BLAS, about 40 times slower than OpenBLAS"
        command = "sudo apt install libopenblas0-pthread"
        if machine.openblas is not None:
            command = f"export LD_PRELOAD={machine.openblas}"
            what += ", which is installed but not used"
        yield Finding("note", what, command)


def of_memory(machine: MachineInfo) -> Iterator[Finding]:
    ram = machine.ram_bytes
    who = "ps -eo rss,pid,comm --sort=-rss | head"
    if machine.system == MAC:
        who = "top -l 1 -o mem -n 8 -stats pid,command,mem"
    if ram is None:
        yield Finding("note", "the size of the memory cannot be read; give --max-memory")
        return
    if ram < LEAST_RAM_BYTES:
        what = f"{roughly(ram)} RAM: only the smallest models fit"
        yield Finding("note", what, f"your_ai recommend --memory {max(1, round(ram / 2**30))}")
    yield from of_wired_limit(machine, ram)
    if machine.pressure in (2, 4):
        pressure = PRESSURES[machine.pressure]
        what = f"memory pressure is at {pressure}: close programs that use much memory"
        yield Finding("risk", what, who)
    elif machine.pressure == 1:
        yield Finding("ok", "memory pressure is normal")
    swap = machine.swap_bytes or 0
    if swap >= SOME_SWAP_BYTES:
        level: Level = "risk" if swap >= ram / MUCH_SWAP_SHARE else "note"
        what = f"{roughly(swap)} of memory is swapped out: runs will be slow"
        yield Finding(level, what, who)
    most = min(ram, machine.recommended_bytes or ram, machine.container_bytes or ram)
    if machine.available_bytes is None:
        yield Finding("note", "the memory that is free now cannot be read; give --max-memory")
    elif machine.available_bytes + (machine.held_bytes or 0) < most / 2:
        free = roughly(machine.available_bytes)
        what = f"only {free} of {roughly(most)} is free now: other programs use the rest"
        yield Finding("note", what, who)
    if machine.container_bytes is not None and machine.container_bytes < ram:
        sizes = f"{roughly(machine.container_bytes)} of the machine's {roughly(ram)}"
        command = f"docker update --memory {ram // MIB}m --memory-swap {ram // MIB}m CONTAINER"
        yield Finding("note", f"this container may use {sizes}", command)


def of_wired_limit(machine: MachineInfo, ram: int) -> Iterator[Finding]:
    """Judge how much memory a Mac lets the GPU use: whether it is too much or could be more."""
    have, wired = machine.recommended_bytes, machine.wired_limit_bytes or 0
    if machine.system != MAC or have is None:
        return
    if max(wired, have) > ram - system_bytes(ram):
        what = f"iogpu.wired_limit_mb leaves macOS {roughly(max(0, ram - max(wired, have)))}"
        yield Finding("risk", f"{what}: it may freeze", "sudo sysctl iogpu.wired_limit_mb=0")
        return
    could = ram - max(SYSTEM_ROOM_BYTES, ram // SYSTEM_ROOM_SHARE)
    if not wired and could - have >= WORTH_BYTES:
        what = f"macOS lets the GPU use {roughly(have)} of {roughly(ram)}; {roughly(could)} is "
        command = f"sudo sysctl iogpu.wired_limit_mb={could // MIB}"
        yield Finding("note", f"{what}safe to allow, until the next restart", command)


def of_disk(machine: MachineInfo) -> Iterator[Finding]:
    if machine.store_writable is False:
        what = f"{machine.store}: cannot be written; models and caches are stored there"
        yield Finding("risk", what, "export YOUR_AI_HOME=$HOME/your_ai")
    free = machine.disk_free_bytes
    if free is None:
        return
    what = f"{roughly(free)} free on the disk of {machine.store}"
    if free < DISK_NOTE_BYTES:
        level: Level = "risk" if free < DISK_RISK_BYTES else "note"
        what += "; an 8B model at 4 bits takes 4.5 GB"
        yield Finding(level, what, "your_ai runs prune")
    else:
        yield Finding("ok", what)


def of_surroundings(machine: MachineInfo) -> Iterator[Finding]:
    if machine.offline:
        what = "HF_HUB_OFFLINE is set: models cannot be downloaded"
        yield Finding("note", what, "unset HF_HUB_OFFLINE")
    if machine.endpoint:
        what = f"HF_ENDPOINT is set: models come from {machine.endpoint}"
        yield Finding("note", what, "unset HF_ENDPOINT")


def older(version: str, than: str) -> bool:
    """Return whether a version is lower than another, comparing the first three numbers."""
    ours, theirs = ([int(part) for part in re.findall(r"\d+", v)[:3]] for v in (version, than))
    length = max(len(ours), len(theirs))
    return ours + [0] * (length - len(ours)) < theirs + [0] * (length - len(theirs))


# Showing it


def findings_json(machine: MachineInfo, found: list[Finding]) -> dict[str, Any]:
    limit = limit_of(machine)
    return {
        "machine": dataclasses.asdict(machine),
        "limit_bytes": limit and limit.limit_bytes,
        "limit_reason": limit and limit.reason,
        "findings": [dataclasses.asdict(finding) for finding in found],
    }


def facts(machine: MachineInfo) -> dict[str, str]:
    """Describe the machine in a few lines, by topic."""
    system = "macOS" if machine.system == MAC else machine.system
    cores = counted(machine.cores, "core") if machine.cores else None
    sizes = (
        (machine.ram_bytes, "RAM"),
        (machine.recommended_bytes, "recommended working set"),
        (machine.gpu_bytes, "on the card"),
        (machine.available_bytes, "free now"),
        (machine.container_bytes, "container limit"),
        (machine.swap_bytes or None, "swapped out"),
    )
    limit = limit_of(machine)
    card = machine.gpu if machine.device == "cuda" else None  # a Mac's GPU is named as its chip
    versions = (("Python", machine.python), ("MLX", machine.mlx), ("mlx-lm", machine.mlx_lm),
                ("your_ai", machine.your_ai))  # fmt: skip
    lines: dict[str, list[str | None]] = {
        "machine": [machine.chip, cores, f"{system} {machine.release or ''}".strip()],
        "device": [DEVICES.get(machine.device or "", machine.device), card],
        "memory": [f"{roughly(size)} {name}" for size, name in sizes if size is not None],
        "a run": [limits.text(limit) if limit else None],
        "store": [machine.store],
        "versions": [f"{name} {version}" for name, version in versions if version],
    }
    texts = {name: ", ".join(part for part in parts if part) for name, parts in lines.items()}
    return {name: text for name, text in texts.items() if text}


def findings_table(machine: MachineInfo, found: list[Finding]) -> RenderableType:
    """Show the machine, then the findings. Each command is on its own line, for copying."""
    about = Table(box=None, pad_edge=False, show_header=False)
    about.add_column(style="dim", no_wrap=True)
    about.add_column()
    for name, text in facts(machine).items():
        about.add_row(name, Text(text))
    lines: list[RenderableType] = [about, ""]
    for finding in found:
        row = Table(box=None, pad_edge=False, show_header=False)
        row.add_column(width=4)
        row.add_column()
        row.add_row(Text(finding.level, STYLES[finding.level]), Text(finding.what))
        lines.append(row)
        if finding.command:
            command = Text(f"      {finding.command}", "bold", overflow="fold")
            lines.append(command)
    return Group(*lines)
