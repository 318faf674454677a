"""Another process that locks a run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

from your_ai.run.folder import LOCK, RunFolder

# A signal just before a read that never ends would be noticed after it.
HOLD = """
import select, sys
from pathlib import Path
from your_ai.run.folder import RunFolder, locked

with locked(RunFolder(Path(sys.argv[1])), sys.argv[2]):
    print("held", flush=True)
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        pass
"""


@contextlib.contextmanager
def held(run: RunFolder, name: str = LOCK) -> Iterator[subprocess.Popen[bytes]]:
    """Let another process lock the run, until the block or its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.path), name],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
