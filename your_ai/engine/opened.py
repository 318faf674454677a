"""Load a model folder. Training, evaluation, generation, bench and doctor all load models here.

Call `open_model`, then add adapters to its network (`nets.model.add_adapters`, or a saved
adapter), then call `build.build_engine` to train or `prepare_for_generation` to generate.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.weights import FileTensor, can_stream, stream, tensors_of
from your_ai.nets.model import load_network
from your_ai.nets.tokenizer import open_tokenizer


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

    def tokenizer(self) -> Any:
        """Load the tokenizer of the folder. Raises UserError if it cannot be loaded."""
        return open_tokenizer(self.folder)


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
