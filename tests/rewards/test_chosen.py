from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.rewards import server as faults
from tests.rewards.rollouts import rollout
from your_ai.errors import RunError, UserError
from your_ai.rewards.chosen import Rewarded, Rewards, load_rewards
from your_ai.rewards.functions import RewardFunction
from your_ai.rewards.judge import JudgeSettings
from your_ai.rewards.names import parse_rewards
from your_ai.rewards.rollout import Rollout


def make(*texts: str, judge: Any = None, **functions: Callable) -> Rewards:
    """Rewards whose function m:NAME is the keyword argument NAME."""
    named = {f"m:{name}": function for name, function in functions.items()}
    loaded = {name: RewardFunction(name, function, None) for name, function in named.items()}
    return Rewards(parse_rewards(texts), loaded, judge)


def rewarded(rewards: Rewards, rollouts: Sequence[Rollout], step: int = 7) -> Rewarded:
    return rewards.begin(rollouts, step).result()


def group(*completions: str, index: int = 0) -> list[Rollout]:
    return [rollout(c, group=index, where=f"t.jsonl:{index + 1}") for c in completions]


def returns(*values: float | None) -> Callable:
    return lambda **_: list(values)


def fails(**_: Any) -> list:
    raise ValueError("no luck")


def test_totals_are_weighted_sums_of_values_without_weights():
    rewards = make("exact_match=2", "length:5=-0.5", "m:f", f=returns(0.25, 0.5))
    found = rewarded(rewards, [rollout("yes", tokens=5), rollout("no", tokens=10)])
    assert found == Rewarded(
        values={"exact_match": [1, 0], "length:5": [1, 0], "m:f": [0.25, 0.5]},
        totals=[1.75, 0.5],
        replies=[None, None],
        notices=[],
        counts={},
    )


def test_a_reward_of_weight_0_is_only_shown():
    rewards = make("exact_match", "m:f=0", f=returns(None, 0.5))
    found = rewarded(rewards, group("yes", "no"))
    assert found.values["m:f"] == [None, 0.5]
    assert (found.totals, found.notices) == ([1, 0], [])


def test_a_missing_reward_makes_its_total_missing_and_not_0():
    rewards = make("exact_match", "m:f", f=returns(None, 0.5, 0))
    found = rewarded(rewards, group("yes", "yes", "no"))
    assert found.values["m:f"] == [None, 0.5, 0]
    assert found.totals == [None, 1.5, 0]
    assert found.notices == ["step 7: 1 reward of 3 missing (1 x m:f: the function gave none)"]


def test_a_function_that_gives_none_for_a_whole_group_does_not_apply_to_it():
    rewards = make("exact_match", "m:f", f=returns(None, None, None, 0.5))
    found = rewarded(rewards, group("yes", "no") + group("yes", "yes", index=1))
    assert found.totals == [1, 0, None, 1.5]
    assert len(found.notices) == 1
    assert "1 reward of 4 missing" in found.notices[0]


def test_the_total_is_missing_if_no_reward_applies():
    rewards = make("m:f", "m:g", f=returns(None, None, 1, 1), g=returns(None, None, 1, 1))
    found = rewarded(rewards, group("a", "b") + group("a", "b", index=1))
    assert found.totals == [None, None, 2, 2]
    assert found.notices == ["step 7: 2 rewards of 4 missing (2 x no reward applies to the prompt)"]


def test_a_function_that_raises_leaves_its_rewards_missing():
    """Not left out: a failure does not mean that it does not apply."""
    rewards = make("exact_match", "m:f", f=fails)
    found = rewarded(rewards, group("yes", "no"))
    assert found.values == {"exact_match": [1, 0], "m:f": [None] * 2}
    assert found.totals == [None] * 2
    assert found.notices == [
        "--reward m:f: step 7: t.jsonl:1: raised ValueError: no luck; its rewards of this call are "
        "missing",
        "step 7: 2 rewards of 2 missing (2 x m:f: raised ValueError: no luck)",
    ]


