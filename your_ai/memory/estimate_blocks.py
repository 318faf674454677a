"""Bytes of a block, in each of its passes, beside its weights and what it keeps. No mlx here.

Shapes: as in `estimate`.
"""

from __future__ import annotations

from your_ai.memory.estimate_kinds import (
    forward_width,
    is_mixer_alone,
    kind_bytes,
    mixing_bytes,
    routed_bytes,
    slices_mlp,
)
from your_ai.memory.estimate_tiles import (
    is_tiled,
    tile_tokens,
    tiled_backward_bytes,
    tiled_forward_bytes,
)
from your_ai.memory.facts import layers_named
from your_ai.memory.layer_sizes import (
    backward_features,
    dense_share,
    head_step,
    largest_matrix_bytes,
    quantized_matrix_bytes,
    slice_width,
    widest_outputs,
)
from your_ai.memory.memoized import memoized
from your_ai.memory.sizes import (
    DEQUANTIZED_SLICE_BYTES,
    HEAD_ROWS,
    QUERY_BLOCK,
    SCORE_BYTES,
)
from your_ai.memory.workload import Workload


@memoized
def kept_forward_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of the forward pass of a block that keeps outputs, beside these."""
    facts, table = workload.facts, workload.coefficients.kept
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
    facts, training, table = workload.facts, workload.training, workload.coefficients.kept
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
        + workload.coefficients.backward_lora["hidden"] * n * facts.passed * number
        + table["lora"] * n * lora * number
        + table["scores"] * scores
        + table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
        + dora_bytes(workload, n, "staged")
        + gemma_bytes(workload, rows, tokens, "staged")
        + kind_bytes(workload.facts, rows, tokens)
    )


@memoized
def staged_forward_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of the forward pass of a block, of a model whose blocks have the same sizes."""
    if is_tiled(workload, rows, tokens):
        of_tile = staged_forward_bytes(workload, rows, tile_tokens(rows, tokens))
        return tiled_forward_bytes(workload, rows, tokens, of_tile)
    facts, coefficients = workload.facts, workload.coefficients
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
    facts, training, coefficients = workload.facts, workload.training, workload.coefficients
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
        + dora_bytes(workload, n, "staged")
        + gemma_bytes(workload, rows, tokens, "staged")
    )


@memoized
def fused_evaluation_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of a block without gradients, of a fused model whose blocks have the same sizes."""
    facts, coefficients = workload.facts, workload.coefficients
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
    """Whether the widest layer has an adapter."""
    facts, training = workload.facts, workload.training
    wide = widest_outputs(facts)
    return any(wide in s for s in layers_named(facts, training.targets, training.experts))


@memoized
def dora_bytes(workload: Workload, tokens: int, engine: str) -> float:
    """Bytes of a block's outputs that the gradients of DoRA's magnitudes need."""
    facts, training = workload.facts, workload.training
    if not training.dora:
        return 0.0
    outputs = sum(
        min(o, facts.hidden) for _, o in layers_named(facts, training.targets, training.experts)
    )
    return workload.coefficients.dora[engine] * tokens * outputs * facts.float_bytes


@memoized
def gemma_bytes(workload: Workload, rows: int, tokens: int, engine: str) -> float:
    """Bytes of a block's norms beyond two, and of attention scores with a softcap (tanh)."""
    facts, table = workload.facts, workload.coefficients.gemma
    hidden = rows * tokens * facts.hidden * facts.float_bytes
    scores = rows * tokens**2 * facts.heads * facts.float_bytes * facts.softcaps
    norms = table[f"{engine}_norms"] * (facts.norms - 2) * hidden
    return norms + table[f"{engine}_scores"] * scores


def logits_bytes(workload: Workload, targets: int) -> int:
    """Bytes of one slice of the logits, for the hidden states that meet the head together."""
    facts = workload.facts
    count = min(targets, HEAD_ROWS)
    of_slice = 4 * count * min(workload.vocabulary, head_step(facts, count))
    return int(workload.coefficients.gemma["logits"] * of_slice) if facts.softcaps else of_slice
