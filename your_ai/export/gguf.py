"""Export an adapter, or the model with the adapter fused in, to GGUF for llama.cpp and others."""

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
    adapted,
    add_parameters,
    arranged,
    describe,
    rope_factors,
)
from your_ai.export.gguf_tokenizer import add_tokenizer
from your_ai.export.names import check_dense
from your_ai.export.started import on_the_base
from your_ai.files import TEMPORARY, sync
from your_ai.memory import allocator
from your_ai.memory.budget import limit_of
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.modelfiles.shards import Lazy, WriteProgress, compute, hold_memory
from your_ai.modelfiles.targets import check_disk, write_error
from your_ai.nets.model import load_network
from your_ai.nets.saved_adapter import Trained, check_generates, check_no_vocabulary, put_adapter

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

# Our name of a matrix type -> gguf's name of the type, and of a file with such matrices. The
# library gguf computes these; `gguf_quantize` has the types that only llama.cpp computes.
KINDS = {
    "f32": ("F32", "ALL_F32"),
    "f16": ("F16", "MOSTLY_F16"),
    "bf16": ("BF16", "MOSTLY_BF16"),
    "q8_0": ("Q8_0", "MOSTLY_Q8_0"),
    "q4_0": ("Q4_0", "MOSTLY_Q4_0"),
}
# Few bits harm the matrix that computes the logits most. llama.cpp keeps it in Q6_K, which the
# library cannot compute, so the next larger type is used. Tied models compute logits with the
# embedding.
FEW_BITS = ("q4_0",)
OUTPUT, EMBEDDING, OUTPUT_KIND = "output.weight", "token_embd.weight", "q8_0"
# llama.cpp computes with these in float32 only.
WHOLE = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ssm_conv1d", "conv")
PART_BYTES = 16 << 20  # bytes of float32 that are converted together
PARTS_HELD = 6  # copies of a part that exist at the same time during the conversion


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of the file, computed lazily."""

    name: str
    parameter: str
    """The parameter's name in the network, for error messages."""
    shape: tuple[int, ...]
    pieces: list[mx.array]
    """Its successive rows; removed as they are written."""
    kind: GGMLQuantizationType
    """The type in which it is written."""
    work_bytes: int = 0
    """Additional memory for reordering it."""

    @property
    def at_once_bytes(self) -> int:
        """Bytes of what is computed together."""
        return max(piece.nbytes for piece in self.pieces) + self.work_bytes

    @property
    def written_bytes(self) -> int:
        from gguf import quant_shape_to_byte_shape

        return math.prod(quant_shape_to_byte_shape(self.shape, self.kind))


def write_adapter(trained: Trained, target: Path) -> None:
    """Write the run's adapter in float32 to the file `target`; an existing file is replaced.

    Raises UserError if llama.cpp cannot apply the adapter, or if `target` cannot be written.
    """
    require_library()
    check_adapter(trained)
    trained = on_the_base(trained)
    adapter = trained.adapter
    check_dense(trained, "GGUF", experts=True)
    network, config = load_network(model_folder(trained.base, None), mx.float32)
    described = describe(trained.base, network, config)
    put_adapter(network, adapter)  # checks that it fits
    tensors = adapter_tensors(described, trained)
    with writing(target, described) as writer:
        add_source(writer, trained, "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", adapter.scale * adapter.rank)
        for _ in write_tensors(adapter.folder, writer, tensors):
            pass


def write_model(
    trained: Trained,
    target: Path,
    kind: str,
    max_memory_gb: float | None = None,
    draft: Path | None = None,
    disk_share: float = 1.0,
) -> Iterator[WriteProgress]:
    """Write the model with the adapter fused in to the file `target`, one tensor at a time.

    kind: the type of the matrices, one of KINDS. An existing file is replaced.
    draft: write to this temporary file, and leave `target` alone.
    disk_share: disk space that must be free, as a multiple of the file's size.
    Raises UserError if llama.cpp does not support the model, if memory or disk is too small, or
    if `target` cannot be written; RunError if the model cannot be read completely.
    """
    require_library()
    check_generates(trained.adapter)
    from gguf import LlamaFileType

    network, config = load_network(model_folder(trained.base, None), mx.float32)
    described = describe(trained.base, network, config)
    rows = described.settings.args.vocab_size
    del network
    tokenizer = trained.tokenizer()
    lazy = fused_lazily(trained, DEQUANTIZED, "float32", max_memory_gb)
    described.settings.args.vocab_size = lazy.config.get("vocab_size", rows)
    tensors = model_tensors(described, lazy, kind)
    allocator.free()
    largest = max(tensor.at_once_bytes for tensor in tensors)
    needed = lazy.input_bytes + largest + PARTS_HELD * PART_BYTES
    hold_memory("exporting", needed, limit_of(max_memory_gb))
    check_disk(target, int(disk_share * sum(tensor.written_bytes for tensor in tensors)))
    with writing(target, described, draft) as writer:
        add_source(writer, trained, "model")
        writer.add_file_type(LlamaFileType[KINDS[kind][1]])
        add_parameters(writer, described)
        add_tokenizer(writer, trained.base, tokenizer, described.settings.args.vocab_size)
        yield from write_tensors(trained.base, writer, tensors)


