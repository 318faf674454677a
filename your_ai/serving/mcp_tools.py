"""The tools of `your_ai mcp`: train, watch, stop, evaluate, report, and the list of runs.

Their docstrings, and the descriptions of their parameters and results, are what an agent reads.
Errors are UserError and RunError, of one line.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import subprocess
import time
import typing
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeVar

import anyio
from anyio import to_thread
from pydantic import BaseModel, Field

from your_ai.config import FIELDS, TrainConfig, flag, resumed
from your_ai.config.requests import RUN_OF_TOOLS, EvaluateRequest, ReportRequest, expanded
from your_ai.config.setting import Tool, settings_of, types_of
from your_ai.dashboard import view
from your_ai.dashboard.metric_table import REWARD
from your_ai.dashboard.state import ViewState, fold, fold_all
from your_ai.data.sources import checked_settings
from your_ai.errors import RunError, UserError
from your_ai.evaluation import record
from your_ai.gates.programs import python_module
from your_ai.gates.text import message_line, shown
from your_ai.hub.find import find_model
from your_ai.memory.limit import GB, memory_here
from your_ai.run import child, events
from your_ai.run import folder as folders
from your_ai.run.child import USER
from your_ai.run.events import BESIDE_THE_WORK, Step
from your_ai.run.folder import RUNS, RunFolder, is_running, owner
from your_ai.serving import mcp_gate
from your_ai.serving.mcp_gate import AgentGate
from your_ai.session import new_run, run_list
from your_ai.session.finished import already_finished
from your_ai.session.new_run import BackgroundRun
from your_ai.session.room import MemoryUser, running_users, share_gb, starting

POLL_S = 0.2
LONGEST_WAIT_S = 600.0
LAST_RECORDS = 400  # to make lines of
MOST_EVENTS = 50
T = TypeVar("T")
Begun = tuple[BackgroundRun, float | None, list[str]]  # with its memory limit in GB, and notes


def described(text: str, **bounds: Any) -> Any:
    return Field(description=text, **bounds)


def bounded(about: Tool) -> Any:
    """The description of a field for agents, with its bounds."""
    bounds: dict[str, float] = {}
    if about.bounds is not None:
        bounds["gt" if about.bounds.above else "ge"] = about.bounds.least
        if about.bounds.most < math.inf:
            bounds["le"] = about.bounds.most
    return described(about.help, **bounds)


def offered(request: type) -> Iterator[inspect.Parameter]:
    """The parameters of a tool for what agents may give of a request, or of the settings."""
    defaults = {each.name: each.default for each in fields(request)}
    for name, about in settings_of(request).items():
        if about.tool is None:
            continue
        whole = types_of(request)[name]
        kind: Any = next((k for k in typing.get_args(whole) or (whole,) if k in (int, float)), str)
        default = None if request is TrainConfig else defaults[name]
        if about.agents == "run":  # a tool does not guess which
            default = inspect.Parameter.empty
        kind = Annotated[kind | None if default is None else kind, bounded(about.tool)]
        only = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, only, default=default, annotation=kind)


def tool(method: Callable[..., Coroutine[Any, Any, T]]) -> Callable[..., Coroutine[Any, Any, T]]:
    """Make a tool of a method, which gets a request, or `**named` settings, from an agent."""
    requests, signature = expanded(method, offered)

    @functools.wraps(method)
    async def called(self: AgentTools, **given: Any) -> T:
        for name, request in requests.items():
            known = settings_of(request).keys() & given.keys()
            given[name] = request(**{field: given.pop(field) for field in known})
        return await method(self, **given)

    called.__signature__ = signature  # type: ignore[attr-defined]
    return called


RunName = Annotated[str, bounded(RUN_OF_TOOLS)]
WaitSeconds = Annotated[
    float, described("Seconds to wait at most.", ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False)
]


class StartedRun(BaseModel, frozen=True, use_attribute_docstrings=True):
    """A run that goes on in the background."""

    run: str
    """Its name, for the other tools."""
    begun: bool
    """Whether training has begun; if not, the model is still being loaded."""
    max_memory_gb: float | None
    """Its memory limit in GB; null: what the machine has free."""
    notes: list[str]
    """What is worth knowing about the settings."""


class WatchedRun(BaseModel, frozen=True, use_attribute_docstrings=True):
    """The state of a run now. Sizes are in bytes, times in seconds; null is unknown."""

    run: str
    state: str
    """running, waiting, paused, finished, stopped (resumable), died, imported or merged."""
    phase: str
    """What it does now, e.g. loading the model, training."""
    step: int | None
    """Optimizer updates done."""
    steps: int | None
    """Optimizer updates of the whole run."""
    loss: float | None
    """Training loss of the last step."""
    reward: float | None
    """Mean reward of the last step, with grpo."""
    seconds_left: float | None
    """Estimated time to the end."""
    memory_bytes: int | None
    """Memory of the process now."""
    peak_bytes: int | None
    """The most that it used."""
    limit_bytes: int | None
    """What it may use."""
    validation_step: int | None
    validation_loss: float | None
    """Loss of the last validation."""
    best_validation_loss: float | None
    """Loss of the best validation, by --best-metric."""
    checkpoint: str | None
    """Newest checkpoint, e.g. step-000120."""
    adapter: str | None
    """Folder of the finished adapter."""
    error: str
    """Why the run died; empty if it did not."""
    last_events: list[str]
    """The last events but steps, oldest first."""


class StoppedRun(BaseModel, frozen=True, use_attribute_docstrings=True):
    """A run that was asked to stop."""

    run: str
    state: str
    """stopped, finished, or running while it still saves."""
    step: int | None
    """The last step that was done."""
    checkpoint: str | None
    """The checkpoint that a resume goes on from."""
    adapter: str | None
    """Folder of the adapter, if it was saved."""
    text: str
    """The same in a sentence."""


class RunText(BaseModel, frozen=True, use_attribute_docstrings=True):
    """Text about a run, and the file that has all of it."""

    run: str
    text: str
    path: str
    """The file, relative to the server's folder."""
    measures: dict[str, Any] = {}
    """Of an evaluation: measures by name, with intervals."""


