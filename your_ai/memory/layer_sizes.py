"""Sizes of the layers of a model, for estimates."""

from __future__ import annotations

from your_ai.memory.facts import BlockFacts, ModelFacts
from your_ai.memory.memoized import memoized
from your_ai.memory.sizes import FEWEST_FEATURES, HEAD_SLICE_BYTES, SLICE_STEP

MLPS = ("mlp", "feed_forward")  # they are computed in slices of features, if they are gated


@memoized
def widest_outputs(facts: ModelFacts) -> int:
    """M, the outputs of the widest linear layer of a block."""
    return max((o for kind in facts.kinds for _, o in kind.linears.values()), default=0)


@memoized
def largest_matrix_bytes(facts: ModelFacts) -> int:
    """Bytes of the largest weight matrix of a block, dequantized."""
    sizes = [size for kind in facts.kinds for size in kind.linears.values()]
    return max((i * o for i, o in sizes), default=0) * facts.float_bytes


@memoized
def quantized_matrix_bytes(facts: ModelFacts) -> int:
    """The same of those that are quantized; 0 if none is."""
    sizes = [
        inputs * outputs
        for kind in facts.kinds
        for name, (inputs, outputs) in kind.linears.items()
        if is_quantized(facts, kind, name)
    ]
    return max(sizes, default=0) * facts.float_bytes


def is_quantized(facts: ModelFacts, kind: BlockFacts, name: str) -> bool:
    """Whether a linear layer of a block is."""
    return facts.quantized and name not in kind.dense


@memoized
def dense_share(facts: ModelFacts) -> float:
    """Of the layers in the MLP of such blocks, or of all if they have none, those that are not
    quantized: from 0 to 1, which runs whole in the forward pass."""
    if not facts.quantized:
        return 1.0
    layers = [(name, name in kind.dense) for kind in facts.kinds for name in kind.linears]
    found = [is_dense for name, is_dense in layers if name.partition(".")[0] in MLPS]
    found = found or [is_dense for _, is_dense in layers]
    return sum(found) / len(found) if found else 0.0


def backward_features(hidden: int) -> int:
    """About the features of a slice of an MLP in its backward pass, for hidden size D."""
    return max(FEWEST_FEATURES, hidden // 2)


def forward_features(hidden: int) -> int:
    """The same in its forward pass, which needs a third of the arrays; of quantized weights."""
    return 2 * max(FEWEST_FEATURES, hidden)


def slice_width(inner: int, about: int) -> int:
    """The features of a slice of an MLP with F = `inner` features; near `about`, at most F."""
    count = -(-inner // about)
    return min(inner, -(-inner // count // SLICE_STEP) * SLICE_STEP)


def head_step(facts: ModelFacts, count: int) -> int:
    """Tokens per slice of the vocabulary, for `count` hidden states."""
    return max(1, HEAD_SLICE_BYTES // (4 * max(count, facts.hidden)))
