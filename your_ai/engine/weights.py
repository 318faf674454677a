"""Streamed weights: a block is read from its file when it runs, and freed afterwards.

`stream` changes a model so that it keeps no frozen weights in memory: each block reads its
weights when it is called, the embedding gathers rows from the file, and the head goes through
slices of the vocabulary. So every caller of the model, including generation, streams.
(`stream_vocabulary` does this only for the embedding and the head; the staged plan uses it.)
The staged engine itself asks `Streamed` for the arrays of a block, and for those of the next
block while one runs.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.errors import RESUME, RunError, UserError, is_read_error
from your_ai.files import read_into
from your_ai.gates.untrusted import read_header
from your_ai.memory.facts import VOCABULARY
from your_ai.nets.adapter_kinds import compute_magnitudes
from your_ai.nets.head import Head, HeadRows, HeadSlice, LinearHead, part_of
from your_ai.nets.mlx_types import Arrays, load_arrays, memory_of
from your_ai.nets.model import EXPERTS, load_network
from your_ai.nets.parts import arrays_of, put, stand_ins
from your_ai.nets.rounding import dense
from your_ai.nets.split import StandIn, blocks_path, module_at
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.nets.vocabulary import TrainedLayer, rows_of_layer, start_rows, trained_layers

# Streamed experts: of a layer with many experts, read only those that its tokens are routed to


MOST_READ = 0.5  # share of the experts; if more are used, the layer is read as a whole

ReadExperts = Callable[[np.ndarray], mx.array]
"""(n,) indices of experts -> the rows (n, ...) of a tensor."""


class RoutedExperts(nn.Module):
    """Replaces a layer of experts while it runs.

    readers: for each of the layer's arrays, by name, what reads experts of it.
    """

    layer: nn.Module
    readers: dict[str, ReadExperts]

    def __init__(self, layer: nn.Module, readers: dict[str, ReadExperts]) -> None:
        super().__init__()
        vars(self).update(layer=layer, readers=readers)  # not children: their arrays stay unread

    def __call__(self, x: mx.array, indices: mx.array, **options: Any) -> mx.array:
        used, places = np.unique(np.array(indices), return_inverse=True)
        if len(used) > MOST_READ * self.layer.num_experts:
            return self.layer(x, indices, **options)
        twin = copy.copy(self.layer)
        for name, read in self.readers.items():
            twin[name] = read(used)
        return twin(x, mx.array(places.reshape(indices.shape).astype(np.uint32)), **options)


@contextlib.contextmanager
def only_routed(block: nn.Module, readers: dict[str, ReadExperts]) -> Iterator[None]:
    """Until the `with` block ends, the experts of a block are read as its tokens need them.

    readers: what reads experts of a tensor, by its path in the block.
    """
    modules = dict(block.named_modules())
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for path, layer in modules.items():
        own = {name: f"{path}.{name}" for name in layer if isinstance(layer[name], mx.array)}
        if isinstance(layer, EXPERTS) and readers.keys() >= set(own.values()):
            parent, _, leaf = path.rpartition(".")
            replaced.append((modules[parent], leaf, layer))
            routed = RoutedExperts(layer, {name: readers[path] for name, path in own.items()})
            modules[parent][leaf] = routed
    try:
        yield
    finally:
        for owner, leaf, layer in replaced:
            owner[leaf] = layer


# Reading weights from files while a model runs: the time lost to it, and hints to the system


F_RDADVISE = 44  # macOS: read a part of a file into the page cache, in the background
Part = tuple[int, int]  # (offset, bytes) in a file


class ReadClock:
    """The seconds in which a model waited for its weights."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time until the `with` block ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def hint(file: Path, parts: Iterable[Part], platform: str = sys.platform) -> None:
    """Ask the system to read parts of a file into its page cache, and do not wait for it.

    That memory belongs to the system, not to this process. A file that cannot be opened is left
    to the read that follows.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, size in parts:
                if platform == "linux":
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
                elif platform == "darwin":
                    advise_macos(descriptor, offset, size)
        finally:
            os.close(descriptor)


def advise_macos(descriptor: int, offset: int, size: int) -> None:
    """F_RDADVISE takes struct radvisory: off_t ra_offset, int ra_count."""
    import fcntl

    fcntl.fcntl(descriptor, F_RDADVISE, struct.pack("=qi4x", offset, min(size, 2**31 - 1)))


DTYPES = {
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "U8": mx.uint8,
}
CHANGED_BYTES = 4 << 20  # of weights that are changed at load and stay in memory


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a safetensors file, read by rows of its first axis."""

    file: Path
    name: str
    dtype: mx.Dtype
    """The dtype of the parameter in the model; values are cast to it when read."""

    @cached_property
    def place(self) -> tuple[int, mx.Dtype, tuple[int, ...]]:
        """(offset, dtype, shape), from the header of the file."""
        try:
            entry = next(entry for entry in read_header(self.file) if entry.name == self.name)
        except (UserError, StopIteration) as error:
            raise gone(self.file, "its contents changed") from error
        return entry.start, DTYPES[entry.kind], entry.shape

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place[2]

    @property
    def nbytes(self) -> int:
        _, kind, shape = self.place
        return math.prod(shape) * kind.size

    def rows(self, start: int, stop: int) -> mx.array:
        """Read the rows from `start` to `stop`, cast to `dtype`."""
        stop = min(stop, self.shape[0])
        return self._array([(start, stop - start)], stop - start)

    def gather(self, indices: np.ndarray) -> mx.array:
        """Read the rows at `indices`, (N,) -> (N, ...); each row is read once."""
        wanted, inverse = np.unique(indices, return_inverse=True)
        rows = self._array([(index, 1) for index in wanted.tolist()], len(wanted))
        return rows[mx.array(inverse.reshape(-1).astype(np.int32))]

    def _array(self, runs: list[tuple[int, int]], count: int) -> mx.array:
        """Read `count` rows; runs: (first row, number of rows) of each part."""
        offset, kind, shape = self.place
        width = math.prod(shape[1:]) * kind.size
        data = mx.zeros(count * width, mx.uint8)
        buffer, done = memory_of(data), 0
        try:
            with self.file.open("rb") as opened:
                for start, rows in runs:
                    part = buffer[done : done + rows * width]
                    done += read_into(opened.fileno(), part, offset + start * width)
        except OSError as error:
            raise gone(self.file, error.strerror) from error
        if done != count * width:
            raise gone(self.file, "it is now shorter")
        array = data.view(kind).reshape(count, *shape[1:]).astype(self.dtype)
        mx.eval(array)  # so that the bytes of the file can be freed
        return array


