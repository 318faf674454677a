from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from tests.rewards import server as faults
from tests.rewards.rollouts import rollout
from your_ai.errors import UserError
from your_ai.rewards.judge import ATTEMPTS, PATIENCE_S, Clock, Graded, Judge, JudgeSettings, delay_s

RUBRIC = """
criteria: [{name: a}, {name: b, scale: [0, 5]}]
formula: a / 10
prices: {input: 2, output: 10}
"""


def verdicts(judge: Judge, *completions: str) -> list[Graded]:
    futures = judge.begin([rollout(completion) for completion in completions])
    return [future.result(20) for future in futures]


def rubric(text: str = RUBRIC) -> str:
    Path("rubric.yaml").write_text(text)
    return "rubric.yaml"


def test_grades_become_a_reward_by_the_rubric(make_judge, server):
    server.odd = [faults.says('{"a": 7, "b": 2}')]
    [found] = verdicts(make_judge(rubric=rubric()), "yes")
    assert found == Graded(0.7, '{"a": 7, "b": 2}', calls=1, cost=pytest.approx(0.0021))


def test_the_same_completion_is_asked_once_and_kept(make_judge, server):
    judge = make_judge()
    found = verdicts(judge, "yes", "no", "yes")
    assert [v.reward for v in found] == pytest.approx([0.8] * 3)
    assert len(server.requests) == 2
    assert verdicts(judge, "yes")[0].is_cached
    [again] = verdicts(make_judge(), "no")
    assert (again.is_cached, again.calls, again.reply) == (True, 0, found[1].reply)
    assert len(server.requests) == 2


def test_requests_run_at_the_same_time_up_to_the_limit(make_judge, server):
    server.always = faults.slowly(0.05)
    judge = make_judge(concurrency=3)
    first = judge.begin([rollout("0")])  # a thread for one, then more
    found = verdicts(judge, *map(str, range(1, 9)))
    assert all(v.reward for v in found)
    assert first[0].result(5).reward
    assert server.most_busy == 3


def test_begin_returns_at_once(make_judge, server):
    judge = make_judge()
    server.always = faults.hang
    futures = judge.begin([rollout("a"), rollout("b")])
    assert not any(future.done() for future in futures)


@pytest.mark.parametrize("first", ["", "Sure! 5", '{"a": 11, "b": 2}', '{"a": 1}', None])
def test_an_unusable_reply_is_asked_for_once_again(make_judge, server, first):
    server.odd = [faults.says(first), faults.says('```\n{"a": 5, "b": 1}\n```')]
    [found] = verdicts(make_judge(rubric=rubric()), "yes")
    assert (found.reward, found.calls) == (0.5, 2)
    again = server.requests[1]["messages"]
    assert [m["role"] for m in again] == ["system", "user", "assistant", "user"]
    assert "Your reply cannot be used: " in again[-1]["content"]


def test_two_unusable_replies_leave_the_reward_missing_and_are_not_kept(make_judge, server):
    server.odd = [faults.says("one"), faults.says("two")]
    judge = make_judge()
    [found] = verdicts(judge, "yes")
    assert (found.reward, found.reply, found.calls) == (None, "two", 2)
    assert found.why.startswith("the reply cannot be used: it is not JSON")
    assert verdicts(judge, "yes")[0].reward == pytest.approx(0.8)


def test_a_formula_without_a_finite_value_leaves_the_reward_missing(make_judge, server):
    judge = make_judge(rubric=rubric("criteria: [{name: a}]\nformula: 1 / (a - 8)"))
    [found] = verdicts(judge, "yes")
    assert (found.reward, found.why) == (None, "the rubric's formula has no finite value")
    assert len(server.requests) == 1


def test_a_kept_reply_that_is_not_one_is_asked_for(make_judge, server):
    judge = make_judge()
    verdicts(judge, "yes")
    judge.cache.run("UPDATE replies SET reply = ?", ("hello",))
    [found] = verdicts(judge, "yes")
    assert (found.is_cached, found.reward) == (False, pytest.approx(0.8))


