"""`your_ai init`: ask what to train, and write a commented YAML file."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.commands.options import columns_of, joined, rows_read, text_of
from your_ai.config import AUTO, DEMO, DEMO_DATA, GRPO, SFT, SOFT, TrainConfig, build, coerce, flag
from your_ai.data.column_hints import MEANINGS, UnknownColumns, likely_columns, names_pair, roles_of
from your_ai.errors import UserError, named_errors
from your_ai.gates.console import ask, echo, echo_error
from your_ai.gates.text import counted, nearest, shortened, shown

if TYPE_CHECKING:
    from your_ai.data.look import DataLook
    from your_ai.doctor.recommend import MachineRoom
    from your_ai.run.folder import RunFolder

# Ask which columns of a table are the question and the answer


RECORDS = 3  # shown before the questions
ABOUT_OBJECTIVE = "What for (sft, dpo, kto, reward, grpo ...)"


def show_records(data: str) -> None:
    """Show the first records of --data as they are, since it is unknown what they mean."""
    from your_ai.data.look import first_records

    for where, record in first_records(data, RECORDS):
        echo(where)
        for name, value in record.items():
            echo(f"  {shortened(name, 30)}: {shown(value, 100)}")
        echo()


def ask_columns(
    data: str, unknown: UnknownColumns, objective: str | None
) -> tuple[str, tuple[str, ...]]:
    """Show rows, and ask what the columns are until each answer is one. Return the objective, and
    the value of --columns.

    objective: None asks for it, too.
    """
    echo(f"  data: the names of the columns do not tell what they are: {', '.join(unknown.record)}")
    show_records(data)
    record = unknown.record
    while objective is None:
        text = ask(ABOUT_OBJECTIVE, "dpo" if names_pair(record) else SFT)
        try:
            objective = coerce("objective", text.strip(), "--objective")
        except UserError as error:
            echo_error(f"error: {error}")
    kind = TrainConfig(objective=objective).row_kind  # type: ignore[arg-type]
    likely = likely_columns(kind, record)
    found: dict[str, str] = {}
    for role in roles_of(kind, record):
        left = [name for name in record if name not in found.values()]
        if not left:
            raise UserError(f"--data {shortened(data)}: has no column left for {MEANINGS[role]}")
        guess = likely.get(role)
        default = guess if guess in left else left[0]
        found[role] = ask_column(f"Which column is {MEANINGS[role]}", default, record, found)
    return objective, tuple(f"{role}={column}" for role, column in found.items())


def ask_column(
    question: str, default: str, record: Mapping[str, Any], taken: Mapping[str, str]
) -> str:
    """Ask until the answer is a column that has no role yet."""
    while True:
        name = ask(question, default).strip()
        column = next((c for c in record if name in (c, c.strip())), None)
        if column is None:
            hint = nearest(name, record) or f"; columns: {', '.join(record)}"
            echo_error(f"error: no column {shortened(name)}{hint}")
        elif column in taken.values():
            role = next(role for role, other in taken.items() if other == column)
            echo_error(f"error: {shortened(column)} is already {MEANINGS[role]}")
        else:
            return column


FILE = "your_ai.yaml"
FOLDERS = ("data", "my-data")  # where the data is looked for first
PLACEHOLDER = "length:200"  # a reward for prompts without expected answers


@dataclass(frozen=True)
class Chosen:
    """The answer to a question."""

    settings: dict[str, Any]
    """What it sets; nothing for a default that `train` chooses."""
    note: str = ""
    """What was found out about it, for the user."""
    look: DataLook | None = None
    """Of data: what was found in the rows; None for a dataset that is not here."""
    objective: str | None = None
    """Of data: the objective, if it was asked for with the columns."""


@dataclass(frozen=True)
class Asker:
    """The source of answers: an option, the user, or the default."""

    interactive: bool

    def __call__(
        self,
        name: str,
        question: Callable[[], tuple[str, str]],
        given: str | None,
        read: Callable[[str], Chosen],
    ) -> Chosen:
        """Return what `read` makes of the answer, after asking until it is valid.

        question: makes the question and the default; called only if they are needed.
        Raises UserError if an answer that was not typed is wrong.
        """
        if given is not None:
            return self.noted(name, read(given))
        text, default = question()
        if not self.interactive:
            return self.noted(name, read(default))
        while True:
            try:
                return self.noted(name, read(ask(text, default).strip()))
            except UserError as error:
                echo_error(f"error: {error}")

    def noted(self, name: str, answer: Chosen) -> Chosen:
        if answer.note:
            echo(f"  {name}: {answer.note}")
        return answer


def init(
    file: Annotated[str, typer.Argument(help="The file to write.", metavar="FILE")] = FILE,
    model: Annotated[str | None, typer.Option(help=text_of("model"), metavar="TEXT")] = None,
    data: Annotated[list[str] | None, typer.Option(help=text_of("data"), metavar="TEXT")] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help=text_of("columns"), metavar="NAMES")
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help=text_of("objective"), metavar="NAME")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(help=text_of("max_memory"), metavar="X|auto")
    ] = None,
    run: Annotated[str | None, typer.Option(help=text_of("run"), metavar="NAME|auto")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults for the others.")
    ] = False,
) -> None:
    """Ask five questions, and write a commented YAML file for `train --config`."""
    from your_ai.config.reading import commented_yaml

    path = Path(file)
    check_place(path, force)
    given = {
        "model": model,
        "data": None if data is None else joined(data),
        "objective": objective,
        "max_memory": max_memory,
        "run": run,
    }
    missing = [flag(name) for name, value in given.items() if value is None]
    if missing and not yes and not sys.stdin.isatty():
        raise UserError(
            f"init: standard input is no terminal, so nobody can be asked for {', '.join(missing)};"
            " give them as options, or --yes for the defaults"
        )
    asker = Asker(interactive=not yes)
    named = columns_of(columns)
    settings = answered(asker, given, named)
    text = commented_yaml(settings)
    check_place(path, force)
    write(path, text)
    echo(f"wrote {path}; next:\n  your_ai train --config {shlex.quote(file)}")


def check_place(path: Path, force: bool) -> None:
    """Raise UserError if the file cannot be written there."""
    if not os.path.lexists(path):
        if not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}")
    elif path.is_symlink() or not path.is_file():
        raise UserError(f"{path}: is not a regular file; give another name")
    elif not force:
        raise UserError(f"{path}: exists; give another name, or --force to overwrite it")


def write(path: Path, text: str) -> None:
    from your_ai.files import replace_text

    with named_errors(path, "written"):
        replace_text(path, text)


def answered(
    asker: Asker, given: Mapping[str, str | None], columns: tuple[str, ...]
) -> dict[str, Any]:
    """The settings of the answers to all questions. Raises UserError for a wrong option.

    columns: the value of --columns; where it is empty and needed, the user is asked for it.
    """

    def about_memory() -> tuple[str, str]:
        gb = f"{room_for(None).limit.limit_bytes / 1e9:.1f}"
        return f"Memory budget in GB (auto: what is free, now {gb})", AUTO

    about_model = "Model (a name of `your_ai models`, a folder, or OWNER/NAME)"
    about_data = "Data (a file, a folder, or hf:OWNER/NAME)"
    about_run = "Name of the run (auto: made of model, data and time)"
    model = asker("model", lambda: (about_model, recommended(given)), given["model"], read_model)
    data = asker(
        "data",
        lambda: (about_data, data_here()),
        given["data"],
        lambda text: read_data(text, columns, given["objective"], asker.interactive),
    )
    likely = SFT if data.look is None else data.look.objective
    objective = asker(
        "objective",
        lambda: (ABOUT_OBJECTIVE, likely),
        data.objective or given["objective"],
        lambda text: read_objective(text, data),
    )
    memory = asker("max_memory", about_memory, given["max_memory"], read_memory)
    run = asker("run", lambda: (about_run, AUTO), given["run"], read_run)
    answers = (model, data, objective, memory, run)
    settings = {name: value for answer in answers for name, value in answer.settings.items()}
    build(settings, "init")  # what contradicts
    return settings


def room_for(max_memory: str | None) -> MachineRoom:
    """The room of this machine, or that of the budget that was given."""
    from your_ai.doctor.machine import read_machine
    from your_ai.doctor.recommend import room_here

    room = room_here(read_machine())
    gb = None if max_memory is None else read_memory(max_memory).settings.get("max_memory")
    if gb is None:
        return room
    return replace(room, limit=replace(room.limit, limit_bytes=int(gb * 1e9)))


def recommended(given: Mapping[str, str | None]) -> str:
    """The first model that `your_ai recommend` names; the demo's if none fits."""
    from your_ai.doctor.recommend import recommend

    objective = coerce("objective", given["objective"] or SFT, "--objective")
    best = next(iter(recommend(room_for(given["max_memory"]), objective=objective)), None)
    return DEMO if best is None else best.known.alias


