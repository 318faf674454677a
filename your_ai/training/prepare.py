"""Check and load everything that a run needs, the cheapest checks first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from your_ai.config import AUTO, GRPO, LOSS, TrainConfig, defaults, flag, last_step
from your_ai.data.batches import Schedule, bucket_edges, few_edges, make_schedule
from your_ai.data.encode import Encoder, SamplePrompt
from your_ai.data.examples import Examples, RowCounts, check_weights, load_examples
from your_ai.data.preferences import parser_of
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import Row, RowLimit, read_rows
from your_ai.data.sources import Splits, find_splits
from your_ai.engine.build import build_engine
from your_ai.engine.compiled import Graphs, GraphShape
from your_ai.engine.opened import Opened, open_model
from your_ai.engine.prefix import (
    DiskStore,
    MemoryStore,
    Store,
    check_room,
    needed_bytes,
    shared_place,
)
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import FileTensor
from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.gates.text import counted
from your_ai.gates.token_ids import vocabulary_of
from your_ai.generation.generate import ANSWER_TOKENS, answer_room
from your_ai.hub.check import check_model
from your_ai.hub.find import find_model, store
from your_ai.hub.fingerprint import fingerprint, tokenizer_fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import Budget, PriorPlans, budget_of, row_limit
from your_ai.memory.calibration_file import valid_measurements
from your_ai.memory.estimate import Plan, graphs_bytes
from your_ai.memory.plan import Option, choose, rows_of, words, workload_of
from your_ai.memory.sample import in_gb
from your_ai.modelfiles.quantize import quantized_lazily
from your_ai.modelfiles.quantized_copies import make_copy, place_of_copy
from your_ai.modelfiles.shards import largest_shard, process_bytes_of
from your_ai.nets import model
from your_ai.nets.saved_adapter import base_files
from your_ai.objectives.chosen import objective_of
from your_ai.rewards.builtin import check_expected
from your_ai.rewards.chosen import Rewards, load_rewards
from your_ai.rewards.judge import JudgeSettings
from your_ai.rewards.names import needs_expected, parse_rewards
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder
from your_ai.training import optimizer
from your_ai.training.best_metric import BestMetric, best_metric_of, check_margin

PROGRESS_EVERY_S = 5.0
MOST_IMBALANCE = 4 / 3  # between good and bad answers in KTO; the bound that its authors suggest
PREFIX = "prefix"  # the folder of a prefix cache on disk, inside the run folder


@dataclass(frozen=True)
class Prepared:
    """Everything that the training loop needs, checked and loaded."""

    config: TrainConfig
    model: nn.Module
    tokenizer: Any
    dtype: mx.Dtype
    adapters: model.Adapters
    engine: Engine
    engine_name: str
    tensors: dict[str, FileTensor]
    graphs: Graphs
    store: Store | None
    budget: Budget
    optimizer: Optimizer
    schedule: Schedule
    valid: Examples | None
    best_metric: BestMetric | None
    test: Examples | None
    samples: list[SamplePrompt]
    steps: int
    depends_on: dict[str, dict[str, str]]
    rewards: Rewards | None = None
    """What rewards the completions, of a run that generates them."""
    prompts: dict[str, PromptRows] | None = None
    """The rows of the prompts, by split, of such a run."""

    def rows_at(self, tokens: int) -> int:
        """Rows of `tokens` tokens in one micro-batch under the plan."""
        return rows_of(self.budget.demand, self.budget.choice.option.plan, tokens)

    def started_event(self, step: int) -> events.Started:
        arrays = model.adapter_arrays(self.model)
        return events.Started(
            step=step,
            steps=self.steps,
            steps_per_epoch=self.schedule.steps_per_epoch,
            model=self.config.model,
            rows=len(self.schedule.examples) // self.schedule.rows_together,
            trainable_parameters=sum(array.size for array in arrays.values()),
            dtype=str(self.dtype).removeprefix("mlx.core."),
            plan=self.engine_name,
            more=ways_to_learn_more(self.config, self.adapters, len(self.model.layers)),
        )


def ways_to_learn_more(config: TrainConfig, adapters: model.Adapters, blocks: int) -> str:
    """Settings to try if a run barely learns, without those that it has.

    blocks: number of blocks of the model.
    """
    targets = [] if config.lora_targets == ("all-linear",) else ["--lora-targets all-linear"]
    layers = ["--lora-layers all"] if adapters.config["num_layers"] < blocks else []
    longer = "--epochs" if config.max_steps is None else "--max-steps"
    ways = ["a higher --learning-rate", " ".join(targets + layers), f"or more {longer}"]
    return ", ".join(filter(None, ways))


def prepare(config: TrainConfig, log: events.EventLog, folder: Path, level: int = 0) -> Prepared:
    """Check and load everything, the cheapest first.

    folder: the run folder, for files that exist only while it runs.
    level: the number of faster plans that fit but are skipped.
    """
    for text in check_splits(config).notes:
        log.write(events.Notice(text=text))
    rewards = rewards_of(config)
    base = find_model(config.model)
    opened = opened_for(config, base, log)
    network, tokenizer = opened.network, opened.tokenizer()
    model.adapted_layers(network, config)  # checks the settings of the adapters

    asked, files = config, fingerprint(base)
    data = read_data(config, network, tokenizer, files, log.write)
    objective = objective_of(config)
    rows = len(data.examples["train"]) // objective.rows_together
    config = defaults.sized(config, rows)
    schedule = schedule_of(config, data)
    steps = last_step(config, schedule.steps_per_epoch)
    config = defaults.timed(config, rows, schedule.steps_per_epoch)
    if asked.warmup_steps != AUTO and config.warmup_steps >= steps:
        text = f"--warmup-steps {config.warmup_steps}: the run has only {counted(steps, 'step')}"
        log.write(events.Notice(text=text))

    if config.patience and "valid" not in data.examples:
        text = "--patience: has no effect, because there are no validation rows"
        log.write(events.Notice(text=text))

    if config.objective == "kto" and (text := imbalance(config, data.examples["train"])):
        log.write(events.Notice(text=text))

    past = past_of(log, config, level)
    budget = budget_of_run(
        config, opened.folder, opened.dtype, data, opened.can_stream, level, past
    )
    training, blocks = budget.demand.training, len(network.layers)
    if config.prefix_cache != "off" and training.blocks == blocks:
        text = "--prefix-cache: caches nothing, because all blocks have adapters; see --lora-layers"
        log.write(events.Notice(text=text))
    config = defaults.with_adapters(config, training.rank, training.blocks, blocks)
    limit = in_gb(budget.limit.limit_bytes)
    for text in defaults.words(asked, config, rows, steps, blocks, limit):
        log.write(events.Notice(text=text))
    adapters = model.add_adapters(network, config)
    start = begin_from(RunFolder(folder), network) if config.from_adapter else {}
    adapters = replace(adapters, config={**adapters.config, "base_files": base_files(files)})
    announce(budget, past, config, log)
    graphs = graphs_within(budget)
    make_store = store_maker(config, opened, adapters, files, data, folder)
    plan = budget.choice.option.plan
    built = build_engine(
        network,
        adapters.dropout_keys,
        plan.engine,
        config.packing,
        opened.tensors,
        make_store,
        objective=objective,
        spill=folder if plan.spill else None,
        graphs=graphs,
        neftune_alpha=config.neftune_alpha,
    )
    model.check_forward_pass(network, adapters, config)
    allocator.free()
    if built.plan != plan.engine:  # the model cannot be split into parts: plan again
        budget = planned_again(budget, built.plan, level, past)
        write_plan(budget, config, log)
    for text in built.notices:
        log.write(events.Notice(text=text))
    splits = find_splits(config).files.items()
    return Prepared(
        config=config,
        model=network,
        tokenizer=tokenizer,
        dtype=opened.dtype,
        adapters=adapters,
        engine=built.engine,
        engine_name=built.plan,
        tensors=opened.tensors,
        graphs=graphs,
        store=built.store,
        budget=budget,
        optimizer=optimizer.build_optimizer(config, network.trainable_parameters()),
        schedule=schedule,
        valid=data.examples.get("valid"),
        best_metric=data.best_metric,
        test=data.examples.get("test"),
        samples=data.samples,
        steps=steps,
        depends_on={
            "model": files,
            "data": {path.name: sha256(path) for name, path in splits if name != "test"},
            "settings": config.fixed_on_resume(),
            **start,
        },
        rewards=rewards,
        prompts=data.prompts,
    )


def rewards_of(config: TrainConfig) -> Rewards | None:
    """The rewards of a run that generates completions; None for other runs.

    Raises UserError if there are none, or the judge cannot be asked.
    """
    if config.objective != GRPO:
        return None
    if not config.reward:
        raise UserError("--reward is missing: what a completion earns, e.g. exact_match")
    judge = JudgeSettings(
        model=config.judge_model,
        url=config.judge_url or None,
        rubric=config.judge_rubric,
        concurrency=config.judge_concurrency,
        max_calls=config.judge_max_calls,
    )
    return load_rewards(config.reward, judge, store() / "cache")


def imbalance(config: TrainConfig, examples: Examples) -> str:
    """A notice if good and bad answers count very differently in KTO; else an empty text."""
    assert examples.labels is not None
    answers = examples.labels[:: objective_of(config).rows_together]
    good, bad = int(answers.sum()), int((~answers).sum())
    counts = f"{counted(good, 'good answer')} and {counted(bad, 'bad one')}"
    if not (good and bad):
        return f"{counts}: kto learns from both, so add rows with the other label"
    sums = good * config.kto_desirable_weight, bad * config.kto_undesirable_weight
    if max(sums) <= MOST_IMBALANCE * min(sums):
        return ""
    few = "kto_desirable_weight" if sums[0] < sums[1] else "kto_undesirable_weight"
    weight = max(sums) / (good if sums[0] < sums[1] else bad)
    return f"{counts}: they count the same with {flag(few)} {weight:.2g}"


def begin_from(folder: RunFolder, network: nn.Module) -> dict[str, dict[str, str]]:
    """Set the adapters to those that the run starts from; return the checksums of their files.

    A resumed run then continues with the adapters of its checkpoint. Raises UserError if a file
    is damaged or missing.
    """
    names = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG)
    if (fault := checkpoint.fault(folder.start, names)) is not None:
        raise UserError(f"{fault}; restore it, or start a new run")
    model.set_adapters(network, checkpoint.load_adapters(folder.start))
    return {"first adapter": {name: sha256(folder.start / name) for name in names}}


def opened_for(config: TrainConfig, base: Path, log: events.EventLog) -> Opened:
    """The model in `base`, quantized first if configured."""
    check_model(base)
    dtype = model.compute_dtype(config.dtype)
    log.write(events.Stage(text=f"loading {config.model}"))
    if dtype != mx.float32 and mx.default_device().type == mx.cpu:
        text = "half precision is many times slower on the CPU; use --dtype float32"
        log.write(events.Notice(text=text))
    weights = base if config.quantize is None else quantized(config.quantize, base, config, log)
    return open_model(weights, dtype)


def schedule_of(config: TrainConfig, data: RunData) -> Schedule:
    """Which rows each step trains."""
    packed_tokens = config.max_seq_length if config.packing else None
    examples = data.examples["train"]
    together = objective_of(config).rows_together
    return make_schedule(
        examples,
        config.batch_size * together,
        config.rows_per_step * together,
        config.seed,
        packed_tokens,
        together,
        config.updates_per_batch,
    )


def announce(budget: Budget, past: PriorPlans, config: TrainConfig, log: events.EventLog) -> None:
    """Write the measurements, the limit and the plan; set MLX's limits."""
    for found in budget.demand.calibration.measurements:
        if not past.begun and found not in past.measurements:  # the run depends on these
            log.write(events.Measured(**asdict(found)))
    chosen = write_plan(budget, config, log)
    allocator.set_limits(
        budget.limit.limit_bytes, chosen.needed_bytes, chosen.estimate.beside_bytes
    )


