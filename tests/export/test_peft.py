"""Files exported for PEFT; tests/interop loads them with PEFT itself."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_model
from tests.export.runs import ALPHA, make_trained
from your_ai.config.adapter_facts import LORA
from your_ai.errors import UserError
from your_ai.export import peft

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


def test_one_matrix_is_in_memory_at_once(tiny_model, tmp_path):
    trained = make_trained(tiny_model, lora_targets=["all-linear"], lora_layers="all", lora_rank=64)
    sizes = [array.nbytes for array in trained.adapter.arrays.values()]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    peft.write(trained, tmp_path / "out")
    assert mx.get_peak_memory() - before < 3 * max(sizes) < sum(sizes) / 3


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
    settings = peft.read_settings(tmp_path / "adapter_config.json", config)
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


# --- Selection of layers


def adapted(said, modules):
    """The layers that PEFT adapts with these settings, according to peft."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, **said}
    return peft.targeted(peft.read_settings("adapter_config.json", config), modules)


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


PATH = Path("adapter_config.json")
# PEFT 0.21 writes this for an adapter without special settings.
PLAIN = {
    "task_type": "CAUSAL_LM", "peft_type": "LORA", "auto_mapping": None, "peft_version": "0.21.2",
    "base_model_name_or_path": "org/model", "revision": None, "inference_mode": True, "r": 4,
    "target_modules": ["q_proj", "up_proj"], "exclude_modules": None, "lora_alpha": 8,
    "lora_dropout": 0.05, "fan_in_fan_out": False, "bias": "none", "use_rslora": False,
    "modules_to_save": None, "init_lora_weights": True, "layers_to_transform": None,
    "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": None,
    "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {},
    "eva_config": None, "corda_config": None, "lora_ga_config": None, "use_dora": False,
    "velora_config": None, "alora_invocation_tokens": None, "use_qalora": False,
    "qalora_group_size": 16, "monteclora_config": None, "layer_replication": None,
    "lora_bias": False, "target_parameters": None, "use_bdlora": None, "arrow_config": None,
    "kasa_config": None, "ensure_weight_tying": False,
}  # fmt: skip
PATHS = [
    f"model.layers.{block}.{name}"
    for block in range(3)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
] + ["lm_head"]


def read(**changes):
    return peft.read_settings(PATH, PLAIN | changes)


def targeted(**changes):
    return sorted(peft.targeted(read(**changes), PATHS))


def test_a_plain_adapter_is_read():
    found = read()
    assert (found.base, found.rank, found.scale, found.dropout) == ("org/model", 4, 2.0, 0.05)
    assert found.kind is LORA


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", {"q_proj": 2.5}), ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]), ("rank_pattern", {"(": 8}), ("alpha_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": "8"}), ("modules_to_save", ["score"]), ("bias", "all"),
        ("bias", "lora_only"), ("lora_bias", True), ("peft_type", "IA3"),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "olora"), ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2], [1, 3]]), ("target_parameters", ["mlp.experts.up_proj"]),
        ("trainable_token_indices", [1, -2]), ("something_new", True), ("k" * 10_000, True),
        ("peft_type", "x" * 10_000), ("peft_type", "\x1b[2J"), ("bias", {"a": "b" * 10_000}),
        ("init_lora_weights", "y" * 10_000), ("r", 0), ("r", -1), ("r", True), ("r", 10**12),
        ("r", math.nan), ("r", 2.5), ("r", "4"), ("r", None), ("lora_alpha", 0),
        ("lora_alpha", math.nan), ("lora_alpha", math.inf), ("lora_alpha", [1]), ("r", 10**400),
        ("lora_dropout", 1), ("lora_dropout", math.nan), ("target_modules", None),
        ("target_modules", []), ("target_modules", [1]), ("target_modules", "("),
        ("target_modules", 7), ("target_modules", {"a": 1}), ("target_modules", ["a"] * 200_000),
        ("target_modules", ["a" * 10_000]), ("layers_to_transform", "0"),
        ("layers_to_transform", ["1"]), ("layers_to_transform", [1.5]),
        ("layers_to_transform", [0] * 200_000), ("layers_pattern", ["("]),
        ("layers_pattern", ["a"] * 1000),
    ],
    ids=range(52),
)  # fmt: skip
def test_settings_that_mlx_lm_adapters_do_not_support_are_refused_in_one_short_line(key, value):
    with pytest.raises(UserError, match=rf"^adapter_config\.json: {key[:20]}") as caught:
        read(**{key: value})
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


def test_a_target_that_the_model_does_not_have_is_an_error():
    with pytest.raises(UserError, match="has no layer q_prj; did you mean q_proj"):
        peft.missing_targets(read(target_modules=["q_prj", "c_attn"]), PATHS)


