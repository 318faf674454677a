"""A network without its weights: its blocks run on made ones, and nothing of it is read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from tests.architectures import batch_of, write_model
from tests.conftest import TINY, make_model
from your_ai.config import TrainConfig
from your_ai.engine import skeleton
from your_ai.engine.programs import trained_arrays
from your_ai.engine.skeleton import SLICES, MadeWeights, cut_vocabulary, made_tensor, random_like
from your_ai.engine.staged import FusedAboveCache, Staged
from your_ai.engine.weights import open_model
from your_ai.errors import Unsplittable
from your_ai.gates.untrusted import read_header
from your_ai.memory.facts import VOCABULARY
from your_ai.memory.sizes import HEAD_SLICE_BYTES
from your_ai.nets.head import LinearHead, ScoreHead
from your_ai.nets.split import blocks_path

ENGINES = (Staged, FusedAboveCache)
LORA = {"lora_targets": ("all-linear",), "lora_layers": "all", "lora_rank": 4}
MADE = [  # architecture, bits, other settings
    ("llama", 4, {}),  # whose embedding is its head
    ("qwen2", 8, {}),
    ("llama", None, {"use_dora": True}),
    ("mistral", 4, {"use_dora": True}),
    ("llama", 4, {"lora_dropout": 0.1}),
    ("qwen3_moe", 4, {"lora_experts": True}),
    ("gemma3_text", None, {}),  # attention of two kinds
]
OTHERS = [
    *("qwen3_next", "gpt_oss", "mamba2", "gemma4_text", "rwkv7", "lfm2", "ministral3"),
    *("gemma3n", "gpt_neox"),  # no trunk whose logits are the model's
]
CASES = [*MADE, *((name, None, {}) for name in OTHERS)]
WHOLE = ["afm7", "iquestloopcoder", "kimi_k3"]  # blocks in several lists, or that are run twice


def engine_of(
    network: nn.Module, settings: dict[str, Any], kind: type[Staged], **given: Any
) -> Any:
    config, hidden = TrainConfig(**LORA | settings), given.pop("hidden", 512)
    return skeleton.engine_of(network, config, kind, hidden, **given)


def opened(folder: Path) -> nn.Module:
    return open_model(folder, mx.float32).network


def written(folder: Path, architecture: str, bits: int | None) -> Path:
    if architecture in OTHERS:
        return write_model(folder, architecture)
    return make_model(folder, architecture, bits)


def tiny_engine(
    place: Path, kind: type[Staged] = Staged, architecture: str = "llama", **given: Any
) -> Any:
    return engine_of(opened(make_model(place / "m", architecture, **TINY)), {}, kind, **given)


def unreadable(folder: Path) -> nn.Module:
    """The network of a folder, of whose file only those weights are left that are outside of
    blocks and vocabulary."""
    network = opened(folder)
    blocks = ".".join(blocks_path(network))
    arrays = dict(tree_flatten(network.parameters()))
    outside = [name for name in arrays if not name.startswith(f"{blocks}.")]
    mx.eval([arrays[name] for name in outside if not set(VOCABULARY) & set(name.split("."))])
    file = folder / "model.safetensors"
    os.truncate(file, min(entry.start for entry in read_header(file)))
    return network


def leaves_of(module: Any) -> dict[str, int]:
    return {path: id(leaf) for path, leaf in tree_flatten(module)}


def run_block(engine: Staged, index: int) -> Iterator[mx.array]:
    """The output of a block, its gradients, and the cotangent of its input."""
    rows = engine.rows_of(batch_of(24), 0)
    before, after = (engine.parts.features(index + place) for place in (0, 1))
    hidden, cotangent = (mx.random.normal((2, 24, f)) for f in (before, after))
    arrays, own = engine.arrays_at(index)
    program, extras = engine.programs.of(index, rows.shape), rows.extras_of(index)
    out = program.forward(arrays, own, hidden, extras)
    grads, back = program.backward(arrays, own, hidden, extras, cotangent)
    assert out.shape == cotangent.shape
    assert back.shape == hidden.shape
    assert {name: grad.shape for name, grad in grads.items()} == {
        name: array.shape for name, array in own.items()
    }
    yield from (out, *grads.values(), back)


def finite(arrays: Iterator[mx.array]) -> bool:
    return all(mx.isfinite(array).all().item() for array in arrays)


def check_blocks(network: nn.Module, settings: dict[str, Any]) -> None:
    """Run every block of both engines, and their heads."""
    for kind in ENGINES:
        engine = engine_of(network, settings, kind)
        assert engine is not None
        assert isinstance(engine.weights, MadeWeights)
        for index in range(len(engine.blocks)):
            with engine.weights.of(index):
                assert finite(run_block(engine, index))
        batch = batch_of(24)
        rows, last = engine.rows_of(batch, 0), engine.parts.features(len(engine.blocks))
        hidden = [mx.random.normal((2, 24, last))]
        sums, cotangents, _ = engine.at_head(batch, rows, hidden, mx.array(1.0))
        assert finite(iter([sums.loss, *cotangents]))


@pytest.mark.parametrize(("architecture", "bits", "settings"), CASES)
def test_blocks_run_on_made_weights(tmp_path, architecture, bits, settings):
    check_blocks(opened(written(tmp_path / "m", architecture, bits)), settings)


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("model_type", WHOLE)
def test_a_model_that_cannot_be_split_has_no_engine(tmp_path, model_type, kind):
    network = opened(write_model(tmp_path / "m", model_type))
    with pytest.raises(Unsplittable):
        engine_of(network, {}, kind)


# What is read. Checking indices would compute them, and so read weights.


@pytest.mark.compiled
@pytest.mark.parametrize(("architecture", "bits", "settings"), CASES)
def test_no_weight_is_read(tmp_path, architecture, bits, settings):
    check_blocks(unreadable(written(tmp_path / "m", architecture, bits)), settings)


# kimi_k3 compiles when it is imported, perhaps while indices are checked.
@pytest.mark.compiled
@pytest.mark.parametrize("model_type", WHOLE[:2])
def test_no_weight_is_read_of_a_model_that_cannot_be_split(tmp_path, model_type):
    network = unreadable(write_model(tmp_path / "m", model_type))
    with pytest.raises(Unsplittable):
        engine_of(network, {}, Staged)


@pytest.mark.compiled
def test_weights_that_are_read_would_fail_these_tests(tmp_path):
    network = unreadable(make_model(tmp_path / "m", **TINY))
    with pytest.raises(RuntimeError):
        mx.eval(network.layers[0].parameters())


# The given network, and memory


@pytest.mark.parametrize("settings", [{}, {"use_dora": True, "lora_dropout": 0.1}])
@pytest.mark.parametrize("score_head", [False, True])
@pytest.mark.parametrize("kind", ENGINES)
def test_the_network_is_as_before(tmp_path, kind, score_head, settings):
    network = opened(make_model(tmp_path / "m", "qwen2", **TINY))
    leaves, modules = leaves_of(network), [(n, type(m)) for n, m in network.named_modules()]
    engine = engine_of(network, settings, kind, score_head=score_head)
    with engine.weights.of(1):
        assert finite(run_block(engine, 1))
    assert leaves_of(network) == leaves
    assert [(n, type(m)) for n, m in network.named_modules()] == modules
    assert not trained_arrays(network.layers[1]).keys() - leaves_of(network.layers[1]).keys()


def test_a_block_has_made_arrays_only_while_it_is_used(tmp_path):
    engine = tiny_engine(tmp_path)
    weights, before = engine.weights, [leaves_of(block) for block in engine.blocks]
    with weights.of(1):
        made = leaves_of(engine.blocks[1])
        assert not set(made.values()) & set(before[1].values())
        assert made.keys() == before[1].keys()
        assert weights.read(1)
        assert [leaves_of(engine.blocks[place]) for place in (0, 2)] == [before[0], before[2]]
    assert [leaves_of(block) for block in engine.blocks] == before
    assert weights.made == {}


def test_a_block_that_fails_keeps_no_made_arrays(tmp_path):
    engine = tiny_engine(tmp_path)
    before = leaves_of(engine.blocks[0])
    with pytest.raises(MemoryError), engine.weights.of(0):
        raise MemoryError
    assert leaves_of(engine.blocks[0]) == before
    assert engine.weights.made == {}


def test_made_arrays_are_like_those_of_the_block(tmp_path):
    engine = tiny_engine(tmp_path)
    block = engine.blocks[0]
    before = {n: (a.shape, a.dtype) for n, a in tree_flatten(block.parameters())}
    with engine.weights.of(0):
        made = dict(tree_flatten(block.parameters()))
    assert {name: (array.shape, array.dtype) for name, array in made.items()} == before


@pytest.mark.memory
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}])
def test_one_block_is_in_memory_at_a_time(tmp_path, settings):
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768}
    network = opened(make_model(tmp_path / "m", bits=None, **sizes))
    block = sum(a.nbytes for _, a in tree_flatten(network.layers[0].parameters()))
    before = mx.get_active_memory()
    engine = engine_of(network, settings, Staged)
    held = mx.get_active_memory() - before
    assert held < block / 2  # the trained arrays of all blocks are lazy, too
    mx.reset_peak_memory()
    for index in range(8):
        with engine.weights.of(index):
            mx.synchronize()
            assert mx.get_active_memory() - before - held < 1.2 * block
        mx.synchronize()
        assert mx.get_active_memory() - before - held < block / 10


@pytest.mark.memory
def test_arrays_of_a_block_are_made_one_at_a_time(tmp_path):
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 768}
    folder = make_model(tmp_path / "m", bits=None, **sizes)
    engine = engine_of(open_model(folder, mx.float16).network, {}, Staged)
    block = sum(a.nbytes for a in dict(tree_flatten(engine.blocks[0].parameters())).values())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    with engine.weights.of(0):
        assert mx.get_peak_memory() - before < 1.7 * block  # random numbers are float32


# The vocabulary


@pytest.mark.parametrize("architecture", ["llama", "llama-untied"])
def test_a_large_vocabulary_is_cut_to_some_slices(tmp_path, architecture):
    rows = SLICES * HEAD_SLICE_BYTES // (4 * 512)
    sizes = {"num_hidden_layers": 1, "hidden_size": 512, "vocab_size": 2 * rows}
    network = opened(make_model(tmp_path / "m", architecture, **sizes))
    engine = engine_of(network, {}, FusedAboveCache)
    assert engine.head.rows.shape == (rows, 512)


def test_a_small_vocabulary_is_whole(tmp_path):
    engine = tiny_engine(tmp_path, FusedAboveCache, "qwen2")
    assert engine.head.rows.shape == (768, 32)


def test_layers_of_blocks_are_not_cut(tmp_path):
    network = opened(make_model(tmp_path / "m", "qwen2", bits=None, **TINY))
    cut = cut_vocabulary(network, 5)
    assert {name: array.shape for name, array in cut.items()} == {
        "model.embed_tokens.weight": (5, 32),
        "lm_head.weight": (5, 32),
    }


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("architecture", ["llama", "llama-untied"])
def test_a_staged_engine_reads_the_vocabulary_and_a_fused_one_has_it(tmp_path, architecture, bits):
    network = opened(make_model(tmp_path / "m", architecture, bits, **TINY))
    staged, fused = (engine_of(network, {}, kind) for kind in ENGINES)
    assert staged.reads_files
    assert not fused.reads_files
    assert isinstance(staged.head, LinearHead)


@pytest.mark.parametrize("kind", ENGINES)
def test_a_score_head_takes_the_place_of_the_logits(tmp_path, kind):
    engine = tiny_engine(tmp_path, kind, hidden=32, score_head=True)
    assert isinstance(engine.head, ScoreHead)
    assert engine.head.scores(mx.ones((5, 32))).shape == (5,)


# Made tensors


@given(st.data())
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16, mx.uint32, mx.uint8])
def test_made_tensors_read_rows_as_they_were_given(dtype, data):
    array = (100 * mx.random.uniform(shape=(9, 4))).astype(dtype)
    tensor = made_tensor("embed.weight", array)
    assert (tensor.shape, tensor.dtype) == (array.shape, dtype)
    start = data.draw(st.integers(0, 8))
    stop = data.draw(st.integers(start + 1, 12))
    assert mx.array_equal(tensor.rows(start, stop), array[start:stop])
    places = np.array(data.draw(st.lists(st.integers(0, 8), min_size=1)))
    found = tensor.gather(places)
    assert found.dtype == dtype
    assert mx.array_equal(found, array[mx.array(places)])


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.bfloat16, mx.uint32, mx.int32, mx.uint8, mx.bool_]
)
def test_made_numbers_are_small_and_those_that_may_be_indices_are_zero(dtype):
    made = random_like(mx.zeros((64, 64), dtype))
    assert (made.shape, made.dtype) == ((64, 64), dtype)
    if mx.issubdtype(dtype, mx.floating):
        assert 0 < mx.abs(made).max().item() < 0.2
    else:
        assert not made.any().item()


def test_made_numbers_may_have_fewer_rows():
    given = mx.zeros((6, 4))
    assert random_like(given, 2).shape == (2, 4)
    assert random_like(given, 9).shape == (6, 4)
