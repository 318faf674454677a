"""Read tensors of a file by rows; use a head that stays in its file."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_model, peak_of
from your_ai.engine.weights import FileRows, FileTensor, StreamedLayer, open_model
from your_ai.errors import RunError
from your_ai.nets.head import LinearHead
from your_ai.nets.losses import loss_and_gradient
from your_ai.objectives.objective import Targets
from your_ai.objectives.sft import SUPERVISED

KERNELS = "measured"  # whose peaks are


def tensor_of(folder, array: mx.array, dtype: mx.Dtype | None = None) -> FileTensor:
    file = folder / "model.safetensors"
    mx.save_safetensors(str(file), {"other": mx.ones(7), "weight": array})
    return FileTensor(file, "weight", dtype or array.dtype)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32, mx.uint8])
def test_rows_equal_those_of_the_file(tmp_path, dtype):
    array = (10 * mx.random.uniform(shape=(9, 4))).astype(dtype)
    tensor = tensor_of(tmp_path, array)
    assert tensor.shape == (9, 4)
    assert mx.array_equal(tensor.rows(2, 5), array[2:5])
    assert mx.array_equal(tensor.rows(6, 99), array[6:])


def test_floats_are_cast_to_the_model_dtype(tmp_path):
    array = mx.random.normal((5, 3)).astype(mx.bfloat16)
    rows = tensor_of(tmp_path, array, mx.float32).rows(0, 5)
    assert rows.dtype == mx.float32
    assert mx.array_equal(rows, array.astype(mx.float32))


@given(indices=st.lists(st.integers(0, 10), min_size=1, max_size=30))
def test_gather_keeps_the_order_of_indices(tmp_path_factory, indices):
    array = mx.arange(33, dtype=mx.float32).reshape(11, 3)
    tensor = tensor_of(tmp_path_factory.mktemp("t"), array)
    assert mx.array_equal(tensor.gather(np.array(indices)), array[mx.array(indices)])


def file_rows(folder, weight: mx.array, bits: int | None) -> tuple[FileRows, mx.array]:
    """The rows of a weight in a file, and the weight, after quantization."""
    arrays, quantization = {"weight": weight}, {}
    if bits:
        quantization = {"group_size": 32, "bits": bits}
        packed = mx.quantize(weight, **quantization)
        arrays = dict(zip(("weight", "scales", "biases"), packed, strict=True))
        weight = mx.dequantize(*packed, **quantization)
    file = folder / f"{len(weight)}.safetensors"
    mx.save_safetensors(str(file), arrays)
    tensors = {name: FileTensor(file, name, array.dtype) for name, array in arrays.items()}
    return FileRows(tensors, quantization), weight


@pytest.mark.parametrize("bits", [None, 4])
def test_streamed_head_equals_the_linear_layer(tmp_path, bits):
    x = mx.random.normal((2, 3, 64))
    rows, weight = file_rows(tmp_path, mx.random.normal((70, 64)), bits)
    assert rows.shape == (70, 64)
    assert mx.allclose(StreamedLayer(rows)(x), x @ weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.memory
@pytest.mark.parametrize("bits", [None, 4])
def test_last_slice_of_a_streamed_head_needs_no_more_than_the_others(tmp_path, bits):
    """The gradient waits until its logits are freed, and so do the rows of the targets."""
    hidden = mx.random.normal((1024, 256))
    tokens, weights = mx.arange(1024), mx.ones(1024)
    targets = Targets(tokens, tokens, weights, tokens)

    def peak(vocabulary: int) -> int:
        rows, _ = file_rows(tmp_path, mx.random.normal((vocabulary, 256)), bits)
        head = LinearHead(rows, before=lambda hidden: mx.fast.rms_norm(hidden, None, 1e-5))
        scale = mx.array(1.0)
        return peak_of(lambda: loss_and_gradient(hidden, targets, SUPERVISED, scale, head)[:2])

    mx.eval(hidden, targets[:4])
    most = max(peak(4 * 1024) for _ in range(5))  # how far MLX runs ahead depends on its threads
    assert most < 1.03 * max(peak(3 * 1024 + 512) for _ in range(5))


def test_missing_or_truncated_file_is_reported(tmp_path):
    tensor = tensor_of(tmp_path, mx.ones((9, 4)))
    assert tensor.shape == (9, 4)
    with tensor.file.open("r+b") as file:
        file.truncate(tensor.place[0] + 40)
    with pytest.raises(RunError, match=r"it is now shorter.*restore them"):
        tensor.rows(0, 9)
    tensor.file.unlink()
    with pytest.raises(RunError, match=r"No such file.*restore them"):
        tensor.gather(np.array([1]))


def test_a_model_that_has_no_head_in_its_files_opens(tmp_path):
    folder = make_model(tmp_path / "gemma3", "gemma3_text", bits=None)
    weights = mx.load(str(folder / "model.safetensors"))
    del weights["lm_head.weight"]  # as in every model of the hub: the embedding is the head
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    opened = open_model(folder, mx.float32)
    assert opened.can_stream
    assert "lm_head" not in opened.network
