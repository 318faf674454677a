"""Guess the memory of a model's work from sizes alone, where nothing was measured. No mlx here.

For the catalogue, for models that are not here, for limits that are far away, and for how much may
be measured at all. The factors are rounded from peaks of MLX 0.32 on a CPU in float32, so a guess
may be a tenth too low, and much too high: plans add `plan.GUESS_MARGIN`.

Shapes: B rows, T tokens per row, N = B x T, D hidden size, M outputs of the widest linear layer.
"""

from __future__ import annotations

from collections.abc import Callable

from your_ai.memory.costs import (
    FUSED_SCORES,
    FUSED_TRAINED,
    STAGED_SCORES,
    TRAINED,
    BlockCosts,
    CostCurve,
    Costs,
    HeadCosts,
    Shape,
)
from your_ai.memory.estimate_adapters import copied_bytes, ranks_of_blocks, whole_bytes
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
from your_ai.memory.mixer_facts import (
    ATTENTION,
    CHUNKS,
    GATED_DELTA,
    KDA,
    LINEAR_ATTENTION,
    MAMBA1,
    MAMBA2,
    MLA,
    RGLRU,
    RWKV7,
    MixerFacts,
)
from your_ai.memory.sizes import (
    DEQUANTIZED_SLICE_BYTES,
    HEAD_ROWS,
    HEAD_SLICE_BYTES,
    QUERY_BLOCK,
    TILE_SCORE_BYTES,
    TILE_TOKENS,
    tiles_of,
)
from your_ai.memory.workload import Training, Workload

SAMPLES = (Shape(1, 128), Shape(2, 128), Shape(1, 512), Shape(1, 1024))
HEAD_SIZES = (1, 128, 256, 512, 1024, 2048)  # N
SLICED_LAYERS = ("gate_proj", "up_proj", "down_proj")  # an MLP that has them runs in slices
SCORES = 3.8  # arrays of the scores of latent attention, whose mask is an array
NORMS_BYTES = 15e6  # norms are computed in slices, so this does not depend on the layer
SOFTCAP_LOGITS = 1.7
SOFTCAP_SCORES = 2.0  # the same of scores that pass through a tanh


@memoized
def costs_of(workload: Workload) -> Costs:
    """The costs of the work: as measured, and guessed where nothing was measured."""
    guess = guessed(workload.facts, workload.training, workload.score_head)
    return guess if workload.costs is None else workload.costs.memory.completed(guess)


@memoized
def is_tiled(workload: Workload, rows: int, tokens: int) -> bool:
    """Return whether every block runs on tiles of such rows, unless it keeps outputs."""
    if workload.soft is not None:  # it has engines of its own
        return False
    return len(tiles_of(rows, tokens)) > 1 and costs_of(workload).is_tiled


@memoized
def guessed(facts: ModelFacts, training: Training, score_head: bool = False) -> Costs:
    """The costs of a model with these adapters; score_head: as in `Workload`."""
    kinds = [block_costs(alone, training, score_head) for alone in facts.alone]
    return Costs(tuple(kinds), facts.order, head_costs(facts, score_head, training))


