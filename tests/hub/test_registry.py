"""Facts about the models with an alias, without their files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from your_ai.gates.untrusted import Entry
from your_ai.hub.built_tensors import tensors_built
from your_ai.hub.registry import (
    TENSORS,
    Known,
    alias_of,
    aliases_like,
    config_of,
    download_text,
    known,
    nearest_aliases,
    numbers,
    quantization_of,
    unpacked,
)

MODELS = list(known().values())


def test_every_model_family_is_in_the_registry():
    families = {alias.split("-")[0] for alias in known()}
    assert families == {
        *("llama", "qwen2.5", "qwen3", "qwen3.5", "qwen3.6", "qwen3.8", "mistral", "ministral3"),
        *("gemma2", "gemma3", "gemma3n", "gemma4", "phi3.5", "phi4", "smollm2", "smollm3"),
        *("gpt", "lfm2.5", "granite4", "granite4.1", "glm4", "glm4.5", "glm4.7", "olmo3"),
        *("deepseek", "nemotron3"),
    }


def test_no_repository_has_two_aliases():
    assert len({model.repo for model in MODELS}) == len(MODELS)


# Published numbers of parameters, in billions. Those of models that also read images count less
# here, because mlx-lm leaves that part out.
PUBLISHED = {
    "llama-8b": 8.03, "llama-1b": 1.24, "llama-3b": 3.21, "llama-70b": 70.55,
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-7b": 7.62, "mistral-7b": 7.25,
    "qwen3-0.6b": 0.60, "qwen3-4b": 4.02, "qwen3-8b": 8.19, "qwen3-14b": 14.8, "qwen3-32b": 32.8,
    "qwen3-30b-a3b": 30.5, "gemma2-2b": 2.61, "gemma2-9b": 9.24, "gemma3-1b": 1.00,
    "gemma4-26b-a4b": 25.2, "gemma4-31b": 30.7, "phi3.5-mini": 3.82, "phi4": 14.7,
    "phi4-mini": 3.8, "smollm2-135m": 0.135, "smollm2-360m": 0.362, "smollm2-1.7b": 1.71,
    "smollm3-3b": 3.08, "gpt-oss-20b": 20.9, "ministral3-3b": 3.4, "ministral3-8b": 8.4,
    "ministral3-14b": 13.5, "lfm2.5-1.2b": 1.17, "granite4-tiny": 6.94, "granite4-small": 32.2,
    "olmo3-7b": 7.3, "qwen2.5-3b": 3.09, "qwen2.5-14b": 14.7, "qwen2.5-32b": 32.5,
    "qwen2.5-coder-7b": 7.62, "qwen3-coder-30b-a3b": 30.5, "qwen3-next-80b-a3b": 79.7,
    "gemma3-270m": 0.268, "gemma3-4b": 3.88, "gemma3-12b": 11.77, "gemma3-27b": 27.0,
    "gemma4-12b": 11.96, "gpt-oss-120b": 116.829, "lfm2.5-350m": 0.35, "granite4-350m": 0.35,
    "granite4.1-3b": 3.4, "mistral-small-24b": 23.6, "mistral-nemo-12b": 12.2,
    "deepseek-r1-1.5b": 1.78, "deepseek-r1-llama-8b": 8.03, "glm4-9b": 9.4, "glm4.5-air": 106.9,
    "nemotron3-nano-4b": 3.974, "nemotron3-nano-30b-a3b": 31.6,
}  # fmt: skip


@pytest.mark.parametrize("alias", PUBLISHED)
def test_tensors_have_the_published_number_of_parameters(alias):
    assert known()[alias].parameters / 1e9 == pytest.approx(PUBLISHED[alias], rel=0.015)


# Published bytes of the weights, of repositories that have no other parts. The headers of their
# files, and small tensors that are float32, are not counted here.
PUBLISHED_BYTES = {
    "granite4.1-3b": 2_127_162_429, "nemotron3-nano-4b": 2_237_078_664,
    "nemotron3-nano-30b-a3b": 17_775_342_336, "qwen3-0.6b": 335_450_584,
}  # fmt: skip


@pytest.mark.parametrize("alias", PUBLISHED_BYTES)
def test_tensors_have_the_published_number_of_bytes(alias):
    assert known()[alias].bytes_on_disk == pytest.approx(PUBLISHED_BYTES[alias], rel=0.0005)


def test_a_token_uses_a_part_of_a_mixture_of_experts():
    assert known()["llama-8b"].active_parameters == known()["llama-8b"].parameters
    assert known()["gpt-oss-20b"].active_parameters == pytest.approx(4.19e9, rel=0.01)
    assert known()["qwen3-30b-a3b"].active_parameters == pytest.approx(3.35e9, rel=0.01)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.alias)
def test_every_entry_says_what_it_was_checked_against(model: Known):
    assert model.checked
    assert model.licence


@pytest.mark.parametrize(
    ("name", "aliases"),
    [
        ("qwen3-4b", ["qwen3-4b"]),
        ("Qwen3-4B", ["qwen3-4b"]),
        ("qwen2.5:7b", ["qwen2.5-7b"]),
        ("gpt-oss:20B", ["gpt-oss-20b"]),
        ("smollm3", ["smollm3-3b"]),
        ("qwen2.5-coder:1", ["qwen2.5-coder-1.5b", "qwen2.5-coder-14b"]),
        ("qwen2:7b", []),
        ("", []),
    ],
)
def test_an_alias_is_found_as_people_type_it(name, aliases):
    """In any case, and with the colon of Ollama's names."""
    assert aliases_like(name) == aliases


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("lama-8b", "llama-8b"),
        ("Meta-Llama-3.1-8B-Instruct", "llama-8b"),
        ("qwen3-8B", "qwen3-8b"),
        ("mistral", "mistral-7b"),
    ],
)
def test_the_most_similar_alias_comes_first(name, first):
    near = nearest_aliases(name, ())
    assert near[0] == first
    assert len(near) <= 3


