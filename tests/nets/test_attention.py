"""Compare attention in blocks with attention under a T x T mask, alone and in mlx-lm's models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step

from tests.conftest import SMALL, load_base, make_model, peak_of
from tests.scheduling import compute_in_order
from your_ai.config import TrainConfig
from your_ai.nets import attention as blockwise
from your_ai.nets import model
from your_ai.nets.attention import BlockwiseAttention, attention, needs_blocks, replace_attention
from your_ai.nets.block_calls import Mask
from your_ai.nets.parts import arrays_of, parts_of, put, skeleton
from your_ai.nets.split import split

KERNELS = "measured"  # they make the peaks smaller
CONFIG = {
    **SMALL,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
    "query_pre_attn_scalar": 25,  # gives a scale that differs from all others
    "sliding_window": 4,
    "sliding_window_pattern": 2,
    "partial_rotary_factor": 0.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "norm_topk_prob": True,
}
OTHERS = {"smollm3": {"no_rope_layer_interval": 2}}  # models that use another model's attention
SEGMENTS = mx.array([[0] * 5 + [1] * 9 + [2] * 6])
TEXTS = [slice(0, 5), slice(5, 14), slice(14, 20)]


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small query blocks for rows of any length."""
    monkeypatch.setattr(blockwise, "needs_blocks", lambda *_: True)
    monkeypatch.setattr(blockwise, "QUERY_BLOCK", 7)


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    """Relative error of the norms; values near 0 are compared with 0.1 per element."""
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 0.1 * a.size**0.5))


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def arrays(batch: int, heads: int, key_heads: int, tokens: int, size: int = 16) -> list[mx.array]:
    mx.random.seed(tokens)
    return [normal(batch, n, tokens, size) for n in (heads, key_heads, key_heads)]


