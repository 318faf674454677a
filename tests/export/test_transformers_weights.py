"""The tensors of transformers, read by mlx-lm's own code, are those that were exported."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import MODEL_REMAPPING

from tests.export.transformers_bases import INNER, NAMES, settings_of
from your_ai.export.transformers_names import (
    KNOWN,
    OUTER,
    Rename,
    TransformersModel,
    kind_of,
    known_of,
)
from your_ai.export.transformers_weights import applied, as_transformers, matches, renamed
from your_ai.modelfiles.shards import Lazy

# mlx-lm reads the experts of gpt_oss only in the quantized form that the hub has.
NO_WAY_BACK = ("gpt_oss",)


def network_of(config: dict[str, Any]) -> Any:
    kind = config["model_type"]
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(kind, kind)}")
    return module.Model(module.ModelArgs.from_dict(config))


def random_arrays(network: Any) -> dict[str, mx.array]:
    """Arrays that differ from each other in every value; those of norms are near 1."""
    mx.random.seed(5)

    def draw(_: str, array: mx.array) -> mx.array:
        return (1 if array.ndim == 1 else 0) + 0.3 * mx.random.uniform(-1, 1, array.shape)

    return dict(tree_flatten(tree_map_with_path(draw, network.parameters())))


def known(config: dict[str, Any]) -> TransformersModel:
    found = known_of(config)
    assert found is not None
    return found


def exported(config: dict[str, Any], arrays: dict[str, mx.array], input_bytes: int = 0) -> Lazy:
    lazy = Lazy(dict(arrays), input_bytes, config, keeps_vision=False, index={})
    return as_transformers(lazy, known(config))


def whole_name(name: str, kind: str) -> str:
    """The name in the checkpoint of the whole model, of which only the text model is exported."""
    if kind not in INNER:
        return name
    if kind == "gemma3n":
        return name.replace("model.", "model.language_model.", 1)
    return f"language_model.{name}"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_WAY_BACK])
def test_sanitize_gives_back_every_tensor(name):
    config = settings_of(name)
    network, kind = network_of(config), config["model_type"]
    arrays = random_arrays(network)
    theirs = exported(config, arrays)
    reader = network if kind in OUTER else network_of(theirs.config)
    whole = {whole_name(n, kind): array for n, array in theirs.arrays.items()}
    found = getattr(reader, "sanitize", dict)(whole)
    assert found.keys() == arrays.keys()
    for path, array in arrays.items():
        assert found[path].shape == array.shape, path
        assert mx.array_equal(found[path], array), path


@pytest.mark.parametrize("kind", KNOWN)
def test_every_rule_changes_a_tensor(kind):
    """Without this, the round trip would hold for rules that do nothing."""
    names = [name for name in NAMES if kind_of(settings_of(name)) == kind]
    used = set()
    for config in map(settings_of, names):
        arrays = dict(tree_flatten(network_of(config).parameters()))
        for rule in known(config).rules:
            used |= {rule} if any(matches(rule, name) for name in arrays) else set()
            arrays = applied(rule, arrays)
    assert names
    assert set(KNOWN[kind].rules) <= used


def test_the_experts_of_gpt_oss_alternate_as_transformers_takes_them_apart():
    config = settings_of("gpt_oss")
    arrays = random_arrays(network_of(config))
    found = exported(config, arrays).arrays
    theirs, ours = "model.layers.1.mlp.experts.", "model.layers.1.mlp.experts."
    for first, part in enumerate(("gate_proj", "up_proj")):
        weight = found[f"{theirs}gate_up_proj"][..., first::2].swapaxes(1, 2)
        assert mx.array_equal(weight, arrays[f"{ours}{part}.weight"])
        bias = found[f"{theirs}gate_up_proj_bias"][..., first::2]
        assert mx.array_equal(bias, arrays[f"{ours}{part}.bias"])
    down = found[f"{theirs}down_proj"].swapaxes(1, 2)
    assert mx.array_equal(down, arrays[f"{ours}down_proj.weight"])


def test_the_experts_of_a_stack_follow_each_other():
    config = settings_of("qwen3_moe")
    names = [*exported(config, random_arrays(network_of(config))).arrays]
    first = names.index("model.layers.0.mlp.experts.0.up_proj.weight")
    ups = [f"model.layers.0.mlp.experts.{index}.up_proj.weight" for index in range(4)]
    assert names[first : first + 4] == ups


def test_a_model_whose_names_are_equal_needs_no_more_memory():
    config = settings_of("llama")
    arrays = random_arrays(network_of(config))
    found = exported(config, arrays, input_bytes=1000)
    assert found.input_bytes == 1000
    assert found.arrays == arrays


def test_the_stack_of_experts_counts_as_memory():
    config = settings_of("qwen3_moe")
    arrays = random_arrays(network_of(config))
    stack = arrays["model.layers.0.mlp.switch_mlp.up_proj.weight"].nbytes
    assert exported(config, arrays, input_bytes=1000).input_bytes == 1000 + 2 * stack


@pytest.mark.parametrize(
    ("name", "part", "wanted"),
    [
        ("model.norm.weight", "norm", "model.x.weight"),
        ("model.norm.weight", "model.norm", "x.weight"),
        ("model.norm.weight", "weight", "model.norm.x"),
        ("model.q_norm.weight", "norm", "model.q_norm.weight"),
        ("model.norm_2.weight", "norm", "model.norm_2.weight"),
    ],
)
def test_a_part_is_made_of_whole_parts_of_a_name(name, part, wanted):
    assert renamed(name, part, "x") == wanted
    assert matches(Rename(part, "x"), name) == (name != wanted)


def test_config_is_that_of_the_text_model_with_the_tokens_of_the_whole():
    config = settings_of("gemma3") | {"eos_token_id": [1, 5], "torch_dtype": "float32"}
    config["text_config"]["torch_dtype"] = "bfloat16"
    found = exported(config, random_arrays(network_of(config))).config
    assert "text_config" not in found
    assert found["model_type"] == "gemma3_text"
    assert found["architectures"] == ["Gemma3ForCausalLM"]
    assert (found["eos_token_id"], found["torch_dtype"]) == ([1, 5], "float32")


@pytest.mark.parametrize("tied", [True, False])
def test_config_says_whether_the_head_is_the_embedding(tied):
    config = settings_of("llama") | {"tie_word_embeddings": tied}
    arrays = random_arrays(network_of(config))
    del config["tie_word_embeddings"]  # the two libraries have different defaults
    assert exported(config, arrays).config["tie_word_embeddings"] is tied


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "plamo2"},
        {},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral4"}},
        {"model_type": "mistral3", "text_config": []},
        {"model_type": "llama4_text"},  # where mlx-lm's code is for other models than in llama4
    ],
)
def test_other_models_are_not_known(config):
    assert known_of(config) is None
