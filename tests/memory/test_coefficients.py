"""Coefficients: the packaged file, and one that was fitted on a machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config import TrainConfig
from your_ai.memory import budget, coefficients
from your_ai.memory.coefficients import (
    FILE,
    PACKAGED,
    Fitted,
    fitted_text,
    for_machine,
    parse,
    read_fitted,
)
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import DataSizes, workload_of

MACHINE = ("gpu", "a card", "1", "2")
OTHER = replace(PACKAGED, vectors={"fused": 1.5, "staged": 0.0})
FITTED = Fitted(
    coefficients=OTHER, machine=MACHINE, date="2026-01-31", peaks=72, lowest=-0.1, highest=0.2
)


def test_packaged_coefficients_are_read_as_they_are():
    assert parse(asdict(PACKAGED), PACKAGED) == PACKAGED
    assert PACKAGED.fused["outs"] > 1


def test_a_fitted_file_is_read_back(tmp_path):
    (tmp_path / "f").write_text(fitted_text(FITTED, {"peaks": []}))
    assert read_fitted(tmp_path / "f") == FITTED
    assert for_machine(tmp_path / "f", MACHINE) == OTHER
    (tmp_path / "f").write_text(fitted_text(FITTED, {}).replace('"vectors"', '"dora"'))
    assert read_fitted(tmp_path / "f") == FITTED  # as it was written before


def test_coefficients_of_another_machine_or_version_are_not_used(tmp_path):
    (tmp_path / "f").write_text(fitted_text(FITTED, {}))
    assert for_machine(tmp_path / "f", ("gpu", "a card", "1", "3")) is PACKAGED
    assert for_machine(tmp_path / "missing", MACHINE) is PACKAGED


@pytest.mark.parametrize("value", [None, "1", True, -0.1, float("nan"), float("inf"), 1e10, [], {}])
def test_a_value_that_is_not_a_coefficient_is_refused(value):
    content = asdict(PACKAGED)
    content["vectors"] = {"fused": value, "staged": 1.0}
    with pytest.raises(ValueError, match=r"vectors\.fused"):
        parse(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.pop("vectors"),
        lambda c: c.update(more={}),
        lambda c: c.update(vectors=[]),
        lambda c: c["vectors"].pop("fused"),
        lambda c: c["vectors"].update(more=1.0),
    ],
)
def test_other_tables_or_keys_are_refused(change):
    content = json.loads(json.dumps(asdict(PACKAGED)))
    change(content)
    with pytest.raises(ValueError, match=r"tables|not a table|other keys"):
        parse(content, PACKAGED)


@given(st.text() | st.binary())
def test_a_damaged_file_is_as_if_there_were_none(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("f") / "f"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "replace"))
    assert read_fitted(path) is None


@pytest.mark.parametrize("name", ["coefficients", "machine", "date", "peaks", "lowest", "highest"])
def test_a_file_without_a_field_is_as_if_there_were_none(tmp_path, name):
    content = json.loads(fitted_text(FITTED, {}))
    for broken in ({n: v for n, v in content.items() if n != name}, content | {name: None}):
        (tmp_path / "f").write_text(json.dumps(broken))
        assert name in ("date",) or read_fitted(tmp_path / "f") is None


def test_plans_use_the_coefficients_that_were_fitted_here(tiny_model, own_folder):
    facts = facts_of(tiny_model, 4)
    config = TrainConfig(lora_layers=2)
    data = DataSizes(lengths=(64,))
    before = workload_of(config, facts, data, budget.process_here())
    assert before.process.coefficients == PACKAGED
    here = replace(FITTED, machine=tuple(budget.machine_key()))
    path = budget.store() / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(fitted_text(here, {}))
    after = workload_of(config, facts, data, budget.process_here())
    assert after.process.coefficients == OTHER
    keys = [
        budget.measured_key(config, workload, budget.mx.float32) for workload in (before, after)
    ]
    assert keys[0] != keys[1]  # peaks measured under others are not mixed with these


def test_the_packaged_file_names_its_device():
    file = coefficients.__file__.replace(".py", ".json")
    with open(file, encoding="utf-8") as opened:
        assert "CPU" in json.load(opened)["device"]
