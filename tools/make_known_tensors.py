"""Write your_ai/hub/known_tensors.json: the shapes of the registry's models, from mlx-lm's code.

    PYTHONPATH=. python tools/make_known_tensors.py

Run it after a change of your_ai/hub/registry.yaml. No weight is made: see hub/built_tensors.py.
"""

from __future__ import annotations

import json
from typing import Any

from mlx.nn import Module

from your_ai.hub.built_tensors import build, tensors_built
from your_ai.hub.known_tensors import DATA, Part, packed
from your_ai.hub.registry import Known, known


def parts_of(model: Known) -> list[Part]:
    """The tensors of a model, as the file has them."""
    config: dict[str, Any] = {"max_position_embeddings": model.context, **model.config}
    if model.quantization is not None:
        quantization = dict(model.quantization)
        layers = quantization.pop("layers", {})
        if layers:
            quantization |= of_layers(build(config), layers)
        config["quantization"] = quantization
    entries, config = tensors_built(config)
    return packed(entries, config.get("quantization"))


def of_layers(network: Module, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of each layer whose name contains a key of `settings`, by name."""
    return {
        name: found
        for name, layer in network.named_modules()
        if hasattr(layer, "to_quantized")
        for text, found in settings.items()
        if text in name
    }


def written(every: dict[str, list[Part]]) -> str:
    """The text of the file, with a line for each kind of block."""
    models = []
    for alias, parts in every.items():
        lines = ",\n".join(f"  {json.dumps(part, separators=(',', ':'))}" for part in parts)
        models.append(f"{json.dumps(alias)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(models) + "\n}\n"


if __name__ == "__main__":
    DATA.write_text(written({model.alias: parts_of(model) for model in known().values()}))
