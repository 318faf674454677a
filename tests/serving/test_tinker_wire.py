"""Requests and answers of Tinker's training API, as bytes from anyone."""

from __future__ import annotations

import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from your_ai.objectives.outside import BETA, CLIP_HIGH, CLIP_LOW, LOSSES
from your_ai.serving import tinker_wire as wire
from your_ai.serving.tinker_wire import RequestFields, SampledTokens, gradients_asked, message_class

DTYPES = {np.dtype("float32"): 1, np.dtype("int64"): 2, np.dtype("int32"): 3}
NEEDED = {"advantages": 1.0, "logprobs": -1.0}
REST = settings(max_examples=60, deadline=None)


def fill(message: Any, values: np.ndarray, csr: bool = False) -> None:
    """A tensor; as CSR its zeros are left out."""
    message.dtype = DTYPES[values.dtype]
    message.shape.extend(values.shape)
    if not csr:
        message.dense = values.tobytes()
        return
    rows, columns = np.nonzero(values)
    starts = np.searchsorted(rows, np.arange(len(values) + 1))
    message.sparse_csr.values = values[rows, columns].tobytes()
    message.sparse_csr.crow_indices = starts.astype("<i8").tobytes()
    message.sparse_csr.col_indices = columns.astype("<i8").tobytes()


def request(*texts: dict[str, Any], loss: str = "cross_entropy", **more: Any) -> Any:
    """A request. texts: the tensors by name, `tokens`, and names of CSR tensors in `csr`."""
    made = message_class("ForwardBackwardRequest")(
        model_id="s:train:0", seq_id=1, loss_fn=loss, **more
    )
    for text in texts:
        datum = made.data.add()
        text = dict(text)
        tokens, csr = np.asarray(text.pop("tokens"), np.int32), text.pop("csr", ())
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        for name, values in text.items():
            fill(datum.loss_fn_inputs.add(key=name).value, np.asarray(values), name in csr)
    return made


def read(*texts: dict[str, Any], **more: Any) -> wire.GradientsAsked:
    return gradients_asked(request(*texts, **more).SerializeToString())


def one(count: int = 3, **more: Any) -> dict[str, Any]:
    ids = np.arange(1, count + 1)
    return {"tokens": ids, "target_tokens": ids + 1, **more}


def refusal(asked: Callable[[], Any]) -> str | None:
    """Why something is refused, "" if it is not, and None if the reason is not one line."""
    try:
        asked()
    except ValueError as error:
        reason = str(error)
        return reason if reason and "\n" not in reason else None
    return ""


