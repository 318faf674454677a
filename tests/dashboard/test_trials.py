"""The trials of a tune as lines, a table and a page."""

from __future__ import annotations

import io
import math

import pytest

from your_ai.dashboard.trials import (
    TrialRow,
    best_trial,
    by_loss,
    trial_line,
    trials_table,
    with_best,
    write_trial_report,
)
from your_ai.gates.console import open_console

SETTINGS = {
    "learning_rate": 2e-4, "lora_rank": 16, "lora_layers": "all", "lr_schedule": "constant",
}  # fmt: skip
NASTY = "</pre><script>alert(1)</script>\x1b[2J"


def row(number: int, loss: float | None, state: str = "finished", **more: object) -> TrialRow:
    known = {"step": 60, "steps": 60, "seconds": 75.0, "peak_bytes": 2 * 10**8}
    known |= {"limit_bytes": 3 * 10**8, "settings": SETTINGS, **more}
    return TrialRow(number=number, state=state, validation_loss=loss, **known)


ROWS = with_best([
    row(0, 0.5),
    row(1, 0.7, "pruned", reason="worse than most at step 20", step=20),
    row(2, None, "failed", reason=NASTY, step=None, steps=None, seconds=None, peak_bytes=None,
        limit_bytes=None),
    row(3, 0.25, settings={**SETTINGS, "learning_rate": 1.2345e-3, "lora_layers": 2}),
    row(4, 0.25),
    row(5, 0.1, "pruned"),
])  # fmt: skip


def shown(rows: list[TrialRow], width: int) -> list[str]:
    file = io.StringIO()
    open_console(file=file, width=width).print(trials_table(rows, width))
    return file.getvalue().splitlines()


def test_best_is_the_first_finished_trial_with_the_lowest_loss():
    assert best_trial(ROWS).number == 3
    assert [r.number for r in ROWS if r.is_best] == [3]
    assert [r.number for r in by_loss(ROWS)] == [3, 4, 0, 5, 1, 2]
    assert best_trial([row(0, None, "failed"), row(1, 0.1, "pruned")]) is None


@pytest.mark.parametrize("width", [70, 80, 100, 200])
def test_table_fits_and_has_the_best_first(width):
    head, first, *rest = shown(ROWS, width)
    assert max(map(len, [head, first, *rest])) <= width
    assert first.split()[:4] == ["003", "best", "0.2500", "1.23e-03"]
    assert len(rest) == 5
    assert ("peak of limit" in head) == (width >= 80)
    assert "…" not in "".join([head, first, *rest])


def test_lines():
    assert trial_line(ROWS[0]) == (
        "trial 000 (the default): rate 2.00e-04, rank 16, layers all, schedule constant: finished, "
        "validation loss 0.5000, 1:15, peak 200 MB of 300 MB"
    )
    assert "pruned (worse than most at step 20), validation loss 0.7000" in trial_line(ROWS[1])
    assert trial_line(ROWS[3]).startswith("trial 003: rate 1.23e-03, rank 16, layers 2, ")
    assert "validation loss 0.2500 (the best so far)" in trial_line(ROWS[3])


@pytest.mark.parametrize(
    "rows", [ROWS, ROWS[:1], [], ROWS[2:3], with_best([row(0, 0.0, settings={}), row(1, math.inf)])]
)
def test_report_shows_every_trial_and_loads_nothing(own_folder, rows):
    out = own_folder / "report.html"
    write_trial_report(rows, "a tune", "learning_rate: 1\n# " + NASTY, out)
    page = out.read_text()
    assert "<script" not in page
    assert "\x1b" not in page
    assert page.count("<td>finished</td>") + page.count("<td>best</td>") == sum(
        r.state == "finished" for r in rows
    )
    if rows is ROWS:
        assert page.count("<figure") == 5
        assert "best: trial 003, validation loss 0.2500; with the default settings 0.5000" in page


def test_rewards_are_shown_as_rewards_and_the_highest_is_the_best(own_folder):
    found = [row(0, None, reward=0.25), row(1, None, reward=0.75), row(2, None, reward=-0.5)]
    rows = with_best([*found, row(3, None, "pruned", reward=0.9)])
    assert (best_trial(rows).number, [r.number for r in by_loss(rows)]) == (1, [1, 0, 2, 3])
    assert "finished, validation reward 0.75 (the best so far)" in trial_line(rows[1])
    head, first, *_ = shown(rows, 200)
    assert head.split()[2] == "reward"
    assert first.split()[:3] == ["001", "best", "0.75"]
    write_trial_report(rows, "a tune", "", own_folder / "report.html")
    page = (own_folder / "report.html").read_text()
    assert "best: trial 001, validation reward 0.75; with the default settings 0.25" in page
    assert "loss" not in page.lower()


def test_wide_ranges_have_readable_logarithmic_axes(own_folder):
    rows = [row(n, 10.0**-n, settings={"learning_rate": 10.0**-n}) for n in range(4)]
    write_trial_report(with_best(rows), "a tune", "", own_folder / "report.html")
    page = (own_folder / "report.html").read_text()
    assert page.count("validation loss (log scale)</div>") == 2
    assert page.count(">0.01</span>") == 3
