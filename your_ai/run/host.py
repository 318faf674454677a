"""The computer that a run is on: power, heat, sleep, notifications, and the state of a process.

All calls of programs of macOS and Linux desktops are here. Each has a short timeout and none
fails: a program that is missing, hangs, fails or prints something else gives None or does nothing.
Nothing here has run on a Mac; tests use recorded output. Memory gauges are in memory.probe.
"""

from __future__ import annotations

import contextlib
import html
import os
import re
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from your_ai.gates.programs import begun, end
from your_ai.gates.text import printable, shortened

SYSTEM = sys.platform  # tests replace it
COMMAND_S = 3.0  # timeout of a program
END_S = 1.0  # wait for a program that was killed
OUTPUT_BYTES = 1 << 16  # a program that prints more is not the one that is meant
WATCHDOG = "AGX_RELAX_CDM_CTXSTORE_TIMEOUT"
TEXT_CHARACTERS = 200  # of a notification

PowerSource = Literal["mains", "battery", "UPS"]
Thermal = Literal["nominal", "fair", "serious", "critical"]
ProcessState = Literal["running", "stopped", "debugged"]

SOURCES: dict[str, PowerSource] = {"AC": "mains", "Battery": "battery", "UPS": "UPS"}
# Levels of com.apple.system.thermalpressurelevel: nominal, moderate, heavy, trapping, sleeping.
LEVELS: tuple[Thermal, ...] = ("nominal", "fair", "serious", "critical", "critical")

# The texts are arguments, not a part of the program, because they have names from outside.
APPLESCRIPT = (
    *("-e", "on run argv"),
    *("-e", "display notification (item 2 of argv) with title (item 1 of argv)"),
    *("-e", "end run"),
)


@dataclass(frozen=True, kw_only=True)
class HostState:
    """Power and heat of the computer. None means unknown."""

    source: PowerSource | None = None
    percent: int | None = None
    """Charge of the battery; None also if there is none."""
    thermal: Thermal | None = None
    """Thermal pressure, in Apple's words for apps."""


def is_mac() -> bool:
    return SYSTEM == "darwin"


def read_state() -> HostState:
    """Read power and heat; unknown on other systems than macOS."""
    if not is_mac():
        return HostState()
    source, percent = power_in(output_of("pmset", "-g", "batt"))
    thermal = thermal_in(output_of("notifyutil", "-g", "com.apple.system.thermalpressurelevel"))
    return HostState(
        source=source,
        percent=percent,
        thermal=thermal or speed_limit_in(output_of("pmset", "-g", "therm")),
    )


def power_in(text: str) -> tuple[PowerSource | None, int | None]:
    """The power source and the charge in percent, from the output of `pmset -g batt`."""
    source = re.search(r"^Now drawing from '(AC|Battery|UPS) Power'", text, re.M)
    if source is None:
        return None, None
    batteries = re.findall(r"^ *-(.*?)\s(\d{1,3})%;", text, re.M)
    own = [charge for name, charge in batteries if name.startswith("InternalBattery")]
    charges = [int(charge) for charge in (own or [charge for _, charge in batteries])]
    percent = charges[0] if charges and charges[0] <= 100 else None
    return SOURCES[source[1]], percent


def thermal_in(text: str) -> Thermal | None:
    """The thermal pressure, from the output of `notifyutil -g`: the key and its value."""
    found = re.fullmatch(r"\S+ (\d{1,2})\s*", text)
    return LEVELS[int(found[1])] if found and int(found[1]) < len(LEVELS) else None


def speed_limit_in(text: str) -> Thermal | None:
    """The thermal pressure, from the output of `pmset -g therm`; less exact than `thermal_in`."""
    limits = [int(n) for n in re.findall(r"CPU_(?:Speed|Scheduler)_Limit\s*=\s*(\d{1,3})\b", text)]
    if any(limit < 100 for limit in limits):
        return "serious"
    is_nominal = limits or "No thermal warning level has been recorded" in text
    return "nominal" if is_nominal else None


@contextlib.contextmanager
def kept_awake(pid: int, wanted: bool = True) -> Iterator[None]:
    """Keep a Mac awake until the block or the process `pid` ends, whichever is first.

    caffeinate watches the process, so that it ends even if this process is killed. -i prevents
    sleep for lack of input, -s all sleep while on mains power.
    """
    process = None
    if wanted and is_mac():
        with contextlib.suppress(OSError):
            process = begun("caffeinate", "-is", "-w", str(pid))
    try:
        yield
    finally:
        if process is not None:
            end(process, END_S)


def relax_gpu_watchdog() -> None:
    """On a Mac, let this process and its children use the GPU for long, unless the user chose.

    Call it before MLX is loaded. docs/long-runs.md has the reason.
    """
    if is_mac():
        os.environ.setdefault(WATCHDOG, "1")


def show_notification(title: str, text: str) -> None:
    """Show a notification, if the system can. Any texts are safe."""
    title, text = (printable(shortened(t, TEXT_CHARACTERS), one_line=True) for t in (title, text))
    if is_mac():
        output_of("osascript", *APPLESCRIPT, "--", title, text)
    elif shutil.which("notify-send"):
        # The text may have markup and escape sequences; the title may not.
        plain = html.escape(text).replace("\\", "\\\\")
        output_of("notify-send", "--app-name=your_ai", "--", title, plain)


def process_state(pid: int) -> ProcessState | None:
    """The state of a process: stopped by a signal, debugged, or running; None if unknown."""
    import psutil  # seldom needed

    try:
        status = psutil.Process(pid).status()
    except Exception:  # any kind: it has ended, or a system call fails in unknown ways
        return None
    if status == psutil.STATUS_TRACING_STOP:
        return "debugged"
    if status != psutil.STATUS_STOPPED:
        return "running"
    # On macOS the letter X of ps means traced.
    traced = is_mac() and "X" in output_of("ps", "-o", "stat=", "-p", str(pid))
    return "debugged" if traced else "stopped"


def output_of(*command: str) -> str:
    """The output of a program; an empty text if it fails, hangs, or prints too much."""
    deadline, found = time.monotonic() + COMMAND_S, bytearray()
    try:
        process = begun(*command, stdout=subprocess.PIPE)
    except (OSError, ValueError):  # ValueError: a text with a NUL
        return ""
    assert process.stdout is not None
    try:
        with selectors.DefaultSelector() as ready, process.stdout as output:
            ready.register(output, selectors.EVENT_READ)
            while len(found) < OUTPUT_BYTES:
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    return ""
                part = os.read(output.fileno(), OUTPUT_BYTES)
                if not part:
                    break
                found += part
        status = process.wait(max(0.0, deadline - time.monotonic()))
    except (OSError, subprocess.TimeoutExpired):
        return ""
    finally:
        end(process, END_S)
    is_good = status == 0 and len(found) < OUTPUT_BYTES
    return found.decode("utf-8", errors="replace") if is_good else ""
