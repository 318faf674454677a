"""Estimates: what must hold of any, and how far they are from what was measured."""

from __future__ import annotations

import gc
import importlib
import math
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_map

from tests.conftest import TINY, make_model, peak_of
from tests.memory.test_facts import tensors_in, write_headers
from tests.scheduling import compute_in_order
from your_ai.config import TrainConfig
from your_ai.config.adapter_facts import DORA, FULL, LORA
from your_ai.config.optimizers import OPTIMIZERS
from your_ai.doctor import our_plans
from your_ai.doctor.contest import Contest, contest_batches, contest_tokens
from your_ai.doctor.shapes import SHAPES, make_shape
from your_ai.engine.build import build_engine
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.gradients import HeldGradients
from your_ai.engine.measure_costs import batch_of, measure_costs
from your_ai.engine.weights import open_model, tensors_of
from your_ai.hub.config_values import GROUP_SIZE
from your_ai.memory.costs import Shape
from your_ai.memory.estimate import (
    Estimate,
    Plan,
    Training,
    Workload,
    adapter_bytes,
    estimate,
    noise_bytes,
    read_bytes,
    weights_bytes,
)
from your_ai.memory.estimate_adapters import largest_array, optimizer_bytes, reduction_bytes
from your_ai.memory.estimate_generation import generation_bytes
from your_ai.memory.estimate_kept import step_cost
from your_ai.memory.facts import BlockFacts, ModelFacts, facts_of
from your_ai.memory.guess import costs_of
from your_ai.nets import model
from your_ai.nets.model import TokenKeys
from your_ai.nets.neftune import Neftune, uniform_noise
from your_ai.training import optimizer

ENGINES = ("fused", "staged", "streamed")
TARGETS = (("q_proj",), ("q_proj", "v_proj"), ("all-linear",))
FEW, ALL = ("4", "q_proj"), ("all", "all-linear")  # layers and targets of the adapters
CLOSE = {"fused": 0.13, "staged": 0.07, "streamed": 0.07, "kept": 0.04}  # of the measured peak


@st.composite
def any_facts(draw) -> ModelFacts:
    """Of a model between a toy and one of 70 billion parameters, quantized or not."""
    hidden, blocks = 64 * draw(st.integers(1, 128)), draw(st.integers(1, 80))
    wide, number = hidden * draw(st.integers(1, 5)), draw(st.sampled_from([2, 4]))
    linears = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden, hidden // draw(st.sampled_from([1, 4, 8]))),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    quantized = draw(st.booleans())
    share = 0.5625 if quantized else number
    block = int(share * sum(i * o for i, o in linears.values()))
    vocabulary = draw(st.integers(256, 262144))
    return ModelFacts(
        kinds=(BlockFacts(linears, block),),
        order=(0,) * blocks,
        hidden=hidden,
        vocabulary=vocabulary,
        heads=draw(st.integers(1, 64)),
        float_bytes=number,
        vocabulary_bytes=int(share * vocabulary * hidden),
        rest_bytes=number * hidden,
        quantized=quantized,
    )


@st.composite
def any_training(draw, facts: ModelFacts) -> Training:
    return Training(
        blocks=draw(st.integers(1, facts.blocks)),
        rank=draw(st.integers(1, 128)),
        targets=draw(st.sampled_from(TARGETS)),
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        adapter=draw(st.sampled_from([LORA, DORA])),
    )


@st.composite
def cases(draw) -> tuple[Workload, Plan, int, int]:
    """workload, plan, rows and tokens."""
    facts = draw(any_facts())
    plan = Plan(draw(st.sampled_from(ENGINES)), 10**9, draw(st.booleans()))
    rows, tokens = draw(st.integers(1, 32)), draw(st.integers(1, 8192))
    return Workload(facts=facts, training=draw(any_training(facts))), plan, rows, tokens


def in_process(workload: Workload, **facts: Any) -> Workload:
    """The workload in a process with other facts."""
    return replace(workload, process=replace(workload.process, **facts))


