"""A plain reading of models, adapters and objectives in float64, to compare engines with.

Whole logits, no padding, dense weights, and MLX's autograd. MLX's own exp, sigmoid, softmax, RMS
norm and RoPE have only the accuracy of float32 even for float64 arrays, so everything is made of
operations that have not.

Shapes: T tokens, D hidden size, V vocabulary, H heads, d head size, n tokens of an answer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model

from your_ai.config.divergences import FORWARD, REVERSE, DivergenceKind
from your_ai.data.examples import Examples
from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.grpo import GRPO
from your_ai.objectives.kto import KTO
from your_ai.objectives.reward import BradleyTerry, ScoreRegression
from your_ai.objectives.sft import SFT
from your_ai.objectives.simpo import SimPO
from your_ai.run.checkpoint import SCORE_WEIGHT

Arrays = dict[str, mx.array]


def exp(x: mx.array) -> mx.array:
    return mx.power(mx.array(math.e, mx.float64), x)


def sigmoid(x: mx.array) -> mx.array:
    return (1 + mx.tanh(x / 2)) / 2


def log_softmax(x: mx.array) -> mx.array:
    x = x - mx.stop_gradient(x.max(axis=-1, keepdims=True))
    return x - mx.log(exp(x).sum(axis=-1, keepdims=True))


# -- models


def plain_logits(weights: Arrays, args: Any, tokens: np.ndarray) -> mx.array:
    """(T, V) logits of llama, qwen2, qwen3, gemma2 or gemma3; args: the ModelArgs of mlx-lm."""
    rows = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    logits = plain_hidden(weights, args, tokens) @ rows.T
    return capped(logits, args.final_logit_softcapping) if args.model_type == "gemma2" else logits


def plain_hidden(weights: Arrays, args: Any, tokens: np.ndarray) -> mx.array:
    """(T, D) hidden states before the head."""
    gemma, eps = args.model_type in ("gemma2", "gemma3_text"), args.rms_norm_eps
    local = args.model_type == "gemma3_text"  # most of its blocks see the last tokens only

    def norm(x: mx.array, name: str) -> mx.array:
        weight = weights[f"{name}.weight"]
        x = x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)
        return x * (1 + weight if gemma else weight)

    def linear(x: mx.array, name: str) -> mx.array:
        y = x @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def attention(x: mx.array, name: str, slides: bool) -> mx.array:
        heads = (args.num_attention_heads, args.num_key_value_heads, args.num_key_value_heads)
        q, k, v = (
            mx.unflatten(linear(x, f"{name}.{part}_proj"), -1, (count, -1)).swapaxes(0, 1)
            for part, count in zip("qkv", heads, strict=True)
        )
        if f"{name}.q_norm.weight" in weights:
            q, k = norm(q, f"{name}.q_norm"), norm(k, f"{name}.k_norm")
        base = args.rope_local_base_freq if slides else args.rope_theta
        q, k = rotated(q, base), rotated(k, base)
        k, v = (mx.repeat(y, heads[0] // heads[1], axis=0) for y in (k, v))
        scores = (
            q @ k.swapaxes(1, 2) / math.sqrt(args.query_pre_attn_scalar if gemma else q.shape[-1])
        )
        if args.model_type == "gemma2":
            scores = capped(scores, args.attn_logit_softcapping)
        seen = np.tril(np.ones(scores.shape[1:], bool))
        if slides:
            seen = np.triu(seen, 1 - args.sliding_window)
        y = exp(log_softmax(mx.where(mx.array(seen), scores, -1e9))) @ v
        return linear(y.swapaxes(0, 1).flatten(1), f"{name}.o_proj")

    def mlp(x: mx.array, name: str) -> mx.array:
        gate = linear(x, f"{name}.gate_proj")
        if gemma:  # GELU by tanh
            slope = sigmoid(2 * math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate))
        else:
            slope = sigmoid(gate)
        return linear(gate * slope * linear(x, f"{name}.up_proj"), f"{name}.down_proj")

    embedding = weights["model.embed_tokens.weight"]
    x = embedding[mx.array(tokens)]
    if gemma:
        size = mx.array(math.sqrt(args.hidden_size))
        x = x * (size.astype(mx.bfloat16) if local else size).item()  # as mlx-lm rounds it
    for index in range(args.num_hidden_layers):
        block = f"model.layers.{index}"
        slides = local and (index + 1) % args.sliding_window_pattern != 0
        y = attention(norm(x, f"{block}.input_layernorm"), f"{block}.self_attn", slides)
        if gemma:
            x = x + norm(y, f"{block}.post_attention_layernorm")
            y = mlp(norm(x, f"{block}.pre_feedforward_layernorm"), f"{block}.mlp")
            x = x + norm(y, f"{block}.post_feedforward_layernorm")
        else:
            x = x + y
            x = x + mlp(norm(x, f"{block}.post_attention_layernorm"), f"{block}.mlp")
    return norm(x, "model.norm")


def rotated(x: mx.array, base: float) -> mx.array:
    """RoPE: rotate (H, T, d) by position."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(x.shape[1]), base ** (-np.arange(half) / half))
    cos, sin = mx.array(np.cos(angles), mx.float64), mx.array(np.sin(angles), mx.float64)
    first, second = x[..., :half], x[..., half:]
    return mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def capped(x: mx.array, limit: float) -> mx.array:
    return limit * mx.tanh(x / limit)


