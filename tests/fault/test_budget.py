"""A few random runs of tests/budget.py stay under their limits; the script runs many more."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from tests.budget import ROOT, Case, case_of, line_of, run_case, write_data
from tests.conftest import call, make_model, write_site

# Multiplies the coefficients of the estimates by FACTOR, before the training process uses them.
FALSIFIED = """
from your_ai.memory import coefficients

for name in ("fused", "fused_head", "forward", "forward_lora", "backward", "backward_lora", "head"):
    table = getattr(coefficients.PACKAGED, name)
    table.update({key: FACTOR * value for key, value in table.items()})
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
LIMIT_GB = 0.24  # near what it needs


@pytest.mark.compiled
@pytest.mark.slow
@pytest.mark.parametrize("seed", [304, 358])
def test_random_run_stays_under_its_limit(seed, tmp_path):
    found = run_case(case_of(seed), tmp_path)
    assert not found.fault, line_of(found)
    assert found.samples > 50


@pytest.mark.compiled
@pytest.mark.slow
def test_low_coefficients_lead_to_the_same_plan_as_correct_ones(tmp_path):
    """tests/memory/test_calibration.py tries many coefficients, without a process."""
    limit = LIMIT_GB + 0.01  # so that correct ones need no second plan, which may come too late
    right = run_case(SMALL, tmp_path / "right", limit_gb=limit)
    wrong = run_case(SMALL, tmp_path / "wrong", f"FACTOR = 0.2\n{FALSIFIED}", limit_gb=limit)
    assert not wrong.fault, line_of(wrong)
    assert wrong.plans[-1] == right.plans[-1]


def test_same_seed_gives_the_same_case():
    assert case_of(7) == case_of(7)
    assert dataclasses.asdict(case_of(7)) != dataclasses.asdict(case_of(8))


@pytest.mark.slow
def test_run_resumed_under_a_tight_limit_measures_each_shape_once(tmp_path):
    shorter = dataclasses.replace(SMALL, words=(50, 45, 30, 10, 4, 2, 50, 50))
    make_model(tmp_path / "model", shorter.architecture, shorter.bits, **shorter.model)
    write_data(shorter, tmp_path / "data")
    flags = (*shorter.flags, "--max-steps", 1, "--max-memory", 2, "--no-supervise", "--run", "r")
    assert call("train", "--model", "model", "--data", "data", *flags) == 0
    write_site(tmp_path / "site", f"FACTOR = 0.2\n{FALSIFIED}")
    command = [sys.executable, "-m", "your_ai", "train", "--resume", "r"]
    environment = os.environ | {
        "YOUR_AI_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path / "site")]),
    }
    done = subprocess.run(
        [*command, "--supervise", "--max-steps", "2", "--max-memory", str(LIMIT_GB)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "r" / "events.jsonl").read_text().splitlines()
    shapes = [
        (event["engine"], event["rows"], event["tokens"])
        for event in map(json.loads, lines)
        if event["event"] == "measured"
    ]
    assert shapes
    assert len(set(shapes)) == len(shapes)
