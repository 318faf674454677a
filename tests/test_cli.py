"""The command line: bad input gives one line and leaves no files; good input works."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import call, chat, events_of, flip, write_rows
from your_ai.config import TrainConfig
from your_ai.run import events
from your_ai.run.folder import RunFolder


def refused(capsys, *arguments: object) -> str:
    """`refused` of a command that must write nothing; what trains does so in this process."""
    here = ["--no-supervise"] if arguments[0] == "train" else []
    error = conftest.refused(capsys, arguments[0], *here, *arguments[1:])
    assert not os.path.exists("runs")
    return error


BAD_ROWS = {
    "not json": ("{oops", r"train.jsonl:2: is not valid JSON"),
    "unknown format": ('{"q": 1, "a": 2}', r"train.jsonl:2: unknown row format; keys found: q, a"),
    "nothing to train": (
        '{"messages": [{"role": "user", "content": "hi"}]}',
        r"train.jsonl:2: no token to train",
    ),
    "too long": (json.dumps({"text": "word " * 500}), r"train.jsonl:2: [\d,]+ tokens, more than"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_invalid_rows_are_named_with_their_line(capsys, own_folder, tiny_model, case):
    line, message = BAD_ROWS[case]
    data = write_rows(own_folder / "d" / "train.jsonl", [chat("a", "b"), line])
    options = ("--model", tiny_model, "--data", data.parent, "--max-seq-length", 64)
    error = refused(capsys, "train", *options, "--lora-layers", 2)
    assert re.search(message, error)


def test_missing_and_empty_data_are_refused(capsys, own_folder, tiny_model):
    (own_folder / "empty").mkdir()
    write_rows(own_folder / "none" / "train.jsonl", [])
    model = ("--model", tiny_model, "--lora-layers", 1)
    assert "nowhere: no such file or folder" in refused(
        capsys, "train", *model, "--data", "nowhere"
    )
    assert "has no train.jsonl" in refused(capsys, "train", *model, "--data", "empty")
    assert "the file is empty" in refused(capsys, "train", *model, "--data", "none")


def test_invalid_models_are_refused(capsys, own_folder, tiny_model, data_folder):
    def copy(name: str):
        return shutil.copytree(tiny_model, own_folder / name)

    (copy("no-config") / "config.json").unlink()
    (copy("no-weights") / "model.safetensors").unlink()
    short = copy("short") / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-100])
    odd = copy("odd") / "config.json"
    odd.write_text(odd.read_text().replace('"llama"', '"unheard-of"'))
    for name, message in {
        "no-config": "config.json: is missing",
        "no-weights": "has no model*.safetensors",
        "short": "model.safetensors: is cut short",
        "odd": "unheard-of not supported",
        "absent": "no such folder or alias",
    }.items():
        error = refused(capsys, "train", "--model", name, "--data", data_folder)
        assert message in error


def test_invalid_options_are_refused(capsys, tiny_model, data_folder):
    base = ("train", "--model", tiny_model, "--data", data_folder)
    for options, message in {
        ("--lora-layers", "0"): "must be at least 1, or all",
        ("--lora-layers", "4"): "the model has 3 blocks",
        ("--lora-layers", "1", "--lora-targets", "q_prj"): "did you mean q_proj?",
        ("--batch-sise", "2"): "--batch-sise",
        ("--batch-size",): "--batch-size",
        ("--optimizer", "adam", "--weight-decay", "1"): "--optimizer adam does not support it",
        ("--config", "x", "--resume", "y"): "cannot be combined with --config",
        ("--resume", "y"): "no run named y",
        ("--run", "a/b"): "use at most 100 letters",
        ("--lora-layers", "1", "--quantize", "4"): "is already quantized to 4 bits",
    }.items():
        assert message in refused(capsys, *base, *options)
    assert "no run named x" in refused(capsys, "generate", "--run", "x", "--prompt", "hi")


def test_a_value_that_is_no_choice_is_named_without_words_of_the_parser(capsys):
    error = refused(capsys, "export", "r", "--to", "ggml")
    assert error.startswith("error: Invalid value for '--to': 'ggml' is not one of 'mlx', 'peft'")


def test_unwritable_runs_folder_is_reported(capsys, tiny_model, data_folder):
    with open("runs", "w"):
        pass  # a file instead of the folder: even root cannot write into it
    assert call("train", "--model", tiny_model, "--data", data_folder) == 2
    assert "cannot be written" in capsys.readouterr().err
    os.remove("runs")


@pytest.fixture
def options(tiny_model, data_folder) -> list[object]:
    data = ["--model", tiny_model, "--data", data_folder, "--samples", 0]
    return ["train", "--no-supervise", *data, "--lora-layers", 1, "--batch-size", 4]


def test_train_resume_generate(capsys, options, own_folder):
    assert call(*options, "--run", "first", "--max-steps", 2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step 1/2  loss ") for line in lines)
    assert "adapter: runs/first/adapter" in lines
    assert call("train", "--resume", "first", "--max-steps", 3) == 0
    assert "resuming at step 2" in capsys.readouterr().out
    assert call("generate", "--run", "first", "--prompt", "hi", "--max-tokens", 4) == 0
    assert call("generate", "--run", "first", "--prompt", "hi", "--no-adapter") == 0


def test_fewer_steps_than_were_asked_for_are_named(capsys, options):
    assert call(*options, "--max-steps", 99, "--epochs", 1) == 0
    assert "--max-steps 99: --epochs ends the run after 3 steps" in capsys.readouterr().out


def test_supervised_run_resumes_with_other_settings(capsys, options):
    assert call(*options, "--run", "first", "--max-steps", 2) == 0
    assert call("train", "--resume", "first", "--max-steps", 3, "--supervise") == 0
    assert "resuming at step 2" in capsys.readouterr().out
    steps = events_of(RunFolder(Path("runs/first")), events.Step)
    assert [event.step for event in steps] == [1, 2, 3]
    before = Path("runs/first/config.yaml").read_bytes()
    assert call("train", "--resume", "first", "--max-steps", 1, "--no-supervise") == 2
    assert "has done 3 steps already" in capsys.readouterr().err
    assert Path("runs/first/config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (("frobnicate",), "your_ai"),
        (("models", "frobnicate"), "your_ai models"),
        (("export", "r", "--to", "ggml"), "your_ai export"),
    ],
)
def test_what_cannot_be_parsed_points_to_the_help_of_its_command(capsys, arguments, asked):
    assert refused(capsys, *arguments).strip().endswith(f"(see {asked} --help)")


def test_internal_error_is_one_line_and_debug_shows_the_traceback(capsys, options, monkeypatch):
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("no such luck")

    monkeypatch.setattr("your_ai.training.train.prepare", broken)
    assert call(*options, "--run", "a") == 1
    error = capsys.readouterr().err
    assert "ZeroDivisionError: no such luck" in error
    assert "Traceback" not in error
    assert call(*options, "--run", "a", "--debug") == 1
    assert "Traceback" in capsys.readouterr().err


def test_version_and_help(capsys):
    assert call("--version") == 0
    assert "your_ai 0." in capsys.readouterr().out
    assert call() == 0
    assert "train" in capsys.readouterr().out


def test_refused_resume_does_not_change_the_run(capsys, options, own_folder, data_folder):
    options[options.index(data_folder)] = data_folder / "train.jsonl"  # no test rows
    assert call(*options, "--run", "first", "--max-steps", 2) == 0
    before = Path("runs/first/config.yaml").read_bytes()
    for change in (("--exact-match",), ("--max-steps", 1), ("--seed", 4)):
        assert call("train", "--resume", "first", *change) == 2
        assert Path("runs/first/config.yaml").read_bytes() == before
    assert call("train", "--resume", "first", "--max-steps", 3) == 0


def test_run_can_be_resumed_from_any_folder(
    capsys, options, own_folder, tiny_model, data_folder, monkeypatch
):
    options[options.index(tiny_model)] = os.path.relpath(tiny_model)
    options[options.index(data_folder)] = os.path.relpath(data_folder)
    assert call(*options, "--run", "first", "--max-steps", 1) == 0
    (own_folder / "elsewhere").mkdir()
    monkeypatch.chdir(own_folder / "elsewhere")
    assert call("train", "--resume", "../runs/first", "--max-steps", 2) == 0
    assert call("generate", "--run", "../runs/first", "--prompt", "hi", "--max-tokens", 2) == 0


def test_printed_command_is_correct_from_any_folder(capsys, options, own_folder, monkeypatch):
    assert call(*options, "--run", "first", "--max-steps", 1) == 0
    assert "try it: your_ai chat first; evaluate it: your_ai eval first" in capsys.readouterr().out
    (own_folder / "else where").mkdir()
    monkeypatch.chdir(own_folder / "else where")
    assert call("train", "--resume", own_folder / "runs" / "first", "--max-steps", 2) == 0
    out = capsys.readouterr().out
    assert f"your_ai chat {own_folder}/runs/first;" in out


def test_settings_edited_in_the_run_folder_are_refused(capsys, options):
    assert call(*options, "--run", "first", "--max-steps", 1) == 0
    path = Path("runs/first/config.yaml")
    path.write_text(path.read_text().replace("optimizer: adamw", "optimizer: sgd"))
    assert call("train", "--resume", "first", "--max-steps", 2) == 2
    assert "the settings changed since the run began (optimizer)" in capsys.readouterr().err


def test_damaged_token_cache_is_rebuilt(capsys, options, own_folder):
    assert call(*options, "--run", "whole", "--max-steps", 4) == 0
    assert call(*options, "--run", "cut", "--max-steps", 2) == 0
    for path in (own_folder / "home" / "cache" / "examples").glob("*/tokens.bin"):
        flip(path)
    assert call("train", "--resume", "cut", "--max-steps", 4) == 0
    adapters = [Path(f"runs/{run}/adapter/adapters.safetensors") for run in ("whole", "cut")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()


def test_half_precision_on_the_cpu_prints_a_note(capsys, options):
    assert call(*options, "--run", "a", "--max-steps", 1, "--dtype", "bfloat16") == 0
    assert "use --dtype float32" in capsys.readouterr().out


def test_exact_match_is_independent_of_prompt_masking(capsys, options):
    options = [*options, "--exact-match", "--max-steps", 1]
    assert call(*options, "--run", "masked") == 0
    masked = capsys.readouterr().out.splitlines()[-1]
    assert call(*options, "--run", "whole", "--no-mask-prompt") == 0
    assert capsys.readouterr().out.splitlines()[-1] == masked


def test_rows_with_only_zero_weights_are_refused(capsys, own_folder, tiny_model):
    train = ("train", "--model", tiny_model, "--data", "d")
    write_rows(own_folder / "d" / "train.jsonl", [chat("a", "b", weight=0)])
    assert "every row has weight 0" in refused(capsys, *train)
    write_rows(own_folder / "d" / "train.jsonl", [chat("a", "b")])
    write_rows(own_folder / "d" / "valid.jsonl", [chat("a", "b", weight=0)])
    error = refused(capsys, *train)
    assert "d/valid.jsonl: every validation row has weight 0: there is nothing to measure" in error


def test_a_refusal_names_the_file_of_the_user_and_not_the_converted_one(
    capsys, own_folder, tiny_model
):
    (own_folder / "mine.csv").write_text("prompt,completion,weight\na,b,0\n")
    (own_folder / "valid.csv").write_text("prompt,completion,weight\na,b,0\nc,d,1\n")
    given = ["train", "--model", tiny_model, "--data", "mine.csv"]
    assert "error: mine.csv: every row has weight 0" in refused(capsys, *given)
    given = [*given[:-1], "valid.csv", "--valid", "mine.csv"]
    assert "error: mine.csv: every validation row has weight 0" in refused(capsys, *given)
    (own_folder / "d").mkdir()
    (own_folder / "d" / "train.csv").write_text("prompt,completion\na b c d,b\n")
    given = [*given[:-3], "d", "--max-seq-length", 2, "--too-long", "truncate"]
    assert "error: train.csv: no row has an answer within" in refused(capsys, *given)


def test_resume_notes_the_new_end_of_a_decaying_learning_rate(capsys, options):
    assert call(*options, "--run", "a", "--max-steps", 2, "--lr-schedule", "linear") == 0
    assert call("train", "--resume", "a", "--max-steps", 4) == 0
    assert "the learning rate now falls to 0 at step 4" in capsys.readouterr().out


def test_output_encoding_that_lacks_characters_does_not_end_the_run(
    options, own_folder, data_folder
):
    rows = [chat("Füße?", "Ja, größer \N{GRINNING FACE}")] * 2
    write_rows(data_folder / "test.jsonl", rows)
    command = [sys.executable, "-m", "your_ai", *map(str, options), "--run", "a"]
    done = subprocess.run(
        [*command, "--max-steps", "1", "--samples", "1"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"F??e?" in done.stdout


def test_closed_standard_streams_are_replaced_by_empty_ones(own_folder):
    """A shell closes them with `<&- >&-`; the next opened file would get their descriptors."""
    (own_folder / "runs" / "a").mkdir(parents=True)
    RunFolder(own_folder / "runs" / "a").write_config(TrainConfig(model="demo", data="demo"))
    command = shlex.join([sys.executable, "-m", "your_ai", "generate", "a"])
    done = subprocess.run(
        f"{command} --no-adapter <&- >&-", shell=True, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, b"error: stdin: is empty; enter some text\n")


def test_failed_run_with_a_broken_display_is_kept(capsys, options, monkeypatch):
    def broken(*arguments: object) -> str:
        raise ValueError("no such view")

    def failing(*arguments: object) -> None:
        raise ZeroDivisionError("in the first step")

    monkeypatch.setattr("your_ai.dashboard.view.event_line", broken)
    monkeypatch.setattr("your_ai.training.train.train_step", failing)
    assert call(*options, "--run", "first") == 1
    assert os.path.isdir("runs/first/checkpoints/step-000000")


WAITING = """
import sys, time
from your_ai import cli

@cli.app.command()
def wait():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("cleaned", flush=True)

sys.argv = ["your_ai", "wait"]
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_command_as_ctrl_c_does(number):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert out == "cleaned\n"
    assert error.strip() in ("", "interrupted")
    assert process.returncode == 128 + number


def test_signals_do_not_change_the_status_while_python_ends():
    """A closing terminal sends several; the last ones come late."""
    script = (
        "import atexit, signal, sys\n"
        "def show():\n"
        "    both = (signal.SIGHUP, signal.SIGTERM)\n"
        "    print([signal.getsignal(n) is signal.SIG_IGN for n in both])\n"
        "atexit.register(show)  # the first is called last\n"
        "sys.argv = ['your_ai', '--version']\n"
        "from your_ai.cli import main\n"
        "main()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "[True, True]"
    assert ended.returncode == 0
