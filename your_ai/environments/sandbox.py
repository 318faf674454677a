"""The tool `python`: run code that a model wrote, in a process that can harm nothing.

The process has no network, can read no file of the home folder, can write only to an empty folder
that is removed, can start no other process or thread, and has limits of time, memory and output.
A kind of sandbox is chosen by a trial of just that (`choose_sandbox`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from your_ai.environments import namespaces
from your_ai.environments.attempts import kill_tree
from your_ai.environments.protocol import MB
from your_ai.errors import UserError
from your_ai.gates.text import shown

FOLDER_MB = 64
CODE_BYTES = 100_000  # less than Linux allows for an argument of a program
GRACE_S = 0.5  # to end after its output has ended
PROBE_S = 20.0
SYSTEM_FILES = "/usr /bin /sbin /lib /lib32 /lib64 /etc/ld.so.cache /etc/alternatives".split()


def visible_files() -> list[tuple[str, str]]:
    """The system's programs and this Python: where each is, and where the code finds it."""
    program = os.path.realpath(sys.executable)
    own = [sys.prefix, sys.exec_prefix, sys.base_prefix, os.path.dirname(os.path.dirname(program))]
    kept = [path for path in (*SYSTEM_FILES, *own) if not home().is_relative_to(path)]
    found = [(path if os.path.islink(path) else os.path.realpath(path), path) for path in kept]
    return list(dict.fromkeys((*found, *((source, source) for source, _ in found))))


def home() -> Path:
    """The home folder. Where a user has none, a path that does not exist."""
    return Path(os.path.expanduser("~"))


def in_namespaces(folder: str) -> list[str]:
    """The beginning of a command whose rest runs in namespaces (Linux)."""
    files = json.dumps(visible_files())
    return [sys.executable, "-I", "-S", str(namespaces.__file__), files, str(FOLDER_MB)]


def in_seatbelt(folder: str) -> list[str]:
    """The beginning of a command whose rest runs in macOS's sandbox."""
    return ["/usr/bin/sandbox-exec", "-p", seatbelt_profile(folder)]


def seatbelt_profile(folder: str) -> str:
    """Rules of macOS's sandbox, of which the last that fits counts. Starting processes, the
    network and all services are denied like everything else that is not allowed."""

    def paths(names: list[str]) -> str:
        # JSON's strings are read as Scheme's, as long as they are not escaped
        quoted = (json.dumps(os.path.realpath(name), ensure_ascii=False) for name in names)
        return " ".join(f"(subpath {name})" for name in quoted)

    own = paths([target for _, target in visible_files() if target not in SYSTEM_FILES])
    return f"""(version 1)
(deny default)
(allow process-exec)
(allow process-info* (target self))
(allow signal (target self))
(allow sysctl-read)
(allow file-read*)
(deny file-read-data {paths([str(home())])})
(allow file-read* {own} {paths([folder])})
(allow file-write* {paths([folder])})
(allow file-write-data (literal "/dev/null"))
"""


def unshut(folder: str) -> list[str]:
    """The beginning of a command whose rest runs as it is."""
    return []


KINDS: Mapping[str, Callable[[str], list[str]]] = {
    "namespaces": in_namespaces,
    "sandbox-exec": in_seatbelt,
}


