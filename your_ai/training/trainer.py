"""The trainer of a run: its model with adapters, engine, optimizer and gradients, under a plan."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.config import AUTO, GENERATING, REWARD, SOFT, Resolved, TrainConfig
from your_ai.config.adapter_starts import ADJUSTED, INIT
from your_ai.config.checks import credit_of
from your_ai.data.batches import Schedule
from your_ai.data.encode import SamplePrompt
from your_ai.data.examples import Examples
from your_ai.data.prompts import PromptRows
from your_ai.engine.build import Built, build_engine
from your_ai.engine.compiled import Graphs
from your_ai.engine.gradients import Gradients
from your_ai.engine.masters import FileWeights, HeldWeights, Masters, ModelArrays, WholeWeights
from your_ai.engine.prefix import (
    DiskStore,
    MemoryStore,
    Store,
    check_room,
    needed_bytes,
    shared_place,
)
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import Opened, start_vocabulary
from your_ai.environments.pool import EnvironmentPool
from your_ai.errors import UserError
from your_ai.evaluation.teacher import (
    STATES,
    Teacher,
    build_teacher,
    is_sampled,
    longest_text,
    open_teacher,
    taught,
)
from your_ai.files import sha256
from your_ai.hub.find import fingerprint
from your_ai.memory.estimate_graphs import graphs_bytes
from your_ai.memory.plan import Budget, kept_by_some, rows_of
from your_ai.memory.workload import Plan
from your_ai.nets import head, model
from your_ai.nets.saved_adapter import TOKENIZER, base_files
from your_ai.nets.vocabulary import vocabulary_trained
from your_ai.rewards.chosen import Rewards
from your_ai.run import checkpoint, events
from your_ai.run.checkpoint import SCORE_HEAD
from your_ai.run.folder import RunFolder
from your_ai.training.distributed import ALONE, Ranks
from your_ai.training.job import Job, ResolvedJob, have_answers, ways_to_learn_more
from your_ai.training.optimizer import StatefulOptimizer
from your_ai.training.periods import Periods
from your_ai.training.reward_models import open_reward_model, scorer_of
from your_ai.training.run_data import BestMetric
from your_ai.training.soft_networks import (
    SoftNetworks,
    build_networks,
    check_tokenizers,
    engine_without_rows,
    open_reference,
    put_first_adapter,
    score_completions,
)

PREFIX = "prefix"  # the folder of a prefix cache on disk, inside the run folder
TEACHER_CACHE = "--teacher-cache"  # the option that asks for a teacher's states on disk
WORKING = "working"  # the same of whole weights and their optimizer states


class Beside(NamedTuple):
    """The networks beside the one that is trained, of which some share its weights."""

    scored_by: list[Opened]
    """The reward models, in the order of the job's."""
    reference: Opened | None
    """Of a run that trains through its own tokens."""
    teacher: Opened | None = None
    known: int = 0
    """Tokens that the teacher and the model know."""

    def sharing(self, job: Job) -> tuple[nn.Module, ...]:
        """Those that share the weights of the base."""
        scored = zip(job.reward_runs, self.scored_by, strict=True)
        shared = [opened.network for run, opened in scored if run.shares_base]
        shared += [] if self.reference is None else [self.reference.network]
        if self.teacher is not None and job.teacher is not None and job.teacher.shares_base:
            shared.append(self.teacher.network)
        return tuple(shared)


