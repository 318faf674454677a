"""Every plan computes the same loss and gradients as the fused plan."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import TINY, calls_of, make_model
from tests.engine.test_fused import assert_step, encode, engine_loss, load, prepared, step_of
from your_ai.config import TrainConfig
from your_ai.data.batches import Batch, make_schedule
from your_ai.engine import weights
from your_ai.engine.build import build_engine
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.weights import Streamed, can_stream, tensors_of
from your_ai.memory import facts
from your_ai.memory.estimate_kept import everything
from your_ai.memory.workload import Kept
from your_ai.nets import attention, model

CASES = [  # architecture, bits, DoRA, dropout
    ("llama", 4, False, 0.1),
    ("llama", None, True, 0.1),
    ("qwen2", 4, False, 0.0),
    ("qwen3", None, False, 0.1),
    ("mistral", 4, True, 0.0),
    ("gemma2", 4, False, 0.1),
    ("gemma2", None, False, 0.0),
    ("gemma3_text", 4, False, 0.1),
    ("llama-untied", 4, False, 0.0),
    ("qwen2-tied", None, False, 0.1),
]
VARIANTS = {
    "kept": ("staged", {"kept": everything(99)}),
    "partly kept": ("streamed", {"kept": Kept(1, 2, 0)}),
    "partly resident": ("streamed", {"resident": 1}),
    "read alone": ("streamed", {"blocks_ahead": 0}),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Use small slices, so that short rows are cut like long ones."""
    monkeypatch.setattr(attention, "CPU_TOKENS", 32)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 24)
    monkeypatch.setattr(attention, "LEAN_QUERY_BLOCK", 16)
    monkeypatch.setattr(attention, "FEWEST_QUERIES", 8)
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 32)
    monkeypatch.setattr(facts, "SLICE_STEP", 32)


def by_plan(
    folder: Path, tmp_path: Path, plan: str, packed=None, batch_size=5, spill=None,
    neftune_alpha=0.0, make_store=None, **settings,
):  # fmt: skip
    """(loss, gradients, loss without gradients) of the same step, through `build_engine`.

    plan: an engine, or a name in VARIANTS.
    """
    plan, more = VARIANTS.get(plan, (plan, {}))
    made = prepared(
        folder, plan, settings, packing=packed is not None, make_store=make_store, spill=spill,
        neftune_alpha=neftune_alpha, **more,
    )  # fmt: skip
    batches = batches_of(made.tokenizer, tmp_path, batch_size, packed)
    loss, grads = step_of(made.engine, batches, 3)
    alone = sum(made.engine.loss(batch).loss.item() for batch in batches)
    return loss, grads, alone / sum(batch.weight for batch in batches)


