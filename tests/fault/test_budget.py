"""A few random runs of tests/budget.py stay under their limits; the script runs many more."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from tests.budget import ROOT, Case, case_of, line_of, run_case, write_data
from tests.conftest import call, make_model

# Multiplies measured costs by FACTOR.
FALSIFIED = """
from dataclasses import replace

import your_ai.engine.measure_costs as measuring
from your_ai.memory.costs import PHASES

measure_costs = measuring.measure_costs


def times_factor(kind):
    curves = {name: getattr(kind, name) for name in PHASES}
    return replace(kind, **{n: c.times(FACTOR) for n, c in curves.items() if c is not None})


def falsified(*args, **options):
    found = measure_costs(*args, **options)
    if found is None:
        return None
    heads = {
        name: replace(head, costs=tuple(FACTOR * c for c in head.costs))
        for name, head in found.memory.heads.items()
    }
    kinds = tuple(map(times_factor, found.memory.kinds))
    return replace(found, memory=replace(found.memory, kinds=kinds, heads=heads))


measuring.measure_costs = falsified
"""
SMALL = Case(
    seed=5,
    architecture="qwen2",
    bits=4,
    model={
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 4000,
    },
    words=(100, 90, 60, 20, 8, 2, 95, 100),
    pairs=False,
    flags=(
        *("--max-steps", "2", "--batch-size", "4", "--lora-targets", "all-linear"),
        *("--lora-layers", "all", "--eval-every", "0"),
    ),
    room=1.0,
)
LIMIT_GB, ENOUGH_GB = 0.24, 0.32  # near what it needs, and with room for measuring


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("seed", [304, 358, 7731])
def test_random_run_stays_under_its_limit(seed, tmp_path):
    found = run_case(case_of(seed), tmp_path)
    assert not found.fault, line_of(found)
    assert found.samples > 50


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_run_with_wrong_costs_stays_under_its_limit(factor, tmp_path):
    found = run_case(SMALL, tmp_path, f"FACTOR = {factor}\n{FALSIFIED}", limit_gb=ENOUGH_GB)
    assert not found.fault, line_of(found)
    assert (tmp_path / "runs/r/costs.json").exists()  # they were measured, and so falsified


def test_same_seed_gives_the_same_case():
    assert case_of(7) == case_of(7)
    assert dataclasses.asdict(case_of(7)) != dataclasses.asdict(case_of(8))


@pytest.mark.slow
def test_run_resumed_under_a_tight_limit_does_not_measure(tmp_path):
    """It began with a guess, far below its limit, and goes on with it."""
    shorter = dataclasses.replace(SMALL, words=(50, 45, 30, 10, 4, 2, 50, 50))
    make_model(tmp_path / "model", shorter.architecture, shorter.bits, **shorter.model)
    write_data(shorter, tmp_path / "data")
    flags = (*shorter.flags, "--max-steps", 1, "--max-memory", 8, "--no-supervise", "--run", "r")
    assert call("train", "--model", "model", "--data", "data", *flags) == 0
    assert not (tmp_path / "runs" / "r" / "costs.json").exists()
    command = [sys.executable, "-m", "your_ai", "train", "--resume", "r", "--supervise"]
    done = subprocess.run(
        [*command, "--max-steps", "2", "--max-memory", str(LIMIT_GB + 0.04)],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs" / "r" / "costs.json").exists()
