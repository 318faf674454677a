"""Choose the settings that are `auto`: from the size of the data, and from memory.

All linear layers of all blocks are adapted, with rank 16, unless memory is too small for every plan
(docs/memory.md). docs/defaults.md has the measurements behind these values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from your_ai.config.by_layer import ByLayer
from your_ai.config.names import AUTO, GRPO, OLD_LAYERS, SFT, SOFT
from your_ai.config.settings import FIELDS, Resolved, TrainConfig
from your_ai.gates.text import counted

RANKS = (16, 8, 4)  # the adapters are tried with these ranks, in this order
BATCHES = ((50_000, 16), (5_000, 8), (0, 4))  # rows of the data from which so many make a batch
MOST_ROLLOUTS, MOST_SOFT = 16, 8  # completions in a micro-batch, of grpo and of soft
# A small data set is repeated until so many rows were trained, in at most so many epochs: where an
# epoch too many does no harm, because the best checkpoint of answers is the result; and elsewhere.
REPEATED, REPEATED_UNCHECKED = (3_000, 50), (2_000, 10)
LONGEST_WARMUP, WARMUP_SHARE = 10, 0.1
FEWEST_STEPS, MOST_STEPS, VALIDATIONS = 10, 100, 10  # between validations; fewest of a run
CHOSEN = ("batch_size", "epochs", "warmup_steps", "eval_every", "lora_rank", "lora_layers")


def resolved(
    config: TrainConfig,
    rows: int,
    validated: bool,
    steps_per_epoch: int,
    rank: int,
    count: int,
    blocks: int,
) -> Resolved:
    """The settings with which a run trains.

    rows, validated: as in `sized`. steps_per_epoch: of so many rows.
    rank: of the adapters, which are on the last `count` of `blocks` blocks.

    Only automatic settings change, and patterns that select none of the chosen blocks go. The
    length of the warm-up and the steps between validations do not depend on how long the run is to
    be: so a run that is made longer when it is resumed ends like one that was so long from the
    start.
    """
    config = sized(config, rows, validated)
    changes: dict[str, Any] = {}
    if config.warmup_steps == AUTO:
        changes["warmup_steps"] = min(LONGEST_WARMUP, int(WARMUP_SHARE * steps_per_epoch))
    if config.eval_every == AUTO:
        tenth = epochs_for(config, rows) * steps_per_epoch // VALIDATIONS
        # A large model may be at its best after one epoch, however many there are.
        changes["eval_every"] = min(MOST_STEPS, max(FEWEST_STEPS, min(tenth, steps_per_epoch)))
    ranks, alphas = ByLayer.of(config.lora_rank), ByLayer.of(config.lora_alpha)
    if ranks.default == AUTO:
        alphas, ranks = alphas_of_same_scale(config, RANKS[0], rank), ranks.with_default(rank)
    if config.lora_layers == AUTO:
        changes["lora_layers"] = "all" if count == blocks else count
        first = blocks - count  # patterns of blocks before it would select nothing
        ranks, alphas = ranks.from_block(first), alphas.from_block(first)
    changes |= {"lora_rank": ranks.setting, "lora_alpha": alphas.setting}
    return Resolved(**{name: getattr(config, name) for name in FIELDS} | changes)


def sized(config: TrainConfig, rows: int, validated: bool = False) -> TrainConfig:
    """The settings with those that depend on the number of training rows.

    rows: rows of the training data, after splitting and without those left out.
    validated: whether there are validation rows.
    """
    epochs = config.epochs
    if epochs == AUTO:
        epochs = epochs_for(config, rows, validated) if config.max_steps is None else None
    return dataclasses.replace(config, batch_size=batch_size(config, rows), epochs=epochs)


def batch_size(config: TrainConfig, rows: int) -> int:
    """Rows of a micro-batch, for so many training rows."""
    if not isinstance(config.batch_size, str):
        return config.batch_size
    if config.objective == GRPO:
        return min(config.rollouts, MOST_ROLLOUTS)
    if config.objective == SOFT:
        return min(config.prompts_per_step, MOST_SOFT)
    if config.generates:
        return min(config.prompts_per_step, MOST_ROLLOUTS)
    return next(size for least, size in BATCHES if rows >= least)


def rows_per_step(config: TrainConfig, rows: int) -> int:
    """Rows of a step, for so many training rows; with grpo and soft, its prompts."""
    if config.generates:
        return config.prompts_per_step
    return batch_size(config, rows) * config.grad_accumulation


def epochs_for(config: TrainConfig, rows: int, validated: bool = True) -> int:
    checked = validated and config.keep_best and config.objective == SFT
    trained, most = REPEATED if checked else REPEATED_UNCHECKED
    return min(most, -(-trained // max(1, rows)))


def adapters(config: TrainConfig, blocks: int) -> Iterator[tuple[int, int]]:
    """Each size of adapters that is allowed, the largest first: the rank, and the number of the
    last blocks with adapters, of a model of `blocks` blocks.

    An automatic rank is reduced before an automatic number of blocks. A number that was given may
    be more than the model has, which is for the caller to refuse.
    """
    default = ByLayer.of(config.lora_rank).default
    ranks = RANKS if isinstance(default, str) else (int(default),)
    if config.adapter_kind.is_whole:  # which have no rank
        ranks = ranks[:1]
    count = config.lora_layers
    if count is None:
        count = min(OLD_LAYERS, blocks)
    elif isinstance(count, str):
        count = blocks
    for rank in ranks:
        yield rank, count
    while config.lora_layers == AUTO and count > 1:
        count //= 2
        yield ranks[-1], count


def alphas_of_same_scale(config: TrainConfig, before: float, rank: int) -> ByLayer:
    """The alphas with which adapters of `rank` have the scale of those of rank `before`.

    Layers with a rank of their own keep their alpha, and so do those whose alpha has a pattern.
    """
    alphas, ratio = ByLayer.of(config.lora_alpha), rank / before
    if ratio == 1:
        return alphas
    kept = (replace(p, value=alphas.number) for p in ByLayer.of(config.lora_rank).patterns)
    alpha = alphas.number * (math.sqrt(ratio) if config.use_rslora else ratio)
    return ByLayer(alpha, (*kept, *alphas.patterns))


def largest(config: TrainConfig, blocks: int) -> tuple[int, int]:
    """The size of the adapters that are used if memory is no limit, as of `adapters`."""
    return next(adapters(config, blocks))


def recorded(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """The settings with what an earlier process of the run chose.

    before: the settings in the run's folder, where the choices are recorded.
    """
    chosen = {n: getattr(before, n) for n in CHOSEN if getattr(config, n) == AUTO}
    if "lora_layers" in chosen or ByLayer.of(config.lora_rank).default == AUTO:
        chosen |= {"lora_rank": before.lora_rank, "lora_alpha": before.lora_alpha}
    return dataclasses.replace(config, **chosen)


def words(
    asked: TrainConfig, chosen: Resolved, rows: int, steps: int, blocks: int, limit: str
) -> list[str]:
    """Lines on what was chosen and why; none if nothing was automatic.

    rows, steps: rows of the training data, and steps of the run.
    blocks: of the model. limit: the memory limit, as text.
    """
    automatic = {name for name in CHOSEN if getattr(asked, name) == AUTO}
    length = []
    if "batch_size" in automatic:
        length.append(f"{counted(rows_per_step(chosen, rows), 'row')} per step")
    if "epochs" in automatic and chosen.epochs is not None:
        length.append(f"{counted(chosen.epochs, 'epoch')} ({counted(steps, 'step')})")
    if "warmup_steps" in automatic and chosen.warmup_steps:
        length.append(f"{counted(chosen.warmup_steps, 'step')} to warm up")
    lines = [f"chosen for {counted(rows, 'training row')}: {', '.join(length)}"] if length else []
    size, full = largest(chosen, blocks), largest(asked, blocks)
    if size != full:
        in_words = whole_text if chosen.adapter_kind.is_whole else adapters_text
        lines.append(
            f"chosen for a limit of {limit}: {in_words(*size, blocks)}, because no plan fits with "
            f"{in_words(*full, blocks)}"
        )
    return lines


def whole_text(rank: object, count: int, blocks: int) -> str:
    """The blocks whose weights are trained; rank: not used."""
    which = "all" if count == blocks else f"the last {count} of"
    return f"the weights of {which} {counted(blocks, 'block')}"


def adapters_text(rank: object, count: int, blocks: int) -> str:
    """Rank and blocks of the adapters: `rank 4 in the last 8 of 32 blocks`."""
    which = "all" if count == blocks else f"the last {count} of"
    return f"rank {rank} in {which} {counted(blocks, 'block')}"
