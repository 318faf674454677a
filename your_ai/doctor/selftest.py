"""`your_ai doctor --selftest`: check this device with a small generated model.

Each check runs in separate processes, because a device's driver may kill them, and in a
temporary folder. This process only watches, so it reads the memory of the others from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil

from your_ai.doctor.findings import facts
from your_ai.doctor.machine import MachineInfo
from your_ai.gates.text import counted, size_text
from your_ai.memory.limit import with_headroom
from your_ai.run import events
from your_ai.run.folder import RunFolder

MAX_S = 120.0
CHECK_S = 75.0  # maximum time of one check
# A check that ran out of time hangs, if it had HANGS_FROM_S and used the CPU for less than
# IDLE_SHARE of its time, or if it had all its time and computes on a GPU, whose driver may wait
# by using the CPU, and compiled no kernel lately. Otherwise it is only slow.
HANGS_FROM_S, IDLE_SHARE = 20.0, 0.05
# On CUDA, MLX compiles kernels when they are first called, 3 to 13 s for one, in one thread. So
# the checks that measure no time run together there, in this share of the time that is left.
TOGETHER_SHARE = 0.65
SLOTS = threading.Semaphore(os.cpu_count() or 1)  # processes at the same time
LEAST_S = 5.0  # no check starts with less time left
# The most informative checks come first, because time may run out before the last.
CHECKS = ("counters", "gradients", "budget", "reload", "checkpoint", "speed")
LOOK_S = 0.01
RUN_STEPS, SAVE_EVERY, KILL_FROM = 60, 10, 15  # the run that is killed, in steps
LONG_TOKENS, LONG_STEPS = 256, 2  # the run with a memory limit
LONG_ROWS, LONG_ROWS_OF_A_GPU = 16, 64
BUDGET_SHARE = 0.25  # of the way from the smallest plan to the largest
PROCESS_VARIES_BYTES = 8_000_000  # that the same program takes more or less memory
WORDS = "the a river stone light house walks sees red small green old under over and or".split()
MARKS = {True: "ok", False: "FAIL", None: "-"}


@dataclass(frozen=True)
class ReportLine:
    """The result of a check."""

    check: str
    ok: bool | None
    """Whether it passed; None if there was not enough time."""
    measured: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


T = TypeVar("T")
U = TypeVar("U")
Work = Callable[[Path, dict[str, Any], float], dict[str, Any]]
"""(folder, figures of the model, deadline) -> the outcome of a check."""


class Part(NamedTuple):
    """A check to be done."""

    name: str
    work: Work | None = None
    """What does it; None for the check of that name."""
    most_s: float = CHECK_S
    times: bool = False
    """Whether it measures times, and so must run alone."""


class Failed(Exception):
    """A check cannot be carried out. The text says why."""


class OutOfTime(Exception):
    """A check ran out of time. Its process ran for `ran_s`, and used `cpu_s` of CPU time, with its
    children, such as compilers."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.cpu_s = sum(map(cpu_seconds, tree_of(process.pid)))
        self.ran_s = 0.0
        with contextlib.suppress(psutil.Error):
            self.ran_s = time.time() - psutil.Process(process.pid).create_time()


def run_selftest(max_seconds: float = MAX_S) -> Iterator[ReportLine]:
    """Run the checks one after the other, and yield each result.

    Everything is in a temporary folder, which is removed even if the caller stops early.
    """
    until = time.monotonic() + max_seconds
    with tempfile.TemporaryDirectory(prefix="your_ai-selftest-") as place:
        parts = [Part(check, times=check == "speed") for check in CHECKS]
        yield from with_model(parts, Path(place).resolve(), until)


def with_model(parts: Sequence[Part], folder: Path, until: float) -> Iterator[ReportLine]:
    """Create the model, then run checks with it; none if that fails."""
    made = line_of(Part("model"), folder, until, {})
    yield made
    if not made.ok:
        return
    if made.figures.get("device") == "cuda":
        yield from together([p for p in parts if not p.times], folder, until, made.figures)
        parts = [part for part in parts if part.times]
    for part in parts:
        yield line_of(part, folder, until, made.figures)


