"""The models with an alias, and the facts about them that are known without their files."""

from __future__ import annotations

import difflib
import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.gates.text import size_text
from your_ai.gates.untrusted import Entry
from your_ai.hub.config_values import experts_used, tensor_bytes, text_part

# The tensors of the registry's models, known without their files and without mlx


TENSORS = Path(__file__).with_name("known_tensors.json")
FLOAT = "BF16"
Part = tuple[str, str, Mapping[str, str]]


@functools.cache
def known_tensors() -> Mapping[str, list[Part]]:
    """The contents of the file, by alias."""
    found: Mapping[str, list[Part]] = json.loads(TENSORS.read_text(encoding="utf-8"))
    return found


def unpacked(parts: Iterable[Part]) -> Iterator[Entry]:
    """The tensors that `packed` has written."""
    for prefix, blocks, tensors in parts:
        layers = [entry for name, text in tensors.items() for entry in layer_of(name, text)]
        for start in [f"{prefix}{block}." for block in numbers(blocks)] if blocks else [""]:
            for name, kind, shape in layers:
                yield Entry(start + name, kind, shape)


def layer_of(name: str, text: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of each tensor of a layer."""
    dims, *more = text.split(" ")
    shape = tuple(int(n) for n in dims.split("x")) if dims else ()
    if len(more) < 2:
        yield name, more[0] if more else FLOAT, shape
        return
    bits, group_size = map(int, more[0].split("/"))
    *rows, inputs = shape
    yield f"{name}.weight", "U32", (*rows, inputs * bits // 32)
    groups = (*rows, inputs // group_size)
    is_affine = more[1] == "affine"
    yield f"{name}.scales", FLOAT if is_affine else "U8", groups
    if is_affine:
        yield f"{name}.biases", FLOAT, groups


def numbers(text: str) -> Iterator[int]:
    """`0-2,5` -> 0, 1, 2, 5"""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def quantization_of(parts: Iterable[Part]) -> dict[str, dict[str, Any]]:
    """The settings of each quantized layer, as in a config.json."""
    found = {}
    for prefix, blocks, tensors in parts:
        for name, text in tensors.items():
            _, *more = text.split(" ")
            if len(more) < 2:
                continue
            bits, group_size = map(int, more[0].split("/"))
            settings = {"bits": bits, "group_size": group_size, "mode": more[1]}
            for start in [f"{prefix}{block}." for block in numbers(blocks)] if blocks else [""]:
                found[start + name] = settings
    return found


def parameters_of(parts: Iterable[Part], experts: int | None = None) -> int:
    """The number of parameters before quantization.

    experts: count only so many of the routed experts of each layer.
    """
    total = 0
    for _, blocks, tensors in parts:
        times = len(list(numbers(blocks))) if blocks else 1
        for name, text in tensors.items():
            shape = [int(n) for n in text.split(" ")[0].split("x") if n]
            if experts is not None and len(shape) > 1 and ("switch" in name or "experts." in name):
                shape[0] = min(shape[0], experts)
            total += times * math.prod(shape)
    return total


DATA = Path(__file__).with_name("registry.yaml")
FLOAT_BYTES = 2  # bfloat16, the dtype of all of them
NEAR = 0.5  # minimum similarity, from 0 to 1, to suggest a name in place of another
MOST_NEAR = 3


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model of the registry."""

    alias: str
    repo: str
    """The repository id on the hub."""
    licence: str
    context: int
    """The maximum sequence length, in tokens."""
    config: Mapping[str, Any]
    """The entries of its config.json that sizes depend on, without the quantization."""
    checked: str = ""
    """What the entry was compared with."""
    quantization: Mapping[str, Any] | None = None
    """How its files are quantized; None if they are bfloat16."""

    @property
    def model_type(self) -> str:
        return str(self.config["model_type"])

    @property
    def bits(self) -> int | None:
        """Bits per weight of most layers; None if the files are bfloat16."""
        return self.quantization["bits"] if self.quantization else None

    @property
    def tensors(self) -> list[Entry]:
        """The tensors in its files."""
        return list(unpacked(known_tensors()[self.alias]))

    @functools.cached_property
    def bytes_on_disk(self) -> int:
        """Bytes of the weights that mlx-lm loads, computed from the shapes of the tensors."""
        return sum(tensor_bytes(entry, FLOAT_BYTES, None) for entry in self.tensors)

    @property
    def has_more(self) -> bool:
        """True if its files have parts that mlx-lm leaves out, such as one that reads images."""
        return "text_config" in self.config

    @functools.cached_property
    def active_parameters(self) -> int:
        """The number of parameters that a token uses: not those of the other experts."""
        used = experts_used({**self.config, **text_part(self.config)})
        return parameters_of(known_tensors()[self.alias], used)

    @functools.cached_property
    def parameters(self) -> int:
        """The number of parameters of the text model, before quantization."""
        return parameters_of(known_tensors()[self.alias])


@functools.cache
def known() -> Mapping[str, Known]:
    """The models of the registry by alias."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # many times faster, if it is there
    entries = yaml.load(DATA.read_text(encoding="utf-8"), Loader=loader)
    return {alias: Known(alias=alias, **entry) for alias, entry in entries.items()}


def config_of(model: Known) -> dict[str, Any]:
    """Return the config.json entries that sizes depend on, enough for mlx-lm to build a model."""
    config = {"max_position_embeddings": model.context, **model.config}
    if model.quantization is not None:
        config["quantization"] = {
            name: value for name, value in model.quantization.items() if name != "layers"
        } | quantization_of(known_tensors()[model.alias])
    return config


def alias_of(repo: str) -> str | None:
    """The alias of a repository, if it has one."""
    return next((model.alias for model in known().values() if model.repo == repo), None)


def aliases_like(name: str) -> list[str]:
    """The alias with this name, or else those that begin with it. `Qwen3:4B` is `qwen3-4b`."""
    typed = name.lower().replace(":", "-")
    if typed in known():
        return [typed]
    return [alias for alias in known() if typed and alias.startswith(typed)]


def nearest_aliases(name: str, others: Iterable[str]) -> list[str]:
    """Return up to MOST_NEAR aliases similar to `name` by alias or repository, most similar first.

    others: names of models that have no alias, which are compared, too.
    """

    def likeness(*texts: str) -> float:
        matchers = [difflib.SequenceMatcher(None, name.lower(), text.lower()) for text in texts]
        return max(matcher.ratio() for matcher in matchers)

    near = {other: likeness(other) for other in others}
    near |= {m.alias: likeness(m.alias, m.repo.split("/")[1]) for m in known().values()}
    ranked = sorted(near, key=lambda alias: -near[alias])
    return [alias for alias in ranked if near[alias] >= NEAR][:MOST_NEAR]


def download_text(model: Known) -> str:
    """The size of the weight files: `4.52 GB`, or `over 5.04 GB` if they have more parts."""
    return f"{'over ' * model.has_more}{size_text(model.bytes_on_disk)}"
