"""Checkpoints: whole or not there, checked when read, the newest few kept.

checkpoints/step-000120/
    adapters.safetensors, adapter_config.json   what mlx-lm loads
    optimizer.safetensors
    state.json                                  TrainState and what the run depends on
    checksums.json                              sha256 of each of the above; written last

A checkpoint is written under a temporary name, synced, and renamed into place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from your_ai.errors import RunError, UserError, lacked_memory
from your_ai.files import read_text, sha256, whole_folder

ADAPTERS = "adapters.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
CHECKSUMS = "checksums.json"
CONTENT = (ADAPTERS, OPTIMIZER, ADAPTER_CONFIG, STATE)
JSON_BYTES = 1 << 24  # of a file beside the arrays; one that is larger is not ours
STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class TrainState:
    """All that a training loop carries from step to step beside the arrays.

    step: steps done, which is also the cursor in the data, since batches are a pure
    function of it; skipped: non-finite steps in all, and in a row; loss_scale and
    good_steps: of float16's dynamic loss scaling.
    """

    step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    loss_scale: float = 1.0
    good_steps: int = 0


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint in memory.

    adapters, optimizer: arrays by name; depends_on: names and sha256 of the files of the
    model and the data, which must be the same when the run is resumed.
    """

    state: TrainState
    adapters: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    adapter_config: dict[str, Any]
    depends_on: dict[str, dict[str, str]]


def save(folder: Path, checkpoint: SavedCheckpoint) -> Path:
    """Write a checkpoint below `folder` and return its place.

    Raises RunError, and leaves nothing new behind, where it cannot be written.
    """
    target = folder / f"step-{checkpoint.state.step:06d}"
    with contextlib.suppress(OSError):  # the error of writing into it says more
        folder.mkdir(exist_ok=True)
    state = {"state": dataclasses.asdict(checkpoint.state), "depends_on": checkpoint.depends_on}
    _write_folder(
        target,
        arrays={ADAPTERS: checkpoint.adapters, OPTIMIZER: checkpoint.optimizer},
        texts={ADAPTER_CONFIG: checkpoint.adapter_config, STATE: state},
    )
    return target


def save_adapter(
    target: Path, adapters: Mapping[str, mx.array], config: dict[str, Any], step: int
) -> None:
    """Write an adapter folder as mlx-lm reads it; one that is there is replaced as a whole."""
    texts = {ADAPTER_CONFIG: {**config, "step": step}}
    _write_folder(target, arrays={ADAPTERS: adapters}, texts=texts)


def adapter_step(folder: Path) -> int | None:
    """The step that an adapter folder is of; None where there is no whole adapter."""
    try:
        if fault(folder, (ADAPTERS, ADAPTER_CONFIG)) is not None:
            return None
        return int(json.loads(read_text(folder / ADAPTER_CONFIG, JSON_BYTES))["step"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None


def _write_folder(
    target: Path, arrays: Mapping[str, Mapping[str, mx.array]], texts: Mapping[str, Any]
) -> None:
    try:
        with whole_folder(target) as folder:
            for name, content in arrays.items():
                mx.save_safetensors(str(folder / name), dict(content), {"format": "mlx"})
            for name, value in texts.items():
                write_json(folder / name, value)
            write_json(folder / CHECKSUMS, {n: sha256(folder / n) for n in (*arrays, *texts)})
    except (OSError, RuntimeError) as error:  # mlx raises RuntimeError on a full disk
        if lacked_memory(error):  # the device's errors arrive late
            raise
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"{target}: cannot be written ({reason}); make room, then resume the run"
        ) from error


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders below `folder`, newest first, whether or not they are whole."""
    found = [p for p in folder.glob("step-*") if STEP_NAME.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def fault(path: Path, names: tuple[str, ...] = CONTENT) -> str | None:
    """What is wrong with a folder written here, naming the file, or None if it is whole."""
    try:
        sums = json.loads(read_text(path / CHECKSUMS, JSON_BYTES))
        expected = {name: sums[name] for name in names}
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
    """The newest checkpoint that is whole, and the faults of those passed over.

    Raises UserError where there are checkpoints and none is whole.
    """
    faults: list[str] = []
    for path in list_checkpoints(folder):
        problem = fault(path)
        if problem is None:
            return path, faults
        faults.append(problem)
    if faults:
        raise UserError(f"{folder}: no checkpoint is whole ({'; '.join(faults)}); begin a new run")
    return None, faults


def load(path: Path) -> SavedCheckpoint:
    """Read a checkpoint that `newest` found whole."""
    try:
        state = json.loads(read_text(path / STATE, JSON_BYTES))
        checkpoint = SavedCheckpoint(
            state=TrainState(**state["state"]),
            adapters=mx.load(str(path / ADAPTERS)),
            optimizer=mx.load(str(path / OPTIMIZER)),
            adapter_config=json.loads(read_text(path / ADAPTER_CONFIG, JSON_BYTES)),
            depends_on=state["depends_on"],
        )
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: was written by another version of your_ai ({error})") from error
    mx.eval(checkpoint.adapters, checkpoint.optimizer)  # now, not when the folder is gone
    return checkpoint


def prune(folder: Path, step: int, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `step`; one that cannot be stays.

    Those after `step` were damaged, and passed over when the run resumed before them.
    """
    ours = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    for path in set(list_checkpoints(folder)) - set(ours[:keep]):
        shutil.rmtree(path, ignore_errors=True)
