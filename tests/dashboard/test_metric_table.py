from __future__ import annotations

from tests.dashboard.frames import rewarded, step
from your_ai.dashboard import metric_table


def test_every_metric_is_in_one_row_or_shown_elsewhere():
    metrics = rewarded(1).metrics | {"strange": 1.0}
    rows = metric_table.metric_rows(metrics)
    assert [name for name, _ in rows["metrics"]] == ["strange"]
    assert [name for name, _ in rows["judge"]] == ["calls", "cache hits"]
    assert [name for name, _ in rows["rollouts"]] == ["length", "cut off", "no spread", "tokens/s"]


def test_update_has_the_seconds_that_the_other_phases_leave():
    seconds = metric_table.phase_seconds(rewarded(1, seconds=2.0))
    assert seconds == {"generate": 1.25, "reward": 0.0009, "update": 2.0 - 1.2509}
    assert metric_table.phase_seconds(rewarded(1, seconds=0.5))["update"] == 0.0
    assert metric_table.phase_seconds(step(1)) == {}


def test_phases_without_a_peak_are_left_out():
    peaks = metric_table.phase_peaks(rewarded(1, peak_bytes=7))
    assert peaks == {"generate": 2.5e9, "update": 7}
    assert metric_table.phase_peaks(step(1)) == {}


def test_shares_are_percentages():
    shares = [0.0, 0.004, 0.25, 1.0, float("nan")]
    assert [metric_table.percent(share) for share in shares] == ["0%", "0.4%", "25%", "100%", "nan"]


def test_a_reward_without_a_spread_is_named():
    assert metric_table.named_rewards({"rewards/a/mean": 1.0}) == {"a": (1.0, None)}
    assert metric_table.named_rewards({"rewards/accuracies": 1.0}) == {}


def test_conversations_have_a_row_of_their_own_with_shares_in_percent():
    found = {"conversation/turns": 2.5, "conversation/ended_by_max_turns": 0.25, "loss": 0.5}
    rows = metric_table.metric_rows({"reward": 0.5, **found})
    assert rows["conversation"] == [("turns", "2.5"), ("ended by max turns", "25%")]
    assert rows["metrics"] == [("loss", "0.5")]