def test_a_function_is_called_with_all_prompts_and_alone_if_it_raises():
    """So one bad completion costs the rewards of its prompt only."""
    calls = []

    def careful(completions, **_):
        calls.append(list(completions))
        if "bad" in completions:
            raise ValueError("no luck")
        return [1.0] * len(completions)

    rewards = make("m:f", f=careful)
    rollouts = group("a", "b") + group("bad", "c", index=1) + group("d", "e", index=2)
    assert rewarded(rewards, rollouts).totals == [1, 1, None, None, 1, 1]
    assert calls == [["a", "b", "bad", "c", "d", "e"], ["a", "b"], ["bad", "c"], ["d", "e"]]
    calls.clear()
    whole = rewards.begin(group("a"), 7).joined(
        [rewards.begin(each, 7) for each in (group("a"), group("b", index=1))]
    )
    assert whole.result().totals == [1, 1]
    assert calls == [["a", "b"]]


def test_prompts_that_no_reward_applies_to_do_not_end_a_run():
    rewards = make("m:f", f=lambda completions, **_: [None] * len(completions))
    for _ in range(5):
        found = rewarded(rewards, group("a", "b") + group("c", "d", index=1))
        assert found.totals == [None] * 4


def test_the_third_call_in_a_row_that_raises_ends_the_run():
    faults_of = iter([fails, fails, returns(1), fails, fails, fails])
    rewards = make("m:f", f=lambda **given: next(faults_of)(**given))
    for step in range(5):
        rewarded(rewards, group("a"), step)
    with pytest.raises(UserError, match=r"step 5: t.jsonl:1: raised ValueError: no luck, in 3 ca"):
        rewarded(rewards, group("a"), 5)


def test_a_result_is_computed_once():
    calls = []
    rewards = make("m:f", f=lambda **given: calls.append(1) or [1])
    pending = rewards.begin(group("a"), 7)
    assert calls == []
    assert pending.wait(0)
    assert pending.result() is pending.result()
    assert calls == [1]


def test_a_wrong_result_of_a_function_is_an_error_at_once():
    with pytest.raises(UserError, match=r"^--reward m:f: step 7: t.jsonl:1: returned nan"):
        rewarded(make("m:f", f=returns(math.nan)), group("a"))
    with pytest.raises(UserError, match=r"^--reward m:f: step 7: returned 2 numbers for 1"):
        rewarded(make("m:f", f=returns(1, 2)), group("a"))


@pytest.mark.parametrize("reward", [1e16, 1e308])
def test_a_sum_that_is_too_large_is_an_error(reward):
    rewards = make("m:f=10", "exact_match", f=returns(reward))
    with pytest.raises(UserError, match=r"^t.jsonl:1: step 7: the weighted sum .*m:f 1e.(16|308)"):
        rewarded(rewards, group("a"))


def test_a_row_without_the_expected_answer_is_an_error_before_anything_is_asked():
    rewards = make("m:f", "exact_match", f=fails)
    with pytest.raises(UserError, match=r"^t.jsonl:4: has no expected answer"):
        rewards.begin([rollout(expected=None, where="t.jsonl:4")], 7)


def test_too_many_missing_totals_in_a_row_end_the_run():
    most = (None, None, 1)
    values = iter([most, (None, 1, 1), most, most, most])
    rewards = make("m:f", f=lambda **_: list(next(values)))
    for step in range(4):
        rewarded(rewards, group("a", "b", "c"), step)
    with pytest.raises(
        RunError, match=r"^step 4: more than half .*2 x m:f: the function gave none"
    ):
        rewarded(rewards, group("a", "b", "c"), 4)


def test_no_rollouts_have_no_rewards():
    found = rewarded(make("exact_match", "m:f", f=fails), [])
    assert found == Rewarded({"exact_match": [], "m:f": []}, [], [], [], {})


# With the judge


def test_the_judge_is_one_of_the_rewards(make_judge, server):
    Path("rubric.yaml").write_text("criteria: [{name: a}]\nprices: {input: 1, output: 0}")
    rewards = make("exact_match", "judge=0.5", judge=make_judge(rubric="rubric.yaml"))
    found = rewarded(rewards, group("yes", "no", "yes"))
    assert found.values == {"exact_match": [1, 0, 1], "judge": [0.8, 0.8, 0.8]}
    assert found.totals == pytest.approx([1.4, 0.4, 1.4])
    assert found.replies == ['{"a": 8}'] * 3
    counts = {"judge/calls": 2, "judge/cache_hits": 0, "judge/missing": 0, "judge/cost": 0.002}
    assert found.counts == pytest.approx(counts)
    assert rewards.judge.calls == 2
    again = rewarded(rewards, group("yes", "no", "yes"))
    assert (again.totals, again.counts["judge/cache_hits"]) == (found.totals, 2)
    assert again.counts["judge/calls"] == again.counts["judge/cost"] == 0


