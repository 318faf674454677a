"""What the doctor finds on recorded machines, and how it shows that."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import your_ai
from tests.conftest import shown
from tests.machines import CPU, CUDA, GB, GIB, MACS, RECORDED
from your_ai.doctor import findings as doctor
from your_ai.doctor.findings import Finding, findings
from your_ai.doctor.machine import MachineInfo, limit_of

MAC = MACS[16]


def bad(machine: MachineInfo) -> list[Finding]:
    return [finding for finding in findings(machine) if finding.level != "ok"]


def found(machine: MachineInfo, word: str) -> Finding:
    """The only finding that contains `word`."""
    (finding,) = [f for f in findings(machine) if word in f.what]
    return finding


def table(machine: MachineInfo) -> str:
    return shown(doctor.findings_table(machine, findings(machine)))


# Recorded machines


@pytest.mark.parametrize("gb", [8, 16, 24, 36])
def test_a_new_mac_has_no_problems(gb):
    assert bad(MACS[gb]) == []


@pytest.mark.parametrize(("gb", "could_mb"), [(64, 57344), (128, 114688)])
def test_a_large_mac_is_advised_to_raise_its_wired_limit(gb, could_mb):
    (finding,) = bad(MACS[gb])
    assert finding.level == "note"
    assert finding.command == f"sudo sysctl iogpu.wired_limit_mb={could_mb}"


def test_the_advised_wired_limit_raises_the_run_limit_and_ends_the_advice():
    for machine in (MACS[64], MACS[128]):
        (finding,) = bad(machine)
        wired = int(finding.command.rpartition("=")[2]) << 20
        raised = replace(machine, recommended_bytes=wired, wired_limit_bytes=wired)
        assert bad(raised) == []
        assert limit_of(raised).limit_bytes > limit_of(machine).limit_bytes


def test_the_limit_on_a_card_is_of_its_memory():
    assert limit_of(CUDA).limit_bytes < CUDA.gpu_bytes < CUDA.ram_bytes
    assert "on the card" in limit_of(CUDA).reason
    assert bad(CUDA) == []


def test_a_linux_machine_without_gpu_is_advised_to_use_openblas():
    assert [f.level for f in bad(CPU)] == ["note", "note"]
    assert found(CPU, "BLAS").command == f"export LD_PRELOAD={CPU.openblas}"
    without = replace(CPU, openblas=None)
    assert found(without, "BLAS").command == "sudo apt install libopenblas0-pthread"
    assert "BLAS" not in str(findings(replace(CPU, blas=CPU.openblas)))


# One problem each


MAC_PROBLEMS = [
    ({"mlx": "0.32.2"}, "risk", "MLX 0.32.2 is older than 0.32.3, which", "'mlx>=0.32.3'"),
    ({"mlx": "0.32.3"}, "note", "with 0.32.4 or newer", "--upgrade 'mlx>=0.32.4'"),
    ({"mlx": None, "device": None}, "risk", "MLX is not installed", "'mlx>=0.32.3'"),
    ({"mlx_fault": "no libx", "device": None}, "risk", "loaded (no libx)", "force-reinstall"),
    ({"mlx_lm": "0.31.9"}, "risk", "mlx-lm 0.31.9 is older than 0.32.2", "'mlx-lm>=0.32.2'"),
    ({"python": "3.9.6"}, "risk", "Python 3.9.6 is too old", "brew install python"),
    ({"release": "13.6"}, "risk", "macOS 13.6: MLX needs 14", "softwareupdate"),
    ({"translated": True}, "risk", "translated by Rosetta", "arch -arm64"),
    ({"architecture": "x86_64", "device": "cpu"}, "risk", "has an Intel chip", ""),
    ({"device": "cpu"}, "risk", "MLX finds no GPU", ""),
    ({"wired_limit_bytes": 16 * GIB}, "risk", "leaves macOS 0 MB", "limit_mb=0"),
    ({"pressure": 2}, "risk", "pressure is at warning", "top -l 1"),
    ({"pressure": 4}, "risk", "pressure is at critical", "top -l 1"),
    ({"swap_bytes": 2 * GB}, "note", "2.0 GB of memory is swapped out", "top -l 1"),
    ({"swap_bytes": 5 * GB}, "risk", "5.0 GB of memory is swapped out", "top -l 1"),
    ({"available_bytes": 3 * GB}, "note", "only 3.0 GB of 12.7 GB is free", "top -l 1"),
    ({"available_bytes": None}, "note", "free now cannot be read", ""),
    ({"ram_bytes": None}, "note", "the size of the memory cannot be read", ""),
    ({"disk_free_bytes": 12 * GB}, "note", "12.0 GB free on the disk", "runs prune"),
    ({"disk_free_bytes": 3 * GB}, "risk", "3.0 GB free on the disk", "runs prune"),
    ({"store_writable": False}, "risk", "cannot be written", "export YOUR_AI_HOME="),
    ({"offline": True}, "note", "HF_HUB_OFFLINE", "unset HF_HUB_OFFLINE"),
    ({"endpoint": "https://hub"}, "note", "come from https://hub", "unset HF_ENDPOINT"),
    ({"missing": ("report", "wandb")}, "note", "report, wandb", "'.[report,wandb]'"),
]
LINUX = replace(CUDA, gpu_bytes=None, gpu_free_bytes=None)
LINUX_PROBLEMS = [
    ({"device": "cpu", "blas": "/x"}, "risk", "an NVIDIA card", "'.[cuda]'"),
    ({"container_bytes": 16 * GIB}, "note", "this container may use 17.2 GB", "docker update"),
    ({"python": "3.9.2"}, "risk", "Python 3.9.2 is too old", "apt install python3"),
    ({"pressure": 4}, "risk", "pressure is at critical", "ps -eo rss"),
]


@pytest.mark.parametrize(
    ("machine", "change", "level", "what", "command"),
    [*((MAC, *row) for row in MAC_PROBLEMS), *((LINUX, *row) for row in LINUX_PROBLEMS)],
)
def test_each_problem_of_a_machine_is_found(machine, change, level, what, command):
    (finding,) = bad(replace(machine, **change))
    assert finding.level == level
    assert what in finding.what
    assert command in finding.command
    assert bool(finding.command) == bool(command)


def test_a_small_machine_is_referred_to_recommend():
    small = replace(CPU, ram_bytes=4 * GIB, available_bytes=3 * GIB, blas="/x")
    assert found(small, "smallest models").command == "your_ai recommend --memory 4"


def test_a_container_as_large_as_its_machine_is_not_mentioned():
    assert "container" not in str(findings(replace(CPU, container_bytes=CPU.ram_bytes)))


def test_risks_come_first_and_ok_findings_last():
    machine = replace(MACS[64], pressure=4, offline=True)
    assert [f.level for f in findings(machine)] == ["risk", "note", "note", "ok", "ok", "ok", "ok"]


def test_required_versions_are_those_of_pyproject():
    project = (Path(your_ai.__file__).parents[1] / "pyproject.toml").read_text()
    assert f'requires-python = ">={doctor.PYTHON_NEEDED}"' in project
    assert f'"mlx>={doctor.MLX_NEEDED};' in project
    assert f'"mlx-lm>={doctor.MLX_LM_NEEDED},<' in project


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [
        ("0.32.1", "0.32.1", False),
        ("0.32", "0.32.1", True),
        ("0.32.1", "0.32", False),
        ("0.9.9", "0.32", True),
        ("1.0", "0.32.1", False),
        ("0.32.1.dev20260101", "0.32.1", False),
        ("15.5", "14", False),
        ("unknown", "14", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, than, older):
    assert doctor.older(version, than) == older


BY_TYPE = {
    "int | None": st.none() | st.integers(0, 5) | st.integers(0, 2**45),
    "str | None": st.none() | st.sampled_from(["metal", "cuda", "cpu"]) | st.text(max_size=5),
    "bool": st.booleans(),
}
CHANGES = {f.name: BY_TYPE[f.type] for f in fields(MachineInfo) if f.type in BY_TYPE}


@given(st.sampled_from(list(RECORDED.values())), st.fixed_dictionaries({}, optional=CHANGES))
def test_any_machine_can_be_judged_and_shown(machine, changes):
    odd = replace(machine, **changes)
    json.dumps(doctor.findings_json(odd, findings(odd)))
    assert table(odd)


# Showing it


@pytest.mark.parametrize("name", RECORDED)
def test_every_machine_is_shown_with_the_memory_limit_of_a_run(name):
    machine = RECORDED[name]
    text = " ".join(table(machine).split())
    assert machine.chip in text
    assert " ".join(doctor.facts(machine)["a run"].split()) in text
    for finding in findings(machine):
        assert f"{finding.level} " in text
        assert " ".join(finding.what.split()) in text


@pytest.mark.parametrize("name", RECORDED)
def test_each_command_is_shown_on_one_line(name):
    lines = [line.strip() for line in table(RECORDED[name]).splitlines()]
    commands = [f.command for f in findings(RECORDED[name]) if f.command]
    assert [line for line in lines if line in commands] == commands


def test_json_contains_the_machine_the_limit_and_the_findings():
    told = json.loads(json.dumps(doctor.findings_json(MAC, findings(MAC))))
    assert told["machine"]["chip"] == "Apple M2"
    assert told["limit_bytes"] == limit_of(MAC).limit_bytes
    assert {"level": "ok", "what": "MLX 0.32.4", "command": ""} in told["findings"]
    assert set(told) == {"machine", "limit_bytes", "limit_reason", "findings"}


def test_a_machine_with_unknown_properties_is_shown():
    unknown = MachineInfo(system="Linux")
    assert doctor.findings_json(unknown, [])["limit_bytes"] is None
    assert re.search(r"machine +Linux", table(unknown))
