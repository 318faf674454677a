"""Import adapters of PEFT and mlx-lm as runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from your_ai import __version__
from your_ai.errors import UserError
from your_ai.export import adapter_files
from your_ai.export.untrained_run import Origin, check_new, create, settings_of
from your_ai.files import sha256
from your_ai.gates.paths import missing_text
from your_ai.run import folder
from your_ai.run.folder import RunFolder


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
    return create(name, config, adapter, origin)
