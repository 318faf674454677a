"""Plans of runs like one that was planned before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import TINY, make_model
from your_ai.config import TrainConfig
from your_ai.hub.find import store
from your_ai.memory.plan import Budget
from your_ai.training import planned
from your_ai.training.plan_without_files import planned_run

PROCESS = '{"python_bytes": 1, "sliced": true, "most_buffers": 1, "mixes_whole": true}'
TOO_SHORT = f'{{"lengths": [-1], "answer_tokens": 0, "process": {PROCESS}, "can_stream": true}}'


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    folder = make_model(tmp_path / "m", **TINY)
    config = TrainConfig(model=str(folder), run="first", max_memory=4.0, lora_targets=("q_proj",))
    budget_of(config)
    return config


@pytest.fixture
def loads(monkeypatch) -> list[str]:
    """A list that receives an item for each model that is loaded."""
    found: list[str] = []
    load = planned.open_model

    def noted(folder: Path, *args: object) -> object:
        found.append(folder.name)
        return load(folder, *args)

    monkeypatch.setattr(planned, "open_model", noted)
    return found


def budget_of(config: TrainConfig, seq_len: int = 64) -> Budget:
    ignore = {"on_note": lambda _: None, "on_measure": lambda _: None}
    return planned_run(config, seq_len, **ignore, remembers=True)


def test_the_same_plan_is_found_without_loading_the_model(config, loads):
    found = budget_of(replace(config, run="second"))
    assert not loads
    shutil.rmtree(store() / "plans")
    assert budget_of(config) == found
    assert loads


def test_another_limit_is_planned_without_loading_the_model(config, loads):
    found = budget_of(replace(config, max_memory=2.0))
    assert not loads
    assert found.limit.limit_bytes == 2 * 10**9


@pytest.mark.parametrize(
    ("changes", "seq_len"),
    [({"lora_rank": "4"}, 64), ({"use_dora": True}, 64), ({"batch_size": 3}, 64), ({}, 32)],
)
def test_other_settings_or_another_length_load_the_model(config, loads, changes, seq_len):
    budget_of(replace(config, **changes), seq_len)
    assert loads


def test_changed_files_load_the_model(config, loads):
    file = Path(config.model) / "chat_template.jinja"
    file.write_text(file.read_text() + " ")
    budget_of(config)
    assert loads


@pytest.mark.parametrize("content", ["", "{}", "[]", TOO_SHORT])
def test_a_damaged_file_loads_the_model(config, loads, content):
    (file,) = (store() / "plans").iterdir()
    file.write_text(content)
    budget_of(config)
    assert loads


def test_without_costs_the_model_is_loaded_and_measured(config, loads):
    shutil.rmtree(store() / "costs")
    assert budget_of(config).workload.costs is not None
    assert loads
