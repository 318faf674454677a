"""AWQ and GPTQ models, repacked for MLX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.architectures import PLANS, outcome
from tests.conftest import call, events_of, losses_of, train
from tests.packed import make_packed, packed_layer
from your_ai.engine.weights import open_model
from your_ai.errors import UserError
from your_ai.gates.untrusted import Entry
from your_ai.hub import awq_gptq
from your_ai.hub.built_tensors import build
from your_ai.hub.find import store
from your_ai.memory.facts import facts_of, facts_of_config
from your_ai.modelfiles.quantized_copies import make_copy, model_folder
from your_ai.modelfiles.repack import layer_arrays
from your_ai.nets.model import load_network
from your_ai.run import events

LAYERS = [("awq", 4, 0), *(("gptq", bits, less) for bits in (2, 3, 4, 8) for less in (0, 1))]


@pytest.mark.parametrize("group", [32, 256])
@pytest.mark.parametrize(("method", "bits", "less"), LAYERS)
def test_repacked_layer_has_the_weights_that_the_format_means(method, bits, less, group):
    parts, weight = packed_layer((64, 256), 1, method, bits, group, less)
    kinds = {"scales": "F16"}
    entries = {f"x.{n}": Entry(f"x.{n}", kinds.get(n, "I32"), a.shape) for n, a in parts.items()}
    packing = awq_gptq.Packing(method, bits, zeros_less_one=less == 1)
    layer = awq_gptq.packed_layer(Path("m"), packing, entries, "x")
    arrays = {name: mx.array(parts[name]) if name in parts else None for name in awq_gptq.PARTS}
    made = layer_arrays(packing, layer, arrays)
    scales = made["scales"].astype(mx.float32)
    settings = {"group_size": layer.mlx_group_size, "bits": layer.bits}
    found = mx.dequantize(made["weight"], scales, made["biases"], **settings)
    assert np.allclose(np.array(found), weight, rtol=0, atol=1e-6)


def test_zero_points_that_borrowed_from_their_neighbor_are_restored():
    parts, _ = packed_layer((32, 32), 1, "gptq", 4, 32, 0)
    zeros = parts["qzeros"].view(np.uint32) & 0xFFFFFFF0  # the first of each word is 0
    packing = awq_gptq.Packing("gptq", 4, zeros_less_one=True)
    layer = awq_gptq.PackedLayer(4, 32, 32, 32, 32)
    arrays = {name: mx.array(array) for name, array in parts.items()}
    exact = layer_arrays(
        awq_gptq.Packing("gptq", 4, zeros_less_one=False),
        layer,
        arrays | {"qzeros": mx.array(zeros.view(np.int32))},
    )
    written = (zeros - np.uint32(0x11111111)).view(np.int32)
    found = layer_arrays(packing, layer, arrays | {"qzeros": mx.array(written)})
    assert mx.array_equal(found["biases"], exact["biases"])


@pytest.mark.parametrize(
    ("architecture", "method", "bits"),
    [("llama", "gptq", 4), ("llama", "gptq", 3), ("qwen3_moe", "awq", 4)],
)
def test_copy_has_the_models_weights_and_trains_alike_under_every_plan(
    tmp_path, architecture, method, bits
):
    dense = make_packed(tmp_path / "m", architecture, method, bits)
    folder = model_folder(tmp_path / "m", None)
    assert folder.parent == store() / "quantized"
    assert list(make_copy(tmp_path / "m", None)) == []
    opened = open_model(folder, mx.float32)
    assert opened.can_stream
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    reference = build(config)
    reference.load_weights(list(reference.sanitize(dense).items()))
    tokens = mx.arange(16)[None]
    ours, theirs = opened.network(tokens), reference(tokens)
    # As mlx-lm, biases are rounded to the dtype of the scales, float16.
    assert mx.linalg.norm(ours - theirs) < 5e-3 * mx.linalg.norm(theirs)
    held = sum(array.nbytes for _, array in tree_flatten(opened.network.parameters()))
    assert facts_of(folder, 4).weights_bytes == held
    biases = sum(4 * array.size for name, array in written_biases(tmp_path / "m"))
    assert facts_of(tmp_path / "m", 4).weights_bytes == held + biases  # left out: all zeros
    assert facts_of_config(config, 4).weights_bytes == held
    references: dict[Any, Any] = {}
    assert {outcome(folder, plan, 16, references) for plan in PLANS} == {"exact"}


def written_biases(folder: Path) -> list[tuple[str, mx.array]]:
    arrays = mx.load(str(folder / "model.safetensors"))
    return [(name, array) for name, array in arrays.items() if name.endswith("_proj.bias")]


def test_run_repacks_once_says_where_and_every_command_uses_it(tmp_path, configure, capsys):
    make_packed(tmp_path / "m")
    runs = [
        train(configure(model=str(tmp_path / "m"), run=plan, plan=plan))
        for plan in ("fused", "streamed")
    ]
    texts = [[e.text for e in events_of(run, events.Notice)] for run in runs]
    said = [[text for text in found if "repacked" in text] for found in texts]
    assert (len(said[0]), len(said[1])) == (1, 0)
    assert str(store() / "quantized") in said[0][0]
    assert losses_of(runs[0]) == pytest.approx(losses_of(runs[1]), rel=1e-4)
    assert call("generate", "fused", "--prompt", "Ask", "--max-tokens", 2) == 0
    assert call("eval", "fused") == 0
    assert call("plan", "--model", tmp_path / "m", "--seq-len", 32) == 0
    assert call("fuse", "fused", tmp_path / "f", "--to", "dequantized") == 0
    opened, _ = load_network(tmp_path / "f", mx.float32)
    assert opened(mx.arange(4)[None]).shape[1] == 4
    capsys.readouterr()
    assert call("train", "--model", tmp_path / "m", "--data", "data", "--quantize", 4) == 2
    assert "is already quantized to 4 bits" in capsys.readouterr().err


def test_groups_of_inputs_that_are_not_neighbors_are_refused(tmp_path):
    make_packed(tmp_path / "m", desc_act=True)
    assert model_folder(tmp_path / "m", None).is_dir()  # the order of g_idx decides
    file = tmp_path / "m" / "model.safetensors"
    arrays = {name: mx.contiguous(array) for name, array in mx.load(str(file)).items()}
    name = next(name for name in arrays if name.endswith("down_proj.g_idx"))
    arrays[name] = arrays[name][::-1]
    mx.save_safetensors(str(file), arrays)
    with pytest.raises(UserError, match="are not grouped in order"):
        model_folder(tmp_path / "m", None)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("awq", {"version": "gemv"}, "version gemv is not supported, only gemm"),
        ("awq", {"bits": 8}, "8 bits are not supported, only 4"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ("gptq", {"bits": 5}, "5 bits are not supported, only 2, 3, 4, 8"),
    ],
)
def test_other_layouts_are_refused_in_one_line(tmp_path, method, settings, message):
    config = {"quantization_config": {"quant_method": method, **settings}}
    with pytest.raises(UserError, match=message):
        awq_gptq.packing_of(tmp_path, config)


def test_mlx_lm_never_reads_these_weights_itself(tmp_path):
    make_packed(tmp_path / "m", method="awq")
    with pytest.raises(UserError, match="must be repacked"):
        load_network(tmp_path / "m", mx.float32)
