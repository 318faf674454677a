"""GGUF files, read back with the package gguf; test_gguf_llama_cpp reads them with llama.cpp."""

from __future__ import annotations

import math
import resource
import sys
from dataclasses import replace
from pathlib import Path

import gguf as library
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.rope_utils import initialize_rope
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import dequantize_model

from tests.conftest import EXTRA, make_model
from tests.export.gguf_files import adapter_file, fields, kinds, tensors
from tests.export.runs import ALPHA, RANK, make_trained
from tests.interop.llamacpp.bases import LLAMA3
from your_ai.errors import RunError, UserError
from your_ai.export import gguf
from your_ai.export.fused_weights import fuse
from your_ai.export.gguf_architectures import in_pairs
from your_ai.nets.model import load_network
from your_ai.nets.saved_adapter import Trained

DENSE = [name for name in EXTRA if name != "qwen3_moe"]
NORMS = {"llama": 0, "mistral": 0, "qwen2": 0, "qwen3": 0, "gemma2": 1, "gemma3_text": 1}


def written(trained, target, kind="f32", **options):
    steps = list(gguf.write_model(trained, target, kind, **options))
    assert steps[-1].done_bytes == steps[-1].total_bytes
    return target


def fused_by_mlx(trained):
    """The weights of the model after mlx-lm's layers fused the adapter."""
    network, _ = load_network(trained.base, mx.float32)
    load_adapters(network, str(trained.adapter.folder))
    layers = [(n, m.fuse(dequantize=True)) for n, m in network.named_modules() if "lora_a" in m]
    network.update_modules(tree_unflatten(layers))
    network = dequantize_model(network)
    return {name: np.array(array) for name, array in tree_flatten(network.parameters())}


