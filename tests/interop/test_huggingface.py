"""An exported model, loaded by transformers, gives the logits of base and adapter in MLX."""

from __future__ import annotations

import json
from dataclasses import replace

import mlx_lm
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.export.runs import TOKENS, logits, make_trained
from tests.interop.bases import ARCHITECTURES, TOLERANCE, largest, load, make_base, torch_logits
from your_ai.export import huggingface
from your_ai.export.fused_weights import base_of
from your_ai.nets.tokenizer import open_tokenizer

pytestmark = pytest.mark.interop
EVERYTHING = {"lora_targets": ("all-linear",), "lora_layers": "all", "use_dora": True}


def exported(trained, target, **settings):
    list(huggingface.write(trained, target, **settings))
    return target


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_logits_are_those_of_mlx(architecture, tmp_path):
    trained = make_trained(make_base(tmp_path / "base", architecture), **EVERYTHING)
    out = exported(trained, tmp_path / "out")
    assert largest(logits(trained), torch_logits(load(out))) < TOLERANCE


def test_a_base_that_transformers_wrote(tmp_path):
    base = make_base(tmp_path / "base", "llama")
    path = base / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5e5}))
    load(base).save_pretrained(base)
    assert "rope_theta" not in json.loads(path.read_text())  # but in rope_parameters
    trained = make_trained(base, **EVERYTHING)
    theirs = torch_logits(load(exported(trained, tmp_path / "out")))
    assert largest(logits(trained), theirs) < TOLERANCE
    mlx_lms, _ = mlx_lm.load(str(tmp_path / "out"))
    assert largest(mlx_lms(TOKENS), theirs) < TOLERANCE


def test_a_quantized_base_is_dequantized(tiny_model, tmp_path):
    trained = make_trained(tiny_model)
    out = exported(trained, tmp_path / "out", dtype="float32", max_memory_gb=2.0)
    assert largest(logits(trained), torch_logits(load(out))) < TOLERANCE
    assert "quantization" not in (out / "config.json").read_text()


def test_a_run_on_a_quantized_copy_is_that_copy_dequantized(tmp_path):
    trained = make_trained(make_base(tmp_path / "base", "llama"), quantize=8)
    out = exported(trained, tmp_path / "out", dtype="float32")
    theirs, copy = torch_logits(load(out)), replace(trained, base=base_of(trained))
    assert largest(logits(copy), theirs) < TOLERANCE
    assert largest(logits(trained), theirs) > 10 * TOLERANCE  # on the weights as they were


def test_the_tokenizer_gives_the_same_ids(tiny_model, tmp_path):
    out = exported(make_trained(tiny_model), tmp_path / "out")
    ours, theirs = open_tokenizer(tiny_model), AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "Größe 12, please\n  and 3 <|end|> more"}]
    for text in ("Hello there", "Größe 12, <|end|>", ""):
        assert theirs.encode(text) == ours.encode(text)
    rendered = ours.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == rendered


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_type_is_the_one_that_was_asked_for(tiny_model, tmp_path, dtype):
    out = exported(make_trained(tiny_model), tmp_path / "out", dtype=dtype)
    assert str(AutoModelForCausalLM.from_pretrained(out).dtype) == f"torch.{dtype}"
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
