"""Models that a training loop of other people trains, step by step, under one memory plan.

The loop says what is computed, and when: the gradients of a loss it names, an update, completions.
All models share the weights of one base. Only one of them is in memory: the others are in files, so
that the plan of one holds for any number.

Shapes: n tokens of a text, m of its targets.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.config import ALL_LINEAR, TrainConfig
from your_ai.config.requests import TinkerRequest
from your_ai.data.batches import Batch, few_edges, padded_batch, padded_targets
from your_ai.data.target_columns import Columns
from your_ai.engine.build import Built, build_engine
from your_ai.engine.gradients import Gradients, gradients_in
from your_ai.engine.weights import Opened, open_model, start_vocabulary
from your_ai.errors import UserError
from your_ai.files import read_text
from your_ai.gates.text import counted
from your_ai.gates.token_ids import check_ids, vocabulary_of
from your_ai.generation.rollouts import Completion, RolloutPrompt, Sampler, complete
from your_ai.hub.find import find_model
from your_ai.memory import allocator, probe
from your_ai.memory.budget import budget_of, process_here, run_limit
from your_ai.memory.facts import facts_of
from your_ai.memory.limit import rounded_up
from your_ai.memory.plan import Budget, DoesNotFit, rows_of
from your_ai.memory.sample import in_gb
from your_ai.memory.workload import DataSizes, Plan, workload_of
from your_ai.nets import model
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.vocabulary import vocabulary_layers
from your_ai.objectives.objective import Scores, Targets
from your_ai.objectives.outside import GSPO, LOGPROBS, OUTSIDE, TOKEN_LOSSES, gspo_weights
from your_ai.run import checkpoint, events
from your_ai.run.folder import RUNS, RunFolder, creating
from your_ai.training import optimizer
from your_ai.training.planned import write_plan
from your_ai.training.run_data import rollouts_planned
from your_ai.training.trainer import graphs_within

OPTIMIZER, GRADIENTS = "optimizer.safetensors", "gradients-{:06d}.safetensors"
SHAPE = "model.json"
PARKED, ASIDE = "parked", "aside"  # folders in that of a run
ALPHA = 32.0  # of LoRA, whatever the rank
MIXER = re.compile("attn|attention|mixer|mamba|conv")  # in the name of what mixes tokens


def outside_config(request: TinkerRequest) -> TrainConfig:
    """The settings for which the memory of a server is planned."""
    return TrainConfig(
        model=request.model,
        objective="grpo",  # its steps generate, score and train, as those of loops
        max_memory=request.max_memory,
        max_seq_length=request.max_seq_length,
        max_new_tokens=request.max_seq_length // 2,
        lora_rank=request.rank,
        batch_size=request.batch_size,
        rollouts=2,
        prompts_per_step=-(-request.samples // 2),
        dtype=request.dtype,
        plan=request.plan,
    )


class OutsideText(NamedTuple):
    """A text with targets, and what the losses of these need."""

    tokens: np.ndarray
    """(n,) int32."""
    positions: np.ndarray
    """(m,) int32, the place of the token that predicts each target."""
    targets: np.ndarray
    """(m,) int32."""
    columns: Columns
    """(m,) float32 each: advantages, old, clip_low and clip_high."""
    counts: np.ndarray
    """(m,) bool, the tokens of the ratio of a whole text."""

    @property
    def nbytes(self) -> int:
        arrays = (self.tokens, self.positions, self.targets, self.counts, *self.columns.values())
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class Adam:
    """The update of one step: AdamW with bias correction, where weight decay is decoupled."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def config(self, config: TrainConfig) -> TrainConfig:
        return replace(
            config, optimizer="adamw", learning_rate=self.learning_rate, adam_beta1=self.beta1,
            adam_beta2=self.beta2, adam_epsilon=self.eps, weight_decay=self.weight_decay,
            adam_bias_correction=True,
        )  # fmt: skip


