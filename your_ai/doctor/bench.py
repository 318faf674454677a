"""Benchmark against mlx-lm: the same weights, tokens and adapters, each in its own process.

`python -m your_ai.doctor.bench` with a Contest as JSON on stdin runs one contender and prints
one row as JSON.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
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
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map
from rich.table import Table

from your_ai.config import TrainConfig, coerce, flag, nearest
from your_ai.data.batches import Batch, RowsAt, make_schedule, micro_batches
from your_ai.data.examples import Examples, RowCounts
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
from your_ai.memory.budget import budget_of
from your_ai.nets import model
from your_ai.rng import derive_seed
from your_ai.training import optimizer
from your_ai.training.optimizer import Update

PLANS = ("auto", "fused", "staged", "streamed", "spilled", "prefix", "unpacked", "packed")
# unpacked and packed train SHORT_ROWS rows of SHORTEST to LONGEST tokens, each once per step.
SHORT_ROWS, SHORTEST, LONGEST = 16, 40, 120
PEERS = ("mlx-lm", "mlx-lm-checkpoint")
ROUNDS = 2  # all contenders in turn, so that a machine that slows down slows them all equally


@dataclass(frozen=True, kw_only=True)
class Contest:
    """The task of every contender: `steps` updates with AdamW on the same batch."""

    folder: str
    dtype: str
    seq_len: int
    batch_size: int
    lora_rank: int
    lora_layers: str
    """Written as the option of `train`."""
    lora_targets: str
    """Written as the option of `train`."""
    supervised: float
    """The share of each row's tokens that is trained, at the end of the row."""
    steps: int
    max_memory: float | None = None
    """In GB, for each contender's process. Our plans split the batch; mlx-lm gets MLX's limit."""
    learning_rate: float = 1e-4

    @property
    def targets(self) -> int:
        """Trained tokens per row."""
        return max(1, round(self.supervised * self.seq_len))

    def train_config(self, plan: str = "auto") -> TrainConfig:
        """The settings for our engines. Raises UserError if the adapter options are invalid."""
        text = {"lora_layers": self.lora_layers, "lora_targets": self.lora_targets}
        return TrainConfig(
            lora_rank=self.lora_rank,
            **{name: coerce(name, value, flag(name)) for name, value in text.items()},
            learning_rate=self.learning_rate,
            max_grad_norm=0,
            batch_size=self.batch_size,
            max_memory=self.max_memory,
            plan=plan,
        )


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """The measurements of one contender."""

    contender: str
    peak_mb: float
    """MLX's peak memory from the first step on."""
    process_mb: float
    """Peak memory of the process."""
    seconds_median: float
    """Per step, without the first step, which compiles."""
    seconds_min: float
    """Per step, without the first step, which compiles."""
    tokens_per_s: float
    losses: list[float]
    within_limit: bool | None = None


def contenders_of(plan: str, against: str) -> list[str]:
    """The contenders named by --plan and --against. Raises UserError."""
    contenders = [*named(plan, "plan", PLANS), *named(against, "against", PEERS)]
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
    """Show the rows. total: of the process; vs: tokens per second divided by the peer's."""
    peers = [row for row in rows if row.contender in PEERS]
    drawn = Table(box=None, pad_edge=False, collapse_padding=True)
    drawn.add_column("", no_wrap=True)
    headers = ["peak\nMB", "total\nMB", "s/step", "least", "tokens\n/s", "last\nloss"]
    headers += [f"vs\n{peer.contender.removeprefix('mlx-lm-')}" for peer in peers]
    for header in headers:
        drawn.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        ratios = [f"{row.tokens_per_s / peer.tokens_per_s:.2f}" for peer in peers]
        drawn.add_row(
            row.contender, f"{row.peak_mb:.0f}", f"{row.process_mb:.0f}",
            f"{row.seconds_median:.3f}", f"{row.seconds_min:.3f}", f"{row.tokens_per_s:.0f}",
            loss_text(row.losses[-1]), *ratios,
        )  # fmt: skip
    return drawn


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
    rows = [combine(name, rounds) for name, rounds in measured.items()]
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


