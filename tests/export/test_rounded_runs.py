"""What runs with --qat leave behind is what they trained: the rounded weights."""

from __future__ import annotations

from pathlib import Path

import gguf as library
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.conftest import make_model
from tests.export.fused_runs import drawn_run
from tests.export.runs import change_parameters
from your_ai.errors import UserError
from your_ai.export import gguf
from your_ai.export.fuse_difference import difference
from your_ai.export.fused_weights import fuse
from your_ai.export.starting import settings_of
from your_ai.generation import generate
from your_ai.nets.lora import RoundedLayer, fused_rows
from your_ai.nets.rounding import float32_weight, quantization_of, rounded
from your_ai.nets.saved_adapter import Trained, read_adapter


def made(tmp_path: Path, data: Path, bits: int | None, qat: str) -> Trained:
    model = make_model(tmp_path / "base" / "model", "llama", bits)
    return drawn_run(model, data, strength=0.02, qat=qat)


def rounded_weights(trained: Trained) -> dict[str, mx.array]:
    """The weights of the adapted layers in the forward pass of training, (O, D) float32."""
    network, _ = generate.load_run(trained)
    found = {}
    for path, layer in network.named_modules():
        if isinstance(layer, RoundedLayer):
            weight = float32_weight(layer.linear, quantization_of(layer.linear))
            weight = fused_rows(weight, layer, layer.scale, slice(None))
            found[path] = rounded(weight, layer.rounding, getattr(mx, layer.written))
    assert found
    return found


@pytest.mark.parametrize(
    ("bits", "qat"), [(4, "same"), (4, "4"), (4, "8:32"), (None, "4:32"), (None, "3:64")]
)
def test_fused_weights_are_those_of_training(tmp_path, data_folder, bits, qat):
    trained, out = made(tmp_path, data_folder, bits, qat), tmp_path / "out"
    list(fuse(trained, out))
    network, _ = mlx_lm.load(str(out))
    layers = dict(network.named_modules())
    for path, weight in rounded_weights(trained).items():
        found = float32_weight(layers[path], quantization_of(layers[path]))
        assert mx.allclose(found, weight, rtol=1e-5, atol=1e-6), path
    assert "as they were in training (--qat)" in (out / "README.md").read_text()
    found = difference(trained, out, None)
    assert found.fused_loss == pytest.approx(found.adapted_loss, abs=1e-5)
    assert found.largest < 1e-3


@pytest.mark.parametrize(("bits", "qat"), [(4, "same"), (4, "3:32"), (None, "4:32")])
def test_scales_are_rounded_as_the_files_have_them(tmp_path, data_folder, bits, qat):
    model = make_model(tmp_path / "base" / "model", "llama", bits)
    arrays = mx.load(str(model / "model.safetensors"))
    floats = {n: a for n, a in arrays.items() if mx.issubdtype(a.dtype, mx.floating)}
    arrays |= {name: array.astype(mx.bfloat16) for name, array in floats.items()}
    mx.save_safetensors(str(model / "model.safetensors"), arrays, {"format": "mlx"})
    trained, out = drawn_run(model, data_folder, strength=0.02, qat=qat), tmp_path / "out"
    list(fuse(trained, out))
    layers = dict(mlx_lm.load(str(out))[0].named_modules())
    for path, weight in rounded_weights(trained).items():
        found = float32_weight(layers[path], quantization_of(layers[path]))
        assert mx.allclose(found, weight, rtol=1e-6, atol=1e-7), path


def test_without_it_rounding_changes_more(tmp_path, data_folder):
    trained, out = made(tmp_path, data_folder, 4, ""), tmp_path / "out"
    list(fuse(trained, out, "same"))
    assert difference(trained, out, None).largest > 1e-2


@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_gguf_has_the_weights_of_training(tmp_path, data_folder, kind):
    trained, file = made(tmp_path, data_folder, None, kind), tmp_path / "model.gguf"
    list(gguf.write_model(trained, file, kind))
    tensors = {tensor.name: tensor for tensor in library.GGUFReader(file).tensors}
    names = {"mlp.down_proj": "ffn_down", "mlp.up_proj": "ffn_up", "self_attn.v_proj": "attn_v"}
    compared = 0
    for path, weight in rounded_weights(trained).items():
        _, _, block, name = path.split(".", 3)
        if name in names:
            tensor = tensors[f"blk.{block}.{names[name]}.weight"]
            found = library.quants.dequantize(tensor.data, tensor.tensor_type)
            differs = np.abs(found.reshape(weight.shape) - np.array(weight)) > 1e-6
            assert differs.mean() < 0.005, path
            compared += 1
    assert compared >= 6


def test_a_run_that_starts_from_it_goes_on_rounding(tmp_path, data_folder):
    trained = made(tmp_path, data_folder, 4, "4:32")
    assert settings_of(str(trained.adapter.folder), None)["qat"] == "4:32"


def test_mlx_lm_loads_the_adapter(tmp_path, data_folder):
    trained = made(tmp_path, data_folder, 4, "same")
    mlx_lm.load(str(trained.base), adapter_path=str(trained.adapter.folder))


@pytest.mark.parametrize("text", [4, "5:48", "", ["same"], "x" * 1000])
def test_an_unknown_format_in_an_adapter_is_refused(tmp_path, data_folder, text):
    folder = made(tmp_path, data_folder, 4, "same").adapter.folder
    change_parameters(folder, qat=text)
    with pytest.raises(UserError, match=r"adapter_config.json: qat .*: must be ") as error:
        read_adapter(folder)
    assert len(str(error.value)) < 600
