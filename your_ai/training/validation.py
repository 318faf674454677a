"""Measure the model between steps: validation loss, sample answers, exact match."""

from __future__ import annotations

import time

from your_ai.evaluation import dataset_scores as measures
from your_ai.generation import generate
from your_ai.run import events
from your_ai.run.stopping import Stop
from your_ai.training.prepare import Prepared, answer_room


def validate(prepared: Prepared, step: int, log: events.EventLog, stop: Stop) -> None:
    if prepared.valid is None:
        return
    began = time.perf_counter()
    measured = measures.mean_loss(prepared.engine, prepared.valid, prepared.rows_at, stop)
    if measured is not None:
        log.write(
            events.Validation(
                step=step,
                loss=measured.loss,
                trained_tokens=measured.trained_tokens,
                seconds=time.perf_counter() - began,
            )
        )


def show_test_rows(when: str, prepared: Prepared, log: events.EventLog, stop: Stop) -> None:
    """Write answers to a few test prompts, and exact match over all test rows, if configured."""
    answers = []
    for sample in prepared.samples:
        if stop:
            return
        limit, _ = answer_room(prepared.tokenizer, sample)
        answers.append(generate.answer(prepared.model, prepared.tokenizer, sample.rendered, limit))
    if answers:
        log.write(
            events.Samples(
                when=when,
                prompts=[sample.asked for sample in prepared.samples],
                answers=answers,
                expected=[sample.expected for sample in prepared.samples],
            )
        )
    if prepared.config.exact_match and prepared.test is not None:
        rows_at = prepared.rows_at
        correct = measures.exact_matches(prepared.engine, prepared.test, rows_at, stop)
        if correct is not None:
            log.write(events.ExactMatch(when=when, correct=correct, rows=len(prepared.test)))
