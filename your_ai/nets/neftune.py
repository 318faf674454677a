"""NEFTune: uniform noise on the token embeddings, in training only (Jain et al., 2023).

    embedding + alpha / sqrt(L * D) * u,    u uniform in [-1, 1) for each token and feature

L counts the tokens of the text itself, without padding, as the authors' code does. The noise is a
pure function of the same keys as dropout, so it does not depend on how a step is split, padded,
packed or recomputed. It is added to what the embedding layer returns, before any scale of the
architecture.

A long row gets its noise tile by tile, so that the float32 arrays of a few tokens exist at a time.

The layer is replaced only while the trunk runs in a training pass. So a tied head, validation and
generation always have the unchanged layer.

Shapes: B rows, T tokens per row, D hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import UserError
from your_ai.gates.token_ids import EMBEDDINGS, is_outside_blocks
from your_ai.memory.sizes import tiles_of
from your_ai.nets.model import TRIED_TOKENS, TokenKeys, dropout_bits, uint32
from your_ai.nets.split import StandIn
from your_ai.rng import derive_seed

LAYER = derive_seed("neftune") % 2**32  # among the keys of the layers with dropout
Noise = Callable[[int, slice, list[mx.array]], mx.array]
"""(D, n of the tokens, arrays that are computed first) -> (B, n, D) float32."""
UNIFORM_BITS = 24  # that float32 can represent exactly
TRIED_ALPHA = 1e3  # of the noise that tests a model


def noisy(embedding: nn.Module, noise: Noise) -> StandIn:
    """A layer like `embedding` that adds `noise` to its output."""

    def embed(tokens: mx.array) -> mx.array:
        """(B, T) -> (B, T, D)"""
        found: list[mx.array] = []
        for tile in tiles_of(*tokens.shape):
            (part,) = mx.depends([tokens[:, tile]], found[-1:]) if found else [tokens[:, tile]]
            x = embedding(part)
            found.append(x + noise(x.shape[-1], tile, found[-1:]).astype(x.dtype))
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)

    return StandIn(embedding, embed)


@dataclass(frozen=True)
class Neftune:
    """The noise on the embedding layer of a model."""

    alpha: float
    owner: nn.Module
    """The module that has the embedding layer."""
    name: str
    """The attribute of `owner` that is the layer."""

    @contextlib.contextmanager
    def added(self, keys: TokenKeys, lengths: mx.array) -> Iterator[None]:
        """Add the noise to the embeddings until the `with` block ends.

        keys: of exactly the tokens that are embedded.
        lengths: the tokens of each token's text; broadcasts to (B, T).
        """
        embedding = self.owner[self.name]

        def noise(size: int, tile: slice, after: list[mx.array]) -> mx.array:
            rows, places, counts = (
                array if array.shape[1] == 1 else array[:, tile] for array in (*keys, lengths)
            )
            (places,) = mx.depends([places], after) if after else [places]
            return uniform_noise(self.alpha, TokenKeys(rows, places), counts, size)

        self.owner[self.name] = noisy(embedding, noise)
        try:
            yield
        finally:
            self.owner[self.name] = embedding


def uniform_noise(alpha: float, keys: TokenKeys, lengths: mx.array, size: int) -> mx.array:
    """(B, T, D) float32 noise; size: D."""
    bits = dropout_bits(keys, uint32(LAYER), mx.arange(size, dtype=mx.uint32))
    uniform = (bits >> (32 - UNIFORM_BITS)).astype(mx.float32) * 2.0 ** (1 - UNIFORM_BITS) - 1
    return (alpha / mx.sqrt(lengths.astype(mx.float32) * size))[..., None] * uniform


def noise_added(
    neftune: Neftune | None, keys: TokenKeys | None, lengths: mx.array | None
) -> contextlib.AbstractContextManager[None]:
    """`neftune.added`, or nothing without noise or outside training."""
    if neftune is None or keys is None or lengths is None:
        return contextlib.nullcontext()
    return neftune.added(keys, lengths)


def neftune_of(
    model: nn.Module, embed: Callable[[mx.array], mx.array], alpha: float
) -> Neftune | None:
    """The noise of a model; None if alpha is 0.

    embed: tokens (B, T) -> any result of the embeddings of `model`, to see that the noise works.
    Raises UserError if the embedding layer cannot be found.
    """
    if alpha == 0:
        return None
    modules = dict(model.named_modules())
    paths = [
        path
        for path, layer in modules.items()
        if path.rpartition(".")[2] in EMBEDDINGS and is_outside_blocks(path)
        if "weight" in layer or getattr(layer, "rows", None) is not None
    ]
    if len(paths) == 1:
        owner, _, name = paths[0].rpartition(".")
        found = Neftune(alpha, modules[owner], name)
        if changes(replace(found, alpha=TRIED_ALPHA), embed):
            return found
    raise UserError(
        "--neftune-alpha: the embedding layer of this model cannot be found; train without it"
    )


def changes(neftune: Neftune, embed: Callable[[mx.array], mx.array]) -> bool:
    """Return whether the noise changes what `embed` returns."""
    tokens = mx.arange(TRIED_TOKENS)[None]
    keys = TokenKeys(mx.zeros((1, 1), mx.uint32), tokens.astype(mx.uint32))
    plain = embed(tokens)
    with neftune.added(keys, mx.full((1, 1), TRIED_TOKENS)):
        noisy = embed(tokens)
    return not mx.array_equal(plain, noisy).item()
