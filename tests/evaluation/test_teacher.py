"""Evaluations that compare predictions with a teacher's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import (
    TINY,
    Killed,
    call,
    calls_of,
    chat,
    load_base,
    make_model,
    working_in,
    write_rows,
)
from tests.engine.test_tiles import cut
from tests.evaluation.conftest import ROWS, TRAINING, compared, trained_run
from tests.training.test_distill import PROMPT, divergence_after
from your_ai.data.encode import Encoder
from your_ai.data.rows import read_rows
from your_ai.engine.prefix import DiskStore
from your_ai.errors import UserError
from your_ai.evaluation import compare as evaluation
from your_ai.evaluation.compare import Request, compare
from your_ai.evaluation.rows import choose_file
from your_ai.memory.plan import options
from your_ai.nets.saved_adapter import open_trained, put_adapter


@pytest.fixture(scope="module")
def teachers(tmp_path_factory) -> dict[str, Path]:
    """A model that is wider than that of the run, with another head, and its base in float32, which
    agrees with it more often."""
    place = tmp_path_factory.mktemp("teacher")
    wide = {"hidden_size": 64, "tie_word_embeddings": False}
    return {
        "wide": make_model(place / "wide", "qwen3", seed=5, factor=2, **wide),
        "near": make_model(place / "near", bits=None, **TINY),
    }


@pytest.fixture
def teacher(teachers) -> Path:
    return teachers["wide"]


Logits = list[np.ndarray]  # (n, V) float64 log-probabilities of each row


def log_probabilities(network: Any, tokens: list[np.ndarray]) -> Logits:
    found = []
    for each in tokens:
        logits = np.array(network(mx.array(each[None, :-1]))[0]).astype(np.float64)
        top = logits.max(-1, keepdims=True)
        found.append(logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True)))
    return found


Expected = dict[str, tuple[np.ndarray, np.ndarray]]


@pytest.fixture(scope="module")
def expected(run: Path, teachers: dict[str, Path]) -> dict[str, Expected]:
    """By teacher, the sums of forward divergence and agreement by row, of base and adapter, from
    whole logits."""
    return {name: sums_from_whole_logits(run, teacher) for name, teacher in teachers.items()}


def sums_from_whole_logits(run: Path, teacher: Path) -> Expected:
    found = open_trained(str(run))
    network, tokenizer = load_base(found.base, mx.float32)
    encoded = [Encoder(tokenizer).encode(row) for row in read_rows(choose_file(None, found.config))]
    tokens, trained = zip(*((each.tokens, each.trained[1:]) for each in encoded), strict=True)
    theirs = log_probabilities(load_base(teacher, mx.float32)[0], tokens)

    def sums() -> tuple[np.ndarray, np.ndarray]:
        mine, gaps, agreements = log_probabilities(network, tokens), [], []
        for p, q, is_target in zip(theirs, mine, trained, strict=True):
            gaps.append((np.exp(p) * (p - q)).sum(-1)[is_target].sum())
            agreements.append((p.argmax(-1) == q.argmax(-1))[is_target].sum())
        return np.array(gaps), np.array(agreements)

    base = sums()
    put_adapter(network, found.adapter)
    return {"base": base, "adapter": sums()}


@pytest.mark.parametrize("teacher_name", ["wide", "near"])
@pytest.mark.parametrize(
    ("engine", "batch_size"), [("fused", 1), ("staged", len(ROWS)), ("streamed", 3)]
)
def test_divergence_and_agreement_are_those_of_whole_logits(
    run, teachers, expected, teacher_name, engine, batch_size
):
    teacher = str(teachers[teacher_name])
    found = compared(run, teacher=teacher, engine=engine, batch_size=batch_size)
    assert found.plan.startswith(engine)
    assert (expected["near"]["base"][1] > 0).any()
    for name, (gaps, agreements) in expected[teacher_name].items():
        measured = getattr(found, name)
        assert measured.divergences == pytest.approx(gaps, rel=1e-5)
        assert measured.agreements.tolist() == agreements.tolist()


def test_the_other_figures_are_those_without_a_teacher(run, teacher):
    alone, found = compared(run), compared(run, teacher=str(teacher))
    for name in ("base", "adapter"):
        wanted, measured = getattr(alone, name), getattr(found, name)
        assert measured.losses.tolist() == wanted.losses.tolist()
        assert measured.exact.tolist() == wanted.exact.tolist()
        assert wanted.divergences is None


def in_place(run: Path) -> Any:
    return working_in(run.parent.parent)


def test_a_run_is_its_own_teacher(run):
    with in_place(run):
        found = compared(run, teacher="run:r")
    assert np.abs(found.adapter.divergences / found.rows.trained_tokens).max() < 1e-5
    assert found.adapter.agreements.tolist() == found.rows.trained_tokens.tolist()
    assert (found.base.divergences > 0.1 * found.rows.trained_tokens).all()


def test_tiles_of_long_rows_are_compared_as_whole_rows(run, teachers, expected, monkeypatch):
    cut(monkeypatch, 8)
    found = compared(run, teacher=str(teachers["near"]), engine="staged")
    gaps, agreements = expected["near"]["adapter"]
    assert found.adapter.divergences == pytest.approx(gaps, rel=1e-5)
    assert found.adapter.agreements.tolist() == agreements.tolist()


def distilled(root: Path, model: Path, **settings: Any) -> Path:
    """A run; its prompts all have answers, so that it may sample completions."""
    rows = write_rows(root / "answered.jsonl", TRAINING)
    first = {
        "objective": "distill", "teacher": str(model), "max_steps": 2, "eval_every": 0,
        "data": str(rows), "valid": "none",
    }  # fmt: skip
    return trained_run(root, model, **{**first, **settings})


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"divergence": "reverse"}, "reverse"),
        ({"divergence": "jsd:0.2", "temperature_distill": 2.0}, "jsd:0.2"),
        ({"divergence": "sampled", "distill_on": "student", "max_new_tokens": 4}, "reverse"),
    ],
)
def test_the_divergence_is_that_of_a_distillation(tmp_path, tiny_model, settings, kind):
    run = distilled(tmp_path, tiny_model, **settings)
    with in_place(run):
        options = ("--data", "answered.jsonl", "--teacher", tiny_model, "--worst", 0)
        assert call("eval", "r", *options) == 0
    found = json.loads((run / "evaluation.json").read_text())
    temperature = settings.get("temperature_distill", 1.0)
    about = {"divergence": kind, "temperature": temperature, "prompt": False}
    assert found["teacher"] == {"name": str(tiny_model), **about}
    base = found["measures"]["divergence"]["base"]
    assert base["value"] == pytest.approx(0, abs=1e-6)  # its own teacher


@pytest.mark.parametrize("settings", [{}, {"distill_on": "student", "max_new_tokens": 4}])
def test_a_distillation_is_measured_without_a_teacher_as_other_runs(
    tmp_path, tiny_model, run, settings
):
    found = compared(distilled(tmp_path, tiny_model, **settings), run / "../../data/test.jsonl")
    other = compared(run)
    assert found.base.losses == pytest.approx(other.base.losses, rel=1e-6)
    assert found.base.exact.tolist() == other.base.exact.tolist()
    assert found.adapter.divergences is None


def test_the_teacher_sees_the_prompt_of_the_run(tmp_path):
    """The mean divergence of the base from itself after the prompt, from whole logits."""
    model = make_model(tmp_path / "model", bits=None, **TINY)
    (tmp_path / "prompt.txt").write_text(PROMPT)
    questions = ["Ask", "Ask please", "What is it?"]
    rows = write_rows(tmp_path / "rows.jsonl", [chat(text, "So it is") for text in questions])
    prompt = {"teacher": "", "teacher_prompt": str(tmp_path / "prompt.txt"), "data": str(rows)}
    run = distilled(tmp_path, model, **prompt)
    found = compared(run, rows, teacher=str(model))
    wanted = divergence_after(model, PROMPT, questions, "So it is")
    measured = found.base.divergences.sum() / found.rows.trained_tokens.sum()
    assert measured == pytest.approx(wanted, rel=1e-4)


def test_the_teacher_reads_each_row_once_and_leaves_nothing(run, teacher, monkeypatch):
    put = calls_of(monkeypatch, DiskStore, "put")
    before = sorted(run.iterdir())
    found = compared(run, teacher=str(teacher))
    sizes = sorted(len(call.given[2]) for call in put)
    assert sizes == sorted(found.rows.trained_tokens.tolist())
    assert sorted(run.iterdir()) == before


def test_an_evaluation_that_is_killed_leaves_no_states(run, teacher, monkeypatch):
    def killed(*_: object) -> None:
        raise Killed

    before = sorted(run.iterdir())
    monkeypatch.setattr(DiskStore, "put", killed)
    with pytest.raises(Killed):
        compared(run, teacher=str(teacher))
    assert sorted(run.iterdir()) == before


def test_progress_counts_the_rows_that_the_teacher_has_read(run, teacher):
    found = open_trained(str(run))
    request = Request(batch_size=3, teacher=str(teacher))
    steps = list(compare(found, choose_file(None, found.config), request))
    done = [step.done for step in steps if step.doing == "teacher: predictions"]
    assert done == sorted(done)
    assert done[-1] == len(ROWS)


def test_the_teacher_is_counted_in_the_plan(run, teacher, monkeypatch):
    """The least limit that does with it is accepted, and one byte less is not."""
    needed = calls_of(monkeypatch, evaluation, "budget_of_evaluation")
    plain = {"engine": "streamed", "batch_size": 1}
    compared(run, **plain)
    compared(run, teacher=str(teacher), **plain)
    workloads = [call.result.workload for call in needed]
    alone, beside = (min(o.needed_bytes for o in options(workload)) for workload in workloads)
    assert beside > alone
    assert workloads[1].teacher.facts.hidden == 64
    assert compared(run, teacher=str(teacher), max_memory_gb=(beside + 1) / 1e9).plan
    with pytest.raises(UserError, match="evaluating does not fit into"):
        compared(run, teacher=str(teacher), max_memory_gb=(beside - 1) / 1e9, **plain)


def test_the_report_says_what_is_compared(run, teacher, capsys):
    with in_place(run):
        assert call("eval", "r", "--teacher", teacher, "--worst", 0) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "divergence" in shown
    assert "agreement" in shown
    assert "Divergence: the forward KL divergence from" in shown
    assert "Agreement: supervised tokens where both find the same token" in shown


def test_the_intervals_are_of_the_rows(run, teachers):
    """Means over tokens with the weights of their rows, between the bounds of their intervals."""
    teacher = teachers["near"]
    with in_place(run):
        assert call("eval", "r", "--teacher", teacher, "--worst", 0, "--json") == 0
    found = json.loads((run / "evaluation.json").read_text())["measures"]
    rows = compared(run, teacher=str(teacher))
    sizes = rows.rows.weights * rows.rows.trained_tokens
    for name, sums in {"divergence": "divergences", "agreement": "agreements"}.items():
        for system in ("base", "adapter"):
            mean = (rows.rows.weights * getattr(getattr(rows, system), sums)).sum() / sizes.sum()
            interval = found[name][system]
            assert interval["value"] == pytest.approx(mean, rel=1e-6)
            assert interval["low"] < interval["value"] < interval["high"]


def test_wrong_teachers_are_one_line(run, tmp_path, capsys):
    other = make_model(tmp_path / "other", bits=None, **TINY)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    path.write_text(json.dumps(content))
    with in_place(run):
        for teacher, text in {
            "run:nope": "--teacher run:nope: no run named nope",
            "nowhere": "--teacher nowhere: ",
            str(other): "token 5 is ! in one and",
        }.items():
            capsys.readouterr()
            assert call("eval", "r", "--teacher", teacher) == 2
            *notes, error = capsys.readouterr().err.splitlines()
            assert text in error
            assert error.startswith("error: ")
            assert all(note.startswith("note: ") for note in notes)


def test_a_reward_model_has_no_teacher(tmp_path, tiny_model, teacher):
    pairs = [{"prompt": row["messages"][0]["content"], "chosen": "Yes", "rejected": "No"}
             for row in TRAINING]  # fmt: skip
    rows = write_rows(tmp_path / "pairs.jsonl", pairs)
    run = trained_run(
        tmp_path, tiny_model, objective="reward", data=str(rows), valid="none", max_steps=1
    )
    with pytest.raises(UserError, match="--teacher: the run is a reward model"):
        compared(run, rows, teacher=str(teacher))


def test_a_model_without_a_frozen_head_is_refused(tmp_path, tiny_model, teacher):
    run = trained_run(tmp_path, tiny_model, train="embeddings,head", max_steps=1)
    with pytest.raises(UserError, match="--teacher: the head of this model is trained"):
        compared(run, teacher=str(teacher))


def test_whole_weights_are_compared(tmp_path, teacher):
    model = make_model(tmp_path / "model", bits=None, **TINY)
    run = trained_run(tmp_path, model, adapter="full", max_steps=4, lora_rank=8, learning_rate=1e-3)
    found = compared(run, teacher=str(teacher))
    assert (found.adapter.divergences != found.base.divergences).all()