def block_costs(facts: ModelFacts, training: Training, score_head: bool) -> BlockCosts:
    """The costs of a block of a model whose blocks are of one kind."""
    number, hidden = facts.float_bytes, facts.hidden + facts.passed
    matrix, largest = quantized_matrix_bytes(facts), largest_matrix_bytes(facts)
    dequantized = min(DEQUANTIZED_SLICE_BYTES, matrix)
    if training.rounding:  # of a slice there are the dense, adapted and rounded weight, and parts
        dequantized = 2 * min(DEQUANTIZED_SLICE_BYTES, largest)
    dense, wide = dense_share(facts), widest_outputs(facts)
    part = slice_width(wide, backward_features(facts.hidden)) if slices_mlp(facts) else wide
    adapted = layers_named(facts, training.targets, training.experts)
    lora, most = sum(i for i, _ in adapted), max(part, facts.hidden)
    sliced_lora = sum(min(i, most) for i, _ in adapted)
    outputs = sum(o for _, o in facts.linears.values())
    vectors = sum(min(o, facts.hidden) for _, o in adapted) * bool(training.adapter.vectors)
    routed = max((facts.linears[name][1] for name in facts.experts), default=0)
    norms = facts.norms - 2
    of_weights = whole_bytes(facts, training)
    weights = 3 * min(part * facts.hidden * number, largest)  # of the layers in a slice of the MLP

    def forward(rows: int, tokens: int) -> float:
        n = rows * tokens * number
        work = n * ((3.4 + 0.3 * (dense == 1)) * forward_width(facts) + 4.5 * hidden)
        work += n * (6 * routed + 0.7 * norms * facts.hidden) + 5.8 * dequantized
        return work + mixing(rows, tokens, forward=True)

    def backward(rows: int, tokens: int) -> float:
        n = rows * tokens * number
        mlp = n * (11.7 * part + 3 * wide * (dense == 1))
        rest = n * (6 * routed + 1.6 * sliced_lora + (1.5 + 0.7 * norms) * hidden + 2.5 * vectors)
        copies = 1.9 * (1 - dense) * min(weights, 3 * DEQUANTIZED_SLICE_BYTES)
        copies += 0.2 * dense * weights
        return max(mlp, mixing(rows, tokens)) + rest + copies + of_weights

    def kept_forward(rows: int, tokens: int) -> float:
        n = rows * tokens * number
        work = n * (4.6 * wide + outputs + (5 + 0.7 * norms) * hidden + 6 * routed)
        work += 4.1 * dequantized
        return work + mixing(rows, tokens, forward=True)

    def kept_backward(rows: int, tokens: int) -> float:
        n = rows * tokens * number
        whole = 7.3 if not matrix else 2.0 * (matrix <= DEQUANTIZED_SLICE_BYTES)
        narrow = min(wide, backward_features(facts.hidden)) if is_mixer_alone(facts) else wide
        work = n * (4.4 * narrow + (1 + 0.7 * norms + whole) * hidden + 1.1 * lora + 2.5 * vectors)
        scores = 4 * rows * tokens * facts.heads * min(tokens, QUERY_BLOCK)
        work += n * 6 * routed + 3 * scores + 4.8 * dequantized + mixing(rows, tokens)
        return work + of_weights

    def saved(rows: int, tokens: int) -> float:
        n = rows * tokens * number
        work = n * (1.75 * outputs + 0.75 * lora + vectors + 5.7 * norms * facts.hidden)
        work += copied_bytes(facts, training) / max(1, training.blocks)
        return work + n * 0.5 * routed + mixing(rows, tokens, kept=True)

    def working(rows: int, tokens: int) -> float:
        n = rows * tokens
        own = n * number * (2.5 * outputs + 6 * routed) + 6.2 * dequantized
        return own + mixing(rows, tokens)

    def evaluated(rows: int, tokens: int) -> float:
        slices = 4.6 * dequantized if largest > DEQUANTIZED_SLICE_BYTES else 0.0
        factor = 4.6 if slices else 8.5
        own = rows * tokens * number * (factor * wide + 5.4 * hidden + 6 * routed) + slices
        return own + mixing(rows, tokens, forward=True)

    def mixing(rows: int, tokens: int, *, kept: bool = False, forward: bool = False) -> float:
        """Bytes beyond those of attention in blocks of queries."""
        (kind,) = facts.kinds
        latent = sum(mixer.heads for mixer in kind.mixers if mixer.kind == MLA)
        found = (1.0 if kept else SCORES) * rows * latent * tokens**2 * number
        if facts.softcaps:
            found += SOFTCAP_SCORES * rows * facts.heads * tokens**2 * number
        every = (recurrence_bytes(m, rows, tokens, number, kept=kept, forward=forward)
                 for m in kind.mixers)  # fmt: skip
        return found + sum(every)

    def of_tiles(work: Callable[[int, int], float], per_token: int) -> CostCurve:
        """On tiles: the work of one of them, or of attention, and what there is of each token."""
        scores = min(17.5 * TILE_SCORE_BYTES, 20 * facts.heads * TILE_TOKENS**2)
        width = max((m.heads * m.value_dim for m in facts.kinds[0].mixers), default=0)
        attention = scores + 23 * TILE_TOKENS * (width or facts.hidden)
        return CostCurve(max(work(1, TILE_TOKENS), attention), per_token)

    cached = max((m.cached for m in facts.kinds[0].mixers), default=0) or 2 * facts.hidden
    of_token = (facts.hidden + cached) * number
    every = {ranks for _, ranks in ranks_of_blocks(facts, training)}
    of_adapters = max(
        (sum(r * (i + o) for r, (i, o) in zip(ranks, adapted, strict=True)) for ranks in every),
        default=0,
    )
    return BlockCosts(
        forward=curve_of(forward),
        backward=curve_of(backward),
        storing=CostCurve(max(4.0 * of_adapters, of_weights)),
        norms=CostCurve(NORMS_BYTES * training.adapter.has_norms),
        kept_forward=curve_of(kept_forward),
        kept_backward=curve_of(kept_backward),
        tiled_forward=of_tiles(forward, of_token),
        tiled_backward=of_tiles(lambda b, t: max(forward(b, t), backward(b, t)),
                                of_token + 4 * cached),
        saved=curve_of(saved),
        working=curve_of(working),
        evaluated=curve_of(evaluated),
        tile_tokens=TILE_TOKENS if can_tile(facts) else 0,
    )  # fmt: skip


