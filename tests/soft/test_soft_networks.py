"""Which networks the schemes serve, with streamed weights too, and what they say of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import TINY, make_model
from tests.objectives.test_gradients import load
from tests.soft.models import KEYS, PROMPTS, VOCABULARY, WEIGHTS, Kind, make, relative_error
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.weights import stream, tensors_of
from your_ai.errors import UserError
from your_ai.nets import model
from your_ai.nets.gumbel import NoisePlaces, gumbel
from your_ai.soft.engine import column_engine, sweep_engine
from your_ai.soft.roles import Network, RewardNetwork, Roles, SoftSettings, network_of

SIZES = {**TINY, "vocab_size": VOCABULARY}


def streamed(folder: Path, dora: bool) -> Roles:
    """Three networks that read all their weights from the files of one base."""
    base, _ = model.load_network(folder, mx.float32)
    tensors = tensors_of(base, folder)

    def network(adapted: bool) -> Network:
        if adapted:
            found, _, _ = load(folder, dora)
        else:
            found, _ = model.load_network(folder, mx.float32)
        dequantize_on_the_cpu(found)
        blocks, weights = stream(found, tensors)
        return network_of(found, blocks, weights)

    reward = network(False)
    score = mx.random.normal((reward.embedding.rows.shape[1],), key=mx.random.key(4))
    return Roles(network(True), RewardNetwork(reward, score), network(False))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Kind(bits=4), SoftSettings(kl_beta=0.3)),
        (Kind(architecture="gemma2", dora=True), SoftSettings(kl_beta=0.1, relaxed=True)),
        (Kind(architecture="llama-untied", bits=4), SoftSettings(relaxed=True)),
    ],
    ids=["llama", "gemma2", "untied"],
)
def test_streamed_weights_give_the_same(tmp_path: Path, kind: Kind, settings: SoftSettings):
    resident = make(tmp_path, kind).roles
    files = streamed(tmp_path / "base", kind.dora)
    reward = RewardNetwork(plain_of(tmp_path / "base"), files.reward.score)
    ours = sweep_engine(files, settings)
    theirs = column_engine(replace(resident, reward=reward), settings)
    sampled = theirs.sample(PROMPTS, KEYS, 5, [])
    again = ours.sample(PROMPTS, KEYS, 5, [])
    np.testing.assert_array_equal(sampled.tokens, again.tokens)
    expected, grads = theirs.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
    sums, found = ours.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
    assert sums.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert relative_error(found, dict(tree_flatten(grads))) < 1e-5
    with pytest.raises(UserError, match="use sweeps"):
        column_engine(files, settings)


def plain_of(folder: Path) -> Network:
    """The network of a folder, without adapters."""
    return network_of(model.load_network(folder, mx.float32)[0])


def network(folder: Path, architecture: str, **changes) -> Network:
    make_model(folder, architecture, None, factor=1, **{**SIZES, **changes})
    return network_of(load(folder, False)[0])


def test_sampled_tokens_are_those_of_the_models_own_logits(tmp_path: Path):
    policy = network(tmp_path / "m", "gemma2")
    engine = column_engine(
        Roles(policy, RewardNetwork(policy, mx.zeros((32,)))), SoftSettings(tau=0.3)
    )
    found = engine.sample(PROMPTS, KEYS, 5, [])
    for row, prompt in enumerate(PROMPTS):
        tokens = prompt.tolist()
        for position in range(5):
            logits = policy.model(mx.array([tokens]))[0, -1]
            places = NoisePlaces(mx.array(KEYS[row : row + 1]), mx.array([position], mx.uint32))
            noise = gumbel(places, mx.arange(VOCABULARY, dtype=mx.uint32))[0]
            tokens.append((logits + noise).argmax().item())
        assert tokens[len(prompt) :] == found.tokens[row].tolist()


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mistral", "qwen2-tied"])
def test_columns_and_sweeps_agree_on_other_architectures(tmp_path: Path, architecture: str):
    policy = network(tmp_path / "m", architecture)
    frozen = plain_of(tmp_path / "m")
    score = mx.random.normal((32,), key=mx.random.key(2))
    roles, settings = Roles(policy, RewardNetwork(frozen, score), frozen), SoftSettings(kl_beta=0.2)
    engines = [column_engine(roles, settings), sweep_engine(roles, settings)]
    sampled = engines[0].sample(PROMPTS, KEYS, 4, [])
    first, second = (e.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)[1] for e in engines)
    assert relative_error(first, dict(tree_flatten(second))) < 1e-5


def test_sweeps_serve_caches_that_columns_do_not(tmp_path: Path):
    """Gemma 3's rotating caches: the gradient has the right direction in each of a few weights."""
    policy = network(tmp_path / "m", "gemma3_text")
    roles = Roles(policy, RewardNetwork(plain_of(tmp_path / "m"), mx.ones((32,))))
    settings = SoftSettings(relaxed=True)  # differentiable as a whole, so differences tell
    with pytest.raises(UserError, match="gemma3_text: its cache is not"):
        column_engine(roles, settings)
    engine = sweep_engine(roles, settings)
    prompts, keys, weights = PROMPTS[:2], KEYS[:2], WEIGHTS[:2]
    sampled = engine.sample(prompts, keys, 4, [])
    assert sampled.lengths.tolist() == [4, 4]
    _, grads = engine.gradients(prompts, sampled, keys, weights, 1.0)
    adapters = dict(tree_flatten(policy.model.trainable_parameters()))
    grads = dict(tree_flatten(grads))
    assert grads.keys() == adapters.keys()
    size = sum(mx.square(grad).sum().item() for grad in grads.values()) ** 0.5
    losses = []
    for step in (-1e-4, 1e-4):
        model.set_adapters(
            policy.model, {path: a + step / size * grads[path] for path, a in adapters.items()}
        )
        sums, _ = engine.gradients(prompts, sampled, keys, weights, 1.0)
        losses.append(sums.loss.item())
    assert (losses[1] - losses[0]) / 2e-4 == pytest.approx(size, rel=2e-2)


