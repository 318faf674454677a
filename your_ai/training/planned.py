"""The memory plan of a run: chosen before anything is loaded, and kept in the run's events."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.config import AUTO, DISTILL, TrainConfig, defaults
from your_ai.data.sources import decided_by_rows
from your_ai.engine.measure_costs import measure_costs
from your_ai.engine.weights import FileTensor, Opened, open_model
from your_ai.errors import UserError
from your_ai.evaluation.teacher import TeacherModel, longest_text, teacher_of
from your_ai.gates.text import size_text
from your_ai.generation.generate import ANSWER_TOKENS
from your_ai.hub.built_tensors import entries_in
from your_ai.hub.find import fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import (
    Measuring,
    PriorPlans,
    budget_of,
    limit_of,
    plan_of,
    process_here,
    run_limit,
)
from your_ai.memory.costs import MeasuredCosts, keep_costs
from your_ai.memory.facts import ModelFacts, facts_from, facts_of
from your_ai.memory.limit import MemoryLimit
from your_ai.memory.plan import Budget, Option, front_points
from your_ai.memory.workload import (
    DataSizes,
    RewardModelSizes,
    TeacherSizes,
    VocabularyArray,
    Workload,
    in_steps,
    words,
    workload_of,
)
from your_ai.modelfiles.quantize import quantized_lazily
from your_ai.modelfiles.quantized_copies import needs_copy, place_of_copy
from your_ai.modelfiles.repack import repacked_lazily
from your_ai.modelfiles.shards import process_bytes_of
from your_ai.nets import model
from your_ai.nets.new_tokens import NewTokens, tokenizer_with_new
from your_ai.nets.numerics import compute_dtype
from your_ai.objectives.chosen import objective_of
from your_ai.rewards.names import reward_texts
from your_ai.run import events
from your_ai.run.folder import RunFolder
from your_ai.training.job import Job, step_sizes
from your_ai.training.plan_again import keep_learned, learned_file, learned_of
from your_ai.training.preview import about_seconds
from your_ai.training.reward_models import reward_runs
from your_ai.training.run_data import RunData, check_splits, read_data, rollouts_planned


def budget_of_job(
    job: Job,
    opened: Opened,
    limit: MemoryLimit,
    level: int = 0,
    past: PriorPlans | None = None,
    joined: bool = False,
    tell: Callable[[str], object] = lambda _: None,
) -> Budget:
    """The plan of a run inside `limit`. Raises UserError if nothing fits.

    level: the number of faster plans that fit but are skipped. joined: one of several ranks. tell:
    receives what is measured, if something is.
    """
    sizes = [run.sizes(opened.folder, opened.dtype.size) for run in job.reward_runs]
    teacher = sizes_of_teacher(job.teacher, job.config, opened.folder, opened.dtype, job.data)
    measure = partial(measure_costs, opened.network, job.config, tell=tell, tensors=opened.tensors)
    return budget_of_run(
        job.config, opened.folder, opened.dtype, job.data, limit, opened.can_stream, level, past,
        reward_models=sizes, teacher=teacher, joined=joined,
        measuring=Measuring(measure), vocabulary=model.vocabulary_sizes(opened.network, job.config),
    )  # fmt: skip


def budget_of_run(
    config: TrainConfig,
    folder: Path,
    dtype: mx.Dtype,
    data: RunData,
    limit: MemoryLimit,
    can_stream: bool,
    level: int = 0,
    past: PriorPlans | None = None,
    before_bytes: int = 0,
    reward_models: Sequence[RewardModelSizes] = (),
    teacher: TeacherSizes | None = None,
    joined: bool = False,
    measuring: Measuring | None = None,
    facts: ModelFacts | None = None,
    vocabulary: tuple[VocabularyArray, ...] = (),
) -> Budget:
    """The plan of a run on `data` inside `limit`. Raises UserError if nothing fits.

    before_bytes: peak memory of the process before it trains. reward_models: those that score.
    teacher: as in `Workload`. joined: as in `workload_of`. measuring: as in `budget_of`. facts: of
        the model, if its folder does not have it yet. vocabulary: as in `Training`.
    """
    sizes = DataSizes(
        lengths=tuple(data.lengths),
        prefix_tokens=data.tokens,
        prefix_texts=sum(map(len, data.examples.values())),
        answer_tokens=data.answer_tokens,
        prompt_tokens=data.prompt_tokens,
        steps=step_sizes(config, data),
    )
    workload = workload_of(
        config,
        facts or facts_of(folder, dtype.size, config.quantize),
        sizes,
        process_here(),
        can_stream=can_stream,
        before_bytes=before_bytes,
        reward_models=tuple(reward_models),
        teacher=teacher,
        joined=joined,
        vocabulary=vocabulary,
    )
    return budget_of(config, workload, dtype, limit, level, past, measuring)


class PlannedModel(NamedTuple):
    """The model of a run that is planned, of which no weight is read."""

    network: nn.Module
    streamable: bool
    """Whether its weights can be read from files during steps."""
    tensors: Mapping[str, FileTensor]
    """Its weights in files."""
    facts: ModelFacts | None = None
    """Of the copy that a run would make first; None if those of the files hold."""
    before_bytes: int = 0
    """Memory of the process while it makes this copy."""


def planned_model(config: TrainConfig, folder: Path, dtype: mx.Dtype) -> PlannedModel:
    """The model in `folder` as a run would load it: quantized, if that is asked."""
    if not needs_copy(folder, config.quantize):
        opened = open_model(folder, dtype)
        return PlannedModel(opened.network, opened.can_stream, opened.tensors)
    facts, tensors, before_bytes = None, dict[str, FileTensor](), 0
    if config.quantize is None:
        network, _, input_bytes = repacked_lazily(folder)
    else:
        network, written, input_bytes = quantized_lazily(folder, config.quantize)
        facts = facts_from(entries_in(network), written, dtype.size, None)
        tensors = open_model(folder, dtype).tensors  # as quickly read as those of the copy
    if not place_of_copy(folder, config.quantize).is_dir():
        arrays = dict(tree_flatten(network.parameters()))
        largest = max(array.nbytes for array in arrays.values())
        before_bytes = process_bytes_of(input_bytes + largest)
    # The copy contains the weights in the form the model uses.
    return PlannedModel(network, True, tensors, facts, before_bytes)


def data_without_rows(config: TrainConfig, seq_len: int | None) -> RunData:
    """The sizes of data that is not read. seq_len: as in `planned_budget`."""
    if config.samples_completions:
        return rollouts_planned(config, seq_len)
    longest = config.max_seq_length if seq_len is None else seq_len
    generates = config.samples not in (0, AUTO) or ":" in config.best_metric
    return RunData({}, [], None, [longest], 0, longest + ANSWER_TOKENS if generates else 0)


def planned_budget(
    config: TrainConfig,
    folder: Path,
    seq_len: int | None = None,
    on_note: Callable[[str], object] = lambda _: None,
    on_measure: Callable[[str], object] | None = None,
    remembers: bool = False,
) -> Budget:
    """The budget of a run of the model in `folder`; no weight is read.

    seq_len: the sequence length T of all rows. By default the lengths come from --data, or
        without data from --max-seq-length. on_note: receives what was noticed in the data.
    on_measure: receives what is measured; without it, nothing is.
    remembers: whether to keep what is learned for `remembered_budget`; in a process that does
        nothing else, since its memory counts.

    Raises UserError if nothing fits.
    """
    if seq_len is not None and seq_len < 1:
        raise UserError(f"--seq-len {seq_len}: must be at least 1")
    given, limit = config, run_limit(config)
    dtype = compute_dtype(config.dtype)
    network, streamable, tensors, facts, before_bytes = planned_model(config, folder, dtype)
    tokenizer, new = None, NewTokens()
    if any(folder.glob("tokenizer*")):  # its memory counts; models made by `bench` have none
        with tempfile.TemporaryDirectory() as place:
            tokenizer, new = tokenizer_with_new(config, folder, Path(place) / "tokenizer")
    model.train_vocabulary(network, config, new)
    model.adapted_layers(network, config)  # checks the settings of the adapters
    if seq_len is None and config.data and not config.answers_from_teacher:
        found = check_splits(config)
        for text in found.notes:
            on_note(text)
        config = decided_by_rows(config, found)

        def tell(event: events.Event) -> None:
            if isinstance(event, events.Notice):
                on_note(event.text)

        files = fingerprint(folder) | new.files
        data = read_data(config, network, tokenizer, files, tell, limit, found.files)
        rows = len(data.examples["train"]) // objective_of(config).rows_together
        config = defaults.sized(config, rows, "valid" in data.examples)
    else:
        config = defaults.sized(config, 0)
        data = data_without_rows(config, seq_len)
    measuring = None
    if on_measure is not None:  # this process needs not stay below the limit of the run
        machine_bytes = limit_of(None).limit_bytes

        def measure(workload: Workload, limit_bytes: int) -> MeasuredCosts | None:
            return measure_costs(network, config, workload, machine_bytes, on_measure, tensors)

        measuring = Measuring(measure, always=True)
    files = fingerprint(folder) if reward_texts(config) or config.objective == DISTILL else {}
    runs = reward_runs(config, files)
    vocabulary = model.vocabulary_sizes(network, config)
    budget = budget_of_run(
        config,
        folder,
        dtype,
        data,
        limit,
        streamable,
        before_bytes=before_bytes,
        reward_models=[run.sizes(folder, dtype.size) for run in runs],
        teacher=sizes_of_teacher(teacher_of(config, folder, files), config, folder, dtype, data),
        measuring=measuring,
        facts=facts,
        vocabulary=vocabulary,
    )
    work, others = budget.workload, needs_copy(folder, config.quantize) or config.generates
    others = (
        others
        or bool(vocabulary)
        or work.teacher is not None
        or (seq_len is None and bool(config.data))
    )
    if remembers and not others and work.costs is not None:
        learned = learned_of(work, process_here(), streamable)
        keep_learned(learned_file(given, folder, seq_len), learned)
    return budget


def sizes_of_teacher(
    teacher: TeacherModel | None, config: TrainConfig, base: Path, dtype: mx.Dtype, data: RunData
) -> TeacherSizes | None:
    """The sizes of the teacher of a run; None if it has none. base: the folder of the student."""
    if teacher is None:
        return None
    found = in_steps(teacher.sizes(base, dtype.size), config, max(data.lengths))
    return replace(found, longest=longest_text((data.seen or {}).values(), config))


def announce(
    budget: Budget, past: PriorPlans, config: TrainConfig, log: events.EventLog, folder: RunFolder
) -> None:
    """Keep the costs in the run, write the limit and the plan; set MLX's limits."""
    if not past.begun:  # the run depends on these
        folder.costs.unlink(missing_ok=True)
        if budget.workload.costs is not None:
            keep_costs(folder.costs, budget.costs_key, budget.workload.costs)
    chosen = write_plan(budget, config, log)
    allocator.set_limits(
        budget.limit.limit_bytes, chosen.needed_bytes, chosen.estimate.beside_bytes
    )


