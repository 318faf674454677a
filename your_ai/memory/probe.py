"""Read the memory gauges of MLX, the process and the system, in bytes.

A gauge that is missing or fails gives None: it must not end a run, and is not guessed. Values
that only macOS has come from `rusage` and `sysctl`, which tests replace with recorded values.
Values of Linux come from files, under folders that are arguments.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import psutil

from your_ai.memory.limit import CARD, MachineMemory
from your_ai.memory.sample import MemorySample

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
PAGE_BYTES = resource.getpagesize()
UNLIMITED_BYTES = 1 << 60  # cgroups of version 1 without a limit report more than this

# Offsets of the current footprint and its lifetime maximum in macOS's struct rusage_info_v4.
RUSAGE_INFO_V4 = 4
RUSAGE_BYTES = 512  # the struct has 296; the rest is room for a system that writes more
FOOTPRINT_AT, MOST_FOOTPRINT_AT = 72, 240

NORMAL, WARNING, CRITICAL = 1, 2, 4  # values of memory pressure on macOS
WARNING_UNDER, CRITICAL_UNDER = 0.07, 0.03  # on Linux, this share of memory left


def read() -> MemorySample:
    """Read all gauges."""
    active, peak = mlx_bytes("get_active_memory"), mlx_bytes("get_peak_memory")
    if active is not None and peak is not None:
        peak = max(peak, active)  # after a reset the peak is 0 until the next allocation
    system = linux_system() if is_linux() else other_system()
    return MemorySample(
        active_bytes=active,
        peak_bytes=peak,
        cache_bytes=mlx_bytes("get_cache_memory"),
        process_bytes=process_bytes(),
        available_bytes=system.available_bytes,
        swap_bytes=system.swap_bytes,
        pressure=system.pressure,
    )


def machine(proc: Path = PROC, cgroups: Path = CGROUPS) -> MachineMemory:
    """Read the memory of the machine, or of its card, to find a limit from."""
    if is_card():
        card = mx.device_info()
        return MachineMemory(
            ram_bytes=int(card["total_memory"]),
            available_bytes=int(card["free_memory"]) if "free_memory" in card else None,
            held_bytes=process_bytes() or 0,
            place=CARD,
        )
    system = linux_system(proc, cgroups) if is_linux() else other_system()
    groups = limited_groups(proc, cgroups) if is_linux() else []
    container = min(groups, key=lambda group: group.limit_bytes, default=None)
    return MachineMemory(
        ram_bytes=psutil.virtual_memory().total,
        working_set_bytes=working_set_bytes(),
        available_bytes=system.available_bytes,
        held_bytes=process_bytes() or 0,
        container_bytes=container and container.limit_bytes,
        container_used_bytes=container and container.used_bytes,
    )


def is_linux() -> bool:
    return sys.platform == "linux"


def is_macos() -> bool:
    return sys.platform == "darwin"


def gauge(read: Callable[[], int | None]) -> int | None:
    """The result of `read`, or None if it fails."""
    try:
        return read()
    except Exception:  # any kind: a system call can fail in unknown ways
        return None


# MLX


def mlx_bytes(name: str) -> int | None:
    """Read a memory gauge of MLX by name."""
    return gauge(lambda: getattr(mx, name)())


def working_set_bytes() -> int | None:
    """The maximum that Metal recommends for a process; None on other devices."""
    return of_device("max_recommended_working_set_size")


def most_buffers() -> int | None:
    """The number of buffers that Metal allows a process at once; None on other devices."""
    return of_device("resource_limit")


def of_device(name: str) -> int | None:
    """A number that MLX knows about the device."""
    return gauge(lambda: int(mx.device_info().get(name, 0)) or None)


# The process


def process_bytes() -> int | None:
    """Memory of this process: RSS, or phys_footprint on macOS (GPU and compressed memory too).

    On a card with its own memory, what MLX holds there: that is what is scarce, and RSS has nothing
    of it.
    """
    if is_card():
        return gauge(lambda: mx.get_active_memory() + mx.get_cache_memory())
    if is_macos():
        return gauge(lambda: footprint(rusage(), FOOTPRINT_AT))
    if is_linux():
        return gauge(resident_bytes)
    return gauge(lambda: psutil.Process().memory_info().rss)


@functools.cache
def is_card() -> bool:
    """Return whether MLX computes on a GPU whose memory is its own, as NVIDIA's are: not that of
    the system, as on a Mac."""
    return not is_macos() and mx.default_device().type == mx.gpu


def process_peak() -> int:
    """Peak memory of this process so far, in bytes, counted as in `process_bytes`.

    Linux's ru_maxrss is only a fallback: it also counts memory of the parent process.
    """
    if is_card():
        found = mlx_bytes("get_peak_memory")
    elif is_linux():
        found = gauge(lambda: kilobytes(PROC / "self/status")["VmHWM"])
    else:
        found = gauge(lambda: footprint(rusage(), MOST_FOOTPRINT_AT)) if is_macos() else None
    if found is not None:
        return found
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if is_macos() else 1024)


def resident_bytes(proc: Path = PROC) -> int:
    """The resident memory of this process, read quickly, because a thread asks often."""
    file = os.open(f"{proc}/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[1]) * PAGE_BYTES
    finally:
        os.close(file)


def rusage() -> bytes:
    """The struct rusage_info_v4 of this process, on macOS."""
    buffer = ctypes.create_string_buffer(RUSAGE_BYTES)
    if libc().proc_pid_rusage(os.getpid(), RUSAGE_INFO_V4, buffer) != 0:
        raise OSError("proc_pid_rusage failed")
    return buffer.raw


def footprint(rusage: bytes, at: int) -> int | None:
    """The unsigned 64-bit word at byte `at`; None for 0, which is impossible."""
    return struct.unpack_from("=Q", rusage, at)[0] or None


def sysctl(name: str) -> int:
    """A 32-bit value of sysctl, on macOS."""
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    if libc().sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0) != 0:
        raise OSError(f"sysctl {name} failed")
    return value.value


@functools.cache
def libc() -> ctypes.CDLL:
    """The libraries linked to this process: on macOS, all of the system's C interface."""
    library = ctypes.CDLL(None)
    pointer = ctypes.c_void_p
    library.proc_pid_rusage.argtypes = [ctypes.c_int, ctypes.c_int, pointer]
    library.sysctlbyname.argtypes = [ctypes.c_char_p, *[pointer] * 3, ctypes.c_size_t]
    return library


