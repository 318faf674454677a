from __future__ import annotations

import json

import mlx.core as mx
import pytest

from tests.export.fused_runs import assert_same_bytes
from tests.export.runs import make_trained
from tests.export.transformers_bases import write_base
from your_ai.errors import UserError
from your_ai.export import peft
from your_ai.export.transformers_names import EXPERT_NAMES
from your_ai.export.untrained_run import import_adapter
from your_ai.nets.saved_adapter import open_trained

EXPERTS = tuple(f"switch_mlp.{name}" for name in EXPERT_NAMES)
PARTS = ("lora_A", "lora_B")
FILE = "adapter_model.safetensors"


def trained_on(folder, kind, *targets, layers="all"):
    base = write_base(folder / "base", kind)
    return make_trained(base, lora_targets=targets, lora_layers=layers)


def test_each_expert_has_its_own_matrices(tmp_path):
    trained = trained_on(tmp_path, "qwen3_moe", *EXPERTS)
    peft.write(trained, tmp_path / "out")
    found = mx.load(str(tmp_path / "out" / FILE))
    stack = trained.adapter.layers["model.layers.2.mlp.switch_mlp.down_proj"]
    for index in range(4):
        path = f"base_model.model.model.layers.2.mlp.experts.{index}.down_proj"
        assert mx.array_equal(found[f"{path}.lora_A.weight"], stack["lora_a"][index])
        assert mx.array_equal(found[f"{path}.lora_B.weight"], stack["lora_b"][index])
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["target_modules"] == sorted(EXPERT_NAMES)


@pytest.mark.parametrize(
    ("kind", "others"),
    [("qwen3_moe", ("q_proj",)), ("mixtral", ()), ("deepseek_v3", ("o_proj",))],
)
def test_experts_are_imported_bit_for_bit(tmp_path, kind, others):
    trained = trained_on(tmp_path, kind, *EXPERTS, *others)
    peft.write(trained, tmp_path / "out")
    import_adapter(tmp_path / "out", str(tmp_path / "base"), "back")
    assert_same_bytes(open_trained("back").adapter.arrays, trained.adapter.arrays)


@pytest.mark.parametrize(
    ("kind", "targets", "layers", "pattern"),
    [
        ("qwen3_moe", EXPERTS[:1], "all", "all their matrices, or none, and 8 matrices are not"),
        ("qwen3_moe", EXPERTS, 2, "experts of all blocks .* and 6 matrices are not"),
        ("qwen2_moe", EXPERTS, "all", "adapts experts, which PEFT does not adapt in qwen2_moe"),
    ],
    ids=["matrices", "blocks", "architecture"],
)
def test_experts_that_peft_cannot_adapt_are_refused(tmp_path, kind, targets, layers, pattern):
    trained = trained_on(tmp_path, kind, *targets, layers=layers)
    with pytest.raises(UserError, match=pattern):
        peft.write(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ("left out", r"has no tensors for .*experts\.1\.down_proj"),
        ("cut", r"switch_mlp.down_proj: does not adapt all experts alike"),
    ],
)
def test_an_adapter_of_which_an_expert_is_missing_or_differs_is_refused(tmp_path, change, pattern):
    peft.write(trained_on(tmp_path, "qwen3_moe", *EXPERTS), tmp_path / "out")
    arrays = mx.load(str(tmp_path / "out" / FILE))
    path = "base_model.model.model.layers.2.mlp.experts.1.down_proj"
    parts = {f"{path}.{part}.weight": arrays.pop(f"{path}.{part}.weight") for part in PARTS}
    if change == "cut":
        arrays |= parts | {f"{path}.lora_A.weight": parts[f"{path}.lora_A.weight"][:, :-1]}
    mx.eval(arrays)
    mx.save_safetensors(str(tmp_path / "out" / FILE), arrays, {"format": "pt"})
    with pytest.raises(UserError, match=pattern):
        import_adapter(tmp_path / "out", str(tmp_path / "base"), "back")


def test_without_restrictions_to_blocks_other_layers_are_named_in_full():
    modules = {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}
    layers = {"model.layers.2.self_attn.q_proj"}
    found = peft.with_experts(layers, {"model.layers.1.mlp.experts.*.w1"}, modules)
    assert found["target_modules"] == [*layers, "w1"]
    assert found["layers_to_transform"] is None
    assert peft.with_experts(layers, set(), modules)["layers_to_transform"] == [2]
