"""`your_ai eval` on a small run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import chat, refused, write_rows
from tests.evaluation.conftest import trained_run
from tests.fault.processes import COMMAND, call
from your_ai.evaluation import compare, record
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder

STOPPING_METRIC = "import os, signal\ndef f(*_): os.kill(os.getpid(), signal.SIGINT)\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_model) -> Path:
    return trained_run(tmp_path_factory.mktemp("run"), tiny_model, save_every=20)


@pytest.fixture
def run(made, own_folder) -> RunFolder:
    """A copy of the run, in runs/ of the current folder."""
    return RunFolder(shutil.copytree(made, own_folder / "runs" / "r").relative_to(own_folder))


def test_a_table_is_called_by_its_own_name_and_not_by_its_copy(run, capsys):
    Path("mine.csv").write_text("prompt,completion\na,b\nc,d\n")
    status, out, error = call(capsys, "eval", "r", "--data", "mine.csv", "--resamples", "10")
    assert status == 0
    assert out.startswith("r, step 40, on mine.csv: 2 rows, ")
    assert "note: evaluating on mine.csv\n" in error


def test_columns_of_other_rows_are_named(run, capsys):
    Path("mine.csv").write_text("they,we\na,b\nc,d\n")
    error = refused(capsys, "eval", "r", "--data", "mine.csv")
    assert error.endswith("say what they are with --columns prompt=they,completion=we\n")
    options = ("--columns", "prompt=they", "--columns", "completion=we", "--resamples", "10")
    status, out, _ = call(capsys, "eval", "r", "--data", "mine.csv", *options)
    assert status == 0
    assert out.startswith("r, step 40, on mine.csv: 2 rows, ")
    assert refused(capsys, "eval", "r", *options).startswith("error: --columns: ")


def test_evaluates_a_run_on_its_own_test_rows(run, capsys):
    status, out, error = call(capsys, "eval", "r", "--resamples", "100")
    assert status == 0
    assert out.startswith("r, step 40, on test.jsonl: 8 rows, ")
    assert "evaluating on " in error
    assert "test.jsonl\n" in error
    assert "note: 2 of 8 rows are also in the run's training data" in error


def test_without_a_name_the_newest_run_is_evaluated(run, capsys):
    status, out, error = call(capsys, "eval", "--resamples", "10")
    assert status == 0
    assert out.startswith("r, step 40, on test.jsonl: 8 rows, ")
    assert error.splitlines()[0] == "run: r (the newest)"


def test_json_output_equals_the_evaluation_saved_in_the_run(run, capsys):
    status, out, _ = call(capsys, "eval", "r", "--json", "--worst", "1", "--confidence", "0.5")
    assert status == 0
    assert json.loads(out) == record.read_evaluation(run)
    assert json.loads(out)["confidence"] == 0.5
    again = call(capsys, "eval", "r", "--json", "--worst", "1", "--confidence", "0.5")[1]
    assert again == out
    other = call(capsys, "eval", "r", "--json", "--seed", "1", "--batch-size", "5")[1]
    assert json.loads(other)["measures"] != json.loads(out)["measures"]


@pytest.mark.parametrize("asked", ["best", "20"])
def test_checkpoint_option_evaluates_that_checkpoint(run, capsys, asked):
    step = checkpoint.best_step(run.checkpoints) if asked == "best" else int(asked)
    out = json.loads(call(capsys, "eval", "r", "--json", "--checkpoint", asked)[1])
    assert (out["step"], out["checkpoint"]) == (step, f"step-{step:06d}")
    assert record.read_evaluation(run) == out


def test_metric_is_imported_from_the_current_folder(run, capsys):
    write_rows(Path("rows.jsonl"), [chat("Question", "Answer")] * 2 + [{"text": "no question"}])
    Path("metric_ok.py").write_text("def f(answer, expected, row): return expected == 'Answer'\n")
    options = ("--data", "rows.jsonl", "--metric", "metric_ok:f", "--max-tokens", "3", "--json")
    status, out, _ = call(capsys, "eval", "r", *options)
    assert (status, json.loads(out)["metric_name"]) == (0, "metric_ok:f")
    always = json.loads(out)["measures"]["metric"]["adapter"]
    assert (always["value"], always["high"]) == (1, 1)
    assert always["low"] == pytest.approx(0.342, abs=0.001)  # 2 of 2 rows
    assert json.loads(out)["data"] == "rows.jsonl"


def test_wrong_answers_are_shown_first_with_those_of_the_base(run, capsys):
    write_rows(Path("rows.jsonl"), [chat("Question", answer) for answer in ("a", "b", "c", "d")])
    Path("metric_b.py").write_text("def f(answer, expected, row): return expected != 'b'\n")
    options = ("--data", "rows.jsonl", "--metric", "metric_b:f", "--max-tokens", "3")
    status, out, _ = call(capsys, "eval", "r", *options, "--worst", "2")
    assert status == 0
    shown = out[out.index("Lowest score with the adapter:") :].splitlines()
    assert shown[1] == "  rows.jsonl:2  score 0.000 -> 0.000"
    labels = [line.split(":")[0].strip() for line in shown[2:6]]
    assert labels == ["prompt", "expected", "base", "adapter"]
    worst = json.loads(call(capsys, "eval", "r", *options, "--json")[1])["worst"]
    assert worst[0]["where"] == "rows.jsonl:2"
    assert shown[4].split(":", 1)[1].split() == worst[0]["base_answer"].split()
    assert shown[5].split(":", 1)[1].split() == worst[0]["answer"].split()
    assert len([row for row in worst if "score" in row["by"]]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--data", "bad.jsonl"], "bad.jsonl:2: unknown row format"),
        (["--metric", "absent_module:f"], "absent_module cannot be imported"),
        (["--metric", "metric_bad:f"], "test.jsonl:1: --metric metric_bad:f raised KeyError: 'x'"),
        (["--confidence", "1"], "--confidence 1: must be above 0 and below 1"),
        (["--confidence", "nan"], "--confidence nan: must be above 0"),
        (["--checkpoint", "7"], "--checkpoint 7: "),
        (["--batch-size", "0"], "--batch-size"),
        (["--max-memory", "0.01"], "evaluating does not fit into 0.01 GB"),
    ],
)
def test_invalid_input_is_reported_in_one_line(run, capsys, options, message):
    write_rows(Path("bad.jsonl"), [chat("a", "b"), {"x": 1}])
    Path("metric_bad.py").write_text("def f(answer, expected, row): return row['x']\n")
    status, out, error = call(capsys, "eval", "r", "--max-tokens", "2", *options)
    assert (status, out) == (2, "")
    assert message in error.splitlines()[-1]
    assert len(error.splitlines()) <= 2  # the other line is "evaluating on ..."
    assert record.read_evaluation(run) is None


def test_results_are_shown_even_if_they_cannot_be_saved(run, capsys):
    run.path.joinpath("evaluation.json").mkdir()
    status, out, error = call(capsys, "eval", "r")
    assert status == 1
    assert out.startswith("r, step 40")
    assert "evaluation.json: cannot be written" in error.splitlines()[-1]
    assert not list(run.path.glob("*.tmp"))


def test_ctrl_c_keeps_the_previous_evaluation(run, capsys):
    record.write_evaluation(run, {"version": 1, "rows": 0})
    Path("metric_stop.py").write_text(STOPPING_METRIC)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "eval", "r", "--metric", "metric_stop:f",
         "--max-tokens", "2"],
        capture_output=True, text=True, check=False, env=dict(os.environ),
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "interrupted: nothing of this evaluation is kept"
    assert record.read_evaluation(run) == {"version": 1, "rows": 0}
    assert not list(run.path.glob("*.tmp"))


def test_running_out_of_memory_is_reported(run, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("[malloc] Unable to allocate 8 bytes.")
        yield

    monkeypatch.setattr(compare, "measure_rows", fail)
    status, _, error = call(capsys, "eval", "r")
    assert status == 1
    assert "out of memory" in error.splitlines()[-1]
    assert checkpoint.fault(run.adapter, (checkpoint.ADAPTERS,)) is None


# -- policies in conversations

SHOP = """
class Shop:
    def reset(self, row, seed):
        self.row = row
        return {"messages": [{"role": "user", "content": row["prompt"]}]}

    def step(self, message):
        return {"messages": [], "reward": self.row["pays"], "done": True}

    def close(self):
        pass

