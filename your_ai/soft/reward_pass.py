"""The rewards of completions, and their gradients with respect to the tokens' embeddings.

Shapes: B rows, S tokens of a padded row, T completion tokens, D hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import mlx.core as mx

from your_ai.soft import passes
from your_ai.soft.roles import RewardNetwork, SoftRows


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
    for part in passes.row_groups(model.network, rows):
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
    for part in passes.row_groups(model.network, rows):
        chosen = rows.part(part)
        inputs = passes.block_inputs(model.network, chosen, None)
        (hidden,) = passes.forward(model.network, inputs)
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
    inputs = passes.block_inputs(network, rows, soft)
    segments, hidden = passes.forward_in_segments(network, inputs)
    del inputs
    (found,), (cotangent,) = mx.vjp(partial(_at_ends, model, rows), [hidden], [weights])
    del hidden
    mx.eval(found, cotangent)
    cotangent = passes.backward_in_segments(network, segments, cotangent)
    of_rows = rows.gather(network.embedding.cotangent(cotangent), 0)
    return RewardGradients(found, mx.where(rows.is_real[..., None], of_rows, 0))