def test_targets_that_no_layer_has_are_named_if_others_match():
    note = peft.missing_targets(read(target_modules=["up_proj", "c_attn"]), PATHS)
    assert note == "adapter_config.json: target_modules: the model has no layer c_attn"
    assert peft.missing_targets(read(target_modules=["up_proj"]), PATHS) == ""


def test_the_first_pattern_that_matches_gives_a_layer_its_rank_and_alpha():
    settings = read(
        rank_pattern={"layers.1.self_attn.q_proj": 2, "model.layers.[12].*": 16, "roj": 99},
        alpha_pattern={"up_proj": 3},
    )
    paths = [PATHS[0], PATHS[2], PATHS[3], PATHS[5]]
    assert peft.sizes_of(settings, paths) == {
        "model.layers.0.self_attn.q_proj": (4, 2.0),
        "model.layers.0.mlp.up_proj": (4, 0.75),
        "model.layers.1.self_attn.q_proj": (2, 4.0),
        "model.layers.1.mlp.up_proj": (16, 3 / 16),
    }


def test_a_pattern_of_ranks_that_takes_long_is_refused(monkeypatch):
    monkeypatch.setattr(peft, "MATCH_S", 0.05)
    settings = read(rank_pattern={r"(.|..|...)*(?<!j)": 2})
    with pytest.raises(UserError, match="a pattern takes more than"):
        peft.sizes_of(settings, PATHS)


# --- Which layers PEFT adapts


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"target_modules": ["up_proj"]}, [2, 5, 8]),
        ({"target_modules": ["p_proj"]}, []),
        ({"target_modules": ["up_proj"], "layers_to_transform": [2]}, [8]),
        ({"target_modules": ["up_proj"], "layers_to_transform": 0}, [2]),
        (
            {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
            [3],
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h"]}, []),
        ({"target_modules": [PATHS[0]], "layers_to_transform": [2]}, [0]),  # a full path
        ({"target_modules": r".*\.[02]\.mlp\..*"}, [2, 8]),
        ({"target_modules": "all-linear"}, range(9)),  # without the head
        ({"target_modules": "all-linear", "exclude_modules": ["q_proj", "o_proj"]}, [2, 5, 8]),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*\.[01]\..*"}, [6]),
    ],
)
def test_layers_are_adapted_by_ends_of_names_whole_patterns_and_blocks(said, wanted):
    assert targeted(**said) == sorted(PATHS[index] for index in wanted)


# --- Malicious or broken settings


@pytest.mark.parametrize(
    "pattern", [r"(.|..|...)*(?<!j)", r"(?:(?:.|..)*(?:.|..)*)*[^a-z]", r"(\w+\.?)+!"]
)
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_a_slow_pattern_is_stopped_in_time(monkeypatch, key, pattern):
    monkeypatch.setattr(peft, "MATCH_S", 0.3)
    others = {"target_modules": ["up_proj"], "layers_to_transform": [1]}
    began = time.process_time()
    with contextlib.suppress(UserError):  # regex matches some of them quickly
        targeted(**others | {key: pattern})
    assert time.process_time() - began < 5


def test_a_slow_pattern_is_reported(monkeypatch):
    monkeypatch.setattr(peft, "MATCH_S", 0.3)
    with pytest.raises(UserError, match=r"^adapter_config\.json: a pattern takes more than 0\.3 s"):
        targeted(target_modules=r"(.|..|...)*(?<!j)")


@pytest.mark.parametrize(
    "pattern", ["(" * 50_000, "(?:" * 2000 + "a" + ")*" * 2000, "[a" * 5000, "a" * 200_000, "(?1)"]
)
def test_an_invalid_pattern_is_refused(pattern):
    with pytest.raises(UserError, match="target_modules: ") as caught:
        read(target_modules=pattern)
    assert len(str(caught.value)) < 200


def test_many_names_are_matched_quickly():
    names = [f"layer_{index}" for index in range(99_000)] + ["up_proj"]
    linears = [f"model.layers.{block}.mlp.up_proj" for block in range(500)]
    began = time.process_time()
    found = peft.targeted(read(target_modules=names), linears)
    assert time.process_time() - began < 2
    assert found == set(linears)


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(st.text(max_size=5), SCALAR)


@given(st.dictionaries(st.sampled_from(peft.READ[1:]), JSON, max_size=4))
def test_any_config_is_read_or_refused(changes):
    try:
        settings = read(**changes)
        found = peft.targeted(settings, PATHS)
    except UserError:
        return
    assert found <= set(PATHS)
    assert 1 <= settings.rank <= 1e9
    assert math.isfinite(settings.scale)
    assert 0 <= settings.dropout < 1
