"""Rewards of preference runs: those of validation, under every plan, and for every form of rows."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import chat, events_of, shown, train, working_in, write_rows
from tests.evaluation.conftest import SETTINGS, compared
from tests.objectives.test_pairs import make
from your_ai.config import TrainConfig, build
from your_ai.config.requests import EvaluateRequest
from your_ai.data.encode import Encoder
from your_ai.errors import UserError
from your_ai.evaluation import show
from your_ai.evaluation.compare import Comparison, RowMeasures
from your_ai.evaluation.custom_metric import Metric
from your_ai.evaluation.rewards import judge, objective_name, rewarding, rewards_of
from your_ai.evaluation.rows import load_rows
from your_ai.evaluation.summary import evaluation_notes, summarize
from your_ai.nets.saved_adapter import Adapter, Trained, open_trained
from your_ai.objectives.chosen import needs_reference, objective_of
from your_ai.objectives.dpo import DPO
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.session import new_run
from your_ai.training.process import train_until_done

PAIRS = [
    {"prompt": "Which?", "chosen": "This one, please", "rejected": "That"},
    {"prompt": "Why " * 9, "chosen": "Because", "rejected": "No idea " * 5, "weight": 2},
    {"prompt": "Ignored", "chosen": "a b", "rejected": "c", "weight": 0},
    {"prompt": "Where?", "chosen": "Here " * 3, "rejected": "There"},
    {"prompt": "When?", "chosen": "Now", "rejected": "Later today"},
]
LABELS = [
    {"prompt": f"Which {i}?", "completion": "word " * (1 + i), "label": i % 3 > 0} for i in range(7)
]
OBJECTIVES = [
    TrainConfig(objective="dpo", beta=0.3), TrainConfig(objective="dpo", reference="none"),
    TrainConfig(objective="ipo"), TrainConfig(objective="simpo"),
    TrainConfig(objective="orpo", orpo_lambda=0.7),
]  # fmt: skip
SUMMARY = EvaluateRequest("r", resamples=50, confidence=0.9, seed=1, worst=2)
COMPARED = (
    *("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected"),
    *("logps/chosen", "logps/rejected"),
)


def preference_run(root: Path, model: Path, rows: list[dict], **settings) -> Path:
    """Train a run on the rows, and validate it on them at its end."""
    for name in ("train", "valid", "test"):
        write_rows(root / "data" / f"{name}.jsonl", rows)
    first = {"model": str(model), "data": str(root / "data"), "max_steps": 4, "keep_best": False}
    with working_in(root):
        config = build({**SETTINGS, **first, **settings}, "test")
        return root / train(config).path


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def dpo(root, tiny_model) -> Path:
    return preference_run(root, tiny_model, PAIRS, run="dpo", objective="dpo")


@pytest.fixture(scope="module")
def expected(root, dpo) -> Comparison:
    """Measured one text at a time with the fused engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOUR_AI_HOME", str(root / "home"))
        return compared(dpo, batch_size=1, engine="fused")


def adapter_values(run: Path | Trained, found: Comparison) -> dict[str, float]:
    trained = open_trained(str(run)) if isinstance(run, Path) else run
    measures = summarize(trained, found, SUMMARY)["measures"]
    return {name: systems["adapter"]["value"] for name, systems in measures.items()}


