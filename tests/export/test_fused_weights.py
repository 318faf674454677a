"""Fused weights: compared with mlx-lm's, and by the logits they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config

from tests.conftest import TINY, make_model
from tests.export.fused_runs import assert_same_bytes, drawn_run, fused_by_mlx_lm, weights_of
from tests.export.runs import change_parameters, make_trained
from your_ai.errors import UserError
from your_ai.export import fused_weights as weights
from your_ai.export import gguf, huggingface
from your_ai.export.fused_weights import fuse, fused_lazily
from your_ai.generation import generate
from your_ai.hub.check import check_model
from your_ai.modelfiles import shards
from your_ai.modelfiles.repack import MLX_PARTS
from your_ai.nets.saved_adapter import Trained
from your_ai.run.checkpoint import ADAPTERS

TOKENS = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
KINDS = [
    *[(architecture, False) for architecture in ("llama", "qwen2", "gemma2", "qwen3_moe")],
    *[(architecture, True) for architecture in ("llama-untied", "qwen2-tied", "gemma2")],
]
FEW = [("llama", False), ("qwen3_moe", False), ("gemma2", True)]


def over(kinds: list[tuple[str, bool]]) -> pytest.MarkDecorator:
    names = [f"{architecture}{'-dora' if dora else ''}" for architecture, dora in kinds]
    return pytest.mark.parametrize("kind", kinds, ids=names)


@pytest.fixture
def to_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round to the nearest value when quantizing, like mlx-lm."""
    monkeypatch.setattr(weights, "dithered", lambda weight, *_: weight)


def run_of(tmp_path: Path, data_folder: Path, kind: tuple[str, bool], bits: int | None) -> Trained:
    model = make_model(tmp_path / "model", kind[0], bits=bits)
    return drawn_run(model, data_folder, use_dora=kind[1])


def written(trained: Trained, target: Path, to: str = "auto", dtype: str = "auto") -> Path:
    list(fuse(trained, target, to, dtype))
    return target


def logits_of(model: Path, **options: str) -> mx.array:
    """The logits of TOKENS, computed by mlx-lm."""
    return mlx_lm.load(str(model), **options)[0](TOKENS)


def unfused(trained: Trained) -> mx.array:
    return logits_of(trained.base, adapter_path=str(trained.adapter.folder))


def assert_near(found: mx.array, wanted: mx.array) -> None:
    """For logits of the order of a few units."""
    assert mx.abs(found - wanted).max().item() <= 1e-4


# Compared with mlx-lm


@over(KINDS)
@pytest.mark.parametrize("bits", [None, 4])
def test_the_fused_model_computes_the_same_as_base_and_adapter(tmp_path, data_folder, kind, bits):
    trained = run_of(tmp_path, data_folder, kind, bits)
    wanted = unfused(trained)
    assert mx.abs(wanted - logits_of(trained.base)).max().item() > 0.1
    out = written(trained, tmp_path / "out", "dequantized")
    assert_near(logits_of(out), wanted)
    assert not any(name.endswith("scales") for name in weights_of(out))


@pytest.mark.parametrize(
    ("kind", "bits"), [*((kind, 4) for kind in FEW), (("llama", False), None)], ids=str
)
def test_weights_of_the_same_form_equal_those_fused_by_mlx_lm(
    tmp_path, data_folder, kind, bits, to_the_nearest
):
    trained = run_of(tmp_path, data_folder, kind, bits)
    out = written(trained, tmp_path / "out", "same" if bits else "auto")
    assert_same_bytes(weights_of(out), fused_by_mlx_lm(trained))
    found, base = check_model(out), check_model(trained.base)
    assert found["quantization"] == base["quantization"] if bits else found == base


