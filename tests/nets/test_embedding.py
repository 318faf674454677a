"""The input embedding as rows -> after."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.conftest import TINY, make_model
from your_ai.engine.build import split_model
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.errors import UserError
from your_ai.nets import model
from your_ai.nets.embedding import InputEmbedding, input_embedding, same_rows
from your_ai.nets.head import LayerRows, ResizedRows
from your_ai.nets.parts import Parts

TOKENS = mx.array([[5, 9, 0], [1, 1, 30]])


def parts_of(folder: Path, architecture: str, bits: int | None = None) -> Parts:
    make_model(folder, architecture, bits, **TINY)
    network, _ = model.load_network(folder, mx.float32)
    dequantize_on_the_cpu(network)
    parts = split_model(network, None).parts
    assert parts is not None
    return parts


@pytest.fixture
def gemma(tmp_path: Path) -> InputEmbedding:
    return input_embedding(parts_of(tmp_path / "gemma", "gemma2"), "gemma2")


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3_text"])
def test_hard_tokens_give_the_models_own_block_inputs(
    tmp_path: Path, architecture: str, bits: int | None
):
    parts = parts_of(tmp_path / "m", architecture, bits)
    found = input_embedding(parts, architecture)
    rows = found.hard(TOKENS)
    before = mx.array(rows)
    assert mx.allclose(found.after(rows), parts.embed(TOKENS), rtol=1e-6).item()
    assert mx.array_equal(rows, before).item()  # gemma 3 scales in place


def test_cotangents_are_those_of_the_scaled_embedding(gemma: InputEmbedding):
    cotangent = mx.random.normal((2, 3, 32), key=mx.random.key(1))
    found = gemma.cotangent(cotangent)
    assert mx.allclose(found, cotangent * 32**0.5, rtol=1e-5).item()


def test_rows_are_the_same_if_they_share_arrays(tmp_path: Path):
    make_model(tmp_path / "m", "llama-untied", 4, **TINY)
    first, second = (model.load_network(tmp_path / "m", mx.float32)[0] for _ in range(2))
    mine = LayerRows(first.model.embed_tokens)
    assert same_rows(mine, LayerRows(first.model.embed_tokens))
    assert not same_rows(mine, LayerRows(first.lm_head))
    assert not same_rows(mine, LayerRows(second.model.embed_tokens))
    second.model.update(first.model.parameters())
    assert same_rows(mine, LayerRows(second.model.embed_tokens))


def test_positions_added_to_embeddings_are_refused(gemma: InputEmbedding):
    """What is added to the rows would be there twice for a sum of two."""
    parts, embed = gemma.parts, gemma.parts.trunk.module.embed_tokens

    class WithPositions(type(parts.trunk.module)):
        def __call__(self, tokens: mx.array, cache: object = None) -> mx.array:
            hidden = self.embed_tokens(tokens) + mx.ones((32,))
            for layer in self.layers:
                hidden = layer(hidden, None, None)
            return hidden

    trunk = WithPositions.__new__(WithPositions)
    vars(trunk).update(vars(parts.trunk.module))
    dict.update(trunk, parts.trunk.module)
    assert trunk.embed_tokens is embed
    with pytest.raises(UserError, match="odd: the input of its first block is not a linear"):
        input_embedding(replace(parts, trunk=replace(parts.trunk, module=trunk)), "odd")


@pytest.mark.parametrize("count", [20, 30, 37])
def test_resized_rows_are_those_of_a_padded_table(count):
    layer = nn.Embedding(30, 8)
    table = mx.concatenate([layer.weight, mx.zeros((10, 8))])[:count]
    rows = ResizedRows(LayerRows(layer), count)
    assert rows.shape == (count, 8)
    hidden = mx.random.normal((3, 8), key=mx.random.key(0))
    for start, stop in ((0, 12), (12, 20), (20, count), (25, count), (31, count)):
        if start >= stop:
            continue
        part = rows.part(start, stop)
        assert part.count == stop - start
        assert mx.allclose(part.forward(hidden), hidden @ table[start:stop].T).item()
        shares = mx.random.normal((3, stop - start), key=mx.random.key(1))
        assert mx.allclose(part.backward(shares), shares @ table[start:stop], atol=1e-6).item()
    tokens = mx.array([0, count - 1, 19])
    assert mx.array_equal(rows.gather(tokens), table[tokens]).item()