def changed(case: tuple[Workload, Plan, int, int], **options: Any) -> Estimate:
    """The estimate of a case whose workload has other fields."""
    workload, *rest = case
    return estimate(replace(workload, **options), *rest)


# Of any


@pytest.mark.memory
@pytest.mark.parametrize("shape", [(4, 256), (1, 2048), (2, 2048), (1, 8192)])  # in tiles
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_memory_of_noise_on_the_embeddings_is_within_its_estimate(shape, dtype):
    compute_in_order()
    size, model = 256, nn.Module()
    model.embed = nn.Embedding(8, size)
    model.embed.weight = model.embed.weight.astype(dtype)
    neftune, (rows, tokens) = Neftune(5.0, model, "embed"), shape
    keys = TokenKeys(mx.zeros((rows, 1), mx.uint32), mx.arange(tokens, dtype=mx.uint32)[None])
    lengths, given = mx.full((rows, 1), tokens), mx.zeros(shape, mx.int32)

    @mx.compile
    def noisy(given, keys, lengths):
        with neftune.added(TokenKeys(*keys), lengths):
            return model.embed(given)

    mx.eval(model.parameters(), keys, lengths, given)
    gc.collect()
    mx.clear_cache()
    peak = peak_of(lambda: noisy(given, keys, lengths))
    found = noisy(given, keys, lengths)
    facts = ModelFacts((BlockFacts({}, 1),), (0,), size, 8, 1, dtype.size, 1, 1, 1, False)
    assert peak <= noise_bytes(facts, *shape)
    whole = model.embed(given) + uniform_noise(5.0, keys, lengths, size).astype(dtype)
    assert mx.array_equal(found, whole)


@given(cases())
def test_what_summing_gradients_over_processes_needs_is_part_of_the_estimate(case):
    workload, plan, *_ = case
    found, without = changed(case, reduces=True), changed(case)
    needed = reduction_bytes(workload.facts, workload.training, plan)
    held = found.components["weights"] + found.components["adapters"]
    assert found.mlx_bytes >= held + needed
    assert found.process_bytes >= without.process_bytes
    assert "reduction" not in without.components


@given(cases())
def test_noise_on_the_embeddings_is_part_of_the_estimate(case):
    facts, rows, tokens = case[0].facts, case[2], case[3]
    found, without = changed(case, noise=True), changed(case)
    assert found.mlx_bytes >= int(noise_bytes(facts, rows, tokens))
    assert found.process_bytes >= without.process_bytes


@given(cases(), st.integers(1, 4), st.integers(0, 10**9), st.integers(0, 10**9))
def test_components_are_bytes_that_add_up(case, micro_batches, python_bytes, prefix_bytes):
    workload, *rest = case
    workload = replace(workload, prefix_bytes=prefix_bytes)
    workload = in_process(workload, python_bytes=python_bytes)
    found = estimate(workload, *rest, micro_batches=micro_batches)
    assert all(type(size) is int and size >= 0 for size in found.components.values())
    assert found.process_bytes == sum(found.components.values())
    assert found.mlx_bytes == found.process_bytes - found.beside_bytes
    assert found.beside_bytes == found.components["python"] + found.components["graphs"]
    assert 0 <= found.work_bytes <= found.mlx_bytes
    assert found.components["python"] == python_bytes
    assert found.components["prefix cache"] == prefix_bytes


def not_less(larger: Estimate, smaller: Estimate, narrower: float = 0.0) -> None:
    """But for what whole slices of the vocabulary round off, or need less as they get narrower."""
    assert larger.process_bytes >= 0.999 * (smaller.process_bytes - narrower)


def narrower_bytes(workload: Workload, before: int, after: int) -> float:
    """Bytes that slices of the head need less for more hidden states: each has fewer columns, with
    about as many logits, but fewer weights."""
    heads = costs_of(workload).heads.values()
    return max(head.at(before) - head.at(after) for head in heads)