def data_here() -> str:
    """The data that is probably meant: a folder with training rows, or else the demo."""
    from your_ai.data.sources import source_of

    for name in FOLDERS:
        if Path(name).is_dir():
            try:
                source_of(name, "--data", to_train=True)
            except UserError:
                continue
            return name
    return DEMO


def checked_text(name: str, text: str) -> str:
    """A setting's text that TrainConfig accepts. Raises UserError."""
    if not text:
        raise UserError(f"{flag(name)}: is empty")
    found: str = getattr(build({name: text}, "init"), name)
    return found


def read_model(text: str) -> Chosen:
    from your_ai.hub.find import Missing, find_model
    from your_ai.hub.registry import known

    name = checked_text("model", text)
    try:
        folder = find_model(name)
        if name not in (DEMO, *known()) and ("/" not in name or Path(name).expanduser().is_dir()):
            name = whole_path(str(folder))
    except Missing as missing:
        size = f", {missing.size_text}" if missing.size_text else ""
        return Chosen({"model": name}, f"not on this machine; train asks to download it{size}")
    return Chosen({"model": name})


def read_data(text: str, columns: Sequence[str], objective: str | None, asks: bool) -> Chosen:
    """The data; its columns are asked for if they are needed and not given, and if `asks`."""
    name = checked_text("data", text)
    try:
        return look_into(name, columns, objective)
    except UnknownColumns as unknown:
        if not asks or columns:
            raise
        objective, chosen = ask_columns(name, unknown, objective)
        return replace(look_into(name, chosen, objective), objective=objective)