@over(FEW)
def test_with_more_bits_layers_without_adapter_stay_unchanged(
    tmp_path, data_folder, kind, to_the_nearest
):
    trained = run_of(tmp_path, data_folder, kind, 4)
    out = written(trained, tmp_path / "out")
    found, base = weights_of(out), weights_of(trained.base)
    adapted = trained.adapter.layers
    rest = [name for name in base if name.rpartition(".")[0] not in adapted]
    assert len(rest) > 10
    assert_same_bytes({name: found[name] for name in rest}, {name: base[name] for name in rest})
    dense = fused_by_mlx_lm(trained, dequantize=True)
    layers = dict(mlx_lm.load(str(trained.base))[0].named_modules())
    config = check_model(trained.base)["quantization"]
    for path in adapted:
        own = {"group_size": layers[path].group_size, "bits": 8, "mode": "affine"}
        parts = mx.quantize(dense[f"{path}.weight"], **own)
        for name, array in zip(("weight", "scales", "biases"), parts, strict=True):
            assert mx.array_equal(found[f"{path}.{name}"], array), path
        if layers[path].bits != 8:  # the router of the experts already has 8
            config[path] = own
    assert check_model(out)["quantization"] == config


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_more_bits_come_closer_to_the_run(tmp_path, data_folder, architecture):
    trained = run_of(tmp_path, data_folder, (architecture, False), 4)
    wanted = unfused(trained)
    off = {
        to: mx.abs(logits_of(written(trained, tmp_path / to, to)) - wanted).mean().item()
        for to in ("same", "6", "8")
    }
    assert off["8"] < off["6"] / 2 < off["same"] / 4


# Rounding


@pytest.mark.parametrize("to", ["same", "6"])
def test_rounding_is_random_and_within_about_one_step(tmp_path, data_folder, to):
    trained = run_of(tmp_path, data_folder, ("llama", False), 4)
    wanted = fused_by_mlx_lm(trained, dequantize=True)
    layers = dict(mlx_lm.load(str(written(trained, tmp_path / "out", to)))[0].named_modules())
    found = []
    for path in trained.adapter.layers:
        off = weights.dense_rows(layers[path], slice(None), []) - wanted[f"{path}.weight"]
        step = mx.repeat(mx.abs(layers[path].scales), layers[path].group_size, axis=-1)
        found.append((off / step).reshape(-1))
    steps = mx.concatenate(found)
    assert (
        mx.abs(steps).max().item() < 1.6
    )  # at the ends of the range MLX may round a full step away
    assert abs(steps.mean().item()) < 0.005
    assert (
        0.35 < mx.sqrt((steps * steps).mean()).item() < 0.45
    )  # 1/sqrt(6); rounding to the nearest would give 0.29


def test_the_same_run_gives_the_same_bytes(tmp_path, data_folder):
    trained = run_of(tmp_path, data_folder, ("llama", False), 4)
    mx.random.seed(1)
    first = weights_of(written(trained, tmp_path / "first"))
    mx.random.seed(2)
    assert_same_bytes(weights_of(written(trained, tmp_path / "second")), first)


def test_a_small_change_survives_8_bits_only_with_random_rounding(
    tmp_path, data_folder, monkeypatch
):
    trained = drawn_run(make_model(tmp_path / "model"), data_folder, strength=0.0003)
    base = weights_of(trained.base)
    dense = fused_by_mlx_lm(trained, dequantize=True)

    def kept() -> float:
        """The share of the intended change that survives, along its own direction."""
        arrays = fused_lazily(trained, "8").arrays
        shown = whole = 0.0
        for path in trained.adapter.layers:
            before, after = (
                mx.dequantize(*(a[f"{path}.{n}"] for n in MLX_PARTS), 32, bits)
                for a, bits in ((base, 4), (arrays, 8))
            )
            change = dense[f"{path}.weight"] - before
            shown += ((after - before) * change).sum().item()
            whole += (change * change).sum().item()
        return shown / whole

    assert kept() == pytest.approx(1, abs=0.1)
    monkeypatch.setattr(weights, "dithered", lambda weight, *_: weight)
    assert kept() < 0.5


# Dtypes, slices and other quantizations


