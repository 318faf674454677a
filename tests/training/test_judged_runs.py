"""Runs whose judge fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.conftest import adapter_of, events_of, notices_of, resume, rollouts_of, train
from tests.rewards import server as faults
from tests.rewards.server import Answerer, JudgeServer, graded
from your_ai.config import TrainConfig
from your_ai.errors import RunError
from your_ai.hub.find import store
from your_ai.rewards import judge
from your_ai.run import events
from your_ai.run.folder import RunFolder, find
from your_ai.run.rollout_files import RolloutRecord, rollout_steps

STEPS = 2


@pytest.fixture
def server(monkeypatch):
    pytest.importorskip("openai")
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(judge, "FIRST_DELAY_S", 0.02)
    monkeypatch.setattr(judge, "PATIENCE_S", 30.0)
    server = JudgeServer()
    server.reply = graded
    yield server
    server.stop()


@pytest.fixture
def judged(rewarded, server) -> Callable[..., TrainConfig]:
    """A function that makes the config of a short run with a judge, with changed settings."""
    of_judge = {"judge_model": "fake", "judge_url": server.url, "judge_timeout_s": 20.0}
    sizes = {"rollouts": 2, "prompts_per_step": 4, "max_new_tokens": 4, "max_steps": STEPS}
    return partial(rewarded, reward=["judge"], save_every=1, **of_judge, **sizes)


def forget_replies() -> None:
    (store() / "cache" / "judge.sqlite").unlink()


def records_of(run: RunFolder) -> list[RolloutRecord]:
    return [record for step in rollout_steps(run.path) for record in rollouts_of(run, step)]


def metric(run: RunFolder, name: str) -> float:
    return sum(step.metrics.get(name, 0) for step in events_of(run, events.Step))


def broken_connection(answerer: Answerer) -> None:
    """The server goes away, and comes back a little later."""

    def restart() -> None:
        answerer.judge.stop()
        time.sleep(0.2)
        answerer.judge.start()

    threading.Thread(target=restart).start()
    faults.disconnect(answerer)


FAULTS = [
    *(faults.slowly(0.9), broken_connection, faults.status(500), Answerer.grade),
    *(faults.status(503, retry_after="0.1"), faults.status(429, retry_after="0.2"), Answerer.grade),
    *(faults.sends(b"<html>"), faults.sends(b'{"choices": []}'), Answerer.grade),
    *(faults.says("10 of 10"), Answerer.grade, faults.says(None), Answerer.grade),
    *(faults.says('{"helpfulness": 99}'), Answerer.grade),
]


def test_faults_that_pass_cost_no_reward(judged, server):
    whole = train(judged(run="whole"))
    forget_replies()
    server.odd = [Answerer.grade, Answerer.grade, *FAULTS]
    run = train(judged(run="disturbed", judge_concurrency=1, judge_timeout_s=0.7))
    assert server.odd == []
    assert [step.step for step in events_of(run, events.Step)] == list(range(1, STEPS + 1))
    assert metric(run, "rewards/missing") == metric(run, "judge/missing") == 0
    assert [r.reward for r in records_of(run)] == [r.reward for r in records_of(whole)]
    assert adapter_of(run) == adapter_of(whole)


def test_a_repeated_run_asks_only_the_first_question(judged, server):
    whole = train(judged(run="whole"))
    assert metric(whole, "judge/calls") + 1 == len(server.requests)
    server.requests.clear()
    again = train(judged(run="again"))
    assert len(server.requests) == 1  # the check of key, address and model
    assert metric(again, "judge/calls") == 0
    asked = {(r.row, r.completion) for r in records_of(again)}  # a question may return later
    assert len(asked) <= metric(again, "judge/cache_hits") <= len(records_of(again))
    assert adapter_of(again) == adapter_of(whole)


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        pytest.param(faults.status(401, "key revoked"), "HTTP 401: key revoked", id="key"),
        pytest.param(faults.says("Very good."), "cannot be used", id="grades"),
        pytest.param(faults.status(503), "HTTP 503|answered", id="away"),
    ],
)
def test_a_fault_that_stays_ends_the_run_and_a_resumed_one_ends_the_same(
    judged, server, monkeypatch, fault, why
):
    """The rewards of one step are known, those of the next cannot be."""
    whole = train(judged(run="whole"))
    forget_replies()
    monkeypatch.setattr(judge, "PATIENCE_S", 0.2)
    known = len({(r.question, r.completion) for r in records_of(whole)[:8]})
    server.odd, server.always = [Answerer.grade] * (1 + known), fault
    with pytest.raises(RunError, match=rf"step 2: more than half .* in a row .*({why})"):
        train(judged(run="failed"))
    failed = find("failed")
    assert [step.step for step in events_of(failed, events.Step)] == [1]
    server.odd, server.always = [], None
    assert resume(failed) == 0
    assert adapter_of(failed) == adapter_of(whole)


def test_what_stays_missing_is_shown_as_missing(judged, server):
    asked: list[str] = []

    def only_some(body: dict) -> str:
        """Grades, except for every third content. Contents have random marks: no hash decides."""
        content = body["messages"][1]["content"]
        with server.lock:
            if content not in asked:
                asked.append(content)
            is_third = asked.index(content) % 3 == 2
        return "no grades" if is_third else graded(body)

    server.reply = only_some
    run = train(judged(run="partly", rollouts=4))
    records = records_of(run)
    missing = [r for r in records if r.reward is None]
    assert 0 < len(missing) < len(records)
    assert all(r.reply == "no grades" and r.advantage == 0 for r in missing)
    assert metric(run, "rewards/missing") == metric(run, "judge/missing") == len(missing)
    assert any("missing" in text and "it is not JSON" in text for text in notices_of(run))
    assert missing[0].rewards == {"judge": None}


def test_missing_rewards_are_counted_over_restarts(judged, server):
    """A step has two prompts, so the third one that is missing is the first of the next step."""
    server.always = faults.says("no grades")
    for start in (train, lambda _: resume(find("failed"))):
        server.odd = [Answerer.grade]  # the first call
        with pytest.raises(RunError, match=r"step 2: more than half .* for 3 prompts in a row"):
            start(judged(run="failed", prompts_per_step=2, max_steps=4))
        assert rollout_steps(find("failed").path) == [1]
