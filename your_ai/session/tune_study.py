"""The study of a tune: what is searched, and the next trial. Optuna keeps it in an SQLite file."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.pruners import MedianPruner
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from your_ai.config import ByLayer, TrainConfig, defaults
from your_ai.errors import RunError, UserError
from your_ai.rng import derive_seed
from your_ai.session.tune_space import FASTEST, LAYER_DIVISORS, RANKS, SCHEDULES, SLOWEST

VERSION = 3  # of a tune's folder
STUDY = "your_ai"  # name of the study in its file
REASON = "reason"  # the attribute of a trial that says why it failed or was pruned
MOST_TRIALS = 10_000

FASTER = 2.5  # the second trial differs from the first only in this multiple of the learning rate
RANDOM_TRIALS = 6  # the first trials, which are drawn without a model of the earlier ones
TRIALS_BEFORE_PRUNING = 4
UNPRUNED_SHARE = 0.25  # of the steps of a run: no trial is pruned before

FINISHED, PRUNED, FAILED = "finished", "pruned", "failed"  # states of a trial that has ended
ENDED = {TrialState.COMPLETE: FINISHED, TrialState.PRUNED: PRUNED, TrialState.FAIL: FAILED}

SearchSpace = dict[str, FloatDistribution | CategoricalDistribution]  # by setting


# What is searched


def space_of(base: TrainConfig, fixed: Sequence[str], blocks: int) -> SearchSpace:
    """Return what is searched around `base`, the settings of the first trial.

    fixed: settings that the user gave, which are not searched; nor are those that patterns of ranks
        or alphas may contradict. blocks: of the model.
    """
    counts = dict.fromkeys(max(1, blocks // divisor) for divisor in LAYER_DIVISORS)
    choices: dict[str, Sequence[Any]] = {
        "lora_rank": RANKS,
        "lora_layers": ["all" if count == blocks else count for count in counts],
        "lr_schedule": SCHEDULES,
    }
    space: SearchSpace = {}
    if "learning_rate" not in fixed:
        rate = base.learning_rate
        space["learning_rate"] = FloatDistribution(SLOWEST * rate, FASTEST * rate, log=True)
    by_layer = [p for v in (base.lora_rank, base.lora_alpha) for p in ByLayer.of(v).patterns]
    if by_layer:  # one number would take the place of all
        del choices["lora_rank"]
    if any(pattern.blocks for pattern in by_layer):  # which may get no adapters
        del choices["lora_layers"]
    for name in [name for name in choices if name not in fixed]:
        values = dict.fromkeys([*choices[name], chosen(base, name, blocks)])
        space[name] = CategoricalDistribution([v for v in values if is_allowed(base, name, v)])
    return space


def chosen(config: TrainConfig, name: str, blocks: int) -> Any:
    """A setting as the space names it."""
    value = getattr(config, name)
    return "all" if name == "lora_layers" and value == blocks else value


def chosen_in(config: TrainConfig, space: SearchSpace, blocks: int) -> dict[str, Any]:
    """The searched settings of a run, as the space names them."""
    return {name: chosen(config, name, blocks) for name in space}


def is_allowed(base: TrainConfig, name: str, value: Any) -> bool:
    """Return whether a value does not contradict another setting."""
    with contextlib.suppress(UserError):
        dataclasses.replace(base, **{name: value})
        return True
    return False


def trial_settings(
    base: TrainConfig, chosen: Mapping[str, Any], fixed: Sequence[str]
) -> TrainConfig:
    """`base` with the chosen settings. The adapters' scale stays, unless alpha is fixed."""
    alpha = base.lora_alpha
    if "lora_alpha" not in fixed and "lora_rank" in chosen:
        before = ByLayer.of(base.lora_rank).default
        before = defaults.RANKS[0] if isinstance(before, str) else before
        alpha = defaults.alphas_of_same_scale(base, before, chosen["lora_rank"]).setting
    return dataclasses.replace(base, **{**chosen, "lora_alpha": alpha})


# Trials


