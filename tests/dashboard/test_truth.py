"""What frames say, held against the events: of a real run, and of random ones."""

from __future__ import annotations

import dataclasses
import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.conftest import chat, train_once, write_rows
from tests.dashboard import frames
from tests.dashboard.frames import started, validation
from tests.dashboard.test_screen import BEGAN_AT, BEGINNING, drawn, folded, step
from your_ai.dashboard.metric_table import plain
from your_ai.dashboard.state import ViewState, fold
from your_ai.gates.text import loss_text, size_text
from your_ai.run import events, folder
from your_ai.run.events import Record
from your_ai.run.stopping import Stop
from your_ai.training.process import train_until_done

SIZES = [(60, 15), (80, 24), (140, 45)]
# Rows of a frame whose first figure is a metric; and short names of the metrics of pairs.
SHOWN = (("reward", "reward", plain),)
SHORT = {"accuracy": "rewards/accuracies", "margin": "rewards/margins", "chosen": "rewards/chosen",
         "rejected": "rewards/rejected"}  # fmt: skip
AFTER = (events.Validation, events.Checkpoint, events.Samples, events.ExactMatch, events.Action)


KEPT: list[Record] = []


@pytest.fixture
def recorded(request) -> list[Record]:
    """The events of a run of 12 steps that is stopped in step 5, killed after 9, and resumed."""
    if not KEPT:  # the tests only read them
        KEPT.extend(request.getfixturevalue("recorded_here"))
    return KEPT


@pytest.fixture
def recorded_here(configure, data_folder, monkeypatch) -> list[Record]:
    write_rows(data_folder / "valid.jsonl", [chat(f"v{i}", "yes") for i in range(4)])
    write_rows(data_folder / "test.jsonl", [chat(f"t{i}", "yes") for i in range(2)])
    options = {"max_steps": 12, "eval_every": 3, "save_every": 4, "samples": 1,
               "exact_match": True, "clear_cache_every": 2, "max_memory": 4.0}  # fmt: skip
    run = folder.create(configure(**options))
    write, stop, limit = events.EventLog.write, Stop(), 5

    class Killed(Exception):
        pass

    def watched(log: events.EventLog, event: events.Event) -> None:
        write(log, event)
        if isinstance(event, events.Step) and event.step == limit:
            if limit == 9:
                raise Killed
            stop.received = 2
            stop.on_first()

    monkeypatch.setattr(events.EventLog, "write", watched)
    config = run.read_config()
    assert train_until_done(run, config, stop) == 130
    limit, stop = 9, Stop()
    with pytest.raises(Killed):
        train_until_done(run, config, stop)
    limit = 0
    assert train_until_done(run, config, Stop()) == 0
    return events.tail(run.events)[0]


PROMPTS = [{"prompt": f"Ask {i}, please", "answer": str(i)} for i in range(4)]
PREFERENCES = [
    {"prompt": f"Ask {i}", "chosen": f"Yes {i}", "rejected": "No " * (1 + i % 3)} for i in range(6)
]
STEPS = {"max_steps": 3, "eval_every": 2, "samples": 1, "max_memory": 4.0}
SAMPLED = {**STEPS, "prompts_per_step": 2, "max_new_tokens": 4, "kl_beta": 0.1}
KINDS = {
    "dpo": (PREFERENCES, STEPS),
    "grpo": (PROMPTS, {**SAMPLED, "reward": ["length:3", "exact_match"], "rollouts": 2}),
    "soft": (PROMPTS, {**SAMPLED, "reward_model": "run:rm"}),
}
PHASES = {
    "dpo": {"computing the reference", "validating"},
    "grpo": {"generating completions", "scoring completions", "computing gradients",
             "validating: generating completions"},
    "soft": {"generating completions", "waiting for rewards", "computing gradients",
             "validating: generating completions"},
}  # fmt: skip


