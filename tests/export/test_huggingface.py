"""Writing the folder for transformers, without transformers."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest

from tests.export.fused_runs import assert_same_bytes, weights_of
from tests.export.runs import make_trained, printed
from tests.export.transformers_bases import write_base
from your_ai import cli
from your_ai.errors import UserError
from your_ai.export import huggingface
from your_ai.modelfiles import shards
from your_ai.nets.head import WEIGHT
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint

EVERYTHING = {"lora_targets": ("all-linear",), "lora_layers": "all", "lora_experts": True}


@pytest.mark.parametrize("stop", [30, 45, 60])
def test_an_export_stopped_within_a_stack_of_experts_continues(tmp_path, monkeypatch, stop):
    monkeypatch.setattr(shards, "SHARD_LEAST_BYTES", 30_000)
    trained = make_trained(write_base(tmp_path / "base", "qwen3_moe"), **EVERYTHING)
    list(huggingface.write(trained, tmp_path / "whole"))
    index = json.loads((tmp_path / "whole/model.safetensors.index.json").read_text())["weight_map"]
    stacks = [
        name.replace(".experts.0.", ".experts.{}.") for name in index if ".experts.0." in name
    ]
    assert any(len({index[stack.format(i)] for i in range(4)}) > 1 for stack in stacks)

    steps = huggingface.write(trained, tmp_path / "out")
    for _ in range(stop):
        found = next(steps)
    steps.close()
    assert not (tmp_path / "out").exists()
    *_, last = huggingface.write(trained, tmp_path / "out")
    assert last.kept_bytes > 0
    assert found.done_bytes < last.done_bytes == last.total_bytes
    assert_same_bytes(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole"))


def test_the_memory_limit_named_in_the_error_is_enough_for_experts(tmp_path):
    trained = make_trained(write_base(tmp_path / "base", "qwen3_moe"), **EVERYTHING)
    with pytest.raises(UserError) as caught:
        list(huggingface.write(trained, tmp_path / "out", max_memory_gb=0.05))
    least = float(str(caught.value).split("exporting this model needs at least ")[1].split()[0])
    list(huggingface.write(trained, tmp_path / "out", max_memory_gb=least))
    assert (tmp_path / "out/config.json").exists()


def test_an_architecture_that_transformers_lacks_is_refused_in_one_line(tmp_path, capsys):
    make_trained(write_base(tmp_path / "base", "minicpm"), name="other")
    before = {file.name for file in tmp_path.iterdir()}
    with pytest.raises(SystemExit) as caught:
        cli.main(["export", "other", "--to", "hf", "--out", str(tmp_path / "out")])
    assert caught.value.code == 2
    text = printed(capsys)
    assert "architecture minicpm is not supported" in text
    assert len(text.strip().splitlines()) == 1
    assert {file.name for file in tmp_path.iterdir()} == before


def test_a_reward_model_without_a_class_in_transformers_is_refused(tmp_path):
    trained = make_trained(write_base(tmp_path / "base", "olmoe"), objective="reward")
    arrays = {**trained.adapter.arrays, WEIGHT: mx.zeros((1, 32))}
    checkpoint.save_adapter(trained.adapter.folder, arrays, trained.adapter.config, 3)
    trained = open_trained(trained.folder.name)
    with pytest.raises(UserError, match=r"reward models of this architecture .* supported: llama"):
        list(huggingface.write(trained, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
