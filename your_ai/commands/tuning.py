"""`your_ai tune`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.commands import training
from your_ai.commands.models import find_or_fetch
from your_ai.commands.options import DownloadsUnasked, FileOfSettings, echo_note, with_options
from your_ai.config import AUTO, REWARD, TrainConfig, flag, negated, resolve
from your_ai.errors import UserError
from your_ai.gates.console import echo_error, echo_json, open_console
from your_ai.run.folder import discard

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from your_ai.dashboard.state import ViewState
    from your_ai.dashboard.trials import TrialRow
    from your_ai.session.tuning import TuneFolder

TRIALS = 20
REFUSED = {  # settings that a tune cannot have, with the reason
    "run": "a tune has several runs; use --name",
    "push_to": "a tune has several adapters; push the best one afterwards: your_ai push",
    "supervise": "each trial trains in its own processes",
    "keep_best": "the value of a trial is its best validation",
    "best_metric": "the value of a trial is its best validation",
    "adapter": "a tune searches the settings of adapters",
}


@with_options
def tune(
    config: FileOfSettings = None,
    trials: Annotated[
        int | None, typer.Option(help=f"Number of trials in all. [default: {TRIALS}]", metavar="N")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the tune; default: made of model, data and time.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue this tune, with its settings; --trials may give more trials.",
            metavar="NAME",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(help="Begin no trial after this many minutes.", metavar="MINUTES"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.")
    ] = False,
    yes: DownloadsUnasked = False,
    **flags: Any,
) -> None:
    """Find a learning rate, rank, layers and schedule: train trials, keep the best adapter."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError(
            "tune needs the package optuna; in the checkout of your_ai, run: pip install '.[tune]'"
        )
    from your_ai.session import tuning

    console = open_console()
    check_numbers(trials, timeout)
    if resume is not None:
        given = [("--config", config is not None), ("--name", name is not None)]
        given += [(flag(setting), True) for setting in flags]
        for other in (other for other, is_given in given if is_given):
            raise UserError(
                f"--resume {resume}: cannot be combined with {other}; only --trials may change"
            )
        folder = tuning.find_tune(resume)
    else:
        settings = resolve(flags, config, on_note=echo_note)
        if "run" not in flags:  # the file may be that of a run
            settings = dataclasses.replace(settings, run="")
        if settings.samples == AUTO:  # nobody reads those of every trial
            settings = dataclasses.replace(settings, samples=0)
        check_settings(settings, flags)
        training.fetch_data(settings, console, yes)
        settings = training.check(settings, detach=False)
        find_or_fetch(settings.model, console, yes)
        folder = tuning.create_tune(settings, name or "", sorted(flags), trials or TRIALS)
    try:
        with shown(console, as_json, folder) as view:
            rows, received = tuning.tune(folder, view, trials=trials, minutes=timeout)
    except BaseException:
        if resume is None and not folder.trial(0).checkpoints.exists():  # training never began
            discard(folder.path)
        raise
    if received:
        echo_error(f"stopped; continue with: your_ai tune --resume {folder.reference}")
        raise typer.Exit(128 + received)
    finish(folder, rows, console, as_json)


def check_numbers(trials: int | None, timeout: float | None) -> None:
    from your_ai.session.tune_study import MOST_TRIALS

    if trials is not None and not 1 <= trials <= MOST_TRIALS:
        raise UserError(f"--trials {trials}: must be at least 1 and at most {MOST_TRIALS:,}")
    if timeout is not None and not 0 < timeout < 1e9:
        raise UserError(f"--timeout {timeout}: must be a number of minutes above 0")


def check_settings(settings: TrainConfig, flags: Mapping[str, Any]) -> None:
    """Raise UserError for settings that a tune cannot have, and if nothing is left to search."""
    from your_ai.session.tune_space import SEARCHED

    defaults = TrainConfig()
    for name, reason in REFUSED.items():
        value = getattr(settings, name)
        if value != getattr(defaults, name):
            given = negated(name) if value is False else flag(name)
            raise UserError(f"{given}: {reason}")
    if set(SEARCHED) <= set(flags):
        names = ", ".join(map(flag, SEARCHED))
        raise UserError(f"nothing is left to search: leave out one of {names}")


def finish(folder: TuneFolder, rows: Sequence[TrialRow], console: Console, as_json: bool) -> None:
    """Write the report; show the trials, the best settings, and what to do with them."""
    from your_ai.dashboard.trials import best_trial, settings_text, trials_table, write_trial_report

    report = None
    try:
        write_trial_report(rows, folder.name, folder.best.read_text("utf-8"), folder.report)
        report = str(folder.report)
    except (UserError, OSError) as error:
        echo_error(f"note: no report: {error}")
    best = best_trial(rows)
    if as_json:
        echo_json(
            {
                "tune": folder.name,
                "folder": str(folder.path),
                "trials": [dataclasses.asdict(row) for row in rows],
                "best": None if best is None else best.number,
                "preset": str(folder.best),
                "report": report,
            }
        )
        return
    console.print(trials_table(rows, console.width))
    if best is not None:
        run = folder.trial(best.number).reference
        is_reward = folder.trial(best.number).read_config().objective == REWARD
        for line in (
            f"best: trial {best.number:03}: {settings_text(best.settings)}",
            f"  its adapter: {folder.trial(best.number).adapter}",
            f"  your_ai {'score' if is_reward else 'generate'} {run}",
            f"  your_ai train --config {folder.best}",
        ):
            console.print(line, soft_wrap=True)
    if report is not None:
        console.print(f"report: {report}", soft_wrap=True)


@dataclasses.dataclass
class TuneLines:
    """Prints a line for each trial, and on a terminal what the present one does."""

    console: Console | None
    """None prints nothing, for --json."""
    status: Status | None = None

    def progress(self, number: int, settings: Mapping[str, Any], state: ViewState) -> None:
        from your_ai.dashboard.trials import progress_text

        if self.status is not None:
            self.status.update(progress_text(number, settings, state))

    def ended(self, row: TrialRow) -> None:
        from your_ai.dashboard.trials import trial_line

        if self.console is not None:
            self.console.print(trial_line(row), soft_wrap=True)


@contextlib.contextmanager
def shown(console: Console, as_json: bool, folder: TuneFolder) -> Iterator[TuneLines]:
    """Yield a view of the tune."""
    if as_json:
        yield TuneLines(None)
        return
    console.print(f"tune {folder.name}: {folder.path}", soft_wrap=True)
    with console.status("starting") if console.is_terminal else contextlib.nullcontext() as status:
        yield TuneLines(console, status)
