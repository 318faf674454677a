"""Between two steps: read the gauges, ask memory.governor, and carry out its actions.

Actions that free memory in place are done here. A change of plan and a restart are left to the
caller, because they start from a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

import mlx.core as mx

from your_ai.config import TrainConfig
from your_ai.data.batches import Batch
from your_ai.engine.protocol import Engine
from your_ai.engine.reload import reload_adapted
from your_ai.errors import RunError
from your_ai.gates.console import echo_error
from your_ai.gates.text import size_text
from your_ai.memory import allocator, probe
from your_ai.memory.budget import empty_bytes, plan_of
from your_ai.memory.corrections import Corrections
from your_ai.memory.governor import (
    LARGE,
    MemoryAction,
    MemoryObservation,
    Policy,
    Watch,
    acted,
    decide,
    policy_of,
)
from your_ai.memory.guard import guarded
from your_ai.memory.sample import MemorySample
from your_ai.memory.workload import Plan
from your_ai.run import child, events, requests
from your_ai.run.folder import RunFolder
from your_ai.training.trainer import Trainer

WRITE_S, WRITE_PAUSED_S = 2.0, 60.0  # seconds between two readings that are written
CHECK_S = 0.2  # seconds between two checks whether a reading is due


class Replan(Exception):
    """The run must continue under another plan or in another process; `action` says which.

    step: the step of the checkpoint from which it continues.
    watch: the state that the policy keeps.
    failed: whether the cause is an error, not the policy.
    """

    def __init__(self, action: MemoryAction, step: int, watch: Watch, failed: bool = False) -> None:
        super().__init__(action.cause)
        self.action, self.step, self.watch, self.failed = action, step, watch, failed


@dataclass
class Governor:
    """Watches one process under one plan, and keeps the state of the policy and estimates."""

    trainer: Trainer
    policy: Policy
    sampler: probe.Sampler
    log: events.EventLog
    corrections: Corrections
    watch: Watch
    seen: tuple[MemorySample, int | None] = (MemorySample(), None)

    def rows_at(self, tokens: int) -> int:
        """The maximum number of rows of `tokens` tokens that fit, by the steps so far."""
        return self.corrections.rows(tokens)

    def before_step(self) -> None:
        mx.reset_peak_memory()

    def look(self) -> tuple[MemorySample, int | None]:
        """Read the gauges, and the peak of the process since the last call."""
        self.seen = probe.read(), self.sampler.highest().process_bytes
        return self.seen

    def after_step(self, step: int, batches: list[Batch]) -> MemoryAction | None:
        """Carry out the policy's cheap actions; return the large action for the caller, if any."""
        sample, highest_bytes = self.seen
        foreseen_bytes = 0
        if sample.peak_bytes:
            shapes = {batch.tokens.shape for batch in batches}
            rows, tokens = max(sorted(shapes), key=lambda s: self.corrections.expected_bytes(*s))
            if self.corrections.learn(rows, tokens, sample.peak_bytes):
                ratio = self.corrections.ratios[tokens]
                self.log.write(events.Corrected(step=step, tokens=tokens, ratio=ratio))
                foreseen_bytes = self.corrections.foreseen_bytes()
        choice, store = self.trainer.budget.choice, self.trainer.built.store
        in_memory = self.trainer.config.prefix_cache == "memory"
        observation = MemoryObservation(
            step=step,
            sample=sample,
            highest_process_bytes=highest_bytes,
            can_shrink=choice.smaller is not None,
            can_grow=choice.level > 0,
            baseline_bytes=self.trainer.budget.workload.process.python_bytes,
            kept_bytes=store.bytes_held if store is not None and in_memory else 0,
            foreseen_bytes=foreseen_bytes,
        )
        self.watch, actions, notices = decide(self.policy, self.watch, observation)
        for text in notices:
            self.log.write(events.Notice(text=text))
        for action in actions:
            if action.kind in LARGE:
                return action
            self.perform(action, step)
        return None

    def perform(self, action: MemoryAction, step: int) -> None:
        def reload() -> int:
            self.log.write(events.Phase(text="reloading the adapted layers"))
            twins = self.trainer.beside.sharing(self.trainer.job)
            return reload_adapted(self.trainer.model, self.trainer.opened.tensors, twins)

        before, after = carry_out(action, step, self.trainer.engine, reload, self.log)
        self.watch = acted(self.policy, self.watch, action, before, after)


def carry_out(
    action: MemoryAction,
    step: int,
    engine: Engine,
    reload: Callable[[], int],
    log: events.EventLog,
) -> tuple[MemorySample, MemorySample]:
    """Do a cheap action; return the gauges before and after.

    reload: reads the frozen arrays of adapted layers again; returns the number of bytes.
    """
    began, before, read = time.perf_counter(), probe.read(), 0
    if action.kind != "clear_cache":
        engine.drop()
    if action.kind == "reload_lora":
        read = reload() + engine.forget()
    allocator.free(collect=action.kind != "clear_cache")
    after = probe.read()
    log.write(action_event(action, step, before, after, time.perf_counter() - began, read))
    return before, after


