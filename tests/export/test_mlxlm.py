from __future__ import annotations

import errno
import json
import shutil

import mlx.core as mx
import pytest
from mlx_lm.utils import load_adapters

from tests.conftest import change_json, make_model
from tests.export.runs import TOKENS, logits, make_trained
from your_ai.errors import UserError
from your_ai.export import gguf, mlxlm, peft
from your_ai.nets.model import adapter_arrays, load_network

EVERYTHING = {"use_dora": True, "lora_targets": ("all-linear",), "lora_layers": "all"}


@pytest.mark.parametrize(
    ("settings", "bits"),
    # mlx-lm's DoRA uses another kernel over quantized weights, and rounds to the adapter's dtype
    [({}, 4), ({"adapter_dtype": "bfloat16"}, 4), (EVERYTHING, None)],
    ids=["lora", "bfloat16", "dora"],
)
def test_mlx_lm_computes_the_same_logits_with_the_exported_adapter(tmp_path, settings, bits):
    base = make_model(tmp_path / "base", bits=bits)
    trained = make_trained(base, **settings)
    mlxlm.write(trained, tmp_path / "out")
    network, _ = load_network(base, mx.float32)
    network = load_adapters(network, str(tmp_path / "out"))
    network.eval()
    assert mx.allclose(network(TOKENS), logits(trained), rtol=0, atol=1e-6)
    assert not mx.allclose(network(TOKENS), logits(trained, adapted=False), rtol=0, atol=1e-2)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_mlx_lm_loads_dora_over_quantized_weights_bit_for_bit(tmp_path, bits):
    base = make_model(tmp_path / "base", bits=bits)
    trained = make_trained(base, **EVERYTHING)
    mlxlm.write(trained, tmp_path / "out")
    network, _ = load_network(base, mx.float32)
    network.freeze()
    theirs = adapter_arrays(load_adapters(network, str(tmp_path / "out")))
    assert theirs.keys() == trained.adapter.arrays.keys()
    assert all(mx.array_equal(theirs[n], array) for n, array in trained.adapter.arrays.items())


def test_adapters_of_experts_are_exported(tmp_path):
    base = make_model(tmp_path / "moe", "qwen3_moe", bits=None)
    trained = make_trained(base, lora_targets=("switch_mlp.up_proj",))
    mlxlm.write(trained, tmp_path / "out")
    arrays = mx.load(str(tmp_path / "out" / "adapters.safetensors"))
    assert arrays["model.layers.2.mlp.switch_mlp.up_proj.lora_a"].ndim == 3


@pytest.mark.parametrize("export", [mlxlm, peft], ids=["mlx-lm", "peft"])
@pytest.mark.parametrize("is_added", [True, False])
def test_the_card_names_the_end_token_that_training_added(tmp_path, export, is_added):
    """A base model that is trained as a chat model has another end token than its template."""
    base = make_model(tmp_path / "base", bits=None)
    if is_added:
        change_json(base, "config.json", eos_token_id=0)
        change_json(base, "tokenizer_config.json", eos_token="<|pad|>")
    export.write(make_trained(base), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("Answers end with `<|end|>`, which is no end token of the base" in card) == is_added


@pytest.mark.parametrize("export", [mlxlm, peft], ids=["mlx-lm", "peft"])
def test_exported_files_contain_no_local_path(tiny_model, tmp_path, export):
    export.write(make_trained(tiny_model), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert str(tmp_path.parent).encode() not in path.read_bytes(), path.name


def test_the_exported_config_names_no_model(tiny_model, tmp_path):
    trained = make_trained(tiny_model)
    assert trained.adapter.config["model"] == str(tiny_model)
    mlxlm.write(trained, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert "model" not in config
    assert config["lora_parameters"] == trained.adapter.config["lora_parameters"]


@pytest.mark.parametrize(
    ("write", "module", "step"),
    [
        (mlxlm.write, shutil, "copyfile"),
        (peft.write, peft, "write_array"),
        (gguf.write_adapter, gguf, "sync"),
    ],
    ids=["mlx-lm", "peft", "gguf"],
)
def test_a_full_disk_leaves_no_files(tiny_model, tmp_path, monkeypatch, write, module, step):
    trained = make_trained(tiny_model)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, step, full)
    with pytest.raises(
        UserError, match=r"out: cannot be written .*No space left.*; free some disk"
    ):
        write(trained, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
