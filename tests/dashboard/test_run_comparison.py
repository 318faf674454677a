"""Runs side by side, in a terminal and as a page."""

from __future__ import annotations

import io
import math
import re
from pathlib import Path

import pytest

from tests.dashboard import frames
from tests.dashboard.frames import record, rewarded, step
from your_ai.config import build
from your_ai.dashboard.run_comparison import (
    LOSS,
    VALIDATION,
    ComparedRun,
    compared_run,
    differing,
    notes,
    renderable,
    results,
    shared_curves,
    write_comparison,
)
from your_ai.gates.console import open_console

NASTY = "</pre><script>alert(1)</script>\x1b[2J"


def config(**settings):
    return build({"model": "m", "data": "d", **settings}, "test")


def past(losses, validation=None, **changes):
    found = [record(step(i + 1, loss=loss, **changes)) for i, loss in enumerate(losses)]
    if validation is not None:
        found.append(record(frames.validation(len(losses), validation)))
    return found


def run(name, losses=(2.0, 1.0), state="finished", measures=None, validation=None, **settings):
    return compared_run(name, state, config(**settings), past(losses, validation), measures or {})


def shown(runs, width=80):
    file = io.StringIO()
    open_console(file=file, width=width).print(renderable(runs, width))
    return file.getvalue()


def test_only_settings_that_differ_are_shown():
    runs = [run("a", learning_rate=1e-4, lora_rank=8), run("b", learning_rate=2e-4, lora_rank=8)]
    assert differing(runs) == {"learning_rate": ["0.0001", "0.0002"]}
    assert "lora_rank" not in shown(runs)
    assert "No setting differs." in shown([run("a"), run("b")])


def test_a_setting_that_only_one_objective_has_differs():
    found = differing([run("a"), run("b", objective="dpo")])
    assert found["objective"] == ["sft", "dpo"]
    assert found["beta"][0] == "-"


def test_results_are_of_the_events():
    steps = past([2.0, 4.0, 1.0], 0.5, seconds=2.0, tokens=100, trained_tokens=40)
    found = compared_run("a", "stopped", config(), steps, {}).figures
    assert found["last loss"] == "1.0000"
    assert found["best validation"] == "0.5000 at step 3"
    assert found["seconds per step"] == "2"
    assert found["tokens"] == "300"
    assert found["trained tokens"] == "120"
    assert found["tokens per second"] == "50"


def test_losses_of_different_objectives_are_not_compared():
    runs = [run("a", validation=0.5), run("b", objective="dpo", validation=0.5)]
    assert "last loss" not in results(runs)
    assert shared_curves(runs) == []
    assert next(notes(runs)) == (
        "the objectives differ (sft, dpo): losses are not compared, only metrics of all runs"
    )


def test_a_metric_is_compared_only_if_all_runs_have_it():
    both = [
        compared_run(name, "finished", config(objective=objective), [record(rewarded(1, 0.5))], {})
        for name, objective in (("a", "grpo"), ("b", "soft"))
    ]
    assert "reward" in shared_curves(both)
    steps = past([1.0], metrics={"kl": 1.0})
    other = compared_run("c", "finished", config(objective="dpo"), steps, {})
    shared = [name for name in shared_curves(both) if name in other.curves]
    assert shared_curves([both[0], other]) == shared


@pytest.mark.parametrize("count", [2, 3, 12])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_any_number_of_runs_fits_the_width(count, width):
    runs = [
        run(f"a-run-with-a-long-name-{n}", data="/a/long/path/" * 9, learning_rate=1e-4 * (n + 1),
            measures={"exact match": "41.2% [38.0, 44.5]"}, validation=1.0)
        for n in range(count)
    ]  # fmt: skip
    lines = shown(runs, width).splitlines()
    assert max(map(len, lines)) <= width
    text = shown(runs, width)
    assert all(f"{1e-4 * (n + 1):g}" in text for n in range(count))


def test_curves_are_drawn_over_each_other():
    text = shown([run("a", [3.0, 2.0, 1.0]), run("b", [3.0, 3.0, 3.0])])
    plot = text[text.index("loss by step") :].splitlines()[1:10]
    assert plot[0].startswith("3.0000 |")
    assert "2" in plot[0].partition("|")[2]
    assert "1" in plot[-1].partition("|")[2]


def test_runs_without_anything_have_a_line_each():
    runs = [
        compared_run("empty", "running", config(), [], {}),
        compared_run("broken", "died", None, [], {}, "runs/broken/config.yaml: is cut short"),
        compared_run("odd", "died", config(), past(["x"]), {}),
    ]
    assert list(notes(runs)) == [
        "empty: it has no events",
        "broken: runs/broken/config.yaml: is cut short",
        "odd: its events have values of a wrong type",
    ]
    assert "running" in shown(runs)


@pytest.mark.parametrize("losses", [[math.nan], [math.inf, 1.0], [1e300], [0.0], [1.0, 1.0]])
def test_losses_that_cannot_be_drawn_do_not_matter(losses):
    assert "Results" in shown([run("a", losses), run("b")])


def test_untrusted_text_cannot_control_the_terminal():
    runs = [run("a", measures={NASTY: NASTY}), run(NASTY)]
    assert "\x1b" not in shown(runs)


# The page


def page(runs):
    write_comparison(runs, Path("c.html"))
    return Path("c.html").read_text()


def test_the_page_has_the_tables_and_a_curve_of_each_run():
    runs = [run("first", validation=1.0, lora_rank=4), run("second", validation=2.0, lora_rank=8)]
    text = page(runs)
    assert text.count("<figure") == 2
    assert "<td>lora_rank</td><td>4</td><td>8</td>" in text
    assert "loss by step, running mean." in text
    assert text.count(">1 first<") >= 2
    assert not re.search(r"(?:src|href)=\"(?!#)", text)
    assert "<script" not in text


def test_the_page_shows_untrusted_text_as_text():
    text = page([run("a", data="<script>", measures={NASTY: NASTY}), run("b")])
    assert "<script" not in text
    assert "\x1b" not in text


def test_the_page_of_many_runs_and_of_none_with_events():
    assert page([run(f"r{n}") for n in range(30)]).count("<figure") == 1
    assert "<figure" not in page([ComparedRun(name=n, state="died") for n in "ab"])


def test_names_of_curves():
    assert set(run("a", validation=1.0).curves) == {LOSS, VALIDATION}
