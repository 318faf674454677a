"""The benchmark: all contenders do the same task, and the output is correct."""

from __future__ import annotations

import gc
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import call, shown
from tests.kernels import fuse
from your_ai.data.batches import Batch
from your_ai.doctor import bench, our_plans
from your_ai.doctor.contest import Contest, contest_tokens
from your_ai.doctor.peers import run_peer
from your_ai.doctor.shapes import llama, make_shape
from your_ai.errors import UserError
from your_ai.files import sha256

SHORT = ("bench", "--shape", "tiny", "--seq-len", 32, "--steps", 3, "--lora-layers", "all")


LONG = ("--seq-len", 256, "--steps", 2, "--lora-layers", 1, "--against", "none", "--json")


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    """One round of all contenders, on a smaller model."""
    monkeypatch.setattr(bench, "ROUNDS", 1)
    monkeypatch.setitem(bench.SHAPES, "tiny", llama(64, 2, 4, 2, 128, 512))


@pytest.fixture
def tiny_shape(tmp_path) -> Path:
    return make_shape("tiny", 4, "float32", tmp_path)


def contest_of(folder: Path | str, **changes: Any) -> Contest:
    contest = Contest(
        folder=str(folder), dtype="float32", seq_len=16, batch_size=1, lora_rank=8,
        lora_layers="all", lora_targets="all-linear", supervised=0.5, steps=3,
    )  # fmt: skip
    return replace(contest, **changes)


def table_of(rows: list[dict[str, Any]]) -> str:
    return shown(bench.bench_table([bench.BenchRow(**row) for row in rows]))


def test_all_contenders_follow_the_same_losses(capsys):
    """This compares our training with mlx-lm's trainer, with and without checkpointing.

    Their table gives ratios to each peer.
    """
    peers = ["mlx-lm", "mlx-lm-checkpoint"]
    options = ("--lora-targets", "all-linear", "--supervised", 0.3, "--json")
    options += ("--against", ",".join(peers))
    assert call(*SHORT, "--bits", 0, *options) == 0
    shown = capsys.readouterr()
    rows = json.loads(shown.out)["rows"]
    assert [row["contender"] for row in rows] == ["fused", *peers]
    assert "measuring mlx-lm-checkpoint (3 of 3)\n" in shown.err
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
        assert row["losses"][-1] < row["losses"][0]
        assert 0 < row["seconds_min"] <= row["seconds_median"]
        assert row["process_mb"] > row["peak_mb"] > 0
    text = table_of(rows)
    assert "fused" in text
    assert text.count("vs") == len(peers)


@pytest.mark.parametrize(
    ("bits", "plans"), [(0, "fused streamed"), (4, "fused kept staged resident streamed spilled")]
)
def test_ten_steps_of_each_plan_follow_mlx_lm(tmp_path, bits, plans):
    folder = make_shape("tiny", bits, "float32", tmp_path)
    contest = contest_of(
        folder, seq_len=16, batch_size=2, supervised=1.0, steps=10, learning_rate=2e-3
    )
    peers = [loss for loss, *_ in run_peer(contest, "mlx-lm")]
    assert peers[-1] < 0.9 * peers[0]
    for plan in plans.split():
        ours = [loss for loss, *_ in our_plans.run_ours(contest, plan)]
        assert ours == pytest.approx(peers, rel=1e-4), plan


@pytest.fixture
def with_kernels() -> Iterator[None]:
    """Fuse operations, as for the user: estimates are of such peaks."""
    fuse(True)
    yield
    fuse(False)


@pytest.mark.compiled
@pytest.mark.memory
def test_a_plan_is_chosen_for_a_peak_of_mlx(tmp_path, monkeypatch, with_kernels):
    """More memory gives a plan that keeps more, up to the fused one."""
    monkeypatch.setitem(bench.SHAPES, "tiny", llama(128, 3, 8, 2, 256, 1024))
    folder = make_shape("tiny", 0, "float32", tmp_path)
    contest = contest_of(folder, seq_len=256, batch_size=2, supervised=1.0, steps=1)
    most = our_plans.prepare_ours(contest, "auto@1").estimated_bytes
    losses, estimated = [], []
    for share in (0.6, 0.85, 2):
        room = round(share * most / 1e9, 3)
        gc.collect()  # the plan before
        ready = our_plans.prepare_ours(contest, f"auto@{room}")
        assert ready.estimated_bytes <= 1e9 * room
        losses.append(ready.step()[0])
        assert ready.peak_bytes < 1e9 * room
        estimated.append(ready.estimated_bytes)
        del ready
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert estimated == sorted(estimated)
    assert estimated[0] < estimated[-1] == most
    with pytest.raises(UserError, match=r"--plan auto@0\.001: no plan fits"):
        our_plans.prepare_ours(contest, "auto@0.001")


