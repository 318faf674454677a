"""The order of a tune: which trial runs, how it ends, what is kept; with a runner that only writes
events."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from optuna.study import Study
from optuna.trial import Trial

from tests.conftest import Killed, chat, refused, write_rows
from tests.dashboard import frames
from tests.dashboard.frames import validation
from your_ai.config import TrainConfig, resolve
from your_ai.config.defaults import resolved
from your_ai.errors import RunError, UserError
from your_ai.run import events
from your_ai.run.child import CRASHED, DONE, FAILED, LOST, USER
from your_ai.run.events import EventLog
from your_ai.run.folder import RunFolder, locked
from your_ai.session import tune_study, tuning
from your_ai.session.tuning import EndedRun, TrialStopped, TrialWatch, TuneFolder

STEPS = 4
FULL_DISK = EndedRun(FAILED, "error: runs/r: cannot be written (No space left on device)")
REFUSED = EndedRun(USER, "error: it does not fit into 0.1 GB")


@dataclass
class Runner:
    """Trains by writing the events of a run: a validation after each second step.

    losses: of each trial, by number; default: lower with each trial.
    ends: what happens instead, by the number of the call.
    """

    losses: dict[int, list[float]] = field(default_factory=dict)
    rewarded: bool = False
    """Whether validations measure rewards, the negatives of the losses."""
    ends: dict[int, EndedRun | BaseException] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def __call__(
        self, folder: RunFolder, received: Sequence[int], is_enough: Callable[[], bool]
    ) -> EndedRun:
        end = self.ends.get(len(self.calls))
        self.calls.append(folder.name)
        folder.write_config(chosen(folder.read_config()))
        folder.checkpoints.mkdir(exist_ok=True)
        with contextlib.closing(EventLog(folder.events)) as log:
            log.write(started())
            if end is not None:
                log.write(validation(2, 5.0))
                if isinstance(end, BaseException):
                    raise end
                return end
            losses = self.losses.get(int(folder.name), [5.0, 4.0 - int(folder.name) / 10])
            for step, loss in zip((2, STEPS), losses, strict=True):
                metrics = {"reward": -loss} if self.rewarded else {}
                log.write(validation(step, loss, metrics=metrics))
                if is_enough():
                    return EndedRun(128 + signal.SIGTERM)
            folder.adapter.mkdir()
            log.write(finished())
        return EndedRun(DONE)


def chosen(config: TrainConfig) -> TrainConfig:
    """The settings with what a run chooses for `auto`."""
    return resolved(config, 10, False, STEPS, rank=16, count=3, blocks=3)


def started() -> events.Started:
    return frames.started(steps=STEPS, steps_per_epoch=4)


def finished(reason: str = "done") -> events.Finished:
    return events.Finished(step=STEPS, reason=reason, adapter="adapter", seconds=1.0)


class View:
    def progress(self, number, settings, state) -> None: ...

    def ended(self, row) -> None: ...


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder of a new tune, which takes a second to make."""
    place = tmp_path_factory.mktemp("made")
    for name in ("train", "valid"):
        write_rows(place / "data" / f"{name}.jsonl", [chat("Ask", "Answer")])
    flags = {"model": str(tiny_model), "data": str(place / "data"), "max_steps": str(STEPS)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return tuning.create_tune(resolve(flags, None), "t", sorted(flags), 3).path.absolute()


@pytest.fixture
def folder(own_folder: Path, made: Path) -> TuneFolder:
    return TuneFolder(Path(shutil.copytree(made, "tunes/t")))


def tune(folder: TuneFolder, runner: Runner, **options):
    return tuning.tune(folder, View(), run=runner, **options)


def test_trials_run_one_after_the_other_and_the_best_is_kept(folder):
    runner = Runner({1: [5.0, 1.0]})
    rows, received = tune(folder, runner)
    assert received == 0
    assert runner.calls == ["000", "001", "002"]
    assert [row.validation_loss for row in rows] == [4.0, 1.0, 3.8]
    assert [row.is_best for row in rows] == [False, True, False]
    assert rows[0].settings == {
        "learning_rate": 2e-4, "lora_rank": 16, "lora_layers": "all", "lr_schedule": "constant",
    }  # fmt: skip
    kept = [folder.trial(n) for n in range(3) if folder.trial(n).checkpoints.exists()]
    assert kept == [folder.trial(1)]
    assert [folder.trial(n).adapter.exists() for n in range(3)] == [False, True, False]
    preset = resolve({}, str(folder.best))
    assert preset == folder.trial(1).read_config()
    assert Path(preset.data).is_absolute()


def test_trials_on_rewards_are_compared_and_shown_by_their_rewards(folder):
    runner = Runner({0: [-0.1, -0.25], 1: [-0.5, -0.75], 2: [-0.5, math.nan]}, rewarded=True)
    rows, _ = tune(folder, runner)
    assert [(row.reward, row.validation_loss) for row in rows[:2]] == [(0.25, None), (0.75, None)]
    assert [row.is_best for row in rows] == [False, True, False]
    assert (rows[2].state, rows[2].reason) == ("pruned", "the validation reward is nan at step 4")
    assert rows[2].reward == 0.5
    note = "# Validation reward 0.75; with the default settings 0.25."
    assert note in folder.best.read_text().splitlines()


def test_finished_tune_goes_on_with_more_trials(folder):
    tune(folder, Runner())
    runner = Runner()
    assert len(tune(folder, runner, trials=2)[0]) == 3
    assert runner.calls == []
    assert len(tune(folder, runner, trials=4)[0]) == 4
    assert runner.calls == ["003"]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_trial_of_a_killed_tune_is_continued(folder, at):
    with pytest.raises(Killed):
        tune(folder, Runner(ends={at: Killed()}))
    before = folder.trial(at).config.read_text()
    runner = Runner()
    rows, _ = tune(folder, runner)
    assert runner.calls == [f"{n:03}" for n in range(at, 3)]
    assert len(rows) == 3
    assert folder.trial(at).config.read_text() == before


def test_trial_that_finished_before_the_kill_is_not_run_again(folder):
    def kill(study: Study, trial: Trial, *end: object) -> None:
        if trial.number == 1:
            raise Killed
        tell(study, trial, *end)

    runner, tell = Runner(), tune_study.tell
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune_study, "tell", kill)
        with pytest.raises(Killed):
            tune(folder, runner)
    assert runner.calls == ["000", "001"]
    rows, _ = tune(folder, runner)
    assert runner.calls == ["000", "001", "002"]
    assert [row.state for row in rows] == ["finished"] * 3


