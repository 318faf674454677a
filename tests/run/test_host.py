"""Programs of the system, with their recorded output and with everything else they may do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import programs
from your_ai.run import host
from your_ai.run.host import HostState, power_in, speed_limit_in, thermal_in

ON_BATTERY = (
    "Now drawing from 'Battery Power'\n"
    " -InternalBattery-0 (id=21758051)\t63%; discharging; 3:15 remaining present: true\n"
)
ON_MAINS = (
    "Now drawing from 'AC Power'\n"
    " -InternalBattery-0 (id=21758051)\t92%; AC attached; not charging present: true\n"
)
NO_THROTTLING = """\
Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
THROTTLED = """\
2026-08-20 05:08:37 -0700 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 12
\tCPU_Speed_Limit \t= 62
"""


@pytest.fixture
def program(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A function that puts a shell script on an otherwise usual PATH."""
    place = own_folder / "bin"
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")

    def write(name: str, script: str) -> None:
        programs.script(place, name, script)

    return write


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SYSTEM", "darwin")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (ON_BATTERY, ("battery", 63)),
        (ON_MAINS, ("mains", 92)),
        (ON_BATTERY.replace("3:15 remaining", "(no estimate)"), ("battery", 63)),
        ("Now drawing from 'AC Power'\n", ("mains", None)),  # a desktop
        (
            "Now drawing from 'UPS Power'\n -UPS-1500VA (id=1234567)\t87%; discharging\n"
            " -InternalBattery-0 (id=1)\t40%; charging; 1:00 remaining present: true\n",
            ("UPS", 40),
        ),
        ("Now drawing from 'UPS Power'\n -Back-UPS ES 700 (id=1)\t87%; discharging\n", ("UPS", 87)),
        ("Now drawing from 'Battery Power'\n -InternalBattery-0\t163%; x\n", ("battery", None)),
        ("Now drawing from 'Solar Power'\n", (None, None)),
        (" -InternalBattery-0 (id=1)\t63%; discharging\n", (None, None)),
        ("\x1b[2J\ufffd", (None, None)),
        ("", (None, None)),
    ],
)
def test_power_source_and_charge(output, expected):
    assert power_in(output) == expected


KEY = "com.apple.system.thermalpressurelevel"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (f"{KEY} 0\n", "nominal"), (f"{KEY} 1\n", "fair"), (f"{KEY} 2\n", "serious"),
        (f"{KEY} 3\n", "critical"), (f"{KEY} 4\n", "critical"), (f"{KEY} 5\n", None),
        (f"{KEY} 18446744073709551615\n", None), (f"{KEY}: Failed with code 9\n", None), ("", None),
    ],
)  # fmt: skip
def test_thermal_pressure_level(output, expected):
    assert thermal_in(output) == expected


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (NO_THROTTLING, "nominal"),
        (THROTTLED, "serious"),
        (THROTTLED.replace("62", "100"), "nominal"),
        (THROTTLED.replace("62", "many"), "nominal"),  # the scheduler's limit remains
        ("Usage: pmset <options>\n", None),
        ("", None),
    ],
)
def test_thermal_pressure_by_the_speed_limit(output, expected):
    assert speed_limit_in(output) == expected


def test_state_of_a_mac_is_read_from_its_programs(program, mac):
    program("pmset", f"test \"$*\" = '-g batt' && cat <<'END'\n{ON_BATTERY}END")
    program("notifyutil", f"test \"$*\" = '-g {KEY}' && echo {KEY} 2")
    assert host.read_state() == HostState(source="battery", percent=63, thermal="serious")


def test_speed_limit_is_read_where_there_is_no_level(program, mac):
    program("notifyutil", "exit 1")
    program("pmset", f"test \"$*\" = '-g therm' && cat <<'END'\n{THROTTLED}END")
    assert host.read_state() == HostState(thermal="serious")


def test_state_is_unknown_without_the_programs_and_on_other_systems(mac, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert host.read_state() == HostState()
    monkeypatch.setattr(host, "SYSTEM", "linux")
    monkeypatch.setattr(host, "output_of", lambda *command: pytest.fail("ran a program"))
    assert host.read_state() == HostState()


@pytest.mark.parametrize(
    "script",
    [
        "echo partial; exit 3",
        "echo partial; exec sleep 60",
        "sleep 2 & echo partial",  # its child keeps the pipe open
        "exec yes",
        "kill -9 $$",
        "exec >&-; exec sleep 60",
    ],
)
def test_program_that_fails_or_hangs_has_no_output(program, monkeypatch, script):
    monkeypatch.setattr(host, "COMMAND_S", 0.3)
    program("odd", script)
    began = time.monotonic()
    assert host.output_of("odd") == ""
    assert time.monotonic() - began < 5
    program("odd", "printf 'caf\\351'")
    monkeypatch.setattr(host, "COMMAND_S", 5.0)
    assert host.output_of("odd") == "caf\ufffd"


def test_text_with_a_nul_cannot_be_an_argument():
    assert host.output_of("echo", "a\0b") == ""


def test_hostile_names_are_only_text_of_a_notification(program, mac):
    """AppleScript gets them as arguments: no name can end a string and start a command."""
    program("osascript", "for each; do printf '%s\\n' \"$each\"; done > arguments")
    name = 'a" with title "b\n do shell script "touch owned" -- \x1b[2J\0'
    host.show_notification("-e", name)
    *script, separator, title, text = Path("arguments").read_text().splitlines()
    assert script == list(host.APPLESCRIPT)
    assert (separator, title) == ("--", "-e")
    assert text == 'a" with title "b\u240a do shell script "touch owned" -- \u241b[2J\u2400'


def test_notification_on_linux_has_no_markup(program, monkeypatch):
    monkeypatch.setattr(host, "SYSTEM", "linux")
    program("notify-send", "printf '%s\\n' \"$@\" > arguments")
    host.show_notification("your_ai", "Run <b>x</b> & \\n" + "long " * 99)
    *_, separator, title, text = Path("arguments").read_text().splitlines()
    assert (separator, title) == ("--", "your_ai")
    assert text.startswith("Run &lt;b&gt;x&lt;/b&gt; &amp; \\\\nlong")
    assert len(text) < 250


def test_notification_without_a_program_does_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    for system in ("darwin", "linux"):
        monkeypatch.setattr(host, "SYSTEM", system)
        host.show_notification("your_ai", "text")


def test_gpu_watchdog_is_relaxed_on_a_mac_unless_the_user_chose(monkeypatch):
    monkeypatch.delenv(host.WATCHDOG, raising=False)
    monkeypatch.setattr(host, "SYSTEM", "linux")
    host.relax_gpu_watchdog()
    assert host.WATCHDOG not in os.environ
    monkeypatch.setattr(host, "SYSTEM", "darwin")
    monkeypatch.setenv(host.WATCHDOG, "0")
    host.relax_gpu_watchdog()
    assert os.environ[host.WATCHDOG] == "0"
    monkeypatch.delenv(host.WATCHDOG)
    host.relax_gpu_watchdog()
    assert os.environ.pop(host.WATCHDOG) == "1"


@pytest.mark.parametrize(("system", "wanted"), [("linux", True), ("darwin", False)])
def test_nothing_is_kept_awake_elsewhere_or_if_not_wanted(program, monkeypatch, system, wanted):
    monkeypatch.setattr(host, "SYSTEM", system)
    program("caffeinate", "touch awake")
    with host.kept_awake(os.getpid(), wanted):
        time.sleep(0.2)
    assert not Path("awake").exists()


def test_mac_is_awake_until_the_block_ends(program, mac):
    program("caffeinate", 'echo "$*" > awake; exec sleep 60')
    with host.kept_awake(os.getpid()):
        while not (Path("awake").exists() and (awake := Path("awake").read_text())):
            time.sleep(0.01)
    assert awake == f"-is -w {os.getpid()}\n"


def test_missing_caffeinate_does_not_matter(mac, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with host.kept_awake(os.getpid()):
        pass


def test_state_of_a_process():
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        assert host.process_state(process.pid) == "running"
        process.send_signal(signal.SIGSTOP)
        while host.process_state(process.pid) == "running":
            time.sleep(0.01)
        assert host.process_state(process.pid) == "stopped"
        process.kill()
    assert host.process_state(process.pid) is None


def test_stopped_process_that_a_debugger_traces_on_a_mac(program, mac):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        program("ps", f'test "$*" = "-o stat= -p {process.pid}" && echo TX+')
        while host.process_state(process.pid) == "running":
            time.sleep(0.01)
        assert host.process_state(process.pid) == "debugged"
        process.kill()
