"""`merge`: runs whose adapters are merged from others."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import make_model
from tests.export.runs import change_config, logits, make_run, make_trained
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.export import merged_run, mlxlm, peft, starting
from your_ai.export.merged_run import Factors, MergeRequest
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import folder
from your_ai.run.folder import RUNS, RunFolder
from your_ai.session import new_run, run_list


def make_two(model, **settings):
    """The runs a and b. settings: those of b that differ."""
    return make_trained(model, "a"), make_trained(model, "b", **settings)


def merge(*adapters, name="m", base=None, **how):
    return merged_run.merge(MergeRequest(adapters, **how), base, name)


def deltas(adapter):
    """The change of each weight, (I, O), or (E, I, O) for experts."""
    found = {}
    for path, parts in adapter.layers.items():
        a, b = (np.array(parts[name], np.float64) for name in ("lora_a", "lora_b"))
        if a.ndim == 3:
            a, b = a.swapaxes(1, 2), b.swapaxes(1, 2)
        found[path] = adapter.sizes[path].scale * a @ b
    return found


def assert_is_sum(merged, *parts):
    """parts: (adapter, weight)"""
    found, every = deltas(merged), [(deltas(adapter), weight) for adapter, weight in parts]
    assert found.keys() == {path for layers, _ in every for path in layers}
    for path, delta in found.items():
        wanted = sum(weight * layers[path] for layers, weight in every if path in layers)
        assert np.abs(delta - wanted).max() <= 1e-6 * np.abs(wanted).max(), path


def refused(pattern, *adapters, **how):
    before = sorted(RUNS.iterdir()) if RUNS.exists() else []
    with pytest.raises(UserError, match=pattern) as caught:
        merge(*adapters, **how)
    assert "\n" not in str(caught.value)
    assert (sorted(RUNS.iterdir()) if RUNS.exists() else []) == before


OTHERS = {
    "like": {},
    "other rank": {"lora_rank": 3, "lora_alpha": 7.0},
    "ranks by layer": {"lora_rank": "3,block.2=5", "lora_alpha": "7,block.1=2"},
    "other layers": {"lora_targets": ("up_proj", "q_proj")},
    "other blocks": {"lora_layers": "all"},
    "nothing in common": {"lora_targets": ("v_proj",), "lora_layers": 1},
}


@pytest.mark.parametrize("settings", OTHERS.values(), ids=OTHERS)
def test_merged_adapter_is_the_weighted_sum(tiny_model, settings):
    one, two = make_two(tiny_model, **settings)
    found = merge(("a", 0.7), ("b", -0.3))
    back = open_trained("m")
    assert_is_sum(back.adapter, (one.adapter, 0.7), (two.adapter, -0.3))
    assert found.relative_error == 0.0
    assert found.rank == back.adapter.rank == back.config.lora_rank
    assert back.adapter.config["base_files"] == one.adapter.config["base_files"]
    assert not mx.allclose(logits(back), logits(back, adapted=False), rtol=0, atol=1e-3)


def test_merge_of_one_adapter_twice_answers_like_it(tiny_model):
    one = make_trained(tiny_model, "a")
    merge(("a", 0.25), ("a", 0.75))
    assert mx.allclose(logits(open_trained("m")), logits(one), rtol=1e-4, atol=1e-4)


def test_folders_of_other_tools_are_merged(tiny_model):
    one = make_trained(tiny_model, "a")
    two = make_trained(tiny_model, "b", lora_rank=2, lora_targets=("v_proj",))
    mlxlm.write(one, Path("of-mlx"))
    peft.write(two, Path("of-peft"))
    merge(("of-mlx", 1.0), ("of-peft", 2.0), base=str(tiny_model))
    assert_is_sum(open_trained("m").adapter, (one.adapter, 1.0), (two.adapter, 2.0))


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_experts_are_merged_one_by_one(tmp_path, method):
    base = make_model(tmp_path / "moe", "qwen3_moe")
    experts = {"lora_targets": ("switch_mlp.up_proj",)}
    one = make_trained(base, "a", **experts)
    two = make_trained(base, "b", lora_rank=2, **experts)
    if method == "linear":
        merge(("a", 0.5), ("b", 0.5))
        assert_is_sum(open_trained("m").adapter, (one.adapter, 0.5), (two.adapter, 0.5))
    else:  # one adapter with all its values is unchanged
        merge(("a", 1.0), method="ties", density=1.0)
        assert_is_sum(open_trained("m").adapter, (one.adapter, 1.0))


def test_lower_rank_tells_its_error(tiny_model):
    one, two = make_two(tiny_model, lora_rank=3)
    found = merge(("a", 0.5), ("b", 0.5), rank=5)
    ours = deltas(open_trained("m").adapter)
    first, second = deltas(one.adapter), deltas(two.adapter)
    wanted = {path: 0.5 * delta + 0.5 * second[path] for path, delta in first.items()}
    error = sum(np.sum((ours[path] - delta) ** 2) for path, delta in wanted.items())
    norm = sum(np.sum(delta**2) for delta in wanted.values())
    assert found.relative_error == pytest.approx((error / norm) ** 0.5, rel=1e-4)
    assert 0 < found.relative_error < 1
    assert open_trained("m").adapter.rank == 5


def test_ties_with_full_rank_loses_nothing(tiny_model):
    make_two(tiny_model, lora_rank=3)
    assert merge(("a", 0.5), ("b", 0.5), method="ties", rank=32).relative_error < 1e-4
    assert 0.01 < merge(("a", 0.5), ("b", 0.5), name="n", method="ties").relative_error < 1


def test_merged_run_says_where_it_came_from(tiny_model):
    make_two(tiny_model)
    run = merge(("a", 0.7), ("b", 0.3), method="ties", density=0.2).run
    record = json.loads(run.origin("merged").read_text())
    assert (record["method"], record["density"], record["rank"]) == ("ties", 0.2, 8)
    assert [(part["from"], part["weight"]) for part in record["adapters"]] == [
        ("a", 0.7),
        ("b", 0.3),
    ]
    (row,) = [row for row in run_list.run_rows() if row.name == "m"]
    assert row.state == "merged"
    with pytest.raises(
        UserError, match="was merged and cannot be resumed; start a new run with --fr"
    ):
        folder.check_resumable(run)


def test_training_starts_from_a_merged_adapter(tiny_model):
    make_two(tiny_model, lora_rank=3)
    merge(("a", 0.5), ("b", 0.5))
    config = new_run.resolve({"from_adapter": "m", "data": "d", "run": "new"}, None)
    assert (config.lora_rank, config.lora_alpha) == (7, 7.0)
    assert starting.create(config).start.is_dir()


def test_merge_of_unlike_blocks_cannot_be_trained(tiny_model):
    make_two(tiny_model, lora_targets=("v_proj",), lora_layers=1)
    merge(("a", 0.5), ("b", 0.5))
    config = new_run.resolve({"from_adapter": "m", "data": "d", "run": "new"}, None)
    with pytest.raises(UserError, match=r"--from m: has nothing for .* training adapts the same l"):
        new_run.create(config)


def test_adapters_of_different_models_are_refused(tiny_model, tmp_path):
    make_run(tiny_model, "a")
    make_run(make_model(tmp_path / "other", seed=5), "b")
    refused("^a and b: were trained on different base models; only", ("a", 0.5), ("b", 0.5))


def test_adapter_that_does_not_fit_is_named(tiny_model, tmp_path):
    make_run(tiny_model, "a")
    wide = make_trained(make_model(tmp_path / "wide", hidden_size=96, head_dim=24), "b")
    mlxlm.write(wide, Path("tuned"))
    change_config(Path("tuned"), base_files=None)
    refused(r"^tuned/adapters.safetensors: .*lora_a is 96 x 4, expected 32 x 4", ("a", 1.0),
            ("tuned", 1.0))  # fmt: skip


def test_dora_is_refused(tiny_model):
    make_run(tiny_model, "a", use_dora=True)
    refused("runs/a/adapter: is a DoRA adapter, whose magnitudes cannot be added", ("a", 1.0))


@pytest.mark.parametrize(
    ("weights", "how", "pattern"),
    [
        ((0.0, 1.0), {}, "^a=0: the weight must be at most 1000, and not 0; leave out"),
        ((float("nan"), 1.0), {}, "^a=nan: the weight must be"),
        ((1e9, 1.0), {}, r"^a=1e\+09: the weight must be"),
        ((1.0, -1.0), {"method": "ties"}, "^b=-1: --method ties needs weights above 0"),
        ((1.0, 1.0), {"density": 0.0}, "^--density 0: must be above 0 and at most 1"),
        ((1.0, 1.0), {"rank": 0}, "^--rank 0: must be from 1"),
        ((1.0, 1.0), {"rank": 9}, "^--rank 9: the merged adapter has rank 8; more adds nothing"),
        ((1.0, 1.0), {"name": "a"}, "^--to a: runs/a exists; choose another name"),
        ((1.0, 1.0), {"name": "../x"}, r"^--to ../x: use at most 100 letters"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(tiny_model, weights, how, pattern):
    make_two(tiny_model)
    refused(pattern, ("a", weights[0]), ("b", weights[1]), **how)


def test_values_too_large_for_float32_are_refused(tiny_model):
    make_run(tiny_model, "a", lora_alpha=1e9)
    trained = open_trained("a")
    mlxlm.write(trained, Path("tuned"))
    huge = {name: mx.full(array.shape, 1e30) for name, array in trained.adapter.arrays.items()}
    mx.save_safetensors("tuned/adapters.safetensors", huge)
    refused("the merged values are too large", ("tuned", 1000.0), base=str(tiny_model))


def test_settings_of_the_merged_run_are_those_of_training(tiny_model):
    make_run(tiny_model, "a")
    config = RunFolder(merge(("a", 1.0)).run.path).read_config()
    assert isinstance(config, TrainConfig)
    assert (config.model, config.lora_layers, config.lora_targets) == (
        str(tiny_model), 2, ("self_attn.q_proj",)
    )  # fmt: skip


@st.composite
def adapters(draw):
    """One to four adapters of a layer, of any ranks and sizes of values, and their weights."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    inputs, outputs = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    layers, weights = [], []
    for _ in range(draw(st.integers(1, 4))):
        rank, scale = draw(st.integers(1, 8)), 10 ** draw(st.floats(-3, 3))
        a = rng.standard_normal((inputs, rank)).astype(np.float32)
        layers.append(Factors(a, scale * rng.standard_normal((rank, outputs))))
        weights.append(draw(st.floats(0.01, 10)))
    return layers, weights


