"""NaN and infinity: such a step changes nothing, and five in a row end the run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tests.conftest import (
    chat,
    events_of,
    losses_of,
    make_model,
    resume,
    train,
    with_functions,
    write_rows,
)
from tests.fault.processes import final_files
from your_ai.errors import RunError
from your_ai.objectives.objective import Sums
from your_ai.rng import derive_seed
from your_ai.run import checkpoint, events, folder
from your_ai.run.checkpoint import TrainState
from your_ai.run.folder import RunFolder
from your_ai.training import optimizer
from your_ai.training import train as recipe

NAN, INFINITY = float("nan"), float("inf")
Result = tuple[Sums, Any]  # sums of the loss and metrics, and the gradients
Spoil = Callable[[Result], Result]


def loss_of(value: float) -> Spoil:
    return lambda result: (Sums(mx.array(value), {}), result[1])


def gradients_of(value: float) -> Spoil:
    return lambda result: (result[0], tree_map(lambda g: mx.full(g.shape, value), result[1]))


def one_gradient_of(value: float) -> Spoil:
    """Replace only one element of one gradient."""

    def spoil(result: Result) -> Result:
        *others, (name, array) = tree_flatten(result[1])
        flat = array.flatten()
        flat[-1] = value
        return result[0], tree_unflatten([*others, (name, flat.reshape(array.shape))])

    return spoil


def spoil_steps(
    monkeypatch: pytest.MonkeyPatch, steps: Iterable[int], spoil: Spoil, micro_batch: int = 0
) -> None:
    """Replace the loss or the gradients of one micro-batch in some steps (counted from 1)."""
    prepare, spoiled = recipe.prepare, set(steps)

    def prepare_spoiled(config, *rest):
        prepared = prepare(config, *rest)
        step_of = {derive_seed(config.seed, "dropout", i): i + 1 for i in range(50)}

        def gradients(batch, scale, seed):
            result = prepared.engine.gradients(batch, scale, seed)
            its_turn = batch.rows[0] == micro_batch * config.batch_size
            return spoil(result) if its_turn and step_of[seed] in spoiled else result

        return with_functions(prepared, gradients=gradients)

    monkeypatch.setattr(recipe, "prepare", prepare_spoiled)


def carried(run: RunFolder, step: int) -> dict[str, bytes]:
    """The bytes of the adapter and the optimizer after a step."""
    path = run.checkpoints / f"step-{step:06d}"
    return {n: (path / n).read_bytes() for n in (checkpoint.ADAPTERS, checkpoint.OPTIMIZER)}


def newest_state(run: RunFolder) -> TrainState:
    path, _ = checkpoint.newest(run.checkpoints)
    return checkpoint.load(path).state


@pytest.fixture
def settings() -> dict[str, Any]:
    return {"save_every": 1, "keep": 99, "lora_layers": 1, "lora_dropout": 0.1}


@pytest.fixture(scope="session")
def smallest_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One narrow block: float16 is slow on a CPU."""
    path = tmp_path_factory.mktemp("models") / "smallest"
    return make_model(path, bits=None, num_hidden_layers=1, hidden_size=32, intermediate_size=32)


@pytest.fixture
def in_float16(settings, smallest_model, data_folder, monkeypatch) -> dict[str, Any]:
    """Settings of a run whose first loss scale fits."""
    monkeypatch.setattr(optimizer, "FIRST_LOSS_SCALE", 2.0**10)
    write_rows(data_folder / "train.jsonl", [chat(f"{i}", "a" * i) for i in range(1, 5)])
    (data_folder / "valid.jsonl").unlink()
    return {**settings, "model": str(smallest_model), "batch_size": 1, "dtype": "float16"}


SPOILS = {
    "loss nan": (loss_of(NAN), "the loss is nan"),
    "loss inf": (loss_of(INFINITY), "the loss is inf"),
    "loss -inf": (loss_of(-INFINITY), "the loss is -inf"),
    "gradients nan": (gradients_of(NAN), "the gradient norm nan"),
    "one gradient nan": (one_gradient_of(NAN), "the gradient norm nan"),
    "one gradient inf": (one_gradient_of(INFINITY), "the gradient norm inf"),
    "one gradient -inf": (one_gradient_of(-INFINITY), "the gradient norm inf"),
    # Finite gradients, but the sum of their squares is infinite.
    "gradients too large": (gradients_of(1e30), "the gradient norm inf"),
}


@pytest.fixture(scope="module")
def trained() -> list[RunFolder]:
    """The run of `spoiled_run`, once it was trained."""
    return []


@pytest.fixture
def spoiled_run(configure, settings, monkeypatch, trained) -> RunFolder:
    """A run whose steps 2, 4, 6... are spoiled, each in its way."""
    if not trained:
        for number, (spoil, _) in enumerate(SPOILS.values(), 1):
            spoil_steps(monkeypatch, [2 * number], spoil)
        run = train(configure(run="r", max_steps=2 * len(SPOILS) + 1, **settings))
        trained.append(RunFolder(run.path.resolve()))
    return trained[0]


@pytest.mark.parametrize("kind", SPOILS)
def test_non_finite_step_changes_nothing(spoiled_run, kind):
    number = list(SPOILS).index(kind) + 1
    assert carried(spoiled_run, 2 * number) == carried(spoiled_run, 2 * number - 1)
    assert carried(spoiled_run, 2 * number) != carried(spoiled_run, 2 * number + 1)
    skipped = events_of(spoiled_run, events.Skipped)[number - 1]
    assert (skipped.step, skipped.in_a_row, skipped.total) == (2 * number, 1, number)
    assert SPOILS[kind][1] in skipped.reason


