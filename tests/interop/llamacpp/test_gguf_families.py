"""llama.cpp reads what the built-in writer makes of each model type, and computes as MLX does.

Both continue the same token ids, so that tokenizers play no part. MLX reads the tokens that
llama.cpp chose; if it would have chosen each of them itself, both generate the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.conftest import VOCABULARY
from tests.export.runs import make_trained
from tests.interop.llamacpp.bases import NAMES, tolerance_of, write_base
from tests.interop.llamacpp.programs import Found, Job, evaluate, packages_in
from your_ai.export import gguf
from your_ai.nets.model import load_network
from your_ai.nets.saved_adapter import Trained, put_adapter, read_adapter
from your_ai.run import checkpoint

pytestmark = pytest.mark.interop
PROMPTS = np.random.default_rng(0).integers(2, 700, (8, 6)).tolist()
TOKENS = 64
# Rounding can decide which expert a token goes to. In so many positions of all it may.
OTHER_EXPERTS = 0.01
# Rounded weights and activations: mean difference of the log-probabilities at a position, which a
# quarter of the positions stay below; another expert changes all positions after it, too. These
# models have no weight that matters more than others, so rounding does more harm than to trained
# ones. Weights read as a wrong type would give noise everywhere.
ROUNDED = {"f16": 0.01, "q8_0": 0.2, "q4_0": 1.0}
# Its experts have layers that llama.cpp does not adapt as mlx-lm does.
WITHOUT_EXPERTS = "gemma4"


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packages_in(tmp_path_factory.mktemp("node"))


@pytest.fixture
def half_gelu(monkeypatch):
    """Compute GELU like llama.cpp's CPU code.

    mlx-lm's gemma and starcoder2 use the exact function, which llama.cpp approximates. Without
    `mx.compile`, which would go on with the function that an earlier test compiled.
    """
    approximate = nn.gelu_approx

    def looked_up(x):
        y = approximate(x.astype(mx.float16).astype(mx.float32)).astype(mx.float16)
        return mx.where(x <= -10, 0, mx.where(x >= 10, x, y.astype(mx.float32)))

    for name in ("gelu", "gelu_approx"):
        monkeypatch.setattr(nn, name, looked_up)
    mx.disable_compile()
    yield
    mx.enable_compile()


def without_effect(trained: Trained, folder: Path) -> Trained:
    """The same run with an adapter of zeros."""
    arrays = {name: mx.zeros_like(array) for name, array in trained.adapter.arrays.items()}
    config = {key: value for key, value in trained.adapter.config.items() if key != "step"}
    checkpoint.save_adapter(folder, arrays, config, step=0)
    return replace(trained, adapter=read_adapter(folder))


def write(trained: Trained, target: Path, kind: str = "f32") -> Path:
    list(gguf.write_model(trained, target, kind))
    return target


def log_probabilities(trained: Trained, tokens: np.ndarray) -> np.ndarray:
    """MLX's, of each token after a prompt and the tokens before it, (P, T, V)."""
    network, _ = load_network(trained.base, mx.float32)
    put_adapter(network, trained.adapter)
    prompts = np.array(PROMPTS[: len(tokens)])
    texts = mx.array(np.concatenate([prompts, tokens], 1)[:, :-1])
    logits = network(texts, cache=make_prompt_cache(network)).astype(mx.float32)
    after = logits[:, prompts.shape[1] - 1 :]
    return np.array(after - mx.logsumexp(after, -1, keepdims=True))


def compare(trained: Trained, found: Found, tolerance: float, others: float) -> None:
    """Check that llama.cpp computed and chose as MLX does, except for a share of the positions.

    A choice is a tie if the log-probabilities of the two tokens differ by less than the tolerance.
    """
    assert not found.error
    ours = log_probabilities(trained, found.tokens)
    differences = np.abs(np.log(found.probabilities) - ours).max(-1)
    chosen = np.take_along_axis(ours, found.tokens[..., None], -1)[..., 0]
    differs = (differences >= tolerance) | (ours.max(-1) - chosen >= tolerance)
    equal = (ours.argmax(-1) == found.tokens).sum()
    largest = np.quantile(differences, 1 - others)
    print(f"{largest:.1e}, {differs.sum()} more; {equal} of {differs.size} tokens equal")
    assert differs.mean() <= others, differences.max()


@pytest.mark.usefixtures("half_gelu")
@pytest.mark.parametrize("name", NAMES)
def test_llama_cpp_computes_as_mlx_does(name, tmp_path, packages):
    experts = not name.startswith(WITHOUT_EXPERTS)
    options = {"lora_targets": ("all-linear",), "lora_layers": "all", "lora_experts": experts}
    trained = make_trained(write_base(tmp_path / "base", name), **options)
    zero = write(without_effect(trained, tmp_path / "zero"), tmp_path / "base.gguf")
    gguf.write_adapter(trained, tmp_path / "lora.gguf")

    def job(model: Path, prompts: int, tokens: int, *adapters: Path) -> Job:
        given, file = PROMPTS[:prompts], tmp_path / f"{model.stem}.bin"
        return Job(model, given, tokens, VOCABULARY, file, adapters)

    files = {kind: write(trained, tmp_path / f"{kind}.gguf", kind) for kind in ("f32", *ROUNDED)}
    jobs = [job(files["f32"], 8, TOKENS), job(zero, 4, 32, tmp_path / "lora.gguf")]
    jobs += [job(files[kind], 2, 8) for kind in ROUNDED]
    fused, adapted, *rounded = evaluate(packages, tmp_path, jobs)

    tolerance = tolerance_of(name)
    shares = mx.load(str(tmp_path / "base/model.safetensors"))
    routed = any("switch_" in path for path in shares)
    for found in (fused, adapted):
        compare(trained, found, tolerance, OTHER_EXPERTS if routed else 0.0)
    plain = log_probabilities(
        replace(trained, adapter=read_adapter(tmp_path / "zero")), fused.tokens
    )
    assert np.abs(log_probabilities(trained, fused.tokens) - plain).mean() > 10 * tolerance
    for kind, found in zip(ROUNDED, rounded, strict=True):
        assert not found.error
        ours = log_probabilities(trained, found.tokens)
        differences = np.abs(np.log(found.probabilities) - ours).mean(-1)
        assert np.quantile(differences, 0.25) < ROUNDED[kind], kind