def test_a_dissimilar_name_has_no_similar_alias():
    assert nearest_aliases("xyzzy", ()) == []


def test_alias_of_finds_the_alias_of_a_repository():
    assert alias_of("mlx-community/phi-4-4bit") == "phi4"
    assert alias_of("someone/else") is None


def test_a_download_with_more_parts_is_larger_than_its_weights_here():
    assert download_text(known()["llama-8b"]) == "4.52 GB"
    assert download_text(known()["qwen3.5-9b"]) == "over 5.04 GB"


TOOL = Path(__file__).parents[2] / "tools" / "make_known_tensors.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_tool_writes(tool):
    """From mlx-lm's own models: so the tensors are exactly those that it loads."""
    assert (
        tool.written({m.alias: tool.parts_of(m) for m in known().values()}) == TENSORS.read_text()
    )


@pytest.mark.parametrize("alias", ["qwen3.5-35b-a3b", "gemma4-e2b", "gpt-oss-20b", "smollm2-135m"])
def test_unpacked_tensors_are_those_of_the_model(alias):
    model = known()[alias]
    entries, _ = tensors_built(config_of(model))
    assert {e.name: e.shape for e in entries} == {e.name: e.shape for e in model.tensors}


def test_packing_keeps_shapes_dtypes_and_quantization(tool):
    entries = [
        Entry("model.embed_tokens.weight", "BF16", (100, 64)),
        *(entry for i in (0, 1, 3) for entry in block(i)),
        Entry("model.scale", "BF16", ()),
        Entry("model.ids", "I32", (3,)),
    ]
    own = {f"model.layers.{i}.up": {"bits": 8, "group_size": 32} for i in (0, 1, 3)}
    parts = tool.packed(entries, {"bits": 4, "group_size": 64, "mode": "mxfp4", **own})
    assert parts[1][:2] == ("model.layers.", "0-1,3")
    assert sorted(unpacked(parts), key=str) == sorted(entries, key=str)
    settings = quantization_of(parts)
    assert settings["model.layers.3.up"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert settings["model.layers.0.down"] == {"bits": 4, "group_size": 32, "mode": "mxfp4"}


def block(index: int) -> list[Entry]:
    at = f"model.layers.{index}"
    return [
        Entry(f"{at}.up.weight", "U32", (16, 16)),
        Entry(f"{at}.up.scales", "BF16", (16, 2)),
        Entry(f"{at}.up.biases", "BF16", (16, 2)),
        Entry(f"{at}.down.weight", "U32", (8, 64, 8)),
        Entry(f"{at}.down.scales", "U8", (8, 64, 2)),
        Entry(f"{at}.norm.weight", "BF16", (64,)),
    ]


@pytest.mark.parametrize("text", ["0", "0-31", "0,2,4-6"])
def test_ranges_are_the_reverse_of_numbers(tool, text):
    assert tool.ranges(list(numbers(text))) == text


def test_the_file_is_small_and_valid():
    assert TENSORS.stat().st_size < 100_000
    assert json.loads(TENSORS.read_text()).keys() == known().keys()
