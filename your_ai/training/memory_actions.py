"""Between two steps: look at the gauges, ask memory.governor, and do what it says.

What frees memory in place is done here. A smaller or larger plan and a restart are the
caller's: they begin from a checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import mlx.core as mx

from your_ai.config import TrainConfig
from your_ai.data.batches import Batch
from your_ai.engine.reload import reload_adapted
from your_ai.errors import RunError
from your_ai.memory import allocator, probe
from your_ai.memory.estimate import Plan
from your_ai.memory.governor import (
    LARGE,
    MemoryAction,
    Observation,
    Policy,
    Watch,
    acted,
    decide,
    policy_of,
)
from your_ai.memory.guard import guarded
from your_ai.memory.plan import Corrections
from your_ai.memory.sample import MemorySample, in_gb
from your_ai.run import events, exits, requests
from your_ai.run.folder import RunFolder
from your_ai.training.prepare import Prepared

TELL_S, TELL_PAUSED_S = 2.0, 60.0  # between two readings that are written
LOOK_S = 0.2


class Replan(Exception):
    """The run is to go on under another plan, or in another process: `action` says which.

    step: that of the checkpoint it goes on from; watch: what the policy is to remember of
    before; failed: it is so after an error, and not by the policy.
    """

    def __init__(self, action: MemoryAction, step: int, watch: Watch, failed: bool = False) -> None:
        super().__init__(action.cause)
        self.action, self.step, self.watch, self.failed = action, step, watch, failed


@dataclass
class Governor:
    """Watches one process under one plan; the state that the policy and the estimates keep."""

    prepared: Prepared
    policy: Policy
    sampler: probe.Sampler
    log: events.EventLog
    corrections: Corrections
    watch: Watch
    seen: tuple[MemorySample, int | None] = (MemorySample(), None)

    def rows_at(self, tokens: int) -> int:
        """The most rows of so many tokens that fit, by what the steps so far have shown."""
        return self.corrections.rows(tokens)

    def before_step(self) -> None:
        mx.reset_peak_memory()

    def look(self) -> tuple[MemorySample, int | None]:
        """The gauges, and the most that the process held since the last look."""
        self.seen = probe.read(), self.sampler.highest().process_bytes
        return self.seen

    def after_step(self, step: int, batches: list[Batch]) -> MemoryAction | None:
        """Free what the policy asks for; what the caller is to do."""
        sample, highest_bytes = self.seen
        if sample.peak_bytes:
            rows, tokens = max((batch.tokens.shape for batch in batches), key=lambda s: s[0] * s[1])
            if self.corrections.learn(rows, tokens, sample.peak_bytes):
                ratio = self.corrections.ratios[tokens]
                self.log.write(events.Corrected(step=step, tokens=tokens, ratio=ratio))
        choice, store = self.prepared.budget.choice, self.prepared.store
        observation = Observation(
            step=step,
            sample=sample,
            highest_process_bytes=highest_bytes,
            can_shrink=choice.smaller is not None,
            can_grow=choice.level > 0,
            baseline_bytes=self.prepared.budget.demand.python_bytes,
            kept_bytes=store.bytes_held if self.prepared.config.prefix_cache == "memory" else 0,
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
        began, before, read = time.perf_counter(), probe.read(), 0
        if action.kind != "clear_cache":
            self.prepared.engine.drop()
        if action.kind == "reload_lora":
            read = reload_adapted(self.prepared.model, self.prepared.tensors)
        allocator.free(collect=action.kind != "clear_cache")
        after = probe.read()
        self.watch = acted(self.policy, self.watch, action, before, after)
        self.log.write(told(action, step, before, after, time.perf_counter() - began, read))


def govern(
    prepared: Prepared, sampler: probe.Sampler, log: events.EventLog, watch: Watch, step: int = 0
) -> Governor:
    """step: from which the run goes on, with what it had learned until then."""
    budget = prepared.budget
    limit_bytes, plan = budget.limit.limit_bytes, budget.choice.option.plan
    corrections = Corrections(budget.demand, plan, limit_bytes, learned(log, plan, step))
    return Governor(
        prepared=prepared,
        policy=policy_of(prepared.config, limit_bytes),
        sampler=sampler,
        log=log,
        corrections=corrections,
        watch=watch,
    )


def learned(log: events.EventLog, plan: Plan, step: int) -> dict[int, float]:
    """The corrections of a run up to a step, since it has trained under this plan.

    So that it splits the batches after a kill as it would have without.
    """
    ratios: dict[int, float] = {}
    for event in (record.event for record in events.tail(log.path)[0]):
        if isinstance(event, events.Planned):
            if Plan(event.plan, event.micro_tokens, event.spill) != plan:
                ratios.clear()
        elif isinstance(event, events.Corrected) and event.step <= step:
            ratios[event.tokens] = max(event.ratio, ratios.get(event.tokens, -math.inf))
    return ratios


def told(
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
    """Write the gauges from a thread whenever nothing else was written for a while."""
    over = threading.Event()

    def tell() -> None:
        while not over.wait(LOOK_S):
            paused = requests.is_asked(folder, requests.PAUSE)
            if time.monotonic() >= log.written_at + (TELL_PAUSED_S if paused else TELL_S):
                with contextlib.suppress(RunError):  # a full disk: the next step meets it too
                    log.write(events.Gauges(**asdict(probe.read())))

    thread = threading.Thread(target=tell, name="gauges", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def within_limit(
    folder: RunFolder, config: TrainConfig
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """End this process before it passes --max-memory: its supervisor goes on, smaller.

    Gives what is to be called once the limit is known to be enough for what comes before.
    """
    if config.max_memory is None:
        return contextlib.nullcontext(lambda: None)
    limit_bytes = int(1e9 * config.max_memory)

    def end(held_bytes: int) -> None:
        held, limit = in_gb(held_bytes), in_gb(limit_bytes)
        with contextlib.suppress(BaseException):  # whatever state the process is in
            text = f"the process held {held} of {limit} within a step: ending it before the limit"
            with contextlib.closing(events.EventLog(folder.events)) as log:
                log.write(events.Notice(text=text))
        os._exit(exits.OUT_OF_MEMORY)

    return guarded(limit_bytes, end)