@pytest.mark.parametrize(
    "fault", [faults.status(500), faults.status(429), faults.sends(b"<html>"), faults.disconnect]
)
def test_failures_that_pass_cost_no_reward(make_judge, server, fake_time, fault):
    server.odd = [fault] * 3
    [found] = verdicts(make_judge(), "yes")
    assert (found.reward, found.calls) == (pytest.approx(0.8), 1)
    assert len(server.requests) == 4
    assert [0.25 * 2**i <= s <= 0.5 * 2**i for i, s in enumerate(fake_time.slept)] == [True] * 3


def test_the_server_is_not_asked_before_its_retry_after(make_judge, server, fake_time):
    server.odd = [
        faults.status(429, retry_after="7"),
        faults.status(503, retry_after="Thu, 01 Jan 2026 00:00:27 GMT"),
        faults.status(429, retry_after="100000"),
    ]
    assert verdicts(make_judge(), "yes")[0].reward
    assert fake_time.slept == [7, 20, 120]


def test_a_server_that_dies_and_comes_back_costs_no_reward(make_judge, server, fake_time):
    judge = make_judge()
    verdicts(judge, "first")
    server.stop()

    def come_back() -> None:
        if len(fake_time.slept) == 5:
            server.start()

    fake_time.before_waking = come_back
    found = verdicts(judge, *map(str, range(4)))
    assert all(v.reward for v in found)


def test_a_server_that_stays_away_is_waited_for_once(make_judge, server, fake_time):
    """Not once for each completion."""
    judge = make_judge(concurrency=1)
    server.stop()
    found = verdicts(judge, *map(str, range(6)))
    assert {v.reward for v in found} == {None}
    assert all(v.why.startswith("no connection") for v in found[:1])
    assert fake_time.seconds <= PATIENCE_S
    assert fake_time.seconds > PATIENCE_S / 3
    server.start()
    assert all(v.reward for v in verdicts(judge, "a", "b"))


def test_a_server_that_never_answers_costs_one_patience(make_judge, server, fake_time):
    """Not one timeout for each completion."""
    fake_time.before_waking = lambda: setattr(fake_time, "seconds", PATIENCE_S - 1)
    judge = make_judge(concurrency=1, timeout_s=0.05)
    server.always = faults.hang
    futures = judge.begin([rollout(str(i)) for i in range(20)])
    futures[0].result(20)
    with fake_time.lock:
        fake_time.before_waking = lambda: None
        fake_time.seconds = PATIENCE_S + 10
    whys = [future.result(20).why for future in futures]
    assert whys[0] == "no reply within 0.05 s, --judge-timeout-s"
    assert whys[-1] == "the server has not answered for 300 s"
    assert len(server.requests) < 10


def test_attempts_are_limited(make_judge, server, fake_time):
    server.always = faults.status(500, "broken")
    [found] = verdicts(make_judge(), "yes")
    assert (found.reward, found.why, found.calls) == (None, "HTTP 500: broken", 0)
    assert len(server.requests) == ATTEMPTS


@pytest.mark.parametrize("code", [400, 401, 404])
def test_failures_that_do_not_pass_are_not_repeated(make_judge, server, code):
    server.odd = [faults.status(code, "never")]
    judge = make_judge()
    [found] = verdicts(judge, "yes")
    assert (found.reward, found.why) == (None, f"HTTP {code}: never")
    assert verdicts(judge, "yes")[0].reward


def test_the_limit_of_calls_counts_answered_ones(make_judge, server):
    server.odd = [faults.status(500)] * 2
    judge = make_judge(concurrency=1, max_calls=2)
    found = verdicts(judge, "a", "b", "c", "a")
    assert [v.reward is None for v in found] == [False, False, True, False]
    assert found[2].why == "--judge-max-calls 2 is reached"
    assert judge.calls == 2
    assert verdicts(judge, "b")[0].is_cached


def test_the_limit_of_calls_holds_for_a_run_that_goes_on(make_judge, server):
    judge = make_judge(calls_before=2, max_calls=2)
    assert verdicts(judge, "a")[0].reward is None
    assert server.requests == []


def test_delays_depend_on_the_request_and_grow():
    delays = [delay_s(attempt, "key", None) for attempt in range(10)]
    assert delays == [delay_s(attempt, "key", None) for attempt in range(10)]
    assert delays != [delay_s(attempt, "other", None) for attempt in range(10)]
    assert max(delays) <= 30


