"""The plan of a run in its events: write it, and read it back when the run is resumed."""

from __future__ import annotations

from dataclasses import asdict

from your_ai.config import TrainConfig
from your_ai.gates.text import size_text
from your_ai.memory.budget import Budget, PriorPlans, plan_of
from your_ai.memory.calibration_file import valid_measurements
from your_ai.memory.plan import Option, front_points
from your_ai.memory.plan_words import words
from your_ai.run import events
from your_ai.training.preview import about_seconds


def asked_of_memory(config: TrainConfig) -> str:
    """The settings that decide the plan, as text."""
    return f"--max-memory {config.max_memory} --plan {config.plan} --spill {config.spill}"


def past_of(log: events.EventLog, config: TrainConfig, level: int) -> PriorPlans:
    """The earlier plan and measurements of the run, in this process or an earlier one.

    The plan is the one it had when it last trained, if the level and settings are the same.
    """
    written = [record.event for record in events.tail(log.path)[0]]
    starts = [at for at, event in enumerate(written) if isinstance(event, events.Started)]
    measured = [asdict(event) for event in written if isinstance(event, events.Measured)]
    plans = [e for e in written[: starts[-1] if starts else 0] if isinstance(e, events.Planned)]
    plan = None
    if plans and plans[-1].level == level and plans[-1].asked == asked_of_memory(config):
        plan = plan_of(plans[-1])
    return PriorPlans(plan, tuple(valid_measurements(measured)), bool(starts))


def write_plan(budget: Budget, config: TrainConfig, log: events.EventLog) -> Option:
    """Write the limit and the plan with their reasons; return the option of the plan."""
    limit, choice = budget.limit, budget.choice
    log.write(events.Limit(limit_bytes=limit.limit_bytes, reason=limit.reason))
    for text in limit.notices:
        log.write(events.Notice(text=text))
    plan, needed = choice.option.plan, choice.option.needed_bytes
    log.write(
        events.Planned(
            plan=plan.engine,
            micro_tokens=plan.micro_tokens,
            spill=plan.spill,
            wave=plan.wave,
            kept=plan.kept.linear,
            kept_attention=plan.kept.attention,
            kept_activations=plan.kept.activations,
            resident=plan.resident,
            blocks_ahead=plan.blocks_ahead,
            level=choice.level,
            estimate_bytes=choice.option.estimate.process_bytes,
            needed_bytes=needed,
            seconds=choice.option.seconds,
            front=front_points(budget.demand),
            asked=asked_of_memory(config),
            text=f"{words(plan, max(budget.demand.lengths))}: needs at least {size_text(needed)}"
            + about_seconds(choice.option),
        )
    )
    return choice.option