def check_adapter(trained: Trained) -> None:
    """Raise UserError if llama.cpp cannot apply an adapter of this kind."""
    adapter = trained.adapter
    check_generates(adapter)
    check_no_vocabulary(adapter, "an adapter of llama.cpp")
    if not adapter.kind.is_sum:
        raise UserError(
            f"{adapter.folder}: is {adapter.kind.title}, which llama.cpp does not support; fuse it "
            "with --fused"
        )
    if any(size.scale == 0 for size in adapter.sizes.values()):
        raise UserError(f"{adapter.folder}: its scale is 0, which llama.cpp would read as 1")


def require_library() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "GGUF needs the package gguf; in the checkout of your_ai, run: pip install '.[gguf]'"
        )


def adapter_tensors(described: Description, trained: Trained) -> list[GgufTensor]:
    """lora_a (r, in) and lora_b (out, r) of each adapted layer, in float32; (E, ...) of experts."""
    found, adapter = [], trained.adapter
    sizes, alpha = adapter.sizes, adapter.scale * adapter.rank
    for layer, parts in adapter.layers.items():
        rank, scale = sizes[layer]
        own = scale * rank / alpha  # llama.cpp multiplies with alpha / rank
        both = (parts[part].astype(mx.float32) for part in ("lora_a", "lora_b"))
        lora_a, lora_b = (array if array.ndim > 2 else array.T for array in both)
        lora_b = lora_b if own == 1 else own * lora_b
        layers = adapted(described, layer, lora_a, lora_b)
        if layers is None:
            raise UserError(
                f"{trained.adapter.folder}: llama.cpp computes {layer} in another way, so an "
                "adapter of it would have another effect; fuse it with --fused"
            )
        for name, *arrays in layers:
            for part, array in zip(("lora_a", "lora_b"), arrays, strict=True):
                found.append(
                    GgufTensor(f"{name}.{part}", layer, array.shape, [array], kind_of("f32", array))
                )
    return found


def model_tensors(described: Description, lazy: Lazy, kind: str) -> list[GgufTensor]:
    """The tensors of the whole model. lazy: its arrays are removed by this."""
    tensors = arranged(described, lazy.arrays, lazy.pieces)
    lazy.arrays.clear()
    lazy.pieces.clear()
    output = OUTPUT if any(tensor.name == OUTPUT for tensor in tensors) else EMBEDDING
    found = []
    for tensor in tensors:
        own = OUTPUT_KIND if tensor.name == output and kind in FEW_BITS else kind
        written = kind_of(own, tensor.array, tensor.name)
        pieces = tensor.pieces or [tensor.array]
        found.append(
            GgufTensor(
                tensor.name, tensor.path, tensor.array.shape, pieces, written, tensor.work_bytes
            )
        )
    for name, factors in rope_factors(described).items():
        found.append(GgufTensor(name, name, factors.shape, [factors], kind_of(kind, factors)))
    return found


def kind_of(kind: str, array: mx.array, name: str = "") -> GGMLQuantizationType:
    """The type in which a tensor is written.

    As in llama.cpp, `kind` is for matrices whose rows are whole blocks of the type; the rows of
    other matrices are float16.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    layer, _, leaf = name.rpartition(".")
    last = layer.rpartition(".")[2]
    small = leaf not in ("", "weight") or last in WHOLE or last.endswith("norm")
    if array.ndim < 2 or small:  # llama.cpp supports only float32 for these
        return GGMLQuantizationType.F32
    wanted = GGMLQuantizationType[KINDS[kind][0]]
    together, _ = GGML_QUANT_SIZES[wanted]
    return wanted if array.shape[-1] % together == 0 else GGMLQuantizationType.F16


def public_name(trained: Trained) -> str:
    """A name for the result. The run's own is private: it may describe the data."""
    base = trained.hub_name
    named = trained.base.absolute().name if base is None else base.repo.rpartition("/")[2]
    return f"{named} fine-tuned"


