"""Memory that kinds of blocks need in training beyond what all blocks need.

The coefficients were fitted by hand to peaks of small models of eleven architectures (qwen3_5,
granitemoehybrid, nemotron_h, kimi_linear, mamba2, lfm2, qwen3_moe, gpt_oss, deepseek_v3,
gemma4_text, gemma3n), on the CPU in float32 at 1,024 tokens.
"""

from __future__ import annotations

from your_ai.memory.facts import ModelFacts
from your_ai.memory.layer_sizes import (
    MLPS,
    dense_share,
    forward_features,
    slice_width,
    widest_outputs,
)
from your_ai.memory.memoized import memoized
from your_ai.memory.mixer_facts import ATTENTION, MLA, SLIDING
from your_ai.memory.mixer_sizes import mixers_bytes

LATENT_SCORES = 3.8  # arrays of the scores of latent attention, whose mask is an array
KEPT_LATENT_SCORES = 1.0  # of each block, from the forward pass to the backward pass
EXPERT_ARRAYS = 6.0  # of the outputs of the routed experts of a token
KEPT_EXPERT_ARRAYS = 0.5
PASSED_ARRAYS = 5.0  # of what a block passes on in addition to the hidden states
SLICED_LAYERS = ("gate_proj", "up_proj", "down_proj")  # an MLP that has them runs in slices


@memoized
def kind_bytes(
    facts: ModelFacts, rows: int, tokens: int, *, kept: bool = False, forward: bool = False
) -> float:
    """Bytes beyond those of a plain block, of a model whose blocks are of one kind.

    kept: what stays in memory from the forward pass to the backward pass; by default the peak.
    forward: the peak of a pass without gradients.
    """
    own = mixing_bytes(facts, rows, tokens, kept=kept, forward=forward)
    return own + routed_bytes(facts, rows, tokens, kept=kept)


@memoized
def mixing_bytes(
    facts: ModelFacts, rows: int, tokens: int, *, kept: bool = False, forward: bool = False
) -> float:
    """The part of `kind_bytes` that mixes tokens: latent attention and mixers."""
    if not facts.kinds:
        return 0.0
    kind, number = facts.kinds[0], facts.float_bytes
    latent = sum(mixer.heads for mixer in kind.mixers if mixer.kind == MLA)
    scores = (KEPT_LATENT_SCORES if kept else LATENT_SCORES) * rows * latent * tokens**2 * number
    mixers = mixers_bytes(kind.mixers, rows, tokens, number, kept=kept, forward=forward)
    return scores + mixers


@memoized
def routed_bytes(facts: ModelFacts, rows: int, tokens: int, *, kept: bool = False) -> float:
    """The rest of `kind_bytes`: routed experts, and what blocks pass on beside hidden states."""
    if not facts.kinds:
        return 0.0
    kind = facts.kinds[0]
    routed = max((kind.linears[name][1] for name in kind.experts), default=0)
    experts = (KEPT_EXPERT_ARRAYS if kept else EXPERT_ARRAYS) * routed
    passed = 0.0 if kept else PASSED_ARRAYS * facts.passed
    return rows * tokens * facts.float_bytes * (experts + passed)


@memoized
def is_mixer_alone(facts: ModelFacts) -> bool:
    """Whether such blocks have a linear-time mixer and no MLP."""
    names = {name.partition(".")[0] for kind in facts.kinds for name in kind.linears}
    every = {mixer.kind for kind in facts.kinds for mixer in kind.mixers}
    return bool(every - {ATTENTION, SLIDING, MLA}) and not names & set(MLPS)


@memoized
def slices_mlp(facts: ModelFacts) -> bool:
    """Whether the MLP of such blocks is computed in slices of features, or they have none."""
    names = {name for kind in facts.kinds for name in kind.linears}
    found = {name.partition(".")[0] for name in names} & set(MLPS)
    gated = all({f"{mlp}.{layer}" for layer in SLICED_LAYERS} <= names for mlp in found)
    return gated and not any(kind.sparse for kind in facts.kinds)


@memoized
def forward_width(facts: ModelFacts) -> int:
    """Outputs of the widest layer, or slice of an MLP, in the forward pass of a block."""
    if dense_share(facts) == 1 or not slices_mlp(facts):
        return widest_outputs(facts)
    about = forward_features(facts.hidden)
    outputs = (
        slice_width(o, about) if name.partition(".")[0] in MLPS else o
        for kind in facts.kinds
        for name, (_, o) in kind.linears.items()
    )
    return max(outputs, default=0)
