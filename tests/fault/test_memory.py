"""Out-of-memory errors, leaks and kills: the run ends with the same result as without them."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

import your_ai
from tests.conftest import (
    chat,
    events_of,
    losses_of,
    resume,
    train,
    train_once,
    with_functions,
    write_rows,
    write_site,
)
from tests.fault.processes import (
    PATIENCE_S,
    Told,
    call,
    final_files,
    leftovers,
    started,
    wait_until,
)
from your_ai.config import TrainConfig
from your_ai.errors import RunError
from your_ai.memory import plan, probe
from your_ai.memory.budget import LATER_BYTES, Budget
from your_ai.run import checkpoint, child, events, folder
from your_ai.run.folder import RUNS, RunFolder
from your_ai.run.stopping import Stop
from your_ai.training import optimizer, process
from your_ai.training import planned as planning
from your_ai.training import train as recipe

pytestmark = pytest.mark.memory

MB = 10**6
OUT_OF_MEMORY = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"
)
STEPS = 4
Place = Callable[[pytest.MonkeyPatch, Callable[[], None]], None]  # where a run fails
KINDS: list[tuple[type[Exception], str]] = [
    (RuntimeError, "[malloc] Unable to allocate 1234567 bytes."),
    (
        RuntimeError,
        "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum "
        "allowed buffer size of 8 bytes.",
    ),
    (RuntimeError, "[metal::malloc] Resource limit (499000) exceeded."),
    (MemoryError, "std::bad_alloc"),
    (MemoryError, ""),
]


class Failure:
    """Raises a new error at the given calls (counted from 1), or at every call if none is given."""

    def __init__(self, *calls: int, kind: type = RuntimeError, text: str = OUT_OF_MEMORY) -> None:
        self.calls, self.count = calls, 0
        self.kind, self.text = kind, text

    def __call__(self) -> None:
        self.count += 1
        if self.count in self.calls or self.calls == ():
            raise self.kind(self.text)


def fail_in_gradients(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    """Fail after the gradients of a micro-batch, if they are one graph before it is run."""
    prepare = recipe.prepare

    def prepared(*args: Any) -> Any:
        found = prepare(*args)

        def failing(gradients: Callable[..., Any] | None) -> Callable[..., Any] | None:
            def computed(*given: Any) -> Any:
                result = gradients(*given)
                fail()
                return result

            return None if gradients is None else computed

        engine = found.engine
        functions = {name: failing(getattr(engine, name)) for name in ("gradients", "by_block")}
        return with_functions(found, **functions)

    monkeypatch.setattr(recipe, "prepare", prepared)


def fail_at_synchronize(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
    """Fail after the update, when the weights have already changed."""
    synchronize = mx.synchronize

    def failing(*args: Any) -> None:
        synchronize(*args)
        fail()

    monkeypatch.setattr(recipe.mx, "synchronize", failing)


def fail_in(name: str, module: Any = recipe) -> Place:
    """Return a patch that fails before a function, by default of the recipe."""

    def patch(monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]) -> None:
        function = getattr(module, name)

        def failing(*args: Any) -> Any:
            fail()
            return function(*args)

        monkeypatch.setattr(module, name, failing)

    return patch


PLACES = pytest.mark.parametrize(
    "place", [fail_in_gradients, fail_at_synchronize], ids=["in evaluation", "late"]
)


@pytest.fixture
def planned(configure, data_folder, monkeypatch) -> Callable[..., Any]:
    """A config of a few steps with many possible plans that differ by little memory."""
    monkeypatch.setattr(plan, "NOTICEABLY", 0.9999)
    rows = [chat(f"Ask {i}", "Say" + " please" * i) for i in range(8)]
    write_rows(data_folder / "train.jsonl", rows)
    write_rows(data_folder / "valid.jsonl", [chat("Ask", "Yes")])
    return partial(configure, max_steps=STEPS, batch_size=8, save_every=1, keep=99, lora_layers=1)


@pytest.fixture
def quick(configure, data_folder) -> Callable[..., Any]:
    """A config of many short steps."""
    write_rows(data_folder / "train.jsonl", [chat(f"Ask {i}", "Yes") for i in range(8)])
    (data_folder / "valid.jsonl").unlink()
    return partial(configure, lora_layers=1)


@pytest.fixture
def undisturbed(planned) -> Callable[..., RunFolder]:
    """The run of some settings that nothing happens to."""
    return lambda **settings: train_once(planned(run="whole", **settings))


def train_until_done(run: RunFolder, stop: Stop | None = None) -> int:
    return process.train_until_done(run, run.read_config(), Stop() if stop is None else stop)


def disturbed(config: TrainConfig, *places: Place, fail: Callable[[], None]) -> RunFolder:
    """A run that ends well although its places fail."""
    run = folder.create(config)
    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            place(patch, fail)
        assert train_until_done(run) == child.DONE
    return run


def steps_of(run: RunFolder) -> list[int]:
    return [event.step for event in events_of(run, events.Step)]


def levels_of(run: RunFolder) -> list[int]:
    return [event.level for event in events_of(run, events.Planned)]


def actions_of(run: RunFolder, *kinds: str) -> list[events.Action]:
    """The actions that were not scheduled."""
    found = [a for a in events_of(run, events.Action) if not a.cause.startswith("every ")]
    return [action for action in found if not kinds or action.kind in kinds]


def adapter_of(run: RunFolder) -> dict[str, mx.array]:
    return mx.load(str(run.adapter / checkpoint.ADAPTERS))


def assert_close(run: RunFolder, other: RunFolder) -> None:
    ours, theirs = adapter_of(run), adapter_of(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert mx.allclose(array, theirs[name], rtol=1e-5, atol=1e-5).item(), name


# -- out-of-memory errors


@pytest.mark.parametrize(
    ("place", "step"),
    [(fail_in_gradients, 1), (fail_at_synchronize, 3), (fail_in_gradients, STEPS)],
    ids=["first", "late in the third", "last"],
)
def test_run_continues_under_the_next_smaller_plan(planned, undisturbed, place, step):
    whole = undisturbed()
    run = disturbed(planned(), place, fail=Failure(step))
    assert levels_of(run) == [0, 1]
    (action,) = actions_of(run)
    assert (action.step, action.kind) == (step - 1, "smaller_plan")  # the last step done
    assert "Insufficient Memory" in action.cause
    assert [event.step for event in events_of(run, events.Started)] == [0, step - 1]
    assert steps_of(run) == [1, 2, 3, 4]  # each step is saved, and none is done twice
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-5)
    assert_close(run, whole)


@PLACES
def test_run_continues_from_the_last_checkpoint(planned, undisturbed, place):
    whole = undisturbed()
    run = disturbed(planned(save_every=2), place, fail=Failure(4))
    assert [event.step for event in events_of(run, events.Started)] == [0, 2]
    assert steps_of(run) == [1, 2, 3, 3, 4]
    assert_close(run, whole)


@PLACES
def test_failed_step_leaves_no_trace(planned, undisturbed, monkeypatch, place):
    """Running the same plan again shows that only the checkpoint is used."""
    settings = {"plan": "staged", "batch_size": 1, "grad_accumulation": 4, "lora_dropout": 0.1}
    settings["max_steps"] = 3
    monkeypatch.setattr(plan, "NOTICEABLY", 0.0)  # no plan is smaller
    whole = undisturbed(**settings)
    failure = Failure(6 if place is fail_in_gradients else 2)
    run = disturbed(planned(**settings), place, fail=failure)
    assert len(actions_of(run)) == 1
    assert levels_of(run) == [0, 0]  # there is no smaller plan
    assert final_files(run) == final_files(whole)


@pytest.mark.parametrize("name", ["prepare", "show_test_rows", "save", "validate", "fill_prefix"])
def test_error_may_occur_anywhere_in_the_run(planned, undisturbed, name):
    whole = undisturbed(eval_every=2)
    run = disturbed(planned(eval_every=2), fail_in(name), fail=Failure(1))
    assert levels_of(run)[-1] == 1
    assert [action.kind for action in actions_of(run)] == ["smaller_plan"]
    assert_close(run, whole)


@pytest.mark.parametrize(
    ("operation", "inside"),
    [
        ("eval", "load"),
        ("allclose", "split"),
        ("allclose", "parts_of"),
        ("eval", "_agrees"),  # in the check of the head
        ("eval", "check_forward_pass"),
    ],
)
def test_error_may_occur_while_the_model_loads(planned, monkeypatch, operation, inside):
    """It must not count as an error of the model or the user, or as a reason for another engine."""
    run, failure = folder.create(planned(max_steps=2)), Failure(1)
    function = getattr(mx, operation)

    def failing(*args: Any, **options: Any) -> Any:
        if sys._getframe(1).f_code.co_name == inside:
            failure()
        return function(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(mx, operation, failing)
        assert train_until_done(run) == child.DONE
    assert failure.count > 1
    assert levels_of(run) == [0, 1]
    assert steps_of(run) == [1, 2]


def test_error_may_occur_while_a_checkpoint_is_written(planned, undisturbed):
    """It must not count as an error of the disk; partial files are removed."""
    whole = undisturbed()
    run = disturbed(planned(), fail_in("save_safetensors", mx), fail=Failure(6))
    assert [action.kind for action in actions_of(run)] == ["smaller_plan"]
    assert leftovers(run) == []
    assert_close(run, whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_cache": "memory"},
        {"plan": "staged", "spill": True},
        {"plan": "streamed", "prefix_cache": "disk"},
        {"packing": True},
        {"use_dora": True, "lora_dropout": 0.1, "grad_accumulation": 2, "batch_size": 4},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_other_state_of_the_run_is_continued(planned, undisturbed, settings):
    whole = undisturbed(**settings)
    run = disturbed(planned(**settings), fail_at_synchronize, fail=Failure(3))
    assert len(actions_of(run)) == 1
    assert steps_of(run) == [1, 2, 3, 4]
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-5)
    assert_close(run, whole)


def test_action_event_reports_the_freed_memory(planned, monkeypatch):
    """The bytes before are read when the plan fails, the bytes after once its model is freed."""
    held: list[mx.array] = []
    failure = Failure(3)

    def fail() -> None:
        held[:] = [mx.ones(100 * MB // 4)] if failure.count + 1 == 3 else []
        mx.eval(held)
        failure()

    free = process.allocator.free
    monkeypatch.setattr(process.allocator, "free", lambda **given: (held.clear(), free(**given)))
    run = disturbed(planned(), fail_in_gradients, fail=fail)
    (action,) = actions_of(run)
    assert action.before_bytes - action.after_bytes > 90 * MB


def test_errors_with_checkpoints_in_between_do_not_add_up(planned):
    """There is one error of each kind."""
    errors = dict(enumerate(KINDS, 1))

    def fail() -> None:
        kind, text = errors.pop(len(steps_of(RunFolder(RUNS / "r"))), (None, ""))
        if kind is not None:
            raise kind(text)

    run = disturbed(planned(max_steps=6), fail_at_synchronize, fail=fail)
    assert errors == {}
    assert len(KINDS) > process.MAX_OUT_OF_MEMORY
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    levels = levels_of(run)
    assert levels == sorted(levels)


def test_repeated_errors_under_the_smallest_plan_end_the_process(
    planned, undisturbed, monkeypatch, capfd
):
    run = folder.create(planned())
    with monkeypatch.context() as patch:
        failure = Failure()
        fail_at_synchronize(patch, lambda: failure() if steps_of(run) else None)
        assert train_until_done(run) == child.OUT_OF_MEMORY
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: runs/r: out of memory")
    assert failure.count == process.MAX_OUT_OF_MEMORY + 1
    assert steps_of(run) == [1]
    assert leftovers(run) == []
    assert not run.adapter.exists()
    path, faults = checkpoint.newest(run.checkpoints)
    assert (path, faults) == (run.checkpoints / "step-000001", [])
    assert train_until_done(run) == child.DONE  # now with enough memory
    assert_close(run, undisturbed())


def test_other_errors_do_not_cause_a_smaller_plan(planned, monkeypatch):
    run = folder.create(planned())
    with monkeypatch.context() as patch:
        fail_in_gradients(patch, Failure(2, text="[matmul] Shapes do not match."))
        with pytest.raises(RunError) as caught:
            train_until_done(run)
    assert "\n" not in str(caught.value)
    assert actions_of(run) == []
    assert levels_of(run) == [0]


def test_stop_signal_while_the_smaller_plan_loads_is_obeyed(planned, undisturbed, monkeypatch):
    """The run can be resumed later without losing a step."""
    whole = undisturbed()
    run, stop = folder.create(planned()), Stop()
    calls = itertools.count(1)

    def stopped() -> None:
        if next(calls) == 2:
            stop.received = signal.SIGTERM

    with monkeypatch.context() as patch:
        fail_in_gradients(patch, Failure(3))
        fail_in("prepare")(patch, stopped)
        assert train_until_done(run, stop) == 128 + signal.SIGTERM
    assert steps_of(run) == [1, 2]
    assert train_until_done(run) == child.DONE
    assert steps_of(run) == [1, 2, 3, 4]
    assert_close(run, whole)


def test_unsupervised_command_ends_with_one_line_of_error(planned, monkeypatch, capsys):
    """Training runs in this process, as in a debugger."""
    folder.create(planned(supervise=False))
    with monkeypatch.context() as patch:
        fail_in_gradients(patch, Failure())
        status, output, error = call(capsys, "train", "--resume", "r")
    assert status not in (0, 1)
    assert len(error.splitlines()) == 1
    assert "Traceback" not in output + error


GROWING = """
import dataclasses