def test_half_precision_is_rounded_once(tmp_path, data_folder):
    model = make_model(tmp_path / "model", bits=None)
    halves = {name: array.astype(mx.bfloat16) for name, array in weights_of(model).items()}
    mx.save_safetensors(str(model / "model.safetensors"), halves, {"format": "mlx"})
    trained = drawn_run(model, data_folder, strength=0.01)
    found = weights_of(written(trained, tmp_path / "out"))
    for path, parts in trained.adapter.layers.items():
        a, b = (np.array(parts[name], np.float64) for name in ("lora_a", "lora_b"))
        base = np.array(halves[f"{path}.weight"].astype(mx.float32), np.float64)
        wanted = base + trained.adapter.scale * b.T @ a.T
        assert found[f"{path}.weight"].dtype == mx.bfloat16
        ours = np.array(found[f"{path}.weight"].astype(mx.float32), np.float64)
        half_a_step = 2 ** (np.floor(np.log2(np.abs(wanted))) - 8)
        assert (np.abs(ours - wanted) <= 1.001 * half_a_step).all(), path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_dtype_can_be_chosen(tmp_path, data_folder, dtype):
    trained = run_of(tmp_path, data_folder, ("llama", False), 4)
    out = written(trained, tmp_path / "out", "dequantized", dtype)
    assert {array.dtype for array in weights_of(out).values()} == {getattr(mx, dtype)}
    assert check_model(out)["torch_dtype"] == dtype
    assert "quantization_config" not in check_model(out)


@pytest.mark.parametrize(("architecture", "dora"), [("llama", True), ("qwen3_moe", False)])
@pytest.mark.parametrize("to", ["same", "8", "dequantized"])
def test_the_slice_size_does_not_change_the_result(
    tmp_path, data_folder, monkeypatch, to_the_nearest, architecture, dora, to
):
    trained = run_of(tmp_path, data_folder, (architecture, dora), 4)
    whole = fused_lazily(trained, to)
    monkeypatch.setattr(weights, "SLICE_BYTES", 3000)
    sliced = fused_lazily(trained, to)
    assert sliced.input_bytes < whole.input_bytes
    assert list(sliced.arrays) == list(whole.arrays)
    for name, array in whole.arrays.items():
        floats = mx.issubdtype(array.dtype, mx.floating)
        tolerance = 1e-6 if floats else 0  # a matmul of fewer rows may round differently
        assert mx.allclose(sliced.arrays[name], array, rtol=0, atol=tolerance), name
    assert set(sliced.pieces) == set(whole.pieces)
    for name, pieces in sliced.pieces.items():
        assert mx.array_equal(mx.concatenate(pieces), sliced.arrays[name]), name


@pytest.mark.parametrize("write", [huggingface.write, gguf.write_model])
def test_the_largest_matrix_is_never_whole(tmp_path, monkeypatch, write):
    """The embedding of a model of 8 billion parameters has 2 GB in float32."""
    monkeypatch.chdir(tmp_path)
    trained = make_trained(make_model(tmp_path / "m", **{**TINY, "vocab_size": 40_000}))
    computed, compute = [], shards.compute

    def watched(source: Path, array: mx.array) -> None:
        computed.append(array.nbytes)
        compute(source, array)

    for module in (shards, gguf):
        monkeypatch.setattr(module, "compute", watched)
    monkeypatch.setattr(weights, "SLICE_BYTES", 100_000)
    list(write(trained, tmp_path / "out", "float32" if write is huggingface.write else "f32"))
    assert max(computed) <= 200_000 < 40_000 * 4 * TINY["hidden_size"]


def quantized_base(folder: Path, **options: Any) -> Path:
    """A model that mlx-lm quantized with these options."""
    model = make_model(folder, bits=None)
    network, config = mlx_lm.utils.load_model(model)
    network, config = quantize_model(network, config, 32, 4, **options)
    arrays = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(model / "model.safetensors"), arrays, {"format": "mlx"})
    save_config(config, model / "config.json")
    return model