def product(layer: Factors) -> np.ndarray:
    """The delta of a layer."""
    return layer.a @ layer.b


def size(array):
    return float(np.linalg.norm(array))


@given(adapters(), st.booleans())
def test_summed_delta_is_the_weighted_sum_of_the_deltas(given, negative):
    layers, weights = given
    weights = [-w if negative and index % 2 else w for index, w in enumerate(weights)]
    found = merged_run.summed(layers, weights)
    wanted = sum(
        w * layer.a.astype(np.float64) @ layer.b for layer, w in zip(layers, weights, strict=True)
    )
    sizes = [size(product(layer)) for layer in layers]
    largest = sum(abs(w) * each for each, w in zip(sizes, weights, strict=True))
    assert found.rank == sum(layer.rank for layer in layers)
    assert size(product(found) - wanted) <= 1e-12 * largest
    assert merged_run.squared_norm(found) == pytest.approx(size(wanted) ** 2, abs=1e-9 * largest**2)


@given(adapters(), st.integers(1, 32))
def test_reduced_delta_is_the_best_of_its_rank(given, rank):
    found = merged_run.summed(*given)
    result = merged_run.reduced(found, rank)
    sizes = np.linalg.svd(product(found), compute_uv=False)
    best, norm = size(sizes[rank:]), size(sizes)
    assert size(product(result.factors) - product(found)) == pytest.approx(best, abs=1e-6 * norm)
    assert result.squared_error**0.5 == pytest.approx(best, abs=1e-6 * norm)
    assert result.squared_norm**0.5 == pytest.approx(norm)


