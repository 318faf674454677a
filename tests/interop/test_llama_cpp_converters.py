"""llama.cpp's own converters read what your_ai writes for them.

LLAMA_CPP names a checkout of llama.cpp, to run its scripts and to read the tokens of GPT-2, which
they recognize.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, LlamaFileType
from tokenizers import AddedToken, Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel

from tests.architectures import write_model
from tests.export.gguf_files import fields, tensors
from tests.export.runs import make_trained
from tests.export.transformers_bases import settings_of
from your_ai.export import gguf, gguf_convert

CHECKOUT = os.environ.get("LLAMA_CPP", "")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(not CHECKOUT, reason="LLAMA_CPP names no checkout of llama.cpp"),
]
TOKENS = Path(CHECKOUT, "models/ggml-vocab-gpt-2.gguf")
END = "<|endoftext|>"


def write_base(folder: Path, kind: str) -> Path:
    """A small random model with GPT-2's tokens."""
    reader = GGUFReader(TOKENS)
    tokens, merges = (
        reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges")
    )
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    sizes = {"vocab_size": len(tokens), "eos_token_id": vocabulary[END]}
    write_model(folder, kind, **{**settings_of(kind), **sizes})
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def run_of(folder: Path, kind: str, **settings):
    base = write_base(folder / "base", kind)
    return make_trained(base, lora_layers="all", lora_targets=["all-linear"], **settings)


def script(name: str) -> Path:
    return Path(CHECKOUT, name).absolute()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("falcon_h1", "f32"), ("seed_oss", "q8_0"), ("nemotron_h", "f32"), ("qwen3_next", "f32")],
)
def test_its_script_converts_models_that_our_writer_does_not_have(tmp_path, kind, dtype):
    trained = run_of(tmp_path, kind, lora_experts=True)
    steps = gguf_convert.write_model(
        trained, tmp_path / "m.gguf", dtype, script=script(gguf_convert.OF_MODELS)
    )
    assert list(steps)
    found = fields(tmp_path / "m.gguf")
    assert found["general.file_type"] == LlamaFileType[gguf.KINDS[dtype][1]]
    assert found["general.name"] == "base fine-tuned"
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert {path.name for path in tmp_path.iterdir()} == {"base", "runs", "m.gguf"}


@pytest.mark.parametrize("kind", ["olmo2", "seed_oss"])
def test_its_script_converts_adapters(tmp_path, kind):
    trained = run_of(tmp_path, kind)
    list(gguf_convert.write_adapter(trained, tmp_path / "a.gguf", script(gguf_convert.OF_ADAPTERS)))
    found = fields(tmp_path / "a.gguf")
    assert found["adapter.lora.alpha"] == trained.adapter.scale * trained.adapter.rank
    layers = {name.rpartition(".lora_")[0] for name in tensors(tmp_path / "a.gguf")}
    assert len(layers) == len(trained.adapter.layers)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_its_script_writes_the_same_as_our_writer(tmp_path, kind):
    trained = run_of(tmp_path, kind)
    list(gguf.write_model(trained, tmp_path / "ours.gguf", "f32"))
    tool = script(gguf_convert.OF_MODELS)
    list(gguf_convert.write_model(trained, tmp_path / "theirs.gguf", "f32", script=tool))
    ours, theirs = (tensors(tmp_path / f"{name}.gguf") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert np.array_equal(array, theirs[name]), name
    ours, theirs = (fields(tmp_path / f"{name}.gguf") for name in ("ours", "theirs"))
    both = {key for key in ours.keys() & theirs.keys() if not key.startswith("GGUF.")}
    assert {key: (ours[key], theirs[key]) for key in both if ours[key] != theirs[key]} == {}
