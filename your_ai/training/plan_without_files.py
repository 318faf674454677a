"""The plan of a run whose model is not on this machine, or that is for another machine.

It comes from the registry or a config.json. Nothing is measured: the process, the device and the
memory are what such a machine usually has.
This module does not import mlx, except to build a model of a config.json.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from your_ai.config import DISTILL, ByLayer, TrainConfig, defaults, flag
from your_ai.config.by_layer import OUTSIDE
from your_ai.config.checks import check_teacher_given
from your_ai.errors import UserError
from your_ai.gates.text import counted, nearest, shortened
from your_ai.gates.untrusted import read_json
from your_ai.hub.config_values import check_config_values
from your_ai.hub.find import Missing, find_model
from your_ai.hub.registry import alias_of, known
from your_ai.memory import limit as limits
from your_ai.memory.buffers import METAL_BUFFERS
from your_ai.memory.facts import (
    HEADS_OF_MODELS,
    VOCABULARY,
    ModelFacts,
    facts_of_config,
    facts_of_known,
    names_of,
)
from your_ai.memory.plan import Budget, choose, largest_that_fits
from your_ai.memory.workload import (
    PYTHON_BYTES,
    WHOLE,
    DataSizes,
    ProcessFacts,
    TeacherSizes,
    VocabularyArray,
    Workload,
    in_steps,
    workload_of,
)

CONFIG, WEIGHTS = "config.json", "model*.safetensors"
CUDA = ("mlx-cuda-12", "mlx-cuda-13")  # packages with MLX's code for NVIDIA cards
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Absent:
    """A model without weights on this machine."""

    facts: ModelFacts
    model_type: str
    note: str
    """What is not here, and what to do about it; one line."""


@dataclass(frozen=True)
class Target:
    """The machine that a plan is for."""

    memory: limits.MachineMemory
    has_gpu: bool
    """Whether MLX computes on a GPU."""
    note: str = ""
    """Which machine it is, if it is another one; one line."""

    @property
    def is_here(self) -> bool:
        return not self.note


def planned_run(
    config: TrainConfig,
    seq_len: int | None,
    on_note: Callable[[str], object],
    memory_gb: float | None = None,
    on_measure: Callable[[str], object] | None = None,
    remembers: bool = False,
) -> Budget:
    """The budget of a run, also if its model is not here; no weight is read.

    seq_len: tokens of every row, instead of the data. on_note: called with what to know about a
    plan without the model's files. memory_gb: plan for an idle Mac sold with this many GB, and
    not for this machine. on_measure, remembers: as in `planned_budget`. Raises UserError if
    nothing fits.
    """
    target = Target(limits.memory_here(), has_gpu()) if memory_gb is None else other_mac(memory_gb)
    check_teacher_given(config)
    named = model_of_teacher(config)
    if memory_gb is None and all(is_here(name) for name in (config.model, named) if name):
        from your_ai.training.plan_again import remembered_budget  # loads mlx

        folder = find_model(config.model)
        if remembers and (budget := remembered_budget(config, folder, seq_len)) is not None:
            return budget
        from your_ai.training.planned import planned_budget  # loads mlx-lm

        return planned_budget(config, folder, seq_len, on_note, on_measure, remembers)
    model, teacher = absent_model(config.model, config, target), None
    if named:
        teacher = absent_model(named, replace(config, quantize=None), target)
    budget = planned(config, model, seq_len, target, teacher)
    for text in notes_of(config, [model, *([teacher] if teacher else [])], seq_len, target):
        on_note(text)
    return budget


def model_of_teacher(config: TrainConfig) -> str:
    """The model that is the teacher of a run; "" if there is none, or a run is."""
    is_model = config.objective == DISTILL and not config.teacher.startswith("run:")
    return config.teacher if is_model else ""


def is_here(name: str) -> bool:
    """Return whether a model has weights on this machine. Raises UserError if it is not known."""
    if config_file(name) is not None:
        return False
    try:
        find_model(name)
    except Missing:
        return False
    return True


def absent_model(name: str, config: TrainConfig, target: Target) -> Absent:
    """The model that a name stands for, from its config or the registry. Raises UserError."""
    if (path := config_file(name)) is not None:
        return absent_of_config(path, config, target)
    try:
        folder = find_model(name)
    except Missing as missing:
        return absent_of_registry(missing, config, target)
    return replace(absent_of_config(folder / CONFIG, config, target), note="")


def other_mac(memory_gb: float) -> Target:
    """An idle Mac sold with this many GB. Raises UserError."""
    note = f"planned for an idle Mac with {memory_gb:g} GB; nothing was measured there"
    return Target(limits.idle_mac(memory_gb), True, note)


def config_file(name: str) -> Path | None:
    """The config.json that --model names, as a file or as a folder without weights, if it does."""
    path = Path(os.path.expanduser(name))
    if os.path.isfile(path) and path.suffix == ".json":
        return path
    if os.path.isfile(path / CONFIG) and not any(path.glob(WEIGHTS)):
        return path / CONFIG
    return None


def absent_of_config(path: Path, config: TrainConfig, target: Target) -> Absent:
    """The model of a config.json. Raises UserError, with the reason, if it cannot be one."""
    content = read_json(path, "it describes a model")
    check_config_values(path, content)
    try:
        facts = facts_of_config(content, float_bytes_of(config, target), config.quantize)
    except ValueError as error:
        raise UserError(f"{path}: {shortened(str(error), 200)}") from error
    if not facts.blocks or not facts.linears:
        raise UserError(f"{path}: no blocks with linear layers were found; is it a language model?")
    note = f"{path}: only the config is here, so sizes are those that it implies"
    return Absent(facts, content["model_type"], note)


def absent_of_registry(missing: Missing, config: TrainConfig, target: Target) -> Absent:
    """A model of the registry. Raises `missing` if it is not in there."""
    alias = alias_of(missing.repo)
    if alias is None:
        raise missing
    model = known()[alias]
    facts = facts_of_known(model, float_bytes_of(config, target), config.quantize)
    note = f"{missing.repo} is not on this machine; download it ({missing.size_text}): "
    return Absent(facts, model.model_type, f"{note}your_ai download {alias}")


def planned(
    config: TrainConfig,
    model: Absent,
    seq_len: int | None,
    target: Target,
    teacher: Absent | None = None,
) -> Budget:
    """The budget of a run of a model without files.

    teacher: that of a distillation, unless it is the model itself.

    seq_len: as in `planned_budget`; rows of the data are not read, since the tokenizer is missing.
    Raises UserError if nothing fits or the adapters do not suit the model.
    """
    if seq_len is not None and seq_len < 1:
        raise UserError(f"--seq-len {seq_len}: must be at least 1")
    facts, config = model.facts, defaults.sized(config, 0)
    check_adapters(config, facts)
    longest, prompt = config.max_seq_length if seq_len is None else seq_len, 0
    if config.samples_completions:
        from your_ai.data.batches import MULTIPLE  # loads numpy

        longest = max(longest, config.max_new_tokens + 2)
        prompt = longest - config.max_new_tokens
        longest = -(-(longest - 1) // MULTIPLE) * MULTIPLE
    limit = limits.find_limit(target.memory, config.max_memory, config.force)
    process = ProcessFacts(python_bytes=PYTHON_BYTES, sliced=not target.has_gpu)
    if not target.is_here or platform.system() == "Darwin":
        process = replace(process, most_buffers=METAL_BUFFERS, mixes_whole=True)
    data = DataSizes(lengths=(longest,), prompt_tokens=prompt)
    count, width = facts.vocabulary, facts.hidden
    outside = tuple(
        VocabularyArray(count, width, count, True, leaf not in HEADS_OF_MODELS, low_rank=name)
        for name, leaf in names_outside(config, facts).items()
    )
    taught = None
    if config.objective == DISTILL:
        own = TeacherSizes(facts=None if teacher is None else teacher.facts)
        taught = in_steps(own, config, longest)
    workload = workload_of(config, facts, data, process, teacher=taught, vocabulary=outside)
    workload = replace(workload, whole=model.model_type in WHOLE)
    if not target.is_here and config.max_memory is None:
        workload = replace(workload, limit_option="--memory")

    def budget_with(asked: Workload) -> Budget:
        return Budget(limit, asked, choose(asked, limit.limit_bytes))

    return largest_that_fits(config, workload, budget_with)


def notes_of(
    config: TrainConfig, models: Sequence[Absent], seq_len: int | None, target: Target
) -> list[str]:
    """Notes for the user on such a plan; a line each."""
    notes = [note for note in (target.note, *(model.note for model in models)) if note]
    if config.data and seq_len is None:
        notes.append(
            "the data is not read for such a plan: rows count as --max-seq-length "
            f"{config.max_seq_length} tokens"
        )
    return notes


def names_outside(config: TrainConfig, facts: ModelFacts) -> dict[str, str]:
    """The targets that are no layers of blocks but names of embeddings and heads, without their
    paths."""
    leaves = {target: target.rpartition(".")[2] for target in config.lora_targets}
    return {
        target: leaf
        for target, leaf in leaves.items()
        if leaf in VOCABULARY and not names_of(facts, (target,), config.lora_experts)
    }


def check_adapters(config: TrainConfig, facts: ModelFacts) -> None:
    """Raise UserError if a target or a pattern is in no block, if the model has fewer blocks, or if
    it is quantized and its own weights are to be trained."""
    if config.adapter_kind.is_whole and facts.quantized:
        raise UserError(
            f"--adapter full: {config.model} is quantized; use a model that is not, or train "
            "adapters (--adapter lora)"
        )
    _, count = defaults.largest(config, facts.blocks)
    if count > facts.blocks:
        raise UserError(
            f"--lora-layers {count}: the model has {counted(facts.blocks, 'block')}; use "
            f"{facts.blocks} or all"
        )
    outside = names_outside(config, facts)
    for target in config.lora_targets:
        if names_of(facts, (target,), config.lora_experts) or target in outside:
            continue
        if experts := names_of(facts, (target,), True):
            raise UserError(
                f"--lora-targets {target}: only routed experts have it; give --lora-experts, or a "
                f"path: {experts[0]}"
            )
        names = sorted({name.rpartition(".")[2] for name in facts.linears})
        raise UserError(
            f"--lora-targets {target}: no block has it{nearest(target, names)}; the layers are "
            f"{', '.join(names)}"
        )
    kinds = enumerate(facts.last(count), facts.blocks - count)
    layers = [
        (index, name)
        for index, kind in kinds
        for name in names_of(facts.alone[kind], config.lora_targets, config.lora_experts)
    ]
    layers += [(OUTSIDE, name) for name in outside]
    for option in ("lora_rank", "lora_alpha"):
        ByLayer.of(getattr(config, option)).check(flag(option), layers)


def float_bytes_of(config: TrainConfig, target: Target) -> int:
    """Size of a number of the compute dtype on that machine."""
    return DTYPE_BYTES.get(config.dtype, 2 if target.has_gpu else 4)


def has_gpu() -> bool:
    """Return whether MLX would compute on a GPU here, as far as can be told without loading it."""
    if platform.system() == "Darwin":
        return platform.machine() == "arm64"
    installed = (each.metadata["Name"] for each in importlib.metadata.distributions())
    return os.path.exists("/dev/nvidia0") and any(name in CUDA for name in installed)
