"""Choose the settings that are `auto`: from the size of the data, and from memory.

All linear layers of all blocks are adapted, with rank 16, unless memory is too small for every plan
(docs/memory.md). docs/defaults.md has the measurements behind these values.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from your_ai.config.names import AUTO, GRPO, OLD_LAYERS, SFT, SOFT
from your_ai.config.settings import TrainConfig
from your_ai.gates.text import counted

RANKS = (16, 8, 4)  # the adapters are tried with these ranks, in this order
BATCHES = ((50_000, 16), (5_000, 8), (0, 4))  # rows of the data from which so many make a batch
MOST_ROLLOUTS, MOST_SOFT = 16, 8  # completions in a micro-batch, of grpo and of soft
# A small data set is repeated until so many rows were trained, in at most so many epochs: where an
# epoch too many does no harm, because the best checkpoint of answers is the result; and elsewhere.
REPEATED, REPEATED_UNCHECKED = (3_000, 100), (2_000, 10)
LONGEST_WARMUP, WARMUP_SHARE = 10, 0.1
FEWEST_STEPS, MOST_STEPS, VALIDATIONS = 10, 100, 10  # between validations; fewest of a run
CHOSEN = ("batch_size", "epochs", "warmup_steps", "eval_every", "lora_rank", "lora_layers")


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
    if config.batch_size != AUTO:
        return config.batch_size
    if config.objective == GRPO:
        return min(config.rollouts, MOST_ROLLOUTS)
    if config.objective == SOFT:
        return min(config.prompts_per_step, MOST_SOFT)
    return next(size for least, size in BATCHES if rows >= least)


def epochs_for(config: TrainConfig, rows: int, validated: bool = True) -> int:
    """Epochs for so many training rows."""
    checked = validated and config.keep_best and config.objective == SFT
    trained, most = REPEATED if checked else REPEATED_UNCHECKED
    return min(most, -(-trained // max(1, rows)))


def timed(config: TrainConfig, rows: int, steps_per_epoch: int) -> TrainConfig:
    """The settings with those that depend on the number of steps of an epoch.

    They do not depend on how long the run is to be: so a run that is made longer when it is resumed
    ends like one that was so long from the start.
    """
    warmup, every = config.warmup_steps, config.eval_every
    if warmup == AUTO:
        warmup = min(LONGEST_WARMUP, int(WARMUP_SHARE * steps_per_epoch))
    if every == AUTO:
        tenth = epochs_for(config, rows) * steps_per_epoch // VALIDATIONS
        # A large model may be at its best after one epoch, however many there are.
        every = min(MOST_STEPS, max(FEWEST_STEPS, min(tenth, steps_per_epoch)))
    return dataclasses.replace(config, warmup_steps=warmup, eval_every=every)


def adapters(config: TrainConfig, blocks: int) -> Iterator[TrainConfig]:
    """The settings with each size of adapters that is allowed, the largest first.

    blocks: number of blocks of the model.

    An automatic rank is reduced before an automatic number of blocks. The scale stays.
    """
    ranks = RANKS if config.lora_rank == AUTO else (config.lora_rank,)
    for rank in ranks:
        yield with_adapters(config, rank, blocks, blocks)
    count = blocks
    while config.lora_layers == AUTO and count > 1:
        count //= 2
        yield with_adapters(config, ranks[-1], count, blocks)


def with_adapters(config: TrainConfig, rank: int, count: int, blocks: int) -> TrainConfig:
    """The settings with this rank, and adapters on the last `count` of `blocks` blocks.

    Only automatic settings change.
    """
    alpha, layers = config.lora_alpha, config.lora_layers
    if config.lora_rank == AUTO:
        alpha = alpha_of_same_scale(config, RANKS[0], rank)
    if layers == AUTO:
        layers = "all" if count == blocks else count
    return dataclasses.replace(config, lora_rank=rank, lora_alpha=alpha, lora_layers=layers)


def alpha_of_same_scale(config: TrainConfig, before: int, rank: int) -> float:
    """The alpha with which adapters of `rank` have the scale of those of rank `before`."""
    ratio = rank / before
    return config.lora_alpha * (math.sqrt(ratio) if config.use_rslora else ratio)


def largest(config: TrainConfig, blocks: int) -> TrainConfig:
    """The settings with the adapters that are used if memory is no limit."""
    return next(adapters(config, blocks))


def adapted_blocks(config: TrainConfig, blocks: int) -> int:
    """How many of the last blocks have adapters, in a model of `blocks` blocks.

    It may be more than the model has, which is for the caller to refuse.
    """
    layers = config.lora_layers
    if layers in ("all", AUTO):
        return blocks
    return min(OLD_LAYERS, blocks) if layers is None else layers


def recorded(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """The settings with what an earlier process of the run chose.

    before: the settings in the run's folder, where the choices are recorded.
    """
    chosen = {n: getattr(before, n) for n in CHOSEN if getattr(config, n) == AUTO}
    if "lora_rank" in chosen:
        chosen["lora_alpha"] = before.lora_alpha
    return dataclasses.replace(config, **chosen)


def words(
    asked: TrainConfig, chosen: TrainConfig, rows: int, steps: int, blocks: int, limit: str
) -> list[str]:
    """What was chosen and why, in lines; none if nothing was automatic.

    rows, steps: rows of the training data, and steps of the run.
    blocks: of the model. limit: the memory limit, as text.
    """

    def text_of(config: TrainConfig) -> str:
        return adapters_text(config.lora_rank, adapted_blocks(config, blocks), blocks)

    automatic = {name for name in CHOSEN if getattr(asked, name) == AUTO}
    length = []
    if "batch_size" in automatic:
        length.append(f"{counted(chosen.rows_per_step, 'row')} per step")
    if "epochs" in automatic and chosen.epochs is not None:
        length.append(f"{counted(chosen.epochs, 'epoch')} ({counted(steps, 'step')})")
    if "warmup_steps" in automatic and chosen.warmup_steps:
        length.append(f"{counted(chosen.warmup_steps, 'step')} to warm up")
    lines = [f"chosen for {counted(rows, 'training row')}: {', '.join(length)}"] if length else []
    full = largest(asked, blocks)
    if (chosen.lora_rank, chosen.lora_layers) != (full.lora_rank, full.lora_layers):
        lines.append(
            f"chosen for a limit of {limit}: {text_of(chosen)}, because no plan fits with "
            f"{text_of(full)}"
        )
    return lines


def adapters_text(rank: int, count: int, blocks: int) -> str:
    """Rank and blocks of the adapters: `rank 4 in the last 8 of 32 blocks`."""
    which = "all" if count == blocks else f"the last {count} of"
    return f"rank {rank} in {which} {counted(blocks, 'block')}"
