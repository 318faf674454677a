"""What a tune searches, and its file: reproducible, continued after a kill, refused if damaged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.session.tune_space import SEARCHED
from your_ai.session.tune_study import (
    ENDED,
    FAILED,
    FINISHED,
    PRUNED,
    REASON,
    chosen_in,
    create_study,
    ended_trials,
    enqueue_first,
    is_worse,
    next_trial,
    open_study,
    space_of,
    tell,
    trial_settings,
    value_of,
)

BASE = TrainConfig(learning_rate=2e-4, lora_rank=16, lora_alpha=32.0, lora_layers="all")
SPACE = space_of(BASE, (), blocks=8)
DEFAULT = chosen_in(BASE, SPACE, 8)
ABOUT = {"trials": 5, "fixed": [], "files": {}, "inputs": {"a": "b"}}
PATH = Path("study.db")
Opened = tuple[Study, RDBStorage]


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of a new study, which takes a second to make."""
    path = tmp_path_factory.mktemp("study") / PATH
    create_study(path, ABOUT)
    return path.read_bytes()


@pytest.fixture
def opened(own_folder, empty) -> Opened:
    PATH.write_bytes(empty)
    found = open_study(PATH)
    begin(found)
    return found


def begin(opened: Opened) -> None:
    """Run the trial of the default settings."""
    study, _ = opened
    enqueue_first(study, DEFAULT)
    trial, settings = drawn(opened, seed=0)
    assert (trial.number, settings) == (0, DEFAULT)
    for step, loss in ((2, 3.0), (4, 2.0)):
        assert not is_worse(trial, step, loss)
    tell(study, trial, FINISHED, 2.0)


def drawn(opened: Opened, seed: int) -> tuple[Trial, dict[str, object]]:
    return next_trial(*opened, SPACE, seed=seed, steps=8)


def last_of(opened: Opened) -> FrozenTrial:
    return ended_trials(opened[0])[-1]


@given(
    st.floats(1e-9, 1e8),
    st.sampled_from([1, 4, 7, 16]),
    st.one_of(st.just("all"), st.integers(1, 9)),
    st.integers(1, 40),
    st.sets(st.sampled_from([*SEARCHED])),
)
def test_space_contains_the_first_trial_and_nothing_fixed(rate, rank, layers, blocks, fixed):
    layers = layers if layers == "all" else min(layers, blocks)
    base = TrainConfig(learning_rate=rate, lora_rank=rank, lora_layers=layers)
    space = space_of(base, sorted(fixed), blocks)
    assert set(space) == set(SEARCHED) - fixed
    for name, value in chosen_in(base, space, blocks).items():
        searched = space[name]
        if isinstance(searched, FloatDistribution):
            assert searched.low <= value <= searched.high
        else:
            assert value in searched.choices
            assert len(set(searched.choices)) == len(searched.choices)


def test_layers_are_all_or_half_of_the_blocks():
    assert SPACE["lora_layers"].choices == ("all", 4)
    assert space_of(BASE, (), blocks=1)["lora_layers"].choices == ("all",)


@pytest.mark.parametrize(
    ("settings", "searched"),
    [({"lora_rank": "8,mlp=4"}, {"lora_layers"}), ({"lora_alpha": "8,block.0=4"}, set())],
)
def test_ranks_by_layer_are_not_searched(settings, searched):
    found = set(space_of(TrainConfig(**settings), (), blocks=8))
    assert found & {"lora_rank", "lora_layers"} == searched


@pytest.mark.parametrize(("fixed", "alpha"), [((), 8.0), (("lora_alpha",), 32.0)])
def test_alpha_follows_the_rank_unless_it_is_given(fixed, alpha):
    changed = trial_settings(BASE, {"lora_rank": 4}, fixed)
    assert (changed.lora_rank, changed.lora_alpha) == (4, alpha)


def test_second_trial_is_the_first_with_a_higher_learning_rate(opened):
    for seed in (0, 1):  # the second time, the trial goes on
        _, settings = drawn(opened, seed)
        assert settings == {**DEFAULT, "learning_rate": pytest.approx(5e-4)}


def test_trials_are_drawn_the_same_after_the_file_is_opened_again(opened, empty):
    found = []
    for number in range(1, 4):
        trial, settings = drawn(opened, seed=3)
        assert trial.number == number
        found.append(settings)
        tell(opened[0], trial, FINISHED, 1.0 + number)
    PATH.write_bytes(empty)
    again = open_study(PATH)
    begin(again)
    for number, settings in enumerate(found, 1):
        assert drawn(again, seed=3)[1] == settings
        again = open_study(PATH)  # the process was killed in the trial
        trial, continued = drawn(again, seed=4)
        assert (trial.number, continued) == (number, settings)
        tell(again[0], trial, FINISHED, 1.0 + number)
    assert [trial.params for trial in ended_trials(again[0])[1:]] == found
    assert found[0] != found[1] != found[2]


def test_only_a_trial_that_is_worse_than_most_is_pruned(opened):
    study, _ = opened
    for number in range(1, 4):
        trial, _ = drawn(opened, seed=0)
        assert not is_worse(trial, 2, 9.0)  # there are too few trials to compare with
        assert not is_worse(trial, 4, 2.0 + number)
        tell(study, trial, FINISHED, 2.0 + number)
    trial, _ = drawn(opened, seed=0)
    assert not is_worse(trial, 1, 99.0)  # too early
    assert not is_worse(trial, 4, 2.1)
    tell(study, trial, FINISHED, 2.1)
    trial, _ = drawn(opened, seed=0)
    assert is_worse(trial, 4, 9.0)
    assert is_worse(trial, 4, 9.0)  # the tune was killed before it recorded this
    tell(study, trial, PRUNED, None, "worse")
    last = last_of(opened)
    assert (ENDED[last.state], value_of(last), last.user_attrs[REASON]) == (PRUNED, 9.0, "worse")


def test_failed_trial_has_a_reason_and_no_value(opened):
    trial, _ = drawn(opened, seed=0)
    tell(opened[0], trial, FAILED, None, "does not fit")
    last = last_of(opened)
    assert (ENDED[last.state], value_of(last)) == (FAILED, None)
    assert last.user_attrs[REASON] == "does not fit"


def test_file_may_have_any_name(own_folder):
    path = own_folder / "a b?{x}%20#'.db"
    create_study(path, ABOUT)
    study, _ = open_study(path)
    assert study.user_attrs == {**ABOUT, "version": 3}
    assert [p.name for p in own_folder.iterdir()] == [path.name]


def other_database(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE studies (study_name TEXT)")


def of_another_version(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE study_user_attributes SET key = 'about' WHERE key = 'version'")


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
        of_another_version,
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
    "UPDATE trial_params SET distribution_json = '{'",
    "UPDATE trials SET state = 'OTHER'",
])  # fmt: skip
def test_damaged_trials_are_refused(opened, statement):
    with sqlite3.connect(PATH) as database:
        database.execute(statement)
    with pytest.raises(UserError, match="is damaged") as caught:
        open_study(PATH)
    assert "\n" not in str(caught.value)