def asked_of_memory(config: TrainConfig) -> str:
    """The settings that decide the plan, as text."""
    return f"--max-memory {config.max_memory} --plan {config.plan} --spill {config.spill}"


def past_of(log: events.EventLog, config: TrainConfig, level: int, folder: RunFolder) -> PriorPlans:
    """The earlier plan and costs of the run, in this process or an earlier one.

    The plan is the one it had when it last trained, if the level and settings are the same.
    """
    records, _ = events.tail(log.path, 0, (events.Started, events.Planned))
    written = [record.event for record in records]
    starts = [at for at, event in enumerate(written) if isinstance(event, events.Started)]
    plans = [e for e in written[: starts[-1] if starts else 0] if isinstance(e, events.Planned)]
    plan = None
    if plans and plans[-1].level == level and plans[-1].asked == asked_of_memory(config):
        plan = plan_of(plans[-1])
    return PriorPlans(plan, folder.costs, bool(starts))


def write_plan(budget: Budget, config: TrainConfig, log: events.EventLog) -> Option:
    """Write the limit and the plan with their reasons; return the option of the plan."""
    limit, choice = budget.limit, budget.choice
    log.write(events.Limit(limit_bytes=limit.limit_bytes, reason=limit.reason))
    for text in limit.notices:
        log.write(events.Notice(text=text))
    plan, needed = choice.option.plan, choice.option.needed_bytes
    log.write(
        events.Planned(
            plan=plan.engine,
            micro_tokens=plan.micro_tokens,
            spill=plan.spill,
            wave=plan.wave,
            kept=plan.kept.linear,
            kept_attention=plan.kept.attention,
            kept_activations=plan.kept.activations,
            resident=plan.resident,
            blocks_ahead=plan.blocks_ahead,
            teacher_blocks=plan.teacher_blocks,
            teacher_ahead=plan.teacher_ahead,
            level=choice.level,
            estimate_bytes=choice.option.estimate.process_bytes,
            needed_bytes=needed,
            seconds=choice.option.seconds,
            front=front_points(budget.workload),
            asked=asked_of_memory(config),
            text=f"{words(plan, max(budget.workload.lengths))}: least limit {size_text(needed)}"
            + about_seconds(choice.option),
        )
    )
    return choice.option
