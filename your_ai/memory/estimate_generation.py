"""Estimate the memory of generation: prompts, KV caches, and sampling."""

from __future__ import annotations

import math

from your_ai.memory.costs import Costs
from your_ai.memory.facts import ModelFacts, quantized_matrix_bytes, widest_outputs
from your_ai.memory.sizes import (
    BATCH_STEP,
    CACHE_STEP,
    DEQUANTIZED_SLICE_BYTES,
    HEAD_SLICE_BYTES,
    PREFILL_TOKENS,
)
from your_ai.memory.workload import RolloutSizes

GENERATION_BYTES = 500_000  # small arrays of generation
# Arrays that exist together: of the part of a KV cache that grows, of attention scores, of slices
# of a layer, of the outputs of the widest layer, and of slices of the head.
GROWN, SCORES, SLICES, WIDE, HEAD_SLICES = 1.7, 1.05, 5.4, 8.0, 2.2
WAVE_GROWN, LOGITS, DENSE_LOGITS = 2.0, 4.1, 3.1  # the same of a wave, and its logits
GOOD_WAVE = 8  # completions generated together from which the plan matters more than the wave


def generation_bytes(
    facts: ModelFacts, tokens: int, costs: Costs | None = None, step: int = CACHE_STEP
) -> int:
    """Bytes of the KV cache of `tokens`, which grows by `step`, and of a prompt, PREFILL_TOKENS of
    it at a time. costs: of the model, if they were measured.

    The peak is in a block or a slice of the head.
    """
    number = facts.float_bytes
    cached = -(-tokens // step) * step
    prompt = min(tokens, PREFILL_TOKENS)
    if costs is not None and costs.has("reading"):
        block = costs.together("reading", "read_more", 1, tokens)
        block += prompt * facts.hidden * number
    else:
        block = guessed_reading(facts, tokens)
    head_slice = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number)
    head = HEAD_SLICES * head_slice + 2 * facts.vocabulary * number
    return int(cached_bytes(facts, cached, prompt) + max(block, head) + GENERATION_BYTES)


def guessed_reading(facts: ModelFacts, tokens: int) -> float:
    """Bytes while a block reads the end of such a prompt: those of attention over all tokens while
    its cache grows, or those of its layers."""
    number, prompt = facts.float_bytes, min(tokens, PREFILL_TOKENS)
    hidden = prompt * facts.hidden * number
    wide = prompt * widest_outputs(facts) * number
    matrix = quantized_matrix_bytes(facts)
    scores = facts.heads * prompt * tokens * number * (2 if facts.softcaps else 1)
    attention = GROWN * largest_cached(facts, tokens, prompt) + SCORES * scores + hidden
    layers = SLICES * min(DEQUANTIZED_SLICE_BYTES, matrix) + WIDE * wide + 2 * hidden
    return max(attention, layers)


def guessed_sampling(facts: ModelFacts, wave: int, tokens: int) -> float:
    """Bytes while a block reads a token of each row of a wave, as its part of the caches grows."""
    layers = SLICES * min(DEQUANTIZED_SLICE_BYTES, quantized_matrix_bytes(facts))
    wide = 4 * wave * widest_outputs(facts) * facts.float_bytes
    return max(WAVE_GROWN * wave * largest_cached(facts, tokens), layers + wide)


def cached_bytes(facts: ModelFacts, tokens: int, together: int = 1) -> int:
    """Bytes that a row of so many tokens leaves in all caches; together: as in `RowCache`."""
    return sum(cache.bytes_at(tokens, together) for cache in facts.row_caches)


def largest_cached(facts: ModelFacts, tokens: int, together: int = 1) -> int:
    """The same of the largest cache."""
    return max((cache.bytes_at(tokens, together) for cache in facts.row_caches), default=0)


def prompts_of_wave(wave: int, group: int) -> int:
    """The most prompts that have rows in one wave: waves begin at several offsets in a group."""
    return (wave + 2 * group - math.gcd(wave, group) - 1) // group


def wave_sizes(rows: int) -> list[list[int]]:
    """The numbers of completions generated together, of so many: larger waves, and those below
    GOOD_WAVE."""
    waves = [rows]
    while waves[-1] > 1:
        waves.append(waves[-1] // 2)
    good = min(GOOD_WAVE, rows)
    found = [[w for w in waves if w >= good], [w for w in waves if w < good]]
    return [each for each in found if each]


def rollout_phases(
    facts: ModelFacts, sizes: RolloutSizes, wave: int, costs: Costs | None = None
) -> list[dict[str, float]]:
    """Bytes while prompts are read, and while completions are sampled, at most `wave` together.
    costs: as in `generation_bytes`.

    The KV cache of a wave grows by BATCH_STEP tokens. While a block's part grows, both exist.
    Sampling needs some arrays as large as the logits of the wave, (B, V) in float32. Where there
    are more completions, prompts are read beside those that are being sampled, and kept until all
    of their completions have begun.
    """
    of_prompt = cached_bytes(facts, sizes.prompt_tokens, PREFILL_TOKENS)
    prompt_bytes = prompts_of_wave(wave, sizes.group) * of_prompt
    joins = wave < sizes.rows or sizes.converses
    grown = -(-sizes.new_tokens // BATCH_STEP) * BATCH_STEP
    tokens = sizes.prompt_tokens + (sizes.new_tokens + BATCH_STEP if joins else grown)
    of_row = cached_bytes(facts, tokens)
    head = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * facts.float_bytes)
    logits = 4 * wave * facts.vocabulary
    block = guessed_sampling(facts, wave, tokens)
    if costs is not None and costs.has("sampling"):
        block = costs.together("sampling", "sample_more", wave, 1)
    work = max(
        block,
        (LOGITS if facts.head_quantized else DENSE_LOGITS) * logits,
        logits + HEAD_SLICES * head * facts.head_quantized,
    )
    waiting = of_prompt * (joins and sizes.group > 1)
    kept = wave * of_row + waiting
    others = joins * (wave - 1) * of_row
    reading = generation_bytes(facts, sizes.prompt_tokens, costs, step=1)
    return [
        {"KV cache": max(prompt_bytes, others), "sampling": reading},
        {"KV cache": kept, "sampling": work + GENERATION_BYTES},
    ]
