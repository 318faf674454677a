"""Adapters whose layers differ in rank and scale, in every form in which they are written."""

from __future__ import annotations

import json
import re
import tempfile

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_adapters

from tests.conftest import make_model
from tests.export.gguf_files import fields, tensors
from tests.export.runs import TOKENS, change_config, logits, make_run, make_trained
from tests.export.test_starting import refused, same, started
from your_ai.config.adapter_facts import MATRICES
from your_ai.errors import UserError
from your_ai.export import gguf, mlxlm, peft
from your_ai.export.fused_weights import fuse
from your_ai.export.untrained_run import import_adapter
from your_ai.nets.layer_sizes import as_trained, evened
from your_ai.nets.model import load_network
from your_ai.nets.saved_adapter import open_trained, read_adapter
from your_ai.publish.card import method_of
from your_ai.publish.contents import of_run, write
from your_ai.run import checkpoint

ALL = {"lora_targets": ("all-linear",), "lora_layers": "all"}
# q_proj 4 and 2.5, mlp 6 and 7/6, of the last block 3 and 10/3 or 7/3
MIXED = {**ALL, "lora_rank": "4,mlp=6,block.2=3", "lora_alpha": "10,mlp=7"}
EXPERTS = {**MIXED, "lora_experts": True}
CASES = [
    ("llama", 4, MIXED),
    ("llama", None, {**MIXED, "use_dora": True}),
    ("llama", None, {**MIXED, "adapter_dtype": "bfloat16"}),
    ("qwen3_moe", None, EXPERTS),
]
ROUNDING = 5e-5  # of logits up to 13: a last place of the adapters alone moves them by 2e-5
IDS = ["lora", "dora", "bfloat16", "experts"]


def size_of(path: str) -> tuple[int, float]:
    """The rank and the alpha of a layer under MIXED, by hand."""
    rank = 3 if ".layers.2." in path else 6 if ".mlp." in path else 4
    return rank, 7 if ".mlp." in path else 10


def deltas_of(trained):
    """The change of each weight, (O, I) float64, by hand."""
    found = {}
    for path, parts in trained.adapter.layers.items():
        rank, alpha = size_of(path)
        a, b = (np.array(parts[name].astype(mx.float32), np.float64) for name in MATRICES)
        assert a.shape[1] == b.shape[0] == rank
        found[path] = alpha / rank * (a @ b).T
    return found


def in_checkpoint(trained):
    """The run with an adapter as a checkpoint has it, which is not evened."""
    adapter = trained.adapter
    place = trained.folder.path / "step-000003"
    checkpoint.save_adapter(place, adapter.arrays, adapter.config, step=3)
    found = read_adapter(place)
    return type(trained)(trained.folder, trained.config, found, trained.base)


# mlx-lm


@pytest.mark.parametrize("exported", [False, True], ids=["run", "checkpoint exported"])
@pytest.mark.parametrize(("architecture", "bits", "settings"), CASES, ids=IDS)
def test_mlx_lm_computes_the_same_logits(tmp_path, architecture, bits, settings, exported):
    base = make_model(tmp_path / "base", architecture, bits=bits)
    trained = make_trained(base, **settings)
    place = trained.adapter.folder
    if exported:
        trained, place = in_checkpoint(trained), tmp_path / "out"
        mlxlm.write(trained, place)
    network = load_adapters(load_network(base, mx.float32)[0], str(place))
    network.eval()
    assert mx.allclose(network(TOKENS), logits(trained), rtol=0, atol=ROUNDING)
    assert not mx.allclose(network(TOKENS), logits(trained, adapted=False), rtol=0, atol=1e-2)


@pytest.mark.parametrize(("architecture", "bits", "settings"), CASES, ids=IDS)
def test_evened_adapter_becomes_what_it_was(tmp_path, architecture, bits, settings):
    base = make_model(tmp_path / "base", architecture, bits=bits)
    adapter = in_checkpoint(make_trained(base, **settings)).adapter
    even, config = evened(adapter.arrays, adapter.config)
    assert len({a.shape[1] for name, a in even.items() if name.endswith("lora_a")}) == 1
    back, as_before = as_trained(even, config)
    assert as_before == adapter.config
    for name, array in adapter.arrays.items():
        assert back[name].shape == array.shape
        assert mx.allclose(back[name], array.astype(mx.float32), rtol=3e-7, atol=0), name


