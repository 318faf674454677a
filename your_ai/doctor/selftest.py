"""`your_ai doctor --selftest`: what this device does, measured with a model made on the spot.

Each check runs in processes of their own, which a device's driver may end, in a temporary
folder. This one watches: what it reports of memory is read from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from your_ai.doctor.findings import facts
from your_ai.doctor.machine import MachineInfo
from your_ai.memory.sample import in_gb
from your_ai.run import events
from your_ai.run.folder import RunFolder

MAX_S = 120.0
CHECK_S = 75.0  # of one check
HANGS_FROM_S, IDLE_SHARE = 20.0, 0.05  # of that time in which it computed: else it is slow
LEAST_S = 5.0  # no check is begun with less left
# Those that tell the most first: time may be up before the last.
CHECKS = ("counters", "gradients", "budget", "reload", "checkpoint", "speed")
LOOK_S = 0.01
RUN_STEPS, SAVE_EVERY, KILL_FROM = 60, 10, 15  # of the run that is killed
LONG_TOKENS, LONG_STEPS = 256, 2  # of the one that is held to a budget,
LONG_ROWS, LONG_ROWS_OF_A_GPU = 16, 64
BUDGET_SHARE = 0.25  # of what the fastest plan needs beside an empty process
WORDS = "the a river stone light house walks sees red small green old under over and or".split()
MARKS = {True: "ok", False: "FAIL", None: "-"}


@dataclass(frozen=True)
class ReportLine:
    """A check: whether it passed, None where there was no time for it, and what it measured."""

    check: str
    ok: bool | None
    measured: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


class Failed(Exception):
    """A check cannot be carried out, and the text says why."""


class OutOfTime(Exception):
    """A check took longer than there was: for so long it used the processor."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        times = psutil.Process(process.pid).cpu_times()
        self.cpu_s = times.user + times.system


def run(max_seconds: float = MAX_S) -> Iterator[ReportLine]:
    """The checks, one after the other; each is told when it is done.

    Everything is in a temporary folder, which is removed, also where the caller stops early.
    """
    until = time.monotonic() + max_seconds
    with tempfile.TemporaryDirectory(prefix="your_ai-selftest-") as place:
        folder = Path(place).resolve()
        made = line_of("model", folder, until, {})
        yield made
        if not made.ok:
            return
        for check in CHECKS:
            yield line_of(check, folder, until, made.figures)


def line_of(check: str, folder: Path, until: float, model: dict[str, Any]) -> ReportLine:
    """One check, with what is left of the time."""
    began = time.monotonic()
    left_s = until - began
    if left_s < LEAST_S:
        return ReportLine(check, None, "not done: the time was up")
    deadline = began + min(left_s, CHECK_S)
    try:
        if check in RUNS:
            outcome = RUNS[check](folder, model, deadline)
        else:
            outcome = asked(check, folder, deadline)
        ok, measured, figures = outcome["ok"], outcome["measured"], outcome.get("figures", {})
    except OutOfTime as late:
        given_s = time.monotonic() - began
        hung = given_s >= HANGS_FROM_S and late.cpu_s < IDLE_SHARE * given_s
        ok, figures = (False if hung else None), {}
        measured = f"{'hangs: ' if hung else ''}not done within {given_s:.0f} s"
        measured += f", of which its last process computed {late.cpu_s:.0f} s"
    except Failed as failure:
        ok, measured, figures = False, str(failure), {}
    return ReportLine(check, ok, measured, time.monotonic() - began, figures)


def failed(lines: Sequence[ReportLine]) -> bool:
    """Whether the self-test ends with exit status 1."""
    return any(line.ok is False for line in lines)


# Processes


