"""Benchmark against mlx-lm and mlx-lm-lora, on the same weights, tokens and adapters.

Each contender runs in its own process.

`python -m your_ai.doctor.bench` with a Contest as JSON on stdin runs one contender and prints
one row as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from rich.table import Table

from your_ai.config import coerce, nearest
from your_ai.data.batches import Batch, RowsAt, make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.doctor.contest import (
    OBJECTIVES,
    Contest,
    batches_of,
    contest_tokens,
    examples_of,
)
from your_ai.doctor.peers import PEERS, check_peers, run_peer
from your_ai.doctor.shapes import SHAPES, make_shape
from your_ai.engine.build import build_engine
from your_ai.engine.opened import open_model
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.protocol import Engine
from your_ai.errors import RunError, UserError
from your_ai.gates.console import echo_json
from your_ai.gates.text import loss_text
from your_ai.gates.token_ids import vocabulary_of
from your_ai.hub.check import check_model
from your_ai.hub.find import find_model, store
from your_ai.memory import allocator, probe
from your_ai.memory.budget import budget_of, demand_of
from your_ai.memory.estimate import Plan
from your_ai.memory.facts import facts_of
from your_ai.memory.plan import estimate_rows
from your_ai.nets import model
from your_ai.objectives.chosen import needs_reference, objective_of
from your_ai.rng import derive_seed
from your_ai.training import optimizer
from your_ai.training.optimizer import Update

PLANS = ("auto", "fused", "staged", "streamed", "spilled", "prefix", "unpacked", "packed")
SHORT = ("unpacked", "packed")
# These train SHORT_ROWS rows of SHORTEST to LONGEST tokens, each once per step.
SHORT_ROWS, SHORTEST, LONGEST = 16, 40, 120
ROUNDS = 2  # all contenders in turn, so that a machine that slows down slows them all equally


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """The measurements of one contender."""

    contender: str
    peak_mb: float
    """MLX's peak memory from the first step on, in ours with the computation of the reference."""
    process_mb: float
    """Peak memory of the process."""
    seconds_median: float
    """Per step, without the first step, which compiles."""
    seconds_min: float
    """Per step, without the first step, which compiles."""
    tokens_per_s: float
    losses: list[float]
    estimated_mb: float | None = None
    """The estimate of `peak_mb`; None for a peer, and for a plan without an estimate."""
    seconds_per_pair: float | None = None
    """The median; None for sft."""
    rows_seconds_median: float | None = None
    """Per step of sft on the same rows, in turn with steps of pairs; None if not measured."""
    rows_seconds_min: float | None = None
    times_rows: float | None = None
    """The median over these turns of the time of a step of pairs divided by that of sft."""
    within_limit: bool | None = None


def contenders_of(plan: str, against: str | None, objective: str) -> list[str]:
    """The contenders named by --plan and --against. Raises UserError.

    against: None for the peers that are always there, which are those of sft.
    """
    if objective not in OBJECTIVES:
        hint = nearest(objective, OBJECTIVES)
        raise UserError(f"--objective {objective}: unknown{hint} ({', '.join(OBJECTIVES)})")
    if against is None:
        against = "mlx-lm,mlx-lm-checkpoint" if objective == "sft" else "none"
    peers = named(against, "against", PEERS)
    check_peers(peers, objective)
    contenders = [*named(plan, "plan", PLANS), *peers]
    if not contenders:
        raise UserError("--plan and --against name nothing to measure")
    return contenders


def weights_of(shape: str | None, model_name: str | None, bits: int, dtype: str) -> Path:
    """The folder of a generated shape or of a model. Raises UserError."""
    if (shape is None) == (model_name is None):
        raise UserError(f"give --shape or --model; shapes: {', '.join(SHAPES)}")
    if dtype == "auto":
        raise UserError("--dtype auto: name a dtype, so that results can be compared")
    coerce("dtype", dtype, "--dtype")
    if model_name is not None:
        folder = find_model(model_name)
        check_model(folder)
        return folder
    if shape not in SHAPES:
        known = ", ".join(SHAPES)
        raise UserError(f"--shape {shape}: unknown{nearest(str(shape), SHAPES)} ({known})")
    if bits not in (0, 4, 8):
        raise UserError(f"--bits {bits}: must be 4 or 8, or 0 for no quantization")
    return make_shape(shape, bits, dtype, store() / "shapes")


