from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import call, chat_prompt, refused, train, write_rows
from tests.generation.test_generate import Parrot
from your_ai.commands import generating
from your_ai.config import build
from your_ai.errors import UserError
from your_ai.generation import generate as generation
from your_ai.generation.generate import Prompt, Sampling, respond
from your_ai.generation.samples import sampled
from your_ai.memory.budget import WavePlan
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder

SHORT = ("--max-tokens", 6)


@pytest.fixture
def stdin(monkeypatch):
    """A function that sets the content of standard input."""

    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))

    return put


def answers_of(run: RunFolder, *texts: str, adapted: bool = True) -> list[str]:
    network, tokenizer = generation.load_run(open_trained(str(run.path)), adapted)
    prompts = [chat_prompt(tokenizer, text) for text in texts]
    six = Sampling(max_tokens=6)
    return ["".join(r.text for r in respond(network, tokenizer, p, six)) for p in prompts]


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


SAMPLES = ("--num-samples", 3, "--temperature", 1, "--seed", 5)


def samples_of(run: RunFolder, texts: list[str], count: int) -> list[str]:
    """Each generated alone."""
    network, tokenizer = generation.load_run(open_trained(str(run.path)))
    sampling = Sampling(max_tokens=6, temperature=1, seed=5)
    prompts = [chat_prompt(tokenizer, text) for text in texts]
    found = sampled(network, tokenizer, [(tokens, sampling) for tokens in prompts], count)
    return [one.text for one in found]


def test_samples_are_printed_under_headings(run, capsys):
    assert call("generate", run.path, "--prompt", "Question 1", *SAMPLES, *SHORT) == 0
    texts = samples_of(run, ["Question 1"], 3)
    assert len(set(texts)) == 3
    parts = [f"sample {n} of 3:\n{text}\n" for n, text in enumerate(texts, start=1)]
    assert capsys.readouterr().out == "\n".join(parts)


def test_samples_of_several_prompts_say_which(run, capsys):
    write_rows(Path("p.txt"), ["Question 1", "", "Question 2"])
    assert call("generate", run.path, "--prompts", "p.txt", *SAMPLES, *SHORT) == 0
    texts = samples_of(run, ["Question 1", "Question 2"], 3)
    heads = [f"p.txt:{line}, sample {n} of 3:" for line in (1, 3) for n in (1, 2, 3)]
    parts = [f"{head}\n{text}\n" for head, text in zip(heads, texts, strict=True)]
    assert capsys.readouterr().out == "\n".join(parts)


def test_json_output_has_a_line_for_each_sample(run, capsys):
    write_rows(Path("p.txt"), ["Question 1", "Question 2"])
    assert call("generate", run.path, "--prompts", "p.txt", "--json", *SAMPLES, *SHORT) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    places = [(row["prompt"], row["sample"]) for row in rows]
    assert places == [(f"Question {p}", n) for p in (1, 2) for n in (1, 2, 3)]
    assert [row["answer"] for row in rows] == samples_of(run, ["Question 1", "Question 2"], 3)