def turned_back(rows: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows with neighboring RoPE pairs in each head back to transformers' order."""
    count = rows.shape[0] // heads
    order = np.arange(rows.shape[0]).reshape(heads, count)
    order = np.concatenate([order[:, 0::2], order[:, 1::2]], axis=1).reshape(-1)
    return rows[order]


# An adapter


def test_an_adapter_has_the_arrays_of_mlx_lm_under_ggufs_names(trained, tmp_path):
    found = tensors(adapter_file(trained, tmp_path))
    assert len(found) == len(trained.adapter.arrays) == 2 * 3 * 7
    ours = trained.adapter.layers["model.layers.1.mlp.down_proj"]
    assert np.array_equal(found["blk.1.ffn_down.weight.lora_a"], np.array(ours["lora_a"]).T)
    assert np.array_equal(found["blk.1.ffn_down.weight.lora_b"], np.array(ours["lora_b"]).T)


@pytest.mark.parametrize(("layer", "name", "heads"), [("q", "attn_q", 4), ("k", "attn_k", 2)])
def test_the_query_and_key_rows_of_llama_are_reordered(trained, tmp_path, layer, name, heads):
    found = tensors(adapter_file(trained, tmp_path))[f"blk.2.{name}.weight.lora_b"]
    ours = trained.adapter.layers[f"model.layers.2.self_attn.{layer}_proj"]["lora_b"]
    assert not np.array_equal(found, np.array(ours).T)
    assert np.array_equal(turned_back(found, heads), np.array(ours).T)


def test_the_query_rows_of_other_architectures_are_not_reordered(tmp_path):
    trained = make_trained(make_model(tmp_path / "m", "qwen3"))
    ours = trained.adapter.layers["model.layers.2.self_attn.q_proj"]["lora_b"]
    found = tensors(adapter_file(trained, tmp_path))["blk.2.attn_q.weight.lora_b"]
    assert np.array_equal(found, np.array(ours).T)


def test_alpha_over_rank_is_the_scale(trained, tmp_path):
    found = fields(adapter_file(trained, tmp_path))
    assert found["general.type"] == "adapter"
    assert found["general.architecture"] == "llama"
    assert found["adapter.type"] == "lora"
    assert found["adapter.lora.alpha"] / RANK == pytest.approx(trained.adapter.scale)
    assert found["adapter.lora.alpha"] == ALPHA


def test_exported_files_contain_no_local_path(trained, tmp_path):
    gguf.write_adapter(trained, tmp_path / "a.gguf")
    written(trained, tmp_path / "m.gguf")
    for name in ("a.gguf", "m.gguf"):
        assert str(trained.base).encode() not in (tmp_path / name).read_bytes()
        assert "general.base_model.count" not in fields(tmp_path / name)


def test_a_base_from_the_hub_is_named_in_the_metadata(trained, tmp_path):
    config = replace(trained.config, model="some/model-1B")
    found = fields(adapter_file(replace(trained, config=config), tmp_path))
    assert found["general.base_model.0.organization"] == "some"
    assert found["general.base_model.0.name"] == "model-1B"


def test_dora_is_refused(tiny_model, tmp_path):
    trained = make_trained(tiny_model, use_dora=True)
    with pytest.raises(
        UserError, match=r"is DoRA, which llama.cpp does not support; fuse it with --fused"
    ):
        gguf.write_adapter(trained, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


def test_an_adapter_of_experts_has_one_matrix_for_all(tmp_path):
    base = make_model(tmp_path / "m", "qwen3_moe", bits=None)
    trained = make_trained(base, lora_targets=["switch_mlp.up_proj"], lora_experts=True)
    found = tensors(adapter_file(trained, tmp_path))
    ours = trained.adapter.layers["model.layers.2.mlp.switch_mlp.up_proj"]
    assert ours["lora_a"].ndim == 3
    for part in ("lora_a", "lora_b"):
        assert np.array_equal(found[f"blk.2.ffn_up_exps.weight.{part}"], np.array(ours[part]))


def test_an_adapter_with_scale_zero_is_refused(trained, tmp_path):
    parameters = {**trained.adapter.config["lora_parameters"], "scale": 0.0}
    config = {**trained.adapter.config, "lora_parameters": parameters}
    adapter = replace(trained.adapter, config=config)
    with pytest.raises(UserError, match="scale is 0"):
        gguf.write_adapter(replace(trained, adapter=adapter), tmp_path / "a.gguf")


def test_an_adapter_of_another_model_is_refused(trained, tmp_path):
    other = replace(trained, base=make_model(tmp_path / "o", hidden_size=128))
    with pytest.raises(UserError, match="does not fit the model"):
        gguf.write_adapter(other, tmp_path / "a.gguf")


def test_without_the_gguf_package_the_error_says_how_to_install_it(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install '\.\[gguf\]'"):
        gguf.write_adapter(trained, tmp_path / "a.gguf")
    with pytest.raises(UserError, match=r"pip install '\.\[gguf\]'"):
        written(trained, tmp_path / "a.gguf")


# The fused model


@pytest.mark.parametrize("architecture", DENSE)
def test_the_weights_equal_those_fused_by_mlx_lm(tmp_path, architecture):
    base = make_model(tmp_path / "m", architecture, bits=None)
    trained = make_trained(base, lora_targets=["all-linear"])
    found, ours = tensors(written(trained, tmp_path / "m.gguf")), fused_by_mlx(trained)
    assert len(found) == len(ours)
    kind = load_network(base, mx.float32)[1]["model_type"]
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.layers.2.self_attn.v_proj.weight": "blk.2.attn_v.weight",
        "model.layers.2.self_attn.o_proj.weight": "blk.2.attn_output.weight",
        "model.layers.2.mlp.gate_proj.weight": "blk.2.ffn_gate.weight",
        "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
    }
    for parameter, name in names.items():
        assert np.allclose(found[name], ours[parameter], atol=1e-5), name
    for parameter, name in {
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.input_layernorm.weight": "blk.1.attn_norm.weight",
    }.items():
        assert np.allclose(found[name], ours[parameter] + NORMS[kind], atol=1e-6), name
    query = found["blk.2.attn_q.weight"]
    query = turned_back(query, 4) if kind in ("llama", "mistral") else query
    assert np.allclose(query, ours["model.layers.2.self_attn.q_proj.weight"], atol=1e-5)
    assert ("output.weight" in found) == ("lm_head.weight" in ours)


def test_the_biases_of_llama_are_reordered_like_the_weights(tmp_path):
    base = make_model(tmp_path / "m", bits=None, attention_bias=True)
    found = tensors(written(make_trained(base), tmp_path / "m.gguf"))
    ours = mx.load(str(base / "model.safetensors"))["model.layers.0.self_attn.k_proj.bias"]
    assert np.allclose(turned_back(found["blk.0.attn_k.bias"], 2), np.array(ours))


def test_fused_weights_are_not_rounded_to_the_dtype_of_the_base(tmp_path):
    base = make_model(tmp_path / "m", bits=None)
    arrays = mx.load(str(base / "model.safetensors"))
    halves = {name: array.astype(mx.bfloat16) for name, array in arrays.items()}
    mx.save_safetensors(str(base / "model.safetensors"), halves, {"format": "mlx"})
    trained = make_trained(base, lora_targets=["up_proj"])
    found, ours = tensors(written(trained, tmp_path / "m.gguf")), fused_by_mlx(trained)
    weight = ours["model.layers.1.mlp.up_proj.weight"]
    assert np.allclose(found["blk.1.ffn_up.weight"], weight, atol=1e-6)


# Rounding errors relative to the largest value of a block. q8_0 and q4_0 store a block's step in
# float16; the levels of q4_0 are -8 to 7, so that the largest value with the other sign loses 1/8.
STEPS = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254 + 2**-11, "q4_0": 1 / 8 + 2**-11}
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_0": 2}  # llama.h has these


@pytest.mark.parametrize("kind", gguf.KINDS)
def test_matrices_are_written_in_the_requested_type(trained, tmp_path, kind):
    path = written(trained, tmp_path / "m.gguf", kind)
    types, found, ours = kinds(path), tensors(path), fused_by_mlx(trained)
    for name, values in found.items():
        own = "q8_0" if (kind, name) == ("q4_0", "token_embd.weight") else kind  # it is tied
        assert types[name] == ("F32" if values.ndim == 1 else own.upper()), name
    weight = ours["model.layers.1.mlp.up_proj.weight"]
    error = np.abs(found["blk.1.ffn_up.weight"] - weight)
    largest = np.abs(weight).reshape(weight.shape[0], -1, 32).max(-1).repeat(32, -1)
    assert (error <= 1e-5 + 1.01 * STEPS[kind] * largest).all()
    assert (error**2).mean() <= (STEPS[kind] * largest).max() ** 2 / 3 + 1e-10
    assert fields(path)["general.file_type"] == FILE_TYPES[kind]


@pytest.mark.parametrize(("name", "wide"), [("llama", "token_embd"), ("llama-untied", "output")])
def test_the_matrix_of_the_logits_keeps_8_bits_in_a_q4_0_file(tmp_path, name, wide):
    trained = make_trained(make_model(tmp_path / "m", name))
    types = kinds(written(trained, tmp_path / "m.gguf", "q4_0"))
    assert {n for n, kind in types.items() if kind == "Q8_0"} == {f"{wide}.weight"}
    assert types["blk.0.ffn_down.weight"] == "Q4_0"


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_rows_that_do_not_fill_blocks_are_written_in_f16(tmp_path, kind):
    base = make_model(tmp_path / "m", bits=None, intermediate_size=80)
    types = kinds(written(make_trained(base), tmp_path / "m.gguf", kind))
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == kind.upper()


def test_weights_too_large_for_float16_are_refused(tmp_path):
    base = make_model(tmp_path / "m", bits=None)
    arrays = mx.load(str(base / "model.safetensors"))
    arrays["model.layers.1.mlp.up_proj.weight"] *= 1e6
    mx.save_safetensors(str(base / "model.safetensors"), arrays, {"format": "mlx"})
    trained = make_trained(base)
    with pytest.raises(UserError, match=r"layers.1.mlp.up_proj.weight .*; use --dtype bf16"):
        written(trained, tmp_path / "m.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf*"))
    written(trained, tmp_path / "m.gguf", "bf16")


