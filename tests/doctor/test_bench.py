"""The benchmark: all contenders do the same task, and the output is correct."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tests.conftest import call
from your_ai.doctor import bench
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


def test_all_contenders_follow_the_same_losses(capsys):
    """This compares our training with mlx-lm's trainer, with and without checkpointing.

    Their table gives ratios to each peer.
    """
    peers = ["mlx-lm", "mlx-lm-checkpoint"]
    options = ("--lora-targets", "all-linear", "--supervised", 0.3, "--json")
    options += ("--against", ",".join(peers))
    assert call(*SHORT, "--bits", 0, *options) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["contender"] for row in rows] == ["fused", *peers]
    for row in rows:
        assert row["losses"] == pytest.approx(rows[0]["losses"], rel=1e-5)
        assert row["losses"][-1] < row["losses"][0]
        assert 0 < row["seconds_min"] <= row["seconds_median"]
        assert row["process_mb"] > row["peak_mb"] > 0
    console = Console(file=io.StringIO(), width=80)
    console.print(bench.table([bench.BenchRow(**row) for row in rows]))
    text = console.file.getvalue()
    assert "fused" in text
    assert text.count("vs") == len(peers)


@pytest.mark.parametrize(
    ("bits", "plans"),
    [(0, ("fused", "streamed")), (4, ("fused", "staged", "streamed", "spilled"))],
    ids=["float", "4-bit"],
)
def test_ten_steps_of_each_plan_follow_mlx_lm(tmp_path, bits, plans):
    contest = bench.Contest(
        folder=str(make_shape("tiny", bits, "float32", tmp_path)),
        dtype="float32",
        seq_len=16,
        batch_size=2,
        lora_rank=8,
        lora_layers="all",
        lora_targets="all-linear",
        supervised=1.0,
        steps=10,
        learning_rate=2e-3,
    )
    peers = [loss for loss, *_ in bench.run_mlx_lm(contest, checkpointing=False)]
    assert peers[-1] < 0.9 * peers[0]
    for plan in plans:
        ours = [loss for loss, *_ in bench.run_ours(contest, plan)]
        assert ours == pytest.approx(peers, rel=1e-4), plan


def test_rounds_are_combined():
    """Without the first step of each round, which compiles."""
    first = {"seconds": [9.0, 2.0, 3.0], "peak_bytes": 5_000_000, "process_bytes": 8_000_000}
    first |= {"tokens": 30, "losses": [2.0, 1.0]}
    other = {**first, "seconds": [9.0, 1.0, 4.0], "peak_bytes": 6_000_000}
    row = bench.combine("fused", [first, other])
    assert (row.seconds_median, row.seconds_min, row.tokens_per_s) == (2.5, 1.0, 12.0)
    assert (row.peak_mb, row.process_mb, row.losses) == (6.0, 8.0, [2.0, 1.0])


def test_packed_trains_the_same_rows_as_unpacked(capsys):
    assert call(*SHORT, "--plan", "unpacked,packed", *LONG) == 0
    unpacked, packed = json.loads(capsys.readouterr().out)["rows"]
    assert packed["losses"][0] == pytest.approx(
        unpacked["losses"][0], rel=0.05
    )  # mean over rows, mean over tokens
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
        (("--shape", "tiny", "--plan", "none", "--against", "none"), "nothing to measure"),
        (("--shape", "tiny", "--dtype", "int8"), "--dtype: expected auto or float32"),
        (("--shape", "tiny", "--model", "demo"), "give --shape or --model"),
    ],
)
def test_invalid_options_are_refused(capsys, options, message):
    assert call("bench", *options) == 2
    assert message in capsys.readouterr().err


def test_a_shape_is_created_once_and_always_the_same(tmp_path):
    first = make_shape("tiny", 4, "float32", tmp_path / "a")
    again = make_shape("tiny", 4, "float32", tmp_path / "b")
    for path in first.glob("*.safetensors"):
        assert sha256(path) == sha256(again / path.name)
    before = (first / "config.json").stat().st_mtime_ns
    assert make_shape("tiny", 4, "float32", tmp_path / "a") == first
    assert (first / "config.json").stat().st_mtime_ns == before


def test_spaces_around_names_are_ignored():
    assert bench.named(" mlx-lm , mlx-lm-checkpoint", "against", bench.PEERS) == list(bench.PEERS)
    with pytest.raises(UserError):
        bench.named("mlx", "against", bench.PEERS)
