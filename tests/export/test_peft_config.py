from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config.adapter_facts import LORA
from your_ai.errors import UserError
from your_ai.export import peft_config

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
LINEARS = [
    f"model.layers.{block}.{name}"
    for block in range(3)
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
] + ["lm_head"]


def read(**changes):
    return peft_config.read(PATH, PLAIN | changes)


def targeted(**changes):
    return sorted(peft_config.targeted(read(**changes), LINEARS))


def test_a_plain_adapter_is_read():
    found = read()
    assert (found.base, found.rank, found.scale, found.dropout) == ("org/model", 4, 2.0, 0.05)
    assert found.kind is LORA


def test_rslora_divides_alpha_by_the_root_of_the_rank():
    assert read(use_rslora=True).scale == 8 / math.sqrt(4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rank_pattern", {"q_proj": 2.5}),
        ("rank_pattern", {"q_proj": 0}),
        ("rank_pattern", ["q_proj"]),
        ("rank_pattern", {"(": 8}),
        ("alpha_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": "8"}),
        ("modules_to_save", ["lm_head"]),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("peft_type", "IA3"),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("fan_in_fan_out", True),
        ("layer_replication", [[0, 2], [1, 3]]),
        ("target_parameters", ["mlp.experts.up_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("something_new", True),
        ("r", 0),
        ("r", 2.5),
        ("r", "4"),
        ("r", None),
        ("lora_alpha", 0),
        ("lora_alpha", float("nan")),
        ("r", 10**400),
        ("lora_dropout", 1),
        ("target_modules", None),
        ("target_modules", []),
        ("target_modules", [1]),
        ("target_modules", "("),
        ("layers_to_transform", ["1"]),
        ("layers_pattern", ["("]),
    ],
)
def test_settings_that_mlx_lm_adapters_do_not_support_are_refused(key, value):
    with pytest.raises(UserError, match=rf"^adapter_config.json: {key}"):
        read(**{key: value})


@given(
    st.sampled_from(sorted(PLAIN)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=2),
    ),
)
def test_any_value_of_a_setting_is_read_or_refused(key, value):
    found, fault = set(), "adapter_config.json: "
    try:
        found = peft_config.targeted(read(**{key: value}), LINEARS)
    except UserError as error:
        fault = str(error)
    assert found <= set(LINEARS)
    assert fault.startswith("adapter_config.json: ")


def test_a_target_that_the_model_does_not_have_is_an_error():
    with pytest.raises(UserError, match="has no layer q_prj; did you mean q_proj"):
        peft_config.missing_targets(read(target_modules=["q_prj", "c_attn"]), LINEARS)


def test_targets_that_no_layer_has_are_named_if_others_match():
    note = peft_config.missing_targets(read(target_modules=["up_proj", "c_attn"]), LINEARS)
    assert note == "adapter_config.json: target_modules: the model has no layer c_attn"
    assert peft_config.missing_targets(read(target_modules=["up_proj"]), LINEARS) == ""


def test_the_first_pattern_that_matches_gives_a_layer_its_rank_and_alpha():
    settings = read(
        rank_pattern={"layers.1.self_attn.q_proj": 2, "model.layers.[12].*": 16, "roj": 99},
        alpha_pattern={"up_proj": 3},
    )
    paths = [LINEARS[0], LINEARS[2], LINEARS[3], LINEARS[5]]
    assert peft_config.sizes_of(settings, paths) == {
        "model.layers.0.self_attn.q_proj": (4, 2.0),
        "model.layers.0.mlp.up_proj": (4, 0.75),
        "model.layers.1.self_attn.q_proj": (2, 4.0),
        "model.layers.1.mlp.up_proj": (16, 3 / 16),
    }


def test_a_pattern_of_ranks_that_takes_long_is_refused(monkeypatch):
    monkeypatch.setattr(peft_config, "MATCH_S", 0.05)
    settings = read(rank_pattern={r"(.|..|...)*(?<!j)": 2})
    with pytest.raises(UserError, match="a pattern takes more than"):
        peft_config.sizes_of(settings, LINEARS)


# --- Which layers PEFT adapts


def test_names_match_the_ends_of_paths():
    assert targeted(target_modules=["up_proj"]) == [
        f"model.layers.{i}.mlp.up_proj" for i in (0, 1, 2)
    ]
    assert targeted(target_modules=["p_proj"]) == []