# The system


class System(NamedTuple):
    """Free memory of the machine and of a container around this process."""

    available_bytes: int | None
    swap_bytes: int | None
    pressure: int | None


def other_system() -> System:
    """The values on systems other than Linux; the pressure is known only on macOS."""
    return System(
        available_bytes=gauge(lambda: psutil.virtual_memory().available),
        swap_bytes=gauge(lambda: psutil.swap_memory().used),
        pressure=gauge(lambda: sysctl("kern.memorystatus_vm_pressure_level"))
        if is_macos()
        else None,
    )


def linux_system(proc: Path = PROC, cgroups: Path = CGROUPS) -> System:
    """Free memory is the minimum over the machine and the cgroups; pressure is the maximum."""
    try:
        info = kilobytes(proc / "meminfo")
        left = [(info["MemAvailable"], info["MemTotal"])]
        left += [
            (group.room_bytes, group.limit_bytes)
            for group in limited_groups(proc, cgroups)
            if group.room_bytes is not None
        ]
    except (OSError, ValueError, KeyError):
        return System(None, gauge(lambda: psutil.swap_memory().used), None)
    swap = info["SwapTotal"] - info["SwapFree"] if "SwapFree" in info else None
    return System(min(left)[0], swap, max(pressure_of(*pair) for pair in left))


def pressure_of(available_bytes: int, total_bytes: int) -> int:
    if available_bytes < CRITICAL_UNDER * total_bytes:
        return CRITICAL
    return WARNING if available_bytes < WARNING_UNDER * total_bytes else NORMAL


def kilobytes(path: Path) -> dict[str, int]:
    """The lines `name: number kB` of a file in /proc, in bytes."""
    rows = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1:] == ["kB"]}


# Control groups (cgroups) of Linux, in which containers and services run


class Group(NamedTuple):
    """A control group with a limit."""

    limit_bytes: int
    used_bytes: int | None
    """Memory in use, without file cache, which the system can drop."""

    @property
    def room_bytes(self) -> int | None:
        return None if self.used_bytes is None else max(0, self.limit_bytes - self.used_bytes)


class StructLayout(NamedTuple):
    """The names of the files and fields read from a group."""

    limits: tuple[str, ...]
    usage: str
    file_cache: tuple[str, ...]


# Above memory.high the kernel slows a process down so much that it counts as a limit.
VERSION_2 = StructLayout(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)
VERSION_1 = StructLayout(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def limited_groups(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[Group]:
    """The groups around this process that have a limit, innermost first; empty if unreadable.

    A container may show a path of its host that does not exist inside it. Its own group is then
    the root.
    """
    try:
        lines = (proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, layout = cgroups, VERSION_2
        elif "memory" in controllers.split(","):
            root, layout = cgroups / "memory", VERSION_1
        else:
            continue
        folder = root / path.strip("/")
        for place in (folder, *folder.parents):
            found += read_group(place, layout)
            if place == root:
                break
    return found


def read_group(folder: Path, layout: StructLayout) -> list[Group]:
    """The group of a folder, or nothing if it has no limit."""

    def number_in(name: str) -> int:
        return int((folder / name).read_text())

    limits = [gauge(functools.partial(number_in, name)) for name in layout.limits]
    known = [limit for limit in limits if limit is not None and limit < UNLIMITED_BYTES]
    if not known:
        return []

    def used() -> int:
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cache = sum(int(row[1]) for row in rows if row[0] in layout.file_cache)
        return max(0, number_in(layout.usage) - cache)

    return [Group(min(known), gauge(used))]


# A thread that watches


@dataclass(frozen=True, kw_only=True)
class Highest:
    """Peaks since the last call of `Sampler.highest`. None if unreadable."""

    process_bytes: int | None
    mlx_bytes: int | None
    """Active memory plus cache."""


class Sampler:
    """Reads memory from a thread every `every_s` seconds, also while MLX evaluates.

    It reads three counters and evaluates nothing.
    """

    def __init__(self, every_s: float = 0.05) -> None:
        self.every_s = every_s
        self._process: int | None = None
        self._mlx: int | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def highest(self) -> Highest:
        """The peaks since the last call, including now."""
        self.look()
        with self._lock:
            found = Highest(process_bytes=self._process, mlx_bytes=self._mlx)
            self._process = self._mlx = None
        return found

    def look(self) -> None:
        """Read the gauges once."""
        active, cache = mlx_bytes("get_active_memory"), mlx_bytes("get_cache_memory")
        process = process_bytes()
        held = None if active is None or cache is None else active + cache
        with self._lock:
            self._process = most(self._process, process)
            self._mlx = most(self._mlx, held)

    def _watch(self) -> None:
        while not self._stopped.wait(self.every_s):
            self.look()


def most(a: int | None, b: int | None) -> int | None:
    """The larger value, ignoring None; None if both are."""
    return max((x for x in (a, b) if x is not None), default=None)