def batches_of(tokenizer: Any, place: Path, batch_size=5, packed=None) -> list[Batch]:
    """The micro-batches of the step."""
    examples = encode(tokenizer, place)
    return make_schedule(examples, batch_size, 5, seed=0, packed_tokens=packed).batches_of(0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Makes a model, and the loss and gradients of the fused engine; once for each case."""

    @functools.cache
    def make(architecture: str, bits: int | None, dora: bool, dropout: float):
        place = tmp_path_factory.mktemp("case")
        folder = make_model(place / "m", architecture, bits, **TINY)
        network, tokenizer, adapters = load(folder, use_dora=dora, lora_dropout=dropout)
        dequantize_on_the_cpu(network)  # as `build_engine` does
        return folder, *engine_loss(network, adapters, encode(tokenizer, place), seed=3)

    return make


@pytest.fixture
def check(tmp_path, reference):
    """Asserts that a step is that of the fused engine."""

    def compare(plan, architecture="llama", bits=4, dora=False, dropout=0.2, **more) -> None:
        folder, *expected = reference(architecture, bits, dora, dropout)
        found = by_plan(folder, tmp_path, plan, use_dora=dora, lora_dropout=dropout, **more)
        assert_step(found[:2] if dropout else found, *expected)

    return compare


# The fused engine of a case with dropout would be compared with itself.
@pytest.mark.parametrize(
    ("architecture", "bits", "dora", "dropout", "plan"),
    [
        *((*case, "streamed") for case in CASES),  # what staged computes, from files
        *((*case, "staged") for case in (CASES[1], CASES[2], CASES[5], CASES[7])),
        *((*case, "kept") for case in CASES),
        *((*case, "partly kept") for case in (CASES[0], CASES[4])),
        (*CASES[1], "partly resident"),
        (*CASES[4], "read alone"),
        *((*case, "fused") for case in (CASES[2], CASES[4], CASES[6])),  # without dropout
    ],
)
def test_every_plan_gives_the_loss_and_gradients_of_the_fused_engine(
    check, architecture, bits, dora, dropout, plan
):
    check(plan, architecture, bits, dora, dropout)


@pytest.mark.parametrize(
    ("architecture", "bits", "dora", "dropout", "plan"),
    [
        (*CASES[0], "fused"), (*CASES[7], "fused"), (*CASES[1], "staged"), (*CASES[7], "staged"),
        (*CASES[7], "kept"), (*CASES[1], "partly kept"), (*CASES[2], "streamed"),
        (*CASES[3], "streamed"), (*CASES[4], "streamed"),
    ],
)  # fmt: skip
def test_packed_texts_give_the_same_gradients_as_separate_rows(
    check, architecture, bits, dora, dropout, plan
):
    check(plan, architecture, bits, dora, dropout, packed=128)


@pytest.mark.parametrize("plan", ["staged", "streamed", "kept"])
def test_micro_batches_give_the_same_gradients_in_each_plan(check, plan):
    check(plan, batch_size=2)


@pytest.mark.parametrize("plan", ["staged", "streamed"])
def test_spilled_inputs_give_bit_identical_gradients(tmp_path, tiny_model, plan):
    settings = {"lora_layers": "all", "lora_dropout": 0.2}
    expected, expected_grads, _ = by_plan(tiny_model, tmp_path, plan, **settings)
    spill = tmp_path / "spill"
    loss, grads, _ = by_plan(tiny_model, tmp_path, plan, spill=spill, **settings)
    assert loss == expected
    for name, grad in grads.items():
        assert mx.array_equal(grad, expected_grads[name]), name
    assert spill.is_dir()


def test_inputs_of_blocks_that_keep_something_stay_in_memory(tmp_path, tiny_model):
    by_plan(tiny_model, tmp_path, "kept", spill=tmp_path / "spill", lora_layers="all")
    assert not (tmp_path / "spill").exists()


def test_streamed_prefix_cache_is_filled_block_by_block(tmp_path, tiny_model, monkeypatch):
    settings = {"lora_layers": 1, "lora_dropout": 0.2}
    expected = by_plan(tiny_model, tmp_path, "fused", batch_size=1, **settings)[:2]
    store, reads = MemoryStore(), calls_of(monkeypatch, Streamed, "load")
    network, tokenizer, _, engine = prepared(
        tiny_model, "streamed", settings, make_store=lambda _: store
    )
    reads.clear()
    batches = batches_of(tokenizer, tmp_path, batch_size=1)
    assert len(batches) == 5
    engine.fill(batches)
    frozen = len(network.layers) - 1
    assert len(reads) == 1 + frozen  # one read for the size of a block
    engine.fill(batches)
    assert len(reads) == 2 + frozen  # nothing is missing
    found = step_of(engine, batches, 3)
    later = {call.given[1] for call in reads[2 + frozen :]}
    assert later == {frozen}  # the frozen blocks are not read again
    assert_step(found, *expected)


@pytest.mark.parametrize(
    ("plan", "packed"),
    [("fused", None), ("fused", 128), ("staged", 128), ("streamed", None), ("kept", None)],
)
def test_prefix_cache_does_not_change_gradients(tmp_path, reference, plan, packed):
    folder, *expected = reference("llama", 4, False, 0.2)
    store = MemoryStore()
    plan, more = VARIANTS.get(plan, (plan, {}))
    more = {**more, "packing": packed is not None, "make_store": lambda _: store}
    made = prepared(folder, plan, {"lora_dropout": 0.2}, **more)
    batches = batches_of(made.tokenizer, tmp_path, packed=packed)
    for _ in range(2):  # the first pass fills the cache, the second reads it
        assert_step(step_of(made.engine, batches, 3), *expected)
        assert store.bytes_held > 0


@pytest.mark.parametrize("plan", ["fused", "staged", "streamed"])
def test_cached_hidden_states_depend_only_on_their_text(tmp_path, tiny_model, plan):
    """So a resumed run fills its cache again with the same numbers."""
    found = []
    for batch_size, packed in ((5, None), (2, None), (5, 128)):
        store = MemoryStore()
        more = {"packing": packed is not None, "make_store": lambda _, store=store: store}
        made = prepared(tiny_model, plan, {"lora_layers": 2}, **more)
        for batch in batches_of(made.tokenizer, tmp_path, batch_size, packed):
            made.engine.loss(batch)
        examples = encode(made.tokenizer, tmp_path)
        texts = [example.tokens[:-1].astype(np.int32) for example in examples]
        found.append([store.get(text).tolist() for text in texts])
    assert len(found[0]) == 5
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("plan", ["staged", "streamed"])
def test_one_adapted_block_gives_the_gradients_of_the_fused_engine(tmp_path, tiny_model, plan):
    settings = {"lora_layers": 1, "lora_targets": ("q_proj",)}
    expected = by_plan(tiny_model, tmp_path, "fused", **settings)[:2]
    assert_step(by_plan(tiny_model, tmp_path, plan, **settings), *expected)


def test_streamed_model_gives_the_same_logits(tmp_path, tiny_model):
    network, _, adapters = load(tiny_model)
    tokens = mx.array([[3, 1, 2, 0, 5, 9, 2]])
    expected = network(tokens)
    tensors = tensors_of(model.load_network(tiny_model, mx.float32)[0], tiny_model)
    build_engine(network, adapters.dropout_keys, "streamed", tensors=tensors)
    assert mx.allclose(network(tokens), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.memory
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize(("architecture", "bits"), [("llama", None), ("qwen2", 4)])
def test_streamed_model_keeps_no_frozen_weights_in_memory(tmp_path, architecture, bits, packing):
    folder = make_model(tmp_path / "m", architecture, bits, num_hidden_layers=6)
    network, _ = model.load_network(folder, mx.float32)
    tensors = tensors_of(network, folder)
    before = mx.get_active_memory()
    adapters = model.add_adapters(network, TrainConfig(lora_layers="all", lora_targets=("q_proj",)))
    mx.reset_peak_memory()
    build_engine(network, adapters.dropout_keys, "streamed", packing, tensors)
    mx.eval(network(mx.array([[3, 1, 2, 0]])))
    whole = (folder / "model.safetensors").stat().st_size
    trained = sum(array.nbytes for _, array in tree_flatten(network.trainable_parameters()))
    assert mx.get_active_memory() - before - trained < whole / 4
    if bits is None:  # otherwise slices of the vocabulary are larger than the whole file
        assert mx.get_peak_memory() - before < whole / 2


def test_weights_changed_on_load_cannot_be_streamed(tmp_path, tiny_model, monkeypatch):
    network, _ = model.load_network(tiny_model, mx.float32)
    other = make_model(tmp_path / "other", "llama", None, **TINY)
    monkeypatch.setattr(weights, "CHANGED_BYTES", 1000)
    tensors = tensors_of(network, other)
    assert not can_stream(network, tensors)
    assert "model.embed_tokens.weight" not in tensors
    assert can_stream(network, tensors_of(network, tiny_model))


@pytest.mark.parametrize(("architecture", "bits"), [("llama", None), ("qwen2", 4)])
def test_staged_model_leaves_embedding_and_head_in_their_files(tmp_path, architecture, bits):
    folder = make_model(tmp_path / "m", architecture, bits)
    network, _ = model.load_network(folder, mx.float32)
    tensors = tensors_of(network, folder)
    adapters = model.add_adapters(network, TrainConfig(lora_layers="all", lora_targets=("q_proj",)))
    assert build_engine(network, adapters.dropout_keys, "staged", tensors=tensors).plan == "staged"
    held = [name for name, _ in tree_flatten(network.parameters())]
    assert not [name for name in held if "embed_tokens" in name or "lm_head" in name]
    assert [name for name in held if "mlp" in name]


@pytest.mark.parametrize("blocks_ahead", [0, 1])
def test_a_step_reads_no_block_twice_in_a_row_and_resident_ones_only_once(
    tmp_path, tiny_model, monkeypatch, blocks_ahead
):
    """Of 3 blocks, the last 2 have adapters. The backward pass begins with the last as it is."""
    settings = {"lora_layers": 2}
    made = prepared(tiny_model, "streamed", settings, blocks_ahead=blocks_ahead)
    engine, batch = made.engine, batches_of(made.tokenizer, tmp_path)[0]
    read = calls_of(monkeypatch, Streamed, "load")

    def step() -> tuple[list[int], dict[str, mx.array]]:
        read.clear()
        _, grads = engine.gradients(batch, 1.0, 3)
        mx.eval(grads)
        return [call.given[1] for call in read], dict(tree_flatten(grads))

    blocks, expected = step()
    assert blocks == [0, 1, 2, 1]
    engine.hold(1, blocks_ahead)
    assert step()[0] == [0, 1, 2, 1]
    for after_forgetting in ([0, 1, 1], [0, 1, 2, 1]):
        blocks, grads = step()
        assert blocks == after_forgetting
        assert all(mx.array_equal(grads[name], expected[name]) for name in expected)
        last = [tensor for name, tensor in made.tensors.items() if ".layers.2." in name]
        assert engine.forget() == sum(math.prod(t.shape) * t.dtype.size for t in last)
    engine.hold(0, blocks_ahead)
    assert step()[0] == [0, 1, 2, 1]
    assert engine.forget() == 0
    assert engine.waited() > 0
    assert engine.waited() == 0
