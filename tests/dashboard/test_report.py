from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.browser import browser_tab, needs_browser
from tests.dashboard.frames import reward_validation, rewarded, started, step, validation
from your_ai.config import TrainConfig
from your_ai.dashboard import charts, history, report
from your_ai.dashboard.report import RolloutSample
from your_ai.errors import UserError
from your_ai.gates.text import printable
from your_ai.run import events
from your_ai.run.events import Event, Record

NO_GAUGES = dict.fromkeys(("active_bytes", "peak_bytes", "cache_bytes", "process_bytes"))
NASTY = "</pre><script>alert(1)</script><img src=x onerror=alert(2)> & \"q\" 'a' $x_1$"
LIMIT = events.Limit(limit_bytes=6_000_000_000, reason="--max-memory 6")


def planned(plan: str, level: int = 0, **changes: object) -> events.Planned:
    fields = {"micro_tokens": 512, "spill": False, "estimate_bytes": 5_200_000_000}
    fields["text"] = f"{plan}, 1 row"
    return events.Planned(plan=plan, level=level, **{**fields, **changes})


def action(at: int, kind: str = "clear_cache", **changes: object) -> events.Action:
    fields = {"cause": "every 10 steps", "before_bytes": 5 * 10**9, "after_bytes": 4 * 10**9}
    return events.Action(step=at, kind=kind, **{**fields, "seconds": 0.25, **changes})


def samples(when: str, answer: str, prompt: str = "2 + 2?", expected: str = "4") -> events.Samples:
    return events.Samples(when=when, prompts=[prompt], answers=[answer], expected=[expected])


DIED = events.Died(step=5, reason="killed by SIGKILL after step 5", level=1)
DONE = events.Finished(step=10, reason="done", adapter="runs/r/adapter", seconds=61.0)
STORY: list[Event] = [
    events.Stage(text="loading some/model"),
    LIMIT,
    planned("fused"),
    started(),
    samples("before", "five"),
    events.ExactMatch(when="before", correct=1, rows=64),
    *(step(i, loss=4.0 - 0.1 * i, highest_bytes=5_400_000_000) for i in range(1, 6)),
    action(3),
    action(4, "reload_lora", cause="near the limit", read_bytes=2_000_000),
    validation(5, 3.75),
    events.Skipped(step=6, reason="the loss is nan", in_a_row=1, total=1),
    DIED,
    events.Stage(text="loading some/model"),
    planned("staged", 1),
    started(4),
    *(step(i, loss=3.0 - 0.1 * i, highest_bytes=5_100_000_000) for i in range(5, 11)),
    events.Notice(text="mind the gap"),
    validation(10, 2.25),
    samples("after", "4"),
    events.ExactMatch(when="after", correct=62, rows=64),
    DONE,
]


def records(*happened: Event, every_s: float = 2.0) -> list[Record]:
    return [Record(1.79e9 + every_s * i, event) for i, event in enumerate(happened)]


