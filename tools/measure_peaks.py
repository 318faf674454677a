"""Measure again the peaks in memory_measurements.json that the engines of today can give.

    python tools/measure_peaks.py [PLAN[:KIND]...]

PLAN: fused, staged, kept (staged, and blocks keep something) or streamed; by default all but fused.
KIND: gradients, step or evaluation; all of them by default.

Only models whose sizes are those of a shape of doctor/shapes.py are measured. Do so after a change
of an engine, then fit: estimates that are fitted to older engines are too high or too low.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from your_ai.doctor import fit_memory
from your_ai.doctor.fit_memory import Peak
from your_ai.doctor.measure_memory import describe, measure_engine
from your_ai.doctor.shapes import SHAPES, make_shape
from your_ai.memory.calibration import Shape
from your_ai.memory.facts import ModelFacts, facts_of

MEASUREMENTS = Path(__file__).with_name("memory_measurements.json")
SIZES = {"hidden": "hidden_size", "vocabulary": "vocab_size", "blocks": "num_hidden_layers"}
BITS = 4  # of quantized weights


def main(wanted: list[str]) -> None:
    content = json.loads(MEASUREMENTS.read_text(encoding="utf-8"))
    columns = {name: content[name] for name in ("device", "columns")}
    peaks = fit_memory.from_json(content)
    groups: dict[str, list[int]] = {}  # of those that a process measures; graphs stay in one
    for place, peak in enumerate(peaks):
        plan = "kept" if peak.kept else peak.engine
        names = {plan, f"{plan}:{peak.kind}"}
        if names & {*wanted} and shape_of(peak.facts) is not None:
            key = repr((peak.engine, peak.kind, peak.facts, peak.training, peak.kept))
            groups.setdefault(key, []).append(place)
    for places in groups.values():
        members = [peaks[place] for place in places]
        name = shape_of(members[0].facts)
        case = json.dumps(fit_memory.to_json(members))
        command = [sys.executable, __file__, "--one", str(name)]
        done = subprocess.run(command, input=case, capture_output=True, text=True, check=True)
        now = fit_memory.from_json(json.loads(done.stdout))
        for place, before, after in zip(places, members, now, strict=True):
            print(f"{name}, {describe(after)}, {before.peak_bytes / 1e6:.1f} before", flush=True)
            peaks[place] = after
        MEASUREMENTS.write_text(as_text(columns | fit_memory.to_json(peaks)), "utf-8")


def shape_of(facts: ModelFacts) -> str | None:
    """The shape with these sizes, if there is one."""
    sizes = {name: getattr(facts, name) for name in SIZES}
    return next(
        (
            name
            for name, config in SHAPES.items()
            if all(sizes[name] == config.get(key) for name, key in SIZES.items())
        ),
        None,
    )


def measured(name: str, peaks: list[Peak]) -> list[Peak]:
    first = peaks[0]
    with tempfile.TemporaryDirectory() as place:
        folder = make_shape(name, BITS if first.facts.quantized else 0, "float32", Path(place))
        facts = facts_of(folder, mx.float32.size)
        cases = [(peak.kind, Shape(peak.rows, peak.tokens)) for peak in peaks]
        given = (folder, mx.float32, facts, first.training, first.engine, sys.maxsize, first.kept)
        return list(measure_engine(*given, cases))


def as_text(content: dict[str, object]) -> str:
    """JSON with one line for each model and each peak."""
    lines = [f' "{name}": {json.dumps(content[name])}' for name in ("device", "columns")]
    models = [f"  {json.dumps(n)}: {json.dumps(m)}" for n, m in dict(content["models"]).items()]
    peaks = [f"  {json.dumps(peak)}" for peak in list(content["peaks"])]
    lines += [' "models": {\n' + ",\n".join(models) + "\n }"]
    lines += [' "peaks": [\n' + ",\n".join(peaks) + "\n ]"]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        given = fit_memory.from_json(json.load(sys.stdin))
        print(json.dumps(fit_memory.to_json(measured(sys.argv[2], given))))
    else:
        main(sys.argv[1:] or ["staged", "kept", "streamed"])