@dataclass(frozen=True)
class LoraShape:
    """The choices that decide the arrays of a model."""

    rank: int
    seed: int
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """The head, unless it is tied to the embedding, which LoRA on one of them would untie."""

    def config(self, config: TrainConfig, network: Any) -> TrainConfig:
        """The settings of its adapters. Raises UserError."""
        targets: tuple[str, ...] = (ALL_LINEAR,)
        if not (self.train_mlp and self.train_attn):
            paths = {path for block in network.layers for path in linear_paths(block)}
            mixes = {path for path in paths if MIXER.search(path.partition(".")[0])}
            kept = mixes if self.train_attn else paths - mixes if self.train_mlp else ()
            targets = tuple(sorted(kept))
        if self.train_unembed and (head := vocabulary_layers(network)[1]) is not None:
            targets = (*targets, head.rpartition(".")[2])
        if not targets:
            raise UserError("train_mlp, train_attn, train_unembed: nothing would be trained")
        return replace(
            config, lora_rank=self.rank, lora_alpha=ALPHA, lora_targets=targets, seed=self.seed,
            lora_layers="all",
        )  # fmt: skip


def linear_paths(block: Any) -> Iterator[str]:
    """The paths of the linear layers in a block."""
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear | nn.QuantizedLinear):
            yield path


@dataclass
class Done:
    """The work of a model since its last update."""

    loss: float = 0.0
    tokens: int = 0
    padded_tokens: int = 0
    targets: int = 0
    weight: float = 0.0
    """The sum of the absolute weights or advantages: what divides the loss that is shown."""
    seconds: float = 0.0


@dataclass
class OutsideModel:
    """A model of a loop: its adapters, and the state of its optimizer. It is a run, too, whose
    events other commands show."""

    shape: LoraShape
    folder: Path
    """Its run."""
    log: events.EventLog
    step: int = 0
    has_gradients: bool = False
    done: Done = field(default_factory=Done)


@dataclass
class Bench:
    """The base in memory, with the adapters of one model."""

    shape: LoraShape
    config: TrainConfig
    """With the settings of the shape."""
    opened: Opened
    adapters: model.Adapters
    built: Built
    budget: Budget
    optimizer: optimizer.StatefulOptimizer
    gradients: Gradients
    updates: dict[Adam, Callable[..., None]] = field(default_factory=dict)