def test_layers_to_transform_limits_the_blocks():
    assert targeted(target_modules=["up_proj"], layers_to_transform=[2]) == [LINEARS[8]]
    assert targeted(target_modules=["up_proj"], layers_to_transform=0) == [LINEARS[2]]
    said = {"layers_to_transform": [1], "layers_pattern": "layers"}
    assert targeted(target_modules=["q_proj"], **said) == [LINEARS[3]]
    said = {"layers_to_transform": [1], "layers_pattern": ["blocks"]}
    assert targeted(target_modules=["q_proj"], **said) == []


def test_a_full_path_is_adapted_in_any_block():
    assert targeted(target_modules=[LINEARS[0]], layers_to_transform=[2]) == [LINEARS[0]]


def test_a_pattern_must_match_the_whole_path():
    assert targeted(target_modules=r".*\.[02]\.mlp\..*") == [LINEARS[2], LINEARS[8]]


def test_all_linear_means_all_layers_except_the_head():
    assert targeted(target_modules="all-linear") == sorted(LINEARS[:-1])


def test_excluded_layers_are_not_adapted():
    found = targeted(target_modules="all-linear", exclude_modules=["q_proj", "o_proj"])
    assert found == [LINEARS[2], LINEARS[5], LINEARS[8]]
    assert targeted(target_modules=["q_proj"], exclude_modules=r".*\.[01]\..*") == [LINEARS[6]]


# --- Malicious or broken settings


@pytest.mark.parametrize(
    "pattern",
    [
        r"(.|..|...)*(?<!j)",
        r"(?:(?:.|..)*(?:.|..)*)*[^a-z]",
        r"(\w+\.?)+!",
    ],
)
@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "layers_pattern"])
def test_a_slow_pattern_is_stopped_in_time(monkeypatch, key, pattern):
    monkeypatch.setattr(peft_config, "MATCH_S", 0.3)
    others = {"target_modules": ["up_proj"], "layers_to_transform": [1]}
    began = time.process_time()
    with contextlib.suppress(UserError):  # regex matches some of them quickly
        targeted(**others | {key: pattern})
    assert time.process_time() - began < 5


def test_a_slow_pattern_is_reported(monkeypatch):
    monkeypatch.setattr(peft_config, "MATCH_S", 0.3)
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
    found = peft_config.targeted(read(target_modules=names), linears)
    assert time.process_time() - began < 2
    assert found == set(linears)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", ["a"] * 200_000),
        ("target_modules", ["a" * 10_000]),
        ("target_modules", 7),
        ("target_modules", {"a": 1}),
        ("layers_pattern", ["a"] * 1000),
        ("layers_to_transform", [0] * 200_000),
        ("layers_to_transform", [1.5]),
        ("layers_to_transform", "0"),
        ("r", 10**12),
        ("r", -1),
        ("r", 1.5),
        ("r", True),
        ("r", "8"),
        ("r", math.nan),
        ("lora_alpha", math.nan),
        ("lora_alpha", math.inf),
        ("lora_alpha", [1]),
        ("lora_dropout", 1),
        ("lora_dropout", math.nan),
        ("peft_type", "x" * 10_000),
        ("peft_type", "\x1b[2J"),
        ("bias", {"a": "b" * 10_000}),
        ("init_lora_weights", "y" * 10_000),
        ("k" * 10_000, True),
    ],
    ids=range(24),
)
def test_an_absurd_value_is_refused_in_one_short_line(key, value):
    with pytest.raises(UserError, match=r"^adapter_config\.json: ") as caught:
        read(**{key: value})
    assert len(str(caught.value)) < 400
    assert str(caught.value).isprintable()


SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(st.text(max_size=5), SCALAR)


@given(st.dictionaries(st.sampled_from(peft_config.READ[1:]), JSON, max_size=4))
def test_any_config_is_read_or_refused(changes):
    try:
        settings = read(**changes)
        found = peft_config.targeted(settings, LINEARS)
    except UserError:
        return
    assert found <= set(LINEARS)
    assert 1 <= settings.rank <= 1e9
    assert math.isfinite(settings.scale)
    assert 0 <= settings.dropout < 1
