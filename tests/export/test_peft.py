"""Files exported for PEFT; tests/interop loads them with PEFT itself."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_model
from tests.export.runs import ALPHA, make_trained
from your_ai.errors import UserError
from your_ai.export import peft, peft_config

BLOCKS = [f"model.layers.{i}" for i in range(3)]
LINEARS = ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "shared.up_proj"]
MODULES = {"model.embed_tokens", "lm_head", *(f"{b}.{name}" for b in BLOCKS for name in LINEARS)}


@pytest.fixture
def trained(tiny_model):
    return make_trained(tiny_model)


def written(trained, target):
    peft.write(trained, target)
    arrays, metadata = mx.load(str(target / "adapter_model.safetensors"), return_metadata=True)
    return arrays, metadata, json.loads((target / "adapter_config.json").read_text())


def test_the_matrices_are_transposed_and_have_peft_names(trained, tmp_path):
    arrays, metadata, _ = written(trained, tmp_path / "out")
    path = "model.layers.2.self_attn.q_proj"
    prefix = f"base_model.model.{path}"
    ours = trained.adapter.layers[path]
    assert metadata == {"format": "pt"}
    assert mx.array_equal(arrays[f"{prefix}.lora_A.weight"], ours["lora_a"].T)
    assert mx.array_equal(arrays[f"{prefix}.lora_B.weight"], ours["lora_b"].T)
    assert len(arrays) == len(trained.adapter.arrays) == 4


def test_dora_magnitudes_are_exported(tiny_model, tmp_path):
    trained = make_trained(tiny_model, use_dora=True, lora_layers=1)
    arrays, _, config = written(trained, tmp_path / "out")
    path = "model.layers.2.self_attn.q_proj"
    found = arrays[f"base_model.model.{path}.lora_magnitude_vector"]
    assert mx.array_equal(found, trained.adapter.layers[path]["m"])
    assert config["use_dora"] is True


def test_the_config_names_the_adapted_layers(trained, tmp_path):
    _, _, config = written(trained, tmp_path / "out")
    said = ("peft_type", "task_type", "r", "lora_alpha", "target_modules", "layers_to_transform")
    assert [config[key] for key in said] == ["LORA", "CAUSAL_LM", 4, 10, ["q_proj"], [1, 2]]
    assert config["base_model_name_or_path"] is None  # a local folder is not a repository


def test_exported_files_contain_no_local_path(trained, tmp_path):
    peft.write(trained, tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path.parent).encode() not in path.read_bytes(), path.name


@pytest.mark.parametrize(
    ("alpha", "rank"), [(10.0, 3), (7.0, 49), (32.0, 6), (1.0, 3), (0.5, 4), (12.75, 7)]
)
def test_alpha_survives_the_rounding_of_the_scale(alpha, rank):
    found = peft.whole((alpha / rank) * rank)
    assert found == pytest.approx(alpha, rel=1e-12)
    assert isinstance(found, int) == alpha.is_integer()


@pytest.mark.parametrize("rank", [4, 6])
def test_rslora_is_exported_as_an_alpha_that_every_reader_divides_by_the_rank(
    tiny_model, tmp_path, rank
):
    """llama.cpp and others ignore use_rslora, so the exported alpha contains the scale."""
    trained = make_trained(tiny_model, use_rslora=True, lora_rank=rank)
    assert trained.adapter.scale == ALPHA / math.sqrt(rank)
    _, _, config = written(trained, tmp_path / "out")
    assert config["use_rslora"] is False
    assert config["lora_alpha"] / config["r"] == pytest.approx(trained.adapter.scale, rel=1e-15)
    settings = peft_config.read(tmp_path / "adapter_config.json", config)
    assert settings.scale == config["lora_alpha"] / rank
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"(rank {rank}, alpha 10, rsLoRA: scale {trained.adapter.scale:g})" in card


def test_experts_are_refused_before_anything_is_written(tmp_path):
    trained = make_trained(
        make_model(tmp_path / "m", "qwen3_moe"), lora_targets=("up_proj",), lora_experts=True
    )
    with pytest.raises(UserError, match="experts"):
        peft.write(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_no_files(trained, tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("[write] Unable to write 4096 bytes to file.")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(UserError, match=r"out: cannot be written .*free some disk"):
        peft.write(trained, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


# --- Selection of layers


def adapted(said, modules):
    """The layers that PEFT adapts with these settings, according to peft_config."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **said}
    return peft_config.targeted(peft_config.read("adapter_config.json", config), modules)


@given(st.sets(st.sampled_from(sorted(MODULES - {"model.embed_tokens"})), min_size=1))
def test_the_config_selects_exactly_the_adapted_layers(layers):
    assert adapted(peft.targets_of(layers, MODULES), MODULES) == layers


def test_layer_names_and_block_indices_are_preferred():
    layers = {f"{block}.self_attn.q_proj" for block in BLOCKS[1:]}
    assert peft.targets_of(layers, MODULES) == {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1, 2],
        "layers_pattern": "layers",
    }


def test_an_ambiguous_layer_name_is_written_as_a_full_path():
    layers = {"model.layers.2.mlp.up_proj"}
    found = peft.targets_of(layers, MODULES)
    assert found["target_modules"] == ["model.layers.2.mlp.up_proj"]
    assert found["layers_to_transform"] is None