def test_one_bad_micro_batch_skips_its_step(configure, settings, monkeypatch):
    spoil_steps(monkeypatch, [2], loss_of(NAN), micro_batch=1)
    run = train(configure(run="r", max_steps=2, grad_accumulation=3, **settings))
    assert [event.step for event in events_of(run, events.Skipped)] == [2]
    assert carried(run, 2) == carried(run, 1)


def last_good_of(run: RunFolder) -> Path:
    """The checkpoint that is named when five steps in a row end the run."""
    with pytest.raises(RunError, match=r"^runs/r: 5 steps in a row were not finite") as caught:
        resume(run)
    named = re.search(r"last good checkpoint is ([^;]+);", str(caught.value))
    assert checkpoint.fault(Path(named[1])) is None
    return Path(named[1])


def test_five_skipped_steps_in_a_row_stop_the_run_and_name_a_checkpoint(
    configure, settings, monkeypatch
):
    spoil_steps(monkeypatch, range(3, 20), loss_of(NAN))
    run = folder.create(configure(run="r", max_steps=20, **settings))
    named, last_good = last_good_of(run), carried(run, 2)
    assert {n: (named / n).read_bytes() for n in last_good} == last_good
    assert [event.in_a_row for event in events_of(run, events.Skipped)] == [1, 2, 3, 4, 5]


def test_named_checkpoint_exists_even_with_keep_1(configure, monkeypatch):
    spoil_steps(monkeypatch, range(1, 20), loss_of(NAN))
    last_good_of(folder.create(configure(run="r", max_steps=20, save_every=1, keep=1)))


def test_good_step_resets_the_count_of_skipped_steps(configure, settings, monkeypatch):
    spoil_steps(monkeypatch, [1, 2, 3, 4, 6, 7, 8, 9], loss_of(NAN))
    run = train(configure(run="r", max_steps=10, **settings))
    assert sorted(losses_of(run)) == [5, 10]
    assert [e.in_a_row for e in events_of(run, events.Skipped)] == [1, 2, 3, 4] * 2
    assert newest_state(run).skipped == 8


def test_resumed_run_continues_the_count_of_skipped_steps(configure, settings, monkeypatch):
    spoil_steps(monkeypatch, range(2, 20), loss_of(NAN))
    run = train(configure(run="r", max_steps=3, **settings))
    with pytest.raises(RunError, match="the last was step 6"):
        resume(run, max_steps=20)


def test_steps_without_weight_do_not_count_towards_giving_up(configure, in_float16, data_folder):
    rows = [chat(f"Question {i}", "Answer", weight=0) for i in range(7)]
    write_rows(data_folder / "train.jsonl", [*rows, chat("Question", "Answer")])
    run = train(configure(run="r", max_steps=8, **in_float16))
    assert len(losses_of(run)) == 1
    assert newest_state(run).loss_scale == optimizer.FIRST_LOSS_SCALE


def test_float16_finds_a_loss_scale_that_fits(configure, in_float16, monkeypatch):
    """Without simulation: gradients in float16 really overflow if the scale is too large."""
    monkeypatch.setattr(optimizer, "FIRST_LOSS_SCALE", 2.0**40)
    run = train(configure(run="r", max_steps=40, **in_float16))
    skipped = events_of(run, events.Skipped)
    assert len(skipped) > recipe.MAX_SKIPPED_IN_A_ROW
    assert {event.in_a_row for event in skipped} == {0}
    assert newest_state(run).loss_scale == 2.0 ** (40 - len(skipped))
    assert len(losses_of(run)) == 40 - len(skipped) > 0


@pytest.mark.parametrize(
    "spoil", [gradients_of(INFINITY), one_gradient_of(NAN)], ids=["all inf", "one nan"]
)
def test_overflow_in_float16_changes_only_the_loss_scale(configure, in_float16, monkeypatch, spoil):
    spoil_steps(monkeypatch, range(2, 10), spoil)
    run = train(configure(run="r", max_steps=9, **in_float16))
    assert carried(run, 9) == carried(run, 1)
    state = newest_state(run)
    assert state.loss_scale == optimizer.FIRST_LOSS_SCALE / 2**8
    assert (state.skipped, state.skipped_in_a_row) == (8, 0)


def test_overflow_at_the_smallest_loss_scale_counts(configure, in_float16, monkeypatch):
    """There is no smaller scale left to try."""
    monkeypatch.setattr(optimizer, "FIRST_LOSS_SCALE", 4.0)
    spoil_steps(monkeypatch, range(1, 20), gradients_of(INFINITY))
    run = folder.create(configure(run="r", max_steps=20, **in_float16))
    with pytest.raises(RunError, match=r"5 steps in a row .* the last was step 7"):
        resume(run)
    assert newest_state(run).loss_scale == 1.0


def test_resuming_in_float16_keeps_the_loss_scale(configure, in_float16, monkeypatch):
    monkeypatch.setattr(optimizer, "LOSS_SCALE_GROWS_AFTER", 3)
    spoil_steps(monkeypatch, [2], gradients_of(INFINITY))
    whole = train(configure(run="whole", max_steps=7, **in_float16))
    cut = train(configure(run="cut", max_steps=4, **in_float16))
    assert newest_state(cut).loss_scale == optimizer.FIRST_LOSS_SCALE / 2
    resume(cut, max_steps=7)
    assert newest_state(cut) == newest_state(whole)
    assert newest_state(cut).loss_scale == optimizer.FIRST_LOSS_SCALE  # after three good steps
    assert final_files(cut) == final_files(whole)
    assert losses_of(cut) == losses_of(whole)
