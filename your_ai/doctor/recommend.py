"""`your_ai recommend`: which known models can train in a machine's memory, and how.

Every model is planned as `your_ai train` does by default, for rows of 2,048 tokens, and where that
leaves room also for long rows. This module only estimates: it does not import mlx and loads
nothing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from your_ai.config import FIELDS, SFT, TrainConfig, coerce, defaults
from your_ai.doctor.machine import MachineInfo, limit_of
from your_ai.errors import UserError
from your_ai.gates.text import counted, size_text
from your_ai.hub.registry import Known, known
from your_ai.memory import limit as limits
from your_ai.memory.facts import ModelFacts, facts_of_known
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import Choice, DoesNotFit, choose, options
from your_ai.memory.workload import (
    PYTHON_BYTES,
    SCORED_FIRST,
    WHOLE,
    ProcessFacts,
    Training,
    Workload,
    words,
)

DATA = "my-data/"
COMFORT_SHARE = 0.9  # of the limit, because estimates for an unmeasured device are rough
MODEL_FIELDS = ("alias", "repo", "parameters", "active_parameters")
WIDTH = 80
COLUMNS = {"model": 12, "tokens": 6, "rank": 4, "layers": 6, "targets": 10, "at least": 8,
           "plan": 8, "work": 6}  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """The rows that a run trains."""

    name: str
    seq_len: int
    batch: int
    objective: str = SFT

    @property
    def texts_together(self) -> int:
        """Texts of a row that go through the model together: 2 for pairs."""
        if self.objective in SCORED_FIRST:
            return 1
        objective = coerce("objective", self.objective, "--objective")
        return TrainConfig(objective=objective).texts_together


USUAL, LONG = Profile("full", 2048, 4), Profile("long", 8192, 1)
TIERS = {  # the best first
    "full": "weights in memory, LoRA on all linear layers",
    "tight": "weights in memory, with less than a tenth of the limit to spare",
    "long": "long rows",
    "slow": "slow: weights or block inputs are read from disk",
    "light": "with smaller adapters: a lower rank, or fewer blocks; most are slow, too",
}
RANKS = {tier: rank for rank, tier in enumerate(TIERS)}


@dataclass(frozen=True)
class MachineRoom:
    """The memory for a run, and how its device computes."""

    limit: MemoryLimit
    float_bytes: int = 2
    """Size of the floating-point numbers in computations."""
    sliced: bool = False
    """Whether weights are dequantized in slices, as on the CPU."""

    @property
    def has_gpu(self) -> bool:
        return not self.sliced


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    known: Known
    tier: str
    """One of TIERS."""
    rank: int
    layers: int
    """How many of the last blocks are adapted."""
    targets: tuple[str, ...]
    seq_len: int
    batch: int
    plan: str
    """The memory plan in words."""
    needed_bytes: int
    """The lowest memory limit for this plan."""
    peak_bytes: int
    """Estimated peak memory of the process."""
    step_cost: float
    """Amount of arithmetic divided by that of the fastest plan."""
    command: str
    """The command that starts the training."""


def room_of(memory_gb: float) -> MachineRoom:
    """The room of an idle Mac sold with this many GB, each 2**30 bytes. Raises UserError."""
    return MachineRoom(limits.detect(limits.idle_mac(memory_gb)))


def room_here(machine: MachineInfo) -> MachineRoom:
    """The current room of this machine. Raises UserError if its memory cannot be read."""
    limit = limit_of(machine)
    if limit is None:
        raise UserError("the size of this machine's memory cannot be read; give --memory")
    if machine.device in ("metal", "cuda"):
        return MachineRoom(limit)
    notice = "no GPU: training may take days; start with the smallest models"
    return MachineRoom(replace(limit, notices=(*limit.notices, notice)), float_bytes=4, sliced=True)


def recommend(
    room: MachineRoom, models: Iterable[Known] | None = None, objective: str = SFT
) -> list[Recommendation]:
    """Return what can train in `room`, best first. Each model comes once, or twice with long rows.

    The best is the largest model with its weights in memory and every linear layer adapted; without
    a GPU, on which any training takes long, the smallest. Of models whose numbers of parameters
    have the same three digits, the one that is further down in the registry is better.
    """
    models = known().values() if models is None else models
    found = [each for model in models for each in of_model(model, room, objective)]
    sign = -1 if room.has_gpu else 1
    places = {alias: place for place, alias in enumerate(known())}

    def rank(each: Recommendation) -> tuple[float, ...]:
        size = float(f"{each.known.parameters:.3g}")
        return RANKS[each.tier], sign * size, -places.get(each.known.alias, 0)

    return sorted(found, key=rank)


def of_model(model: Known, room: MachineRoom, objective: str) -> Iterator[Recommendation]:
    usual, longer = (replace(profile, objective=objective) for profile in (USUAL, LONG))
    facts = facts_of_known(model, room.float_bytes)
    best = planned(model, facts, usual, room)
    if best is None:
        return
    yield best
    if best.tier == "full" and model.context > best.seq_len:
        long = planned(model, facts, longer, room)
        if long is not None and long.tier == "long":
            yield long


def workloads(
    facts: ModelFacts, profile: Profile, room: MachineRoom, model: Known | None = None
) -> Iterator[Workload]:
    """The workloads of runs with each size of adapters that `train` would try, the largest first.

    model: the model, if it is known.
    """
    seq_len = profile.seq_len if model is None else min(profile.seq_len, model.context)
    is_whole = model is not None and model.model_type in WHOLE
    config = TrainConfig()
    process = ProcessFacts(python_bytes=PYTHON_BYTES, sliced=room.sliced)
    for rank, blocks in defaults.adapters(config, facts.blocks):
        yield Workload(
            facts=facts,
            training=Training(
                blocks=blocks,
                rank=rank,
                targets=config.lora_targets,
                experts=config.lora_experts,
            ),
            whole=is_whole,
            lengths=(seq_len,),
            batch_size=profile.batch * profile.texts_together,
            rows_per_step=profile.batch * profile.texts_together,
            rows_together=profile.texts_together,
            process=process,
        )


def first_that_fits(wanted: Iterable[Workload], limit_bytes: int) -> tuple[Workload, Choice] | None:
    """The first workload that fits under any plan, with its plan; None if none does.

    wanted: the largest first. If the smallest does not fit, those between are not tried.
    """

    def fitting(workload: Workload) -> tuple[Workload, Choice] | None:
        try:
            return workload, choose(workload, limit_bytes)
        except DoesNotFit:
            return None

    largest, *others = wanted
    if (found := fitting(largest)) or not others:
        return found
    smallest = fitting(others.pop())
    return next(filter(None, map(fitting, others)), smallest) if smallest else None


def planned(
    model: Known, facts: ModelFacts, profile: Profile, room: MachineRoom
) -> Recommendation | None:
    """The recommendation for a model with this profile; None if it does not fit."""
    limit_bytes = room.limit.limit_bytes
    found = first_that_fits(workloads(facts, profile, room, model), limit_bytes)
    if found is None:
        return None
    workload, choice = found
    training, (seq_len,) = workload.training, workload.lengths
    return Recommendation(
        known=model,
        tier=tier_of(workload, limit_bytes) or profile.name,
        rank=training.rank,
        layers=training.blocks,
        targets=training.targets,
        seq_len=seq_len,
        batch=profile.batch,
        plan=words(choice.option.plan, seq_len),
        needed_bytes=choice.option.needed_bytes,
        peak_bytes=choice.option.estimate.process_bytes,
        step_cost=choice.option.cost,
        command=command_of(model, seq_len, profile),
    )


def tier_of(workload: Workload, limit_bytes: int) -> str:
    """light, slow or tight; empty if all fits into memory with room to spare."""
    full = (defaults.RANKS[0], workload.facts.blocks)
    if (workload.training.rank, workload.training.blocks) != full:
        return "light"
    whole = [o for o in options(workload) if o.plan.engine != "streamed" and not o.plan.spill]
    least = min(option.needed_bytes for option in whole)
    if least > limit_bytes:
        return "slow"
    return "tight" if least > COMFORT_SHARE * limit_bytes else ""


def command_of(model: Known, seq_len: int, profile: Profile) -> str:
    """The command that starts the training; it chooses the size of the adapters by itself."""
    flags = [f"--model {model.alias} --data {DATA}"]
    if profile.objective != SFT:
        flags.append(f"--objective {profile.objective}")
    if seq_len != FIELDS["max_seq_length"].default:
        flags.append(f"--max-seq-length {seq_len}")
    if profile.batch != USUAL.batch:
        flags.append(f"--batch-size {profile.batch}")
    return f"your_ai train {' '.join(flags)}"


# Showing it


def recommendations_json(room: MachineRoom, found: list[Recommendation]) -> dict[str, Any]:
    def row(each: Recommendation) -> dict[str, Any]:
        model = {name: getattr(each.known, name) for name in MODEL_FIELDS}
        fields = {f.name: getattr(each, f.name) for f in dataclasses.fields(each)}
        return {**model, **{name: value for name, value in fields.items() if name != "known"}}

    limit = room.limit
    return {
        "limit_bytes": limit.limit_bytes,
        "limit_reason": limit.reason,
        "notices": list(limit.notices),
        "recommendations": [row(each) for each in found],
    }


NONE_FITS = "no known model fits: even the smallest needs more memory"


def recommendation_text(
    room: MachineRoom, found: list[Recommendation], seconds: float | None = None
) -> RenderableType:
    """Show the first recommendation with its command.

    seconds: of a step, from the newest run, if there is one.
    """
    if not found:
        return Group(NONE_FITS, *about_limit(room))
    best = found[0]
    size = best.known.parameters
    billions = f"{size / 1e9:.1f} billion" if size >= 1e9 else f"{size / 1e6:.0f} million"
    lines: list[RenderableType] = [
        Text.assemble((best.known.alias, "bold"), f", {billions} parameters: {TIERS[best.tier]}"),
        f"rank {best.rank} in {counted(best.layers, 'block')}, {counted(best.batch, 'row')} of up "
        f"to {best.seq_len:,} tokens per step; uses {size_text(best.peak_bytes)}, "
        f"least limit {size_text(best.needed_bytes)}; {best.plan}",
    ]
    if seconds is not None:
        lines.append(f"about {seconds:.3g} s per step of full rows, as fast as the newest run")
    lines += ["", Text(continued(best.command), "bold", overflow="fold"), ""]
    others = len({each.known.alias for each in found} - {best.known.alias})
    lines.append(
        f"{counted(others, 'other model')} can be trained here, also with longer rows: --all"
        if others or len(found) > 1
        else "no other known model fits"
    )
    return Group(*lines, *about_limit(room))


def about_limit(room: MachineRoom) -> list[RenderableType]:
    return ["", limits.text(room.limit), *room.limit.notices]


def recommendations_table(room: MachineRoom, found: list[Recommendation]) -> RenderableType:
    """Show all recommendations with their commands."""
    lines: list[RenderableType] = [] if found else [NONE_FITS]
    for tier, title in TIERS.items():
        there = [each for each in found if each.tier == tier]
        if not there:
            continue
        lines += [*[""] * bool(lines), Text(title, "bold"), recommendation_rows(there)]
        lines += [Text(continued(each.command), overflow="fold") for each in there]
    return Group(*lines, *about_limit(room))


def continued(command: str, width: int = WIDTH) -> str:
    """Break a command into lines of at most `width`; all except the last end with `\\`."""
    lines = [""]
    for part in re.split(" (?=--)", command):
        if lines[-1] and len(f"{lines[-1]} {part} \\") > width:
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {part}" if lines[-1] else part
    return "\n".join(lines)


def recommendation_rows(shown: list[Recommendation]) -> Table:
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, width in COLUMNS.items():
        left = head in ("model", "targets", "plan")
        drawn.add_column(head, justify="left" if left else "right", no_wrap=True, min_width=width)
    for each in shown:
        drawn.add_row(
            each.known.alias,
            str(each.seq_len),
            str(each.rank),
            str(each.layers),
            ",".join(each.targets),
            size_text(each.needed_bytes),
            each.plan.partition(",")[0],
            f"x {each.step_cost:.2f}",
        )
    return drawn
