"""Blocks on tiles of long rows: the same loss and gradients as on whole rows."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import batch_of, opened_with_adapters, write_model
from tests.conftest import TINY, make_model, peak_of
from tests.engine.test_fused import assert_gradients
from tests.engine.test_plans import by_plan
from your_ai.engine.build import build_engine
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.spill import Spilled
from your_ai.engine.tiles import TiledBlocks
from your_ai.memory import sizes
from your_ai.memory.facts import facts_of
from your_ai.memory.guess import can_tile
from your_ai.nets import tiled_attention

CASES = [  # architecture, bits, DoRA, dropout, other settings of by_plan
    ("llama", 4, False, 0.1, {}),
    ("llama", None, True, 0.1, {"packed": 128}),
    ("gemma3_text", None, False, 0.1, {"spill": True, "neftune_alpha": 5.0}),  # windows
    ("gemma3_text", 4, False, 0.0, {"packed": 128, "plan": "streamed"}),
    ("qwen3", None, False, 0.1, {"plan": "partly kept"}),
    ("mistral", 4, True, 0.0, {"plan": "kept", "lora_layers": 1}),
]


@pytest.fixture
def used(monkeypatch):
    """Cuts short rows into tiles; a list that says of each use of a block whether it did."""
    found: list[bool] = []
    of = TiledBlocks.of

    def noted(self: TiledBlocks, *args):
        block = of(self, *args)
        found.append(block is not None)
        return block

    monkeypatch.setattr(TiledBlocks, "of", noted)
    monkeypatch.setattr(tiled_attention, "FEWEST_QUERIES", 8)
    monkeypatch.setattr(tiled_attention, "TILE_SCORE_BYTES", 1)
    return found


def cut(monkeypatch, tokens: int = 24) -> None:
    for size in ("TILED_FROM", "TILE_TOKENS", "FEWEST_TILE_TOKENS"):
        monkeypatch.setattr(sizes, size, tokens)


@pytest.mark.parametrize(("architecture", "bits", "dora", "dropout", "settings"), CASES)
def test_tiles_give_the_loss_and_gradients_of_whole_rows(
    tmp_path, monkeypatch, used, architecture, bits, dora, dropout, settings
):
    folder = make_model(tmp_path / "m", architecture, bits, **TINY)
    settings = {"plan": "staged", "use_dora": dora, "lora_dropout": dropout} | settings
    if settings.get("spill"):
        settings["spill"] = tmp_path / "spill"
    expected, expected_grads, expected_alone = by_plan(folder, tmp_path, **settings)
    assert not any(used)
    used.clear()
    cut(monkeypatch)
    loss, grads, alone = by_plan(folder, tmp_path, **settings)
    assert set(used) == {True}
    assert loss == pytest.approx(expected, rel=1e-5)
    assert alone == pytest.approx(expected_alone, rel=1e-5)
    assert_gradients(grads, expected_grads)


def test_tiles_are_deterministic_and_the_same_spilled(tmp_path, monkeypatch, used, tiny_model):
    cut(monkeypatch)
    _, expected, _ = by_plan(tiny_model, tmp_path, "staged", lora_layers="all")
    for settings in ({}, {"spill": tmp_path / "spill"}):
        _, grads, _ = by_plan(tiny_model, tmp_path, "staged", lora_layers="all", **settings)
        for name, grad in grads.items():
            assert mx.array_equal(grad, expected[name]), name
    assert set(used) == {True}


def engine_of(folder, plan="staged", **settings):
    opened, adapters = opened_with_adapters(folder)
    built = build_engine(
        opened.network, adapters.dropout_keys, plan, tensors=opened.tensors, **settings
    )
    return built.engine


# Windows and sinks; chunks of two kinds and no rotation; factors of each token; experts; learned
# positions; keys and values of one matrix; windows beside the query; latent attention.
TILED = ["gpt_oss", "llama4_text", "ministral3", "qwen3_moe", "gpt2", "phi3", "plamo3", "minicpm3"]
# A softcap; latent attention that is not expanded; shared keys; a recurrence; convolutions of keys:
# no block is cut.
WHOLE = ["gemma2", "deepseek_v3", "gemma4_text", "mamba2", "baichuan_m1"]
MIXED = ["llama4", "phi3small"]  # factors computed from positions, or sparse masks, in some blocks
CUT = {name: {True} for name in TILED} | {name: {False} for name in WHOLE}
CUT |= {name: {True, False} for name in MIXED}


@pytest.mark.parametrize("model_type", CUT)
def test_architectures_tile_as_the_estimate_says(tmp_path, monkeypatch, used, model_type):
    folder, batch = write_model(tmp_path / "m", model_type), batch_of(40)
    assert can_tile(facts_of(folder, 4)) == (model_type in TILED)
    expected, scores = engine_of(folder).score(batch)
    assert not any(used)
    used.clear()
    cut(monkeypatch)
    found, predictions = engine_of(folder).score(batch)
    assert set(used) == CUT[model_type]
    assert np.allclose(np.array(found), np.array(expected), rtol=1e-4, atol=1e-5)
    assert mx.array_equal(predictions, scores)


def test_targets_of_all_tiles_come_back_in_their_order(tmp_path, monkeypatch, used):
    folder, batch = write_model(tmp_path / "m", "llama"), batch_of(40)
    engine = engine_of(folder)
    wanted = np.array(engine.log_probabilities(batch)), engine.loss(batch).loss.item()
    used.clear()
    cut(monkeypatch)
    monkeypatch.setattr("your_ai.engine.tiled_head.HEAD_ROWS", 48)
    engine = engine_of(folder)
    assert np.allclose(np.array(engine.log_probabilities(batch)), wanted[0], rtol=1e-4)
    assert engine.loss(batch).loss.item() == pytest.approx(wanted[1], rel=1e-5)
    assert set(used) == {True}


def test_a_prefix_cache_is_filled_and_used_with_tiles(tmp_path, monkeypatch, used, tiny_model):
    settings, store = {"lora_layers": 1}, MemoryStore()
    _, expected, _ = by_plan(tiny_model, tmp_path, "staged", **settings)
    used.clear()
    cut(monkeypatch)
    settings["make_store"] = lambda _: store
    _, grads, _ = by_plan(tiny_model, tmp_path, "staged", **settings)
    assert store.bytes_held > 0
    assert set(used) == {True}
    assert_gradients(grads, expected)


@pytest.mark.memory
def test_the_work_of_a_block_does_not_grow_with_the_row(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "m", "llama")

    def work(tokens: int) -> int:
        engine, batch = engine_of(folder, spill=tmp_path), batch_of(tokens)
        mx.eval(engine.gradients(batch, 1.0, 0)[1])
        mx.synchronize()
        mx.clear_cache()
        return peak_of(lambda: engine.gradients(batch, 1.0, 0)[1])

    whole = work(512)
    cut(monkeypatch, 64)
    monkeypatch.setattr("your_ai.engine.tiled_head.HEAD_ROWS", 128)
    short, long = work(256), work(512)
    # Hidden states, keys, values and gradients of these, of two rows: 32 + 4 x 16 numbers a token.
    assert long - short < 1.25 * 256 * 2 * 4 * (32 + 4 * 16)
    assert long < whole / 2


def test_arrays_below_the_top_of_a_stack_can_be_read(tmp_path):
    stack = Spilled(tmp_path)
    arrays = [mx.full((2, size), size, mx.bfloat16) for size in (1, 3, 2)]
    for array in arrays:
        stack.append(array)
    for count, array in enumerate(reversed(arrays)):
        assert mx.array_equal(stack.below_top(count), array)
    assert len(stack) == 3
    assert mx.array_equal(stack.pop(), arrays[2])