def graphs_within(budget: Budget) -> Graphs:
    """A cache of compiled graphs, with as much room as the plan leaves."""
    workload, engine = workload_of(budget.demand), budget.choice.option.plan.engine

    def size_of(shape: GraphShape) -> int:
        return graphs_bytes(workload, engine, shape.rows, shape.tokens, trained=shape.trained)

    return Graphs(size_of, budget.graphs_room_bytes)


def store_maker(
    config: TrainConfig,
    opened: Opened,
    adapters: model.Adapters,
    files: dict[str, str],
    data: RunData,
    folder: Path,
) -> Callable[[int], Store] | None:
    """Return f(hidden_size) -> the configured prefix cache, or None if it is off."""
    kind, shared = config.prefix_cache, config.prefix_cache_folder
    if kind == "off":
        return None
    frozen = len(opened.network.layers) - adapters.config["num_layers"]
    key = files | {"frozen blocks": str(frozen), "--quantize": str(config.quantize)}

    def make(size: int) -> Store:
        if kind == "memory":
            return MemoryStore()
        place = shared_place(Path(shared), key, size, opened.dtype) if shared else folder / PREFIX
        store = DiskStore(place, key, size, opened.dtype, shared=bool(shared))
        held = store.bytes_held // needed_bytes(1, size, opened.dtype)
        check_room(place, max(0, data.tokens - held), size, opened.dtype)
        return store

    return make