class Outside:
    """Trains and asks the models of outside loops. All calls come from one thread."""

    def __init__(self, config: TrainConfig, server_bytes: int = 0) -> None:
        """config: the model, its limit, and the largest text and rank that are announced.
        server_bytes: of requests and answers that the process holds.
        Raises UserError if nothing fits."""
        self.config, self.server_bytes = config, server_bytes
        self.base = find_model(config.model)
        self.limit = run_limit(config)
        self.check_stop: Callable[[], None] = lambda: None
        """Called before each micro-batch and token; may raise."""
        self.bench: Bench | None = None
        self.active: OutsideModel | None = None
        self.sampler_of: Path | None = None
        """The folder whose adapters are in place of those of the active model."""
        opened = open_model(self.base, compute_dtype(config.dtype))
        self.tokenizer = opened.tokenizer()
        self.vocabulary = vocabulary_of(opened.network)
        self.architecture = str(opened.config.get("model_type", ""))
        self.budget = self.planned(LoraShape(int(config.lora_rank), 0), opened)

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return self.config.max_seq_length

    # -- the plan

    def planned(self, shape: LoraShape, opened: Opened) -> Budget:
        """The plan of models of a shape. Raises UserError if none fits."""
        config = shape.config(self.config, opened.network)
        data = rollouts_planned(config, config.max_seq_length)
        process = process_here()
        workload = workload_of(
            config,
            facts_of(opened.folder, opened.dtype.size),
            DataSizes(lengths=tuple(data.lengths), prompt_tokens=data.prompt_tokens),
            replace(process, python_bytes=process.python_bytes + self.server_bytes),
            can_stream=opened.can_stream,
            vocabulary=model.vocabulary_sizes(opened.network, config),
        )
        assert workload.rollouts is not None
        # Each completion may have a prompt of its own.
        workload = replace(workload, rollouts=replace(workload.rollouts, group=1))
        try:
            return budget_of(config, workload, opened.dtype, self.limit)
        except DoesNotFit as refusal:
            least, limit = in_gb(rounded_up(refusal.least_bytes)), in_gb(self.limit.limit_bytes)
            raise UserError(
                f"--max-memory: texts of {self.longest:,} tokens and rank {shape.rank} do not fit "
                f"into {limit}; at least {least} is needed; raise the limit, or lower "
                "--max-seq-length, --rank or --samples"
            ) from refusal

    def rows_at(self, tokens: int) -> int:
        assert self.bench is not None
        budget = self.bench.budget
        return rows_of(budget.workload, budget.choice.option.plan, tokens)

    # -- models

    def create(self, shape: LoraShape, folder: Path) -> OutsideModel:
        """A new model whose run is in `folder`. Raises UserError."""
        self.park()
        bench = self.put(shape)
        with creating(folder.name, self.settings_of(bench.config, folder.name, shape)) as made:
            log = events.EventLog(made.events)
        self.active = found = OutsideModel(shape, folder, log)
        write_plan(bench.budget, self.config, log)
        arrays = model.adapter_arrays(bench.opened.network)
        log.write(
            events.Started(
                step=0, steps=0, steps_per_epoch=0, model=self.config.model, rows=0,
                trainable_parameters=sum(array.size for array in arrays.values()),
                dtype=str(bench.opened.dtype).removeprefix("mlx.core."), plan=bench.built.plan,
                has_answers=False,
            )
        )  # fmt: skip
        return found

    def settings_of(self, config: TrainConfig, run: str, shape: LoraShape) -> TrainConfig:
        """The settings of the run of a model, for the commands that use it; config: its bench's."""
        return TrainConfig(
            model=config.model, run=run, max_memory=config.max_memory, dtype=config.dtype,
            max_seq_length=config.max_seq_length, batch_size=config.batch_size, seed=shape.seed,
            lora_rank=shape.rank, lora_alpha=ALPHA, lora_layers="all",
            lora_targets=config.lora_targets,
        )  # fmt: skip

    def end(self, of: OutsideModel) -> None:
        """Write the adapter of a model as the result of its run."""
        bench = self.activate(of)
        folder = RunFolder(of.folder)
        arrays = model.adapter_arrays(bench.opened.network)
        checkpoint.save_adapter(folder.adapter, arrays, bench.adapters.config, of.step)
        of.log.write(
            events.Finished(
                step=of.step, reason="done", adapter=str(folder.adapter), seconds=0.0,
                adapter_step=of.step,
            )
        )  # fmt: skip

    def put(self, shape: LoraShape) -> Bench:
        """Give the base new adapters of this shape."""
        if self.bench is not None and replace(self.bench.shape, seed=0) == replace(shape, seed=0):
            return self.renew(shape)
        self.bench = None
        allocator.free()
        opened = open_model(self.base, compute_dtype(self.config.dtype))
        budget = self.planned(shape, opened)
        chosen = budget.choice.option
        allocator.set_limits(
            self.limit.limit_bytes, chosen.needed_bytes, chosen.estimate.beside_bytes
        )
        config = shape.config(self.config, opened.network)
        adapters = model.add_adapters(opened.network, config)
        start_vocabulary(opened, {})
        plan, graphs = chosen.plan, graphs_within(budget)
        RUNS.mkdir(exist_ok=True)
        place = RUNS if plan.gradients_on_disk else None  # of files without names
        built = build_engine(
            opened.network, adapters.dropout_keys, plan.engine, tensors=opened.tensors,
            objective=OUTSIDE, spill=place, graphs=graphs, kept=plan.kept, resident=plan.resident,
            blocks_ahead=plan.blocks_ahead,
        )  # fmt: skip
        allocator.free()
        states = first_states(config, opened, chosen.plan)
        gradients = gradients_in(place)
        self.bench = Bench(shape, config, opened, adapters, built, budget, states, gradients)
        return self.bench

    def renew(self, shape: LoraShape) -> Bench:
        """Put first adapters and optimizer states where others were."""
        assert self.bench is not None
        bench = self.bench
        bench.gradients.clear()
        bench.optimizer.states.clear()  # before there are others
        bench.updates.clear()
        fresh = open_model(self.base, compute_dtype(self.config.dtype))
        model.add_adapters(fresh.network, replace(bench.config, seed=shape.seed))
        start_vocabulary(fresh, {})
        model.set_adapters(bench.opened.network, model.adapter_arrays(fresh.network))
        del fresh
        bench.optimizer = first_states(bench.config, bench.opened, bench.budget.choice.option.plan)
        bench.shape = shape
        return bench

    def park(self) -> None:
        """Write the active model to its folder, so that another can take its place."""
        self.restore_active()
        if self.active is not None:
            self.write(self.active, self.active.folder / PARKED, gradients=True)
            self.active = None

    def activate(self, wanted: OutsideModel) -> Bench:
        """Let a model be the one in memory."""
        self.restore_active()
        if self.active is not wanted:
            self.park()
            self.put(wanted.shape)
            self.read(wanted, wanted.folder / PARKED, with_optimizer=True)
            self.active = wanted
            shutil.rmtree(wanted.folder / PARKED, ignore_errors=True)
        assert self.bench is not None
        return self.bench

    def restore_active(self) -> None:
        """Put the adapters of the active model back, after those of a sampler."""
        if self.sampler_of is None:
            return
        self.sampler_of = None
        if self.active is not None and self.bench is not None:
            back, self.active = self.active, None  # lost if its file cannot be read
            aside = back.folder / ASIDE
            model.set_adapters(self.bench.opened.network, checkpoint.load_adapters(aside))
            self.active = back
            shutil.rmtree(aside, ignore_errors=True)

    # -- files

    def write(
        self,
        of: OutsideModel,
        folder: Path,
        *,
        gradients: bool = False,
        with_optimizer: bool = True,
    ) -> None:
        """Write a model that is in memory: its adapters, for any reader, and its optimizer."""
        assert self.bench is not None
        bench = self.bench
        trained = model.adapter_arrays(bench.opened.network)
        arrays: dict[str, checkpoint.ArraysOrWriter] = {**checkpoint.files_of(trained)}
        if with_optimizer:
            arrays[OPTIMIZER] = optimizer.saved_states(bench.optimizer)
        if gradients and of.has_gradients:  # one by one, as they may be on disk
            for number, name in enumerate(bench.gradients.sizes()):
                arrays[GRADIENTS.format(number)] = partial(save_gradient, bench.gradients, name)
        about = {"shape": asdict(of.shape), "step": of.step, "model": self.config.model}
        config = {**bench.adapters.config, "step": of.step}
        texts = {checkpoint.ADAPTER_CONFIG: config, SHAPE: about}
        checkpoint.write_folder(folder, arrays=arrays, texts=texts)

    def read(self, into: OutsideModel, folder: Path, *, with_optimizer: bool) -> None:
        """Read what `write` wrote into the active model. Raises UserError."""
        assert self.bench is not None
        model.set_adapters(self.bench.opened.network, checkpoint.load_adapters(folder))
        if with_optimizer:
            arrays = dict(load_arrays(folder / OPTIMIZER))
            optimizer.restore_states(self.bench.optimizer, arrays)
            into.step = int(about_of(folder)["step"])
        self.bench.gradients.clear()
        for path in sorted(folder.glob("gradients-*.safetensors")):
            self.bench.gradients.add(dict(load_arrays(path)))

    def save(self, of: OutsideModel, target: Path, *, with_optimizer: bool = True) -> None:
        """Save a model as it is now; `target` is replaced."""
        self.activate(of)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.write(of, target, with_optimizer=with_optimizer)

    def load(self, into: OutsideModel, folder: Path, *, with_optimizer: bool) -> None:
        """Give a model what was saved in `folder`. Raises UserError if it has another shape."""
        if with_optimizer and not (folder / OPTIMIZER).is_file():
            raise UserError(f"{folder}: was saved for samplers, without an optimizer")
        check_intact(folder, with_optimizer=with_optimizer)
        self.activate(into)
        self.read(into, folder, with_optimizer=with_optimizer)
        into.has_gradients = False

    def forget(self, model: OutsideModel) -> None:
        """Free a model; what it saved stays."""
        self.restore_active()
        if self.active is model:
            self.active = None
        shutil.rmtree(model.folder / PARKED, ignore_errors=True)

    # -- what loops ask for

    def log_probabilities(
        self, of: OutsideModel | Path | None, texts: Sequence[OutsideText]
    ) -> list[np.ndarray]:
        """(m,) float32 of the targets of each text. of: as in `sampled`."""
        bench = self.asked(of)
        found = [np.zeros(len(text.targets), np.float32) for text in texts]
        for batch, parts in batches_of(texts, self.rows_at, 0):
            self.check_stop()
            values = np.array(bench.built.engine.log_probabilities(batch))
            scatter(found, parts, values[: batch.trained_tokens])
        return found

    def add_gradients(
        self, of: OutsideModel, texts: Sequence[OutsideText], loss: str, *, gradients: bool = True
    ) -> tuple[float, list[np.ndarray]]:
        """Add the gradients of the sum of a loss to those of the model.

        Returns the loss, and (m,) float32 log-probabilities of the targets of each text.
        Raises UserError.
        """
        self.check(texts)
        bench = self.activate(of)
        if loss == GSPO:
            return self.weighed_by_text(of, texts, gradients)
        if not gradients:
            found = self.log_probabilities(of, texts)
            return loss_of(texts, found, loss), found
        total, began = 0.0, time.perf_counter()
        found = [np.zeros(len(text.targets), np.float32) for text in texts]
        of.has_gradients = True
        try:
            for batch, parts in batches_of(texts, self.rows_at, TOKEN_LOSSES.index(loss)):
                total += self.add_batch(of, bench, batch, found, parts)
        except BaseException:
            # Some of these texts are in the sum, and it cannot be known of which targets.
            bench.gradients.clear()
            of.has_gradients, of.done = False, Done()
            raise
        of.done.loss += total
        of.done.seconds += time.perf_counter() - began
        return total, found

    def add_batch(
        self,
        of: OutsideModel,
        bench: Bench,
        batch: Batch,
        found: Sequence[np.ndarray],
        parts: list[TextPart],
    ) -> float:
        """Add the gradients of a micro-batch; returns its loss, and writes to `found`."""
        self.check_stop()
        sums = bench.built.engine.add_gradients(batch, 1.0, 0, bench.gradients)
        values, slots = sums.metrics[LOGPROBS]
        mx.eval(sums.loss, values, slots)
        at = np.array(slots)
        ordered = np.zeros(batch.trained_tokens, np.float32)
        ordered[at[at >= 0]] = np.array(values)[at >= 0]
        scatter(found, parts, ordered)
        of.done.tokens += batch.real_tokens
        of.done.padded_tokens += batch.tokens.size
        of.done.targets += batch.trained_tokens
        of.done.weight += float(np.abs(batch.columns["advantages"]).sum(dtype=np.float64))
        return float(sums.loss)

    def weighed_by_text(
        self, of: OutsideModel, texts: Sequence[OutsideText], gradients: bool
    ) -> tuple[float, list[np.ndarray]]:
        found = self.log_probabilities(of, texts)
        total, weighed = 0.0, []
        for text, values in zip(texts, found, strict=True):
            loss, weights = gspo_weights(values, text.columns, text.counts)
            total += loss
            columns = {**text.columns, "advantages": weights}
            weighed.append(text._replace(columns=columns))
        if gradients:
            self.add_gradients(of, weighed, TOKEN_LOSSES[0])
        return total, found

    def update(self, of: OutsideModel, adam: Adam) -> dict[str, float]:
        """One step of the optimizer with the gradients since the last; returns metrics.

        Raises UserError if there are no gradients, or if they are not finite; then nothing changes.
        """
        began, bench = time.perf_counter(), self.activate(of)
        if not of.has_gradients:
            raise UserError("optim_step: there are no gradients; call forward_backward first")
        norm = float(optimizer.global_norm(bench.gradients))
        of.has_gradients = False
        if not np.isfinite(norm):
            bench.gradients.clear()
            raise UserError(f"optim_step: the gradient norm is {norm}; the step changed nothing")
        update = self.update_of(bench, adam)
        update(
            bench.gradients, optimizer.clip_factor(norm, adam.grad_clip_norm), adam.learning_rate
        )
        bench.gradients.clear()
        mx.synchronize()
        of.step += 1
        self.write_step(of, adam, norm, time.perf_counter() - began)
        return {"grad_norm": norm}

    def write_step(self, of: OutsideModel, adam: Adam, norm: float, seconds: float) -> None:
        done, of.done = of.done, Done()
        sample = probe.read()
        mx.reset_peak_memory()
        of.log.write(
            events.Step(
                step=of.step, steps=of.step, epoch=1, loss=done.loss / (done.weight or 1),
                grad_norm=norm, learning_rate=adam.learning_rate, tokens=done.tokens,
                padded_tokens=done.padded_tokens, trained_tokens=done.targets,
                seconds=done.seconds + seconds, **asdict(sample),
            )
        )  # fmt: skip

    def update_of(self, bench: Bench, adam: Adam) -> Callable[..., None]:
        """The compiled update of these settings, whatever the learning rate."""
        key = replace(adam, learning_rate=0.0, grad_clip_norm=0.0)
        if key not in bench.updates:
            bench.updates.clear()
            network, config = bench.opened.network, adam.config(self.config)
            fresh = optimizer.build_optimizer(config, {})
            fresh.rule.state["step"] = bench.optimizer.rule.state["step"]
            bench.optimizer = replace(bench.optimizer, rule=fresh.rule)
            bench.updates[key] = optimizer.make_update(network, bench.optimizer)
        return bench.updates[key]

    def sampled(
        self,
        of: OutsideModel | Path | None,
        prompts: Sequence[RolloutPrompt],
        sampler: Sampler,
        stop_tokens: Sequence[int],
        most: int,
    ) -> list[Completion]:
        """Completions of prompts, in waves. of: a model as it is now, the folder of adapters that
        were saved, or None for the base."""
        bench = self.asked(of)
        wave = bench.budget.choice.option.plan.wave or 1
        network = bench.opened.network
        network.eval()

        def step(_: int) -> None:
            self.check_stop()

        found = list(complete(network, prompts, sampler, stop_tokens, most, wave, step))
        allocator.free(collect=False)
        return found

    def asked(self, of: OutsideModel | Path | None) -> Bench:
        """The bench with the adapters that are to be asked."""
        if isinstance(of, OutsideModel):
            return self.activate(of)
        where = of or Path()
        if self.bench is not None and self.sampler_of == where:
            return self.bench
        shape = shape_in(of) if of is not None else None
        if self.bench is None or (
            shape is not None and replace(self.bench.shape, seed=0) != replace(shape, seed=0)
        ):
            self.park()
            self.put(shape or LoraShape(int(self.config.lora_rank), 0))
        assert self.bench is not None
        network = self.bench.opened.network
        if self.active is not None and self.sampler_of is None:
            config = self.bench.adapters.config
            aside = self.active.folder / ASIDE
            checkpoint.save_adapter(aside, model.adapter_arrays(network), config, self.active.step)
        if of is not None:
            check_intact(of)
        arrays = checkpoint.load_adapters(of) if of is not None else without_effect(network)
        self.sampler_of = Path(ASIDE)  # nothing that can be asked for, until all are set
        model.set_adapters(network, arrays)
        self.sampler_of = where
        return self.bench

    def check(self, texts: Sequence[OutsideText]) -> None:
        """Raise UserError for a text that is too long, or tokens that the model has not."""
        for number, text in enumerate(texts, 1):
            if len(text.tokens) > self.longest:
                raise UserError(
                    f"text {number} has {counted(len(text.tokens), 'token')}; this server was "
                    f"planned for {self.longest:,}: start it with a larger --max-seq-length (the "
                    f"plan of this one needs {in_gb(self.budget.choice.option.needed_bytes)})"
                )
            for ids in (text.tokens, text.targets):
                check_ids(ids, self.vocabulary, self.tokenizer, f"text {number}")


