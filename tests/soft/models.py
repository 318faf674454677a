"""Small networks for differentiable generation, and a plain reading of its loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tests.conftest import TINY, make_model
from tests.objectives.test_gradients import load
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.nets import model
from your_ai.nets.gumbel import NoisePlaces, gumbel
from your_ai.soft.roles import RewardNetwork, Roles, Sampled, SoftSettings, network_of

VOCABULARY = 160
PROMPTS = [np.array([3, 1, 2, 7]), np.array([5, 4]), np.array([9, 9, 6, 2, 8])]
KEYS = np.array([3, 900, 77], np.uint32)
WEIGHTS = np.array([1.0, 0.5, 2.0])


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Which networks a case has."""

    architecture: str = "llama"
    bits: int | None = None
    dora: bool = False
    dtype: mx.Dtype = mx.float32
    other_base: bool = False
    """Whether the reward model has a base of its own, with another hidden size."""


class Made(NamedTuple):
    """Networks for an engine, and the same networks for the plain reading."""

    roles: Roles
    policy: nn.Module
    reference: nn.Module
    reward: nn.Module


def make(folder: Path, kind: Kind) -> Made:
    sizes = {**TINY, "vocab_size": VOCABULARY}
    make_model(folder / "base", kind.architecture, kind.bits, factor=1, **sizes)
    judge = folder / "base"
    if kind.other_base:
        judge = folder / "judge"
        wide = {**sizes, "hidden_size": 64}
        make_model(judge, kind.architecture, kind.bits, seed=5, factor=1, **wide)

    def networks() -> tuple[nn.Module, nn.Module, nn.Module]:
        policy, _, _ = load(folder / "base", kind.dora)
        reference, _ = model.load_network(folder / "base", mx.float32)
        if kind.other_base:
            return policy, reference, model.load_network(judge, mx.float32)[0]
        reward, _, _ = load(folder / "base", kind.dora)
        reward.freeze()
        reward.update(other_adapters(reward))
        return policy, reference, reward

    ours, plain = networks(), networks()
    for network in ours:
        network.update(
            tree_map(lambda a: a.astype(kind.dtype) if a.dtype == mx.float32 else a,
                     frozen_parameters(network))
        )  # fmt: skip
        dequantize_on_the_cpu(network)
    policy, reference, reward = map(network_of, ours)
    width = reward.embedding.rows.shape[1]
    score = mx.random.normal((width,), key=mx.random.key(4))
    return Made(Roles(policy, RewardNetwork(reward, score), reference), *plain)


def frozen_parameters(network: nn.Module) -> Any:
    trained = dict(tree_flatten(network.trainable_parameters()))
    arrays = tree_flatten(network.parameters())
    return tree_unflatten([(path, array) for path, array in arrays if path not in trained])


def other_adapters(network: nn.Module) -> Any:
    """Other adapters than those of the policy: their B has the opposite sign."""
    arrays = tree_flatten(network.parameters())
    return tree_unflatten([(path, -a) for path, a in arrays if path.endswith("lora_b")])


class Given(nn.Module):
    """An embedding layer that returns what it was given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._layer, self._rows = layer, None

    def __call__(self, tokens: mx.array) -> mx.array:
        return self._rows + 0

    def as_linear(self, hidden: mx.array) -> mx.array:
        return self._layer.as_linear(hidden)


class Opened:
    """A network that takes rows of its embedding."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.table = network.model.embed_tokens(mx.arange(VOCABULARY))  # (V, D)
        self.layer = network.model["embed_tokens"] = Given(network.model.embed_tokens)

    def close(self) -> None:
        self.network.model["embed_tokens"] = self.layer._layer

    def logits(self, rows: mx.array) -> mx.array:
        """(T, D) -> (T, V)"""
        self.layer._rows = rows[None]
        return self.network(mx.zeros((1, len(rows)), mx.int32))[0].astype(mx.float32)

    def finished(self, rows: mx.array) -> mx.array:
        """(T, D) -> (T, D)"""
        self.layer._rows = rows[None]
        return self.network.model(mx.zeros((1, len(rows)), mx.int32))[0]


class Plain(NamedTuple):
    loss: float
    reward: float
    """The sum over all rows."""
    kl: float
    grads: dict[str, mx.array]


def plain_gradients(
    made: Made,
    settings: SoftSettings,
    sampled: Sampled,
    prompts: list[np.ndarray] = PROMPTS,
    keys: np.ndarray = KEYS,
    weights: np.ndarray = WEIGHTS,
) -> Plain:
    """The loss of the batch as one graph, row by row and token by token, and its gradients."""
    policy, reference, reward = map(Opened, made[1:])
    params = dict(tree_flatten(made.policy.trainable_parameters()))
    figures: list[tuple[mx.array, mx.array]] = []

    def of_row(row: int) -> mx.array:
        prompt, length = mx.array(prompts[row]), int(sampled.lengths[row])
        mine, judged = policy.table[prompt], reward.table[prompt]
        total = mx.array(0.0)
        for t in range(length):
            z = policy.logits(mine)[-1]
            place = NoisePlaces(mx.array(keys[row : row + 1]), mx.array([t], mx.uint32))
            noise = gumbel(place, mx.arange(VOCABULARY, dtype=mx.uint32))[0]
            y = mx.softmax((z + noise) / settings.tau)
            hard = (mx.arange(VOCABULARY) == int(sampled.tokens[row, t])).astype(mx.float32)
            token = y if settings.relaxed else hard + y - mx.stop_gradient(y)
            if settings.kl_beta:
                logp = z - mx.logsumexp(z)
                ref = mx.stop_gradient(reference.logits(mx.stop_gradient(mine))[-1])
                total = total + (mx.exp(logp) * (logp - ref + mx.logsumexp(ref))).sum()
            mine = mx.concatenate([mine, (token @ policy.table)[None]])
            judged = mx.concatenate([judged, (token @ reward.table)[None]])
        found = reward.finished(judged)[-1] @ made.roles.reward.score
        figures.append((mx.stop_gradient(found), mx.stop_gradient(total)))
        return float(weights[row]) * (settings.kl_beta * total - found)

    def loss(params: dict[str, mx.array]) -> mx.array:
        made.policy.update(tree_unflatten(list(params.items())))
        return sum(map(of_row, range(len(prompts))))

    found, grads = mx.value_and_grad(loss)(params)
    made.policy.update(tree_unflatten(list(params.items())))
    mx.eval(found, grads)
    for opened in (policy, reference, reward):
        opened.close()
    rewards, divergences = zip(*figures, strict=True)
    return Plain(found.item(), float(sum(rewards)), float(sum(divergences)), grads)


def relative_error(found: Any, expected: dict[str, mx.array]) -> float:
    """The error of all gradients together."""
    ours = dict(tree_flatten(found))
    assert ours.keys() == expected.keys()
    apart = sum(mx.square(ours[name] - expected[name]).sum().item() for name in ours)
    return (apart / sum(mx.square(array).sum().item() for array in expected.values())) ** 0.5
