"""No command passes a token id to a model whose embedding has no row for it."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from pathlib import Path

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx.utils import tree_flatten

from tests.architectures import write_model
from tests.conftest import EXTRA, call, chat, load_base, make_model, write_rows
from your_ai.data.encode import Encoder
from your_ai.engine.weights import stream_vocabulary, tensors_of
from your_ai.errors import UserError
from your_ai.gates.token_ids import EMBEDDINGS, check_ids, vocabulary_of
from your_ai.generation import generate
from your_ai.nets import model

MANY = 40_000_000


def add_token(folder: Path, text: str, number: int) -> Path:
    """Add a token with the given id to the tokenizer of a model."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].append({**content["added_tokens"][-1], "id": number, "content": text})
    if text in content["model"]["vocab"]:  # then change its id instead
        content["model"]["vocab"][text] = number
        content["added_tokens"].pop()
    path.write_text(json.dumps(content))
    return folder


@pytest.fixture
def beyond(own_folder, tiny_model):
    """A model whose tokenizer has the token `<new>`, with an id just past its embedding."""
    return add_token(make_model(own_folder / "beyond"), "<new>", 768)


@pytest.mark.parametrize("architecture", sorted(EXTRA))
@pytest.mark.parametrize("bits", [4, None])
def test_the_vocabulary_size_is_the_number_of_embedding_rows(tmp_path, architecture, bits):
    folder = make_model(tmp_path / "m", architecture, bits)
    network, _ = model.load_network(folder, mx.float32)
    assert vocabulary_of(network) == 768
    if stream_vocabulary(network, tensors_of(network, folder)):
        assert vocabulary_of(network) == 768


def test_the_vocabulary_size_comes_from_arrays_not_config_json(tmp_path):
    folder = make_model(tmp_path / "m", "llama-untied", None)
    network, _ = model.load_network(folder, mx.float32)
    network.args.vocab_size = 10**6
    assert vocabulary_of(network) == 768
    network.lm_head.weight = network.lm_head.weight[:700]
    assert vocabulary_of(network) == 700


def test_the_embedding_of_every_mlx_lm_architecture_is_found():
    named = re.compile(r"self\.(\w+) = nn\.Embedding\(\s*\w*(?:args|config)?\.?\w*vocab_size")
    found = set()
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        source = Path(mlx_lm.models.__path__[0], f"{module.name}.py")
        found |= set(named.findall(source.read_text())) if source.is_file() else set()
    assert "embed_tokens" in found
    assert found - {"embed_tokens_per_layer"} <= set(EMBEDDINGS)


@pytest.mark.parametrize("ids", [[768], [0, MANY], [-1], [2**32 - 1, 3]])
def test_the_error_names_a_token_id_without_a_row(demo_tokenizer, ids):
    with pytest.raises(UserError, match=r"^rows:1: has token id -?\d+.*, but the model has 768 t"):
        check_ids(ids, 768, demo_tokenizer, "rows:1")


def test_token_ids_with_rows_pass(demo_tokenizer):
    check_ids([0, 767], 768, demo_tokenizer, "rows:1")
    check_ids([], 768, demo_tokenizer, "rows:1")


@pytest.mark.parametrize(("text", "number"), [("<new>", 768), ("Z", 768), ("Z", MANY)])
def test_train_and_plan_name_the_row_with_an_invalid_token_id(own_folder, capsys, text, number):
    folder = add_token(make_model(own_folder / "m"), text, number)
    rows = write_rows(own_folder / "d.jsonl", [chat("a", "b"), chat("a", f"b {text}")])
    for command in (["train", "--no-supervise"], ["plan"]):
        assert call(*command, "--model", folder, "--data", rows, "--batch-size", 1) == 2
        error = capsys.readouterr().err
        assert f"d.jsonl:2: has token id {number} ({text}), but the model has 768" in error
    assert not (own_folder / "runs").exists()


