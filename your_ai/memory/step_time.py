"""Predict the seconds of a step from those of its blocks and its head, as measured. No mlx here.

A step is a sum of terms: forward, backward, head, storing, reading, as far as it is not done
meanwhile, and scoring. An update of the adapters takes a few percent of a step, and is not counted.

Shapes: B rows, T tokens per row, N = B x T.
"""

from __future__ import annotations

from collections.abc import Callable

from your_ai.memory.costs import TRAINED, MeasuredCosts
from your_ai.memory.estimate import read_bytes
from your_ai.memory.estimate_adapters import optimizer_bytes
from your_ai.memory.estimate_kept import SHARES
from your_ai.memory.sizes import tiles_of
from your_ai.memory.workload import Plan, Workload

SCORED_HEAD = 0.5  # the head without gradients, relative to the head with them
Terms = dict[str, float]  # seconds by the name of the term


def step_seconds(
    workload: Workload,
    measured: MeasuredCosts,
    plan: Plan,
    rows_at: Callable[[int], int],
    scored: bool = False,
) -> Terms:
    """The seconds of a step by term, on average over the rows of the data.

    rows_at: T -> rows of a micro-batch. scored: whether its rows are scored before.

    The rows of a step have about the same length, see `data.batches.epoch_order`.
    """
    counts = workload.steps.rows_of_length or ((max(workload.lengths), 1),)
    whole = sum(count for _, count in counts)
    found: Terms = {}
    for tokens, count in counts:
        rows = rows_at(tokens)
        micro_batches = -(-workload.rows_per_step // rows)
        of_one = micro_batch_seconds(workload, measured, plan, rows, tokens, scored)
        for name, seconds in of_one.items():
            found[name] = found.get(name, 0.0) + micro_batches * seconds * count / whole
    if plan.states_on_disk:
        states = optimizer_bytes(workload.facts, workload.training)
        found["storing"] += 2 * states * measured.read_s  # writing takes about as long
    return found


def micro_batch_seconds(
    workload: Workload,
    measured: MeasuredCosts,
    plan: Plan,
    rows: int,
    tokens: int,
    scored: bool = False,
) -> Terms:
    """The seconds of the gradients of a micro-batch of (B, T) by term; scored: as in
    `step_seconds`."""
    time, sizes = measured.time, workload.steps
    blocks, trained = workload.facts.blocks, workload.training.reach(workload.facts)
    targets = max(1, round(sizes.trained_share * rows * tokens))
    fused, is_long = plan.engine == "fused", len(tiles_of(rows, tokens)) > 1

    def of_last(phase: str, count: int, is_long: bool = False) -> float:
        return time.sum(phase, rows, tokens, count, is_long=is_long)

    passes = ("evaluated", False) if fused else ("forward", is_long)
    every, own = (of_last(passes[0], count, passes[1]) for count in (blocks, trained))
    if fused:
        terms = {"forward": 0.0, "backward": of_last("saved", trained)}
    else:
        backward = of_last("backward", trained, is_long)
        for count, share in zip(plan.kept, SHARES, strict=True):
            computed, kept = ("forward", "backward"), ("kept_forward", "kept_backward")
            again = sum(of_last(phase, count, is_long) for phase in computed)
            saved = max(0.0, again - sum(of_last(phase, count) for phase in kept))
            backward -= saved * share / sum(SHARES)
        terms = {"forward": own, "backward": max(0.0, backward)}
        terms["storing"] = of_last("storing", trained)
    if not sizes.cached_prefix:
        terms["forward"] += every - own
    if TRAINED in time.heads:
        terms["head"] = time.heads[TRAINED].at(targets)
    if not fused:
        reading = measured.read_s * read_bytes(workload.facts, workload.training, plan)
        meanwhile = sum(terms.values()) * (plan.blocks_ahead > 0)
        terms["reading"] = max(0.0, reading - meanwhile)
    if scored:
        terms["scoring"] = every + SCORED_HEAD * terms.get("head", 0.0)
    return terms