def test_converting_in_parts_gives_the_same_file(trained, tmp_path, monkeypatch):
    whole = written(trained, tmp_path / "whole.gguf", "q8_0").read_bytes()
    monkeypatch.setattr(gguf, "PART_BYTES", 1000)
    assert written(trained, tmp_path / "parts.gguf", "q8_0").read_bytes() == whole


def test_the_metadata_contains_the_sizes_of_the_model(trained, tmp_path):
    found = fields(written(trained, tmp_path / "m.gguf"))
    wanted = {
        "block_count": 3, "context_length": 2048, "embedding_length": 32,
        "feed_forward_length": 64, "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": 8, "attention.value_length": 8, "vocab_size": 768,
        "rope.dimension_count": 8, "rope.freq_base": 10000.0,
    }  # fmt: skip
    assert {key: found[f"llama.{key}"] for key in wanted} == wanted
    assert found["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    assert found["general.name"] == f"{trained.base.name} fine-tuned"  # and not the run's name


def test_gemma_gets_its_sliding_windows_and_softcaps(tmp_path):
    two = make_trained(make_model(tmp_path / "2", "gemma2", sliding_window=32), "two")
    found = fields(written(two, tmp_path / "2.gguf"))
    assert found["gemma2.attn_logit_softcapping"] == 50
    assert found["gemma2.final_logit_softcapping"] == 30
    assert found["gemma2.attention.sliding_window"] == 32
    three = make_trained(make_model(tmp_path / "3", "gemma3_text"), "three")
    found = fields(written(three, tmp_path / "3.gguf"))
    assert found["gemma3.attention.sliding_window"] == 16
    assert found["gemma3.attention.sliding_window_pattern"] == 2
    assert found["gemma3.rope.freq_base"] == 10000  # the models of these tests say so
    assert found["gemma3.rope.freq_base_swa"] == 10000


def test_the_rope_frequencies_of_llama3_equal_those_of_mlx_lm(tmp_path):
    trained = make_trained(make_model(tmp_path / "m", bits=None, rope_scaling=LLAMA3))
    found = tensors(written(trained, tmp_path / "m.gguf"))["rope_freqs.weight"]
    plain = 10000.0 ** (np.arange(0, 16, 2) / 16)
    ours = initialize_rope(16, 10000.0, False, LLAMA3)
    assert np.allclose(found, np.array(ours._freqs) / plain, rtol=1e-5)
    assert len(set(found.tolist())) > 2  # low, middle and high frequencies


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            {"type": "yarn", "factor": 2.0, "original_context_length": 64},
        ),
    ],
)
def test_rope_scaling_is_recorded(tmp_path, scaling, wanted):
    trained = make_trained(make_model(tmp_path / "m", "qwen3", rope_scaling=scaling))
    found = fields(written(trained, tmp_path / "m.gguf"))
    assert {key: found[f"qwen3.rope.scaling.{key}"] for key in wanted} == wanted


