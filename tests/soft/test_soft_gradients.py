"""Both schemes give the gradients of the whole autoregressive graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.soft.models import (
    KEYS,
    PROMPTS,
    VOCABULARY,
    WEIGHTS,
    Kind,
    make,
    plain_gradients,
    relative_error,
)
from your_ai.nets.head import LinearHead
from your_ai.soft import columns, passes
from your_ai.soft.engine import SoftEngine, column_engine, sweep_engine
from your_ai.soft.roles import Sampled, SoftSettings

TOKENS = 6
TOLERANCE = 1e-5
CASES = {
    "llama": (Kind(), SoftSettings()),
    "llama, relaxed": (Kind(), SoftSettings(relaxed=True, kl_beta=0.3, tau=0.7)),
    "llama, untied, 4-bit, DoRA": (
        Kind(architecture="llama-untied", bits=4, dora=True, other_base=True),
        SoftSettings(kl_beta=0.5),
    ),
    "qwen3, 4-bit": (Kind(architecture="qwen3", bits=4), SoftSettings(kl_beta=0.2, tau=1.5)),
    "qwen3, DoRA, relaxed": (
        Kind(architecture="qwen3", dora=True, other_base=True),
        SoftSettings(relaxed=True),
    ),
    "gemma2": (Kind(architecture="gemma2"), SoftSettings(kl_beta=0.4, tau=0.8)),
    "gemma2, 4-bit, DoRA, relaxed": (
        Kind(architecture="gemma2", bits=4, dora=True),
        SoftSettings(relaxed=True, kl_beta=0.1, tau=2.0),  # better conditioned than 1
    ),
    "qwen2, untied, relaxed": (
        Kind(architecture="qwen2", bits=4),
        SoftSettings(relaxed=True, kl_beta=0.1),
    ),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small vocabulary, the short prompts and the few rows like large ones."""
    slices = [(0, 64), (64, 100), (100, VOCABULARY)]
    monkeypatch.setattr(LinearHead, "slices", lambda head, count: iter(slices))
    monkeypatch.setattr(columns, "TOGETHER", 2)
    monkeypatch.setattr(columns, "PREFILL_TOKENS", 6)
    monkeypatch.setattr(passes, "GROUP_TOKENS", 64)
    monkeypatch.setattr(columns, "POSITIONS", 7)


def sampled_by(engine: SoftEngine) -> Sampled:
    """Completions of which one ends early, by a token that it has sampled."""
    free = engine.sample(PROMPTS, KEYS, TOKENS, [])
    assert free.lengths.tolist() == [TOKENS] * len(PROMPTS)
    stop = int(free.tokens[1, 2])
    found = engine.sample(PROMPTS, KEYS, TOKENS, [stop])
    assert found.lengths[1] <= 3
    for row, length in enumerate(found.lengths):
        np.testing.assert_array_equal(found.tokens[row, :length], free.tokens[row, :length])
    return found


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_whole_graph(tmp_path: Path, name: str):
    kind, settings = CASES[name]
    made = make(tmp_path, kind)
    engines = [column_engine(made.roles, settings), sweep_engine(made.roles, settings)]
    sampled = sampled_by(engines[0])
    expected = plain_gradients(made, settings, sampled)
    for engine in engines:
        sums, grads = engine.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
        assert relative_error(grads, expected.grads) < TOLERANCE
        assert sums.loss.item() == pytest.approx(expected.loss, rel=1e-5)
        assert sums.metrics["reward"][0].item() == pytest.approx(expected.reward, rel=1e-5)
        assert sums.metrics["credit_residual"][0].item() == 0
        assert ("kl" in sums.metrics) == bool(settings.kl_beta)
        if settings.kl_beta:
            kl, count = sums.metrics["kl"]
            assert kl.item() == pytest.approx(expected.kl, rel=1e-4)
            assert count.item() == sampled.lengths.sum()