def first_states(config: TrainConfig, opened: Opened, plan: Plan) -> optimizer.StatefulOptimizer:
    """An optimizer before its first step; on disk, if the plan says so."""
    place = RUNS if plan.states_on_disk else None
    trained = opened.network.trainable_parameters()
    return optimizer.build_optimizer(Adam().config(config), trained, place)


def save_gradient(gradients: Gradients, name: str, path: Path) -> None:
    """Move a gradient to a file."""
    checkpoint.save_arrays(path, gradients.take([name]))


def without_effect(network: Any) -> dict[str, mx.array]:
    """Adapters that add nothing."""
    arrays = model.adapter_arrays(network)
    return {n: mx.zeros_like(a) if "lora_b" in n else a for n, a in arrays.items()}


def check_intact(folder: Path, *, with_optimizer: bool = False) -> None:
    """Raise UserError if what was saved in a folder is damaged."""
    files = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG, SHAPE)
    if (fault := checkpoint.fault(folder, files + (OPTIMIZER,) * with_optimizer)) is not None:
        raise UserError(fault)


def about_of(folder: Path) -> dict[str, Any]:
    """The record beside saved adapters. Raises UserError if it is missing or damaged."""
    try:
        found = json.loads(read_text(folder / SHAPE, 1 << 16))
        LoraShape(**found["shape"]), int(found["step"])
    except (OSError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{folder}: is no saved model, or damaged") from error
    return dict(found)


def shape_in(folder: Path) -> LoraShape:
    return LoraShape(**about_of(folder)["shape"])


def loss_of(texts: Sequence[OutsideText], found: Sequence[np.ndarray], loss: str) -> float:
    """The sum of a loss of tokens, of known log-probabilities."""
    if not texts:
        return 0.0
    current = np.concatenate(found)
    columns = {n: mx.array(np.concatenate([t.columns[n] for t in texts])) for n in texts[0].columns}
    columns["loss"] = mx.full(current.shape, TOKEN_LOSSES.index(loss), mx.int32)
    columns["slot"] = mx.arange(len(current))
    unused = mx.zeros(current.shape, mx.int32)
    targets = Targets(unused, unused, mx.ones(current.shape), unused, columns)
    return float(OUTSIDE.weigh(Scores(mx.array(current)), targets).loss)


class TextPart(NamedTuple):
    """Targets of a text that are computed together: all, unless they are too many."""

    place: int
    """Of the text."""
    cut: slice

    def of(self, texts: Sequence[OutsideText]) -> OutsideText:
        text, cut = texts[self.place], self.cut
        columns = {name: values[cut] for name, values in text.columns.items()}
        return OutsideText(
            text.tokens, text.positions[cut], text.targets[cut], columns, text.counts[cut]
        )


def batches_of(
    texts: Sequence[OutsideText], rows_at: Callable[[int], int], loss: int
) -> Iterator[tuple[Batch, list[TextPart]]]:
    """Padded micro-batches of texts, the longest first, and the parts of texts in each.

    The plan counts one target for each token of its rows. Where tokens have several, there are
    fewer rows, and a text with more targets than that is computed several times.
    loss: the number of the loss of all targets.
    """
    longest = max((len(text.tokens) for text in texts), default=0)
    edges = few_edges(longest)
    waiting = deque(sorted(range(len(texts)), key=lambda place: -len(texts[place].tokens)))
    cut_at = 0  # targets of the first that waits that were computed
    while waiting:
        length = int(edges[np.searchsorted(edges, len(texts[waiting[0]].tokens))])
        rows = max(1, rows_at(length))
        parts: list[TextPart] = []
        count = 0
        while waiting and len(parts) < rows:
            left = len(texts[waiting[0]].targets) - cut_at
            if padded_targets(count + left, (len(parts) + 1) * length) > rows * length and parts:
                break
            end = cut_at + min(left, rows * length)
            parts.append(TextPart(waiting[0], slice(cut_at, end)))
            count += end - cut_at
            cut_at = 0 if end == cut_at + left else end
            if cut_at:
                break
            waiting.popleft()
        yield batch_of([part.of(texts) for part in parts], length, loss), parts


def batch_of(texts: Sequence[OutsideText], length: int, loss: int) -> Batch:
    """A micro-batch of texts padded to `length` tokens."""
    count = len(texts)
    tokens = np.zeros((count, length), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
    columns = {name: [text.columns[name] for text in texts] for name in texts[0].columns}
    trained = sum(len(text.targets) for text in texts)
    columns["loss"], columns["slot"] = [np.full(trained, loss)], [np.arange(trained)]
    return padded_batch(
        tokens,
        positions=[row * length + text.positions for row, text in enumerate(texts)],
        targets=[text.targets for text in texts],
        weights=[np.ones(len(text.targets)) for text in texts],
        columns=columns,
        rows=np.arange(count, dtype=np.uint32)[:, None],
        places=np.arange(length, dtype=np.uint32)[None],
        lengths=np.array([len(text.tokens) for text in texts]),
    )


def scatter(found: Sequence[np.ndarray], parts: Sequence[TextPart], values: np.ndarray) -> None:
    """Put the values of the targets of a micro-batch where their texts are."""
    start = 0
    for place, cut in parts:
        count = cut.stop - cut.start
        found[place][cut] = values[start : start + count]
        start += count
