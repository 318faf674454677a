"""A few inputs of hostile_inputs.py, and a test that its checks find faults."""

from __future__ import annotations

import pytest

from tests.hostile_inputs import KINDS, Case, carry_out, faults_of, judge, train

FIRST = {kind: number for number, kind in reversed(list(enumerate(KINDS)))}


@pytest.mark.slow
@pytest.mark.parametrize("number", sorted(FIRST.values()))
def test_bad_input_ends_with_one_error_line(number):
    verdict = carry_out(number, seed=0)
    assert not verdict.faults, (verdict.faults, verdict.case.command, verdict.stderr)


def test_faults_of_finds_each_fault(tmp_path):
    case = Case("data", train("d"))
    assert faults_of(case, tmp_path, 2, "error: what\n") == []
    (tmp_path / "runs" / "r").mkdir(parents=True)
    assert faults_of(case, tmp_path, 2, "error: what\n") == ["a run folder is left"]
    assert len(faults_of(case, tmp_path, 1, "Traceback\n...\nValueError: what\n")) == 2
    assert faults_of(case, tmp_path, 0, "") == ["ended with status 0"]
    assert faults_of(case, tmp_path, 1, f"error: {'x' * 3000}\n") == ["a message that is too long"]
    assert faults_of(case, tmp_path, 1, "error: \x1b[31m\n") == ["control characters"]


def test_good_input_has_no_faults(tmp_path):
    verdict = judge(Case("plan", ["plan"], harmless=True), tmp_path)
    assert (verdict.status, verdict.faults) == (0, [])
