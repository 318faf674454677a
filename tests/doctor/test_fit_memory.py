"""The fit of coefficients to measured peaks."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.memory.test_estimate import RECORDED
from your_ai.doctor import fit_memory
from your_ai.doctor.fit_memory import decided, errors, estimated_bytes, fit, from_json, to_json
from your_ai.memory.coefficients import PACKAGED

TABLES = [table for tables in fit_memory.FITTED.values() for table in tables]
STAGED = [p for p in RECORDED if p.engine != "fused" and p.kind == "gradients" and not p.kept]
FUSED = [p for p in RECORDED if p.engine == "fused" and p.kind == "step"]


def scaled(factor: float):
    """Coefficients whose fitted tables are all too large or too small."""
    tables = {
        name: {key: factor * value for key, value in getattr(PACKAGED, name).items()}
        for name in TABLES
    }
    return dataclasses.replace(PACKAGED, **tables)


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_peaks_of_a_machine_that_needs_more_or_less_are_fitted(factor):
    """Peaks made by other coefficients are estimated as well as their own coefficients do."""
    peaks = [
        dataclasses.replace(peak, peak_bytes=estimated_bytes(peak, scaled(factor)))
        for peak in FUSED
    ]
    assert np.abs(errors(peaks, PACKAGED)).max() > 0.4
    found = fit(peaks, PACKAGED)
    assert np.abs(errors(peaks, found)).max() < 0.1
    assert found.backward == PACKAGED.backward  # nothing was measured of other engines


def cost(peaks, coefficients) -> float:
    """What a fit lowers: squared errors, those of low estimates doubled before."""
    found = errors(peaks, coefficients)
    return float((np.where(found < 0, fit_memory.TOO_LOW * found, found) ** 2).sum())


@pytest.mark.parametrize("peaks", [STAGED, FUSED], ids=["staged", "fused"])
def test_a_fit_is_never_worse_than_where_it_starts(peaks):
    assert cost(peaks, fit(peaks, PACKAGED)) <= cost(peaks, PACKAGED)


def test_coefficients_are_never_negative():
    peaks = [dataclasses.replace(peak, peak_bytes=peak.peak_bytes // 20) for peak in STAGED]
    found = fit(peaks, PACKAGED)
    assert all(value >= 0 for table in TABLES for value in getattr(found, table).values())


def test_peaks_decide_only_the_coefficients_of_their_kind_and_engine():
    tables = {table for table, _ in decided(STAGED, PACKAGED)}
    assert tables == {*("forward", "forward_lora", "backward", "backward_lora"), "head", "tiles"}
    assert {table for table, _ in decided(FUSED, PACKAGED)} == {"fused", "fused_head"}


def test_peaks_are_read_back_as_they_were_written():
    assert from_json(to_json(RECORDED)) == RECORDED


def test_the_script_shows_errors_before_and_after(tmp_path):
    script = Path(__file__).parents[2] / "tools" / "fit_memory.py"
    file = tmp_path / "peaks.json"
    file.write_text(json.dumps(to_json(STAGED[:6])))
    done = subprocess.run(
        [sys.executable, str(script), "--measurements", str(file)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["now", "fitted"]
