"""Hold predicted seconds a step against measured ones, after `your_ai bench --calibrate`.

Usage: python tools/check_speed.py [--calibrate] [--only TEXT] [--repeats N] [--core-seconds]

With --core-seconds, times are those of the process's threads (user + sys), which what else runs
disturbs less; then calibrate the same way, with OPENBLAS_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import mlx.core as mx

from your_ai.config import ALL_LINEAR
from your_ai.doctor.measure_speed import (
    SpeedCase,
    calibrated,
    keep_speed,
    measured_times,
    prepared,
)
from your_ai.doctor.shapes import make_shape
from your_ai.hub.find import store
from your_ai.memory.budget import speed_here
from your_ai.memory.calibration import Shape
from your_ai.memory.facts import facts_of
from your_ai.memory.step_time import StepOperations
from your_ai.memory.workload import Kept, Plan, StepSizes, Training

QV = ("q_proj", "v_proj")


def case(
    engine: str, tokens: int, blocks: int, targets=(ALL_LINEAR,), kept=0, rank=16, rows=1, **more
) -> SpeedCase:
    return SpeedCase(engine, (Shape(rows, tokens),), blocks, targets, kept, rank=rank, **more)


# Shape, bits, and what is timed.
CASES = [
    ("tiny", 0, case("fused", 64, 4)),
    ("tiny", 0, case("staged", 256, 4)),
    ("tiny", 4, case("fused", 1024, 4)),
    ("tiny", 4, case("streamed", 128, 4)),
    ("narrow", 0, case("fused", 128, 6)),
    ("narrow", 0, case("fused", 1024, 6)),
    ("narrow", 0, case("staged", 512, 6, kept=3)),
    ("narrow", 0, case("fused", 256, 2, QV, rank=8)),
    ("narrow", 0, case("fused", 128, 6, rows=4)),
    ("narrow", 4, case("staged", 256, 6)),
    ("narrow", 4, case("streamed", 512, 6, rank=8)),
    ("narrow", 4, case("fused", 64, 6)),
    ("narrow", 4, case("staged", 1024, 3, kept=3)),
    ("small", 0, case("fused", 64, 16)),
    ("small", 0, case("fused", 512, 16)),
    ("small", 0, case("staged", 256, 16)),
    ("small", 0, case("staged", 512, 16, kept=8)),
    ("small", 0, case("streamed", 256, 4, QV, rank=8)),
    ("small", 0, case("staged", 1024, 2)),
    ("small", 4, case("fused", 256, 16)),
    ("small", 4, case("staged", 512, 8, rank=8)),
    ("small", 4, case("streamed", 128, 16)),
    ("qwen2.5-0.5b", 4, case("staged", 256, 24)),
    ("qwen2.5-0.5b", 4, case("streamed", 128, 24, QV, rank=8)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the cases to measure")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file to append results to, a line each")
    parser.add_argument("--core-seconds", action="store_true", help="instead of wall time")
    parser.add_argument("--calibrate", action="store_true", help="first, and keep it")
    asked = parser.parse_args()
    now = time.process_time if asked.core_seconds else time.perf_counter
    if asked.calibrate:
        began = now()
        times = measured_times(now=now)
        path = keep_speed(calibrated(times), times)
        print(f"calibrated in {now() - began:.0f} s: {path}", flush=True)
    known = speed_here()
    for name, bits, each in CASES:
        (shape,) = each.shapes
        kept = f" kept {each.kept}" if each.kept else ""
        text = (
            f"{name} {bits or 32}-bit {each.engine}{kept} {shape.rows} x {shape.tokens}, rank "
            f"{each.rank} on {','.join(each.targets)} of {each.blocks}"
        )
        if asked.only not in text:
            continue
        folder = make_shape(name, bits, "float32", store() / "shapes")
        stepper = prepared(folder, mx.float32, each)
        measured = [sum(s) for s in stepper.steps(shape, asked.repeats, now)]
        seconds = statistics.median(measured[1:])
        facts = facts_of(folder, 4)
        training = Training(blocks=each.blocks, rank=each.rank, targets=each.targets)
        work = StepOperations(facts, training, StepSizes())
        plan = Plan(each.engine, shape.size, each.spill, kept=Kept(linear=each.kept))
        terms = work.of_step(plan, *shape)
        if asked.json:
            with asked.json.open("a") as file:
                file.write(json.dumps([text, seconds, terms]) + "\n")
        if known.speed is None:
            print(f"{text}: {seconds:.3f} s; {known.note}", flush=True)
            continue
        predicted = {term: known.speed.of(counts) for term, counts in terms.items()}
        total = sum(predicted.values())
        parts = ", ".join(f"{term} {value:.3f}" for term, value in predicted.items())
        print(f"{text}: {seconds:.3f} s, predicted {total:.3f} ({total / seconds - 1:+.0%})")
        print(f"    {parts}", flush=True)


if __name__ == "__main__":
    main()
