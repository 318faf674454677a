"""Coefficients: the packaged file, and what is refused in one."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from your_ai.memory import coefficients
from your_ai.memory.coefficients import PACKAGED, parse


def test_packaged_coefficients_are_read_as_they_are():
    assert parse(asdict(PACKAGED)) == PACKAGED
    assert PACKAGED.fused["outs"] > 1


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
    ],
)
def test_other_tables_are_refused(change):
    content = json.loads(json.dumps(asdict(PACKAGED)))
    change(content)
    with pytest.raises(ValueError, match=r"not the tables|not a table"):
        parse(content)


def test_the_packaged_file_names_its_device():
    file = coefficients.__file__.replace(".py", ".json")
    with open(file, encoding="utf-8") as opened:
        assert "CPU" in json.load(opened)["device"]
