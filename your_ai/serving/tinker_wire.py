"""The requests and answers of Tinker's training API, as bytes: one gate for each field.

Gradients are asked for with protobuf, which may be compressed by zstd, and all else with JSON. The
messages are described here by their field numbers. Everything that comes from a client is checked:
what is wrong raises ValueError, whose text names the field.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import zstandard
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from your_ai.data.target_columns import ColumnName
from your_ai.gates.text import shown
from your_ai.generation.likely import TokensAtPlaces
from your_ai.objectives.outside import BETA, CLIP_HIGH, CLIP_LOW, LOSSES
from your_ai.training.outside_texts import OutsideText

PACKAGE = "tinker_public"
MOST_BYTES = 1 << 23  # of a request that is decompressed; clients send at most 5 MB and a text
MOST_FIELDS = 1 << 19  # of a request, since an empty one takes 50 times the memory of its 2 bytes
MOST_TEXTS = 1 << 14
MOST_TARGETS = 1 << 21  # of a request
NO_REQUEST = "the body is no ForwardBackwardRequest"
INPUTS = (
    *("target_tokens", "weights", "advantages", "logprobs", "sequence_ratio_mask"),
    *("clip_low_threshold", "clip_high_threshold"),
)
Described = descriptor_pb2.FieldDescriptorProto
TYPES = {
    "double": Described.TYPE_DOUBLE,
    "int64": Described.TYPE_INT64,
    "int32": Described.TYPE_INT32,
    "bool": Described.TYPE_BOOL,
    "string": Described.TYPE_STRING,
    "bytes": Described.TYPE_BYTES,
    "uint32": Described.TYPE_UINT32,
}
# message -> its fields: number, name, type; `*` is repeated, `?` may be absent
MESSAGES: dict[str, tuple[tuple[int, str, str], ...]] = {
    "SparseCsr": (
        (1, "values", "bytes"), (2, "crow_indices", "bytes"), (3, "col_indices", "bytes"),
    ),
    "Tensor": (
        (1, "dense", "bytes?"), (2, "sparse_csr", "SparseCsr"), (3, "dtype", "int32"),
        (4, "shape", "int64*"),
    ),
    "NamedTensor": ((1, "key", "string"), (2, "value", "Tensor")),
    "EncodedText": ((1, "tokens", "bytes"),),
    "Unread": (),
    "Chunk": ((1, "encoded_text", "EncodedText"), (2, "image", "Unread"), (3, "dmel", "Unread")),
    "Datum": ((1, "model_input", "Chunk*"), (2, "loss_fn_inputs", "NamedTensor*")),
    "NamedNumber": ((1, "key", "string"), (2, "value", "double")),
    "ForwardBackwardRequest": (
        (1, "model_id", "string"), (2, "seq_id", "int32"), (3, "data", "Datum*"),
        (4, "loss_fn", "string"), (5, "loss_fn_config", "NamedNumber*"),
        (6, "forward_only", "bool"), (7, "loss_fn_config_v2", "NamedValue*"),
    ),
    "NamedValue": ((1, "key", "string"), (2, "value", "ConfigValue")),
    "ConfigValue": ((1, "number", "double"), (2, "text", "string")),
    "BatchedTensor": (
        (1, "data", "bytes"), (2, "offsets", "bytes"), (3, "dtype", "int32"),
        (4, "trailing_shape", "int64*"),
    ),
    "NamedBatched": ((1, "key", "string"), (2, "value", "BatchedTensor")),
    "ArrayRecord": (
        (1, "type_tag", "string"), (2, "fields", "NamedBatched*"), (3, "num_datums", "int64"),
    ),
    "ForwardBackwardOutput": (
        (1, "loss_fn_output_type", "string"), (2, "loss_fn_outputs", "ArrayRecord*"),
        (3, "metrics", "NamedNumber*"),
    ),
    "TopkLogprobs": (
        (1, "token_ids", "bytes"), (2, "logprobs", "bytes"), (3, "k", "uint32"),
        (4, "length", "uint32"),
    ),
    "SampledSequence": (
        (1, "stop_reason", "int32"), (2, "tokens", "bytes"), (3, "logprobs", "bytes?"),
        (4, "topk_sampled_logprobs", "TopkLogprobs"),
    ),
    "SampleResponse": (
        (1, "sequences", "SampledSequence*"), (2, "prompt_logprobs", "bytes?"),
        (3, "topk_prompt_logprobs", "TopkLogprobs"), (4, "prompt_cache_hit_tokens", "int32"),
        (5, "target_prompt_logprobs", "Tensor"), (6, "prompt_alt_tokens", "PromptAltTokens"),
    ),
    "PromptAltTokens": ((1, "tokens", "Tensor"), (2, "logprobs", "Tensor")),
}  # fmt: skip
NUMBERS: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
FLOAT32, INT64 = 1, 2
STOP, LENGTH = 0, 1  # why a sequence ended
NO_TOP = -99999.0  # of the token 0: there is none
MOST_CELLS = 1 << 19  # of all tables of an answer, beside its tokens


@cache
def message_class(name: str) -> Any:
    """The class of a message of `MESSAGES`."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker.proto", package=PACKAGE, syntax="proto3")
    for own, fields in MESSAGES.items():
        made = file.message_type.add(name=own)
        for number, field, kind in fields:
            kind, many = kind.rstrip("?*"), kind.endswith("*")
            added = made.field.add(name=field, number=number)
            added.label = Described.LABEL_REPEATED if many else Described.LABEL_OPTIONAL
            added.type = TYPES.get(kind, Described.TYPE_MESSAGE)
            if kind not in TYPES:
                added.type_name = f".{PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


