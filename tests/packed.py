"""Random AWQ and GPTQ layers and models, packed as AutoAWQ and AutoGPTQ do, and what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.conftest import TINY, make_model

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output in each place of a word
Arrays = dict[str, np.ndarray]


def gptq_words(values: np.ndarray, bits: int) -> np.ndarray:
    """(N, M) integers -> (N * b / 32, M), as the loops of AutoGPTQ pack neighboring rows."""
    found = np.zeros((len(values) * bits // 32, values.shape[1]), np.uint64)
    for row, each in enumerate(values.astype(np.uint64)):
        word, place = divmod(row * bits, 32)
        found[word] |= (each << np.uint64(place)) & np.uint64(0xFFFFFFFF)
        if place + bits > 32:  # only with 3 bits
            found[word + 1] |= each >> np.uint64(32 - place)
    return found.astype(np.uint32).view(np.int32)


def awq_words(values: np.ndarray) -> np.ndarray:
    """(N, M) integers of 4 bits -> (N, M / 8), as AutoAWQ packs neighboring columns."""
    found = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for place, column in enumerate(AWQ_ORDER):
        found |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return found.view(np.int32)


def packed_layer(
    shape: tuple[int, int], seed: int, method: str, bits: int, group: int, stored_less: int
) -> tuple[Arrays, np.ndarray]:
    """The tensors of a layer, and its weight (O, I) in float64.

    shape: (O, I). stored_less: what qzeros has less than the zero points.
    """
    (outputs, inputs), random = shape, np.random.default_rng(seed)
    values = random.integers(0, 1 << bits, (inputs, outputs))
    zeros = random.integers(1, 1 << bits, (inputs // group, outputs))
    scales = (random.uniform(0.5, 1.5, zeros.shape) * 0.6 / (1 << bits)).astype(np.float16)
    places = np.arange(inputs) // group
    weight = (scales[places].astype(np.float64) * (values - zeros[places])).T
    if method == "awq":
        return {"qweight": awq_words(values), "qzeros": awq_words(zeros), "scales": scales}, weight
    return {
        "qweight": gptq_words(values, bits),
        "qzeros": np.ascontiguousarray(gptq_words((zeros - stored_less).T, bits).T),
        "scales": scales,
        "g_idx": places.astype(np.int32),
    }, weight


def make_packed(
    folder: Path, architecture: str = "llama", method: str = "gptq", bits: int = 4, **settings: Any
) -> dict[str, mx.array]:
    """Write an AWQ or GPTQ model with Hugging Face's names; return its weights, dense in float32.

    settings: of its quantization_config.
    """
    make_model(folder, architecture, bits=None, **TINY | {"head_dim": 16})
    less = int(method == "gptq" and settings.get("checkpoint_format") != "gptq_v2")
    plain: dict[str, np.ndarray] = {}
    for name, array in mx.load(str(folder / "model.safetensors")).items():
        if "switch_mlp" in name:
            for expert, each in enumerate(array):
                plain[name.replace("switch_mlp", f"experts.{expert}")] = np.array(each)
        else:
            plain[name] = np.array(array)
    written: dict[str, Any] = {}
    dense: dict[str, mx.array] = {}
    for seed, (name, array) in enumerate(plain.items()):
        layer = name.removesuffix(".weight")
        if not layer.endswith("_proj"):
            written[name] = mx.array(array).astype(mx.float16)
            dense[name] = written[name].astype(mx.float32)
            continue
        parts, weight = packed_layer(array.shape, seed, method, bits, 32, less)
        written |= {f"{layer}.{part}": mx.array(found) for part, found in parts.items()}
        written[f"{layer}.bias"] = mx.zeros(len(array), mx.float16)  # as AutoGPTQ does
        dense[name] = mx.array(weight.astype(np.float32))
    mx.save_safetensors(str(folder / "model.safetensors"), written, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method, "bits": bits, "group_size": 32, **settings
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return dense
