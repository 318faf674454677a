"""Estimate the memory of compiled graphs. Shapes: as in `estimate`."""

from __future__ import annotations

from your_ai.memory.estimate_adapters import forms_of_kinds
from your_ai.memory.facts import (
    BlockFacts,
    ModelFacts,
    head_step,
    is_quantized,
    layers_named,
    names_of,
)
from your_ai.memory.guess import is_tiled
from your_ai.memory.memoized import memoized
from your_ai.memory.mixer_facts import CHUNKS, MAMBA1, MAMBA2, RWKV7
from your_ai.memory.sizes import (
    CPU_TOKENS,
    DEQUANTIZED_SLICE_BYTES,
    FEWEST_QUERIES,
    HEAD_ROWS,
    HEAD_SLICE_BYTES,
    LEAN_QUERY_BLOCK,
    QUERY_BLOCK,
    SCORE_BYTES,
    TILE_SCORE_BYTES,
    tiles_of,
)
from your_ai.memory.workload import NOTHING, Kept, Plan, Workload

GRAPH_BYTES = 85_000  # operations of one slice that waits to be evaluated
FORWARD_GRAPH = 0.4  # size of a graph without a backward pass, relative to one with it
GRAPHS_MARGIN = 1.25
ROUNDED_SLICE = 3  # operations of a slice that is rounded, relative to one that is dequantized
# Bytes of a compiled graph for each of the things in it: a fused one, those of a kind of block, and
# that of the first trained block, which has no gradient of its input.
Table = dict[str, int]
FUSED_GRAPH: Table = {
    "block": 100_000,
    "slice": 115_000,
    "queries": 200_000,
    "adapted": 50_000,
    "vectors": 150_000,
}
FUSED_HEAD_GRAPH = 150_000  # for each slice of the vocabulary
STAGED_GRAPH: Table = {
    "block": 300_000,
    "slice": 100_000,
    "queries": 200_000,
    "adapted": 100_000,
    "vectors": 100_000,
}
FIRST_GRAPH: Table = {"block": 100_000, "slice": 60_000, "queries": 170_000}
# Bytes of each chunk of a recurrence: in a fused graph, and by kind in that of a block, where the
# queries that are counted are enough for the others.
FUSED_CHUNK, STAGED_CHUNK = 450_000, {MAMBA1: 450_000, MAMBA2: 350_000, RWKV7: 600_000}


