"""Everything a run needs, checked and loaded: the cheapest checks first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer

from your_ai import hub, model, optimizer
from your_ai.config import TrainConfig, flag
from your_ai.data.batches import StepPlan, plan_steps
from your_ai.data.encode import Encoder, Prompt
from your_ai.data.examples import Examples, load_examples
from your_ai.data.rows import find_splits, read_rows
from your_ai.engine.fused import Engine, fused_engine
from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.run import events


@dataclass(frozen=True)
class Prepared:
    """All that the loop needs, checked and loaded."""

    config: TrainConfig
    model: nn.Module
    tokenizer: Any
    dtype: mx.Dtype
    adapters: model.Adapters
    engine: Engine
    optimizer: Optimizer
    plan: StepPlan
    valid: Examples | None
    test: Examples | None
    samples: list[Prompt]
    steps: int
    depends_on: dict[str, dict[str, str]]

    def started_event(self, step: int) -> events.Started:
        arrays = model.adapter_arrays(self.model)
        return events.Started(
            step=step,
            steps=self.steps,
            steps_per_epoch=self.plan.steps_per_epoch,
            model=self.config.model,
            rows=len(self.plan.examples),
            trainable_parameters=sum(array.size for array in arrays.values()),
            dtype=str(self.dtype).removeprefix("mlx.core."),
            plan="fused",
        )


def prepare(config: TrainConfig, log: events.EventLog) -> Prepared:
    """Check and load everything, the cheapest first."""
    splits = find_splits(config.data)
    base = hub.find_model(config.model)
    hub.check_model(base)
    dtype = model.compute_dtype(config.dtype)
    log.write(events.Stage(text=f"loading {config.model}"))
    network, tokenizer = model.load_base(base, dtype, config.quantize)
    adapters = model.add_adapters(network, config)

    log.write(events.Stage(text=f"reading {config.data}"))
    files = hub.fingerprint(base)
    examples = {
        name: load_split(path, config, tokenizer, files, log) for name, path in splits.items()
    }
    plan = plan_steps(examples["train"], config.batch_size, config.rows_per_step, config.seed)
    limits = [
        config.max_steps,
        config.epochs and config.epochs * plan.steps_per_epoch,
    ]
    steps = min([n for n in limits if n is not None], default=plan.steps_per_epoch)
    for wanted in ("samples", "exact_match"):
        if getattr(config, wanted) and "test" not in splits:
            raise UserError(f"{flag(wanted)}: --data {config.data} has no test.jsonl")

    mx.eval(network.parameters())
    split = model.split(network)
    if not split.hidden:
        text = "the model cannot be split before its head: every position goes through it"
        log.write(events.Notice(text=text))
    return Prepared(
        config=config,
        model=network,
        tokenizer=tokenizer,
        dtype=dtype,
        adapters=adapters,
        engine=fused_engine(network, split, adapters.dropout_keys),
        optimizer=optimizer.build_optimizer(config, network.trainable_parameters()),
        plan=plan,
        valid=examples.get("valid"),
        test=examples.get("test"),
        samples=sample_prompts(splits.get("test"), tokenizer, config.samples),
        steps=steps,
        depends_on={
            "model": files,
            "data": {p.name: sha256(p) for n, p in splits.items() if n != "test"},
        },
    )


def load_split(
    path: Path, config: TrainConfig, tokenizer: Any, files: dict[str, str], log: events.EventLog
) -> Examples:
    """The examples of one file; what was cut from its rows is told once."""
    examples = load_examples(
        path,
        Encoder(tokenizer, config.mask_prompt),
        hub.tokenizer_fingerprint(files),
        config.max_seq_length,
        config.too_long,
        hub.store() / "cache",
    )
    tally = examples.tally
    if tally.truncated or tally.split:
        done = "truncated" if tally.truncated else "split"
        text = (
            f"{path.name}: {tally.truncated + tally.split} of {tally.rows} rows were longer than "
            f"--max-seq-length {config.max_seq_length} and were {done}"
        )
        if tally.dropped:
            text += f"; {tally.dropped} pieces with nothing left to train were dropped"
        log.write(events.Notice(text=text))
    return examples


def sample_prompts(path: Path | None, tokenizer: Any, count: int) -> list[Prompt]:
    """The first `count` test rows that ask something."""
    if path is None or count == 0:
        return []
    prompts = map(Encoder(tokenizer).prompt_of, read_rows(path))
    return list(islice((p for p in prompts if p is not None), count))
