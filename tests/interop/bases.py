"""Models that transformers and mlx-lm both load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import EXTRA, make_model
from tests.export.runs import TOKENS
from your_ai.export.transformers_names import known_of

TOLERANCE = 1e-4  # of logits of about 10, from the same weights in float32
# Beside what tests.conftest says of an architecture.
MORE: dict[str, dict[str, Any]] = {
    "phi3": {"tie_word_embeddings": False, "rope_scaling": None, "pad_token_id": 0},
    "smollm3": {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 1], "pad_token_id": 0,
                "bos_token_id": 1},
}  # fmt: skip


# What tests.conftest makes, with weights that differ more than those of tests.export.
ARCHITECTURES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "phi3"),
    "smollm3",
)


def make_base(path: Path, architecture: str) -> Path:
    """A float32 model of three blocks, its files as those of the hub are.

    Its matrices are half of what others test with: there float32 alone makes a difference of
    1e-4, in torch as in MLX.
    """
    EXTRA.update({name: more for name, more in MORE.items() if name not in EXTRA})
    make_model(path, architecture, bits=None)
    weights = mx.load(str(path / "model.safetensors"))
    if architecture == "gemma3_text":  # whose head is the embedding in every model of the hub
        del weights["lm_head.weight"]
    for name in [name for name in weights if "switch_mlp" in name]:  # mlx-lm's name for them
        for index, expert in enumerate(weights.pop(name)):
            weights[name.replace("switch_mlp", f"experts.{index}")] = expert
    weights = {name: w / 2 if w.ndim > 1 else w for name, w in weights.items()}
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "pt"})
    return path


def as_torch(array: mx.array) -> torch.Tensor:
    return torch.from_numpy(np.array(array))


def load(folder: Path) -> Any:
    """transformers' model of a folder in float32; nothing in it is missing or left over."""
    model, told = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not {name: keys for name, keys in told.items() if keys}
    config = json.loads((folder / "config.json").read_text())
    known = known_of(config)
    assert known is None or type(model).__name__ == known.head
    return model.eval()


def torch_logits(model: Any) -> torch.Tensor:
    """Of TOKENS, (2, 24, V)."""
    with torch.no_grad():
        return model(as_torch(TOKENS).long()).logits


def largest(ours: mx.array, theirs: torch.Tensor) -> float:
    """The largest difference."""
    return (as_torch(ours) - theirs).abs().max().item()
