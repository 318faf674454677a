"""An exported adapter, put on the same model by PEFT, gives the logits that it gives in MLX."""

from __future__ import annotations

import json
import shutil

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import get_peft_model_state_dict

from tests.export.runs import logits, make_trained
from tests.export.test_peft import MODULES, PATH, PATHS, PLAIN
from tests.interop.bases import ARCHITECTURES, TOLERANCE, largest, load, make_base, torch_logits
from your_ai.export import peft
from your_ai.nets.model import load_network

pytestmark = pytest.mark.interop
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ONE = {"lora_targets": ("q_proj",)}
EVERYTHING = {"lora_targets": ("all-linear",), "lora_layers": "all", "use_dora": True}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def base(request, tmp_path_factory):
    return make_base(tmp_path_factory.mktemp("bases") / request.param, request.param)


def adapted(base, folder):
    """transformers' model with the adapter, which adapts what is in its file and no more."""
    model = PeftModel.from_pretrained(load(base), folder)
    names = mx.load(str(folder / "adapter_model.safetensors")).keys()
    assert get_peft_model_state_dict(model).keys() == names
    return model.eval()


@pytest.mark.parametrize("settings", [ONE, EVERYTHING], ids=["q_proj", "dora"])
def test_the_logits_are_those_of_mlx(base, tmp_path, settings):
    if base.name == "qwen3_moe" and settings == EVERYTHING:
        settings = {**settings, "lora_targets": ATTENTION}
    if base.name == "phi3" and settings == ONE:
        settings = {"lora_targets": ("qkv_proj",)}
    trained = make_trained(base, **settings)
    peft.write(trained, tmp_path / "out")
    plain = load(base)
    assert largest(logits(trained, adapted=False), torch_logits(plain)) < TOLERANCE
    ours, theirs = logits(trained), torch_logits(adapted(base, tmp_path / "out"))
    assert largest(ours, theirs) < TOLERANCE
    assert largest(ours, torch_logits(plain)) > 100 * TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_linear_layers_of_the_last_blocks(tmp_path, dtype):
    base = make_base(tmp_path / "base", "qwen2")
    settings = {"lora_targets": ("all-linear",), "lora_rank": 6, "adapter_dtype": dtype}
    trained = make_trained(base, **settings)
    peft.write(trained, tmp_path / "out")
    assert largest(logits(trained), torch_logits(adapted(base, tmp_path / "out"))) < TOLERANCE


def test_rslora_has_the_same_scale_in_peft(tmp_path):
    base = make_base(tmp_path / "base", "qwen2")
    trained = make_trained(base, use_rslora=True, lora_rank=6)
    peft.write(trained, tmp_path / "out")
    assert largest(logits(trained), torch_logits(adapted(base, tmp_path / "out"))) < TOLERANCE


def test_an_adapter_of_a_quantized_base_fits_the_dequantized_one(tiny_model, tmp_path):
    trained = make_trained(tiny_model, use_dora=True)
    peft.write(trained, tmp_path / "out")
    base = shutil.copytree(tiny_model, tmp_path / "base")
    network, config = load_network(tiny_model, mx.float32)
    weights = dict(tree_flatten(dequantize_model(network).parameters()))
    mx.save_safetensors(str(base / "model.safetensors"), weights, {"format": "pt"})
    kept = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (base / "config.json").write_text(json.dumps(kept))
    assert largest(logits(trained), torch_logits(adapted(base, tmp_path / "out"))) < TOLERANCE


# --- Our reading of PEFT's rule of which layers are adapted


def by_peft(settings, paths):
    config = LoraConfig(**{k: v for k, v in settings.items() if k not in ("peft_type",)})
    return {path for path in paths if check_target_module_exists(config, path)}


@given(st.sets(st.sampled_from(sorted(MODULES - {"model.embed_tokens"})), min_size=1))
def test_peft_takes_the_settings_for_exactly_the_layers(layers):
    assert by_peft(peft.targets_of(layers, MODULES), MODULES) == layers


@given(
    st.fixed_dictionaries(
        {
            "target_modules": st.lists(
                st.sampled_from([PATHS[0], PATHS[5], "q_proj", "mlp.up_proj", "proj", "x"]),
                min_size=1,
            )
            | st.sampled_from([r".*\.[02]\.mlp\..*", "q_proj", ".*q_proj"])
        },
        optional={
            "layers_to_transform": st.integers(0, 2) | st.lists(st.integers(0, 3)),
            "layers_pattern": st.sampled_from(["layers", ["layers"], ["blocks", "layers"], "h"]),
            "exclude_modules": st.sampled_from([["o_proj"], PATHS[:2], ".*2.*", [], "q_proj"]),
        },
    )
)
def test_settings_mean_to_us_what_they_mean_to_peft(settings):
    if isinstance(settings["target_modules"], str) or "layers_to_transform" not in settings:
        settings.pop("layers_to_transform", None)
        settings.pop("layers_pattern", None)  # PEFT refuses these together
    ours = peft.targeted(peft.read_settings(PATH, PLAIN | settings), PATHS)
    assert ours == by_peft(settings, PATHS)
