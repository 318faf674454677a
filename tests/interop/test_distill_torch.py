"""Divergences and their gradients, against the loss of TRL's GKD trainer on the same tensors."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
import torch

from tests.nets.test_divergence import S, V, dense_of, error_of, two_sides
from your_ai.config.divergences import divergence_of
from your_ai.nets import losses
from your_ai.nets.head import TargetHead
from your_ai.objectives.distill import Distillation
from your_ai.objectives.objective import Targets

pytest.importorskip("trl", reason="needs trl: pip install -e '.[dev,interop]'")
from trl.experimental.gkd import GKDTrainer

pytestmark = pytest.mark.interop
TOLERANCE = 1e-5
BETAS = {"forward": 0, "reverse": 1, "jsd:0.1": 0.1, "jsd:0.5": 0.5, "jsd:0.9": 0.9}


def in_torch(array: mx.array) -> torch.Tensor:
    with mx.stream(mx.cpu):
        return torch.tensor(np.array(array.astype(mx.float64)))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("heads", ["biases", "4 bits", "padded teacher"])
@pytest.mark.parametrize("name", BETAS)
def test_loss_and_gradient_are_those_of_trl(name, heads, temperature):
    """TRL does not multiply the loss by the square of the temperature. Its mean is over the tokens
    that have labels; ours are the sums of those with a weight."""
    student, teacher = two_sides(heads, "wider")
    weights = np.ones(S, np.float32)
    weights[[3, 7]] = 0

    objective = Distillation(divergence=divergence_of(name), temperature=temperature)
    head = student.head(64, teacher=TargetHead(teacher.head(64), V))
    zeros = mx.zeros(S, mx.int32)
    columns = zeros, zeros, mx.array(weights), zeros, {}, teacher.inputs
    targets, factor = Targets(*columns), mx.array(1.0)
    ours, grads, _ = losses.loss_and_gradient(student.inputs, targets, objective, factor, head)

    inputs = in_torch(student.inputs).requires_grad_()
    logits = []
    for states, made in ((inputs, student), (in_torch(teacher.inputs), teacher)):
        weight, bias = map(in_torch, dense_of(made.layer))
        logits.append((states @ weight.T + bias)[None, :, :V])
    labels = torch.tensor(np.where(weights, 0, -100))[None]
    mean = GKDTrainer.generalized_jsd_loss(
        *logits, labels=labels, beta=BETAS[name], temperature=temperature
    )
    theirs = mean * (temperature**2 * int(weights.sum()))
    theirs.backward()
    assert ours.loss.item() == pytest.approx(theirs.item(), rel=TOLERANCE)
    assert error_of(grads, inputs.grad.numpy()) < TOLERANCE
    assert not grads[3].any()
