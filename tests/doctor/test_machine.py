"""Reading this machine: a property that cannot be read is None, and nothing raises."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import mlx.core as mx
import psutil
import pytest

from your_ai.doctor import findings, machine
from your_ai.doctor.machine import read_machine
from your_ai.memory import probe

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libc.so.6
7f02-7f03 r-xp 00000000 08:01 13 /venv/numpy.libs/libscipy_openblas64_-ff.so
"""
OPENBLAS = "7f04-7f05 r-xp 00000000 08:01 14 /usr/lib/openblas-pthread/libblas.so.3\n"


def test_this_machine_is_read():
    found = read_machine()
    assert found.ram_bytes == psutil.virtual_memory().total
    assert found.held_bytes > 0
    assert found.mlx == metadata.version("mlx")
    assert found.device == ("cpu" if mx.default_device().type == mx.cpu else found.device)
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.disk_free_bytes > 0
    assert found.store_writable


def test_a_missing_store_is_judged_by_its_parent_folder(own_folder, monkeypatch):
    monkeypatch.setenv("YOUR_AI_HOME", str(own_folder / "a" / "b"))
    found = read_machine()
    assert found.store == str(own_folder / "a" / "b")
    assert found.store_writable
    assert found.disk_free_bytes > 0
    assert not (own_folder / "a").exists()


def test_hub_environment_variables_are_read(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = read_machine()
    assert (found.endpoint, found.offline) == ("https://hub.example", True)


def test_an_mlx_that_cannot_be_loaded_gives_the_reason(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError(f"{name}: libcuda.so.1 is missing\nand more")

    monkeypatch.setattr(machine.importlib, "import_module", fail)
    monkeypatch.setattr(machine, "device", fail)
    found = read_machine()
    assert found.mlx_fault == "mlx.core: libcuda.so.1 is missing"
    assert found.device is None


@pytest.mark.parametrize("name", ["memory", "chip", "device", "loaded_blas", "installed_openblas"])
def test_a_property_that_cannot_be_read_is_none(monkeypatch, name):
    def fail(*_: object) -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(machine, name, fail)
    found = read_machine()
    field = {"loaded_blas": "blas", "installed_openblas": "openblas", "memory": "held_bytes"}
    assert getattr(found, field.get(name, name)) is None
    assert found.ram_bytes == psutil.virtual_memory().total


def test_nothing_raises_if_nothing_can_be_read(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    for name in ("store", "chip", "device", "memory", "sysctl", "load_mlx"):
        monkeypatch.setattr(machine, name, fail)
    for place, name in ((machine.psutil, "virtual_memory"), (machine.metadata, "version")):
        monkeypatch.setattr(place, name, fail)
    found = read_machine()
    assert (found.ram_bytes, found.store, found.mlx) == (None, None, None)


def test_chip_wired_limit_and_rosetta_of_a_mac_are_read(monkeypatch):
    told = {
        "machdep.cpu.brand_string": "Apple M1 Max",
        "iogpu.wired_limit_mb": "57344",
        "sysctl.proc_translated": "1",
    }
    info = {
        "max_recommended_working_set_size": 56 << 30,
        "max_buffer_length": 42 << 30,
        "memory_size": 64 << 30,
    }

    def run(arguments: list[str], **_: object) -> SimpleNamespace:
        assert arguments[:2] == ["sysctl", "-n"]
        return SimpleNamespace(stdout=told[arguments[2]] + "\n")

    monkeypatch.setattr(machine, "is_mac", lambda: True)
    monkeypatch.setattr(machine.subprocess, "run", run)
    monkeypatch.setattr(machine.platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    monkeypatch.setattr(mx, "device_info", lambda: info)
    found = read_machine()
    assert (found.chip, found.translated, found.release) == ("Apple M1 Max", True, "15.5")
    assert found.wired_limit_bytes == 56 << 30
    assert found.recommended_bytes == probe.working_set_bytes() == 56 << 30
    assert found.max_buffer_bytes == 42 << 30
    assert found.gpu_bytes is None


def test_the_memory_of_a_card_is_read(monkeypatch):
    info = {"device_name": "NVIDIA H100", "total_memory": 80 << 30, "free_memory": 78 << 30}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    monkeypatch.setattr(machine, "output_of", lambda *command: f"version of {command[0]}")
    found = read_machine()
    assert (found.gpu, found.driver) == ("NVIDIA H100", "version of nvidia-smi")
    assert "NVIDIA H100" in findings.facts(found)["device"]
    assert (found.gpu_bytes, found.gpu_free_bytes) == (80 << 30, 78 << 30)
    assert found.recommended_bytes is None


@pytest.mark.parametrize(("maps", "blas"), [(MAPS, None), (MAPS + OPENBLAS, OPENBLAS.split()[-1])])
def test_the_blas_of_numpy_is_ignored(monkeypatch, maps, blas):
    monkeypatch.setattr(machine.Path, "read_text", lambda *_, **__: maps)
    assert machine.loaded_blas() == blas


def test_an_extra_is_missing_if_its_package_is_missing(monkeypatch):
    there = {"tensorboardX"}
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: name in there or None)
    assert machine.missing_extras() == ("documents", "judge", "mcp", "swanlab", "tune", "wandb")
