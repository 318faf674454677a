"""An adapter, or the model with it, as llama.cpp reads it, and all that is built on that."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import importlib.util
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from your_ai.errors import UserError
from your_ai.export.fused_weights import DEQUANTIZED, fused_lazily
from your_ai.export.gguf_model import (
    Description,
    add_parameters,
    arranged,
    describe,
    name_of,
    rope_factors,
)
from your_ai.export.gguf_tokenizer import add_tokenizer
from your_ai.export.names import check_dense
from your_ai.files import TEMPORARY, sync
from your_ai.memory import allocator
from your_ai.modelfiles.shards import WriteProgress, compute, hold_memory
from your_ai.modelfiles.targets import unwritable
from your_ai.modelfiles.unfinished import check_disk
from your_ai.nets.model import load_network, load_tokenizer_of
from your_ai.nets.saved_adapter import Trained, put_adapter

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

# What gguf calls each type of the matrices, and a file with it.
KINDS = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
}
ROPE_FACTORS = "rope_freqs.weight"
PART_BYTES = 16 << 20  # of float32, converted at a time,
PARTS_HELD = 6  # and what is made of it on the way


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, lazy.

    parameter: of the network, as errors name it; kind: what it is written in; work_bytes: held
    beside it to put it in order.
    """

    name: str
    parameter: str
    array: mx.array
    kind: GGMLQuantizationType
    work_bytes: int = 0

    @property
    def written_bytes(self) -> int:
        from gguf import quant_shape_to_byte_shape

        return math.prod(quant_shape_to_byte_shape(self.array.shape, self.kind))


def write_adapter(trained: Trained, target: Path) -> None:
    """Write the run's adapter, in float32, to the file `target`; one that is there is replaced.

    Raises UserError for an adapter that llama.cpp cannot put on a model, and where `target`
    cannot be written.
    """
    require_library()
    adapter = trained.adapter
    if adapter.is_dora:
        raise UserError(f"{adapter.folder}: is DoRA, which llama.cpp has not; fuse it: --fused")
    if adapter.scale == 0:
        raise UserError(f"{adapter.folder}: its scale is 0, which llama.cpp takes for 1")
    check_dense(trained, "GGUF")
    network, config = load_network(trained.base, mx.float32)
    described = describe(trained.base, network, config)
    put_adapter(network, adapter)  # which finds out whether it fits
    tensors = adapter_tensors(described, trained)
    with writing(target, described) as writer:
        add_source(writer, trained, "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", adapter.scale * adapter.rank)
        for _ in write_tensors(adapter.folder, writer, tensors):
            pass


def write_model(
    trained: Trained, target: Path, kind: str, max_memory_gb: float | None = None
) -> Iterator[WriteProgress]:
    """Write the run's model with the adapter in it to the file `target`, a tensor at a time.

    kind: one of KINDS, of the matrices. A file that is there is replaced. Raises UserError for
    a model that llama.cpp does not have, too little memory or disk, and where `target` cannot
    be written; RunError where the model cannot be read to its end.
    """
    require_library()
    from gguf import LlamaFileType

    network, config = load_network(trained.base, mx.float32)
    described = describe(trained.base, network, config)
    del network
    tokenizer = load_tokenizer_of(trained.base, config.get("eos_token_id"))
    lazy = fused_lazily(trained, DEQUANTIZED, "float32", max_memory_gb)
    tensors = model_tensors(described, lazy.arrays, kind)
    allocator.free()
    largest = max(tensor.array.nbytes + tensor.work_bytes for tensor in tensors)
    needed = lazy.input_bytes + largest + PARTS_HELD * PART_BYTES
    hold_memory("exporting", needed, max_memory_gb, force=False)
    check_disk(target, sum(tensor.written_bytes for tensor in tensors))
    with writing(target, described) as writer:
        add_source(writer, trained, "model")
        writer.add_file_type(LlamaFileType[KINDS[kind][1]])
        add_parameters(writer, described)
        add_tokenizer(writer, trained.base, tokenizer, described.args.vocab_size)
        yield from write_tensors(trained.base, writer, tensors)


def require_library() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UserError("GGUF needs the package gguf; run: pip install 'your_ai[gguf]'")


def adapter_tensors(described: Description, trained: Trained) -> list[GgufTensor]:
    """lora_a (r, in) and lora_b (out, r) of each adapted layer, in float32."""
    found = []
    for layer, parts in trained.adapter.layers.items():
        weight = f"{layer}.weight"
        name = name_of(described, weight)
        lora_a, lora_b = (parts[part].T.astype(mx.float32) for part in ("lora_a", "lora_b"))
        lora_b = arranged(described, weight, lora_b)
        for part, array in (("lora_a", lora_a), ("lora_b", lora_b)):
            found.append(GgufTensor(f"{name}.{part}", layer, array, kind_of("f32", array)))
    return found


