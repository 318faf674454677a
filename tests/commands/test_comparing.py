from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import call
from tests.dashboard.frames import record, step
from your_ai.config import build
from your_ai.evaluation.show import adapter_values
from your_ai.run import events, folder


def make(name, losses=(2.0, 1.0), **settings):
    run = folder.create(build({"model": "m", "data": "d", "run": name, **settings}, "test"))
    lines = [events.to_line(record(step(i + 1, loss=loss))) for i, loss in enumerate(losses)]
    run.events.write_text("".join(lines))
    return run


def interval(value):
    return {"value": value, "low": value, "high": value}


EVALUATION = {
    "version": 1, "data": "test.jsonl", "rows": 20, "step": 2, "metric_name": None,
    "measures": {"exact_match": dict.fromkeys(("base", "adapter", "difference"), interval(0.5))},
}  # fmt: skip


def test_runs_are_compared_by_name_and_folder(own_folder, capsys):
    first, _ = make("a", lora_rank=4), make("b", lora_rank=8)
    (first.path / "evaluation.json").write_text(json.dumps(EVALUATION))
    assert call("compare", first.path, "b") == 0
    out, error = capsys.readouterr()
    assert "1 a" in out
    assert "2 b" in out
    assert "lora_rank" in out
    assert "50.0% [50.0, 50.0]" in " ".join(out.split())
    assert "loss by step" in out
    assert error == ""
    assert "\x1b" not in out


def test_the_page_is_written_and_named(own_folder, capsys):
    make("a")
    make("b")
    assert call("compare", "a", "b", "--html", "c.html") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "c.html"
    assert Path("c.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("a",), "error: give two runs or more; your_ai runs lists them\n"),
        (("a", "runs/a"), "error: runs/a: is given twice\n"),
        (("a", "aa"), "/runs; did you mean a?\n"),
    ],
)
def test_names_that_are_not_two_runs_are_refused(own_folder, capsys, names, text):
    make("a")
    assert call("compare", *names) == 2
    assert capsys.readouterr().err.endswith(text)


BROKEN = {
    "config cut": lambda run: run.config.write_text("model: x\n"),
    "config binary": lambda run: run.config.write_bytes(b"\xff\xfe"),
    "events binary": lambda run: run.events.write_bytes(b"\x00" * (1 << 21)),
    "no events": lambda run: run.events.unlink(),
    "wrong types": lambda run: run.events.write_text(
        run.events.read_text().replace('"loss":', '"loss":"x","l":')
    ),
    "events a folder": lambda run: (run.events.unlink(), run.events.mkdir()),
    "evaluation": lambda run: (run.path / "evaluation.json").write_text('{"version": 1}'),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_run_is_a_line_and_not_the_end(own_folder, capsys, how):
    make("a")
    BROKEN[how](make("b"))
    assert call("compare", "a", "b") == 0
    out, error = capsys.readouterr()
    assert "1 a" in out
    assert error.count("\n") == (how != "evaluation")
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "found",
    [None, {}, {**EVALUATION, "measures": []}, {**EVALUATION, "rows": "x"},
     {**EVALUATION, "measures": {"loss": {"adapter": 3}}}, {**EVALUATION, "step": []}],
)  # fmt: skip
def test_an_evaluation_of_another_form_has_no_values(found):
    assert adapter_values(found) == {}
