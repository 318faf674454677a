"""Frames of every phase and objective at five sizes, compared with golden/sizes/*.txt.

To update them: YOUR_AI_RENEW_GOLDEN=1 python -m pytest -n 0 tests/dashboard/test_frames.py
"""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from tests.dashboard.frames import reward_validation, rewarded, validation
from tests.dashboard.test_screen import (
    BEGAN_AT,
    BEGINNING,
    END,
    KEYS,
    LOADING,
    NAME,
    TRAINING,
    action,
    compared,
    console_of,
    drawn,
    folded,
    step,
)
from your_ai.dashboard.screen import screen
from your_ai.dashboard.state import ViewState, resumed
from your_ai.run import events

SIZES = [(60, 15), (80, 24), (100, 32), (140, 45), (200, 60)]
STYLED = (100, 32)
SAMPLES = events.Samples(
    when="before", prompts=["Could you ship six clocks to Accra?", "Please send 4 chairs."],
    answers=["Six clocks will go to Accra.", "Four."], expected=["Six clocks, Accra.", ""],
)  # fmt: skip
ROLLOUT = events.Rollout(
    step=10, prompt="Please send four barrels to Lima.", completion='{"count": 4}', reward=0.8,
    expected='{"city": "Lima", "count": 4}',
)  # fmt: skip
STOP = events.Stopping(text="stopping after this step; signal again to stop immediately")
STOPPED = events.Finished(step=200, reason="stopped by Ctrl-C", adapter="", seconds=99.0)
PAIRS = {
    "rewards/chosen": 0.0925, "rewards/rejected": -0.1322, "rewards/margins": 0.2247,
    "rewards/accuracies": 1.0, "logps/chosen": -0.2571, "logps/rejected": -2.447,
}  # fmt: skip
SCORES = {"rewards/margins": 0.41, "rewards/accuracies": 0.875, "rewards/error": 0.1}
SOFT = {"reward": 0.41, "kl": 0.01, "credit/residual": 0.02, "temperature": 0.7}
CHECKED = validation(
    20, 0.6, best=True, metrics={"rewards/margins": 0.19, "rewards/accuracies": 0.75}
)
REWARDED = folded(
    *BEGINNING, *(rewarded(n, steps=1000) for n in range(1, 10)), reward_validation(9, 0.625),
    events.Phase(text="generating completions", in_step=True), ROLLOUT, rewarded(10, steps=1000),
)  # fmt: skip


def after(*happened: events.Event, state: ViewState = TRAINING) -> ViewState:
    return folded(*happened, state=state)


def trained(metrics: dict[str, float], *more: events.Event) -> ViewState:
    return folded(*BEGINNING, SAMPLES, *(step(n, metrics=metrics) for n in range(1, 22)), *more)


def phase(text: str, in_step: bool = False) -> events.Phase:
    return events.Phase(text=text, in_step=in_step)


STATES = {
    "starting": ViewState(),
    "loading the model": folded(*LOADING),
    "measuring": folded(*BEGINNING[:-1], events.Stage(text="measuring 4 x 480 tokens")),
    "computing the reference": folded(*LOADING, events.Stage(text="computing the reference")),
    "saving at the start": folded(*BEGINNING, phase("saving")),
    "answering test prompts": folded(*BEGINNING, phase("answering test prompts")),
    "compiling the first step": folded(*BEGINNING, SAMPLES, phase("compiling the first step")),
    "training": TRAINING,
    "validating": after(phase("validating")),
    "saving": after(phase("saving")),
    "reloading": after(phase("reloading the adapted layers")),
    "changing the plan": after(action(200, "smaller_plan", "it proved too large", 10**8, 1.0)),
    "restarting": after(events.Died(step=200, reason="killed by SIGKILL", level=1)),
    "died": after(events.Died(step=200, reason="killed by SIGKILL", level=None)),
    "paused": after(events.Paused(step=200)),
    "stopping": after(STOP),
    "stopping: saving": after(STOP, phase("saving")),
    "stopped": after(STOP, STOPPED),
    "resuming": resumed(after(STOP, STOPPED), BEGAN_AT + 300),
    "finishing": folded(*END[:3], state=TRAINING),
    "done": folded(*END, state=TRAINING),
    "small model": folded(
        events.Limit(limit_bytes=22 * 10**9, reason="20 GB free"),
        events.Planned(plan="fused", micro_tokens=64, spill=False, level=0, text="fused",
                       estimate_bytes=200_000_000),
        BEGINNING[-1],
        step(1, active_bytes=2_400_000, cache_bytes=0, process_bytes=150_000_000,
             highest_bytes=160_000_000),
    ),
    "routine": after(*(action(n, "clear_cache", "every 10 steps", 10**8, 0.01)
                       for n in range(210, 400, 10))),
    "pairs": trained(PAIRS, CHECKED),
    "reward model": trained(SCORES),
    "rewards": REWARDED,
    "generating": after(phase("generating completions", in_step=True), state=REWARDED),
    "soft": folded(*BEGINNING, *(rewarded(n, metrics=SOFT) for n in range(1, 5)), ROLLOUT),
}  # fmt: skip


def differing(before: list[str], lines: list[str]) -> list[str]:
    """A frame: whole, or its lines that differ from the frame before, after their numbers."""
    changed = [
        f"{number:02} {line}"
        for number, (line, old) in enumerate(zip(lines, before, strict=False))
        if line != old
    ]
    same_size = len(lines) == len(before)
    return changed if same_size and len(changed) < len(lines) / 2 else lines


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_frames_of_all_phases_equal_the_golden_file(width, height):
    frames, before = [], list[str]()
    for name, state in STATES.items():
        lines = [line.rstrip() for line in drawn(state, width, height)]
        assert len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        frames += [f"==== {name}", *differing(before, lines)]
        before = lines
    compared(f"sizes/{width}x{height}", frames)


def test_styles_equal_the_golden_file():
    """Styles are names of the terminal's own colors, so a light and a dark terminal get the same.

    A line of the file is a style, and the texts that have it.
    """
    found = []
    for name, state in STATES.items():
        frame = screen(state, NAME, *STYLED, (state.last_at or BEGAN_AT) + 1, keys=KEYS)
        by_style: dict[str, list[str]] = {}
        for span in frame.spans:
            text = frame.plain[span.start : span.end].strip()
            texts = by_style.setdefault(str(span.style), [])
            if text and text not in texts and (any(c.isalnum() for c in text) or not texts):
                texts.append(text if len(text) < 30 else f"{text[:29]}~")
        found += [f"==== {name}"]
        found += [f"{style}: {' | '.join(by_style[style])}" for style in sorted(by_style)]
    compared("sizes/styles", found)


@pytest.mark.parametrize("name", STATES)
def test_only_named_colors_are_used(name):
    """A terminal chooses named colors for its background; a fixed color may vanish on it."""
    console = console_of(100, 32, color_system="truecolor", no_color=False, _environ={})
    console.print(screen(STATES[name], NAME, 100, 32, BEGAN_AT, keys=KEYS))
    text = console.file.getvalue()
    assert "38;" not in text
    assert "48;" not in text


def test_without_color_no_color_is_written():
    console = console_of(100, 32, color_system="truecolor", no_color=True, _environ={})
    console.print(screen(TRAINING, NAME, 100, 32, BEGAN_AT, keys=KEYS))
    assert not any(f"\x1b[{code}m" in console.file.getvalue() for code in range(30, 38))