def look_into(name: str, columns: Sequence[str], objective: str | None) -> Chosen:
    """The data, and what was found in it.

    objective: what the rows are for, where their columns do not tell. Raises UserError.
    """
    from your_ai.data.hub_datasets import MissingDataset
    from your_ai.data.look import look
    from your_ai.data.sources import STDIN

    if name == STDIN:
        raise UserError("--data -: init cannot keep standard input; give a file")
    settings: dict[str, Any] = {"data": from_anywhere(name)}
    settings |= {"columns": tuple(columns)} if columns else {}
    try:
        found = look(name, None, rows_read(), columns)
    except MissingDataset:
        return Chosen(settings, "not on this machine; train asks to download it")
    except UnknownColumns:
        if objective is not None:
            look(name, coerce("objective", objective, "--objective"), rows_read(), columns)
        raise
    problems = (
        f"; training refuses {found.problems:,}, first: {found.problem}" if found.problems else ""
    )
    note = f"{counted(found.rows, 'row')}, {found.form}{problems}"
    for noticed in found.notes:
        echo(f"  data: {noticed}")
    kind = "embedded data" if name in DEMO_DATA else form_of_source(name)
    return Chosen(settings, f"{kind}: {note}", look=found)


def from_anywhere(data: str) -> str:
    """The value of --data with whole paths, so that the file of settings works in any folder."""
    from your_ai.data.sources import exists, names_in

    parts = []
    for name, share in names_in(data).items():
        path = name if name in DEMO_DATA or not exists(name) else whole_path(name)
        parts.append(path if share == 1 else f"{path}={share:g}")
    return ",".join(parts)


def whole_path(name: str) -> str:
    return str(Path(name).expanduser().absolute())


def form_of_source(name: str) -> str:
    """`CSV`, or the forms of several files, by their names."""
    from your_ai.data.records import form_of
    from your_ai.data.sources import sources_of

    files = [file for source in sources_of(name) for file in source.splits["train"]]
    return ", ".join(dict.fromkeys(form_of(file) for file in files))


def read_objective(text: str, data: Chosen) -> Chosen:
    """The objective, checked with the rows; with rewards, also a first one, or a reward model."""
    from your_ai.data.look import look

    name, seen = coerce("objective", text, "--objective"), data.look
    if seen is not None and name != seen.objective:
        columns = data.settings.get("columns", ())
        seen = look(data.settings["data"], name, rows_read(), columns)
    if name == SOFT:
        run = reward_model_here()
        against = f"run:{whole_path(str(run.path))}"  # so that the file works in any folder
        note = f"trains against run:{run.name}, the newest"
        return Chosen({"objective": name, "reward_model": against}, note)
    if name != GRPO:
        return Chosen({"objective": name})
    if seen is not None and not seen.expected:
        note = f"rewards {PLACEHOLDER} for now: change reward in the file to what you want"
        return Chosen({"objective": name, "reward": (PLACEHOLDER,)}, note)
    return Chosen({"objective": name, "reward": ("exact_match",)}, "rewards exact_match")


def reward_model_here() -> RunFolder:
    """The newest reward model in ./runs. Raises UserError if there is none."""
    from your_ai.session.run_list import newest_reward_model

    found = newest_reward_model()
    if found is None:
        raise UserError(
            "--objective soft: no run in ./runs is a reward model to train against; train one "
            "first: your_ai train --objective reward"
        )
    return found


def read_memory(text: str) -> Chosen:
    """The budget in GB; `auto` sets nothing."""
    from your_ai.memory.limit import memory_here, requested

    if text == AUTO:
        return Chosen({})
    gb = build({"max_memory": text}, "init").max_memory
    assert gb is not None
    requested(memory_here(), gb, force=False)
    return Chosen({"max_memory": gb})


def read_run(text: str) -> Chosen:
    from your_ai.run.folder import place_of

    if text == AUTO:
        return Chosen({})
    folder = place_of(text)
    if folder.path.exists():
        raise UserError(f"--run {shortened(text)}: {folder.path} exists; choose another name")
    return Chosen({"run": text})
