"""Runs with LoRA on the embedding and the head: resumed, evaluated, fused and exported."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from tests.conftest import call, change_json, make_model, refused, train
from tests.training.vocabulary import (
    arrays,
    assert_evaluation_shows_that_it_learned,
    assert_plan_counts_what_is_trained,
    assert_resumes_exactly,
    fused,
    imported_from_peft,
)
from your_ai.errors import UserError
from your_ai.export import peft
from your_ai.export.untrained_run import import_adapter
from your_ai.generation.generate import load_run
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.saved_adapter import open_trained, read_adapter

BOTH = {"lora_targets": "q_proj,embed_tokens,lm_head"}
BY_LAYER = {**BOTH, "lora_rank": "4,lm_head=2,embed_tokens=3", "lora_alpha": "8,lm_head=2"}
TOKENS = mx.array([[5, 17, 300, 44, 9]])


@pytest.fixture
def config(configure, own_folder):
    """Makes the config of a run of a model whose head is not tied."""
    made: dict[int | None, Path] = {}

    def make(bits: int | None = None, **settings):
        if bits not in made:
            made[bits] = make_model(own_folder / f"base-{bits}", "llama-untied", bits)
        return configure(**{"model": str(made[bits]), **settings})

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {"plan": "fused", **BOTH},
        {"plan": "staged", "spill": True, **BY_LAYER, "loraplus_ratio": 4},
        {"plan": "streamed", "lora_targets": "all-linear,lm_head", "adapter_dtype": "bfloat16"},
    ],
)
def test_a_resumed_run_ends_with_the_same_bytes(config, settings):
    whole = assert_resumes_exactly(partial(config, 4), **settings)
    assert any("lm_head.low_rank" in name for name in arrays(whole))


@pytest.mark.parametrize("settings", [BOTH, BY_LAYER])
@pytest.mark.parametrize("bits", [None, 4])
def test_the_fused_model_answers_as_the_run_does(config, own_folder, bits, settings):
    train(config(bits, **settings, learning_rate=0.05))
    trained = open_trained("r")
    found, _ = fused(own_folder / "fused", "dequantized" if bits else "auto")
    base, _ = mlx_lm.load(trained.config.model)
    wanted = load_run(trained)[0](TOKENS)
    assert mx.allclose(found(TOKENS), wanted, rtol=1e-3, atol=1e-3)
    assert not mx.allclose(base(TOKENS), wanted, rtol=1e-1, atol=1e-1)


def test_a_model_for_transformers_answers_as_the_run_does(config, own_folder):
    train(config(**BOTH, learning_rate=0.05))
    assert call("export", "r", "--to", "hf", "--out", own_folder / "hf") == 0
    exported, _ = mlx_lm.load(str(own_folder / "hf"))
    wanted = load_run(open_trained("r"))[0](TOKENS)
    assert mx.allclose(exported(TOKENS), wanted, rtol=1e-3, atol=1e-3)


def test_a_base_that_stays_quantized_is_fused(config, own_folder):
    train(config(4, **BOTH, learning_rate=0.05))
    trained = open_trained("r")
    found, _ = fused(own_folder / "fused")
    assert (found.lm_head.bits, found.model.embed_tokens.bits) == (8, 8)
    wanted = load_run(trained)[0](TOKENS)
    base, _ = mlx_lm.load(trained.config.model)
    away = mx.linalg.norm(base(TOKENS) - wanted)
    assert mx.linalg.norm(found(TOKENS) - wanted) < 0.1 * away


def test_evaluation_compares_with_the_base(config, capsys):
    train(config(4, **BOTH, plan="streamed", max_steps=8, learning_rate=0.02))
    assert_evaluation_shows_that_it_learned(capsys)


@pytest.mark.parametrize("settings", [BOTH, BY_LAYER, {"lora_targets": "q_proj,lm_head"}])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_plan_counts_the_matrices(config, settings, optimizer):
    settings = config(**settings, optimizer=optimizer)
    workload = assert_plan_counts_what_is_trained(settings)
    whole = "embed_tokens" in settings.lora_targets
    reach = workload.facts.blocks if whole else settings.lora_layers
    assert workload.training.reach(workload.facts) == reach


@pytest.mark.parametrize("settings", [BOTH, BY_LAYER])
def test_pefts_files_have_the_matrices_and_are_imported(config, own_folder, settings):
    train(config(**settings, learning_rate=0.05))
    trained, again = open_trained("r"), imported_from_peft(own_folder / "peft")
    written = load_arrays(own_folder / "peft" / "adapter_model.safetensors")
    count, width = mlx_lm.load(trained.config.model)[0].lm_head.weight.shape
    sizes = trained.adapter.sizes
    embedding, head = sizes["model.embed_tokens"].rank, sizes["lm_head"].rank
    path = "base_model.model.model.embed_tokens.lora_embedding_"
    assert written[f"{path}A"].shape == (embedding, count)
    assert written[f"{path}B"].shape == (width, embedding)
    assert written["base_model.model.lm_head.lora_A.weight"].shape == (head, width)
    assert written["base_model.model.lm_head.lora_B.weight"].shape == (count, head)
    named = json.loads((own_folder / "peft" / "adapter_config.json").read_text())
    assert {"lm_head", "model.embed_tokens"} <= {*named["target_modules"]}
    (network, _), (other, _) = load_run(trained), load_run(again)
    assert mx.array_equal(network(TOKENS), other(TOKENS))
    assert again.adapter.sizes == trained.adapter.sizes
    assert again.config.lora_rank == trained.adapter.ranks.setting


def test_peft_adapters_of_a_tied_embedding_are_refused(config, own_folder, tiny_model):
    train(config(**BOTH))
    peft.write(open_trained("r"), own_folder / "peft")
    with pytest.raises(UserError, match="tied"):
        import_adapter(own_folder / "peft", str(tiny_model), "back")


def test_no_run_starts_from_pefts_files_with_them(config, own_folder, data_folder, capsys):
    train(config(**BOTH))
    trained = open_trained("r")
    peft.write(trained, own_folder / "peft")
    command = ("train", "--from", "peft", "--model", trained.config.model, "--data", data_folder)
    assert "has trained embeddings, which a run that starts" in refused(capsys, *command)


@pytest.mark.parametrize("to", ["mlx", "gguf"])
def test_formats_without_them_are_refused(config, capsys, to):
    train(config(max_steps=1, **BOTH))
    message = "has trained embeddings, which an adapter of"
    assert message in refused(capsys, "export", "r", "--to", to)


def test_an_adapter_without_its_file_beside_is_refused(config):
    run = train(config(max_steps=1, **BOTH))
    (run.adapter / "vocabulary_lora.safetensors").unlink()
    with pytest.raises(UserError, match="adapter is damaged"):
        open_trained("r")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lm_head": [4]}, "give .rank, scale. by path"),
        (["lm_head"], "give .rank, scale. by path"),
        ({"lm_head": [4, 5.0]}, "model.embed_tokens.low_rank.lora_a is not there as in"),
        ({"lm_head": [4, 5.0], "model.embed_tokens": [3, 5.0]}, "is 768 x 4, expected 768 x 3"),
        ({"lm_head": [4, 5.0], "model.norm": [4, 5.0]}, "is not there as in"),
    ],
)
def test_settings_of_an_adapter_that_are_wrong_are_refused(config, given, message):
    run = train(config(max_steps=1, **BOTH))
    trained = open_trained("r")
    change_json(run.adapter, "adapter_config.json", vocabulary_lora=given)
    with pytest.raises(UserError, match=message):
        load_run(replace(trained, adapter=read_adapter(run.adapter)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "--use-dora: not supported with --lora-targets lm_head"),
        ({"qat": "8"}, "--qat: not supported with --lora-targets lm_head"),
        ({"lora_dropout": 0.1}, "--lora-dropout: not supported with --lora-targets lm_head"),
        ({"train": "head"}, "--train: not supported with --lora-targets lm_head"),
        ({"lora_targets": "lm_head"}, "name layers of blocks, too"),
        ({"lora_targets": "all-linear,q_proj"}, "all-linear includes every other layer"),
        ({"lora_rank": "4,embed_tokens=2"}, "no adapted layer has embed_tokens"),
        (
            {"lora_targets": "q_proj,embed_tokens", "prefix_cache": "memory"},
            "use --prefix-cache off",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, settings, message):
    with pytest.raises(UserError, match=message):
        train(config(**{"lora_targets": "q_proj,lm_head", **settings}))


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_tied_head_is_refused(configure, name):
    with pytest.raises(UserError, match=f"--lora-targets {name}: the head of this model is tied"):
        train(configure(lora_targets=f"q_proj,{name}"))
