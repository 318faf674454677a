"""The most likely tokens at each place of a text, and draws."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import TINY, make_model
from your_ai.engine.weights import open_model
from your_ai.generation.likely import drawn, likely, top

KERNELS = "measured"
TOKENS = np.random.default_rng(0).integers(3, 60, 50)


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("models") / "m", factor=1.5, **TINY)
    found = open_model(folder, mx.float32).network
    found.eval()
    return found


@pytest.fixture(scope="module")
def scores(network) -> np.ndarray:
    """(49, V) the log-probabilities at each place after the first."""
    logits = network(mx.array(TOKENS[None]))[0, :-1].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("start", [1, 2, 30, 49])
@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_the_most_likely_are_those_of_one_pass(network, scores, start, at_once):
    found = likely(network, TOKENS, start, at_once, top(6))
    wanted = np.sort(scores[start - 1 :], axis=-1)[:, ::-1][:, :6]
    assert found.logprobs == pytest.approx(wanted, abs=1e-4)
    own = np.take_along_axis(scores[start - 1 :], found.ids, axis=-1)
    assert found.logprobs == pytest.approx(own, abs=1e-4)


def test_more_than_the_vocabulary_are_all_of_it(network, scores):
    found = likely(network, TOKENS[:5], 1, 3, top(10**6))
    assert sorted(found.ids[0].tolist()) == list(range(scores.shape[1]))


def test_draws_depend_on_seed_and_place_alone(network):
    first, other = (likely(network, TOKENS, 1, at_once, drawn(4, 9, 1.0)) for at_once in (1, 50))
    assert np.array_equal(first.ids, other.ids)
    assert np.array_equal(likely(network, TOKENS, 20, 5, drawn(4, 9, 1.0)).ids, first.ids[19:])
    assert not np.array_equal(likely(network, TOKENS, 1, 50, drawn(4, 8, 1.0)).ids, first.ids)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_are_as_frequent_as_they_are_likely(network, scores, temperature):
    found = likely(network, TOKENS[:3], 1, 2, drawn(4000, 1, temperature))
    for row, ids in enumerate(found.ids):
        shares = np.exp(scores[row] / temperature)
        shares /= shares.sum()
        counts = np.bincount(ids, minlength=len(shares)) / len(ids)
        assert np.abs(counts - shares).max() < 5 * np.sqrt(0.25 / len(ids))


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-39, 1e-30])
def test_without_temperature_the_most_likely_is_drawn(network, scores, temperature):
    found = likely(network, TOKENS, 1, 8, drawn(3, 1, temperature))
    assert (found.ids == scores.argmax(-1)[:, None]).all()


@pytest.mark.parametrize("choose", [top(64), drawn(64, 1, 1.0)], ids=["top", "drawn"])
def test_more_tokens_at_a_place_need_no_more_memory_than_its_scores(choose):
    """The plan counts three arrays as large as the logits of a wave, or more."""
    scores = mx.random.normal((4, 200_000))
    mx.eval(scores)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(choose(scores, 1))
    assert mx.get_peak_memory() - before < 2.1 * scores.nbytes