@memoized
def graphs_bytes(
    workload: Workload,
    engine: str,
    rows: int,
    tokens: int,
    *,
    trained: bool = True,
    kept: Kept = NOTHING,
) -> int:
    """Bytes of the compiled graphs for micro-batches of one shape. trained: with gradients.

    A fused graph contains every block. The other engines share one graph per kind of block, and
    one more if only some of these keep something. Blocks of other ranks or scales are of another
    kind.
    """
    facts, training = workload.facts, workload.training
    queries = queries_in_graph(workload, engine, rows, tokens, kept)

    def size_of(table: Table, alone: Workload) -> float:
        """The size, by a table, of the graph of one block of a model that has only such blocks."""
        adapted = len(layers_named(alone.facts, training.targets, training.experts))
        counts = {
            "block": 1,
            "slice": dequantized_slices(alone),
            "queries": queries,
            "adapted": adapted,
            "vectors": adapted * len(training.adapter.vectors),
        }
        return sum(table.get(name, 0) * count for name, count in counts.items())

    def of_chunks(alone: Workload) -> int:
        return chunks_bytes(alone.facts, engine, tokens)

    if engine == "fused":
        found = 0.0
        for alone, count, adapted_count in workload.parts:
            blocks = adapted_count + FORWARD_GRAPH * (count - adapted_count)
            found += blocks * (size_of(FUSED_GRAPH, alone) + of_chunks(alone))
        slices = -(-workload.vocabulary // head_step(facts, min(HEAD_ROWS, rows * tokens)))
        found += FUSED_HEAD_GRAPH * slices
    else:
        forms, calls = forms_of_kinds(facts, training), calls_of_kinds(workload)
        sizes = (size_of(STAGED_GRAPH, each) + of_chunks(each) for each in workload.alone)
        found = sum(
            size * max(1, forms.get(kind, 0)) * calls[kind] for kind, size in enumerate(sizes)
        )
        found *= len({training.reach(facts), *(n for n in kept if n)})
        found += max((size_of(FIRST_GRAPH, each) for each in workload.alone), default=0)
    return int(GRAPHS_MARGIN * found * (1 if trained else FORWARD_GRAPH))


def calls_of_kinds(workload: Workload) -> list[int]:
    """In how many ways blocks of each kind are called, as far as that was measured: with windows or
    without. They are compiled separately."""
    facts, measured = workload.facts, workload.measured
    if measured is None:
        return [1] * len(facts.kinds)
    pairs = set(zip(facts.order, measured.order, strict=True))
    return [sum(own == kind for own, _ in pairs) for kind in range(len(facts.kinds))]


def chunks_bytes(facts: ModelFacts, engine: str, tokens: int) -> int:
    """Bytes of the chunks of recurrences in the graph of a block."""
    return sum(
        (FUSED_CHUNK if engine == "fused" else STAGED_CHUNK.get(mixer.kind, 0))
        * -(-tokens // CHUNKS[mixer.kind])
        for kind in facts.kinds
        for mixer in kind.mixers
        if mixer.kind in CHUNKS
    )


@memoized
def dequantized_slices(workload: Workload) -> int:
    """Slices in which the weights of a block are dequantized, or more if they are rounded, too."""
    facts, training = workload.facts, workload.training
    rounded = names_of(facts, training.targets) if training.rounding else []

    def weight_of(kind: BlockFacts, name: str) -> int:
        if name in rounded:
            return ROUNDED_SLICE
        return int(workload.process.sliced and is_quantized(facts, kind, name))

    return max(
        sum(
            weight_of(kind, name) * -(-i * o * facts.float_bytes // DEQUANTIZED_SLICE_BYTES)
            for name, (i, o) in kind.linears.items()
        )
        for kind in facts.kinds
    )


def queries_in_graph(
    workload: Workload, engine: str, rows: int, tokens: int, kept: Kept = NOTHING
) -> int:
    """The blocks of queries in the graph of a block; the arguments are as of `graphs_bytes`."""
    some_keep_none = engine != "fused" and kept.linear < workload.training.reach(workload.facts)
    if some_keep_none and is_tiled(workload, rows, tokens):
        return tiled_query_blocks(workload.facts, rows, tokens)
    return query_blocks(workload.facts, engine, rows, tokens)


def query_blocks(facts: ModelFacts, engine: str, rows: int, tokens: int) -> int:
    """Blocks of queries in which attention over a row is computed; 0 if it is computed whole."""
    if tokens < CPU_TOKENS:
        return 0
    most = QUERY_BLOCK if engine == "fused" else LEAN_QUERY_BLOCK
    most = min(most, SCORE_BYTES // (4 * rows * max(1, facts.heads) * tokens))
    return -(-tokens // max(most, FEWEST_QUERIES))


def tiled_query_blocks(facts: ModelFacts, rows: int, tokens: int) -> int:
    """Blocks of queries in the compiled graphs of attention: of a tile with itself, and with
    another; twice, if the last tile is shorter."""
    tiles = tiles_of(rows, tokens)
    n = tiles[0].stop - tiles[0].start
    most = max(FEWEST_QUERIES, TILE_SCORE_BYTES // (4 * rows * max(1, facts.heads) * n))
    shapes = len({tile.stop - tile.start for tile in tiles})
    return 2 * shapes * -(-n // min(most, n))


def evaluation_graphs_bytes(
    workload: Workload, plan: Plan, rows: int, tokens: int, work_bytes: int
) -> int:
    """Bytes of the graphs of an evaluation, in addition to `work_bytes` of activations.

    A fused graph contains every block and all slices. A staged model has such a graph once, when
    its parts are compared with the whole; its memory is free before the first block runs.
    """
    facts = workload.facts
    slices = dequantized_slices(workload)
    blocks = GRAPH_BYTES * facts.blocks * slices
    compiled = graphs_bytes(workload, plan.engine, rows, tokens, trained=False)
    if plan.engine == "fused":
        head = -(-workload.vocabulary * facts.hidden * facts.float_bytes // HEAD_SLICE_BYTES)
        return max(compiled, blocks) + 2 * GRAPH_BYTES * head
    return compiled + max(0, blocks - work_bytes if plan.engine == "staged" else 0)
