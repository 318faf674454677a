"""Memory of the mixers of nets.mixers in training, beyond their inputs.

Measured on the CPU with compiled programs in float32: the peak of the forward and the backward
pass of one layer's mixer, with the gradients of all its inputs, minus the inputs and the gradient
of the output. The formulas are within 15% of it (tests/memory/test_mixer_sizes.py). The
projections, convolutions and norms around a mixer are not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from your_ai.memory.mixer_facts import (
    GATED_DELTA,
    KDA,
    LINEAR_ATTENTION,
    MAMBA1,
    MAMBA2,
    RGLRU,
    RWKV7,
    MixerFacts,
)
from your_ai.memory.sizes import (
    DELTA_CHUNK,
    LINEAR_CHUNK,
    LRU_CHUNK,
    RWKV_CHUNK,
    SELECTIVE_CHUNK,
    VECTOR_DELTA_CHUNK,
)


@dataclass(frozen=True)
class MixerSizes:
    """How many numbers a mixer has, for one row."""

    inputs: int
    """Per token, in the model's precision: e.g. queries, keys, values."""
    gates: int
    """Per token, in float32."""
    outputs: int
    """Per token."""
    state: int
    """Kept in float32 before each chunk."""
    chunk: int
    """Tokens per chunk."""
    work: int
    """What a chunk computes, in float32."""
    gradients: float
    """How often the gradients of the inputs exist at the end: those of the chunks, and joined."""
    alive: float
    """How many times `work` is in memory: its gradients too, and chunks that MLX runs ahead."""


def gated_delta_sizes(
    key_heads: int, value_heads: int, key_size: int, value_size: int, vector: bool
) -> MixerSizes:
    """vector: whether the decay is a number per feature of a key, not per head."""
    chunk = VECTOR_DELTA_CHUNK if vector else DELTA_CHUNK
    gates = value_heads * (key_size + 1 if vector else 2)
    outputs = value_heads * value_size
    inputs, state = 2 * key_heads * key_size + outputs, outputs * key_size
    work = state + chunk * (inputs + gates + outputs + value_heads * chunk)
    if vector:
        work += 3 * levels(chunk) * chunk * value_heads * (key_size + chunk)
    alive = 3.75 if vector else 6.0
    return MixerSizes(inputs, gates, outputs, state, chunk, work, 1.5, alive)


def rwkv7_sizes(heads: int, size: int) -> MixerSizes:
    features, chunk = heads * size, RWKV_CHUNK
    work = features * (size + 7 * chunk) + 4 * levels(chunk) * chunk * heads * (size + chunk)
    return MixerSizes(6 * features, 0, features, features * size, chunk, work, 1.75, 3.25)


def state_space_sizes(groups: int, heads: int, state_size: int, head_size: int) -> MixerSizes:
    """Mamba 2."""
    outputs, gates, chunk = heads * head_size, 2 * heads, LINEAR_CHUNK
    inputs, state = outputs + 2 * groups * state_size, outputs * state_size
    work = state + chunk * (inputs + gates + outputs + heads * chunk)
    return MixerSizes(inputs, gates, outputs, state, chunk, work, 1.75, 4.25)


def lightning_sizes(heads: int, size: int) -> MixerSizes:
    """Lightning attention: the decay is the same at all tokens."""
    features, chunk = heads * size, LINEAR_CHUNK
    state = features * size
    work = state + chunk * (4 * features + heads + heads * chunk)
    return MixerSizes(3 * features, heads, features, state, chunk, work, 1.75, 3.5)


def selective_sizes(channels: int, state_size: int) -> MixerSizes:
    """Mamba 1."""
    inputs, state, chunk = 2 * (channels + state_size), channels * state_size, SELECTIVE_CHUNK
    work = state + chunk * (inputs + channels + state)
    return MixerSizes(inputs, 0, channels, state, chunk, work, 1.25, 14.25)


def lru_sizes(channels: int) -> MixerSizes:
    """RG-LRU."""
    work = channels * (1 + 3 * LRU_CHUNK)
    return MixerSizes(2 * channels, 0, channels, channels, LRU_CHUNK, work, 2.0, 8.25)


