"""The fused engine. `objectives/test_gradients` compares its gradients with a plain reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from tests.conftest import chat, load_base, write_rows
from your_ai.config import TrainConfig
from your_ai.data.batches import make_schedule
from your_ai.data.encode import Encoder
from your_ai.data.examples import Examples, load_examples
from your_ai.engine.build import build_engine
from your_ai.engine.fused import fused_engine
from your_ai.engine.protocol import Engine
from your_ai.engine.weights import FileTensor, tensors_of
from your_ai.nets import model
from your_ai.nets.rounding import MLX_PARTS, float32_weight, quantization_of
from your_ai.nets.split import Split
from your_ai.nets.split import split as split_in_two
from your_ai.objectives.sft import SUPERVISED

ROWS = [
    chat("Short question", "Short answer"),
    chat("A much longer question " * 2, "An answer " * 3, weight=2.5),
    {"text": "Some plain text, trained from its second token on."},
    chat("Ignored", "With no weight at all", weight=0),
    chat("One more", "Yes"),
]


def load(folder: Path, **settings: Any) -> tuple[nn.Module, Any, model.Adapters]:
    config = TrainConfig(
        **{"lora_layers": 2, "lora_targets": ("all-linear",), "lora_rank": 4, **settings}
    )
    network, tokenizer = load_base(folder, mx.float32)
    adapters = model.add_adapters(network, config)
    mx.random.seed(1)  # lora_b is initially zero, which would make half the gradients zero
    network.update(
        tree_map(
            lambda p: (p + 0.05 * mx.random.normal(p.shape)).astype(p.dtype),
            network.trainable_parameters(),
        )
    )
    mx.eval(network.parameters())
    return network, tokenizer, adapters


class Prepared(NamedTuple):
    """A model with adapters, and the engine of a plan."""

    network: nn.Module
    tokenizer: Any
    tensors: dict[str, FileTensor]
    engine: Engine


def prepared(folder: Path, plan: str, settings: dict[str, Any], **options: Any) -> Prepared:
    """As in a run. settings: of the adapters; options: of `build_engine`."""
    network, tokenizer, adapters = load(folder, **settings)
    tensors = tensors_of(model.load_network(folder, mx.float32)[0], folder)
    built = build_engine(network, adapters.dropout_keys, plan, tensors=tensors, **options)
    assert built.plan == plan
    return Prepared(network, tokenizer, tensors, built.engine)


def weight_of(linear: nn.Module) -> mx.array:
    """The frozen weight of a layer as one matrix."""
    parts = {name: linear[name] for name in MLX_PARTS if linear.get(name) is not None}
    return float32_weight(parts, quantization_of(linear))


def encode(tokenizer: Any, folder: Path) -> Examples:
    path = write_rows(folder / "train.jsonl", ROWS)
    return load_examples(path, Encoder(tokenizer), "tokenizer", 256, "error", folder / "cache")


def plain_loss(network: nn.Module, examples: Examples) -> mx.array:
    """The weighted mean loss of the trained tokens: one row at a time, full logits, no padding."""
    total, weight = mx.array(0.0), 0.0
    for i in range(len(examples)):
        tokens = [int(t) for t in examples[i].tokens]
        logits = network(mx.array([tokens[:-1]]))[0]
        for t in range(1, len(tokens)):
            if examples[i].trained[t]:
                scores = logits[t - 1] - mx.logsumexp(logits[t - 1])
                total = total - float(examples.weights[i]) * scores[tokens[t]]
                weight += float(examples.weights[i])
    return total / weight


def engine_loss(network, adapters, examples, batch_size=5, accumulation=1, seed=0):
    """The same loss from the engine: (loss, gradients by name)."""
    engine = fused_engine(network, split_in_two(network), adapters.dropout_keys, SUPERVISED)
    plan = make_schedule(examples, batch_size, batch_size * accumulation, seed=0)
    batches = plan.batches_of(0)
    return step_of(engine, batches, seed)


def step_of(engine: Any, batches: list[Any], seed: int) -> tuple[float, dict[str, mx.array]]:
    """The weighted mean loss of a step, and its gradients by name."""
    weight = sum(batch.weight for batch in batches)
    loss, total = 0.0, None
    for batch in batches:
        part, grads = engine.gradients(batch, 1 / weight, seed)
        loss += part.loss.item() / weight
        total = grads if total is None else tree_map(mx.add, total, grads)
    return loss, dict(tree_flatten(total))


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    """The norm of the difference, relative to the norm."""
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (ours, theirs))
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12))


def assert_gradients(
    found: dict[str, mx.array], expected: dict[str, mx.array], most: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert relative_error(grad, expected[name]) < most, name


def assert_step(found: Any, loss: float, grads: dict[str, mx.array], most: float = 1e-5) -> None:
    """found: a loss and gradients, and perhaps the loss without gradients."""
    found_loss, found_grads, *alone = found
    assert [found_loss, *alone] == pytest.approx([loss] * (1 + len(alone)), rel=1e-5)
    assert_gradients(found_grads, grads, most)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "dropout"), [(2, 3, 0.0), (2, 3, 0.3), (1, 5, 0.3)]
)
def test_splitting_into_micro_batches_changes_nothing(
    tmp_path, tiny_model, batch_size, accumulation, dropout
):
    network, tokenizer, adapters = load(tiny_model, lora_dropout=dropout)
    examples = encode(tokenizer, tmp_path)
    whole = engine_loss(network, adapters, examples)
    assert_step(engine_loss(network, adapters, examples, batch_size, accumulation), *whole)


def test_dropout_depends_only_on_the_step_seed(tmp_path, tiny_model):
    network, tokenizer, adapters = load(tiny_model, lora_dropout=0.3)
    examples = encode(tokenizer, tmp_path)
    first, _ = engine_loss(network, adapters, examples, seed=1)
    other, _ = engine_loss(network, adapters, examples, seed=2)
    mx.random.seed(99)
    again, _ = engine_loss(network, adapters, examples, seed=1)
    assert first == again
    assert first != other


def test_validation_uses_no_dropout(tmp_path, tiny_model):
    network, tokenizer, adapters = load(tiny_model, lora_dropout=0.5)
    examples = encode(tokenizer, tmp_path)
    expected = plain_loss(network, examples).item()
    engine = fused_engine(network, split_in_two(network), adapters.dropout_keys, SUPERVISED)
    plan = make_schedule(examples, 5, 5, seed=0)
    (batch,) = plan.batches_of(0)
    engine.gradients(batch, 1.0, 7)  # must not leave dropout keys behind
    assert engine.loss(batch).loss.item() / batch.weight == pytest.approx(expected, rel=1e-5)


def test_head_receives_only_trained_positions(tmp_path, tiny_model):
    network, tokenizer, adapters = load(tiny_model)
    examples = encode(tokenizer, tmp_path)
    split = split_in_two(network)
    seen = []

    def head(hidden: mx.array) -> mx.array:
        seen.append(hidden.shape)
        return split.head(hidden)

    engine = fused_engine(network, Split(split.trunk, head), adapters.dropout_keys, SUPERVISED)
    plan = make_schedule(examples, 5, 5, seed=0)
    (batch,) = plan.batches_of(0)
    engine.loss(batch)
    positions = sum(int(np.prod(shape[:-1])) for shape in seen) - 1  # one for the vocabulary size
    assert batch.trained_tokens <= positions < 0.6 * batch.tokens.size
