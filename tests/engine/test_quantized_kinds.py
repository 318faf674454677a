"""Models quantized in every way that MLX knows: gradients, sizes, and what cannot be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_adapters, load_model, quantize_model

from tests.architectures import PLANS, opened_with_adapters, outcome, write_model
from tests.conftest import change_json
from your_ai.config import TrainConfig
from your_ai.engine.weights import open_model
from your_ai.errors import UserError
from your_ai.hub.config_values import is_left
from your_ai.memory.facts import facts_of, facts_of_config
from your_ai.nets import dora
from your_ai.nets.model import add_adapters

WIDE = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32, "moe_intermediate_size": 128,
        "num_hidden_layers": 2}  # fmt: skip
AFFINE = [(2, 32), (3, 64), (4, 128), (5, 32), (6, 64), (8, 128)]
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
KINDS: dict[str, dict[str, Any]] = {
    **{f"{b} bits in {g}": {"bits": b, "group_size": g, "mode": "affine"} for b, g in AFFINE},
    **{mode: {"bits": b, "group_size": g, "mode": mode} for mode, (b, g) in FLOATS.items()},
}  # fmt: skip
MIXED = {
    "v_proj": {"bits": 8, "group_size": 32, "mode": "affine"},
    "k_proj": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
    "down_proj": {"bits": 3, "group_size": 64, "mode": "affine"},
    "o_proj": False,
}
NVFP4, MXFP8 = KINDS["nvfp4"], KINDS["mxfp8"]
# The `quantization_config` of other libraries, and the settings that mlx-lm gives their layers.
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mxfp4": (
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        KINDS["mxfp4"],
    ),
    "fp8": ({"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [32, 32]}, MXFP8),
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "nvfp4-pack-quantized",
            "ignore": ["lm_head", "re:.*q_proj"],
        },
        NVFP4,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, NVFP4),
}


def write_quantized(folder: Path, kind: str, architecture: str = "llama") -> Path:
    """Write a small model that is quantized in one of KINDS, or `mixed`."""
    write_model(folder, architecture, **WIDE)
    model, config = load_model(folder, lazy=True)
    settings = dict(KINDS.get(kind, KINDS["4 bits in 128"]))

    own = getattr(model, "quant_predicate", lambda *_: True)

    def chosen(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        mixed = MIXED.get(path.rpartition(".")[2]) if kind == "mixed" else None
        return own(path, layer) if mixed is None else mixed

    model, config = quantize_model(model, config, **settings, quant_predicate=chosen)
    kept = [path for path, layer in model.named_modules() if type(layer) is nn.Linear]
    config["quantization"] |= dict.fromkeys(kept, False)
    return write(folder, model, config)


def write(folder: Path, model: nn.Module, config: dict[str, Any]) -> Path:
    arrays = {name: mx.array(array) for name, array in tree_flatten(model.parameters())}
    mx.eval(arrays)
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def assert_sizes_are_known(folder: Path) -> None:
    network = open_model(folder, mx.float32).network
    held = sum(array.nbytes for _, array in tree_flatten(network.parameters()))
    files = facts_of(folder, 4)
    config = facts_of_config(json.loads((folder / "config.json").read_text()), 4)
    assert files.weights_bytes == config.weights_bytes == held
    assert files.kinds[0].linears == config.kinds[0].linears
    assert files.quantized
    assert config.quantized


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *((kind, "llama") for kind in (*KINDS, "mixed")),
        *((kind, "qwen3_moe") for kind in ("3 bits in 64", "mxfp4", "nvfp4", "mixed")),
    ],
)
def test_every_kind_trains_alike_under_every_plan(tmp_path, kind, architecture):
    folder = write_quantized(tmp_path / "m", kind, architecture)
    assert_sizes_are_known(folder)
    references: dict[Any, Any] = {}
    assert {outcome(folder, plan, 16, references) for plan in PLANS} == {"exact"}


@pytest.mark.parametrize("kind", ["6 bits in 64", "mxfp4", "mxfp8", "nvfp4"])
def test_adapter_computes_the_same_in_mlx_lm(tmp_path, kind):
    folder, adapter = write_quantized(tmp_path / "m", kind), tmp_path / "a"
    opened, adapters = opened_with_adapters(folder)
    tokens = mx.arange(16)[None]
    ours = opened.network(tokens)
    adapter.mkdir()
    arrays = dict(tree_flatten(opened.network.trainable_parameters()))
    mx.save_safetensors(str(adapter / "adapters.safetensors"), arrays)
    (adapter / "adapter_config.json").write_text(json.dumps(adapters.config))
    theirs = load_adapters(load_model(folder)[0], str(adapter)).eval()(tokens)
    assert mx.linalg.norm(ours - theirs) < 1e-4 * mx.linalg.norm(theirs)


@pytest.mark.parametrize("method", METHODS)
def test_sizes_of_weights_that_other_libraries_quantized(tmp_path, method):
    folder = write_model(tmp_path / "m", "llama", **WIDE)
    found, settings = METHODS[method]
    model, config = load_model(folder, lazy=True)
    config["quantization_config"] = found

    def chosen(path: str, layer: nn.Module) -> bool:
        return hasattr(layer, "to_quantized") and not is_left(path, config)

    nn.quantize(model, **settings, class_predicate=chosen)
    write(folder, model, config)
    assert_sizes_are_known(folder)


@pytest.mark.parametrize(("kind", "noted"), [("3 bits in 64", True), ("4 bits in 128", False)])
def test_dora_adapter_that_mlx_lm_cannot_load_is_said(tmp_path, kind, noted):
    network = open_model(write_quantized(tmp_path / "m", kind), mx.float32).network
    add_adapters(network, TrainConfig(use_dora=True, lora_targets=("q_proj",), lora_rank=4))
    assert ("layers of 3 bits" in dora.limits(network)) == noted


def test_layers_that_cannot_be_trained_are_refused_at_load(tmp_path):
    folder = write_quantized(tmp_path / "m", "nvfp4")
    change_json(folder, "config.json", quantize_activations=True)
    with pytest.raises(UserError, match="rounds its inputs"):
        open_model(folder, mx.float32)


def test_global_scale_is_refused_on_the_cpu(tmp_path):
    folder = write_model(tmp_path / "m", "qwen3_moe", **WIDE)
    model, config = load_model(folder, lazy=True)
    model, config = quantize_model(model, config, 16, 4, mode="nvfp4", global_scale=True)
    write(folder, model, config)
    with pytest.raises(UserError, match="global scale"):
        open_model(folder, mx.float32)


def test_method_that_mlx_lm_cannot_load_is_named(tmp_path):
    folder = write_quantized(tmp_path / "m", "4 bits in 128")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization"]
    config["quantization_config"] = {"quant_method": "hqq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot load this model, quantized with hqq"):
        open_model(folder, mx.float32)


def test_ternary_model_is_refused_from_its_config():
    config = {"model_type": "llama", "quantization_config": {"quant_method": "bitnet"}, **WIDE}
    config |= {"num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 64}
    with pytest.raises(ValueError, match="ternary"):
        facts_of_config(config, 4)
