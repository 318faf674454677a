"""`bench --calibrate` measures small models, and plans predict seconds from then on."""

from __future__ import annotations

import json

import pytest

from tests.conftest import call
from your_ai.doctor import measure_speed
from your_ai.doctor.fit_speed import TimedWork
from your_ai.doctor.kernel_times import Kernels
from your_ai.doctor.measure_speed import SpeedCase, SpeedModels
from your_ai.doctor.shapes import SHAPES, llama
from your_ai.errors import RunError
from your_ai.memory.calibration import Shape
from your_ai.memory.speed import KINDS, NOT_MEASURED

SMALL = llama(64, 2, 1, 1, 64, 256)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One small model, few cases, and no repetition."""
    monkeypatch.setitem(SHAPES, "tiny", SMALL)
    kernels = Kernels(
        products=((32, 64, 64), (64, 64, 64)),
        adapters=((32, 64, 64, 4),),
        attentions=((96, 1, 1, 32, True),),
        heads=((8, 64, 100),),
    )
    for name in ("ON_FAST", "ON_SLOW"):
        monkeypatch.setattr(measure_speed, name, SpeedModels((SMALL,), 32, kernels))
    case = SpeedCase("streamed", (Shape(1, 32),), spill=True)
    monkeypatch.setattr(measure_speed, "cases_of", lambda bits, long: (case,)[bits:])
    monkeypatch.setattr(measure_speed, "BITS", (0,))
    monkeypatch.setattr(measure_speed, "MOST_ERROR", 10.0)  # such short times vary much


def test_plans_predict_seconds_after_a_calibration(own_folder, capsys):
    plan = ("plan", "--shape", "tiny", "--bits", 0, "--seq-len", 64)
    assert call(*plan) == 0
    assert " ".join(NOT_MEASURED.split()) in " ".join(capsys.readouterr().out.split())
    assert call("bench", "--calibrate", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(own_folder / "home" / "speed.json")
    assert found["seconds"].keys() == KINDS.keys()
    assert call(*plan) == 0
    assert "s / step, as predicted from this machine's speed" in capsys.readouterr().out
    assert call(*plan, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    terms = planned["seconds_by_term"]
    assert terms["forward"] > 0
    assert planned["seconds_a_step"] == pytest.approx(sum(terms.values()))
    assert call(*plan, "--front", "--json") == 0
    front = json.loads(capsys.readouterr().out)
    seconds = [each["seconds_a_step"] for each in front]
    needed = [each["needed_bytes"] for each in front]
    assert seconds == sorted(seconds)
    assert needed == sorted(needed, reverse=True)


def test_an_interrupted_calibration_keeps_the_old_one(own_folder, monkeypatch):
    file = own_folder / "home" / "speed.json"
    file.parent.mkdir()
    file.write_text("old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_speed, "times_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_speed.measured_times()
    assert file.read_text() == "old"


def test_times_that_do_not_agree_are_not_kept(monkeypatch):
    monkeypatch.undo()
    work = {"matmul": 1e9}
    measured = [TimedWork(f"case {n}", work, seconds) for n, seconds in enumerate((1, 3, 9, 27))]
    with pytest.raises(RunError, match="do not agree"):
        measure_speed.calibrated(measured)


def test_a_calibration_takes_no_model(capsys):
    assert call("bench", "--calibrate", "--shape", "tiny") == 2
    assert "--calibrate: has models of its own" in capsys.readouterr().err