def test_trial_that_does_not_fit_is_recorded_with_its_reason(folder):
    rows, _ = tune(folder, Runner(ends={1: REFUSED}))
    assert [row.state for row in rows] == ["finished", "failed", "finished"]
    assert rows[1].reason == "it does not fit into 0.1 GB"
    assert rows[1].validation_loss is None
    assert rows[2].is_best


def test_first_trial_that_does_not_fit_ends_the_tune(folder):
    with pytest.raises(UserError, match="it does not fit"):
        tune(folder, Runner(ends={0: REFUSED}))
    runner = Runner()
    assert len(tune(folder, runner)[0]) == 3
    assert runner.calls[0] == "000"


def test_full_disk_ends_the_tune_and_the_trial_can_be_continued(folder):
    with pytest.raises(RunError, match="No space left"):
        tune(folder, Runner(ends={1: FULL_DISK}))
    runner = Runner()
    assert [row.state for row in tune(folder, runner)[0]] == ["finished"] * 3
    assert runner.calls == ["001", "002"]


def test_trial_is_started_again_if_its_supervisor_is_killed(folder):
    killed = EndedRun(-signal.SIGKILL)
    runner = Runner(ends={1: killed, 2: killed})
    assert len(tune(folder, runner)[0]) == 3
    assert runner.calls == ["000", "001", "001", "001", "002"]
    with pytest.raises(RunError, match="was killed 3 times"):
        tune(folder, Runner(ends=dict.fromkeys(range(3), killed)), trials=4)


def test_loss_that_is_not_finite_prunes_the_trial(folder):
    rows, _ = tune(folder, Runner({1: [float("nan"), 0.1]}))
    assert rows[1].state == "pruned"
    assert "nan at step 2" in rows[1].reason
    assert rows[2].is_best


def test_signal_ends_the_tune_and_the_trial_can_be_continued(folder):
    rows, received = tune(folder, Runner(ends={1: EndedRun(128 + signal.SIGINT)}))
    assert received == signal.SIGINT
    assert [row.number for row in rows] == [0]
    assert len(tune(folder, Runner())[0]) == 3


def test_no_trial_starts_after_the_time(folder, monkeypatch):
    at = iter([0, 30, 90])
    monkeypatch.setattr(tuning, "clock", lambda: next(at))
    rows, received = tune(folder, Runner(), minutes=1)
    assert (len(rows), received) == (1, 0)


DIVERGED = [events.Skipped(step=3, reason="nan", in_a_row=5, total=5)]


