"""Ordinary passes of a network over whole rows, block by block, from embeddings.

Only the arrays of one block are in use at a time, so the weights may be streamed.

Shapes: B rows, S tokens of a padded row, T completion tokens, D hidden size.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_unflatten

from your_ai.engine.compiled import GraphShape
from your_ai.engine.programs import Extras
from your_ai.nets.mlx_types import Arrays
from your_ai.soft.roles import Network, RewardNetwork, SoftRows

GROUP_TOKENS = 256  # tokens of the rows, with padding, that go through a frozen network together


def block_inputs(network: Network, rows: SoftRows, soft: mx.array | None) -> mx.array:
    """(B, S, D) input of the first block.

    soft: (B, T, D) embedding rows of relaxed completion tokens; None for the sampled tokens.
    """
    found = network.embedding.hard(mx.array(rows.tokens))
    if soft is not None:
        found = rows.scatter(soft, 0, found)
    return network.embedding.after(found)


def row_groups(network: Network, rows: SoftRows) -> list[slice]:
    """The rows that go through a network together.

    Few if the weights are resident; all if they are streamed, so that each is read once.
    """
    size = len(rows.prompts)
    if not network.weights.streamed:
        size = max(1, GROUP_TOKENS // rows.tokens.shape[1])
    return [slice(start, start + size) for start in range(0, len(rows.prompts), size)]


def forward(
    network: Network, hidden: mx.array, keep: bool = False, which: range | None = None
) -> list[mx.array]:
    """The input of each block, if `keep`, and at the end the output of the last one.

    which: the blocks, all by default.
    """
    shape = GraphShape(hidden.shape[0], hidden.shape[1])
    which = range(len(network.parts.blocks)) if which is None else which
    found: list[mx.array] = []
    network.weights.ahead(which)
    for index in which:
        arrays = network.arrays(index)
        network.weights.ahead(range(index + 1, which.stop))
        if keep:
            found.append(hidden)
        program = network.programs.of(index, shape)
        hidden = program.forward(arrays, network.trained(index), hidden, {})
        mx.eval(hidden)
        del arrays
    return [*found, hidden]


def backward(
    network: Network, inputs: list[mx.array], cotangent: mx.array, which: range | None = None
) -> mx.array:
    """The cotangent of the first block's input, (B, S, D); parameters get no gradient.

    inputs: of each block. which: the blocks, all by default.
    """
    shape = GraphShape(cotangent.shape[0], cotangent.shape[1])
    which = range(len(network.parts.blocks)) if which is None else which
    for index, given in zip(reversed(which), reversed(inputs), strict=True):
        arrays = network.arrays(index) | network.trained(index)
        network.weights.ahead(reversed(range(index)))
        program = network.programs.of(index, shape)
        _, cotangent = program.backward(arrays, {}, given, {}, cotangent)
        del arrays
        mx.eval(cotangent)
    return cotangent


class Segment(NamedTuple):
    """Consecutive blocks of a forward pass."""

    which: range
    inputs: list[mx.array]
    """(B, S, D) each: of all its blocks, or only of the first."""


def forward_in_segments(network: Network, hidden: mx.array) -> tuple[list[Segment], mx.array]:
    """The segments, and the output of the last block.

    About sqrt(L) of the L block inputs are kept, so that a backward pass needs a second forward
    pass and little memory (Chen et al. 2016, arXiv:1604.06174). If the weights are streamed, all
    are kept, because each read of the weights costs time.
    """
    count = len(network.parts.blocks)
    if network.weights.streamed:
        *inputs, hidden = forward(network, hidden, keep=True)
        return [Segment(range(count), inputs)], hidden
    found: list[Segment] = []
    size = math.isqrt(count - 1) + 1
    for start in range(0, count, size):
        segment = Segment(range(start, min(start + size, count)), [hidden])
        (hidden,) = forward(network, hidden, which=segment.which)
        found.append(segment)
    return found, hidden


def backward_in_segments(
    network: Network, segments: list[Segment], cotangent: mx.array
) -> mx.array:
    """Run `backward` for segments, and remove them."""
    while segments:
        which, inputs = segments.pop()
        if len(inputs) < len(which):
            inputs = forward(network, inputs[0], keep=True, which=which[:-1])
        cotangent = backward(network, inputs, cotangent, which)
    return cotangent


def parameter_gradients(
    network: Network, inputs: list[mx.array], cotangent: mx.array
) -> dict[int, Arrays]:
    """The gradients of each trained block. Removes the inputs."""
    shape = GraphShape(cotangent.shape[0], cotangent.shape[1])
    found: dict[int, Arrays] = {}
    for index in reversed(range(network.first, len(network.parts.blocks))):
        arrays = network.arrays(index)
        network.weights.ahead(reversed(range(network.first, index)))
        program = network.programs.of(index, shape)
        extras: Extras = {}
        given = (arrays, network.trained(index), inputs[index], extras, cotangent)
        del inputs[index:]
        if index > network.first:
            found[index], cotangent = program.backward(*given)
        else:
            found[index] = program.lowest(*given)
        del arrays, given
        mx.eval(found[index], cotangent)
    return found


def gradient_tree(network: Network, found: dict[int, Arrays]) -> Any:
    """The gradients of the blocks as a tree like the model's trainable parameters."""
    return tree_unflatten(
        [
            (f"{network.names[index]}.{path}", grad)
            for index, arrays in sorted(found.items())
            for path, grad in arrays.items()
        ]
    )


