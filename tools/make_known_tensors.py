"""Write your_ai/hub/known_tensors.json: the shapes of the registry's models, from mlx-lm's code.

    PYTHONPATH=. python tools/make_known_tensors.py

Run it after a change of your_ai/hub/registry.yaml. No weight is made: see hub/built_tensors.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from mlx.nn import Module

from your_ai.gates.untrusted import BLOCK, Entry
from your_ai.hub.built_tensors import build, tensors_built
from your_ai.hub.config_values import FLOATS
from your_ai.hub.registry import TENSORS, Known, Part, known


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


def packed(entries: Iterable[Entry], quantization: dict[str, Any] | None) -> list[Part]:
    """Write tensors as hub/known_tensors.py reads them.

    quantization: of the model that has them, as in its config.json.
    """
    by_name = {entry.name: entry for entry in entries}
    outside: dict[str, str] = {}
    blocks: dict[tuple[str, int], dict[str, str]] = {}
    for entry in by_name.values():
        layer, _, leaf = entry.name.rpartition(".")
        if leaf in ("scales", "biases") and f"{layer}.scales" in by_name:
            continue
        name, text = entry.name, "x".join(map(str, entry.shape))
        if leaf == "weight" and f"{layer}.scales" in by_name:
            name, text = layer, quantized_text(entry, by_name, quantization or {})
        elif entry.kind not in FLOATS:
            text += f" {entry.kind}"
        match = BLOCK.search(f"{name}.")
        if match is None:
            outside[name] = text
        else:
            start = name[: match.start(1)]
            inside = match[2].removesuffix(".")
            blocks.setdefault((start, int(match[1])), {})[inside] = text
    parts: list[Part] = [("", "", outside)]
    alike: dict[tuple[str, str], list[int]] = {}
    for (start, block), tensors in sorted(blocks.items(), key=lambda pair: pair[0]):
        alike.setdefault((start, json.dumps(tensors)), []).append(block)
    parts += [(start, ranges(found), json.loads(text)) for (start, text), found in alike.items()]
    return parts


def quantized_text(entry: Entry, by_name: Mapping[str, Entry], quantization: dict[str, Any]) -> str:
    """The shape of a quantized layer and how it is quantized; entry: its weights."""
    layer = entry.name.removesuffix(".weight")
    own = quantization.get(layer)
    found = {**quantization, **own} if isinstance(own, dict) else quantization
    if isinstance(own, dict) and "mode" not in own:
        found["mode"] = "affine"
    groups = by_name[f"{layer}.scales"].shape[-1]
    bits, inputs = int(found["bits"]), entry.shape[-1] * 32 // int(found["bits"])
    dims = (*entry.shape[:-1], inputs)
    return f"{'x'.join(map(str, dims))} {bits}/{inputs // groups} {found.get('mode', 'affine')}"


def ranges(found: list[int]) -> str:
    """The reverse of `numbers`."""
    parts = []
    for _, group in groupby(enumerate(sorted(found)), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)


if __name__ == "__main__":
    TENSORS.write_text(written({model.alias: parts_of(model) for model in known().values()}))