def planned_again(budget: Budget, engine: str, level: int, past: PriorPlans) -> Budget:
    """The budget under another engine than the one chosen. Raises UserError if it does not fit."""
    demand = replace(budget.demand, engine=engine, spill=False)
    choice = choose(demand, budget.limit.limit_bytes, level, past.plan)
    return replace(budget, demand=demand, choice=choice)


@dataclass(frozen=True)
class RunData:
    """The data of a run, and the sizes that decide its memory."""

    examples: dict[str, Examples]
    """The tokenized rows of each split."""
    samples: list[SamplePrompt]
    """The prompts for sample answers."""
    best_metric: BestMetric | None
    """What --best-metric measures; None for the loss."""
    lengths: list[int]
    """The sequence length T of every bucket."""
    tokens: int
    """Tokens of all texts together."""
    answer_tokens: int
    """Tokens of the longest prompt to answer, with its answer; 0 if nothing is generated."""
    prompts: dict[str, PromptRows] | None = None
    """The rows of the prompts, by split, of a run that generates completions."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the longest prompt whose completions are generated; 0 if none are."""
        if self.prompts is None:
            return 0
        return max((int(found.lengths.max()) for found in self.examples.values()), default=0)


def check_splits(config: TrainConfig) -> Splits:
    """The files of --data by split. Raises UserError if a required one is missing."""
    splits = find_splits(config)
    for wanted in ("samples", "exact_match"):
        if getattr(config, wanted) and "test" not in splits.files:
            raise UserError(f"{flag(wanted)}: --data {config.data} has no test.jsonl")
    if config.best_metric != LOSS and "valid" not in splits.files:
        raise UserError(
            f"--best-metric {config.best_metric}: there are no validation rows; give some with "
            "--valid, or use --best-metric loss"
        )
    return splits


