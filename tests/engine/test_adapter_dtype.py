"""Adapters in bfloat16: the gradients of float32 adapters with the same values, rounded."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.conftest import TINY, calls_of, make_model
from tests.engine.test_fused import encode, load, relative_error
from your_ai.data.batches import make_schedule
from your_ai.engine import tiles
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import HeldGradients, SpilledGradients
from your_ai.engine.weights import tensors_of
from your_ai.memory import facts
from your_ai.memory.estimate_kept import everything
from your_ai.nets import attention, model

ROUNDED = 2.0**-8  # relative error of two roundings to bfloat16


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Use small slices, so that short rows are cut like long ones."""
    monkeypatch.setattr(attention, "CPU_TOKENS", 32)
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 32)
    monkeypatch.setattr(facts, "SLICE_STEP", 32)


@pytest.mark.parametrize(
    ("architecture", "bits", "plan", "settings"),
    [
        ("llama", None, "fused", {"use_dora": True, "lora_dropout": 0.1}),
        ("llama", 4, "staged", {"use_dora": True}),
        ("llama", None, "staged", {"lora_dropout": 0.1}),
        ("llama", 4, "kept", {}),
        ("llama", 4, "tiled", {"lora_dropout": 0.1}),
        ("llama", 4, "streamed", {"use_rslora": True}),
        ("qwen3_moe", None, "fused", {}),
        ("qwen3_moe", None, "streamed", {}),
    ],
)
def test_gradients_are_those_of_float32_adapters(
    tmp_path, monkeypatch, architecture, bits, plan, settings
):
    if plan == "tiled":
        monkeypatch.setattr("your_ai.memory.sizes.TILED_FROM", 16)
        monkeypatch.setattr("your_ai.memory.sizes.TILE_TOKENS", 16)
        monkeypatch.setattr("your_ai.memory.sizes.FEWEST_TILE_TOKENS", 8)
    folder = make_model(tmp_path / "m", architecture, bits, **TINY)
    rounded, tokenizer, its_adapters = load(folder, adapter_dtype="bfloat16", **settings)
    examples, values = encode(tokenizer, tmp_path), model.adapter_arrays(rounded)

    def computed(network, adapters, total) -> dict[str, mx.array]:
        name = {"kept": "staged", "tiled": "staged"}.get(plan, plan)
        more = {"kept": everything(99)} if plan == "kept" else {}
        tensors = tensors_of(model.load_network(folder, mx.float32)[0], folder)
        built = build_engine(
            network, adapters.dropout_keys, name, packing=False, tensors=tensors, **more
        )
        for batch in make_schedule(examples, 2, 5, seed=0).batches_of(0):
            built.engine.add_gradients(batch, 0.1, 3, total)
        return total.take(total.sizes())

    used = calls_of(monkeypatch, tiles.TiledBlock, "backward")
    total = SpilledGradients(tmp_path) if plan == "streamed" else HeldGradients()
    found = computed(rounded, its_adapters, total)
    dtypes = {path.rpartition(".")[2]: array.dtype for path, array in values.items()}
    assert dtypes == {
        "lora_a": mx.bfloat16, "lora_b": mx.bfloat16,
        **({"m": mx.float32} if "use_dora" in settings else {}),
    }  # fmt: skip
    network, _, adapters = load(folder, **settings)
    model.set_adapters(network, values)
    assert {array.dtype for array in model.adapter_arrays(network).values()} == {mx.float32}
    expected = computed(network, adapters, HeldGradients())
    assert found.keys() == expected.keys()
    for path, grad in found.items():
        assert relative_error(grad, expected[path]) < ROUNDED, path
    assert bool(used) == (plan == "tiled")


def test_the_gradients_of_one_micro_batch_stay_in_bfloat16(tmp_path):
    folder = make_model(tmp_path / "m", "llama", 4, **TINY)
    network, tokenizer, adapters = load(folder, adapter_dtype="bfloat16")
    built = build_engine(network, adapters.dropout_keys, "staged", packing=False)
    (batch,) = make_schedule(encode(tokenizer, tmp_path), 5, 5, seed=0).batches_of(0)
    total = HeldGradients()
    built.engine.add_gradients(batch, 0.1, 3, total)
    assert {array.dtype for array in total.arrays.values()} == {mx.bfloat16}
