"""The engine of a plan, made for a model: the checks that decide whether it fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from your_ai.blocks import Parts, parts_of
from your_ai.engine.attention import put_blockwise
from your_ai.engine.fused import Engine, fused_engine
from your_ai.engine.prefix import Store
from your_ai.engine.spill import Spilled
from your_ai.engine.staged import Joined, Staged
from your_ai.engine.weights import Tensor, stream, stream_vocabulary
from your_ai.errors import UserError
from your_ai.head import linear_head
from your_ai.model import DropoutKeys, split

NO_PARTS = "this model's blocks cannot be told apart"


@dataclass(frozen=True)
class Built:
    """An engine, the plan that it carries out, and what the user should know of it."""

    engine: Engine
    plan: str
    notices: tuple[str, ...] = ()


def build_engine(
    model: nn.Module,
    dropout_keys: DropoutKeys,
    plan: str,
    packing: bool = False,
    tensors: dict[str, Tensor] | None = None,
    make_store: Callable[[int], Store] | None = None,
    spill: Path | None = None,
) -> Built:
    """The engine of `plan` for a model with adapters; a staged one falls back to fused.

    tensors: where its weights are. A streamed plan needs them, after which the model holds
    none; of a staged one they let the embedding and the head stay in their files.
    make_store: the frozen-prefix cache, where there is one, for a hidden size.
    spill: a folder for block inputs, of a staged or streamed plan.
    Raises UserError where the plan or packing cannot be.
    """
    notices: list[str] = []
    blocks, weights = None, None
    if plan == "streamed":
        blocks, weights = stream(model, tensors or {})
    halves = split(model)
    if not halves.hidden:
        notices.append("the model cannot be split before its head: every position goes through it")
    parts = parts_of(model, halves.head, blocks) if halves.hidden else None
    if packing and (parts is None or not keeps_texts_apart(parts, model)):
        raise UserError(f"--packing: {NO_PARTS}, so texts cannot be kept apart; train without it")
    if parts is None and plan == "streamed":
        raise UserError(f"--plan streamed: {NO_PARTS}; train with --plan fused")
    if parts is None and plan == "staged":
        notices.append(f"--plan staged: {NO_PARTS}; training with --plan fused")
        plan = "fused"
    head = halves.head
    if halves.hidden:
        hidden = halves.trunk(mx.zeros((1, 2), mx.int32))  # for its shape: not computed
        linear = linear_head(halves.head, hidden.shape[-1], hidden.dtype)
        if plan == "staged" and tensors is not None and linear is not None:
            stream_vocabulary(model, tensors)
            halves = split(model)
            parts = replace(parts, head=halves.head)
            linear = linear_head(halves.head, hidden.shape[-1], hidden.dtype)
        head = linear or halves.head
    store = None
    if make_store is not None and parts is None:
        notices.append(f"--prefix-cache: {NO_PARTS}; training without it")
    elif make_store is not None:
        store = make_store(hidden.shape[-1])
    if store is not None and plan == "fused":
        joined = Joined(model, parts, dropout_keys, head, store=store)
        return Built(joined.engine(), plan, tuple(notices))
    if plan == "fused":
        put_blockwise(model)
        return Built(fused_engine(model, halves, dropout_keys, parts, head), plan, tuple(notices))
    inputs = [] if spill is None else Spilled(spill)
    staged = Staged(model, parts, dropout_keys, head, weights, store, inputs)
    return Built(staged.engine(), plan, tuple(notices))


def keeps_texts_apart(parts: Parts, model: nn.Module) -> bool:
    """Whether two texts in a row give the logits that each gives alone."""
    tokens = mx.array([[3, 1, 2, 0, 1, 3, 2, 1]])
    segments = mx.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    packed = parts.finished_head(parts.run_blocks(tokens, segments))
    alone = mx.concatenate([model(tokens[:, :3]), model(tokens[:, 3:])], axis=1)
    return mx.allclose(packed, alone, rtol=1e-3, atol=1e-3).item()