@pytest.mark.parametrize("make_engine", [column_engine, sweep_engine])
def test_rows_do_not_depend_on_their_batch(tmp_path: Path, make_engine):
    settings = SoftSettings(kl_beta=0.3)
    engine = make_engine(make(tmp_path, Kind(architecture="gemma2")).roles, settings)
    sampled = sampled_by(engine)
    whole, grads = engine.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 0.5)
    total: dict[str, mx.array] = {}
    loss = 0.0
    for rows in (slice(0, 2), slice(2, 3)):
        again = engine.sample(PROMPTS[rows], KEYS[rows], sampled.lengths[rows].max(), [])
        for row, length in enumerate(sampled.lengths[rows]):
            np.testing.assert_array_equal(
                again.tokens[row, :length], sampled.tokens[rows][row, :length]
            )
        part = Sampled(sampled.tokens[rows], sampled.lengths[rows])
        sums, found = engine.gradients(PROMPTS[rows], part, KEYS[rows], WEIGHTS[rows], 0.5)
        loss += sums.loss.item()
        for path, grad in tree_flatten(found):
            total[path] = total[path] + grad if path in total else grad
    assert loss == pytest.approx(whole.loss.item(), rel=1e-5)
    assert relative_error(grads, total) < TOLERANCE


@pytest.mark.parametrize("make_engine", [column_engine, sweep_engine])
@pytest.mark.parametrize("relaxed", [False, True], ids=["straight-through", "relaxed"])
@pytest.mark.parametrize(("prompt", "tokens"), [([7], 3), ([7, 2], 1)])
def test_the_shortest_prompts_and_completions(
    tmp_path: Path, make_engine, relaxed: bool, prompt: list[int], tokens: int
):
    settings = SoftSettings(kl_beta=0.3, relaxed=relaxed)
    made = make(tmp_path, Kind())
    engine, prompts = make_engine(made.roles, settings), [np.array(prompt)]
    sampled = engine.sample(prompts, KEYS[:1], tokens, [])
    expected = plain_gradients(made, settings, sampled, prompts, KEYS[:1], WEIGHTS[:1])
    sums, grads = engine.gradients(prompts, sampled, KEYS[:1], WEIGHTS[:1], 1.0)
    assert sums.loss.item() == pytest.approx(expected.loss, rel=1e-5)
    assert relative_error(grads, expected.grads) < TOLERANCE


def test_half_precision_is_close(tmp_path: Path):
    """Losses and gradients of bfloat16 weights, to the accuracy of bfloat16."""
    settings = SoftSettings(kl_beta=0.3)
    made = make(tmp_path / "whole", Kind())
    sampled = sampled_by(column_engine(made.roles, settings))
    expected = plain_gradients(made, settings, sampled)
    half = make(tmp_path / "half", Kind(dtype=mx.bfloat16))
    sums, grads = column_engine(half.roles, settings).gradients(
        PROMPTS, sampled, KEYS, WEIGHTS, 1.0
    )
    assert sums.loss.item() == pytest.approx(expected.loss, rel=0.05)
    assert relative_error(grads, expected.grads) < 0.1
    assert all(grad.dtype == mx.float32 for _, grad in tree_flatten(grads))


def test_more_sweeps_leave_less_error(tmp_path: Path):
    made = make(tmp_path, Kind())
    settings = SoftSettings(kl_beta=0.3)
    exact = sweep_engine(made.roles, settings)
    sampled = exact.sample(PROMPTS, KEYS, 8, [])
    _, whole = exact.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
    expected = dict(tree_flatten(whole))
    errors, residuals = [], []
    for credit in (0, 1, 2, 4):
        engine = sweep_engine(made.roles, replace(settings, credit=credit))
        sums, grads = engine.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
        errors.append(relative_error(grads, expected))
        residuals.append(sums.metrics["credit_residual"][0].item())
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2
    assert errors[-1] < errors[0] / 20
    assert residuals[:2] == [1, 1]  # there is nothing to compare with
    assert residuals[2] > 3 * residuals[3] > 0
    tolerant = sweep_engine(made.roles, replace(settings, credit=1.01 * residuals[2]))
    sums, grads = tolerant.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
    assert sums.metrics["credit_residual"][0].item() == pytest.approx(residuals[2], rel=1e-3)
    assert relative_error(grads, expected) == pytest.approx(errors[2], rel=1e-3)
