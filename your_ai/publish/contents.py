"""The files that a push sends. They say nothing of the user's data, folders or machine.

A run sends its adapter in mlx-lm's format, its settings and card. A folder written by
`your_ai fuse` or `your_ai export` sends the files of its format and a card. Files that are not
named here are never sent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from your_ai.config import DEMO_DATA, FOLDER, NONE, TrainConfig, to_yaml
from your_ai.errors import UserError
from your_ai.evaluation import record
from your_ai.export.started import on_the_base
from your_ai.gates.untrusted import JSON_BYTES, links_outside, read_bytes, read_json
from your_ai.hub.find import REPO
from your_ai.modelfiles.targets import write_error
from your_ai.nets.layer_sizes import evened
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.saved_adapter import (
    Trained,
    check_is_adapter,
    check_no_vocabulary,
    has_score_head,
)
from your_ai.nets.tokenizer import added_end_text
from your_ai.publish.card import (
    CARD,
    Base,
    CardKind,
    Subject,
    base_of,
    card,
    end_note,
    figures_of,
    method_of,
    named_run,
    objective_of,
    origin_notes,
    split,
    up_to,
)
from your_ai.run import events
from your_ai.run.checkpoint import (
    ADAPTER_CONFIG,
    ADAPTERS,
    CHECKSUMS,
    PEFT_ADAPTERS,
    SCORE_HEAD,
    STATE,
    STEP_NAME,
    save_arrays,
)
from your_ai.run.checkpoint import step_of as checkpoint_step
from your_ai.run.folder import RUNS, RunFolder

LIBRARIES = ("mlx", "peft", "transformers")
CONFIGS = ("config.json", ADAPTER_CONFIG)
# The settings of an adapter that mlx-lm and your_ai read. mlx-lm's trainer writes all of its
# settings there, with the paths of the data.
ADAPTER_KEYS = (
    *("fine_tune_type", "model", "num_layers", "lora_parameters", "step", "base_files"),
    "score_head",
)
# The files that show the kind of a folder, and the other files that are sent.
MARKS: dict[CardKind, str] = {
    "peft": PEFT_ADAPTERS,
    "adapter": ADAPTERS,
    "model": "model*.safetensors",
    "gguf": "*.gguf",
}
BESIDE = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", ADAPTER_CONFIG),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "*.tiktoken", "chat_template*"),
)


@dataclass(frozen=True)
class Contents:
    """The files to send, with a commit message and notes."""

    files: dict[str, bytes | Path]
    """The content, or the file that has it, by its name in the repository."""
    what: str
    """A few words for the commit message."""
    notes: tuple[str, ...] = ()
    """What the user should know."""


def of_run(trained: Trained, repo: str) -> Contents:
    """The contents to send for a run. Raises UserError if its events or files cannot be read."""
    check_is_adapter(trained.adapter)
    trained = on_the_base(trained)
    adapter, step = trained.adapter, trained.adapter.step or 0
    check_no_vocabulary(adapter, "a published adapter")
    base = base_of(trained)
    records, _ = events.tail(trained.folder.events)
    records = up_to(records, step)
    figures = figures_of(records)
    config = None if trained.folder.untrained else trained.config
    found, note = measured(trained.folder, step)
    ends = end_note(added_end_text(trained.base))
    subject = Subject(
        repo=repo,
        kind="adapter",
        base=base,
        method=method_of(trained),
        objective=objective_of(trained),
        step=step,
        config=config,
        figures=figures,
        evaluation=found,
        notes=[*origin_notes(trained), *([ends] if ends else [])],
    )
    check_own(adapter.folder / ADAPTERS, adapter.folder)
    arrays, own = evened(adapter.arrays, adapter.config)
    known = {key: own[key] for key in ADAPTER_KEYS if key in own}
    named = without_paths({**known, "model": base.repo or base.name})
    files: dict[str, bytes | Path] = {
        CARD: card(subject).encode("utf-8", "replace"),
        ADAPTER_CONFIG: as_json(named),
        ADAPTERS: adapter.folder / ADAPTERS if arrays is adapter.arrays else file_of(arrays),
        **({SCORE_HEAD: adapter.folder / SCORE_HEAD} if has_score_head(adapter) else {}),
    }
    if config is not None:
        files["config.yaml"] = settings_of(config, base).encode("utf-8", "replace")
    what = f"adapter of step {step}" if config is not None else "adapter"
    return Contents(files, what, (note,) if note else ())


def file_of(arrays: Arrays) -> bytes:
    """The content of the file of an adapter."""
    with tempfile.TemporaryDirectory() as folder:
        save_arrays(Path(folder) / ADAPTERS, arrays)
        return (Path(folder) / ADAPTERS).read_bytes()


def settings_of(config: TrainConfig, base: Base) -> str:
    """The settings as `--config` reads them, without those of this machine or its user."""
    data = config.data if config.data in DEMO_DATA else ""
    valid = config.valid if config.valid in (NONE, FOLDER) else ""
    free = dataclasses.replace(
        config,
        valid=valid,
        prefix_cache_folder="",
        model=base.repo or base.name,
        data=data,
        run="",
        from_adapter="",
        reward=tuple(map(named_run, config.reward)),
        reward_model=named_run(config.reward_model),
        judge_rubric="",
        report_to=(),
        push_to="",
    )
    return to_yaml(free)


def measured(folder: RunFolder, step: int) -> tuple[dict[str, Any] | None, str]:
    """Results of `your_ai eval` for this step or None, and a note if they cannot be used."""
    found = record.read_evaluation(folder)
    if found is None:
        return None, ""
    sides, rows = found.get("measures"), found.get("rows")
    sound = isinstance(sides, dict) and all(isinstance(side, dict) for side in sides.values())
    path = record.evaluation_file(folder)
    if not (sound and isinstance(rows, int)):
        return None, f"{path}: is damaged and not in the card; measure again: your_ai eval"
    name = str(found.get("checkpoint"))  # only the name of a checkpoint has its step
    of = checkpoint_step(Path(name)) if STEP_NAME.fullmatch(name) else found.get("step")
    if of != step:
        why = f"is for step {of}, not for step {step}"
        return None, f"{path}: {why}, so it is not in the card; measure again: your_ai eval"
    return found, ""


# Folders


def is_folder(name: str) -> bool:
    """Return whether `name` is a folder with a model or an adapter, but not a run."""
    path = Path(name)
    is_run = any((place / "config.yaml").is_file() for place in (RUNS / name, path))
    return path.is_dir() and not is_run and kind_of(path) is not None


def kind_of(folder: Path) -> CardKind | None:
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:  # no permission to read it
        return None
    kinds = (kind for kind, mark in MARKS.items() if any(fnmatch(n, mark) for n in names))
    return next(kinds, None)


def of_folder(folder: Path, repo: str) -> Contents:
    """The contents to send for a folder with a model or an adapter.

    Raises UserError for a checkpoint, and for files that cannot be read.
    """
    kind = sent_kind(folder)
    there = sorted(path for path in folder.iterdir() if path.is_file())
    sent = [path for path in there if any(fnmatch(path.name, p) for p in (MARKS[kind], *BESIDE))]
    for path in sent:
        check_own(path, folder)
    files: dict[str, bytes | Path] = {path.name: path for path in sent}
    known = front_of(folder / CARD)
    library = known.get("library_name")
    configs = {name: read_json(folder / name, "it is sent") for name in CONFIGS if name in files}
    for name, config in configs.items():
        if (public := public_config(name, config)) != config:
            files[name] = as_json(public)
    bases = map(base_in, [*reversed(configs.values()), known])
    subject = Subject(
        repo=repo,
        kind=kind,
        base=next(filter(None, bases), None),
        library=library if library in LIBRARIES else None,
        files=[path.name for path in sent if fnmatch(path.name, MARKS[kind])],
    )
    files[CARD] = card(subject).encode("utf-8", "replace")
    ours = (*files, CHECKSUMS)
    left = [path.name for path in there if path.name not in ours and path.name[0] != "."]
    note = f"not sent, because it does not belong to a {what_of(kind)}: {', '.join(left)}"
    return Contents(files, what_of(kind), (note,) if left else ())


def sent_kind(folder: Path) -> CardKind:
    """The kind of a folder that can be sent. Raises UserError for others, and for checkpoints."""
    kind = kind_of(folder)
    if kind is None:
        raise UserError(f"{folder}: has no model and no adapter")
    if (folder / STATE).exists():
        raise UserError(f"{folder}: is a checkpoint; push its run, with --checkpoint {folder.name}")
    return kind


def public_config(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """A configuration without this machine's paths; of mlx-lm's adapters only what it reads."""
    cleaned: dict[str, Any] = without_paths(config)
    if name == ADAPTER_CONFIG and "lora_parameters" in config:
        return {key: cleaned[key] for key in ADAPTER_KEYS if key in cleaned}
    return cleaned


def what_of(kind: CardKind) -> str:
    return {"gguf": "GGUF file", "peft": "PEFT adapter"}.get(kind, kind)


def front_of(path: Path) -> dict[str, Any]:
    """The metadata of a folder's card; empty if there is none that can be read."""
    try:
        return split(read_bytes(path, JSON_BYTES).decode("utf-8"))[0] or {}
    except (OSError, ValueError, UserError):
        return {}