# The first call


def test_the_first_call_is_one_small_request_that_does_not_count(make_judge, server):
    judge = make_judge(max_calls=1)
    judge.check()
    assert len(server.requests) == 1
    assert judge.calls == 0
    assert "2 + 2" in json.dumps(server.requests[0])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.status(401, "bad key"), "refuses the key (HTTP 401: bad key); set OPENAI_API_KEY"),
        (faults.status(403), "refuses the key (HTTP 403: no); set OPENAI_API_KEY"),
        (faults.status(404, "The model `fake` does not exist"), "--judge-model fake: "),
        (faults.status(400, "unknown model"), "--judge-model fake: "),
        (faults.status(404), "give the server's base URL, which usually ends with /v1"),
        (faults.sends(b"<html>"), "give the base URL of a server of OpenAI's protocol"),
        (faults.status(400, "odd"), "refuses the first call (HTTP 400: odd)"),
        (faults.disconnect, "check the URL, and that the server runs"),
    ],
)
def test_the_first_call_says_what_to_set(make_judge, server, fault, message):
    server.odd = [fault]
    with pytest.raises(UserError, match=r"^--(judge-url|judge-model|reward judge)") as error:
        make_judge().check()
    assert message in str(error.value)
    assert len(server.requests) == 1


def test_a_wrong_address_is_named(make_judge, server):
    with pytest.raises(UserError, match=r"nothing answers there .HTTP 404: Not Found"):
        make_judge(url=server.url.removesuffix("/v1")).check()
    server.stop()
    with pytest.raises(UserError, match=rf"^--judge-url {server.url}: no connection"):
        make_judge().check()
    server.start()


def test_the_first_call_is_repeated_while_the_server_is_busy(make_judge, server, fake_time):
    server.odd = [faults.status(503)] * 2
    make_judge().check()
    assert len(fake_time.slept) == 2
    server.odd = [faults.status(429, "busy")] * 3
    with pytest.raises(UserError, match=r"cannot answer now .HTTP 429: busy.; try again later"):
        make_judge().check()


def test_a_model_that_gives_no_grades_is_refused(make_judge, server):
    server.odd = [faults.says("Four."), faults.says('{"a": 1, "b": 2}')]
    make_judge(rubric=rubric()).check()
    server.always = faults.says("Four.")
    with pytest.raises(UserError, match=r"^--judge-model fake: its grades of a test answer cannot"):
        make_judge().check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": " "}, "needs --judge-model"),
        ({"model": "a\nb"}, "needs --judge-model"),
        ({"concurrency": 0}, "--judge-concurrency 0: expected 1 to 256"),
        ({"max_calls": 0}, "--judge-max-calls 0: expected at least 1 call"),
        ({"timeout_s": 0.0}, "--judge-timeout-s 0.0"),
        ({"timeout_s": float("nan")}, "--judge-timeout-s nan"),
        ({"rubric": "absent.yaml"}, "absent.yaml: no such file"),
    ],
)
def test_wrong_settings_are_errors(own_folder, settings, message):
    given = {"model": "fake", "url": "http://localhost:1/v1", **settings}
    with pytest.raises(UserError) as error:
        Judge(JudgeSettings(**given), own_folder)
    assert message in str(error.value)


# Closing


def test_closing_does_not_wait_for_requests_or_delays(make_judge, server):
    server.always = faults.status(503, retry_after="100")
    judge = make_judge(clock=Clock(), concurrency=2)  # it really waits
    futures = judge.begin([rollout("a"), rollout("b"), rollout("c")])
    while len(server.requests) < 2:
        time.sleep(0.005)
    start = time.monotonic()
    judge.close()
    assert time.monotonic() - start < 5
    assert [future.result(5).why for future in futures[:2]] == ["the judge was closed"] * 2
    assert not futures[2].done()


def test_threads_do_not_keep_the_process_alive(make_judge, server):
    judge = make_judge()
    verdicts(judge, "a")
    assert all(t.daemon for t in threading.enumerate() if t.name == "judge")
    judge.close()
    assert not any(thread.is_alive() for thread in judge.threads)
