"""llama.cpp reads the exported files and computes the same as MLX.

llama-cpp-python must be compiled, so it is not among the extras. Without it these tests are
skipped.
"""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tokenizers import normalizers

from tests.conftest import DEMO_FOLDER, EXTRA, make_model
from tests.export.gguf_files import byte_level, sentencepiece, with_tokenizer
from tests.export.runs import TOKENS, make_trained
from tests.interop.llamacpp.bases import LLAMA3
from your_ai.export import gguf
from your_ai.export.gguf_tokenizer import PROBE, SPLITTERS, splitter_of
from your_ai.generation.generate import Sampling, load_run, respond
from your_ai.nets.model import load_network
from your_ai.nets.saved_adapter import put_adapter, read_adapter
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.run import checkpoint

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

IDS = TOKENS.flatten().tolist()  # 48, more than the sliding window of gemma3_text here
FLOAT32 = 0  # ggml's number of the type
# Tolerances of logits up to 27. llama.cpp looks up gemma's activation function in a float16
# table, and the reference model here imitates that. They differ only where they round an input
# to different table entries.
TOLERANCES = {"gemma2": 1e-2, "gemma3_text": 1e-2}
TOLERANCE = 2e-4
MODELS = {
    **{name: (name, {}) for name in EXTRA if name != "qwen3_moe"},
    "llama, 4 bits": ("llama", {"bits": 4}),
    "llama3's positions": ("llama", {"rope_scaling": LLAMA3}),
    "linear positions": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "linear positions of gemma": (
        "gemma3_text",
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "yarn": (
        "qwen3",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"num_key_value_heads": 4, "head_dim": 32}),
}
TEXTS = [
    *("", " ", "Hello world", "trailing ", "a  b   c    d", "tab\tx", "1234567890", "é", "<unk>"),
    *("x\r\ny\n\n\nz", "I'LL we've", "naïve 日本 🚀👨‍👩‍👧", "<|user|>Hi<|end|> there", "ſ ıİ ß ǅ"),
    *("def f(x):\n    return x**2\n", "x️⃣ ١٢٣ ४५", "\u00a0\u2003|", "<tool>call</tool>"),
    "\u3000全角　空白",
]


def load(path, **options):
    return llama_cpp.Llama(
        str(path), n_ctx=256, n_batch=256, logits_all=True, verbose=False, n_threads=2,
        type_k=FLOAT32, type_v=FLOAT32, **options,
    )  # fmt: skip


def logits_of(path, **options):
    """llama.cpp's logits of IDS, (48, V)."""
    model = load(path, **options)
    model.eval(IDS)
    return np.array(model.scores[: len(IDS)])


def logits_of_mlx(trained, adapted=True):
    network, _ = load_network(trained.base, mx.float32)
    if adapted:
        put_adapter(network, trained.adapter)
    return np.array(network(mx.array([IDS]))[0])


def without_effect(trained, folder):
    """The same run with an adapter of zeros."""
    arrays = {name: mx.zeros_like(array) for name, array in trained.adapter.arrays.items()}
    config = {key: value for key, value in trained.adapter.config.items() if key != "step"}
    checkpoint.save_adapter(folder, arrays, config, step=0)
    return dataclasses.replace(trained, adapter=read_adapter(folder))


def write(trained, target, kind="f32"):
    list(gguf.write_model(trained, target, kind))
    return target


@pytest.fixture
def half_gelu(monkeypatch):
    """Compute gemma's activation function like llama.cpp's CPU code."""
    whole = nn.gelu_approx

    def looked_up(x):
        y = whole(x.astype(mx.float16).astype(mx.float32)).astype(mx.float16)
        return mx.where(x <= -10, 0, mx.where(x >= 10, x, y.astype(mx.float32)))

    monkeypatch.setattr(nn, "gelu_approx", looked_up)


@pytest.mark.usefixtures("half_gelu")
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_logits_as_mlx(tmp_path, name):
    architecture, changes = MODELS[name]
    base = make_model(tmp_path / "base", architecture, **{"bits": None, **changes})
    trained = make_trained(base, lora_layers="all", lora_targets=["all-linear"])
    tolerance = TOLERANCES.get(architecture, TOLERANCE)
    ours, plain = logits_of_mlx(trained), logits_of_mlx(trained, adapted=False)
    assert np.abs(ours - plain).max() > 1000 * tolerance or tolerance > TOLERANCE

    fused = logits_of(write(trained, tmp_path / "fused.gguf"))
    assert np.abs(fused - ours).max() < tolerance
    gguf.write_adapter(trained, tmp_path / "lora.gguf")
    zero = write(without_effect(trained, tmp_path / "zero"), tmp_path / "base.gguf")
    assert np.abs(logits_of(zero) - plain).max() < tolerance
    adapted = logits_of(zero, lora_path=str(tmp_path / "lora.gguf"))
    assert np.abs(adapted - ours).max() < tolerance


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_llama_cpp_reads_smaller_types_correctly(tmp_path, kind):
    base = make_model(tmp_path / "base", "qwen2", bits=None)
    trained = make_trained(base, lora_layers="all", lora_targets=["all-linear"])
    ours, plain = logits_of_mlx(trained), logits_of_mlx(trained, adapted=False)
    found = logits_of(write(trained, tmp_path / "m.gguf", kind))
    # test_gguf checks how close the weights are; llama.cpp also rounds the activations. Weights
    # read as a wrong type would give noise, at least as far away as the base.
    assert np.abs(found - ours).mean() < 0.2 * np.abs(ours - plain).mean()


