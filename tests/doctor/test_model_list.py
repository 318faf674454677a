from __future__ import annotations

import functools

import pytest

from tests.conftest import make_model, shown
from your_ai.doctor import model_list
from your_ai.doctor.recommend import room_of
from your_ai.hub.find import models_root
from your_ai.hub.registry import known

SMALL, LARGE = room_of(8), room_of(128)


# Of the known models alone: a room has a thousand plans to weigh.
rows = functools.cache(model_list.model_rows)


def row(name: str, found: list[model_list.ModelRow]) -> model_list.ModelRow:
    return next(row for row in found if row.name == name)


@pytest.fixture
def few_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One known model beside the local ones."""
    few = {"llama-8b": known()["llama-8b"]}
    monkeypatch.setattr(model_list, "known", lambda: few)


def test_a_known_model_that_is_not_local_is_listed_with_its_size():
    found = row("llama-8b", rows(LARGE))
    assert (found.where, found.bits, found.fault) == ("", 4, None)
    assert found.size_bytes == known()["llama-8b"].bytes_on_disk


def test_more_memory_never_makes_a_model_fit_worse():
    order = list(model_list.WORDS.values())[::-1]
    large, small = ({row.name: row.fits for row in rows(room)} for room in (LARGE, SMALL))
    for name in known():
        assert order.index(large[name]) >= order.index(small[name])
    assert large["phi4"] == "yes"
    assert small["phi4"] != "yes"


def test_a_local_model_is_planned_from_its_files(few_known):
    make_model(models_root() / "mine")
    found = row("mine", model_list.model_rows(LARGE))
    assert (found.where, found.bits, found.fits) == ("models", 4, "yes")


def test_a_damaged_model_names_the_fault_and_no_fit(few_known):
    folder = make_model(models_root() / "mine")
    (folder / "model.safetensors").write_bytes(b"cut")
    found = row("mine", model_list.model_rows(LARGE))
    assert found.fits is None
    assert "model.safetensors" in found.fault


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_width(width):
    lines = shown(model_list.models_table(rows(LARGE), width), width).splitlines()
    assert len(lines) == 2 + len(known())
    assert lines[1].split()[0] == "demo"  # what is here comes first
    assert max(map(len, lines)) <= width