@given(cases())
def test_more_work_is_never_less_memory(case):
    workload, plan, rows, tokens = case
    training, base = workload.training, estimate(*case)
    for shape in ((rows + 1, tokens), (rows, tokens + 1)):
        less = narrower_bytes(workload, rows * tokens, math.prod(shape))
        not_less(estimate(workload, plan, *shape), base, max(0.0, less))
    not_less(changed(case, training=replace(training, rank=training.rank + 1)), base)
    not_less(estimate(*case, micro_batches=2), base)
    if training.blocks < workload.facts.blocks:
        not_less(changed(case, training=replace(training, blocks=training.blocks + 1)), base)


@given(cases(), st.booleans())
def test_to_evaluate_holds_nothing_of_a_training(case, sliced):
    workload, *rest = case
    case = (in_process(workload, sliced=sliced), *rest)
    found = changed(case, forward=True).components
    for name in ("gradients", "optimizer", "block inputs"):
        assert found[name] == 0
    assert found["adapters"] == estimate(*case).components["adapters"]


@given(cases(), st.booleans())
def test_to_evaluate_more_is_never_less_memory(case, sliced):
    workload, plan, rows, tokens = case
    workload = replace(in_process(workload, sliced=sliced), forward=True)
    base = estimate(workload, plan, rows, tokens)
    for shape in ((rows + 1, tokens), (rows, tokens + 1)):
        less = narrower_bytes(workload, rows * tokens, math.prod(shape))
        not_less(estimate(workload, plan, *shape), base, max(0.0, less))
    not_less(changed((workload, plan, rows, tokens), answer_tokens=2048), base)
    not_less(estimate(in_process(workload, sliced=True), plan, rows, tokens), base)


@given(cases())
def test_inputs_on_disk_are_never_more_memory(case):
    workload, plan, rows, tokens = case
    kept = estimate(workload, replace(plan, spill=False), rows, tokens)
    spilled = estimate(workload, replace(plan, spill=True), rows, tokens)
    assert spilled.process_bytes <= kept.process_bytes
    if plan.engine != "fused":
        assert spilled.components["block inputs"] == 0


@given(cases())
def test_each_engine_holds_no_more_weights_than_the_one_before(case):
    facts = case[0].facts
    facts = replace(facts, order=(0,) * max(2, facts.blocks))
    sizes = [weights_bytes(facts, engine) for engine in ENGINES]
    assert sizes == sorted(sizes, reverse=True)


@given(cases())
def test_computing_blocks_twice_costs_at_most_half_as_much_again(case):
    workload, plan, *_ = case
    cost = step_cost(workload.facts, workload.training, plan)
    assert cost == 1 if plan.engine == "fused" else 1 < cost <= 1.5


def test_what_is_read_of_the_files():
    """Every block forwards, each trained one but the last once more, and the vocabulary once."""
    block = BlockFacts({"q_proj": (64, 64)}, 100)
    facts = ModelFacts((block,), (0,) * 8, 64, 256, 4, 4, 1000, 64, 0, True)
    training = Training(blocks=3, rank=4, targets=("q_proj",))
    reads = [read_bytes(facts, training, Plan(engine, 64)) for engine in ENGINES]
    assert reads == [0, 1000, 1000 + 100 * (8 + 2)]
    resident = [Plan("streamed", 64, resident=count) for count in (1, 3, 5)]
    reads = [read_bytes(facts, training, plan) for plan in resident]
    assert reads == [1000 + 100 * (7 + 2), 1000 + 100 * 5, 1000 + 100 * 3]


@pytest.mark.parametrize("micro_tokens", [1, 100, 256, 511, 512, 100_000])
def test_rows_at_once_fit_the_tokens_but_are_never_none(micro_tokens):
    plan = Plan("fused", micro_tokens)
    for tokens in (1, 64, 256, 4096):
        rows = plan.rows(tokens, 8)
        assert 1 <= rows <= 8
        assert rows == 1 or rows * tokens <= micro_tokens
        assert rows == 8 or (rows + 1) * tokens > micro_tokens