def read_data(
    config: TrainConfig,
    network: nn.Module,
    tokenizer: Any,
    files: dict[str, str],
    write: Callable[[events.Event], None],
) -> RunData:
    """The tokenized rows of --data, for `train` and `plan`.

    files: the checksums of the model's files.
    write: receives events about progress and shortened rows.

    Raises UserError for rows that cannot be trained.
    """
    splits = check_splits(config).files
    limit = row_limit(config.max_row_bytes, config.max_memory, config.force)
    vocabulary = vocabulary_of(network)
    encoder = Encoder(tokenizer, config.mask_prompt, vocabulary, limit, config.row_kind)
    samples = sample_prompts(splits.get("test"), encoder, config.samples)
    examples = {
        name: load_split(name, path, config, encoder, files, write)
        for name, path in splits.items()
        if name != "test" or config.exact_match
    }
    for name in ("train", "valid"):
        if name in splits:
            check_weights(name, splits[name], examples[name], limit)
    best = None
    if "valid" in splits:
        check_margin(config, splits["valid"], examples["valid"], limit)
        best = best_metric_of(config, splits["valid"], encoder, tokenizer_fingerprint(files))
    longest = max(int(found.lengths.max()) for found in examples.values())
    if config.packing:
        longest = max(longest, config.max_seq_length)
    model.check_positions(network, longest, f"--max-seq-length {config.max_seq_length}")
    allocator.free()  # memory that tokenizing left
    if config.objective == GRPO:
        return prompts_of_run(config, network, splits, limit, examples, samples, tokenizer)
    asked = [*samples, *(best.prompts if best else ())]
    scored = [*examples.values(), *([best.rows.answers.examples] if best else [])]
    return RunData(
        examples=examples,
        samples=samples,
        best_metric=best,
        lengths=lengths_of(scored),
        tokens=sum(int((found.lengths - 1).sum()) for found in examples.values()),
        answer_tokens=max((answer_room(tokenizer, prompt)[1] for prompt in asked), default=0),
    )


