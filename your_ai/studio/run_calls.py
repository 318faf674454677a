"""Runs and models, for the pages that plan and start: what the studio asks of its worker."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from your_ai.errors import UserError

if TYPE_CHECKING:
    from your_ai.config import TrainConfig
    from your_ai.memory.workload import Workload

BEGUN_S = 2.0  # what is wrong by then is an error of the page, and later one of the run
PLANS = 16  # that are kept, to be made again for other limits


def plan(settings: dict[str, Any]) -> dict[str, Any]:
    """The plan of a run with these settings, as `your_ai plan --json`, and notes on it.

    What was read and measured for it is kept, so that one for another limit follows at once.
    """
    from your_ai.memory.budget import budget_of, run_limit
    from your_ai.nets.numerics import compute_dtype
    from your_ai.session import new_run
    from your_ai.training import preview

    notes: list[str] = []
    config = new_run.resolve(settings, None, on_note=notes.append)
    workload, noticed = workload_for(replace(config, max_memory=None))
    budget = budget_of(config, workload, compute_dtype(config.dtype), run_limit(config))
    return {**preview.as_json(budget), "notes": [*notes, *noticed]}


@lru_cache(PLANS)
def workload_for(config: TrainConfig) -> tuple[Workload, tuple[str, ...]]:
    """The measured work of a run, and notes on it."""
    from your_ai.training.plan_without_files import planned_run

    noticed: list[str] = []
    budget = planned_run(config, None, noticed.append, on_measure=lambda _: None)
    return budget.workload, tuple(noticed)


def start(settings: dict[str, Any]) -> str:
    """Start a run, which waits for the memory of those before it; return its name."""
    from your_ai.data.sources import checked_settings
    from your_ai.hub.find import find_model
    from your_ai.session import new_run

    resolved = checked_settings(new_run.resolve({"wait": True, **settings}, None), False)
    new_run.check_rewards(resolved)
    find_model(resolved.model)
    folder = new_run.create(resolved)
    new_run.wait_until_begun(new_run.start(folder, resolved, new=True), BEGUN_S)
    return folder.name


def resume(run: str, changes: dict[str, Any]) -> None:
    """Continue a run from its last checkpoint, as `start` begins one."""
    from your_ai.config import resumed
    from your_ai.run import folder as folders
    from your_ai.session import new_run
    from your_ai.session.finished import already_finished

    folder = folders.find(run)
    folders.check_resumable(folder)
    settings = resumed(folder.read_config(), {"wait": True, **changes})
    if done := already_finished(folder, settings):
        raise UserError(done)
    new_run.wait_until_begun(new_run.start(folder, settings, new=False), BEGUN_S)


def models() -> dict[str, Any]:
    """The models on this machine, and the known ones with their plans, the best first."""
    from your_ai.doctor.machine import read_machine
    from your_ai.doctor.model_list import WORDS, demo, of_local
    from your_ai.doctor.recommend import Recommendation, recommend, room_here
    from your_ai.hub.local import local_models
    from your_ai.hub.registry import known

    room = room_here(read_machine())
    here = [of_local(local, room) for local in (demo(), *local_models())]
    repos = {row.repo for row in here if row.fault is None}
    plans: dict[str, Recommendation] = {}  # the best first; with long rows there may be another
    for plan in recommend(room):
        plans.setdefault(plan.known.alias, plan)
    there = []
    for alias in dict.fromkeys([*plans, *known()]):
        model = known()[alias]
        if model.repo in repos:
            continue
        fitting = plans.get(alias)
        row = {"name": alias, "size_bytes": model.bytes_on_disk, "licence": model.licence}
        row |= {"fits": WORDS[""], "needed_bytes": None, "plan": ""} if fitting is None else {
            "fits": WORDS[fitting.tier], "needed_bytes": fitting.needed_bytes, "plan": fitting.plan
        }  # fmt: skip
        there.append(row)
    return {
        "here": [asdict(row) for row in here],
        "there": there,
        "limit_bytes": room.limit.limit_bytes,
    }
