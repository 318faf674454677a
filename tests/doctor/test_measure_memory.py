"""`doctor --fit-memory` measures models in other processes and keeps what was fitted to them."""

from __future__ import annotations

import contextlib
import json

import pytest

from tests.conftest import call
from your_ai.doctor import measure_memory, shapes
from your_ai.errors import RunError

KERNELS = "measured"  # they make the peaks smaller


@pytest.fixture(autouse=True)
def one_small_model(tmp_path, monkeypatch):
    """The only model to measure, made beforehand."""
    monkeypatch.setattr(measure_memory, "MODELS", (("tiny", 4),))
    monkeypatch.setitem(shapes.SHAPES, "tiny", shapes.llama(64, 2, 1, 1, 64, 256))
    place = tmp_path / "shapes"
    shapes.make_shape("tiny", 4, "float32", place)
    there = contextlib.nullcontext(str(place))
    monkeypatch.setattr(measure_memory.tempfile, "TemporaryDirectory", lambda **_: there)


@pytest.mark.compiled
def test_plans_use_what_was_measured_and_fitted(own_folder, capsys):
    assert call("doctor", "--fit-memory", "--json") == 0
    fitted = json.loads(capsys.readouterr().out)
    assert fitted["peaks"] >= measure_memory.FEWEST
    assert -0.5 < fitted["lowest"] <= 0 <= fitted["highest"] < 0.5
    assert fitted["file"] == str(own_folder / "home" / "memory.json")
    plan = ("plan", "--shape", "tiny", "--seq-len", 4096, "--json")
    assert call(*plan) == 0
    ours = json.loads(capsys.readouterr().out)
    (own_folder / "home" / "memory.json").unlink()
    assert call(*plan) == 0
    packaged = json.loads(capsys.readouterr().out)
    assert ours["needed_bytes"] != packaged["needed_bytes"]


def test_failed_process_is_reported_and_nothing_is_kept(own_folder, monkeypatch):
    monkeypatch.setattr(measure_memory, "MODELS", (("huge", 4),))
    assert call("doctor", "--fit-memory") == 1
    assert not (own_folder / "home").exists()


def test_too_few_peaks_are_not_fitted():
    with pytest.raises(RunError, match="only 0 cases"):
        measure_memory.fitted_to([])