# The rewards of completions, and their gradients with respect to the tokens' embeddings


class RewardGradients(NamedTuple):
    """The rewards of a batch."""

    rewards: mx.array
    """(B,) float32"""
    cotangents: mx.array
    """(B, T, D) of the embedding row of each completion token: u, the weighted gradient."""


def judge(
    model: RewardNetwork, rows: SoftRows, soft: mx.array | None, weights: mx.array
) -> RewardGradients:
    """The rewards of the rows, and the gradient of sum(weight x reward).

    soft: (B, T, D) embedding rows of relaxed tokens, or None. weights: (B,) float32.

    Resident weights judge few rows at a time, because the inputs of blocks are kept.
    """
    found: list[RewardGradients] = []
    for part in row_groups(model.network, rows):
        chosen, count = rows.part(part), rows.count
        own = None if soft is None else soft[part, : chosen.count]
        judged = _judge(model, chosen, own, weights[part])
        missing = count - chosen.count
        cotangents = mx.pad(judged.cotangents, [(0, 0), (0, missing), (0, 0)])
        found.append(RewardGradients(judged.rewards, cotangents))
        mx.eval(found[-1])
    return RewardGradients(*(mx.concatenate([*arrays]) for arrays in zip(*found, strict=True)))


def rewards_of(model: RewardNetwork, rows: SoftRows) -> mx.array:
    """(B,) float32 rewards of the rows, without gradients."""
    found: list[mx.array] = []
    for part in row_groups(model.network, rows):
        chosen = rows.part(part)
        inputs = block_inputs(model.network, chosen, None)
        (hidden,) = forward(model.network, inputs)
        del inputs
        found.append(_at_ends(model, chosen, hidden))
        mx.eval(found[-1])
    return mx.concatenate(found)


def _at_ends(model: RewardNetwork, rows: SoftRows, hidden: mx.array) -> mx.array:
    """(B,) float32 rewards; hidden: (B, S, D), output of the last block."""
    last = mx.array(rows.starts + rows.sampled.lengths - 1)[:, None]
    states = mx.take_along_axis(hidden, last[..., None], axis=1)
    finished = model.network.parts.finish(states)[:, 0]
    return finished.astype(mx.float32) @ model.score.astype(mx.float32)


def _judge(
    model: RewardNetwork, rows: SoftRows, soft: mx.array | None, weights: mx.array
) -> RewardGradients:
    network = model.network
    inputs = block_inputs(network, rows, soft)
    segments, hidden = forward_in_segments(network, inputs)
    del inputs
    (found,), (cotangent,) = mx.vjp(partial(_at_ends, model, rows), [hidden], [weights])
    del hidden
    mx.eval(found, cotangent)
    cotangent = backward_in_segments(network, segments, cotangent)
    of_rows = rows.gather(network.embedding.cotangent(cotangent), 0)
    return RewardGradients(found, mx.where(rows.is_real[..., None], of_rows, 0))
