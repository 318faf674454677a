"""Generated models with the shapes of real models and random weights, for measuring only."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.config import TrainConfig
from your_ai.engine.build import Built, build_engine
from your_ai.engine.weights import Opened
from your_ai.errors import RunError
from your_ai.files import atomic_folder
from your_ai.gates.text import size_text
from your_ai.hub.config_values import GROUP_SIZE
from your_ai.hub.registry import config_of, known
from your_ai.memory.workload import Plan
from your_ai.nets import model
from your_ai.rng import derive_seed
from your_ai.run.checkpoint import save_arrays

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(
    hidden: int, blocks: int, heads: int, kv: int, mlp: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": hidden // heads,
        "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        **more,
    }


def of_known(alias: str, **more: Any) -> dict[str, Any]:
    """The configuration of a model of the registry, without its quantization."""
    return {**config_of(replace(known()[alias], quantization=None)), **more}


# The first four are not published models.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": llama(128, 4, 4, 2, 384, 1024),
    "small": llama(1024, 16, 16, 8, 2816, 32000),
    "narrow": llama(256, 6, 4, 2, 768, 16000),
    "wide": llama(1024, 4, 16, 4, 2816, 32000),
    "qwen2.5-0.5b": of_known("qwen2.5-0.5b"),
    "llama-3.2-1b": of_known("llama-1b", rope_scaling={**LLAMA3_ROPE, "factor": 32.0}),
    "llama-3.1-8b": of_known("llama-8b", rope_scaling={**LLAMA3_ROPE, "factor": 8.0}),
}


def make_shape(
    name: str,
    bits: int,
    dtype: str,
    folder: Path,
    on_note: Callable[[str], object] = lambda _: None,
) -> Path:
    """Return a model folder of this shape below `folder`; create it if it does not exist.

    on_note: called with what is written where, before it is.
    bits: 4 or 8 to quantize, 0 to leave the weights in `dtype`. The same arguments give the
    same weights. Each block is one shard, so the peak memory is little more than the model.
    """
    target = folder / f"{name}-{bits}bit-{dtype}"
    if (target / "config.json").is_file():
        return target
    write_shape(SHAPES[name], name, bits, dtype, target, on_note)
    return target


def write_shape(
    config: dict[str, Any],
    name: str,
    bits: int,
    dtype: str,
    target: Path,
    on_note: Callable[[str], object] = lambda _: None,
) -> None:
    """Write a model with this config.json and random weights to `target`; as `make_shape`."""
    config = dict(config)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(derive_seed("shape", name))
    network = module.Model(module.ModelArgs.from_dict(config))
    network.set_dtype(getattr(mx, dtype))
    if bits:
        config["quantization"] = {"group_size": GROUP_SIZE, "bits": bits, "mode": "affine"}
        nn.quantize(network, GROUP_SIZE, bits)
    shards: dict[str, dict[str, mx.array]] = {}
    for path, array in dict(tree_flatten(network.parameters())).items():
        block = path.split("layers.")[1].split(".")[0] if "layers." in path else "rest"
        shards.setdefault(block, {})[path] = array
    size = sum(array.nbytes for arrays in shards.values() for array in arrays.values())
    on_note(f"writing the shape {name} with random weights, {size_text(size)}, to {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(target) as temporary:
        for block, arrays in shards.items():
            save_arrays(temporary / f"model-{block}.safetensors", arrays)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def built_with_adapters(opened: Opened, config: TrainConfig, plan: Plan, folder: Path) -> Built:
    """Add adapters to a model, and build the engine of `plan`, with its files in `folder`.

    Raises RunError if the model does not train under it.
    """
    adapters = model.add_adapters(opened.network, config)
    built = build_engine(
        opened.network,
        adapters.dropout_keys,
        plan.engine,
        tensors=opened.tensors,
        spill=folder if plan.gradients_on_disk else None,
        kept=plan.kept,
        resident=plan.resident,
        blocks_ahead=plan.blocks_ahead,
    )
    if built.notices:
        raise RunError(built.notices[-1])
    return built
