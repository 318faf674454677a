"""Tensors of a config.json, from mlx-lm's models."""

from __future__ import annotations

import pytest

from tests.conftest import EXTRA, SMALL
from your_ai.hub.built_tensors import tensors_built

DENSE = {**SMALL, "model_type": "llama", "tie_word_embeddings": False}
MIXTURE = {**SMALL, **EXTRA["qwen3_moe"], "model_type": "qwen3_moe"}
UP = "model.layers.0.mlp.up_proj"


def shapes(config, *names: str) -> list[tuple[str, tuple[int, ...]] | None]:
    found = {entry.name: (entry.kind, entry.shape) for entry in tensors_built(config)[0]}
    return [found.get(name) for name in names]


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"bits": 4, "group_size": 64}, [("U32", (128, 8)), ("F32", (128, 1)), ("F32", (128, 1))]),
        ({"bits": 8, "group_size": 32}, [("U32", (128, 16)), ("F32", (128, 2)), ("F32", (128, 2))]),
        ({"bits": 4, "mode": "mxfp4"}, [("U32", (128, 8)), ("U8", (128, 2)), None]),
        ({"bits": 4, "mode": "nvfp4"}, [("U32", (128, 8)), ("U8", (128, 4)), None]),
        ({"bits": 8, "mode": "mxfp8"}, [("U32", (128, 16)), ("U8", (128, 2)), None]),
        ({"bits": 4, "group_size": 64, UP: {"bits": 6, "group_size": 32}},
         [("U32", (128, 12)), ("F32", (128, 2)), ("F32", (128, 2))]),
        ({"bits": 4, "group_size": 64, UP: False}, [("F32", (128, 64)), None, None]),
        ({"bits": 4, "group_size": 128}, [("F32", (128, 64)), None, None]),
    ],
)  # fmt: skip
def test_layers_are_quantized_as_the_config_says(quantization, expected):
    config = {**DENSE, "quantization": quantization}
    names = [f"{UP}.{leaf}" for leaf in ("weight", "scales", "biases")]
    assert shapes(config, *names) == expected


def test_layers_that_an_architecture_quantizes_in_its_own_way_are_in_the_result():
    _, completed = tensors_built({**MIXTURE, "quantization": {"bits": 4, "group_size": 64}})
    assert completed["quantization"]["model.layers.0.mlp.gate"] == {"bits": 8, "group_size": 64}
    assert "model.layers.0.mlp.gate" not in MIXTURE


def test_a_tied_head_is_left_out():
    assert shapes(DENSE, "lm_head.weight") == [("F32", (768, 64))]
    assert shapes({**DENSE, "tie_word_embeddings": True}, "lm_head.weight") == [None]
    gemma = {**SMALL, **EXTRA["gemma3_text"], "model_type": "gemma3_text"}
    assert shapes(gemma, "lm_head.weight") == [None]
    assert shapes({**gemma, "tie_word_embeddings": False}, "lm_head.weight") != [None]


@pytest.mark.parametrize(
    "changes", [{"model_type": "nope"}, {"hidden_size": None}, {"quantization": {"bits": 99}}]
)
def test_what_mlx_lm_cannot_build_is_refused_in_one_line(changes):
    with pytest.raises(ValueError, match=r"^mlx-lm cannot build this model \(.+\)$"):
        tensors_built({**DENSE, **changes})
