"""Each preset in configs/ is trained for one step on a small substitute for its model.

test_demo.py trains those of the demo's preferences.
"""

from __future__ import annotations

import pytest

from tests.conftest import TINY, call, make_model
from your_ai.config import DEMO, TrainConfig, build
from your_ai.config.reading import find_preset
from your_ai.doctor.recommend import PYTHON_BYTES, room_of
from your_ai.files import packaged
from your_ai.gates.yaml_files import read_yaml
from your_ai.hub.registry import known
from your_ai.memory.facts import facts_of_known
from your_ai.memory.plan import choose
from your_ai.memory.workload import DataSizes, ProcessFacts, workload_of

PRESETS = sorted(path.stem for path in packaged("configs").glob("*.yaml"))


def settings_of(preset: str) -> TrainConfig:
    return build(read_yaml(find_preset(preset)), preset)


@pytest.mark.parametrize("preset", [p for p in PRESETS if not p.startswith("demo-")])
def test_preset_trains_one_step(own_folder, small_demo, preset):
    config = settings_of(preset)
    less = ["--max-steps", 1, "--batch-size", 2, "--grad-accumulation", 1, "--force"]
    if config.model == DEMO:
        less += ["--samples", 1]
    else:
        model = known()[config.model]
        folder = own_folder / "models" / model.repo.split("/")[1]
        make_model(folder, model.model_type, **TINY, num_hidden_layers=4)
        rows = {"answers": "data", "pairs": "pairs", "prompts": "data"}[config.row_kind]
        less += ["--data", small_demo / rows, "--samples", 0]
    if config.objective == "soft":
        reward = ["--objective", "reward", "--data", small_demo / "pairs", "--run", "rm"]
        assert call("train", "--model", config.model, *reward, "--max-steps", 1) == 0
        less += ["--max-new-tokens", 4, "--prompts-per-step", 2]
    elif config.objective == "distill":
        teacher = known()[config.teacher]
        make_model(own_folder / "models" / teacher.repo.split("/")[1], teacher.model_type, **TINY)
        less += ["--max-new-tokens", 4, "--prompts-per-step", 2]
    elif config.row_kind == "prompts":
        less += ["--reward", "length:3", "--rollouts", 2, "--max-new-tokens", 4]
        less += ["--no-mask-truncated"]  # a random model ends nowhere
    assert call("train", "--config", preset, *less) == 0


@pytest.mark.parametrize(("preset", "memory_gb"), [
    ("llama-8b-dpo-16gb", 16), ("qwen-0.5b-dpo-8gb", 8),
])  # fmt: skip
def test_preset_named_after_a_mac_fits_into_its_memory(preset, memory_gb):
    config = settings_of(preset)
    model = known()[config.model]
    facts = facts_of_known(model, 2)
    mac = ProcessFacts(python_bytes=PYTHON_BYTES)
    workload = workload_of(config, facts, DataSizes(lengths=(config.max_seq_length,)), mac)
    limit_bytes = int(config.max_memory * 1e9)
    assert limit_bytes <= room_of(memory_gb).limit.limit_bytes
    plan = choose(workload, limit_bytes).option.plan
    assert plan.engine != "streamed"
    assert not plan.spill
    rows = config.batch_size * workload.rows_together
    assert plan.rows(config.max_seq_length, rows) >= workload.rows_together  # no pair is split
