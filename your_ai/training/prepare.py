"""Check and load everything that a run needs, the cheapest checks first."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mlx.core as mx

from your_ai.config import TrainConfig, defaults
from your_ai.data.sources import decided_by_rows
from your_ai.engine.gradients import gradients_in
from your_ai.engine.weights import Opened, open_model
from your_ai.errors import UserError
from your_ai.gates.text import model_name, now_and_then, size_text
from your_ai.generation.conversations import environments_of
from your_ai.hub.check import check_model
from your_ai.hub.find import find_model
from your_ai.memory import allocator
from your_ai.memory.budget import fused_budget, run_limit
from your_ai.memory.endurance import MOST_SHARE, writes_of
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import Budget
from your_ai.modelfiles.quantized_copies import make_copy, place_of_copy
from your_ai.modelfiles.shards import WriteProgress
from your_ai.nets import model
from your_ai.nets.adapter_kinds import KINDS
from your_ai.nets.numerics import compute_dtype
from your_ai.rewards.chosen import Rewards
from your_ai.run import events
from your_ai.run.folder import RunFolder
from your_ai.training.distributed import ALONE, Ranks
from your_ai.training.first_adapters import with_first_adapter
from your_ai.training.job import Job, ResolvedJob, job_of, rewards_of
from your_ai.training.optimizer import build_optimizer
from your_ai.training.planned import (
    announce,
    budget_of_job,
    past_of,
    planned_budget,
    write_plan,
)
from your_ai.training.run_data import check_splits
from your_ai.training.teacher_answers import answered
from your_ai.training.trainer import (
    WORKING,
    Trainer,
    add_adapters,
    build,
    graphs_within,
    networks_beside,
    periods_of,
    put_scorers,
    whole_weights,
)

NOT_PURE = (
    "the environment or tools do not say is_pure = True: a step that was interrupted while it "
    "generated may have other conversations now; those that were written are trained as they are"
)


def prepare(
    config: TrainConfig,
    log: events.EventLog,
    folder: Path,
    level: int = 0,
    ranks: Ranks = ALONE,
    on_fit: Callable[[], None] = lambda: None,
) -> Trainer:
    """Check and load everything, the cheapest first: the job, its memory plan, the trainer.

    folder: the run folder, for files that exist only while it runs.
    level: the number of faster plans that fit but are skipped.
    ranks: this process among those that train together.
    on_fit: is called once a plan fits, before anything is loaded.
    """
    limit = run_limit(config)
    planned, opened, rewards = read_job(config, log, folder, limit, ranks)
    with contextlib.ExitStack() as started:  # ends the environments if anything fails
        environments = environments_of(config, planned.tokenizer, planned.data.prompts or {})
        if environments is not None:
            started.callback(environments.shutdown)
        past = past_of(log, planned.config, level, RunFolder(folder))
        if past.begun and environments is not None and not environments.is_pure:
            log.write(events.Notice(text=NOT_PURE))
        told = partial(doing, log)
        budget = budget_of_job(planned, opened, limit, level, past, ranks.size > 1, told)
        if planned.config.adapter_kind.is_whole:
            tell(log, writes_text(planned, budget, folder))
        on_fit()

        training, blocks = budget.workload.training, len(opened.network.layers)
        job = planned.with_adapters(training.rank, training.blocks, blocks)
        if job.config.init:
            if ranks.size > 1:
                raise UserError("--init: is not supported with several processes; train with one")
            source = find_model(config.model)
            opened = with_first_adapter(job, source, opened, folder, limit, told)
        network, beside = opened.network, networks_beside(job, opened)
        tell(log, *choices(job, training.blocks, blocks, size_text(budget.limit.limit_bytes)))
        adapters, start = add_adapters(job, opened, budget.workload.facts.hidden, RunFolder(folder))
        ranks.check_same({"adapter": json.dumps(adapters.config, sort_keys=True)})
        announce(budget, past, job.config, log, RunFolder(folder))
        tell(log, KINDS[job.config.adapter_kind].limits(network))
        graphs = graphs_within(budget)
        built, soft, teacher = build(job, opened, adapters, beside, budget, graphs, folder)
        model.check_forward_pass(network, adapters, job.config)
        allocator.free()
        if built.plan != budget.choice.option.plan.engine:  # the model has no parts: plan again
            budget = fused_budget(budget, level, past.plan)
            write_plan(budget, job.config, log)
        tell(log, *built.notices)
        put_scorers(rewards, job, beside, soft, budget)
        plan = budget.choice.option.plan
        whole = whole_weights(job.config, opened, built.engine, plan, folder)
        trained = network.trainable_parameters()
        states = folder if whole is None else folder / WORKING
        trainer = Trainer(
            job=job,
            budget=budget,
            opened=opened,
            adapters=adapters,
            built=built,
            graphs=graphs,
            optimizer=build_optimizer(job.config, trained, states if plan.states_on_disk else None),
            gradients=gradients_in(folder if plan.gradients_on_disk and soft is None else None),
            whole=whole,
            periods=periods_of(job.config, adapters, blocks),
            depends_on=job.depends_on() | start,
            schedule=job.schedule,
            valid=job.data.examples.get("valid"),
            beside=beside,
            soft=soft,
            teacher=teacher,
            rewards=rewards,
            environments=environments,
            ranks=ranks,
        )
        started.pop_all()
        return trainer


def writes_text(job: Job, budget: Budget, folder: Path) -> str:
    """A notice on what a run of whole weights writes to the disk of its folder. Raises UserError if
    that is much, and was not allowed."""
    plan, config = budget.choice.option.plan, job.config
    writes = writes_of(budget.workload, plan, job.steps, config.save_every)
    disk_bytes = shutil.disk_usage(folder).total
    text = writes.text(disk_bytes)
    if writes.share(disk_bytes) > MOST_SHARE and not config.heavy_writes:
        raise UserError(
            f"--adapter full: {text}; train fewer steps, raise --max-memory, use --optimizer-bits "
            "8, or allow it with --yes"
        )
    return text


def read_job(
    config: TrainConfig, log: events.EventLog, folder: Path, limit: MemoryLimit, ranks: Ranks
) -> tuple[Job, Opened, Rewards | None]:
    """Read what the run is to do, its model without weights, and what rewards its completions."""
    found = check_splits(config)
    tell(log, *found.notes)
    config = decided_by_rows(config, found)
    if config.answers_from_teacher:
        found = answered(config, found, log, RunFolder(folder), limit, ranks)
    rewards = rewards_of(config, log, folder)
    base = find_model(config.model)
    opened = opened_for(config, base, log, limit)
    job = job_of(config, base, opened, log, limit, RunFolder(folder), found)
    return job, opened, rewards


def doing(log: events.EventLog, text: str) -> None:
    """Write what is done before training."""
    log.write(events.Stage(text=text))


def tell(log: events.EventLog, *texts: str) -> None:
    """Write a notice for each text that is not empty."""
    for text in filter(None, texts):
        log.write(events.Notice(text=text))


def choices(job: ResolvedJob, adapted: int, blocks: int, limit: str) -> list[str]:
    """Notices on choices made for a run and on what has no effect; adapted: blocks with
    adapters."""
    found = []
    if job.config.prefix_cache != "off" and adapted == blocks:
        found.append(
            "--prefix-cache: caches nothing, because all blocks have adapters; see --lora-layers"
        )
    return found + defaults.words(job.asked, job.config, job.rows, job.steps, blocks, limit)


def opened_for(config: TrainConfig, base: Path, log: events.EventLog, limit: MemoryLimit) -> Opened:
    """The model in `base`, quantized or repacked first if needed."""
    check_model(base)
    dtype = compute_dtype(config.dtype)
    log.write(events.Stage(text=f"loading {model_name(config.model)}"))
    if dtype != mx.float32 and mx.default_device().type == mx.cpu:
        text = "half precision is many times slower on the CPU; use --dtype float32"
        log.write(events.Notice(text=text))
    return open_model(copied(base, config, log, limit), dtype)


def copied(base: Path, config: TrainConfig, log: events.EventLog, limit: MemoryLimit) -> Path:
    """The folder that the model is loaded from: a copy, if it needs one, is made now.

    Reports progress, and says where the copy of an AWQ or GPTQ model is.
    """
    bits = config.quantize
    doing = "repacking" if bits is None else "quantizing"
    has_notice = bits is not None

    def text_of(progress: WriteProgress) -> str:
        done, total = size_text(progress.done_bytes), size_text(progress.total_bytes)
        return f"{doing} {config.model}: {done} of {total}"

    report = now_and_then(lambda text: log.write(events.Stage(text=text)), text_of)
    try:
        for progress in make_copy(base, bits, limit):
            if not has_notice:
                size, place = size_text(progress.total_bytes), place_of_copy(base, bits)
                text = f"AWQ or GPTQ weights are repacked for MLX once, {size} of disk: {place}"
                log.write(events.Notice(text=text))
                has_notice = True
            report(progress)
    except UserError:
        planned_budget(config, base)  # if memory is too small, this names the limit for all of it
        raise
    return place_of_copy(base, bits)