def test_a_single_answer_is_the_first_sample(run, capsys):
    arguments = ("generate", run.path, "--prompt", "Question 1", *SAMPLES[2:], *SHORT)
    expected = samples_of(run, ["Question 1"], 1)[0]
    assert call(*arguments) == 0
    assert capsys.readouterr().out == expected + "\n"
    assert call(*arguments, "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert row["answer"] == expected
    assert "sample" not in row


def test_samples_are_the_same_under_any_memory_limit(run, capsys, monkeypatch):
    """A smaller one makes smaller waves, and then weights stay in their files."""
    write_rows(Path("p.txt"), ["Question 1", "Question 2", "Question 3"])
    arguments = ("generate", run.path, "--prompts", "p.txt", *SAMPLES, *SHORT)
    assert call(*arguments) == 0
    expected = capsys.readouterr().out
    for plan in (WavePlan(4, streams=False), WavePlan(2, streams=True)):
        monkeypatch.setattr(generation, "plan_waves", lambda *_, plan=plan: plan)
        assert call(*arguments) == 0
        assert capsys.readouterr().out == expected


def test_a_memory_limit_that_is_too_small_for_samples_is_refused(run, capsys):
    error = refused(capsys, "generate", run.path, "--prompt", "a", *SAMPLES, "--max-memory", "0.01")
    assert "--max-memory 0.01: generating with this model needs at least" in error


def test_no_adapter_uses_the_base_model(run, capsys, tmp_path):
    shutil.copytree(run.path, tmp_path / "new", ignore=shutil.ignore_patterns("adapter", "check*"))
    arguments = ("generate", tmp_path / "new", "--prompt", "Question 1", *SHORT)
    assert call(*arguments) == 2
    assert "has no finished adapter" in capsys.readouterr().err
    assert call(*arguments, "--no-adapter") == 0
    assert capsys.readouterr().out == answers_of(run, "Question 1", adapted=False)[0] + "\n"


def test_bad_prompt_lines_are_reported_before_the_model_is_loaded(run, capsys):
    write_rows(Path("p.jsonl"), [{"prompt": "good"}, {"text": "bad"}])
    error = refused(capsys, "generate", run.path, "--prompts", "p.jsonl", "--model", "nowhere")
    assert "p.jsonl:2: has no prompt" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a", "--prompts", "b"), "--prompt and --prompts: give one"),
        (("--prompt", " "), "--prompt: is empty"),
        (("--prompts", "nowhere.txt"), "nowhere.txt: no such file: /"),
        (("--prompts", "."), ".: cannot be read"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature nan"),
        (("--prompt", "a", "--top-p", "0"), "--top-p 0"),
        (("--prompt", "a", "--max-tokens", "0"), "--max-tokens 0"),
        (("--prompt", "a", "--max-memory", "nan"), "--max-memory nan"),
        (("--prompt", "a", "--num-samples", "0"), "--num-samples 0: must be at least 1"),
        (("--prompt", "a", "--num-samples", "-2"), "--num-samples -2: must be at least 1"),
        (("--prompt", "a", "--num-samples", "3"), "--num-samples 3: at temperature 0 all"),
        (("--prompt", "a", "--run", "other"), "--run other: RUN says"),
        (("--prompt", "a", "--no-adapter", "--checkpoint", "3"), "--checkpoint: no adapter"),
        (("--prompt", "a", "--checkpoint", "7"), "--checkpoint 7"),
        (("--prompt", "x " * 3000), "--prompt: has .* tokens; the model's context is 2048"),
    ],
)
def test_invalid_input_is_refused(run, capsys, arguments, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused(capsys, "generate", run.path, *arguments))


def test_without_a_name_the_newest_run_answers(run, capsys):
    runs = Path("runs")
    runs.mkdir()
    (runs / "r").symlink_to(run.path)
    assert call("generate", "--prompt", "Question 1", *SHORT) == 0
    out, error = capsys.readouterr()
    assert out == answers_of(run, "Question 1")[0] + "\n"
    assert error.splitlines()[0] == "run: r (the newest)"


def test_without_a_name_and_without_runs_it_is_refused(capsys):
    error = refused(capsys, "generate", "--prompt", "a")
    assert "no runs in runs; start one: your_ai train" in error


def test_empty_standard_input_is_refused(run, capsys, stdin):
    stdin(b"\n")
    assert "stdin: is empty" in refused(capsys, "generate", run.path)


PROMPT = Prompt("p.txt:3", [{"role": "user", "content": "one two three"}])


def test_too_long_prompt_is_named(demo_tokenizer):
    with pytest.raises(UserError, match=r"p.txt:3: has \d+ tokens; the model's context is 4"):
        generation.fit(demo_tokenizer, PROMPT, Sampling(), 4)


def test_answer_length_is_limited_by_the_context(demo_tokenizer):
    tokens, sampling = generation.fit(demo_tokenizer, PROMPT, Sampling(max_tokens=99), 30)
    assert len(tokens) + sampling.max_tokens == 30


def test_control_characters_in_answers_are_not_printed(demo_tokenizer, capsys):
    parrot = Parrot(demo_tokenizer, "a\x1b[2Jb")
    prompt = chat_prompt(demo_tokenizer, "Say it")
    generating.show(respond(parrot, demo_tokenizer, prompt, Sampling()))
    assert capsys.readouterr().out == "a␛[2Jb\n"


