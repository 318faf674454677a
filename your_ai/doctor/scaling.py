"""How a step becomes faster on several processes, and what share of it is communication.

`python -m your_ai.doctor.scaling JSON` runs one rank of a Contest; rank 0 prints.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
import time
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
from your_ai.run.child import POLL_S, open_log, read_log
from your_ai.run.folder import RunFolder
from your_ai.session.ranks import check_processes, started_group
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
    """Return what rank 0 of `processes` measured."""
    task = json.dumps({"contest": dataclasses.asdict(contest), "plan": plan})
    command = python_module("your_ai.doctor.scaling", task)
    with tempfile.TemporaryDirectory() as place:
        folder = RunFolder(Path(place))
        with open_log(folder) as log, started_group(command, folder, log, processes) as group:
            while group.first.process.poll() is None:
                group.look()
                time.sleep(POLL_S)
            group.end()
            status, _ = group.result
            lines = read_log(log, 0).strip().splitlines() or ["a process failed"]
    if status:
        raise RunError(f"--processes {processes}: {lines[-1]}")
    found: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
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
    task = json.loads(sys.argv[1])
    ranks = join(TIMEOUT_S)
    result = run_rank(Contest(**task["contest"]), task["plan"], ranks)
    ranks.leave()
    if ranks.is_first:
        echo_json(result)