def test_llama_cpp_gives_the_same_chat_answer_as_mlx(tmp_path):
    trained = make_trained(DEMO_FOLDER)
    model = load(write(trained, tmp_path / "demo.gguf"))
    network, tokenizer = load_run(trained)
    messages = [{"role": "user", "content": "Five red shirts to Oslo, please: 5 × 3?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert model.tokenize(text.encode(), add_bos=False, special=True) == tokens
    reply = model.create_chat_completion(messages, temperature=0, max_tokens=40)
    answers = respond(network, tokenizer, tokens, Sampling(max_tokens=40))
    ours = "".join(response.text for response in answers)
    assert reply["choices"][0]["message"]["content"].strip() == ours.strip()
    assert reply["usage"]["prompt_tokens"] == len(tokens)


def differing(base, target, texts=TEXTS):
    """The texts that llama.cpp tokenizes differently, with or without added special tokens."""
    path = write(make_trained(base, lora_layers=1), target)
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokenizer = open_tokenizer(base)
    return {
        text
        for text in texts
        for added in (False, True)
        if tokenizer.encode(text, add_special_tokens=added)
        != model.tokenize(text.encode(), add_bos=added, special=True)
    }


@pytest.mark.parametrize(
    ("name", "known"),
    # For these, llama.cpp distinguishes upper and lower case only in ASCII.
    [(name, {PROBE} if name in ("tekken", "gpt-4o") else set()) for name, _, _ in SPLITTERS],
)
def test_byte_level_tokenizers_give_the_same_tokens(tmp_path, name, known):
    ignores, patterns = {n: (i, p) for n, i, p in SPLITTERS}[name]
    tokenizer = byte_level(splitter_of(patterns), ignores, begins=True)
    named = {"bos_token": "<|user|>", "eos_token": "<|end|>"}
    base = with_tokenizer(tmp_path / "base", tokenizer, **named)
    assert differing(base, tmp_path / "m.gguf", [*TEXTS, PROBE]) <= known


def test_llama_cpp_ignores_the_nfc_normalizer_of_qwen(tmp_path):
    tokenizer = byte_level(splitter_of({n: p for n, _, p in SPLITTERS}["qwen2"]))
    tokenizer.normalizer = normalizers.NFC()
    base = with_tokenizer(tmp_path / "base", tokenizer, eos_token="<|end|>")
    assert differing(base, tmp_path / "m.gguf", [*TEXTS, "e\u0301"]) == {"e\u0301"}


@pytest.mark.parametrize("prefix", ["normalizer", "always", "first", "never"])
def test_sentencepiece_tokenizers_give_the_same_tokens(tmp_path, prefix):
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = None if prefix == "first" else "{{ messages }}"
    base = with_tokenizer(tmp_path / "base", sentencepiece(prefix), template, **named)
    # llama.cpp adds a space even before a leading space, as only old tokenizers do.
    known = {" "} if prefix in ("always", "first") else set()
    if prefix == "first":
        known |= {text for text in TEXTS if "<|user|>" in text or "<unk>" in text}
    assert differing(base, tmp_path / "m.gguf", [*TEXTS, PROBE]) <= known


def test_a_chat_tokenizes_the_same_if_only_the_first_text_gets_a_space(tmp_path):
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    template = "<s>{% for m in messages %}<|user|>{{ m.content }}</s>{% endfor %}"
    base = with_tokenizer(tmp_path / "base", sentencepiece("first"), template, **named)
    text = open_tokenizer(base).apply_chat_template(
        [{"role": "user", "content": "Hello  world"}] * 2, tokenize=False
    )
    assert json.dumps(text).count("Hello") == 2
    model = llama_cpp.Llama(
        str(write(make_trained(base, lora_layers=1), tmp_path / "m.gguf")),
        vocab_only=True,
        verbose=False,
    )
    ours = open_tokenizer(base).encode(text, add_special_tokens=False)
    assert model.tokenize(text.encode(), add_bos=False, special=True) == ours
