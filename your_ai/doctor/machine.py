"""This machine as it tells of itself: what `your_ai doctor` judges and shows.

No mlx here: it is loaded when a machine is read, where it can be.
"""

from __future__ import annotations

import glob
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from your_ai import __version__
from your_ai.hub.find import store
from your_ai.memory import limit as limits
from your_ai.memory.limit import MemoryLimit

PACKAGES = {  # of extras
    "report": ("matplotlib", "jinja2"),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboardX",),
    "wandb": ("wandb",),
}
MIB = 1 << 20
COMMAND_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """What a machine tells of itself; sizes in bytes, None what is not known.

    system: Darwin or Linux; release: of macOS, or of the kernel; translated: an Apple chip
    runs this Python as an Intel one's; device: metal, cuda or cpu, None where mlx cannot be
    loaded, mlx_fault then says why; nvidia: there is such a card; blas: of those faster than
    the one that MLX brings, which is loaded, and openblas where one lies; recommended: what
    Metal says a process should use at most; max_buffer: of one array there; wired_limit: what
    the user has set that to, 0 for nothing; gpu: memory of an NVIDIA card, and what of it is
    free; held: by this process; container: the least limit
    around it, and what is used in it; pressure: 1 normal, 2 warning, 4 critical; store: where
    models and caches lie; missing: the extras of your_ai without a package of theirs;
    endpoint, offline: of the hub.
    """

    system: str
    release: str | None = None
    architecture: str | None = None
    translated: bool = False
    chip: str | None = None
    cores: int | None = None
    device: str | None = None
    nvidia: bool = False
    blas: str | None = None
    openblas: str | None = None
    ram_bytes: int | None = None
    recommended_bytes: int | None = None
    max_buffer_bytes: int | None = None
    wired_limit_bytes: int | None = None
    gpu_bytes: int | None = None
    gpu_free_bytes: int | None = None
    available_bytes: int | None = None
    held_bytes: int | None = None
    swap_bytes: int | None = None
    pressure: int | None = None
    container_bytes: int | None = None
    container_used_bytes: int | None = None
    disk_free_bytes: int | None = None
    store: str | None = None
    store_writable: bool | None = None
    python: str | None = None
    mlx: str | None = None
    mlx_fault: str | None = None
    mlx_lm: str | None = None
    your_ai: str | None = None
    missing: tuple[str, ...] = ()
    memory_fit: str | None = None
    """The date on which memory estimates were fitted to a machine, with --fit-memory."""
    memory_fit_used: bool = False
    """Whether it was this machine with these versions, so that plans use that fit."""
    endpoint: str | None = None
    offline: bool = False


def limit_of(machine: MachineInfo) -> MemoryLimit | None:
    """What a run would take, and why; None where it cannot be found."""
    if machine.ram_bytes is None:
        return None
    return limits.detect(
        limits.MachineMemory(
            ram_bytes=machine.ram_bytes,
            working_set_bytes=machine.recommended_bytes,
            available_bytes=machine.available_bytes,
            held_bytes=machine.held_bytes or 0,
            container_bytes=machine.container_bytes,
            container_used_bytes=machine.container_used_bytes,
        )
    )


def read_machine() -> MachineInfo:
    """This machine, now. Never raises."""
    place = attempt(store)
    parent = place and attempt(lambda: next(p for p in (place, *place.parents) if p.exists()))
    fault = attempt(load_mlx)
    return MachineInfo(
        system=platform.system(),
        release=(platform.mac_ver()[0] or None) if is_mac() else platform.release(),
        architecture=platform.machine(),
        translated=is_mac() and attempt(lambda: sysctl("sysctl.proc_translated")) == "1",
        chip=attempt(chip),
        cores=psutil.cpu_count(logical=False) or os.cpu_count(),
        device=attempt(device),
        nvidia=os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None,
        blas=attempt(loaded_blas),
        openblas=attempt(installed_openblas),
        wired_limit_bytes=attempt(lambda: MIB * int(sysctl("iogpu.wired_limit_mb"))),
        **(attempt(memory) or {"ram_bytes": attempt(lambda: psutil.virtual_memory().total)}),
        disk_free_bytes=parent and attempt(lambda: shutil.disk_usage(parent).free),
        store=place and str(place),
        store_writable=parent and os.access(parent, os.W_OK),
        python=platform.python_version(),
        mlx=attempt(lambda: metadata.version("mlx")),
        mlx_fault=fault or None,
        mlx_lm=attempt(lambda: metadata.version("mlx-lm")),
        your_ai=__version__,
        missing=missing_extras(),
        **(attempt(memory_fit) or {}),
        endpoint=os.environ.get("HF_ENDPOINT") or None,
        offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    )


