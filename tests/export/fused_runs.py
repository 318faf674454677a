"""Runs with a random, untrained adapter, and reference weights fused by mlx-lm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten, tree_unflatten

from your_ai.config import build
from your_ai.hub.find import fingerprint
from your_ai.nets.model import adapter_arrays, add_adapters, load_network
from your_ai.nets.saved_adapter import Trained, base_files, open_trained
from your_ai.run import checkpoint, folder


def drawn_run(model: Path, data: Path, strength: float = 0.1, **settings: Any) -> Trained:
    """Create a finished run whose adapter changes the model's output.

    strength: standard deviation of lora_b, which is 0 in an untrained adapter.
    """
    first = {"model": str(model), "data": str(data), "run": "drawn", "lora_rank": 4,
             "lora_layers": 2, "lora_targets": "all-linear"}  # fmt: skip
    config = build(first | settings, "test")
    run = folder.create(config)
    network, _ = load_network(model, mx.float32)
    adapters = add_adapters(network, config)
    arrays = adapter_arrays(network)
    mx.random.seed(7)
    for name, array in arrays.items():
        if name.endswith("lora_b"):
            arrays[name] = strength * mx.random.normal(array.shape)
        elif name.endswith(".m"):
            arrays[name] = array * (1 + strength * mx.random.normal(array.shape))
    record = {**adapters.config, "base_files": base_files(fingerprint(model))}
    checkpoint.save_adapter(run.adapter, arrays, record, step=3)
    return open_trained(config.run)


def fused_by_mlx_lm(trained: Trained, dequantize: bool = False) -> dict[str, mx.array]:
    """The weights that `mlx_lm.fuse` writes, by name."""
    network, _ = mlx_lm.load(str(trained.base), adapter_path=str(trained.adapter.folder))
    layers = [(n, m.fuse(dequantize)) for n, m in network.named_modules() if hasattr(m, "fuse")]
    network.update_modules(tree_unflatten(layers))
    if dequantize:
        network = mlx_lm.utils.dequantize_model(network)
    return dict(tree_flatten(network.parameters()))


def weights_of(model: Path) -> dict[str, mx.array]:
    """The tensors of a model's files."""
    return {n: a for p in model.glob("model*.safetensors") for n, a in mx.load(str(p)).items()}


def assert_same_bytes(found: dict[str, mx.array], wanted: dict[str, mx.array]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert mx.array_equal(found[name].view(mx.uint8), array.view(mx.uint8)), name