def test_ranks_alone_and_halves_of_scales_are_exact(tiny_model):
    trained = make_trained(tiny_model, **ALL, lora_rank="4,mlp=8", lora_alpha=16.0)
    adapter = in_checkpoint(trained).adapter
    back, _ = as_trained(*evened(adapter.arrays, adapter.config))
    assert same(back, adapter.arrays)


def test_plain_adapter_is_written_as_it_is(tiny_model):
    adapter = make_trained(tiny_model, **ALL).adapter
    arrays, config = evened(adapter.arrays, adapter.config)
    assert arrays is adapter.arrays
    assert config is adapter.config


@pytest.mark.parametrize(
    "sizes",
    [
        [], {"a": [1, 2.0]}, {"model.layers.2.self_attn.q_proj": [5, 1.0]},
        {"model.layers.2.self_attn.q_proj": [0, 1.0]}, {"model.layers.2.self_attn.q_proj": [2, 0]},
        {"model.layers.2.self_attn.q_proj": [2, float("nan")]},
        {"model.layers.2.self_attn.q_proj": [2]}, {"model.layers.2.self_attn.q_proj": 2},
    ],
)  # fmt: skip
def test_sizes_that_no_adapter_has_are_refused(tiny_model, sizes):
    run = make_run(tiny_model, lora_layers=1)
    parameters = {"rank": 4, "scale": 2.0, "keys": ["self_attn.q_proj"], "by_layer": sizes}
    change_config(run.adapter, lora_parameters=parameters)
    with pytest.raises(UserError, match=r"adapter_config.json: by_layer"):
        read_adapter(run.adapter)


# PEFT