def test_an_embedding_that_is_not_linear_is_refused(tmp_path: Path):
    make_model(tmp_path / "m", "llama-untied", None, **SIZES)
    odd, _ = model.load_network(tmp_path / "m", mx.float32)
    trunk, embedding = odd.model, odd.model.embed_tokens

    class Shifted(type(embedding)):
        def __call__(self, tokens: mx.array) -> mx.array:
            return mx.tanh(embedding(tokens))

    shifted = Shifted(*embedding.weight.shape)
    shifted.weight = embedding.weight
    trunk.embed_tokens = shifted
    with pytest.raises(UserError, match="llama: the input of its first block is not a linear"):
        network_of(odd)


def test_roles_that_do_not_fit_are_refused(tmp_path: Path):
    policy = network(tmp_path / "m", "llama")
    other = network(tmp_path / "o", "llama", vocab_size=128)
    with pytest.raises(UserError, match="the policy has 160 tokens and the reward model 128"):
        column_engine(Roles(policy, RewardNetwork(other, mx.zeros((32,)))), SoftSettings())
    with pytest.raises(UserError, match="score head"):
        sweep_engine(Roles(policy, RewardNetwork(policy, mx.zeros((31,)))), SoftSettings())
    wide = network(tmp_path / "w", "llama", hidden_size=64)
    with pytest.raises(UserError, match="the reference must have the base"):
        sweep_engine(Roles(policy, RewardNetwork(policy, mx.zeros((32,))), wide), SoftSettings())
    roles = Roles(policy, RewardNetwork(policy, mx.zeros((32,))))
    with pytest.raises(UserError, match="needs a reference"):
        sweep_engine(roles, SoftSettings(kl_beta=0.1))


@pytest.mark.parametrize("make_engine", [column_engine, sweep_engine])
def test_a_step_may_be_stopped_before_any_token(tmp_path: Path, make_engine):
    policy = network(tmp_path / "m", "llama")
    rows: list[int] = []

    def step(count: int) -> None:
        rows.append(count)
        if len(rows) == limit:
            raise KeyboardInterrupt

    roles = Roles(policy, RewardNetwork(plain_of(tmp_path / "m"), mx.ones((32,))))
    engine, limit = make_engine(roles, SoftSettings(step=step)), 0
    sampled = engine.sample(PROMPTS, KEYS, 4, [])
    assert rows == [3] * 4
    engine.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
    assert rows == [3] * 8  # columns: the prompts, and three tokens; sweeps: T - 1, and the last
    limit = 10
    with pytest.raises(KeyboardInterrupt):
        engine.gradients(PROMPTS, sampled, KEYS, WEIGHTS, 1.0)