def test_a_dora_adapter_is_fused_into_the_model(tiny_model, tmp_path):
    trained = make_trained(tiny_model, use_dora=True)
    found, ours = tensors(written(trained, tmp_path / "m.gguf")), fused_by_mlx(trained)
    query = turned_back(found["blk.2.attn_q.weight"], 4)
    assert np.allclose(query, ours["model.layers.2.self_attn.q_proj.weight"], atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\]"),
        ("llama", {"rope_traditional": True}, "rope_traditional is set"),
        ("llama", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                   "sliding_window": 8}, "some layers have a sliding window"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling is dynamic"),
        ("qwen3", {"rope_scaling": LLAMA3}, "rope_scaling is llama3"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar is 24"),
    ],
)  # fmt: skip
def test_models_that_llama_cpp_does_not_support_are_refused(
    tmp_path, architecture, changes, message
):
    trained = make_trained(make_model(tmp_path / "m", architecture, **changes))
    with pytest.raises(UserError, match=message):
        written(trained, tmp_path / "m.gguf")
    with pytest.raises(UserError, match=message):
        gguf.write_adapter(trained, tmp_path / "m.gguf")


def test_the_largest_gemma_scales_queries_by_hidden_size_per_head(tmp_path):
    changes = {"num_hidden_layers": 46, "intermediate_size": 32, "head_dim": 8}
    base = make_model(tmp_path / "m", "gemma2", query_pre_attn_scalar=16, **changes)
    assert adapter_file(make_trained(base), tmp_path).exists()  # 64 // 4, and not 8


