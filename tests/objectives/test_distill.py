"""Distillation under every plan: the loss and gradients of a plain reading in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import TINY, make_model
from tests.engine.test_fused import assert_gradients
from tests.engine.test_tiles import cut
from tests.objectives import test_gradients
from tests.objectives.plain import (
    Arrays,
    PlainModel,
    double,
    exp,
    log_softmax,
    plain_divergence,
    plain_logits,
    plain_model,
    with_adapters,
)
from tests.objectives.test_gradients import TOLERANCE, VOCABULARY, WAYS, Way, load
from your_ai.config.divergences import divergence_of
from your_ai.data.batches import make_schedule
from your_ai.data.examples import Examples
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import HeldGradients
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.weights import open_model
from your_ai.evaluation.teacher import TeacherModel, build_teacher, taught
from your_ai.memory.workload import Plan
from your_ai.nets.head import LinearHead
from your_ai.objectives.distill import Distillation, SampledDivergence
from your_ai.objectives.objective import Totals
from your_ai.training.steps import accumulate

PADDED = 200  # of a vocabulary of 160


def distillation(divergence: str, temperature: float = 1.0, sft_weight: float = 0.0):
    kind = divergence_of(divergence)
    return Distillation(divergence=kind, temperature=temperature, sft_weight=sft_weight)


OBJECTIVES = {
    "forward": distillation("forward"),
    "forward-sft": distillation("forward", 2.0, 0.5),
    "reverse": distillation("reverse"),
    "reverse-2": distillation("reverse", 2.0),
    "jsd": distillation("jsd:0.5"),
    "jsd-0.1": distillation("jsd:0.1", 2.0),
    "jsd-0.9": distillation("jsd:0.9", 1.0, 0.3),
    "sampled": SampledDivergence(),
}
STUDENTS: dict[str, tuple[str, int | None, bool]] = {  # architecture, bits, DoRA
    "llama": ("llama", None, False),
    "llama-untied": ("llama-untied", 4, True),
    "qwen2": ("qwen2", 4, False),
    "qwen3": ("qwen3", None, True),
    "gemma2": ("gemma2", 4, False),
    "gemma3": ("gemma3_text", None, False),
}
TEACHERS: dict[str, tuple[str, int | None, dict[str, int]]] = {  # architecture, bits, sizes
    "wider": ("qwen2", 4, {**TINY, "hidden_size": 64}),
    "wider, capped and padded": ("gemma2", None, {**TINY, "hidden_size": 64, "vocab_size": PADDED}),
    "narrower": ("llama", None, {**TINY, "hidden_size": 16}),
}
DISTILLED_WAYS = {
    name: WAYS[name] for name in ("fused", "tiled", "streamed", "cached", "packed", "split")
}


def cases() -> list[tuple[str, str, str, str]]:
    """(objective, way, student, teacher), so that any two of them occur together."""
    students, teachers = list(STUDENTS), list(TEACHERS)
    return [
        (objective, way, students[(i + j) % len(students)], teachers[(i + 2 * j) % 3])
        for i, objective in enumerate(OBJECTIVES)
        for j, way in enumerate(DISTILLED_WAYS)
    ]


def test_any_two_parts_of_a_case_occur_together():
    lists = (OBJECTIVES, DISTILLED_WAYS, STUDENTS, TEACHERS)
    for a in range(4):
        for b in range(a):
            missing = {(x, y) for x in lists[a] for y in lists[b]}
            missing -= {(case[a], case[b]) for case in cases()}
            assert not missing


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small vocabulary like a large one."""

    def slices(head: LinearHead, count: int) -> list[tuple[int, int]]:
        return [(0, 64), (64, 100), (100, head.rows.shape[0])]

    monkeypatch.setattr(LinearHead, "slices", slices)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that makes a student or a teacher by its name, once."""

    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("models") / name.replace(", ", "-").replace(" ", "-")
        if name in STUDENTS:
            architecture, bits, _ = STUDENTS[name]
            size: dict[str, int] = TINY
        else:
            architecture, bits, size = TEACHERS[name]
        more = {"vocab_size": VOCABULARY, **size}
        return make_model(folder, architecture, bits, seed=len(name), factor=1, **more)

    return made


@cache
def plain_of(folder: Path) -> PlainModel:
    return plain_model(open_model(folder, mx.float32).network)


def make_examples() -> Examples:
    """Texts with random tokens; some have a weight of 0."""
    return replace(test_gradients.make_examples("sft"), columns={})


class Expected(NamedTuple):
    loss: float
    gradients: Arrays
    metrics: dict[str, float]


def expected(objective, folder: Path, dora: bool, teacher: Path) -> Expected:
    """A plain reading: one text at a time, whole logits, in float64."""
    network, _, scale = load(folder, dora)
    adapters = dict(tree_flatten(network.trainable_parameters()))
    student, other, examples = plain_of(folder), plain_of(teacher), make_examples()
    figures: dict[str, mx.array] = {}

    def log_probabilities(model: PlainModel, weights: Arrays, row: int) -> mx.array:
        """(n, V) logits that predict the trained tokens of a row."""
        at = mx.array(np.flatnonzero(examples[row].trained) - 1)
        return plain_logits(weights, model.args, examples[row].tokens)[at][:, :VOCABULARY]

    def loss(adapters: Arrays) -> mx.array:
        weights, total, count = with_adapters(student.weights, scale, adapters), 0.0, 0.0
        found: dict[str, list[mx.array]] = {}
        for row in range(len(examples)):
            if not examples.weights[row]:
                continue
            tokens = mx.array(examples[row].tokens[examples[row].trained])[:, None]
            mine = log_probabilities(student, weights, row)
            theirs = log_probabilities(other, other.weights, row)
            chosen = mx.take_along_axis(log_softmax(mine), tokens, axis=-1)[:, 0]
            if isinstance(objective, SampledDivergence):
                known = mx.take_along_axis(log_softmax(theirs), tokens, axis=-1)[:, 0]
                gap = mx.stop_gradient(chosen - known)
                # The policy gradient, and the value of the estimate.
                losses = gap * (chosen - mx.stop_gradient(chosen)) + gap
                parts = {"divergence": gap, "entropy": -chosen}
            else:
                t = objective.temperature
                q, p = log_softmax(mine / t), log_softmax(theirs / t)
                divergences = t**2 * plain_divergence(objective.divergence, q, p)
                losses = divergences - objective.sft_weight * chosen
                parts = {
                    "divergence": divergences,
                    "agreement": (q.argmax(-1) == p.argmax(-1)).astype(mx.float64),
                    "entropy": -(exp(q) * q).sum(-1),
                    "entropy/teacher": -(exp(p) * p).sum(-1),
                }
            weight = float(examples.weights[row])
            total, count = total + weight * losses.sum(), count + weight * len(losses)
            for name, values in parts.items():
                found.setdefault(name, []).append(mx.stop_gradient(values))
        figures.update({name: mx.concatenate(values).mean() for name, values in found.items()})
        return total / count

    with mx.stream(mx.cpu):  # GPUs have no float64
        value, grads = mx.value_and_grad(loss)(double(adapters))
        mx.eval(value, grads, figures)
    return Expected(value.item(), grads, {name: value.item() for name, value in figures.items()})


@pytest.fixture(scope="module")
def expectation(folder_of) -> Callable[[str, str, str], Expected]:
    @cache
    def found(objective: str, student: str, teacher: str) -> Expected:
        dora = STUDENTS[student][2]
        return expected(OBJECTIVES[objective], folder_of(student), dora, folder_of(teacher))

    return found


def computed(
    objective, folder: Path, dora: bool, teacher: Path, way: Way
) -> tuple[list[float], Arrays, Totals]:
    """A step of an engine: its loss, in both ways to compute it, its gradients, and its sums."""
    opened = open_model(folder, mx.float32)
    plan = Plan(engine=way.plan, micro_tokens=0)
    model = TeacherModel("--teacher", teacher, None, shares_base=False)
    asked = build_teacher(
        model, open_model(teacher, mx.float32), VOCABULARY, plan, lambda _: MemoryStore(),
        together=0, objective=objective,
    )  # fmt: skip
    network, keys, _ = load(folder, dora)
    built = build_engine(
        network,
        keys,
        way.plan,
        packing=way.packed_tokens is not None,
        tensors=opened.tensors,
        make_store=(lambda _: MemoryStore()) if way.cached else None,
        objective=objective,
        teacher=None if isinstance(objective, SampledDivergence) else asked.target,
    )
    assert (built.plan, built.notices) == (way.plan, ())
    engine, examples = taught(built.engine, asked), make_examples()
    schedule = make_schedule(examples, way.rows, len(examples), 0, way.packed_tokens)
    batches = schedule.batches_of(0)
    denominator = objective.denominator(batches)
    total = HeldGradients()
    sums = accumulate(engine, batches, 1 / denominator, 0, total)
    losses = [sums.loss, sum(engine.loss(batch).loss.item() for batch in batches)]
    return [loss / denominator for loss in losses], total.arrays, sums


@pytest.mark.parametrize(("objective", "way", "student", "teacher"), cases())
def test_loss_gradients_and_metrics_are_those_of_a_plain_reading(
    folder_of, expectation, monkeypatch, objective, way, student, teacher
):
    if WAYS[way].tiled:
        cut(monkeypatch, 16)
    folders = folder_of(student), STUDENTS[student][2], folder_of(teacher)
    losses, grads, sums = computed(OBJECTIVES[objective], *folders, WAYS[way])
    plain = expectation(objective, student, teacher)
    assert losses == pytest.approx([plain.loss] * 2, rel=TOLERANCE)
    assert_gradients(grads, plain.gradients)
    assert sums.means() == pytest.approx(plain.metrics, rel=TOLERANCE)
