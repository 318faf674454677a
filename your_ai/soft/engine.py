"""Differentiable generation: sample with Gumbel noise, then gradients through the tokens.

A policy is trained through its own sampled tokens against a frozen reward model, with the Gumbel
softmax of Jang et al. 2016, arXiv:1611.01144: logits z, Gumbel noise g, the token argmax(z + g),
and y = softmax((z + g) / tau), whose gradient the token gets (straight-through), or which is the
token (relaxed). The loss of a row is

    weight (-reward + kl_beta sum_t KL(p_t || p_ref,t))      p = softmax(z)

with the KL divergence over the whole vocabulary at the sampled prefix. Its gradient goes through
the policy's own inputs too. The reference's inputs are constants: the reference is detached.

Columns and sweeps (modules of these names) compute the same gradients in different memory.

Shapes: B rows, P tokens of a prompt, T tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.errors import UserError
from your_ai.nets.gumbel import Noisy
from your_ai.nets.mlx_types import Arrays
from your_ai.objectives.objective import Sums
from your_ai.soft import columns, passes
from your_ai.soft.cached_blocks import CachedBlocks, cached_blocks
from your_ai.soft.columns import Terms, cotangent_of, find_terms
from your_ai.soft.passes import RewardGradients, judge
from your_ai.soft.roles import (
    CreditLength,
    Network,
    Roles,
    Sampled,
    SoftRows,
    SoftSettings,
    check_roles,
    noisy_head,
)
from your_ai.soft.sampling import replay, sample

# Gradients through a policy's own tokens by ordinary backward passes over the whole rows


class Swept(NamedTuple):
    """The result of all sweeps."""

    gradients: dict[int, Arrays]
    """Of each trained block."""
    residual: float
    """The relative difference of the credits of the last two sweeps: 1 before the second, and 0 if
    the result is exact."""


def sweep(
    policy: Network,
    settings: SoftSettings,
    rows: SoftRows,
    inputs: list[mx.array],
    terms: Terms,
) -> Swept:
    """inputs: of each block, (B, S, D). They are removed."""
    noisy, exact = noisy_head(policy, settings), rows.count - 1
    later, residual, done = None, 1.0, 0
    while not is_enough(settings.credit, done, residual, exact):
        settings.step(len(rows.prompts))
        cotangent = passes.backward(policy, inputs, of_outputs(policy, noisy, rows, terms, later))
        found = next_credit(policy, rows, cotangent)
        mx.eval(found)
        residual, later, done = difference(found, later), found, done + 1
        if residual == 0:
            break
    settings.step(len(rows.prompts))
    cotangent = of_outputs(policy, noisy, rows, terms, later)
    grads = passes.parameter_gradients(policy, inputs, cotangent)
    return Swept(grads, 0.0 if done >= exact else residual)


def is_enough(credit: CreditLength, done: int, residual: float, exact: int) -> bool:
    """Return whether no further sweep is needed; exact: the number that makes the result exact."""
    if done >= exact:
        return True
    if credit == "exact":
        return False
    if isinstance(credit, int):
        return done >= credit
    return done > 0 and residual <= credit


def of_outputs(
    policy: Network, noisy: Noisy, rows: SoftRows, terms: Terms, later: mx.array | None
) -> mx.array:
    """(B, S, D) cotangent of the output of the last block."""
    found = cotangent_of(noisy, terms, policy.embedding.rows, later)
    empty = mx.zeros((*rows.tokens.shape, found.shape[-1]), found.dtype)
    return rows.scatter(found, -1, empty)


def next_credit(policy: Network, rows: SoftRows, cotangent: mx.array) -> mx.array:
    """(B, T, D) of each token's embedding row, from the cotangent of the first block's input."""
    found = rows.gather(policy.embedding.cotangent(cotangent), 0)
    return mx.where(rows.is_real[..., None], found, 0)


def difference(new: mx.array, old: mx.array | None) -> float:
    """|new - old| / |new|; 0 if both are 0."""
    apart = new if old is None else new - old
    size = float(mx.sqrt(mx.square(new.astype(mx.float32)).sum()))
    return float(mx.sqrt(mx.square(apart.astype(mx.float32)).sum())) / max(size, 1e-30)


@dataclass(frozen=True)
class SoftEngine:
    """The two halves of a step. Tokens may be stored between them."""

    sample: Callable[[Sequence[np.ndarray], np.ndarray, int, Collection[int]], Sampled]
    """(prompts, keys, max_new_tokens, stop_tokens) -> the completions.
    prompts: (P,) int each, at least one token. keys: (B,) uint32, of the noise."""
    gradients: Callable[
        [Sequence[np.ndarray], Sampled, np.ndarray, np.ndarray, float], tuple[Sums, Any]
    ]
    """(prompts, sampled, keys, weights, scale) -> the sums over the rows, and the gradients of
    `scale` times the loss, as a tree of the trainable parameters. weights: (B,) of the rows."""


class _Prepared(NamedTuple):
    """The beginning that both schemes share."""

    soft: mx.array | None
    """(B, T, D) the policy's embedding rows of relaxed tokens."""
    judged: RewardGradients
    reference: mx.array | None
    """(B, T, D) inputs of the linear head under the reference."""
    kl_weights: mx.array
    """(B, T)"""


TermsOf = Callable[[mx.array], Terms]
"""(B, T, D) outputs of the last block that predict the tokens -> the terms. Called once."""
Result = tuple[dict[int, Arrays], Terms, float]
"""Gradients, terms, residual"""
# (rows, (B, T, D) embedding rows of relaxed tokens, terms_of) -> the result
Scheme = Callable[[SoftRows, mx.array | None, TermsOf], Result]


