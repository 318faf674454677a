"""Runs with --init: where their adapters begin, and the weights that these belong to."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from gguf import GGUFReader

from tests.conftest import (
    call,
    flip,
    killed_in,
    losses_of,
    make_model,
    resume,
    train,
    train_once,
    write_rows,
)
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.export import gguf, mlxlm, peft
from your_ai.export.adapter_files import find_adapter
from your_ai.export.fuse_difference import difference
from your_ai.export.fused_weights import fuse
from your_ai.generation import generate
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.nets import model
from your_ai.nets.adapter_kinds import KINDS
from your_ai.nets.lora import fused_rows
from your_ai.nets.rounding import float32_weight, quantization_of
from your_ai.nets.saved_adapter import open_trained, put_adapter
from your_ai.run.folder import RUNS, RunFolder
from your_ai.training import first_adapters
from your_ai.training.first_adapters import STARTS, StartingLayer

TOKENS = mx.random.randint(2, 700, (2, 24), key=mx.random.key(3))
INITS = [("loftq", 4), ("loftq:3", 4), ("pissa", None), ("pissa", 4)]
PLANS = ("fused", "staged", "streamed")


@pytest.fixture
def float_model(tmp_path):
    """Its inputs are multiples of 64, as --quantize needs them."""
    return make_model(tmp_path / "base" / "model", "qwen2", None)


@pytest.fixture
def starting(configure, float_model) -> Callable[..., TrainConfig]:
    """A function that makes the config of two steps on that model."""
    targets = ("q_proj", "mlp.down_proj")
    return partial(configure, model=str(float_model), lora_targets=targets, max_steps=2)


def logits(network: nn.Module) -> mx.array:
    return network(TOKENS).astype(mx.float32)


def weights_of(network: nn.Module) -> dict[str, mx.array]:
    """The weights of all layers in float32, by path."""
    found = network.named_modules()
    layers = [(n, m) for n, m in found if isinstance(m, nn.Linear | nn.QuantizedLinear)]
    return {n: float32_weight(m, quantization_of(m)) for n, m in layers}


def layer_of(bits: int | None, dtype: mx.Dtype = mx.float32, more: Any = 0) -> StartingLayer:
    """A layer of random weights, to which `more` is added."""
    weight = nn.Linear(128, 96, bias=False)
    weight.weight = mx.random.normal((96, 128), key=mx.random.key(1)) + more
    base = weight if bits is None else nn.QuantizedLinear.from_linear(weight, 64, bits)
    return StartingLayer(weight, base, rank=8, scale=2.0, dtype=dtype, seed=0)


def weight_at_start(layer: StartingLayer, found, taken) -> mx.array:
    rows = slice(None)
    return fused_rows(layer.base_rows(taken, rows, []), found, layer.scale, rows)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_loftq_is_the_best_of_its_rank_and_rounds_make_it_closer(bits):
    layer = layer_of(bits)
    exact = layer.weight.weight
    lost = np.array(exact - layer.base_rows(None, slice(None), []), np.float64)
    sizes = np.linalg.svd(lost, compute_uv=False)
    errors = []
    for rounds in (1, 2, 5):
        start = weight_at_start(layer, *STARTS["loftq"](layer, rounds))
        errors.append(float(mx.linalg.norm(exact - start)))
    assert errors[0] == pytest.approx(np.sqrt((sizes[8:] ** 2).sum()), rel=1e-4)
    assert errors[0] < 0.95 * np.linalg.norm(lost)
    assert errors[2] < errors[1] < errors[0]


def test_pissa_leaves_the_weight_and_has_its_largest_part():
    layer = layer_of(None)
    found, taken = STARTS["pissa"](layer, 1)
    exact = layer.weight.weight
    assert mx.allclose(weight_at_start(layer, found, taken), exact, atol=1e-5)
    sizes = np.linalg.svd(np.array(exact, np.float64), compute_uv=False)
    rest = np.linalg.svd(np.array(layer.base_rows(taken, slice(None), [])), compute_uv=False)
    assert rest[0] == pytest.approx(sizes[8], rel=1e-4)


@pytest.mark.parametrize("bits", [2, 4])
def test_pissa_quantizes_the_rest_of_a_matrix_with_large_parts_more_closely(bits):
    u = mx.random.normal((96, 4), key=mx.random.key(5))
    large = u @ mx.random.normal((4, 128), key=mx.random.key(6))
    layer = layer_of(bits, more=large)
    large = layer.weight.weight
    without = mx.linalg.norm(layer.lost_rows(None, slice(None), []))
    error = mx.linalg.norm(large - weight_at_start(layer, *STARTS["pissa"](layer, 1)))
    assert error < 0.8 * without


def test_bfloat16_adapters_are_rounded_before_the_base_loses_their_product():
    layer = layer_of(None, mx.bfloat16)
    found, taken = STARTS["pissa"](layer, 1)
    assert found["lora_a"].dtype == mx.bfloat16
    assert mx.allclose(weight_at_start(layer, found, taken), layer.weight.weight, atol=1e-5)


@pytest.mark.parametrize(("init", "bits"), INITS)
def test_every_plan_trains_the_same_from_there(starting, init, bits):
    given = {"init": init, "quantize": bits}
    runs = [train_once(starting(**given, run=plan, plan=plan)) for plan in PLANS]
    losses = [losses_of(run) for run in runs]
    for run, found in zip(runs[1:], losses[1:], strict=True):
        assert found == pytest.approx(losses[0], rel=1e-5)
        for name in ("start/adapters.safetensors", "base/model.safetensors"):
            first = runs[0].path / name
            assert first.exists() == (run.path / name).exists()
            assert not first.exists() or first.read_bytes() == (run.path / name).read_bytes()


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(("init", "bits"), INITS)
def test_first_checkpoint_computes_what_weights_do(starting, float_model, init, bits, use_dora):
    train_once(starting(init=init, quantize=bits, keep=5, use_dora=use_dora, lora_rank=16))
    trained = open_trained("r", "0")
    exact = model.load_network(float_model, mx.float32)[0]
    if bits is None:
        start = logits(generate.load_run(trained)[0])
        assert mx.allclose(start, logits(exact), rtol=1e-4, atol=1e-4)
    weights, adapter = weights_of(exact), trained.adapter
    plain = weights_of(model.load_network(model_folder(float_model, bits), mx.float32)[0])
    begun = weights_of(model.load_network(model_folder(*trained.source), mx.float32)[0])
    for path, parts in adapter.layers.items():
        fused = KINDS[adapter.kind].fused_rows(begun[path], parts, adapter.scale, slice(None))
        error, before = (mx.linalg.norm(each - weights[path]) for each in (fused, plain[path]))
        assert error < (before if bits else 1e-4), path


MOMENTS = [("largest_part", each) for each in INITS]
MOMENTS += [(at, each) for at in ("put_changed", "open_model") for each in INITS[1:]]


@pytest.mark.parametrize(("at", "start"), MOMENTS)
def test_killed_while_it_is_made_it_gives_the_same_bytes(starting, at, start):
    given = {"init": start[0], "quantize": start[1]}
    whole = train_once(starting(**given, run="whole"))
    with killed_in(first_adapters, at, at=1 if at == "open_model" else 2):
        train(starting(**given, run="killed"))
    run = RunFolder(RUNS / "killed")
    resume(run)
    for file in ("start/adapters.safetensors", "adapter/adapters.safetensors"):
        assert (run.path / file).read_bytes() == (whole.path / file).read_bytes()
    assert losses_of(run) == losses_of(whole)


@pytest.mark.parametrize(("init", "bits"), [("pissa", None), ("loftq:2", 4)])
def test_resumed_runs_end_like_those_that_never_stopped(starting, init, bits):
    whole = train_once(starting(init=init, quantize=bits, max_steps=4, run="whole"))
    run = train_once(starting(init=init, quantize=bits))
    shutil.rmtree(run.base)  # it can be made again
    resume(run, max_steps=4)
    name = "adapter/adapters.safetensors"
    assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_changed_base_weights_are_refused(starting):
    run = train_once(starting(init="pissa"))
    flip(run.base / "model.safetensors")
    with pytest.raises(UserError, match=r"runs/r/base: is missing or was changed.*--init pissa"):
        open_trained("r")
    with pytest.raises(UserError, match=r"the adjusted base changed since the run began"):
        resume(run, max_steps=4)


@pytest.mark.parametrize(("init", "bits"), INITS)
def test_fused_weights_are_those_of_training(starting, float_model, tmp_path, init, bits):
    train_once(starting(init=init, quantize=bits))
    trained, out = open_trained("r"), tmp_path / "out"
    for _ in fuse(trained, out, "dequantized", "float32"):
        pass
    found = logits(model.load_network(out, mx.float32)[0])
    wanted = logits(generate.load_run(trained)[0])
    assert mx.allclose(found, wanted, rtol=1e-4, atol=1e-4)
    measured = difference(trained, out)
    assert measured.fused_loss == pytest.approx(measured.adapted_loss, abs=1e-4)
    exact = model_folder(float_model, bits)
    assert measured.effect < mx.abs(wanted - logits(model.load_network(exact, mx.float32)[0])).max()


@pytest.mark.parametrize("use_dora", [False, True])
def test_exported_adapters_are_added_to_the_base_itself(starting, float_model, tmp_path, use_dora):
    train_once(starting(init="pissa", use_dora=use_dora, max_steps=4))
    trained = open_trained("r")
    wanted = logits(generate.load_run(trained)[0])
    for write, name in ((mlxlm.write, "mlx"), (peft.write, "peft")):
        write(trained, tmp_path / name)
        assert call("import", tmp_path / name, "--model", float_model, "--run", name) == 0
        network = model.load_network(float_model, mx.float32)[0]
        assert not mx.allclose(logits(network), wanted, atol=1e-2)
        put_adapter(network, open_trained(name).adapter)
        assert mx.allclose(logits(network), wanted, rtol=1e-3, atol=1e-3)


def test_adapter_for_llama_cpp_has_twice_the_rank(starting, float_model, tmp_path):
    train_once(starting(init="pissa"))
    trained, file = open_trained("r"), tmp_path / "adapter.gguf"
    gguf.write_adapter(trained, file)
    found = {tensor.name: tensor.data for tensor in GGUFReader(file).tensors}
    down = {part: found[f"blk.2.ffn_down.weight.lora_{part}"] for part in "ab"}
    assert (down["a"].shape[0], down["b"].shape[1]) == (8, 8)
    product = trained.adapter.scale * down["b"] @ down["a"]
    path = "model.layers.2.mlp.down_proj"
    exact = weights_of(model.load_network(float_model, mx.float32)[0])[path]
    begun = weights_of(model.load_network(trained.folder.base, mx.float32)[0])[path]
    parts = trained.adapter.layers[path]
    wanted = fused_rows(begun, parts, trained.adapter.scale, slice(None)) - exact
    assert np.allclose(product, np.array(wanted), atol=1e-5)


@pytest.mark.parametrize(("init", "bits"), INITS)
def test_reference_of_a_preference_is_the_model_at_the_start(starting, init, bits):
    rows = [{"prompt": f"Ask {i}", "chosen": "yes", "rejected": "no"} for i in range(4)]
    data = write_rows(Path("pairs") / "train.jsonl", rows)
    given = {"init": init, "quantize": bits, "learning_rate": 1e-4, "objective": "dpo"}
    run = train(starting(**given, data=str(data), valid="none"))
    assert losses_of(run)[1] == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.parametrize("init", ["loftq", "pissa"])
def test_adapters_are_not_read_without_their_base(starting, init):
    train_once(starting(init=init, quantize=4))
    for source in ("r", "runs/r/adapter"):
        with pytest.raises(UserError, match=f"began with --init {init}, so it is added to other"):
            find_adapter(source, "--from")


def test_base_of_an_evaluation_is_the_model_that_it_began_from(starting, capsys):
    train_once(starting(run="plain"))
    train_once(starting(init="pissa"))
    losses = []
    for run in ("plain", "r"):
        assert call("eval", run, "--json") == 0
        losses.append(json.loads(capsys.readouterr().out)["measures"]["loss"]["base"]["value"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--init", "svd"), "--init 'svd': give loftq, loftq:N with N from 2 to 100, or pissa"),
        (("--init", "loftq:0"), "--init 'loftq:0': give"),
        (("--init", "loftq"), "--init loftq: makes up for what quantization takes away; give --qu"),
        (("--init", "pissa", "--processes", "2"), "--init: is not supported with several"),
        (("--init", "pissa", "--from", "demo"), "--init: the adapters start from those of --from"),
    ],
)
def test_what_does_not_go_together_is_refused(data_folder, capsys, flags, message):
    assert call("train", "--model", "demo", "--data", data_folder, *flags) == 2
    assert message in capsys.readouterr().err
