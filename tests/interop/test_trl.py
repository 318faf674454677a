"""Losses, derivatives and metrics of the objectives, against TRL's own on the same numbers.

TRL's code runs unchanged, without a model: its trainers are made without their initialization, and
their model returns log-probabilities from a table.

Shapes: n targets, R texts, T tokens of the longest answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import torch

from tests.objectives.test_pairs import make
from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.kto import KTO
from your_ai.objectives.objective import Totals
from your_ai.objectives.orpo import ORPO
from your_ai.objectives.simpo import SimPO

trl = pytest.importorskip("trl", reason="needs trl: pip install -e '.[dev,interop]'")
from trl.experimental.cpo import CPOTrainer  # noqa: E402
from trl.experimental.orpo import ORPOTrainer  # noqa: E402

pytestmark = pytest.mark.interop
TOLERANCE = 1e-5
RAGGED = [(3, 5), (1, 4), (6, 2), (2, 2)]  # tokens of both answers of each pair
EQUAL = [(3, 5), (3, 1), (3, 2)]
ONE = [(4, 3)]
LABELS = [True, False, True, True]  # of the first answers, for KTO


class Step(NamedTuple):
    """What a trainer computes from log-probabilities."""

    loss: float
    slopes: np.ndarray
    """(n,) d loss / d log-probability of each target."""
    metrics: dict[str, float]


class Answers(NamedTuple):
    """The answers of a step as TRL has them."""

    table: torch.Tensor
    """(R, T) float64 log-probabilities, 0 after the end of an answer."""
    mask: torch.Tensor
    """(R, T) int64, 1 at the tokens of an answer."""
    reference: torch.Tensor
    """(R,) float64 sums under the reference."""


# -- TRL's trainers


def trainer(kind: type, **settings: Any) -> Any:
    made = object.__new__(kind)
    same = lambda array: array  # noqa: E731
    vars(made).update(
        accelerator=SimpleNamespace(device="cpu", gather=same, gather_for_metrics=same),
        model=SimpleNamespace(training=True),
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    return made


def inputs_of(answers: Answers, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some texts, each with a prompt of one token, which is their row in the table."""
    prompt = torch.ones(len(rows), 1, dtype=torch.int64)
    mask = answers.mask[rows]
    ids = torch.cat([rows[:, None], torch.zeros_like(mask)], dim=1)
    attention = torch.cat([prompt, mask], dim=1)
    completion = torch.cat([0 * prompt, mask], dim=1)
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": completion}


