"""What the GGUF files of different model types have; tests/interop/llamacpp runs them."""

from __future__ import annotations

import gguf as library
import mlx.core as mx
import numpy as np
import pytest

from tests.architectures import write_model
from tests.export.gguf_files import fields, kinds, tensors
from tests.export.runs import make_trained
from tests.interop.llamacpp.bases import config_for, write_base
from your_ai.errors import UserError
from your_ai.export import gguf
from your_ai.export.gguf_architectures import KNOWN
from your_ai.export.transformers_names import KNOWN as IN_TRANSFORMERS
from your_ai.nets.model import load_network


def made(folder, name, **changes):
    """A run without effect on a small model, and the model's arrays."""
    base = write_base(folder / "base", name)
    if changes:
        config = config_for(name)
        (config.get("text_config") or config).update(changes)
        write_model(folder / "changed", config["model_type"], **config)
        for file in (folder / "changed").iterdir():
            file.replace(base / file.name)
    trained = make_trained(base, lora_targets=("all-linear",), lora_layers=1)
    return trained, {n: np.array(a) for n, a in mx.load(str(base / "model.safetensors")).items()}


def exported(folder, name, kind="f32", **changes):
    """The arrays of a small model; and the tensors, metadata and types of its GGUF file."""
    trained, arrays = made(folder, name, **changes)
    list(gguf.write_model(trained, folder / "m.gguf", kind))
    return arrays, *(read(folder / "m.gguf") for read in (tensors, fields, kinds))


def test_every_model_type_is_one_of_mlx_lm_and_an_architecture_of_gguf():
    from gguf import MODEL_ARCH_NAMES

    assert {known.architecture for known in KNOWN.values()} <= set(MODEL_ARCH_NAMES.values())
    assert set(KNOWN) <= {kind.removesuffix("_text") for kind in IN_TRANSFORMERS}


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("qwen3_moe", "model.layers.0.mlp.switch_mlp"),
        ("mixtral", "model.layers.0.block_sparse_moe.switch_mlp"),
        ("lfm2_moe", "model.layers.0.feed_forward.switch_mlp"),
    ],
)
def test_experts_are_one_tensor_and_the_router_is_float32(tmp_path, name, ours):
    block = 1 if name == "lfm2_moe" else 0
    arrays, found, settings, written = exported(tmp_path, name, "f16")
    architecture = KNOWN[name].architecture
    for part in ("gate", "up", "down"):
        tensor, path = f"blk.{block}.ffn_{part}_exps.weight", ours.replace(".0.", f".{block}.")
        assert np.allclose(found[tensor], arrays[f"{path}.{part}_proj.weight"], atol=1e-2)
        assert written[tensor] == "F16"
    assert written[f"blk.{block}.ffn_gate_inp.weight"] == "F32"
    assert settings[f"{architecture}.expert_count"] == 4
    assert settings[f"{architecture}.expert_used_count"] == 2


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("gemma4-dense", {"top_k_experts": 2}, "expert"),
        ("qwen3_moe", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope.scaling"),
    ],
)
def test_experts_and_scalings_that_mlx_lm_ignores_are_not_written(tmp_path, name, changes, key):
    _, _, settings, _ = exported(tmp_path, name, **changes)
    assert not [setting for setting in settings if key in setting]


def test_gpt_oss_has_its_sinks_and_float32_biases(tmp_path):
    arrays, found, settings, written = exported(tmp_path, "gpt_oss", "q8_0")
    assert np.allclose(found["blk.2.attn_sinks.weight"], arrays["model.layers.2.self_attn.sinks"])
    assert written["blk.2.ffn_down_exps.weight"] == "Q8_0"
    assert written["blk.2.ffn_down_exps.bias"] == "F32"
    assert settings["gpt-oss.attention.sliding_window"] == 16
    assert settings["gpt-oss.rope.scaling.type"] == "yarn"