def enqueue_first(study: Study, default: dict[str, Any]) -> None:
    """Begin with the default settings, and then a higher learning rate."""
    study.enqueue_trial(default, skip_if_exists=True)
    if "learning_rate" in default:
        faster = {**default, "learning_rate": FASTER * default["learning_rate"]}
        study.enqueue_trial(faster, skip_if_exists=True)


def ended_trials(study: Study) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=tuple(ENDED))


def next_trial(
    study: Study, storage: RDBStorage, space: SearchSpace, seed: int, steps: int
) -> tuple[Trial, dict[str, Any]]:
    """The trial that was interrupted, or else a new one, and its settings.

    What is drawn depends only on the seed and on the trials that have ended.
    steps: of a run.
    """
    drawn = derive_seed(seed, "tune", len(ended_trials(study))) % (1 << 32)
    study.sampler = TPESampler(seed=drawn, n_startup_trials=RANDOM_TRIALS)
    study.pruner = MedianPruner(TRIALS_BEFORE_PRUNING, n_warmup_steps=int(UNPRUNED_SHARE * steps))
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if running:
        of = storage.get_study_id_from_name(STUDY)
        number = running[0].number
        trial = Trial(study, storage.get_trial_id_from_study_id_trial_number(of, number))
    else:
        trial = study.ask()
    return trial, {name: suggested(trial, name, searched) for name, searched in space.items()}


def suggested(
    trial: Trial, name: str, searched: FloatDistribution | CategoricalDistribution
) -> Any:
    if isinstance(searched, FloatDistribution):
        return trial.suggest_float(name, searched.low, searched.high, log=searched.log)
    return trial.suggest_categorical(name, searched.choices)


def is_worse(trial: Trial, step: int, loss: float) -> bool:
    """Record a validation loss; return whether the trial should be pruned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trial that is resumed reports some steps again
        trial.report(loss, step)
    return trial.should_prune()


def tell(study: Study, trial: Trial, state: str, value: float | None, reason: str = "") -> None:
    """Record how a trial ended. state: finished, pruned or failed; value: of a finished one."""
    if reason:
        trial.set_user_attr(REASON, reason)
    found = next(known for known, name in ENDED.items() if name == state)
    study.tell(trial, value if state == FINISHED else None, found)


def value_of(trial: FrozenTrial) -> float | None:
    """The best validation loss of a trial, or the negative of its reward; None if it failed."""
    if trial.state == TrialState.PRUNED:  # optuna's value is the last loss
        return min(filter(math.isfinite, trial.intermediate_values.values()), default=None)
    return trial.value


# The file


def create_study(path: Path, about: Mapping[str, Any]) -> None:
    """Write the file of a new study. Raises RunError if that fails.

    about: what the tune depends on, which becomes attributes of the study.
    """
    with storage_errors(path):
        path.touch()
        study = optuna.create_study(storage=storage_in(path), study_name=STUDY)
        for name, value in about.items():
            study.set_user_attr(name, value)
        study.set_user_attr("version", VERSION)


def open_study(path: Path) -> tuple[Study, RDBStorage]:
    """Open the study in a file. Raises UserError if the file is damaged."""
    try:
        storage = storage_in(path)
        study = optuna.load_study(study_name=STUDY, storage=storage)
        study.get_trials()  # read now, so that damage is found here
        version = study.user_attrs.get("version")
    except Exception as error:  # optuna does not say what it raises for a damaged file
        raise UserError(f"{path}: is damaged ({reason_of(error)}); start a new tune") from error
    if version != VERSION:
        raise UserError(
            f"{path.parent}: was written by another version of your_ai; start a new tune"
        )
    return study, storage


def storage_in(path: Path) -> RDBStorage:
    """Optuna's storage in a file that exists. Its path may have any characters, as ? and %."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    address = f"file:{quote(str(path.absolute()))}?mode=rw"
    creator = {"creator": lambda: sqlite3.connect(address, uri=True)}
    return RDBStorage("sqlite://", engine_kwargs=creator)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise RunError if the file cannot be read or written."""
    try:
        yield
    except (sqlite3.Error, SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise RunError(
            f"{path}: cannot be used ({reason_of(error)}); free some disk space if it is short, "
            "then resume the tune"
        ) from error


def reason_of(error: BaseException) -> str:
    """The first line of the error that caused it, without SQL."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__
