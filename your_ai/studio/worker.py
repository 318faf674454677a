"""A process that loads MLX for the studio, and is asked in lines of JSON.

It ends when nobody has asked it for a while, or when its studio is gone, so that what it holds is
free for runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from typing import Any

from your_ai.errors import REPORT, RunError, UserError, first_line
from your_ai.gates.programs import end, python_module

IDLE_S = 120.0
LOOK_S = 1.0
TURN_S = 0.2  # between two looks of a question whether it still matters
LONG_S = 20.0  # work on what nobody asks for any more is ended after this time
LINE_BYTES = 1 << 24


class Superseded(UserError):
    """A question whose answer nobody waits for any more."""

    def __init__(self) -> None:
        super().__init__("another window came first; change something here to ask again")


class Worker:
    """The process, seen from the studio: started by the first question, and again if it died."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self.idle_s = idle_s
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()
        self.used_at = time.monotonic()
        self.last: object = None
        """The last question of `ask_last`."""
        self.topic, self.since = "", 0.0
        """What it works on for such a question, and since when."""
        self.is_over = False

    def ask(self, what: str, **given: Any) -> Any:
        """Return what one of `CALLS` answers. Raises its UserError or RunError."""
        with self.lock:
            return self.answer(what, given)

    def ask_last(self, what: str, topic: str, **given: Any) -> Any:
        """Ask as `ask` what is asked again and again, and of which only the last answer matters.

        Others that wait are given up: they raise Superseded, and do not hold threads of the server.
        topic: what the question is about; work on another one is ended if it takes long.
        """
        self.last = own = object()
        while not self.lock.acquire(timeout=TURN_S):
            if self.last is not own:
                raise Superseded
            if self.topic not in ("", topic) and time.monotonic() - self.since > LONG_S:
                self.end_process()
        try:
            if self.last is not own:
                raise Superseded
            self.topic, self.since = topic, time.monotonic()
            return self.answer(what, given)
        except RunError:
            if self.last is not own:  # which ended the process
                raise Superseded from None
            raise
        finally:
            self.topic = ""
            self.lock.release()

    def answer(self, what: str, given: dict[str, Any]) -> Any:
        if self.is_over:
            raise RunError("the studio has ended; start it again: your_ai studio")
        process = self.running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([what, given]).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(LINE_BYTES)
        except OSError:
            line = b""
        self.used_at = time.monotonic()
        if not line.endswith(b"\n"):
            raise RunError(f"the process for {what} ended; there may be too little memory")
        kind, answer = json.loads(line)
        if kind != "answer":
            raise (UserError if kind == "user" else RunError)(answer)
        return answer

    def running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                python_module("your_ai.studio.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            threading.Thread(target=self.rest, args=(self.process,), daemon=True).start()
        return self.process

    def rest(self, process: subprocess.Popen[bytes]) -> None:
        """End the process when it has been idle."""
        while process.poll() is None:
            time.sleep(LOOK_S)
            if time.monotonic() - self.used_at > self.idle_s and self.lock.acquire(blocking=False):
                try:
                    end(process)
                finally:
                    self.lock.release()

    def end(self) -> None:
        self.is_over = True
        self.end_process()

    def end_process(self) -> None:
        if self.process is not None:
            end(self.process)


# The functions that it can be asked for, and the module of each: loaded when it is asked for
CALLS = {
    **dict.fromkeys(("plan", "start", "resume", "models"), "run_calls"),
    **dict.fromkeys(("look", "leave_out"), "data_calls"),
    **dict.fromkeys(("begin_answer", "more_of_answer"), "try_calls"),
    "draw": "board_calls",
}


def main() -> None:
    """Answer questions until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin.buffer:
        what, given = json.loads(line)
        try:
            module = import_module(f"your_ai.studio.{CALLS[what]}")
            found = ["answer", getattr(module, what)(**given)]
        except UserError as error:
            found = ["user", str(error)]
        except RunError as error:
            found = ["run", str(error)]
        except (Exception, MemoryError) as error:
            found = ["run", f"{type(error).__name__}: {first_line(error)}; {REPORT}"]
        answers.write(json.dumps(found).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
