"""Checkpoints: written atomically, verified when read; only the newest few and the best are kept.

checkpoints/step-000120/
    adapters.safetensors, adapter_config.json   readable by mlx-lm
    score_head.safetensors                      of a reward model
    new_tokens.safetensors                      trained rows of new tokens
    vocabulary.safetensors                      embeddings and heads that are trained as a whole
    vocabulary_lora.safetensors                 LoRA on the embedding and the head
    optimizer.safetensors
    weights-00012.safetensors, states-00012.safetensors   of block 12, if whole weights are trained
    state.json                                  TrainState and the files that the run depends on
    checksums.json                              sha256 of each of the above; written last

A checkpoint is written under a temporary name, synced, and renamed into place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from your_ai.errors import RESUME, RunError, UserError, is_memory_error
from your_ai.files import atomic_folder, read_text, remedy_of, sha256
from your_ai.nets.mlx_types import load_arrays

ADAPTERS = "adapters.safetensors"
PEFT_ADAPTERS = "adapter_model.safetensors"  # the same in the format of PEFT
SCORE_HEAD = "score_head.safetensors"  # in a file of its own, so that mlx-lm loads the adapter
SCORE_WEIGHT = "score.weight"  # its only array, (1, D)
# Other arrays of an adapter, by their names or parts of these, in files that mlx-lm does not read.
BESIDE = {
    SCORE_WEIGHT: SCORE_HEAD,
    "new_rows": "new_tokens.safetensors",
    "all_rows": "vocabulary.safetensors",
    "low_rank": "vocabulary_lora.safetensors",
}
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
CHECKSUMS = "checksums.json"
CONTENT = (ADAPTERS, OPTIMIZER, ADAPTER_CONFIG, STATE)
JSON_BYTES = 1 << 24  # maximum size of a JSON file; a larger one is not from this program
BLOCK_FILE = re.compile(r"(?:weights|states)-\w+\.safetensors")  # of whole weights
STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class TrainState:
    """The state of the training loop between steps, except for the arrays."""

    step: int = 0
    """Finished steps. Also the position in the data, because batches are a function of it."""
    skipped: int = 0
    """Number of skipped steps, because they were not finite."""
    skipped_in_a_row: int = 0
    loss_scale: float = 1.0
    """For dynamic loss scaling in float16."""
    good_steps: int = 0
    """For dynamic loss scaling in float16."""
    best_loss: float | None = None
    """The validation loss at `best_step`; None before the first that is finite."""
    best_value: float | None = None
    """The value of --best-metric at `best_step`; None if that is the loss."""
    best_step: int | None = None
    """The step of the best validation so far."""
    without_better: int = 0
    """Number of validations since `best_step`, none of which was better."""
    validation_due: bool = False
    """Whether the validation after this step is still to be done, because it was interrupted."""


ArraysOrWriter = Mapping[str, mx.array] | Callable[[Path], None]
"""Arrays by name, or a function that writes them as a safetensors file, or raises OSError."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in memory."""

    state: TrainState
    adapters: dict[str, mx.array]
    """Arrays by name."""
    optimizer: ArraysOrWriter
    """Arrays by name; they are lazy in a checkpoint that was read."""
    adapter_config: dict[str, Any]
    depends_on: dict[str, dict[str, str]]
    """Names and sha256 of the model's and data's files, which must not change until a resume."""
    files: Mapping[str, Callable[[Path], None]] = dataclasses.field(default_factory=dict)
    """Functions that write other files of it, by name, or raise OSError; empty in a checkpoint that
    was read."""


def save(folder: Path, checkpoint: SavedCheckpoint) -> Path:
    """Write a checkpoint below `folder` and return its path.

    If it cannot be written, raises RunError and leaves no new files behind.
    """
    target = path_at(folder, checkpoint.state.step)
    with contextlib.suppress(OSError):  # writing into it below gives a better error
        folder.mkdir(exist_ok=True)
    state = {"state": dataclasses.asdict(checkpoint.state), "depends_on": checkpoint.depends_on}
    write_folder(
        target,
        arrays={
            **files_of(checkpoint.adapters),
            OPTIMIZER: checkpoint.optimizer,
            **checkpoint.files,
        },
        texts={ADAPTER_CONFIG: checkpoint.adapter_config, STATE: state},
    )
    return target


def save_adapter(
    target: Path, adapters: Mapping[str, mx.array], config: dict[str, Any], step: int
) -> None:
    """Write an adapter folder for mlx-lm; an existing folder is replaced atomically."""
    texts = {ADAPTER_CONFIG: {**config, "step": step}}
    write_folder(target, arrays=files_of(adapters), texts=texts)


