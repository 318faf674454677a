"""The Python interface, `import your_ai`: what the command line does, for notebooks and programs.

Importing it is quick; MLX is loaded by what needs it. Errors that are the caller's are
`UserError`, everything else that can go wrong with a run is `RunError`; both say what to do.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from your_ai.config import (
    ADAPTER_SETTINGS,
    FIELDS,
    OBJECTIVES_WITH,
    TrainConfig,
    build,
    defaults,
    resumed,
)
from your_ai.config.requests import (
    EvaluateRequest,
    GenerateRequest,
    MadeData,
    MakeDataRequest,
    ReportRequest,
    RunLike,
    ScoreRequest,
)
from your_ai.config.setting import settings_of
from your_ai.errors import RunError, UserError, explain
from your_ai.gates.console import echo_error, open_console
from your_ai.gates.paths import missing_text
from your_ai.run import events
from your_ai.run import folder as folders
from your_ai.run.folder import RunFolder
from your_ai.session import new_run

if TYPE_CHECKING:
    from your_ai.dashboard.history import RunHistory
    from your_ai.generation.generate import Answerer
    from your_ai.nets.saved_adapter import Trained


@dataclass(frozen=True)
class PlannedRun:
    """The plan of a run: how it would be computed, and what it would hold."""

    engine: str
    """fused, staged or streamed."""
    text: str
    """The plan in words."""
    limit_bytes: int
    needed_bytes: int
    """The least memory limit under which this plan is chosen."""
    components: dict[str, int]
    """The estimated peak of the process, in bytes by component."""
    rank: int
    """The rank of the adapters, smaller than asked for only where it is automatic."""
    blocks: int
    """How many of the last blocks have adapters."""
    notes: tuple[str, ...] = ()
    """What each key of a file of mlx-lm became, and what differs."""
    seconds_per_step: float | None = None
    """Predicted; None if nothing was measured, as of a model that is not on this machine."""


@dataclass(frozen=True)
class RunMemory:
    """The memory that a run held, in bytes; None where nothing was recorded."""

    peak_bytes: int | None
    """The most that the training process held."""
    limit_bytes: int | None


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def of_request(request: Callable[P, R]) -> Callable[[Callable[[R], T]], Callable[P, T]]:
    """Make a function of the fields of a request out of one that gets the request.

    The help of the fields becomes part of its documentation.
    """

    def of_fields(function: Callable[[R], T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*arguments: P.args, **named: P.kwargs) -> T:
            return function(request(*arguments, **named))

        returned = typing.get_type_hints(function)["return"]
        signature = inspect.signature(request, eval_str=True).replace(return_annotation=returned)
        kinds = {name: each.annotation for name, each in signature.parameters.items()}
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__annotations__ = kinds | {"return": returned}
        known = settings_of(request).items()
        helps = "\n".join(f"    {name}: {about.help}" for name, about in known)
        called.__doc__ = f"{function.__doc__}\n{helps}"
        return called

    return of_fields


@of_request(EvaluateRequest)
def evaluate(request: EvaluateRequest) -> dict[str, Any]:
    """Compare a run's adapter with its base model; return the content of evaluation.json.

    `measures` has the value and interval of base, adapter and difference for loss, perplexity and
    exact_match, and of a run that learns preferences, for rewards/accuracies and others
    (docs/objectives.md); of conversations, for success, reward, turns and others
    (docs/environments.md). on_progress is called with an `EvaluationProgress`, on_note with what
    the user should know. Raises UserError and RunError; EvaluationNotKept, a RunError with the
    results, if the run's folder cannot be written.
    """
    from your_ai.data.lines import file_of_first_row
    from your_ai.evaluation import conversations, record, rows, summary
    from your_ai.evaluation.compare import Request, compare
    from your_ai.evaluation.custom_metric import load_metric

    trained = _trained(request)
    if request.columns and request.data is None:
        raise UserError("--columns: the run's rows have known columns; give other rows with --data")
    config = replace(trained.config, columns=tuple(request.columns) or trained.config.columns)
    config = conversations.acting(config, request)
    path = rows.choose_file(None if request.data is None else str(request.data), config)
    if config.converses:
        if trained.note:
            request.on_note(trained.note)
        request.on_note(f"evaluating on {file_of_first_row(path)}")
        talking = conversations.converse(trained, config, path, request)
        with contextlib.closing(talking):
            talked = _guarded(trained.folder, lambda: _last(talking, request.on_progress))
        for text in conversations.notes_on_policies(trained, talked):
            request.on_note(text)
        measured = conversations.summarize_conversations(trained, talked, request)
        record.write_evaluation(trained.folder, measured)
        return measured
    settings = Request(
        batch_size=request.batch_size or defaults.batch_size(trained.config, rows=0),
        max_memory_gb=request.max_memory,
        metric=None if request.metric is None else load_metric(request.metric),
        max_tokens=request.max_tokens,
        teacher=request.teacher,
        to_show=functools.partial(summary.worst_places, trained, request.worst)
        if request.worst
        else None,
    )
    if trained.note:
        request.on_note(trained.note)
    request.on_note(f"evaluating on {file_of_first_row(path)}")
    steps = compare(trained, path, settings)
    found = _guarded(trained.folder, lambda: _last(steps, request.on_progress))
    for text in summary.evaluation_notes(found):
        request.on_note(text)
    measured = summary.summarize(trained, found, request)
    record.write_evaluation(trained.folder, measured)
    return measured


@of_request(ScoreRequest)
def score(request: ScoreRequest) -> Iterator[dict[str, Any]]:
    """Score rows with a reward model; yield each row with its `reward`.

    Rows with an answer get `reward`, those with `chosen` and `rejected` get `reward_chosen` and
    `reward_rejected`. rows may be the rows themselves. on_note is called with what the user should
    know. Raises UserError and RunError.
    """
    from your_ai.data.sources import STDIN
    from your_ai.evaluation.reward_model import check_reward_run, score_rows

    trained = _trained(request)
    if request.columns:
        config = replace(trained.config, columns=tuple(request.columns))
        trained = replace(trained, config=config)
    check_reward_run(trained, "score")
    rows = request.rows
    if isinstance(rows, str | Path) and str(rows) != STDIN:
        path = Path(rows).expanduser()
        if path.is_dir():
            raise UserError(f"{path}: is a folder; give a file of rows")
        if not path.is_file():
            raise UserError(f"{rows}: {missing_text(path, 'file')}; - is standard input")
    if trained.note:
        request.on_note(trained.note)
    found = score_rows(trained, rows, request.too_long, request.batch_size, request.max_memory)

    def each() -> Iterator[dict[str, Any]]:
        while (row := _guarded(trained.folder, lambda: next(found, None))) is not None:
            yield row

    return each()


@of_request(GenerateRequest)
def generate(request: GenerateRequest) -> str:
    """The answer to a prompt, or to a conversation of messages with role and content.

    Raises UserError for a prompt that the model cannot take. Where run is a `Run`, the model stays
    in memory for its next call, until `Run.unload`.
    """
    from your_ai.generation import generate as generation

    sampling, prompt = generation.sampling_of(request), request.prompt
    asked = (
        generation.text_prompt(prompt, "prompt")
        if isinstance(prompt, str)
        else generation.parse_prompt({"messages": list(prompt)}, "prompt")
    )
    run = _run(request.run)
    form, _ = generation.form_of_prompts(run.config, request.system)
    asked = generation.asked_with(asked, form)
    answerer = run.load(request, asked.most_tokens + request.max_tokens)
    (tokens, bounded), *_ = answerer.fit([asked], sampling)
    return "".join(r.text for r in answerer.respond(tokens, bounded))


@of_request(MakeDataRequest)
def make_data(request: MakeDataRequest) -> MadeData:
    """Make a file of chat rows, questions and answers about documents, that a local model writes.

    Answers that the text does not support, and near-duplicates of questions, are dropped and kept
    in a file beside it. A call that was ended goes on when it is made again. on_note is called with
    what the user should know. Raises UserError and RunError.
    """
    from your_ai.generation.making import make_rows

    return make_rows(request)


@of_request(ReportRequest)
def report(request: ReportRequest) -> Path:
    """Write a self-contained HTML page about a run; return its path."""
    from your_ai.dashboard.report import write_report
    from your_ai.session.run_list import newest, rollout_samples

    folder = newest() if request.run is None else folders.find(os.fspath(request.run))
    records, _ = events.tail(folder.events)
    page = folder.path / "report.html" if request.out is None else Path(request.out)
    config, samples = folder.config_text("replace"), rollout_samples(folder.path)
    write_report(records, folder.name, config, page, samples, folder.settings())
    return page


@dataclass
class Run:
    """A run in its folder: in progress, finished, stopped, or imported.

    What was recorded is read again at each access.
    """

    path: Path
    _loaded: dict[tuple[Any, ...], Answerer] = field(
        default_factory=dict, repr=False, compare=False
    )

    @property
    def name(self) -> str:
        return self._folder.name

    @property
    def config(self) -> TrainConfig:
        """The settings of the run."""
        return self._folder.read_config()

    @property
    def is_running(self) -> bool:
        return folders.is_running(self._folder)

    @property
    def is_finished(self) -> bool:
        """True if training reached its last step."""
        finished = self._past().state.finished
        return finished is not None and finished.reason == "done"

    @property
    def steps(self) -> list[int]:
        """The steps that were done, from 1; one for each of `losses`."""
        return [step.step for step in self._past().steps]

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [step.loss for step in self._past().steps]

    @property
    def validation_losses(self) -> dict[int, float]:
        """The losses of the validations, by step."""
        return {event.step: event.loss for event in self._past().validations}

    @property
    def best_validation(self) -> tuple[int, float] | None:
        """(step, loss) of the best validation, by --best-metric; None if there was none."""
        best = self._past().state.best_validation
        return None if best is None else (best.step, best.loss)

    @property
    def metrics(self) -> dict[str, dict[int, float]]:
        """Values that the objective reported beside the loss: by name, then by step."""
        found: dict[str, dict[int, float]] = {}
        for step in self._past().steps:
            for name, value in step.metrics.items():
                found.setdefault(name, {})[step.step] = value
        return found

    @property
    def memory(self) -> RunMemory:
        state = self._past().state
        limit = state.limit
        return RunMemory(state.highest_bytes, None if limit is None else limit.limit_bytes)

    @property
    def adapter(self) -> Path:
        """The folder of the finished adapter, which mlx-lm loads. Raises UserError if none is."""
        from your_ai.nets.saved_adapter import check_is_adapter, open_trained

        found = open_trained(str(self.path)).adapter
        check_is_adapter(found)
        return found.folder

    def resume(self, *, show: bool = True, **changes: Any) -> Run:
        """Continue from the last checkpoint; `changes`: settings that may change, as `--resume`."""
        folders.check_resumable(self._folder)
        settings = resumed(self._folder.read_config(), changes)
        return _train(self._folder, settings, new=False, show=show)

    def load(self, request: GenerateRequest, room: int) -> Answerer:
        """The model that answers a request, which stays in memory for the next until `unload`.

        room: longest prompt and answer, in tokens, for the request's max_memory.
        """
        from your_ai.generation.generate import open_answerer

        room = 0 if request.max_memory is None else room
        key = (request.adapter, request.checkpoint, request.model, request.max_memory, room)
        if key not in self._loaded:
            self.unload()  # one model at a time
            self._loaded[key] = open_answerer(str(self.path), room, request)
        return self._loaded[key]

    def unload(self) -> None:
        """Drop the model that `generate` loaded."""
        self._loaded.clear()

    evaluate = evaluate
    generate = generate
    score = score
    report = report

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    def _past(self) -> RunHistory:
        from your_ai.dashboard import history

        return history.read_history(events.tail(self._folder.events)[0])


def load_run(name: str | Path) -> Run:
    """The run with this name in ./runs, or in this folder. Raises UserError if there is none."""
    return Run(folders.find(str(name)).path)


def train(config: TrainConfig | str | None = None, *, show: bool = True, **settings: Any) -> Run:
    """Train LoRA adapters, and return the run when it has ended.

    config: a TrainConfig, or the name of a preset or YAML file (also one of mlx-lm); settings:
    those of `TrainConfig` by name, which win over it. Without a model and data the embedded demo
    is trained. show: the dashboard, or its lines where there is no terminal. An interrupt, such as
    Ctrl-C or stopping a notebook's cell, finishes the step and saves: `Run.resume` continues.
    Raises UserError for bad input, before anything is written, and RunError where training fails.
    """
    resolved, notes = _settings(config, settings)
    for text in notes if show else ():
        echo_error(f"note: {text}")
    from your_ai.data.sources import checked_settings
    from your_ai.hub.find import find_model

    resolved = checked_settings(resolved, every_row=False)
    new_run.check_rewards(resolved)
    find_model(resolved.model)
    return _train(new_run.create(resolved), resolved, new=True, show=show)


def plan(
    config: TrainConfig | str | None = None,
    *,
    seq_len: int | None = None,
    memory_gb: float | None = None,
    **settings: Any,
) -> PlannedRun:
    """The memory that a run would take, and how it would be computed; no weight is read.

    Arguments as for `train`. seq_len: the length of every row, in tokens, instead of looking at
    the data. memory_gb: plan for an idle Mac with this much RAM, not for this machine.
    Raises UserError where nothing fits into the limit, with the least that would.
    """
    resolved, notes = _settings(config, settings, needs_data=False)
    from your_ai.memory.workload import words
    from your_ai.training.plan_without_files import planned_run

    budget = planned_run(resolved, seq_len, notes.append, memory_gb, on_measure=lambda _: None)
    option = budget.choice.option
    return PlannedRun(
        engine=option.plan.engine,
        text=words(option.plan, max(budget.workload.lengths)),
        limit_bytes=budget.limit.limit_bytes,
        needed_bytes=option.needed_bytes,
        components=dict(option.estimate.components),
        rank=budget.workload.training.rank,
        blocks=budget.workload.training.blocks,
        notes=tuple(notes),
        seconds_per_step=option.seconds,
    )


def _run(run: RunLike) -> Run:
    """The run that is meant; None: the newest that is trained."""
    from your_ai.session.run_list import newest_trained

    if isinstance(run, Run):
        return run
    return Run(newest_trained()[0].path) if run is None else load_run(os.fspath(run))


def _trained(request: EvaluateRequest | ScoreRequest) -> Trained:
    from your_ai.nets.saved_adapter import open_trained

    return open_trained(str(_run(request.run).path), request.checkpoint, request.model)


def _settings(
    config: TrainConfig | str | None, settings: dict[str, Any], needs_data: bool = True
) -> tuple[TrainConfig, list[str]]:
    """The settings of a new run, and notes for the user about the file they are from."""
    unknown = [name for name in settings if name not in TrainConfig.__dataclass_fields__]
    if unknown:
        build(settings, "settings")  # names the nearest
    settings = {n: str(v) if isinstance(v, Path) else v for n, v in settings.items()}
    if isinstance(config, TrainConfig):
        whole, free = asdict(config), [*OBJECTIVES_WITH]  # their defaults are not a choice
        if settings.get("from_adapter", config.from_adapter):
            free += ["model", *ADAPTER_SETTINGS]
        whole = {n: v for n, v in whole.items() if n not in free or v != FIELDS[n].default}
        return new_run.resolve(whole | settings, None, needs_data), []
    notes: list[str] = []
    return new_run.resolve(settings, config, needs_data, notes.append), notes


def _train(folder: RunFolder, settings: TrainConfig, *, new: bool, show: bool) -> Run:
    from your_ai.session import attach

    console = open_console() if show else open_console(file=io.StringIO())
    attach.train_and_show(folder, settings, console, new=new)
    return Run(folder.path)


def _last(steps: Iterable[Any], on_step: Callable[[Any], object]) -> Any:
    """Call `on_step` with what a generator yields; return what it returns."""
    iterator = iter(steps)
    while True:
        try:
            on_step(next(iterator))
        except StopIteration as end:
            return end.value


def _guarded(folder: RunFolder, function: Callable[[], Any]) -> Any:
    """Return the result of a function; what MLX raises is a RunError."""
    try:
        return function()
    except (RuntimeError, MemoryError) as error:
        if type(error) not in (RuntimeError, MemoryError):
            raise
        raise RunError(f"{folder.path}: {explain(str(error) or 'MemoryError')}") from error