def test_mamba_has_its_decay_and_its_matrices(tmp_path):
    arrays, found, settings, written = exported(tmp_path, "granitemoehybrid", "f16")
    mixer = "model.layers.0.mamba"
    assert np.allclose(found["blk.0.ssm_a"], -np.exp(arrays[f"{mixer}.A_log"])[:, None])
    assert found["blk.0.ssm_d"].shape == (8, 1)
    assert found["blk.0.ssm_norm.weight"].shape == (1, 128)
    assert np.allclose(found["blk.0.ssm_conv1d.weight"], arrays[f"{mixer}.conv1d.weight"][..., 0])
    assert {written[f"blk.0.ssm_{name}"] for name in ("a", "d", "conv1d.weight")} == {"F32"}
    both = arrays["model.layers.0.shared_mlp.input_linear.weight"]
    assert np.allclose(found["blk.0.ffn_gate_shexp.weight"], both[:64], atol=1e-2)
    assert np.allclose(found["blk.0.ffn_up_shexp.weight"], both[64:], atol=1e-2)
    assert settings["granitehybrid.attention.head_count_kv"] == [0, 2, 0, 2]
    assert settings["granitehybrid.ssm.inner_size"] == 128


def test_gemma4_says_what_differs_between_blocks(tmp_path):
    arrays, found, settings, _ = exported(tmp_path, "gemma4-dense")
    of = {name.removeprefix("gemma4."): value for name, value in settings.items()}
    assert of["attention.sliding_window_pattern"] == [True, False, True, False]
    assert of["feed_forward_length"] == [64, 64, 128, 128]
    assert (of["rope.freq_base"], of["rope.freq_base_swa"]) == (1e6, 1e4)
    assert found["rope_freqs.weight"].tolist() == pytest.approx([1.0] * 2 + [1e30] * 6)
    scale = arrays["language_model.model.layers.1.layer_scalar"]
    assert np.allclose(found["blk.1.layer_output_scale.weight"], scale)


def value_rows(rows):
    """The rows of two key heads with two value heads each, of 8 rows, as llama.cpp has them."""
    return np.concatenate([rows[8 * head : 8 * head + 8] for head in (0, 2, 1, 3)])


def test_the_value_heads_of_qwen3_5_alternate_between_key_heads(tmp_path):
    arrays, found, _, _ = exported(tmp_path, "qwen3_5")
    mixer = "language_model.model.layers.0.linear_attn"
    qkv = arrays[f"{mixer}.in_proj_qkv.weight"]
    assert np.allclose(found["blk.0.attn_qkv.weight"][:32], qkv[:32])
    assert np.allclose(found["blk.0.attn_qkv.weight"][32:], value_rows(qkv[32:]))
    out = arrays[f"{mixer}.out_proj.weight"]
    assert np.allclose(found["blk.0.ssm_out.weight"], value_rows(out.T).T)
    assert np.allclose(found["blk.0.ssm_dt.bias"], arrays[f"{mixer}.dt_bias"][[0, 2, 1, 3]])
    assert np.allclose(found["blk.0.ssm_a"], -np.exp(arrays[f"{mixer}.A_log"][[0, 2, 1, 3]]))


def test_an_adapter_is_reordered_and_divided_with_its_layer(tmp_path):
    trained = make_trained(
        write_base(tmp_path / "q", "qwen3_5"), lora_targets=("out_proj",), lora_layers="all"
    )
    gguf.write_adapter(trained, tmp_path / "q.gguf")
    ours = trained.adapter.layers["language_model.model.layers.0.linear_attn.out_proj"]
    found = tensors(tmp_path / "q.gguf")
    lora_a = found["blk.0.ssm_out.weight.lora_a"]
    assert np.array_equal(lora_a, value_rows(np.array(ours["lora_a"])).T)
    trained = make_trained(
        write_base(tmp_path / "g", "granitemoehybrid"), "g",
        lora_targets=("input_linear",), lora_layers="all",
    )  # fmt: skip
    gguf.write_adapter(trained, tmp_path / "g.gguf")
    ours = trained.adapter.layers["model.layers.3.shared_mlp.input_linear"]
    found = tensors(tmp_path / "g.gguf")
    for start, name in ((0, "gate"), (64, "up")):
        lora_b = found[f"blk.3.ffn_{name}_shexp.weight.lora_b"]
        assert np.array_equal(lora_b, np.array(ours["lora_b"]).T[start : start + 64])
        lora_a = found[f"blk.3.ffn_{name}_shexp.weight.lora_a"]
        assert np.array_equal(lora_a, np.array(ours["lora_a"]).T)