def add_source(writer: GGUFWriter, trained: Trained, kind: str) -> None:
    """Write the kind of the file and the name of the base model, but no local path."""
    from gguf import GGML_QUANT_VERSION

    writer.add_type(kind)
    base = trained.hub_name
    writer.add_name(public_name(trained))
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if base is not None:
        organization, _, name = base.repo.rpartition("/")
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, name)
        writer.add_base_model_organization(0, organization)


@contextlib.contextmanager
def writing(
    target: Path, described: Description, draft: Path | None = None
) -> Iterator[GGUFWriter]:
    """Yield a writer for a file, as `replacing` does."""
    from gguf import GGUFWriter

    with (
        replacing(target, draft) as path,
        contextlib.closing(GGUFWriter(path, described.architecture)) as writer,
    ):
        yield writer


@contextlib.contextmanager
def replacing(target: Path, draft: Path | None = None) -> Iterator[Path]:
    """Yield a temporary file, which replaces `target` if the block succeeds.

    draft: yield this temporary file of the caller, and leave `target` alone. Raises UserError if
    the file cannot be written.
    """
    try:
        with contextlib.nullcontext(draft) if draft else temporary_file(target) as path:
            yield path
            if draft is None:
                sync(path)
                os.replace(path, target)
                sync(target.parent)
    except OSError as error:
        raise write_error(target, error) from error


@contextlib.contextmanager
def temporary_file(target: Path) -> Iterator[Path]:
    """Yield an empty locked file next to `target`; delete it at the end if it still exists.

    Files that killed processes left behind for the same target are deleted.
    """
    prefix = f"{TEMPORARY}{target.name}-"
    for other in target.parent.glob(f"{glob.escape(prefix)}*"):
        with (
            contextlib.suppress(OSError),
            other.open("rb") as file,
        ):  # locked by another process, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            other.unlink()
    descriptor, name = tempfile.mkstemp(prefix=prefix, dir=target.parent)
    path = Path(name)
    try:
        with contextlib.suppress(OSError):  # the file system may not support locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        path.chmod(0o644)  # mkstemp makes it readable only by its owner
        yield path
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def write_tensors(
    source: Path, writer: GGUFWriter, tensors: list[GgufTensor]
) -> Iterator[WriteProgress]:
    """Write the header of the file, then the tensors. Each is removed from the list first.

    source: the folder named in the error if a tensor cannot be computed.
    """
    import numpy as np

    total = sum(tensor.written_bytes for tensor in tensors)
    for tensor in tensors:
        size, kind = tensor.written_bytes, np.dtype(np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, kind, size, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None  # it was opened for the header
    file = writer.fout[0]
    writer.write_padding(file, file.tell())
    done = 0
    yield WriteProgress(done, total, 0)
    while tensors:
        tensor = tensors.pop(0)
        while tensor.pieces:
            for part in converted(source, tensor, tensor.pieces.pop(0)):
                file.write(part)
        writer.write_padding(file, tensor.written_bytes)
        done += tensor.written_bytes
        allocator.free(collect=False)
        yield WriteProgress(done, total, 0)


def converted(source: Path, tensor: GgufTensor, array: mx.array) -> Iterator[memoryview]:
    """Compute rows of a tensor, and yield their bytes in its type, a few at a time."""
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    compute(source, array)
    numbers = np.asarray(array)  # shares the memory, no copy
    if numbers.ndim > 2:  # the rows of all experts
        numbers = numbers.reshape(-1, numbers.shape[-1])
    rows = max(1, PART_BYTES // (4 * numbers.shape[-1]))
    for start in range(0, len(numbers), rows):
        with np.errstate(over="ignore"):
            part = quantize(numbers[start : start + rows], tensor.kind)
        if tensor.kind == GGMLQuantizationType.F16 and not np.isfinite(part).all():
            raise UserError(
                f"{source}: {tensor.parameter} has weights too large for float16; use --dtype bf16"
            )
        yield np.ascontiguousarray(part).data.cast("B")
