"""The rewards that the user chose, together: their values, weighted totals, and what is missing.

A missing reward is never 0: it is None, and so is the total, which then is left out of the
baseline of its group.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from your_ai.config import TrainConfig
from your_ai.errors import RESUME, RunError, UserError
from your_ai.gates.text import counted
from your_ai.hub.find import store
from your_ai.rewards.builtin import builtin, check_expected
from your_ai.rewards.functions import FunctionFailed, RewardFunction, load_reward_function
from your_ai.rewards.judge import Graded, Judge, JudgeSettings
from your_ai.rewards.names import FUNCTION, JUDGE, RUN, WeightedName, parse_rewards, reward_texts
from your_ai.rewards.rollout import Rollout

FAILURES = 3  # of a function, in a row, that end the run
MISSING_CALLS = 3  # prompts in a row with more than half of the totals missing, that end it
LOOK_EVERY_S = 0.2
MOST_REWARD = 1e15  # the squares of larger ones do not fit into float32
NOT_GIVEN, NOTHING_APPLIES = "the function gave none", "no reward applies to the prompt"
NO_SCORE = "the reward model gave no number"


@dataclass(frozen=True)
class Rewarded:
    """The rewards of n rollouts."""

    values: dict[str, list[float | None]]
    """By reward, n values without the weight, in the order of the rollouts; None: missing."""
    totals: list[float | None]
    """n weighted sums; None: missing."""
    replies: list[str | None]
    """n replies of the judge, for the record; None if there is none."""
    notices: list[str]
    """For the user: what is missing and why. Each is one line."""
    counts: dict[str, float]
    """With a judge: judge/calls, judge/cache_hits, judge/missing, and with prices judge/cost."""


# The score of each rollout by a trained reward model; None: missing.
ScoreRollouts = Callable[[Sequence[Rollout]], list[float | None]]


class Rewards:
    """The rewards of a run. Not for several threads.

    models: by name, the trained reward models, which are loaded after the rewards.
    """

    def __init__(
        self,
        names: Sequence[WeightedName],
        functions: Mapping[str, RewardFunction],
        judge: Judge | None = None,
        missing_before: int = 0,
    ) -> None:
        """functions: the user's, by name.

        missing_before: the last results of an interrupted run that missed more than half of
            their totals, in a row.
        """
        self.names = tuple(names)
        self.judge = judge
        self.builtin = {n.name: f for n in names if (f := builtin(n)) is not None}
        self.functions = functions
        self.models: dict[str, ScoreRollouts] = {}
        self.failures: Counter[str] = Counter()  # of each function, in a row
        self.missing_calls = min(missing_before, MISSING_CALLS - 1)  # in a row

    def begin(self, rollouts: Sequence[Rollout], step: int) -> Pending:
        """Start what takes long without this process, which is the judge; returns at once.

        The results must be taken in the same order.

        Raises UserError, naming the row, if one lacks an expected answer that a reward needs.
        """
        for rollout in rollouts:
            check_expected(self.names, rollout.expected, rollout.where)
        verdicts = [] if self.judge is None else self.judge.begin(rollouts)
        return Pending(self, rollouts, step, verdicts)

    def close(self) -> None:
        """Give up calls that are under way."""
        if self.judge is not None:
            self.judge.close()


def load_rewards(
    texts: Sequence[str],
    judge: JudgeSettings | None,
    cache_folder: Path,
    calls_before: int = 0,
    missing_before: int = 0,
) -> Rewards:
    """Import the functions of the rewards, and try the judge with one call.

    calls_before: the calls to the judge that the run made before it was interrupted.
    missing_before: see `Rewards`.

    Raises UserError if anything is missing or wrong.
    """
    names = parse_rewards(texts)
    functions = {n.name: load_reward_function(n.name) for n in names if n.kind == FUNCTION}
    found = Rewards(names, functions, missing_before=missing_before)
    if any(name.kind == JUDGE for name in names):
        found.judge = Judge(judge or JudgeSettings(model=""), cache_folder, calls_before)
        try:
            found.judge.check()
        except BaseException:
            found.close()
            raise
    return found


def chosen_rewards(config: TrainConfig, calls_before: int = 0, missing_before: int = 0) -> Rewards:
    """The rewards that the settings name, as of `load_rewards`."""
    judge = JudgeSettings(
        model=config.judge_model,
        url=config.judge_url or None,
        rubric=config.judge_rubric,
        concurrency=config.judge_concurrency,
        max_calls=config.judge_max_calls,
        timeout_s=config.judge_timeout_s,
    )
    cache = store() / "cache"
    return load_rewards(reward_texts(config), judge, cache, calls_before, missing_before)


@dataclass(frozen=True)
class RewardValues:
    """Values that one reward gives n rollouts."""

    values: Sequence[float | None]
    """Without the weight; None: missing."""
    whys: Sequence[str]
    """Why a value is missing, if it is."""
    left_out: Set[int] = frozenset()
    """The groups that the reward does not apply to."""


class Pending:
    """Rewards that are being computed."""

    def __init__(
        self,
        rewards: Rewards,
        rollouts: Sequence[Rollout],
        step: int,
        verdicts: Sequence[Future[Graded]],
    ) -> None:
        self.rewards, self.rollouts, self.step = rewards, tuple(rollouts), step
        self.verdicts = verdicts
        self.rewarded: Rewarded | None = None

    @classmethod
    def joined(cls, several: Sequence[Pending]) -> Pending:
        """All of them, at least one, as one call of the user's functions."""
        first = several[0]
        rollouts = [rollout for each in several for rollout in each.rollouts]
        verdicts = [verdict for each in several for verdict in each.verdicts]
        return cls(first.rewards, rollouts, first.step, verdicts)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the judge for some time; whether `result` then returns without waiting."""
        return not concurrent.futures.wait(self.verdicts, timeout_s).not_done

    def result(self, look: Callable[[], None] = lambda: None) -> Rewarded:
        """The rewards. Calls the user's functions, then waits for the judge.

        look: is called now and then while it waits, and may raise.

        Raises UserError if a function returned something wrong, or raised in FAILURES calls in a
        row, and RunError if MISSING_CALLS prompts in a row miss more than half of their totals.
        """
        if self.rewarded is None:
            self.rewarded = self.finish(look)
        return self.rewarded

    def finish(self, look: Callable[[], None]) -> Rewarded:
        notices: list[str] = []
        functions = self.rewards.functions
        called = {name: self.call(name, notices) for name in functions}  # while the judge works
        while not self.wait(LOOK_EVERY_S):
            look()
        verdicts = [future.result() for future in self.verdicts]
        found = {
            name.name: called.get(name.name) or self.others(name, verdicts)
            for name in self.rewards.names
        }
        summed = [self.total(i, found) for i in range(len(self.rollouts))]
        totals = [total for total, _ in summed]
        failed = [bool(reasons) and reasons != [NOTHING_APPLIES] for _, reasons in summed]
        why_missing = Counter(reason for _, reasons in summed for reason in reasons)
        if why_missing and self.rewards.names:
            missing = f"{counted(totals.count(None), 'reward')} of {len(totals)} missing"
            notices.append(f"step {self.step}: {missing} ({reasons_text(why_missing)})")
        if self.rewards.judge is not None:
            notices += self.rewards.judge.cache.take_notices()
        self.count_missing(failed, why_missing)
        values = {name: self.without_failed(reward.values) for name, reward in found.items()}
        replies = [verdict.reply for verdict in verdicts] or [None] * len(self.rollouts)
        return Rewarded(values, totals, replies, notices, self.counts())

    def without_failed(self, values: Sequence[float | None]) -> list[float | None]:
        """Rewards, with None for the rollouts that failed."""
        pairs = zip(self.rollouts, values, strict=True)
        return [None if rollout.failure else value for rollout, value in pairs]

    def others(self, name: WeightedName, verdicts: Sequence[Graded]) -> RewardValues:
        """The values of a reward that is not a user's function."""
        if name.kind == JUDGE:
            return RewardValues([v.reward for v in verdicts], [v.why for v in verdicts])
        if name.kind == RUN:
            scores = self.rewards.models[name.name](self.rollouts)
            return RewardValues(scores, [NO_SCORE] * len(scores))
        rewards = [self.rewards.builtin[name.name](rollout) for rollout in self.rollouts]
        return RewardValues(rewards, [NOT_GIVEN] * len(rewards))

    def call(self, name: str, notices: list[str]) -> RewardValues:
        """The values of a user's function. It does not apply to prompts for which it gives none.

        If it raises, it is called again for each prompt, so that others keep their rewards.
        """
        groups = by_group(self.rollouts)
        values: list[float | None] = [None] * len(self.rollouts)
        raised: dict[int, str] = {}  # what it raised, by group
        if len(groups) > 1:
            with contextlib.suppress(FunctionFailed):
                values = self.rewards.functions[name].rewards(self.rollouts, self.step)
                self.rewards.failures[name] = 0
                groups = {}
        failures = self.rewards.failures
        for group, places in groups.items():
            rollouts = [self.rollouts[i] for i in places]
            try:
                alone = self.rewards.functions[name].rewards(rollouts, self.step)
            except FunctionFailed as error:
                failures[name] += 1
                where = f"--reward {name}: step {self.step}: {rows_text(rollouts)}"
                if failures[name] >= FAILURES:
                    raise UserError(
                        f"{where}: raised {error}, in {FAILURES} calls in a row; correct the "
                        f"function, {RESUME}"
                    ) from error
                notices.append(f"{where}: raised {error}; its rewards of this call are missing")
                raised[group] = f"raised {error}"
                continue
            failures[name] = 0
            for i, value in zip(places, alone, strict=True):
                values[i] = value
        whys = [raised.get(rollout.group, NOT_GIVEN) for rollout in self.rollouts]
        there = zip(self.rollouts, values, strict=True)
        given = {rollout.group for rollout, value in there if value is not None}
        without = {rollout.group for rollout in self.rollouts} - given
        return RewardValues(values, whys, without - raised.keys())

    def total(self, i: int, found: dict[str, RewardValues]) -> tuple[float | None, list[str]]:
        """The weighted sum of the rewards of rollout i; None if one of them is missing, and why.

        Those of weight 0 are only shown.
        """
        rollout = self.rollouts[i]
        if rollout.failure:
            return None, [rollout.failure]
        applied = [
            name
            for name in self.rewards.names
            if name.weight and rollout.group not in found[name.name].left_out
        ]
        if not applied:
            return None, [NOTHING_APPLIES]
        total, reasons = 0.0, []
        for name in applied:
            reward = found[name.name]
            value = reward.values[i]
            if value is None:
                reasons.append(f"{name.name}: {reward.whys[i]}")
            else:
                total += name.weight * value
        if reasons:
            return None, reasons
        if not abs(total) <= MOST_REWARD:
            listed = ", ".join(f"{n.name} {found[n.name].values[i]:g}" for n in applied)
            raise UserError(
                f"{rollout.where}: step {self.step}: the weighted sum of the rewards is too large "
                f"({listed}); give smaller weights, or return smaller numbers"
            )
        return total, []

    def count_missing(self, failed: list[bool], reasons: Counter[str]) -> None:
        """Raise RunError if more than half of the totals are missing, of too many prompts in a row.

        failed: whether the total is missing although a reward applies to the prompt. Prompts with
        a single completion are counted as one.
        """
        groups = list(by_group(self.rollouts).values())
        if len(groups) == len(self.rollouts):
            groups = [list(range(len(self.rollouts)))] if self.rollouts else []
        most = 0
        for group in groups:
            is_missing = 2 * sum(failed[i] for i in group) > len(group)
            self.rewards.missing_calls = self.rewards.missing_calls + 1 if is_missing else 0
            most = max(most, self.rewards.missing_calls)
        if most >= MISSING_CALLS and 2 * sum(failed) > len(failed):
            raise RunError(
                f"step {self.step}: more than half of the rewards were missing for "
                f"{MISSING_CALLS} prompts in a row ({reasons_text(reasons)}); correct that, then "
                "resume the run"
            )

    def counts(self) -> dict[str, float]:
        judge = self.rewards.judge
        if judge is None:
            return {}
        once = list({id(future): future.result() for future in self.verdicts}.values())
        counts = {
            "judge/calls": float(sum(verdict.calls for verdict in once)),
            "judge/cache_hits": float(sum(verdict.is_cached for verdict in once)),
            "judge/missing": float(sum(f.result().reward is None for f in self.verdicts)),
        }
        if judge.rubric.prices is not None:
            counts["judge/cost"] = sum(verdict.cost for verdict in once)
        return counts


def by_group(rollouts: Sequence[Rollout]) -> dict[int, list[int]]:
    """The places of the completions of each prompt."""
    found: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        found.setdefault(rollout.group, []).append(place)
    return found


def rows_text(rollouts: Sequence[Rollout]) -> str:
    """`train.jsonl:3`, or `train.jsonl:3 and 2 more rows`."""
    places = list(dict.fromkeys(rollout.where for rollout in rollouts))
    more = len(places) - 1
    return f"{places[0]} and {counted(more, 'more row')}" if more else places[0]


def reasons_text(reasons: Counter[str], most: int = 3) -> str:
    """The most frequent reasons, each with its count."""
    listed = [f"{count} x {reason}" for reason, count in reasons.most_common(most)]
    if len(reasons) > most:
        listed.append(f"{len(reasons) - most} other reasons")
    return "; ".join(listed)