@dataclass(frozen=True)
class GradientsAsked:
    """A request for gradients, or with `forward_only` for log-probabilities."""

    model_id: str
    seq_id: int
    loss: str
    texts: tuple[OutsideText, ...]
    shapes: tuple[tuple[int, ...], ...]
    """Of the targets of each text."""
    forward_only: bool

    @property
    def size_bytes(self) -> int:
        return sum(text.nbytes for text in self.texts)


def decompressed(body: bytes) -> bytes:
    """The content of a body that zstd compressed, of one frame. Raises ValueError."""
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if MOST_BYTES < size < zstandard.CONTENTSIZE_UNKNOWN:
            raise ValueError(f"the body has more than {MOST_BYTES} bytes")
        opened = zstandard.ZstdDecompressor(max_window_size=MOST_BYTES)
        return opened.decompress(body, max_output_size=MOST_BYTES, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"the body is no zstd of at most {MOST_BYTES} bytes ({error})") from error


def check_fields(body: memoryview, message: str, room: int) -> int:
    """Return what is left of `room` after the fields of a message. Raises ValueError if nothing is.

    Numbers that are packed count as one field for each byte.
    """
    kinds = {number: kind.rstrip("?*") for number, _, kind in MESSAGES[message]}
    at = 0
    while at < len(body):
        key, at = varint(body, at)
        room -= 1
        size = {1: 8, 5: 4}.get(key & 7, 0)
        if key & 7 in (0, 2):
            number, at = varint(body, at)
            size = number if key & 7 == 2 else 0
        elif not size:
            raise ValueError(NO_REQUEST)
        kind = kinds.get(key >> 3, "bytes")
        if key & 7 == 2 and kind in MESSAGES:
            room = check_fields(body[at : at + size], kind, room)
        elif key & 7 == 2 and kind not in ("bytes", "string"):
            room -= size
        at += size
        if room < 0:
            raise ValueError(f"the body has more than {MOST_FIELDS} fields")
    return room