@pytest.fixture
def recorded_of(configure, own_folder, monkeypatch):
    """A function that gives the events of a run of an objective, stopped in step 2 and resumed."""

    def record(objective: str) -> list[Record]:
        if objective == "soft":
            data = write_rows(own_folder / "pairs" / "train.jsonl", PREFERENCES).parent
            model = {"data": str(data), "objective": "reward", "run": "rm", "valid": "none"}
            train_once(configure(**{**model, "max_steps": 2}))
        rows, options = KINDS[objective]
        for split in ("train", "valid", "test"):
            write_rows(own_folder / objective / f"{split}.jsonl", rows)
        data = str(own_folder / objective)
        run = folder.create(configure(**{**options, "data": data, "objective": objective}))
        write, stop = events.EventLog.write, Stop()

        def watched(log: events.EventLog, event: events.Event) -> None:
            write(log, event)
            if isinstance(event, events.Step) and event.step == 2 and not stop.received:
                stop.received = 2
                stop.on_first()

        with monkeypatch.context() as patch:
            patch.setattr(events.EventLog, "write", watched)
            assert train_until_done(run, run.read_config(), stop) == 130
        assert train_until_done(run, run.read_config(), Stop()) == 0
        return events.tail(run.events)[0]

    return record


class Truth:
    """What is so after each event, found without the dashboard's state."""

    def __init__(self) -> None:
        self.doing, self.stopping, self.at, self.steps = "starting", False, 0, 0
        self.step: events.Step | None = None
        self.gauges: events.Gauges | events.Step | None = None
        self.is_ready = self.has_stepped = False
        self.validated: dict[str, float] = {}
        self.seconds: list[float] = []
        self.stepped_at: list[float] = []

    def take(self, event: events.Event, time: float) -> None:
        match event:
            case events.Stage() if self.has_stepped or self.doing in ("finished", "stopped"):
                self.gauges, self.stopping = None, False
                self.is_ready = self.has_stepped = False
                self.doing = event.text
            case events.Stage() | events.Phase():
                self.doing = event.text
            case events.Stopping():
                self.stopping = True
            case events.Started():
                self.is_ready, self.has_stepped, self.stopping = True, False, False
                self.at, self.steps = event.step, event.steps
                self.seconds, self.stepped_at = [], []
                if self.step is not None and self.step.step > event.step:
                    self.step = None
                is_left = event.step < event.steps
                self.doing = "preparing the first step" if is_left else "finishing"
            case events.Finished():
                self.doing = "finished" if event.reason == "done" else "stopped"
                self.stopping = False
            case events.Step():
                self.step = self.gauges = event
                self.at, self.has_stepped = event.step, True
                self.seconds.append(event.seconds)
                self.stepped_at.append(time)
            case events.Gauges():
                self.gauges = event
            case events.Validation():
                self.validated = {"loss": event.loss, **event.metrics}
        if isinstance(event, (events.Step, events.Corrected, *AFTER)) and self.is_ready:
            first = "training" if self.has_stepped else "preparing the first step"
            self.doing = first if self.at < self.steps else "finishing"

    @property
    def longest_s(self) -> float:
        """The longest time for a step of this process, with what came between it and the next."""
        return max(*self.seconds, *(b - a for a, b in pairwise(self.stepped_at)), 0.0)

    def check(self, lines: list[str]) -> None:
        head, text = lines[0], "\n".join(lines)
        said = re.split(r"[●○■] ", head)[-1].strip()
        doing = self.doing
        if self.stopping:
            doing = "stopping after this step" if doing == "training" else f"stopping: {doing}"
        said = re.sub(r" \.\.\. [\d:]+( s)?$", "", said)
        cut = said.removesuffix("…")
        assert doing.startswith(cut), (doing, said)
        assert len(cut) >= min(8, len(doing))
        if self.steps:
            [(at, steps)] = re.findall(r"^ step +(\d+)/(\d+)", text, re.M)
            assert (int(at), int(steps)) == (self.at, self.steps)
        left = re.search(r"^ time +([\d:]+)( s)? left", text, re.M)
        if left is not None:
            assert self.at < self.steps
            assert not self.stopping
            assert self.is_ready
            assert self.doing != "stopped"
            parts = [int(part) for part in left[1].split(":")]
            seconds = sum(part * 60**i for i, part in enumerate(reversed(parts)))
            assert seconds >= 1
            assert seconds <= 1.5 * self.longest_s * (self.steps - self.at) + 2
        if self.step is not None:
            shown = re.search(r"^ loss +(\S+)", text, re.M)
            assert shown is not None
            assert shown[1] == loss_text(self.step.loss)
            assert f"{self.step.learning_rate:.3g}" in text
        else:
            assert re.search(r"^ loss +\S", text, re.M) is None
        self.check_metrics(text)
        measured = self.gauges.process_bytes if self.gauges is not None else None
        process = re.search(r"process (\S+ [kMG]?B)", text)
        assert (process and process[1]) == (None if measured is None else size_text(measured))
        if self.gauges is not None and self.gauges.active_bytes is not None:
            assert f"active {size_text(self.gauges.active_bytes)}" in text

    def check_metrics(self, text: str) -> None:
        """Each figure of the last step that the frame shows, and of the last validation."""
        metrics = {} if self.step is None else self.step.metrics
        for label, name, shown_as in SHOWN:
            for found in re.findall(rf"^ {label} +(\S+)", text, re.M):
                assert found == shown_as(metrics[name]), (label, found)
        for label, values in (("metrics", metrics), ("valid", self.validated)):
            for row in re.findall(rf"^ {label} (.*)$", text, re.M):
                for word, name in SHORT.items():
                    for found in re.findall(rf"(?<!logp) {word} (\S+)", row):
                        assert found == f"{values[name]:.4g}", (label, word)
        for found in re.findall(r"^ (?:loss|reward) .* validation ([^ ,]+),", text, re.M):
            value = self.validated.get("reward", self.validated.get("loss"))
            assert value is not None
            assert found in (loss_text(value), plain(value))


