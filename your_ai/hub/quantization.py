"""How a config.json says that a model is quantized: in mlx-lm's words, or in another library's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from your_ai.hub.config_values import text_part

# As mlx-lm reads them, by the name of the method or of the format of compressed-tensors.
OTHER_METHODS: dict[str, dict[str, Any]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "nvfp4-pack-quantized": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "mxfp4-pack-quantized": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "pack-quantized": {"group_size": 32, "bits": 4, "mode": "affine"},
}
SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
UNSAFE = re.compile(r"\)[*+{?]|\\\d")  # repeated groups can take forever to match
MOST_PATTERN = 200
MLX_GROUPS = (128, 64, 32)


def method_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The `quantization_config` of another library than mlx-lm; empty if there is none."""
    found = config.get("quantization_config") or text_part(config).get("quantization_config")
    if config.get("quantization") or not isinstance(found, dict):
        return {}
    return found if found.get("quant_method") else {}


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the model's layers for MLX, as in `quantization`; empty if there are none.

    Weights that mlx-lm dequantizes when it loads them, as most of FP8, are not quantized.
    """
    if isinstance(own := config.get("quantization"), dict):
        return own
    found = method_of(config)
    name = str(found.get("quant_method"))
    if name == "compressed-tensors":
        name = str(found.get("format"))
    if name == "fp8" and found.get("scale_fmt") == "ue8m0":
        blocks = found.get("weight_block_size") or ()
        return OTHER_METHODS["mxfp8"] if blocks == [32, 32] else {}
    if name == "modelopt":
        settings = inner_part(found)
        is_nvfp4 = settings.get("quant_algo") == "NVFP4"
        return OTHER_METHODS["nvfp4-pack-quantized"] if is_nvfp4 else {}
    if name in ("awq", "gptq"):
        size = found.get("group_size") or MLX_GROUPS[0]
        group = next((each for each in MLX_GROUPS if size % each == 0), MLX_GROUPS[0])
        return {"group_size": group, "bits": found.get("bits") or 4, "mode": "affine"}
    return OTHER_METHODS.get(name, {})


def inner_part(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the settings are: ModelOpt has them one level deeper."""
    inner = found.get("quantization")
    return inner if isinstance(inner, dict) else found


def is_left(layer: str, config: Mapping[str, Any]) -> bool:
    """Whether another library has left a linear layer as it was, by its name in MLX.

    All of them leave embeddings, and the head unless they say so.
    """
    found = method_of(config)
    settings = inner_part(found)
    lists = [settings.get(key) for key in SKIPPED]
    names = [name for given in lists if isinstance(given, list) for name in given]
    if layer.endswith("embed_tokens") or (layer.endswith("lm_head") and not found.get("lm_head")):
        return True
    return any(names_layer(str(name), layer) for name in names)


def names_layer(pattern: str, layer: str) -> bool:
    """Whether an entry of a list of layers names this one: a part of its name, or a pattern."""
    if pattern.startswith("re:"):
        if UNSAFE.search(pattern) or len(pattern) > MOST_PATTERN:
            return False
        try:
            return re.match(pattern[3:], layer) is not None
        except re.error:
            return False
    if "*" in pattern:
        return fnmatch(layer, pattern) or fnmatch(layer, f"{pattern}.*")
    return f".{pattern}." in f".{layer}."