def base_in(config: dict[str, Any]) -> Base | None:
    names = (config.get(key) for key in ("base_model_name_or_path", "base_model", "model"))
    found = next((name for name in names if isinstance(name, str) and name), None)
    if found is None:
        return None
    return Base(Path(found).name, found if REPO.fullmatch(found) else None)


# Files


def check_own(path: Path, folder: Path) -> None:
    """Raise UserError for a link to a file outside of the folder, which may be private."""
    if links_outside(path, folder):
        raise UserError(
            f"{path}: is a link to {path.resolve()}, which is not sent; replace it with the file"
        )


def without_paths(value: Any) -> Any:
    """A JSON value in which each path of this machine is replaced by its last part."""
    if isinstance(value, dict):
        return {name: without_paths(part) for name, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    if isinstance(value, str) and value.startswith(("/", "~", "./", "../")):
        return Path(value).name
    return value


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def write(contents: Contents) -> Path:
    """Write what would be sent to a new folder, with links to large files.

    Raises UserError, and leaves nothing, if it cannot be written.
    """
    folder = Path(tempfile.gettempdir())
    try:
        folder = Path(tempfile.mkdtemp(prefix="your_ai-push-"))
        for name, content in contents.files.items():
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                os.symlink(content.absolute(), folder / name)
    except OSError as error:
        if folder.name.startswith("your_ai-push-"):
            shutil.rmtree(folder, ignore_errors=True)
        raise write_error(folder, error) from error
    return folder
