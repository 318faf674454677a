"""Base and adapter get the same numbers under every plan and batch size."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import calls_of, chat, chat_prompt, events_of, load_base, make_model, write_rows
from tests.evaluation.conftest import ROWS, carry_out, compared, trained_run
from your_ai.config import TrainConfig
from your_ai.engine.build import build_engine
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.errors import RunError, UserError
from your_ai.evaluation import compare as evaluation
from your_ai.evaluation.compare import Request, compare
from your_ai.evaluation.custom_metric import Metric
from your_ai.evaluation.dataset_scores import scored
from your_ai.evaluation.rows import choose_file
from your_ai.generation import generate, samples
from your_ai.memory.budget import budget_of, budget_of_evaluation, limit_of, process_here
from your_ai.memory.facts import facts_of
from your_ai.memory.plan import options
from your_ai.memory.workload import DataSizes, workload_of
from your_ai.modelfiles.quantized_copies import place_of_copy
from your_ai.nets import model
from your_ai.nets.saved_adapter import open_trained, put_adapter, training_of
from your_ai.run import events
from your_ai.run.folder import RunFolder


@pytest.fixture(scope="module")
def expected(tmp_path_factory, run):
    """Measured one row at a time with the fused engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("YOUR_AI_HOME", str(run.parent.parent / "home"))
        return compared(run, batch_size=1, engine="fused")


def test_batch_size_is_capped_at_the_number_of_rows(run, monkeypatch):
    """The time and memory of the search for a plan grow with the batch size."""
    calls = calls_of(monkeypatch, evaluation, "budget_of_evaluation")
    compared(run, batch_size=10**6)
    assert [call.given[4] for call in calls] == [len(ROWS)]


@pytest.mark.parametrize(
    ("engine", "batch_size"), [("fused", 2), ("fused", 5), ("staged", len(ROWS)), ("streamed", 5)]
)
def test_numbers_depend_on_neither_batch_size_nor_plan(run, expected, engine, batch_size):
    found = compared(run, batch_size=batch_size, engine=engine)
    assert found.plan.startswith(engine)
    for ours, theirs in ((found.base, expected.base), (found.adapter, expected.adapter)):
        assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
        assert np.array_equal(ours.exact, theirs.exact)
    assert found.adapter.exact.tolist() == [True, *[False] * 6, True]


def plain(base, examples, adapter=None):
    """Losses of a model without any adapter layers, or with the adapter put on directly."""
    network, _ = load_base(base, mx.float32)
    if adapter is not None:
        put_adapter(network, adapter)
    dequantize_on_the_cpu(network)
    engine = build_engine(network, model.DropoutKeys([None]), "fused").engine
    return carry_out(scored(engine, examples, lambda _: 2)).losses


@pytest.mark.parametrize("dora", [False, True])
def test_base_losses_equal_the_model_without_adapter_bit_for_bit(tmp_path, tiny_model, dora):
    run = trained_run(tmp_path, tiny_model, use_dora=dora, lora_dropout=0.0 if dora else 0.1,
                      max_steps=10)  # fmt: skip
    found = compared(run, engine="fused")
    examples, trained = found.rows.trained.examples, open_trained(str(run))
    assert np.array_equal(found.base.losses, plain(trained.base, examples))
    assert np.array_equal(found.adapter.losses, plain(trained.base, examples, trained.adapter))
    assert not np.allclose(found.base.losses, found.adapter.losses, rtol=0.01)


def test_mean_loss_equals_the_validation_loss_of_training(run):
    """The rows equal valid.jsonl, so the weighted mean is the one of the last validation."""
    found = compared(run)
    tokens, weights = found.rows.trained_tokens, found.rows.weights
    mean = (weights * found.adapter.losses).sum() / (weights * tokens).sum()
    validation = events_of(RunFolder(run), events.Validation)[-1]
    assert mean == pytest.approx(validation.loss, rel=1e-6)
    assert tokens.sum() == validation.trained_tokens


def test_a_quantized_run_is_measured_on_its_quantized_copy(tmp_path):
    folder = make_model(tmp_path / "m", bits=None)
    run = trained_run(tmp_path, folder, quantize=4, max_steps=2)
    found = compared(run)
    expected = plain(place_of_copy(folder, 4), found.rows.trained.examples)
    assert np.array_equal(found.base.losses, expected)


