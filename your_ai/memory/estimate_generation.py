"""Estimate the memory of generation: prompts, KV caches, and sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass

from your_ai.memory.coefficients import PACKAGED, Coefficients
from your_ai.memory.facts import ModelFacts
from your_ai.memory.layer_sizes import largest_matrix_bytes, widest_outputs
from your_ai.memory.sizes import (
    CACHE_STEP,
    DEQUANTIZED_SLICE_BYTES,
    HEAD_SLICE_BYTES,
    PREFILL_TOKENS,
)

GENERATION_BYTES = 500_000  # small arrays of generation


@dataclass(frozen=True)
class RolloutSizes:
    """The completions that each step generates."""

    prompt_tokens: int
    """Of the longest prompt."""
    new_tokens: int
    """Maximum tokens of a completion."""
    group: int
    """Completions of a prompt."""
    rows: int
    """Completions of a step."""


def generation_bytes(facts: ModelFacts, tokens: int, coefficients: Coefficients = PACKAGED) -> int:
    """Bytes of the KV cache of `tokens`, and of a prompt, PREFILL_TOKENS of it at a time.

    The peak is in one of three places: attention over all tokens while the KV cache of a block
    grows, the layers of a block, or a slice of the head.
    """
    number, table = facts.float_bytes, coefficients.generation
    kept = sum(o for name, (_, o) in facts.linears.items() if name.endswith(("k_proj", "v_proj")))
    of_block = -(-tokens // CACHE_STEP) * CACHE_STEP * (kept or 2 * facts.hidden) * number
    prompt = min(tokens, PREFILL_TOKENS)
    hidden = prompt * facts.hidden * number
    wide = prompt * widest_outputs(facts) * number
    matrix = largest_matrix_bytes(facts) * facts.quantized
    scores = facts.heads * prompt * tokens * number * (2 if facts.softcaps else 1)
    attention = table["grown"] * of_block + table["scores"] * scores + hidden
    layers = (
        table["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix) + table["wide"] * wide + 2 * hidden
    )
    head = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number)
    head = table["head"] * head + 2 * facts.vocabulary * number
    return int(facts.blocks * of_block + max(attention, layers, head) + GENERATION_BYTES)


def kv_bytes_per_token(facts: ModelFacts) -> int:
    """Bytes of the keys and values of a token, in a block."""
    kept = sum(o for name, (_, o) in facts.linears.items() if name.endswith(("k_proj", "v_proj")))
    return (kept or 2 * facts.hidden) * facts.float_bytes


def rollout_phases(
    facts: ModelFacts,
    sizes: RolloutSizes,
    wave: int,
    coefficients: Coefficients = PACKAGED,
) -> list[dict[str, float]]:
    """Bytes while the prompts of a wave are read, and while its completions are sampled.

    The KV cache of a wave grows by CACHE_STEP tokens. While a block's part grows, both exist.
    Sampling needs some arrays as large as the logits of the wave, (B, V) in float32.
    """
    table, per_token = coefficients.rollouts, kv_bytes_per_token(facts)
    # The most prompts that have rows in one wave: waves begin at these offsets in a group.
    prompts = (wave + 2 * sizes.group - math.gcd(wave, sizes.group) - 1) // sizes.group
    prompt_bytes = prompts * sizes.prompt_tokens * per_token * facts.blocks
    tokens = sizes.prompt_tokens + -(-sizes.new_tokens // CACHE_STEP) * CACHE_STEP
    of_block = wave * tokens * per_token
    matrix = largest_matrix_bytes(facts) * facts.quantized
    layers = coefficients.generation["slice"] * min(DEQUANTIZED_SLICE_BYTES, matrix)
    head = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * facts.float_bytes)
    logits = 4 * wave * facts.vocabulary
    work = max(
        table["grown"] * of_block,
        table["logits" if facts.quantized else "dense_logits"] * logits,
        logits + coefficients.generation["head"] * head * facts.quantized,
        layers + 4 * wave * widest_outputs(facts) * facts.float_bytes,
    )
    merged = wave * sizes.prompt_tokens * per_token * facts.blocks
    kept = max(facts.blocks * of_block, prompt_bytes + merged)
    reading = generation_bytes(facts, sizes.prompt_tokens, coefficients)
    return [
        {"KV cache": prompt_bytes, "sampling": reading},
        {"KV cache": kept, "sampling": work + GENERATION_BYTES},
    ]