def segments_of(batch: int, tokens: int, seed: int = 0) -> mx.array:
    """(B, T): texts of random length, and padding, whose segment is -1."""
    random = np.random.default_rng(seed)
    numbers = np.cumsum(random.random((batch, tokens)) < 0.1, axis=1)
    numbers[0, tokens - tokens // 5 :] = -1
    return mx.array(numbers.astype(np.int32))


def plain(q, k, v, scale, window=None, segments=None, chunk=None) -> mx.array:
    """Attention with one softmax over all keys and a mask."""
    repeats = q.shape[1] // k.shape[1]
    k, v = mx.repeat(k, repeats, axis=1), mx.repeat(v, repeats, axis=1)
    scores = scale * (q @ k.swapaxes(-1, -2))
    scores = mx.where(Mask(window, segments, chunk).array(q.shape[2]), scores, -mx.inf)
    return mx.softmax(scores, axis=-1) @ v


def with_gradients(attend: Callable[..., mx.array], given: list[mx.array], **mask: Any) -> Any:
    """[the output, the gradients of q, k and v]"""
    weight = mx.cos(mx.arange(given[0].size)).reshape(given[0].shape)

    def loss(q, k, v):
        y = attend(q, k, v, 0.3, **mask)
        return (y * weight).sum(), y

    (_, output), grads = mx.value_and_grad(loss, argnums=(0, 1, 2))(*given)
    return [output, *grads]


def assert_equal(given: list[mx.array], tolerance: float = 1e-5, **mask: Any) -> None:
    ours, theirs = with_gradients(attention, given, **mask), with_gradients(plain, given, **mask)
    for name, a, b in zip("oqkv", ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, b) < tolerance, name


@pytest.mark.parametrize("tokens", [1, 64, 150, 256])
@pytest.mark.parametrize("window", [None, 1, 33, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_output_and_gradients_equal_a_plain_softmax(tokens, window, packed):
    segments = segments_of(2, tokens) if packed else None
    assert_equal(arrays(2, 4, 2, tokens), window=window, segments=segments)


@given(
    batch=st.sampled_from([1, 3]),
    key_heads=st.integers(1, 2),
    repeats=st.sampled_from([1, 2, 7]),
    tokens=st.integers(1, 40),
    window=st.none() | st.integers(1, 45),
    seed=st.none() | st.integers(0, 99),
    block=st.integers(1, 20),
)
def test_equals_plain_softmax_for_any_shape_and_block_size(
    batch, key_heads, repeats, tokens, window, seed, block
):
    segments = None if seed is None else segments_of(batch, tokens, seed)
    given = arrays(batch, key_heads * repeats, key_heads, tokens, size=8)
    with (
        patch.object(blockwise, "QUERY_BLOCK", block),
        patch.object(blockwise, "FEWEST_QUERIES", 1),
    ):
        assert_equal(given, window=window, segments=segments)


def test_long_rows_use_smaller_query_blocks(monkeypatch):
    given = arrays(1, 4, 2, 150)
    monkeypatch.setattr(blockwise, "SCORE_BYTES", 4 * 4 * 150 * 20)
    rows = [rows.stop - rows.start for rows, _ in blockwise._blocks(given[0].shape, None, None, 64)]
    assert rows == [20] * 7 + [10]
    assert_equal(given)


def test_blocks_cover_exactly_the_visible_keys():
    blocks = list(blockwise._blocks((1, 2, 200, 8), 50, None, 64))
    assert blocks == [
        (slice(0, 64), slice(0, 64)),
        (slice(64, 128), slice(15, 128)),
        (slice(128, 192), slice(79, 192)),
        (slice(192, 200), slice(143, 200)),
    ]


def test_blocks_begin_with_the_chunk_of_their_first_query():
    blocks = list(blockwise._blocks((1, 2, 200, 8), None, 50, 64))
    assert [keys.start for _, keys in blocks] == [0, 50, 100, 150]


@pytest.mark.parametrize("chunk", [1, 7, 20, 64, 99, 100, 300])
@pytest.mark.parametrize("more", [{}, {"window": 9}, {"segments": segments_of(2, 100)}])
def test_chunks_equal_a_mask(chunk, more):
    assert_equal(arrays(2, 4, 2, 100), chunk=chunk, **more)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_error_is_below_the_input_precision(dtype):
    given = [x.astype(dtype) for x in arrays(2, 4, 2, 100)]
    exact = with_gradients(plain, [x.astype(mx.float32) for x in given])
    ours = with_gradients(attention, given)
    assert {x.dtype for x in ours} == {dtype}
    for a, b in zip(ours, exact, strict=True):
        assert relative_error(a, b) < mx.finfo(dtype).eps


def test_large_scores_stay_finite():
    q, k, v = arrays(1, 2, 2, 100)
    for x in with_gradients(attention, [1e3 * q, 1e3 * k, v], segments=segments_of(1, 100)):
        assert mx.isfinite(x).all().item()


@pytest.mark.memory
@pytest.mark.parametrize(
    ("compiled", "masked"),
    [(False, {"segments": segments_of(1, 4096)}), (True, {}), (True, {"chunk": 3000})],
    ids=["eager packed", "compiled causal", "compiled chunks"],
)
def test_memory_is_less_than_that_of_one_array_of_scores(compiled, masked):
    """A fifteenth to a ninth."""
    compute_in_order()
    tokens = 4096
    q, k, v = arrays(1, 1, 1, tokens, size=16)

    def loss(q, k, v):
        return mx.square(attention(q, k, v, 0.2, **masked)).sum()

    step = mx.value_and_grad(loss, argnums=(0, 1, 2))
    if compiled:
        step = mx.compile(step)
    mx.eval(q, k, v, masked)
    assert peak_of(lambda: step(q, k, v)) < tokens**2 * 4 / 8


# -- in the models of mlx-lm --------------------------------------------------------------


def network_of(architecture: str) -> nn.Module:
    """A small model with random weights."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    config = {"model_type": architecture, **CONFIG, **OTHERS.get(architecture, {})}
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict(config))
    network.update(tree_map(lambda p: p + 0.1 * normal(*p.shape), network.parameters()))
    return network


def attention_of(architecture: str) -> nn.Module:
    return network_of(architecture).layers[0].self_attn


@pytest.mark.parametrize("architecture", [*(n.split(".")[0] for n in blockwise.LAYOUTS), *OTHERS])
def test_every_known_attention_layer_equals_its_base(everywhere, architecture):
    base = attention_of(architecture)
    ours = BlockwiseAttention.from_base(base)
    x = normal(2, 20, CONFIG["hidden_size"])
    with patch.object(type(base), "__call__", lambda *_: pytest.fail("fell back")):
        causal = ours(x, "causal")
        masked = {mask: ours(x, mask) for mask in (Mask(), Mask(6), Mask(None, SEGMENTS))}
    assert relative_error(causal, base(x, "causal")) < 1e-5
    for mask, y in masked.items():
        assert relative_error(y, base(x, mask.array(20))) < 1e-5, mask

    for text in TEXTS:  # packed equals alone, because rotary positions are relative
        alone = base(x[:, text], "causal")
        assert relative_error(masked[Mask(None, SEGMENTS)][:, text], alone) < 1e-5


@pytest.mark.parametrize("architecture", [*(n.split(".")[0] for n in blockwise.LAYOUTS), *OTHERS])
def test_model_output_is_unchanged_by_put_blockwise(everywhere, architecture):
    pytest.importorskip(f"mlx_lm.models.{architecture}")
    network = network_of(architecture)
    tokens = mx.random.randint(0, 700, (2, 20))
    expected, names = network(tokens), [name for name, _ in tree_flatten(network.parameters())]
    assert replace_attention(network) == 2
    assert [name for name, _ in tree_flatten(network.parameters())] == names
    assert relative_error(network(tokens), expected) < 1e-5


def test_packed_texts_equal_the_same_texts_in_separate_rows(everywhere):
    network = network_of("qwen3")
    replace_attention(network)
    parts = parts_of(network, split(network))
    tokens = mx.random.randint(0, 700, (1, 20))
    packed = parts.run_blocks(tokens, SEGMENTS)
    for text in TEXTS:
        assert relative_error(packed[:, text], parts.run_blocks(tokens[:, text])) < 1e-5


def test_unknown_attention_layers_are_not_replaced():
    network = network_of("gemma2")
    assert replace_attention(network) == 0
    assert not any(isinstance(m, BlockwiseAttention) for m in network.modules())


def test_put_blockwise_twice_changes_nothing():
    network = network_of("llama")
    assert replace_attention(network) == 2
    assert replace_attention(network) == 0


def test_generation_with_a_cache_is_unchanged(everywhere):
    network = network_of("llama")

    def generate() -> list[int]:
        steps = generate_step(mx.array([5, 300, 17, 42]), network, max_tokens=8)
        return [int(token) for token, _ in steps]

    expected = generate()
    replace_attention(network)
    assert generate() == expected


def test_unsupported_masks_use_mlx_attention(everywhere):
    base = attention_of("llama")
    ours = BlockwiseAttention.from_base(base)
    x = normal(2, 9, CONFIG["hidden_size"])
    backward = mx.arange(9)[:, None] <= mx.arange(9)
    assert mx.array_equal(ours(x, backward), base(x, backward))
    assert mx.array_equal(ours(x), base(x))  # every key


def test_short_rows_use_mlx_attention():
    base = attention_of("llama")
    ours = BlockwiseAttention.from_base(base)
    x = normal(2, 9, CONFIG["hidden_size"])
    assert mx.array_equal(ours(x, "causal"), base(x, "causal"))
    assert mx.array_equal(ours(x, Mask()), base(x, "causal"))
    assert mx.array_equal(ours(x, Mask(9)), base(x, "causal"))
    assert mx.array_equal(ours(x[:, :1]), base(x[:, :1]))


def test_adapters_inside_attention_get_equal_gradients(everywhere, tmp_path):
    def gradients(put: bool) -> dict[str, mx.array]:
        network, _ = load_base(tmp_path / "m", mx.float32)
        model.add_adapters(network, TrainConfig(lora_layers=2, lora_targets=("all-linear",)))
        assert not put or replace_attention(network, lean=True) == 3
        mx.random.seed(1)
        network.update(
            tree_map(lambda p: p + 0.05 * normal(*p.shape), network.trainable_parameters())
        )
        tokens = mx.arange(20)[None]
        loss = nn.value_and_grad(network, lambda: mx.square(network(tokens)).mean())
        return dict(tree_flatten(loss()[1]))

    make_model(tmp_path / "m", "qwen2")
    expected, ours = gradients(put=False), gradients(put=True)
    assert ours.keys() == expected.keys()
    assert any("q_proj.lora_a" in name for name in ours)
    for name, grad in ours.items():
        assert relative_error(grad, expected[name]) < 1e-5, name


@pytest.mark.parametrize("mask", ["causal", None], ids=["blocks", "base"])
def test_skeleton_uses_the_arrays_put_into_it(monkeypatch, mask):
    monkeypatch.setattr(blockwise, "needs_blocks", lambda *_: mask == "causal")
    one, other = network_of("llama").layers
    x = normal(1, 9, CONFIG["hidden_size"])
    expected = other(x, mask)
    replace_attention(one)
    twin = skeleton(one)
    put(twin, arrays_of(other))
    assert relative_error(twin(x, mask), expected) < 1e-5
    assert relative_error(one(x, mask), expected) > 0.1


OLD, NEW = (0, 32, 1), (0, 32, 4)


@pytest.mark.parametrize(
    ("expected", "device", "version", "tokens", "segments", "window"),
    [
        (True, "metal", NEW, 100, True, None),  # packed or windowed: on every device
        (True, "cuda", NEW, 100, True, None),
        (True, "cpu", NEW, 80, False, 50),
        (True, "metal", NEW, 4096, False, 512),
        (False, "metal", NEW, 4096, False, 4096),  # a window that masks nothing
        (False, "cpu", NEW, 64, False, None),  # CPU: blocks are faster for longer rows
        (True, "cpu", NEW, 128, False, None),
        (True, "metal", OLD, 2048, False, None),  # MLX without a fused backward pass
        (False, "metal", OLD, 128, False, None),
        (False, "metal", NEW, 8192, False, None),
        (False, "metal", (0, 33, 0), 8192, False, None),
        (False, "cuda", OLD, 8192, False, None),
    ],
)
def test_wanted_depends_on_device_version_length_and_mask(
    expected, device, version, tokens, segments, window
):
    assert needs_blocks(device, version, tokens, segments, window) is expected


@pytest.mark.parametrize("window", [None, 6])
def test_sinks_take_their_share_of_attention(everywhere, window):
    given, sinks = arrays(2, 4, 2, 20, size=8), mx.array([0.5, -1.0, 2.0, 0.0])

    def mlx(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        mask = Mask(window).array(20)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)

    found = with_gradients(attention, given, window=window, queries=8, sinks=sinks)
    for ours, theirs in zip(found, with_gradients(mlx, given), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_known_results_equal_those_of_the_forward_pass(packed):
    q, k, v = arrays(2, 4, 2, 40, size=8)
    segments = mx.arange(40)[None] // 25 * mx.ones((2, 1), mx.int32) if packed else None
    options = {"scale": 0.3, "segments": segments, "queries": 16}
    results = blockwise.attention_results(q, k, v, **options)

    def loss(q, k, v, known=None):
        return (blockwise.attention_results(q, k, v, **options, known=known)[0] ** 2).sum()

    expected = mx.grad(loss, argnums=(0, 1, 2))(q, k, v)
    found = mx.grad(loss, argnums=(0, 1, 2))(q, k, v, results)
    for name, ours, theirs in zip("qkv", found, expected, strict=True):
        assert mx.array_equal(ours, theirs), name