@pytest.mark.parametrize("name", ["auto@", "auto@x", "auto@1e3", "fused@1", "auto@1@2"])
def test_other_plans_with_a_peak_are_refused(name):
    with pytest.raises(UserError, match="unknown"):
        bench.contenders_of(name, "none", "sft")
    assert bench.contenders_of("auto@1.5, kept", "none", "sft") == ["auto@1.5", "kept"]


def test_pairs_are_measured_beside_rows_of_sft_and_the_estimate(capsys):
    assert call(*SHORT, "--objective", "dpo", "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["contender"] == "fused"
    assert row["losses"][0] == pytest.approx(math.log(2), rel=1e-5)  # the reference is the base
    assert row["losses"][-1] < row["losses"][0]
    assert row["seconds_per_pair"] == row["seconds_median"]
    assert 0 < row["rows_seconds_min"] <= row["rows_seconds_median"]
    assert row["times_rows"] > 0
    assert row["estimated_mb"] > 0
    assert "s/pair" in table_of([row])


@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo"])
def test_plans_follow_the_same_losses_of_pairs(tiny_shape, objective):
    contest = contest_of(tiny_shape, objective=objective, batch_size=2)
    fused, staged = (
        [loss for loss, *_ in our_plans.run_ours(contest, plan)] for plan in ("fused", "staged")
    )
    assert staged == pytest.approx(fused, rel=1e-4)
    assert fused[-1] < fused[0]


def test_plans_train_the_same_rollouts(tiny_shape):
    contest = contest_of(
        tiny_shape, objective="grpo", rollouts=4, kl_beta=0.1, learning_rate=3e-2, steps=4
    )
    fused, staged, streamed = (
        [(reward, tokens) for reward, _, tokens in our_plans.run_ours(contest, plan)]
        for plan in ("fused", "staged", "streamed")
    )
    assert fused == staged == streamed
    assert len({reward for reward, _ in fused}) > 1
    assert {tokens for _, tokens in fused} == {4 * 8}


@pytest.mark.parametrize("plan", ["packed", "prefix"])
def test_plans_that_rollouts_do_not_have_are_refused(plan):
    with pytest.raises(UserError, match=f"--plan {plan}: grpo does not train under it"):
        bench.contenders_of(plan, None, "grpo")


def test_rollouts_are_shown_with_their_rewards(capsys):
    options = ("--objective", "grpo", "--rollouts", 2, "--plan", "fused,auto", "--max-memory", 2)
    assert call(*SHORT, *options, "--against", "none") == 0
    out = capsys.readouterr().out
    assert "reward" in out
    assert "s/pair" not in out


def updates_of(ready: our_plans.OurSteps) -> list[list[Batch]]:
    """The micro-batches of each update of a step."""
    loop = ready.loop
    steps = range(loop.trainer.schedule.steps_per_epoch)
    return [loop.source.step(step, loop.governor.rows_at).batches for step in steps]


@pytest.mark.parametrize("plan", ["unpacked", "packed"])
def test_short_pairs_are_trained_one_by_one_or_packed(tiny_shape, plan):
    contest = contest_of(tiny_shape, objective="dpo", seq_len=512, lora_layers="1", steps=1)
    assert bench.pairs_per_step(contest, plan) == our_plans.SHORT_ROWS / 2
    updates = updates_of(our_plans.prepare_ours(contest, plan))
    assert len(updates) == (1 if plan == "packed" else our_plans.SHORT_ROWS / 2)
    every = [batch for batches in updates for batch in batches]
    assert all(batch.packed for batch in every) is (plan == "packed")
    assert sum(int(batch.texts.max()) + 1 for batch in every) == our_plans.SHORT_ROWS


@pytest.mark.memory
def test_rows_of_sft_share_the_weights_of_pairs_beside_them(tmp_path):
    folder = make_shape("tiny", 0, "float32", tmp_path)
    contest = contest_of(folder, objective="dpo", lora_targets="q_proj", lora_rank=1)
    ready = our_plans.prepare_ours(contest, "fused")
    network = ready.loop.trainer.model
    weights_bytes = sum(array.nbytes for _, array in tree_flatten(network.parameters()))
    before_bytes = mx.get_active_memory()
    alone = our_plans.prepare_ours(contest.of_single_rows(), "fused", beside=ready)
    assert updates_of(alone)[0][0].tokens.shape == updates_of(ready)[0][0].tokens.shape
    assert mx.get_active_memory() - before_bytes < weights_bytes / 4


def test_answers_of_a_pair_have_the_same_prompt():
    tokens = contest_tokens(contest_of("m", objective="dpo", batch_size=2), vocabulary=512)
    chosen, rejected = tokens[::2], tokens[1::2]
    assert tokens.shape == (4, 17)
    assert np.array_equal(chosen[:, :9], rejected[:, :9])
    assert not np.array_equal(chosen[:, 9:], rejected[:, 9:])


def test_rounds_are_combined():
    """Without the first step of each round, which compiles."""
    first = {"seconds": [9.0, 2.0, 3.0], "peak_bytes": 5_000_000, "process_bytes": 8_000_000}
    first |= {"tokens": 30, "losses": [2.0, 1.0], "turns": [(2.0, 1.0)], "estimated_bytes": 5e6}
    first |= {"waits": [0.2, 0.3]}
    other = {**first, "seconds": [9.0, 1.0, 4.0], "peak_bytes": 6_000_000, "turns": [(6.0, 5.0)]}
    other |= {"waits": [0.1, 0.9]}
    row = bench.combine(contest_of("m", objective="dpo", batch_size=5), "fused", [first, other])
    assert (row.seconds_median, row.seconds_min, row.tokens_per_s) == (2.5, 1.0, 12.0)
    assert (row.peak_mb, row.process_mb, row.losses) == (6.0, 8.0, [2.0, 1.0])
    assert (row.estimated_mb, row.seconds_per_pair) == (5.0, 0.5)
    assert (row.rows_seconds_median, row.rows_seconds_min, row.times_rows) == (3.0, 1.0, 1.6)
    assert row.read_wait_s == pytest.approx(0.25)
    rounds = [{**each, "waits": []} for each in (first, other)]
    assert bench.combine(contest_of("m"), "fused", rounds).read_wait_s is None


def test_packed_trains_the_same_rows_as_unpacked(capsys):
    assert call(*SHORT, "--plan", "unpacked,packed", *LONG) == 0
    unpacked, packed = json.loads(capsys.readouterr().out)["rows"]
    # One is a mean over rows, the other over tokens.
    assert packed["losses"][0] == pytest.approx(unpacked["losses"][0], rel=0.05)
    tokens = [row["tokens_per_s"] * row["seconds_median"] for row in (unpacked, packed)]
    assert tokens[0] == pytest.approx(tokens[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shape", "tiny", "--plan", "packed", "--seq-len", 64), "rows of up to 120 tokens"),
        ((), "give --shape or --model; shapes: tiny, small"),
        (("--shape", "smal"), "did you mean small"),
        (("--shape", "tiny", "--bits", 3), "--bits 3: must be 4 or 8"),
        (("--shape", "tiny", "--plan", "fusd"), "did you mean fused"),
        (("--shape", "tiny", "--against", "x"), "--against x: unknown"),
        (("--shape", "tiny", "--objective", "dop"), "did you mean dpo"),
        (("--shape", "tiny", "--objective", "dpo", "--plan", "none"), "nothing to measure"),
        (("--shape", "tiny", "--plan", "none", "--against", "none"), "nothing to measure"),
        (("--shape", "tiny", "--dtype", "int8"), "--dtype: expected auto or float32"),
        (("--shape", "tiny", "--model", "demo"), "give --shape or --model"),
    ],
)
def test_invalid_options_are_refused(capsys, options, message):
    assert call("bench", *options) == 2
    assert message in capsys.readouterr().err


def test_a_shape_is_created_once_and_always_the_same(tmp_path):
    notes: list[str] = []
    first = make_shape("tiny", 4, "float32", tmp_path / "a", notes.append)
    (note,) = notes
    assert re.fullmatch(rf"writing the shape tiny with random weights, \d+ kB, to {first}", note)
    again = make_shape("tiny", 4, "float32", tmp_path / "b")
    for path in first.glob("*.safetensors"):
        assert sha256(path) == sha256(again / path.name)
    before = (first / "config.json").stat().st_mtime_ns
    assert make_shape("tiny", 4, "float32", tmp_path / "a", notes.append) == first
    assert len(notes) == 1
    assert (first / "config.json").stat().st_mtime_ns == before