def test_the_metric_gets_the_answers_of_base_and_adapter(run, tmp_path):
    """Answers are generated as for a user's prompt, and scored in the order of the rows."""
    rows = [chat("Question 1 please", "Answer 1"), {"text": "asks nothing"}, chat("b", "two")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    given = []

    def score(answer, expected, row):
        given.append((answer, expected, row))
        return len(given)

    found = compared(run, path, metric=Metric("m:score", score), max_tokens=5)
    assert [(e, r) for _, e, r in given] == 2 * [("Answer 1", rows[0]), ("two", rows[2])]
    assert found.base.scores[[0, 2]].tolist() == [1, 2]
    assert found.adapter.scores[[0, 2]].tolist() == [3, 4]
    assert np.isnan(found.base.scores[1])
    answers = [found.base.answers[0], found.base.answers[2], *found.adapter.answers.values()]
    assert [answer for answer, *_ in given] == answers
    for adapted, measured in ((False, found.base), (True, found.adapter)):
        alone = {place: answer_alone(run, rows[place], adapted) for place in (0, 2)}
        assert {place: measured.answers[place] for place in alone} == alone


def answer_alone(run, row, adapted) -> str:
    """The answer of at most 5 tokens to what a row asks."""
    network, tokenizer = generate.load_run(open_trained(str(run)), adapted)
    asked = row["messages"][:1]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return generate.answer(network, tokenizer, text, 5)


@pytest.mark.parametrize(("engine", "dora"), [("fused", True), ("streamed", False)])
def test_chosen_rows_are_answered_without_a_metric(tmp_path, tiny_model, engine, dora):
    """The base's answers are those of the model alone; rows that ask nothing are left out."""
    run = trained_run(tmp_path, tiny_model, use_dora=dora, max_steps=20)
    rows = [chat("Question 1 please", "Answer 1"), {"text": "asks nothing"}, chat("b", "two")]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    found = compared(run, path, to_show=lambda found: [2, 1], max_tokens=5, engine=engine)
    assert found.adapter.scores is None
    for adapted, measured in ((False, found.base), (True, found.adapter)):
        assert measured.answers == {2: answer_alone(run, rows[2], adapted)}
    assert found.base.answers != found.adapter.answers


def test_answers_that_are_only_shown_leave_the_plan_as_it_is(run):
    shown = compared(run, to_show=lambda found: [0])
    assert set(shown.adapter.answers) == {0}
    assert shown.plan == compared(run).plan


@pytest.mark.parametrize("error", [UserError, RunError])
def test_answers_that_cannot_be_had_are_named_and_lose_nothing(run, monkeypatch, error):
    def ended(*arguments, **more):
        raise error("too much")

    monkeypatch.setattr(evaluation, "sampled", ended)
    found = compared(run, to_show=lambda found: [0])
    assert found.adapter.answers is None
    assert len(found.adapter.losses) == len(ROWS)
    assert "no answers to the worst rows are shown: too much" in found.notes


def test_answers_that_do_not_fit_are_left_out_and_named(run, monkeypatch):
    budget = evaluation.budget_of_evaluation

    def without_answers(*arguments, answers=None, **more):
        if answers is not None:
            raise UserError("too much")
        return budget(*arguments, **more)

    monkeypatch.setattr(evaluation, "budget_of_evaluation", without_answers)
    found = compared(run, to_show=lambda found: [0])
    assert found.adapter.answers is None
    assert "no answers to the worst rows are shown: too much" in found.notes


@pytest.fixture(scope="module")
def answers_alone() -> dict[bool, list[str]]:
    """What `answers_of` found, by whether the adapter was used."""
    return {}


@pytest.mark.parametrize(("engine", "wave"), [("fused", 1), ("staged", 3), ("streamed", 8)])
def test_answers_depend_on_neither_wave_nor_plan(
    run, answers_alone, tmp_path, engine, wave, monkeypatch
):
    """Each has its own limit: twice the tokens of the expected answer, and some more."""
    monkeypatch.setattr("your_ai.generation.generate.ANSWER_TOKENS", 5)
    monkeypatch.setattr("your_ai.memory.plan.wave_sizes", lambda rows: [[wave]])
    rows = [chat(f"Question {n} " + "please " * n, "Answer " * (n % 3 + 1)) for n in range(8)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    calls = calls_of(monkeypatch, samples, "complete")
    found = compared(run, path, metric=Metric("m:f", lambda *_: 1), engine=engine)
    assert [len(call.given[1]) for call in calls] == 2 * {1: [1] * 8, 3: [3, 3, 2], 8: [8]}[wave]
    assert found.plan.endswith(f"{wave} completion{'s' * (wave > 1)} at a time")
    for adapted, measured in ((False, found.base), (True, found.adapter)):
        if adapted not in answers_alone:
            answers_alone[adapted] = answers_of(run, rows, adapted)
        assert [measured.answers[place] for place in range(8)] == answers_alone[adapted]


def answers_of(run, rows, adapted) -> list[str]:
    """The answers to the rows, each generated alone."""
    network, tokenizer = generate.load_run(open_trained(str(run)), adapted)
    found = []
    for row in rows:
        asked, expected = (message["content"] for message in row["messages"])
        limit = 2 * len(tokenizer.encode(expected)) + 5
        tokens = chat_prompt(tokenizer, asked)
        responses = generate.respond(
            network, tokenizer, tokens, generate.Sampling(max_tokens=limit)
        )
        found.append("".join(response.text for response in responses).strip())
    return found


def test_a_row_that_the_metric_refuses_ends_it_at_once(run, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [chat(f"Question {n}", "two") for n in range(4)])
    scored = []

    def score(answer, expected, row):
        scored.append(row)
        return 1 if len(scored) < 2 else "bad"

    with pytest.raises(UserError, match=r"rows\.jsonl:2: --metric m:f returned"):
        compared(run, path, metric=Metric("m:f", score), max_tokens=5)


def test_a_metric_needs_rows_that_ask_for_an_answer(run, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "asks nothing"}])
    with pytest.raises(UserError, match="no row asks for an answer; --metric needs rows"):
        compared(run, path, metric=Metric("m:f", lambda *_: 1))


