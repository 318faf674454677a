"""The kinds of adapters, as far as they can be told without MLX.

A kind has two matrices for each adapted layer, A (inputs, rank) and B (rank, outputs), and maybe
vectors; or none, if the weights themselves are trained. `nets/adapter_kinds.py` has the layers of
each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AdapterFacts:
    """Facts about a kind of adapter that estimates, exports and settings need."""

    name: str
    """`fine_tune_type` in mlx-lm's adapter_config.json."""
    title: str
    """The name in messages and model cards."""
    setting: str = ""
    """The setting that chooses the kind, on or off; "" for the kind without one. PEFT's
    adapter_config.json has it by the same name, as mlx-lm's had up to 0.19."""
    vectors: tuple[str, ...] = ()
    """Names of the trained arrays of a layer beside A and B: (outputs,) float32 each."""
    has_norms: bool = False
    """Whether it computes with the norms of the rows of the whole weight: (outputs,) float32 for
    each layer, kept until the adapter changes."""
    adapts_experts: bool = True
    """Whether it has layers for routed experts."""
    is_whole: bool = False
    """Whether it adds no layers, but trains the weights of the model. The result is a model."""

    @property
    def is_sum(self) -> bool:
        """True if the adapter only adds a product of A and B to the weight. Only then can it be
        merged with others, or added by llama.cpp."""
        return not (self.vectors or self.is_whole)


LORA = AdapterFacts(name="lora", title="LoRA")
DORA = AdapterFacts(
    name="dora",
    title="DoRA",
    setting="use_dora",
    vectors=("m",),
    has_norms=True,
    adapts_experts=False,
)
FULL = AdapterFacts(name="full", title="whole weights", is_whole=True)
FACTS = {facts.name: facts for facts in (LORA, DORA)}  # those that are added to a model
MATRICES = ("lora_a", "lora_b")
VECTORS = tuple(name for facts in FACTS.values() for name in facts.vectors)
TITLES = " or ".join(facts.title for facts in FACTS.values())


def chosen_by(settings: Mapping[str, Any]) -> AdapterFacts:
    """The kind that settings choose, of a run or of PEFT."""
    return next((facts for facts in FACTS.values() if settings.get(facts.setting)), LORA)


def settings_choosing(chosen: AdapterFacts) -> dict[str, bool]:
    """The settings with which `chosen_by` finds this kind."""
    return {facts.setting: facts is chosen for facts in FACTS.values() if facts.setting}