def test_what_the_judge_cannot_say_is_missing_with_its_reason(make_judge, server):
    rewards = make("exact_match", "judge", judge=make_judge(concurrency=1, max_calls=1))
    found = rewarded(rewards, group("yes", "no", "no"))
    assert found.totals == [pytest.approx(1.8), None, None]
    assert found.notices == [
        "step 7: 2 rewards of 3 missing (2 x judge: --judge-max-calls 1 is reached)"
    ]
    assert found.counts == {"judge/calls": 1, "judge/cache_hits": 0, "judge/missing": 2}
    rewarded(rewards, group("b"))
    with pytest.raises(RunError, match=r"--judge-max-calls 1 is reached.*then resume the run"):
        rewarded(rewards, group("c"))


def test_a_damaged_cache_is_a_notice(make_judge, own_folder):
    (own_folder / "cache").mkdir()
    (own_folder / "cache" / "judge.sqlite").write_bytes(b"x" * 5000)
    found = rewarded(make("judge", judge=make_judge()), group("yes"))
    assert found.totals == pytest.approx([0.8])
    assert "is damaged" in found.notices[0]


def test_judging_overlaps_with_other_work(make_judge, server):
    server.always = faults.hang
    rewards = make("judge", judge=make_judge())
    pending = rewards.begin(group("yes"), 7)
    assert not pending.wait(0.01)


# Loading


@pytest.fixture
def module(own_folder, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("loaded_rewards.py").write_text("def f(completions): return [len(c) for c in completions]")
    yield "loaded_rewards:f"
    sys.modules.pop("loaded_rewards", None)


def test_functions_are_imported_when_rewards_are_loaded(module, own_folder):
    rewards = load_rewards(["exact_match", f"{module}=0.5"], None, own_folder / "cache")
    assert rewarded(rewards, group("yes", "a")).totals == [2.5, 0.5]
    assert not (own_folder / "cache").exists()
    rewards.close()
    with pytest.raises(UserError, match=r"^--reward absent_9:f: absent_9 cannot be imported"):
        load_rewards(["absent_9:f"], None, own_folder)


def test_the_judge_is_tried_when_rewards_are_loaded(server, own_folder):
    settings = JudgeSettings("fake", server.url)
    rewards = load_rewards(["judge"], settings, own_folder / "cache")
    assert len(server.requests) == 1
    assert rewarded(rewards, group("yes")).totals == pytest.approx([0.8])
    rewards.close()
    server.odd = [faults.status(401, "bad key")]
    with pytest.raises(UserError, match=r"set OPENAI_API_KEY"):
        load_rewards(["judge"], settings, own_folder / "cache")


def test_a_second_run_asks_nothing_but_the_first_call(server, own_folder):
    for _ in range(2):
        rewards = load_rewards(["judge"], JudgeSettings("fake", server.url), own_folder / "cache")
        found = rewarded(rewards, group("yes", "no"))
        rewards.close()
    assert found.counts == {"judge/calls": 0, "judge/cache_hits": 2, "judge/missing": 0}
    assert len(server.requests) == 4


def test_a_judge_without_a_model_is_an_error(own_folder):
    with pytest.raises(UserError, match=r"^--reward judge: needs --judge-model"):
        load_rewards(["judge"], None, own_folder)


def test_whoever_waits_for_the_judge_may_look_elsewhere_and_give_up():
    class Slow:
        def begin(self, rollouts):
            return [Future() for _ in rollouts]

    called = []
    rewards = make("judge", "m:f", judge=Slow(), f=lambda **_: called.append(1) or [1.0])
    with pytest.raises(InterruptedError):
        rewards.begin(group("a"), 1).result(Mock(side_effect=InterruptedError))
    assert called == [1]  # while the judge works
