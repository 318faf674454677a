"""Runs that train whole weights: on disk as in memory, killed and resumed, and their result."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load as load_by_mlx_lm

from tests.conftest import (
    TINY,
    chat,
    load_base,
    losses_of,
    make_model,
    notices_of,
    peak_of,
    refused,
    resume,
    train,
    write_rows,
)
from tests.engine.test_fused import plain_loss
from tests.evaluation.conftest import carry_out
from tests.fault.processes import train_and_die
from tests.training.test_preferences import PAIRS
from your_ai.config import TrainConfig, build
from your_ai.errors import UserError
from your_ai.evaluation.compare import Comparison, Request, compare
from your_ai.memory import allocator
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder
from your_ai.session import new_run
from your_ai.training.periods import blocks_of

ROWS = [chat(f"Ask {i}" + " please" * (i % 4), f"Answer {i}") for i in range(8)]
HERE: dict[str, Any] = {"plan": "staged", "spill": True}  # the weights are in memory
ON_DISK: dict[str, Any] = {"plan": "streamed", "spill": True}


@pytest.fixture(scope="module")
def float_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("float")
    return {
        name: make_model(place / name, name, None, seed=3, **TINY) for name in ("llama", "qwen2")
    }


@pytest.fixture
def whole(float_models, own_folder):
    """A function that makes the config of a run."""

    def make(run: str, model: str = "qwen2", rows: Any = ROWS, **settings: Any) -> TrainConfig:
        data = write_rows(own_folder / "rows.jsonl", rows)
        first = {
            "model": str(float_models[model]), "data": str(data), "valid": "none", "run": run,
            "adapter": "full", "max_steps": 4, "batch_size": 4, "learning_rate": 1e-3,
            "supervise": False, "samples": 0, "lora_layers": 2,
        }  # fmt: skip
        return build({**first, **settings}, "test")

    return make


def saved(run: RunFolder) -> dict[str, bytes]:
    """The trained files of the newest checkpoint, and the result."""
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    files = [*newest.glob("weights-*"), *newest.glob("states-*"), *newest.glob("optimizer.*")]
    assert len(files) > 2
    result = [*run.model.glob("*.safetensors"), run.model / "config.json"]
    return {path.name: path.read_bytes() for path in (*files, *result)}


def test_twenty_steps_on_disk_are_those_in_memory(whole):
    here = train(whole("here", **HERE, max_steps=20))
    on_disk = train(whole("disk", **ON_DISK, max_steps=20))
    assert losses_of(on_disk) == losses_of(here)
    assert saved(on_disk) == saved(here)
    assert losses_of(here)[20] < losses_of(here)[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer_bits": 8, "model": "llama"},
        {"optimizer": "adafactor"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "adapter_dtype": "bfloat16"},
        {"lora_targets": ("q_proj", "mlp.down_proj"), "grad_accumulation": 2, "batch_size": 2},
        {"objective": "dpo", "rows": PAIRS},
        {"packing": True, "layerwise_lr_decay": 0.5},
    ],
)
def test_every_kind_of_run_is_the_same_on_disk_and_resumes_bit_for_bit(
    whole, monkeypatch, settings
):
    monkeypatch.setattr("your_ai.training.optimizer_states.FEWEST_QUANTIZED", 64)
    here = train(whole("here", **HERE, **settings))
    on_disk = train(whole("disk", **ON_DISK, **settings, max_steps=2))
    assert resume(on_disk, max_steps=4) == 0
    assert losses_of(on_disk) == losses_of(here)
    assert saved(on_disk) == saved(here)


def test_a_run_goes_on_under_another_plan(whole):
    whole_run = train(whole("whole", **HERE))
    for first, then in ((HERE, ON_DISK), (ON_DISK, HERE)):
        run = train(whole(f"from_{first['plan']}", **first, max_steps=2))
        assert resume(run, max_steps=4, **then) == 0
        assert saved(run) == saved(whole_run)


@pytest.mark.parametrize("last", [1, 7, 10])
def test_a_run_killed_within_an_update_resumes_bit_for_bit(whole, last):
    expected = train(whole("expected", **ON_DISK, save_every=1))
    killed = new_run.create(whole("killed", **ON_DISK, save_every=1))
    train_and_die(killed, "your_ai.engine.block_files:os.replace", last, "weights", "states")
    assert resume(killed) == 0
    assert saved(killed) == saved(expected)
    assert not (killed.path / "working").exists()


def test_checkpoints_are_links_to_files_that_no_step_changes(whole):
    run = train(whole("run", **ON_DISK, save_every=1))
    newest, before, *_ = checkpoint.list_checkpoints(run.checkpoints)
    for path in newest.glob("weights-*"):
        assert path.read_bytes() != (before / path.name).read_bytes()
    assert checkpoint.fault(before) is None
    (newest / "weights-00001.safetensors").write_bytes(b"damaged")
    assert "weights-00001.safetensors: its checksum is wrong" in (checkpoint.fault(newest) or "")


def test_only_the_chosen_arrays_change_and_the_result_is_a_model(whole, float_models):
    run = train(whole("run", **ON_DISK, lora_layers=1, lora_targets=("q_proj",)))
    base = mx.load(str(float_models["qwen2"] / "model.safetensors"))
    found = mx.load(str(run.model / "model.safetensors"))
    assert found.keys() == base.keys()
    changed = {name for name in base if not mx.array_equal(base[name], found[name])}
    layer = "model.layers.2.self_attn.q_proj"
    assert changed == {f"{layer}.weight", f"{layer}.bias"}
    network, _ = load_by_mlx_lm(str(run.model))
    assert network(mx.array([[1, 2, 3]])).shape == (1, 3, base["lm_head.weight"].shape[0])


def test_a_preference_run_compares_with_the_model_as_it_started(whole):
    """So the first loss is log 2, also of a run that was resumed."""
    run = train(whole("run", rows=PAIRS, objective="dpo", **ON_DISK, max_steps=2))
    assert resume(run, max_steps=3) == 0
    assert losses_of(run)[1] == pytest.approx(0.6931, abs=1e-3)
    straight = train(whole("straight", rows=PAIRS, objective="dpo", **HERE, max_steps=3))
    assert losses_of(run) == losses_of(straight)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--use-dora"], "--use-dora: not supported with --adapter full"),
        (["--qat", "4"], "--qat: not supported with --adapter full"),
        (["--lora-rank", "8"], "--lora-rank: --adapter full adds no layers"),
        (["--objective", "grpo", "--reward", "length:3"], "not supported with --objective grpo"),
        (["--processes", "2"], "--adapter full: trains in one process"),
        (["--prefix-cache", "disk"], "--prefix-cache: not supported with --adapter full"),
        (["--adapter-dtype", "bfloat16"], "--adapter-dtype bfloat16: needs --dtype bfloat16"),
    ],
)
def test_what_makes_no_sense_is_refused(whole, capsys, arguments, message):
    config = whole("r")
    given = ["--model", config.model, "--data", config.data, "--no-supervise", "--samples", "0"]
    assert message in refused(capsys, "train", "--adapter", "full", *given, *arguments)


def test_a_quantized_model_is_refused(whole, capsys, tiny_model):
    given = ["--model", tiny_model, "--data", whole("r").data, "--no-supervise"]
    error = refused(capsys, "train", "--adapter", "full", *given)
    assert "is quantized, and so has no gradient; use a model that is not quantized" in error


def test_commands_that_need_an_adapter_say_what_the_result_is(whole, capsys):
    run = train(whole("run", **HERE, max_steps=1))
    commands = ("export run --to peft", "export run --to mlx", "merge run", "train --from run")
    for command in commands:
        assert "whole weights" in refused(capsys, *command.split())
    error = refused(capsys, "generate", "run", "--prompt", "Hi", "--checkpoint", "latest")
    assert "can only be resumed" in error
    assert run.model.is_dir()


def measured(engine: str) -> Comparison:
    request = Request(batch_size=2, engine=engine)
    return carry_out(compare(open_trained("run"), Path("rows.jsonl"), request))


@pytest.mark.parametrize("engine", ["staged", "streamed"])
def test_evaluation_measures_the_base_and_the_result(whole, engine):
    run = train(whole("run", **HERE))
    found, base = measured(engine), Path(run.read_config().model)
    examples = found.rows.trained.examples
    count = sum(int(examples[i].trained[1:].sum()) for i in range(len(examples)))
    for measures, folder in ((found.adapter, run.model), (found.base, base)):
        expected = plain_loss(load_base(folder, mx.float32)[0], examples).item()
        assert measures.losses.sum() / count == pytest.approx(expected, rel=1e-4)
    assert found.adapter.losses.sum() < found.base.losses.sum()


@pytest.mark.parametrize("engine", ["fused", "staged"])
def test_evaluation_has_one_of_the_two_models_in_memory(whole, own_folder, engine):
    sizes = {"hidden_size": 256, "intermediate_size": 4096, "head_dim": 64}
    base = make_model(own_folder / "wide", "qwen2", None, **sizes)
    train(dataclasses.replace(whole("run", **HERE, max_steps=1), model=str(base)))
    weights = sum(file.stat().st_size for file in base.glob("*.safetensors"))
    allocator.free()  # what the run left
    assert peak_of(lambda: measured(engine)) < 1.7 * weights


def test_a_run_that_wears_the_disk_is_refused_unless_it_is_allowed(whole, monkeypatch):
    monkeypatch.setattr("your_ai.memory.endurance.FULL_WRITES", 1e-6)
    config = whole("run", **ON_DISK, max_steps=1)
    with pytest.raises(UserError, match=r"a step writes .* usually bears.*allow it with --yes"):
        train(config)
    run = train(dataclasses.replace(config, run="allowed", heavy_writes=True))
    assert any("a step writes" in text for text in notices_of(run))


PERIODS = {"blocks_per_period": 1, "period": 3, "lora_layers": "all", "max_steps": 8}


@pytest.mark.parametrize("here", [HERE, {"plan": "fused"}])
def test_periods_train_one_block_at_a_time_and_resume_bit_for_bit(whole, here):
    """Fused and staged gradients differ by rounding, so fused is compared with itself."""
    straight = train(whole("straight", **here, **PERIODS, save_every=1, keep=9))
    changed = []
    for step in range(1, 9):
        now, before = (checkpoint.path_at(straight.checkpoints, s) for s in (step, step - 1))
        if not before.exists():
            continue
        files = list(now.glob("weights-*"))
        changed.append([p.name for p in files if not same_file(p, before / p.name)])
        assert [path.name[-13:] for path in now.glob("states-*")] == [changed[-1][0][-13:]]
    assert all(len(names) == 1 for names in changed)
    for stop in (3, 5):  # between two periods, and within one
        cut = train(whole(f"cut{stop}", **here, **PERIODS | {"max_steps": stop}))
        assert resume(cut, max_steps=8) == 0
        assert saved(cut) == saved(straight)
        assert losses_of(cut) == losses_of(straight)
    if here == HERE:
        on_disk = train(whole("disk", **ON_DISK, **PERIODS))
        assert saved(on_disk) == saved(straight)


def same_file(one: Path, other: Path) -> bool:
    return other.exists() and one.read_bytes() == other.read_bytes()


def test_every_block_has_its_turn_before_one_has_it_again():
    turns = [blocks_of(number, range(2, 7), 2, seed=4) for number in range(9)]
    for turn in (turns[:3], turns[3:6], turns[6:]):
        assert sorted(block for blocks in turn for block in blocks) == [2, 3, 4, 5, 6]
    assert turns[:3] != turns[3:6]
    assert turns == [blocks_of(number, range(2, 7), 2, seed=4) for number in range(9)]
