"""Fit the packaged coefficients of memory estimates to the peaks in memory_measurements.json.

    python tools/fit_memory.py           how far the estimates are off now, and after a fit
    python tools/fit_memory.py --write   the same, and write your_ai/memory/coefficients.json

Peaks of another machine: `your_ai doctor --fit-memory` measures and fits there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from your_ai.doctor import fit_memory
from your_ai.memory import coefficients
from your_ai.memory.coefficients import PACKAGED, Coefficients

MEASUREMENTS = Path(__file__).with_name("memory_measurements.json")
PERCENTILES = (0, 5, 25, 50, 75, 95, 100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the coefficients")
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    options = parser.parse_args()
    peaks = fit_memory.from_json(json.loads(options.measurements.read_text(encoding="utf-8")))
    print(f"estimate over measured peak, in percent: percentiles {PERCENTILES}")
    show("now", peaks, PACKAGED)
    found = fit_memory.fit(peaks, PACKAGED)
    show("fitted", peaks, found)
    if options.write:
        device = json.loads(options.measurements.read_text(encoding="utf-8"))["device"]
        file = Path(coefficients.__file__).with_name("coefficients.json")
        file.write_text(as_text(found, device), encoding="utf-8")


def show(title: str, peaks: list[fit_memory.Peak], found: Coefficients) -> None:
    off = fit_memory.errors(peaks, found)
    kinds = np.array([f"{peak.kind}, {peak.engine}" for peak in peaks])
    for kind in sorted(set(kinds)):
        values = np.percentile(100 * off[kinds == kind], PERCENTILES)
        print(f"{title:7} {kind:20}", *(f"{value:+6.1f}" for value in values))


def as_text(found: Coefficients, device: str) -> str:
    tables = [
        f"    {json.dumps(name)}: {json.dumps(table)}"
        for name, table in dataclasses.asdict(found).items()
    ]
    body = ",\n".join(tables)
    return f'{{\n  "device": {json.dumps(device)},\n  "coefficients": {{\n{body}\n  }}\n}}\n'


if __name__ == "__main__":
    main()