def varint(body: memoryview, at: int) -> tuple[int, int]:
    """A number of protobuf, and the place after it. Raises ValueError."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(body):
            break
        value |= (body[at] & 127) << shift
        at += 1
        if body[at - 1] < 128:
            return value, at
    raise ValueError(NO_REQUEST)


class RefusedInTurn(ValueError):
    """A request of a model is refused, whose number must not be waited for."""

    def __init__(self, reason: object, model_id: str, seq_id: int) -> None:
        super().__init__(str(reason))
        self.model_id, self.seq_id = model_id, seq_id


def gradients_asked(body: bytes) -> GradientsAsked:
    """Read a request for gradients. Raises ValueError."""
    check_fields(memoryview(body), "ForwardBackwardRequest", MOST_FIELDS)
    asked = message_class("ForwardBackwardRequest")()
    try:
        asked.ParseFromString(body)
    except DecodeError as error:
        raise ValueError(NO_REQUEST) from error
    if asked.seq_id < 1:
        raise ValueError("seq_id: give a whole number from 1 on")
    try:
        return gradients_in(asked)
    except ValueError as error:
        raise RefusedInTurn(error, asked.model_id, asked.seq_id) from error


def gradients_in(asked: Any) -> GradientsAsked:
    """Read the fields of a request for gradients. Raises ValueError."""
    loss = asked.loss_fn
    if loss not in LOSSES:
        raise ValueError(f"loss_fn {shown(loss)}: give {', '.join(LOSSES)}")
    config = {entry.key: entry.value for entry in asked.loss_fn_config}
    for entry in asked.loss_fn_config_v2:
        if entry.value.text:
            raise ValueError(f"loss_fn_config: {shown(entry.key)} must be a number")
        config[entry.key] = entry.value.number
    if not 0 < len(asked.data) <= MOST_TEXTS:
        raise ValueError(f"data: give 1 to {MOST_TEXTS} texts")
    thresholds = thresholds_of(config, loss)
    texts, shapes, room = [], [], MOST_TARGETS
    for number, datum in enumerate(asked.data):
        try:
            text, shape = text_of(datum, loss, thresholds, room)
        except ValueError as error:
            raise ValueError(f"data[{number}]: {error}") from error
        room -= len(text.targets)
        texts.append(text)
        shapes.append(shape)
    return GradientsAsked(
        asked.model_id, asked.seq_id, loss, tuple(texts), tuple(shapes), asked.forward_only
    )


def thresholds_of(config: Mapping[str, float], loss: str) -> tuple[float, float]:
    """The thresholds of all tokens, where a text gives none."""
    known = {"beta"} if loss == "dro" else {"clip_low_threshold", "clip_high_threshold"}
    for name, value in config.items():
        if name not in known:
            raise ValueError(f"loss_fn_config: {loss} has no {shown(name)}")
        if not math.isfinite(value):
            raise ValueError(f"loss_fn_config: {name} is not finite")
    if loss == "dro":
        return config.get("beta", BETA), CLIP_HIGH
    low, high = config.get("clip_low_threshold"), config.get("clip_high_threshold")
    return CLIP_LOW if low is None else low, CLIP_HIGH if high is None else high


def text_of(
    datum: Any, loss: str, thresholds: tuple[float, float], room: int
) -> tuple[OutsideText, tuple[int, ...]]:
    """A text of a request, and the shape of its targets. room: targets that it may have."""
    parts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError("model_input: only tokens can be trained here, no images or sounds")
        parts.append(numbers(chunk.encoded_text.tokens, 3, "model_input"))
    tokens = np.concatenate([*parts, np.zeros(0, np.int32)]).astype(np.int32)
    inputs = {entry.key: entry.value for entry in datum.loss_fn_inputs}
    if not len(tokens) or "target_tokens" not in inputs:
        raise ValueError("give tokens in model_input, and target_tokens")
    for name in inputs:
        if name not in INPUTS:
            raise ValueError(f"loss_fn_inputs: there is no {shown(name)}; give {', '.join(INPUTS)}")
    place, given, shape = cells(inputs["target_tokens"], "target_tokens", len(tokens), room)
    if given.dtype.kind != "i" or (len(given) and not 0 <= given.min() <= given.max() < 2**31):
        raise ValueError("target_tokens: give token ids")
    width = shape[1] if len(shape) > 1 else 1

    def values(name: str, default: float | None) -> np.ndarray:
        """(m,) of the targets."""
        if name not in inputs:
            if default is None:
                raise ValueError(f"{loss} needs {name}")
            return np.full(len(given), default, np.float32)
        at, found, own = cells(inputs[name], name, len(tokens), room)
        if not np.isfinite(found).all():
            raise ValueError(f"{name}: is not finite")
        if len(own) > 1 and own != shape:
            raise ValueError(f"{name}: has shape {own}, target_tokens {shape}")
        if own == shape and np.array_equal(at, place):
            return found.astype(np.float32)
        # What a tensor does not list is 0; not spread out, as few cells may have huge shapes.
        wanted, order = place if len(own) > 1 else place // width, np.argsort(at)
        spots = np.minimum(np.searchsorted(at, wanted, sorter=order), max(0, len(at) - 1))
        if not len(at):
            return np.zeros(len(given), np.float32)
        near = order[spots]
        return np.where(at[near] == wanted, found[near], 0).astype(np.float32)

    weighs = loss == "cross_entropy"
    columns: dict[ColumnName, np.ndarray] = {
        "advantages": values("weights", 1.0) if weighs else values("advantages", None),
        "old": values("logprobs", 0.0 if weighs else None),
        "clip_low": values("clip_low_threshold", thresholds[0]),
        "clip_high": values("clip_high_threshold", thresholds[1]),
    }
    if loss == "dro":
        columns["clip_low"] = np.full(len(given), thresholds[0], np.float32)
    counts = values("sequence_ratio_mask", 1.0) != 0
    positions = (place // width).astype(np.int32)
    return OutsideText(tokens, positions, given.astype(np.int32), columns, counts), shape


def cells(
    tensor: Any, name: str, rows: int, room: int
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """The places, (m,), of the values of a tensor, (m,), in the order of its rows; and its shape:
    (rows,) or (rows, k)."""
    if tensor.HasField("sparse_csr"):
        values = numbers(tensor.sparse_csr.values, tensor.dtype, name)
        starts = numbers(tensor.sparse_csr.crow_indices, INT64, name)
        columns = numbers(tensor.sparse_csr.col_indices, INT64, name)
        shape = tuple(tensor.shape)
        if len(shape) != 2 or shape[0] != rows or not 0 < shape[1] <= 1 << 20:
            raise ValueError(f"{name}: has shape {shape}, expected ({rows}, k)")
        if len(values) > room:
            raise ValueError(f"{name}: is too large")
        right = len(starts) == rows + 1 and starts[0] == 0 and starts[-1] == len(values)
        # Not by differences, which may be beyond int64.
        if not right or (starts[1:] < starts[:-1]).any() or len(columns) != len(values):
            raise ValueError(f"{name}: its CSR indices are wrong")
        if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
            raise ValueError(f"{name}: its CSR columns are out of range")
        places = np.repeat(np.arange(rows), np.diff(starts)) * shape[1] + columns
        if len(np.unique(places)) < len(places):
            raise ValueError(f"{name}: its CSR gives a cell twice")
        return places, values, shape
    values = numbers(tensor.dense, tensor.dtype, name)
    if len(values) > room:
        raise ValueError(f"{name}: is too large")
    shape = tuple(tensor.shape) or (len(values),)
    if shape[0] != rows or len(shape) > 2 or math.prod(shape) != len(values) or 0 in shape:
        raise ValueError(f"{name}: has shape {shape}, expected ({rows},) or ({rows}, k)")
    return np.arange(len(values)), values, shape


def numbers(data: bytes, dtype: int, name: str) -> np.ndarray:
    found = NUMBERS.get(dtype)
    if found is None or len(data) % found.itemsize:
        raise ValueError(f"{name}: its bytes are no numbers of its dtype")
    return np.asarray(np.frombuffer(data, found))


# Answers


def gradients_answer(
    metrics: Mapping[str, float], logprobs: Sequence[np.ndarray], shapes: Sequence[Sequence[int]]
) -> bytes:
    """The log-probabilities of the targets of each text, and metrics."""
    answer = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for values, shape in zip(logprobs, shapes, strict=True):
        record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=1)
        data = values.astype("<f4").tobytes()
        field = record.fields.add(key="logprobs")
        field.value.data, field.value.dtype = data, FLOAT32
        field.value.offsets = np.array([0, len(data)], "<i8").tobytes()
        # Of sparse targets, the values that were given.
        if len(values) == math.prod(shape):
            field.value.trailing_shape.extend(shape[1:])
    for name, value in metrics.items():
        answer.metrics.add(key=name, value=value)
    return bytes(answer.SerializeToString())


@dataclass(frozen=True)
class SampledTokens:
    """A completion, with the log-probability of each of its tokens."""

    tokens: tuple[int, ...]
    logprobs: np.ndarray
    stopped: bool
    top: TokensAtPlaces | None = None
    """The most likely tokens, if they were asked for."""


@dataclass(frozen=True)
class ScoredPrompt:
    """The answer on a prompt of n tokens."""

    logprobs: np.ndarray | None = None
    """(n,), NaN where there are none."""
    top: TokensAtPlaces | None = None
    """Of its last m tokens."""
    targets: tuple[TargetTable, np.ndarray] | None = None
    """Those that were asked for, and a log-probability for each cell."""
    alternatives: TokensAtPlaces | None = None
    """Of all its tokens but the first."""


def sample_answer(sequences: Sequence[SampledTokens], prompt: ScoredPrompt, length: int) -> bytes:
    """Completions of a prompt of `length` tokens."""
    answer = message_class("SampleResponse")()
    for sequence in sequences:
        added = answer.sequences.add(
            stop_reason=STOP if sequence.stopped else LENGTH,
            tokens=np.array(sequence.tokens, "<i4").tobytes(),
            logprobs=sequence.logprobs.astype("<f4").tobytes(),
        )
        if sequence.top is not None:
            write_top(added.topk_sampled_logprobs, sequence.top, len(sequence.tokens))
    if prompt.logprobs is not None:
        answer.prompt_logprobs = prompt.logprobs.astype("<f4").tobytes()
    if prompt.top is not None:
        write_top(answer.topk_prompt_logprobs, prompt.top, length)
    if prompt.targets is not None:
        table, values = prompt.targets
        write_tensor(answer.target_prompt_logprobs, values.astype("<f4"), table.shape, table.csr)
    if (found := prompt.alternatives) is not None:
        write_tensor(answer.prompt_alt_tokens.tokens, found.ids.astype("<i8"), found.ids.shape)
        write_tensor(
            answer.prompt_alt_tokens.logprobs, found.logprobs.astype("<f4"), found.ids.shape
        )
    return bytes(answer.SerializeToString())


def write_top(message: Any, found: TokensAtPlaces, length: int) -> None:
    """Write tokens of the last places of `length`; others are marked as having none."""
    count, k = found.ids.shape
    ids, logprobs = np.zeros((length, k), "<i4"), np.full((length, k), NO_TOP, "<f4")
    ids[length - count :], logprobs[length - count :] = found
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = k, length


def write_tensor(
    message: Any,
    values: np.ndarray,
    shape: Sequence[int],
    csr: tuple[np.ndarray, np.ndarray] | None = None,
) -> None:
    """Write a tensor; csr: as of `TargetTable`."""
    message.dtype = FLOAT32 if values.dtype.kind == "f" else INT64
    message.shape.extend(shape)
    if csr is None:
        message.dense = values.tobytes()
        return
    sparse, (starts, columns) = message.sparse_csr, csr
    sparse.values = values.tobytes()
    sparse.crow_indices = starts.astype("<i8").tobytes()
    sparse.col_indices = columns.astype("<i8").tobytes()


@dataclass(frozen=True)
class TargetTable:
    """Ids to score at the n - 1 places of a prompt after the first, a row for each place."""

    shape: tuple[int, int]
    rows: np.ndarray
    """(cells,) int64, the row of each cell."""
    ids: np.ndarray
    """(cells,) int64; -1 asks for nothing."""
    csr: tuple[np.ndarray, np.ndarray] | None
    """(rows + 1,) and (cells,) int64, where each row begins and the columns; None if all cells are
    given."""


# Fields of JSON


class RequestFields:
    """The fields of a JSON object from a client. Each method raises ValueError."""

    def __init__(self, body: Any, name: str = "the body") -> None:
        if not isinstance(body, dict):
            raise ValueError(f"{name} must be an object")
        self.body, self.name = body, name

    def text(self, name: str, default: str | None = None, most: int = 1000) -> str:
        value = self.body.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or not 0 < len(value) <= most:
            raise ValueError(f"{name}: give text of 1 to {most} characters")
        return value

    def whole(self, name: str, least: int, most: int, default: int | None = None) -> int:
        value = self.body.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"{name}: give a whole number from {least} to {most}")
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        value = self.body.get(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value <= most:  # so it is finite
            raise ValueError(f"{name}: give a number from {least:g} to {most:g}")
        return float(value)

    def table(self, name: str, rows: int) -> TargetTable | None:
        """Token ids in a table of so many rows, dense or sparse CSR; None if there is none."""
        if self.body.get(name) is None:
            return None
        given = self.fields(name)
        shape, ids = given.wholes("shape", 2), given.wholes("data", MOST_CELLS)
        if given.body.get("dtype") != "int64" or len(shape) != 2 or shape[0] != rows:
            raise ValueError(f"{name}: give int64 ids in the shape ({rows}, K)")
        if not len(ids) or (ids < -1).any():
            raise ValueError(f"{name}: give token ids, and -1 for none")
        width = int(shape[1])
        if given.body.get("sparse_crow_indices") is None:
            if len(ids) != rows * width:
                raise ValueError(f"{name}: has {len(ids)} ids, not {rows} x {width}")
            return TargetTable((rows, width), np.arange(len(ids)) // width, ids, None)
        starts = given.wholes("sparse_crow_indices", rows + 1)
        columns = given.wholes("sparse_col_indices", MOST_CELLS)
        counts = np.diff(starts)
        right = len(starts) == rows + 1 and starts[0] == 0 and starts[-1] == len(ids)
        if not right or (counts < 0).any() or len(columns) != len(ids):
            raise ValueError(f"{name}: the sparse indices do not fit")
        if (columns < 0).any() or (columns >= width).any():
            raise ValueError(f"{name}: a column is outside of the shape")
        return TargetTable(
            (rows, width), np.repeat(np.arange(rows), counts), ids, (starts, columns)
        )

    def wholes(self, name: str, most: int) -> np.ndarray:
        """(n,) int64 of a list of whole numbers."""
        value = self.body.get(name)
        if not isinstance(value, list) or len(value) > most or {*map(type, value)} - {int}:
            raise ValueError(f"{self.name}: {name}: give at most {most} whole numbers")
        if any(not -(2**31) <= each < 2**31 for each in value):
            raise ValueError(f"{self.name}: {name}: a number is too large")
        return np.array(value, np.int64)

    def truth(self, name: str, default: bool = False) -> bool:
        value = self.body.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{name}: give true or false")
        return value

    def fields(self, name: str) -> RequestFields:
        return RequestFields(self.body.get(name), name)

    def tokens(self, name: str) -> np.ndarray:
        """(n,) int32 of the chunks of a prompt."""
        chunks = self.fields(name).body.get("chunks")
        if not isinstance(chunks, list) or len(chunks) > MOST_TEXTS:
            raise ValueError(f"{name}: give chunks of tokens")
        parts: list[int] = []
        for chunk in chunks:
            ids = chunk.get("tokens") if isinstance(chunk, dict) else None
            if not isinstance(ids, list):
                raise ValueError(f"{name}: only tokens can be read here, no images or sounds")
            parts += ids
        if not parts or not all(type(each) is int and 0 <= each < 2**31 for each in parts):
            raise ValueError(f"{name}: give token ids")
        return np.array(parts, np.int32)