class RunsInFolder(BaseModel, frozen=True, use_attribute_docstrings=True):
    """The runs in the server's folder, the last changed first."""

    runs: list[dict[str, Any]]


@dataclass
class AgentTools:
    """The tools, bound to the folder of a gate, which is the current folder."""

    gate: AgentGate
    children: set[subprocess.Popen[bytes]] = field(default_factory=set)
    """Commands in progress, which end with the server."""
    evaluating: dict[int, MemoryUser] = field(default_factory=dict)
    """Evaluations in progress."""
    stopping: dict[str, int] = field(default_factory=dict)
    """Runs that were asked to stop -> the process that was asked."""

    @tool
    async def train(
        self,
        config: Annotated[
            str | None, described("A YAML file of settings here, or a preset; the others override")
        ] = None,
        settings: Annotated[
            dict[str, Any] | None,
            described("Other options of `your_ai train`, with _ for -, e.g. {'lora_rank': 8}."),
        ] = None,
        resume: Annotated[
            str | None, described("Continue this run instead; only some settings may change.")
        ] = None,
        wait_s: WaitSeconds = 10.0,
        **named: Any,
    ) -> StartedRun:
        """Train LoRA adapters in the background, and return the run's name.

        Waits at most wait_s seconds for training to begin, so that what is wrong with model, data
        or memory is an error at once. The run goes on when the server ends; `watch` shows it.
        Without model and data, the small embedded demo is trained.
        """
        given = dict(settings or {})
        for name, value in named.items():
            if value is not None and given.setdefault(name, value) != value:
                raise UserError(f"{name}: is given twice; leave it out of settings")
        if resume is None:
            begin = functools.partial(self._begin, given, config)
        else:
            begin = functools.partial(self._begin_again, given, config, resume)
        started, limit_gb, notes = await in_thread(begin)
        begun = await in_thread(new_run.wait_until_begun, started, wait_s)
        name = started.folder.name
        return StartedRun(run=name, begun=begun, max_memory_gb=limit_gb, notes=notes)

    async def watch(
        self,
        run: RunName,
        wait_s: Annotated[
            float,
            described(
                "Wait until the run gets on, for so many seconds at most; 0 = answer at once.",
                ge=0, le=LONGEST_WAIT_S, allow_inf_nan=False,
            ),
        ] = 0.0,
        events: Annotated[
            int, described("How many of the last events to return.", ge=0, le=MOST_EVENTS)
        ] = 5,
    ) -> WatchedRun:  # fmt: skip
        """The present state of a run: phase, step, loss, time left, memory, validation, events.

        With wait_s, returns as soon as a step, a validation, a checkpoint or another event comes,
        or the run ends.
        """
        found = await in_thread(mcp_gate.find_run, self.gate, run)
        if wait_s:
            await wait_for_progress(found, wait_s)
        return await in_thread(watched, found, events)

    async def stop(self, run: RunName, wait_s: WaitSeconds = 60.0) -> StoppedRun:
        """Ask a run to finish its step, save and end; wait for that, and say what was saved.

        `train` with resume continues it. If it still saves after wait_s seconds, the state is
        running: call `stop` or `watch` again, which does not disturb it.
        """
        found = await in_thread(mcp_gate.find_run, self.gate, run)
        await in_thread(self._signal, found)
        deadline = time.monotonic() + wait_s
        while is_running(found) and time.monotonic() < deadline:
            await anyio.sleep(POLL_S)
        return await in_thread(stopped, found)

    @tool
    async def evaluate(self, request: EvaluateRequest) -> RunText:
        """Compare a run's adapter with its base model on rows that it was not trained on.

        Returns when it is done, which takes seconds to hours. The measures have the value and
        confidence interval of base, adapter and difference.
        """
        run = str(request.run)
        found = await in_thread(mcp_gate.find_run, self.gate, run)
        config = await in_thread(found.read_config)
        await in_thread(mcp_gate.check_evaluated, self.gate, config, request)
        token = await in_thread(self._reserve, found, request.max_memory)
        try:
            if (limit_bytes := self.evaluating[token].limit_bytes) is not None:
                request = replace(request, max_memory=limit_bytes / GB)
            text = await self._command("eval", found.name, *arguments_of(request))
        finally:
            del self.evaluating[token]
        measured = await in_thread(record.read_evaluation, found)
        measures = {} if measured is None else dict(measured.get("measures", {}))
        return RunText(
            run=run, text=text, path=str(record.evaluation_file(found)), measures=measures
        )

    @tool
    async def report(self, request: ReportRequest) -> RunText:
        """Write an HTML page about a run: curves, memory, plans, samples; return a summary too."""
        run = str(request.run)
        found = await in_thread(mcp_gate.find_run, self.gate, run)
        page = str(found.path / "report.html") if request.out is None else str(request.out)
        path = await in_thread(mcp_gate.check_page, self.gate, "out", page)
        await self._command("report", found.name, f"--out={path}")
        text = await in_thread(summary_of, found)
        return RunText(run=run, text=text, path=str(path.relative_to(self.gate.folder)))

    async def runs(self) -> RunsInFolder:
        """List the runs in the folder: state, step, losses, memory in bytes, time in seconds."""
        await in_thread(mcp_gate.check_runs, self.gate)
        return RunsInFolder(runs=run_list.rows_as_json(await in_thread(run_list.run_rows)))

    # What the tools share. These functions block, and are called in threads.

    def _begin(self, given: dict[str, Any], config: str | None) -> Begun:
        """Check, create and start a new run."""
        notes: list[str] = []
        mcp_gate.check_runs(self.gate)
        mcp_gate.check_settings(self.gate, given, "settings")
        if config is not None:
            mcp_gate.check_file_of_settings(self.gate, config)
        resolved = new_run.resolve(given, config, on_note=notes.append)
        mcp_gate.check_config(self.gate, resolved, FIELDS)
        return *self._start(resolved, None), notes

    def _begin_again(self, given: dict[str, Any], config: str | None, run: str) -> Begun:
        """Check and continue a run."""
        for name, value in (("config", config), ("run", given.get("run"))):
            if value is not None:
                raise UserError(f"resume {shown(run)}: cannot be combined with {name}")
        found = mcp_gate.find_run(self.gate, run)
        folders.check_resumable(found)
        settings = resumed(found.read_config(), given)
        done = already_finished(found, settings)
        settings = replace(settings, supervise=True)  # as each run here
        mcp_gate.check_config(self.gate, settings, FIELDS)
        if is_running(found):
            raise UserError(f"run {found.name}: is running; watch it, or stop it first")
        if done:
            raise UserError(done)
        return *self._start(settings, found), []

    def _start(
        self, settings: TrainConfig, found: RunFolder | None
    ) -> tuple[BackgroundRun, float | None]:
        """Start a new run, or one that is resumed; return it with its memory limit in GB."""
        settings = checked_settings(settings, every_row=False)
        find_model(settings.model)
        with self.starting():
            asked_gb, processes = settings.max_memory, settings.processes
            share = share_gb(memory_here(), self._users(), asked_gb, processes)
            settings = settings if share is None else replace(settings, max_memory=share)
            folder = new_run.create(settings) if found is None else found
            self.stopping.pop(folder.name, None)
            return new_run.start(folder, settings, new=found is None), settings.max_memory

    def _users(self) -> list[MemoryUser]:
        """The runs and evaluations that work in this folder now."""
        return [*running_users(RUNS, {}), *self.evaluating.values()]

    def _reserve(self, found: RunFolder, asked_gb: float | None) -> int:
        """Reserve memory for an evaluation; return its key in `evaluating`."""
        with self.starting():
            share = share_gb(memory_here(), self._users(), asked_gb)
            limit_bytes = None if share is None else int(share * GB)
            token = max(self.evaluating, default=0) + 1
            self.evaluating[token] = MemoryUser(f"the evaluation of {found.name}", limit_bytes)
        return token

    def starting(self) -> contextlib.AbstractContextManager[None]:
        """Let one call at a time begin something, also of other servers of this folder."""
        return starting(self.gate.folder)

    def _signal(self, found: RunFolder) -> None:
        """Ask a run to stop, once: a second signal would end it without saving."""
        asked = self.stopping.get(found.name)
        if asked is not None and owner(found) in (asked, None):
            return
        self.stopping[found.name] = run_list.stop(found)

    async def _command(self, *arguments: str) -> str:
        """The output of a command of your_ai. It ends with this call. Raises its error."""
        process = subprocess.Popen(
            python_module("your_ai", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.children.add(process)
        try:
            output, messages = await in_thread(process.communicate)
        finally:
            self.children.discard(process)
            if process.poll() is None:
                process.kill()
        if process.returncode:
            errors = child.errors_in(messages.decode(errors="replace"))
            last = errors[-1] if errors else f"it ended with status {process.returncode}"
            raise (UserError if process.returncode == USER else RunError)(last)
        return output.decode(errors="replace").strip()


def arguments_of(request: Any) -> list[str]:
    """The options of a command for a request: of what is not as by default."""
    values = {each.name: (getattr(request, each.name), each.default) for each in fields(request)}
    return [
        f"{flag(name)}={value}"
        for name, (value, default) in values.items()
        if value != default and name != "run"
    ]


# What tools return of a run


async def in_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that blocks; a call that is cancelled does not wait for it."""
    return await to_thread.run_sync(function, *arguments, abandon_on_cancel=True)


async def wait_for_progress(found: RunFolder, seconds: float) -> None:
    """Wait until the run writes an event about its work, or ends, or the time is over."""
    deadline = time.monotonic() + seconds
    _, offset = await in_thread(events.tail, found.events)
    while time.monotonic() < deadline and is_running(found):
        await anyio.sleep(POLL_S)
        records, offset = await in_thread(events.tail, found.events, offset)
        if any(not isinstance(record.event, BESIDE_THE_WORK) for record in records):
            return


def watched(found: RunFolder, last: int) -> WatchedRun:
    """The present state of a run, with so many of its last events."""
    running = is_running(found)  # before the events, so that a run that ends has its last
    records, _ = events.tail(found.events)
    state, lines = fold_all(ViewState(), records[:-LAST_RECORDS]), []
    for each in records[-LAST_RECORDS:]:
        state = fold(state, each)
        line = None if isinstance(each.event, Step) else view.event_line(each.event, state)
        lines += [] if line is None else [message_line(line)]
    happened = [each.event for each in records]
    ended = run_list.last_of(happened, events.Started, events.Finished)
    now = run_list.state_of(found, running, state, ended)
    return WatchedRun(
        run=found.name,
        state=now,
        phase=state.doing_text if running else now,
        steps=total.steps if (total := state.step or state.started) else None,
        seconds_left=run_list.number(state.seconds_left) if running else None,
        memory_bytes=state.gauges.process_bytes if running and state.gauges else None,
        peak_bytes=state.highest_bytes,
        limit_bytes=state.limit.limit_bytes if state.limit else None,
        checkpoint=max((path.name for path in found.checkpoints.glob("step-*")), default=None),
        adapter=str(found.adapter) if found.adapter.is_dir() else None,
        error=reason_of_death(found, state) if now == "died" else "",
        last_events=lines[len(lines) - last :] if last else [],
        **losses_of(state),
    )


def losses_of(state: ViewState) -> dict[str, Any]:
    """The fields of a WatchedRun about its last step and validation, and the best one."""
    step, validation, best = state.step, state.validation, state.best_validation
    return {
        "step": step.step if step else None,
        "loss": run_list.number(step.loss) if step else None,
        "reward": run_list.number(step.metrics.get(REWARD)) if step else None,
        "validation_step": validation.step if validation else None,
        "validation_loss": run_list.number(validation.loss) if validation else None,
        "best_validation_loss": run_list.number(best.loss) if best else None,
    }


def reason_of_death(found: RunFolder, state: ViewState) -> str:
    """Say why a run died: its last event about it, or the last error of its processes."""
    if state.gave_up:
        return message_line(state.deaths[-1].reason)
    with contextlib.suppress(UserError), child.open_log(found) as log:
        if errors := child.errors_in(child.read_log(log, 0)):
            return message_line(errors[-1])
    return "its processes ended without an error message; train with resume continues it"


def stopped(found: RunFolder) -> StoppedRun:
    """The state of a run that was asked to stop, and what it saved."""
    now = watched(found, 0)
    if now.state in ("running", "waiting", "paused"):
        text = "it still finishes its step or saves; call stop or watch again"
    elif now.state == "finished":
        text = f"it had finished; the adapter is in {now.adapter}"
    else:
        saved = f"saved as {now.checkpoint}" if now.checkpoint else "nothing was saved"
        text = f"{now.state} after step {now.step or 0}, {saved}; train with resume continues it"
    return StoppedRun(
        run=now.run,
        state=now.state,
        step=now.step,
        checkpoint=now.checkpoint,
        adapter=now.adapter,
        text=text,
    )


def summary_of(found: RunFolder) -> str:
    """The summary that the command line prints after a run; of one in progress, what it does."""
    running = is_running(found)  # before the events, so that a run that ends has its last
    state = fold_all(ViewState(), events.tail(found.events)[0])
    if running:
        if (step := state.step) is None:
            return f"{state.doing_text}; no step is done yet"
        done = view.step_text(step, state.tokens_per_s or 0.0, state.seconds_left)
        return f"{state.doing_text}; {done}"
    parts = view.summary(state, found.reference, events_shown=False)
    return "\n".join(part for part in parts if isinstance(part, str))
