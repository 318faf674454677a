"""Frames of a recorded run, compared with golden/*.txt; `test_frames` compares every phase.

To update them, run the tests once with YOUR_AI_RENEW_GOLDEN=1 set, then check the differences.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import re
import statistics
import time
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.dashboard import frames
from tests.dashboard.frames import reward_validation, rewarded, started, validation
from your_ai.dashboard import view
from your_ai.dashboard.page import UNICODE
from your_ai.dashboard.screen import screen
from your_ai.dashboard.state import ViewState, fold
from your_ai.run import events
from your_ai.run.events import Event, Record

GOLDEN = Path(__file__).parent / "golden"
BEGAN_AT = 1_800_000_000.0
KEYS = "q detach   c checkpoint   p pause"
NAME = "qwen-demo-20270115"
LIMIT = events.Limit(limit_bytes=7_000_000_000, reason="--max-memory 7")
PLANNED = events.Planned(
    plan="fused", micro_tokens=1920, spill=False, level=0, estimate_bytes=5_200_000_000,
    needed_bytes=5_600_000_000, asked="--max-memory 7 --plan auto --spill False",
    text="fused, micro-batches of 4 x 480 tokens: least limit 5.60 GB",
)  # fmt: skip
STARTED = started(steps=1000, steps_per_epoch=100, model="Qwen3-0.6B", rows=400, dtype="bfloat16")
LOADING = [
    events.Stage(text="loading Qwen3-0.6B"),
    events.Gauges(
        active_bytes=900_000_000, cache_bytes=0, process_bytes=1_310_000_000,
        available_bytes=9_100_000_000, swap_bytes=0, pressure=1,
    ),
]  # fmt: skip
BEGINNING = [*LOADING, LIMIT, PLANNED, STARTED]


def step(number: int, **changes: Any) -> events.Step:
    """A step; memory rises with its number, and the loss falls with some noise."""
    process_bytes = 3_000_000_000 + 11_000_000 * number + 90_000_000 * (number % 5)
    fields = {
        "steps": 1000, "epoch": 1 + number // 100,
        "loss": 1.1 + 3.0 / (1 + number / 12) + 0.05 * (number * 7 % 11 - 5), "grad_norm": 0.52,
        "tokens": 1480, "seconds": 0.8 + 0.05 * (number % 3),
        "active_bytes": process_bytes - 1_200_000_000, "cache_bytes": 790_000_000,
        "peak_bytes": process_bytes + 200_000_000, "highest_bytes": process_bytes + 250_000_000,
        "process_bytes": process_bytes, "available_bytes": 6_200_000_000, "swap_bytes": 0,
        "pressure": 1,
    }  # fmt: skip
    return frames.step(number, **{**fields, **changes})


def action(number: int, kind: str, cause: str, freed_bytes: int, seconds: float) -> events.Action:
    before = 5_000_000_000
    return events.Action(
        step=number, kind=kind, cause=cause, before_bytes=before,
        after_bytes=before - freed_bytes, seconds=seconds,
    )  # fmt: skip


def training() -> list[Event]:
    """200 steps with rising memory, and other events between them."""
    near = "process 4.95 GB within the step is over 70% of the limit of 7.00 GB"
    also = {
        50: [validation(50, 1.7312)],
        100: [
            validation(100, 1.5121),
            events.Checkpoint(step=100, folder="checkpoints/step-000100", seconds=0.2),
            action(100, "reload_lora", "every 50 steps", 203_000_000, 0.27),
        ],
        140: [events.Skipped(step=141, reason="the loss is nan", in_a_row=1, total=1)],
        150: [action(150, "reload_lora", "every 50 steps", 198_000_000, 0.26)],
        160: [events.Notice(text="3 rows are longer than 480 tokens and were cut")],
        170: [action(170, "clear_cache", near, 455_000_000, 0.018)],
        180: [action(180, "drop_compiled", near, 120_000_000, 0.31)],
        190: [action(190, "reload_lora", near, 0, 1.27)],
    }
    steps = [step(number) for number in range(1, 201)]
    steps[-1] = dataclasses.replace(steps[-1], pressure=2)
    return [*BEGINNING, *(event for one in steps for event in (one, *also.get(one.step, ())))]


def folded(*happened: Event, state: ViewState | None = None) -> ViewState:
    """The state after events that are one second apart."""
    state = state or ViewState()
    first = BEGAN_AT if state.last_at is None else state.last_at + 1
    records = [Record(first + second, event) for second, event in enumerate(happened)]
    return reduce(fold, records, state)


TRAINING = folded(*training())
OVER = folded(step(201, process_bytes=7_560_000_000, highest_bytes=7_560_000_000), state=TRAINING)
END = [
    dataclasses.replace(step(200), step=1000, epoch=10, loss=0.9981),
    validation(1000, 1.2345),
    events.Checkpoint(step=1000, folder="checkpoints/step-001000", seconds=0.2),
    events.ExactMatch(when="before", correct=2, rows=64),
    events.ExactMatch(when="after", correct=62, rows=64),
    events.Finished(step=1000, reason="done", adapter="runs/r/adapter", seconds=845.0),
]
REWARDED = folded(
    *BEGINNING,
    *(rewarded(number, steps=1000) for number in range(1, 10)),
    reward_validation(9, 0.625),
    rewarded(10, steps=1000),
)
FRAMES: dict[str, tuple[ViewState, int, int, dict[str, Any]]] = {
    "training-40x12": (TRAINING, 40, 12, {}),
    "training-ascii": (TRAINING, 80, 24, {"unicode": False}),
    "over-the-limit": (OVER, 80, 24, {}),
    "rewards-40x12": (REWARDED, 40, 12, {"unicode": False}),
    "no-limit": (dataclasses.replace(TRAINING, limit=None, planned=None), 80, 24, {}),
}


def drawn(
    state: ViewState,
    width: int,
    height: int,
    *,
    after_s: float = 1.0,
    name: str = NAME,
    keys: str = KEYS,
    **options: Any,
) -> list[str]:
    """The lines of a frame `after_s` seconds after the last event."""
    now = (state.last_at or BEGAN_AT) + after_s
    console = console_of(width, height)
    console.print(screen(state, name, width, height, now, keys=keys, **options))
    return console.file.getvalue().removesuffix("\n").split("\n")


def console_of(width: int, height: int, **options: Any) -> Console:
    colors = {"color_system": None, **options}
    return Console(
        width=width, height=height, force_terminal=True, legacy_windows=False,
        file=io.StringIO(), **colors,
    )  # fmt: skip


def text_of(state: ViewState, width: int = 80, height: int = 24, **options: Any) -> str:
    return "\n".join(drawn(state, width, height, **options))


def compared(name: str, lines: list[str]) -> None:
    """Compare lines with those of a golden file, or write it if that was asked for."""
    path, text = GOLDEN / f"{name}.txt", "\n".join(lines) + "\n"
    if os.environ.get("YOUR_AI_RENEW_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", FRAMES)
def test_frame_equals_the_golden_file(name):
    state, width, height, options = FRAMES[name]
    compared(name, [line.rstrip() for line in drawn(state, width, height, **options)])


def test_every_golden_file_has_a_test():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(FRAMES)


@pytest.mark.parametrize("height", range(5, 30))
def test_higher_screen_shows_everything_a_lower_one_does(height):
    """Gaps may differ."""
    low = [line for line in drawn(TRAINING, 80, height - 1) if line.strip()]
    high = iter(drawn(TRAINING, 80, height))
    assert all(line in high for line in low)


def test_smallest_screen_shows_state_memory_and_progress():
    lines = drawn(TRAINING, 80, 4)
    starts = [line.split()[:1] for line in lines]
    assert starts[:2] == [[NAME], ["memory"]]
    assert lines[0].endswith("● training")
    assert lines[2].split()[0][0] == UNICODE.active
    assert starts[3] == ["step"]


# Memory


def with_gauges(limit_bytes: int | None = 1000 * 10**6, **sizes: int | None) -> ViewState:
    limit = [events.Limit(limit_bytes=limit_bytes, reason="")] if limit_bytes else []
    return folded(*limit, events.Gauges(**sizes))


def gauge_of(state: ViewState, width: int = 112) -> str:
    """The bar, which has 100 cells on a screen of width 112."""
    return next(
        line.strip()
        for line in drawn(state, width, 12, after_s=0.0)
        if line.strip()[:1] in "█▓▒·┃▶" and line.strip() and " " not in line.strip()
    )


@pytest.mark.parametrize(
    ("sizes", "bar", "text"),
    [
        ((400, 100, 600), "█" * 40 + "▓" * 10 + "▒" * 10 + "┃" + "·" * 39, ""),
        ((500, None, 1200), "█" * 50 + "▒" * 49 + "▶", "120%  over the limit"),
        ((400, 400, 500), "█" * 40 + "▓" * 10 + "┃" + "▓" * 29 + "·" * 20, "other 0 MB"),
    ],
    ids=["stacked", "over the limit", "more in parts than in the process"],
)
def test_bar_stacks_active_cache_and_rest_of_process(sizes, bar, text):
    names = ("active_bytes", "cache_bytes", "process_bytes")
    known = {name: mb * 10**6 for name, mb in zip(names, sizes, strict=True) if mb is not None}
    state = with_gauges(**known)
    assert gauge_of(state) == bar
    assert text in text_of(state)


def test_tick_marks_the_peak():
    state = folded(
        events.Gauges(active_bytes=100 * 10**6, process_bytes=100 * 10**6),
        state=with_gauges(active_bytes=700 * 10**6, process_bytes=700 * 10**6),
    )
    assert gauge_of(state) == "█" * 10 + "·" * 60 + "┃" + "·" * 29


@pytest.mark.parametrize("text", ["generating completions", "answering test prompts"])
def test_the_phase_has_room_before_the_names(text):
    state = folded(*BEGINNING, events.Phase(text=text, in_step=True))
    for width in (40, 59, 60, 80):
        assert text in drawn(state, width, 15)[0]
    long = "validating: generating completions"
    state = folded(*BEGINNING, events.Phase(text=long, in_step=True))
    assert long in drawn(state, 60, 15)[0]
    assert "validating: generating" in drawn(state, 40, 10)[0]


def test_elapsed_time_stays_when_a_restart_loses_the_last_step():
    again = dataclasses.replace(STARTED, step=0)
    died = events.Died(step=1, reason="killed by SIGKILL", level=0)
    state = folded(*BEGINNING, step(1), died, LOADING[0], again)
    assert state.step is None
    [time] = [line for line in drawn(state, 80, 24) if line.startswith(" time")]
    assert time.endswith(" elapsed")


def test_the_most_telling_metrics_come_first_where_few_fit():
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "own")
    state = folded(*BEGINNING, step(1, metrics=dict.fromkeys(names, 0.5)))
    [narrow] = [line for line in drawn(state, 40, 12) if "metrics" in line]
    assert "accuracy 0.5" in narrow
    assert "own 0.5" in text_of(state, 140, 45)


def test_memory_that_is_not_measured_is_not_called_free():
    text = text_of(folded(LIMIT, PLANNED, STARTED))
    assert "limit 7.00 GB  not measured yet" in text
    assert "free" not in text
    died = events.Died(step=1, reason="killed by SIGKILL", level=0)
    text = text_of(folded(*BEGINNING, step(1, available_bytes=None), died))
    assert "not measured yet" in text
    assert "free" not in text


def test_a_long_plan_leaves_to_the_gauge_what_it_needs():
    long = "fused, micro-batches of 4 x 480 tokens, 32 completions at a time"
    planned = dataclasses.replace(PLANNED, text=f"{long}: least limit 5.60 GB")
    lines = drawn(folded(LIMIT, planned, STARTED, step(1)), 80, 24)
    assert any(line.endswith(long) for line in lines)
    assert any("┆ at least 5.60 GB" in line for line in lines)


def test_the_best_mean_is_shown_once_there_are_enough_steps():
    steps = [step(n) for n in range(1, 21)]
    assert " lowest " not in text_of(folded(*BEGINNING, *steps[:19]), 120, 40)
    assert " lowest " in text_of(folded(*BEGINNING, *steps), 120, 40)


def test_a_model_in_a_folder_has_the_name_of_the_folder():
    started = dataclasses.replace(STARTED, model="/Users/ada/models/tiny/")
    assert drawn(folded(LIMIT, PLANNED, started), 80, 24)[0].split()[:2] == [NAME, "tiny"]


def test_a_plan_has_one_figure_and_its_margin():
    text = text_of(folded(*BEGINNING, step(1)), 120, 40)
    assert re.search(r"┆ at least 5.60 GB ", text)
    needs = r"needs +at least 5.60 GB: estimated peak 5.20 GB \+ safety margin 400 MB"
    assert re.search(needs, text)
    line = view.event_line(PLANNED, ViewState())
    assert line is not None
    assert line.endswith("least limit 5.60 GB (estimated peak 5.20 GB + safety margin 400 MB)")


def test_a_plan_of_an_older_version_shows_its_estimate():
    old = dataclasses.replace(PLANNED, needed_bytes=0)
    text = text_of(folded(LIMIT, old, STARTED, step(1)), 120, 40)
    assert "┆ estimated peak 5.20 GB" in text
    assert "margin" not in text


def test_metrics_have_a_line_that_fits_narrow_screens():
    metrics = {"rewards/margins": 0.25, "rewards/accuracies": 0.75}
    state = folded(*BEGINNING, step(1, metrics=metrics))
    assert "accuracy 0.75   margin 0.25" in text_of(state)
    assert all(cell_len(line) <= 40 for line in drawn(state, 40, 30))


def test_phases_stay_while_the_same_completions_are_trained_again():
    state = folded(*BEGINNING, rewarded(1), step(2, metrics={"reward": 0.5, "kl": 0.1}))
    assert "seconds generate 1.25 s" in " ".join(" ".join(drawn(state, 120, 40)).split())


@pytest.mark.parametrize("height", range(5, 40))
def test_screens_of_a_reward_run_fit_and_grow(height):
    low = [line for line in drawn(REWARDED, 80, height - 1) if line.strip()]
    high = drawn(REWARDED, 80, height)
    assert len(high) <= height
    assert all(cell_len(line) <= 80 for line in high)
    assert len(low) <= len([line for line in high if line.strip()])


def test_step_whose_rewards_are_all_missing_says_so():
    metrics = {"completions/mean_length": 9.0, "rewards/missing": 32.0}
    text = " ".join(text_of(folded(*BEGINNING, rewarded(1, metrics=metrics))).split())
    assert "reward missing missing 32" in text


def test_metrics_that_are_not_finite_are_drawn():
    metrics = dict.fromkeys(rewarded(1).metrics, math.nan)
    state = folded(*BEGINNING, rewarded(1, metrics=metrics), rewarded(2, reward=math.inf))
    assert "reward    inf" in text_of(state)


def test_end_of_a_reward_run_has_the_reward_of_the_held_out_rows():
    state = folded(
        events.ExactMatch(when="before", correct=2, rows=64, reward=0.25),
        events.ExactMatch(when="after", correct=62, rows=64, reward=0.97),
        events.Finished(step=10, reason="done", adapter="a", seconds=9.0),
        state=REWARDED,
    )
    text = text_of(state, 80, 30)
    assert "validation reward: 0.625 at the end" in text
    assert "reward: 0.25 before, 0.97 after" in text


def test_unknown_gauges_are_left_out():
    text = text_of(with_gauges(cache_bytes=100 * 10**6))
    assert "cache 100 MB" in text
    assert "active" not in text
    assert "process" not in text
    assert "peak" not in text
    assert "not measured yet" in text_of(ViewState())


@pytest.mark.parametrize(("percent", "style"), [(69, "32"), (71, "33"), (89, "33"), (91, "31")])
def test_color_shows_how_near_the_limit_is(percent, style):
    state = with_gauges(process_bytes=percent * 10**7)
    console = console_of(80, 24, color_system="standard", no_color=False, _environ={})
    console.print(screen(state, NAME, 80, 24, BEGAN_AT))
    assert f"\x1b[1;{style}m{percent}0 MB\x1b[0m" in console.file.getvalue()


# Curves


def test_curve_is_scaled_from_lowest_to_highest_loss():
    state = folded(STARTED, *(step(i, loss=float(i)) for i in range(1, 9)))
    assert "▁▂▃▄▅▆▇█" in text_of(state)
    assert "1 – 8" in text_of(state)


def test_long_curve_fits_the_screen_and_keeps_its_peak():
    sizes = [10**8] * 300 + [9 * 10**8] + [10**8] * 100
    state = folded(LIMIT, *(events.Gauges(process_bytes=size) for size in sizes))
    state = dataclasses.replace(state, limit=events.Limit(limit_bytes=10**9, reason=""))
    curve = next(line for line in drawn(state, 80, 24) if "0 – 1.00 GB" in line).split()[0]
    assert len(curve) == 49
    assert (curve.count("█"), curve.count("▁")) == (1, 48)


def test_non_finite_losses_are_marked_and_not_scaled():
    losses = [1.0, float("nan"), 2.0, float("inf"), 1.0]
    state = folded(STARTED, *(step(i, loss=loss) for i, loss in enumerate(losses, 1)))
    assert "▁×█×▁" in text_of(state)


def test_losses_of_many_magnitudes_use_a_log_scale():
    losses = [10.0**-i for i in range(8)]
    text = text_of(folded(STARTED, *(step(i, loss=loss) for i, loss in enumerate(losses, 1))))
    assert "█▇▆▅▄▃▂▁" in text
    assert "1e-7 – 1 log" in text


def test_high_screen_has_higher_curves():
    state = folded(STARTED, *(step(i, loss=float(i)) for i in range(1, 17)))
    sizes = [events.Gauges(process_bytes=i * 10**9) for i in range(1, 17)]
    lines = drawn(folded(*sizes, state=state), 80, 32)
    assert any("▁▂▃▄▅▆▇█" in line and line.endswith("16.00 GB") for line in lines)
    assert any("▄▂▃▄▅▆▇██" in line and line.rstrip().endswith("  0") for line in lines)


# Words


def test_stage_shows_its_elapsed_time():
    lines = drawn(folded(events.Stage(text="loading m")), 80, 24, after_s=12.2)
    assert lines[0].endswith("○ loading m ... 12 s")


def test_clock_stops_when_the_run_is_finished():
    state = folded(*BEGINNING, step(4), END[-1])
    assert text_of(state) == text_of(state, after_s=999.0)


def test_late_step_is_shown_as_a_warning():
    state = folded(*BEGINNING, step(1, seconds=2.0))
    assert "no step" not in text_of(state, after_s=9.0)
    assert "no step for 2:05; a step usually takes 2.00 s" in text_of(state, after_s=125.0)
    waiting = folded(events.Gauges(process_bytes=1), state=state)
    assert "no step for 2:0" in text_of(waiting, after_s=125.0)
    for excuse in (events.Paused(step=1), events.Phase(text="validating")):
        assert "no step" not in text_of(folded(excuse, state=state), after_s=125.0)


def test_run_that_is_not_restarted_is_shown_as_died():
    died = events.Died(step=4, reason="killed by SIGKILL", level=None)
    assert text_of(folded(*BEGINNING, step(4), died)).splitlines()[0].endswith("died")
    again = folded(*BEGINNING, step(4), died, events.Stage(text="loading"))
    assert "loading" in text_of(again).splitlines()[0]


@pytest.mark.parametrize(
    ("asked", "why"),
    [("--plan auto", "the fastest that fits"), ("--plan staged", "as asked: --plan staged")],
)
def test_reason_of_the_plan_is_shown(asked, why):
    state = folded(LIMIT, dataclasses.replace(PLANNED, asked=asked))
    assert f"why       {why}" in text_of(state)


def test_control_characters_in_text_have_no_effect():
    evil = "a\x1b[31mred\x1b]0;title\x07\n[bold]b[/bold]\r\x9b2Jc\u202ed\x00"
    text = text_of(folded(events.Notice(text=evil), state=TRAINING), 120, 40, name=evil)
    assert "a red [bold]b[/bold] 2Jc d" in text
    assert text.replace("\n", "").isprintable()


# Any events on any screen

WORDS = st.one_of(
    st.text(max_size=40),
    st.text(
        st.sampled_from("\x1b[]m31;\n\r\t\x00\x9b\u200d\ufe0f\u0301模型👨👩🏽🇩🇪한ᄒ[/b]é"),
        max_size=60,
    ),
    st.sampled_from(["x" * 500, "模" * 100, "\x1b[2J", "[bold red]x[/]", "--plan auto", "done"]),
)
SIZES = st.one_of(st.none(), st.integers(-(2**70), 2**70), st.integers(0, 10**10))
COUNTS = st.one_of(st.integers(-(2**70), 2**70), st.integers(0, 1000))
NUMBERS = st.one_of(st.floats(), st.floats(0, 10))
BY_TYPE = {
    "str": WORDS, "bool": st.booleans(), "int": COUNTS, "int | None": SIZES, "float": NUMBERS,
    "list[str]": st.lists(WORDS, max_size=3), "float | None": st.none() | NUMBERS,
}  # fmt: skip
KINDS = (
    *(events.Step, events.Gauges, events.Stage, events.Phase, events.Host, events.Notice),
    *(events.Limit, events.Planned, events.Action, events.Died, events.Started, events.Paused),
    *(events.Continued, events.Skipped, events.Validation, events.Checkpoint, events.ExactMatch),
    *(events.Finished, events.Samples, events.Rollout),
)


def any_of(kind: type[Event]) -> st.SearchStrategy[Event]:
    """An event of a kind, with anything in its fields of these types."""
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    return st.builds(kind, **{name: BY_TYPE[t] for name, t in types.items() if t in BY_TYPE})


@given(
    happened=st.lists(st.one_of(*map(any_of, KINDS)), max_size=20),
    name=WORDS,
    keys=WORDS,
    width=st.one_of(st.integers(20, 200), st.just(80)),
    height=st.integers(4, 60),
    after_s=NUMBERS,
    unicode=st.booleans(),
)
def test_no_events_break_the_screen(happened, name, keys, width, height, after_s, unicode):
    state = folded(*happened)
    lines = drawn(state, width, height, name=name, keys=keys, after_s=after_s, unicode=unicode)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert all(line.isprintable() for line in lines)
    assert unicode or all(map(str.isascii, lines))


@pytest.mark.parametrize(("width", "height"), [(0, 0), (1, 1), (3, 2), (19, 3), (-1, -1)])
@pytest.mark.parametrize("state", [ViewState(), TRAINING, OVER], ids=["new", "training", "over"])
def test_too_small_screen_raises_no_error(state, width, height):
    screen(state, NAME, width, height, BEGAN_AT, keys=KEYS)


def test_drawing_a_frame_is_fast():
    """A frame is drawn during training, so it may only take milliseconds of CPU time."""
    console, took_s = console_of(80, 24, color_system="truecolor"), []
    for _ in range(30):
        began = time.process_time()
        console.print(screen(TRAINING, NAME, 80, 24, BEGAN_AT, keys=KEYS))
        took_s.append(time.process_time() - began)
    assert statistics.median(took_s) < 0.01
