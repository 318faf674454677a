"""Model folder -> model: the one path on which train, evaluate, generate, bench and doctor load.

open_model, then adapters on its network (`nets.model.add_adapters` or a saved adapter's), then
either `build.build_engine`, or `for_answers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.weights import FileTensor, can_stream, stream, tensors_of
from your_ai.nets.model import load_network, load_tokenizer_of


@dataclass(frozen=True)
class Opened:
    """A model whose weights are lazy: they are read when they are first used."""

    folder: Path
    network: nn.Module
    config: dict[str, Any]
    """The model's config.json, as mlx-lm has it."""
    dtype: mx.Dtype
    """Of what is computed."""
    tensors: dict[str, FileTensor]
    """Where in the folder's files each of the network's arrays is."""
    can_stream: bool
    """Whether the files have the weights as the network has them."""

    def tokenizer(self) -> Any:
        """The tokenizer of the folder. Raises UserError where it cannot be loaded."""
        return load_tokenizer_of(self.folder, self.config.get("eos_token_id"))


def open_model(folder: Path, dtype: mx.Dtype) -> Opened:
    """Raises UserError for a folder that is not whole, or that mlx-lm cannot load."""
    network, config = load_network(folder, dtype)
    tensors = tensors_of(network, folder)
    return Opened(folder, network, config, dtype, tensors, can_stream(network, tensors))


def for_answers(opened: Opened, streams: bool) -> nn.Module:
    """The network, ready to generate; streams: weights are read from their files for each token."""
    network = opened.network
    network.eval()
    dequantize_on_the_cpu(network)
    if streams:
        stream(network, opened.tensors)
    return network