def replay(recorded: list[Record]) -> tuple[set[str], str]:
    """Check the frames of each moment at each size; what was done, and the last frame."""
    state, truth, seen, lines = ViewState(), Truth(), set(), list[str]()
    for record, following in pairwise([*recorded, recorded[-1]]):
        state = fold(state, record)
        truth.take(record.event, record.time)
        seen.add(truth.doing)
        gap = min(3, math.ceil(following.time - record.time))
        for after_s in range(gap + 1):
            for width, height in SIZES:
                lines = drawn(state, width, height, after_s=float(after_s))
                truth.check(lines)
    return seen, "\n".join(lines)


@pytest.mark.parametrize("objective", KINDS)
def test_no_frame_of_an_objective_says_what_is_not_so(recorded_of, objective):
    recorded = recorded_of(objective)
    seen, last = replay(recorded)
    assert PHASES[objective] | {"training", "saving", "finished", "stopped"} <= seen
    [*_, last_step] = [r.event for r in recorded if isinstance(r.event, events.Step)]
    shown = {
        "dpo": f"accuracy {last_step.metrics.get('rewards/accuracies', 0):.4g} ",
        "grpo": "exact_match ",
        "soft": "KL ",
    }[objective]
    assert shown in last


@pytest.mark.parametrize(
    ("metrics", "wrong"),
    [
        ({"rewards/accuracies": 1.0, "rewards/margins": 0.5}, {"rewards/margins": 0.25}),
        ({"reward": 0.5, "kl": 0.1}, {"reward": 0.25}),
    ],
)
def test_the_check_finds_a_wrong_metric(metrics, wrong):
    truth, state = Truth(), folded(*BEGINNING, events.Phase(text="compiling the first step"))
    for number, event in enumerate((BEGINNING[-1], step(1, metrics=metrics))):
        truth.take(event, float(number))
        state = fold(state, Record(BEGAN_AT, event))
    truth.check_metrics("\n".join(drawn(state, 80, 24)))
    false = dataclasses.replace(state.step, metrics={**metrics, **wrong})
    with pytest.raises(AssertionError):
        truth.check_metrics("\n".join(drawn(dataclasses.replace(state, step=false), 80, 24)))


def test_no_frame_of_a_run_says_what_is_not_so(recorded):
    seen, _ = replay(recorded)
    expected = {
        "compiling the first step", "training", "validating", "saving", "finished", "stopped",
        "answering test prompts", "comparing answers with the test rows", "saving the adapter",
    }  # fmt: skip
    assert expected <= seen
    assert any(text.startswith("loading") for text in seen)


