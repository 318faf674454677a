"""Runs that learn preferences: their reference, plans, resuming, and what they show."""

from __future__ import annotations

import contextlib
import errno
import math
import os

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import (
    adapter_of,
    events_of,
    losses_of,
    resume,
    train,
    whole_and_resumed,
    write_rows,
)
from your_ai.data.examples import Examples, RowCounts
from your_ai.errors import UserError
from your_ai.evaluation.dataset_scores import MeanLoss
from your_ai.run import checkpoint, events
from your_ai.session import new_run
from your_ai.training import reference
from your_ai.training.job import imbalance
from your_ai.training.memory_actions import Governor

ASKED = [f"Question {i} " * (1 + i % 3) for i in range(12)]
PAIRS = [
    {"prompt": text, "chosen": f"Yes {i}", "rejected": "No " * (1 + i % 4)}
    for i, text in enumerate(ASKED)
]
LABELED = [
    {"prompt": f"Question {i // 2} " * (1 + i % 3), "completion": text, "label": i % 2 == 0}
    for i, text in enumerate(["Yes, it is", "No " * 3] * 6)
]
OBJECTIVES = ("dpo", "ipo", "simpo", "orpo", "kto")


@pytest.fixture
def pairs(own_folder, configure):
    """A function that makes the config of two steps on 12 rows; 4 of them may validate."""
    for name, rows in (("pairs", PAIRS), ("labels", LABELED)):
        write_rows(own_folder / name / "train.jsonl", rows)
        write_rows(own_folder / name / "valid.jsonl", rows[:4])

    def make(objective="dpo", **settings):
        data = own_folder / ("labels" if objective == "kto" else "pairs")
        first = {"data": str(data), "objective": objective, "max_steps": 2, "valid": "none"}
        return configure(**{**first, **settings})

    return make


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_raises_the_margin(pairs, objective):
    run = train(pairs(objective, max_steps=4, valid="", eval_every=2, keep_best=False))
    first, last = (event.metrics["rewards/margins"] for event in events_of(run, events.Validation))
    assert first < last
    steps = events_of(run, events.Step)
    assert {"rewards/accuracies", "logps/chosen"} <= steps[0].metrics.keys()


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_every_plan_learns_the_same(pairs, objective):
    first = losses_of(train(pairs(objective, run="a", plan="fused")))
    others = ({"plan": "staged"}, {"plan": "streamed"}, {"plan": "fused", "packing": True})
    for number, settings in enumerate(others):
        found = losses_of(train(pairs(objective, run=f"other-{number}", **settings)))
        assert found == pytest.approx(first, rel=1e-4)


@pytest.mark.parametrize(
    ("objective", "packing", "rows"),
    [("dpo", True, 2), ("ipo", False, 2), ("simpo", True, 2), ("orpo", False, 2), ("kto", True, 6)],
)
def test_groups_that_do_not_fit_into_a_micro_batch_learn_the_same(
    pairs, monkeypatch, objective, packing, rows
):
    settings = {"packing": packing, "batch_size": rows}
    whole = train(pairs(objective, run="a", **settings))
    monkeypatch.setattr(Governor, "rows_at", lambda self, tokens: 1)
    split = train(pairs(objective, run="b", **settings))
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=1e-4)
    first, second = (events_of(run, events.Step)[-1] for run in (whole, split))
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-3)
    assert "rewards/margins" in first.metrics
    assert second.metrics == pytest.approx(first.metrics, rel=1e-3, abs=1e-3)


def test_the_reference_is_computed_once_for_the_same_rows(pairs, monkeypatch):
    first = train(pairs(run="a"))
    monkeypatch.setattr(reference, "computed", None)
    again = train(pairs(run="b"))
    assert adapter_of(again) == adapter_of(first)


def test_a_damaged_reference_is_computed_again(pairs, own_folder):
    first = train(pairs(run="whole", max_steps=1))
    cache = own_folder / "home" / "cache" / "reference"
    file = next(iter(sorted(cache.glob(f"*/{reference.VALUES}"))))
    content = file.read_bytes()
    changes = {"other": b"\1" + content[1:], "short": content[:-4], "gone": None}
    for name, changed in changes.items():
        file.unlink() if changed is None else file.write_bytes(changed)
        assert adapter_of(train(pairs(run=name, max_steps=1))) == adapter_of(first)
        assert file.read_bytes() == content


def test_a_resumed_run_ends_with_the_same_adapter(pairs):
    whole, cut = whole_and_resumed(pairs, 1, 2)
    assert adapter_of(cut) == adapter_of(whole)


# Loss, accuracy and margin of each validation.
MEASURED = [(0.5, 0.5, 2.0), (0.4, 0.75, 1.0), (0.3, 0.75, 1.0), (0.2, 0.5, -1.0)]


