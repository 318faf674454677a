"""Read the properties of this machine, for `your_ai doctor`.

Importing this module does not import mlx. `read_machine` tries to load it.
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
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from your_ai import __version__
from your_ai.hub.find import store
from your_ai.memory import limit as limits
from your_ai.memory.limit import MemoryLimit

PACKAGES = {  # the packages of each extra
    "documents": ("pypdf",),
    "judge": ("openai",),
    "mcp": ("mcp",),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboardX",),
    "tune": ("optuna",),
    "wandb": ("wandb",),
}
MLX_PACKAGES = ("mlx-metal", "mlx-cuda-13", "mlx-cuda-12", "mlx-cpu")  # each with MLX's code
# The fields of MachineInfo that tell nothing about the machine's owner.
SHARED = (
    *("system", "release", "architecture", "translated", "chip", "cores", "device", "gpu"),
    *("driver", "ram_bytes", "recommended_bytes", "max_buffer_bytes", "wired_limit_bytes"),
    *("gpu_bytes", "gpu_free_bytes", "available_bytes", "swap_bytes", "pressure"),
    *("container_bytes", "disk_free_bytes", "python", "mlx", "mlx_package", "mlx_fault"),
    *("mlx_lm", "your_ai"),
)
MIB = 1 << 20
COMMAND_S = 5.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """The properties of a machine. Sizes are in bytes; None means unknown."""

    system: str
    """Darwin or Linux."""
    release: str | None = None
    """Version of macOS or of the Linux kernel."""
    architecture: str | None = None
    translated: bool = False
    """Whether this Python is built for Intel and runs on an Apple chip through Rosetta."""
    chip: str | None = None
    cores: int | None = None
    device: str | None = None
    """metal, cuda or cpu; None if mlx cannot be loaded."""
    gpu: str | None = None
    """Name of the GPU that MLX computes on."""
    driver: str | None = None
    """Version of NVIDIA's driver."""
    nvidia: bool = False
    """Whether there is an NVIDIA card."""
    blas: str | None = None
    """The loaded BLAS library that is faster than MLX's bundled one; None if there is none."""
    openblas: str | None = None
    """The file of an installed OpenBLAS."""
    ram_bytes: int | None = None
    recommended_bytes: int | None = None
    """The memory that Metal recommends as the maximum of a process."""
    max_buffer_bytes: int | None = None
    """Metal's maximum size of one array."""
    wired_limit_bytes: int | None = None
    """The GPU's wired limit as set by the user; 0 if not set."""
    gpu_bytes: int | None = None
    """Memory of an NVIDIA card."""
    gpu_free_bytes: int | None = None
    """Free memory of an NVIDIA card."""
    available_bytes: int | None = None
    held_bytes: int | None = None
    """Memory of this process."""
    swap_bytes: int | None = None
    pressure: int | None = None
    """Memory pressure: 1 normal, 2 warning, 4 critical."""
    container_bytes: int | None = None
    """The lowest container limit around this process."""
    container_used_bytes: int | None = None
    """Memory used in that container."""
    disk_free_bytes: int | None = None
    store: str | None = None
    """The folder of models and caches."""
    store_writable: bool | None = None
    python: str | None = None
    mlx: str | None = None
    mlx_package: str | None = None
    """The package with MLX's code for this device, and its version."""
    mlx_fault: str | None = None
    """Why mlx cannot be loaded."""
    mlx_lm: str | None = None
    your_ai: str | None = None
    missing: tuple[str, ...] = ()
    """The extras of your_ai that lack a package."""
    endpoint: str | None = None
    """HF_ENDPOINT."""
    offline: bool = False
    """HF_HUB_OFFLINE."""