@contextlib.contextmanager
def started(arguments: Sequence[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of Python, its output in NAME.out and NAME.err, killed when the block ends."""
    with open(folder / f"{name}.out", "wb") as out, open(folder / f"{name}.err", "wb") as err:
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
            process.kill()
            process.wait()


def done(arguments: Sequence[str], folder: Path, name: str, deadline: float) -> str:
    """What a process printed that ended well. Raises Failed, OutOfTime."""
    with started(arguments, folder, name) as process:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        if process.poll() is None:
            raise OutOfTime(process)
    if process.returncode != 0:
        raise Failed(how_it_ended(folder, name, process.returncode))
    return (folder / f"{name}.out").read_text(encoding="utf-8", errors="replace")


def how_it_ended(folder: Path, name: str, status: int) -> str:
    """In words, with the last that it said."""
    ended = f"ended with status {status}"
    if status < 0:
        ended = f"was killed by {signal.Signals(-status).name}"
    output = (folder / f"{name}.err").read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return f"its process {ended}" + (f": {lines[-1]}" if lines else "")


def asked(check: str, folder: Path, deadline: float) -> dict[str, Any]:
    """The outcome of one of `checks`."""
    output = done(["-m", "your_ai.doctor.checks", check, str(folder)], folder, check, deadline)
    try:
        return json.loads(output.splitlines()[-1])
    except (ValueError, IndexError) as error:
        raise Failed("its process ended without a result") from error


def command(name: str, settings: dict[str, Any]) -> list[str]:
    """Arguments of Python for a command of your_ai."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    return ["-m", "your_ai", name, *flags]


def write_rows(folder: Path, name: str, rows: int, words: int) -> Path:
    """A data folder of plain texts, always the same."""
    place = folder / name
    place.mkdir(exist_ok=True)
    draw = random.Random(rows)
    lines = [json.dumps({"text": " ".join(draw.choices(WORDS, k=words))}) for _ in range(rows)]
    (place / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return place


# A run that is killed, and one that is held to a budget


def survive(folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """A run killed with SIGKILL goes on to the adapter of one that was not."""
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
        raise Failed(f"before it was killed, {how_it_ended(folder, 'killed', process.returncode)}")
    at = steps_of(killed)
    done([*command("train", {"resume": "killed"}), *unsupervised], folder, "resumed", deadline)
    told = [record.event for record in events.tail(killed.events)[0]]
    start = [event.step for event in told if isinstance(event, events.Started)][-1]
    outcome = asked("adapters", folder, deadline)
    text = f"killed at step {at} of {RUN_STEPS}, went on from step {start}: {outcome['measured']}"
    return {**outcome, "ok": outcome["ok"] and start > 0, "measured": text}


def steps_of(run: RunFolder) -> int:
    """The last step that a run told of."""
    with contextlib.suppress(OSError):
        told = [record.event for record in events.tail(run.events)[0]]
        return max((event.step for event in told if isinstance(event, events.Step)), default=0)
    return 0


def hold_budget(folder: Path, model: dict[str, Any], deadline: float) -> dict[str, Any]:
    """A run that is given a quarter of what it would take stays below it, seen from outside."""
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
    fastest = [*command("plan", {**settings, "plan": "fused"}), "--json"]
    planned = json.loads(done(fastest, folder, "plan", deadline))
    empty = planned["components"]["python"]
    fused = max(planned["needed_bytes"], (planned["larger"] or planned)["needed_bytes"])
    budget_gb = round((empty + BUDGET_SHARE * (fused - empty)) / 1e9, 3)
    limited = {**settings, "run": "held", "max_steps": LONG_STEPS, "max_memory": budget_gb}
    most, looks = 0, 0
    with started([*command("train", limited), "--no-supervise"], folder, "held") as process:
        while process.poll() is None:
            if time.monotonic() > deadline:
                raise OutOfTime(process)
            most, looks = max(most, held_by(process.pid)), looks + 1
            time.sleep(LOOK_S)
    if process.returncode != 0:
        raise Failed(how_it_ended(folder, "held", process.returncode))
    told = [record.event for record in events.tail(RunFolder(folder / "runs" / "held").events)[0]]
    plans = [event.text for event in told if isinstance(event, events.Planned)]
    ratios = [event.ratio for event in told if isinstance(event, events.Measured)]
    figures = {"limit_bytes": int(1e9 * budget_gb), "peak_bytes": most, "looks": looks,
               "fused_bytes": fused, "empty_bytes": empty, "plans": plans,
               "measured_over_estimated": ratios}  # fmt: skip
    text = (
        f"--max-memory {budget_gb:g} held {in_gb(most)} at most, in {looks} looks; the fastest "
        f"plan takes {in_gb(fused)}, an empty process {in_gb(empty)}; planned {'; '.join(plans)}"
    )
    if ratios:  # the last is of the largest micro-batch
        text += f"; activations are {ratios[-1]:.2f} times what is estimated"
    return {"ok": 0 < most <= 1e9 * budget_gb, "measured": text, "figures": figures}


RUNS = {"checkpoint": survive, "budget": hold_budget}


def held_by(pid: int) -> int:
    """The most that a process has held, as the system counts it, or holds now; 0 for none.

    A lifetime maximum where the system keeps one: it misses nothing between two looks.
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
    except (OSError, KeyError, psutil.Error):  # it has just ended
        return 0


# Showing it


def text(line: ReportLine) -> str:
    """`ok    gradients   worst relative difference ...  (4.2 s)`"""
    return f"{MARKS[line.ok]:<5} {line.check:<11} {line.measured}  ({line.seconds:.1f} s)"


def report(lines: Sequence[ReportLine], machine: MachineInfo) -> str:
    """What can be pasted into an issue: the machine, and what was measured.

    It names no path and no user.
    """
    about = {name: text for name, text in facts(machine).items() if name != "store"}
    more = {"max buffer": machine.max_buffer_bytes, "wired limit": machine.wired_limit_bytes}
    about |= {name: in_gb(size) for name, size in more.items() if size}
    if machine.blas:
        about["BLAS"] = Path(machine.blas).parent.name
    counts = {mark: sum(line.ok is ok for line in lines) for ok, mark in MARKS.items()}
    passed = f"{counts['ok']} of {len(lines)} checks passed"
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