class Parsed(HTMLParser):
    """The elements of a page with their attributes, and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def written(
    folder: Path, happened: Sequence[Event], text: str = "model: m\n", name: str = "a-run",
    **more: object,
) -> str:  # fmt: skip
    """The page of a run. text: of its config.yaml."""
    out = folder / "report.html"
    report.write_report(records(*happened), name, text, out, **more)
    return out.read_text(encoding="utf-8")


def past(*happened: Event) -> history.RunHistory:
    return history.read_history(records(*happened))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("report"), STORY)


def test_report_begins_with_the_main_figures(page):
    text = Parsed(page).text
    for shown in (
        "a-run m finished Steps 10 of 10 epoch 1",
        "Last loss 2.0000 best running mean",
        "Best validation loss 2.2500 at step 10; last 2.2500",
        "Peak memory 5.40 GB 90% of the limit, 6.00 GB",
        "Speed 100 tokens/s 2,200 tokens in total",
        "Running time 58 s since 2026-09-21 14:13 UTC",
        "Exact match 97% [89, 99] after, 2% [0, 8] before",
    ):
        assert shown in text


def test_each_panel_of_a_chart_has_a_label(page):
    panels = [attributes for tag, attributes in Parsed(page).elements if tag == "svg"]
    assert len(panels) == 6
    assert all(panel["role"] == "img" and len(panel["aria-label"]) > 20 for panel in panels)
    assert page.count("<svg") == page.count("<title>") - 1  # and the page has one


def test_settings_that_differ_come_before_the_charts(own_folder):
    config = TrainConfig(model="some/model", data="d.jsonl", lora_rank=4, max_steps=7, epochs=None)
    text = Parsed(written(own_folder, STORY, config=config)).text
    assert "lora-rank 4 auto" in text
    assert "max-steps 7 none epochs none auto" in text
    assert text.index("lora-rank 4") < text.index("Loss of each step")
    assert "grad-checkpoint" not in text


def test_settings_that_cannot_be_read_leave_the_file(page):
    assert "config.yaml model: m" in Parsed(page).text


def test_metrics_of_an_objective_have_a_chart(own_folder):
    steps = [step(n, metrics={"rewards/margins": n / 10, "kl": 0.1}) for n in range(1, 6)]
    found = written(own_folder, [started(), *steps])
    assert len([tag for tag, _ in Parsed(found).elements if tag == "svg"]) == 7
    assert "rewards/margins" in found


REWARDED = [
    started(),
    events.ExactMatch(when="before", correct=1, rows=64, reward=0.25),
    *(rewarded(n) for n in range(1, 6)),
    reward_validation(5, 0.75),
    *(rewarded(n) for n in range(6, 11)),
    reward_validation(10, 0.5),
    events.ExactMatch(when="after", correct=62, rows=64, reward=0.97),
    DONE,
]


def test_report_of_rewards_has_their_curve_and_no_validation_loss(own_folder):
    page = written(own_folder, REWARDED)
    text = Parsed(page).text
    assert "validation loss" not in text.lower()
    for shown in (
        "Best validation reward 0.75 at step 5; last 0.5",
        "Reward of held-out rows 0.97 after, 0.25 before",
        "Last reward 0.8 best running mean 0.7 at step 10",
        "phase mean seconds highest MLX peak generate 1.25 2.50 GB reward 0.0009 - update 0.749",
        "validation reward: 0.5 at the end, best 0.75 at step 5",
        "reward: 0.25 before, 0.97 after",
    ):
        assert shown in text
    assert "Last loss" not in text
    assert page.index('<figure id="reward">') < page.index('<figure id="loss">')
    assert "peak_bytes/generate" not in page


def test_report_of_rewards_shows_completions(own_folder):
    found = RolloutSample(3, "worst", "2 + 2?", NASTY, "4", 0.25)
    parsed = Parsed(written(own_folder, REWARDED, rollouts=[found]))
    assert f"3 worst 0.25 2 + 2? {' '.join(NASTY.split())} 4" in parsed.text
    assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
    assert "Completions over time" not in written(own_folder, REWARDED)


def test_report_of_strange_rewards_is_written(own_folder):
    strange = dict.fromkeys(rewarded(1).metrics, math.nan)
    happened = [rewarded(1, metrics=strange), rewarded(2, reward=1e308), rewarded(3)]
    happened.append(reward_validation(3, math.nan))
    assert written(own_folder, happened).rstrip().endswith("</html>")


def test_tables_have_headers(page):
    assert page.count("<table") == page.count("<thead>") > 4
    assert page.count("<th ") == page.count("<th scope=")


def test_actions_are_summed_by_kind_and_listed(page):
    text = Parsed(page).text
    assert "clear cache 1 1.00 GB 0 MB 0.25 reload lora 1 1.00 GB 2.0 MB 0.25" in text
    assert "step 4 reload lora 1 near the limit 1.00 GB 0.25" in text


def test_only_the_last_actions_are_listed(own_folder):
    text = Parsed(written(own_folder, [action(i, cause=f"why-{i}-") for i in range(50)])).text
    assert "The last 20 of 50" in text
    assert [f"why-{i}-" in text for i in (29, 30, 49)] == [False, True, True]


def test_deaths_skipped_steps_and_notices_are_listed(page):
    text = Parsed(page).text
    assert "5 killed by SIGKILL after step 5 1" in text
    assert "step 6 was skipped: the loss is nan" in text
    assert "mind the gap" in text
    assert "died once: killed by SIGKILL after step 5" in text


def test_answers_are_shown_next_to_the_expected_answer(page):
    assert "2 + 2? five 4 as expected 4" in Parsed(page).text


def test_each_plan_change_has_a_cause():
    larger = action(8, "larger_plan", cause="plenty of memory for 50 steps")
    asked = planned("staged", asked="--plan staged")
    changes = history.plan_changes(
        past(planned("fused"), started(), step(1), DIED, planned("staged", 1), step(2), larger,
             planned("fused"), step(3), planned("fused"), asked, planned("streamed"))
    )  # fmt: skip
    assert [(at, plan.plan, why) for _, at, plan, why in changes] == [
        (0, "fused", "chosen at the start"),
        (1, "staged", DIED.reason),
        (2, "fused", larger.cause),
        (3, "staged", "asked for --plan staged"),
        (3, "streamed", "chosen when resumed"),
    ]


@pytest.mark.parametrize(
    ("happened", "word"),
    [
        ([DONE], "finished"),
        ([dataclasses.replace(DONE, reason="stopped by Ctrl-C")], "stopped"),
        ([dataclasses.replace(DIED, level=None), events.Notice(text="n")], "died"),
        ([DIED], "open"),
        ([DONE, events.Stage(text="loading m")], "open"),
        ([step(1)], "open"),
        ([], "open"),
    ],
)
def test_ending_of_a_run_is_classified(happened, word):
    assert history.ending(past(*happened))[0] == word


def test_repeated_steps_replace_the_first_ones():
    again = past(started(), step(1, loss=9.0), step(2, loss=8.0), started(1), step(2, loss=7.0))
    assert history.losses(again) == [(1, 9.0), (2, 7.0)]


def test_steps_after_the_restart_checkpoint_are_dropped():
    again = past(started(), *(step(i) for i in range(1, 8)), validation(6, 1.0), started(4))
    assert [s.step for s in again.steps] == [1, 2, 3, 4]
    assert again.validations == []


def test_time_between_two_processes_is_not_running_time():
    loading = events.Stage(text="loading m")
    times = [0.0, 5.0, 90_000.0, 90_004.0]
    happened = map(Record, times, [loading, step(1), loading, step(2)])
    assert [seconds for seconds, _ in history.read_history(list(happened)).timeline] == [0, 5, 5, 9]


def test_curve_has_a_gap_where_a_process_died():
    points = history.over_time(past(step(1), DIED, step(2, **NO_GAUGES), step(3)), history.held)
    assert [point[0] for point in points] == [0, 2, 6]
    assert [math.isnan(point[-1]) for point in points] == [False, True, False]


def test_memory_areas_are_stacked_up_to_the_process_memory():
    gauges = events.Gauges(active_bytes=3, cache_bytes=2, process_bytes=9)
    assert history.held(gauges) == (3, 5, 9)
    assert history.held(dataclasses.replace(gauges, process_bytes=4)) == (3, 5, 5)
    assert history.held(dataclasses.replace(gauges, active_bytes=None)) == (0, 2, 9)


def test_running_mean_starts_again_after_a_gap():
    means = history.smoothed([(1, 9.0), (2, math.nan), (3, 1.0), (4, 2.0)])
    assert [mean for _, mean in means[2:]] == [1.0, 2.0]


def test_history_grows_as_events_are_written():
    reader = history.HistoryReader()
    happened = records(*STORY)
    for start in range(0, len(happened), 3):
        reader.add(happened[start : start + 3])
    assert reader.past == history.read_history(happened)


@given(st.lists(st.floats(0, 1e12) | st.just(math.nan), max_size=4000))
def test_thinned_curve_keeps_extremes_and_order(values):
    points = list(enumerate(values))
    kept = history.thinned(points)
    assert len(kept) <= 6 * history.BUCKETS
    assert kept == sorted(kept)
    drawn = [y for y in values if not math.isnan(y)]
    left = [y for _, y in kept if not math.isnan(y)]
    for extreme in (min, max):
        assert extreme(drawn, default=0) == extreme(left, default=0)
    assert any(map(math.isnan, values)) == any(math.isnan(y) for _, y in kept)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "happened",
    [
        [],
        [LIMIT, started()],
        [LIMIT, step(1)],
        [step(1), DIED],
        [step(i, **NO_GAUGES) for i in (1, 2)],
        [events.Gauges(process_bytes=10**9)],
        [step(1, loss=math.nan), validation(1, math.nan)],
        [step(i, loss=loss) for i, loss in enumerate((1e308, -1e308, math.inf, 1e-300, 2.0), 1)],
        [step(i, loss=0.0, tokens=0, seconds=0.0, learning_rate=0.0) for i in (1, 2)],
        [dataclasses.replace(LIMIT, limit_bytes=0), step(1, process_bytes=0, active_bytes=0)],
        [events.Skipped(step=i, reason="nan", in_a_row=i, total=i) for i in range(300)],
        [step(2), step(1)],
    ],
)  # fmt: skip
def test_runs_with_unusual_events_have_a_report(own_folder, happened):
    assert written(own_folder, happened).rstrip().endswith("</html>")


def test_run_without_steps_has_no_charts(own_folder):
    page = written(own_folder, [LIMIT, started(), DONE])
    assert "No steps yet." in page
    assert "<svg" not in page


def test_long_run_has_a_small_page(own_folder):
    long = [step(i, loss=1 + i % 7, process_bytes=10**9 + i % 997 * 10**6) for i in range(1, 20001)]
    caches = [action(i) for i in range(2000)]
    page = written(own_folder, [LIMIT, started(), *long, *caches])
    assert len(page) < 1_000_000
    assert page.count("<use ") < 500


def test_user_text_is_escaped(own_folder):
    nasty = [
        dataclasses.replace(LIMIT, reason=NASTY),
        planned("fused", text=NASTY),
        started(model=NASTY),
        samples("before", NASTY, NASTY, NASTY),
        step(1),
        action(1, NASTY, cause=NASTY),
        events.Notice(text=NASTY),
        events.Skipped(step=1, reason=NASTY, in_a_row=1, total=1),
        dataclasses.replace(DIED, reason=NASTY),
        dataclasses.replace(DONE, reason=NASTY),
    ]
    parsed = Parsed(written(own_folder, nasty, NASTY, NASTY))
    assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
    assert not [a for _, attributes in parsed.elements for a in attributes if a.startswith("on")]
    assert parsed.text.count(" ".join(NASTY.split())) >= 14


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_characters="\r\0")))
def test_any_text_is_shown_unchanged(own_folder, text):
    parsed = Parsed(written(own_folder, [samples("before", "", prompt=text)]))
    shown = printable(text)
    assert shown == "" or shown in parsed.texts


def test_page_loads_no_other_files(page):
    parsed = Parsed(page)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in parsed.elements}
    named = [
        value
        for _, attributes in parsed.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href")
    ]
    assert all(value.startswith("#") for value in named)
    assert not re.search(r"://|@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_ids_are_unique_in_the_page(page):
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def test_charts_use_the_colors_of_the_page(page):
    drawn = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    assert not re.search(r": ?#[0-9a-f]{3,6}", drawn)
    used = set(re.findall(r"(?:color|stroke|fill): var\(--(\w+)\)", page))
    assert {"blue", "green", "active", "red"} <= used <= set(charts.COLORS)


@pytest.mark.parametrize("colors", [charts.LIGHT, charts.DARK], ids=["light", "dark"])
def test_line_colors_have_enough_contrast(colors):
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for name in ("blue", "orange", "green", "red", "muted"):
        low, high = sorted((luminance(colors[name]), luminance(colors["paper"])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_same_run_gives_the_same_page(own_folder, page):
    assert written(own_folder, STORY) == page


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("missing/folder/r.html", r"cannot be written \([^\n]+\); choose another path"),
        ("file/r.html", r"cannot be written \([^\n]+\); choose another path"),
        ("folder", "is a folder; give the name of a file in it"),
    ],
)
def test_unwritable_path_is_named(own_folder, where, reason):
    (own_folder / "file").write_text("")
    (own_folder / "folder").mkdir()
    before = sorted(own_folder.rglob("*"))
    with pytest.raises(UserError, match=f"{where}: {reason}"):
        report.write_report([], "r", "", own_folder / where)
    assert sorted(own_folder.rglob("*")) == before


def test_failed_write_keeps_the_old_page(own_folder, monkeypatch):
    (own_folder / "r.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        report.write_report([], "r", "", own_folder / "r.html")
    assert [p.name for p in own_folder.iterdir()] == ["r.html"]
    assert (own_folder / "r.html").read_text() == "old"


PROBE = """(() => {
const numbers = color => color.match(/[\\d.]+/g).map(Number);
const linear = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
function paper(element) {
  for (; element; element = element.parentElement) {
    const color = numbers(getComputedStyle(element).backgroundColor);
    if (color.length === 3 || color[3] > 0) return color;
  }
  return [255, 255, 255];
}
function contrast(element) {
  const color = numbers(getComputedStyle(element).color);
  const [low, high] = [luminance(color), luminance(paper(element))].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}
function overlaps(row) {
  const boxes = [...row.children].map(label => label.getBoundingClientRect()).filter(b => b.width);
  return boxes.some((box, i) => i && box.left < boxes[i - 1].right);
}
const own = element => [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
const texts = [...document.querySelectorAll("main :not(title)")].filter(own);
const labels = [...document.querySelectorAll(".chart span")].filter(e => e.offsetWidth);
return {
  charts: [...document.querySelectorAll("svg")].map(svg => svg.getBoundingClientRect().toJSON()),
  inCharts: texts.filter(text => text.closest(".chart")).length,
  worst: Math.min(...texts.map(contrast)),
  smallest: Math.min(...texts.map(text => parseFloat(getComputedStyle(text).fontSize))),
  overlapping: [...document.querySelectorAll(".x")].filter(overlaps).length,
  cut: labels.filter(e => e.getBoundingClientRect().right > innerWidth).length,
  paper: paper(document.body),
  across: document.documentElement.scrollWidth,  // innerWidth of a phone grows with it
  loaded: performance.getEntriesByType("resource").map(entry => entry.name),
};
})()"""


@needs_browser
def test_page_is_legible_in_a_browser(own_folder):
    long = [step(1000 * n, steps=20_000, loss=4 - 0.1 * n) for n in range(1, 21)]
    story = [*STORY[:-1], *long, DONE]
    report.write_report(records(*story, every_s=3600.0), "r" * 90, "m", own_folder / "r.html")
    with browser_tab(own_folder / "profile") as tab:
        for width, scheme in ((1280, "dark"), (375, "light"), (320, "dark")):
            tab.look(width, 800, scheme)
            tab.open((own_folder / "r.html").as_uri())
            result = tab.run(PROBE)
            assert (tab.messages, result["loaded"]) == ([], [])
            assert result["paper"] == ([20, 23, 27] if scheme == "dark" else [255, 255, 255])
            heights = [round(chart["height"]) for chart in result["charts"]]
            assert heights == [230, 230, 230, 230, 46, 230]
            assert all(chart["width"] >= min(300, width / 2) for chart in result["charts"])
            assert result["inCharts"] > 40
            assert result["worst"] >= 4.5
            assert result["smallest"] >= 12
            assert (result["overlapping"], result["cut"]) == (0, 0)
            assert result["across"] <= width


def test_plans_are_drawn_with_the_chosen_one_and_the_run():
    front = [[4e9, 2.0], [2e9, 3.5]]
    plan = planned("staged", needed_bytes=2 * 10**9, seconds=3.5, front=front)
    past = history.read_history(records(LIMIT, plan, started(), *map(step, (1, 2, 3))))
    chart = charts.plans_chart(past)
    found = {curve.label: curve.points for panel in chart.panels for curve in panel.curves}
    assert found["predicted"] == [(2.0, 3.5), (4.0, 2.0)]
    assert found["chosen"] == [(2.0, 3.5)]
    assert found["measured"][0][1] == past.steps[-1].seconds
    assert [curve.points for curve in chart.breaks] == [[(6.0, 0.0)]]
    assert "Plans" in report.report_page(past, "r", "")


@pytest.mark.parametrize("front", [[], [[1e9, 0]], [[math.inf, math.nan]]])
def test_plans_without_seconds_are_not_drawn(front):
    past = history.read_history(records(LIMIT, planned("fused", front=front, seconds=math.nan)))
    assert charts.plans_chart(past) is None