def combine(name: str, rounds: list[dict[str, Any]]) -> BenchRow:
    seconds = [s for measured in rounds for s in measured["seconds"][1:]]
    median = statistics.median(seconds)
    return BenchRow(
        contender=name,
        peak_mb=max(measured["peak_bytes"] for measured in rounds) / 1e6,
        process_mb=max(measured["process_bytes"] for measured in rounds) / 1e6,
        seconds_median=median,
        seconds_min=min(seconds),
        tokens_per_s=rounds[0]["tokens"] / median,
        losses=rounds[0]["losses"],
    )


def contest_tokens(contest: Contest, vocabulary: int) -> np.ndarray:
    """(B, T + 1) random tokens, the same for every contender."""
    rng = np.random.Generator(np.random.PCG64(derive_seed("bench tokens")))
    return rng.integers(0, vocabulary, (contest.batch_size, contest.seq_len + 1), dtype=np.uint32)


def contest_batches(contest: Contest, tokens: np.ndarray, rows_at: RowsAt) -> list[Batch]:
    trained = np.zeros(tokens.shape, bool)
    trained[:, -contest.targets :] = True
    starts = np.arange(len(tokens) + 1) * tokens.shape[1]
    weights = np.ones(len(tokens), np.float32)
    examples = Examples(tokens.reshape(-1), trained.reshape(-1), starts, weights, RowCounts())
    rows = np.arange(len(tokens))
    return list(micro_batches(examples, rows, rows_at, np.array([contest.seq_len])))


def updates_of(
    contest: Contest, contender: str, vocabulary: int, rows_at: RowsAt
) -> list[list[Batch]]:
    """The micro-batches of each update of a step. Only unpacked has several updates per step."""
    if contender not in ("unpacked", "packed"):
        return [contest_batches(contest, contest_tokens(contest, vocabulary), rows_at)]
    rng = np.random.Generator(np.random.PCG64(derive_seed("bench rows")))
    starts = np.cumsum([0, *rng.integers(SHORTEST, LONGEST + 1, SHORT_ROWS)])
    tokens = rng.integers(0, vocabulary, starts[-1], dtype=np.uint32)
    weights = np.ones(SHORT_ROWS, np.float32)
    examples = Examples(tokens, np.ones(len(tokens), bool), starts, weights, RowCounts())
    if contender == "packed":
        return [make_schedule(examples, 1, SHORT_ROWS, 0, contest.seq_len).batches_of(0)]
    one_by_one = make_schedule(examples, 1, 1, 0)
    return [one_by_one.batches_of(step) for step in range(SHORT_ROWS)]