def together(
    parts: Sequence[Part], folder: Path, until: float, model: dict[str, Any]
) -> Iterator[ReportLine]:
    """Run checks at the same time, each in its own folder with its own copy of the model."""
    now = time.monotonic()
    until = now + TOGETHER_SHARE * (until - now)

    def run_one(part: Part) -> ReportLine:
        own = folder / part.name.replace(" ", "-")
        copied = shutil.copytree(model["folder"], own / Path(model["folder"]).name)
        own_model = {**model, "folder": str(copied)}
        return line_of(part._replace(most_s=math.inf), own, until, own_model)

    yield from at_once(run_one, parts)


def at_once(function: Callable[[T], U], given: Sequence[T]) -> Iterator[U]:
    """Call a function that waits for processes with each of `given` at the same time. The results
    come in the order of `given`."""
    with ThreadPoolExecutor(max(1, len(given))) as pool:
        yield from pool.map(function, given)


def line_of(part: Part, folder: Path, until: float, model: dict[str, Any]) -> ReportLine:
    """Run one check in the remaining time. model: its figures; empty before there is one."""
    check, began = part.name, time.monotonic()
    left_s = until - began
    if left_s < LEAST_S:
        return ReportLine(check, None, "not done: out of time")
    deadline = began + min(left_s, part.most_s)
    try:
        if work := part.work or RUNS.get(check):
            outcome = work(folder, model, deadline)
        else:
            outcome = asked(check, folder, deadline)
        ok, measured, figures = outcome["ok"], outcome["measured"], outcome.get("figures", {})
    except OutOfTime as late:
        given_s = time.monotonic() - began
        hung = late.ran_s >= HANGS_FROM_S and late.cpu_s < IDLE_SHARE * late.ran_s
        full = given_s >= part.most_s and model.get("device") != "cpu"
        waits = late.ran_s >= HANGS_FROM_S and seconds_since_kernel() > HANGS_FROM_S
        hung = hung or (full and waits)
        ok, figures = (False if hung else None), {}
        measured = f"{'hangs: ' if hung else ''}not finished within {given_s:.0f} s"
        measured += f"; its processes used {late.cpu_s:.0f} s of CPU time"
    except Failed as failure:
        ok, measured, figures = False, str(failure), {}
    except Exception as error:  # a fault in one check must not lose the results of the others
        ok, measured, figures = False, f"{type(error).__name__}: {error}", {}
    return ReportLine(check, ok, measured, time.monotonic() - began, figures)


def failed(lines: Sequence[ReportLine]) -> bool:
    """Return whether the self-test ends with exit status 1."""
    return any(line.ok is False for line in lines)


# Processes


def tree_of(pid: int) -> list[psutil.Process]:
    """A process and all that it started, as far as they still run."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    return []


def cpu_seconds(process: psutil.Process) -> float:
    """The CPU time of a process and of its children that have ended; 0 if it has ended itself."""
    with contextlib.suppress(psutil.Error):
        return sum(process.cpu_times()[:4])  # user and system, its own and of its children
    return 0.0


def seconds_since_kernel() -> float:
    """Seconds since MLX last stored a kernel that it compiled for CUDA; infinite without one."""
    place = os.environ.get("MLX_PTX_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "mlx")
    with contextlib.suppress(OSError):
        files = (file for file in Path(place).rglob("*") if "cpu" not in file.parts)
        found = [file.stat().st_mtime for file in files if file.is_file()]
        return time.time() - max(found, default=-math.inf)
    return math.inf


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started: a supervisor starts another in its own session."""
    for each in tree_of(process.pid):
        with contextlib.suppress(psutil.Error):
            each.kill()
    process.kill()
    process.wait()


