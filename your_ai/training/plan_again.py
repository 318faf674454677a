"""The plan of a run like one that was planned before, without loading its model again.

What planning learns of the model and of the process that loads it is kept in the store, beside the
measured costs. Limits of memory may be others: plans are chosen anew.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

from your_ai.config import TrainConfig, defaults
from your_ai.files import read_text, replace_text
from your_ai.hub.find import file_keys, store
from your_ai.hub.row_caches import RowCache
from your_ai.memory.budget import Measuring, budget_of, machine_key, run_limit, sources_digest
from your_ai.memory.costs import MOST_BYTES, MeasuredCosts, built, key_digest
from your_ai.memory.facts import facts_of
from your_ai.memory.plan import Budget
from your_ai.memory.workload import DataSizes, ProcessFacts, Workload, workload_of
from your_ai.nets.numerics import compute_dtype


@dataclass(frozen=True)
class Learned:
    """Facts that planning a run without data learned."""

    lengths: tuple[int, ...]
    answer_tokens: int
    """As in `DataSizes`, both."""
    process: ProcessFacts
    """Of the process with MLX, mlx-lm and the tokenizer."""
    can_stream: bool
    """Whether the weights can be read from their files."""
    row_caches: tuple[RowCache, ...] | None
    """As in `ModelFacts`, if the run generates answers."""


def learned_of(workload: Workload, process: ProcessFacts, can_stream: bool) -> Learned:
    """The facts that planning a run without data learned."""
    tokens = workload.answer_tokens
    caches = workload.facts.row_caches if tokens else None
    return Learned(workload.lengths, tokens, process, can_stream, caches)


def learned_file(config: TrainConfig, folder: Path, seq_len: int | None) -> Path:
    """The file of what was learned: named after everything that it depends on, but for what a run
    is called and the limit of its memory."""
    settings = repr(replace(config, run="", max_memory=None, force=False))
    code = sources_digest(), version("transformers"), *machine_key()
    key = key_digest([*code, *file_keys(folder).values(), settings, str(seq_len)])
    return store() / "plans" / f"{key[:32]}.json"


def keep_learned(path: Path, learned: Learned) -> None:
    """Replace the file. If that fails, the next plan loads the model again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(asdict(learned)) + "\n")


def remembered_budget(config: TrainConfig, folder: Path, seq_len: int | None) -> Budget | None:
    """The budget of such a run; None if nothing was learned, or its costs are not in the store.

    Raises UserError if nothing fits.
    """
    try:
        content = json.loads(read_text(learned_file(config, folder, seq_len), MOST_BYTES))
        learned: Learned = built(Learned, content)
        if min(*learned.lengths, learned.process.python_bytes) < 1:
            return None
    except (OSError, ValueError, RecursionError, TypeError):
        return None
    config, dtype = defaults.sized(config, 0), compute_dtype(config.dtype)
    sizes = DataSizes(lengths=learned.lengths, answer_tokens=learned.answer_tokens)
    facts = replace(facts_of(folder, dtype.size), known_caches=learned.row_caches)
    workload = workload_of(config, facts, sizes, learned.process, can_stream=learned.can_stream)

    def unknown(workload: Workload, limit_bytes: int) -> MeasuredCosts | None:
        raise LookupError

    with suppress(LookupError):
        measuring = Measuring(unknown, always=True)
        return budget_of(config, workload, dtype, run_limit(config), measuring=measuring)
    return None