@given(any_facts(), st.integers(1, 4096))
def test_answering_takes_more_for_more_tokens(facts, tokens):
    assert 0 < generation_bytes(facts, tokens) <= generation_bytes(facts, tokens + 1)


# Of real models


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize(
    ("targets", "dora", "dtype"),
    [
        (("q_proj",), False, "float32"),
        (("all-linear",), False, "bfloat16"),
        (("q_proj", "v_proj"), True, "bfloat16"),
    ],
)
def test_adapters_are_those_that_training_adds(tmp_path, architecture, targets, dora, dtype):
    folder = make_model(tmp_path / "m", architecture)
    network, _ = model.load_network(folder, mx.float32)
    settings = {"use_dora": dora, "adapter_dtype": dtype}
    config = TrainConfig(lora_targets=targets, lora_rank=3, lora_layers=2, **settings)
    model.add_adapters(network, config)
    found = sum(array.nbytes for array in model.adapter_arrays(network).values())
    training = Training(
        blocks=2, rank=3, targets=targets, adapter=config.adapter_kind, adapter_dtype=dtype
    )
    assert adapter_bytes(facts_of(folder, 4), training) == found


@pytest.mark.parametrize(
    ("name", "bits"), [*((name, 32) for name in OPTIMIZERS), ("adamw", 8), ("lion", 8)]
)
def test_optimizers_hold_what_is_estimated(tiny_model, name, bits):
    """To a tenth of the adapters: adafactor's depends on their shapes."""
    network, _ = model.load_network(tiny_model, mx.float32)
    settings = {"optimizer": name, "optimizer_bits": bits, "lora_rank": 64}
    config = TrainConfig(lora_targets=("all-linear",), lora_layers="all", **settings)
    model.add_adapters(network, config)
    built = optimizer.build_optimizer(config, network.trainable_parameters())
    update = optimizer.make_update(network, built)
    update(HeldGradients(tree_map(mx.ones_like, network.trainable_parameters())), 1.0, 1e-3)
    held = sum(array.nbytes for array in optimizer.saved_states(built).values())
    training = Training(
        blocks=3, rank=64, targets=("all-linear",), optimizer=name, optimizer_bits=bits
    )
    facts = facts_of(tiny_model, 4)
    workload = Workload(facts=facts, training=training)
    found = estimate(workload, Plan("fused", 64), 1, 64).components
    assert found["optimizer"] == pytest.approx(held, abs=0.1 * found["adapters"])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj")])
def test_whole_weights_are_those_that_training_unfreezes(tmp_path, architecture, targets):
    folder = make_model(tmp_path / "m", architecture, None)
    network, _ = model.load_network(folder, mx.float32)
    config = TrainConfig(lora_targets=targets, lora_layers=2, adapter="full")
    model.add_adapters(network, config)
    found = [array.size for array in model.adapter_arrays(network).values()]
    training = Training(blocks=2, rank=1, targets=targets, adapter=config.adapter_kind)
    facts = facts_of(folder, 4)
    assert adapter_bytes(facts, training) == 4 * sum(found)
    assert largest_array(facts, training) == max(found)
    assert adapter_bytes(facts_of(folder, 2), training) == 2 * sum(found)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_whole_weights_hold_what_is_estimated(tmp_path, name):
    folder = make_model(tmp_path / "m", "qwen2", None, **TINY)
    network, _ = model.load_network(folder, mx.float32)
    config = TrainConfig(lora_layers="all", adapter="full", optimizer=name)
    model.add_adapters(network, config)
    built = optimizer.build_optimizer(config, network.trainable_parameters())
    optimizer.make_update(network, built)(
        HeldGradients(tree_map(mx.ones_like, network.trainable_parameters())), 1.0, 1e-3
    )
    arrays = built.states.saved({}).values()
    training = Training(
        blocks=3, rank=1, targets=("all-linear",), adapter=config.adapter_kind, optimizer=name
    )
    held = sum(array.nbytes for array in arrays if array.ndim)
    assert optimizer_bytes(facts_of(folder, 4), training) == held


