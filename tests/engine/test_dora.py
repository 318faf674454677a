"""DoRA under each plan: gradients equal mlx-lm's layers, memory close to that of LoRA."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map

from tests.conftest import TINY, Call, calls_of, make_model
from tests.engine.test_compiled import Made
from tests.engine.test_fused import (
    assert_step,
    encode,
    engine_loss,
    load,
    relative_error,
    step_of,
)
from tests.engine.test_reload import loaded_with
from your_ai.data.batches import make_schedule
from your_ai.engine import dequantized
from your_ai.engine.build import build_engine
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.gradients import HeldGradients
from your_ai.engine.weights import tensors_of
from your_ai.nets import dora, model
from your_ai.training.optimizer import build_optimizer, make_update

PLANS = ("fused", "staged", "streamed")
WIDE = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
MORE_BYTES = 2 << 20  # allowed above LoRA; a dequantized weight of the wide model is 2.9 MB


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int | None], Path]:
    """Makes a model with wide layers; the argument is its number of bits."""
    place = tmp_path_factory.mktemp("wide")
    return functools.cache(lambda bits: make_model(place / f"{bits}", "llama", bits, **WIDE))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Any]:
    """Makes (the model, its engine and batches) as in a run."""

    def make(path: Path, plan: str, cached: bool = False, **settings: Any):
        settings = {"use_dora": True, "lora_layers": "all", **settings}
        found = loaded_with(tmp_path, path, plan, cached, **settings)
        return found.network, Made(found.engine, found.batches)

    return make


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The norms of layers that are computed from now on."""
    return calls_of(monkeypatch, dora, "row_norms")


def step(made: Made) -> tuple[float, Any]:
    loss, total = 0.0, None
    for batch in made.batches:
        part, grads = made.engine.gradients(batch, 1.0, 3)
        total = grads if total is None else tree_map(mx.add, total, grads)
        mx.eval(part, total)
        loss += part.loss.item()
    return loss, total


# -- exactness


@pytest.mark.parametrize(
    ("architecture", "bits", "dropout", "plan"),
    [
        ("qwen2", 4, 0.0, "fused"),
        ("qwen2", None, 0.2, "fused"),
        ("mistral", 8, 0.2, "fused"),
        ("qwen2", None, 0.2, "staged"),
        ("mistral", 8, 0.2, "streamed"),
    ],
)
def test_gradients_equal_those_of_mlx_lm_layers(
    tmp_path, monkeypatch, architecture, bits, dropout, plan
):
    folder = make_model(tmp_path / "m", architecture, bits, **TINY)
    settings = {"use_dora": True, "lora_dropout": dropout}
    with monkeypatch.context() as patch:
        patch.setattr(dora, "put_dora", lambda network: None)
        theirs, tokenizer, adapters = load(folder, **settings)
    examples = encode(tokenizer, tmp_path)
    ours, _, our_adapters = load(folder, **settings)
    model.set_adapters(ours, model.adapter_arrays(theirs))
    expected = engine_loss(theirs, adapters, examples, seed=3)

    dequantize_on_the_cpu(ours)
    tensors = tensors_of(model.load_network(folder, mx.float32)[0], folder)
    engine = build_engine(ours, our_adapters.dropout_keys, plan, tensors=tensors).engine
    batches = make_schedule(examples, 2, 5, seed=0).batches_of(0)
    assert_step(step_of(engine, batches, 3), *expected)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_trains_models_with_bits_that_do_not_divide_32(tmp_path, made, bits):
    folder = make_model(tmp_path / "m", "llama", bits, **TINY)
    expected, expected_grads = step(made(folder, "fused")[1])
    expected_grads = dict(tree_flatten(expected_grads))
    for plan in ("staged", "streamed"):
        loss, grads = step(made(folder, plan)[1])
        assert loss == pytest.approx(expected, rel=1e-5), plan
        for name, grad in tree_flatten(grads):
            assert relative_error(grad, expected_grads[name]) < 1e-5, (plan, name)


# -- norms


@pytest.mark.parametrize(
    ("plan", "cached"), [("fused", False), ("fused", True), ("staged", False), ("streamed", True)]
)
def test_norms_are_computed_once_per_update(tiny_model, made, computed, plan, cached):
    """For any number of micro-batches and evaluations, after the first compilation."""
    settings = {"lora_layers": 2} if cached else {}
    network, engine = made(tiny_model, plan, cached, **settings)
    layers = len([name for name in model.adapter_arrays(network) if name.endswith(".m")])
    update = make_update(
        network, build_optimizer(model.TrainConfig(), network.trainable_parameters())
    )
    assert len(engine.batches) > 1
    for count in range(3):
        computed.clear()
        _, grads = step(engine)
        for batch in engine.batches:
            mx.eval(engine.engine.loss(batch), engine.engine.predictions(batch))
        mx.eval(network(mx.array([[3, 1, 2, 0]])))
        assert len(computed) == layers or count == 0  # tracing in the first step adds calls
        update(HeldGradients(grads), 1.0, 1e-2)


@pytest.mark.parametrize("plan", PLANS)
def test_norms_follow_the_adapter_after_each_update(tiny_model, made, monkeypatch, plan):
    """The results equal those without the cache of norms."""

    def run() -> list[float]:
        network, engine = made(tiny_model, plan)
        parameters = network.trainable_parameters()
        update = make_update(network, build_optimizer(model.TrainConfig(), parameters))
        losses = []
        for _ in range(2):
            loss, grads = step(engine)
            update(HeldGradients(grads), 1.0, 3e-2)
            alone = sum(engine.engine.loss(batch).loss.item() for batch in engine.batches)
            losses += [loss, alone, network(mx.array([[3, 1, 2, 0]])).sum().item()]
        return losses

    kept = run()
    monkeypatch.setattr(dora.NormCache, "of", lambda self, *adapter: None)
    assert run() == kept
    assert len(set(kept)) > 4


# -- memory


def held(made: Made) -> int:
    """Peak memory of a step and an evaluation of the shortest batch."""
    made = Made(made.engine, [min(made.batches, key=lambda batch: batch.tokens.size)])
    gc.collect()
    mx.reset_peak_memory()
    grads = step(made)
    del grads
    mx.eval(made.engine.loss(made.batches[0]), made.engine.predictions(made.batches[0]))
    return mx.get_peak_memory()


@pytest.mark.memory
@pytest.mark.parametrize(("plan", "bits"), [("fused", None), ("staged", 4), ("streamed", None)])
def test_peak_memory_is_close_to_that_of_lora(monkeypatch, wide, made, plan, bits):
    """Measured from loading the model, with slices as small as its weights are."""
    for module, name in ((dora, "SLICE_BYTES"), (dequantized, "DEQUANTIZED_SLICE_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name) // 4)
    peaks = []
    for use_dora in (False, True):
        gc.collect()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        network, engine = made(wide(bits), plan, use_dora=use_dora)
        peaks.append(max(held(engine) for _ in range(3)) - before)  # threads vary it by 2%
        del network, engine
    assert peaks[1] < peaks[0] + MORE_BYTES


@pytest.mark.memory
def test_streamed_model_keeps_no_frozen_weights_in_memory(tmp_path, made, tiny_model):
    folder = make_model(tmp_path / "m", "llama", None, num_hidden_layers=6)
    before = mx.get_active_memory()
    network, engine = made(folder, "streamed", lora_rank=1)
    step(engine)
    mx.eval(network(mx.array([[3, 1, 2, 0]])))
    gc.collect()
    whole = (folder / "model.safetensors").stat().st_size
    assert mx.get_active_memory() - before < whole / 4
