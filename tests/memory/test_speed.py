"""The file with the speed of a machine: read back, or not used and said why."""

from __future__ import annotations

import json

import pytest

from tests.speeds import CORE
from your_ai.memory.budget import blas_libraries
from your_ai.memory.speed import CHANGED, NOT_MEASURED, known_speed, read_speed, speed_text


def test_a_speed_is_read_back(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(speed_text(CORE, []))
    assert read_speed(path) == CORE
    assert known_speed(path, lambda: CORE.machine).speed == CORE
    assert known_speed(path, lambda: CORE.machine).note == ""


def test_the_speed_of_another_machine_is_not_used(tmp_path):
    path = tmp_path / "speed.json"
    assert known_speed(path, lambda: CORE.machine).note == NOT_MEASURED
    path.write_text(speed_text(CORE, []))
    found = known_speed(path, lambda: ("cpu", "arm"))
    assert found.speed is None
    assert found.note == CHANGED.format(date=CORE.date)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": {}},
        {"seconds": {**CORE.seconds, "matmul": -1}},
        {"seconds": {**CORE.seconds, "matmul": float("nan")}},
        {"seconds": dict.fromkeys(CORE.seconds, 0)},
        {"lowest": "x"},
        {"machine": None},
    ],
)
def test_a_damaged_speed_is_not_used(tmp_path, change):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps({**json.loads(speed_text(CORE, [])), **change}))
    assert read_speed(path) is None


def test_libraries_of_products_are_named(tmp_path):
    maps = tmp_path / "maps"
    lines = (
        "7f00-7f01 r-xp 00000000 fe:00 12 /usr/lib/openblas-pthread/libblas.so.3",
        "7f01-7f02 r-xp 00000000 fe:00 12 /usr/lib/openblas-pthread/libblas.so.3",
        "7f02-7f03 r-xp 00000000 fe:00 13 /v/site-packages/numpy.libs/libscipy_openblas.so",
        "7f03-7f04 rw-p 00000000 00:00 0 [heap]",
    )
    maps.write_text("\n".join(lines))
    assert blas_libraries(maps) == ["openblas-pthread/libblas.so.3"]
    assert blas_libraries(tmp_path / "missing") == []
