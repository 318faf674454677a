"""Answers that a teacher writes to prompts, and runs that train them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import mlx.core as mx
import pytest

from tests.conftest import (
    Killed,
    adapter_of,
    call,
    chat,
    killed_in,
    make_model,
    notices_of,
    refused,
    resume,
    train,
    train_once,
    write_rows,
)
from tests.rewards.server import JudgeServer, grade_of, graded
from your_ai.config import TrainConfig, to_yaml
from your_ai.data.encode import Encoder
from your_ai.data.rows import Question, Row
from your_ai.errors import Interrupted, UserError
from your_ai.generation.generate import answer, load_run
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder, find
from your_ai.training import prepare, teacher_answers

PROMPTS = [f"Ask {i}" + " please" * (2 * i) for i in range(6)]
TRAINED = {  # a teacher that answers what it was trained on, with an end
    "run": "teacher", "max_steps": 60, "lora_layers": 3, "lora_targets": ["all-linear"],
    "lora_rank": 8, "valid": "none",
}  # fmt: skip
REWARD = "def longer(completions, **_):\n    return [float(len(text)) for text in completions]\n"


@pytest.fixture
def answering(configure, own_folder) -> Callable[..., TrainConfig]:
    """A function that makes the config of a short run on answers of a teacher, which is there."""
    train_once(configure(**TRAINED))
    data = write_rows(own_folder / "prompts.jsonl", [{"prompt": text} for text in PROMPTS])
    return partial(
        configure, data=str(data), valid="none", teacher="run:teacher", answers_from_teacher=1,
        top_k=1, max_new_tokens=24, run="r",
    )  # fmt: skip


def rows_of(run: RunFolder, split: str = "train") -> list[dict]:
    return [json.loads(line) for line in (run.answers / f"{split}.jsonl").read_text().splitlines()]


def test_the_rows_have_the_answers_that_the_teacher_generates(answering):
    rows = rows_of(train(answering()))
    network, tokenizer = load_run(open_trained("teacher"))
    for row, text in zip(rows, PROMPTS, strict=True):
        asked = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        expected = answer(network, tokenizer, rendered, 24)
        assert row == {"prompt": text, "completion": expected}
        assert expected.startswith("Answer")


def test_a_row_keeps_all_but_its_last_answer(answering, own_folder):
    turns = [*chat("Ask 1 please please", "no")["messages"], *chat("Ask 0", "wrong")["messages"]]
    *asked, wrong = {"role": "system", "content": "Be brief."}, *turns
    row = {"messages": [*asked, wrong], "weight": 2.0, "source": "book"}
    other = {"instruction": "Ask", "input": "0", "output": "x"}
    data = write_rows(own_folder / "chats.jsonl", [row, other])
    first, second = rows_of(train(answering(data=str(data), max_new_tokens=40)))
    assert first.pop("completion") not in ("", "wrong")
    assert first == {"prompt": asked, "weight": 2.0, "source": "book"}
    assert second.pop("completion") not in ("", "x")
    assert second == {"prompt": "Ask\n\n0"}


def test_validation_rows_are_answered_and_test_rows_stay(answering, own_folder):
    folder = own_folder / "asked"
    write_rows(folder / "train.jsonl", [{"prompt": text} for text in PROMPTS])
    write_rows(folder / "valid.jsonl", [chat("Ask 0", "not the teacher's")])
    write_rows(folder / "test.jsonl", [chat("Ask 0", "what people said")])
    run = train(answering(data=str(folder), valid="", samples=1))
    (row,) = rows_of(run, "valid")
    assert row["completion"].startswith("Answer")
    assert "what people said" in run.events.read_text()
    assert not (run.answers / "test.jsonl").exists()


def test_a_run_killed_while_the_teacher_writes_ends_with_the_same_bytes(answering, monkeypatch):
    settings = {"answers_from_teacher": 2, "top_k": 0, "temperature": 0.7}
    monkeypatch.setattr(teacher_answers, "TOGETHER", 4)
    whole = train(answering(run="whole", **settings))
    genuine, calls = teacher_answers.complete, []

    def once(*args, **kwargs):
        calls.append(len(args[1]))
        if len(calls) == 2:
            raise Killed
        return genuine(*args, **kwargs)

    monkeypatch.setattr(teacher_answers, "complete", once)
    with pytest.raises(Killed):
        train(answering(run="killed", **settings))
    killed = find("killed")
    part = killed.answers / "train.jsonl.part"
    part.write_bytes(part.read_bytes() + b'{"past": 4, "rows"')  # it was cut short
    assert resume(killed) == 0
    assert calls == [2, 2, 2, 2]  # not the first prompts again
    for name in ("train.jsonl", ".made-of.json"):
        assert (killed.answers / name).read_bytes() == (whole.answers / name).read_bytes()
    assert adapter_of(killed) == adapter_of(whole)
    assert not part.exists()


def test_the_answer_with_the_highest_reward_is_trained(answering, own_folder):
    (own_folder / "lengths.py").write_text(REWARD)
    sampled = {"answers_from_teacher": 4, "top_k": 0, "temperature": 1.5, "max_new_tokens": 40}
    every = rows_of(train(answering(run="every", **sampled)))
    best = rows_of(train(answering(run="best", reward=["lengths:longer"], **sampled)))
    lengths: dict[str, list[int]] = {}
    for row in every:
        lengths.setdefault(row["prompt"], []).append(len(row["completion"]))
    assert {row["prompt"]: len(row["completion"]) for row in best} == {
        prompt: max(found) for prompt, found in lengths.items()
    }
    assert len(best) == len(lengths)
    assert any(min(found) < max(found) for found in lengths.values())


def test_expected_answers_reach_rewards(answering, own_folder):
    (own_folder / "matches.py").write_text(
        "def same(completions, expected, **_):\n"
        "    return [float(a == b) for a, b in zip(completions, expected)]\n"
    )
    data = write_rows(own_folder / "rows.jsonl", [chat("Ask 0", "Answer 0")])
    config = answering(
        data=str(data), reward=["exact_match=2", "matches:same"], answers_from_teacher=16, top_k=0,
        temperature=1.2, max_steps=1,
    )  # fmt: skip
    (row,) = rows_of(train(config))
    assert row["completion"] == "Answer 0"


def test_a_judge_chooses_and_its_calls_are_counted(answering, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    server = JudgeServer()

    server.reply = graded
    sampled = {"answers_from_teacher": 3, "top_k": 0, "temperature": 1.5}
    of_judge = {"reward": ["judge"], "judge_model": "fake", "judge_url": server.url}
    counted, genuine = [], teacher_answers.Writer.after

    def after(self, *args):
        counted.append(found := genuine(self, *args))
        return found

    monkeypatch.setattr(teacher_answers.Writer, "after", after)
    try:
        best = rows_of(train(answering(run="best", **sampled, **of_judge)))
    finally:
        server.stop()
    every = rows_of(train(answering(run="every", **sampled)))
    grades = {}
    for request in server.requests[1:]:  # the first tries whether there is a judge
        grades[request["messages"][1]["content"]] = grade_of(request)
    for row in best:
        others = [o["completion"] for o in every if o["prompt"] == row["prompt"]]
        assert row["completion"] in others
        asked = {said: g for said, g in grades.items() if row["prompt"] + "\n" in said}
        mine = max(g for said, g in asked.items() if row["completion"] in said)
        assert mine == max(asked.values())
    assert counted[0].calls == len(server.requests) - 1


def test_an_edited_file_is_trained_as_it_is(answering, own_folder, monkeypatch):
    with killed_in(prepare, "opened_for", at=1):  # when the answers are there
        train(answering())
    run = find("r")
    rows = [chat("Ask 0", "Mine"), chat("Ask 1", "Mine, too")]
    write_rows(run.answers / "train.jsonl", rows)
    monkeypatch.setattr(teacher_answers, "load_writer", Mock(side_effect=Killed))
    assert resume(run) == 0
    data = write_rows(own_folder / "mine.jsonl", rows)
    plain = {"teacher": "", "answers_from_teacher": 0, "top_k": 0, "max_new_tokens": 256}
    assert adapter_of(run) == adapter_of(train(answering(data=str(data), run="plain", **plain)))


def test_answers_that_change_after_the_first_step_are_refused(answering):
    run = train(answering())
    write_rows(run.answers / "train.jsonl", [chat("Ask 0", "Mine")])
    with pytest.raises(UserError, match=r"the data changed since the run began \(train.jsonl\)"):
        resume(run, max_steps=6)


@pytest.mark.parametrize("what", ["data", "teacher", "settings"])
def test_what_decides_the_answers_must_not_change_while_they_are_written(
    answering, configure, own_folder, what
):
    with killed_in(teacher_answers, "complete", at=1):
        train(answering())
    changes = {"settings": {"temperature": 0.5}}.get(what, {})
    if what == "data":
        write_rows(own_folder / "prompts.jsonl", [{"prompt": "Another"}])
    if what == "teacher":
        shutil.rmtree(own_folder / "runs" / "teacher")
        train(configure(**TRAINED | {"max_steps": 2}))
    with pytest.raises(UserError, match=f"the {what} changed since the teacher began to answer"):
        resume(find("r"), **changes)


def test_prompts_without_a_whole_answer_are_counted(answering, own_folder):
    rows = [{"prompt": PROMPTS[0]}, {"prompt": "Something else that it never saw before"}]
    data = write_rows(own_folder / "some.jsonl", rows)
    long = rows_of(train(answering(data=str(data), run="long", max_new_tokens=400)))
    lengths = [len(row["completion"]) for row in long]
    assert len(lengths) == 1 or lengths[0] != lengths[1]
    run = train(answering(data=str(data), max_new_tokens=8))
    assert [row["prompt"] for row in rows_of(run)] == [PROMPTS[0]]
    assert any("train.jsonl: 1 prompt of 2 left out" in text for text in notices_of(run))


def test_a_run_without_a_whole_answer_says_what_to_do(answering):
    with pytest.raises(UserError, match="cut off at --max-new-tokens 1, or empty"):
        train(answering(max_new_tokens=1))


def test_only_the_teacher_sees_the_teachers_prompt(answering, own_folder, monkeypatch):
    (own_folder / "rule.md").write_text("Answer in capitals.\n")
    genuine, seen = teacher_answers.complete, []

    def watched(network, prompts, *args):
        seen.extend(prompt.tokens.tolist() for prompt in prompts)
        return genuine(network, prompts, *args)

    monkeypatch.setattr(teacher_answers, "complete", watched)
    run = train(answering(teacher_prompt=str(own_folder / "rule.md"), max_new_tokens=400))
    assert {row["prompt"] for row in rows_of(run)} <= {*PROMPTS}
    encoder = Encoder(open_trained("teacher").tokenizer())
    rows = [Row("", Question(text, None), 1.0) for text in PROMPTS]
    expected = [encoder.encode(encoder.after_prompt(row, "Answer in capitals.")) for row in rows]
    assert seen == [each.tokens.tolist() for each in expected]


def test_the_teacher_is_gone_before_the_student_is_loaded(answering, monkeypatch):
    genuine, before, after = prepare.opened_for, mx.get_active_memory(), []

    def opened_for(*args):
        after.append(mx.get_active_memory())
        return genuine(*args)

    monkeypatch.setattr(prepare, "opened_for", opened_for)
    train(answering())
    assert after[0] - before < 100_000  # of half a megabyte of weights


@pytest.mark.parametrize(
    ("error", "status", "wanted"),
    [
        (UserError("no such model"), 2, "no such model"),
        (Interrupted(2), 130, "what there is stays: your_ai train --resume r"),
    ],
)
def test_answers_stay_if_the_run_ends_before_it_trains(
    capsys, answering, monkeypatch, error, status, wanted
):
    config = answering(run="")
    Path("r.yaml").write_text(to_yaml(config))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "opened_for", Mock(side_effect=error))
        assert call("train", "--config", "r.yaml", "--run", "r") == status
    assert wanted in capsys.readouterr().err
    before = rows_of(find("r"))
    assert len(before) == len(PROMPTS)
    assert call("train", "--resume", "r") == 0
    assert rows_of(find("r")) == before


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"teacher": "run:teacher"}, "--teacher: --objective sft uses it only with"),
        ({"max-new-tokens": 256}, "--max-new-tokens: --objective sft uses it only with"),
        ({"reward": "length:3"}, "--reward: --objective sft uses it only with"),
        ({"answers-from-teacher": 1}, "--teacher is missing"),
        ({"answers-from-teacher": 1, "teacher": "nowhere"}, "--teacher nowhere"),
        ({"answers-from-teacher": 1, "teacher-prompt": "nowhere.md"}, "nowhere.md: cannot be read"),
        ({"answers-from-teacher": 1, "teacher": "x", "reward": "length:3"}, "several answers"),
        ({"answers-from-teacher": 2, "teacher": "x", "reward": "run:y"}, "--reward run:y"),
        (
            {"answers-from-teacher": 2, "teacher": "x", "reward": "judge"},
            "--judge-model is missing",
        ),
        ({"answers-from-teacher": 2, "teacher": "x", "top-p": 2}, "--top-p 2"),
        ({"answers-from-teacher": 2, "objective": "dpo"}, "is for sft"),
        (
            {"answers-from-teacher": 2, "teacher": "base", "reward": "exact_match"},
            "prompts.jsonl:1: has no expected answer",
        ),
        (
            {"answers-from-teacher": 1, "teacher": "base", "max-new-tokens": 3000},
            "3,004 with --max-new-tokens 3000, more than --max-seq-length 2048",
        ),
    ],
)
def test_wrong_settings_are_one_line(capsys, tiny_model, own_folder, settings, wanted):
    shutil.copytree(tiny_model, own_folder / "base")
    write_rows(own_folder / "prompts.jsonl", [{"prompt": "a"}])
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    given = ("--model", tiny_model, "--data", "prompts.jsonl", "--valid", "none")
    assert wanted in refused(capsys, "train", *given, *flags)


MEASURED = """
import re, sys
from your_ai.cli import main
try:
    main(sys.argv[1:])
except SystemExit as ended:
    text = open("/proc/self/status").read()
    print("peak", re.search(r"VmHWM:\\s+(\\d+) kB", text)[1])
    raise
"""


@pytest.mark.memory
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_teacher_that_does_not_fit_is_streamed(tiny_model, own_folder):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 128}
    teacher = make_model(own_folder / "large", bits=None, num_hidden_layers=12, **sizes)
    weights = (teacher / "model.safetensors").stat().st_size
    data = write_rows(own_folder / "prompts.jsonl", [{"prompt": text} for text in PROMPTS[:2]])
    limit = 240_000_000
    assert weights > 140_000_000
    done = subprocess.run(
        [
            sys.executable, "-c", MEASURED, "train", "--model", tiny_model, "--data", data,
            "--valid", "none", "--teacher", teacher, "--answers-from-teacher", "1",
            "--max-new-tokens", "4", "--max-memory", str(limit / 1e9), "--no-supervise",
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "cut off at --max-new-tokens 4" in done.stderr  # it writes noise, all the same
    peak = 1024 * int(done.stdout.rpartition("peak ")[2])
    assert peak <= limit
    assert Path("runs").exists()
