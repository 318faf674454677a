"""Bytes of a block, in each of its passes, beside its weights and what it keeps. No mlx here.

Shapes: as in `estimate`.
"""

from __future__ import annotations

from your_ai.memory.estimate_tiles import (
    is_tiled,
    tile_tokens,
    tiled_backward_bytes,
    tiled_forward_bytes,
)
from your_ai.memory.facts import (
    MLPS,
    ModelFacts,
    backward_features,
    dense_share,
    forward_features,
    head_step,
    largest_matrix_bytes,
    layers_named,
    quantized_matrix_bytes,
    slice_width,
    widest_outputs,
)
from your_ai.memory.memoized import memoized
from your_ai.memory.mixer_facts import ATTENTION, MLA, SLIDING, mixers_bytes
from your_ai.memory.sizes import (
    DEQUANTIZED_SLICE_BYTES,
    HEAD_ROWS,
    QUERY_BLOCK,
    SCORE_BYTES,
)
from your_ai.memory.workload import Workload

# Memory that kinds of blocks need in training beyond what all blocks need


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
    """Return whether such blocks have a linear-time mixer and no MLP."""
    names = {name.partition(".")[0] for kind in facts.kinds for name in kind.linears}
    every = {mixer.kind for kind in facts.kinds for mixer in kind.mixers}
    return bool(every - {ATTENTION, SLIDING, MLA}) and not names & set(MLPS)


@memoized
def slices_mlp(facts: ModelFacts) -> bool:
    """Return whether the MLP of such blocks is computed in slices of features, or there is none."""
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


@memoized
def kept_forward_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of the forward pass of a block that keeps outputs, beside these."""
    facts, table = workload.facts, workload.process.coefficients.kept
    number, n = facts.float_bytes, rows * tokens
    matrix = quantized_matrix_bytes(facts)
    return (
        table["forward_wide"] * n * widest_outputs(facts) * number
        + table["forward_hidden"] * (n * (facts.hidden + facts.passed) * number)
        + table["forward_slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
        + gemma_bytes(workload, rows, tokens, "staged")
        + kind_bytes(facts, rows, tokens, forward=True)
    )


@memoized
def kept_backward_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of the backward pass of a block that kept outputs, beside these."""
    facts, training, table = workload.facts, workload.training, workload.process.coefficients.kept
    number, n, wide = facts.float_bytes, rows * tokens, widest_outputs(facts)
    if is_mixer_alone(facts):  # its arrays that are as wide as its projections count with it
        wide = min(wide, backward_features(facts.hidden))
    lora = sum(i for i, _ in layers_named(facts, training.targets, training.experts))
    scores = min(SCORE_BYTES, 4 * rows * facts.heads * tokens * min(tokens, QUERY_BLOCK))
    matrix = quantized_matrix_bytes(facts)
    whole = 0.0  # of a product that is not computed in slices
    if not matrix:
        whole = table["whole"]
    elif matrix <= DEQUANTIZED_SLICE_BYTES:
        whole = table["quantized_whole"]
    return (
        (table["wide"] + table["adapted"] * adapts_widest(workload)) * n * wide * number
        + (table["hidden"] + whole) * n * facts.hidden * number
        + workload.process.coefficients.backward_lora["hidden"] * n * facts.passed * number
        + table["lora"] * n * lora * number
        + table["scores"] * scores
        + table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
        + vectors_bytes(workload, n, "staged")
        + gemma_bytes(workload, rows, tokens, "staged")
        + kind_bytes(workload.facts, rows, tokens)
    )


