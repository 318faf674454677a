"""The self-test around its checks: processes, time limits, memory from outside, the report."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.machines import CPU, MACS, STORE
from your_ai.doctor import checks, selftest, shapes
from your_ai.doctor.selftest import (
    CHECKS,
    Failed,
    OutOfTime,
    Part,
    ReportLine,
    failed,
    peak_memory_of,
    report,
    run_selftest,
    text,
)
from your_ai.memory import probe

OUTCOME = {"ok": True, "measured": "all is well", "figures": {"folder": "m", "device": "cpu"}}
SOON_S = 60.0


def answering(outcomes: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """In place of `asked`: gives the outcome of a check, by its name, or raises it."""

    def answer(check: str, *_: object) -> dict[str, Any]:
        found = outcomes.get(check, OUTCOME)
        if isinstance(found, Exception):
            raise found
        return found

    return answer


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Prepared outcomes or exceptions of checks, by name. No process is started."""
    outcomes: dict[str, Any] = {}
    answer = answering(outcomes)
    monkeypatch.setattr(selftest, "asked", answer)
    runs = {name: lambda *_, name=name: answer(name) for name in selftest.RUNS}
    monkeypatch.setattr(selftest, "RUNS", runs)
    return outcomes


@pytest.fixture
def temporary(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of temporary folders, which must be removed."""
    place = own_folder / "tmp"
    place.mkdir()
    monkeypatch.setattr(selftest.tempfile, "tempdir", str(place))
    return place


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the self-test's model, smaller here, and the figures about it."""
    place = tmp_path_factory.mktemp("selftest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(shapes.SHAPES, checks.SHAPE, shapes.llama(64, 2, 4, 2, 128, 1024))
        shapes.make_shape(checks.SHAPE, checks.BITS, "float32", place)
    return place, selftest.asked("model", place, time.monotonic() + SOON_S)["figures"]


def late(computed_s: float, ran_s: float = SOON_S) -> OutOfTime:
    error = OutOfTime.__new__(OutOfTime)
    error.cpu_s, error.ran_s = computed_s, ran_s
    return error


# The checks in turn


def test_every_check_yields_a_result_in_order(canned, temporary):
    lines = list(run_selftest())
    assert [line.check for line in lines] == ["model", *CHECKS]
    assert all(line.ok and line.measured == "all is well" for line in lines)
    assert not failed(lines)
    assert list(temporary.iterdir()) == []


def test_the_selftest_ends_if_the_model_cannot_be_created(canned):
    canned["model"] = Failed("its process was killed by SIGABRT")
    (line,) = run_selftest()
    assert (line.ok, line.measured) == (False, "its process was killed by SIGABRT")
    assert failed([line])


def test_a_failed_check_does_not_stop_the_others(canned):
    canned["gradients"] = {"ok": False, "measured": "worst 0.3"}
    canned["budget"] = Failed("its process ended with status 1: error: no")
    lines = list(run_selftest())
    assert len(lines) == 1 + len(CHECKS)
    assert [line.check for line in lines if line.ok is False] == ["gradients", "budget"]
    assert failed(lines)


@pytest.mark.parametrize(
    ("device", "computed_s", "ran_s", "took_s", "hangs"),
    [
        ("cpu", 30, 40, 40, False),
        ("cpu", 0.5, 40, 40, True),
        ("cpu", 0.1, 6, 6, False),  # for too short a time to tell
        ("cuda", 30, SOON_S, 40, True),  # the GPU is waited for with the CPU
        ("cpu", 30, SOON_S, 40, False),
        ("cuda", 0.1, 2, 160, False),  # it waited for other processes
    ],
)
def test_a_hanging_check_is_distinguished_from_a_slow_one(
    canned, monkeypatch, device, computed_s, ran_s, took_s, hangs
):
    canned["reload"] = late(computed_s, ran_s)
    times = iter([0.0, took_s, took_s])
    monkeypatch.setattr(selftest.time, "monotonic", lambda: next(times))
    line = selftest.line_of(Part("reload", most_s=40.0), Path(), 300.0, {"device": device})
    told = f"not finished within {took_s} s; its processes used {computed_s:.0f} s of CPU time"
    assert (line.ok, line.measured) == ((False, f"hangs: {told}") if hangs else (None, told))


def test_a_gpu_whose_kernels_are_being_compiled_does_not_hang(canned, monkeypatch, own_folder):
    """An H200 took more than two minutes of it for one check."""
    canned["reload"] = late(30)
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(own_folder))
    (own_folder / "0.32.4").mkdir()
    kernel = own_folder / "0.32.4" / "a.ptx"
    for age_s, ok in ((60, False), (5, None)):
        kernel.touch()
        os.utime(kernel, times=(time.time() - age_s,) * 2)
        os.utime(kernel.parent, times=(time.time() - age_s,) * 2)
        part = Part("reload", most_s=0.0)
        assert selftest.line_of(part, Path(), time.monotonic() + 9, {"device": "cuda"}).ok is ok


def test_checks_that_measure_no_time_run_together_on_cuda(canned, monkeypatch, own_folder):
    model = own_folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    canned["model"] = {**OUTCOME, "figures": {"folder": str(model), "device": "cuda"}}
    both, places = threading.Barrier(2, timeout=SOON_S), []

    def meet(folder: Path, figures: dict[str, Any], _: float) -> dict[str, Any]:
        both.wait()  # fails alone
        assert (Path(figures["folder"]) / "config.json").is_file()
        places.append(folder)
        return OUTCOME

    parts = [Part("first one", meet), Part("speed", times=True), Part("second", meet)]
    until = time.monotonic() + SOON_S
    lines = list(selftest.with_model(parts, own_folder, until))
    assert [line.check for line in lines] == ["model", "first one", "second", "speed"]
    assert all(line.ok for line in lines)
    assert len(set(places)) == 2


def test_stopping_early_removes_the_temporary_folder(canned, temporary):
    lines = run_selftest()
    next(lines)
    assert len(list(temporary.iterdir())) == 1
    lines.close()
    assert list(temporary.iterdir()) == []


# Processes


def test_a_failed_process_is_described(own_folder):
    for code, ended in (
        ("import os; os.abort()", "its process was killed by SIGABRT"),
        ("raise SystemExit('no GPU')", "its process ended with status 1: no GPU"),
    ):
        with pytest.raises(Failed, match=re.escape(ended)):
            selftest.done(["-c", code], own_folder, "x", time.monotonic() + SOON_S)


def test_a_process_that_takes_too_long_is_killed(own_folder):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with pytest.raises(OutOfTime) as caught:
        selftest.done(["-c", code], own_folder, "x", time.monotonic() + 1.0)
    assert caught.value.cpu_s < 1
    assert not psutil.pid_exists(int((own_folder / "x.out").read_text()))


def test_the_children_of_a_process_count_and_are_killed(own_folder):
    """A compiler works for the process that waits; a supervisor's child has its own session."""
    child = "import os; print(os.getpid(), flush=True); [None for _ in iter(int, 1)]"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], "
    code += "start_new_session=True)"
    with pytest.raises(OutOfTime) as caught:
        selftest.done(["-c", code], own_folder, "x", time.monotonic() + 1.5)
    assert caught.value.cpu_s > 0.2
    assert ended(int((own_folder / "x.out").read_text()))


