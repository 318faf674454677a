"""The networks of differentiable generation, the settings, and the rows of a batch.

Policy, reference and reward model may be module trees that share the arrays of one base.

Shapes: B rows, P tokens of a prompt, T tokens of the longest completion, S tokens of a padded row,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.data.batches import MULTIPLE
from your_ai.engine.build import NO_PARTS, split_model
from your_ai.engine.compiled import Graphs
from your_ai.engine.programs import Programs, trained_arrays
from your_ai.engine.staged import Resident, Weights, finished
from your_ai.errors import UserError
from your_ai.nets.adapter_kinds import Normed, normed_layers, norms_of
from your_ai.nets.embedding import InputEmbedding, input_embedding
from your_ai.nets.gumbel import Noisy
from your_ai.nets.head import LinearHead, ResizedRows
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import DropoutKeys
from your_ai.nets.parts import Parts

CreditLength = Literal["exact"] | int | float


@dataclass(frozen=True)
class Network:
    """A model in parts, without dropout."""

    model: nn.Module
    label: str
    """Its model type, for messages."""
    parts: Parts
    embedding: InputEmbedding
    final: LinearHead
    """The head of finished hidden states, as the trunk returns them."""
    weights: Weights
    normed: list[Normed]
    names: list[str]
    """The paths of the blocks in the model."""
    programs: Programs

    @cached_property
    def head(self) -> LinearHead:
        """The head of the outputs of the last block."""
        head = finished(self.parts, self.final)
        assert isinstance(head, LinearHead)
        return head

    @cached_property
    def first(self) -> int:
        """The first trained block; the number of blocks if none is trained."""
        trained = (i for i, block in enumerate(self.parts.blocks) if trained_arrays(block))
        return next(trained, len(self.parts.blocks))

    def arrays(self, index: int) -> Arrays:
        """The frozen weights of block `index`, and the norms of its adapted layers."""
        arrays = self.weights.read(index)
        return arrays | norms_of(self.normed[index], arrays)

    def trained(self, index: int) -> Arrays:
        return trained_arrays(self.parts.blocks[index])


@dataclass(frozen=True)
class RewardNetwork:
    """reward = score . (finished hidden state of the last real token)"""

    network: Network
    score: mx.array
    """(D,)"""


@dataclass(frozen=True)
class Roles:
    """The policy, which is trained, and the frozen networks that its loss depends on."""

    policy: Network
    reward: RewardNetwork
    reference: Network | None = None
    """For the KL term."""


@dataclass(frozen=True, kw_only=True)
class SoftSettings:
    """Settings of how tokens are sampled, what is minimized, and how far gradients go."""

    tau: float = 1.0
    """The temperature of the relaxation."""
    relaxed: bool = False
    """Whether soft embeddings also go forward. By default only the gradient is soft
    (straight-through), and the forward pass is an exact sample."""
    kl_beta: float = 0.0
    """The factor of the KL divergence to the reference."""
    credit: CreditLength = "exact"
    """How far sweeps carry credit back: "exact", a number of tokens, or, if below 1, the relative
    difference of two sweeps that ends them. Columns are always exact."""
    step: Callable[[int], None] = lambda _: None
    """Called with the number of rows before each token, column and sweep; may raise."""


class Sampled(NamedTuple):
    """The completions of a batch."""

    tokens: np.ndarray
    """(B, T) int32; what follows a completion is 0."""
    lengths: np.ndarray
    """(B,) int32, with the end token, if there is one."""


@dataclass(frozen=True)
class SoftRows:
    """Prompts with their completions; every row is padded on the right."""

    prompts: Sequence[np.ndarray]
    """(P,) int each."""
    sampled: Sampled
    keys: np.ndarray
    """(B,) uint32, of the noise."""

    @property
    def count(self) -> int:
        """T"""
        return int(self.sampled.lengths.max())

    @cached_property
    def starts(self) -> np.ndarray:
        """(B,) the number of tokens of each prompt."""
        return np.array([len(prompt) for prompt in self.prompts], np.int32)

    @cached_property
    def tokens(self) -> np.ndarray:
        """(B, S) int32: prompt, completion, padding."""
        longest = int((self.starts + self.sampled.lengths).max())
        found = np.zeros((len(self.prompts), -(-longest // MULTIPLE) * MULTIPLE), np.int32)
        for row, prompt in enumerate(self.prompts):
            start, length = self.starts[row], self.sampled.lengths[row]
            found[row, :start] = prompt
            found[row, start : start + length] = self.sampled.tokens[row, :length]
        return found

    @cached_property
    def is_real(self) -> mx.array:
        """(B, T) bool, True at the tokens of completions."""
        return mx.arange(self.count) < mx.array(self.sampled.lengths)[:, None]

    def places(self) -> tuple[mx.array, mx.array]:
        """The key and position of each token, (B, T) uint32 each, as in `gumbel.NoisePlaces`."""
        shape = (len(self.prompts), self.count)
        keys = mx.broadcast_to(mx.array(self.keys.astype(np.uint32))[:, None], shape)
        return keys, mx.broadcast_to(mx.arange(self.count, dtype=mx.uint32), shape)

    def at(self, shift: int) -> mx.array:
        """(B, T) the position in `tokens` of each completion token, plus `shift`."""
        found = self.starts[:, None] + np.arange(self.count)[None] + shift
        return mx.array(np.minimum(found, self.tokens.shape[1] - 1))

    def gather(self, hidden: mx.array, shift: int) -> mx.array:
        """(B, T, D) of (B, S, D), at the completion tokens plus `shift`."""
        return mx.take_along_axis(hidden, self.at(shift)[..., None], axis=1)

    def scatter(self, values: mx.array, shift: int, hidden: mx.array) -> mx.array:
        """Replace `hidden`, (B, S, D), at the completion tokens plus `shift` by `values`."""
        values = mx.where(self.is_real[..., None], values.astype(hidden.dtype), 0)
        real = mx.where(self.is_real[..., None], 1, 0).astype(hidden.dtype)
        rows = mx.arange(len(hidden))[:, None]
        kept = mx.ones((*hidden.shape[:2], 1), hidden.dtype).at[rows, self.at(shift)].add(-real)
        return (hidden * kept).at[rows, self.at(shift)].add(values)

    def part(self, rows: slice) -> SoftRows:
        sampled = Sampled(self.sampled.tokens[rows], self.sampled.lengths[rows])
        return SoftRows(self.prompts[rows], sampled, self.keys[rows])


def network_of(
    model: nn.Module,
    blocks: list[nn.Module] | None = None,
    weights: Weights | None = None,
    graphs: Graphs | None = None,
    vocabulary: int | None = None,
) -> Network:
    """Take a model apart.

    vocabulary: of the policy, for a reward model whose embedding has more or fewer rows.

    blocks, weights: of a streamed model, from `engine.weights.stream`.
    Raises UserError if the model cannot be taken apart, or has no linear head or embedding.
    """
    label = getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2]
    found = split_model(model, blocks)
    if found.parts is None:
        reason = f"{NO_PARTS} ({found.reason})"
        raise UserError(f"{label}: {reason}, which differentiable generation needs")
    if not found.parts.is_plain:
        raise UserError(
            f"{label}: its blocks receive more than hidden states and masks, which differentiable "
            "generation does not support"
        )
    if not isinstance(found.head, LinearHead):
        raise UserError(
            f"{label}: its head is not a linear layer, which differentiable generation needs"
        )
    embedding = input_embedding(found.parts, label)
    if vocabulary not in (None, embedding.rows.shape[0]):
        embedding = replace(embedding, rows=ResizedRows(embedding.rows, vocabulary))
    elif embedding.rows.shape[0] != found.head.rows.shape[0]:
        raise UserError(f"{label}: its embedding and its head have different vocabularies")
    names = {id(module): name for name, module in model.named_modules()}
    parts = found.parts
    return Network(
        model,
        label,
        parts,
        embedding,
        found.head,
        weights or Resident(parts.blocks),
        [normed_layers(block) for block in parts.blocks],
        [names[id(block)] for block in model.layers],
        Programs(parts, DropoutKeys([None]), True, Graphs() if graphs is None else graphs),
    )


def check_roles(roles: Roles) -> None:
    """Raise UserError if the networks do not fit together."""
    policy, reward = roles.policy, roles.reward
    sizes = (policy.final.rows.shape[0], reward.network.embedding.rows.shape[0])
    if sizes[0] != sizes[1]:
        raise UserError(
            f"the policy has {sizes[0]} tokens and the reward model {sizes[1]}; both need the "
            "same tokenizer"
        )
    reference = roles.reference
    if reference is not None and reference.final.rows.shape != policy.final.rows.shape:
        raise UserError("the reference must have the base of the policy")
    if reward.score.shape != (reward.network.embedding.rows.shape[1],):
        raise UserError(
            f"the score head has shape {reward.score.shape}, not that of a hidden state"
        )


def noisy_head(network: Network, settings: SoftSettings) -> Noisy:
    """The head of the outputs of the last block, with noise."""
    return Noisy(network.head, settings.tau)