def levels(chunk: int) -> int:
    """Levels at which a chunk with decays per feature is halved."""
    return (chunk - 1).bit_length()


def forward_bytes(sizes: MixerSizes, rows: int, tokens: int, float_bytes: int) -> int:
    """Bytes of the outputs of the chunks, and joined, in a pass without gradients; the other
    arguments are as in `transient_bytes`."""
    return rows * 2 * sizes.outputs * tokens * float_bytes


def transient_bytes(sizes: MixerSizes, rows: int, tokens: int, float_bytes: int) -> int:
    """float_bytes: of the inputs and the output.

    The states are freed as the gradients of the chunks come. So the peak is at the end of the
    forward pass, where the output's chunks are joined, or at the end of the backward pass.
    """
    states = 4 * sizes.state * -(-tokens // sizes.chunk)
    forward = 2 * sizes.outputs * tokens * float_bytes + states
    of_inputs = sizes.inputs * float_bytes + 4 * sizes.gates
    backward = (sizes.outputs * float_bytes + sizes.gradients * of_inputs) * tokens
    work = 4 * sizes.alive * sizes.work * min(tokens, sizes.chunk) / sizes.chunk
    return int(rows * (max(forward, backward) + work))


CONVOLUTION_ARRAYS = 3  # of its outputs, while a short convolution computes its gradient
# What is kept for the backward pass: arrays like the outputs of the convolution, and, in addition
# to its inputs and output, like the output of the recurrence. Mamba 2 has a gated norm.
KEPT = {MAMBA2: (2.5, 2)}
KEPT_OTHERWISE = (1, 0)


def sizes_of(mixer: MixerFacts) -> MixerSizes | None:
    """The sizes of a recurrence; None for attention and convolutions."""
    heads, keys, values = mixer.heads, mixer.key_dim, mixer.value_dim
    if mixer.kind in (GATED_DELTA, KDA):
        return gated_delta_sizes(mixer.kv_heads, heads, keys, values, mixer.kind == KDA)
    if mixer.kind == RWKV7:
        return rwkv7_sizes(heads, keys)
    if mixer.kind == MAMBA2:
        return state_space_sizes(mixer.kv_heads, heads, mixer.state_size, values)
    if mixer.kind == LINEAR_ATTENTION:
        return lightning_sizes(heads, keys)
    if mixer.kind == MAMBA1:
        return selective_sizes(heads, mixer.state_size)
    return lru_sizes(heads * values) if mixer.kind == RGLRU else None


def mixers_bytes(
    mixers: Iterable[MixerFacts],
    rows: int,
    tokens: int,
    float_bytes: int,
    *,
    kept: bool = False,
    forward: bool = False,
) -> int:
    """Bytes of the recurrences and short convolutions of a block in a training pass.

    kept: what stays in memory from the forward pass to the backward pass; by default the peak.
    forward: the peak of a pass without gradients.
    """
    total, size = 0, rows * tokens * float_bytes
    for mixer in mixers:
        found = sizes_of(mixer)
        if found is not None:
            of_one = kept_bytes if kept else forward_bytes if forward else transient_bytes
            total += of_one(found, rows, tokens, float_bytes)
        of_convolution, of_outputs = KEPT.get(mixer.kind, KEPT_OTHERWISE)
        if not kept:
            of_convolution, of_outputs = CONVOLUTION_ARRAYS, 0
        outputs = 0 if found is None else found.outputs
        total += int(size * (of_convolution * mixer.conv_channels + of_outputs * outputs))
    return total


def kept_bytes(sizes: MixerSizes, rows: int, tokens: int, float_bytes: int) -> int:
    """Bytes of the inputs, the output and the states of a recurrence."""
    states = 4 * sizes.state * -(-tokens // sizes.chunk)
    of_token = (sizes.inputs + sizes.outputs) * float_bytes + 4 * sizes.gates
    return rows * (of_token * tokens + states)