def govern(
    trainer: Trainer, sampler: probe.Sampler, log: events.EventLog, watch: Watch, step: int = 0
) -> Governor:
    """The governor of a run that continues from `step`, with its corrections up to then."""
    budget = trainer.budget
    limit_bytes, plan = budget.limit.limit_bytes, budget.choice.option.plan
    trained = replace(budget.workload, rollouts=None)  # peaks are of the updates alone
    # The step that ran out may be one of shorter rows, of which more was kept.
    room_bytes = 0 if has_run_out(log) else budget.choice.option.needed_bytes
    corrections = Corrections(trained, plan, limit_bytes, learned(log, plan, step), room_bytes)
    trainer.engine.keep(corrections.kept)
    return Governor(
        trainer=trainer,
        policy=policy_of(trainer.config, limit_bytes),
        sampler=sampler,
        log=log,
        corrections=corrections,
        watch=watch,
    )


def has_run_out(log: events.EventLog) -> bool:
    """Return whether the run has run out of memory since its last step."""
    records, _ = events.tail(log.path, 0, (events.Died, events.Step))
    last = records[-1].event if records else None
    return isinstance(last, events.Died) and last.of_memory


def learned(log: events.EventLog, plan: Plan, step: int) -> dict[int, float]:
    """The corrections that a run learned under this plan, up to a step.

    With them it splits batches after a kill in the same way as without the kill.
    """
    ratios: dict[int, float] = {}
    records, _ = events.tail(log.path, 0, (events.Planned, events.Corrected))
    for event in (record.event for record in records):
        if isinstance(event, events.Planned):
            if plan_of(event) != plan:
                ratios.clear()
        elif isinstance(event, events.Corrected) and event.step <= step:
            ratios[event.tokens] = max(event.ratio, ratios.get(event.tokens, -math.inf))
    return ratios


def action_event(
    action: MemoryAction,
    step: int,
    before: MemorySample,
    after: MemorySample,
    seconds: float,
    read_bytes: int = 0,
) -> events.Action:
    return events.Action(
        step=step,
        kind=action.kind,
        cause=action.cause,
        before_bytes=before.process_bytes or 0,
        after_bytes=after.process_bytes or 0,
        seconds=seconds,
        read_bytes=read_bytes,
    )


@contextlib.contextmanager
def telling_gauges(folder: RunFolder, log: events.EventLog) -> Iterator[None]:
    """Write the gauges from a thread whenever no other event was written for a while."""
    over = threading.Event()

    def write_gauges() -> None:
        while not over.wait(CHECK_S):
            paused = requests.is_asked(folder, requests.PAUSE)
            if time.monotonic() >= log.written_at + (WRITE_PAUSED_S if paused else WRITE_S):
                with contextlib.suppress(RunError):  # the next step reports a full disk as well
                    log.write(events.Gauges(**asdict(probe.read())))

    thread = threading.Thread(target=write_gauges, name="gauges", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def within_limit(
    folder: RunFolder, config: TrainConfig, last_word: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], None]]:
    """End this process before it exceeds --max-memory; its supervisor continues, smaller.

    last_word: is called before the process ends.
    Yields a function to call once the run is known to fit. Before that, a process that reads more
    than the limit allows ends with an error of the user; one that is over the limit without any
    rows goes on, because its plan will be refused with the limit that it needs.
    """
    if config.max_memory is None:
        yield lambda: None
        return
    limit_bytes, fits = int(1e9 * config.max_memory), threading.Event()

    def ready(most_bytes: int) -> bool:
        empty = empty_bytes()
        return fits.is_set() or (empty is not None and empty < most_bytes)

    def end(held_bytes: int) -> None:
        held, limit = size_text(held_bytes), size_text(limit_bytes)
        if not fits.is_set():
            with contextlib.suppress(BaseException):
                echo_error(
                    f"error: --max-memory {config.max_memory:g}: reading the rows took {held} of "
                    f"{limit} before training; raise the limit, or shorten the longest rows"
                )
            os._exit(child.USER)
        with contextlib.suppress(BaseException):  # the process must end in any case
            text = f"the process used {held} of {limit} within a step: ending it before the limit"
            with contextlib.closing(events.EventLog(folder.events)) as log:
                log.write(events.Notice(text=text))
        with contextlib.suppress(BaseException):
            last_word()
        os._exit(child.OUT_OF_MEMORY)

    with guarded(limit_bytes, end, ready):
        yield fits.set