def adapted(weight: mx.array, scale: float, adapter: Arrays) -> mx.array:
    """W + s (A B)^T; with DoRA, each row gets the length m, and its own length is a constant."""
    weight = weight + scale * (adapter["lora_a"] @ adapter["lora_b"]).T
    if "m" not in adapter:
        return weight
    lengths = mx.sqrt((weight * weight).sum(axis=1))
    return weight * (adapter["m"] / mx.stop_gradient(lengths))[:, None]


def with_adapters(weights: Arrays, scale: float, adapters: Arrays) -> Arrays:
    """The weights with those of the adapted layers replaced; adapters: by path, with those of a
    score head, or trained arrays of the model itself.
    """
    layers: dict[str, Arrays] = {}
    whole = {n: a for n, a in adapters.items() if n in weights or n == SCORE_WEIGHT}
    weights = weights | whole
    for path, array in adapters.items():
        if path in whole:
            continue
        layer, _, part = path.rpartition(".")
        layers.setdefault(layer, {})[part] = array
    return weights | {
        f"{layer}.weight": adapted(weights[f"{layer}.weight"], scale, adapter)
        for layer, adapter in layers.items()
    }


# -- objectives


def plain_divergence(kind: DivergenceKind, q: mx.array, p: mx.array) -> mx.array:
    """(n,) the divergence, from (n, V) log-probabilities of a student and of its teacher."""

    def kl(p: mx.array, q: mx.array) -> mx.array:
        return (exp(p) * (p - q)).sum(axis=-1)

    if kind.name == FORWARD:
        return kl(p, q)
    if kind.name == REVERSE:
        return kl(q, p)
    b = kind.share
    m = mx.log(b * exp(p) + (1 - b) * exp(q))
    return b * kl(p, m) + (1 - b) * kl(q, m)


class Answer(NamedTuple):
    """(n,) float64 log-probabilities of the tokens of an answer; of a reward model, its score."""

    current: mx.array
    reference: mx.array
    old: mx.array | None = None
    """Only of rollouts, like the advantage."""
    advantage: mx.array | None = None
    rating: float = 0.0

    @property
    def ratios(self) -> mx.array:
        return self.current - self.reference


class Group(NamedTuple):
    """A row: a chosen and a rejected answer, or an answer and that of another row."""

    answers: list[Answer]
    weight: float
    good: bool
    """The label of the first answer."""


def log_sigmoid(x: mx.array) -> mx.array:
    return mx.minimum(x, 0) - mx.log(1 + exp(-mx.abs(x)))


def log_odds(x: mx.array) -> mx.array:
    return mx.log(exp(x) / (1 - exp(x)))


def plain_loss(objective: Any, groups: list[Group]) -> mx.array:
    """The loss of a step."""
    weight = sum(group.weight for group in groups)
    if isinstance(objective, SFT):
        losses = [-sum(answer.current.sum() for answer in group.answers) for group in groups]
        weight = sum(g.weight * len(answer.current) for g in groups for answer in g.answers)
    elif isinstance(objective, GRPO):
        answers = [(group.weight, answer) for group in groups for answer in group.answers]
        counts = [len(a.current) if objective.normalization == "dapo" else 1 for _, a in answers]
        weight = sum(w * n if objective.normalization == "dapo" else w > 0
                     for (w, _), n in zip(answers, counts, strict=True))  # fmt: skip
        return sum(w * rollout_loss(objective, answer).sum() for w, answer in answers) / weight
    elif isinstance(objective, ScoreRegression):
        weight *= 2
        losses = [sum((a.current.sum() - a.rating) ** 2 for a in g.answers) for g in groups]
    elif isinstance(objective, KTO):
        moved = sum(g.weight * g.answers[1].ratios.sum() for g in groups) / weight
        baseline = mx.stop_gradient(mx.maximum(moved, 0))
        losses = [kto_loss(objective, group, baseline) for group in groups]
    else:
        losses = [pair_loss(objective, *group.answers) for group in groups]
    return sum(g.weight * loss for g, loss in zip(groups, losses, strict=True)) / weight


