"""Training of a tiny model: exact resume, exact accumulation, notices and schedules."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map
from mlx_lm.utils import load_tokenizer

from tests.conftest import (
    DEMO_FOLDER,
    TINY,
    adapter_of,
    change_json,
    chat,
    events_of,
    losses_of,
    make_model,
    notices_of,
    train,
    train_once,
    whole_and_resumed,
    write_rows,
)
from tests.data.test_records import written
from your_ai.data.encode import Encoder
from your_ai.data.rows import read_rows
from your_ai.engine import build
from your_ai.engine.prefix import DiskStore
from your_ai.errors import UserError
from your_ai.memory import probe
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.run import checkpoint, events, requests
from your_ai.run.checkpoint import ADAPTERS, OPTIMIZER
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.session import new_run
from your_ai.training import train as recipe
from your_ai.training.planned import planned_budget
from your_ai.training.process import train_until_done
from your_ai.training.trainer import PREFIX


def final_files(run: RunFolder) -> dict[str, bytes]:
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    return {
        "adapter": (run.adapter / checkpoint.ADAPTERS).read_bytes(),
        "optimizer": (newest / checkpoint.OPTIMIZER).read_bytes(),
    }


@pytest.mark.parametrize(
    ("stop_at", "settings"),
    [
        (2, {"optimizer": "adamw", "lora_dropout": 0.2, "lora_targets": "all-linear"}),
        (2, {"optimizer": "muon", "lora_dropout": 0.2, "lora_targets": "all-linear"}),
        (3, {"prefix_cache": "memory", "lora_layers": 1}),
        (3, {"prefix_cache": "disk", "lora_layers": 1}),
    ],
)
def test_resuming_is_bit_identical(configure, stop_at, settings):
    """With three steps per epoch: the run stops within an epoch, or after the first, where the
    batches of the next one are different."""
    settings = {**settings, "batch_size": 2, "grad_accumulation": 2}
    whole, cut = whole_and_resumed(configure, stop_at, stop_at + 2, **settings)
    assert losses_of(cut) == losses_of(whole)
    assert final_files(cut) == final_files(whole)


def test_a_prefix_cache_is_left_out_where_the_model_has_no_blocks(configure, monkeypatch):
    whole = build.split_model

    def without_blocks(*args: Any) -> build.SplitModel:
        return whole(*args)._replace(parts=None, reason="a test")

    monkeypatch.setattr(build, "split_model", without_blocks)
    run = train(configure(prefix_cache="memory", plan="fused", lora_layers=1, max_steps=2))
    told = [text for text in notices_of(run) if "training without it" in text]
    assert any("--prefix-cache" in text for text in told)


def test_runs_with_a_shared_prefix_cache_compute_the_prefix_once(configure, monkeypatch):
    settings = {"prefix_cache": "disk", "lora_layers": 1, "max_steps": 4, "eval_every": 2}
    shared = {**settings, "prefix_cache_folder": "shared"}
    first = train(configure(run="first", **shared, learning_rate=1e-3))
    put = []
    with monkeypatch.context() as patched:
        patched.setattr(DiskStore, "put", lambda self, tokens, hidden: put.append(tokens))
        second = train(configure(run="second", **shared))
    assert put == []
    alone = train(configure(run="alone", **settings))
    assert losses_of(second) == pytest.approx(losses_of(alone), rel=1e-6)
    assert losses_of(first) != pytest.approx(losses_of(alone), rel=1e-6)
    assert not (second.path / PREFIX).exists()


def test_frequent_validation_and_saving_do_not_change_the_result(configure):
    settings = {"max_steps": 3, "lora_dropout": 0.2, "keep_best": False}
    seldom = train(configure(run="seldom", eval_every=0, save_every=0, **settings))
    often = train(configure(run="often", eval_every=1, save_every=1, keep=1, **settings))
    assert losses_of(often) == losses_of(seldom)
    assert final_files(often) == final_files(seldom)
    validations = events_of(often, events.Validation)
    assert [event.step for event in validations] == [1, 2, 3]
    (last,) = events_of(seldom, events.Validation)
    assert validations[-1].loss == last.loss


def test_a_step_is_one_update_with_any_accumulation(configure):
    """Ten rows, four per step: three steps per epoch, the last one short."""
    run = train(configure(max_steps=None, epochs=2, batch_size=1, grad_accumulation=4))
    steps = events_of(run, events.Step)
    assert [(event.step, event.epoch) for event in steps] == [
        (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2),
    ]  # fmt: skip
    for epoch in (steps[:3], steps[3:]):
        assert sum(event.trained_tokens for event in epoch) == trained_tokens(run)


def trained_tokens(run: RunFolder) -> int:
    tokenizer = load_tokenizer(DEMO_FOLDER)
    rows = read_rows(Path(run.read_config().data) / "train.jsonl")
    return sum(int(Encoder(tokenizer).encode(row).trained.sum()) for row in rows)


def test_data_smaller_than_a_batch_is_trained_completely(configure, data_folder):
    write_rows(data_folder / "train.jsonl", [chat("a", "b"), chat("c", "d")])
    run = train(configure(batch_size=8, grad_accumulation=2, max_steps=None, epochs=3))
    assert [event.trained_tokens for event in events_of(run, events.Step)] == [4, 4, 4]


@pytest.fixture
def other_end(tmp_path):
    """A model whose template ends turns with <|end|>, which its tokenizer takes for no end."""
    folder = make_model(tmp_path / "other_end", **TINY)
    change_json(folder, "tokenizer_config.json", eos_token="<|pad|>")
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template.replace("<|end|>'", "<|end|>\n'"))
    return folder


def test_planning_before_changes_nothing_that_is_trained(configure, other_end, monkeypatch):
    settings = {"model": str(other_end), "max_steps": 1}
    alone = train(configure(run="alone", **settings))
    monkeypatch.setenv("YOUR_AI_HOME", "another")  # nothing is cached there
    planned_budget(configure(**settings), other_end)
    after = train(configure(run="after", **settings))
    assert losses_of(after) == losses_of(alone)
    assert trained_tokens(after) == trained_tokens(alone)


@pytest.mark.parametrize(
    ("architecture", "quantize"), [("llama", None), ("llama", 4), ("qwen3_moe", 4)]
)
def test_costs_that_planning_measured_are_those_of_the_run(
    configure, tmp_path, architecture, quantize
):
    """Also of a model that is quantized first, whose copy the run opens: within a tight limit it
    could not measure them."""
    config = configure(quantize=quantize, max_memory=4.0, lora_targets="q_proj")
    folder, told = make_model(tmp_path / "whole", architecture, bits=None, hidden_size=128), []
    planned_budget(config, folder, on_measure=told.append)
    assert told
    if quantize is not None:
        folder = model_folder(folder, quantize)
    planned_budget(replace(config, quantize=None), folder, on_measure=pytest.fail)


def test_a_token_that_only_the_chat_template_ends_turns_with_is_named_once(configure, other_end):
    change_json(other_end, "config.json", eos_token_id=0)
    run = train(configure(model=str(other_end), max_steps=1))
    assert [text for text in notices_of(run) if "<|end|>" in text] == [
        "the chat template ends an answer with <|end|>, which is no end token of the model; "
        "your_ai trains it and stops there, in this run and its exports"
    ]


@pytest.mark.parametrize(
    ("too_long", "told"), [("truncate", "were truncated"), ("split", "were split")]
)
def test_rows_over_max_seq_length_give_one_notice(configure, data_folder, too_long, told):
    write_rows(data_folder / "valid.jsonl", [chat("a", "b")])
    run = train(configure(max_seq_length=40, too_long=too_long))
    (notice,) = [text for text in notices_of(run) if told in text]
    assert notice.startswith("train.jsonl: ")
    assert "of 10 rows were longer than --max-seq-length 40" in notice


def test_long_passages_of_documents_are_split_and_other_rows_refused(configure, data_folder):
    document = data_folder.with_name("book.md")
    document.write_text("# One\n\n" + "It was a long night. " * 40 + "\n\n# Two\n\nShort.\n")
    run = train(configure(data=str(document), valid="none", max_seq_length=40, max_steps=1))
    assert run.read_config().too_long == "split"
    told = "book.md: 1 of 4 rows was longer than --max-seq-length 40 and was split"
    assert [text for text in notices_of(run) if "split" in text] == [told]
    rows = f"{document},{data_folder / 'train.jsonl'}"
    for name, data in (("rows", str(data_folder)), ("mixed", rows)):
        with pytest.raises(UserError, match="tokens, more than --max-seq-length 40"):
            train(configure(run=name, data=data, valid="none", max_seq_length=40))


def test_wired_without_metal_says_that_it_has_no_effect(configure):
    found = notices_of(train(configure(max_steps=1, wired=True)))
    told = "--wired: has no effect, because there is no Metal"
    assert [text for text in found if "--wired" in text] == [told]


def test_a_run_wires_up_to_its_limit_only_if_asked(configure, monkeypatch):
    set_to = []
    monkeypatch.setattr(probe, "working_set_bytes", lambda: 64 * 10**9)
    monkeypatch.setattr(mx, "set_wired_limit", lambda size: set_to.append(size) or 0)
    train(configure(max_steps=1, max_memory=2, run="plain"))
    assert set_to == []
    train(configure(max_steps=1, max_memory=2, wired=True))
    assert set_to == [2 * 10**9, 0]


def test_gradient_is_clipped_by_its_global_norm(configure):
    settings = {"max_steps": 1, "optimizer": "sgd", "learning_rate": 1.0}
    run = train(configure(run="clipped", max_grad_norm=1e-3, **settings))
    folders = (run.adapter, run.checkpoints / "step-000000")
    end, start = (mx.load(str(folder / ADAPTERS)) for folder in folders)
    moved = [mx.square(array - start[name]).sum().item() for name, array in end.items()]
    (step,) = events_of(run, events.Step)
    assert step.grad_norm > 1e-3  # the norm before clipping
    assert sum(moved) ** 0.5 == pytest.approx(1e-3, rel=1e-2)


def test_spilling_and_8_bits_train_the_same_and_resume_bit_for_bit(configure, monkeypatch):
    monkeypatch.setattr("your_ai.training.optimizer_states.FEWEST_QUANTIZED", 64)
    monkeypatch.setattr("your_ai.memory.plan.may_keep", lambda *_: False)  # as if spilled
    settings = {"plan": "staged", "optimizer_bits": 8, "grad_accumulation": 2}
    held = train(configure(run="held", max_steps=4, **settings))
    whole, cut = whole_and_resumed(configure, 2, 4, spill=True, **settings)
    assert final_files(cut) == final_files(whole)
    assert adapter_of(whole) == adapter_of(held)
    states = [mx.load(str(checkpoint.newest(r.checkpoints)[0] / OPTIMIZER)) for r in (held, whole)]
    assert any(name.endswith("v_codes") for name in states[0])
    assert all(mx.array_equal(array, states[1][name]) for name, array in states[0].items())


def test_a_run_that_another_command_stopped_says_so(configure):
    config = configure(max_steps=3)
    run, stop = new_run.create(config), Stop()
    requests.ask(run, requests.STOP)
    stop.received = signal.SIGINT
    train_until_done(run, config, stop)
    (finished,) = events_of(run, events.Finished)
    assert finished.reason == "stopped on request"
    assert not requests.is_asked(run, requests.STOP)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains_and_resumes(configure, dtype):
    full = train_once(configure(run="full", max_steps=4))
    whole, cut = whole_and_resumed(configure, 2, 4, dtype=dtype)
    assert final_files(cut) == final_files(whole)
    assert losses_of(whole) == pytest.approx(losses_of(full), rel=0.05)


@pytest.mark.memory
def test_no_old_parameter_stays_in_memory_while_new_ones_are_computed(configure, monkeypatch):
    """Else an update would need all adapters once more, which no plan counts."""
    train_step, grown = recipe.train_step, []

    def watched(loop: Any, state: Any) -> Any:
        def update(*arguments: Any) -> None:
            model = loop.trainer.model
            before = mx.get_active_memory()
            model.update(tree_map(lambda array: array + 0, model.trainable_parameters()))
            mx.eval(model.trainable_parameters())
            mx.synchronize()
            grown.append(mx.get_active_memory() - before)
            loop.update(*arguments)

        return train_step(replace(loop, update=update), state)

    monkeypatch.setattr(recipe, "train_step", watched)
    run = train(configure(max_steps=2, lora_rank=64, lora_layers="all", lora_targets="all-linear"))
    assert len(grown) == 2
    assert max(grown) < 0.1 * (run.adapter / ADAPTERS).stat().st_size


def test_learning_rate_follows_the_schedule(configure):
    run = train(configure(max_steps=4, lr_schedule="linear", warmup_steps=2, learning_rate=0.09))
    rates = [event.learning_rate for event in events_of(run, events.Step)]
    assert rates == pytest.approx([0.03, 0.06, 0.09, 0.045])


def test_every_form_of_data_trains_the_adapter_of_its_jsonl_twin(configure):
    pairs = [{"prompt": f"Ask {i}", "completion": f"Answer {i}"} for i in range(50)]
    twin = write_rows(Path("twin.jsonl"), pairs)
    columns = [{"question": r["prompt"], "Answer": r["completion"], "id": "7"} for r in pairs]
    first = train(configure(data=str(twin), run="twin", max_steps=2))
    for form in ("csv", "parquet"):
        other = written(f"other.{form}", columns)
        run = train(configure(data=str(other), run=form, max_steps=2))
        assert adapter_of(run) == adapter_of(first)
        for told in ("prompt = question, completion = Answer", "20 of 50 rows are held out"):
            assert any(told in text for text in notices_of(run))
        assert events_of(run, events.Validation)


@pytest.mark.parametrize(("valid", "epochs"), [("", 50), ("none", 10)])
def test_epochs_are_many_where_few_rows_are_validated(configure, valid, epochs):
    asked = {"max_steps": None, "epochs": "auto", "valid": valid, "batch_size": 10}
    run = train(configure(**asked, eval_every=1, patience=1, learning_rate=1e-30))
    assert run.read_config().epochs == epochs