def run_ours(contest: Contest, contender: str) -> Iterator[tuple[float, float, int]]:
    """Yield (loss, seconds, tokens) of each step.

    auto: the fastest plan that fits --max-memory or the machine. spilled: streamed, with block
    inputs on disk. prefix: fused, with a prefix cache in memory. unpacked, packed: fused, on
    short rows; one row per update, or rows joined up to --seq-len.
    """
    plan = contender if contender in ("auto", "staged", "streamed") else "fused"
    plan = "streamed" if contender == "spilled" else plan
    spill = contender == "spilled"
    rows_at = lambda _: contest.batch_size  # noqa: E731
    opened = open_model(Path(contest.folder), getattr(mx, contest.dtype))
    network, config = opened.network, contest.train_config()
    adapters = model.add_adapters(network, config)
    if plan == "auto" or contest.max_memory is not None:
        asked = dataclasses.replace(contest.train_config(plan), spill=spill)
        budget = budget_of(asked, opened.folder, opened.dtype, [contest.seq_len])
        chosen = budget.choice.option
        plan, spill = chosen.plan.engine, chosen.plan.spill
        rows_at = partial(chosen.plan.rows, batch_size=contest.batch_size)
        beside_bytes = chosen.estimate.beside_bytes
        allocator.set_limits(budget.limit.limit_bytes, chosen.needed_bytes, beside_bytes)
    built = build_engine(
        network,
        adapters.dropout_keys,
        plan,
        packing=contender == "packed",
        tensors=opened.tensors,
        make_store=(lambda _: MemoryStore()) if contender == "prefix" else None,
        spill=Path(tempfile.gettempdir()) if spill else None,
    )
    if built.notices:
        raise RunError(built.notices[-1])
    allocator.free()
    engine = built.engine
    adamw = optimizer.build_optimizer(config, network.trainable_parameters())
    update = optimizer.make_update(network, adamw)
    vocabulary = vocabulary_of(network) or opened.config["vocab_size"]
    updates = updates_of(contest, contender, vocabulary, rows_at)
    tokens = sum(batch.real_tokens for batches in updates for batch in batches)
    mx.reset_peak_memory()
    for _ in range(contest.steps):
        began = time.perf_counter()
        losses = [one_update(engine, update, batches, contest) for batches in updates]
        yield statistics.mean(losses), time.perf_counter() - began, tokens


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


def run_mlx_lm(contest: Contest, checkpointing: bool) -> Iterator[tuple[float, float, int]]:
    """Do the same with mlx-lm's trainer, unchanged."""
    from mlx_lm.tuner.trainer import TrainingArgs, TrainingCallback, train

    if contest.max_memory is not None:
        mx.set_memory_limit(max(1, int(1e9 * contest.max_memory) - (probe.process_bytes() or 0)))
    network, settings = model.load_network(Path(contest.folder), getattr(mx, contest.dtype))
    config = contest.train_config()
    model.add_adapters(network, config)
    mx.eval(network.parameters())
    vocabulary = vocabulary_of(network) or settings["vocab_size"]
    tokens = mx.array(contest_tokens(contest, vocabulary).astype(np.int32))
    first = contest.seq_len - contest.targets + 1
    lengths = mx.array([[first, contest.seq_len]] * contest.batch_size)
    measured: list[tuple[float, float, int]] = []

    class Collect(TrainingCallback):
        def on_train_loss_report(self, train_info: dict) -> None:
            seconds = 1 / train_info["iterations_per_second"]
            measured.append(
                (train_info["train_loss"], seconds, contest.batch_size * contest.seq_len)
            )

    def batches(**_: Any) -> Iterator[tuple[mx.array, mx.array]]:
        while True:
            yield tokens, lengths

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options = TrainingArgs(
            batch_size=contest.batch_size,
            iters=contest.steps,
            steps_per_report=1,
            steps_per_save=contest.steps + 1,
            adapter_file=str(Path(folder) / "adapters.safetensors"),
            grad_checkpoint=checkpointing,
        )
        adamw = optim.AdamW(contest.learning_rate, weight_decay=0.0, bias_correction=True)
        adamw.init(network.trainable_parameters())
        mx.reset_peak_memory()
        train(
            network, adamw, train_dataset=[], args=options,
            iterate_batches=batches, training_callback=Collect(),
        )  # fmt: skip
    yield from measured


def run_contender(contest: Contest, contender: str) -> dict[str, Any]:
    if contender in PEERS:
        steps = run_mlx_lm(contest, checkpointing=contender == "mlx-lm-checkpoint")
    else:
        steps = run_ours(contest, contender)
    losses, seconds, tokens = zip(*steps, strict=True)
    return {
        "losses": losses,
        "seconds": seconds,
        "tokens": tokens[-1],
        "peak_bytes": mx.get_peak_memory(),
        "process_bytes": probe.process_peak(),
    }


if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    echo_json(run_contender(Contest(**task["contest"]), task["contender"]))
