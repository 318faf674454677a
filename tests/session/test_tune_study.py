"""What a tune searches, and its file: reproducible, continued after a kill, refused if damaged."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.session import tune_study
from your_ai.session.tune_study import (
    FAILED,
    FINISHED,
    PRUNED,
    SEARCHED,
    Between,
    TuneAbout,
    TuneStudy,
    chosen_in,
    create_study,
    open_study,
    settings_of,
    space_of,
)

pytest.importorskip("optuna", reason="searches")
BASE = TrainConfig(learning_rate=2e-4, lora_rank=16, lora_alpha=32.0, lora_layers="all")
SPACE = space_of(BASE, (), blocks=8)
ABOUT = TuneAbout(version=tune_study.VERSION, trials=5, fixed=(), settings="s", inputs={"a": "b"})
PATH = Path("study.db")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a new study, which takes a second to make."""
    path = tmp_path_factory.mktemp("study") / PATH
    create_study(path, ABOUT)
    return path.read_bytes()


@pytest.fixture
def study(own_folder, empty) -> TuneStudy:
    PATH.write_bytes(empty)
    return open_study(PATH)


def begin(study: TuneStudy, **losses: float) -> None:
    study.add_first(SPACE, chosen_in(BASE, SPACE, 8), {2: 3.0, 4: 2.0, **losses}, 2.0)


@given(
    st.floats(1e-9, 1e8),
    st.sampled_from([1, 4, 7, 16]),
    st.one_of(st.just("all"), st.integers(1, 9)),
    st.integers(1, 40),
    st.sets(st.sampled_from(SEARCHED)),
)
def test_space_contains_the_first_trial_and_nothing_fixed(rate, rank, layers, blocks, fixed):
    layers = layers if layers == "all" else min(layers, blocks)
    base = TrainConfig(learning_rate=rate, lora_rank=rank, lora_layers=layers)
    space = space_of(base, sorted(fixed), blocks)
    assert set(space) == set(SEARCHED) - fixed
    for name, value in chosen_in(base, space, blocks).items():
        searched = space[name]
        if isinstance(searched, Between):
            assert searched.low <= value <= searched.high
        else:
            assert value in searched
            assert len(set(searched)) == len(searched)


def test_layers_are_all_or_half_of_the_blocks():
    assert SPACE["lora_layers"] == ("all", 4)
    assert space_of(BASE, (), blocks=1)["lora_layers"] == ("all",)


@pytest.mark.parametrize(("fixed", "alpha"), [((), 8.0), (("lora_alpha",), 32.0)])
def test_alpha_follows_the_rank_unless_it_is_given(fixed, alpha):
    changed = settings_of(BASE, {"lora_rank": 4}, fixed)
    assert (changed.lora_rank, changed.lora_alpha) == (4, alpha)


def test_second_trial_is_the_first_with_a_higher_learning_rate(study):
    begin(study)
    for seed in (0, 1):  # the second time, the trial goes on
        _, settings = study.next_trial(SPACE, seed=seed, steps=8)
        first = chosen_in(BASE, SPACE, 8)
        assert settings == {**first, "learning_rate": pytest.approx(5e-4)}


def test_trials_are_drawn_the_same_after_the_file_is_opened_again(study, empty):
    drawn = []
    begin(study)
    for number in range(1, 3):
        trial, settings = study.next_trial(SPACE, seed=3, steps=8)
        assert trial.number == number
        drawn.append(settings)
        study.tell(number, FINISHED, 1.0 + number)
    study.close()
    PATH.write_bytes(empty)
    again = open_study(PATH)
    begin(again)
    for number, settings in enumerate(drawn, 1):
        assert again.next_trial(SPACE, seed=3, steps=8)[1] == settings
        again.close()
        again = open_study(PATH)  # the process was killed in the trial
        trial, continued = again.next_trial(SPACE, seed=4, steps=8)
        assert (trial.number, continued) == (number, settings)
        again.tell(number, FINISHED, 1.0 + number)
    assert [told.settings for told in again.told()[1:]] == drawn
    assert drawn[0] != drawn[1]


def test_only_a_trial_that_is_worse_than_most_is_pruned(study):
    begin(study)
    for number in range(1, 4):
        trial, _ = study.next_trial(SPACE, seed=0, steps=8)
        assert not study.report(trial, 2, 9.0)  # there are too few trials to compare with
        assert not study.report(trial, 4, 2.0 + number)
        study.tell(number, FINISHED, 2.0 + number)
    trial, _ = study.next_trial(SPACE, seed=0, steps=8)
    assert not study.report(trial, 1, 99.0)  # too early
    assert not study.report(trial, 4, 2.1)
    study.tell(trial.number, FINISHED, 2.1)
    trial, _ = study.next_trial(SPACE, seed=0, steps=8)
    assert study.report(trial, 4, 9.0)
    assert study.report(trial, 4, 9.0)  # the tune was killed before it recorded this
    study.tell(trial.number, PRUNED, 9.0, "worse")
    last = study.told()[-1]
    assert (last.state, last.value, last.reason) == (PRUNED, 9.0, "worse")


def test_failed_trial_has_a_reason_and_no_value(study):
    begin(study)
    trial, _ = study.next_trial(SPACE, seed=0, steps=8)
    study.tell(trial.number, FAILED, None, "does not fit")
    last = study.told()[-1]
    assert (last.state, last.value, last.reason) == (FAILED, None, "does not fit")


def test_file_may_have_any_name(own_folder):
    path = own_folder / "a b?{x}%20#'.db"
    create_study(path, ABOUT)
    assert open_study(path).about == ABOUT
    assert [p.name for p in own_folder.iterdir()] == [path.name]


def other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE studies (study_name TEXT)")


def change_about(text: str) -> None:
    with sqlite3.connect(PATH) as database:
        database.execute("UPDATE study_user_attributes SET value_json = ?", (text,))


def about(**changes: object) -> None:
    change_about(json.dumps(json.dumps({**dataclasses.asdict(ABOUT), **changes})))


def rename_study(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE studies SET study_name = 'other'")


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: (path.unlink(), path.mkdir()),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not SQLite" * 99),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(path.read_bytes()[:20_480]),
        other_database,
        rename_study,
        lambda path: change_about("{"),
        lambda path: change_about("null"),
        lambda path: about(version=99),
        lambda path: about(trials=0),
        lambda path: about(trials="many"),
        lambda path: about(fixed=["no_setting"]),
        lambda path: about(inputs={"a": 1}),
        lambda path: about(more=1),
    ],
)
def test_damaged_file_is_refused(own_folder, empty, damage):
    PATH.write_bytes(empty)
    damage(PATH)
    with pytest.raises(UserError) as caught:
        open_study(PATH)
    assert "\n" not in str(caught.value)
    assert "study.db" in str(caught.value) or "another version" in str(caught.value)


@pytest.mark.parametrize("statement", [
    "UPDATE trial_values SET value = 1e999",
    "UPDATE trial_values SET value_type = 'INF_POS'",
    "UPDATE trial_params SET distribution_json = '{'",
    "UPDATE trial_params SET param_name = 'model' WHERE param_name = 'lora_rank'",
    "UPDATE trials SET state = 'OTHER'",
    "DELETE FROM trial_values",
])  # fmt: skip
def test_damaged_trials_are_refused(study, statement):
    begin(study)
    study.close()
    with sqlite3.connect(PATH) as database:
        database.execute(statement)
    with pytest.raises(UserError, match="is damaged") as caught:
        open_study(PATH)
    assert "\n" not in str(caught.value)