def prompts_of_run(
    config: TrainConfig,
    network: nn.Module,
    splits: dict[str, Path],
    limit: RowLimit,
    examples: dict[str, Examples],
    samples: list[SamplePrompt],
    tokenizer: Any,
) -> RunData:
    """The data of a run that generates completions of these prompts.

    Raises UserError for a prompt that is too long, or that lacks what a reward needs.
    """
    longest = max(int(found.lengths.max()) for found in examples.values())
    total = longest + config.max_new_tokens
    if total > config.max_seq_length:
        raise UserError(
            f"--max-seq-length {config.max_seq_length}: the longest prompt has "
            f"{counted(longest, 'token')}, {total} with --max-new-tokens {config.max_new_tokens}; "
            "raise it, or lower --max-new-tokens"
        )
    model.check_positions(network, total, f"--max-new-tokens {config.max_new_tokens}")
    prompts = {name: PromptRows(splits[name], limit) for name in examples}
    names = parse_rewards(config.reward)
    if needs_expected(names):
        for found in prompts.values():
            for index in range(len(found.offsets)):
                _, row = found.read(index)
                check_expected(names, row.content.expected, row.where)
    answers = (answer_room(tokenizer, prompt)[1] for prompt in samples)
    shortest = min(int(found.lengths.min()) for found in examples.values())
    edges = few_edges(total - 1)
    return RunData(
        examples=examples,
        samples=samples,
        best_metric=None,
        lengths=edges[edges >= shortest].tolist(),
        tokens=0,
        answer_tokens=max(answers, default=0),
        prompts=prompts,
    )


def budget_of_run(
    config: TrainConfig,
    folder: Path,
    dtype: mx.Dtype,
    data: RunData,
    can_stream: bool,
    level: int = 0,
    past: PriorPlans | None = None,
    before_bytes: int = 0,
) -> Budget:
    """The limit and the plan of a run on `data`. Raises UserError if nothing fits.

    before_bytes: peak memory of the process before it trains.
    """
    return budget_of(
        config,
        folder,
        dtype,
        data.lengths,
        level,
        past,
        can_stream=can_stream,
        prefix_tokens=data.tokens,
        answer_tokens=data.answer_tokens,
        prompt_tokens=data.prompt_tokens,
        before_bytes=before_bytes,
    )