def gone(file: Path, reason: str | None) -> RunError:
    return RunError(
        f"{file}: can no longer be read ({reason}); this plan reads the model files for the "
        f"whole run: restore them, {RESUME}"
    )


def tensors_of(model: nn.Module, folder: Path) -> dict[str, FileTensor]:
    """The file tensor of each parameter of a model without adapters, by path.

    Parameters that the files store in a different form are left out; see `can_stream`.
    """
    raw: dict[str, mx.array] = {}
    found: dict[int, tuple[Path, str]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        for name, array in load_arrays(file).items():
            raw[name] = array
            found[id(array)] = (file, name)
    kept = list(raw.values())  # keep them alive, so that no id is used twice
    # Some architectures change themselves in it, and only once, so it is another model's.
    kind: Any = type(model)
    twin = kind(model.args) if hasattr(model, "args") else model  # never evaluated
    weights = twin.sanitize(raw) if hasattr(twin, "sanitize") else raw
    tensors: dict[str, FileTensor] = {}
    for path, parameter in tree_flatten(model.parameters()):
        stored = weights.get(path)
        if stored is not None and id(stored) in found and stored.shape == parameter.shape:
            tensors[path] = FileTensor(*found[id(stored)], parameter.dtype)
    del kept
    return tensors


def can_stream(model: nn.Module, tensors: dict[str, FileTensor]) -> bool:
    """Return whether the files store the parameters of a model without adapters in their own form.

    A few small ones that are changed at load, e.g. reshaped, stay in memory.
    """
    changed = (a.nbytes for path, a in tree_flatten(model.parameters()) if path not in tensors)
    return bool(sum(changed) <= CHANGED_BYTES)


HINTED_BLOCKS = 2  # blocks after those that are read, which the system reads in the background


@dataclass
class Streamed:
    """The frozen arrays of the blocks, read from files; implements `staged.Weights`."""

    files: list[dict[str, FileTensor]]
    """For each block, the file tensor of each path."""
    rest: list[Arrays]
    """For each block, the arrays that are in no file."""
    resident: int = 0
    """Blocks, from the last, that are read once and then stay in memory."""
    blocks_ahead: int = 1
    """Blocks that are read while the block before them runs."""
    clock: ReadClock = field(default_factory=ReadClock)
    streamed: bool = True
    stream: mx.Stream = field(default_factory=lambda: mx.new_stream(mx.cpu))
    _held: dict[int, Arrays] = field(default_factory=dict)
    """Of the resident blocks that were read."""
    _ahead: dict[int, Arrays] = field(default_factory=dict)
    _lazy: dict[Path, dict[str, mx.array]] = field(default_factory=dict)
    """Arrays of open files that nobody took yet; none is evaluated."""

    def read(self, index: int) -> Arrays:
        """The arrays of a block, in memory. Waits until they are read."""
        if index in self._held:
            return self._held[index]
        arrays = self._ahead.pop(index, None) or self.load(index)
        with self.clock.waiting(), self.reading(index):
            mx.eval(arrays)
        if self.is_resident(index):
            self._held[index] = arrays
        return arrays

    @contextlib.contextmanager
    def reading(self, index: int) -> Iterator[None]:
        """Raise RunError, which names a file, where the block's arrays cannot be read."""
        try:
            yield
        except RuntimeError as error:
            if not is_read_error(error):
                raise
            files = sorted({tensor.file for tensor in self.files[index].values()})
            raise gone(files[0], str(error)) from error

    def ahead(self, indices: Iterable[int]) -> None:
        left = [index for index in indices if index not in self._held]
        now, later = left[: self.blocks_ahead], left[self.blocks_ahead :][:HINTED_BLOCKS]
        self._ahead = {index: self._ahead.get(index) or self.load(index) for index in now}
        mx.async_eval(self._ahead)
        for index in later:
            self._hint(index)

    def again(self, index: int, arrays: Arrays) -> None:
        own = self.files[index].keys() | self.rest[index].keys()
        self._ahead = {index: {name: array for name, array in arrays.items() if name in own}}

    def hold(self, resident: int, blocks_ahead: int) -> None:
        """From now on, keep this many blocks in memory, and read this many ahead."""
        self.resident, self.blocks_ahead = resident, blocks_ahead
        self._held = {i: arrays for i, arrays in self._held.items() if self.is_resident(i)}
        self._ahead = {}

    def forget(self) -> int:
        """Free the resident blocks, so that they are read again; the bytes of that."""
        freed = sum(
            array.nbytes
            for index, arrays in self._held.items()
            for path, array in arrays.items()
            if path in self.files[index]
        )
        self._held, self._ahead = {}, {}
        return freed

    def move(self, index: int, tensors: dict[str, FileTensor]) -> None:
        """From now on, read some arrays of a block from these files, which may have replaced others
        of the same name."""
        if tensors:
            self.files[index] |= tensors
            self._held.pop(index, None)
            self._ahead.pop(index, None)
            for file in {tensor.file for tensor in tensors.values()}:
                self._lazy.pop(file, None)
            vars(self).pop("_places", None)

    def is_resident(self, index: int) -> bool:
        return index >= len(self.files) - self.resident

    def load(self, index: int) -> Arrays:
        """Make new lazy arrays of a block, which are freed after their last use."""
        arrays = dict(self.rest[index])
        for path, tensor in self.files[index].items():
            arrays[path] = self._take(tensor).astype(tensor.dtype, stream=self.stream)
        return arrays

    def _take(self, tensor: FileTensor) -> mx.array:
        """A new lazy array. A file is opened again only when one of its arrays was taken before:
        opening it takes 10 ms if it has all blocks of a model.
        """
        if tensor.name not in self._lazy.get(tensor.file, {}):
            try:
                self._lazy[tensor.file] = load_arrays(tensor.file, self.stream)
            except RuntimeError as error:
                raise gone(tensor.file, str(error)) from error
        if tensor.name not in self._lazy[tensor.file]:
            raise gone(tensor.file, "its contents changed")
        return self._lazy[tensor.file].pop(tensor.name)

    def _hint(self, index: int) -> None:
        for file, parts in self._places[index].items():
            hint(file, parts)

    @cached_property
    def _places(self) -> list[dict[Path, list[Part]]]:
        """The parts of each block's files; none if a header cannot be read."""
        every = {tensor.file for tensors in self.files for tensor in tensors.values()}
        known: dict[Path, dict[str, Part]] = {file: {} for file in every}
        for file, places in known.items():
            with contextlib.suppress(UserError):  # reading the block says what is wrong
                places |= {e.name: (e.start, e.end - e.start) for e in read_header(file)}
        found: list[dict[Path, list[Part]]] = []
        for tensors in self.files:
            parts: dict[Path, list[Part]] = {}
            for tensor in tensors.values():
                if tensor.name in known[tensor.file]:
                    parts.setdefault(tensor.file, []).append(known[tensor.file][tensor.name])
            found.append(parts)
        return found


@dataclass(frozen=True)
class FileRows:
    """The rows of a layer's weight, read from its file on request; implements `head.HeadRows`.

    tensors: weight, and scales, biases and bias if the layer has them.
    """

    tensors: dict[str, FileTensor]
    quantization: dict[str, Any]
    clock: ReadClock = field(default_factory=ReadClock)

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""
        if "scales" in self.tensors:
            rows, groups = self.tensors["scales"].shape
            return rows, groups * self.quantization["group_size"]
        rows, width = self.tensors["weight"].shape
        return rows, width

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        mx.eval(*after)  # before reading more
        with self.clock.waiting():
            arrays = {name: tensor.rows(start, stop) for name, tensor in self.tensors.items()}
        return part_of(arrays, self.quantization)

    def gather(self, tokens: mx.array) -> mx.array:
        indices = np.array(tokens).reshape(-1)
        with self.clock.waiting():
            rows = {n: tensor.gather(indices) for n, tensor in self.tensors.items() if n != "bias"}
        return dense(rows, self.quantization)


class StreamedLayer(nn.Module):
    """An embedding or a linear head whose weight stays in its file.

    last_only: compute logits only at the last position.
    """

    def __init__(self, rows: FileRows) -> None:
        super().__init__()
        self.rows, self.last_only = rows, False

    @property
    def weight(self) -> mx.array:
        """(V, D), all of it in memory, for models that use it in their own way."""
        count, _ = self.rows.shape
        return self.rows.gather(mx.arange(count))

    def __call__(self, x: mx.array) -> mx.array:
        if mx.issubdtype(x.dtype, mx.floating):
            return self.as_linear(x)
        return self.rows.gather(x).reshape(*x.shape, -1)

    def as_linear(self, x: mx.array) -> mx.array:
        """(..., T, D) -> (..., T or 1, V), slice by slice."""
        x = x[..., -1:, :] if self.last_only else x
        flat = x.reshape(-1, x.shape[-1])
        found: list[mx.array] = []
        for start, stop in LinearHead(self.rows).slices(len(flat)):
            found.append(self.rows.part(start, stop, found[-1:]).forward(flat))
            mx.eval(found[-1])
        return mx.concatenate(found, axis=-1).reshape(*x.shape[:-1], -1)


def stream(
    model: nn.Module,
    tensors: dict[str, FileTensor],
    resident: int = 0,
    blocks_ahead: int = 1,
    holds_vocabulary: bool = False,
) -> tuple[list[nn.Module], Streamed]:
    """Change a model with adapters, in place, to read its frozen weights from their files.

    resident, blocks_ahead: as of `Streamed`. holds_vocabulary: leave embedding and head as they
        are.

    Returns its original blocks, whose weights were never read, and the source of their arrays.
    Raises UserError if the blocks of the model are not one list.
    """
    place = blocks_path(model)
    if not place:
        raise UserError("--plan streamed: the blocks of this model are not one list")
    names = {id(module): name for name, module in model.named_modules()}
    blocks = list(model.layers)
    files: list[dict[str, FileTensor]] = []
    rest: list[Arrays] = []
    unread: list[Arrays] = []
    for block in blocks:
        trained = dict(tree_flatten(block.trainable_parameters()))
        mine: dict[str, FileTensor] = {}
        other: Arrays = {}
        for path, array in arrays_of(block).items():
            tensor = tensors.get(f"{names[id(block)]}.{path}".replace(".linear.", "."))
            if tensor is not None:
                mine[path] = tensor
            elif path not in trained:
                other[path] = array
        files.append(mine)
        rest.append(other)
    weights = Streamed(files, rest, resident, blocks_ahead)
    for index, block in enumerate(blocks):
        put(block, weights.load(index))
        compute_magnitudes(block)
        own = dict(tree_flatten(block.trainable_parameters()))
        moving = {name: array for name, array in own.items() if name in files[index]}
        mx.eval([array for name, array in own.items() if name not in moving], rest[index])
        # Arrays of files that are replaced would keep the old ones on disk.
        unread.append(weights.load(index) | stand_ins(moving))
        put(block, unread[index])

    readers: list[dict[str, ReadExperts]]
    readers = [{path: tensor.gather for path, tensor in mine.items()} for mine in files]

    def run(index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            stays = weights.is_resident(index)
            put(blocks[index], weights.read(index) if stays else weights.load(index))
            try:
                routed = only_routed(blocks[index], {} if stays else readers[index])
                with routed, weights.reading(index):
                    result = blocks[index](*args, **kwargs)
                    mx.eval(result)
                return result
            finally:
                put(blocks[index], unread[index])

        return forward

    if not holds_vocabulary:
        stream_vocabulary(model, tensors, weights.clock)
    replaced = [StandIn(block, run(index)) for index, block in enumerate(blocks)]
    module_at(model, place[:-1])[place[-1]] = replaced  # `model.layers` may be a copy of the list
    return blocks, weights


def stream_vocabulary(
    model: nn.Module, tensors: dict[str, FileTensor], clock: ReadClock | None = None
) -> dict[str, nn.Module]:
    """Change the embeddings and the head, in place, to read their rows from their files.

    clock: counts the time of these reads.

    Returns the original layers by path; `put_layers` restores them.
    """
    before: dict[str, nn.Module] = {}
    blocks = ".".join(map(str, blocks_path(model)))
    for name, module in model.named_modules():
        in_files = name.removesuffix(".linear")  # of a layer of which something is trained
        leaf = in_files.rpartition(".")[2]
        if blocks and name.startswith(f"{blocks}."):
            continue
        own = {n: tensors[f"{in_files}.{n}"] for n in module if f"{in_files}.{n}" in tensors}
        if leaf in VOCABULARY and own.keys() == arrays_of(module).keys():
            before[name] = module
            rows = rows_in_files(module, own, clock or ReadClock())
            put_layers(model, {name: StreamedLayer(rows)})
    return before


def rows_in_files(layer: nn.Module, tensors: dict[str, FileTensor], clock: ReadClock) -> FileRows:
    """The rows of an embedding or a head; tensors: of its arrays, by name."""
    options = ("group_size", "bits", "mode") if "scales" in tensors else ()
    quantization = {name: vars(layer)[name] for name in options if name in vars(layer)}
    return FileRows(tensors, quantization, clock)


def start_vocabulary(opened: Opened, spelled: Mapping[int, Sequence[int]]) -> None:
    """Set what is trained of the vocabulary of a model to its first values; spelled: as of
    `vocabulary.start_rows`."""
    for layer in trained_layers(opened.network):
        start_rows(layer, first_rows(layer, opened.tensors), spelled)


def first_rows(layer: TrainedLayer, tensors: dict[str, FileTensor]) -> HeadRows:
    """The base's rows of a layer that is trained, read from their file if they are there."""
    base = layer.base_layer
    own = {n: tensors[f"{layer.path}.{n}"] for n in base if f"{layer.path}.{n}" in tensors}
    if own.keys() != base.keys():
        return rows_of_layer(base)
    return rows_in_files(base, own, ReadClock())


def put_layers(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Replace the layers at the given paths."""
    modules = dict(model.named_modules())
    for name, layer in layers.items():
        parent, _, leaf = name.rpartition(".")
        modules[parent][leaf] = layer


@contextlib.contextmanager
def last_position_only(model: nn.Module) -> Iterator[None]:
    """Compute logits only at the last position until the `with` block ends, for generation.

    A head in memory is lazy, so the logits of a prompt are never computed. A head in a file
    would compute V logits for each token of the prompt.
    """
    layers = [module for module in model.modules() if isinstance(module, StreamedLayer)]
    try:
        for layer in layers:
            layer.last_only = True
        yield
    finally:
        for layer in layers:
            layer.last_only = False


def reads_file(head: Head) -> bool:
    """Return whether a head, or that of the teacher beside it, reads its rows from a file."""
    if not isinstance(head, LinearHead):
        return False
    rows = [head.rows, *([] if head.teacher is None else [head.teacher.head.rows])]
    return any(isinstance(each, FileRows) for each in rows)


def streams_vocabulary(model: nn.Module) -> bool:
    return any(isinstance(module, StreamedLayer) for module in model.modules())


# Load a model folder. Training, evaluation, generation, bench and doctor all load models here


@dataclass(frozen=True)
class Opened:
    """A model with lazy weights: they are read from the files on first use."""

    folder: Path
    network: nn.Module
    config: dict[str, Any]
    """The model's config.json, as mlx-lm loads it."""
    dtype: mx.Dtype
    """The dtype of the computation."""
    tensors: dict[str, FileTensor]
    """The place in the folder's files of each array of the network."""
    can_stream: bool
    """Whether the files store all weights in the form that the network uses."""

    def tokenizer(self, files: Path | None = None) -> Any:
        """Load the tokenizer of the folder. Raises UserError if it cannot be loaded.

        files: as of `open_tokenizer`.
        """
        return open_tokenizer(self.folder, files)


def open_model(folder: Path, dtype: mx.Dtype) -> Opened:
    """Open a model. Raises UserError if its folder is incomplete or mlx-lm cannot load it."""
    network, config = load_network(folder, dtype)
    tensors = tensors_of(network, folder)
    return Opened(folder, network, config, dtype, tensors, can_stream(network, tensors))


def prepare_for_generation(opened: Opened, streams: bool) -> nn.Module:
    """Prepare the network for generation; streams: read weights from their files per token."""
    network = opened.network
    network.eval()
    dequantize_on_the_cpu(network)
    if streams:
        stream(network, opened.tensors)
    return network