@pytest.mark.parametrize(
    ("ended", "more", "expected"),
    [
        (EndedRun(DONE), [finished()], "finished"),
        (EndedRun(USER, "error: no"), [], "failed"),
        (EndedRun(LOST, "error: died"), [], "failed"),
        (EndedRun(FAILED, "error: 5 steps"), DIVERGED, "failed"),
        (EndedRun(FAILED, "error: full"), [], RunError),
        (EndedRun(CRASHED, "Traceback"), [], RunError),
        (EndedRun(130), [finished("stopped by Ctrl-C")], TrialStopped),
        (EndedRun(-signal.SIGTERM), [], TrialStopped),
        (EndedRun(-signal.SIGKILL), [], None),
        (None, [], None),
        (None, [finished()], "finished"),
    ],
)
def test_how_a_trial_ended(own_folder, ended, more, expected):
    run = RunFolder(own_folder)
    for event in (started(), validation(2, 1.5), *more):
        events.write_event(run.events, event)
    watch = TrialWatch(run)
    assert not watch.read()
    if isinstance(expected, type):
        with pytest.raises(expected):
            tuning.end_of(watch, ended)
        return
    end = tuning.end_of(watch, ended)
    assert (end and end.state) == expected
    if expected == "finished":
        assert end.value == 1.5


def test_only_one_process_tunes_a_folder(folder, monkeypatch):
    monkeypatch.setattr("your_ai.run.folder.LOCK_WAIT_S", 0.0)
    with (
        locked(RunFolder(folder.path), tuning.TUNE_LOCK),
        pytest.raises(UserError, match="is working on this tune"),
    ):
        tune(folder, Runner())


def change_data(folder: TuneFolder) -> None:
    study, _ = tune_study.open_study(folder.study)
    study.set_user_attr("inputs", {**study.user_attrs["inputs"], "data train": "0"})


def change_first(folder: TuneFolder) -> None:
    config = folder.trial(0).config
    config.write_text(config.read_text().replace("lora_rank: 16", "lora_rank: 8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_data, r"changed since the tune began \(data train\)"),
        (change_first, "trials/000/config.yaml: was changed"),
        (lambda folder: folder.settings.write_text("model: x\n"), "settings.yaml: was changed"),
        (lambda folder: folder.study.write_bytes(b"?"), "study.db: is damaged"),
        (lambda folder: folder.trial(0).config.unlink(), "config.yaml: cannot be read"),
    ],
)
def test_changed_tune_is_refused(folder, change, message):
    tune(folder, Runner(), trials=1)
    change(folder)
    runner = Runner()
    with pytest.raises(UserError, match=message):
        tune(folder, runner, trials=2)
    assert runner.calls == []


# The command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trials", "0"], "--trials 0: must be at least 1"),
        (["--timeout", "0"], "--timeout 0.0: must be a number of minutes above 0"),
        (["--name", "../x"], "--name ../x: use at most 100"),
        (["--name", "t"], "--name t: tunes/t exists"),
        (["--run", "r"], "--run: a tune has several runs"),
        (["--no-supervise"], "--no-supervise: each trial"),
        (["--push-to", "a/b"], "--push-to: a tune has several adapters"),
        (["--valid", "none"], "has no validation rows"),
        (["--from", "r"], "--from r: only works with train and plan"),
        (["--learning-rate", "1", "--lora-rank", "4", "--lora-layers", "all", "--lr-schedule",
          "linear"], "nothing is left to search"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(capsys, folder, data_folder, arguments, message):
    common = ["--model", "demo", "--data", "data"]
    assert message in refused(capsys, "tune", *common, *arguments)
    assert [path.name for path in tuning.TUNES.iterdir()] == ["t"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume", "tt"], "/tunes; did you mean t?"),
        (["--resume", "t", "--max-steps", "9"], "cannot be combined with --max-steps"),
        (["--resume", "t", "--config", "demo"], "cannot be combined with --config"),
        (["--resume", "t", "--name", "u"], "cannot be combined with --name"),
    ],
)
def test_wrong_resumes_are_refused(capsys, folder, arguments, message):
    assert message in refused(capsys, "tune", *arguments)


def test_the_name_of_the_run_in_a_file_of_settings_is_ignored(capsys, data_folder):
    Path("tunes").write_text("")
    Path("mine.yaml").write_text("run: mine\nmodel: demo\ndata: data\n")
    error = refused(capsys, "tune", "--config", "mine.yaml", "--name", "t")
    assert "tunes/t: cannot be written" in error
    error = refused(capsys, "tune", "--config", "mine.yaml", "--run", "other")
    assert error == "error: --run: a tune has several runs; use --name\n"


def test_missing_optuna_is_named(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install '.[tune]'" in refused(capsys, "tune")