def test_in_pairs_reorders_halves_to_neighboring_pairs():
    rows = mx.arange(12)[:, None]
    assert in_pairs(rows, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert np.array_equal(turned_back(np.array(in_pairs(rows, 2)), 2), np.array(rows))


# Complete files or none


def test_progress_counts_the_bytes_of_the_weights(trained, tmp_path):
    steps = list(gguf.write_model(trained, tmp_path / "m.gguf", "f16"))
    done = [step.done_bytes for step in steps]
    assert done == sorted(done)
    assert done[0] == 0
    sizes = sum(tensor.n_bytes for tensor in library.GGUFReader(tmp_path / "m.gguf").tensors)
    assert done[-1] == steps[-1].total_bytes == sizes


def test_a_stopped_export_leaves_no_files(trained, tmp_path):
    steps = gguf.write_model(trained, tmp_path / "m.gguf", "f32")
    for _ in range(4):
        next(steps)
    steps.close()
    assert not list(tmp_path.glob("*.gguf*"))
    assert not list(tmp_path.glob(".*"))


def test_leftovers_of_killed_processes_are_deleted_but_not_files_in_use(trained, tmp_path):
    killed = tmp_path / ".tmp-m.gguf-killed"
    killed.write_bytes(b"half")
    other = tmp_path / ".tmp-n.gguf-killed"  # of another target
    other.write_bytes(b"half")
    first = gguf.write_model(trained, tmp_path / "m.gguf", "f32")
    next(first)
    assert not killed.exists()
    second = written(trained, tmp_path / "m.gguf").read_bytes()
    assert list(first)[-1].done_bytes > 0
    assert (tmp_path / "m.gguf").read_bytes() == second
    assert [path.name for path in tmp_path.glob(".tmp-*")] == [other.name]


@pytest.mark.parametrize("room_bytes", [0, 10_000, 100_000])
def test_a_write_error_keeps_the_existing_file(trained, tmp_path, room_bytes):
    target = tmp_path / "m.gguf"
    target.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room_bytes, hard))
    try:
        with pytest.raises(UserError, match=r"m.gguf: cannot be written"):
            written(trained, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir() if "m.gguf" in path.name] == ["m.gguf"]


def test_a_missing_target_folder_is_an_error(trained, tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        gguf.write_adapter(trained, tmp_path / "gone" / "a.gguf")


def test_too_little_memory_is_an_error_before_anything_is_written(trained, tmp_path):
    with pytest.raises(UserError, match="--max-memory: exporting this model needs at least"):
        written(trained, tmp_path / "m.gguf", max_memory_gb=0.05)
    assert not list(tmp_path.glob("*.gguf*"))


def test_weights_that_become_unreadable_are_an_error(tmp_path):
    base = make_model(tmp_path / "m", bits=None)
    trained = make_trained(base)
    steps = gguf.write_model(trained, tmp_path / "m.gguf", "f32")
    next(steps)
    with (base / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(RunError, match="can no longer be read"):
        list(steps)
    assert not list(tmp_path.glob("*.gguf*"))


def test_the_file_is_readable_by_other_users(trained, tmp_path):
    assert math.log2(adapter_file(trained, tmp_path).stat().st_mode & 0o004) == 2


def write_gguf(trained: Trained, target: Path) -> None:
    list(gguf.write_model(trained, target, "f32"))


def write_fused(trained: Trained, target: Path) -> None:
    folder = target.with_suffix(".folder")
    list(fuse(trained, folder, to="dequantized"))
    (found,) = folder.glob("model*.safetensors")
    found.rename(target)


@pytest.mark.parametrize(
    ("write", "use_dora"), [(gguf.write_adapter, False), (write_gguf, True), (write_fused, True)]
)
def test_the_export_is_that_of_a_float32_adapter_with_the_same_values(
    tiny_model, tmp_path, write, use_dora
):
    trained = make_trained(tiny_model, use_dora=use_dora, adapter_dtype="bfloat16")
    arrays = trained.adapter.arrays
    assert {a.dtype for n, a in arrays.items() if not n.endswith(".m")} == {mx.bfloat16}
    same = replace(trained.adapter, arrays={n: a.astype(mx.float32) for n, a in arrays.items()})
    write(trained, tmp_path / "rounded")
    write(replace(trained, adapter=same), tmp_path / "same")
    assert (tmp_path / "rounded").read_bytes() == (tmp_path / "same").read_bytes()