@dataclass(frozen=True)
class Trainer:
    """Everything that the training loop needs, checked and loaded."""

    job: ResolvedJob
    budget: Budget
    opened: Opened
    adapters: model.Adapters
    built: Built
    graphs: Graphs
    optimizer: StatefulOptimizer
    gradients: Gradients
    """Those of the step that is computed."""
    whole: WholeWeights | None
    """The weights that are trained, if they are not those of adapters."""
    periods: Periods | None
    """Those of a run that trains some blocks at a time."""
    depends_on: dict[str, dict[str, str]]
    """What must be the same when the run is resumed: checksums and values, by kind."""
    schedule: Schedule
    """That of the job, with the reference of its rows if the objective needs one."""
    valid: Examples | None
    beside: Beside
    soft: SoftNetworks | None = None
    """The networks of a run that trains through its own tokens."""
    teacher: Teacher | None = None
    """What a distillation compares its predictions with."""
    rewards: Rewards | None = None
    """What rewards the completions, of a run that generates them."""
    environments: EnvironmentPool | None = None
    """What the model talks to, of a run whose completions are conversations."""
    ranks: Ranks = ALONE

    @property
    def config(self) -> Resolved:
        return self.job.config

    @property
    def model(self) -> nn.Module:
        return self.opened.network

    def enter_period(self, step: int) -> None:
        """Let the blocks of step `step` be trained, if a run trains some at a time."""
        if self.periods is not None:
            self.periods.enter(step, self.model, self.engine, self.optimizer)

    @property
    def masters(self) -> Masters:
        """The trained parameters."""
        return ModelArrays(self.model) if self.whole is None else self.whole

    @property
    def engine(self) -> Engine:
        return self.built.engine

    @property
    def tokenizer(self) -> Any:
        return self.job.tokenizer

    @property
    def steps(self) -> int:
        return self.job.steps

    @property
    def test(self) -> Examples | None:
        return self.job.data.examples.get("test")

    @property
    def prompts(self) -> dict[str, PromptRows]:
        """The rows of the prompts, by split, of a run that generates completions."""
        return self.job.data.prompts or {}

    @property
    def best_metric(self) -> BestMetric | None:
        return self.job.data.best_metric

    @property
    def samples(self) -> list[SamplePrompt]:
        unasked = self.config.samples == AUTO and self.built.plan == "streamed"
        return [] if unasked else self.job.data.samples

    @property
    def hidden(self) -> int:
        """Hidden size of the model."""
        return self.budget.workload.facts.hidden

    @property
    def wave(self) -> int:
        """The completions that are generated together."""
        return self.budget.choice.option.plan.wave or 1

    def rows_at(self, tokens: int) -> int:
        """Rows of `tokens` tokens in one micro-batch under the plan."""
        return rows_of(self.budget.workload, self.budget.choice.option.plan, tokens)

    def close(self) -> None:
        """Free what waits for others, such as the judge of completions, and end environments."""
        if self.environments is not None:
            self.environments.shutdown()
        if self.rewards is not None:
            self.rewards.close()

    def started_event(self, step: int) -> events.Started:
        arrays = model.adapter_arrays(self.model)
        return events.Started(
            step=step,
            steps=self.steps,
            steps_per_epoch=self.schedule.steps_per_epoch,
            model=self.config.model,
            rows=self.job.rows,
            trainable_parameters=sum(array.size for array in arrays.values()),
            dtype=str(self.opened.dtype).removeprefix("mlx.core."),
            plan=self.built.plan,
            more=ways_to_learn_more(self.config, self.adapters, len(self.model.layers)),
            has_answers=have_answers(self.prompts),
            is_reward_model=self.config.objective == REWARD,
            trains_weights=self.whole is not None,
        )


def networks_beside(job: Job, opened: Opened) -> Beside:
    """Open the other networks of a run, before its model has adapters. Raises UserError."""
    scored_by = [open_reward_model(run, opened) for run in job.reward_runs]
    if job.teacher is not None:
        longest = longest_text((job.data.seen or job.data.examples).values(), job.config)
        return Beside(scored_by, None, *open_teacher(job.teacher, opened, job.tokenizer, longest))
    if job.config.objective != SOFT:
        return Beside(scored_by, None)
    reference = open_reference(opened) if job.config.kl_beta else None
    theirs = scored_by[0].tokenizer()
    check_tokenizers(job.reward_runs[0], opened, job.tokenizer, theirs)
    return Beside(scored_by, reference)