# Arrays of the work on a chunk of a recurrence that exist together.
ALIVE = {GATED_DELTA: 6, KDA: 15, RWKV7: 17, MAMBA2: 9, LINEAR_ATTENTION: 5, MAMBA1: 16, RGLRU: 32}


def recurrence_bytes(
    mixer: MixerFacts, rows: int, tokens: int, number: int, *, kept: bool, forward: bool
) -> float:
    """Bytes of a recurrence and its short convolution in a training pass.

    kept: what stays until the backward pass. forward: of a pass without gradients.
    """
    convolution = rows * tokens * number * mixer.conv_channels * (1 if kept else 3)
    if mixer.kind not in CHUNKS:
        return convolution
    chunk, size = CHUNKS[mixer.kind], mixer.key_dim or mixer.state_size
    outputs = mixer.heads * max(1, mixer.value_dim)
    keys = mixer.kv_heads or 2 * mixer.heads * (mixer.kind == RWKV7)
    inputs, state = outputs + 2 * keys * size, outputs * max(1, size)
    if forward:
        return convolution + rows * 2 * outputs * tokens * number
    states = 2 * state * -(-tokens // chunk)
    if kept:
        return convolution + rows * (number * tokens * (inputs + outputs) + 2 * states)
    of_chunk = state if mixer.kind in (MAMBA1, RGLRU) else mixer.heads * chunk
    work = state + chunk * (inputs + outputs + of_chunk)
    if mixer.kind == RGLRU:
        work = chunk * outputs
    of_tokens = number * tokens * (outputs + 1.75 * inputs)
    return convolution + rows * (of_tokens + states + 4 * ALIVE[mixer.kind] * work)


def curve_of(work: Callable[[int, int], float]) -> CostCurve:
    """The curve through a function of (B, T), or just above it, where it is none."""
    found = {shape: work(*shape) for shape in SAMPLES}
    curve = CostCurve.through(found)
    above = max((size / curve.at(*shape) for shape, size in found.items() if size), default=1.0)
    terms = (above * term for term in (curve.fixed, curve.of_token, curve.of_pair))
    return CostCurve(*terms) if above > 1 else curve


def head_costs(facts: ModelFacts, score_head: bool, training: Training) -> dict[str, HeadCosts]:
    """The costs of the head: slices of its logits and of its weight, and hidden states."""
    added = [a for a in training.vocabulary if not a.is_embedding or a.is_tied]
    arrays = [m for a in added if a.low_rank for m in a.matrices(training.ranks)]
    gradients = 2 * 4 * sum(rows * columns * count for rows, columns, count in arrays)
    number = facts.float_bytes

    def staged(n: int) -> float:
        logits, weights = head_slices(facts, n, score_head)
        hidden = n * facts.hidden * number
        together = hidden * min(1.0, HEAD_ROWS / n)
        slices = (2 if facts.head_quantized else 3) + bool(added)
        own = 3.75 * logits + slices * weights + 5.7 * together + gradients
        return own + 2 * (hidden - together)

    def fused(n: int) -> float:
        logits, weights = head_slices(facts, n, score_head)
        quantized, outputs = facts.head_quantized, sum(o for _, o in facts.linears.values())
        work = (2 if quantized else 3) * (4.2 * logits + 1.9 * weights * quantized)
        return work + n * number * (0.85 * outputs + 1.1 * facts.hidden)

    def scores(n: int, of_slice: float) -> float:
        logits, _ = head_slices(facts, n, score_head)
        part = min(HEAD_SLICE_BYTES, facts.vocabulary * facts.hidden * number) * (not score_head)
        hidden = min(n, HEAD_ROWS) * facts.hidden * number
        return max(staged(n), 3.4 * logits + of_slice * part + 4 * hidden)

    every: dict[str, Callable[[int], float]] = {
        TRAINED: staged,
        FUSED_TRAINED: fused,
        STAGED_SCORES: lambda n: scores(n, 1.7),
        FUSED_SCORES: lambda n: scores(n, 8.6),
    }
    return {
        name: HeadCosts(HEAD_SIZES, tuple(of(n) for n in HEAD_SIZES)) for name, of in every.items()
    }


def head_slices(facts: ModelFacts, n: int, score_head: bool) -> tuple[float, float]:
    """Bytes of a slice of the logits of N hidden states, and of the weight in it."""
    if score_head:
        return 0.0, 0.0
    columns = min(facts.vocabulary, head_step(facts, min(n, HEAD_ROWS)))
    return logits_bytes(facts, n), columns * facts.hidden * facts.float_bytes


@memoized
def can_tile(facts: ModelFacts) -> bool:
    """Return whether the blocks of such a model have attention alone, in a form that
    engine/tiles.py can cut, and pass on nothing but hidden states."""
    mixers = [kind.mixers for kind in facts.kinds]
    plain = all(len(m) == 1 and m[0].kind in (ATTENTION, MLA) for m in mixers)
    plain = plain and not any(mixer.untiled for (mixer,) in mixers)
    return plain and not facts.softcaps and not facts.passed


def logits_bytes(facts: ModelFacts, targets: int) -> float:
    """Bytes of one slice of the logits, for the hidden states that meet the head together."""
    count = min(targets, HEAD_ROWS)
    of_slice = 4 * count * min(facts.vocabulary, head_step(facts, count))
    return SOFTCAP_LOGITS * of_slice if facts.softcaps else of_slice


def is_mixer_alone(facts: ModelFacts) -> bool:
    """Return whether such blocks have a linear-time mixer and no MLP."""
    names = {name.partition(".")[0] for kind in facts.kinds for name in kind.linears}
    every = {mixer.kind for kind in facts.kinds for mixer in kind.mixers}
    return bool(every - {ATTENTION, MLA}) and not names & set(MLPS)


def slices_mlp(facts: ModelFacts) -> bool:
    """Return whether the MLP of such blocks is computed in slices of features, or there is none."""
    names = {name for kind in facts.kinds for name in kind.linears}
    found = {name.partition(".")[0] for name in names} & set(MLPS)
    gated = all({f"{mlp}.{layer}" for layer in SLICED_LAYERS} <= names for mlp in found)
    return gated and not any(kind.sparse for kind in facts.kinds)


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
