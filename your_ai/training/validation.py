"""Measure the model between steps: validation loss, sample answers, exact match."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace

from your_ai.config import REWARD_METRICS, TrainConfig
from your_ai.data.batches import by_length
from your_ai.data.examples import Examples
from your_ai.evaluation import dataset_scores as measures
from your_ai.evaluation.compare import Ready
from your_ai.evaluation.dataset_scores import MeanLoss
from your_ai.generation import generate
from your_ai.run import events
from your_ai.run.checkpoint import TrainState
from your_ai.run.stopping import Stop
from your_ai.training import run_data
from your_ai.training.rollouts import reward_metrics
from your_ai.training.run_data import METRIC_ROWS, sample_room
from your_ai.training.steps import RewardMeter
from your_ai.training.trainer import Trainer


def validate_here(
    trainer: Trainer,
    state: TrainState,
    log: events.EventLog,
    stop: Stop,
    meter: RewardMeter | None = None,
) -> TrainState:
    """Measure the loss and --best-metric that are due after `state.step`; return the state.

    meter: of a run that trains on rewards: the mean reward is measured.

    If asked to stop, the validation is still due, and a resumed run does it first.
    """
    if trainer.valid is None or not state.validation_due:
        return replace(state, validation_due=False)
    began = time.perf_counter()
    log.write(events.Phase(text="validating"))
    if meter is not None:
        return validate_completions(meter, state, log, stop, began)
    measured = mean_loss(trainer, trainer.valid, stop)
    if measured is None:
        dealt = trainer.ranks.size > 1 and is_dealt(trainer, meter)
        stopped = any(trainer.ranks.gather(bool(stop))) if dealt else bool(stop)
        return replace(state, validation_due=stopped)
    metrics = dict(measured.metrics)
    value = metrics.get(REWARD_METRICS.get(trainer.config.best_metric, ""))
    if trainer.best_metric is not None:
        log.write(events.Phase(text=f"validating: {trainer.best_metric.name}"))
        ready = Ready(trainer.model, trainer.tokenizer, trainer.engine, trainer.rows_at)
        value = run_data.measured(trainer.best_metric, ready, stop)
        if value is None:
            return state
        metrics[trainer.best_metric.name] = value
    return told(state, replace(measured, metrics=metrics), value, log, began)


def told(
    state: TrainState, measured: MeanLoss, value: float | None, log: events.EventLog, began: float
) -> TrainState:
    """Write what a validation measured; return the state after it. value: of --best-metric."""
    state = after_validation(replace(state, validation_due=False), measured.loss, value)
    log.write(
        events.Validation(
            step=state.step,
            loss=measured.loss,
            trained_tokens=measured.trained_tokens,
            seconds=time.perf_counter() - began,
            best=state.best_step == state.step,
            metrics=measured.metrics,
        )
    )
    return state


def validate(
    trainer: Trainer,
    state: TrainState,
    log: events.EventLog,
    stop: Stop,
    meter: RewardMeter | None = None,
) -> TrainState:
    """The state after the validation that is due.

    Rank 0 does for all what cannot be dealt: answers, rewards, and losses of whole files.
    """
    ranks = trainer.ranks
    if ranks.size == 1 or is_dealt(trainer, meter):
        return validate_here(trainer, state, log, stop, meter)
    if trainer.valid is None or not state.validation_due:
        return replace(state, validation_due=False)
    found = ranks.of_first(lambda: asdict(validate_here(trainer, state, log, stop, meter)))
    return TrainState(**found)


def is_dealt(trainer: Trainer, meter: RewardMeter | None) -> bool:
    """Return whether each rank measures a part of the validation rows."""
    is_local = trainer.engine.objective.token_local
    return meter is None and trainer.best_metric is None and is_local


def mean_loss(trainer: Trainer, valid: Examples, stop: Stop) -> MeanLoss | None:
    """The mean loss of the validation rows, of which each rank computes a part."""
    ranks, engine, rows_at = trainer.ranks, trainer.engine, trainer.rows_at
    if ranks.size == 1 or not is_dealt(trainer, None):
        return measures.mean_loss(engine, valid, rows_at, stop)
    lengths = valid.lengths[by_length(valid)]
    ids = ranks.rows(lengths, trainer.budget.workload.facts.hidden)
    return measures.mean_loss_of_all(engine, valid, rows_at, stop, ids, ranks.gather)


def validate_completions(
    meter: RewardMeter, state: TrainState, log: events.EventLog, stop: Stop, began: float
) -> TrainState:
    """Measure what training minimizes over the most likely completions of the first validation
    prompts: the negative mean reward, or the divergence from a teacher."""
    records = meter.measured("valid", METRIC_ROWS, state.step)
    if records is None:
        return state
    measured = meter.loss_of(records, "valid", stop)
    if measured is None:
        return replace(state, validation_due=bool(stop))
    return told(state, measured, None, log, began)


def after_validation(state: TrainState, loss: float, value: float | None = None) -> TrainState:
    """The state after one more validation; value: of --best-metric, if that is not the loss.

    The higher value is better, and of equal values the one with the lower loss. A loss that is
    not finite is never the best.
    """
    if math.isfinite(loss) and (
        state.best_loss is None
        or (value or 0.0, -loss) > (state.best_value or 0.0, -state.best_loss)
    ):
        return replace(
            state, best_loss=loss, best_value=value, best_step=state.step, without_better=0
        )
    return replace(state, without_better=state.without_better + 1)


def is_enough(config: TrainConfig, state: TrainState) -> bool:
    """Return whether --patience ends the run after `state.step`."""
    return 0 < config.patience <= state.without_better


def show_test_rows(
    when: str,
    trainer: Trainer,
    log: events.EventLog,
    stop: Stop,
    meter: RewardMeter | None = None,
) -> None:
    """Write answers to a few held-out prompts, and exact match over all test rows, if configured.

    meter: of a run that trains on rewards: the answers of all test rows are generated.
    """
    if not trainer.ranks.is_first:
        return
    if trainer.samples:
        show_samples(when, trainer, log, stop)
    if stop or not trainer.config.exact_match or trainer.test is None:
        return
    log.write(events.Phase(text="comparing answers with the test rows"))
    if meter is None:
        rows_at, rows = trainer.rows_at, len(trainer.test)
        correct = measures.exact_matches(trainer.engine, trainer.test, rows_at, stop)
        if correct is not None:
            log.write(events.ExactMatch(when=when, correct=correct, rows=rows))
        return
    records = meter.measured("test", len(trainer.test), 0)
    if records is not None:
        reward = reward_metrics(records, group=1).get("reward")
        correct = sum(r.completion.strip() == (r.expected or "").strip() for r in records)
        found = events.ExactMatch(when=when, correct=correct, rows=len(records), reward=reward)
        log.write(found)


def show_samples(when: str, trainer: Trainer, log: events.EventLog, stop: Stop) -> None:
    """Write the answers to --samples; none if asked to stop."""
    log.write(events.Phase(text="answering test prompts"))
    answers = []
    for sample in trainer.samples:
        if stop:
            return
        limit, _ = sample_room(trainer.config, trainer.model, trainer.tokenizer, sample)
        answers.append(generate.answer(trainer.model, trainer.tokenizer, sample.rendered, limit))
    log.write(
        events.Samples(
            when=when,
            prompts=[sample.asked for sample in trainer.samples],
            answers=answers,
            expected=[s.expected if s.is_good else "" for s in trainer.samples],
        )
    )
