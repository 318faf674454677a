from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import call, write_rows
from tests.generation.test_generate import Parrot, train_in
from your_ai.commands import generating
from your_ai.errors import UserError
from your_ai.generation import generate as generation
from your_ai.generation.generate import Prompt, Sampling, respond
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder

SHORT = ("--max-tokens", 6)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_model) -> RunFolder:
    return train_in(tmp_path_factory.mktemp("runs"), tiny_model)


@pytest.fixture
def stdin(monkeypatch):
    """A function that sets the content of standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    return put


def answers_of(run: RunFolder, *texts: str, adapted: bool = True) -> list[str]:
    network, tokenizer = generation.load_run(open_trained(str(run.path)), adapted)
    prompts = [generation.chat_prompt(tokenizer, text) for text in texts]
    return ["".join(generation.stream(network, tokenizer, p, 6)) for p in prompts]


def refused(capsys, *arguments: object) -> str:
    assert call("generate", *arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_standard_input_is_one_prompt(run, capsys, stdin):
    stdin(b"Question 1\nand more\n")
    assert call("generate", run.path, *SHORT) == 0
    assert capsys.readouterr().out == answers_of(run, "Question 1\nand more")[0] + "\n"


def test_prompts_file_is_answered_line_by_line(run, capsys):
    write_rows(Path("p.txt"), ["Question 1", "", "Question 2"])
    assert call("generate", run.path, "--prompts", "p.txt", *SHORT) == 0
    first, second = answers_of(run, "Question 1", "Question 2")
    assert capsys.readouterr().out == f"{first}\n\n{second}\n"


def test_json_output_has_answers_and_token_counts(run, capsys, stdin):
    stdin(b'{"prompt": "Question 1"}\n{"messages": [{"role": "user", "content": "Question 2"}]}')
    assert call("generate", "--run", run.path, "--prompts", "-", "--json", *SHORT) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["Question 1", "Question 2"]
    assert [row["answer"] for row in rows] == answers_of(run, "Question 1", "Question 2")
    assert {(row["tokens"], row["finish_reason"]) for row in rows} == {(6, "length")}
    assert all(row["seconds"] >= 0 and row["prompt_tokens"] > 3 for row in rows)


def test_no_adapter_uses_the_base_model(run, capsys, tmp_path):
    shutil.copytree(run.path, tmp_path / "new", ignore=shutil.ignore_patterns("adapter", "check*"))
    arguments = ("generate", tmp_path / "new", "--prompt", "Question 1", *SHORT)
    assert call(*arguments) == 2
    assert "has no finished adapter" in capsys.readouterr().err
    assert call(*arguments, "--no-adapter") == 0
    assert capsys.readouterr().out == answers_of(run, "Question 1", adapted=False)[0] + "\n"


def test_bad_prompt_lines_are_reported_before_the_model_is_loaded(run, capsys):
    write_rows(Path("p.jsonl"), [{"prompt": "good"}, {"text": "bad"}])
    error = refused(capsys, run.path, "--prompts", "p.jsonl", "--model", "nowhere")
    assert "p.jsonl:2: needs" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a", "--prompts", "b"), "--prompt and --prompts: give one"),
        (("--prompt", " "), "--prompt: is empty"),
        (("--prompts", "nowhere.txt"), "nowhere.txt: cannot be read"),
        (("--prompts", "."), ".: cannot be read"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature nan"),
        (("--prompt", "a", "--top-p", "0"), "--top-p 0"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens 0"),
        (("--prompt", "a", "--max-memory", "nan"), "--max-memory nan"),
        (("--prompt", "a", "--run", "other"), "--run other: RUN says"),
        (("--prompt", "a", "--no-adapter", "--checkpoint", "3"), "--checkpoint: no adapter"),
        (("--prompt", "a", "--checkpoint", "7"), "--checkpoint 7"),
        (("--prompt", "x " * 3000), "--prompt: has .* tokens; the model's context is 2048"),
    ],
)
def test_invalid_input_is_refused(run, capsys, arguments, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused(capsys, run.path, *arguments))


def test_without_a_name_the_newest_run_answers(run, capsys):
    runs = Path("runs")
    runs.mkdir()
    (runs / "r").symlink_to(run.path)
    assert call("generate", "--prompt", "Question 1", *SHORT) == 0
    out, error = capsys.readouterr()
    assert out == answers_of(run, "Question 1")[0] + "\n"
    assert error.splitlines()[0] == "run: r (the newest)"


def test_without_a_name_and_without_runs_it_is_refused(capsys):
    assert "no runs in runs; start one: your_ai train" in refused(capsys, "--prompt", "a")


def test_empty_standard_input_is_refused(run, capsys, stdin):
    stdin(b"\n")
    assert "stdin: is empty" in refused(capsys, run.path)


def test_too_long_prompt_is_named(demo_tokenizer):
    prompt = Prompt("p.txt:3", [{"role": "user", "content": "one two three"}])
    with pytest.raises(UserError, match=r"p.txt:3: has \d+ tokens; the model's context is 4"):
        generation.fit(demo_tokenizer, prompt, Sampling(), 4)


def test_answer_length_is_limited_by_the_context(demo_tokenizer):
    prompt = Prompt("p.txt:3", [{"role": "user", "content": "one two three"}])
    tokens, sampling = generation.fit(demo_tokenizer, prompt, Sampling(max_tokens=99), 30)
    assert len(tokens) + sampling.max_tokens == 30


def test_control_characters_in_answers_are_not_printed(demo_tokenizer, capsys):
    parrot = Parrot(demo_tokenizer, "a\x1b[2Jb")
    prompt = generation.chat_prompt(demo_tokenizer, "Say it")
    generating.show(respond(parrot, demo_tokenizer, prompt, Sampling()))
    assert capsys.readouterr().out == "a␛[2Jb\n"


def test_closed_output_pipe_ends_the_command_quietly(run):
    write_rows(Path("p.txt"), ["Question 1"] * 200)
    arguments = ("generate", str(run.path), "--prompts", "p.txt")
    process = subprocess.Popen(
        [sys.executable, "-m", "your_ai", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0
