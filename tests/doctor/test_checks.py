"""The checks of the self-test pass on this device, and each detects its kind of fault."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map

from your_ai.doctor import checks as selfchecks
from your_ai.doctor import machine, shapes
from your_ai.doctor.checks import CHECKS, MadeModel
from your_ai.hub.check import check_model
from your_ai.memory.sizes import tiles_of
from your_ai.nets.tokenizer import open_tokenizer

CPU = mx.default_device().type == mx.cpu


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use fewer tokens and updates than on a user's machine, and restore the cache limit."""
    monkeypatch.setattr(selfchecks, "TOKENS", 32)
    monkeypatch.setattr(selfchecks, "FEW_TOKENS", 32)
    monkeypatch.setattr(selfchecks, "STEPS", 2)
    limit = mx.set_cache_limit(0)
    mx.set_cache_limit(limit)
    yield
    mx.set_cache_limit(limit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("selfchecks")
    with pytest.MonkeyPatch.context() as patch:  # smaller than on a user's machine
        patch.setitem(shapes.SHAPES, selfchecks.SHAPE, shapes.llama(128, 3, 4, 2, 128, 512))
        selfchecks.make_model(place)
    return place


def write_adapters(folder: Path, run: str, value: float) -> None:
    place = folder / "runs" / run / "adapter"
    place.mkdir(parents=True)
    mx.save_safetensors(str(place / "adapters.safetensors"), {"a": mx.full((4, 4), value)})


def test_the_generated_model_is_complete(tmp_path):
    outcome = selfchecks.make_model(tmp_path)
    path = Path(outcome.figures["folder"])
    assert path == selfchecks.model_in(tmp_path)
    check_model(path)
    assert open_tokenizer(path).encode("a stone")
    assert outcome.figures["device"] == selfchecks.device()


@pytest.mark.parametrize("name", ["counters", "speed"])
def test_the_checks_pass_on_this_device(folder, name):
    outcome = CHECKS[name](folder)
    assert outcome.ok, outcome.measured
    json.dumps(dataclasses.asdict(outcome))


def test_counters_follow_an_array_in_a_process_that_freed_much_before(folder):
    """The C library holds what was freed, so that an array takes no new memory of the system."""
    freed = [bytes(100_000) for _ in range(1500)]  # each below the size that is mapped by itself
    above = bytes(100_000)
    del freed
    outcome = CHECKS["counters"](folder)
    assert outcome.ok, outcome.measured
    del above


def test_gradients_of_the_plans_differ_only_by_rounding(folder):
    outcome = selfchecks.compare_gradients(folder)
    assert outcome.ok, outcome.measured
    if CPU:
        plans = ("staged", "streamed", "kept")
        assert set(outcome.figures) == {f"{plan} float32" for plan in plans}
        assert all(worst < 1e-5 for worst in outcome.figures.values())


def test_reloads_change_nothing(folder):
    outcome = selfchecks.compare_reloads(folder)
    assert outcome.ok, outcome.measured
    assert outcome.figures["read_bytes"] > 100_000
    if CPU:  # on a GPU the order of sums may vary
        for plan in ("fused", "staged"):
            assert outcome.figures[plan] == {"alike": 0.0, "reloaded": 0.0}


def test_a_cache_that_is_not_cleared_is_detected(folder, monkeypatch):
    monkeypatch.setattr(mx, "clear_cache", lambda: None)
    outcome = selfchecks.count_memory(folder)
    assert not outcome.ok
    assert "wrong: cache when cleared" in outcome.measured


def test_gradients_that_are_wrong_by_one_percent_are_detected(folder, monkeypatch):
    made = selfchecks.made

    def off(place: Path, plan: str, contest: Any) -> MadeModel:
        found = made(place, plan, contest)
        if plan != "staged":
            return found
        gradients = found.engine.gradients

        def scaled(*arguments: Any) -> Any:
            loss, grads = gradients(*arguments)
            return loss, tree_map(lambda g: 1.01 * g, grads)

        return found._replace(engine=dataclasses.replace(found.engine, gradients=scaled))

    monkeypatch.setattr(selfchecks, "made", off)
    outcome = selfchecks.compare_gradients(folder)
    assert not outcome.ok
    assert outcome.figures["staged float32"] == pytest.approx(0.01, rel=0.01)
    assert outcome.figures["streamed float32"] < 1e-5


def test_a_reload_that_changes_a_weight_is_detected(folder, monkeypatch):
    reload_adapted = selfchecks.reload_adapted

    def damaged(network: nn.Module, tensors: Any) -> int:
        read = reload_adapted(network, tensors)
        layer = network.layers[0].self_attn.q_proj.linear
        layer.scales = 1.01 * layer.scales
        return read

    monkeypatch.setattr(selfchecks, "reload_adapted", damaged)
    outcome = selfchecks.compare_reloads(folder)
    assert not outcome.ok
    assert "weights are not the same" in outcome.measured


def test_a_reload_that_reads_nothing_fails_the_check(folder, monkeypatch):
    monkeypatch.setattr(selfchecks, "reload_adapted", lambda *_: 0)
    assert not selfchecks.compare_reloads(folder).ok


def test_different_losses_are_detected(folder, monkeypatch):
    def off(_: object, plan: str) -> list[tuple[float, float, int]]:
        return [(2.1 if plan == "spilled" else 2.0, 0.5, 64)] * 2

    monkeypatch.setattr(selfchecks.our_plans, "run_ours", off)
    outcome = selfchecks.time_plans(folder)
    assert not outcome.ok
    assert "the losses differ" in outcome.measured


@pytest.mark.parametrize(
    ("value", "ok", "text"), [(2.0, True, "the same bytes"), (2.02, False, "differs by 9.9e-03")]
)
def test_adapters_are_compared_by_their_bytes(tmp_path, value, ok, text):
    write_adapters(tmp_path, "whole", 2.0)
    write_adapters(tmp_path, "killed", value)
    outcome = selfchecks.compare_adapters(tmp_path)
    assert (outcome.ok, text in outcome.measured) == (ok, True)


def test_adapters_may_differ_slightly_only_on_a_gpu(tmp_path, monkeypatch):
    write_adapters(tmp_path, "whole", 2.0)
    write_adapters(tmp_path, "killed", 2.00001)
    for device, ok in (("cpu", False), ("metal", True)):
        monkeypatch.setattr(selfchecks, "device", lambda device=device: device)
        assert selfchecks.compare_adapters(tmp_path).ok == ok


def test_values_that_are_not_finite_differ_infinitely():
    nan = mx.array([1.0, float("nan")])
    assert selfchecks.relative(nan, mx.array([1.0, 1.0])) == float("inf")


def test_plans_agree_with_mlx_lm(folder):
    outcome = selfchecks.compare_with_plain(folder, "float32")
    assert outcome.ok, outcome.measured
    found = [outcome.figures[f"{way}{bits}"] for way in selfchecks.WAYS for bits in ("", " 4-bit")]
    assert all(0 < each < 1e-4 for each in found)


@pytest.mark.parametrize(("factor", "ok"), [(1.0, True), (1.05, False)])
def test_plans_may_differ_as_mlx_lm_does_in_half_precision(folder, monkeypatch, factor, ok):
    def scaled(found: MadeModel) -> tuple[float, dict[str, mx.array]]:
        loss, grads = step_of(found)
        return loss, {name: factor * grad for name, grad in grads.items()}

    step_of = selfchecks.step_of
    monkeypatch.setattr(selfchecks, "step_of", scaled)
    monkeypatch.setattr(selfchecks, "WAYS", ("staged",))
    outcome = selfchecks.compare_with_plain(folder, "float16")
    assert outcome.ok is ok, outcome.measured
    assert 1e-4 < outcome.figures["plain 4-bit"] < 0.03


def test_rows_in_tiles_agree_with_fused_ones(folder, monkeypatch):
    for name in ("LONG_TOKENS", "LONG_TOKENS_OF_A_CPU"):
        monkeypatch.setattr(selfchecks, name, 520)
    assert len(tiles_of(selfchecks.ROWS, 520)) > 1
    outcome = selfchecks.compare_tiles(folder)
    assert outcome.ok, outcome.measured
    assert 0 < outcome.figures["staged float32"] < 1e-4
    assert outcome.figures["staged float32 peak MB"] > 1


@pytest.mark.parametrize("wrong", [1.1, float("nan"), float("inf")])
def test_tiles_with_another_gradient_fail(folder, monkeypatch, wrong):
    found = {"fused": 1.0, "staged": 1.0, "kept": wrong}
    monkeypatch.setattr(selfchecks, "made", lambda _, plan, *__, **___: plan)
    monkeypatch.setattr(selfchecks, "step_of", lambda plan: (2.0, {"a": mx.array([found[plan]])}))
    assert not selfchecks.compare_tiles(folder).ok


@pytest.mark.parametrize(
    ("peak", "ok"), [(0.7, False), (0.85, True), (1.05, True), (1.2, False), (3.0, False)]
)
def test_a_peak_that_is_far_from_its_estimate_fails(folder, monkeypatch, peak, ok):
    found = {"peak_bytes": 1e6 * peak, "estimated_bytes": 1e6}
    found |= {"process_bytes": 1, "seconds": [2, 1]}
    monkeypatch.setattr(selfchecks.bench, "run_contender", lambda *_: found)
    outcome = selfchecks.compare_peak(folder, "staged", "4", "256", "float32")
    assert (outcome.ok, outcome.measured) == (ok, f"{peak:.2f}")
    assert outcome.figures["seconds"] == 1


def test_what_is_shared_about_the_machine_has_no_paths(folder, monkeypatch):
    monkeypatch.setattr(machine.platform, "release", lambda: "6.8.0-made-by-ada")
    found = selfchecks.describe_machine(folder).figures
    assert found["ram_bytes"] > 0
    assert found["release"] in ("6.8.0", machine.platform.mac_ver()[0])
    assert not {"store", "openblas", "endpoint"} & found.keys()
    assert not [value for value in found.values() if "/" in str(value)]
