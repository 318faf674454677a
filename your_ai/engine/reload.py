"""The LoRA-only reload: read the frozen weights of the adapted layers again from the model files.

The frozen arrays of the adapted layers are freed and read again, tensor by tensor, into new
buffers. So a compiled graph or a cache that still refers to old buffers does not keep a second
copy, and fragmented memory becomes contiguous again. Adapters and optimizer states are not
touched, and the new arrays have the same bytes, so the losses are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn

from your_ai.engine.weights import FileTensor, gone
from your_ai.nets.split import StandIn


def reload_adapted(
    model: nn.Module, tensors: dict[str, FileTensor] | None, twins: Sequence[nn.Module] = ()
) -> int:
    """Read the frozen arrays of the adapted layers again; return the number of bytes read.

    tensors: the file of each array, by path.
    twins: models that share these arrays, and get the new ones.

    Skips arrays that no file stores in the form that the model uses, and arrays that are
    streamed. Raises RunError if a file is gone.
    """
    modules = dict(model.named_modules())
    streamed = tuple(f"{n}." for n, module in modules.items() if isinstance(module, StandIn))
    sharing: dict[str, list[nn.Module]] = defaultdict(list)
    for twin in twins:
        for name, module in twin.named_modules():
            sharing[plain(name)].append(module)
    read = 0
    for name, layer in modules.items():
        if "lora_a" not in layer or name.startswith(streamed):
            continue
        for path, child in layer.named_modules():
            for leaf in list(child):
                place = plain(".".join(part for part in (name, path) if part))
                tensor = (tensors or {}).get(f"{place}.{leaf}")
                if tensor is None or not isinstance(child[leaf], mx.array):
                    continue
                try:
                    rows = tensor.shape[0]  # from the header of the file
                except OSError as error:
                    raise gone(tensor.file, error.strerror) from error
                others = [m for m in sharing[place] if m.get(leaf) is child[leaf]]
                for holder in (child, *others):
                    holder[leaf] = None  # free the old buffer before allocating the new one
                array = tensor.rows(0, rows)
                for holder in (child, *others):
                    holder[leaf] = array
                read += array.nbytes
    return read


def plain(path: str) -> str:
    """The path of a layer as in the model's files, without the wrappers of adapters."""
    return path.replace(".linear.", ".").removesuffix(".linear")
