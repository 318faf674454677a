"""Sizes of the layers of a model, for estimates."""

from __future__ import annotations

from your_ai.memory.facts import ModelFacts
from your_ai.memory.memoized import memoized
from your_ai.memory.sizes import FEWEST_FEATURES, HEAD_SLICE_BYTES, SLICE_STEP


@memoized
def widest_outputs(facts: ModelFacts) -> int:
    """M, the outputs of the widest linear layer of a block."""
    return max((o for kind in facts.kinds for _, o in kind.linears.values()), default=0)


@memoized
def largest_matrix_bytes(facts: ModelFacts) -> int:
    """Bytes of the largest weight matrix of a block, dequantized."""
    sizes = [size for kind in facts.kinds for size in kind.linears.values()]
    return max((i * o for i, o in sizes), default=0) * facts.float_bytes


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