def test_notes_of_the_last_end_are_gone_when_a_run_is_resumed(recorded):
    state, ended = ViewState(), False
    for record in recorded:
        state = fold(state, record)
        if isinstance(record.event, events.Finished):
            ended = True
        elif ended:
            assert "stopping" not in "\n".join(drawn(state, 140, 45))
    assert ended


def test_lost_steps_are_not_shown_after_a_restart(recorded):
    last = max(i for i, r in enumerate(recorded) if isinstance(r.event, events.Started))
    state, before = ViewState(), recorded[:last]
    for record in [*before, recorded[last]]:
        state = fold(state, record)
    assert max(r.event.step for r in before if isinstance(r.event, events.Step)) == 9
    assert (state.at, max(state.losses.at)) == (8, 8)
    assert all(step <= 8 for step in state.validations.at)


# Random runs

SIZES_BYTES = st.one_of(st.none(), st.integers(0, 10**10))


@st.composite
def histories(draw: st.DrawFn) -> list[events.Event]:
    """Events as a training process writes them: it loads, does steps, and is stopped or killed."""
    happened, saved = list[events.Event](), 0
    steps = draw(st.integers(1, 12))
    for _ in range(draw(st.integers(1, 3))):
        happened.append(events.Stage(text="loading m"))
        happened.append(events.Gauges(process_bytes=draw(SIZES_BYTES)))
        happened.append(started(saved, steps=steps, steps_per_epoch=steps))
        if saved < steps:
            happened.append(events.Phase(text="compiling the first step"))
        at = saved
        for _ in range(draw(st.integers(0, steps - saved))):
            at += 1
            happened.append(frames.step(
                at, steps=steps, loss=draw(st.floats(1e-6, 100)), cache_bytes=None, peak_bytes=None,
                learning_rate=draw(st.floats(1e-7, 1)), seconds=draw(st.floats(0.001, 1e4)),
                process_bytes=draw(SIZES_BYTES), active_bytes=draw(SIZES_BYTES),
            ))  # fmt: skip
            also = draw(st.sampled_from(["", "valid", "save", "gauges", "note", "stop"]))
            if also == "valid":
                happened.append(events.Phase(text="validating"))
                happened.append(validation(at, 1.0))
            elif also == "save":
                saved = at
                happened.append(events.Phase(text="saving"))
                happened.append(events.Checkpoint(step=at, folder="c", seconds=0.1))
            elif also == "gauges":
                happened.append(events.Gauges(
                    process_bytes=draw(SIZES_BYTES), active_bytes=draw(SIZES_BYTES)
                ))  # fmt: skip
            elif also == "note":
                happened.append(events.Notice(text="a note of the run"))
            elif also == "stop":
                happened.append(events.Stopping(text="stopping after this step"))
                happened.append(events.Finished(step=at, reason="x", adapter="", seconds=1.0))
                saved = at
                break
    return happened


@given(histories(), st.sampled_from(SIZES))
def test_no_frame_of_any_run_says_what_is_not_so(happened, size):
    state, truth = ViewState(), Truth()
    for second, event in enumerate(happened):
        state = fold(state, record := Record(1_800_000_000.0 + second, event))
        truth.take(event, record.time)
        lines = drawn(state, *size)
        truth.check(lines)
        assert len(lines) <= size[1]
        assert max(map(cell_len, lines)) <= size[0]


def test_the_check_finds_what_is_not_so(recorded):
    """Each figure that the check reads is changed once."""
    state, truth = ViewState(), Truth()
    last = max(i for i, r in enumerate(recorded) if isinstance(r.event, events.Step)) - 1
    last = max(i for i, r in enumerate(recorded[:last]) if isinstance(r.event, events.Step))
    for record in recorded[: last + 1]:
        state = fold(state, record)
        truth.take(record.event, record.time)
    truth.check(drawn(state, 80, 24))
    last_step = state.step
    assert last_step is not None
    for wrong in (
        {"doing": "validating"},
        {"at": 3},
        {"stopping": True},
        {"step": dataclasses.replace(last_step, loss=last_step.loss + 1)},
        {"gauges": dataclasses.replace(last_step, process_bytes=1)},
        {"step_s": 1e6},
    ):
        with pytest.raises(AssertionError):
            truth.check(drawn(dataclasses.replace(state, **wrong), 80, 24))
