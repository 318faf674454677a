"""The models with an alias, and the facts about them that are known without their files."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from your_ai.hub.architectures import GROUP_SIZE, tensor_bytes, tensors_of_config

DATA = Path(__file__).with_name("registry.yaml")
FLOAT_BYTES = 2  # bfloat16, the dtype of all of them
NEAR = 0.5  # minimum similarity, from 0 to 1, to suggest a name in place of another


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model of the registry."""

    alias: str
    repo: str
    """The repository id on the hub."""
    model_type: str
    parameters: int
    """The number of parameters before quantization."""
    layers: int
    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads."""
    head_dim: int
    inner: int
    """The width of the feed-forward layers."""
    vocabulary: int
    tied: bool
    """Whether the head uses the embedding's weights."""
    context: int
    """The maximum sequence length, in tokens."""
    licence: str
    bits: int | None = None
    """Bits per weight; None if the files are bfloat16."""
    group_size: int | None = None
    """Weights per quantization group; None if the files are bfloat16."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """The other entries of the model's config.json."""

    @property
    def bytes_on_disk(self) -> int:
        """Bytes of the weight files, computed from the shapes of the tensors."""
        group_size = self.group_size or GROUP_SIZE
        return sum(
            tensor_bytes(entry, FLOAT_BYTES, self.bits, group_size)
            for entry in tensors_of_config(config_of(self))
        )


@functools.cache
def known() -> Mapping[str, Known]:
    """The models of the registry by alias."""
    import yaml

    entries = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return {alias: Known(alias=alias, **entry) for alias, entry in entries.items()}


def config_of(model: Known) -> dict[str, Any]:
    """Return the config.json entries that sizes depend on, enough for mlx-lm to build a model."""
    config = {
        "model_type": model.model_type,
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.inner,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied,
        "max_position_embeddings": model.context,
        **model.more,
    }
    if model.bits is not None:
        config["quantization"] = {"group_size": model.group_size, "bits": model.bits}
    return config


def alias_of(repo: str) -> str | None:
    """The alias of a repository, if it has one."""
    return next((model.alias for model in known().values() if model.repo == repo), None)


def nearest_aliases(name: str, count: int = 3) -> list[str]:
    """Return up to `count` aliases similar to `name` by alias or repository, most similar first."""

    def likeness(model: Known) -> float:
        texts = (model.alias, model.repo.split("/")[1].lower())
        matchers = [difflib.SequenceMatcher(None, name.lower(), text) for text in texts]
        return max(matcher.ratio() for matcher in matchers)

    near = {model.alias: likeness(model) for model in known().values()}
    ranked = sorted(near, key=lambda alias: -near[alias])
    return [alias for alias in ranked if near[alias] >= NEAR][:count]


def size_text(size_bytes: float) -> str:
    """Format a size as `4.52 GB`, `12.3 MB` or `3 kB` (powers of ten)."""
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.2f} GB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
