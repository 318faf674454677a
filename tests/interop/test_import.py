"""An adapter that PEFT wrote, imported, gives in MLX the logits that it gives in torch."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict

from tests.export.runs import logits
from tests.interop.bases import TOLERANCE, as_torch, largest, load, make_base, torch_logits
from your_ai.errors import UserError
from your_ai.export.untrained_run import import_adapter
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RUNS

pytestmark = pytest.mark.interop


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {name: make_base(folder / name, name) for name in ("llama-untied", "qwen2", "gemma2")}


TOKENS = {"embed_tokens": [9, 3, 5], "lm_head": [9, 3, 5]}


def written(base, folder, **settings):
    """The adapter of random numbers that PEFT has written to `folder`."""
    config = LoraConfig(task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 10, **settings})
    torch.manual_seed(0)
    model = get_peft_model(load(base), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter *= 1 + 0.2 * torch.randn_like(parameter)
            elif any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("qwen2", {"target_modules": ["q_proj", "v_proj"]}),
        ("qwen2", {"target_modules": "all-linear", "use_dora": True}),
        ("gemma2", {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.1}),
        ("llama-untied", {"target_modules": ["up_proj"], "layers_to_transform": [0, 2]}),
        ("llama-untied", {"target_modules": r".*\.[01]\.(self_attn\.q|mlp\.down)_proj"}),
        ("llama-untied", {"target_modules": "all-linear", "exclude_modules": ["o_proj"]}),
        ("llama-untied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("llama-untied", {"target_modules": ["q_proj"], "trainable_token_indices": TOKENS}),
    ],
    ids=["lora", "dora", "rslora", "blocks", "pattern", "excluded", "head", "tokens"],
)
def test_the_logits_are_those_of_peft(bases, tmp_path, architecture, settings):
    base = bases[architecture]
    model = written(base, tmp_path / "tuned", **settings)
    import_adapter(tmp_path / "tuned", None, "back")  # it says where its base is
    trained = open_trained("back")
    assert trained.base == base
    assert largest(logits(trained), torch_logits(model)) < TOLERANCE
    assert largest(logits(trained, adapted=False), torch_logits(model)) > 100 * TOLERANCE


def test_every_number_is_the_same(bases, tmp_path):
    model = written(bases["qwen2"], tmp_path / "tuned", target_modules=["q_proj"])
    import_adapter(tmp_path / "tuned", None, "back")
    theirs = get_peft_model_state_dict(model)
    ours = open_trained("back").adapter.arrays
    for block in range(3):
        path = f"model.layers.{block}.self_attn.q_proj"
        for name, part in (("lora_A", "lora_a"), ("lora_B", "lora_b")):
            array = theirs.pop(f"base_model.model.{path}.{name}.weight")
            assert torch.equal(as_torch(ours[f"{path}.{part}"]).T, array)
    assert not theirs


def test_the_head_can_be_adapted(bases, tmp_path):
    base = bases["llama-untied"]
    model = written(base, tmp_path / "tuned", target_modules=["lm_head", "q_proj"])
    with pytest.raises(UserError, match=r"lm_head.base_layer.weight, a weight of the"):
        import_adapter(tmp_path / "tuned", None, "back")
    model.save_pretrained(tmp_path / "tuned", save_embedding_layers=False)
    import_adapter(tmp_path / "tuned", None, "back")
    assert largest(logits(open_trained("back")), torch_logits(model)) < TOLERANCE


@pytest.mark.parametrize(
    ("settings", "pattern"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embedding"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}, "modules_to_save norm"),
        ({"target_modules": ["q_proj"], "bias": "all"}, "bias all"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "init_lora_weights olora"),
    ],
)
def test_what_mlx_lm_cannot_do_is_refused(bases, tmp_path, settings, pattern):
    written(bases["llama-untied"], tmp_path / "tuned", **settings)
    with pytest.raises(UserError, match=pattern):
        import_adapter(tmp_path / "tuned", None, "back")
    assert not RUNS.exists()