def test_an_adapter_of_layers_that_llama_cpp_scales_is_refused(tmp_path):
    base = write_base(tmp_path / "m", "gemma4")
    trained = make_trained(
        base, lora_targets=("switch_glu.down_proj",), lora_layers="all", lora_experts=True
    )
    with pytest.raises(UserError, match=r"switch_glu.down_proj in another way, .* with --fused"):
        gguf.write_adapter(trained, tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, r"no_rope_layers is \[1, 0, 1, 0\]"),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types is"),
        ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("cohere2", {"sliding_window_pattern": 2}, "sliding_window_pattern is 2"),
        ("mamba", {"intermediate_size": 64}, "intermediate_size is 64"),
        ("dots1", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("qwen3_5", {"linear_value_head_dim": 16}, "linear_value_head_dim is 16"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias is True"),
        ("falcon_h1", {"attention_bias": True}, "attention_bias is True"),
        ("ernie4_5", {"use_bias": True}, "use_bias is True"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is True"),
        ("dots1", {"mlp_bias": True, "num_key_value_heads": 4}, "mlp_bias is True"),
    ],
)
def test_what_llama_cpp_has_in_its_code_is_required(tmp_path, name, changes, message):
    trained, _ = made(tmp_path, name, **changes)
    with pytest.raises(UserError, match=message):
        list(gguf.write_model(trained, tmp_path / "m.gguf", "f32"))
    with pytest.raises(UserError, match=message):
        gguf.write_adapter(trained, tmp_path / "a.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_experts_are_converted_in_parts(tmp_path, monkeypatch):
    """A part is of rows of one expert, not of whole experts."""
    trained, _ = made(tmp_path, "qwen3_moe")
    list(gguf.write_model(trained, tmp_path / "whole.gguf", "q8_0"))
    sizes, convert = [], gguf.converted

    def watched(*arguments):
        for part in convert(*arguments):
            sizes.append(len(part))
            yield part

    monkeypatch.setattr(gguf, "converted", watched)
    monkeypatch.setattr(gguf, "PART_BYTES", 4096)
    list(gguf.write_model(trained, tmp_path / "parts.gguf", "q8_0"))
    whole, parts = (tensors(tmp_path / f"{name}.gguf") for name in ("whole", "parts"))
    assert all(np.array_equal(whole[name], parts[name]) for name in whole)
    assert max(sizes) <= 4096


def test_memory_for_reordering_is_counted(tmp_path):
    from your_ai.export.gguf_model import arranged, describe

    base = write_base(tmp_path / "m", "qwen3_5")
    network, config = load_network(base, mx.float32)
    arrays = dict(mx.load(str(base / "model.safetensors")))
    work = {t.name: (t.work_bytes, t.array.nbytes)
            for t in arranged(describe(base, network, config), arrays, {})}  # fmt: skip
    assert work["blk.0.ffn_up.weight"][0] == 0
    for name in ("blk.0.ssm_out.weight", "blk.0.attn_qkv.weight"):
        assert work[name][0] >= work[name][1]


def test_whole_numbers_in_config_json_are_written_as_the_type_that_llama_cpp_reads(tmp_path):
    rope = {
        "full_attention": {"rope_theta": 1000000, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 10000, "rope_type": "default"},
    }
    _, found, _, _ = exported(tmp_path, "gemma4-dense", rope_parameters=rope)
    assert found["rope_freqs.weight"].tolist() == [1.0] * 8
    read = library.GGUFReader(tmp_path / "m.gguf").fields
    for key in ("rope.freq_base", "rope.freq_base_swa"):
        assert read[f"gemma4.{key}"].types == [library.GGUFValueType.FLOAT32], key
