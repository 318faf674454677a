"""What blocks may keep for their backward pass: in which order, how many bytes, for how much work.

No mlx here. Shapes: as in `estimate`.
"""

from __future__ import annotations

from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.mixer_facts import ATTENTION
from your_ai.memory.sizes import CPU_TOKENS
from your_ai.memory.workload import NOTHING, Kept, Plan, Training

GATE, BESIDE_GATE = "gate_proj", ("up_proj", "down_proj")
# Shares of the core-seconds in which a block's forward pass is computed again. Its parts, each
# measured for the shape `small` at 512 tokens in float32 on a CPU: products of the linear layers
# but the last 79 ms, attention 25 ms, the MLP's activation 20 ms, norms and the rest 6 ms.
SHARES = (0.61, 0.19, 0.15)  # in the order of `Kept`


def at_rung(blocks: int, rung: int) -> Kept:
    """The arrays that `blocks` blocks keep at a rung from 0, nothing, to `highest`, everything.

    Each rung is one block that keeps one kind more. First all keep what saves most time for its
    memory.
    """
    attention = min(rung, blocks)
    linear = min(rung - attention, blocks)
    return Kept(linear, attention, min(rung - attention - linear, blocks))


def rung_of(kept: Kept) -> int:
    return sum(kept)


def highest(blocks: int) -> int:
    return len(NOTHING) * blocks


def everything(blocks: int) -> Kept:
    return at_rung(blocks, highest(blocks))


def computed_again(kept: Kept, blocks: int) -> float:
    """The number of forward passes of blocks that a step computes again, of `blocks` trained ones.

    Of one block it is the share of its forward pass that is not kept: 1 if nothing is.
    """
    return blocks - sum(n * share for n, share in zip(kept, SHARES, strict=True))


def step_cost(facts: ModelFacts, training: Training, plan: Plan) -> float:
    """Arithmetic of a step relative to a fused one. The others compute of trained blocks twice
    what they do not keep.

    A backward pass through frozen weights costs as much as a forward pass. Reading weights is
    not counted.
    """
    fused = facts.blocks + training.reach(facts)
    again = computed_again(plan.kept, training.reach(facts))
    return 1.0 if plan.engine == "fused" else (fused + again) / fused


def kept_bytes(facts: ModelFacts, kept: Kept, rows: int, tokens: int, done: int = 0) -> int:
    """Bytes of what the last blocks keep.

    done: the number of blocks, from the last, whose backward pass is over, and which keep nothing
        any more.
    """
    of_block = (linear_numbers, attention_numbers, activation_numbers)
    numbers = 0
    for count, of in zip(kept, of_block, strict=True):
        if count <= done:
            continue
        still, over = facts.counts_of_last(count), facts.counts_of_last(done)
        for kind, n in still.items():
            numbers += (n - over.get(kind, 0)) * of(facts, facts.kinds[kind], tokens)
    return rows * tokens * numbers * facts.float_bytes


def linear_numbers(facts: ModelFacts, kind: BlockFacts, tokens: int) -> int:
    """Outputs of the linear layers for each token: of all but routed experts and the last, which
    is small beside experts."""
    outputs = sum(o for name, (_, o) in kind.linears.items() if name not in kind.experts)
    return max(0, outputs - (0 if kind.experts else facts.hidden))


def attention_numbers(facts: ModelFacts, kind: BlockFacts, tokens: int) -> int:
    """Outputs of attention for each token, and a float32 of each head."""
    if tokens < CPU_TOKENS:  # MLX's own attention returns no log-sum-exp
        return 0
    sums = 4 // facts.float_bytes
    mixers = [mixer for mixer in kind.mixers if mixer.kind == ATTENTION]
    return sum(mixer.heads * (mixer.value_dim + sums) for mixer in mixers)


def activation_numbers(facts: ModelFacts, kind: BlockFacts, tokens: int) -> int:
    """Numbers for each token beyond the outputs of two layers, whose place three arrays of the
    same size take."""
    roots = (name.removesuffix(GATE) for name in kind.linears if name.endswith(GATE))
    gates = (
        f"{root}{GATE}"
        for root in roots
        if all(f"{root}{layer}" in kind.linears for layer in BESIDE_GATE)
    )
    return sum(kind.linears[name][1] for name in gates if name not in kind.experts)