def fused_head(answers: Answers, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
    """A model that returns log-probabilities and statistics of logits, as TRL's trainers want."""
    found = answers.table[input_ids[:, 0]]
    none = torch.zeros_like(found)
    return SimpleNamespace(log_probs=found, entropy=none, mean_logits=none, is_top1=none.bool())


def whole_head(answers: Answers, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
    """A model that returns logits of a vocabulary of two tokens; the first has the given score."""
    rows = input_ids[:, 0]
    score = torch.where(answers.mask[rows] == 1, answers.table[rows], -1.0)
    logits = torch.stack([score, torch.log(-torch.expm1(score))], dim=-1)
    return SimpleNamespace(logits=torch.cat([logits, logits[:, -1:]], dim=1))


def halves(answers: Answers) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of the first and of the second texts."""
    rows = torch.arange(len(answers.table))
    return rows[::2], rows[1::2]


def by_dpo(answers: Answers, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    options = {
        "label_smoothing": 0.0, "loss_weights": [1.0], "ld_alpha": None,
        "f_divergence_type": "reverse_kl", "use_weighting": False,
    }  # fmt: skip
    made = trainer(trl.DPOTrainer, **options | settings)
    chosen, rejected = halves(answers)
    inputs = {
        **inputs_of(answers, torch.cat([chosen, rejected])),
        "ref_chosen_logps": answers.reference[chosen],
        "ref_rejected_logps": answers.reference[rejected],
    }
    loss = made._compute_loss(partial(fused_head, answers), inputs, False)
    return loss, {name: values[0] for name, values in made._metrics["train"].items()}


def by_kto(answers: Answers, **settings: Any) -> tuple[torch.Tensor, dict[str, float]]:
    made = trainer(trl.KTOTrainer, loss_type="kto", calculate_KL=True, **settings)
    own, others = halves(answers)
    inputs = {
        **inputs_of(answers, own),
        **{f"KL_{name}": array for name, array in inputs_of(answers, others).items()},
        "label": torch.tensor(LABELS[: len(own)]),
        "ref_logps": answers.reference[own],
        "ref_KL_logps": answers.reference[others],
    }
    loss = made._compute_loss(partial(fused_head, answers), inputs, False)
    return loss, {name: values[0] for name, values in made._metrics["train"].items()}


def without_reference(
    kind: type, answers: Answers, **settings: Any
) -> tuple[torch.Tensor, dict[str, float]]:
    made = trainer(kind, pad_token_id=0, padding_value=0, **settings)
    batch = {}
    for name, rows in zip(("chosen", "rejected"), halves(answers), strict=True):
        inputs = inputs_of(answers, rows)
        labels = torch.where(inputs["completion_mask"] == 1, inputs["input_ids"], -100)
        batch |= {f"{name}_input_ids": inputs["input_ids"], f"{name}_labels": labels,
                  f"{name}_attention_mask": inputs["attention_mask"]}  # fmt: skip
    return made.get_batch_loss_metrics(partial(whole_head, answers), batch)


by_cpo = partial(without_reference, CPOTrainer, loss_type="simpo", alpha=0.0)
by_orpo = partial(without_reference, ORPOTrainer)


# -- the same step here and there


def here_and_there(objective: Any, theirs: Callable, lengths: list, seed: int) -> tuple[Step, Step]:
    scores, targets, texts, current, reference = make(lengths, [1.0] * len(lengths), seed, 2)
    labels = np.append(np.repeat(LABELS[: len(lengths)], 2)[texts], [False, False])
    targets = targets._replace(columns={**targets.columns, "labels": mx.array(labels)})
    weighed = objective.weigh(scores, targets)
    totals = Totals()
    totals.add(weighed.sums)
    ours = Step(
        weighed.loss.item() / len(lengths),
        -np.array(weighed.weights)[: len(texts)] / len(lengths),
        totals.means(),
    )

    at = texts, np.concatenate([np.arange(count) for pair in lengths for count in pair])
    shape = (2 * len(lengths), max(map(max, lengths)))
    table, mask = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.int64)
    table[at], mask[at] = torch.tensor(current), 1
    table.requires_grad_()
    sums = torch.tensor(np.bincount(texts, reference))
    loss, metrics = theirs(Answers(table, mask, sums))
    loss.backward()
    return ours, Step(loss.item(), table.grad[at].numpy(), metrics)


CASES = {
    "dpo": (DPO(beta=0.3), partial(by_dpo, beta=0.3, loss_types=["sigmoid"]), RAGGED),
    # TRL ignores the smoothing in its loss "sigmoid". For one pair, its loss "aot" is the same.
    "dpo-smoothed": (
        DPO(beta=0.3, label_smoothing=0.2),
        partial(by_dpo, beta=0.3, label_smoothing=0.2, loss_types=["aot"]),
        ONE,
    ),
    # TRL's cross-entropy is a mean over all tokens of a batch, and ours over pairs.
    "dpo-sft": (
        DPO(beta=0.3, sft_weight=0.7),
        partial(by_dpo, beta=0.3, loss_types=["sigmoid", "sft"], loss_weights=[1.0, 0.7]),
        EQUAL,
    ),
    "ipo": (IPO(beta=0.3), partial(by_dpo, beta=0.3, loss_types=["ipo"]), RAGGED),
    "simpo": (
        SimPO(beta=1.5, gamma=0.9, label_smoothing=0.1),
        partial(by_cpo, beta=1.5, simpo_gamma=0.9, label_smoothing=0.1, cpo_alpha=0.0),
        RAGGED,
    ),
    "simpo-sft": (
        SimPO(beta=1.5, sft_weight=0.7),
        partial(by_cpo, beta=1.5, simpo_gamma=0.5, label_smoothing=0.0, cpo_alpha=0.7),
        EQUAL,
    ),
    # TRL's cross-entropy includes the prompt, too. Here a prompt is one token, without a loss.
    "orpo": (ORPO(odds_weight=0.4), partial(by_orpo, beta=0.4), EQUAL),
    "kto": (
        KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.8),
        partial(by_kto, beta=0.3, desirable_weight=1.5, undesirable_weight=0.8),
        RAGGED,
    ),
}
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
LOGPS = ("logps/chosen", "logps/rejected")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_loss_and_derivatives_are_those_of_trl(name, seed):
    ours, theirs = here_and_there(*CASES[name], seed)
    assert ours.loss == pytest.approx(theirs.loss, rel=TOLERANCE)
    distance = np.linalg.norm(ours.slopes - theirs.slopes)
    assert distance < TOLERANCE * np.linalg.norm(theirs.slopes)


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        ("dpo", (*REWARDS, "rewards/accuracies", *LOGPS)),
        ("ipo", LOGPS),  # TRL's rewards are sums, though its loss compares means
        ("simpo", (*REWARDS, "rewards/accuracies")),  # and its logps are means
        ("orpo", (*REWARDS, "rewards/accuracies")),
        ("kto", (*REWARDS, *LOGPS, "kl")),
    ],
)
def test_metrics_are_those_of_trl(name, metrics):
    for seed in range(3):
        ours, theirs = here_and_there(*CASES[name], seed)
        for metric in metrics:
            expected = pytest.approx(theirs.metrics[metric], rel=TOLERANCE, abs=1e-6)
            assert ours.metrics[metric] == expected, metric