@memoized
def staged_forward_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of the forward pass of a block, of a model whose blocks have the same sizes."""
    if is_tiled(workload, rows, tokens):
        of_tile = staged_forward_bytes(workload, rows, tile_tokens(rows, tokens))
        return tiled_forward_bytes(workload, rows, tokens, of_tile)
    facts, coefficients = workload.facts, workload.process.coefficients
    number, n, wide = facts.float_bytes, rows * tokens, forward_width(facts)
    matrix = quantized_matrix_bytes(facts)
    table = coefficients.forward_lora if adapts_widest(workload) else coefficients.forward
    return (
        (table["wide"] + table["dense"] * (dense_share(facts) == 1)) * n * wide * number
        + table["hidden"] * n * facts.hidden * number
        + table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
        + gemma_bytes(workload, rows, tokens, "staged")
        + kind_bytes(workload.facts, rows, tokens, forward=True)
    )


@memoized
def staged_backward_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of the backward pass of a block, of a model whose blocks have the same sizes."""
    if is_tiled(workload, rows, tokens):
        of_rows = (workload, rows, tile_tokens(rows, tokens))
        of_tile = staged_forward_bytes(*of_rows), staged_backward_bytes(*of_rows)
        return tiled_backward_bytes(workload, rows, tokens, *of_tile)
    facts, training, coefficients = workload.facts, workload.training, workload.process.coefficients
    number, n, wide = facts.float_bytes, rows * tokens, widest_outputs(facts)
    part, most = wide, wide
    if slices_mlp(facts):
        part = slice_width(wide, backward_features(facts.hidden))
        most = max(part, facts.hidden)  # inputs of an adapter that exist together
    adapted = layers_named(facts, training.targets, training.experts)
    lora = sum(min(inputs, most) for inputs, _ in adapted)
    matrix = largest_matrix_bytes(facts)
    table = coefficients.backward_lora if adapts_widest(workload) else coefficients.backward
    weights = min(part * facts.hidden * number, matrix)  # of a layer in a slice of the MLP
    dense = dense_share(facts)
    copies = (1 - dense) * (table["slice"] * 3 * min(weights, DEQUANTIZED_SLICE_BYTES))
    copies += dense * (table["dense_slice"] * 3 * weights)
    mlp = table["part"] * n * part * number
    mlp += table["dense"] * n * wide * number * (dense == 1)
    return (
        max(mlp, mixing_bytes(facts, rows, tokens))  # one comes after the other
        + routed_bytes(facts, rows, tokens)
        + table["lora"] * n * lora * number
        + table["hidden"] * (n * (facts.hidden + facts.passed) * number)
        + copies
        + vectors_bytes(workload, n, "staged")
        + gemma_bytes(workload, rows, tokens, "staged")
    )


@memoized
def fused_evaluation_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of a block without gradients, of a fused model whose blocks have the same sizes."""
    facts, coefficients = workload.facts, workload.process.coefficients
    number, n, wide = facts.float_bytes, rows * tokens, widest_outputs(facts)
    if largest_matrix_bytes(facts) <= DEQUANTIZED_SLICE_BYTES:
        table = coefficients.evaluation_unsliced
        return table["wide"] * n * wide * number + table["logits"] * logits_bytes(workload, n)
    table = coefficients.evaluation
    return (
        (table["wide"] + table["lora"] * adapts_widest(workload)) * n * wide * number
        + table["hidden"] * n * facts.hidden * number
        + table["slice"] * DEQUANTIZED_SLICE_BYTES
    )


@memoized
def adapts_widest(workload: Workload) -> bool:
    """Return whether the widest layer has an adapter."""
    facts, training = workload.facts, workload.training
    wide = widest_outputs(facts)
    return any(wide in s for s in layers_named(facts, training.targets, training.experts))


@memoized
def vectors_bytes(workload: Workload, tokens: int, engine: str) -> float:
    """Bytes of a block's outputs that the gradients of vectors need."""
    facts, training = workload.facts, workload.training
    if not training.adapter.vectors:
        return 0.0
    outputs = sum(
        min(o, facts.hidden) for _, o in layers_named(facts, training.targets, training.experts)
    )
    return workload.process.coefficients.vectors[engine] * tokens * outputs * facts.float_bytes


@memoized
def gemma_bytes(workload: Workload, rows: int, tokens: int, engine: str) -> float:
    """Bytes of a block's norms beyond two, and of attention scores with a softcap (tanh)."""
    facts, table = workload.facts, workload.process.coefficients.gemma
    hidden = rows * tokens * facts.hidden * facts.float_bytes
    scores = rows * tokens**2 * facts.heads * facts.float_bytes * facts.softcaps
    norms = table[f"{engine}_norms"] * (facts.norms - 2) * hidden
    return norms + table[f"{engine}_scores"] * scores


def logits_bytes(workload: Workload, targets: int) -> int:
    """Bytes of one slice of the logits, for the hidden states that meet the head together."""
    facts = workload.facts
    count = min(targets, HEAD_ROWS)
    of_slice = 4 * count * min(workload.vocabulary, head_step(facts, count))
    return (
        int(workload.process.coefficients.gemma["logits"] * of_slice)
        if facts.softcaps
        else of_slice
    )
