"""Measured costs of blocks and heads: what they add up to, and what measuring itself takes."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.architectures import write_model
from tests.conftest import TINY, calls_of, make_model
from tests.scheduling import compute_in_order
from your_ai.config import TrainConfig
from your_ai.data.batches import MULTIPLE
from your_ai.engine import measure_costs as measuring
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import gradients_in
from your_ai.engine.measure_costs import batch_of, measure_costs
from your_ai.engine.weights import open_model
from your_ai.memory import probe
from your_ai.memory.costs import FUSED_SCORES, PHASES, STAGED_SCORES, MeasuredCosts, Shape, bytes_of
from your_ai.memory.estimate import estimate
from your_ai.memory.estimate_kept import everything
from your_ai.memory.facts import facts_of
from your_ai.memory.sizes import tiles_of
from your_ai.memory.step_time import micro_batch_seconds
from your_ai.memory.workload import DataSizes, Plan, ProcessFacts, Workload, workload_of
from your_ai.nets.model import add_adapters

KERNELS = "measured"  # they make the peaks smaller
MB = 10**6
FAR = 1 << 40  # bytes
LORA = {"lora_rank": 16, "lora_layers": "all", "lora_targets": ("all-linear",)}
CONFIG = TrainConfig(**LORA)
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "head_dim": 64,
    "vocab_size": 8000,
}
CASES = {  # architecture, bits, shape, settings, other sizes
    "llama": ("llama", 4, Shape(2, 256), {}, {}),
    "llama on tiles": ("llama", 4, Shape(1, 1280), {}, {}),
    "three rows on tiles": ("llama", 4, Shape(3, 640), {}, {}),
    "not quantized": ("qwen2", None, Shape(1, 512), {}, {}),
    "by layer": ("llama", 4, Shape(1, 512), {"lora_rank": "8,mlp=128,block.2=32"}, {}),
    "dora": ("llama", 8, Shape(1, 512), {"use_dora": True, "lora_dropout": 0.1}, {}),
    "windows": ("gemma3_text", 4, Shape(1, 512), {}, {"sliding_window": 128}),
    "softcaps": ("gemma2", 4, Shape(1, 1024), {}, {"num_hidden_layers": 2}),
}
ENGINES, CLOSE = ("fused", "staged", "streamed", "kept"), 0.04  # of the measured peak
WORK = ("forward", "backward", "kept_forward", "kept_backward", "saved", "working")


def workload_for(folder: Path, shape: Shape, config: TrainConfig = CONFIG) -> Workload:
    data, process = DataSizes(lengths=(shape.tokens,)), ProcessFacts(sliced=True)
    found = workload_of(config, facts_of(folder, 4), data, process)
    return replace(found, batch_size=shape.rows, rows_per_step=shape.rows)


def measured(
    folder: Path, workload: Workload, limit_bytes: int = FAR, config: TrainConfig = CONFIG
) -> MeasuredCosts | None:
    network = open_model(folder, mx.float32).network
    return measure_costs(network, config, workload, limit_bytes)


@dataclass(frozen=True)
class Case:
    """A model, and the work on it with measured costs."""

    folder: Path
    config: TrainConfig
    shape: Shape
    workload: Workload


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> Case:
    return made_case(tmp_path_factory.mktemp("case") / "m", *CASES[request.param])


def made_case(
    folder: Path, architecture: str, bits: int | None, shape: Shape, settings: dict[str, Any],
    sizes: dict[str, int],
) -> Case:  # fmt: skip
    make_model(folder, architecture, bits, **SIZES | sizes)
    config = TrainConfig(**LORA | settings)
    workload = workload_for(folder, shape, config)
    compute_in_order()
    costs = measured(folder, workload, config=config)
    assert costs is not None
    assert costs.is_complete
    return Case(folder, config, shape, replace(workload, costs=costs))


def plan_for(engine: str, workload: Workload, shape: Shape) -> Plan:
    if engine == "kept":
        return Plan("staged", shape.size, kept=everything(workload.training.blocks))
    return Plan(engine, shape.size)


def peak_of_gradients(case: Case, plan: Plan, folder: Path) -> int:
    """The peak of MLX's memory while an engine computes gradients."""
    compute_in_order()
    gc.collect()
    mx.clear_cache()
    mx.set_cache_limit(0)
    others = mx.get_active_memory()
    opened = open_model(case.folder, mx.float32)
    keys = add_adapters(opened.network, case.config).dropout_keys
    spill = folder if plan.inputs_on_disk else None
    built = build_engine(
        opened.network, keys, plan.engine, tensors=opened.tensors, spill=spill, kept=plan.kept
    )
    total = gradients_in(folder if plan.gradients_on_disk else None)
    mx.eval(opened.network.trainable_parameters())
    gc.collect()
    mx.reset_peak_memory()
    mx.eval(built.engine.add_gradients(batch_of(case.shape, False), 1.0, 0, total))
    return mx.get_peak_memory() - others


