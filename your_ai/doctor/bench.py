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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.table import Table

from your_ai.config import GRPO, coerce, nearest
from your_ai.doctor.contest import OBJECTIVES, Contest
from your_ai.doctor.our_plans import LONGEST, SHORT, SHORT_ROWS, OurSteps, mlx_room, prepare_ours
from your_ai.doctor.peers import PEERS, check_peers, run_peer
from your_ai.doctor.shapes import SHAPES, make_shape
from your_ai.errors import RunError, UserError
from your_ai.gates.console import echo_json
from your_ai.gates.programs import python_module
from your_ai.gates.text import loss_text
from your_ai.hub.check import check_model
from your_ai.hub.find import find_model, store
from your_ai.memory import probe
from your_ai.modelfiles.quantized_copies import model_folder

PLANS = (
    *("auto", "fused", "kept", "staged", "staged-spilled", "resident", "streamed", "spilled"),
    *("prefix", "unpacked", "packed"),
)
ROUNDS = 2  # all contenders in turn, so that a machine that slows down slows them all equally


@dataclass(frozen=True, kw_only=True)
class BenchRow:
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
    """Of each step; with grpo, mean rewards."""
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
    read_wait_s: float | None = None
    """Seconds per step in which it waited for weights, without the first step: the median; None if
    the weights of all blocks are in memory."""


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
    plans = [name.strip() for name in plan.split(",")]
    named(",".join(name for name in plans if mlx_room(name) is None), "plan", PLANS)
    plans = [name for name in plans if name not in ("", "none")]
    if objective == GRPO and (without := [name for name in plans if name in (*SHORT, "prefix")]):
        raise UserError(f"--plan {without[0]}: grpo does not train under it; use another")
    contenders = [*plans, *peers]
    if not contenders:
        raise UserError("--plan and --against name nothing to measure")
    return contenders


def weights_of(
    shape: str | None,
    model_name: str | None,
    bits: int,
    dtype: str,
    on_note: Callable[[str], object] = lambda _: None,
) -> Path:
    """The folder of a generated shape or of a model. Raises UserError.

    on_note: called with the size of a shape before its files are written.
    """
    if (shape is None) == (model_name is None):
        raise UserError(f"give --shape or --model; shapes: {', '.join(SHAPES)}")
    if dtype == "auto":
        raise UserError("--dtype auto: name a dtype, so that results can be compared")
    coerce("dtype", dtype, "--dtype")
    if model_name is not None:
        folder = find_model(model_name)
        check_model(folder)
        return model_folder(folder, None)
    if shape not in SHAPES:
        known = ", ".join(SHAPES)
        raise UserError(f"--shape {shape}: unknown{nearest(str(shape), SHAPES)} ({known})")
    if bits not in (0, 4, 8):
        raise UserError(f"--bits {bits}: must be 4 or 8, or 0 for no quantization")
    return make_shape(shape, bits, dtype, store() / "shapes", on_note)


