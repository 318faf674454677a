"""The models with an alias, and the facts about them that are known without their files."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.gates.text import size_text
from your_ai.gates.untrusted import Entry
from your_ai.hub.config_values import experts_used, text_part
from your_ai.hub.known_tensors import known_tensors, parameters_of, quantization_of, unpacked
from your_ai.hub.tensor_sizes import tensor_bytes

DATA = Path(__file__).with_name("registry.yaml")
FLOAT_BYTES = 2  # bfloat16, the dtype of all of them
NEAR = 0.5  # minimum similarity, from 0 to 1, to suggest a name in place of another


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
        """Whether its files have parts that mlx-lm leaves out, such as one that reads images."""
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
    """The alias with this name, or else those that begin with it."""
    if name in known():
        return [name]
    return [alias for alias in known() if name and alias.startswith(name.lower())]


def nearest_aliases(name: str, others: Iterable[str] = (), count: int = 3) -> list[str]:
    """Return up to `count` aliases similar to `name` by alias or repository, most similar first.

    others: names of models that have no alias, which are compared, too.
    """

    def likeness(*texts: str) -> float:
        matchers = [difflib.SequenceMatcher(None, name.lower(), text.lower()) for text in texts]
        return max(matcher.ratio() for matcher in matchers)

    near = {other: likeness(other) for other in others}
    near |= {m.alias: likeness(m.alias, m.repo.split("/")[1]) for m in known().values()}
    ranked = sorted(near, key=lambda alias: -near[alias])
    return [alias for alias in ranked if near[alias] >= NEAR][:count]


def download_text(model: Known) -> str:
    """The size of the weight files: `4.52 GB`, or `over 5.04 GB` if they have more parts."""
    return f"{'over ' * model.has_more}{size_text(model.bytes_on_disk)}"