def check_peak(case: Case, plan: Plan, folder: Path) -> None:
    """Check that the peak of the gradients is the one that measured costs add up to."""
    workload = case.workload
    for _ in range(3):  # a few operations begin together: beside other load, less was measured
        found = estimate(workload, plan, *case.shape, gradients_only=True)
        expected = found.mlx_bytes - found.components["optimizer"]
        close = pytest.approx(peak_of_gradients(case, plan, folder), rel=CLOSE)
        if expected == close:
            return
        again = measured(case.folder, replace(case.workload, costs=None), config=case.config)
        workload = replace(case.workload, costs=again)
    assert expected == close


@pytest.mark.memory
@pytest.mark.parametrize("engine", ENGINES)
def test_peaks_of_gradients_are_those_that_measured_costs_add_up_to(case, tmp_path, engine):
    check_peak(case, plan_for(engine, case.workload, case.shape), tmp_path)


@pytest.mark.memory
@pytest.mark.parametrize("engine", ["staged", "kept"])
def test_norms_of_layers_of_any_size_are_in_the_peak_on_short_rows(tmp_path, engine):
    settings, sizes = {"use_dora": True}, {"vocab_size": 64, "intermediate_size": 1024}
    case = made_case(tmp_path / "m", "llama", None, Shape(1, 32), settings, sizes)
    check_peak(case, plan_for(engine, case.workload, case.shape), tmp_path)


# What measuring takes


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "m", **TINY)


@contextlib.contextmanager
def watched_bytes() -> Iterator[list[int]]:
    """Yield a list that receives the bytes of this process, again and again until the end."""
    found, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            found.append(probe.process_bytes() or 0)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


@pytest.mark.memory
@pytest.mark.parametrize("more", [10 * MB, 25 * MB, 60 * MB])
def test_measuring_stays_below_its_limit_and_says_what_it_left_out(tmp_path, more):
    folder = make_model(tmp_path / "m", **SIZES)
    workload = workload_for(folder, Shape(4, 1024))
    measured(folder, workload_for(folder, Shape(1, 8)))  # imports, and threads
    limit_bytes = (probe.process_bytes() or 0) + more
    with watched_bytes() as found:
        costs = measured(folder, workload, limit_bytes)
    assert costs is None or not costs.is_complete
    assert max(found) <= limit_bytes


def test_nothing_is_measured_without_room(folder, monkeypatch):
    ran = []
    monkeypatch.setattr(
        measuring, "cost_of", lambda *_, **__: ran.append(1) or measuring.Cost(1, 1)
    )
    costs = measured(folder, workload_for(folder, Shape(1, 256)), 1)
    assert costs is None or not costs.is_complete
    assert not ran


@pytest.mark.memory
def test_measuring_leaves_nothing_in_memory(folder):
    config = TrainConfig(**LORA, use_dora=True)
    network = open_model(folder, mx.float32).network
    workload = workload_for(folder, Shape(2, 64), config)
    measure_costs(network, config, workload, FAR)
    gc.collect()
    before = mx.get_active_memory()
    assert measure_costs(network, config, workload, FAR) is not None
    gc.collect()
    mx.synchronize()
    assert mx.get_active_memory() <= before


@pytest.mark.parametrize("limit_bytes", [1, FAR])
def test_the_cache_limit_is_as_before(folder, limit_bytes):
    mx.set_cache_limit(123 * MB)
    measured(folder, workload_for(folder, Shape(1, 16)), limit_bytes)
    assert mx.set_cache_limit(123 * MB) == 123 * MB


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[malloc] Unable to allocate 9 bytes."), ValueError()]
)
def test_nothing_is_measured_and_the_cache_limit_is_as_before_if_measuring_fails(
    folder, monkeypatch, error
):
    def fail(*_: Any, **__: Any) -> float:
        raise error

    monkeypatch.setattr(measuring, "cost_of", fail)
    mx.set_cache_limit(123 * MB)
    assert measured(folder, workload_for(folder, Shape(1, 16))) is None
    assert mx.set_cache_limit(123 * MB) == 123 * MB