from your_ai.training import process, train as recipe
from your_ai.memory import probe

prepare, calls = recipe.prepare, []
probe.process_bytes = lambda: 120_000_000 + 10_000_000 * (len(calls) > 2)


def prepared(*args):
    found = prepare(*args)
    gradients = found.engine.gradients

    def failing(*given):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("Insufficient Memory")
        return gradients(*given)

    engine = dataclasses.replace(found.engine, gradients=failing)
    return dataclasses.replace(found, built=dataclasses.replace(found.built, engine=engine))


recipe.prepare = prepared
"""


def test_growth_of_python_memory_does_not_end_the_run(planned, monkeypatch):
    """The smallest plan fitted at the start of the run, so it must not be refused later."""
    budgets: list[Budget] = []
    budget_of = planning.budget_of
    with monkeypatch.context() as patch:
        patch.setattr(
            planning, "budget_of", lambda *a, **k: budgets.append(budget_of(*a, **k)) or budgets[0]
        )
        whole = train(planned(run="whole"))
    process = dataclasses.replace(budgets[0].workload.process, python_bytes=120 * MB + LATER_BYTES)
    workload = dataclasses.replace(budgets[0].workload, process=process)
    least = min(option.needed_bytes for option in plan.options(workload))
    run = RunFolder(RUNS / "r")
    with started(planned(max_memory=(least + 3 * MB) / 1e9), "r", before=GROWING) as process:
        _, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (0, "")
    assert steps_of(run) == [1, 2, 3, 4]
    assert_close(run, whole)


# -- memory of the previous plan


@pytest.mark.parametrize("how", ["an error", "the governor"])
def test_old_model_is_freed_before_the_next_one_loads(planned, monkeypatch, how):
    models: list[weakref.ref] = []
    alive: list[list[bool]] = []
    active: list[int] = []
    prepare = recipe.prepare

    def prepared(*args: Any) -> Any:
        alive.append([reference() is not None for reference in models])
        active.append(mx.get_active_memory())
        found = prepare(*args)
        models.append(weakref.ref(found.model))
        return found

    gc.collect()
    run = folder.create(planned())
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "prepare", prepared)
        if how == "an error":
            fail_in_gradients(patch, Failure(3))
        else:
            ask_for_a_smaller_plan(patch, run, after=2)
        assert train_until_done(run) == child.DONE
    assert alive == [[], [False]]
    assert active[1] <= active[0]
    assert levels_of(run) == [0, 1]


def ask_for_a_smaller_plan(patch: pytest.MonkeyPatch, run: RunFolder, after: int) -> None:
    """Simulate critical memory pressure from step `after` until the plan changes."""
    read = probe.read

    def pressed() -> Any:
        high = len(steps_of(run)) >= after - 1 and len(levels_of(run)) == 1
        return dataclasses.replace(read(), pressure=4 if high else 1)

    patch.setattr(probe, "read", pressed)


def test_smaller_plan_of_the_governor_loses_no_step(planned, undisturbed, monkeypatch):
    whole = undisturbed()
    run = folder.create(planned(save_every=0))
    with monkeypatch.context() as patch:
        ask_for_a_smaller_plan(patch, run, after=2)
        assert train_until_done(run) == child.DONE
    assert actions_of(run)[-1].kind == "smaller_plan"
    assert steps_of(run) == [1, 2, 3, 4]
    assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-5)
    assert_close(run, whole)


# -- leaks

LEAKY = """
import sys

