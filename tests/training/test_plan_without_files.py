"""Plans of models that are not on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import call, make_model
from your_ai.config import TrainConfig
from your_ai.doctor.recommend import room_of
from your_ai.doctor.shapes import SHAPES
from your_ai.errors import UserError
from your_ai.hub.registry import known
from your_ai.memory.budget import process_here
from your_ai.memory.estimate_adapters import adapter_bytes
from your_ai.memory.facts import facts_of
from your_ai.memory.plan import Budget
from your_ai.memory.workload import SCORED_FIRST, DataSizes, workload_of
from your_ai.objectives.chosen import objective_of
from your_ai.training import plan_without_files
from your_ai.training.plan_without_files import planned_run

OBJECTIVES = ["sft", "dpo", "ipo", "simpo", "orpo", "kto", "grpo", "reward", "soft"]
LIGHT = (
    "import sys\n"
    "from your_ai import cli\n"
    "sys.argv = ['your_ai', 'plan', '--model', 'llama-8b', '--max-memory', '7', '--force']\n"
    "try:\n"
    "    cli.main()\n"
    "finally:\n"
    "    heavy = ('mlx', 'mlx_lm', 'numpy', 'transformers')\n"
    "    print([name for name in heavy if name in sys.modules])\n"
)


def planned(notes: list[str] | None = None, seq_len: int | None = None, **settings) -> Budget:
    notes = [] if notes is None else notes
    settings = {"max_memory": 500.0, "force": True, "run": "r", **settings}
    return planned_run(TrainConfig(**settings), seq_len, notes.append)


@pytest.fixture
def config_json(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**SHAPES["tiny"], **changes}))
        return path

    return write


@pytest.mark.parametrize("alias", list(known()))
def test_every_known_model_has_a_plan(alias):
    notes: list[str] = []
    budget = planned(notes, model=alias)
    assert budget.choice.option.plan.engine == "fused"
    (note,) = notes
    assert note.startswith(f"{known()[alias].repo} is not on this machine; download it (")
    assert note.endswith(f"): your_ai download {alias}")


def test_it_needs_no_mlx_and_shows_the_table():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert "limit 7.0 GB: --max-memory 7" in done.stdout
    assert "adapters: rank 16 in all 32 blocks" in done.stdout
    assert "estimated peak" in done.stdout
    assert done.stdout.endswith("[]\n")
    assert done.stderr.startswith("note: mlx-community/Meta-Llama-3.1-8B-Instruct-4bit is not on")


def test_other_repositories_must_be_downloaded_first():
    with pytest.raises(UserError, match=r"--model someone/else: is not on this machine; download"):
        planned(model="someone/else")


def test_rows_of_the_data_count_as_the_longest(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    notes: list[str] = []
    settings = {"model": "llama-1b", "data": str(tmp_path), "max_seq_length": 512}
    assert planned(notes, **settings).workload.lengths == (512,)
    assert notes[1] == (
        "the data is not read for such a plan: rows count as --max-seq-length 512 tokens"
    )
    assert planned(notes := [], seq_len=64, **settings).workload.lengths == (64,)
    assert len(notes) == 1


@pytest.mark.parametrize("memory_gb", [8, 16, 64])
def test_a_plan_for_another_mac_has_its_limit(memory_gb):
    notes: list[str] = []
    config = TrainConfig(model="qwen3-4b", run="r")
    budget = planned_run(config, None, notes.append, memory_gb)
    assert budget.limit == room_of(memory_gb).limit
    assert budget.workload.facts.float_bytes == 2
    assert notes[0] == f"planned for an idle Mac with {memory_gb} GB; nothing was measured there"


def test_longest_row_of_another_mac_is_that_of_its_limit(capsys):
    def longest(*options: str) -> dict:
        asked = ("plan", "--model", "qwen3-4b", "--longest", *options, "--json")
        assert call(*asked) == 0
        (found,) = json.loads(capsys.readouterr().out)
        return found

    of_mac = longest("--memory", "16")
    gb = of_mac["limit_bytes"] / 1e9
    assert gb < 16
    assert of_mac == longest("--memory", "64", "--max-memory", str(gb))
    lower = longest("--memory", "16", "--max-memory", "5")
    assert lower["limit_bytes"] == 5 * 10**9
    assert lower["tokens"] < of_mac["tokens"]


def test_a_limit_is_that_of_the_other_mac():
    config = TrainConfig(model="qwen3-4b", run="r", max_memory=6.0)
    assert planned_run(config, None, print, 8.0).limit.limit_bytes == 6 * 10**9
    with pytest.raises(UserError, match=r"this machine has 8\.58 GB of memory"):
        planned_run(replace(config, max_memory=9.0), None, print, 8.0)
    with pytest.raises(UserError, match=r"^--memory: nothing fits into 0\.068 GB"):
        planned_run(replace(config, max_memory=None), None, print, 0.1)
    with pytest.raises(UserError, match="--memory -1: must be a number above 0"):
        planned_run(config, None, print, -1.0)


def test_a_model_that_is_here_is_planned_for_another_mac_as_its_config(tmp_path):
    folder, notes = make_model(tmp_path / "m"), []
    config = TrainConfig(model=str(folder), run="r")
    found = planned_run(config, 64, notes.append, 16.0)
    alone = tmp_path / "config.json"
    alone.write_bytes((folder / "config.json").read_bytes())
    assert found.choice == planned_run(replace(config, model=str(alone)), 64, print, 16.0).choice
    assert len(notes) == 1


@pytest.mark.parametrize("bits", [4, None])
def test_a_config_alone_gives_the_plan_of_the_model(tmp_path, bits, monkeypatch):
    monkeypatch.setattr(plan_without_files, "has_gpu", lambda: False)
    folder = make_model(tmp_path / "m", "qwen3_moe", bits)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((folder / "config.json").read_bytes())
    for name in (alone, alone / "config.json"):
        notes: list[str] = []
        found = planned(notes, model=str(name), seq_len=64).workload
        assert "only the config is here" in notes[0]
        config = TrainConfig(model=str(folder), max_memory=500.0, force=True)
        data = DataSizes(lengths=(64,))
        here = workload_of(config, facts_of(folder, 4), data, process_here())
        assert found.facts == here.facts
        assert found.training == here.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unheard-of"}, "config.json: mlx-lm cannot build this model"),
        ({"num_attention_heads": None}, "config.json: mlx-lm cannot build this model"),
        ({"vocab_size": -1}, "config.json: vocab_size -1: must be a whole number"),
        ({"model_type": None}, "config.json: has no model_type"),
    ],
)
def test_a_broken_config_is_refused_in_one_line(config_json, capsys, changes, message):
    path = config_json(**changes)
    assert call("plan", "--model", path) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_adapters_are_checked_against_the_model():
    with pytest.raises(UserError, match=r"--lora-targets x_proj: no block has it; did you mean"):
        planned(model="llama-1b", lora_targets=("x_proj",))
    with pytest.raises(UserError, match=r"--lora-targets up_proj: only routed experts have it"):
        planned(model="qwen3-30b-a3b", lora_targets=("up_proj",))
    with pytest.raises(UserError, match=r"--lora-layers 99: the model has 16 blocks; use 16 or"):
        planned(model="llama-1b", lora_layers=99)
    with pytest.raises(UserError, match="--seq-len 0: must be at least 1"):
        planned(model="llama-1b", seq_len=0)


def test_lora_on_the_embedding_and_the_head_counts():
    plain, both = (
        planned(model="llama-1b", lora_targets=("q_proj", *more))
        for more in ((), ("embed_tokens", "lm_head"))
    )
    (embedding, head) = both.workload.training.vocabulary
    assert (embedding.is_embedding, head.is_embedding) == (True, False)
    facts = both.workload.facts
    sizes = [adapter_bytes(facts, each.workload.training) for each in (both, plain)]
    rank = both.workload.training.rank
    assert both.workload.training.rank == plain.workload.training.rank
    assert sizes[0] - sizes[1] == 2 * 4 * rank * (facts.vocabulary + facts.hidden)


def test_models_that_cannot_be_split_are_planned_whole(monkeypatch):
    monkeypatch.setattr(plan_without_files, "WHOLE", ("gemma4",))
    settings = {"model": "gemma4-e2b", "max_memory": 60.0}
    assert planned(**settings).choice.option.plan.engine == "fused"
    with pytest.raises(UserError, match="nothing fits into"):
        planned(model="gemma4-31b", max_memory=20.0)


def test_experts_cost_adapters_only_if_they_are_asked_for():
    few, many = (
        planned(model="qwen3-30b-a3b", lora_experts=experts).choice.option.estimate.components
        for experts in (False, True)
    )
    assert many["adapters"] > 10 * few["adapters"]


@pytest.mark.parametrize("objective", [*OBJECTIVES, "scores"])
def test_texts_go_together_as_the_objective_wants(objective):
    """The settings know it without MLX, which the objectives need."""
    settings = {"soft": {"reward_model": "run:r"},
                "scores": {"objective": "reward", "reward_loss": "scores"}}  # fmt: skip
    config = TrainConfig(**({"objective": objective} | settings.get(objective, {})))
    found = objective_of(config)
    assert config.texts_together == found.rows_together
    assert (config.objective in SCORED_FIRST) == ("others" in found.phases)


@pytest.mark.parametrize("objective", ["dpo", "kto", "grpo", "reward"])
def test_other_objectives_have_plans_too(objective):
    assert planned(model="llama-1b", objective=objective).choice.option.needed_bytes > 0


def test_a_distillation_without_a_teacher_is_refused(capsys):
    assert call("plan", "--objective", "distill", "--model", "llama-8b") == 2
    assert "error: --teacher is missing" in capsys.readouterr().err


def test_an_8b_shape_with_its_whole_weights_fits_into_12_gb(config_json):
    """Its weights in bfloat16, their float32 masters, gradients and Adam's states on disk."""
    config = config_json(**SHAPES["llama-3.1-8b"])
    settings = {"model": str(config), "adapter": "full", "dtype": "bfloat16", "max_memory": 12.0}
    option = planned(seq_len=512, **settings).choice.option
    assert (option.plan.engine, option.plan.spill) == ("streamed", True)
    assert option.needed_bytes < 12e9


def test_whole_weights_of_a_quantized_model_are_not_planned():
    with pytest.raises(UserError, match=r"--adapter full: llama-8b is quantized"):
        planned(model="llama-8b", adapter="full")