@dataclass(frozen=True)
class Sandbox:
    """A way to run code, and its limits."""

    kind: Callable[[str], list[str]]
    timeout_s: float
    """Of wall time, and of the processor's time."""
    memory_mb: int
    """Of address space; a Mac has no such limit, and the pool watches its memory."""
    output_characters: int

    def python(self, code: str) -> str:
        """Run Python code, and return what it prints and its error if it has one.

        Each call starts anew in an empty folder, without network, other processes or threads.

        Args:
            code: The program. Print what you want to see.
        """
        output, status = self.run(code)
        ended = f"\n[ended by signal {status - 128}]" if status > 128 else ""
        return output + ended

    def run(self, code: str, *arguments: str) -> tuple[str, int]:
        """The output of code, and its exit status (128 + a signal's number).

        At a few characters more than `output_characters` it is ended. Raises TimeoutError, and
        ValueError for what is no code, OSError if it cannot be started.
        """
        if "\0" in code or len(code.encode("utf-8", "replace")) > CODE_BYTES:
            raise ValueError(f"the code is longer than {CODE_BYTES:,} bytes, or has a null byte")
        text = code.encode("utf-8", "replace").decode()
        program = [sys.executable, "-I", "-B", "-X", "utf8", "-c", text, *arguments]
        end = time.monotonic() + self.timeout_s
        with tempfile.TemporaryDirectory(prefix="code-") as folder:
            process = subprocess.Popen(
                [*self.kind(folder), *program],
                stdin=subprocess.PIPE,  # its end tells namespaces to end
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**namespaces.ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
                preexec_fn=self.limit,
            )
            try:
                output = b"".join(read_until(process, end, 4 * self.output_characters))
            except TimeoutError:
                raise TimeoutError(f"took more than {self.timeout_s:g} s") from None
            finally:
                stop(process)
        status = process.returncode
        return output.decode(errors="replace"), 128 - status if status < 0 else status

    def limit(self) -> None:
        """Limit this process and those that it starts."""
        seconds = int(self.timeout_s) + 1
        for name, most in (
            (resource.RLIMIT_CPU, seconds),
            (resource.RLIMIT_AS, self.memory_mb * MB),
            (resource.RLIMIT_FSIZE, FOLDER_MB * MB),
            (resource.RLIMIT_CORE, 0),
        ):
            with contextlib.suppress(ValueError, OSError):  # a lower one holds already
                resource.setrlimit(name, (most, most))


def read_until(process: subprocess.Popen[bytes], end: float, most: int) -> Iterator[bytes]:
    """The output of a process until it ends or there are more than `most` bytes.

    Raises TimeoutError at the time `end`.
    """
    assert process.stdout is not None
    while most >= 0:
        left_s = end - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            return
        most -= len(part)
        yield part


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid, except_for=0)
        process.wait()


PROBE = """
import os, socket, sys
port, kept, private = sys.argv[1:]
open("own", "w").write("x" * 1000)
def fault(name, act):
    try: act()
    except Exception: return
    print(name)
fault("the network can be used", lambda: socket.create_connection(("127.0.0.1", port), 2))
fault("files can be written", lambda: open(kept, "w"))
fault("files can be removed", lambda: os.remove(kept))
fault("files of the home folder can be read", lambda: open(private).read(1))
fault("processes can be started", os.fork)
fault("memory can be had beside its limit", lambda: os.memfd_create("own"))
print("done")
"""


def fault_of_sandbox(sandbox: Sandbox) -> str | None:
    """Try what code must not do. Say what of it is possible, or why code cannot run."""
    files = home().iterdir() if os.access(home(), os.R_OK) else iter(())
    readable = (str(path) for path in files if path.is_file() and os.access(path, os.R_OK))
    private = next(readable, "/nonexistent")
    with tempfile.TemporaryDirectory() as outside, socket.create_server(("127.0.0.1", 0)) as server:
        kept = Path(outside, "kept")
        kept.write_text("kept")
        try:
            port = str(server.getsockname()[1])
            output, _ = sandbox.run(PROBE, port, str(kept), private)
        except OSError as error:  # TimeoutError too
            return shown(str(error))
        if not kept.exists() or kept.read_text() != "kept":
            return "files can be written"
    lines = output.strip().splitlines() or ["it ended without output"]
    return None if lines == ["done"] else shown(lines[0] if lines[-1] == "done" else lines[-1])


def choose_sandbox(
    timeout_s: float, memory_mb: int, output_characters: int, trust_code: bool
) -> Sandbox:
    """The first kind of sandbox that works here, or none with `trust_code`. Raises UserError."""
    faults = []
    for name, kind in KINDS.items():
        fault = fault_of_sandbox(Sandbox(kind, PROBE_S, memory_mb, output_characters))
        if fault is None:
            return Sandbox(kind, timeout_s, memory_mb, output_characters)
        faults.append(f"{name}: {fault}")
    if trust_code:
        return Sandbox(unshut, timeout_s, memory_mb, output_characters)
    raise UserError(
        f"--tools python: this computer has no sandbox for a model's code ({'; '.join(faults)}); "
        "--trust-code runs it without one"
    )