def test_an_adapter_with_wrong_shapes_is_refused_before_measuring(run, tmp_path):
    """An imported adapter may not name its base, so the shapes are the only check."""
    other = make_model(tmp_path / "other", hidden_size=128)
    trained = replace(open_trained(str(run)), base=other)
    steps = compare(trained, choose_file(None, trained.config), Request(batch_size=2))
    doing = []
    with pytest.raises(UserError, match="does not fit the model"):
        doing += (step.doing for step in steps)
    assert not [text for text in doing if text.startswith("base")]


def test_evaluation_fits_into_a_limit_too_small_for_training(run):
    """The chosen plan also fits into the limit."""
    found = open_trained(str(run))
    config = found.config
    lengths = compared(run).rows.trained.lengths
    training = training_of(found.adapter, config, 3)
    args = (training, found.base, mx.float32, lengths, 2)
    every = options(budget_of_evaluation(*args, limit_of(None)).workload)
    least = min(option.needed_bytes for option in every)
    limit_gb = (least + 1) / 1e9
    data = DataSizes(lengths=tuple(lengths))
    workload = workload_of(config, facts_of(found.base, 4), data, process_here())
    with pytest.raises(UserError, match="nothing fits into"):
        budget_of(config, workload, mx.float32, limit_of(limit_gb))
    assert compared(run, max_memory_gb=limit_gb).plan.startswith("streamed, micro-batches of 1 x ")
    with pytest.raises(UserError, match="evaluating does not fit into"):
        compared(run, max_memory_gb=(least - 1) / 1e9)


def test_progress_reports_the_phase_and_the_count(run):
    found = open_trained(str(run))
    steps = list(compare(found, choose_file(None, found.config), Request(batch_size=3)))
    assert steps[0].doing == "reading test.jsonl"
    for name in ("base: losses", "adapter: losses"):
        done = [step.done for step in steps if step.doing == name]
        assert done == [3, 6, 8]
    assert {step.total for step in steps if step.done} == {8}


def test_a_base_that_a_run_did_not_start_from_is_said():
    config = TrainConfig(from_adapter="other")
    assert evaluation.start_text(config, None).startswith("base is the model without an adapter;")
    measured = evaluation.RowMeasures(np.zeros(1), np.zeros(1, bool))
    assert evaluation.start_text(config, measured) == ""
    assert evaluation.start_text(TrainConfig(), None) == ""
