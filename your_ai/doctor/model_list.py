"""`your_ai models`: local models, other known models, and whether each can train here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from your_ai.config import DEMO
from your_ai.doctor.machine import read_machine
from your_ai.doctor.recommend import (
    USUAL,
    MachineRoom,
    first_that_fits,
    recommend,
    room_here,
    tier_of,
    workloads,
)
from your_ai.errors import UserError
from your_ai.files import packaged
from your_ai.gates.text import counted, size_text
from your_ai.hub.local import Local, bits_of, local_models, size_of
from your_ai.hub.online import OnlineModel
from your_ai.hub.registry import Known, known
from your_ai.memory.facts import facts_of

WORDS = {  # for recommend's tiers
    "full": "yes",
    "tight": "barely",
    "slow": "slowly",
    "light": "small adapters",
    "": "no",
}
MOST_SHOWN = 40
STYLES = {"yes": "green", "no": "red"}


@dataclass(frozen=True, kw_only=True)
class ModelRow:
    name: str
    repo: str | None
    where: str
    """your_ai, models, cache, or empty if it is not on this machine."""
    size_bytes: int
    """Size on disk, now or after a download."""
    parameters: int | None = None
    bits: int | None = None
    licence: str | None = None
    fits: str | None = None
    """How it trains in this machine's available memory: one of WORDS' values; None if unknown."""
    fault: str | None = None
    """What is wrong with it, e.g. a missing file."""


def model_rows(room: MachineRoom | None = None) -> list[ModelRow]:
    """The model that comes with your_ai, the local models by name, then the known models that are
    not local. Raises UserError.
    """
    room = room_here(read_machine()) if room is None else room
    here = [of_local(local, room) for local in (demo(), *local_models())]
    there = {row.repo for row in here if row.fault is None}
    return [*here, *(of_known(k, room) for k in known().values() if k.repo not in there)]


def demo() -> Local:
    """The model that comes with your_ai."""
    folder = packaged("models", "demo")
    return Local(
        name=DEMO,
        folder=folder,
        where="your_ai",
        size_bytes=size_of(folder),
        bits=bits_of(folder),
    )


def of_known(model: Known, room: MachineRoom) -> ModelRow:
    return ModelRow(
        name=model.alias,
        repo=model.repo,
        where="",
        size_bytes=model.bytes_on_disk,
        parameters=model.parameters,
        bits=model.bits,
        licence=model.licence,
        fits=fit_of_known(model, room),
    )


def of_local(local: Local, room: MachineRoom) -> ModelRow:
    model = known().get(local.alias) if local.alias else None
    if local.fault is not None:
        fits = None
    elif model is not None:
        fits = fit_of_known(model, room)
    else:
        fits = fit_of_folder(local.folder, room)
    return ModelRow(
        name=local.alias or local.name,
        repo=local.repo,
        where=local.where,
        size_bytes=local.size_bytes,
        parameters=model.parameters if model else None,
        bits=local.bits,
        licence=model.licence if model else None,
        fits=fits,
        fault=local.fault,
    )


def fit_of_known(model: Known, room: MachineRoom) -> str:
    best = next(iter(recommend(room, [model])), None)
    return WORDS[best.tier if best is not None else ""]


def fit_of_folder(folder: Path, room: MachineRoom) -> str | None:
    """Return how a local model trains here; None if the planner cannot read the folder."""
    try:
        facts = facts_of(folder, room.float_bytes)
    except (UserError, ValueError, LookupError):
        return None
    if not facts.blocks or not facts.linears:
        return None
    limit_bytes = room.limit.limit_bytes
    found = first_that_fits(workloads(facts, USUAL, room), limit_bytes)
    if found is None:
        return WORDS[""]
    workload, _ = found
    return WORDS[tier_of(workload, limit_bytes) or USUAL.name]


def models_table(found: Sequence[ModelRow], width: int = 80) -> Table:
    """Show the models. The column `trains` says whether training fits into the memory here."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    drawn.add_column("model", no_wrap=True)
    for head in ("size", "bits"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for head in ("here", "trains"):
        drawn.add_column(head, no_wrap=True)
    drawn.add_column("licence", no_wrap=True)
    if width > 100:
        drawn.add_column("repo", no_wrap=True, overflow="ellipsis")
    for row in found:
        fits = row.fits or "?"
        trains = Text(row.fault, "red") if row.fault else Text(fits, STYLES.get(fits, ""))
        bits = "-" if row.bits is None else str(row.bits)
        where = [Text(row.licence or "-"), *([Text(row.repo or "-")] if width > 100 else [])]
        size = size_text(row.size_bytes)
        drawn.add_row(Text(row.name), size, bits, row.where or "-", trains, *where)
    return drawn


def shown_online(found: Sequence[OnlineModel]) -> list[OnlineModel]:
    """The new ones; if all are new or none is, the most downloaded ones."""
    new = [model for model in found if model.is_new]
    return new if 0 < len(new) < len(found) else list(found[:MOST_SHOWN])


def news(found: Sequence[OnlineModel]) -> str:
    """Say how many models of the hub are new: all of them at the first look."""
    count = counted(len(found), "quantized model")
    new = sum(model.is_new for model in found)
    known_before = "not looked before" if new == len(found) else f"{new} new since the last look"
    return f"{count} of mlx-community that mlx-lm can load; {known_before}"


def online_table(found: Sequence[OnlineModel]) -> Table:
    """Show models of the hub. The column `alias` is empty if `--model` takes the repo itself."""
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    drawn.add_column("repo", overflow="fold")
    for head in ("alias", "architecture"):
        drawn.add_column(head, no_wrap=True)
    for head in ("bits", "downloads"):
        drawn.add_column(head, justify="right", no_wrap=True)
    for model in shown_online(found):
        alias, kind = model.alias or "-", model.model_type
        texts = [Text(text) for text in (model.repo, alias, kind, str(model.bits))]
        drawn.add_row(*texts, f"{model.downloads:,}")
    return drawn
