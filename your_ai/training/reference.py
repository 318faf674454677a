"""The reference of a preference loss: log-probabilities under the model as the run starts.

They are computed once, before the first step, while the adapters still have their first values,
so no second model is needed. They are kept in the cache, for other runs on the same rows and for a
run that is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from your_ai.data.batches import RowsAt, by_length, in_order_of_length
from your_ai.data.examples import Examples, delete_unused, map_array, unwritable
from your_ai.engine.protocol import Engine
from your_ai.files import atomic_folder, sha256
from your_ai.gates.text import counted, now_and_then
from your_ai.hub.find import store
from your_ai.run import events
from your_ai.training.trainer import Trainer

FORMAT = 1
VALUES, ABOUT = "reference.bin", "about.json"
ABOUT_BYTES = 4096


def with_reference(
    examples: Examples,
    engine: Engine,
    rows_at: RowsAt,
    depends_on: dict[str, str],
    cache: Path,
    progress: Callable[[str], None],
) -> Examples:
    """The examples with their reference, from `cache` if it was computed before.

    engine: has a model whose adapters have their first values.
    depends_on: what decides the values beside the rows: model, first adapter, data type.
    Raises UserError if the cache cannot be written.
    """
    rows = examples.tokens_file.parent.name  # made of all that decides the tokens
    content = json.dumps([FORMAT, rows, sorted(depends_on.items())])
    folder = cache / "reference" / hashlib.sha256(content.encode()).hexdigest()[:32]
    values = opened(folder, len(examples.tokens))
    if values is None:
        delete_unused(folder.parent)
        found = computed(examples, engine, rows_at, progress)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with atomic_folder(folder) as temporary:
                found.tofile(temporary / VALUES)
                about = {"sha256": sha256(temporary / VALUES)}
                (temporary / ABOUT).write_text(json.dumps(about))
        except OSError as error:
            if opened(folder, len(examples.tokens)) is None:  # another run has not written it
                raise unwritable(folder.parent, "reference log-probabilities", error) from error
        values = found
    return examples.with_columns({"reference": values})


def opened(folder: Path, size: int) -> np.ndarray | None:
    """The kept values; None if they are missing or damaged."""
    try:
        about = json.loads((folder / ABOUT).read_bytes()[:ABOUT_BYTES])
        if about["sha256"] != sha256(folder / VALUES):
            return None
        values = map_array(folder / VALUES, np.float32, size)
        os.utime(folder)  # marks it as used, for `delete_unused`
    except (OSError, ValueError, TypeError, LookupError):
        return None
    return values


def computed(
    examples: Examples,
    engine: Engine,
    rows_at: RowsAt,
    progress: Callable[[str], None],
    edges: np.ndarray | None = None,
) -> np.ndarray:
    """(N,) float32, the log-probability of each trained token, and 0 for the others.

    edges: the lengths to pad to; by default those that suit the examples.
    """
    values = np.zeros(len(examples.tokens), np.float32)
    order, done = by_length(examples), 0
    total = counted(len(order), "text")
    report = now_and_then(progress, lambda done: f"computing the reference: {done:,} of {total}")
    for batch in in_order_of_length(examples, rows_at, edges=edges):
        rows = order[done : done + int((batch.lengths > 0).sum())]
        found = engine.log_probabilities(batch)
        mx.eval(found)
        at = np.concatenate([examples.starts[row] + places(examples, row) for row in rows])
        values[at] = np.array(found)[: len(at)]
        done += len(rows)
        report(done)
    if edges is None:  # else the same shapes come again
        engine.drop()
    return values


def places(examples: Examples, row: int) -> np.ndarray:
    """The indices of the trained tokens of a text."""
    return np.flatnonzero(examples[row].trained)


def referenced(trainer: Trainer, log: events.EventLog) -> Trainer:
    """The rows with the log-probabilities of their answers under the model as the run starts."""
    depends_on = {
        **trainer.depends_on["model"],
        **trainer.depends_on.get("first adapter", {}),
        "--quantize": str(trainer.config.quantize),
        "dtype": str(trainer.opened.dtype),
    }
    if trainer.config.adapter_dtype != "float32":  # rounds the first adapter
        depends_on["--adapter-dtype"] = trainer.config.adapter_dtype

    def with_values(examples: Examples) -> Examples:
        return with_reference(
            examples,
            trainer.engine,
            trainer.rows_at,
            depends_on,
            store() / "cache",
            lambda text: log.write(events.Stage(text=text)),
        )

    log.write(events.Stage(text="computing the reference"))
    schedule = replace(trainer.schedule, examples=with_values(trainer.schedule.examples))
    valid = None if trainer.valid is None else with_values(trainer.valid)
    return replace(trainer, schedule=schedule, valid=valid)