def named(text: str, option: str, known: tuple[str, ...]) -> list[str]:
    """The names in a comma-separated list. Raises UserError for an unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise UserError(f"--{option} {name}: unknown{hint} ({', '.join(known)})")
    return names


def bench_table(rows: list[BenchRow], of_rewards: bool = False) -> Table:
    """Show the rows.

    est.: the estimate of the peak; total: of the process; x sft: the time of a pair relative to
    two rows of sft; wait: for weights from files, per step; vs: tokens per second divided by the
    peer's.

    of_rewards: the rows have rewards instead of losses.
    """
    peers = [row for row in rows if row.contender in PEERS]
    of_pairs = any(row.seconds_per_pair is not None for row in rows)
    drawn = Table(box=None, pad_edge=False, collapse_padding=True)
    drawn.add_column("", no_wrap=True)
    headers = ["peak\nMB", "est.\nMB", "total\nMB", "s/pair" if of_pairs else "s/step"]
    headers += ["x\nsft"] if of_pairs else ["least"]
    headers += ["tokens\n/s", "last\nreward" if of_rewards else "last\nloss"]
    waits = any(row.read_wait_s is not None for row in rows)
    headers += ["wait\ns"] if waits else []
    headers += [f"vs\n{short_name(peer.contender.removeprefix('mlx-lm-'))}" for peer in peers]
    for header in headers:
        drawn.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        planned = "" if row.estimated_mb is None else f"{row.estimated_mb:.0f}"
        times = [f"{row.seconds_median:.3f}", f"{row.seconds_min:.3f}"]
        if of_pairs:
            times = [f"{row.seconds_per_pair:.3f}"]
            times += ["" if row.times_rows is None else f"{row.times_rows:.2f}"]
        waited = ["" if row.read_wait_s is None else f"{row.read_wait_s:.2f}"] if waits else []
        drawn.add_row(
            short_name(row.contender), f"{row.peak_mb:.0f}", planned, f"{row.process_mb:.0f}",
            *times, f"{row.tokens_per_s:.0f}", loss_text(row.losses[-1]), *waited,
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


def compare_contenders(
    contest: Contest,
    contenders: list[str],
    on_note: Callable[[str], object] = lambda _: None,
) -> list[BenchRow]:
    """Run every contender ROUNDS times, in turn. Raises UserError, or RunError if one fails.

    on_note: called before each with what is measured, and how many are left.
    """
    if "packed" in contenders and contest.seq_len < LONGEST:
        raise UserError(
            f"--seq-len {contest.seq_len}: must be at least {LONGEST} for packed, which joins rows "
            f"of up to {LONGEST} tokens"
        )
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    turns = [name for _ in range(ROUNDS) for name in contenders]
    for number, name in enumerate(turns, 1):
        on_note(f"measuring {name} ({number} of {len(turns)})")
        measured[name].append(run_alone(contest, name))
    rows = [combine(contest, name, rounds) for name, rounds in measured.items()]
    if contest.max_memory is None:
        return rows
    limit_mb = 1000 * contest.max_memory
    return [dataclasses.replace(row, within_limit=row.process_mb <= limit_mb) for row in rows]


def run_alone(contest: Contest, contender: str) -> dict[str, Any]:
    task = json.dumps({"contest": dataclasses.asdict(contest), "contender": contender})
    done = subprocess.run(
        python_module("your_ai.doctor.bench"),
        input=task, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RunError(f"{contender}: {lines[-1]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def combine(contest: Contest, name: str, rounds: list[dict[str, Any]]) -> BenchRow:
    seconds = [s for measured in rounds for s in measured["seconds"][1:]]
    turns = [turn for measured in rounds for turn in measured["turns"]]
    waits = [s for measured in rounds for s in measured["waits"]]
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
        read_wait_s=statistics.median(waits) if waits else None,
    )


def pairs_per_step(contest: Contest, contender: str) -> int:
    """0 for sft."""
    if contest.rows_together == 1:
        return 0
    return SHORT_ROWS // 2 if contender in SHORT else contest.batch_size


def run_contender(contest: Contest, contender: str) -> dict[str, Any]:
    """Return what one contender did, measured in this process."""
    ready: OurSteps | None = None
    turns: list[tuple[float, float]] = []  # seconds of a step of pairs, and of sft on its rows
    waits: list[float | None] = []
    if contender in PEERS:
        steps = run_peer(contest, contender)
    else:
        ready, steps = prepare_ours(contest, contender), []
        for _ in range(contest.steps):
            steps.append(ready.step())
            waits.append(ready.waited_s)
    losses, seconds, tokens = zip(*steps, strict=True)
    process_bytes = probe.process_peak()
    # A limit has no room for both side by side; other plans train other rows, or in other updates.
    is_alike = contest.max_memory is None and contender not in (*SHORT, "auto")
    if ready is not None and contest.rows_together > 1 and is_alike:
        alone = prepare_ours(contest.of_single_rows(), contender, beside=ready)
        alone.step()  # compiles
        turns = [(ready.step()[1], alone.step()[1]) for _ in range(contest.steps)]
    return {
        "peak_bytes": mx.get_peak_memory() if ready is None else ready.peak_bytes,
        "process_bytes": process_bytes,
        "losses": losses,
        "seconds": [*seconds, *(pairs for pairs, _ in turns)],
        "tokens": tokens[-1],
        "turns": turns,
        "waits": [seconds for seconds in waits[1:] if seconds is not None],
        "estimated_bytes": None if ready is None else ready.estimated_bytes,
    }


if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    echo_json(run_contender(Contest(**task["contest"]), task["contender"]))
