"""Runs that learn the predictions of a teacher."""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import (
    DEMO_FOLDER,
    TINY,
    adapter_of,
    call,
    chat,
    events_of,
    flip,
    killed_in,
    load_base,
    losses_of,
    make_model,
    resume,
    rollouts_of,
    train,
    train_once,
    whole_and_resumed,
    write_rows,
)
from tests.fault.processes import train_and_die
from tests.training.test_distributed import difference, supervised
from your_ai.data.encode import Encoder
from your_ai.data.examples import Examples, RowCounts
from your_ai.data.rows import read_rows
from your_ai.engine import prefix
from your_ai.engine.prefix import HIDDEN, INDEX, RECORD, DiskStore, MemoryStore
from your_ai.errors import RunError, UserError
from your_ai.evaluation.teacher import STATES, Teacher
from your_ai.memory.estimate import teacher_phases
from your_ai.memory.plan import Budget
from your_ai.run import events
from your_ai.run.folder import RUNS, RunFolder, find
from your_ai.run.rollout_files import rollout_steps
from your_ai.session import new_run
from your_ai.training import train as recipe
from your_ai.training.rollouts import prompt_of

ON_STUDENT: dict[str, Any] = {
    "distill_on": "student", "divergence": "reverse", "prompts_per_step": 3, "max_new_tokens": 6,
}  # fmt: skip
MIXED = {**ON_STUDENT, "distill_on": "data", "distill_student_share": 0.5}
PROMPT = "Answer as briefly as you can."


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A teacher that is wider than the student, and a student that is not quantized."""
    place = tmp_path_factory.mktemp("models")
    return {
        "wide": make_model(place / "wide", "qwen3", seed=5, hidden_size=64),
        "float": make_model(place / "float", bits=None, **TINY),
    }


@pytest.fixture
def distilled(configure, models):
    """A function that makes the config of a short run, by default with the run `t` as teacher.

    A prompt for teachers is in `prompt.txt`.
    """
    Path("prompt.txt").write_text(PROMPT)

    def make(teacher: str = "run:t", **settings: Any):
        if teacher == "run:t" and not (RUNS / "t").exists():
            train_once(configure(run="t", max_steps=6, lora_targets=["all-linear"]))
        teacher = str(models.get(teacher, teacher))
        first = {"objective": "distill", "teacher": teacher, "valid": "none", "max_steps": 3}
        return configure(**{**first, **settings})

    return make


@pytest.fixture
def budgets(monkeypatch) -> list[Budget]:
    """Those of the runs that the test trains."""
    found: list[Budget] = []
    prepare = recipe.prepare

    def prepared(*args, **more):
        trainer = prepare(*args, **more)
        found.append(trainer.budget)
        return trainer

    monkeypatch.setattr(recipe, "prepare", prepared)
    return found


TEACHERS = ("run:t", "wide")
ALL: dict[str, Any] = {
    "lora_targets": ["all-linear"], "lora_layers": "all", "learning_rate": 5e-3, "max_steps": 16,
}  # fmt: skip


def divergences_of(run: RunFolder) -> list[float]:
    return [step.metrics["divergence"] for step in events_of(run, events.Step)]


@pytest.mark.parametrize(
    ("teacher", "settings"),
    [
        pytest.param("run:t", {}, id="run-data"),
        pytest.param("run:t", ON_STUDENT, id="run-student"),
        pytest.param("wide", {}, id="wide-data"),
        pytest.param("wide", ON_STUDENT, id="wide-student"),
        pytest.param(
            "run:t", {**ON_STUDENT, "divergence": "sampled", "prompts_per_step": 8}, id="sampled"
        ),
    ],
)
def test_the_divergence_falls(distilled, teacher, settings):
    found = divergences_of(train(distilled(teacher, **ALL, **settings)))
    assert np.mean(found[-4:]) < 0.8 * np.mean(found[:4])


@pytest.mark.parametrize("settings", [{}, ON_STUDENT], ids=["data", "student"])
def test_a_validation_measures_the_divergence(distilled, settings):
    run = train(distilled(valid="", eval_every=1, max_steps=2, **settings))
    for found in events_of(run, events.Validation):
        assert found.loss == found.metrics["divergence"]
        assert {"agreement", "entropy", "entropy/teacher"} <= found.metrics.keys()


def test_a_model_of_a_run_teaches_what_the_run_teaches(configure, models, own_folder, distilled):
    """A run shares the weights of its base with the student; the model that it gives does not."""
    base = str(models["float"])
    train(configure(run="t", model=base, max_steps=6, lora_targets=["all-linear"]))
    assert call("fuse", "t", own_folder / "fused", "--no-measure") == 0
    shared = losses_of(train(distilled("run:t", run="a", model=base)))
    own = losses_of(train(distilled(str(own_folder / "fused"), run="b", model=base)))
    assert own == pytest.approx(shared, rel=1e-4)


def test_a_student_that_predicts_what_its_teacher_does_has_nothing_to_learn(distilled):
    run = train(distilled(from_adapter="t", max_steps=1, lora_targets=["all-linear"]))
    (step,) = events_of(run, events.Step)
    assert step.metrics["divergence"] == pytest.approx(0, abs=1e-6)
    assert step.metrics["agreement"] == 1
    assert step.metrics["entropy"] == pytest.approx(step.metrics["entropy/teacher"], rel=1e-5)


# -- what the teacher computed


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize(("plan", "divergence"), [("fused", "forward"), ("streamed", "jsd:0.3")])
def test_stored_states_train_the_same_bytes_as_those_computed_in_each_step(
    distilled, teacher, plan, divergence
):
    settings: dict[str, Any] = {"plan": plan, "lora_dropout": 0.1, "max_steps": 6}
    settings["divergence"] = divergence
    stored = train(distilled(teacher, run="stored", **settings))
    again = train(distilled(teacher, run="again", teacher_cache="off", **settings))
    assert adapter_of(stored) == adapter_of(again)
    assert not (stored.path / STATES).exists()  # of a run that is finished


@pytest.mark.parametrize(
    ("place", "last", "missing"),
    [
        ("your_ai.engine.prefix:DiskStore.put", 4, 7),
        ("your_ai.training:train.train_step", 3, 0),
    ],
    ids=["read", "step"],
)
def test_a_killed_run_goes_on_with_what_the_teacher_computed(
    distilled, monkeypatch, place, last, missing
):
    """Ten rows: three are stored when it is killed in the middle of the fourth, or all."""
    settings: dict[str, Any] = {"max_steps": 6, "save_every": 1, "lora_dropout": 0.1}
    whole = train_once(distilled(run="whole", **settings))
    killed = new_run.create(distilled(run="killed", **settings))
    train_and_die(killed, place, last)
    put = after_each(monkeypatch, DiskStore, "put", lambda *_: None)
    assert resume(killed) == 0
    assert len(put) == missing
    assert adapter_of(killed) == adapter_of(whole)


@pytest.mark.parametrize(("name", "place"), [(HIDDEN, -1), (INDEX, -RECORD.size)])
def test_damaged_states_are_computed_again(distilled, monkeypatch, name, place):
    """Those of the text that was stored last, by a run that is killed before its third step."""
    settings: dict[str, Any] = {"max_steps": 6, "save_every": 1}
    whole = train_once(distilled(run="whole", **settings))
    config = distilled(run="cut", **settings)
    with killed_in(recipe, "train_step", at=3):
        train(config)
    cut = find("cut")
    flip(cut.path / STATES / name, place)
    put = after_each(monkeypatch, DiskStore, "put", lambda *_: None)
    assert resume(cut) == 0
    assert len(put) == 1
    assert adapter_of(cut) == adapter_of(whole)


def after_each(
    monkeypatch: pytest.MonkeyPatch, kind: type, name: str, read: Callable[..., Any]
) -> list[Any]:
    """What is read of an object and the arguments after each call of a method from now on."""
    found: list[Any] = []
    genuine = getattr(kind, name)

    def called(self, *args):
        genuine(self, *args)
        found.append(read(self, *args))

    monkeypatch.setattr(kind, name, called)
    return found


@pytest.mark.parametrize(
    "settings", [{"teacher_cache": "off"}, ON_STUDENT], ids=["data", "student"]
)
def test_no_more_states_are_in_memory_than_the_plan_counts(
    distilled, data_folder, budgets, monkeypatch, settings
):
    """Validation compares many more rows than a step trains."""
    write_rows(data_folder / "valid.jsonl", [chat(f"Ask {i}", f"Answer {i}") for i in range(40)])
    held = after_each(monkeypatch, MemoryStore, "put", lambda store, *_: store.bytes_held)
    train(distilled("wide", valid="", eval_every=1, max_steps=2, **settings))
    sizes = budgets[0].workload.teacher
    assert 0 < max(held) <= sizes.step_tokens * sizes.facts.hidden * sizes.facts.float_bytes


def test_the_weights_of_a_teacher_in_memory_stay_there(distilled, budgets, monkeypatch):
    left = after_each(monkeypatch, Teacher, "look", lambda teacher, _: teacher.engine.forget())
    train(distilled("wide", **ON_STUDENT))
    plan, facts = budgets[0].choice.option.plan, budgets[0].workload.teacher.facts
    assert plan.teacher_blocks == facts.blocks
    assert left[0] == facts.blocks_bytes


def test_the_plan_of_a_mixture_counts_completions(distilled, data_folder, budgets):
    """Whose prompts are shorter than the longest row, and which are longer than any."""
    row = chat("Ask me", "Answer " * 20)
    write_rows(data_folder / "train.jsonl", [row, chat("Ask", "Answer")])
    train(distilled(**MIXED | {"max_new_tokens": 90}, max_steps=1))
    workload = budgets[-1].workload
    tokenizer = load_base(DEMO_FOLDER, mx.float32)[1]
    prompt = len(tokenizer.encode("<|user|>Ask me<|end|><|assistant|>"))
    assert workload.rollouts.prompt_tokens == prompt
    assert max(workload.lengths) >= prompt + 90 - 1


def test_the_lengths_of_prompts_are_those_of_the_prompts_of_rows():
    rng = np.random.default_rng(0)
    trained = rng.random(400) < 0.5
    trained[9::10] = True
    trained[20:30] = True  # a row without a prompt
    starts = np.arange(0, 401, 10)
    examples = Examples(np.arange(400), trained, starts, np.ones(40), RowCounts())
    prompts = [len(prompt_of(examples, row)) for row in range(40)]
    assert examples.prompt_lengths.tolist() == prompts


def test_a_mixture_with_too_long_completions_is_refused(distilled):
    with pytest.raises(UserError, match="--max-new-tokens 4000, more than --max-seq-length"):
        train(distilled(**{**MIXED, "max_new_tokens": 4000}))


@pytest.mark.parametrize("settings", [{}, ON_STUDENT], ids=["data", "student"])
def test_the_plan_counts_a_long_prompt_of_the_teacher(distilled, own_folder, budgets, settings):
    (own_folder / "long.txt").write_text(PROMPT * 200)
    for name in ("prompt", "long"):
        prompt = {"teacher_prompt": f"{name}.txt", "max_steps": 1}
        train(distilled("", run=name, **{**settings, **prompt}))
    works = []
    for budget in budgets:
        workload, plan = budget.workload, budget.choice.option.plan
        (phase,) = teacher_phases(workload, workload.teacher, plan, max(workload.lengths))
        works.append(phase["block work"])
    tokens = len(load_base(DEMO_FOLDER, mx.float32)[1].encode(PROMPT * 199))
    assert works[1] - works[0] > 4 * tokens * budgets[0].workload.facts.hidden


def test_what_a_teacher_reads_instead_of_completions_is_dropped_with_them(distilled, monkeypatch):
    def held(teacher, _):
        return len(teacher.others) + len(teacher.others_of_step)

    found = after_each(monkeypatch, Teacher, "look", held)
    train(distilled("", teacher_prompt="prompt.txt", **ON_STUDENT))
    assert max(found) <= ON_STUDENT["prompts_per_step"]


def test_the_log_says_that_the_teacher_reads_before_it_does(distilled):
    with killed_in(Teacher, "look", at=1):
        train(distilled(run="r"))
    assert events_of(find("r"), events.Stage)[-1].text == "the teacher reads the rows"


def test_a_full_disk_names_the_cache_of_the_teacher(distilled, monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(prefix, "write_at", Mock(side_effect=full))
    with pytest.raises(RunError, match=r"--teacher-cache off$"):
        train(distilled())


# -- what a teacher sees that its student does not


@pytest.fixture(scope="module", params=["system", "no-system"])
def prompted(request, tmp_path_factory) -> Path:
    """A model whose chat template has a system role, or refuses it."""
    folder = make_model(tmp_path_factory.mktemp("prompted") / "model", bits=None, **TINY)
    if request.param == "no-system":
        path = folder / "chat_template.jinja"
        refuses = "{% if message['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
        loop = "{% for message in messages %}"
        path.write_text(path.read_text().replace(loop, loop + refuses))
    return folder


def divergence_after(model: Path, prompt: str, questions: list[str], answer: str) -> float:
    """The mean forward divergence of a model from itself after a prompt, over the tokens of the
    answers, in float64."""
    network, tokenizer = load_base(model, mx.float32)

    def log_probabilities(text: str, count: int) -> np.ndarray:
        tokens = tokenizer.encode(text)
        logits = np.array(network(mx.array(tokens)[None])[0]).astype(np.float64)[-count - 1 : -1]
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    has_system = "raise_exception" not in (model / "chat_template.jinja").read_text()
    end, gaps = f"<|end|><|assistant|>{answer}<|end|>", []
    count = len(tokenizer.encode(f"{answer}<|end|>"))
    for question in questions:
        seen = f"<|user|>{prompt}\n\n{question}"
        if has_system:
            seen = f"<|system|>{prompt}<|end|><|user|>{question}"
        p = log_probabilities(seen + end, count)
        q = log_probabilities(f"<|user|>{question}{end}", count)
        gaps.append((np.exp(p) * (p - q)).sum(-1))
    return float(np.concatenate(gaps).mean())


@pytest.mark.parametrize("settings", [{}, {"packing": True}], ids=["rows", "packed"])
def test_a_prompt_of_the_teacher_is_compared_answer_by_answer(
    distilled, own_folder, prompted, settings
):
    questions = ["Ask", "Ask please", "What is it?"]
    data = write_rows(own_folder / "p.jsonl", [chat(text, "So it is") for text in questions])
    Path("prompt.txt").write_text(PROMPT + "\n")
    run = train(distilled(
        "", model=str(prompted), data=str(data), teacher_prompt="prompt.txt", batch_size=3,
        max_steps=1, **settings,
    ))  # fmt: skip
    wanted = divergence_after(prompted, PROMPT, questions, "So it is")
    assert divergences_of(run) == [pytest.approx(wanted, rel=1e-4)]


def test_a_prompt_of_the_teacher_goes_before_the_system_prompt_of_a_row(
    distilled, own_folder, monkeypatch
):
    row = chat("Ask", "So it is")
    system = {"role": "system", "content": "Be kind."}
    both = {"role": "system", "content": f"{PROMPT}\n\nBe kind."}
    found = [
        write_rows(own_folder / name, [{"messages": [given, *row["messages"]]}])
        for name, given in (("own.jsonl", system), ("both.jsonl", both))
    ]
    seen: list[list[int]] = []

    def noted(self, texts, genuine=Teacher.look):
        texts = list(texts)
        seen.extend(text.tokens.tolist() for text in texts)
        genuine(self, texts)

    monkeypatch.setattr(Teacher, "look", noted)
    train(distilled("", data=str(found[0]), teacher_prompt="prompt.txt", max_steps=1))
    (parsed,) = read_rows(found[1])
    tokens = Encoder(load_base(DEMO_FOLDER, mx.float32)[1]).encode(parsed).tokens
    assert seen[0] == tokens[:-1].tolist()


def test_rows_that_differ_only_in_what_is_trained_are_compared_at_their_own_tokens(
    distilled, own_folder
):
    turns = [*chat("Ask", "So it is")["messages"], *chat("What is it?", "So is it")["messages"]]
    rows = [
        {"messages": [turns[0], {**turns[1], "weight": w}, turns[2], {**turns[3], "weight": 1 - w}]}
        for w in (0, 1)
    ]

    def loss_of(name: str, found: list[dict[str, Any]]) -> float:
        data = write_rows(own_folder / f"{name}.jsonl", found)
        given = {"teacher_prompt": "prompt.txt", "batch_size": 2, "max_steps": 1}
        return divergences_of(train(distilled("", run=name, data=str(data), **given)))[0]

    alone = [loss_of("first", rows[:1]), loss_of("second", rows[1:])]
    assert loss_of("both", rows) == pytest.approx(np.mean(alone), rel=1e-5)


def test_a_prompt_is_learned_from_completions_of_the_student(distilled):
    found = divergences_of(train(distilled("", teacher_prompt="prompt.txt", **ALL, **ON_STUDENT)))
    assert np.mean(found[-4:]) < 0.8 * np.mean(found[:4])


# -- plans, processes, and mixtures of steps


SETTINGS = {
    "packing": {"packing": True, "max_seq_length": 128},
    "dora": {"use_dora": True},
    "dropout": {"lora_dropout": 0.2},
    "accumulation": {"batch_size": 1, "grad_accumulation": 3},
    "jsd": {"divergence": "jsd:0.3", "temperature_distill": 2.0, "sft_weight": 0.5},
    "student": ON_STUDENT,
}
BOTH = itertools.product(TEACHERS, SETTINGS)  # in turns, unless the suite may be slow
IN_TURNS = BOTH if os.environ.get("YOUR_AI_SLOW") else zip(itertools.cycle(TEACHERS), SETTINGS)


@pytest.mark.parametrize(("teacher", "name"), list(IN_TURNS))
def test_every_plan_learns_the_same(distilled, teacher, name):
    fused, *others = (
        losses_of(train(distilled(teacher, run=plan, plan=plan, **SETTINGS[name])))
        for plan in ("fused", "staged", "streamed")
    )
    for losses in others:
        assert losses == pytest.approx(fused, rel=1e-4)


def test_long_rows_are_validated_tile_by_tile_as_whole(distilled, monkeypatch):
    settings: dict[str, Any] = {"valid": "", "eval_every": 1, "max_steps": 2}
    whole = train(distilled(run="whole", plan="fused", **settings))
    for size in ("TILED_FROM", "TILE_TOKENS", "FEWEST_TILE_TOKENS"):
        monkeypatch.setattr(f"your_ai.memory.sizes.{size}", 8)
    tiled = train(distilled(run="tiled", plan="staged", **settings))
    wanted, found = (events_of(run, events.Validation) for run in (whole, tiled))
    for one, other in zip(wanted, found, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-4)
        assert other.metrics == pytest.approx(one.metrics, rel=1e-4)


def test_a_mixture_trains_rows_and_completions_the_same_after_it_is_resumed(distilled):
    whole, cut = whole_and_resumed(distilled, 3, 6, **MIXED)
    of_student = [s.step for s in events_of(whole, events.Step) if "seconds/generate" in s.metrics]
    assert of_student == rollout_steps(whole.path)
    assert 0 < len(of_student) < 6
    assert adapter_of(cut) == adapter_of(whole)


def test_completions_are_trained_as_they_were_written(distilled):
    run = train(distilled(**ON_STUDENT, max_steps=2))
    for step in events_of(run, events.Step):
        records = rollouts_of(run, step.step)
        assert step.trained_tokens == sum(len(record.tokens) for record in records)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"max_steps": 4}, {**MIXED, "max_steps": 6}], ids=["data", "mixed"]
)
def test_two_processes_train_the_adapter_of_one(distilled, settings):
    config = distilled(**settings, batch_size=4, max_memory=1.0, supervise=True)
    one = train(replace(config, run="one"))
    two, status = supervised(replace(config, processes=2), "two")
    assert status == 0
    assert difference(two, one) < 1e-5


# -- what is refused

TRAINED_HEAD = {"train": "embeddings,head"}


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"divergence": "kl"}, "--divergence 'kl': give forward, reverse, jsd:B"),
        ({"divergence": "jsd:1"}, "--divergence 'jsd:1': give forward"),
        ({"divergence": "sampled"}, "--divergence sampled: .* use --distill-on student"),
        ({"distill_on": "student", "distill_student_share": 0.5}, "leave --distill-on out"),
        (
            {**ON_STUDENT, "divergence": "sampled", "temperature_distill": 2.0},
            "--temperature-distill: --divergence sampled does not use it",
        ),
        (
            {**ON_STUDENT, "divergence": "sampled", "temperature": 0.5},
            "--temperature: --divergence sampled is estimated from",
        ),
        ({**ON_STUDENT, "divergence": "sampled", "top_k": 4}, "--top-k: --divergence sampled is"),
        ({**ON_STUDENT, "sft_weight": 1.0}, "--sft-weight: .* use it with --distill-on data"),
        ({"max_new_tokens": 4}, "--max-new-tokens: only works with completions of the student"),
        ({**ON_STUDENT, "teacher_cache": "off"}, "--teacher-cache: completions are new"),
        ({"teacher_prompt": "prompt.txt", "too_long": "split"}, "--too-long split: not supported"),
        ({"objective": "sft"}, "--teacher: --objective sft uses it only with"),
        ({"teacher": ""}, "--teacher is missing"),
        ({"teacher": "run:nope"}, "--teacher run:nope: no run named nope"),
        ({"teacher": "nowhere"}, "--teacher nowhere: "),
        ({"teacher_prompt": "nope.txt"}, "nope.txt: cannot be read"),
        ({"teacher_prompt": "empty.txt"}, "--teacher-prompt empty.txt: is empty"),
        ({"teacher_prompt": "binary"}, "--teacher-prompt binary: is not UTF-8 text"),
        ({"teacher": "", "teacher_prompt": "prompt.txt", **TRAINED_HEAD}, "name a --teacher"),
        (TRAINED_HEAD, "the head of this model is trained"),
    ],
)  # fmt: skip
def test_wrong_settings_are_one_line(distilled, own_folder, settings, text):
    (own_folder / "empty.txt").touch()
    (own_folder / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=text) as refusal:
        train(distilled(**settings))
    assert "\n" not in str(refusal.value)


def test_a_reward_model_is_no_teacher(distilled, configure, own_folder):
    pairs = [{"prompt": f"Ask {i}", "chosen": "Yes", "rejected": "No"} for i in range(4)]
    data = write_rows(own_folder / "pairs.jsonl", pairs)
    train(configure(run="t", data=str(data), valid="none", objective="reward", max_steps=1))
    with pytest.raises(UserError, match="--teacher run:t: "):
        train(distilled())


def test_a_teacher_with_other_tokens_is_refused_with_the_first_one(distilled, tmp_path):
    other = make_model(tmp_path / "other", bits=None, **TINY)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    path.write_text(json.dumps(content))
    wanted = "its tokenizer differs from the student's: token 5 is ! in one and"
    with pytest.raises(UserError, match=wanted):
        train(distilled(str(other)))


@pytest.mark.parametrize("rows", [-32, 32])
def test_padding_of_the_vocabulary_is_no_difference(distilled, tmp_path, rows):
    other = make_model(tmp_path / "other", vocab_size=768 + rows, **TINY)
    assert len(losses_of(train(distilled(str(other), max_steps=1)))) == 1
