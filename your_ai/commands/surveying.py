"""`your_ai data look` and `your_ai data make`."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from your_ai.commands.beginning import show_records
from your_ai.commands.options import (
    CommandWithPanels,
    JsonObject,
    echo_note,
    rows_read,
    with_options,
)
from your_ai.config import DEMO, DEMO_DATA, FIELDS, TrainConfig, build, coerce, defaults, flag
from your_ai.config.requests import MakeDataRequest, SurveyRequest
from your_ai.data.column_hints import UnknownColumns
from your_ai.gates.console import echo, echo_error, echo_json, open_console
from your_ai.gates.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.data.survey import SplitSurvey, Survey

BAR = 40  # characters of the longest bar
NAMES = {"train": "training", "valid": "validation", "test": "test"}


class LookByDefault(TyperGroup):
    """The commands of `data`: without the name of one, it is `look`, as in `your_ai data FILE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = [LOOK, *args]
        return super().parse_args(ctx, args)


LOOK = "look"
app = typer.Typer(
    name="data",
    help="Look at data before it is trained, or make some of documents; `data FILE` looks.",
    cls=LookByDefault,
)


@app.command(LOOK, cls=CommandWithPanels)
@with_options
def look(
    request: SurveyRequest,
    as_json: JsonObject = False,
    yes: Annotated[bool, typer.Option(help="Download a missing dataset without asking.")] = False,
) -> None:
    """Show what training would see of the data: rows, lengths, problems, and what is trained."""
    from your_ai.commands.models import fetch_datasets
    from your_ai.data import survey as surveying
    from your_ai.data.sources import checked_settings, find_splits

    settings = {
        name: coerce(name, value, flag(name))
        for name, value in vars(request).items()
        if name in FIELDS and value is not None
    }
    fetch_datasets(request.data, open_console(stderr=True), yes)
    try:
        config = checked_settings(build(settings, "settings"), False, rows_read())
    except UnknownColumns:
        if not as_json:
            show_records(request.data)
        raise
    tokenizer, notes = tokenizer_of(config, named=request.model is not None)
    found = surveying.survey(
        find_splits(config), config, tokenizer, request.draw, notes, echo_error
    )
    if as_json:
        echo_json(surveying.as_json(found, config))
    else:
        show(found, config, open_console())


@app.command(cls=CommandWithPanels)
@with_options
def make(request: MakeDataRequest, as_json: JsonObject = False) -> None:
    """Make training rows of documents: questions and answers that a local model writes and checks.

    Started again after it was stopped, it goes on.
    """
    from your_ai.api import make_data

    made = make_data(**{**vars(request), "on_note": echo_note})
    if as_json:
        echo_json({**vars(made), "path": str(made.path), "dropped_path": str(made.dropped_path)})
        return
    chunks, documents = counted(made.chunks, "chunk"), counted(made.documents, "document")
    echo(f"{made.path}: {counted(made.rows, 'row')} made of {chunks} of {documents}")
    if made.dropped:
        echo(f"{made.dropped_path}: {sum(made.dropped.values()):,} dropped")
    for reason, count in made.dropped.items():
        echo(f"  {count:,} {reason}")
    file = shlex.quote(str(made.path))
    echo(f"next:\n  your_ai data look {file}\n  your_ai train --data {file}")


def tokenizer_of(config: TrainConfig, named: bool) -> tuple[object | None, list[str]]:
    """The tokenizer of the model, and notes on it.

    None, and a note is printed, if no model was named and it is not on this machine.
    """
    from your_ai.hub.find import Missing, find_model

    name = DEMO if config.data in DEMO_DATA and not named else config.model
    try:
        folder = find_model(name)
    except Missing:
        if named:
            raise
        echo_error(
            f"note: {name} is not on this machine: lengths are in characters; name a model with "
            "--model to see tokens"
        )
        return None, []
    from your_ai.nets.tokenizer import end_notes, open_tokenizer

    tokenizer = open_tokenizer(folder)
    return tokenizer, end_notes(folder, tokenizer)


def show(found: Survey, config: TrainConfig, console: Console) -> None:
    from rich.text import Text

    from your_ai.data.survey import BAD, REJECTED

    for note in found.notes:
        console.print(note)
    for name, split in found.splits.items():
        show_split(name, split, found.unit, config, console)
    colored = console.color_system is not None
    for row in found.drawn:
        rejected = row.answer in (REJECTED, BAD)
        style, color = ("bold red", "red") if rejected else ("bold green", "green")
        begin, end = ("[-", "-]") if rejected else ("[[", "]]")
        trained_as = "made less likely" if rejected else "trained"
        which = f", {row.answer}" if row.answer else ""
        marks = color if colored else f"in {begin} {end}"
        console.print(f"\n{row.where}{which} ({marks}: {trained_as})")
        if row.problem:
            console.print(f"training refuses it: {row.problem}", soft_wrap=True)
        line = Text()
        for text, trained in row.parts:
            marked = f"{begin}{text}{end}" if trained and not colored else text
            line.append(marked, style=style if trained else "dim")
        console.print(line)


def show_split(
    name: str, split: SplitSurvey, unit: str, config: TrainConfig, console: Console
) -> None:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in split.kinds.items())
    console.print(f"\n{NAMES[name]}: {kinds}")
    for count, what in (
        (split.duplicates, "equal to a row before"),
        (split.in_training, "also in the training data"),
        (split.empty, "without an answer or a text: training refuses them"),
        (split.refused, "that training refuses"),
        (split.too_long, f"longer than --max-seq-length {config.max_seq_length}: see --too-long"),
    ):
        if count:
            console.print(f"  {count:,} {what}")
    if split.problem:
        console.print(f"  first: {split.problem}", soft_wrap=True)
    if not split.lengths:
        return
    least, median, most_of_them, most = split.quantiles()
    from your_ai.dashboard.view import duration
    from your_ai.session.run_list import seconds_for

    console.print(
        f"  {unit} per row: {least:,} to {most:,}, median {median:,}, 95% up to {most_of_them:,}"
    )
    total = sum(split.lengths)
    if unit == "tokens":
        share = split.trained_tokens / total
        rows = split.rows - split.empty - split.refused
        rows_per_step = defaults.rows_per_step(config, rows)
        steps = -(-rows // rows_per_step)
        console.print(
            f"  tokens: {total:,}, of which {split.trained_tokens:,} are trained ({share:.0%})"
        )
        if name == "train":
            seconds = seconds_for(total, config.model)
            took = (
                ""
                if seconds is None
                else f", about {duration(seconds)} at the speed of the newest run"
            )
            length = f"{counted(steps, 'step')} of {counted(rows_per_step, 'row')}"
            console.print(f"  an epoch: {length}{took}")
    bins = split.histogram()
    highest = max(count for *_, count in bins)
    for begin, end, count in bins:
        bar = "#" * round(BAR * count / highest)
        console.print(f"  {begin:>7,} - {end - 1:>7,}  {count:>8,}  {bar}")
