"""Check and load everything that a run needs, the cheapest checks first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.config import AUTO, GRPO, REWARD, SOFT, TrainConfig, defaults, flag, last_step
from your_ai.config.checks import credit_of
from your_ai.data.batches import Schedule
from your_ai.data.encode import SamplePrompt
from your_ai.data.examples import Examples
from your_ai.data.preferences import kind_of
from your_ai.data.prompts import PromptRows
from your_ai.data.sources import find_splits, with_reward_loss
from your_ai.engine.build import Built, build_engine
from your_ai.engine.compiled import Graphs
from your_ai.engine.gradients import Gradients, gradients_in
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
from your_ai.gates.text import counted, model_name, now_and_then, size_text
from your_ai.generation.generate import ANSWER_TOKENS
from your_ai.hub.check import check_model
from your_ai.hub.find import find_model, store
from your_ai.hub.fingerprint import fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import Budget, PriorPlans, budget_of
from your_ai.memory.estimate_graphs import graphs_bytes
from your_ai.memory.plan import choose, kept_by_some, rows_of, workload_of
from your_ai.memory.workload import RewardModelSizes
from your_ai.modelfiles.quantize import quantized_lazily
from your_ai.modelfiles.quantized_copies import make_copy, needs_copy, place_of_copy
from your_ai.modelfiles.repack import repacked_lazily
from your_ai.modelfiles.shards import WriteProgress, largest_shard, process_bytes_of
from your_ai.nets import model, score_head
from your_ai.nets.dora import note_on_bits
from your_ai.nets.saved_adapter import base_files
from your_ai.nets.tokenizer import end_notes, open_tokenizer
from your_ai.objectives.chosen import objective_of
from your_ai.rewards.chosen import Rewards, load_rewards
from your_ai.rewards.judge import JudgeSettings
from your_ai.rewards.names import reward_texts
from your_ai.run import checkpoint, events
from your_ai.run.checkpoint import SCORE_HEAD
from your_ai.run.folder import RunFolder
from your_ai.run.rollout_files import missing_in_a_row
from your_ai.training import optimizer
from your_ai.training.best_metric import BestMetric
from your_ai.training.distributed import ALONE, Ranks
from your_ai.training.optimizer import StatefulOptimizer
from your_ai.training.plan_events import past_of, write_plan
from your_ai.training.reward_models import open_reward_model, reward_runs, scorer_of
from your_ai.training.run_data import RunData, check_splits, read_data, rollouts_planned
from your_ai.training.soft_networks import (
    SoftNetworks,
    build_networks,
    check_tokenizers,
    engine_without_rows,
    open_reference,
    put_first_adapter,
    scorer_of_network,
)
from your_ai.training.steps_of_run import schedule_of, step_sizes

MOST_IMBALANCE = 4 / 3  # between good and bad answers in KTO; the bound that its authors suggest
HIGHER_RATE = 2.5  # times the learning rate, for a run that learned too little
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
    optimizer: StatefulOptimizer
    gradients: Gradients
    """Those of the step that is computed."""
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
    sharing: tuple[nn.Module, ...] = ()
    """Reward models and a reference that share the weights of the base."""
    soft: SoftNetworks | None = None
    """The networks of a run that trains through its own tokens."""
    ranks: Ranks = ALONE

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
            has_answers=have_answers(self.prompts or {}),
            is_reward_model=self.config.objective == REWARD,
        )


def have_answers(prompts: Mapping[str, PromptRows]) -> bool:
    """Whether the first row that an evaluation would take has an answer; True without prompts.

    prompts: the rows of the prompts, by split.
    """
    for split in ("test", "valid", "train"):
        if split in prompts:
            return kind_of(prompts[split].read(0)[0]) is not None
    return True


def ways_to_learn_more(config: TrainConfig, adapters: model.Adapters, blocks: int) -> str:
    """Settings to try if a run barely learns, without those that it has.

    blocks: number of blocks of the model.
    """
    targets = [] if config.lora_targets == ("all-linear",) else ["--lora-targets all-linear"]
    layers = ["--lora-layers all"] if adapters.config["num_layers"] < blocks else []
    longer = "--epochs" if config.max_steps is None else "--max-steps"
    rate = f"a higher --learning-rate, such as {HIGHER_RATE * config.learning_rate:g}"
    ways = [rate, " ".join(targets + layers), f"or more {longer}"]
    return ", ".join(filter(None, ways))


def prepare(
    config: TrainConfig,
    log: events.EventLog,
    folder: Path,
    level: int = 0,
    ranks: Ranks = ALONE,
    on_fit: Callable[[], None] = lambda: None,
) -> Prepared:
    """Check and load everything, the cheapest first.

    folder: the run folder, for files that exist only while it runs.
    level: the number of faster plans that fit but are skipped.
    ranks: this process among those that train together.
    on_fit: is called once a plan fits, before anything is loaded.
    """
    found = check_splits(config)
    for text in found.notes:
        log.write(events.Notice(text=text))
    config = with_reward_loss(config, found)
    rewards = rewards_of(config, log, folder)
    base = find_model(config.model)
    opened = opened_for(config, base, log)
    network, tokenizer = opened.network, opened.tokenizer()
    model.adapted_layers(network, config)  # checks the settings of the adapters

    asked, files = config, fingerprint(base)
    runs = reward_runs(config, files)
    for text in end_notes(opened.folder, tokenizer):
        log.write(events.Notice(text=text))
    data = read_data(config, network, tokenizer, files, log.write)
    objective = objective_of(config)
    rows = len(data.examples["train"]) // objective.rows_together
    config = defaults.sized(config, rows, "valid" in data.examples)
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
        config,
        opened.folder,
        opened.dtype,
        data,
        opened.can_stream,
        level,
        past,
        reward_models=[run.sizes(opened.folder, opened.dtype.size) for run in runs],
        joined=ranks.size > 1,
    )
    on_fit()
    # Before there are adapters:
    scored_by = [open_reward_model(run, opened) for run in runs]
    is_soft = config.objective == SOFT
    reference = open_reference(opened) if is_soft and config.kl_beta else None
    if is_soft:
        check_tokenizers(runs[0], opened, tokenizer, scored_by[0].tokenizer())
    training, blocks = budget.demand.training, len(network.layers)
    if config.prefix_cache != "off" and training.blocks == blocks:
        text = "--prefix-cache: caches nothing, because all blocks have adapters; see --lora-layers"
        log.write(events.Notice(text=text))
    config = defaults.with_adapters(config, training.rank, training.blocks, blocks)
    limit = size_text(budget.limit.limit_bytes)
    for text in defaults.words(asked, config, rows, steps, blocks, limit):
        log.write(events.Notice(text=text))
    adapters = model.add_adapters(network, config)
    if config.objective == REWARD:
        score_head.put_score_head(network, budget.demand.facts.hidden, config.seed)
        adapters = replace(adapters, config={**adapters.config, "score_head": SCORE_HEAD})
    start = begin_from(RunFolder(folder), network) if config.from_adapter else {}
    adapters = replace(adapters, config={**adapters.config, "base_files": base_files(files)})
    announce(budget, past, config, log)
    if text := note_on_bits(network):
        log.write(events.Notice(text=text))
    graphs = graphs_within(budget)
    make_store = store_maker(config, opened, adapters, files, data, folder)
    plan, soft = budget.choice.option.plan, None
    if is_soft:
        if reference is not None and config.from_adapter:
            put_first_adapter(reference, RunFolder(folder), adapters, config.adapter_dtype)
        exact = credit_of(config.soft_credit) == "exact"
        soft = build_networks(opened, scored_by[0], reference, plan.engine, graphs, exact)
        built = Built(engine_without_rows(graphs), plan.engine, soft.notices)
    else:
        built = build_engine(
            network,
            adapters.dropout_keys,
            plan.engine,
            config.packing,
            opened.tensors,
            make_store,
            objective=objective,
            spill=folder if plan.gradients_on_disk else None,
            graphs=graphs,
            neftune_alpha=config.neftune_alpha,
            temperature=config.temperature,
            longest=config.max_seq_length,
            kept=plan.kept,
            resident=plan.resident,
            blocks_ahead=plan.blocks_ahead,
        )
    model.check_forward_pass(network, adapters, config)
    allocator.free()
    if built.plan != plan.engine:  # the model cannot be split into parts: plan again
        budget = planned_again(budget, built.plan, level, past)
        plan = budget.choice.option.plan
        write_plan(budget, config, log)
    for text in built.notices:
        log.write(events.Notice(text=text))
    for index, (run, found) in enumerate(zip(runs, scored_by, strict=True)):
        if soft is not None and index == 0:
            rewards.models[run.name] = scorer_of_network(soft.roles.reward)
        else:
            rewards.models[run.name] = scorer_of(run, found, plan, budget.demand.batch_size)
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
        optimizer=optimizer.build_optimizer(
            config, network.trainable_parameters(), folder if plan.states_on_disk else None
        ),
        gradients=gradients_in(folder if plan.gradients_on_disk and not is_soft else None),
        schedule=schedule,
        valid=data.examples.get("valid"),
        best_metric=data.best_metric,
        test=data.examples.get("test"),
        samples=[] if config.samples == AUTO and built.plan == "streamed" else data.samples,
        steps=steps,
        depends_on={
            "model": files,
            "data": {path.name: sha256(path) for name, path in splits if name != "test"},
            "settings": config.fixed_on_resume(),
            **{f"reward model {run.name}": run.checksums for run in runs},
            **start,
        },
        rewards=rewards,
        prompts=data.prompts,
        sharing=(
            *(f.network for r, f in zip(runs, scored_by, strict=True) if r.shares_base),
            *([] if reference is None else [reference.network]),
        ),
        soft=soft,
        ranks=ranks,
    )


def rewards_of(config: TrainConfig, log: events.EventLog, folder: Path) -> Rewards | None:
    """The rewards of a run that generates completions; None for other runs.

    log: says how often the judge was asked before the run was interrupted.
    folder: of the run, with the rewards that it has written.

    Raises UserError if there are none, or the judge cannot be asked.
    """
    if not config.generates:
        return None
    if config.objective == GRPO and not config.reward:
        raise UserError("--reward is missing: what a completion earns, e.g. exact_match")
    judge = JudgeSettings(
        model=config.judge_model,
        url=config.judge_url or None,
        rubric=config.judge_rubric,
        concurrency=config.judge_concurrency,
        max_calls=config.judge_max_calls,
        timeout_s=config.judge_timeout_s,
    )
    written = (record.event for record in events.tail(log.path)[0])
    counted_in = (e for e in written if isinstance(e, events.Step | events.Validation))
    calls = (event.metrics.get("judge/calls", 0) for event in counted_in)
    missing = missing_in_a_row(folder, config.rollouts)
    return load_rewards(reward_texts(config), judge, store() / "cache", int(sum(calls)), missing)


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
    arrays = checkpoint.load_adapters(folder.start)
    if (layer := score_head.score_layer(network)) is None:
        arrays.pop(score_head.WEIGHT, None)
    else:
        arrays.setdefault(score_head.WEIGHT, layer.weight)
    model.set_adapters(network, arrays)
    return {"first adapter": {name: sha256(folder.start / name) for name in names}}


def opened_for(config: TrainConfig, base: Path, log: events.EventLog) -> Opened:
    """The model in `base`, quantized or repacked first if needed."""
    check_model(base)
    dtype = model.compute_dtype(config.dtype)
    log.write(events.Stage(text=f"loading {model_name(config.model)}"))
    if dtype != mx.float32 and mx.default_device().type == mx.cpu:
        text = "half precision is many times slower on the CPU; use --dtype float32"
        log.write(events.Notice(text=text))
    return open_model(copied(base, config, log), dtype)


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
    workload, plan = workload_of(budget.demand), budget.choice.option.plan
    of_plan = partial(graphs_bytes, workload, plan.engine, kept=kept_by_some(budget.demand, plan))
    return Graphs(lambda s: of_plan(s.rows, s.tokens, trained=s.trained), budget.graphs_room_bytes)


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


def budget_of_run(
    config: TrainConfig,
    folder: Path,
    dtype: mx.Dtype,
    data: RunData,
    can_stream: bool,
    level: int = 0,
    past: PriorPlans | None = None,
    before_bytes: int = 0,
    reward_models: Sequence[RewardModelSizes] = (),
    joined: bool = False,
) -> Budget:
    """The limit and the plan of a run on `data`. Raises UserError if nothing fits.

    before_bytes: peak memory of the process before it trains. reward_models: those that score.
    joined: as in `demand_of`.
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
        prefix_texts=sum(map(len, data.examples.values())),
        answer_tokens=data.answer_tokens,
        prompt_tokens=data.prompt_tokens,
        before_bytes=before_bytes,
        reward_models=tuple(reward_models),
        steps=step_sizes(config, data),
        joined=joined,
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
    if not needs_copy(folder, config.quantize):
        opened = open_model(folder, dtype)
        network, streamable = opened.network, opened.can_stream
    else:
        if config.quantize is None:
            network, _, input_bytes = repacked_lazily(folder)
        else:
            network, _, input_bytes = quantized_lazily(folder, config.quantize)
        streamable = True  # the copy contains the weights in the form the model uses
        if not place_of_copy(folder, config.quantize).is_dir():
            arrays = dict(tree_flatten(network.parameters()))
            before_bytes = process_bytes_of(input_bytes + largest_shard(arrays))
    tokenizer = None
    if any(folder.glob("tokenizer*")):  # its memory counts; models made by `bench` have none
        tokenizer = open_tokenizer(folder)
    model.adapted_layers(network, config)  # checks the settings of the adapters
    if seq_len is None and config.data:
        config = with_reward_loss(config, check_splits(config))
        files = fingerprint(folder)
        data = read_data(config, network, tokenizer, files, lambda _: None)
        together = objective_of(config).rows_together
        config = defaults.sized(config, len(data.examples["train"]) // together)
    else:
        config = defaults.sized(config, 0)
        longest = config.max_seq_length if seq_len is None else seq_len
        generates = config.samples not in (0, AUTO) or ":" in config.best_metric
        answers = longest + ANSWER_TOKENS if generates else 0
        data = RunData({}, [], None, [longest], 0, answers)
        if config.generates:
            data = rollouts_planned(config, seq_len)
    sizes = []
    if runs := reward_runs(config, fingerprint(folder)):
        sizes = [run.sizes(folder, dtype.size) for run in runs]
    return budget_of_run(
        config,
        folder,
        dtype,
        data,
        streamable,
        before_bytes=before_bytes,
        reward_models=sizes,
    )


def copied(base: Path, config: TrainConfig, log: events.EventLog) -> Path:
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
        for progress in make_copy(base, bits, config.max_memory, config.force):
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
