"""Runs that train new tokens, embeddings or heads: resumed, evaluated, fused and exported."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from tests.conftest import (
    EXTRA,
    TINY,
    call,
    chat,
    flip,
    make_model,
    notices_of,
    refused,
    train,
    write_rows,
)
from tests.training.vocabulary import (
    assert_evaluation_shows_that_it_learned,
    assert_plan_counts_what_is_trained,
    assert_resumes_exactly,
    fused,
    imported_from_peft,
)
from your_ai.errors import UserError
from your_ai.export import peft
from your_ai.generation.generate import load_run
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.new_tokens import tokenizer_with_new
from your_ai.nets.saved_adapter import open_trained

WORDS = ("<north>", "<south>")
ROWS = [chat(f"Go {word}!", f"I go {word} now.") for word in WORDS for _ in range(4)]


@pytest.fixture
def config(configure, own_folder):
    """Makes the config of a run on rows that have the new tokens."""
    folder = own_folder / "rows"
    for split in ("train", "valid", "test"):
        write_rows(folder / f"{split}.jsonl", ROWS)

    def make(**settings):
        return configure(**{"data": str(folder), "add_tokens": ",".join(WORDS), **settings})

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"plan": "streamed", "embedding_learning_rate": 0.1},
        {"train": "embeddings,head", "spill": True, "plan": "staged"},
        {"train": "embeddings,head", "add_tokens": "", "adapter_dtype": "bfloat16"},
        {"objective": "dpo", "data": "pairs"},
    ],
)
def test_a_resumed_run_ends_with_the_same_bytes(config, own_folder, settings):
    if settings.get("data"):
        answers = [(f"Go {word}!", f"I go {word}.") for word in WORDS]
        rows = [{"prompt": p, "chosen": text, "rejected": "No."} for p, text in answers]
        for split in ("train", "valid", "test"):
            write_rows(own_folder / "pairs" / f"{split}.jsonl", rows)
        settings = {**settings, "data": str(own_folder / "pairs")}
    assert_resumes_exactly(config, **settings)


def test_only_rows_of_new_tokens_change_and_they_start_at_their_spelling(config, tiny_model):
    run = train(config(learning_rate=1e-9, max_steps=1))
    trained = open_trained("r")
    tokenizer, (rows,) = trained.tokenizer(), trained.adapter.vocabulary.values()
    before, _ = mlx_lm.load(str(tiny_model))
    embed = before.model.embed_tokens
    ids = trained.adapter.config["new_tokens"]
    places = [ids.index(token) for token in tokenizer.convert_tokens_to_ids(list(WORDS))]
    spelled = json.loads((run.tokenizer / "new_tokens.json").read_text())["spelled"]
    for place in places:
        expected = embed(mx.array(spelled[str(ids[place])])).astype(mx.float32).mean(0)
        assert mx.allclose(rows[place], expected, atol=1e-6)
    network, _ = load_run(trained)
    count = len(embed(mx.arange(embed.weight.shape[0])))
    same = mx.array([token for token in range(count) if token not in ids])
    assert mx.array_equal(network.model.embed_tokens(same), embed(same))


@pytest.mark.parametrize("train_whole", ["", "embeddings,head"])
@pytest.mark.parametrize("bits", [None, 4])
def test_the_fused_model_answers_as_the_run_does(config, own_folder, bits, train_whole):
    folder = make_model(own_folder / "base", "llama", bits)
    train(config(model=str(folder), train=train_whole, learning_rate=0.05))
    network, tokenizer = load_run(open_trained("r"))
    found, read = fused(own_folder / "fused", "dequantized" if bits else "auto")
    tokens = mx.array([tokenizer.encode(f"Go {WORDS[1]} and {WORDS[0]}!")])
    assert read.encode(f"Go {WORDS[1]} and {WORDS[0]}!") == tokens[0].tolist()
    wanted, said = network(tokens), found(tokens)
    assert said.shape == wanted.shape
    assert wanted.shape[-1] % 64 == 0
    assert mx.allclose(said, wanted, rtol=1e-3, atol=1e-3)
    text = (own_folder / "fused" / "config.json").read_text()
    assert json.loads(text)["vocab_size"] == wanted.shape[-1]


def test_rows_that_stay_quantized_are_not_rounded_again(config, own_folder):
    folder = make_model(own_folder / "base", "llama", 4)
    train(config(model=str(folder), learning_rate=0.05))
    before, after = mlx_lm.load(str(folder))[0], fused(own_folder / "fused", "same")[0]
    count = min(open_trained("r").adapter.config["new_tokens"])
    for name in ("weight", "scales", "biases"):
        ours, theirs = (m.model.embed_tokens[name][:count] for m in (after, before))
        assert mx.array_equal(ours, theirs)


def test_evaluation_compares_with_the_base(config, capsys):
    train(config())
    assert_evaluation_shows_that_it_learned(capsys)


def test_pefts_files_name_the_tokens(config, own_folder):
    train(config())
    trained = open_trained("r")
    peft.write(trained, own_folder / "peft")
    settings = json.loads((own_folder / "peft" / "adapter_config.json").read_text())
    ids = trained.adapter.config["new_tokens"]
    assert settings["trainable_token_indices"] == {"embed_tokens": ids}
    assert (own_folder / "peft" / "tokenizer.json").is_file()


@pytest.mark.parametrize("to", ["mlx", "gguf"])
def test_formats_without_rows_are_refused(config, capsys, to):
    train(config(max_steps=1))
    message = "has trained embeddings, which an adapter of"
    assert message in refused(capsys, "export", "r", "--to", to)


def test_a_run_does_not_start_from_such_an_adapter(config, capsys):
    run = train(config(max_steps=1))
    text = refused(capsys, "train", "--from", "r", "--data", run.read_config().data)
    assert "has trained embeddings; go on with its run" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "heads"}, "--train 'heads': give embeddings or head"),
        ({"prefix_cache": "memory"}, "use --prefix-cache off"),
        ({"add_tokens": "", "embedding_learning_rate": 1.0}, "only works with --train"),
        ({"train": "head", "add_tokens": ""}, "tied to its embedding"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, settings, message):
    with pytest.raises(UserError, match=message):
        train(config(**settings))


def test_a_reward_model_has_no_head_to_train(config, own_folder):
    untied = make_model(own_folder / "untied", "llama-untied", **TINY)
    row = {"prompt": "Go!", "chosen": "I go.", "rejected": "No."}
    pairs = write_rows(own_folder / "pairs.jsonl", [row] * 4)
    settings = {"model": str(untied), "data": str(pairs), "add_tokens": "", "train": "head"}
    with pytest.raises(UserError, match=r"^--train: a reward model has no head over"):
        train(config(objective="reward", **settings))


@pytest.mark.parametrize("change", [shutil.rmtree, lambda f: flip(f / "tokenizer.json")])
def test_a_run_without_its_tokenizer_is_not_used(config, capsys, change):
    run = train(config(max_steps=1))
    change(run.tokenizer)
    text = refused(capsys, "generate", "r", "--prompt", "Go <north>!")
    assert "tokenizer: is not the tokenizer that the adapter was trained on" in text


def test_a_run_without_its_tokenizer_is_not_resumed(config, capsys):
    run = train(config(max_steps=1))
    shutil.rmtree(run.tokenizer)
    text = refused(capsys, "train", "--resume", "r", "--max-steps", "2")
    assert "tokenizer: is missing; restore it, or start a new run" in text
    assert not run.tokenizer.exists()


def test_a_run_with_another_tokenizer_is_not_resumed(config, capsys):
    run = train(config(max_steps=1))
    shutil.rmtree(run.tokenizer)
    other = replace(run.read_config(), add_tokens="<south>,<north>")
    tokenizer_with_new(other, Path(other.model), run.tokenizer)
    text = refused(capsys, "train", "--resume", "r", "--max-steps", "2")
    assert "the model changed since the run began (tokenizer/tokenizer.json)" in text


@pytest.mark.parametrize("train_whole", ["", "head"])
def test_the_bias_of_a_fused_head_has_the_new_tokens(config, own_folder, monkeypatch, train_whole):
    monkeypatch.setitem(EXTRA, "phi", {"partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5})
    model = make_model(own_folder / "biased", "phi", None, **TINY)
    train(config(model=str(model), max_steps=1, train=train_whole))
    fused(own_folder / "fused")
    before = load_arrays(model / "model.safetensors")["lm_head.bias"]
    after = load_arrays(own_folder / "fused" / "model.safetensors")["lm_head.bias"]
    assert mx.array_equal(after[: len(before)], before)
    assert mx.array_equal(after[len(before) :], mx.zeros(64))


def test_a_reward_model_scores_rows_with_its_new_tokens(config, own_folder, capsys):
    rows = [{"prompt": "Go!", "chosen": f"I go {word}.", "rejected": "No."} for word in WORDS]
    pairs = write_rows(own_folder / "pairs.jsonl", rows * 2)
    train(config(data=str(pairs), objective="reward", max_steps=1))
    assert call("score", "r", str(pairs)) == 0


@pytest.mark.parametrize("settings", [{}, {"train": "embeddings,head", "add_tokens": ""}])
def test_the_plan_counts_the_trained_arrays(config, settings):
    workload = assert_plan_counts_what_is_trained(config(**settings))
    assert workload.training.reach(workload.facts) == workload.facts.blocks


@pytest.mark.parametrize("settings", [{}, {"train": "embeddings,head", "add_tokens": ""}])
def test_pefts_files_are_imported_as_the_same_adapter(config, own_folder, settings):
    train(config(**settings))
    trained, again = open_trained("r"), imported_from_peft(own_folder / "peft")
    assert again.adapter.vocabulary.keys() == trained.adapter.vocabulary.keys()
    (network, tokenizer), (other, read) = load_run(trained), load_run(again)
    text = f"Go {WORDS[0]}!"
    assert read.encode(text) == tokenizer.encode(text)
    tokens = mx.array([tokenizer.encode(text)])
    assert mx.array_equal(network(tokens), other(tokens))


def test_tokens_that_are_in_no_row_are_named(config):
    run = train(config(max_steps=1, add_tokens=f"{WORDS[0]},<never>"))
    assert any("1 new token of 2 in no training row, such as <never>" in n for n in notices_of(run))
    run = train(config(max_steps=1, run="all"))
    assert not any("in no training row" in text for text in notices_of(run))


def test_new_tokens_are_trained_beside_weights_that_init_adjusted(config):
    assert_resumes_exactly(config, init="pissa")
    assert load_run(open_trained("whole"))