if {where!r} in sys.orig_argv:
    import mlx.core as mx

    from your_ai.training import optimizer

    kept, global_norm = [], optimizer.global_norm

    def leaking(grads):
        kept.append(mx.ones({size} // 4))
        mx.eval(kept[-1])
        return global_norm(grads)

    optimizer.global_norm = leaking
"""


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Makes each step leak a number of bytes, until the test is over."""
    kept: list[mx.array] = []
    global_norm = optimizer.global_norm

    def begin(size_bytes: int) -> None:
        def leaking(grads: Any) -> mx.array:
            kept.append(mx.ones(size_bytes // 4))
            mx.eval(kept[-1])
            return global_norm(grads)

        monkeypatch.setattr(optimizer, "global_norm", leaking)

    yield begin
    kept.clear()
    mx.clear_cache()


def room_gb(room_bytes: int) -> float:
    """A limit that leaves `room_bytes` above the memory of this process."""
    gc.collect()
    mx.clear_cache()
    return (probe.process_bytes() + room_bytes) / 1e9


@pytest.mark.parametrize("gauge", ["right", "failing", "frozen"])
def test_leak_is_noticed_within_ten_steps(quick, leak, monkeypatch, gauge):
    """gauge: the gauge of the process; MLX's own gauges still work."""
    leak(60 * MB)
    config = quick(max_steps=40, max_memory=room_gb(800 * MB), save_every=100, supervise=True)
    run = folder.create(config)
    with monkeypatch.context() as patch:
        if gauge != "right":
            patch.setattr(probe, "process_bytes", lambda: None if gauge == "failing" else 50 * MB)
        assert train_until_done(run) == child.RESTART
    told = [getattr(event, "text", getattr(event, "cause", "")) for event in events_of(run)]
    assert any("memory grows by 60 MB a step" in text for text in told)
    noticed = next(count for count, text in enumerate(told) if "memory grows" in text)
    assert sum(isinstance(event, events.Step) for event in events_of(run)[:noticed]) <= 10


def test_leak_takes_each_action_in_order_and_saves_everything(quick, leak):
    leak(30 * MB)
    limit = room_gb(800 * MB)
    settings = {"max_memory": limit, "leak_threshold_mb": 20, "clear_cache_every": 0}
    run = folder.create(quick(max_steps=60, save_every=100, supervise=True, **settings))
    assert train_until_done(run) == child.RESTART
    found = [a for a in events_of(run, events.Action) if "grows" in a.cause]
    assert [a.kind for a in found] == ["clear_cache", "drop_compiled", "reload_lora", "restart"]
    assert [action.step for action in found] == sorted(action.step for action in found)
    last = found[-1].step
    assert last == max(steps_of(run))
    assert checkpoint.newest(run.checkpoints)[0].name == f"step-{last:06d}"
    assert max(event.highest_bytes for event in events_of(run, events.Step)) < limit * 1e9


def test_leaking_run_without_supervisor_ends_before_its_limit(quick, leak):
    """Without a supervisor it cannot restart: it saves and ends before it reaches the limit."""
    leak(60 * MB)
    limit = room_gb(800 * MB)
    run = folder.create(quick(max_steps=40, max_memory=limit, save_every=100, supervise=False))
    with pytest.raises(RunError) as caught:
        train_until_done(run)
    assert "\n" not in str(caught.value)
    assert "--resume r" in str(caught.value)
    assert max(event.highest_bytes for event in events_of(run, events.Step)) < limit * 1e9
    assert checkpoint.newest(run.checkpoints)[0].name == f"step-{max(steps_of(run)):06d}"


class Watcher:
    """Reads the memory of a run's training processes from outside, every few milliseconds.

    highest: the peak memory of each process in bytes, by process id.
    """

    def __init__(self, run: RunFolder, every_s: float = 0.01) -> None:
        self.run, self.every_s = run, every_s
        self.highest: dict[int, int] = {}
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> Watcher:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.thread.join()

    def watch(self) -> None:
        while not self.stopped.wait(self.every_s):
            pid = working_on(self.run)
            try:
                status = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            rows = (line.split() for line in status.splitlines())
            held = next((int(row[1]) * 1024 for row in rows if row[0] == "VmRSS:"), 0)
            self.highest[pid] = max(held, self.highest.get(pid, 0))


def working_on(run: RunFolder) -> int | None:
    """The id of the process that has locked the run, if it can be read."""
    try:
        return int((run.path / "lock").read_text())
    except (OSError, ValueError):
        return None


def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Make every new Python process run `source` first."""
    place = write_site(tmp_path / "site", source)
    package = Path(your_ai.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), str(package)]))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_leaking_process_is_restarted_before_its_limit(quick, tmp_path, monkeypatch):
    config = quick(max_steps=14, max_memory=0.9, save_every=100)
    whole = train(dataclasses.replace(config, run="whole", max_memory=None))
    environment(tmp_path, monkeypatch, LEAKY.format(where="your_ai.training", size=60 * MB))
    run = RunFolder(RUNS / "leaking")
    with started(config, "leaking", supervise=True) as process, Watcher(run) as watcher:
        _, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, error) == (0, "")
    assert [action.kind for action in actions_of(run, "restart")] == ["restart"]
    assert events_of(run, events.Died) == []
    assert len(watcher.highest) == 2  # processes
    assert 300 * MB < max(watcher.highest.values()) < 900 * MB
    assert steps_of(run) == list(range(1, 15))
    assert final_files(run) == final_files(whole)


READING = """
import sys

if "your_ai.training" in sys.orig_argv:
    import time

    from your_ai.training import job

    read_data = job.read_data

    def reading(*args):
        found = read_data(*args)
        held = b"1" * 150_000_000
        time.sleep(2)
        return found

    job.read_data = reading
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_process_whose_rows_take_more_than_the_limit_ends_before_it(quick, tmp_path, monkeypatch):
    environment(tmp_path, monkeypatch, READING)
    with started(quick(max_memory=0.23), "r", supervise=True) as process:
        _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2
    assert re.fullmatch(
        r"error: --max-memory 0.23: reading the rows took 2\d\d MB of 230 MB before training; "
        r"raise the limit, or shorten the longest rows\n",
        error,
    )
    assert not (RUNS / "r").exists()


EXHAUSTED = """
import sys

if "your_ai.training" in sys.orig_argv:
    from your_ai.training import optimizer

    def fail(grads):
        raise RuntimeError("[metal::malloc] Resource limit (499000) exceeded.")

    optimizer.global_norm = fail
"""


def test_run_without_enough_memory_gives_one_line_of_error(planned, tmp_path, monkeypatch):
    """It tries every plan, in several processes."""
    environment(tmp_path, monkeypatch, EXHAUSTED)
    run = RunFolder(RUNS / "r")
    with started(planned(), "r", supervise=True) as process:
        _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert len(error.splitlines()) == 1
    assert "ran out of memory before its first step" in error
    assert "your_ai train --resume r" in error
    assert events_of(run, events.Died)[-1].level is None
    assert leftovers(run) == []
    assert checkpoint.newest(run.checkpoints) == (run.checkpoints / "step-000000", [])


# -- kill -9 under the supervisor


def killed_at_random(run: RunFolder, process: subprocess.Popen, kills: int, seed: int) -> list[int]:
    """Kill the training process `kills` times, after progress each time; return steps at kills."""
    draw = random.Random(seed)
    done: list[int] = []
    killed: set[int] = set()
    told = Told(run)

    def last_step() -> int:
        return max((e.step for e in told.read() if isinstance(e, events.Step)), default=0)

    for _ in range(kills):
        enough = last_step() + draw.randint(3, 8)
        wait_until(process, lambda: last_step() >= enough and working_on(run) not in killed)  # noqa: B023
        time.sleep(draw.uniform(0, 0.05))
        pid = working_on(run)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
        done.append(last_step())
    return done


KILLS = 10 if os.environ.get("YOUR_AI_SLOW") else 2


def test_supervised_run_finishes_after_repeated_kills(quick):
    steps = 20 * KILLS
    settings = {"max_steps": steps, "save_every": 2, "lora_dropout": 0.1, "grad_accumulation": 2}
    run = RunFolder(RUNS / "killed")
    with started(quick(**settings), "killed", supervise=True) as process:
        killed_at_random(run, process, KILLS, seed=KILLS)
        _, error = process.communicate(timeout=2 * PATIENCE_S)
    assert (process.returncode, error) == (0, "")
    assert len(events_of(run, events.Died)) == KILLS
    assert {died.level for died in events_of(run, events.Died)} == {0}
    whole = train(quick(run="whole", **settings))
    assert final_files(run) == final_files(whole)
    assert losses_of(run) == losses_of(whole)
    assert leftovers(run) == []


def test_run_killed_with_its_supervisor_resumes_exactly(quick):
    """It is resumed by hand."""
    settings = {"max_steps": 40, "save_every": 2}
    run = RunFolder(RUNS / "killed")
    with started(quick(**settings), "killed", supervise=True) as process:
        killed_at_random(run, process, 1, seed=0)
        process.kill()
    assert resume(run) == child.DONE
    assert final_files(run) == final_files(train(quick(run="whole", **settings)))
