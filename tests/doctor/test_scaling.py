"""`bench --processes`: a step on one process, and on several."""

from __future__ import annotations

import json

import pytest

from tests.conftest import call
from your_ai.doctor import scaling

TINY = ("--shape", "tiny", "--seq-len", 16, "--batch-size", 2, "--steps", 2, "--lora-rank", 4)


@pytest.mark.slow
def test_two_processes_send_the_gradients_once_per_step(capsys):
    assert call("bench", *TINY, "--processes", 2, "--json") == 0
    one, two = json.loads(capsys.readouterr().out)["rows"]
    assert (one["processes"], two["processes"]) == (1, 2)
    assert one["sent_bytes"] == one["waited_share"] == 0
    assert two["gradient_bytes"] == one["gradient_bytes"] > 0
    assert two["gradient_bytes"] < two["sent_bytes"] < 1.05 * two["gradient_bytes"]
    assert 0 < two["waited_share"] < 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--plan", "fused,staged"), "measures one plan"),
        (("--plan", "packed"), "measures one plan"),
        (("--plan", "none"), "nothing to measure"),
        (("--plan", "fussed"), "fussed"),
        (("--against", "mlx-lm"), "--against: only works without --processes"),
        (("--objective", "grpo"), "not grpo"),
        (("--batch-size", 3), "--batch-size 3: must be a multiple of --processes 2"),
        (("--processes", 500, "--batch-size", 500), "--processes 500: must be at most 256"),
    ],
)
def test_what_is_not_measured_is_refused_before_a_process_starts(
    monkeypatch, capsys, flags, message
):
    monkeypatch.setattr(scaling, "run_ranks", None)
    assert call("bench", *TINY, "--processes", 2, *flags) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert message in line