def check_against_validation(run: Path, found: Comparison) -> dict:
    """The summary of a run, whose adapter has the metrics of the run's last validation."""
    values = adapter_values(run, found)
    metrics = events_of(RunFolder(run), events.Validation)[-1].metrics
    for name in set(COMPARED) & metrics.keys() & values.keys():
        assert values[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name
    return summarize(open_trained(str(run)), found, SUMMARY)


def test_rewards_of_dpo_are_those_of_validation(dpo, expected):
    summary = check_against_validation(dpo, expected)
    assert summary["preferences"] == {
        "objective": "dpo", "reference": "base", "pairs": 5, "good": 0, "bad": 0,
    }  # fmt: skip
    assert abs(summary["measures"]["rewards/margins"]["adapter"]["value"]) > 0.01


@pytest.mark.parametrize("objective", ["grpo", "soft"])
def test_a_run_on_rewards_of_completions_has_no_rewards_of_pairs(dpo, expected, objective):
    """Pairs say only which answer is likelier: rewards of DPO are not what the run learned."""
    run = open_trained(str(dpo))
    run = dataclasses.replace(run, config=TrainConfig(objective=objective, kl_beta=0.1))
    found = summarize(run, expected, SUMMARY)
    assert not [name for name in found["measures"] if name.startswith("rewards/")]
    likelier = summarize(open_trained(str(dpo)), expected, SUMMARY)["measures"]["logps/accuracies"]
    assert found["measures"]["logps/accuracies"] == likelier
    assert (found["preferences"]["objective"], found["preferences"]["reference"]) == ("", None)
    assert "adapter_margin" not in found["worst"][0]
    report = shown(show.evaluation_report(found, "r"))
    assert "Rewards are" not in report
    assert "Logp accuracy: pairs whose chosen answer is more likely." in report


def test_rewards_of_kto_are_those_of_validation(tmp_path, tiny_model, monkeypatch):
    run = preference_run(tmp_path, tiny_model, LABELS, run="kto", objective="kto", max_steps=2)
    monkeypatch.setenv("YOUR_AI_HOME", str(tmp_path / "home"))
    found = compared(run)
    summary = check_against_validation(run, found)
    assert "rewards/margins" in summary["measures"]
    assert found.leaked == 7
    about = summary["preferences"]
    assert (about["objective"], about["reference"], about["good"]) == ("kto", "base", 4)


@pytest.mark.parametrize("config", OBJECTIVES, ids=lambda config: config.objective)
def test_rewards_are_those_of_the_objective_in_training(config):
    scores, targets, *_ = make([(3, 2), (1, 4), (2, 2)], [1.0, 1.0, 2.0], 7, 2)
    if not needs_reference(config):
        targets = targets._replace(columns={})
    metrics = objective_of(config).weigh(scores, targets).metrics
    columns = [scores.current, scores.current * 0 + 1]
    columns += [targets.columns["reference"]] if needs_reference(config) else []
    sums = [by_text(column, targets) for column in columns]
    logps, tokens, reference = (*sums, None)[:3]
    found = rewards_of(rewarding(config), logps, reference, tokens)
    for name, values in zip(("chosen", "rejected"), found, strict=True):
        expected = metrics[f"rewards/{name}"][0].item() / 3
        assert values.mean() == pytest.approx(expected, rel=1e-4), name


def by_text(values, targets) -> np.ndarray:
    """(2, 3): the sums of the values of the targets of both answers of three pairs."""
    sums = targets.sum_by_text(mx.where(targets.is_real, values, 0))
    return np.array(sums)[:6].reshape(3, 2).T.astype(np.float64)


def test_without_a_reference_rewards_are_log_probabilities(dpo, expected):
    run = open_trained(str(dpo))
    run = replace(run, config=replace(run.config, reference="none", beta=0.5))
    values = adapter_values(run, expected)
    assert values["rewards/chosen"] == pytest.approx(0.5 * values["logps/chosen"])
    assert values["rewards/accuracies"] == values["logps/accuracies"]


@pytest.fixture
def later(root, dpo, monkeypatch) -> Path:
    """A run that starts from the adapter of the other run."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("YOUR_AI_HOME", str(root / "home"))
    if not (root / "runs" / "later").exists():
        names = ("batch_size", "learning_rate", "supervise", "eval_every")
        settings = {name: SETTINGS[name] for name in names} | {"max_steps": 1, "keep_best": False}
        data = {"from_adapter": str(dpo), "data": str(root / "data"), "run": "later"}
        config = new_run.resolve({**settings, **data, "objective": "dpo"}, None)
        train_until_done(new_run.create(config), config, Stop())
    return root / "runs" / "later"


def test_rewards_are_relative_to_the_adapter_that_a_run_starts_from(later, dpo, expected):
    summary = check_against_validation(later, compared(later))
    assert summary["preferences"]["reference"] == "start"
    accuracies = adapter_values(dpo, expected)["logps/accuracies"]
    assert summary["preferences"]["start"] == {"logps/accuracies": accuracies}
    base = summary["measures"]["rewards/margins"]["base"]["value"]
    reversed_margin = -adapter_values(dpo, expected)["rewards/margins"]
    assert base == pytest.approx(reversed_margin, rel=1e-4)


def test_a_missing_adapter_to_compare_with_is_refused_only_for_preferences(later, tmp_path):
    folder = shutil.copytree(later, tmp_path / "runs" / "copy")
    (folder / "start" / checkpoint.ADAPTERS).unlink()
    with pytest.raises(UserError, match="rewards of this run compare with this adapter: restore"):
        compared(folder)
    answers = write_rows(tmp_path / "answers.jsonl", [chat("a", "b")])
    assert compared(folder, answers).start is None


@pytest.mark.parametrize(("engine", "batch_size"), [("staged", 9), ("streamed", 3)])
def test_rewards_depend_on_neither_batch_size_nor_plan(dpo, expected, engine, batch_size):
    found = compared(dpo, batch_size=batch_size, engine=engine)
    assert found.plan.startswith(engine)
    for ours, theirs in ((found.base, expected.base), (found.adapter, expected.adapter)):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert ours.bad_losses == pytest.approx(theirs.bad_losses, rel=1e-5)
        assert np.array_equal(ours.exact, theirs.exact)


def test_losses_of_the_chosen_answers_are_those_of_answers_alone(dpo, expected, tmp_path):
    keys = {"prompt": "prompt", "chosen": "completion", "weight": "weight"}
    rows = [{new: row[old] for old, new in keys.items() if old in row} for row in PAIRS]
    found = compared(dpo, write_rows(tmp_path / "answers.jsonl", rows))
    assert found.adapter.losses == pytest.approx(expected.adapter.losses, rel=1e-5)
    assert found.adapter.bad_losses is None
    summaries = [summarize(open_trained(str(dpo)), each, SUMMARY) for each in (found, expected)]
    assert "preferences" not in summaries[0]
    assert set(summaries[0]["measures"]) == {"loss", "perplexity", "exact_match"}
    assert [s["trained_tokens"] for s in summaries] == 2 * [found.rows.trained_tokens.sum()]


def test_pairs_of_the_training_data_are_counted_by_their_chosen_answers(dpo, tmp_path):
    other = {"prompt": "Which?", "chosen": "This one, please", "rejected": "None"}
    swapped = {"prompt": "New?", "chosen": "Yes", "rejected": "No"}
    found = compared(dpo, write_rows(tmp_path / "rows.jsonl", [PAIRS[3], other, swapped]))
    assert found.leaked == 2


def test_a_metric_expects_the_chosen_answer(dpo, tmp_path):
    given = []
    path = write_rows(tmp_path / "rows.jsonl", [PAIRS[0], LABELS[0], LABELS[1]])
    metric = Metric("m:f", lambda answer, expected, row: given.append((expected, row)) or 1)
    compared(dpo, path, metric=metric, max_tokens=2)
    assert given == 2 * [("This one, please", PAIRS[0]), (LABELS[1]["completion"], LABELS[1])]


# On made-up losses


def measured_rows(folder: Path, tokenizer, rows: list[dict], **settings):
    """The rows, and a function that gives RowMeasures the log-probabilities of their answers."""
    config = TrainConfig(objective="dpo", **settings)
    encoder = Encoder(tokenizer, kind="any")
    found = load_rows(write_rows(folder / "rows.jsonl", rows), config, encoder, "t")

    def measured(good: list[float], bad: list[float]) -> RowMeasures:
        return RowMeasures(-np.array(good), np.zeros(len(found), bool), bad_losses=-np.array(bad))

    return found, measured


def summary_of(rows, base, adapter, folder: Path, **settings) -> dict:
    run = RunFolder(folder / "runs" / "r")
    config = TrainConfig(objective="dpo", **settings)
    trained = Trained(run, config, Adapter(run.adapter, {}, {"step": 1}), folder)
    found = Comparison(rows, base, adapter, None, 0, "fused", ())
    return summarize(trained, found, SUMMARY)


@pytest.fixture
def pairs(own_folder, demo_tokenizer) -> dict:
    """The summary of PAIRS with these log-probabilities; the third pair has no weight."""
    rows, measured = measured_rows(own_folder, demo_tokenizer, PAIRS)
    base = measured([-9, -9, -9, -9, -9], [-8, -10, -9, -9, -12])
    adapter = measured([-9, -8, 0, -11, -8], [-8, -10, -99, -10, -13])
    return summary_of(rows, base, adapter, own_folder, beta=0.5)


def test_accuracies_and_margins_are_unweighted_means_over_pairs_with_a_weight(pairs):
    values = {name: found["adapter"]["value"] for name, found in pairs["measures"].items()}
    assert values["rewards/accuracies"] == (0.5 + 1 + 0 + 1) / 4
    assert values["rewards/margins"] == pytest.approx((0 + 0.5 - 0.5 + 1) / 4)
    assert values["rewards/chosen"] == pytest.approx((0 + 0.5 - 1 + 0.5) / 4)
    assert values["rewards/rejected"] == pytest.approx((0 + 0 - 0.5 - 0.5) / 4)
    assert values["logps/accuracies"] == 2 / 4
    assert pairs["measures"]["logps/accuracies"]["base"]["value"] == (0 + 1 + 0.5 + 1) / 4


def test_a_base_that_is_its_own_reference_has_only_ties(pairs):
    accuracy = pairs["measures"]["rewards/accuracies"]
    assert accuracy["base"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    low, high = (accuracy["adapter"][bound] for bound in ("low", "high"))
    assert 0 < low < accuracy["adapter"]["value"] < high < 1
    assert accuracy["difference"]["low"] == low - 0.5
    assert accuracy["difference"]["high"] == high - 0.5
    assert set(pairs["measures"]["rewards/margins"]["base"].values()) == {0}


def test_the_pairs_with_the_lowest_margins_are_listed_with_both_answers(pairs):
    first, second, *_ = pairs["worst"]
    assert (first["where"], first["by"]) == ("rows.jsonl:4", ["margin", "change"])
    assert (first["base_margin"], first["adapter_margin"]) == (0, -0.5)
    assert (first["expected"], first["rejected"]) == ("Here Here Here", "There")
    assert second["where"] == "rows.jsonl:1"


def test_a_pair_that_is_not_finite_makes_the_means_unknown(own_folder, demo_tokenizer):
    rows, measured = measured_rows(own_folder, demo_tokenizer, PAIRS[:2])
    base, adapter = measured([-9, -9], [-8, -8]), measured([-9, -9], [-8, -np.inf])
    summary = summary_of(rows, base, adapter, own_folder)
    for name in ("rewards/accuracies", "rewards/margins", "logps/accuracies"):
        assert summary["measures"][name]["adapter"]["value"] is None
    assert summary["measures"]["loss"]["adapter"]["value"] is not None
    (text,) = evaluation_notes(Comparison(rows, base, adapter, None, 0, "fused", ()))
    assert "adapter: 1 of 2 rows has a loss that is not finite, the first is rows.jsonl:2" in text


@pytest.fixture
def labels(own_folder, demo_tokenizer) -> dict:
    rows, measured = measured_rows(own_folder, demo_tokenizer, LABELS)
    zeros = [0.0] * 7
    base = measured(zeros, zeros)
    adapter = measured([0, 3, -1, 0, 2, 1, 0], [1, 0, 0, -2, 0, 0, 2])
    return summary_of(rows, base, adapter, own_folder, beta=2.0)


def test_labels_have_mean_rewards_and_how_well_they_rank(labels):
    measures = labels["measures"]
    values = {name: found["adapter"]["value"] for name, found in measures.items()}
    good, bad = np.array([3, -1, 2, 1]), np.array([1, -2, 2])
    assert values["rewards/chosen"] == pytest.approx(2 * good.mean())
    assert values["rewards/rejected"] == pytest.approx(2 * bad.mean())
    assert values["rewards/margins"] == pytest.approx(2 * (good.mean() - bad.mean()))
    wins = (good[:, None] > bad) + 0.5 * (good[:, None] == bad)
    assert values["rewards/auc"] == pytest.approx(wins.mean())
    assert measures["rewards/auc"]["base"] == {"value": 0.5, "low": 0.5, "high": 0.5}
    assert not {"rewards/accuracies", "logps/accuracies"} & measures.keys()


def test_only_good_answers_have_a_loss(labels):
    assert labels["rows"] == 7
    assert (labels["preferences"]["good"], labels["preferences"]["bad"]) == (4, 3)
    assert labels["better"] + labels["worse"] + labels["equal"] == 4
    assert {row["where"] for row in labels["worst"]} <= {f"rows.jsonl:{n}" for n in (2, 3, 5, 6)}


def test_bad_answers_alone_have_a_reward_and_no_loss(own_folder, demo_tokenizer):
    rows, measured = measured_rows(own_folder, demo_tokenizer, [LABELS[0], LABELS[3]])
    summary = summary_of(rows, measured([0, 0], [-3, -3]), measured([0, 0], [-4, -6]), own_folder)
    assert set(summary["measures"]) == {"rewards/rejected", "logps/rejected"}
    assert summary["measures"]["rewards/rejected"]["adapter"]["value"] == pytest.approx(-0.2)
    assert (summary["trained_tokens"], summary["worst"]) == (0, [])


def test_pairs_labels_and_answers_may_be_mixed(own_folder, demo_tokenizer):
    mixed = [PAIRS[0], LABELS[0], LABELS[1], chat("a", "b"), {"text": "a text"}]
    rows, measured = measured_rows(own_folder, demo_tokenizer, mixed)
    assert rows.is_pair.tolist() == [True, False, False, False, False]
    assert rows.is_labeled.tolist() == [False, True, True, False, False]
    assert rows.asks.tolist() == [True, False, True, True, False]
    base = measured([0] * 5, [0] * 5)
    summary = summary_of(rows, base, measured([1, 0, 2, 9, 9], [0, 1, 0, 0, 0]), own_folder)
    values = {name: found["adapter"]["value"] for name, found in summary["measures"].items()}
    assert values["rewards/accuracies"] == values["rewards/auc"] == 1
    assert values["rewards/chosen"] == pytest.approx(0.1 * (1 + 2) / 2)
    assert summary["better"] == 4


def test_a_pair_that_has_no_room_for_an_answer_is_left_out(own_folder, demo_tokenizer):
    long = {"prompt": "word " * 60, "chosen": "a", "rejected": "b"}
    settings = {"max_seq_length": 48, "too_long": "truncate"}
    found, _ = measured_rows(own_folder, demo_tokenizer, [PAIRS[0], long, LABELS[1]], **settings)
    assert found.lines.tolist() == [1, 3]
    assert found.is_pair.tolist() == [True, False]
    assert found.trained.is_bad.tolist() == [False, True, False]


def test_prompts_of_pairs_are_masked_by_every_encoder(own_folder, demo_tokenizer):
    path = write_rows(own_folder / "rows.jsonl", PAIRS)
    config = TrainConfig(objective="dpo")
    counts = [
        load_rows(path, config, Encoder(demo_tokenizer, mask, kind="any"), "t").trained_tokens
        for mask in (True, False)
    ]
    assert counts[0].tolist() == counts[1].tolist()


def test_rows_without_preferences_are_not_judged(own_folder, demo_tokenizer):
    rows, measured = measured_rows(own_folder, demo_tokenizer, [chat("a", "b")])
    same = measured([0], [0])
    found = Comparison(rows, same, same, None, 0, "fused", ())
    assert judge(TrainConfig(objective="dpo"), found) is None


def test_an_objective_that_is_not_over_pairs_has_the_rewards_of_dpo():
    assert rewarding(TrainConfig(objective="kto", beta=0.3)) == DPO(beta=0.3)


@pytest.mark.parametrize(
    ("objective", "name"), [("grpo", ""), ("soft", ""), ("sft", "dpo"), ("kto", "kto")]
)
def test_rewards_are_named_after_the_objective_that_gives_them(objective, name):
    assert objective_name(TrainConfig(objective=objective)) == name
