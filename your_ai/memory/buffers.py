"""Count the MLX buffers that a process holds at once: Metal allows it a fixed number. No mlx here.

What stays is a few thousand, for any model: the arrays of layers, adapters, gradients and states.
More of them come with the data: a buffer for each text of a prefix cache in memory, and the KV
caches of the prompts of a wave. Most of all are there while a graph is traced. MLX gives each
constant of an operation a buffer of its own, until the graph is complete and equal ones are shared;
a graph has operations for each slice of a row, and a fused graph has those of every block.

Micro-batches add none: they are numpy arrays until their turn. Freed buffers that MLX keeps do not
count: at the limit it frees them. Every number here is an upper bound. The constants were counted
in graphs of MLX 0.32.4, and tests/memory/test_buffers.py counts them again.
"""

from __future__ import annotations

from collections import Counter

from your_ai.config.optimizers import OPTIMIZERS
from your_ai.memory.estimate_adapters import arrays_of
from your_ai.memory.estimate_generation import prompts_of_wave
from your_ai.memory.estimate_graphs import queries_in_graph, query_blocks
from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.mixer_facts import ATTENTION, CHUNKS, GATED_DELTA, KDA, MAMBA1
from your_ai.memory.workload import Plan, RolloutSizes, Workload

METAL_BUFFERS = 499_000  # of every Mac so far; MLX assumes it where the system does not say
ALLOWED = 0.9  # share of the limit; also for the few that a finished graph and running work keep
OF_LAYER = 4  # weight, scales, biases and bias
OF_BLOCK = 16  # arrays of a block beside its linear layers, and those that it keeps of them
OUTSIDE = 32  # arrays outside of the blocks
CACHED = 2  # keys and values, or the states of a recurrence
# Constants of the graph of a block with its backward pass: of all, of each block of queries, and of
# each chunk of a recurrence.
OF_GRAPH, OF_QUERIES, OF_CHUNK = 180, 44, {KDA: 52, MAMBA1: 26}
OF_OTHER_CHUNK = 90
FORWARD = 0.65  # the same of a graph without its backward pass


def allowed(most_buffers: int) -> int:
    """The buffers that plans may use, of those that a process may hold."""
    return int(ALLOWED * most_buffers)


def most_held(workload: Workload, plan: Plan, rows: int, tokens: int) -> int:
    """The buffers that a process holds at once under a plan, at most, for micro-batches of (B, T)
    or shorter ones."""
    facts, sizes = workload.facts, workload.rollouts
    kept = OF_BLOCK * sum(plan.kept) + facts.blocks
    others = len(workload.reward_models) + (workload.teacher is not None)
    held = workload.prefix_texts + of_model(workload) * (1 + others) + kept
    tracing = of_tracing(workload, plan, rows, tokens)
    return held + max(tracing, of_wave(facts, sizes, plan.wave) if sizes else 0)


def of_model(workload: Workload) -> int:
    """The arrays of a model and its adapters; in training also of gradients, their sums and the
    states of the optimizer."""
    facts, training = workload.facts, workload.training
    held = [OF_BLOCK + kind.norms + OF_LAYER * len(kind.linears) for kind in facts.kinds]
    trained = sum(count for _, count in arrays_of(facts, training))
    each = 1 + training.adapter.has_norms
    if not workload.forward:
        states = max(2, OPTIMIZERS[training.optimizer].states)
        each += 2 + states * (1 if training.optimizer_bits == 32 else 2)
    return OUTSIDE + sum(held[kind] for kind in facts.order) + each * trained


def of_wave(facts: ModelFacts, sizes: RolloutSizes, wave: int) -> int:
    """The KV caches of the prompts of a wave, and of the wave, while it grows."""
    return CACHED * facts.blocks * (prompts_of_wave(wave, sizes.group) + 2)


def of_tracing(workload: Workload, plan: Plan, rows: int, tokens: int) -> int:
    """The constants of the largest graph: of all blocks, or of one."""
    facts, whole = workload.facts, plan.engine == "fused" and workload.soft is None
    mixes_whole = workload.process.mixes_whole and not workload.packed
    if whole:  # some of its attention is lean, too
        queries = query_blocks(facts, "staged", rows, tokens)
    else:
        queries = queries_in_graph(workload, plan.engine, rows, tokens, plan.kept)

    def constants(kind: BlockFacts) -> int:
        found = OF_GRAPH
        for mixer in kind.mixers:
            if mixer.kind == ATTENTION:
                found += OF_QUERIES * queries * (not mixes_whole or facts.has_windows)
            elif mixer.kind in CHUNKS and not (mixes_whole and mixer.kind == GATED_DELTA):
                of_chunk = OF_CHUNK.get(mixer.kind, OF_OTHER_CHUNK)
                found += of_chunk * -(-tokens // CHUNKS[mixer.kind])
        return found

    of_kinds = [constants(kind) for kind in facts.kinds]
    if not whole:
        return max(of_kinds, default=0)
    trained = 0 if workload.forward else workload.training.reach(facts)
    every, backward = Counter(facts.order), Counter(facts.last(trained))
    shares = {kind: FORWARD * n + (1 - FORWARD) * backward[kind] for kind, n in every.items()}
    return int(sum(of_kinds[kind] * share for kind, share in shares.items()))


def too_many(workload: Workload, least: int) -> str:
    """The error if every plan holds more; least: of all plans."""
    advice = "shorten the rows (--max-seq-length), or adapt less (--lora-layers)"
    if workload.prefix_texts > least // 2:
        advice = "use --prefix-cache disk"
    return (
        f"every plan needs {least:,} of MLX's buffers or more, and Metal allows a process "
        f"{workload.process.most_buffers:,}; {advice}"
    )
