"""Models that take turns on one base in memory: their adapters, optimizers and gradients.

What is not in memory is in files of the model's run, so any number of models needs the memory of
one. A sampler takes the place of the adapters alone.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.config import ALL_LINEAR, TrainConfig
from your_ai.engine.build import Built, build_engine
from your_ai.engine.gradients import Gradients, gradients_in
from your_ai.engine.weights import Opened, open_model, start_vocabulary
from your_ai.errors import UserError
from your_ai.files import read_text
from your_ai.hub.find import fingerprint
from your_ai.memory import allocator
from your_ai.memory.plan import Budget
from your_ai.nets import model
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.numerics import compute_dtype
from your_ai.nets.saved_adapter import base_files, check_files, read_adapter
from your_ai.nets.vocabulary import vocabulary_layers
from your_ai.objectives.outside import OUTSIDE
from your_ai.run import checkpoint, events
from your_ai.run.folder import RUNS
from your_ai.training import optimizer
from your_ai.training.trainer import graphs_within

OPTIMIZER, GRADIENTS = "optimizer.safetensors", "gradients-{:06d}.safetensors"
SHAPE = "model.json"
PARKED_ADAPTERS, PARKED_STATES = "parked/adapters", "parked/states"  # folders in that of a run
ALPHA = 32.0  # of LoRA, whatever the rank
MIXER = re.compile("attn|attention|mixer|mamba|conv")  # in the name of what mixes tokens


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
        """The settings of the optimizer, whose rate each update has."""
        return replace(
            config, optimizer="adamw", adam_beta1=self.beta1, adam_beta2=self.beta2,
            adam_epsilon=self.eps, weight_decay=self.weight_decay, adam_bias_correction=True,
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


class OutsideLog(events.EventLog):
    """The events of a model. Their file is open only while one is written, as models are many."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.close()

    def write(self, event: events.Event) -> None:
        with contextlib.closing(events.EventLog(self.path)) as log:
            log.write(event)


@dataclass(eq=False)
class OutsideModel:
    """A model of a loop: its adapters, and the state of its optimizer. It is a run, too, whose
    events other commands show."""

    shape: LoraShape
    folder: Path
    """Its run."""
    log: OutsideLog
    step: int = 0
    has_gradients: bool = False
    done: Done = field(default_factory=Done)


class SavedAdapters(NamedTuple):
    """A folder with adapters that do not change."""

    folder: Path
    written: int
    """Differs if the folder was replaced."""

    @staticmethod
    def at(folder: Path) -> SavedAdapters:
        """Raises UserError if there are none."""
        try:
            return SavedAdapters(folder, (folder / checkpoint.CHECKSUMS).stat().st_mtime_ns)
        except OSError as error:
            raise UserError(f"{folder}: is no saved model, or damaged") from error


BASE = SavedAdapters(Path(), 0)  # without adapters
Asked = OutsideModel | SavedAdapters


@dataclass
class Bench:
    """The base in memory, with adapters, gradients and an optimizer of one shape."""

    shape: LoraShape
    config: TrainConfig
    """With the settings of the shape."""
    opened: Opened
    adapters: model.Adapters
    built: Built
    optimizer: optimizer.StatefulOptimizer
    gradients: Gradients
    updates: dict[Adam, Callable[..., None]] = field(default_factory=dict)

    def restart(self, place: Path | None) -> None:
        """Put an optimizer before its first step; its states are on disk in `place`, if given."""
        self.gradients.clear()
        self.optimizer.states.clear()  # before there are others
        self.updates.clear()
        self.optimizer = first_states(self.config, self.opened, place)