def plain_ties(deltas, weights, density):
    """TIES as in the paper, value by value."""
    result = np.zeros_like(deltas[0])
    kept = []
    for delta in deltas:
        order = sorted(np.abs(delta).ravel(), reverse=True)
        least = order[max(1, int(density * delta.size)) - 1]
        kept.append(np.where(np.abs(delta) >= least, delta, 0))
    for place in np.ndindex(result.shape):
        values = [(delta[place], weight) for delta, weight in zip(kept, weights, strict=True)]
        total = np.float32(0)
        for value, weight in values:
            total += np.float32(weight) * value
        agreeing = [(value, weight) for value, weight in values if value * total > 0]
        if agreeing:
            shares = sum(weight for _, weight in agreeing)
            result[place] = sum(value * weight for value, weight in agreeing) / shares
    return result


@given(adapters(), st.floats(0.01, 1))
def test_ties_gives_what_a_plain_reading_gives(given, density):
    layers, weights = given
    deltas = [layer.a @ layer.b.astype(np.float32) for layer in layers]
    found = merged_run.ties(layers, weights, density)
    wanted = plain_ties(deltas, weights, density)
    assert np.abs(found - wanted).max() <= 1e-5 * max(np.abs(delta).max() for delta in deltas)


def test_ties_of_the_papers_example():
    """Trim the smallest, elect the sign of the larger sum, take the mean of what agrees."""
    rows = ([[4.0, -1.0, 3.0, 0.1]], [[-2.0, -3.0, 5.0, 0.2]], [[-1.0, 0.5, 1.0, 9.0]])
    layers = [Factors(np.ones((1, 1), np.float32), np.array(row)) for row in rows]
    found = merged_run.ties(layers, [1.0, 1.0, 1.0], 0.75)
    assert found.tolist() == [[4.0, -2.0, 3.0, 9.0]]


