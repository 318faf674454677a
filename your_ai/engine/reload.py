"""The LoRA-only reload: the weights below the adapters, read back from the model's files.

What the adapted layers hold besides their adapters is dropped and read again, tensor by
tensor, into new buffers; so nothing that still refers to the old ones, a compiled graph or a
cache, keeps them twice, and what was scattered lies together again. Adapters and optimizer
are not touched, and the bytes are the same: so are the losses.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from your_ai.engine.weights import FileTensor, gone
from your_ai.nets.parts import StandIn


def reload_adapted(model: nn.Module, tensors: dict[str, FileTensor] | None) -> int:
    """Read back the frozen arrays of the adapted layers; the bytes that were read.

    tensors: where they are, by path; 0 where they are in no file as the model has them, or
    the model streams them. Raises RunError where a file is gone.
    """
    modules = dict(model.named_modules())
    streamed = tuple(f"{n}." for n, module in modules.items() if isinstance(module, StandIn))
    read = 0
    for name, layer in modules.items():
        if "lora_a" not in layer or name.startswith(streamed):
            continue
        for path, child in layer.named_modules():
            for leaf in list(child):
                place = ".".join(part for part in (name, path, leaf) if part)
                tensor = (tensors or {}).get(place.replace(".linear.", "."))
                if tensor is None or not isinstance(child[leaf], mx.array):
                    continue
                try:
                    rows = tensor.shape[0]  # from the file's header
                except OSError as error:
                    raise gone(tensor.file, error.strerror) from error
                child[leaf] = None  # its buffer is free before the next one is taken
                child[leaf] = tensor.rows(0, rows)
                read += child[leaf].nbytes
    return read