def model_tensors(
    described: Description, arrays: dict[str, mx.array], kind: str
) -> list[GgufTensor]:
    """arrays: the parameters by name, taken out."""
    found = []
    for parameter in list(arrays):
        array = arrays.pop(parameter)
        ordered = arranged(described, parameter, array)
        work_bytes = 0 if ordered is array else array.nbytes
        name = name_of(described, parameter)
        found.append(GgufTensor(name, parameter, ordered, kind_of(kind, array), work_bytes))
    factors = rope_factors(described)
    if factors is not None:
        found.append(GgufTensor(ROPE_FACTORS, ROPE_FACTORS, factors, kind_of(kind, factors)))
    return found


def kind_of(kind: str, array: mx.array) -> GGMLQuantizationType:
    """The type that a parameter is written in: of matrices `kind`, where their rows allow it."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if array.ndim < 2:  # llama.cpp computes with these in float32 alone
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[KINDS[kind][0]]
    together, _ = GGML_QUANT_SIZES[wanted]
    return wanted if array.shape[-1] % together == 0 else GGMLQuantizationType.F16


def add_source(writer: GGUFWriter, trained: Trained, kind: str) -> None:
    """Tell what the file is, and of which model, but not where that is on this machine."""
    from gguf import GGML_QUANT_VERSION

    writer.add_type(kind)
    base = trained.hub_name
    named = trained.base.absolute().name if base is None else base.repo.rpartition("/")[2]
    writer.add_name(f"{named} fine-tuned")  # a run's own name may tell of its data
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if base is not None:
        organization, _, name = base.repo.rpartition("/")
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, name)
        writer.add_base_model_organization(0, organization)


@contextlib.contextmanager
def writing(target: Path, described: Description) -> Iterator[GGUFWriter]:
    """A writer of a file beside `target`, which becomes `target` if the block ends well.

    Raises UserError where it cannot be written.
    """
    from gguf import GGUFWriter

    try:
        with temporary_file(target) as path:
            with contextlib.closing(GGUFWriter(path, described.architecture)) as writer:
                yield writer
            sync(path)
            os.replace(path, target)
            sync(target.parent)
    except OSError as error:
        raise unwritable(target, error) from error


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[Path]:
    """An empty file beside `target`, held by this process, and deleted if it is still there.

    Those that killed processes have left of the same target are deleted.
    """
    prefix = f"{TEMPORARY}{target.name}-"
    for other in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), other.open("rb") as file:  # in work, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=target.parent)
    path = Path(name)
    try:
        with contextlib.suppress(OSError):  # a file system that knows no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        path.chmod(0o644)  # mkstemp is for its owner alone
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def write_tensors(
    source: Path, writer: GGUFWriter, tensors: list[GgufTensor]
) -> Iterator[WriteProgress]:
    """Write the head of the file, then the tensors, each taken out as it is computed.

    source: what to blame where they cannot be.
    """
    import numpy as np

    total = sum(tensor.written_bytes for tensor in tensors)
    for tensor in tensors:
        size, kind = tensor.written_bytes, np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.array.shape, kind, size, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    done = 0
    yield WriteProgress(done, total, 0)
    while tensors:
        tensor = tensors.pop(0)
        compute(source, tensor.array)
        for part in converted(source, tensor):
            file.write(part)
        writer.write_padding(file, tensor.written_bytes)
        done += tensor.written_bytes
        del tensor
        allocator.free(collect=False)
        yield WriteProgress(done, total, 0)


def converted(source: Path, tensor: GgufTensor) -> Iterator[memoryview]:
    """The bytes of a computed tensor in its type, some rows at a time."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    numbers = np.asarray(tensor.array)  # of the same memory
    rows = max(1, PART_BYTES // (4 * numbers.shape[-1]))
    for start in range(0, len(numbers), rows):
        with np.errstate(over="ignore"):
            part = quantize(numbers[start : start + rows], tensor.kind)
        if tensor.kind == GGMLQuantizationType.F16 and not np.isfinite(part).all():
            raise UserError(
                f"{source}: {tensor.parameter} has weights that float16 cannot hold; use "
                "--dtype bf16"
            )
        yield memoryview(np.ascontiguousarray(part)).cast("B")
