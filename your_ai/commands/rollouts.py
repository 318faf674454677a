"""`your_ai rollouts`: read what a run generated, and what each completion earned."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.commands.options import JsonObject, RunOrNewest
from your_ai.config import SOFT
from your_ai.data.turns import ASSISTANT, REASONING, TOOL
from your_ai.errors import UserError
from your_ai.gates.console import echo_json, open_console
from your_ai.gates.text import counted, message_line
from your_ai.run.rollout_files import DONE, by_reward, known_reward

if TYPE_CHECKING:
    from rich.console import RenderableType

    from your_ai.run.folder import RunFolder
    from your_ai.run.rollout_files import ConversationRecord, RolloutRecord

LIMIT = 10
INDENT = 4  # cells before a text


def rollouts(
    run: RunOrNewest = None,
    step: Annotated[int | None, typer.Option(help="Training step; default: the last.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Completions of the step, highest reward first.")
    ] = False,
    worst: Annotated[
        bool, typer.Option("--worst", help="Completions of the step, lowest reward first.")
    ] = False,
    limit: Annotated[
        int,
        typer.Option(
            help="Maximum number of prompts, or of completions with --best or --worst.", min=1
        ),
    ] = LIMIT,
    as_json: JsonObject = False,
) -> None:
    """Show the completions that a run generated for a training step, with their rewards."""
    from your_ai.run import folder as folders
    from your_ai.session import run_list

    if best and worst:
        raise UserError("--best and --worst: give one of them")
    folder = run_list.newest() if run is None else folders.find(run)
    step, records = read(folder, step)
    if best or worst:
        groups = [[record] for record in by_reward(records, highest=best)]
    else:
        groups = by_prompt(records)
    if as_json:
        shown = [as_object(record) for group in groups[:limit] for record in group]
        if not has_advantages(folder):
            shown = [{**record, "advantage": None} for record in shown]
        echo_json({"run": folder.name, "step": step, "rollouts": shown})
        return
    console = open_console()
    for part in heading(folder.name, step, records):
        console.print(part)
    with_advantage = has_advantages(folder)
    for group in groups[:limit]:
        for part in page_of(group, with_advantage):
            console.print(part)
    if (left := len(groups) - limit) > 0:
        what = "completion" if best or worst else "prompt"
        console.print(f"\n{counted(left, f'more {what}')}: --limit {len(groups)} shows all")


def read(folder: RunFolder, step: int | None) -> tuple[int, list[RolloutRecord]]:
    """The rollouts of a step, or of the last one, with the number of the step.

    Raises UserError if they are not there, or damaged.
    """
    from your_ai.run.rollout_files import FOLDER, read_rollouts, rollout_file, rollout_steps

    try:
        steps = rollout_steps(folder.path)
    except OSError as error:
        where = folder.path / FOLDER
        raise UserError(f"{where}: cannot be read ({error.strerror})") from error
    if not steps:
        raise UserError(
            f"{folder.path}: has no rollouts; only a run that trains on rewards writes them, "
            "before each step"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        nearest = [*[s for s in steps if s < step][-1:], *[s for s in steps if s > step][:1]]
        names = " and ".join(map(str, nearest))
        raise UserError(f"{folder.path}: has no rollouts of step {step}; the nearest: {names}")
    path = rollout_file(folder.path, step)
    records = read_rollouts(path) if path.is_file() else None
    if records is None:
        raise UserError(f"{path}: is damaged, or is no file of rollouts; choose another --step")
    return step, records


def by_prompt(records: Sequence[RolloutRecord]) -> list[list[RolloutRecord]]:
    """The completions of each prompt, in the order of the file."""
    groups = [[record] for record in records[:1]]
    for before, record in pairwise(records):
        if record.row == before.row and record.sample > before.sample:
            groups[-1].append(record)
        else:
            groups.append([record])
    return groups


def heading(name: str, step: int, records: Sequence[RolloutRecord]) -> Iterator[RenderableType]:
    from rich.text import Text

    rewards = [reward for r in records if (reward := known_reward(r.reward)) is not None]
    parts = [
        counted(len(by_prompt(records)), "prompt"),
        counted(len(records), "completion"),
        f"mean reward {value_text(sum(rewards) / len(rewards) if rewards else None)}",
    ]
    if missing := len(records) - len(rewards):
        parts.append(counted(missing, "missing reward"))
    if cut_off := sum(not record.stopped for record in records):
        parts.append(f"{cut_off:,} cut off")
    yield Text(message_line(f"{name}: rollouts of step {step}"), style="bold")
    yield ", ".join(parts)


def has_advantages(folder: RunFolder) -> bool:
    """Return whether the completions of a run are compared: soft trains through each by itself."""
    settings = folder.settings()
    return settings is None or settings.objective != SOFT


def page_of(group: Sequence[RolloutRecord], with_advantage: bool) -> Iterator[RenderableType]:
    """A prompt with its expected answer, then its completions."""
    from rich.padding import Padding
    from rich.text import Text

    first = group[0]
    yield Text(f"\nprompt  {message_line(first.where.rpartition('/')[2])}", style="bold cyan")
    yield Padding(Text(first.question), (0, 0, 0, INDENT))
    if first.expected is not None:
        yield Text("  expected", style="dim")
        yield Padding(Text(str(first.expected)), (0, 0, 0, INDENT))
    for record in group:
        yield Text(f"  {facts_of(record, with_advantage)}", style=style_of(record))
        if record.conversation is None:
            yield padded(record.completion, INDENT)
        else:
            yield from turns_of(record.conversation)
        if record.reply is not None:
            yield Text("    judge", style="dim")
            yield Padding(Text(str(record.reply)), (0, 0, 0, 2 * INDENT))


def padded(text: str, cells: int) -> RenderableType:
    from rich.padding import Padding
    from rich.text import Text

    shown = Text(text) if text.strip() else Text("(empty)", style="dim")
    return Padding(shown, (0, 0, 0, cells))


def turns_of(talk: ConversationRecord) -> Iterator[RenderableType]:
    """A conversation, turn by turn: what the model said and called, what it heard, and what the
    environment gave for it."""
    from rich.text import Text

    turn = 0
    for message in talk.said:
        role, facts = str(message.get("role")), ""
        if role == ASSISTANT:
            parts = [counted(talk.turns[turn], "token")]
            if talk.rewards[turn] is not None:
                parts.append(f"reward {value_text(talk.rewards[turn])}")
            if talk.advantages is not None:
                parts.append(f"advantage {talk.advantages[turn]:+.3g}")
            facts, turn = f" ({', '.join(parts)})", turn + 1
        name = f" {message['name']}" if role == TOOL and message.get("name") else ""
        yield Text(f"    {message_line(role + name)}{facts}", style="dim")
        calls = [call_text(call) for call in message.get("tool_calls") or ()]
        said = [str(message.get(key) or "") for key in (*REASONING, "content")]
        texts = [text for text in (*said, *calls) if text.strip()]
        yield padded("\n".join(texts), 2 * INDENT)
    if talk.ended != DONE:
        yield Text(f"    ended: {message_line(talk.ended)}", style="yellow")


def call_text(call: Any) -> str:
    """A call of a tool as Python would write it."""
    function = call.get("function") if isinstance(call, dict) else None
    given = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(given, dict):
        return str(call)
    values = ", ".join(f"{name}={value!r}" for name, value in given.items())
    return f"{function.get('name')}({values})"


def facts_of(record: RolloutRecord, with_advantage: bool) -> str:
    """The reward of a completion, where it comes from, and how long the completion is."""
    parts = [f"completion {record.sample + 1}: reward {value_text(record.reward)}"]
    parts += [f"{message_line(name)} {value_text(v)}" for name, v in record.rewards.items()]
    parts += [f"advantage {record.advantage:+.3g}"] if with_advantage else []
    parts.append(counted(len(record.tokens), "token"))
    return ", ".join([*parts, *([] if record.stopped else ["cut off"])])


def style_of(record: RolloutRecord) -> str:
    if known_reward(record.reward) is None:
        return "yellow"
    return "green" if record.advantage > 0 else "red" if record.advantage < 0 else "bold"


def value_text(value: float | None) -> str:
    return "missing" if known_reward(value) is None else f"{value:.4g}"


def as_object(record: RolloutRecord) -> dict[str, Any]:
    """A record for JSON, which has no NaN."""
    values = {name: known_reward(value) for name, value in record.rewards.items()}
    found = {"reward": known_reward(record.reward), "rewards": values}
    return dataclasses.asdict(record) | found | {"advantage": known_reward(record.advantage)}
