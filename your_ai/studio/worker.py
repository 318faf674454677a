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
LINE_BYTES = 1 << 24


class Worker:
    """The process, seen from the studio: started by the first question, and again if it died."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self.idle_s = idle_s
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()
        self.used_at = time.monotonic()

    def ask(self, what: str, **given: Any) -> Any:
        """Return what one of `calls` answers. Raises its UserError or RunError."""
        with self.lock:
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
        if self.process is not None:
            end(self.process)


<<<<<<< HEAD
# The functions that it can be asked for, and the module of each: loaded when it is asked for
CALLS = {
    **dict.fromkeys(("plan", "start", "resume", "models"), "run_calls"),
    **dict.fromkeys(("look", "leave_out"), "data_calls"),
    **dict.fromkeys(("begin_answer", "more_of_answer"), "try_calls"),
=======
# What it can be asked for


BEGUN_S = 0.5  # what is wrong at once is an error of the page, and later one of the run
PLANS = 16  # that are kept, to be made again for other limits


def plan(settings: dict[str, Any]) -> dict[str, Any]:
    """The plan of a run with these settings, as `your_ai plan --json`, and notes on it.

    What was read and measured for it is kept, so that one for another limit follows at once.
    """
    from your_ai.memory.budget import budget_of, run_limit
    from your_ai.nets.numerics import compute_dtype
    from your_ai.session import new_run
    from your_ai.training import preview

    notes: list[str] = []
    config = new_run.resolve(settings, None, on_note=notes.append)
    workload, noticed = workload_for(replace(config, max_memory=None))
    budget = budget_of(config, workload, compute_dtype(config.dtype), run_limit(config))
    return {**preview.as_json(budget), "notes": [*notes, *noticed]}


@lru_cache(PLANS)
def workload_for(config: TrainConfig) -> tuple[Workload, tuple[str, ...]]:
    """The measured work of a run, and notes on it."""
    from your_ai.training.plan_without_files import planned_run

    noticed: list[str] = []
    budget = planned_run(config, None, noticed.append, on_measure=lambda _: None)
    return budget.workload, tuple(noticed)


def start(settings: dict[str, Any]) -> str:
    """Start a run, which waits for the memory of those before it; return its name."""
    from your_ai.data.sources import checked_settings
    from your_ai.hub.find import find_model
    from your_ai.session import new_run

    resolved = checked_settings(new_run.resolve({"wait": True, **settings}, None), False)
    new_run.check_rewards(resolved)
    find_model(resolved.model)
    folder = new_run.create(resolved)
    new_run.wait_until_begun(new_run.start(folder, resolved, new=True), BEGUN_S)
    return folder.name


def resume(run: str, changes: dict[str, Any]) -> None:
    """Continue a run from its last checkpoint, as `start` begins one."""
    from your_ai.config import resumed
    from your_ai.run import folder as folders
    from your_ai.session import new_run
    from your_ai.session.finished import already_finished

    folder = folders.find(run)
    folders.check_resumable(folder)
    settings = resumed(folder.read_config(), {"wait": True, **changes})
    if done := already_finished(folder, settings):
        raise UserError(done)
    new_run.wait_until_begun(new_run.start(folder, settings, new=False), BEGUN_S)


def models() -> dict[str, Any]:
    """The models on this machine, and the known ones with their plans, the best first."""
    from your_ai.doctor.machine import read_machine
    from your_ai.doctor.model_list import WORDS, demo, of_local
    from your_ai.doctor.recommend import Recommendation, recommend, room_here
    from your_ai.hub.local import local_models
    from your_ai.hub.registry import known

    room = room_here(read_machine())
    here = [of_local(local, room) for local in (demo(), *local_models())]
    repos = {row.repo for row in here if row.fault is None}
    plans: dict[str, Recommendation] = {}  # the best first; with long rows there may be another
    for plan in recommend(room):
        plans.setdefault(plan.known.alias, plan)
    there = []
    for alias in dict.fromkeys([*plans, *known()]):
        model = known()[alias]
        if model.repo in repos:
            continue
        fitting = plans.get(alias)
        row = {"name": alias, "size_bytes": model.bytes_on_disk, "licence": model.licence}
        row |= {"fits": WORDS[""], "needed_bytes": None, "plan": ""} if fitting is None else {
            "fits": WORDS[fitting.tier], "needed_bytes": fitting.needed_bytes, "plan": fitting.plan
        }  # fmt: skip
        there.append(row)
    return {
        "here": [asdict(row) for row in here],
        "there": there,
        "limit_bytes": room.limit.limit_bytes,
    }


def look(**given: Any) -> Any:
    """Look at data for the page that shows it."""
    from your_ai.studio import data_calls

    return data_calls.look(**given)


def leave_out(**given: Any) -> Any:
    """Write data without some rows."""
    from your_ai.studio import data_calls

    return data_calls.leave_out(**given)


CALLS: dict[str, Callable[..., Any]] = {
    "look": look,
    "leave_out": leave_out,
    "plan": plan,
    "start": start,
    "resume": resume,
    "models": models,
>>>>>>> data51p
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
