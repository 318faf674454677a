"""Measure the peak memory of a step of the models in architecture_peaks.json, under each plan.

    python tools/measure_architectures.py [NAME...]     measure, print, and write the file

The estimates were not fitted to these models, so how far they are off is how far they are off for
a new one: `tests/memory/test_kinds.py` compares them. Each model has random float32 weights; all of
its linear layers have adapters. A peak is MLX's, of the gradients of one micro-batch.
"""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from your_ai.config import TrainConfig
from your_ai.data.batches import Batch
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import gradients_in
from your_ai.engine.weights import open_model
from your_ai.memory.workload import Kept, Plan
from your_ai.nets.model import add_adapters

PEAKS = Path(__file__).with_name("architecture_peaks.json")
PLANS = ("fused", "staged", "streamed", "kept")  # kept: staged, all linear layers keep outputs
STEPS = 2  # the first one also compiles


def main(names: list[str]) -> None:
    recorded = json.loads(PEAKS.read_text(encoding="utf-8"))
    for name, model in recorded["models"].items():
        for plan in PLANS if name in names or not names else ():
            case = json.dumps({**recorded, "models": None, "config": model["config"], "plan": plan})
            # A process each: MLX keeps kernels and buffers of those before.
            command = [sys.executable, __file__, "--one"]
            done = subprocess.run(command, input=case, capture_output=True, text=True, check=True)
            model["peaks"][plan] = int(done.stdout)
            print(f"{name:20} {plan:8} {model['peaks'][plan] / 1e6:8.1f} MB", flush=True)
    PEAKS.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


def peak_of(config: dict[str, Any], plan: str, rows: int, tokens: int, rank: int) -> int:
    """The peak of a step's gradients, in bytes."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    with tempfile.TemporaryDirectory() as made:
        network = module.Model(module.ModelArgs.from_dict(config))
        weights = {path: 0.02 * mx.random.normal(array.shape)
                   for path, array in tree_flatten(network.parameters())}  # fmt: skip
        mx.save_safetensors(f"{made}/model.safetensors", weights, {"format": "mlx"})
        Path(made, "config.json").write_text(json.dumps(config), encoding="utf-8")
        del network, weights
        opened = open_model(Path(made), mx.float32)
        trained = TrainConfig(lora_targets=("all-linear",), lora_layers="all", lora_rank=rank)
        keys = add_adapters(opened.network, trained).dropout_keys
        engine = "staged" if plan == "kept" else plan
        kept = Kept(linear=len(opened.network.layers) if plan == "kept" else 0)
        on_disk = Plan(engine, 0, kept=kept).gradients_on_disk
        spill = Path(made) if on_disk else None
        built = build_engine(
            opened.network, keys, engine, tensors=opened.tensors, kept=kept, spill=spill
        )
        assert built.plan == engine, built.notices
        batch = batch_of(rows, tokens)
        gc.collect()
        mx.clear_cache()
        for _ in range(STEPS):
            mx.reset_peak_memory()
            gradients = gradients_in(spill)
            mx.eval(built.engine.add_gradients(batch, 1 / len(batch.targets), 0, gradients))
            peak_bytes = mx.get_peak_memory()
            del gradients
        return peak_bytes


def batch_of(rows: int, tokens: int) -> Batch:
    """Full rows of random tokens; every token but the first is a target."""
    random = np.random.default_rng(0).integers(1, 100, (rows, tokens)).astype(np.int32)
    places = np.arange(rows * tokens, dtype=np.int32).reshape(rows, tokens)
    positions = places[:, :-1].reshape(-1)
    return Batch(
        tokens=random,
        positions=positions,
        targets=random[:, 1:].reshape(-1),
        weights=np.ones(len(positions), np.float32),
        texts=(positions // tokens).astype(np.int32),
        rows=np.arange(rows, dtype=np.uint32)[:, None],
        places=np.arange(tokens, dtype=np.uint32)[None],
        lengths=np.full(rows, tokens),
        trained_tokens=len(positions),
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--one"]:
        mx.set_default_device(mx.cpu)
        one = json.load(sys.stdin)
        print(peak_of(one["config"], one["plan"], one["rows"], one["tokens"], one["rank"]))
    else:
        main(sys.argv[1:])
