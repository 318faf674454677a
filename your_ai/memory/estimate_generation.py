"""Estimate the memory of generation: prompts, KV caches, and sampling."""

from __future__ import annotations

import math

from your_ai.memory.facts import BlockFacts, ModelFacts, quantized_matrix_bytes, widest_outputs
from your_ai.memory.mixer_facts import ATTENTION, MLA, SLIDING
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
GROWN, SCORES, SLICES, WIDE, HEAD_SLICES = 1.7, 1.05, 5.4, 1.5, 2.2
WAVE_GROWN, LOGITS, DENSE_LOGITS = 1.0, 4.1, 3.1  # the same of a wave, and its logits
GOOD_WAVE = 8  # completions generated together from which the plan matters more than the wave


def generation_bytes(facts: ModelFacts, tokens: int, step: int = CACHE_STEP) -> int:
    """Bytes of the KV cache of `tokens`, which grows by `step`, and of a prompt, PREFILL_TOKENS of
    it at a time.

    The peak is in one of three places: attention over all tokens while the KV cache of a block
    grows, the layers of a block, or a slice of the head.
    """
    number = facts.float_bytes
    cached = -(-tokens // step) * step
    of_block = cached * largest_kv_bytes(facts)
    prompt = min(tokens, PREFILL_TOKENS)
    hidden = prompt * facts.hidden * number
    wide = prompt * widest_outputs(facts) * number
    matrix = quantized_matrix_bytes(facts)
    scores = facts.heads * prompt * tokens * number * (2 if facts.softcaps else 1)
    attention = GROWN * of_block + SCORES * scores + hidden
    layers = SLICES * min(DEQUANTIZED_SLICE_BYTES, matrix) + WIDE * wide + 2 * hidden
    head_slice = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number)
    head = HEAD_SLICES * head_slice + 2 * facts.vocabulary * number
    return int(cached * kv_bytes_per_token(facts) + max(attention, layers, head) + GENERATION_BYTES)


def kv_bytes_of_block(facts: ModelFacts, block: BlockFacts) -> int:
    """Bytes that a token leaves in the cache of a block: keys and values, but no state."""
    kept = sum(o for name, (_, o) in block.linears.items() if name.endswith(("k_proj", "v_proj")))
    if block.mixers and not kept:
        kept = sum(m.cached for m in block.mixers if m.kind == MLA)
        joined = any(m.kind in (ATTENTION, SLIDING) and m.cached for m in block.mixers)
        return (kept or 2 * facts.hidden * joined) * facts.float_bytes
    if block.mixers and not any(m.cached for m in block.mixers):
        return 0
    return (kept or 2 * facts.hidden) * facts.float_bytes


def largest_kv_bytes(facts: ModelFacts) -> int:
    """Bytes that a token leaves in the cache of the block that keeps most."""
    return max((kv_bytes_of_block(facts, block) for block in facts.kinds), default=0)


def kv_bytes_per_token(facts: ModelFacts) -> int:
    """Bytes that a token leaves in the caches of all blocks."""
    of_kinds = [kv_bytes_of_block(facts, block) for block in facts.kinds]
    return sum(of_kinds[kind] for kind in facts.order)


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


def rollout_phases(facts: ModelFacts, sizes: RolloutSizes, wave: int) -> list[dict[str, float]]:
    """Bytes while prompts are read, and while completions are sampled, at most `wave` together.

    The KV cache of a wave grows by BATCH_STEP tokens. While a block's part grows, both exist.
    Sampling needs some arrays as large as the logits of the wave, (B, V) in float32. Where there
    are more completions, prompts are read beside those that are being sampled, and kept until all
    of their completions have begun.
    """
    per_token = kv_bytes_per_token(facts)
    of_prompt = sizes.prompt_tokens * per_token
    prompt_bytes = prompts_of_wave(wave, sizes.group) * of_prompt
    joins = wave < sizes.rows or sizes.converses
    grown = -(-sizes.new_tokens // BATCH_STEP) * BATCH_STEP
    tokens = sizes.prompt_tokens + (sizes.new_tokens + BATCH_STEP if joins else grown)
    of_block = wave * tokens * largest_kv_bytes(facts)
    matrix = quantized_matrix_bytes(facts)
    layers = SLICES * min(DEQUANTIZED_SLICE_BYTES, matrix)
    head = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * facts.float_bytes)
    logits = 4 * wave * facts.vocabulary
    work = max(
        WAVE_GROWN * of_block,
        (LOGITS if facts.head_quantized else DENSE_LOGITS) * logits,
        logits + HEAD_SLICES * head * facts.head_quantized,
        layers + 4 * wave * widest_outputs(facts) * facts.float_bytes,
    )
    waiting = of_prompt * (joins and sizes.group > 1)
    kept = wave * tokens * per_token + waiting
    others = joins * (wave - 1) * tokens * per_token
    reading = generation_bytes(facts, sizes.prompt_tokens, step=1)
    return [
        {"KV cache": max(prompt_bytes, others), "sampling": reading},
        {"KV cache": kept, "sampling": work + GENERATION_BYTES},
    ]