def planned_budget(config: TrainConfig, folder: Path, seq_len: int | None = None) -> Budget:
    """The budget of a run of the model in `folder`; no weight is read.

    seq_len: the sequence length T of all rows. By default the lengths come from --data, or
        without data from --max-seq-length.

    Raises UserError if nothing fits.
    """
    if seq_len is not None and seq_len < 1:
        raise UserError(f"--seq-len {seq_len}: must be at least 1")
    dtype, before_bytes = model.compute_dtype(config.dtype), 0
    if config.quantize is None:
        opened = open_model(folder, dtype)
        network, streamable = opened.network, opened.can_stream
    else:
        network, _, input_bytes = quantized_lazily(folder, config.quantize)
        streamable = True  # the quantized copy contains the weights in the form the model uses
        if not place_of_copy(folder, config.quantize).is_dir():
            arrays = dict(tree_flatten(network.parameters()))
            before_bytes = process_bytes_of(input_bytes + largest_shard(arrays))
    tokenizer = None
    if any(folder.glob("tokenizer*")):  # its memory counts; models made by `bench` have none
        tokenizer = model.load_tokenizer_of(folder)
    model.adapted_layers(network, config)  # checks the settings of the adapters
    if seq_len is None and config.data:
        files = fingerprint(folder)
        data = read_data(config, network, tokenizer, files, lambda _: None)
        together = objective_of(config).rows_together
        config = defaults.sized(config, len(data.examples["train"]) // together)
    else:
        config = defaults.sized(config, 0)
        longest = config.max_seq_length if seq_len is None else seq_len
        generates = config.samples or ":" in config.best_metric
        answers = longest + ANSWER_TOKENS if generates else 0
        data = RunData({}, [], None, [longest], 0, answers)
        if config.objective == GRPO:
            data = rollouts_planned(config, seq_len)
    return budget_of_run(config, folder, dtype, data, streamable, before_bytes=before_bytes)


def rollouts_planned(config: TrainConfig, seq_len: int | None) -> RunData:
    """The sizes of a run that generates completions, without its data.

    seq_len: tokens of a prompt with its completion; by default --max-seq-length.
    """
    total = max(seq_len or config.max_seq_length, config.max_new_tokens + 2)
    lengths = few_edges(total - 1).tolist()
    prompt = np.array([0, total - config.max_new_tokens])
    empty = np.zeros(0)
    one = Examples(empty, empty, prompt, np.ones(1, np.float32), RowCounts())
    return RunData({"train": one}, [], None, lengths[-1:], 0, 0, prompts={})


def quantized(bits: int, base: Path, config: TrainConfig, log: events.EventLog) -> Path:
    """Make the quantized copy of the model, reporting progress; return its folder."""
    written_at = time.monotonic()
    try:
        for progress in make_copy(base, bits, config.max_memory, config.force):
            if time.monotonic() - written_at > PROGRESS_EVERY_S:
                done = f"{in_gb(progress.done_bytes)} of {in_gb(progress.total_bytes)}"
                log.write(events.Stage(text=f"quantizing {config.model}: {done}"))
                written_at = time.monotonic()
    except UserError:
        planned_budget(config, base)  # if memory is too small, this names the limit for all of it
        raise
    return place_of_copy(base, bits)


def lengths_of(examples: Iterable[Examples]) -> list[int]:
    """The sequence length T of every bucket of all examples."""
    return sorted({int(t) for found in examples for t in bucket_edges(found.lengths - 1)})


def asked_of_memory(config: TrainConfig) -> str:
    """The settings that decide the plan, as text."""
    return f"--max-memory {config.max_memory} --plan {config.plan} --spill {config.spill}"


def past_of(log: events.EventLog, config: TrainConfig, level: int) -> PriorPlans:
    """The earlier plan and measurements of the run, in this process or an earlier one.

    The plan is the one it had when it last trained, if the level and settings are the same.
    """
    written = [record.event for record in events.tail(log.path)[0]]
    starts = [at for at, event in enumerate(written) if isinstance(event, events.Started)]
    measured = [asdict(event) for event in written if isinstance(event, events.Measured)]
    plans = [e for e in written[: starts[-1] if starts else 0] if isinstance(e, events.Planned)]
    plan = None
    if plans and plans[-1].level == level and plans[-1].asked == asked_of_memory(config):
        last = plans[-1]
        plan = Plan(last.plan, last.micro_tokens, last.spill, last.wave)
    return PriorPlans(plan, tuple(valid_measurements(measured)), bool(starts))


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
            level=choice.level,
            estimate_bytes=choice.option.estimate.process_bytes,
            asked=asked_of_memory(config),
            text=f"{words(plan, max(budget.demand.lengths))}: needs {in_gb(needed)}",
        )
    )
    return choice.option


def load_split(
    name: str,
    path: Path,
    config: TrainConfig,
    encoder: Encoder,
    files: dict[str, str],
    write: Callable[[events.Event], None],
) -> Examples:
    """The examples of one file; writes one notice if rows were shortened.

    Test rows are always masked, because an exact match compares only the answer.
    """

    def with_progress(rows: Iterator[Row]) -> Iterator[Row]:
        text = f"reading {path.name}"
        write(events.Stage(text=text))
        written_at = time.monotonic()
        for count, row in enumerate(rows):
            if time.monotonic() - written_at > PROGRESS_EVERY_S:
                write(events.Stage(text=f"{text}: {counted(count, 'row')}"))
                written_at = time.monotonic()
            yield row

    examples = load_examples(
        path,
        replace(encoder, mask_prompt=config.mask_prompt or name == "test"),
        tokenizer_fingerprint(files),
        config.max_seq_length,
        config.too_long,
        store() / "cache",
        with_progress,
    )
    tally = examples.tally
    if tally.truncated or tally.split:
        count = tally.truncated + tally.split
        verb = "was" if count == 1 else "were"
        done = f"{verb} truncated" if tally.truncated else f"{verb} split"
        text = (
            f"{path.name}: {count:,} of {counted(tally.rows, 'row')} {verb} longer than "
            f"--max-seq-length {config.max_seq_length} and {done}"
        )
        if tally.dropped:
            text += f"; {counted(tally.dropped, 'piece')} with nothing left to train: dropped"
        write(events.Notice(text=text))
    return examples


def sample_prompts(path: Path | None, encoder: Encoder, count: int) -> list[SamplePrompt]:
    """Prompts from the first `count` test rows that have one."""
    if path is None or count == 0:
        return []
    rows = read_rows(path, encoder.limit, parser_of(encoder.kind))
    prompts = map(encoder.prompt_of, rows)
    return list(islice((p for p in prompts if p is not None), count))
