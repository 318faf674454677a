"""Create runs whose adapter was imported or merged, and not trained here.

Like a trained run, such a run has a config.yaml and an adapter. It also has `imported.json` or
`merged.json`, which says where the adapter came from. It cannot be resumed, because it has no
data and no optimizer state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai import __version__
from your_ai.config import TrainConfig
from your_ai.config.adapter_facts import DORA
from your_ai.errors import RunError, UserError, first_line
from your_ai.export import adapter_files
from your_ai.export.names import name_in_block
from your_ai.files import sha256, sync
from your_ai.gates.paths import missing_text
from your_ai.modelfiles.targets import write_error
from your_ai.nets.layer_sizes import evened
from your_ai.nets.new_tokens import files_of_tokenizer
from your_ai.nets.saved_adapter import TOKENIZER, Adapter
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.nets.vocabulary import NEW_TOKENS, TRAINED_MODULES
from your_ai.run import checkpoint, events, folder
from your_ai.run.folder import RunFolder, Untrained


@dataclass(frozen=True)
class Origin:
    """The origin of a run's adapter."""

    kind: Untrained
    record: dict[str, Any]
    """What the run's imported.json or merged.json says."""
    text: str
    """The same in a few words, for the run's events."""


def check_new(name: str, option: str) -> None:
    """Raise UserError if there cannot be a new run of this name; option: what gave the name."""
    target = folder.place_of(name, option)
    if os.path.lexists(target.path):
        raise UserError(f"{option} {name}: {target.path} exists; choose another name")


def create(
    name: str, config: TrainConfig, adapter: Adapter, origin: Origin, tokenizer: Any = None
) -> RunFolder:
    """Create the run's folder, completely or not at all.

    tokenizer: with the tokens that the adapter adds to its base.

    Raises UserError if the name is taken or the folder cannot be written.
    """
    target = folder.place_of(name)
    with creating_with_arrays(name, config) as new:
        arrays, record = evened(adapter.arrays, adapter.config)
        if tokenizer is not None:
            tokenizer.save_pretrained(str(new.tokenizer))
            record = {**record, TOKENIZER: files_of_tokenizer(new.tokenizer)}
        checkpoint.save_adapter(new.adapter, arrays | adapter.vocabulary, record, step=0)
        path = new.origin(origin.kind)
        checkpoint.write_json(path, origin.record)
        sync(path)
        end = events.Finished(step=0, reason="done", adapter=str(target.adapter), seconds=0.0)
        with contextlib.closing(events.EventLog(new.events)) as log:  # so that watching it ends
            log.write(events.Notice(text=f"{origin.text}; nothing was trained here"))
            log.write(end)
    return target


@contextlib.contextmanager
def creating_with_arrays(name: str, config: TrainConfig) -> Iterator[RunFolder]:
    """Create a run's folder as `folder.creating` does, for a block that also saves an adapter."""
    try:
        with folder.creating(name, config) as new:
            yield new
    except RunError as error:  # its text explains how to resume, which is impossible here
        cause = error.__cause__ or error
        number = getattr(cause, "errno", errno.ENOSPC)  # MLX gives no errno if the disk is full
        reason = OSError(number, getattr(cause, "strerror", None) or first_line(cause))
        raise write_error(folder.place_of(name).path, reason) from error


def settings_of(adapter: Adapter, name: str, path: Path) -> TrainConfig:
    """The settings with which training would have created this adapter.

    path: of the file with the adapter's settings. Raises UserError, naming it, if training
    refuses such a setting.
    """
    parameters, count = adapter.config["lora_parameters"], int(adapter.config["num_layers"])
    keys = parameters.get("keys") or {name_in_block(layer) for layer in adapter.layers}
    try:
        return TrainConfig(
            model=adapter.config["model"],
            run=name,
            lora_rank=adapter.ranks.setting,
            lora_alpha=adapter.alphas.setting,
            lora_layers=count if count > 0 else "all",
            lora_targets=tuple(sorted({*keys, *adapter.low_rank})),
            lora_dropout=float(parameters.get("dropout", 0.0)),
            use_dora=adapter.kind is DORA,
            qat=adapter.rounding,
            train=",".join(adapter.config.get(TRAINED_MODULES, [])),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


# Import adapters of PEFT and mlx-lm as runs


def import_adapter(
    source: Path,
    base: str | None = None,
    name: str | None = None,
    on_note: Callable[[str], object] = lambda text: None,
) -> RunFolder:
    """Create a run from the adapter in `source`, at step 0.

    base: the base model, if the adapter does not name it or it is in another place.
    name: of the run. on_note: called with what the user should know.
    Raises UserError, before anything is written, if the adapter is damaged, does not fit the
    model, or needs something that mlx-lm adapters cannot do.
    """
    if not source.exists():
        raise UserError(f"{source}: {missing_text(source, 'folder')}")
    files = adapter_files.find_adapter(str(source), str(source))
    adapter = adapter_files.read(files)
    found = adapter_files.find_base_model(source, base, files.base)
    network = adapter_files.load_base(files, found)
    adapter = adapter_files.fitted(files, adapter, found, network, on_note)
    adapter_files.check_fit(files.file, network, adapter)
    adapter = dataclasses.replace(adapter, config={**adapter.config, "model": base or files.base})
    config = settings_of(adapter, name or "", files.config)
    name = name or folder.default_name(dataclasses.replace(config, data=str(source.absolute())))
    check_new(name, "--run")
    record = {
        "from": source.absolute().name,
        "files": {path.name: sha256(path) for path in (files.file, files.config)},
        "your_ai": __version__,
    }
    origin = Origin("imported", record, f"imported from {record['from']}")
    tokenizer = None
    if NEW_TOKENS in adapter.config:
        if any(files.folder.glob("tokenizer*")):
            tokenizer = open_tokenizer(found, files.folder)
        elif max(adapter.config[NEW_TOKENS]) >= len(open_tokenizer(found).get_vocab()):
            raise UserError(
                f"{files.folder}: has tokens that its base lacks, but no tokenizer; add its files"
            )
    return create(name, config, adapter, origin, tokenizer)