def test_only_the_ratio_of_weights_counts_for_ties():
    rng = np.random.default_rng(1)
    layers = [Factors(rng.random((5, 2)) - 0.5, rng.random((2, 7)) - 0.5) for _ in range(3)]
    ours, theirs = (merged_run.ties(layers, [w, w, 2 * w], 0.5) for w in (1.0, 0.25))
    assert np.allclose(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("exact_size", [0, 512], ids=["random subspace", "exact"])
def test_factored_delta_is_nearly_the_best_of_its_rank(monkeypatch, exact_size):
    monkeypatch.setattr(merged_run, "EXACT_SIZE", exact_size)
    rng = np.random.default_rng(0)
    low = rng.standard_normal((120, 6)) @ rng.standard_normal((6, 90))
    delta = np.where(rng.random(low.shape) < 0.5, low, 0).astype(np.float32)  # of full rank
    found = merged_run.factored(delta, 8)
    sizes = np.linalg.svd(delta, compute_uv=False)
    error = size(product(found.factors) - delta)
    assert size(sizes[8:]) <= error * (1 + 1e-5)
    assert error <= 1.001 * size(sizes[8:])
    assert found.squared_error**0.5 == pytest.approx(error, rel=1e-4)


def test_padding_does_not_change_the_delta():
    layer = Factors(np.ones((3, 2)), np.ones((2, 4)))
    more = merged_run.padded(layer, 5)
    assert (more.rank, product(more).tolist()) == (5, product(layer).tolist())
