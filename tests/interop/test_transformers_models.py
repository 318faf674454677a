"""Every architecture that `--to hf` supports: transformers reads the export and computes the same.

The base is a small random model with an adapter on all linear layers, those of experts included.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from transformers.core_model_loading import revert_weight_conversion

from tests.export.fused_runs import assert_same_bytes
from tests.export.runs import TOKENS, logits, make_trained
from tests.export.transformers_bases import NAMES, settings_of, write_base
from tests.interop.bases import TOLERANCE, largest, load, torch_logits
from your_ai.export import huggingface, peft
from your_ai.export.names import SAME_LAYERS, block_of, name_in_block
from your_ai.export.peft_experts import CONVERTED
from your_ai.export.transformers_names import EXPERT_NAMES, KNOWN, is_in_peft
from your_ai.export.transformers_weights import as_transformers
from your_ai.export.untrained_run import import_adapter
from your_ai.modelfiles.shards import Lazy
from your_ai.nets.model import LINEAR, load_network
from your_ai.nets.saved_adapter import open_trained, put_adapter

pytestmark = pytest.mark.interop
EVERYTHING = {"lora_targets": ("all-linear",), "lora_layers": "all", "lora_experts": True}
# transformers writes the dense layers of kimi_linear under the name that the others have.
OTHER_NAMES = ("kimi_linear",)


def logits_with_cache(trained) -> mx.array:
    """Of TOKENS. Without a cache, mlx-lm's gemma3n does not share keys and values."""
    network, _ = load_network(trained.base, mx.float32)
    put_adapter(network, trained.adapter)
    return network(TOKENS, cache=make_prompt_cache(network))


def written(model) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What transformers would write: shape and dtype by name, without what is stored once."""
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    state = revert_weight_conversion(model, state)
    return {name: (tuple(array.shape), array.dtype) for name, array in state.items()}


def ignored(model, name: str) -> bool:
    """Whether transformers says that it does not read this tensor."""
    lists = (part._keys_to_ignore_on_load_unexpected for part in (model, model.base_model))
    return any(re.search(pattern, name) for patterns in lists for pattern in patterns or ())


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_every_tensor_and_gives_the_same_logits(name, tmp_path):
    trained = make_trained(write_base(tmp_path / "base", name), **EVERYTHING)
    list(huggingface.write(trained, tmp_path / "out"))
    model = load(tmp_path / "out")
    ours = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        ours |= mx.load(str(file))
    found = {n: (array.shape, getattr(torch, str(array.dtype)[9:])) for n, array in ours.items()}
    if name not in OTHER_NAMES:
        assert {n: f for n, f in found.items() if not ignored(model, n)} == written(model)
    assert largest(logits_with_cache(trained), torch_logits(model)) < TOLERANCE


def hub_form(base: Path) -> Path:
    """The model in the form of transformers, beside it; mlx-lm reads it too."""
    weights, config = mx.load(str(base / "model.safetensors")), settings_of(base.name)
    theirs = as_transformers(Lazy(weights, 0, config, False, {}), KNOWN[config["model_type"]])
    there = shutil.copytree(base, base.with_name("hub"))
    arrays = {name: mx.contiguous(array) for name, array in theirs.arrays.items()}
    mx.save_safetensors(str(there / "model.safetensors"), arrays, {"format": "pt"})
    (there / "config.json").write_text(json.dumps(theirs.config))
    return there


def adaptable(base: Path, kind: str) -> list[str]:
    """The linear layers in blocks that PEFT adapts, by their names in a block."""
    network, _ = load_network(base, mx.float32)
    found = {
        name_in_block(path)
        for path, layer in network.named_modules()
        if isinstance(layer, LINEAR) and layer.weight.ndim == 2 and block_of(path) is not None
        if is_in_peft(KNOWN[kind], path)
    }
    return sorted(found)


@pytest.mark.parametrize("kind", SAME_LAYERS)
def test_peft_adapts_the_same_layers_and_import_reads_them_back(kind, tmp_path):
    base = hub_form(write_base(tmp_path / kind, kind))
    targets = adaptable(base, kind)
    trained = make_trained(base, lora_targets=tuple(targets), lora_layers="all")
    peft.write(trained, tmp_path / "out")
    plain = load(base)
    assert largest(logits(trained, adapted=False), torch_logits(plain)) < TOLERANCE
    model = PeftModel.from_pretrained(plain, tmp_path / "out").eval()
    names = mx.load(str(tmp_path / "out/adapter_model.safetensors")).keys()
    assert get_peft_model_state_dict(model).keys() == names
    theirs = torch_logits(model)
    assert largest(logits(trained), theirs) < TOLERANCE
    assert largest(logits(trained, adapted=False), theirs) > 100 * TOLERANCE

    import_adapter(tmp_path / "out", str(base), "back")
    assert_same_bytes(open_trained("back").adapter.arrays, trained.adapter.arrays)


@pytest.mark.parametrize("kind", CONVERTED)
def test_peft_adapts_experts_and_import_reads_them_back(kind, tmp_path):
    base = hub_form(write_base(tmp_path / kind, kind))
    targets = [*adaptable(base, kind), *(f"switch_mlp.{name}" for name in EXPERT_NAMES)]
    trained = make_trained(base, lora_targets=tuple(targets), lora_layers="all")
    peft.write(trained, tmp_path / "out")
    model = PeftModel.from_pretrained(load(base), tmp_path / "out").eval()
    names = [name for name, _ in model.named_parameters() if "lora_A" in name]
    assert any(".experts." in name for name in names)  # one matrix for all experts
    theirs = torch_logits(model)
    assert largest(logits(trained), theirs) < TOLERANCE
    arrays = trained.adapter.arrays
    without = {n: mx.zeros_like(a) if "switch_mlp" in n else a for n, a in arrays.items()}
    dense = replace(trained, adapter=replace(trained.adapter, arrays=without))
    assert largest(logits(dense), theirs) > 100 * TOLERANCE

    import_adapter(tmp_path / "out", str(base), "back")
    assert_same_bytes(open_trained("back").adapter.arrays, arrays)


def can_be_quantized(_: str, layer: nn.Module) -> bool:
    return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 32 == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {"bits": 4}),
        ("deepseek_v3", {"bits": 8}),
        ("gpt_oss", {"bits": 4, "mode": "mxfp4"}),
        ("qwen3_5_moe", {"bits": 4}),
    ],
)
def test_quantized_experts_are_dequantized(name, settings, tmp_path):
    base = write_base(tmp_path / "base", name)
    network, config = load_network(base, mx.float32)
    nn.quantize(network, 32, **settings, class_predicate=can_be_quantized)
    config["quantization"] = {"group_size": 32, **settings}
    (base / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(network.parameters()))
    assert any("experts" in n or "switch_mlp" in n for n in weights if n.endswith(".scales"))
    mx.save_safetensors(str(base / "model.safetensors"), weights, {"format": "mlx"})
    trained = make_trained(base, **EVERYTHING)
    list(huggingface.write(trained, tmp_path / "out", dtype="float32"))
    assert "quantization" not in (tmp_path / "out/config.json").read_text()
    assert largest(logits_with_cache(trained), torch_logits(load(tmp_path / "out"))) < TOLERANCE