def add_adapters(
    job: Job, opened: Opened, hidden: int, folder: RunFolder
) -> tuple[model.Adapters, dict[str, dict[str, str]]]:
    """Give the model its adapters and score head, those of --from or --init if there are any, and
    the first values of what is trained of its vocabulary.

    hidden: hidden size of the model. Returns also the checksums of what it starts from.
    """
    network = opened.network
    adapters = model.add_adapters(network, job.config)
    start_vocabulary(opened, job.new.spelled)
    more: dict[str, Any] = {"base_files": base_files(job.files)}
    if job.new.files:
        more[TOKENIZER] = job.new.files
    if job.config.objective == REWARD:
        head.put_score_head(network, hidden, job.config.seed)
        more["score_head"] = SCORE_HEAD
    start = begin_from(folder, network) if job.config.has_first_adapter else {}
    if job.config.init:
        more[INIT] = job.config.init
    if folder.base.is_dir():
        more[ADJUSTED] = base_files(fingerprint(folder.base))
        start = start | {"adjusted base": more[ADJUSTED]}
    return replace(adapters, config={**adapters.config, **more}), start


def begin_from(folder: RunFolder, network: nn.Module) -> dict[str, dict[str, str]]:
    """Set the adapters to those that the run starts from; return the checksums of their files.

    A resumed run then continues with the adapters of its checkpoint. Raises UserError if a file
    is damaged or missing.
    """
    names = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG)
    if (fault := checkpoint.fault(folder.start, names)) is not None:
        raise UserError(f"{fault}; restore it, or start a new run")
    arrays = checkpoint.load_adapters(folder.start)
    if (layer := head.score_layer(network)) is None:
        arrays.pop(checkpoint.SCORE_WEIGHT, None)
    else:
        arrays.setdefault(checkpoint.SCORE_WEIGHT, layer.weight)
    for trained in vocabulary_trained(network):
        arrays = trained.trained | arrays
    model.set_adapters(network, arrays)
    return {"first adapter": {name: sha256(folder.start / name) for name in names}}


def build(
    job: Job,
    opened: Opened,
    adapters: model.Adapters,
    beside: Beside,
    budget: Budget,
    graphs: Graphs,
    folder: Path,
) -> tuple[Built, SoftNetworks | None, Teacher | None]:
    """The engine of the plan, the networks of a run that trains through its own tokens, and the
    teacher of one that has a teacher."""
    config, plan = job.config, budget.choice.option.plan
    if config.objective == SOFT:
        reference = beside.reference
        if reference is not None and config.has_first_adapter:
            put_first_adapter(reference, RunFolder(folder), adapters, config.adapter_dtype)
        exact = credit_of(config.soft_credit) == "exact"
        soft = build_networks(opened, beside.scored_by[0], reference, plan.engine, graphs, exact)
        return Built(engine_without_rows(graphs), plan.engine, soft.notices), soft, None
    teacher = None
    if job.teacher is not None and beside.teacher is not None:
        kept = config.teacher_cache == "disk" and not config.student_share
        made = teacher_store(job, folder / STATES, opened.dtype, kept)
        sizes = budget.workload.teacher
        assert sizes is not None
        given, together = (beside.teacher, beside.known), None if kept else sizes.step_tokens
        teacher = build_teacher(job.teacher, *given, plan, made, together, job.objective)
        read_views(teacher, job)
    built = build_engine(
        opened.network,
        adapters.dropout_keys,
        plan.engine,
        config.packing,
        opened.tensors,
        store_maker(job, opened, adapters, folder),
        objective=job.objective,
        spill=folder if plan.gradients_on_disk else None,
        graphs=graphs,
        neftune_alpha=config.neftune_alpha,
        temperature=config.temperature if config.objective in GENERATING else 1.0,
        longest=config.max_seq_length,
        kept=plan.kept,
        resident=plan.resident,
        blocks_ahead=plan.blocks_ahead,
        teacher=None if teacher is None or is_sampled(job.objective) else teacher.target,
    )
    if teacher is not None:
        built = replace(built, engine=taught(built.engine, teacher))
    return built, None, teacher


