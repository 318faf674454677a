"""Training from an adapter: under every plan, it continues what the adapter's run did."""

from __future__ import annotations

import dataclasses
import shutil

import mlx.core as mx
import pytest

from tests.conftest import call, events_of, losses_of, resume, train, train_once
from tests.export.runs import make_run
from your_ai.config import is_used
from your_ai.errors import UserError
from your_ai.nets.saved_adapter import read_adapter
from your_ai.run import events
from your_ai.session import new_run

# Plain gradient descent over all rows in each step: its only state is the adapter.
WHOLE = {"batch_size": 10, "optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
WHOLE |= {"eval_every": 0, "save_every": 0, "valid": "none"}


def train_from(source, configure, **settings):
    config = configure(**WHOLE, run="new", max_steps=2, **settings)
    flags = dataclasses.asdict(config) | {"from_adapter": str(source)}
    for name in ("lora_alpha", "lora_layers", "lora_rank", "lora_targets", "use_dora"):
        flags.pop(name)
    flags = {name: value for name, value in flags.items() if is_used(name, config.objective)}
    return train(new_run.resolve(flags, None))


@pytest.mark.parametrize(
    ("plan", "use_dora"), [("fused", False), ("streamed", False), ("staged", True)]
)
def test_two_steps_from_two_steps_are_four_steps(configure, plan, use_dora):
    adapted = {"use_dora": use_dora, "lora_targets": ("q_proj", "mlp.up_proj")}
    whole = train_once(configure(**WHOLE, run="whole", max_steps=4, **adapted))
    train_once(configure(**WHOLE, run="half", max_steps=2, **adapted))
    run = train_from("half", configure, plan=plan)
    losses, wanted = losses_of(run), losses_of(whole)
    assert losses[1] == pytest.approx(wanted[3], rel=1e-5)
    assert losses[2] == pytest.approx(wanted[4], rel=1e-5)
    ours, theirs = read_adapter(run.adapter).arrays, read_adapter(whole.adapter).arrays
    for name, array in theirs.items():
        assert mx.allclose(ours[name], array, rtol=1e-4, atol=1e-6), name


def test_first_checkpoint_is_the_adapter_it_starts_from(configure):
    train_once(configure(**WHOLE, run="half", max_steps=1))
    run = train_from("half", configure, keep=5)
    first = read_adapter(run.checkpoints / "step-000000").arrays
    for name, array in read_adapter(run.start).arrays.items():
        assert mx.array_equal(first[name], array)
    texts = [event.text for event in events_of(run, events.Notice)]
    assert "starting from the adapter half" in texts


def test_run_resumes_without_its_source_but_not_without_its_copy(configure):
    half = train_once(configure(**WHOLE, run="half", max_steps=1))
    run = train_from("half", configure)
    shutil.rmtree(half.path)
    resume(run, max_steps=3)
    assert sorted(losses_of(run)) == [1, 2, 3]
    shutil.rmtree(run.start)
    with pytest.raises(UserError, match=r"start/checksums.json: is missing; restore it, or start"):
        resume(run, max_steps=4)


def test_command_line_trains_from_a_run(tiny_model, data_folder, capsys):
    make_run(tiny_model, "first")
    given = ("--data", data_folder, "--max-steps", 1, "--samples", 0, "--no-supervise")
    assert call("train", "--from", "first", "--run", "second", *given) == 0
    assert call("train", "--from", "first", "--lora-rank", 9, *given) == 2
    assert "error: --lora-rank 9: the adapter of --from first has 4" in capsys.readouterr().err
    assert call("train", "--resume", "second", "--from", "other", "--no-supervise") == 2
    assert "--from other: the run started with first, which" in capsys.readouterr().err
