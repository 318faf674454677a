"""Build the engine of a plan for a model, and check that the model supports the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.engine.compiled import Graphs, can_compile
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.fused import fused_engine
from your_ai.engine.prefix import Store
from your_ai.engine.programs import first_trained
from your_ai.engine.protocol import Engine
from your_ai.engine.spill import Spilled
from your_ai.engine.staged import FusedAboveCache, Staged
from your_ai.engine.weights import (
    FileTensor,
    Streamed,
    put_layers,
    reads_file,
    stream,
    stream_vocabulary,
)
from your_ai.errors import Unsplittable, UserError
from your_ai.memory import allocator
from your_ai.memory.workload import NOTHING, Kept
from your_ai.nets.adapter_kinds import compute_magnitudes
from your_ai.nets.attention import replace_attention
from your_ai.nets.head import (
    Head,
    LinearHead,
    ScoreHead,
    SomeTrained,
    TargetHead,
    at_temperature,
    linear_head,
    score_layer,
)
from your_ai.nets.mixers.replace import replace_mixers
from your_ai.nets.model import DropoutKeys
from your_ai.nets.neftune import neftune_of
from your_ai.nets.parts import Parts, parts_of
from your_ai.nets.split import Path as ModulePath
from your_ai.nets.split import Split, split, split_at
from your_ai.nets.vocabulary import trained_layers, vocabulary_layers
from your_ai.objectives.objective import Objective
from your_ai.objectives.sft import SUPERVISED

NO_PARTS = "this model cannot be split into its blocks"
MIXES = "its blocks treat a row as one text (in convolutions, states or absolute positions)"


@dataclass(frozen=True)
class Built:
    """An engine, and how it was built."""

    engine: Engine
    plan: str
    """The plan that the engine carries out; it may differ from the requested plan."""
    notices: tuple[str, ...] = ()
    """Messages for the user."""
    store: Store | None = None
    """The prefix cache, if there is one."""
    head: Head | None = None
    """The head, which takes finished hidden states."""


def build_engine(
    model: nn.Module,
    dropout_keys: DropoutKeys,
    plan: str,
    packing: bool = False,
    tensors: dict[str, FileTensor] | None = None,
    make_store: Callable[[int], Store] | None = None,
    spill: Path | None = None,
    graphs: Graphs | None = None,
    objective: Objective = SUPERVISED,
    neftune_alpha: float = 0.0,
    temperature: float = 1.0,
    longest: int = 0,
    kept: Kept = NOTHING,
    resident: int = 0,
    blocks_ahead: int = 1,
    holds_vocabulary: bool = False,
    teacher: TargetHead | None = None,
) -> Built:
    """Build the engine of `plan` for a model with adapters.

    Reads the weights into memory, except for a streamed plan. A staged plan falls back to fused
    if the model cannot be split into blocks.

    tensors: the files of the weights. A streamed plan needs them, and keeps no weights in
        memory; a staged plan uses them to leave the embedding and the head in their files.
    make_store: hidden size -> the frozen-prefix cache; None for no cache.
    spill: a folder for block inputs, of a staged or streamed plan, where blocks keep nothing; None
        to keep them in memory.
    graphs: the cache of compiled graphs; by default it keeps all of them.
    neftune_alpha: of the noise on the embeddings in training; 0 for none.
    temperature: divides the logits.
    longest: the maximum tokens of a packed row.
    kept: of a staged or streamed plan, what blocks keep for the backward pass.
    resident, blocks_ahead: of a streamed plan, the blocks whose weights stay in memory, and those
        that are read while the block before them runs.
    holds_vocabulary: keep embedding and head in memory, whatever the plan.
    teacher: the head whose predictions the objective compares.
    Raises UserError if the model does not support the plan, packing or noise.
    """
    notices: list[str] = []
    graphs = Graphs() if graphs is None else graphs
    graphs.compiles = can_compile(model)
    if not graphs.compiles:
        notices.append("the model's code reads values of arrays: it trains uncompiled, and slower")
    dequantize_on_the_cpu(model)
    found, weights = split_and_loaded(
        model, plan, tensors or {}, resident, blocks_ahead, holds_vocabulary
    )
    halves, parts, head = found.halves, found.parts, at_temperature(found.head, temperature)
    if teacher is not None:
        head = with_teacher(head, teacher)
    if isinstance(head, ScoreHead) and not (parts.finishes if parts else halves.hidden):
        raise UserError("--objective reward: this model cannot be split before its head")
    check_trained_head(model, head)
    if not halves.hidden:
        notices.append(
            "the model cannot be split before its head: logits are computed for all tokens"
        )
    if packing:
        check_packing(model, found, longest)
    if parts is None:
        notices += notices_without_parts(plan, make_store is not None, found.reason)
        if reads_file(head):  # of the teacher: a fused graph cannot
            raise UserError(f"--objective distill: {NO_PARTS} ({found.reason}); use --plan fused")
        plan = "fused"
    neftune = neftune_of(model, halves.trunk if parts is None else parts.embed, neftune_alpha)
    store = None
    if make_store is not None and parts is not None:
        store = make_store(parts.features(first_trained(parts.blocks)))
    if store is not None and plan == "fused":
        joined = FusedAboveCache(
            model, parts, dropout_keys, objective, head, store=store, graphs=graphs
        )
        return Built(joined.engine(), plan, tuple(notices), store, head)
    if parts is None or plan == "fused":
        replace_attention(model)
        replace_mixers(model)
        engine = fused_engine(model, halves, dropout_keys, objective, parts, head, graphs, neftune)
        return Built(engine, plan, tuple(notices), head=head)
    inputs = None if spill is None else Spilled(spill)
    staged = Staged(
        model, parts, dropout_keys, objective, head, weights, store, inputs, graphs,
        neftune=neftune, kept=kept,
    )  # fmt: skip
    return Built(staged.engine(), plan, tuple(notices), store, head)


def with_teacher(head: Head, teacher: TargetHead) -> LinearHead:
    """The head of a student. Raises UserError if its predictions cannot be compared."""
    if not isinstance(head, LinearHead) or isinstance(head.rows, SomeTrained):
        what = "is trained" if isinstance(head, LinearHead) else "is no linear layer"
        raise UserError(
            f"--teacher: the head of this model {what}, and only a frozen linear one can be "
            "compared with a teacher's"
        )
    return replace(head, teacher=teacher)


def check_trained_head(model: nn.Module, head: Head) -> None:
    """Raise UserError if rows of the head are trained, but it gives no gradients of them."""
    layers = trained_layers(model)
    if not layers or isinstance(head, LinearHead | ScoreHead):
        return
    if vocabulary_layers(model)[1] is None or not all(layer.is_embedding for layer in layers):
        raise UserError(
            "--train, --add-tokens: the head of this model computes more than a linear layer, so "
            "its rows cannot be trained"
        )


def notices_without_parts(plan: str, has_store: bool, reason: str) -> list[str]:
    """Notices on what a model that cannot be split into blocks does without. Raises UserError if it
    cannot do without the plan."""
    if plan == "streamed":
        raise UserError(f"--plan streamed: {NO_PARTS} ({reason}); train with --plan fused")
    notices = []
    if plan == "staged":
        notices.append(f"--plan staged: {NO_PARTS} ({reason}); training with --plan fused")
    if has_store:
        notices.append(f"--prefix-cache: {NO_PARTS} ({reason}); training without it")
    return notices


def split_and_loaded(
    model: nn.Module,
    plan: str,
    tensors: dict[str, FileTensor],
    resident: int,
    blocks_ahead: int,
    holds_vocabulary: bool,
) -> tuple[SplitModel, Streamed | None]:
    """Split a model into its parts, and read the weights that `plan` keeps in memory.

    The last three arguments are as of `build_engine`.

    Returns the weights that are read when they are used, too, if the plan is streamed.
    """
    if plan == "streamed":
        blocks, weights = stream(model, tensors, resident, blocks_ahead, holds_vocabulary)
        return split_model(model, blocks), weights
    reads = plan == "staged" and not holds_vocabulary
    vocabulary = stream_vocabulary(model, tensors) if reads else {}
    load(model)
    found = split_model(model, None)
    if vocabulary and (found.parts is None or not isinstance(found.head, LinearHead | ScoreHead)):
        put_layers(model, vocabulary)
        load(model)
        found = split_model(model, None)
    return found, None


def check_packing(model: nn.Module, found: SplitModel, longest: int) -> None:
    """Raise UserError if texts that share a row of `longest` tokens would be trained otherwise."""
    if found.parts is None or not packing_is_exact(found.parts, model):
        reason = f"{NO_PARTS} ({found.reason})" if found.parts is None else MIXES
        raise UserError(f"--packing: {reason}, so packed texts would mix; train without it")
    if longest > 1 and found.parts.depends_on_place(longest):
        raise UserError(
            f"--packing: in rows of {longest} tokens, this model treats tokens by their place in "
            "the row, so packed texts would differ; train without it"
        )


def load(model: nn.Module) -> None:
    """Read a model's weights block by block, which uses little memory beyond the weights."""
    for block in model.layers:
        compute_magnitudes(block)
        mx.eval(block.parameters())
        allocator.free(collect=False)
    mx.eval(model.parameters())