def test_layers_of_a_mixed_base_keep_their_own_bits(tmp_path, data_folder):
    def mixed(path: str, _: nn.Module) -> bool | dict[str, int]:
        if path.endswith("down_proj"):
            return {"group_size": 64, "bits": 8}
        return not path.endswith("v_proj")

    trained = drawn_run(quantized_base(tmp_path / "model", quant_predicate=mixed), data_folder)
    out = written(trained, tmp_path / "out", "6")
    layers = dict(mlx_lm.load(str(out))[0].named_modules())
    block = "model.layers.2"
    assert layers[f"{block}.self_attn.q_proj"].bits == 6
    assert layers[f"{block}.mlp.down_proj"].bits == 8
    assert layers["model.layers.0.self_attn.q_proj"].bits == 4
    assert type(layers[f"{block}.self_attn.v_proj"]) is nn.Linear
    assert_near(logits_of(written(trained, tmp_path / "dense", "dequantized")), unfused(trained))


def test_a_base_with_another_quantization_mode_becomes_affine(tmp_path, data_folder):
    trained = drawn_run(quantized_base(tmp_path / "model", mode="mxfp4"), data_folder)
    out = written(trained, tmp_path / "out")
    own = check_model(out)["quantization"]["model.layers.2.self_attn.q_proj"]
    assert own == {"group_size": 32, "bits": 8, "mode": "affine"}
    assert_near(logits_of(written(trained, tmp_path / "dense", "dequantized")), unfused(trained))


def test_a_run_that_quantized_is_fused_into_its_quantized_copy(tmp_path, data_folder):
    model = make_model(tmp_path / "model", bits=None)
    trained = drawn_run(model, data_folder, quantize=4)
    out = written(trained, tmp_path / "out", "dequantized")
    network, _ = generate.load_run(trained)
    assert_near(logits_of(out), network(TOKENS))
    assert "trained on a copy of the base quantized to 4 bits" in (out / "README.md").read_text()


@pytest.mark.memory
def test_fused_lazily_computes_nothing_yet(tmp_path, data_folder):
    trained = run_of(tmp_path, data_folder, ("llama", False), 4)
    adapter = (trained.adapter.folder / ADAPTERS).stat().st_size  # which is read
    before = mx.get_active_memory()
    lazy = fused_lazily(trained, "dequantized")
    assert mx.get_active_memory() - before - adapter < 10_000 < lazy.index["total_size"]


# Refusals


@pytest.mark.parametrize(
    ("bits", "options", "message"),
    [
        (None, {"to": "8"}, "--to 8: .*model is not quantized; fuse it without --to"),
        (8, {"to": "4"}, "--to 4: the adapted layers already have 8 bits; give 8 or more"),
        (4, {"to": "7"}, "--to 7: give auto, same, dequantized, 4, 5, 6 or 8"),
        (4, {"dtype": "float32"}, "--dtype float32: layers stay quantized; add --to dequantized"),
        (4, {"dtype": "int8"}, "--dtype int8: give auto, float32, bfloat16 or float16"),
    ],
)
def test_impossible_options_are_refused(tmp_path, data_folder, bits, options, message):
    trained = run_of(tmp_path, data_folder, ("llama", False), bits)
    with pytest.raises(UserError, match=message):
        fused_lazily(trained, **options)


def test_a_layer_that_cannot_be_fused_is_named(tmp_path, data_folder, monkeypatch):
    trained = run_of(tmp_path, data_folder, ("llama", False), 4)
    monkeypatch.setattr(weights, "LINEAR", (nn.Linear,))
    with pytest.raises(UserError, match="_proj is a QuantizedLinear, which cannot be fused"):
        fused_lazily(trained)


def test_an_adapter_with_wrong_shapes_is_refused(tmp_path, data_folder):
    trained = run_of(tmp_path, data_folder, ("llama", False), 4)
    change_parameters(trained.adapter.folder, rank=8)
    with pytest.raises(UserError, match=r"lora_a is \d+ x 4, expected \d+ x 8"):
        fused_lazily(trained)