class SharedBase:
    """The base in memory, and whose adapters and states are there with it."""

    def __init__(self, folder: Path, config: TrainConfig, budget: Budget) -> None:
        """budget: holds for the shapes of all models."""
        self.folder, self.config, self.budget = folder, config, budget
        self.files = base_files(fingerprint(folder))
        self.bench: Bench | None = None
        self.adapters_of: Asked | None = None
        self.states_of: OutsideModel | None = None
        """Whose optimizer and gradients are there."""

    # -- turns

    def begin(self, shape: LoraShape) -> Bench:
        """Put the first adapters and states of a model there; they are nobody's yet. Raises
        UserError."""
        self.put_states_away()
        bench = self.bench_of(shape)
        self.put_adapters_away()
        bench.restart(self.place_of_states)
        fresh = open_model(self.folder, compute_dtype(self.config.dtype))
        model.add_adapters(fresh.network, shape.config(self.config, fresh.network))
        start_vocabulary(fresh, {})
        model.set_adapters(bench.opened.network, model.adapter_arrays(fresh.network))
        return bench

    def train(self, wanted: OutsideModel) -> Bench:
        """Let the adapters and states of a model be there. Raises UserError."""
        bench = self.ask(wanted)
        if self.states_of is not wanted:
            self.put_states_away()
            self.read_states(wanted.folder / PARKED_STATES)
            self.states_of = wanted
        return bench

    def ask(self, wanted: Asked) -> Bench:
        """Let these adapters be there. Raises UserError."""
        if self.bench is not None and self.adapters_of == wanted:
            return self.bench
        if isinstance(wanted, OutsideModel):
            shape, folder = wanted.shape, wanted.folder / PARKED_ADAPTERS
        elif wanted != BASE:
            self.check(wanted.folder)
            shape, folder = shape_in(wanted.folder), wanted.folder
        else:
            usual = LoraShape(int(self.config.lora_rank), 0)
            shape, folder = self.bench.shape if self.bench is not None else usual, None
        bench = self.bench_of(shape)
        self.put_adapters_away()
        network = bench.opened.network
        arrays = without_effect(network) if folder is None else checkpoint.load_adapters(folder)
        model.set_adapters(network, arrays)
        self.adapters_of = wanted
        return bench

    def bench_of(self, shape: LoraShape) -> Bench:
        """The base with arrays of this shape; whose they are is as before, if they had it."""
        if self.bench is not None and replace(self.bench.shape, seed=0) == replace(shape, seed=0):
            return self.bench
        self.put_adapters_away()
        self.put_states_away()
        self.bench = None
        allocator.free()
        opened = open_model(self.folder, compute_dtype(self.config.dtype))
        config = shape.config(self.config, opened.network)
        adapters = model.add_adapters(opened.network, config)
        adapters = replace(adapters, config={**adapters.config, "base_files": self.files})
        start_vocabulary(opened, {})
        plan = self.budget.choice.option.plan
        RUNS.mkdir(exist_ok=True)
        spill = RUNS if plan.gradients_on_disk else None  # of files without names
        built = build_engine(
            opened.network, adapters.dropout_keys, plan.engine, tensors=opened.tensors,
            objective=OUTSIDE, spill=spill, graphs=graphs_within(self.budget), kept=plan.kept,
            resident=plan.resident, blocks_ahead=plan.blocks_ahead,
        )  # fmt: skip
        allocator.free()
        states = first_states(config, opened, self.place_of_states)
        self.bench = Bench(shape, config, opened, adapters, built, states, gradients_in(spill))
        return self.bench

    @property
    def place_of_states(self) -> Path | None:
        """The folder of optimizer states that the plan has on disk."""
        return RUNS if self.budget.choice.option.plan.states_on_disk else None

    def put_adapters_away(self) -> None:
        """Write the adapters of a model to its files; afterwards they are nobody's."""
        if isinstance(self.adapters_of, OutsideModel):
            of = self.adapters_of
            self.write(of.folder / PARKED_ADAPTERS, of, self.adapter_files())
        self.adapters_of = None

    def put_states_away(self) -> None:
        """Write the optimizer and gradients of a model to its files; then they are nobody's."""
        if self.states_of is not None:
            assert self.bench is not None
            of, gradients = self.states_of, self.bench.gradients
            arrays: dict[str, checkpoint.ArraysOrWriter] = {OPTIMIZER: self.optimizer_file()}
            if of.has_gradients:  # one by one, as they may be on disk
                for number, name in enumerate(gradients.sizes()):
                    arrays[GRADIENTS.format(number)] = partial(save_gradient, gradients, name)
            self.write(of.folder / PARKED_STATES, of, arrays)
            gradients.clear()
        self.states_of = None

    def forget(self, of: OutsideModel) -> None:
        """Free what a model has here; what it saved stays."""
        self.adapters_of = None if self.adapters_of is of else self.adapters_of
        if self.states_of is of:
            assert self.bench is not None
            self.bench.gradients.clear()
            self.states_of = None
        shutil.rmtree((of.folder / PARKED_STATES).parent, ignore_errors=True)

    # -- files

    def adapter_files(self) -> Mapping[str, checkpoint.ArraysOrWriter]:
        assert self.bench is not None
        return checkpoint.files_of(model.adapter_arrays(self.bench.opened.network))

    def optimizer_file(self) -> checkpoint.ArraysOrWriter:
        assert self.bench is not None
        return optimizer.saved_states(self.bench.optimizer)

    def write(
        self, folder: Path, of: OutsideModel, arrays: Mapping[str, checkpoint.ArraysOrWriter]
    ) -> None:
        """Replace a folder by these arrays of a model; mlx-lm reads it if it has the adapters."""
        assert self.bench is not None
        folder.parent.mkdir(parents=True, exist_ok=True)
        about = {"shape": asdict(of.shape), "step": of.step, "model": self.config.model}
        config = {**self.bench.adapters.config, "step": of.step}
        texts = {checkpoint.ADAPTER_CONFIG: config, SHAPE: about}
        checkpoint.write_folder(folder, arrays=arrays, texts=texts)

    def read_states(self, folder: Path) -> int:
        """Read an optimizer, and the gradients beside it; returns its step. Raises UserError."""
        assert self.bench is not None
        step = int(about_of(folder)["step"])
        optimizer.restore_states(self.bench.optimizer, dict(load_arrays(folder / OPTIMIZER)))
        self.bench.gradients.clear()
        for path in sorted(folder.glob("gradients-*.safetensors")):
            self.bench.gradients.add(dict(load_arrays(path)))
        return step

    def save(self, of: OutsideModel, target: Path, *, with_optimizer: bool = True) -> None:
        """Save a model as it is now; `target` is replaced."""
        self.train(of) if with_optimizer else self.ask(of)
        arrays = dict(self.adapter_files())
        if with_optimizer:
            arrays[OPTIMIZER] = self.optimizer_file()
        self.write(target, of, arrays)

    def check(self, folder: Path, *, with_optimizer: bool = False) -> None:
        """Raise UserError if what was saved in a folder is damaged, or of another base."""
        files = (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG, SHAPE)
        if (fault := checkpoint.fault(folder, files + (OPTIMIZER,) * with_optimizer)) is not None:
            raise UserError(fault)
        check_files(read_adapter(folder), self.files, self.folder)

    def load(self, into: OutsideModel, folder: Path, *, with_optimizer: bool) -> None:
        """Give a model what was saved in `folder`. Raises UserError if it has another shape."""
        if with_optimizer and not (folder / OPTIMIZER).is_file():
            raise UserError(f"{folder}: was saved for samplers, without an optimizer")
        self.check(folder, with_optimizer=with_optimizer)
        bench = self.train(into)
        model.set_adapters(bench.opened.network, checkpoint.load_adapters(folder))
        bench.gradients.clear()
        into.has_gradients = False
        if with_optimizer:
            into.step = self.read_states(folder)


def first_states(
    config: TrainConfig, opened: Opened, place: Path | None
) -> optimizer.StatefulOptimizer:
    """An optimizer before its first step; place: as in `Bench.restart`."""
    trained = opened.network.trainable_parameters()
    return optimizer.build_optimizer(Adam().config(config), trained, place)


def save_gradient(gradients: Gradients, name: str, path: Path) -> None:
    """Copy a gradient to a file: until all are there, none may be lost."""
    arrays = gradients.take([name])
    try:
        checkpoint.save_arrays(path, arrays)
    finally:
        gradients.add(arrays)


def without_effect(network: Any) -> dict[str, mx.array]:
    """Adapters that add nothing."""
    arrays = model.adapter_arrays(network)
    return {n: mx.zeros_like(a) if "lora_b" in n else a for n, a in arrays.items()}


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
