"""`your_ai init` asks, writes a file for `train` and `plan`, and leaves nothing half-written."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import call, write_rows
from tests.data.test_records import write_csv
from your_ai.commands import beginning
from your_ai.config import TrainConfig, resolve
from your_ai.doctor import recommend
from your_ai.hub.registry import known
from your_ai.run.folder import create

PAIRS = [{"prompt": f"q{i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
ANSWERS = [{"prompt": f"q{i}", "completion": "yes"} for i in range(4)]
HARD = "my 'data' \"x\": #1 é 名.jsonl"
QUICK = ("--model", "demo", "--yes")


class Typed(io.StringIO):
    """What a user types; Ctrl-C is the end if `interrupts`."""

    interrupts = False

    def isatty(self) -> bool:
        return True

    def readline(self, *size: int) -> str:
        line = super().readline(*size)
        if not line and self.interrupts:
            raise KeyboardInterrupt
        return line


def type_in(monkeypatch, *lines: str, interrupts: bool = False) -> None:
    typed = Typed("".join(f"{line}\n" for line in lines))
    typed.interrupts = interrupts
    monkeypatch.setattr(sys, "stdin", typed)
    monkeypatch.setattr(beginning, "recommended", lambda given: "demo")  # it takes half a second


def written(path: str = "your_ai.yaml") -> TrainConfig:
    return resolve({}, path)


def whole(name: str) -> str:
    return str(Path(name).absolute())


def refused(capsys, *arguments: object, status: int = 2) -> str:
    before = {*os.listdir(), "home"}  # there is the cache of converted rows
    assert call("init", *arguments) == status
    assert {*os.listdir(), "home"} == before
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    return error


def test_defaults_are_the_recommended_model_and_the_data_that_is_there(capsys, monkeypatch):
    few = {name: known()[name] for name in ("smollm2-135m", "qwen3-0.6b", "llama-1b")}
    monkeypatch.setattr(recommend, "known", lambda: few)  # planning all takes a second
    write_rows(Path("data/train.jsonl"), ANSWERS)
    assert call("recommend", "--json") == 0
    best = json.loads(capsys.readouterr().out)["recommendations"][0]["alias"]
    assert call("init", "--yes") == 0
    out = capsys.readouterr().out
    assert "jsonl: 4 rows, prompt + completion" in out
    assert out.endswith("wrote your_ai.yaml; next:\n  your_ai train --config your_ai.yaml\n")
    config = written()
    assert (config.model, config.data, config.objective) == (best, whole("data"), "sft")
    assert (config.max_memory, config.run) == (None, "")


def test_without_data_the_demo_is_taken():
    assert call("init", *QUICK) == 0
    assert written().data == "demo"


@pytest.mark.parametrize(
    ("rows", "objective", "reward"),
    [
        (PAIRS, "dpo", ()),
        ([{**row, "label": i % 2 == 0} for i, row in enumerate(ANSWERS)], "kto", ()),
        (ANSWERS, "sft", ()),
        ([{"instruction": "q", "output": "a"}], "sft", ()),
        ([{"text": "once"}], "sft", ()),
        ([{"prompt": "2+2?", "answer": "4"}], "sft", ()),
        ([{"prompt": [{"role": "user", "content": "2+2?"}]}], "grpo", ("length:200",)),
        ([{"prompt": [{"role": "user", "content": "q"}], "solution": "4"}], "sft", ()),
    ],
)  # fmt: skip
def test_columns_say_what_the_data_is_for(rows, objective, reward):
    write_rows(Path("rows.jsonl"), rows)
    assert call("init", *QUICK, "--data", "rows.jsonl") == 0
    assert (written().objective, written().reward) == (objective, reward)


def test_table_is_read_with_the_reader_of_training(capsys):
    write_csv(Path("a.csv"), [{"question": f"Ask {i}", "answer": f"Yes {i}"} for i in range(9)])
    assert call("init", *QUICK, "--data", "a.csv") == 0
    assert "  data: csv: 9 rows, prompt + completion\n" in capsys.readouterr().out


def test_rows_that_training_refuses_are_reported(capsys):
    write_rows(Path("a.jsonl"), [*ANSWERS, {"prompt": "q", "completion": " "}])
    assert call("init", *QUICK, "--data", "a.jsonl") == 0
    assert "training refuses 1, first: a.jsonl:5: no answer" in capsys.readouterr().out


def test_answers_that_are_typed_are_asked_again_until_they_are_valid(capsys, monkeypatch):
    write_rows(Path(HARD), PAIRS)
    type_in(monkeypatch, "demmo", "demo", "nowhere", HARD, "sft", "", "lots", "0.5", "a b", "mine")
    assert call("init") == 0
    output = capsys.readouterr()
    assert output.err.count("error: ") == 5
    config = written()
    assert (config.model, config.data, config.objective) == ("demo", whole(HARD), "dpo")
    assert (config.max_memory, config.run) == (0.5, "mine")


def test_options_are_not_asked_for(capsys, monkeypatch):
    type_in(monkeypatch, "auto")
    arguments = ("--model", "demo", "--data", "demo", "--objective", "sft", "--max-memory", "1")
    assert call("init", *arguments) == 0
    assert capsys.readouterr().out.count("[auto]") == 1


@pytest.mark.parametrize(("interrupts", "count"), [(True, 2), (False, 2), (False, 0)])
def test_interrupt_and_end_of_input_write_nothing(capsys, monkeypatch, interrupts, count):
    write_rows(Path("data/train.jsonl"), ANSWERS)
    type_in(monkeypatch, *["", ""][:count], interrupts=interrupts)
    assert refused(capsys, status=130).endswith("interrupted")


def test_input_that_is_no_terminal_is_refused_and_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("demo\n"))
    error = refused(capsys, "--model", "demo", "--run", "r")
    assert "--data, --objective, --max-memory;" in error
    every = ("--data", "demo", "--objective", "sft", "--max-memory", "auto", "--run", "r")
    assert call("init", "--model", "demo", *every) == 0


def test_file_is_not_overwritten_without_force(capsys):
    Path("your_ai.yaml").write_text("mine")
    assert "--force" in refused(capsys, *QUICK)
    assert Path("your_ai.yaml").read_text() == "mine"
    assert call("init", *QUICK, "--force") == 0
    assert written().model == "demo"


def test_places_that_are_no_files_are_refused(capsys):
    Path("d").mkdir()
    Path("link").symlink_to("elsewhere")
    for place in ("d", "link", "/dev/null", "none/c.yaml"):
        refused(capsys, place, *QUICK, "--force")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model", ""), ("--model", "../none"), ("--data", "none.jsonl"), ("--data", "-"),
        ("--data", "a\nb"), ("--objective", "sftt"), ("--objective", "soft"),
        ("--objective", "dpo"), ("--max-memory", "0"), ("--max-memory", "nan"),
        ("--max-memory", "1e9"), ("--run", "a/b"), ("--run", ".."),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(capsys, option, value):
    write_rows(Path("data/train.jsonl"), ANSWERS)
    given = {"--model": "demo"} | {option: value}
    refused(capsys, "--yes", *(text for pair in given.items() for text in pair))


def made_run(name: str, objective: str, with_adapter: bool = True) -> None:
    run = create(TrainConfig(model="m", data="d", run=name, objective=objective))
    if with_adapter:
        run.adapter.mkdir()


def test_soft_trains_against_the_newest_reward_model(capsys):
    write_rows(Path("prompts.jsonl"), [{"prompt": f"q{i}"} for i in range(4)])
    asked = (*QUICK, "--data", "prompts.jsonl", "--objective", "soft")
    made_run("policy", "sft")
    made_run("untrained", "reward", with_adapter=False)
    assert "your_ai train --objective reward" in refused(capsys, *asked)
    made_run("rm", "reward")
    assert call("init", *asked) == 0
    assert "run:rm" in capsys.readouterr().out
    config = written()
    assert (config.objective, config.reward_model) == ("soft", f"run:{Path('runs/rm').absolute()}")


def test_failed_write_leaves_nothing(capsys, monkeypatch):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("your_ai.files.replace_text", full)
    assert "No space left" in refused(capsys, *QUICK)


def test_file_works_for_plan_and_for_train(capsys):
    write_rows(Path(HARD), [{"prompt": f"q{i}", "completion": "a"} for i in range(4)])
    name = "set: up #1.yaml"
    options = ("--run", "r", "--objective", "sft", "--max-memory", "2")
    assert call("init", name, *QUICK, "--data", HARD, *options) == 0
    assert "your_ai train --config 'set: up #1.yaml'" in capsys.readouterr().out
    assert call("plan", "--config", name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == 2_000_000_000
    assert call("train", "--config", name, "--samples", 0, "--no-supervise", "--max-steps", 1) == 0
    saved = resolve({}, "runs/r/config.yaml")
    assert saved.data == str(Path(HARD).resolve())


def test_data_folder_without_rows_is_not_the_default():
    Path("data").mkdir()
    assert beginning.data_here() == "demo"


TICKETS = [{"nr": i, "they_wrote": f"Where is parcel {i}?", "we_said": "On its way."} for i in
           range(9)]  # fmt: skip
JUDGED = [{"they_wrote": f"Parcel {i}?", "good": "On its way.", "bad": "No."} for i in range(9)]


def test_unknown_columns_are_asked_for_and_written(capsys, monkeypatch):
    write_csv(Path("tickets.csv"), TICKETS)
    answers = ("they_wrot", "they_wrote", "they_wrote", "", "", "")  # two are wrong
    type_in(monkeypatch, "", *answers, interrupts=True)
    arguments = ("--data", "tickets.csv", "--max-memory", "auto", "--run", "r", "--model", "demo")
    assert call("init", *arguments) == 0
    output = capsys.readouterr()
    for number in range(3):
        assert f"they_wrote: Where is parcel {number}?" in output.out
    assert "parcel 3?" not in output.out
    assert "Which column is the question [they_wrote]" in output.out
    assert "Which column is the answer [we_said]" in output.out
    assert "no column they_wrot; did you mean they_wrote?" in output.err
    assert "they_wrote is already the question" in output.err
    assert written().columns == ("prompt=they_wrote", "completion=we_said")
    assert call("plan", "--config", "your_ai.yaml") == 0


@pytest.mark.parametrize("given", [(), ("--objective", "dpo")])
def test_columns_of_pairs_are_asked_for(capsys, monkeypatch, given):
    write_csv(Path("judged.csv"), JUDGED)
    type_in(monkeypatch, *[""] * (3 if given else 4), interrupts=True)
    arguments = ("--data", "judged.csv", "--max-memory", "auto", "--run", "r", "--model", "demo")
    assert call("init", *arguments, *given) == 0
    assert "Which column is the bad answer [bad]" in capsys.readouterr().out
    assert written().columns == ("prompt=they_wrote", "chosen=good", "rejected=bad")
    assert written().objective == "dpo"


def test_columns_are_an_option(capsys):
    write_csv(Path("judged.csv"), JUDGED)
    columns = "prompt=they_wrote,chosen=good,rejected=bad"
    assert call("init", *QUICK, "--data", "judged.csv", "--columns", columns) == 0
    assert (written().objective, written().columns) == ("dpo", tuple(columns.split(",")))
    error = refused(capsys, "other.yaml", *QUICK, "--data", "judged.csv", "--objective", "dpo")
    assert error.endswith(f"--columns {columns}")


def test_file_works_from_any_folder(capsys, tmp_path_factory, monkeypatch):
    write_csv(Path("tickets.csv"), TICKETS)
    columns = "prompt=they_wrote,completion=we_said"
    assert call("init", *QUICK, "--data", "tickets.csv=2", "--columns", columns) == 0
    file = whole("your_ai.yaml")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert call("plan", "--config", file) == 0
