"""The saved models of outside loops, by their paths: those of earlier servers, too.

That of tinker://SESSION:train:N/KIND/NAME is in the folder runs/SESSION-train-N/KIND/NAME.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from your_ai.errors import UserError
from your_ai.files import atomic_folder, is_plain_file
from your_ai.gates.text import shortened
from your_ai.training.outside_models import SHAPE, LoraShape, about_of, shape_in

SCHEME = "tinker://"
WEIGHTS, SAMPLERS, EXTERNAL = "weights", "sampler_weights", "external_weights"
KINDS = {WEIGHTS: "training", SAMPLERS: "sampler", EXTERNAL: "external"}
MLX = "mlx"  # the folder of the mlx-lm adapter in external weights, which are a PEFT adapter
PATH = re.compile(
    rf"{SCHEME}([A-Za-z0-9._-]+:train:[0-9]+)/({'|'.join(KINDS)})/([A-Za-z0-9][A-Za-z0-9._-]*)"
)
MODEL = re.compile(r"[A-Za-z0-9._-]{1,80}:train:[0-9]{1,9}")
RUN = re.compile(r"(.+)-train-([0-9]+)")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Saved:
    """A saved model."""

    model: str
    kind: str
    name: str
    folder: Path

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def facts(self) -> dict[str, object]:
        """It as an entry of lists."""
        size = sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file())
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": time_of(self.folder),
            "tinker_path": self.path,
            "size_bytes": size,
        }


@dataclass(frozen=True)
class SavedModels:
    """Those in the folder of all runs."""

    runs: Path

    def folder_of(self, model: str) -> Path:
        """The run of a model. Raises UserError if it is no id of one."""
        if not MODEL.fullmatch(model) or ".." in model:
            raise UserError(f"model {shortened(model)}: is no id of a model")
        return self.runs / model.replace(":", "-")

    def target(self, model: str, kind: str, name: str) -> Saved:
        """The place of a saved model that is to be. Raises UserError."""
        if not NAME.fullmatch(name):
            raise UserError(f"path {shortened(name)}: give letters, digits, `.`, `_` and `-`")
        return Saved(model, kind, name, self.folder_of(model) / kind / name)

    def find(self, path: str, kinds: Container[str] = (WEIGHTS, SAMPLERS)) -> Saved:
        """A saved model by its path; kinds: those that are expected.

        Raises UserError if it is not there, or damaged.
        """
        saved = self.place(path, kinds)
        about_of(saved.folder)
        return saved

    def place(self, path: str, kinds: Container[str]) -> Saved:
        """One by its path, if it is there or not. Raises UserError."""
        found = PATH.fullmatch(path)
        if found is None or found[2] not in kinds:
            kind = WEIGHTS if WEIGHTS in kinds else EXTERNAL
            raise UserError(f"path {shortened(path)}: give {SCHEME}MODEL/{kind}/NAME")
        return self.target(*found.groups())

    def by_id(self, model: str, checkpoint: str) -> Saved:
        """One of any kind by its id, KIND/NAME. Raises UserError."""
        return self.find(f"{SCHEME}{model}/{checkpoint}", KINDS)

    def of_model(self, model: str) -> list[Saved]:
        """Those of a model, the oldest first."""
        run = self.folder_of(model)
        found = [
            Saved(model, kind, folder.name, folder)
            for kind in KINDS
            for folder in (run / kind).glob("*")
            if NAME.fullmatch(folder.name) and folder.is_dir()
        ]
        return sorted(found, key=lambda saved: (saved.folder.stat().st_mtime, saved.path))

    def models(self) -> Iterator[str]:
        """The ids of all models that were ever here, the newest first."""
        folders = [path for path in self.runs.glob("*-train-*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: -path.stat().st_mtime):
            name = RUN.sub(r"\1:train:\2", folder.name)
            if MODEL.fullmatch(name) and ".." not in name:
                yield name

    def files(self, model: str, checkpoint: str) -> dict[str, Path]:
        """Those of external weights, by their paths in the folder. Raises UserError."""
        folder = self.find(f"{SCHEME}{model}/{checkpoint}", (EXTERNAL,)).folder
        found = sorted(path for path in folder.rglob("*") if is_plain_file(path))
        named = {path.relative_to(folder).as_posix(): path for path in found}
        return {name: path for name, path in named.items() if name != SHAPE}

    def delete(self, model: str, checkpoint: str) -> object:
        """Delete one by its id, which may be damaged. Raises UserError."""
        folder = self.place(f"{SCHEME}{model}/{checkpoint}", KINDS).folder
        if folder.is_symlink() or not folder.is_dir():
            raise UserError(f"{folder}: is no saved model")
        shutil.rmtree(folder)
        return {}

    def keep(self, model: str, checkpoint: str) -> object:
        """Accept a time after which one may be deleted; none is. Raises UserError."""
        self.by_id(model, checkpoint)
        return {}

    def copy(self, path: str, model: str) -> Saved:
        """Copy a saved model to another, which cannot be trained. Raises UserError."""
        source = self.find(path, KINDS)
        target = self.target(model, source.kind, source.name)
        target.folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(target.folder) as folder:
            shutil.copytree(source.folder, folder, dirs_exist_ok=True)
        return target

    def run_facts(self, model: str, base: str) -> dict[str, object]:
        """A model as an entry of lists. Raises UserError if it is not here."""
        folder = self.folder_of(model)
        if not folder.is_dir():
            raise UserError(f"model {shortened(model)}: is not here")
        every = self.of_model(model)
        last = {saved.kind: saved for saved in every}
        found: dict[str, object] = {
            "training_run_id": model,
            "base_model": base,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": rank_in(every[-1].folder) if every else None,
            "last_request_time": time_of(folder),
        }
        for kind, key in ((WEIGHTS, "last_checkpoint"), (SAMPLERS, "last_sampler_checkpoint")):
            if kind in last:
                found[key] = last[kind].facts
        return found

    def shape(self, path: str) -> LoraShape:
        return shape_in(self.find(path, KINDS).folder)


def rank_in(folder: Path) -> int | None:
    """The rank of a saved model; None if it is damaged."""
    try:
        return shape_in(folder).rank
    except UserError:
        return None


def time_of(folder: Path) -> str:
    return datetime.fromtimestamp(folder.stat().st_mtime, UTC).isoformat()
