"""The models that have a short name, and what is known of them without their files."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("registry.yaml")
FLOAT_BYTES = 2  # of bfloat16, which all of them are in
NEAR = 0.5  # of 1, how alike two names are that one may be meant for the other


@dataclass(frozen=True, kw_only=True)
class Known:
    """A model of the registry.

    repo: its id on the hub; parameters: as they were before quantization; heads: of the
    queries; kv_heads: of the keys and values; inner: the width of the feed-forward layers;
    tied: whether the head is the embedding; bits, group_size: None where the files are
    bfloat16; context: the most tokens it was made for; more: the rest of its config.json.
    """

    alias: str
    repo: str
    model_type: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool
    context: int
    licence: str
    bits: int | None = None
    group_size: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a block, by its name in mlx-lm."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.model_type == "phi3":
            return {
                "self_attn.qkv_proj": (self.hidden, queries + 2 * keys),
                "self_attn.o_proj": (queries, self.hidden),
                "mlp.gate_up_proj": (self.hidden, 2 * self.inner),
                "mlp.down_proj": (self.inner, self.hidden),
            }
        return {
            "self_attn.q_proj": (self.hidden, queries),
            "self_attn.k_proj": (self.hidden, keys),
            "self_attn.v_proj": (self.hidden, keys),
            "self_attn.o_proj": (queries, self.hidden),
            "mlp.gate_proj": (self.hidden, self.inner),
            "mlp.up_proj": (self.hidden, self.inner),
            "mlp.down_proj": (self.inner, self.hidden),
        }

    @property
    def block_vectors(self) -> int:
        """The numbers of a block that are never quantized: of its norms and biases."""
        norms = (4 if self.model_type.startswith("gemma") else 2) * self.hidden
        if self.model_type in ("qwen3", "gemma3_text"):
            norms += 2 * self.head_dim  # of the queries, and of the keys
        if self.model_type == "qwen2":
            norms += (self.heads + 2 * self.kv_heads) * self.head_dim  # biases
        return norms

    @property
    def vocabulary_parameters(self) -> int:
        """Those of the embedding and, untied, the head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def shape_parameters(self) -> int:
        """The parameters, as the other figures have them."""
        linears = sum(inputs * outputs for inputs, outputs in self.linears.values())
        blocks = self.layers * (linears + self.block_vectors)
        return blocks + self.vocabulary_parameters + self.hidden  # and the last norm

    @property
    def bytes_on_disk(self) -> int:
        """Of the weights, computed: each group has a scale and a bias beside its numbers."""
        vectors = self.layers * self.block_vectors + self.hidden
        matrices = self.shape_parameters - vectors
        if self.bits is None or self.group_size is None:
            return FLOAT_BYTES * (matrices + vectors)
        groups = matrices // self.group_size
        return matrices * self.bits // 8 + FLOAT_BYTES * (2 * groups + vectors)


@functools.cache
def known() -> Mapping[str, Known]:
    """The models of the registry by alias."""
    import yaml

    entries = yaml.safe_load(DATA.read_text(encoding="utf-8"))
    return {alias: Known(alias=alias, **entry) for alias, entry in entries.items()}


def config_of(model: Known) -> dict[str, Any]:
    """Its config.json as far as sizes depend on it; mlx-lm builds a model from it."""
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
    """The alias of a repo of the registry."""
    return next((model.alias for model in known().values() if model.repo == repo), None)


def nearest_aliases(name: str, count: int = 3) -> list[str]:
    """At most `count` aliases that are like `name`, or whose repo is, the nearest first."""

    def likeness(model: Known) -> float:
        texts = (model.alias, model.repo.split("/")[1].lower())
        matchers = [difflib.SequenceMatcher(None, name.lower(), text) for text in texts]
        return max(matcher.ratio() for matcher in matchers)

    near = {model.alias: likeness(model) for model in known().values()}
    ranked = sorted(near, key=lambda alias: -near[alias])
    return [alias for alias in ranked if near[alias] >= NEAR][:count]


def size_text(size_bytes: float) -> str:
    """`4.52 GB`, `12.3 MB` or `3 kB`, of powers of ten."""
    if size_bytes >= 1e9:
        return f"{size_bytes / 1e9:.2f} GB"
    return f"{size_bytes / 1e6:.1f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:.0f} kB"