@pytest.mark.parametrize(
    ("dtype", "plan", "held"),
    [
        ("float32", "fused", 2),  # float32 masters beside weights in bfloat16
        ("float32", "streamed", 0),
        ("bfloat16", "fused", 0),  # the weights are the masters
    ],
)
def test_masters_take_memory_if_their_dtype_is_another(tmp_path, dtype, plan, held):
    facts = facts_of(make_model(tmp_path / "m", "llama", None, **TINY), 2)
    training = Training(
        blocks=3, rank=1, targets=("all-linear",), adapter=FULL, adapter_dtype=dtype
    )
    found = estimate(Workload(facts=facts, training=training), Plan(plan, 64), 1, 64).components
    assert found["adapters"] == held * adapter_bytes(facts, training)


# Measured peaks


def facts_of_shape(name: str, folder: Path) -> ModelFacts:
    """The facts of a shape from the headers of its files alone."""
    config = SHAPES[name] | {"quantization": {"group_size": GROUP_SIZE, "bits": 4}}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    network = module.Model(module.ModelArgs.from_dict(config))
    nn.quantize(network, GROUP_SIZE, 4)
    return facts_of(write_headers(folder, tensors_in(network), config), 4)


def training_of(facts: ModelFacts, layers: str, targets: str) -> Training:
    blocks = facts.blocks if layers == "all" else int(layers)
    return Training(blocks=blocks, rank=16, targets=(targets,))


def test_facts_from_headers_are_those_of_a_written_model(tmp_path):
    made = facts_of(make_shape("tiny", 4, "float32", tmp_path), 4)
    from_headers = facts_of_shape("tiny", tmp_path / "headers")
    assert made == from_headers


CHEAP = [
    (128, 1, *FEW, "spilled"),
    (128, 4, *FEW, "resident"),
    (128, 1, *ALL, "staged"),
    (128, 4, *FEW, "fused"),
    (128, 4, *FEW, "streamed"),
    (512, 1, *ALL, "fused"),
]


@pytest.fixture(scope="module")
def tiny_shape(tmp_path_factory) -> Path:
    return make_shape("tiny", 4, "float32", tmp_path_factory.mktemp("shapes"))


def with_measured_costs(folder: Path, config: TrainConfig, workload: Workload) -> Workload:
    """The workload with its costs as measured, without reading a weight."""
    network = open_model(folder, mx.float32).network
    costs = measure_costs(network, config, workload, 10**10)
    assert costs is not None
    return replace(workload, costs=costs)


@cache
def measured_workload(
    folder: Path, tokens: int, rows: int, layers: str, targets: str, forward: bool = False
) -> Workload:
    """The work of a contest, measured once for the tests that have the same."""
    facts, config = facts_of(folder, 4), TrainConfig(lora_targets=(targets,))
    training = training_of(facts, layers, targets)
    sizes = {"lengths": (tokens,), "batch_size": rows, "rows_per_step": rows}
    workload = Workload(facts=facts, training=training, forward=forward, **sizes)
    return with_measured_costs(folder, config, workload)


def contest_on(folder: Path, tokens: int, rows: int, adapted: tuple[str, str], **more) -> Contest:
    layers, targets = adapted
    return Contest(
        folder=str(folder), dtype="float32", seq_len=tokens, batch_size=rows, lora_rank=16,
        lora_layers=layers, lora_targets=targets, supervised=1.0, **more,
    )  # fmt: skip