@pytest.mark.parametrize(
    ("objective", "metric", "best"),
    [("dpo", "loss", 4), ("kto", "accuracy", 3), ("dpo", "margin", 1)],
)
def test_the_best_checkpoint_may_be_that_of_the_accuracy_or_the_margin(
    pairs, monkeypatch, objective, metric, best
):
    measured = iter(MEASURED)

    def mean_loss(*_):
        loss, accuracy, margin = next(measured)
        return MeanLoss(loss, 9, {"rewards/accuracies": accuracy, "rewards/margins": margin})

    monkeypatch.setattr("your_ai.training.validation.measures.mean_loss", mean_loss)
    run = train(pairs(objective, max_steps=4, valid="", eval_every=1, best_metric=metric))
    assert events_of(run, events.Finished)[-1].adapter_step == best
    marked = [event.step for event in events_of(run, events.Validation) if event.best]
    assert marked[-1] == best


def test_a_margin_of_answers_with_one_label_is_refused(pairs, own_folder):
    rows = [{**row, "completion": f"Yes {i}"} for i, row in enumerate(LABELED[::2])]
    write_rows(own_folder / "labels" / "valid.jsonl", rows)
    with pytest.raises(UserError, match=r"labels of .*/valid\.jsonl are all the same"):
        train(pairs("kto", max_steps=1, valid="", best_metric="margin"))
    train(pairs("kto", run="b", max_steps=1, valid="", best_metric="accuracy"))


def test_samples_expect_no_answer_with_the_label_false(pairs, own_folder, monkeypatch):
    monkeypatch.setattr("your_ai.generation.generate.ANSWER_TOKENS", 4)
    write_rows(own_folder / "labels" / "test.jsonl", LABELED[:2])
    run = train(pairs("kto", run="a", max_steps=1, samples=2))
    for found in events_of(run, events.Samples):
        assert found.expected == [LABELED[0]["completion"], ""]


def test_a_changed_objective_in_the_settings_of_a_run_is_named_alone(pairs):
    run = train(pairs(run="a", max_steps=1, label_smoothing=0.1))
    run.write_config(pairs("simpo", run="a", max_steps=2, beta=1.0, simpo_gamma=1.0))
    with pytest.raises(UserError, match=r"settings changed since the run began \(objective\)"):
        resume(run, max_steps=2)


def test_an_adapter_that_a_run_starts_from_is_its_reference(pairs, configure):
    source = train(configure(run="source", max_steps=2))
    config = new_run.resolve(
        {"from_adapter": "source", "data": pairs().data, "objective": "dpo", "max_steps": 1,
         "batch_size": 2, "run": "r", "supervise": False},
        None,
    )  # fmt: skip
    run = train(config)
    (step,) = events_of(run, events.Step)
    assert step.loss == pytest.approx(math.log(2), abs=1e-5)
    start = mx.load(str(source.adapter / checkpoint.ADAPTERS))
    moved = mx.load(str(run.adapter / checkpoint.ADAPTERS))
    assert any(not mx.array_equal(start[name], moved[name]).item() for name in start)


def test_without_a_reference_none_is_computed(pairs, monkeypatch):
    monkeypatch.setattr(reference, "computed", None)
    train(pairs(reference="none", max_steps=1))
    train(pairs(run="b", objective="simpo", max_steps=1))


@pytest.mark.parametrize(
    ("good", "weights", "text"),
    [
        (6, {}, ""), (7, {}, "7 good answers and 5 bad ones: they count the same with "
                            "--kto-undesirable-weight 1.4"),
        (9, {"kto_undesirable_weight": 3.0}, ""), (12, {}, "add rows with the other label"),
        (3, {"kto_desirable_weight": 0.0}, "--kto-desirable-weight"),
    ],
)  # fmt: skip
def test_an_imbalance_of_labels_is_told_with_the_weight_that_mends_it(pairs, good, weights, text):
    labels = np.repeat(np.arange(12) < good, 2)
    examples = Examples(None, None, None, None, RowCounts(), {"labels": labels})
    found = imbalance(pairs("kto", **weights), examples)
    assert text in found
    assert bool(found) == bool(text)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_reference_that_another_run_writes_at_the_same_time_is_no_error(
    pairs, monkeypatch, is_written
):
    whole = reference.atomic_folder

    @contextlib.contextmanager
    def taken(folder):
        if is_written:
            with whole(folder) as temporary:
                yield temporary
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(reference, "atomic_folder", taken)
    if is_written:
        assert len(losses_of(train(pairs(max_steps=1)))) == 1
    else:
        with pytest.raises(UserError, match="cannot write reference log-probabilities there"):
            train(pairs(max_steps=1))
