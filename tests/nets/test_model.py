"""Loading, LoRA layers, keyed dropout, and the split before the head."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm import load as mlx_lm_load
from mlx_lm.models.bitlinear_layers import BitLinear

from tests.conftest import call, change_json, load_base, make_model, peak_of
from your_ai.config import ADDED, TrainConfig
from your_ai.errors import UserError
from your_ai.nets import model
from your_ai.nets.split import split as split_in_two
from your_ai.run import checkpoint
from your_ai.run.folder import RUNS

ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]
TOKENS = mx.array([[5, 300, 17, 42, 99, 260, 700]])


def adapted(folder, seed=3, **settings):
    """A model with nonzero adapters."""
    network, _ = load_base(folder, mx.float32)
    adapters = model.add_adapters(network, TrainConfig(**{"lora_layers": 2, **settings}))
    mx.random.seed(seed)
    arrays = tree_map(lambda p: p + 0.1 * mx.random.normal(p.shape), network.trainable_parameters())
    network.update(arrays)
    return network, adapters


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mlx_lm_with_the_saved_adapter_gives_the_same_logits(tmp_path, architecture, dora):
    folder = make_model(tmp_path / "m", architecture)
    network, adapters = adapted(folder, lora_targets=("all-linear",), use_dora=dora)
    path = tmp_path / "adapter"
    checkpoint.save_adapter(path, model.adapter_arrays(network), adapters.config, 1)
    theirs, _ = mlx_lm_load(str(folder), adapter_path=str(path))
    base, _ = mlx_lm_load(str(folder))
    ours = network(TOKENS)
    assert mx.allclose(ours, theirs(TOKENS), rtol=1e-5, atol=1e-5)
    assert not mx.allclose(ours, base(TOKENS), rtol=1e-2, atol=1e-2)  # the adapter does something


STRETCHED = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "old", "new"),
    [
        (
            "llama",
            {"rope_theta": 5e5, "rope_scaling": STRETCHED},
            {"rope_theta": 5e5, **STRETCHED, "rope_type": "llama3"},
        ),
        ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            "gemma3_text",
            {"rope_theta": 3e5, "rope_local_base_freq": 2e4},
            {
                "full_attention": {"rope_theta": 3e5, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"},
            },
        ),
    ],
)
def test_reads_rope_parameters_of_transformers_5(tmp_path, architecture, old, new):
    folder = make_model(tmp_path / "m", architecture, **old)
    wanted = load_base(folder, mx.float32)[0](TOKENS)
    path = folder / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k not in old}
    path.write_text(json.dumps(config))
    assert not mx.allclose(load_base(folder, mx.float32)[0](TOKENS), wanted, atol=1e-3)
    path.write_text(json.dumps({**config, "rope_parameters": new}))
    assert mx.array_equal(load_base(folder, mx.float32)[0](TOKENS), wanted)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_split_gives_the_logits_of_the_whole_model(tmp_path, architecture):
    network, _ = load_base(make_model(tmp_path / "m", architecture), mx.float32)
    split = split_in_two(network)
    assert split.hidden
    assert mx.array_equal(split.head(split.trunk(TOKENS)), network(TOKENS))


def test_trunk_is_the_whole_model_if_it_cannot_be_split(tiny_model):
    network, _ = load_base(tiny_model, mx.float32)

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network

        def __call__(self, tokens: mx.array) -> mx.array:
            return self.inner(tokens) * 2

    split = split_in_two(Odd())
    assert not split.hidden
    assert mx.array_equal(split.head(split.trunk(TOKENS)), network(TOKENS) * 2)


def test_new_adapters_do_not_change_the_logits(tiny_model):
    network, _ = load_base(tiny_model, mx.float32)
    before = network(TOKENS)
    model.add_adapters(network, TrainConfig(lora_targets=("all-linear",), lora_layers="all"))
    assert mx.array_equal(network(TOKENS), before)


def test_adapter_initialization_depends_only_on_the_seed(tiny_model):
    def draw(seed: int) -> dict[str, mx.array]:
        network, _ = load_base(tiny_model, mx.float32)
        model.add_adapters(network, TrainConfig(seed=seed, lora_layers=2))
        return model.adapter_arrays(network)

    first = draw(0)
    mx.random.seed(12345)
    again, other = draw(0), draw(1)
    assert all(mx.array_equal(first[n], again[n]) for n in first)
    assert not any(mx.array_equal(first[n], other[n]) for n in first if n.endswith("lora_a"))


def test_only_targets_in_the_last_blocks_are_trained(tiny_model):
    network, _ = load_base(tiny_model, mx.float32)
    model.add_adapters(network, TrainConfig(lora_layers=1, lora_targets=("v_proj", "mlp.up_proj")))
    names = {n.rsplit(".", 1)[0] for n, _ in tree_flatten(network.trainable_parameters())}
    assert names == {"model.layers.2.self_attn.v_proj", "model.layers.2.mlp.up_proj"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_targets": ("qq_proj",)}, "did you mean q_proj.*down_proj, gate_proj"),
        ({"lora_layers": 4}, "the model has 3 blocks"),
    ],
)
def test_impossible_adapters_are_refused(tiny_model, settings, message):
    network, _ = load_base(tiny_model, mx.float32)
    with pytest.raises(UserError, match=message):
        model.add_adapters(network, TrainConfig(**{"lora_layers": 2, **settings}))


def test_adapter_of_another_shape_is_refused(tiny_model):
    network, _ = adapted(tiny_model, lora_rank=4)
    other, _ = adapted(tiny_model, lora_rank=8)
    with pytest.raises(UserError, match="does not fit the model"):
        model.set_adapters(network, model.adapter_arrays(other))


def test_adapters_patch_no_class(tiny_model):
    before = {c: c.__call__ for c in (nn.Linear, nn.QuantizedLinear, nn.Dropout)}
    adapted(tiny_model, lora_dropout=0.5)
    assert {c: c.__call__ for c in before} == before


@pytest.mark.parametrize(
    ("blocks", "layers", "adapted"), [(6, "auto", 6), (6, "all", 6), (6, 2, 2), (6, None, 4)]
)
def test_adapts_all_blocks_by_default_and_four_in_old_runs(tmp_path, blocks, layers, adapted):
    network, _ = load_base(make_model(tmp_path / "m", num_hidden_layers=blocks), mx.float32)
    config = TrainConfig(lora_layers=layers)
    assert model.add_adapters(network, config).config["num_layers"] == adapted


def test_unknown_architecture_is_named_in_the_error(tmp_path):
    folder = make_model(tmp_path / "m")
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama9"'))
    with pytest.raises(UserError, match="lama9 not supported"):
        load_base(folder, mx.float32)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_base_is_cast_to_dtype_but_adapters_stay_float32(tiny_model, dtype):
    network, _ = load_base(tiny_model, dtype)
    model.add_adapters(network, TrainConfig(lora_layers=2))
    assert network.model.norm.weight.dtype == dtype
    assert network.model.layers[0].mlp.up_proj.scales.dtype == dtype
    assert {p.dtype for p in model.adapter_arrays(network).values()} == {mx.float32}
    assert network(TOKENS).dtype == dtype


def keys(*values: int) -> mx.array:
    return mx.array(values, mx.uint32)


def dropped(rows: mx.array, layer: int = 7, tokens: int = 64, features: int = 256, p: float = 0.25):
    places = mx.arange(tokens, dtype=mx.uint32)[None]
    holder = model.DropoutKeys([model.TokenKeys(rows[:, None], places)])
    layer = model.KeyedDropout(p, layer, holder)
    return np.array(layer(mx.ones((rows.size, tokens, features))))


def test_dropout_drops_the_right_share_and_rescales():
    x = dropped(keys(1, 2, 3, 4))
    assert set(np.unique(x)) == {0.0, np.float32(1 / 0.75)}
    assert (x == 0).mean() == pytest.approx(0.25, abs=0.005)
    assert (x == 0).mean(axis=(0, 1)) == pytest.approx(0.25, abs=0.12)  # every feature
    assert (x == 0).mean(axis=(0, 2)) == pytest.approx(0.25, abs=0.06)  # every position


def test_dropout_is_independent_across_rows_layers_positions_and_features():
    a, b = dropped(keys(1, 2)) == 0
    c = dropped(keys(1), layer=8)[0] == 0
    for other in (b, c, np.roll(a, 1, axis=0), np.roll(a, 1, axis=1)):
        assert (a & other).mean() == pytest.approx(0.25**2, abs=0.01)


def test_dropout_of_a_row_does_not_depend_on_its_batch():
    together = dropped(keys(10, 11, 12), tokens=96)
    alone = dropped(keys(11), tokens=64)
    assert np.array_equal(together[1, :64], alone[0])


def test_dropout_of_a_packed_text_equals_that_of_a_separate_row():
    apart = dropped(keys(10, 11), tokens=40)
    rows = mx.array([[10] * 40 + [11] * 40], mx.uint32)
    places = mx.concatenate([mx.arange(40, dtype=mx.uint32)] * 2)[None]
    layer = model.KeyedDropout(0.25, 7, model.DropoutKeys([model.TokenKeys(rows, places)]))
    together = np.array(layer(mx.ones((1, 80, 256))))
    assert np.array_equal(together[0], apart.reshape(80, 256))


def test_dropout_without_keys_is_the_identity():
    x = mx.ones((1, 4, 8))
    assert mx.array_equal(model.KeyedDropout(0.9, 1, model.DropoutKeys([None]))(x), x)


def test_experts_support_adapters_but_not_dropout(tmp_path):
    folder = make_model(tmp_path / "m", "qwen3_moe")
    network, _ = load_base(folder, mx.float32)
    with pytest.raises(UserError, match="--lora-dropout: not supported on the expert layers"):
        model.add_adapters(network, TrainConfig(lora_layers=1, lora_experts=True, lora_dropout=0.1))
    config = TrainConfig(lora_layers=1, lora_targets=("up_proj",), lora_experts=True)
    adapters = model.add_adapters(network, config)
    assert adapters.config["lora_parameters"]["keys"] == ["mlp.switch_mlp.up_proj"]


def test_experts_get_adapters_only_if_they_are_named(tmp_path):
    folder = make_model(tmp_path / "m", "qwen3_moe")
    network, _ = load_base(folder, mx.float32)
    attention = [f"self_attn.{letter}_proj" for letter in "kqvo"]

    def found(*targets: str, experts: bool = False) -> list[str]:
        config = TrainConfig(lora_targets=targets, lora_experts=experts)
        return sorted(model.adapted_layers(network, config)[1])

    assert found("all-linear") == sorted(["mlp.gate", *attention])
    experts = [f"mlp.switch_mlp.{name}_proj" for name in ("down", "gate", "up")]
    assert found("all-linear", experts=True) == sorted(["mlp.gate", *experts, *attention])
    assert ADDED["lora_experts"]  # old runs resume with the adapters that they began with
    assert found("q_proj", "switch_mlp.up_proj") == [experts[2], "self_attn.q_proj"]
    only = r"--lora-targets up_proj: only routed experts .*--lora-experts, or a path: mlp\.switch"
    with pytest.raises(UserError, match=only):
        found("up_proj")


def test_ternary_layers_are_refused():
    block = nn.Sequential(BitLinear(8, 8, bias=False))
    with pytest.raises(UserError, match=r"ternary \(BitLinear\), which cannot be adapted"):
        model.find_targets([block], TrainConfig())


def test_model_that_fails_on_a_short_row_is_refused(tiny_model):
    config = TrainConfig(lora_layers=1, lora_dropout=0.5)
    network, _ = load_base(tiny_model, mx.float32)
    adapters = model.add_adapters(network, config)
    model.check_forward_pass(network, adapters, config)
    assert adapters.dropout_keys.current is None

    class Stepwise(nn.Module):
        """Calls a layer with one token, as some state-space models do."""

        def __call__(self, tokens: mx.array) -> mx.array:
            return network.layers[-1].self_attn.q_proj(mx.zeros((1, 32)))

    with pytest.raises(UserError, match="--lora-dropout: not supported with these --lora-targets"):
        model.check_forward_pass(Stepwise(), adapters, config)
    network.model.layers = []
    del network.model["norm"]
    with pytest.raises(UserError, match="the model fails on a short row"):
        model.check_forward_pass(network, adapters, config)


# -- custom code in a model folder


@pytest.fixture
def foreign(tmp_path):
    """A model folder with Python code, which creates the file `ran` if it is executed."""
    folder = make_model(tmp_path / "foreign")
    code = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass T: pass\n"
    for name in ("code.py", "tokenization_code.py"):
        (folder / name).write_text(code)
    return folder


@pytest.fixture
def never_asked(monkeypatch):
    """Records every prompt, and answers it with yes."""
    asked = []
    monkeypatch.setattr("builtins.input", lambda text="": asked.append(text) or "y")
    return asked


CODE = {"AutoTokenizer": ["code.T", None], "AutoConfig": "code.T", "AutoProcessor": "code.T"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"auto_map": CODE, "tokenizer_class": "CodeTokenizer"}, "is custom Python code"),
        ({"auto_map": ["code.T", None], "tokenizer_class": "CodeTokenizer"}, "Python code"),
        ({"auto_map": "code.T"}, "cannot be loaded"),
        ({"tokenizer_class": "AutoTokenizer"}, "AutoTokenizer: is not a tokenizer"),
        ({"tokenizer_class": "AutoConfig"}, "AutoConfig: is not a tokenizer"),
        ({"tokenizer_class": "AutoModelForCausalLM"}, "is not a tokenizer"),
        ({"tokenizer_class": "RagTokenizer"}, "RagTokenizer: is not a tokenizer"),
        ({"tokenizer_class": "pipeline"}, "pipeline: is not a tokenizer"),
        ({"tokenizer_class": ["x"]}, "a list: is not a tokenizer"),
        ({"tool_parser_type": "..utils"}, "is not a name that mlx-lm knows"),
        ({"tool_parser_type": 7}, "is not a name that mlx-lm knows"),
        ({"chat_template_type": "a/b"}, "is not a name that mlx-lm knows"),
        ({"fast_tokenizer_files": ["/etc/tokenizer.4.0.json"]}, "points outside its folder"),
        ({"gguf_file": "/etc/x.gguf"}, "gguf_file"),
        ({"chat_template": [{"name": "../x", "template": "x"}]}, "points outside its folder"),
    ],
)
def test_loading_a_tokenizer_runs_no_custom_code_and_never_prompts(
    foreign, never_asked, changes, reason
):
    change_json(foreign, "tokenizer_config.json", **changes)
    change_json(foreign, "config.json", auto_map=CODE)
    with pytest.raises(UserError, match=reason) as caught:
        load_base(foreign, mx.float32)
    assert "\n" not in str(caught.value)
    assert never_asked == []
    assert not (foreign.parent / "ran").exists()


def test_unused_code_next_to_a_known_model_is_ignored(foreign, never_asked):
    """As in many published models that transformers now supports itself."""
    change_json(foreign, "tokenizer_config.json", auto_map=CODE)
    change_json(foreign, "config.json", auto_map=CODE)
    load_base(foreign, mx.float32)
    assert never_asked == []
    assert not (foreign.parent / "ran").exists()


def test_model_with_custom_code_is_refused(foreign, never_asked):
    change_json(foreign, "config.json", model_file="code.py")
    with pytest.raises(
        UserError, match=r"model_file code\.py: the model needs its own Python code"
    ):
        load_base(foreign, mx.float32)
    assert not (foreign.parent / "ran").exists()


@pytest.mark.parametrize("command", ["train", "plan"])
def test_no_run_is_created_for_a_model_with_custom_code(
    foreign, never_asked, data_folder, capsys, command
):
    change_json(foreign, "tokenizer_config.json", auto_map=CODE, tokenizer_class="CodeTokenizer")
    options = ("--model", str(foreign), "--data", str(data_folder), "--max-steps", 1)
    assert call(command, *options) == 2
    assert "is custom Python code" in capsys.readouterr().err
    assert not RUNS.exists()
    assert never_asked == []


# -- the rank


@pytest.mark.parametrize("bits", [None, 4])
def test_rank_above_every_dimension_is_refused_before_adding_adapters(tmp_path, bits):
    network, _ = load_base(make_model(tmp_path / "m", bits=bits), mx.float32)
    config = TrainConfig(lora_rank=129, lora_targets=("all-linear",))
    with pytest.raises(UserError, match=r"--lora-rank 129: .* at most 128 inputs or outputs"):
        model.add_adapters(network, config)
    assert not any("lora_a" in module for _, module in network.named_modules())
    model.add_adapters(network, dataclasses.replace(config, lora_rank=128))


@pytest.mark.memory
def test_adapters_in_a_file_are_read_one_after_the_other(tmp_path):
    """Old and new ones together would be twice the adapters."""
    network, _ = model.load_network(make_model(tmp_path / "m", hidden_size=256), mx.float32)
    settings = {"lora_layers": "all", "lora_targets": ("all-linear",), "lora_rank": 128}
    model.add_adapters(network, TrainConfig(**settings))
    mx.eval(network.parameters())
    arrays = model.adapter_arrays(network)
    whole = sum(array.nbytes for array in arrays.values())
    largest = max(array.nbytes for array in arrays.values())
    assert largest < whole / 8
    path = tmp_path / "adapters.safetensors"
    checkpoint.save_arrays(path, {name: array + 1 for name, array in arrays.items()})
    wanted = float(arrays["model.layers.0.self_attn.q_proj.lora_b"].sum())
    del arrays
    mx.clear_cache()
    assert peak_of(lambda: model.set_adapters(network, mx.load(str(path)))) < 2 * largest
    found = model.adapter_arrays(network)["model.layers.0.self_attn.q_proj.lora_b"]
    assert float(found.sum()) == pytest.approx(wanted + found.size)