@pytest.mark.compiled
@pytest.mark.memory
@pytest.mark.parametrize(("tokens", "rows", "layers", "targets", "contender"), CHEAP)
def test_peaks_measured_here_are_estimated(
    tiny_shape, tmp_path, monkeypatch, tokens, rows, layers, targets, contender
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where block inputs are spilled
    compute_in_order()
    contest = contest_on(tiny_shape, tokens, rows, (layers, targets), steps=2)
    plan = Plan(contender, rows * tokens)
    if our_plans.ENGINES.get(contender) == "streamed":
        resident = 2 if contender == "resident" else 0  # of 4 blocks
        alone = Plan("streamed", rows * tokens, contender == "spilled", resident=resident)
        plan = replace(alone, blocks_ahead=int(contender == "resident"))

    def measured() -> int:
        gc.collect()
        before = mx.get_active_memory()  # of other tests
        ready = our_plans.prepare_ours(contest, contender)
        for _ in range(contest.steps):
            ready.step()
        return ready.peak_bytes - before

    def estimated() -> int:
        workload = measured_workload(tiny_shape, tokens, rows, layers, targets)
        return estimate(workload, plan, rows, tokens).mlx_bytes

    found, peak = estimated(), measured()
    assert found == pytest.approx(peak, rel=CLOSE[plan.engine])


@pytest.mark.compiled
@pytest.mark.memory
@pytest.mark.parametrize(
    ("engine", "tokens", "rows", "adapted"),
    [("fused", 256, 2, ALL), ("staged", 128, 4, FEW), ("streamed", 128, 2, ALL)],
)
def test_peaks_of_an_evaluation_measured_here_are_estimated(
    tiny_shape, engine, tokens, rows, adapted
):
    compute_in_order()
    contest = contest_on(tiny_shape, tokens, rows, adapted, steps=1)
    gc.collect()
    before = mx.get_active_memory()  # of other tests
    network, config = model.load_network(tiny_shape, mx.float32)
    tensors = tensors_of(network, tiny_shape)
    adapters = model.add_adapters(network, contest.train_config())
    dequantize_on_the_cpu(network)
    built = build_engine(network, adapters.dropout_keys, engine, tensors=tensors)
    drawn = contest_tokens(contest, config["vocab_size"])
    (batch,) = contest_batches(contest, drawn, lambda _: rows)

    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(built.engine.score(batch))
    peak = mx.get_peak_memory() - before
    workload = measured_workload(tiny_shape, tokens, rows, *adapted, forward=True)
    found = estimate(workload, Plan(engine, rows * tokens), rows, tokens).mlx_bytes
    assert found == pytest.approx(peak, rel=CLOSE[engine])


# The head is most of a small fused model: of 1 or 2 slices of the vocabulary, then of many.
@pytest.mark.compiled
@pytest.mark.memory
@pytest.mark.parametrize(
    ("hidden", "tokens", "bits"), [(64, 32, None), (64, 64, 4), (64, 256, None), (256, 64, 4)]
)
def test_peaks_of_a_large_vocabulary_over_few_features_are_estimated(
    tmp_path, bits, hidden, tokens
):
    model_args = {"hidden_size": hidden, "head_dim": 32, "num_attention_heads": hidden // 32}
    folder = make_model(tmp_path / "m", "qwen3", bits, **model_args, vocab_size=32_000)
    gc.collect()
    before = mx.get_active_memory()  # of other tests
    network, _ = model.load_network(folder, mx.float32)
    config = TrainConfig(lora_rank=8, lora_layers="all", lora_targets=("q_proj",))
    adapters = model.add_adapters(network, config)
    mx.eval(network.parameters())
    dequantize_on_the_cpu(network)
    built = build_engine(network, adapters.dropout_keys, "fused")
    batch = batch_of(Shape(1, tokens), packing=False)
    compute_in_order()
    mx.reset_peak_memory()
    mx.eval(built.engine.gradients(batch, 1.0, 0))
    peak = mx.get_peak_memory() - before
    facts = facts_of(folder, 4)
    training = Training(blocks=facts.blocks, rank=8, targets=("q_proj",))
    workload = Workload(facts=facts, training=training, lengths=(tokens,))
    workload = with_measured_costs(folder, config, workload)
    found = estimate(workload, Plan("fused", tokens), 1, tokens, gradients_only=True)
    optimizer_states = found.components["optimizer"]
    assert found.mlx_bytes - optimizer_states == pytest.approx(peak, rel=CLOSE["fused"])