def attempt(read: Callable[[], T]) -> T | None:
    """What `read` gives, or None where it fails."""
    try:
        return read()
    except Exception:  # of any kind: what a machine does not tell must not end a diagnosis
        return None


def is_mac() -> bool:
    return sys.platform == "darwin"


def load_mlx() -> str:
    """Why mlx cannot be loaded; empty where it can."""
    try:
        importlib.import_module("mlx.core")
    except Exception as error:  # a library that it needs may be missing, or be another one
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def memory() -> dict[str, int | None]:
    """The fields of Machine that memory.probe reads."""
    import mlx.core as mx

    from your_ai.memory import probe

    machine, sample = probe.machine(), probe.read()
    info = attempt(lambda: (getattr(mx, "device_info", None) or mx.metal.device_info)()) or {}
    return {
        "ram_bytes": machine.ram_bytes,
        "recommended_bytes": machine.working_set_bytes,
        "max_buffer_bytes": info.get("max_buffer_length") or None,
        "gpu_bytes": info.get("total_memory") or None,
        "gpu_free_bytes": info.get("free_memory") or None,
        "available_bytes": machine.available_bytes,
        "held_bytes": machine.held_bytes,
        "swap_bytes": sample.swap_bytes,
        "pressure": sample.pressure,
        "container_bytes": machine.container_bytes,
        "container_used_bytes": machine.container_used_bytes,
    }


def memory_fit() -> dict[str, Any]:
    """The fields of MachineInfo about fitted memory estimates."""
    from your_ai.memory import budget, coefficients

    found = coefficients.read_fitted(store() / coefficients.FILE)
    if found is None:
        return {}
    used = found.machine == tuple(budget.machine_key())
    return {"memory_fit": found.date, "memory_fit_used": used}


def device() -> str:
    """metal, cuda or cpu: what MLX computes on unless it is told otherwise."""
    import mlx.core as mx

    if mx.default_device().type != mx.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def chip() -> str | None:
    """The processor's name."""
    if is_mac():
        return sysctl("machdep.cpu.brand_string")
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (named or [platform.processor()])[0] or None


def sysctl(name: str) -> str:
    """A value of macOS's kernel as text. Raises OSError or a SubprocessError."""
    told = subprocess.run(
        ["sysctl", "-n", name], capture_output=True, text=True, timeout=COMMAND_S, check=True
    )
    return told.stdout.strip()


def loaded_blas() -> str | None:
    """The file of a fast BLAS in this process, on Linux; not NumPy's, which MLX does not use."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    fast = (p for p in sorted(paths) if re.search(r"openblas|mkl|blis|armpl", p))
    return next((p for p in fast if "scipy" not in p and "numpy" not in p), None)


def installed_openblas() -> str | None:
    """Where Debian and Ubuntu put what can stand in for MLX's BLAS."""
    place = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or '*'}/openblas-*/libblas.so.3"
    return next(iter(sorted(glob.glob(place), reverse=True)), None)  # pthread before openmp


def missing_extras() -> tuple[str, ...]:
    def there(package: str) -> bool:
        return attempt(lambda: importlib.util.find_spec(package)) is not None

    return tuple(extra for extra, names in PACKAGES.items() if not all(map(there, names)))
