"""The tensors of a model that is known by its config.json alone, read from mlx-lm's own code.

The model is built, but nothing is evaluated: MLX's arrays are lazy, so the size does not matter.
This is the only module of `hub` that needs mlx.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.cache import make_prompt_cache

from your_ai.gates.untrusted import Entry
from your_ai.hub.config_values import group_size_of, is_left, method_of, quantization_of, text_part
from your_ai.hub.row_caches import RowCache
from your_ai.nets.mlx_types import DTYPE_NAMES

READ_TOKENS = 32, 64  # of two texts that show what a token leaves in a cache
TERNARY = "its layers are ternary (BitLinear), which cannot be adapted"


def tensors_built(config: dict[str, Any]) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors of mlx-lm's model of this configuration, and the configuration completed.

    It is quantized as the configuration says. Layers that mlx-lm would quantize in another way,
    such as the router of a mixture of experts, are in `quantization` of the result. A head that
    the configuration calls tied is left out. Raises ValueError with a reason if mlx-lm cannot
    build the model.
    """
    try:
        network = build(config)
        is_ternary = any(isinstance(module, BitLinear) for module in network.modules())
        if is_ternary or method_of(config).get("quant_method") == "bitnet":
            raise ValueError(TERNARY)
        completed = dict(config)
        if quantization := quantization_of(config):
            completed["quantization"] = quantize(network, quantization, config)
        found = entries_in(network)
    except Exception as error:  # the code of an architecture may raise any type
        text = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(f"mlx-lm cannot build this model ({text})") from error
    if is_tied(config):
        found = [entry for entry in found if ".lm_head." not in f".{entry.name}"]
    return found, completed


def entries_in(network: nn.Module) -> list[Entry]:
    """The tensors of a network, of which none is computed."""
    arrays = dict(tree_flatten(network.parameters()))
    return [Entry(name, DTYPE_NAMES[a.dtype], tuple(a.shape)) for name, a in arrays.items()]


def is_tied(config: dict[str, Any]) -> bool:
    """Return whether the head has the weights of the embedding; Gemma's always does."""
    for part in (config, text_part(config)):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return str(config["model_type"]).startswith("gemma")


def build(config: dict[str, Any]) -> nn.Module:
    """The model of a configuration. Its arrays are lazy; evaluating them gives random weights."""
    # Private in mlx-lm, but the only place that knows which class runs a model_type.
    classes = vars(utils)["_get_classes"]
    model_class, args_class = classes(config=config)
    model: nn.Module = model_class(args_class.from_dict(config))
    return model


def quantize(
    network: nn.Module, quantization: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """Quantize the layers that mlx_lm.convert would, lazily, or those of another library.

    quantization: as in a config.json, with the settings of single layers by their names. The
        result also has those that the architecture chooses.
    """
    predicate = getattr(network, "quant_predicate", None)
    group_size = group_size_of(quantization)
    completed, is_other = dict(quantization), bool(method_of(config))

    def chosen(name: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized"):
            return False
        if name in quantization:
            own: bool | dict[str, Any] = quantization[name]
            return own
        if layer.weight.shape[-1] % group_size:
            return False
        found = True if predicate is None else predicate(name, layer)
        if is_other:  # routers, for which architectures choose other settings, are left
            return found is True and not is_left(name, config)
        if isinstance(found, dict):
            completed[name] = found
        return found

    nn.quantize(
        network,
        group_size,
        int(quantization.get("bits", 4)),
        mode=str(quantization.get("mode", "affine")),
        class_predicate=chosen,
    )
    return completed


def caches_built(config: dict[str, Any], float_bytes: int) -> tuple[RowCache, ...]:
    """The caches of one row of mlx-lm's model of this configuration.

    Two short texts are read, of which nothing is computed: arrays have shapes before they have
    values. Raises whatever the code of the architecture raises.
    """
    network = build(config)
    network.set_dtype(mx.float32 if float_bytes == 4 else mx.float16)
    few, many = READ_TOKENS
    found = []
    for part, less, more in zip(*(parts_read(network, n) for n in (0, few, many)), strict=True):
        of_token = (more.nbytes - less.nbytes) // (many - few)
        most = (getattr(part, name, None) for name in ("max_size", "chunk_size"))
        window = next((int(tokens) for tokens in most if tokens), 0)
        found.append(RowCache(max(0, less.nbytes - few * of_token), of_token, window))
    return tuple(found)


def parts_read(network: nn.Module, tokens: int) -> list[Any]:
    """The caches of a model, and those inside of these, after it read so many tokens."""
    caches = make_prompt_cache(network)
    parts = [part for each in caches for part in getattr(each, "caches", (each,))]
    for part in parts:
        part.step = 1  # their arrays grow by single tokens
    if tokens:
        network(mx.zeros((1, tokens), mx.int32), cache=caches)
    return parts