def ended(pid: int) -> bool:
    """Whether a process is gone within some seconds, or waits for another to notice its end."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process, deadline = psutil.Process(pid), time.monotonic() + 10
        while process.status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
    return True


def test_a_check_without_a_result_fails(own_folder, monkeypatch):
    monkeypatch.setattr(selftest, "done", lambda *_: "a warning\n")
    with pytest.raises(Failed, match="without a result"):
        selftest.asked("counters", own_folder, 0.0)


def test_an_unknown_check_fails_with_the_error_of_its_process(own_folder):
    with pytest.raises(Failed, match="ended with status 1: KeyError: 'unheard-of'"):
        selftest.asked("unheard-of", own_folder, time.monotonic() + SOON_S)


# Runs


def test_a_killed_run_resumes_to_the_same_adapter(made, monkeypatch):
    for name, value in (("RUN_STEPS", 24), ("SAVE_EVERY", 4), ("KILL_FROM", 6)):
        monkeypatch.setattr(selftest, name, value)
    outcome = selftest.survive(*made, time.monotonic() + SOON_S)
    match = re.fullmatch(
        r"killed at step (\d+) of 24, resumed from step (\d+): the adapter has the same bytes",
        outcome["measured"],
    )
    assert outcome["ok"]
    assert 6 <= int(match[1]) < 24
    assert 4 <= int(match[2]) <= int(match[1])


def test_a_run_stays_below_its_memory_limit(made, monkeypatch):
    monkeypatch.setattr(selftest, "LONG_TOKENS", 96)
    outcome = selftest.hold_budget(*made, time.monotonic() + SOON_S)
    figures = outcome["figures"]
    assert outcome["ok"], outcome["measured"]
    assert figures["empty_bytes"] < figures["limit_bytes"] < figures["most_bytes"]
    assert 50_000_000 < figures["peak_bytes"] <= figures["limit_bytes"]
    assert figures["looks"] > 50
    assert figures["plans"]


@pytest.mark.parametrize(("most", "limit"), [(300, 229), (200, 212)])
def test_an_exceeded_memory_limit_is_detected(made, monkeypatch, most, limit):
    front = [
        {"needed_bytes": size * 10**6, "components": {"python": 150_000_000}}
        for size in (most, 200)
    ]
    monkeypatch.setattr(selftest, "done", lambda *_: json.dumps(front))
    monkeypatch.setattr(selftest, "command", lambda *_: ["-c", "import time; time.sleep(0.5)"])
    for held, ok in ((limit * 10**6 - 1, True), (limit * 10**6 + 1, False)):
        monkeypatch.setattr(selftest, "peak_memory_of", lambda _, held=held: held)
        outcome = selftest.hold_budget(*made, time.monotonic() + SOON_S)
        assert outcome["figures"]["limit_bytes"] == limit * 10**6
        assert outcome["ok"] == ok


def test_the_peak_memory_of_another_process_includes_freed_memory():
    code = (
        "import sys; x = bytearray(b'1') * 80_000_000; del x; print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        assert 80_000_000 < peak_memory_of(process.pid) < 120_000_000
        process.kill()
    assert peak_memory_of(process.pid) == 0


@pytest.mark.parametrize(("now", "most", "held"), [(7, 9, 9), (7, 0, 7), (0, 0, 0)])
def test_the_footprint_of_another_process_is_read_on_a_mac(monkeypatch, now, most, held):
    class Library:
        @staticmethod
        def proc_pid_rusage(pid: int, flavour: int, buffer: Any) -> int:
            assert (pid, flavour) == (os.getpid(), probe.RUSAGE_INFO_V4)
            values = ((probe.FOOTPRINT_AT, now), (probe.MOST_FOOTPRINT_AT, most))
            for at, value in values:
                ctypes.memmove(ctypes.addressof(buffer) + at, struct.pack("=Q", value), 8)
            return 0

    monkeypatch.setattr(probe, "is_macos", lambda: True)
    monkeypatch.setattr(probe, "libc", Library)
    assert peak_memory_of(os.getpid()) == held


# Showing it

LINES = [
    ReportLine("model", True, "tiny, on metal", 1.2),
    ReportLine("gradients", False, "worst relative difference 3.0e-01", 4.0),
    ReportLine("speed", None, "not done: out of time"),
]


def test_a_line_shows_the_measurement():
    assert text(LINES[1]) == "FAIL  gradients   worst relative difference 3.0e-01  (4.0 s)"
    assert text(LINES[0]).startswith("ok    model ")
    assert text(LINES[2]).startswith("-     speed ")


def test_the_report_is_a_code_block_without_private_paths():
    shown = report(LINES, MACS[64])
    first, *_, last = shown.splitlines()
    assert (first, last) == ("```", "```")
    assert "1 of 3 checks passed, 1 not done" in shown
    for part in ("Apple M1 Max", "macOS 14.2", "MLX 0.32.4", "max buffer", *map(text, LINES)):
        assert part in shown
    assert STORE not in shown
    assert STORE not in report(LINES, CPU)