def limit_of(machine: MachineInfo) -> MemoryLimit | None:
    """The memory limit of a run here, with its reason; None if it cannot be determined."""
    if machine.ram_bytes is None:
        return None
    if machine.gpu_bytes is not None:
        return limits.detect(
            limits.MachineMemory(
                ram_bytes=machine.gpu_bytes,
                available_bytes=machine.gpu_free_bytes,
                held_bytes=machine.held_bytes or 0,
                place=limits.CARD,
            )
        )
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
    """Read the current state of this machine. Never raises."""
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
        driver=attempt(driver),
        nvidia=os.path.exists("/dev/nvidia0") or shutil.which("nvidia-smi") is not None,
        blas=attempt(loaded_blas),
        openblas=attempt(installed_openblas),
        wired_limit_bytes=attempt(lambda: MIB * int(sysctl("iogpu.wired_limit_mb"))),
        **(attempt(memory) or {"ram_bytes": attempt(lambda: psutil.virtual_memory().total)}),
        disk_free_bytes=attempt(lambda: shutil.disk_usage(parent).free) if parent else None,
        store=str(place) if place else None,
        store_writable=os.access(parent, os.W_OK) if parent else None,
        python=platform.python_version(),
        mlx=attempt(lambda: metadata.version("mlx")),
        mlx_package=mlx_package(),
        mlx_fault=fault or None,
        mlx_lm=attempt(lambda: metadata.version("mlx-lm")),
        your_ai=__version__,
        missing=missing_extras(),
        endpoint=os.environ.get("HF_ENDPOINT") or None,
        offline=os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"),
    )


def attempt(read: Callable[[], T]) -> T | None:
    """Return the result of `read`, or None if it fails."""
    try:
        return read()
    except Exception:  # an unreadable property must not end the diagnosis
        return None


def is_mac() -> bool:
    return sys.platform == "darwin"


def load_mlx() -> str:
    """Load mlx. Return why it cannot be loaded, or an empty text."""
    try:
        importlib.import_module("mlx.core")
    except Exception as error:  # a library that it needs may be missing or have a wrong version
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""


def memory() -> dict[str, Any]:
    """The fields of MachineInfo that memory.probe or MLX reads."""
    import mlx.core as mx

    from your_ai.memory import probe

    machine, sample = probe.machine(), probe.read()
    info = attempt(lambda: (getattr(mx, "device_info", None) or mx.metal.device_info)()) or {}
    return {
        "gpu": info.get("device_name") if device() != "cpu" else None,
        "ram_bytes": psutil.virtual_memory().total,
        "recommended_bytes": machine.working_set_bytes,
        "max_buffer_bytes": info.get("max_buffer_length") or None,
        "gpu_bytes": info.get("total_memory") or None,
        "gpu_free_bytes": info.get("free_memory") or None,
        "available_bytes": sample.available_bytes,
        "held_bytes": machine.held_bytes,
        "swap_bytes": sample.swap_bytes,
        "pressure": sample.pressure,
        "container_bytes": machine.container_bytes,
        "container_used_bytes": machine.container_used_bytes,
    }


def device() -> str:
    """MLX's default device: metal, cuda or cpu."""
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
    """A value of the macOS kernel as text. Raises OSError or a SubprocessError."""
    return output_of("sysctl", "-n", name)


def driver() -> str:
    """Version of the driver of the first NVIDIA card. Raises OSError or a SubprocessError."""
    return output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")


def output_of(*command: str) -> str:
    """Return what a program prints. Raises OSError or a SubprocessError."""
    done = subprocess.run([*command], capture_output=True, text=True, timeout=COMMAND_S, check=True)
    return done.stdout.strip()


def mlx_package() -> str | None:
    """`mlx-cuda-13 0.32.4`; None if no such package is installed."""
    for name in MLX_PACKAGES:
        if version := attempt(partial(metadata.version, name)):
            return f"{name} {version}"
    return None


def loaded_blas() -> str | None:
    """The file of a fast BLAS loaded in this process on Linux. Ignores NumPy's, unused by MLX."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/" in line}
    fast = (p for p in sorted(paths) if re.search(r"openblas|mkl|blis|armpl", p))
    return next((p for p in fast if "scipy" not in p and "numpy" not in p), None)


def installed_openblas() -> str | None:
    """The file of an OpenBLAS of Debian or Ubuntu that can replace MLX's BLAS."""
    place = f"/usr/lib/{sysconfig.get_config_var('MULTIARCH') or '*'}/openblas-*/libblas.so.3"
    return next(iter(sorted(glob.glob(place), reverse=True)), None)  # prefer pthread to openmp


def missing_extras() -> tuple[str, ...]:
    def there(package: str) -> bool:
        return attempt(lambda: importlib.util.find_spec(package)) is not None

    return tuple(extra for extra, names in PACKAGES.items() if not all(map(there, names)))