def as_peft_reads(config, path):
    """(rank, alpha) of a layer, by the rule of peft.utils.other.get_pattern_key."""

    def value(patterns, default):
        keys = (key for key in patterns if re.match(rf"(.*\.)?({key})$", path))
        return patterns.get(next(keys, None), default)

    rank = value(config["rank_pattern"], config["r"])
    return rank, value(config["alpha_pattern"], config["lora_alpha"])


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_peft_finds_the_rank_and_the_alpha_of_each_layer(tiny_model, tmp_path, dora):
    trained = make_trained(tiny_model, use_dora=dora, **MIXED)
    peft.write(trained, tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    arrays = mx.load(str(tmp_path / "out/adapter_model.safetensors"))
    for path in trained.adapter.layers:
        rank, alpha = as_peft_reads(config, path)
        assert (rank, alpha) == size_of(path), path
        assert arrays[f"base_model.model.{path}.lora_A.weight"].shape[0] == rank


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_exported_patterns_are_imported(tiny_model, tmp_path, dora):
    trained = make_trained(tiny_model, use_dora=dora, **MIXED)
    peft.write(trained, tmp_path / "tuned")
    import_adapter(tmp_path / "tuned", str(tiny_model), "back")
    back = open_trained("back")
    assert {p: tuple(s) for p, s in back.adapter.sizes.items()} == {
        path: (rank, pytest.approx(alpha / rank)) for path, (rank, alpha) in
        ((path, size_of(path)) for path in trained.adapter.layers)
    }  # fmt: skip
    assert mx.allclose(logits(back), logits(trained), rtol=0, atol=ROUNDING)
    ranks, alphas = back.adapter.ranks, back.adapter.alphas
    assert (back.config.lora_rank, back.config.lora_alpha) == (ranks.setting, alphas.setting)
    assert ranks.at((0, "mlp.up_proj")) == 6
    assert alphas.at((2, "mlp.up_proj")) == 7


def test_experts_of_several_sizes_are_not_exported_to_peft(tmp_path):
    base = make_model(tmp_path / "base", "qwen3_moe", bits=None)
    settings = {**EXPERTS, "lora_targets": ("q_proj", "switch_mlp.up_proj")}
    with pytest.raises(UserError, match="has layers of different ranks or scales beside experts"):
        peft.write(make_trained(base, **settings), tmp_path / "out")


# Weights


def test_fused_weights_have_the_products_with_their_own_scales(tmp_path):
    base = make_model(tmp_path / "base", bits=None)
    trained = make_trained(base, **MIXED)
    list(fuse(trained, tmp_path / "out", "same"))
    files = (next(folder.glob("*.safetensors")) for folder in (base, tmp_path / "out"))
    before, after = (
        {name: np.array(array, np.float64) for name, array in mx.load(str(file)).items()}
        for file in files
    )
    for path, delta in deltas_of(trained).items():
        found = after[f"{path}.weight"] - before[f"{path}.weight"]
        assert np.abs(found - delta).max() < 1e-6, path


def test_llama_cpp_scales_each_layer_as_it_was_trained(tmp_path):
    """It multiplies B A with adapter.lora.alpha over the rank of the tensor."""
    base = make_model(tmp_path / "base", bits=None)
    trained = make_trained(base, **{**MIXED, "lora_targets": ("o_proj", "up_proj")})
    gguf.write_adapter(trained, tmp_path / "a.gguf")
    found, alpha = tensors(tmp_path / "a.gguf"), fields(tmp_path / "a.gguf")["adapter.lora.alpha"]
    names = {"self_attn.o_proj": "attn_output", "mlp.up_proj": "ffn_up"}
    for path, delta in deltas_of(trained).items():
        block, name = re.search(r"layers\.(\d+)\.(.*)", path).groups()
        a, b = (found[f"blk.{block}.{names[name]}.weight.lora_{part}"] for part in "ab")
        assert np.abs(alpha / len(a) * b @ a - delta).max() < 1e-6, path


# A run that starts from it


@pytest.mark.parametrize("given", [{}, {"lora_rank": MIXED["lora_rank"]}, MIXED])
def test_run_starts_with_the_same_ranks_and_scales(tiny_model, given):
    trained = make_trained(tiny_model, **MIXED)
    given = {n: ",".join(v) if isinstance(v, tuple) else v for n, v in given.items()}
    _, start = started("r", model=str(tiny_model), **given)
    assert same(start.arrays, trained.adapter.arrays)
    assert start.sizes.keys() == trained.adapter.sizes.keys()
    for path, size in start.sizes.items():
        rank, alpha = size_of(path)
        assert size == (rank, pytest.approx(alpha / rank))


@pytest.mark.parametrize(
    "flags",
    [{"lora_rank": "4,mlp=5,block.2=3"}, {"lora_alpha": "10,mlp=8"}, {"lora_rank": "4"},
     {"lora_rank": "auto,mlp=6,block.2=3"}],
)  # fmt: skip
def test_other_ranks_or_scales_are_refused(tiny_model, flags):
    make_run(tiny_model, **MIXED)
    refused("r", "leave .*(out|setting)", model=str(tiny_model), **flags)


@pytest.mark.parametrize("place", ["run", "checkpoint"])
def test_pushed_adapter_is_what_mlx_lm_loads(tiny_model, tmp_path, monkeypatch, place):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trained = make_trained(tiny_model, **MIXED)
    trained = in_checkpoint(trained) if place == "checkpoint" else trained
    pushed = write(of_run(trained, "someone/mine"))
    network = load_adapters(load_network(tiny_model, mx.float32)[0], str(pushed))
    network.eval()
    assert mx.allclose(network(TOKENS), logits(trained), rtol=0, atol=ROUNDING)
    assert read_adapter(pushed).sizes == trained.adapter.sizes


@pytest.mark.parametrize("shape", [(3,), (8, 1), (2, 8, 1)])
def test_arrays_of_other_shapes_are_refused(tiny_model, shape):
    trained = make_trained(tiny_model, **MIXED)
    name = "model.layers.2.self_attn.q_proj.lora_a"
    arrays, config = evened(trained.adapter.arrays, trained.adapter.config)
    checkpoint.save_adapter(
        trained.adapter.folder, {**arrays, name: mx.zeros(shape)}, config, step=3
    )
    with pytest.raises(UserError, match=r"does not fit the model: .*lora_a is "):
        logits(open_trained("r"))


def test_card_says_what_differs(tiny_model):
    trained = make_trained(tiny_model, lora_rank="4,block.1=8", lora_layers=2)
    assert method_of(trained).sizes == "rank 4,block.1.self_attn.q_proj=8, alpha 10"