def column_engine(
    roles: Roles, settings: SoftSettings, blocks: CachedBlocks | None = None
) -> SoftEngine:
    """Exact gradients in the memory of a KV cache and one token, for resident weights.

    blocks: of the policy, from `cached_blocks`, where several engines share them.

    Raises UserError if the networks do not fit together, or the policy's caches are not of plain
    keys and values.
    """
    if roles.policy.weights.streamed:
        raise UserError("columns read every weight once per token; use sweeps for streamed weights")
    blocks = blocks or cached_blocks(roles.policy)

    def run(rows: SoftRows, soft: mx.array | None, terms_of: TermsOf) -> Result:
        filled = columns.fill(blocks, rows, soft)
        terms = terms_of(filled.hidden)
        return columns.gradients(blocks, settings, rows, filled, terms), terms, 0.0

    return _engine(roles, settings, run)


def sweep_engine(roles: Roles, settings: SoftSettings) -> SoftEngine:
    """Gradients in the memory of one ordinary pass, exact if `settings.credit` says so.

    Raises UserError if the networks do not fit together.
    """
    policy = roles.policy

    def run(rows: SoftRows, soft: mx.array | None, terms_of: TermsOf) -> Result:
        first = passes.block_inputs(policy, rows, soft)
        *inputs, hidden = passes.forward(policy, first, keep=True)
        terms = terms_of(rows.gather(hidden, -1))
        del hidden
        swept = sweep(policy, settings, rows, inputs, terms)
        return swept.gradients, terms, swept.residual

    return _engine(roles, settings, run)


def _engine(roles: Roles, settings: SoftSettings, scheme: Scheme) -> SoftEngine:
    check_roles(roles)
    if settings.kl_beta and roles.reference is None:
        raise UserError("the KL divergence needs a reference")

    def sample_rows(
        prompts: Sequence[np.ndarray],
        keys: np.ndarray,
        max_new_tokens: int,
        stop_tokens: Collection[int],
    ) -> Sampled:
        return sample(roles.policy, prompts, keys, max_new_tokens, stop_tokens, settings)

    def gradients(
        prompts: Sequence[np.ndarray],
        sampled: Sampled,
        keys: np.ndarray,
        weights: np.ndarray,
        scale: float,
    ) -> tuple[Sums, Any]:
        rows, given = SoftRows(prompts, sampled, keys), mx.array(weights, mx.float32)
        prepared = [_prepare(roles, settings, rows, given, scale)]
        soft, rewards = prepared[0].soft, prepared[0].judged.rewards

        def terms_of(hidden: mx.array) -> Terms:
            known = prepared.pop()  # so that its arrays are freed afterwards
            return find_terms(
                noisy_head(roles.policy, settings), hidden, rows.places(),
                roles.reward.network.embedding.rows, known.judged.cotangents, known.reference,
                known.kl_weights,
            )  # fmt: skip

        grads, terms, residual = scheme(rows, soft, terms_of)
        sums = _sums(settings, rows, given, rewards, terms.kl, residual)
        return sums, passes.gradient_tree(roles.policy, grads)

    return SoftEngine(sample_rows, gradients)


def _prepare(
    roles: Roles, settings: SoftSettings, rows: SoftRows, weights: mx.array, scale: float
) -> _Prepared:
    """Everything that does not depend on the gradients of the policy."""
    policy, reward = roles.policy, roles.reward
    soft, soft_reward = None, None
    if settings.relaxed:
        wanted = [policy.embedding.rows, reward.network.embedding.rows]
        soft, soft_reward = replay(policy, rows, settings, wanted)
    judged = judge(reward, rows, soft_reward, -weights * scale)
    del soft_reward
    reference, kl_weights = None, mx.where(rows.is_real, weights[:, None], 0) * settings.kl_beta
    if settings.kl_beta:
        assert roles.reference is not None
        reference = reference_inputs(roles.reference, rows, soft)
    return _Prepared(soft, judged, reference, kl_weights * scale)


def reference_inputs(reference: Network, rows: SoftRows, soft: mx.array | None) -> mx.array:
    """(B, T, D) inputs of the linear head under the reference, at the completion tokens."""
    found: list[mx.array] = []
    for part in passes.row_groups(reference, rows):
        chosen = rows.part(part)
        own = None if soft is None else soft[part, : chosen.count]
        (hidden,) = passes.forward(reference, passes.block_inputs(reference, chosen, own))
        states = chosen.gather(hidden, -1)
        inputs = reference.head.inputs(states.reshape(-1, states.shape[-1]))
        inputs = inputs.reshape(*states.shape[:2], -1)
        found.append(mx.pad(inputs, [(0, 0), (0, rows.count - chosen.count), (0, 0)]))
        mx.eval(found[-1])
    return mx.concatenate(found)


def _sums(
    settings: SoftSettings,
    rows: SoftRows,
    weights: mx.array,
    rewards: mx.array,
    kl: mx.array,
    residual: float,
) -> Sums:
    """The loss and the metrics; rows of weight 0 do not count."""
    of_rows = mx.where(rows.is_real, kl, 0).sum(axis=1)
    lengths, counts = mx.array(rows.sampled.lengths), weights != 0
    loss = (weights * (settings.kl_beta * of_rows - rewards)).sum()
    count = counts.sum()
    metrics = {
        "reward": (mx.where(counts, rewards, 0).sum(), count),
        "completion_length": (mx.where(counts, lengths, 0).sum(), count),
        "credit_residual": (mx.array(residual), mx.array(1)),
    }
    if settings.kl_beta:
        metrics["kl"] = (mx.where(counts, of_rows, 0).sum(), mx.where(counts, lengths, 0).sum())
    return Sums(loss, metrics)