def files_of(adapters: Mapping[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """The arrays of each file of an adapter."""
    found: dict[str, dict[str, mx.array]] = {ADAPTERS: {}}
    for name, array in adapters.items():
        parts = name.split(".")
        ends = (file for end, file in BESIDE.items() if name == end or end in parts)
        found.setdefault(next(ends, ADAPTERS), {})[name] = array
    return found


def files_beside(folder: Path) -> list[str]:
    """The names of the files of an adapter that are there, besides that of its layers."""
    return [name for name in BESIDE.values() if (folder / name).is_file()]


def adapter_step(folder: Path) -> int | None:
    """The step at which an adapter was saved; None if the folder has no intact adapter."""
    try:
        if fault(folder, (ADAPTERS, ADAPTER_CONFIG)) is not None:
            return None
        return int(json.loads(read_text(folder / ADAPTER_CONFIG, JSON_BYTES))["step"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def write_folder(
    target: Path, arrays: Mapping[str, ArraysOrWriter], texts: Mapping[str, Any]
) -> None:
    try:
        with atomic_folder(target) as folder:
            for name, content in arrays.items():
                if callable(content):
                    content(folder / name)
                else:
                    save_arrays(folder / name, content)
            for name, value in texts.items():
                write_json(folder / name, value)
            write_json(folder / CHECKSUMS, {n: sha256(folder / n) for n in (*arrays, *texts)})
    except OSError as error:
        reason = error.strerror or error
        raise RunError(
            f"{target}: cannot be written ({reason}); {remedy_of(error)}, {RESUME}"
        ) from error


def save_arrays(path: Path, arrays: Mapping[str, mx.array], library: str = "mlx") -> None:
    """Write arrays as a safetensors file.

    library: whose layout the arrays have, mlx or pt. Raises OSError if the file cannot be
    written, which MLX raises as a RuntimeError.
    """
    try:
        mx.save_safetensors(str(path), dict(arrays), {"format": library})
    except RuntimeError as error:
        if is_memory_error(error):  # arrays that are not computed yet are computed here
            raise
        raise OSError(errno.ENOSPC, " ".join(str(error).split())) from error


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders below `folder`, newest first, intact or not."""
    found = [p for p in folder.glob("step-*") if STEP_NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def path_at(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def fault(path: Path, names: tuple[str, ...] = CONTENT) -> str | None:
    """Describe what is wrong with a folder written here, naming the file; None if intact."""
    try:
        sums = json.loads(read_text(path / CHECKSUMS, JSON_BYTES))
        expected = {name: sums[name] for name in names}
        if ADAPTERS in names:
            more = {*BESIDE.values()}
            expected |= {n: s for n, s in sums.items() if n in more or BLOCK_FILE.fullmatch(n)}
    except FileNotFoundError:
        return f"{path / CHECKSUMS}: is missing"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return f"{path / CHECKSUMS}: cannot be read"
    for name, checksum in expected.items():
        try:
            if sha256(path / name) != checksum:
                return f"{path / name}: its checksum is wrong"
        except FileNotFoundError:
            return f"{path / name}: is missing"
        except OSError as error:
            return f"{path / name}: cannot be read ({error.strerror})"
    return None


def newest(folder: Path) -> tuple[Path | None, list[str]]:
    """Return the newest intact checkpoint, and the faults of newer ones that were skipped.

    Raises UserError if there are checkpoints but none is intact.
    """
    faults: list[str] = []
    for path in list_checkpoints(folder):
        problem = fault(path)
        if problem is None:
            return path, faults
        faults.append(problem)
    if faults:
        raise UserError(f"{folder}: no checkpoint is intact ({'; '.join(faults)}); start a new run")
    return None, faults


def load(path: Path) -> SavedCheckpoint:
    """Read a checkpoint that `newest` returned, but for its arrays, which are read when they are
    used."""
    try:
        state = json.loads(read_text(path / STATE, JSON_BYTES))
        checkpoint = SavedCheckpoint(
            state=TrainState(**state["state"]),
            adapters=load_adapters(path),
            optimizer=load_arrays(path / OPTIMIZER),
            adapter_config=json.loads(read_text(path / ADAPTER_CONFIG, JSON_BYTES)),
            depends_on=state["depends_on"],
        )
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: was written by another version of your_ai ({error})") from error
    return checkpoint


def load_adapters(path: Path) -> dict[str, mx.array]:
    """The lazy arrays of an adapter by name, with those of the files beside it."""
    found = load_arrays(path / ADAPTERS)
    for name in files_beside(path):
        found |= load_arrays(path / name)
    return found


def load_state(path: Path) -> TrainState | None:
    """The state in a checkpoint; None if it cannot be read."""
    try:
        return TrainState(**json.loads(read_text(path / STATE, JSON_BYTES))["state"])
    except (OSError, TypeError, LookupError, ValueError, RecursionError):
        return None


def best_step(folder: Path) -> int | None:
    """The step with the best validation, as the newest readable checkpoint records it.

    None if there was no validation yet.
    """
    states = filter(None, map(load_state, list_checkpoints(folder)))
    return next((state.best_step for state in states), None)


def prune(folder: Path, step: int, keep: int, best: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`; ignore deletion errors.

    best: the step of a checkpoint that is kept in any case.

    Checkpoints after `step` are damaged: they were skipped when the run resumed from `step`.
    """
    there = list_checkpoints(folder)
    ours = [path for path in there if step_of(path) <= step]
    kept = {*ours[:keep], *(path for path in ours if step_of(path) == best)}
    for path in set(there) - kept:
        shutil.rmtree(path, ignore_errors=True)
