"""Runs with a random adapter, made without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.conftest import change_json
from your_ai.config import build
from your_ai.hub.find import fingerprint
from your_ai.nets.layer_sizes import evened
from your_ai.nets.model import adapter_arrays, add_adapters, load_network, set_adapters
from your_ai.nets.saved_adapter import Trained, base_files, open_trained, put_adapter
from your_ai.run import checkpoint, folder
from your_ai.run.folder import RunFolder

TOKENS = mx.random.randint(2, 700, (2, 24), key=mx.random.key(3))
RANK, ALPHA = 4, 10.0  # unequal, and alpha / rank is not an exact float for every rank


def printed(capsys: Any) -> str:
    """What was written to stdout, then to stderr."""
    found = capsys.readouterr()
    return found.out + found.err


def make_run(base: Path, name: str = "r", **settings: Any) -> RunFolder:
    """Create a finished run on `base` in the current folder."""
    first = {"model": str(base), "data": "", "run": name, "lora_layers": 2, "lora_rank": RANK,
             "lora_targets": "q_proj"}  # fmt: skip
    config = build({**first, "lora_alpha": ALPHA, **settings}, "test")
    network, _ = load_network(base, mx.float32)
    adapters = add_adapters(network, config)
    arrays = {}
    mx.random.seed(7)
    for path, array in adapter_arrays(network).items():
        noise = mx.random.normal(array.shape)
        found = array * (1 + 0.2 * noise) if path.endswith(".m") else array + 0.05 * noise
        arrays[path] = found.astype(array.dtype)
    set_adapters(network, arrays)
    run = folder.create(config)
    record = {**adapters.config, "base_files": base_files(fingerprint(base))}
    checkpoint.save_adapter(run.adapter, *evened(arrays, record), step=3)
    return run


def make_trained(base: Path, name: str = "r", **settings: Any) -> Trained:
    make_run(base, name, **settings)
    return open_trained(name)


def change_config(adapter: Path, **settings: Any) -> None:
    """Change settings of an adapter."""
    change_json(adapter, checkpoint.ADAPTER_CONFIG, **settings)


def change_parameters(adapter: Path, **parameters: Any) -> None:
    """Change `lora_parameters` of an adapter."""
    config = json.loads((adapter / checkpoint.ADAPTER_CONFIG).read_text())
    change_config(adapter, lora_parameters=config["lora_parameters"] | parameters)


def logits(trained: Trained, adapted: bool = True) -> mx.array:
    """The logits of TOKENS in float32, (2, 24, V)."""
    network, _ = load_network(trained.base, mx.float32)
    if adapted:
        put_adapter(network, trained.adapter)
    return network(TOKENS)