def named(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    """The names in a comma-separated list. Raises UserError for an unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise UserError(f"--{option} {name}: unknown{hint} ({', '.join(known)})")
    return names


def table(rows: list[BenchRow]) -> Table:
    """Show the rows.

    est.: the estimate of the peak; total: of the process; x sft: the time of a pair relative to
    two rows of sft; vs: tokens per second divided by the peer's.
    """
    peers = [row for row in rows if row.contender in PEERS]
    of_pairs = any(row.seconds_per_pair is not None for row in rows)
    drawn = Table(box=None, pad_edge=False, collapse_padding=True)
    drawn.add_column("", no_wrap=True)
    headers = ["peak\nMB", "est.\nMB", "total\nMB", "s/pair" if of_pairs else "s/step"]
    headers += ["x\nsft"] if of_pairs else ["least"]
    headers += ["tokens\n/s", "last\nloss"]
    headers += [f"vs\n{short_name(peer.contender.removeprefix('mlx-lm-'))}" for peer in peers]
    for header in headers:
        drawn.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        planned = "" if row.estimated_mb is None else f"{row.estimated_mb:.0f}"
        times = [f"{row.seconds_median:.3f}", f"{row.seconds_min:.3f}"]
        if of_pairs:
            times = [f"{row.seconds_per_pair:.3f}"]
            times += ["" if row.times_rows is None else f"{row.times_rows:.2f}"]
        drawn.add_row(
            short_name(row.contender), f"{row.peak_mb:.0f}", planned, f"{row.process_mb:.0f}",
            *times, f"{row.tokens_per_s:.0f}", loss_text(row.losses[-1]),
            *(f"{row.tokens_per_s / peer.tokens_per_s:.2f}" for peer in peers),
        )  # fmt: skip
    return drawn


def short_name(contender: str) -> str:
    """The name in two lines if it is long."""
    return contender.replace("lora-", "lora\n-")


def over_limit(contest: Contest, rows: list[BenchRow]) -> list[str]:
    """The messages about contenders that used more than --max-memory."""
    return [
        f"{row.contender}: used {row.process_mb:.0f} MB, more than --max-memory "
        f"{contest.max_memory:g}"
        for row in rows
        if row.within_limit is False
    ]


def compare(contest: Contest, contenders: list[str]) -> list[BenchRow]:
    """Run every contender ROUNDS times, in turn. Raises UserError, or RunError if one fails."""
    if "packed" in contenders and contest.seq_len < LONGEST:
        raise UserError(
            f"--seq-len {contest.seq_len}: must be at least {LONGEST} for packed, which joins rows "
            f"of up to {LONGEST} tokens"
        )
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name in contenders:
            measured[name].append(run_alone(contest, name))
    rows = [combine(contest, name, rounds) for name, rounds in measured.items()]
    if contest.max_memory is None:
        return rows
    limit_mb = 1000 * contest.max_memory
    return [dataclasses.replace(row, within_limit=row.process_mb <= limit_mb) for row in rows]


def run_alone(contest: Contest, contender: str) -> dict[str, Any]:
    """Run one contender in its own process."""
    task = json.dumps({"contest": dataclasses.asdict(contest), "contender": contender})
    done = subprocess.run(
        [sys.executable, "-m", "your_ai.doctor.bench"],
        input=task, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RunError(f"{contender}: {lines[-1]}")
    return json.loads(done.stdout)


def combine(contest: Contest, name: str, rounds: list[dict[str, Any]]) -> BenchRow:
    seconds = [s for measured in rounds for s in measured["seconds"][1:]]
    turns = [turn for measured in rounds for turn in measured["turns"]]
    median, estimated = statistics.median(seconds), rounds[0]["estimated_bytes"]
    of_rows = [rows for _, rows in turns]
    pairs = pairs_per_step(contest, name)
    times = [of_pairs / rows for of_pairs, rows in turns]
    return BenchRow(
        contender=name,
        peak_mb=max(measured["peak_bytes"] for measured in rounds) / 1e6,
        process_mb=max(measured["process_bytes"] for measured in rounds) / 1e6,
        seconds_median=median,
        seconds_min=min(seconds),
        tokens_per_s=rounds[0]["tokens"] / median,
        losses=rounds[0]["losses"],
        estimated_mb=None if estimated is None else estimated / 1e6,
        seconds_per_pair=median / pairs if pairs else None,
        rows_seconds_median=statistics.median(of_rows) if turns else None,
        rows_seconds_min=min(of_rows) if turns else None,
        times_rows=statistics.median(times) if turns else None,
    )


def pairs_per_step(contest: Contest, contender: str) -> int:
    """0 for sft."""
    if contest.rows_together == 1:
        return 0
    return SHORT_ROWS // 2 if contender in SHORT else contest.batch_size


def examples_for(contest: Contest, contender: str, vocabulary: int) -> Examples:
    """The rows of a step. Those of unpacked and packed are short, and all their tokens trained."""
    if contender not in SHORT:
        return examples_of(contest, contest_tokens(contest, vocabulary))
    rng = np.random.Generator(np.random.PCG64(derive_seed("bench rows")))
    starts = np.cumsum([0, *rng.integers(SHORTEST, LONGEST + 1, SHORT_ROWS)])
    tokens = rng.integers(0, vocabulary, starts[-1], dtype=np.uint32)
    weights = np.ones(SHORT_ROWS, np.float32)
    return Examples(tokens, np.ones(len(tokens), bool), starts, weights, RowCounts())


def updates_of(
    contest: Contest, contender: str, examples: Examples, rows_at: RowsAt
) -> list[list[Batch]]:
    """The micro-batches of each update of a step. Only unpacked has several updates per step."""
    together = contest.rows_together
    if contender == "packed":
        packed = make_schedule(examples, SHORT_ROWS, SHORT_ROWS, 0, contest.seq_len, together)
        return [packed.batches_of(0)]
    if contender == "unpacked":
        one_by_one = make_schedule(examples, together, together, 0, rows_together=together)
        return [one_by_one.batches_of(step) for step in range(one_by_one.steps_per_epoch)]
    return [batches_of(contest, examples, rows_at)]


@dataclass(frozen=True)
class PreparedSteps:
    """One of our plans, with everything that its steps need."""

    contest: Contest
    network: nn.Module
    engine: Engine
    update: Update
    updates: list[list[Batch]]
    """The micro-batches of each update of a step."""
    estimated_bytes: int | None
    """The estimate of MLX's peak memory, if there is one for this plan."""

    def step(self) -> tuple[float, float, int]:
        """Do a step; return (loss, seconds, tokens)."""
        began = time.perf_counter()
        losses = [
            one_update(self.engine, self.update, batches, self.contest) for batches in self.updates
        ]
        seconds = time.perf_counter() - began
        tokens = sum(batch.real_tokens for batches in self.updates for batch in batches)
        return statistics.mean(losses), seconds, tokens


def run_ours(contest: Contest, contender: str) -> Iterator[tuple[float, float, int]]:
    """Yield (loss, seconds, tokens) of each step of one of our plans."""
    ready = prepare_ours(contest, contender)
    for _ in range(contest.steps):
        yield ready.step()


def prepare_ours(
    contest: Contest, contender: str, beside: PreparedSteps | None = None
) -> PreparedSteps:
    """Load the model for one of our plans. From here on, MLX's peak memory is counted.

    auto: the fastest plan that fits --max-memory or the machine. spilled: streamed, with block
    inputs on disk. prefix: fused, with a prefix cache in memory. unpacked, packed: fused, on
    short rows; one row or pair per update, or rows joined up to --seq-len.
    beside: shares its weights in memory.
    """
    plan = contender if contender in ("auto", "staged", "streamed") else "fused"
    plan = "streamed" if contender == "spilled" else plan
    spill = contender == "spilled"
    opened = open_model(Path(contest.folder), getattr(mx, contest.dtype))
    network, config = opened.network, contest.train_config()
    adapters = model.add_adapters(network, config)
    if beside is not None and plan != "streamed":
        network.update(beside.network.parameters())
    wanted = Plan(plan, contest.rows * contest.seq_len, spill)
    if plan == "auto" or contest.max_memory is not None:
        asked = dataclasses.replace(contest.train_config(plan), spill=spill)
        budget = budget_of(asked, opened.folder, opened.dtype, [contest.seq_len])
        chosen = budget.choice.option
        wanted, estimate = chosen.plan, chosen.estimate
        rows_at: RowsAt = partial(wanted.rows, batch_size=contest.rows)
        allocator.set_limits(budget.limit.limit_bytes, chosen.needed_bytes, estimate.beside_bytes)
    else:
        facts = facts_of(opened.folder, opened.dtype.size)
        demand = demand_of(config, facts, [contest.seq_len], can_stream=opened.can_stream)
        estimate = estimate_rows(demand, wanted, contest.rows, contest.seq_len)
        rows_at = lambda _: contest.rows  # noqa: E731
    built = build_engine(
        network,
        adapters.dropout_keys,
        wanted.engine,
        packing=contender == "packed",
        tensors=opened.tensors,
        make_store=(lambda _: MemoryStore()) if contender == "prefix" else None,
        spill=Path(tempfile.gettempdir()) if wanted.spill else None,
        objective=objective_of(config),
    )
    if built.notices:
        raise RunError(built.notices[-1])
    allocator.free()
    engine = built.engine
    adamw = optimizer.build_optimizer(config, network.trainable_parameters())
    update = optimizer.make_update(network, adamw)
    vocabulary = vocabulary_of(network) or opened.config["vocab_size"]
    examples = examples_for(contest, contender, vocabulary)
    updates = updates_of(contest, contender, examples, rows_at)
    mx.reset_peak_memory()
    if needs_reference(config):
        updates = [[with_reference(engine, batch) for batch in batches] for batches in updates]
        engine.drop()
    known = contender not in (*SHORT, "prefix")
    return PreparedSteps(
        contest, network, engine, update, updates, estimate.mlx_bytes if known else None
    )


def with_reference(engine: Engine, batch: Batch) -> Batch:
    """The batch with log-probabilities under the model as it is now."""
    losses, _ = engine.score(batch)
    return dataclasses.replace(batch, reference=-np.array(losses))


def one_update(engine: Engine, update: Update, batches: list[Batch], contest: Contest) -> float:
    """Do one update and return the mean loss before it."""
    denominator = engine.objective.denominator(batches)
    loss, total = 0.0, None
    for batch in batches:
        sums, grads = engine.gradients(batch, 1 / denominator, 0)
        mx.eval(sums, grads)
        total = grads if total is None else tree_map(mx.add, total, grads)
        loss += sums.loss.item() / denominator
        del grads
    update(total, 1.0, contest.learning_rate)
    return loss


def run_contender(contest: Contest, contender: str) -> dict[str, Any]:
    """What one contender did, measured in this process."""
    ready, turns = None, []
    if contender in PEERS:
        steps = run_peer(contest, contender)
    else:
        ready = prepare_ours(contest, contender)
        steps = [ready.step() for _ in range(contest.steps)]
    losses, seconds, tokens = zip(*steps, strict=True)
    measured = {"peak_bytes": mx.get_peak_memory(), "process_bytes": probe.process_peak()}
    if ready is not None and contest.rows_together > 1 and compares_with_rows(contest, contender):
        turns = turns_with_rows(ready, contender)
    return measured | {
        "losses": losses,
        "seconds": [*seconds, *(pairs for pairs, _ in turns)],
        "tokens": tokens[-1],
        "turns": turns,
        "estimated_bytes": None if ready is None else ready.estimated_bytes,
    }


def compares_with_rows(contest: Contest, contender: str) -> bool:
    """Whether both fit side by side, and a step trains the same rows with the same updates."""
    return contest.max_memory is None and contender not in (*SHORT, "auto")


def turns_with_rows(ready: PreparedSteps, contender: str) -> list[tuple[float, float]]:
    """Seconds of a step of pairs and of one of sft on the same rows, in turn, `steps` times."""
    alone = prepare_ours(ready.contest.of_single_rows(), contender, beside=ready)
    alone.step()  # compiles
    return [(ready.step()[1], alone.step()[1]) for _ in range(ready.contest.steps)]


if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    echo_json(run_contender(Contest(**task["contest"]), task["contender"]))