class Closed(Shop):
    def reset(self, row, seed):
        raise ValueError("the shop is closed")

class Stepless:
    def reset(self, row, seed):
        pass
"""
IN_SHOP = ("eval", "r", "--data", "rows.jsonl", "--max-tokens", "4", "--resamples", "10")


@pytest.fixture
def shop(run) -> RunFolder:
    """The run, trained without conversations, with rows for an environment."""
    Path("shops.py").write_text(SHOP)
    write_rows(Path("rows.jsonl"), [{"prompt": "Hello", "pays": pays} for pays in (1, 0, 0.5, 1)])
    return run


def test_a_run_is_measured_in_an_environment(shop, capsys):
    """The base has random weights, and never ends its answer."""
    of_zero = (*IN_SHOP, "--environment", "shops:Shop", "--success-reward", "0")
    status, out, error = call(capsys, *of_zero)
    assert status == 0
    assert out.startswith("r, step 40, on rows.jsonl: 4 rows\n")
    assert "note: evaluating on rows.jsonl\n" in error
    [success] = [line for line in out.splitlines() if line.startswith("success")]
    assert re.sub(r" +", " ", success).startswith("success 100.0% [51.0, 100.0] 100.0%")
    assert "Conversations with --environment shops:Shop, one for each row.\n" in out
    assert "Success: a reward of at least 0.\n" in out
    assert "Ended, base: --max-new-tokens 4; without a reward: 0.\n" in out
    status, out, _ = call(capsys, *IN_SHOP, "--environment", "shops:Shop", "--json")
    found = json.loads(out)
    assert found == record.read_evaluation(shop)
    assert found["measures"]["success"]["base"]["value"] == 0
    shutil.copytree(shop.path, shop.path.with_name("s"))
    status, out, _ = call(capsys, "compare", "r", "s")
    assert status == 0
    assert "success" in out


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--environment", "nowhere:Shop"], "nowhere:Shop: nowhere cannot be imported"),
        (["--environment", "shops:Stepless"], "shops:Stepless: has no method step"),
        (["--environment", "shops:Closed"], ": the environment cannot begin: reset: ValueError"),
        (["--environment", "shops:Shop", "--tools", "shops"], "--tools: cannot be combined"),
        (["--tools", "json:dumps", "--metric", "m:f"], "--metric: conversations are measured"),
        (["--tools", "json:dumps"], "rows.jsonl:1: has no expected answer, and the run has no"),
        (["--success-reward", "1"], "--success-reward: only works with --environment"),
    ],
)
def test_what_cannot_be_measured_in_conversations_is_the_last_line(shop, capsys, options, wanted):
    status, out, error = call(capsys, *IN_SHOP, *options)
    lines = error.splitlines()
    assert (status, out) == (2, "")
    assert wanted in lines[-1]
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert record.read_evaluation(shop) is None