def teacher_store(job: Job, folder: Path, dtype: mx.Dtype, kept: bool) -> Callable[[int], Store]:
    """Return f(width) -> where the teacher's states are kept: on disk, if they are needed again."""

    def make(width: int) -> Store:
        if not kept:
            return MemoryStore()
        assert job.teacher is not None
        # The softmaxes beside the states, if there are any, are those at a temperature.
        key = job.teacher.checksums | {"temperature": f"{job.config.temperature_distill:g}"}
        found = DiskStore(folder, key, width, dtype, option=TEACHER_CACHE)
        held = found.bytes_held // needed_bytes(1, width, dtype)
        check_room(folder, max(0, trained_tokens(job) - held), width, dtype, TEACHER_CACHE)
        return found

    return make


def trained_tokens(job: Job) -> int:
    """Trained tokens of the rows that a teacher reads."""
    return sum(int(e.trained.sum()) for n, e in job.data.examples.items() if n != "test")


def read_views(teacher: Teacher, job: Job) -> None:
    """Let the teacher read its own view of the rows, where it has one."""
    if job.config.generates:
        return
    for name, seen in (job.data.seen or {}).items():
        teacher.reads(job.data.examples[name], seen)


def whole_weights(
    config: TrainConfig, opened: Opened, engine: Engine, plan: Plan, folder: Path
) -> WholeWeights | None:
    """The weights that a run trains without adapters; None if it has adapters.

    folder: of the run; what another plan left in its working copy is removed.
    """
    working = folder / WORKING
    shutil.rmtree(working, ignore_errors=True)
    if not config.adapter_kind.is_whole:
        return None
    dtype = getattr(mx, config.adapter_dtype)
    if plan.weights_on_disk:
        return FileWeights(opened.network, opened.tensors, dtype, working, engine.moved)
    return HeldWeights(opened.network, opened.tensors, dtype)


def periods_of(config: Resolved, adapters: model.Adapters, blocks: int) -> Periods | None:
    """The periods of a run that trains some of its blocks at a time; blocks: of the model."""
    if config.blocks_per_period is None:
        return None
    first = blocks - adapters.config["num_layers"]
    keys = adapters.config["lora_parameters"]["keys"]
    own = range(first, blocks)
    return Periods(config.period, config.blocks_per_period, own, keys, config.seed)


def put_scorers(
    rewards: Rewards | None, job: Job, beside: Beside, soft: SoftNetworks | None, budget: Budget
) -> None:
    """Let the reward models of the run score its completions, under its plan."""
    plan, rows = budget.choice.option.plan, budget.workload.batch_size
    for run, opened in zip(job.reward_runs, beside.scored_by, strict=True):
        assert rewards is not None  # it names the reward models
        rewards.models[run.name] = (
            partial(score_completions, soft.roles.reward)
            if soft is not None and run is job.reward_runs[0]
            else scorer_of(run, opened, plan, rows)
        )


def graphs_within(budget: Budget) -> Graphs:
    """A cache of compiled graphs, with as much room as the plan leaves."""
    workload, plan = budget.workload, budget.choice.option.plan
    of_plan = partial(graphs_bytes, workload, plan.engine, kept=kept_by_some(workload, plan))
    return Graphs(lambda s: of_plan(s.rows, s.tokens, trained=s.trained), budget.graphs_room_bytes)


def store_maker(
    job: Job, opened: Opened, adapters: model.Adapters, folder: Path
) -> Callable[[int], Store] | None:
    """Return f(hidden_size) -> the configured prefix cache, or None if it is off."""
    kind, shared = job.config.prefix_cache, job.config.prefix_cache_folder
    if kind == "off":
        return None
    frozen = len(opened.network.layers) - adapters.config["num_layers"]
    key = job.files | {"frozen blocks": str(frozen), "--quantize": str(job.config.quantize)}

    def make(size: int) -> Store:
        if kind == "memory":
            return MemoryStore()
        place = shared_place(Path(shared), key, size, opened.dtype) if shared else folder / PREFIX
        store = DiskStore(place, key, size, opened.dtype, shared=bool(shared))
        held = store.bytes_held // needed_bytes(1, size, opened.dtype)
        check_room(place, max(0, job.data.tokens - held), size, opened.dtype)
        return store

    return make