class SplitModel(NamedTuple):
    """A model split before its head, and split into blocks."""

    halves: Split
    parts: Parts | None
    """None if the model cannot be split into blocks."""
    head: Head
    """The model's score head if it has one; else a LinearHead if the structure of the head is
    known, otherwise any function."""
    reason: str = ""
    """Why the model cannot be split into blocks."""


def split_model(
    model: nn.Module, blocks: list[nn.Module] | None, path: ModulePath | None = None
) -> SplitModel:
    """Split a model, and compare its parts with the whole.

    blocks: as of `parts_of`. path: of the trunk, if it is known: then nothing is compared, and no
        block is evaluated.
    """
    halves, parts, reason = split(model) if path is None else split_at(model, path), None, ""
    try:
        parts = parts_of(model, halves, blocks, checks=path is None)
    except Unsplittable as error:
        reason = str(error)
    if parts is not None and not halves.hidden:
        halves = Split(parts.run_blocks, parts.head)
    score = score_layer(model)
    if score is not None:
        return SplitModel(halves, parts, ScoreHead(score), reason)
    if not isinstance(halves.head, nn.Module):  # the trunk returns logits
        return SplitModel(halves, parts, halves.head, reason)
    hidden = halves.trunk(mx.zeros((1, 2), mx.int32))  # only its shape is used; never evaluated
    head = linear_head(halves.head, hidden.shape[-1], hidden.dtype) or halves.head
    return SplitModel(halves, parts, head, reason)


def packing_is_exact(parts: Parts, model: nn.Module) -> bool:
    """Return whether two texts packed into one row give the same logits as each text alone.

    Runs the model's own blocks: the blocks of a streamed model read their weights and free them.
    """
    parts = replace(parts, blocks=list(model.layers))
    tokens = mx.array([[3, 1, 2, 0, 1, 3, 2, 1]])
    segments = mx.array([[0, 0, 0, 1, 1, 1, 1, 1]])
    packed = parts.finished_head(parts.run_blocks(tokens, segments))
    alone = mx.concatenate([model(tokens[:, :3]), model(tokens[:, 3:])], axis=1)
    return bool(mx.allclose(packed, alone, rtol=1e-3, atol=1e-3))