@contextlib.contextmanager
def started(arguments: Sequence[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start Python with its output in NAME.out and NAME.err; kill it when the block ends."""
    with (
        SLOTS,
        open(folder / f"{name}.out", "wb") as out,
        open(folder / f"{name}.err", "wb") as err,
    ):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env={**os.environ, "YOUR_AI_HOME": str(folder / "home")},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            kill(process)


def done(arguments: Sequence[str], folder: Path, name: str, deadline: float) -> str:
    """Run a process and return its stdout. Raises Failed or OutOfTime."""
    with started(arguments, folder, name) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            raise OutOfTime(process)
    if process.returncode != 0:
        raise Failed(describe_end(folder, name, process.returncode))
    return (folder / f"{name}.out").read_text(encoding="utf-8", errors="replace")


def describe_end(folder: Path, name: str, status: int) -> str:
    """Describe how a process ended, with the last line that it printed."""
    ended = f"ended with status {status}"
    if status < 0:
        ended = f"was killed by {signal.Signals(-status).name}"
    output = (folder / f"{name}.err").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"its process {ended}" + (f": {lines[-1]}" if lines else "")


def asked(check: str, folder: Path, deadline: float, *more: str) -> dict[str, Any]:
    """Run one of the checks in `doctor.checks` and return its outcome. more: its arguments."""
    folder.mkdir(exist_ok=True)
    arguments = ["-m", "your_ai.doctor.checks", check, str(folder), *more]
    output = done(arguments, folder, check, deadline)
    try:
        outcome: dict[str, Any] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise Failed("its process ended without a result") from error
    return outcome


def command(name: str, settings: dict[str, Any]) -> list[str]:
    """The arguments of Python that run a command of your_ai."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    return ["-m", "your_ai", name, *flags]


def write_rows(folder: Path, name: str, rows: int, words: int) -> Path:
    """Create a data folder of plain texts, always the same ones."""
    place = folder / name
    place.mkdir(exist_ok=True)
    draw = random.Random(rows)
    lines = [json.dumps({"text": " ".join(draw.choices(WORDS, k=words))}) for _ in range(rows)]
    (place / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


# A run that is killed, and a run with a memory limit


def survive(folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Check that a run killed with SIGKILL and resumed gives the adapter of an unkilled run."""
    settings = {
        "model": model["folder"],
        "data": write_rows(folder, "short", 32, 6),
        "max_steps": RUN_STEPS,
        "save_every": SAVE_EVERY,
        "max_seq_length": 64,
        "batch_size": 2,
        "lora_rank": 4,
        "lora_layers": "all",
        "lora_dropout": 0.1,
    }
    unsupervised = ["--no-supervise"]
    whole = command("train", {**settings, "run": "whole"})
    done([*whole, *unsupervised], folder, "whole", deadline)
    killed = RunFolder(folder / "runs" / "killed")
    first = [*command("train", {**settings, "run": "killed"}), *unsupervised]
    with started(first, folder, "killed") as process:
        while process.poll() is None and steps_of(killed) < KILL_FROM:
            if time.monotonic() > deadline:
                raise OutOfTime(process)
            time.sleep(LOOK_S)
    if process.returncode != -signal.SIGKILL:
        raise Failed(f"before it was killed, {describe_end(folder, 'killed', process.returncode)}")
    at = steps_of(killed)
    done([*command("train", {"resume": "killed"}), *unsupervised], folder, "resumed", deadline)
    logged = [record.event for record in events.tail(killed.events)[0]]
    start = events.of(events.Started, logged)[-1].step
    outcome = asked("adapters", folder, deadline)
    text = f"killed at step {at} of {RUN_STEPS}, resumed from step {start}: {outcome['measured']}"
    return {**outcome, "ok": outcome["ok"] and start > 0, "measured": text}


def steps_of(run: RunFolder) -> int:
    """The last step in a run's events."""
    with contextlib.suppress(OSError):
        logged = [record.event for record in events.tail(run.events)[0]]
        return max((step.step for step in events.of(events.Step, logged)), default=0)
    return 0


def hold_budget(folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Check from outside that a run stays below a limit not far above the least it can take."""
    rows = LONG_ROWS if model["device"] == "cpu" else LONG_ROWS_OF_A_GPU
    settings = {
        "model": model["folder"],
        "data": write_rows(folder, "long", rows, 2 * LONG_TOKENS),
        "max_seq_length": LONG_TOKENS,
        "too_long": "truncate",
        "batch_size": rows,
        "lora_layers": "all",
        "lora_targets": "all-linear",
    }
    front = [*command("plan", settings), "--front", "--json"]
    plans_by_size = sorted(json.loads(done(front, folder, "plan", deadline)), key=bytes_needed)
    empty = plans_by_size[0]["components"]["python"]
    least, most = bytes_needed(plans_by_size[0]), bytes_needed(plans_by_size[-1])
    more = max(BUDGET_SHARE * (most - least), PROCESS_VARIES_BYTES)
    budget_gb = round(with_headroom(int(least + more)) / 1e9, 3)
    limited = {**settings, "run": "held", "max_steps": LONG_STEPS, "max_memory": budget_gb}
    peak, looks = 0, 0
    with started([*command("train", limited), "--no-supervise"], folder, "held") as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise OutOfTime(process)
            peak, looks = max(peak, peak_memory_of(process.pid)), looks + 1
            time.sleep(LOOK_S)
    if process.returncode != 0:
        raise Failed(describe_end(folder, "held", process.returncode))
    logged = [record.event for record in events.tail(RunFolder(folder / "runs" / "held").events)[0]]
    plans = [event.text for event in events.of(events.Planned, logged)]
    steps = events.of(events.Step, logged)
    of_mlx = [step.peak_bytes or 0 for step in steps]
    if model["device"] == "cuda":  # seen from outside, a process has nothing of the card's memory
        peak = max((step.highest_bytes or 0 for step in steps), default=0)
    figures = {"limit_bytes": int(1e9 * budget_gb), "peak_bytes": peak, "looks": looks,
               "most_bytes": most, "empty_bytes": empty, "plans": plans,
               "mlx_peak_bytes": max(of_mlx, default=0)}  # fmt: skip
    text = (
        f"with --max-memory {budget_gb:g} the peak was {size_text(peak)}, in {looks} readings; the "
        f"largest plan takes {size_text(most)}, an empty process {size_text(empty)}; "
        f"planned: {'; '.join(plans)}"
    )
    if any(of_mlx):
        text += f"; MLX's peak was {size_text(max(of_mlx))}"
    return {"ok": 0 < peak <= 1e9 * budget_gb, "measured": text, "figures": figures}


def bytes_needed(plan: dict[str, Any]) -> int:
    return int(plan["needed_bytes"])


RUNS = {"checkpoint": survive, "budget": hold_budget}


def peak_memory_of(pid: int) -> int:
    """Peak or current memory of a process, as the system counts it; 0 if it has ended.

    The peak is used if the system records one, because it misses nothing between two readings.
    """
    from your_ai.memory import probe

    try:
        if probe.is_macos():
            buffer = ctypes.create_string_buffer(probe.RUSAGE_BYTES)
            if probe.libc().proc_pid_rusage(pid, probe.RUSAGE_INFO_V4, buffer) != 0:
                return 0
            places = (probe.FOOTPRINT_AT, probe.MOST_FOOTPRINT_AT)
            return max(probe.footprint(buffer.raw, at) or 0 for at in places)
        if probe.is_linux():
            return probe.kilobytes(probe.PROC / f"{pid}/status")["VmHWM"]
        return psutil.Process(pid).memory_info().rss
    except (OSError, KeyError, psutil.Error):  # the process has just ended
        return 0


# Showing it


def text(line: ReportLine) -> str:
    """`ok    gradients   worst relative difference ...  (4.2 s)`"""
    return f"{MARKS[line.ok]:<5} {line.check:<11} {line.measured}  ({line.seconds:.1f} s)"


def report(lines: Sequence[ReportLine], machine: MachineInfo) -> str:
    """A report for an issue: the machine and the results, without paths or user names."""
    about = {name: text for name, text in facts(machine).items() if name != "store"}
    more = {"max buffer": machine.max_buffer_bytes, "wired limit": machine.wired_limit_bytes}
    about |= {name: size_text(size) for name, size in more.items() if size}
    if machine.blas:
        about["BLAS"] = Path(machine.blas).parent.name
    counts = {mark: sum(line.ok is ok for line in lines) for ok, mark in MARKS.items()}
    passed = f"{counts['ok']} of {counted(len(lines), 'check')} passed"
    left = f", {counts['-']} not done" if counts["-"] else ""
    width = max(map(len, about), default=0)
    return "\n".join(
        [
            "```",
            f"your_ai doctor --selftest: {passed}{left}",
            *(f"{name:<{width}}  {text}" for name, text in about.items()),
            "",
            *(text(line) for line in lines),
            "```",
        ]
    )