def rollout_loss(objective: GRPO, answer: Answer) -> mx.array:
    """(n,) the loss of each token."""
    log_ratio = answer.current - (
        mx.stop_gradient(answer.current) if answer.old is None else answer.old
    )
    ratio = exp(log_ratio)
    used = exp(log_ratio.mean()) if objective.importance == "sequence" else ratio
    clipped = mx.clip(used, 1 - objective.clip_low, 1 + objective.clip_high)
    gained = mx.minimum(used * answer.advantage, clipped * answer.advantage)
    d = answer.reference - answer.current
    estimate = exp(d) - d - 1
    penalty = estimate if objective.kl == "k3" else ratio * estimate
    return -gained + objective.kl_beta * penalty


def kto_loss(objective: KTO, group: Group, baseline: mx.array) -> mx.array:
    v = objective.beta * (group.answers[0].ratios.sum() - baseline)
    if not group.good:
        return objective.undesirable_weight * (1 - sigmoid(-v))
    imitation = -objective.sft_weight * group.answers[0].current.mean()
    return objective.desirable_weight * (1 - sigmoid(v)) + imitation


def pair_loss(objective: Any, chosen: Answer, rejected: Answer) -> mx.array:
    a, b = chosen.current.mean(), rejected.current.mean()
    if isinstance(objective, BradleyTerry):
        return -log_sigmoid(a - b - chosen.rating) + objective.center * (a + b) ** 2
    e = getattr(objective, "label_smoothing", 0.0)
    if isinstance(objective, DPO):
        h = objective.beta * (chosen.ratios.sum() - rejected.ratios.sum())
        loss = -(1 - e) * log_sigmoid(h) - e * log_sigmoid(-h)
    elif isinstance(objective, IPO):
        loss = (chosen.ratios.mean() - rejected.ratios.mean() - 1 / (2 * objective.beta)) ** 2
    elif isinstance(objective, SimPO):
        u = objective.beta * (a - b) - objective.gamma
        loss = -(1 - e) * log_sigmoid(u) - e * log_sigmoid(-u)
    else:
        loss = -a - objective.odds_weight * log_sigmoid(log_odds(a) - log_odds(b))
    return loss - objective.sft_weight * a


# -- together


class PlainModel(NamedTuple):
    """A model without adapters."""

    args: Any
    """The ModelArgs of mlx-lm."""
    weights: Arrays
    """float64, by path."""


def plain_model(network: nn.Module) -> PlainModel:
    """The network, which may be quantized, in float64."""
    return PlainModel(
        network.args, double(dict(tree_flatten(dequantize_model(network).parameters())))
    )


def double(arrays: Arrays) -> Arrays:
    return {path: array.astype(mx.float64, stream=mx.cpu) for path, array in arrays.items()}


def plain_gradients(
    objective: Any,
    model: PlainModel,
    adapters: Arrays,
    scale: float,
    examples: Examples,
    temperature: float = 1.0,
) -> tuple[float, Arrays]:
    """The loss of a step with all examples, and its gradients by path."""

    def answer(weights: Arrays, index: int) -> Answer:
        tokens, at = examples[index].tokens, np.flatnonzero(examples[index].trained)
        columns = examples.columns
        if "ratings" in columns:
            hidden = plain_hidden(weights, model.args, tokens[:-1])
            score = hidden[-1:] @ weights[SCORE_WEIGHT].T
            return Answer(score[:, 0], mx.zeros(1), rating=float(columns["ratings"][index]))
        scores = log_softmax(plain_logits(weights, model.args, tokens) / temperature)
        places = examples.starts[index] + at
        names = [name for name in ("reference", "old", "advantages") if name in columns]
        kept = {name: mx.array(columns[name][places], mx.float64) for name in names}
        return Answer(
            scores[mx.array(at - 1), mx.array(tokens[at])],
            kept["reference"], kept.get("old"), kept.get("advantages"),
        )  # fmt: skip

    def loss(adapters: Arrays) -> mx.array:
        weights = with_adapters(model.weights, scale, adapters)
        rows = range(0, len(examples), 2)
        return plain_loss(
            objective,
            [
                Group(
                    [answer(weights, row), answer(weights, row + 1)],
                    float(examples.weights[row]),
                    "labels" in examples.columns and bool(examples.columns["labels"][row]),
                )
                for row in rows
            ],
        )

    with mx.stream(mx.cpu):  # GPUs have no float64
        found, grads = mx.value_and_grad(loss)(double(adapters))
        mx.eval(found, grads)
    return found.item(), grads