def test_closed_output_pipe_ends_the_command_quietly(run):
    write_rows(Path("p.txt"), ["Question 1"] * 200)
    arguments = ("generate", str(run.path), "--prompts", "p.txt", "--max-tokens", "8")
    process = subprocess.Popen(
        [sys.executable, "-m", "your_ai", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 0


# Prompts have the form of the rows that the run trained


@pytest.fixture
def trained_on(tiny_model, data_folder, capsys):
    """Trains a run on rows; gives its folder and its tokenizer."""

    def make(rows: list[dict[str, Any]], **settings: Any) -> tuple[Path, Any]:
        data = write_rows(data_folder / "rows.jsonl", rows)
        given = {"max_steps": 1, "samples": 0, "eval_every": 0, "lora_layers": 1, "valid": "none"}
        files = {"model": str(tiny_model), "data": str(data)}
        run = train(build({**files, **given, **settings}, "here")).path
        capsys.readouterr()
        return run, generation.load_run(open_trained(str(run)))[1]

    return make


def prompt_tokens_of(capsys, *arguments: object) -> tuple[int, str]:
    assert call("generate", *arguments, "--json", *SHORT) == 0
    shown = capsys.readouterr()
    return json.loads(shown.out)["prompt_tokens"], shown.err


def test_the_system_prompt_of_the_rows_is_put_before_prompts(trained_on, data_folder, capsys):
    rows = [{"prompt": f"q{n}", "completion": "a", "system": "Be Bob."} for n in range(4)]
    run, tokenizer = trained_on(rows)
    asked = [{"role": "user", "content": "q1"}]
    plain = len(generation.prompt_tokens(tokenizer, asked))
    whole = len(generation.prompt_tokens(tokenizer, generation.with_system(asked, "Be Bob.")))
    count, said = prompt_tokens_of(capsys, run, "--prompt", "q1")
    assert count == whole > plain
    assert "the system prompt of the training rows is used: 'Be Bob.'" in " ".join(said.split())
    assert prompt_tokens_of(capsys, run, "--prompt", "q1", "--system", "") == (plain, "")
    (data_folder / "rows.jsonl").unlink()
    count, said = prompt_tokens_of(capsys, run, "--prompt", "q1")
    assert count == plain
    assert "the training rows cannot be read again" in " ".join(said.split())


def test_the_tools_of_the_rows_are_shown_to_the_model(trained_on, capsys):
    tools = [{"name": "f", "description": "finds"}]
    rows = [{"prompt": f"q{n}", "completion": "a", "tools": tools} for n in range(4)]
    run, tokenizer = trained_on(rows)
    whole = [{"type": "function", "function": tools[0]}]
    asked = generation.prompt_tokens(tokenizer, [{"role": "user", "content": "q1"}], tools=whole)
    count, said = prompt_tokens_of(capsys, run, "--prompt", "q1")
    assert count == len(asked)
    assert "prompts have the 1 tool of the training rows" in " ".join(said.split())


def test_a_run_of_texts_continues_texts(trained_on, capsys):
    run, tokenizer = trained_on([{"text": f"Once upon {n}"} for n in range(4)])
    count, said = prompt_tokens_of(capsys, run, "--prompt", "Once upon")
    assert count == len(tokenizer.encode("Once upon"))
    assert "the training rows are plain texts" in said


def test_rows_of_prompts_are_read_as_the_rows_of_the_run_were(trained_on, data_folder, capsys):
    template = data_folder / "t.jinja"
    template.write_text("{{ topic }}: {{ asked }}")
    rows = [{"topic": "t", "asked": f"q{n}", "reply": "a"} for n in range(4)]
    columns = {"columns": ("completion=reply",), "prompt_template": str(template)}
    run, _ = trained_on(rows, **columns)
    write_rows(data_folder / "p.jsonl", [{"topic": "t", "asked": "q1"}])
    write_rows(data_folder / "ready.jsonl", [{"prompt": "t: q1"}])
    by_row, said = prompt_tokens_of(capsys, run, "--prompts", data_folder / "p.jsonl")
    assert said == ""
    ready, _ = prompt_tokens_of(capsys, run, "--prompts", data_folder / "ready.jsonl")
    typed, said = prompt_tokens_of(capsys, run, "--prompt", "t: q1")
    assert by_row == ready == typed
    assert "made by --prompt-template" in said
