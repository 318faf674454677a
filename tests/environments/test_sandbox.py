from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from your_ai.environments import sandbox
from your_ai.environments.sandbox import (
    KINDS,
    Sandbox,
    choose_sandbox,
    fault_of_sandbox,
    in_seatbelt,
    seatbelt_profile,
    unshut,
)
from your_ai.errors import UserError


@pytest.fixture(scope="module")
def shut() -> Sandbox:
    """The sandbox of this computer."""
    try:
        return choose_sandbox(20.0, 512, 1000, trust_code=False)
    except UserError as error:
        pytest.skip(str(error))


def test_code_prints_and_computes(shut):
    assert shut.python("import math\nprint(math.factorial(5))") == "120\n"


def test_an_error_is_shown(shut):
    assert shut.python("1 / 0").splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_packages_of_this_python_can_be_used(shut):
    assert shut.python("import numpy\nprint(numpy.ones((9, 9)).dot(numpy.ones(9)).sum())") == (
        "81.0\n"
    )


def test_each_call_has_an_empty_folder_to_write_to(shut):
    code = "import os; open('a', 'w').write('x'); print(os.listdir(), open('a').read())"
    assert shut.python(code) == shut.python(code) == "['a'] x\n"


def test_text_of_any_language_passes(shut):
    assert shut.python("print('ä 漢 \U0001f600', input.__name__)") == "ä 漢 \U0001f600 input\n"


@pytest.mark.parametrize("code", ["print(1)\0", f"print({'1' * 200_000})"])
def test_what_is_no_code_is_an_error(shut, code):
    with pytest.raises(ValueError, match=r"^the code is longer than 100,000 bytes, or has"):
        shut.python(code)


# Hostile code


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("import os; os._exit(3)", ""),
        ("import ctypes; ctypes.string_at(0)", f"[ended by signal {signal.SIGSEGV.value}]"),
        ("import os; os.kill(os.getpid(), 9)", f"[ended by signal {signal.SIGKILL.value}]"),
        ("bytearray(10**9)", "MemoryError"),
        ("import os\nwhile True: os.fork()", "BlockingIOError: "),
        ("import subprocess; subprocess.run(['true'])", "BlockingIOError: "),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("def f(): f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("open('a', 'wb').write(bytes(80_000_000))", "OSError: "),
        ("for n in range(10**6): open(str(n), 'w').close()", "No space left on device: '"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "Network is unreachable"),
        ("import socket; socket.create_connection(('1.1.1.1', 53))", "Network is unreachable"),
        ("open('/usr/written', 'w')", "Read-only file system: '/usr/written'"),
        ("import os; print(os.listdir('/proc'))", "No such file or directory: '/proc'"),
        (
            "import os; os.memfd_create('more')",
            "PermissionError: [Errno 1] Operation not permitted",
        ),
        (
            "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
            "print(c.shmget(0, 1 << 30, 0o1600), ctypes.get_errno())",
            "-1 1",
        ),
        ("import os; os.setuid(0)", "PermissionError: [Errno 1] Operation not permitted"),
        ("import os; os.mkdir('/a')", "Read-only file system: '/a'"),
        ("import os; print(sorted(os.environ)[:1], len(os.environ) < 9)", "['HOME'] True"),
    ],
)
def test_hostile_code_harms_nothing(shut, code, end):
    last = (shut.python(code).splitlines() or [""])[-1]
    assert end in last, last
    assert bool(end) == bool(last)


def test_all_that_is_printed_is_never_kept(shut):
    start = time.monotonic()
    before = psutil.Process().memory_info().rss
    output = shut.python("while True: print('x' * 10**6)")
    assert 1000 < len(output) < 100_000
    assert psutil.Process().memory_info().rss < before + 50e6
    assert time.monotonic() - start < 10