def test_an_invalid_token_that_no_row_uses_is_accepted(own_folder, beyond):
    rows = write_rows(own_folder / "d.jsonl", [chat("a", "b")])
    assert call("plan", "--model", beyond, "--data", rows) == 0


def test_cached_rows_of_a_larger_model_are_checked_again(own_folder, beyond, capsys):
    """The larger model has the same tokenizer, so the cache key is the same."""
    rows = write_rows(own_folder / "d.jsonl", [chat("a", "b <new>")])
    larger = make_model(own_folder / "larger", vocab_size=800)
    (larger / "tokenizer.json").write_bytes((beyond / "tokenizer.json").read_bytes())
    assert call("plan", "--model", larger, "--data", rows) == 0
    assert call("plan", "--model", beyond, "--data", rows) == 2
    assert "d.jsonl:1: has token id 768" in capsys.readouterr().err


def test_prompts_with_invalid_token_ids_are_refused(beyond):
    network, tokenizer = load_base(beyond, mx.float32)
    sampling = generate.Sampling(max_tokens=1)
    ids = generate.prompt_tokens(tokenizer, [{"role": "user", "content": "Hello"}])
    assert list(generate.respond(network, tokenizer, ids, sampling))
    ids = generate.prompt_tokens(tokenizer, [{"role": "user", "content": "Hello <new>"}])
    for prompt in (ids, [MANY], [-1]):
        with pytest.raises(UserError, match="the prompt: has token id"):
            list(generate.respond(network, tokenizer, prompt, sampling))


def test_a_head_with_more_rows_than_the_embedding_is_refused(tmp_path):
    folder = make_model(tmp_path / "m", "llama-untied", None)
    network, tokenizer = load_base(folder, mx.float32)
    network.lm_head.weight = mx.zeros((800, 64))
    with pytest.raises(UserError, match="its head has 800 tokens, but its embedding 768"):
        generate.check_answers(network, tokenizer, folder)


def test_a_model_whose_code_writes_tokens_that_it_does_not_have_is_refused(tmp_path):
    """phi3small excludes tokens of its own vocabulary, by number, whatever vocab_size says."""
    folder = write_model(tmp_path / "m", "phi3small", vocab_size=100351)
    with pytest.raises(UserError, match=r"writes the logits of token 100351, but .* 100,?351 tok"):
        model.load_network(folder, mx.float32)


@pytest.mark.parametrize("end", [-1, 2**40, "x", [1, None], 1.5])
def test_an_invalid_eos_token_id_is_refused(tmp_path, end):
    folder = make_model(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": end}))
    with pytest.raises(UserError, match=r"eos_token_id .* is not a token id|cannot be loaded"):
        load_base(folder, mx.float32)


def test_a_row_longer_than_the_learned_positions_is_refused():
    module = importlib.import_module("mlx_lm.models.gpt2")
    shape = {"n_ctx": 64, "n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 64}
    arguments = {**shape, "model_type": "gpt2", "layer_norm_epsilon": 1e-5, "vocab_size": 100}
    network = module.Model(module.ModelArgs.from_dict(arguments))
    assert dict(tree_flatten(network.parameters()))["model.wpe.weight"].shape == (64, 32)
    assert vocabulary_of(network) == 100
    model.check_positions(network, 65, "--max-seq-length 65")  # the last token is only a target
    with pytest.raises(UserError, match="has 66 tokens, but the model has 64 position embeddings"):
        model.check_positions(network, 66, "--max-seq-length 66")


def test_a_tokenizer_without_an_end_token_is_reported(demo_tokenizer, monkeypatch):
    from your_ai.data.rows import Row, Text

    class Endless:
        eos_token_id, eos_token_ids, bos_token, has_chat_template = None, set(), None, False
        backend_tokenizer = demo_tokenizer.backend_tokenizer

    with pytest.raises(UserError, match="rows:1: the model's tokenizer has no token that ends"):
        Encoder(Endless()).encode(Row("rows:1", Text("Hi"), 1.0))