@pytest.mark.parametrize("shape", [Shape(1, 1), Shape(1, 2), Shape(5, 1), Shape(2, 100)])
def test_rows_of_any_length_are_measured(folder, shape):
    """Batches are padded to a multiple of 32 tokens: no index may be out of range."""
    workload = workload_for(folder, shape)
    costs = measured(folder, workload)
    assert costs is not None
    assert costs.is_complete
    kinds = costs.memory.kinds
    assert all(bytes_of(kind, name, *shape) > 0 for kind in kinds for name in WORK)


@pytest.mark.parametrize("shape", [Shape(1, 5), Shape(1, 300), Shape(3, 200)])
def test_no_shape_is_larger_than_the_micro_batches_of_the_run(folder, monkeypatch, shape):
    made = calls_of(monkeypatch, measuring, "batch_of")
    measured(folder, workload_for(folder, shape))
    shapes = {call.given[0] for call in made}
    padded = -(-shape.tokens // MULTIPLE) * MULTIPLE
    of_heads = {each for each in shapes if each.rows == 1}
    assert max(each.size for each in shapes) <= shape.rows * padded
    assert max(each.rows for each in shapes) <= shape.rows
    assert max(each.tokens for each in shapes - of_heads or of_heads) <= padded


@pytest.mark.parametrize("shape", [Shape(3, 768), Shape(5, 4096), Shape(8, 256)])
def test_tiles_of_many_rows_are_measured_as_large_as_those_of_the_run(folder, shape):
    measured_on = measuring.tiled_shapes(workload_for(folder, shape))[-1]
    assert measured_on.rows == shape.rows
    assert tiles_of(*measured_on)[0].stop >= tiles_of(*shape)[0].stop


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tokens", [96, 300, 1100])
def test_every_phase_that_a_run_may_have_is_timed(folder, tokens, packed):
    """Among them tiles: of several rows, of one, and of a packed one."""
    workload = replace(workload_for(folder, Shape(4, tokens)), packed=packed)
    costs = measured(folder, workload)
    workload = replace(workload, costs=costs)
    for engine in ENGINES:
        for rows in (1, 2, 4):
            plan = plan_for(engine, workload, Shape(rows, tokens))
            terms = micro_batch_seconds(workload, costs, plan, rows, tokens)
            assert min(terms["forward"] + terms["backward"], terms["head"]) > 0, (engine, rows)


def test_an_evaluation_measures_no_gradients(folder):
    workload = replace(workload_for(folder, Shape(2, 64)), forward=True)
    costs = measured(folder, workload).memory
    assert set(costs.heads) <= {STAGED_SCORES, FUSED_SCORES}
    known = {name for kind in costs.kinds for name in PHASES if getattr(kind, name) is not None}
    assert known == {"forward", "evaluated"}


def test_every_kind_of_block_is_measured_once(tmp_path):
    folder = make_model(tmp_path / "m", "gemma3_text", **TINY, num_hidden_layers=4)
    network, told = open_model(folder, mx.float32).network, []
    workload = workload_for(folder, Shape(1, 64))
    costs = measure_costs(network, CONFIG, workload, FAR, told.append)
    assert costs.memory.order == (0, 1, 0, 1)
    blocks = [f"measuring a block, kind {kind} of 2" for kind in (1, 2)]
    assert told == ["measuring the head", *blocks]


# Among them: a model whose last blocks get keys from others, and one without a trunk.
@pytest.mark.parametrize(
    "model_type", ["qwen3_next", "nemotron_h", "gpt_oss", "gemma4_text", "gemma3n"]
)
def test_models_of_several_kinds_of_blocks_are_measured(tmp_path, model_type):
    folder = write_model(tmp_path / "m", model_type)
    workload = workload_for(folder, Shape(1, 48))
    costs = measured(folder, workload)
    assert len(costs.memory.order) == workload.facts.blocks
    assert {kind.backward is not None for kind in costs.memory.kinds} == {True}


# Two whose blocks cannot run one at a time, of the second because they run several times. The code
# of dbrx reads values of arrays, so that nothing is compiled.
@pytest.mark.memory
@pytest.mark.parametrize(
    ("model_type", "engine"),
    [("afm7", "fused"), ("iquestloopcoder", "fused")]
    + [("dbrx", engine) for engine in ("fused", "staged", "streamed")],
)
def test_fused_graphs_are_measured_whole_where_blocks_cannot_be(tmp_path, model_type, engine):
    folder, shape = write_model(tmp_path / "m", model_type), Shape(2, 96)
    workload, plan = workload_for(folder, shape), Plan(engine, shape.size)
    compute_in_order()
    costs = measured(folder, workload)
    assert costs.is_whole == (model_type != "dbrx")
    check_peak(Case(folder, CONFIG, shape, replace(workload, costs=costs)), plan, tmp_path)