def test_files_outside_survive_and_cannot_be_seen(shut, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    code = f"""
import os, shutil
print(os.path.exists({str(kept)!r}))
shutil.rmtree({str(tmp_path)!r}, ignore_errors=True)
"""
    assert shut.python(code) == "False\n"
    assert kept.read_text() == "kept"


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(99)",
        "import os, time; os.close(1); os.close(2); time.sleep(99)",
        "import signal, time\nfor n in range(1, 65):\n try: signal.signal(n, signal.SIG_IGN)\n"
        " except Exception: pass\ntime.sleep(99)",
        "import os, time; os.setsid(); time.sleep(99)",
    ],
)
def test_endless_code_ends_with_all_its_processes(shut, code):
    brief = Sandbox(shut.kind, 0.5, 512, 1000)
    with pytest.raises(TimeoutError, match=r"^took more than 0\.5 s$"):
        brief.python(code)
    assert not [each for each in psutil.Process().children(recursive=True) if is_code(each)]


def is_code(process: psutil.Process) -> bool:
    try:
        return "utf8" in process.cmdline()
    except psutil.Error:
        return False


def test_capabilities_cannot_be_had_again(shut):
    """A user namespace of its own does not let code write to what is mounted read-only."""
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.unshare(0x10000000 | 0x20000)
print(libc.mount(None, b"/usr", None, 0x20 | 0x1000, None))
try: open("/usr/x", "w")
except OSError as error: print(error.strerror)
"""
    assert shut.python(code) == "-1\nRead-only file system\n"


# The choice


def test_the_trial_finds_what_a_plain_process_can_do(tmp_path):
    fault = fault_of_sandbox(Sandbox(unshut, 20.0, 512, 1000))
    assert fault in ("the network can be used", "files can be written")


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        ("s/CLONE_NEWPID | CLONE_NEWNET/CLONE_NEWPID/", "the network can be used"),
        ("s/RLIMIT_NPROC, (1, 1)/RLIMIT_NPROC, (99, 99)/", "processes can be started"),
        ("s/    deny_calls()/    pass/", "memory can be had beside its limit"),
    ],
)
def test_the_trial_finds_each_hole(shut, monkeypatch, tmp_path, damage, fault):
    if shut.kind is not KINDS["namespaces"]:
        pytest.skip("no namespaces here")
    _, old, new, _ = damage.split("/")
    text = Path(sandbox.namespaces.__file__).read_text()
    assert old in text
    damaged = tmp_path / "damaged.py"
    damaged.write_text(text.replace(old, new))
    monkeypatch.setattr(sandbox.namespaces, "__file__", str(damaged))
    assert fault_of_sandbox(Sandbox(shut.kind, 20.0, 512, 1000)) == fault


def test_without_a_sandbox_code_is_refused_unless_it_is_trusted(monkeypatch):
    monkeypatch.setattr(sandbox, "KINDS", {"none": lambda folder: ["/no/program"]})
    text = (
        "--tools python: this computer has no sandbox for a model's code (none: [Errno 2] No such "
        "file or directory: '/no/program'); --trust-code runs it without one"
    )
    with pytest.raises(UserError, match=f"^{re.escape(text)}$"):
        choose_sandbox(20.0, 512, 1000, trust_code=False)
    trusted = choose_sandbox(20.0, 512, 1000, trust_code=True)
    assert trusted.python("print(1 + 1)") == "2\n"


def test_the_command_for_a_mac_denies_all_but_what_is_needed(monkeypatch):
    """It was never run: there is no Mac here."""
    monkeypatch.setenv("HOME", "/Users/Ä")
    program, flag, profile = in_seatbelt("/tmp/own")
    assert (program, flag) == ("/usr/bin/sandbox-exec", "-p")
    rules = profile.splitlines()
    assert rules[:2] == ["(version 1)", "(deny default)"]
    assert not [rule for rule in rules if "network" in rule or "fork" in rule or "mach" in rule]
    denied = rules.index('(deny file-read-data (subpath "/Users/Ä"))')
    assert rules.index("(allow file-read*)") < denied < rules.index(own_files(rules))
    writes = [rule for rule in rules if "(allow file-write" in rule]
    assert writes == [
        '(allow file-write* (subpath "/tmp/own"))',
        '(allow file-write-data (literal "/dev/null"))',
    ]
    assert profile == seatbelt_profile("/tmp/own")


def own_files(rules: list[str]) -> str:
    return next(rule for rule in rules if rule.startswith("(allow file-read* (subpath"))
