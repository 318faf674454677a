"""How a step becomes faster on several processes, and what share of it is communication.

`python -m your_ai.doctor.scaling` with a Contest as JSON on stdin runs one rank; rank 0 prints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from rich.table import Table

from your_ai.config import GRPO, build
from your_ai.doctor.contest import Contest
from your_ai.doctor.our_plans import SHORT, prepare_ours
from your_ai.errors import RunError, UserError
from your_ai.gates.console import echo_json
from your_ai.gates.programs import python_module
from your_ai.gates.text import size_text
from your_ai.session.ranks import LOOPBACK, check_processes, free_ports
from your_ai.training.distributed import Ranks
from your_ai.training.joining import join

TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """Steps of the same batch on `processes` processes."""

    processes: int
    seconds_median: float
    """Per step, without the first, which compiles."""
    tokens_per_s: float
    waited_share: float
    """Of the time of rank 0: the transfer, and the wait for slower ranks."""
    sent_bytes: int
    """What each rank gave to collective operations in a step."""
    gradient_bytes: int


def measured_scaling(
    contest: Contest,
    plans: Sequence[str],
    processes: int,
    on_note: Callable[[str], object] = lambda _: None,
) -> list[ScalingRow]:
    """One process, and then `processes`, on the same batch. Raises UserError and RunError."""
    plan = plans[0]
    if contest.objective == GRPO or plan in SHORT or len(plans) > 1:
        raise UserError("--processes: measures one plan of rows or pairs; not grpo, not packed")
    config = build({"processes": processes, "max_memory": contest.max_memory}, "bench")
    check_processes(config)
    if contest.batch_size % processes:
        raise UserError(
            f"--batch-size {contest.batch_size}: must be a multiple of --processes {processes}, "
            "so that all do the same"
        )
    rows = []
    for number in (1, processes):
        on_note(f"measuring {number} of {processes} processes")
        found = run_ranks(contest, plan, number)
        median = statistics.median(found["seconds"][1:])
        rows.append(
            ScalingRow(
                processes=number,
                seconds_median=median,
                tokens_per_s=contest.rows * contest.seq_len / median,
                waited_share=sum(found["waited"][1:]) / sum(found["seconds"][1:]),
                sent_bytes=found["sent_bytes"],
                gradient_bytes=found["gradient_bytes"],
            )
        )
    return rows


def run_ranks(contest: Contest, plan: str, processes: int) -> dict[str, Any]:
    """What rank 0 of `processes` measured."""
    task = json.dumps({"contest": dataclasses.asdict(contest), "plan": plan}).encode()
    command = python_module("your_ai.doctor.scaling")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = Path(folder, "hosts.json")
        place.write_text(json.dumps([[f"{LOOPBACK}:{port}"] for port in free_ports(processes)]))
        started = []
        for rank in range(processes):
            named = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(place)} if processes > 1 else {}
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                env={**os.environ, **named},
            )
            stack.callback(process.kill)
            started.append(process)
        for process in started[1:]:
            assert process.stdin is not None
            process.stdin.write(task)
            process.stdin.close()
        output, errors = started[0].communicate(task)
        for process in started:
            process.wait()
    if started[0].returncode:
        lines = errors.decode("utf-8", "replace").strip().splitlines()
        raise RunError(f"--processes {processes}: {lines[-1] if lines else 'a process failed'}")
    found: dict[str, Any] = json.loads(output)
    return found


def run_rank(contest: Contest, plan: str, ranks: Ranks) -> dict[str, Any]:
    """Do the steps of one rank; return what it measured."""
    ready = prepare_ours(contest, plan, ranks=ranks)
    seconds, waited = [], []
    for _ in range(contest.steps):
        seconds.append(ready.step()[1])
        waited.append(ranks.waited_s)
    trained = tree_flatten(ready.loop.trainer.model.trainable_parameters())
    return {
        "seconds": seconds,
        "waited": waited,
        "sent_bytes": ranks.sent_bytes,
        "gradient_bytes": sum(array.nbytes for _, array in trained),
    }


def scaling_table(rows: list[ScalingRow]) -> Table:
    drawn = Table(box=None, pad_edge=False)
    for header in ("processes", "s/step", "tokens/s", "speed", "waiting", "sent", "gradients"):
        drawn.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            str(row.processes),
            f"{row.seconds_median:.3f}",
            f"{row.tokens_per_s:.0f}",
            f"{rows[0].seconds_median / row.seconds_median:.2f}",
            f"{row.waited_share:.1%}",
            size_text(row.sent_bytes),
            size_text(row.gradient_bytes),
        )
    return drawn


if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    ranks = join(TIMEOUT_S)
    result = run_rank(Contest(**task["contest"]), task["plan"], ranks)
    ranks.leave()
    if ranks.is_first:
        echo_json(result)