@st.composite
def tables(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Target ids, (T,) or (T, K), and weights of the same shape; 0 is no target of a CSR."""
    shape = draw(st.sampled_from([(1,), (7,), (1, 1), (4, 1), (5, 3), (2, 9)]))
    ids = draw(arrays.arrays(np.int64, shape, elements=st.integers(0, 2**31 - 1)))
    elements = st.sampled_from([0.0, 0.5, -1.0, 2.0])
    return ids, draw(arrays.arrays(np.float32, shape, elements=elements))


@REST
@given(tables(), st.booleans(), st.booleans())
def test_targets_and_weights_are_read_cell_by_cell(table, sparse_ids, sparse_weights):
    ids, weights = table
    flat = ids.ndim == 1
    csr = () if flat else ("target_tokens",) * sparse_ids + ("weights",) * sparse_weights
    asked = read(
        {"tokens": np.arange(len(ids)), "target_tokens": ids, "weights": weights, "csr": csr}
    )
    (text,) = asked.texts
    chosen = (
        np.argwhere(ids.reshape(len(ids), -1) != 0)
        if "target_tokens" in csr
        else np.argwhere(np.ones_like(ids.reshape(len(ids), -1)))
    )
    rows, columns = chosen[:, 0], chosen[:, 1]
    assert text.positions.tolist() == rows.tolist()
    assert text.targets.tolist() == ids.reshape(len(ids), -1)[rows, columns].tolist()
    wanted = weights.reshape(len(ids), -1)[rows, columns]
    assert text.columns["advantages"].tolist() == wanted.tolist()
    assert text.columns["advantages"].dtype == np.float32
    assert asked.shapes == (ids.shape,)


def test_value_of_a_token_is_that_of_all_its_targets():
    ids = np.array([[1, 2], [3, 4], [5, 6]])
    weights = np.array([1, 2, 3], np.float32)
    for csr in ((), ("target_tokens",)):
        (text,) = read(one(target_tokens=ids, weights=weights, csr=csr)).texts
        assert text.columns["advantages"].tolist() == [1, 1, 2, 2, 3, 3]
        assert text.positions.tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_has_its_thresholds(loss):
    needed = {n: np.full(3, v, np.float32) for n, v in NEEDED.items()}
    text = one(**({} if loss == "cross_entropy" else needed))
    name = "beta" if loss == "dro" else "clip_low_threshold"
    default = BETA if loss == "dro" else CLIP_LOW
    (plain,) = read(text, loss=loss).texts
    assert plain.columns["clip_low"].tolist() == [np.float32(default)] * 3
    assert plain.columns["clip_high"].tolist() == [np.float32(CLIP_HIGH)] * 3
    (given,) = read(text, loss=loss, loss_fn_config=[{"key": name, "value": 0.25}]).texts
    assert given.columns["clip_low"].tolist() == [0.25] * 3
    newer = [{"key": name, "value": {"number": 0.25}}]
    (same,) = read(text, loss=loss, loss_fn_config_v2=newer).texts
    assert same.columns["clip_low"].tolist() == [0.25] * 3
    own = {"clip_low_threshold": np.array([0.1, 0.2, 0.3], np.float32)}
    (each,) = read({**text, **own}, loss=loss).texts
    wanted = [BETA] * 3 if loss == "dro" else [0.1, 0.2, 0.3]
    np.testing.assert_allclose(each.columns["clip_low"], wanted, rtol=1e-6)


F32, I64 = np.float32, np.int64
ROW = np.ones(3, F32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"tokens": []}, "model_input"),
    "no targets": ({"target_tokens": None}, "target_tokens"),
    "targets of floats": ({"target_tokens": ROW}, "target_tokens"),
    "negative target": ({"target_tokens": np.array([1, -1, 2])}, "target_tokens"),
    "huge target": ({"target_tokens": np.array([1, 2**31, 2])}, "target_tokens"),
    "fewer targets": ({"target_tokens": np.array([1, 2])}, "target_tokens"),
    "more targets": ({"target_tokens": np.arange(4)}, "target_tokens"),
    "three dimensions": ({"target_tokens": np.ones((3, 1, 1), I64)}, "target_tokens"),
    "no columns": ({"target_tokens": np.ones((3, 0), I64)}, "target_tokens"),
    "NaN": ({"weights": ROW * np.nan}, "weights"),
    "Infinity": ({"weights": ROW * np.inf}, "weights"),
    "fewer weights": ({"weights": ROW[:2]}, "weights"),
    "wide weights": ({"weights": np.ones((3, 2), F32)}, "weights"),
    "a mask": ({"mask": ROW}, "mask"),
    "a line break": ({"a\nb": ROW}, "loss_fn_inputs"),
    "a NaN mask": ({"sequence_ratio_mask": ROW * np.nan}, "sequence_ratio_mask"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensor_is_refused_by_its_name(name):
    changes, named = WRONG[name]
    text = {n: v for n, v in (one() | changes).items() if v is not None}
    with pytest.raises(ValueError, match=named) as found:
        read(one(), text)
    assert "data[1]" in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("missing", ["advantages", "logprobs"])
@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "cross_entropy"])
def test_loss_names_the_tensor_that_it_needs(loss, missing):
    given = {n: np.full(3, v, F32) for n, v in NEEDED.items() if n != missing}
    with pytest.raises(ValueError, match=f"{loss} needs {missing}"):
        read(one(**given), loss=loss)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"loss": "rlhf"}, "loss_fn rlhf"),
        ({"loss": "a\nb"}, "loss_fn"),
        ({"loss_fn_config": [{"key": "beta", "value": 1}]}, "beta"),
        ({"loss_fn_config": [{"key": "clip_low_threshold", "value": math.nan}]}, "clip_low"),
        ({"loss_fn_config_v2": [{"key": "x\ny", "value": {"text": "a"}}]}, "loss_fn_config"),
    ],
)
def test_wrong_setting_of_a_loss_is_refused_by_its_name(changes, named):
    with pytest.raises(ValueError, match=named) as found:
        read(one(), **changes)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("number", [0, -1, -(2**31)])
def test_number_of_a_request_begins_at_one(number):
    made = request(one())
    made.seq_id = number
    with pytest.raises(ValueError, match="seq_id"):
        gradients_asked(made.SerializeToString())


def test_images_and_empty_requests_are_refused():
    made = request(one())
    made.data[0].model_input.add().image.SetInParent()
    with pytest.raises(ValueError, match="model_input"):
        gradients_asked(made.SerializeToString())
    with pytest.raises(ValueError, match="data: give 1 to"):
        read()


def csr(starts: list[int], columns: list[int], width: int = 4, rows: int = 3) -> bytes:
    made = request(one())
    tensor = made.data[0].loss_fn_inputs[0].value
    tensor.Clear()
    tensor.dtype = 2
    tensor.shape.extend([rows, width])
    tensor.sparse_csr.values = np.ones(len(columns), "<i8").tobytes()
    tensor.sparse_csr.crow_indices = np.array(starts, "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array(columns, "<i8").tobytes()
    return bytes(made.SerializeToString())


def test_right_csr_indices_are_read():
    (text,) = gradients_asked(csr([0, 1, 1, 3], [3, 0, 2])).texts
    assert text.positions.tolist() == [0, 2, 2]


BIG = 2**63 - 1


@pytest.mark.parametrize(
    ("starts", "columns", "shape"),
    [
        ([0, 2, 1, 3], [0, 1, 2], (3, 4)),  # not ascending
        ([1, 1, 1, 3], [0, 1, 2], (3, 4)),
        ([0, 1, 2, 2], [0, 1, 2], (3, 4)),
        ([0, 1, 3], [0, 1, 2], (3, 4)),
        ([], [], (3, 4)),
        ([0, BIG, -2, 3], [0, 1, 2], (3, 4)),  # whose differences are positive beyond int64
        ([0, 1, 2, 3], [0, 1, 4], (3, 4)),
        ([0, 1, 2, 3], [0, -1, 2], (3, 4)),
        ([0, 2, 2, 3], [1, 1, 2], (3, 4)),  # a cell twice
        ([0, 1, 2, 3], [0, 1, 2], (4, 4)),
        ([0, 1, 2, 3], [0, 1, 2], (3, 0)),
        ([0, 1, 2, 3], [0, 1, 2], (3, -1)),
        ([0, 1, 2, 3], [0, 1, 2], (3, 2**62)),
    ],
)
def test_wrong_csr_indices_are_refused(starts, columns, shape):
    with pytest.raises(ValueError, match="target_tokens"):
        gradients_asked(csr(starts, columns, shape[1], shape[0]))


def test_few_cells_of_a_huge_shape_take_little_memory():
    """Weights whose cells are others than those of the targets."""
    made = message_class("ForwardBackwardRequest")()
    made.ParseFromString(csr([0, 1, 2, 3], [5, 7, 9], 1 << 20))
    tensor = made.data[0].loss_fn_inputs.add(key="weights").value
    tensor.CopyFrom(made.data[0].loss_fn_inputs[0].value)
    tensor.dtype = 1
    tensor.sparse_csr.values = np.array([3, 4, 5], "<f4").tobytes()
    tensor.sparse_csr.col_indices = np.array([7, 7, 1], "<i8").tobytes()
    tracemalloc.start()
    (text,) = gradients_asked(made.SerializeToString()).texts
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text.columns["advantages"].tolist() == [0, 4, 0]
    assert peak < 1e6


def test_weights_without_cells_are_zero():
    weights = np.zeros((3, 2), F32)
    ids = np.ones((3, 2), I64)
    (text,) = read(one(target_tokens=ids, weights=weights, csr=("weights",))).texts
    assert not text.columns["advantages"].any()


# Bytes from anyone


@REST
@given(st.data())
def test_any_bytes_are_read_or_refused_with_one_line(data):
    body = request(one(), one(5, weights=np.ones(5, F32))).SerializeToString()
    kind = data.draw(st.sampled_from(["cut", "flip", "any"]))
    if kind == "cut":
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    elif kind == "flip":
        changed = bytearray(body)
        for _ in range(data.draw(st.integers(1, 4))):
            changed[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
        body = bytes(changed)
    else:
        body = data.draw(st.binary(max_size=200))
    assert refusal(lambda: gradients_asked(body)) is not None


@pytest.mark.parametrize(
    "body",
    [
        b"\x1a\x00" * (1 << 23),  # empty texts
        b"\x1a\x80\x80\x80\x08" + b"\x0a\x00" * (1 << 23),  # a text of empty chunks
        b"\x2a\x00" * (1 << 23),  # settings
        b"\x78\x00" * (1 << 23),  # unknown numbers
        b"\x1a\x87\x80\x80\x08\x12\x83\x80\x80\x08\x12\xff\xff\xff\x07\x22\xfb\xff\xff\x07"
        + b"\x01" * (1 << 24),  # a shape of 16 million dimensions
    ],
)
def test_many_small_parts_are_refused_before_they_take_memory(body):
    process = psutil.Process()
    before, began = process.memory_info().rss, time.process_time()
    with pytest.raises(ValueError, match="the body"):
        gradients_asked(body)
    assert process.memory_info().rss - before < 60e6
    assert time.process_time() - began < 5


def test_compressed_body_is_that_which_was_compressed():
    body = request(one()).SerializeToString()
    assert wire.decompressed(zstandard.ZstdCompressor().compress(body)) == body
    stream = zstandard.ZstdCompressor().compressobj()
    assert wire.decompressed(stream.compress(body) + stream.flush()) == body


def bomb(size: int, known: bool) -> bytes:
    packed = zstandard.ZstdCompressor().compressobj(size=size if known else -1)
    parts = [packed.compress(bytes(1 << 20)) for _ in range(size >> 20)]
    return b"".join([*parts, packed.flush()])


@pytest.mark.parametrize(
    "body",
    [
        b"", b"junk", zstandard.ZstdCompressor().compress(b"a" * 1000)[:-2],
        zstandard.ZstdCompressor().compress(b"a") + b"junk",
        zstandard.ZstdCompressor().compress(b"a") * 2,
        bomb(wire.MOST_BYTES + (1 << 20), True), bomb(wire.MOST_BYTES + (1 << 20), False),
        b"\x28\xb5\x2f\xfd\xe0" + (2**62).to_bytes(8, "little") + b"\x01\x00\x00",
    ],
    ids=["empty", "junk", "cut", "more", "two", "bomb", "bomb of unknown size", "a huge size"],
)  # fmt: skip
def test_wrong_compressed_bodies_are_refused(body):
    with pytest.raises(ValueError, match="the body") as found:
        wire.decompressed(body)
    assert "\n" not in str(found.value)


# Answers


@REST
@given(st.lists(st.integers(0, 9), max_size=5), st.booleans())
def test_answer_has_the_log_probabilities_of_each_text(counts, wide):
    shapes = [(count, 2) if wide else (count,) for count in counts]
    values = [np.arange(math.prod(shape), dtype=F32) for shape in shapes]
    answer = message_class("ForwardBackwardOutput")()
    answer.ParseFromString(wire.gradients_answer({"loss:sum": 2.5}, values, shapes))
    assert {entry.key: entry.value for entry in answer.metrics} == {"loss:sum": 2.5}
    for record, own, shape in zip(answer.loss_fn_outputs, values, shapes, strict=True):
        (entry,) = record.fields
        found = np.frombuffer(entry.value.data, "<f4").reshape(-1, *entry.value.trailing_shape)
        assert (entry.key, entry.value.dtype) == ("logprobs", 1)
        assert np.frombuffer(entry.value.offsets, "<i8").tolist() == [0, 4 * len(own)]
        assert np.array_equal(found.ravel(), own)
        assert found.shape == shape or not own.size


@REST
@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=4), st.booleans())
def test_answer_has_each_completion(completions, with_prompt):
    made = [
        SampledTokens(tuple(tokens), -np.arange(len(tokens), dtype=F32), len(tokens) % 2 == 0)
        for tokens in completions
    ]
    prompt = np.array([np.nan, -1, -2], F32) if with_prompt else None
    answer = message_class("SampleResponse")()
    answer.ParseFromString(wire.sample_answer(made, wire.ScoredPrompt(prompt), 3))
    for found, own in zip(answer.sequences, made, strict=True):
        assert tuple(np.frombuffer(found.tokens, "<i4")) == own.tokens
        assert np.array_equal(np.frombuffer(found.logprobs, "<f4"), own.logprobs)
        assert found.stop_reason == (0 if own.stopped else 1)
    assert len(answer.prompt_logprobs) == (12 if with_prompt else 0)


# Fields of JSON

ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.just(-(10**400))
    | st.floats() | st.text(max_size=5) | st.just("a" * 2000) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(ANY)
def test_any_field_is_read_or_refused_with_one_line(value):
    fields = RequestFields({"x": value})
    chunks = RequestFields({"x": {"chunks": [{"tokens": value}]}})
    for asked in (
        lambda: fields.text("x"), lambda: fields.whole("x", 0, 9, 1), lambda: fields.truth("x"),
        lambda: fields.number("x", 0, 9, 1.0), lambda: fields.fields("x"),
        lambda: fields.tokens("x"), lambda: chunks.tokens("x"), lambda: RequestFields(value),
        lambda: RequestFields({"x": {"chunks": value}}).tokens("x"),
        lambda: RequestFields({"x": {"chunks": [value]}}).tokens("x"),
    ):  # fmt: skip
        assert refusal(asked) is not None


@pytest.mark.parametrize("value", [True, 1.5, "1", [1], 10, -1, 10**30])
def test_whole_numbers_are_within_their_bounds(value):
    with pytest.raises(ValueError, match="x: give a whole number from 0 to 9"):
        RequestFields({"x": value}).whole("x", 0, 9)


@pytest.mark.parametrize("value", [True, "1", [1], 10, -1, math.nan, math.inf, 10**400])
def test_numbers_are_within_their_bounds(value):
    with pytest.raises(ValueError, match="x: give a number from 0 to 9"):
        RequestFields({"x": value}).number("x", 0, 9, 1.0)


@pytest.mark.parametrize("ids", [[], [True], [1.0], [-1], [2**31], ["1"], [None]])
def test_tokens_are_ids(ids):
    with pytest.raises(ValueError, match="x: give token ids"):
        RequestFields({"x": {"chunks": [{"tokens": ids}]}}).tokens("x")


def test_tokens_of_chunks_are_joined():
    chunks = [{"tokens": [1, 2]}, {"tokens": []}, {"tokens": [3]}]
    assert RequestFields({"x": {"chunks": chunks}}).tokens("x").tolist() == [1, 2, 3]
