"""Checks of the numbers in a config.json: all valid ones pass, invalid ones are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import EXTRA, SMALL, json_values
from tests.hub.conftest import error_of
from your_ai.errors import UserError
from your_ai.gates.untrusted import Entry
from your_ai.hub.config_values import (
    MOST_BLOCKS,
    REAL,
    WHOLE,
    check_config_values,
    is_left,
    names_layer,
    quantization_of,
)
from your_ai.hub.registry import config_of, known

PATH = Path("config.json")
LLAMA = {"model_type": "llama", **SMALL}
# Unusual entries of published configs.
HONEST = {
    "null": {"head_dim": None, "num_key_value_heads": None, "rope_scaling": None, "n_inner": None},
    "openelm": {"num_query_heads": [12, 16], "num_kv_heads": [3, 4], "ffn_multipliers": [0.5, 4]},
    "hunyuan": {"moe_intermediate_size": [3072, 3072], "moe_topk": [8, 8], "num_experts": [64]},
    "gemma3n": {"intermediate_size": [8192] * 30, "hidden_size_per_layer_input": 256},
    "llama3.1": {"rope_scaling": {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0}},
    "phi3 long": {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2]}},
    "deepseek": {
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0}, "kv_lora_rank": 512,
    },
    "mamba": {"time_step_limit": [0.0, math.inf], "time_step_rank": "auto", "state_size": 16},
    "large base": {"rope_theta": 1e11, "rope_local_base_freq": 10000},
    "base of each block": {"rope_theta": [10000.0, 5e6]},
    "by attention": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "mixed bits": {
        "quantization": {
            "group_size": 64, "bits": 4, "mode": "affine", "lm_head": False,
            "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8},
        },
    },
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "mxfp4": {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}},
    "bitsandbytes": {"quantization_config": {"load_in_4bit": True, "llm_int8_threshold": 6.0}},
    "vision": {"text_config": dict(LLAMA), "vision_config": {"hidden_size": 1152, "depths": [2]}},
    "code beside": {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    "text wrapper": {"llm_config": {"hidden_size": 64}, "text_config": {}},
    "no experts": {"num_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 0},
    "no window": {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28},
    "minus one": {"pad_token_id": -1, "num_logits_to_keep": -1, "attn_window_size": -1},
    "long": {"max_position_embeddings": 10_485_760, "model_max_length": 10**30},
}  # fmt: skip


@pytest.mark.parametrize("alias", list(known()))
def test_configs_of_all_registry_models_pass(alias):
    check_config_values(PATH, config_of(known()[alias]))


@pytest.mark.parametrize("architecture", EXTRA)
def test_configs_of_all_test_architectures_pass(architecture):
    kind = architecture.removesuffix("-untied").removesuffix("-tied")
    check_config_values(PATH, {"model_type": kind, **SMALL, **EXTRA[architecture]})


@pytest.mark.parametrize("what", HONEST)
def test_unusual_entries_of_published_configs_pass(what):
    check_config_values(PATH, LLAMA | HONEST[what])


WRONG = [
    ("num_hidden_layers", 100_000_000),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", [3]),
    ("num_hidden_layers", "3"),
    ("num_hidden_layers", True),
    ("hidden_size", -64),
    ("hidden_size", 64.0),
    ("hidden_size", math.nan),
    ("hidden_size", 1 << 40),
    ("hidden_size", {"a": 64}),
    ("vocab_size", 0),
    ("vocab_size", 10**100),
    ("num_attention_heads", 0),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", -1),
    ("intermediate_size", [64, -1]),
    ("num_experts", 1 << 30),
    ("num_experts_per_tok", 9),
    ("rope_theta", 0),
    ("rope_theta", -1.0),
    ("rope_theta", math.inf),
    ("rope_theta", "10000"),
    ("rms_norm_eps", math.nan),
    ("rms_norm_eps", -1),
    ("rope_scaling", []),
    ("rope_scaling", {"factor": 0}),
    ("rope_scaling", {"factor": -math.inf}),
    ("rope_scaling", {"long_factor": [1.0, math.nan]}),
    ("rope_parameters", {"full_attention": {"rope_theta": -1}}),
    ("quantization", []),
    ("quantization", {"bits": 0, "group_size": 64}),
    ("quantization", {"bits": 4.5, "group_size": 64}),
    ("quantization", {"bits": 4, "group_size": 1 << 40}),
    ("quantization", {"bits": 4, "group_size": 64, "lm_head": {"bits": 10**9}}),
    ("quantization_config", "4bit"),
    ("text_config", []),
    ("text_config", {"num_hidden_layers": 10**9}),
    ("ssm_state_size", 1 << 60),
    ("num_anything", math.inf),
    ("model_type", "../../x"),
    ("model_type", ""),
    ("model_type", None),
    ("model_file", "code.py"),
]


@pytest.mark.parametrize(("key", "value"), WRONG, ids=range(len(WRONG)))
def test_the_error_names_the_key_of_an_impossible_value(key, value):
    config = LLAMA | {"head_dim": None, "num_local_experts": 8} | {key: value}
    text = error_of(check_config_values, PATH, config)
    assert text.startswith("config.json: ")
    assert key in text or "num_" in key
    assert len(text) < 300


def entries(*names: str) -> list[Entry]:
    return [Entry(name, "F32", (4,)) for name in names]


def test_a_config_with_a_few_more_blocks_than_the_files_passes():
    check_config_values(PATH, LLAMA | {"num_hidden_layers": 8}, entries("model.layers.3.a.weight"))


@pytest.mark.parametrize(
    ("blocks", "name", "message"),
    [
        (1000, "model.layers.2.a.weight", "num_hidden_layers 1000: .* have only 3 blocks"),
        (3, f"model.layers.{MOST_BLOCKS + 1}.a.weight", r"has a tensor model\.layers"),
        (3, f"model.layers.{'9' * 5000}.a.weight", r"has a tensor model\.layers"),
        (3, f"model.layers.0.experts.{10**9}.weight", r"has a tensor model\.layers"),
    ],
    ids=["far more blocks than in the files", "a block", "a huge block", "an expert"],
)
def test_impossible_numbers_of_blocks_and_names_of_tensors_are_refused(blocks, name, message):
    with pytest.raises(UserError, match=message):
        check_config_values(PATH, LLAMA | {"num_hidden_layers": blocks}, entries(name))


JSON = json_values()
KEYS = [*WHOLE, *REAL, "quantization", "quantization_config", "rope_scaling", "rope_parameters"]


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from([*KEYS, "text_config", "n_odd_size", "model_type"]), JSON))
def test_any_config_that_passes_has_values_within_bounds(config):
    config = json.loads(json.dumps({"model_type": "llama", **config}))
    try:
        check_config_values(PATH, config)
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017
        return
    for key, (least, most) in WHOLE.items():
        if isinstance(config.get(key), int | float | str):
            assert type(config[key]) is int
            assert least <= config[key] <= most
    for key in REAL:
        if isinstance(config.get(key), int | float | str):
            assert math.isfinite(config[key])


LAYER = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": 32},
        {"quant_method": "modelopt", "quantization": True},
        {"quant_method": "compressed-tensors", "format": "x", "ignore": 7},
        {"quant_method": ["mxfp4"]},
    ],
)
def test_settings_of_another_kind_say_nothing(settings):
    config = {"quantization_config": settings}
    assert quantization_of(config) == {}
    assert not is_left(LAYER, config)


def test_patterns_name_layers():
    assert names_layer("re:.*self_attn.*", LAYER)
    assert names_layer("model.layers.*.self_attn", LAYER)
    assert names_layer("self_attn", LAYER)
    assert not names_layer("re:.*mlp.*", LAYER)


@pytest.mark.timeout(5)
def test_patterns_that_take_forever_are_not_tried():
    assert not names_layer("re:(.*.*)*(x+)+y", LAYER * 20)
    assert not names_layer("re:" + ".*" * 500 + "!", LAYER)
