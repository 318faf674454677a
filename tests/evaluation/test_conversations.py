"""Base and adapter are measured as policies, in conversations."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.conftest import calls_of, chat, train_once, write_rows
from tests.fault.processes import COMMAND
from your_ai import api
from your_ai.config import TrainConfig
from your_ai.config.requests import EvaluateRequest
from your_ai.dashboard.measures import wilson
from your_ai.errors import UserError
from your_ai.evaluation import conversations as policies
from your_ai.evaluation import record
from your_ai.evaluation.bootstrap import paired
from your_ai.evaluation.conversations import acting, line_of_message
from your_ai.generation import generate
from your_ai.memory.budget import waves_within
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import RolloutSizes
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder

SHOPS = '''
import json, os

class Scored:
    """Two turns; pays a quarter, and then what the row says."""

    def reset(self, row, seed):
        self.row, self.asked = row, 0
        order = f"Please send three red lamps to {row['city']}."
        return {"messages": [{"role": "user", "content": order}]}

    def step(self, message):
        self.asked += 1
        if self.row.get("fails") == self.asked:
            raise ValueError("out of stock")
        if self.asked == 2:
            return {"messages": [], "reward": self.row["score"], "done": True}
        return {"messages": [{"role": "user", "content": "How many?"}], "reward": 0.25}

    def close(self):
        pass

class Logged(Scored):
    """One turn; pays for letters, and writes what it heard."""

    def step(self, message):
        said = message["content"]
        with open("heard.jsonl", "a") as file:
            file.write(json.dumps([self.row["city"], said]) + "\\n")
        return {"messages": [], "reward": sum(map(str.isalpha, said)) % 7 / 6, "done": True}

class Unready(Scored):
    def reset(self, row, seed):
        raise ValueError("the shop is closed")

class Stepless:
    def reset(self, row, seed):
        pass

def lamps(city: str) -> int:
    """Count the lamps that a city has."""
    return len(city)
'''
CITIES = ("Oslo", "Lima", "Rome", "Cairo", "Bern", "Riga")
SCORES = (1.0, 0.0, 0.75, 0.5, 0.8, 0.7)


@pytest.fixture
def run(configure: Callable[..., TrainConfig], own_folder: Path) -> RunFolder:
    """A short run with conversations, whose adapter answers otherwise than the base."""
    (own_folder / "shops.py").write_text(textwrap.dedent(SHOPS))
    rows = [{"city": city, "score": score} for city, score in zip(CITIES, SCORES, strict=True)]
    data = write_rows(own_folder / "train.jsonl", rows)
    write_rows(own_folder / "rows.jsonl", rows)
    return train_once(
        configure(
            model="demo", data=str(data), valid="none", objective="grpo",
            environment="shops:Logged", rollouts=4, prompts_per_step=2, max_steps=3,
            max_new_tokens=24, max_seq_length=128, learning_rate=3e-2, lora_layers=4,
        )
    )  # fmt: skip


def measured(**request: Any) -> dict[str, Any]:
    return api.evaluate("r", **{"data": "rows.jsonl", "resamples": 100, **request})


def hosts() -> list[psutil.Process]:
    found = list[psutil.Process]()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            found += [each] * ("environments.host" in " ".join(each.cmdline()))
    return found


def test_shares_and_means_are_those_of_the_rows(run):
    """The environment pays what the rows say, whatever the model says."""
    found = measured(environment="shops:Scored")
    rewards = np.array(SCORES) + 0.25
    share = (rewards >= 1).mean()
    assert 0 < share < 1
    for system in ("base", "adapter"):
        success = found["measures"]["success"][system]
        bounds = wilson(share, len(rewards), 0.95)
        assert success["value"] == pytest.approx(share)
        assert (success["low"], success["high"]) == pytest.approx(bounds)
        assert found["measures"]["reward"][system]["value"] == pytest.approx(rewards.mean())
        assert found["measures"]["turns"][system]["value"] == 2
        assert found["measures"]["unfinished"][system]["value"] == 0
        assert found["conversations"][system] == {"ended": {"done": 6}, "without_reward": 0}
    assert found["conversations"]["with"] == "--environment shops:Scored"
    assert (found["better"], found["worse"], found["equal"], found["rows"]) == (0, 0, 6, 6)
    more = measured(environment="shops:Scored", success_reward=0.95)
    assert more["measures"]["success"]["base"]["value"] == pytest.approx((rewards >= 0.95).mean())
    assert record.read_evaluation(run) == more


def test_base_and_adapter_say_what_they_answer_alone(run):
    """With the run's own environment; rewards, intervals and the worst rows follow from it."""
    Path("heard.jsonl").unlink(missing_ok=True)
    found = measured()
    heard = defaultdict(list)
    for line in Path("heard.jsonl").read_text().splitlines():
        city, said = json.loads(line)
        heard[city].append(said)
    trained = open_trained(str(run.path))
    for place, adapted in enumerate((False, True)):
        network, tokenizer = generate.load_run(trained, adapted)
        for city in CITIES:
            order = [{"role": "user", "content": f"Please send three red lamps to {city}."}]
            text = tokenizer.apply_chat_template(order, tokenize=False, add_generation_prompt=True)
            said = generate.answer(network, tokenizer, text, 24)
            assert heard[city][place].strip() == said.strip()
    paid = np.array([[sum(map(str.isalpha, s)) % 7 / 6 for s in heard[city]] for city in CITIES])
    base, adapter = paid.T
    assert (base != adapter).any()
    ours = found["measures"]["reward"]
    theirs = paired(base, adapter, np.ones(6), 100, 0).intervals(0.95)
    for system, interval in theirs.items():
        assert ours[system] == pytest.approx(vars(interval))
    assert found["worse"] == (base - adapter > 1e-9).sum()
    lost = base - adapter
    worst = [int(row["where"].split(":")[1]) - 1 for row in found["worst"]]
    assert worst == [i for i in np.argsort(-lost, kind="stable") if lost[i] > 1e-9][:3]
    for row, place in zip(found["worst"], worst, strict=True):
        assert row["adapter_reward"] == pytest.approx(adapter[place])
        assert row["turns"][0].startswith("user: Please send three red lamps")
        assert row["turns"][1] == line_of_message(
            {"role": "assistant", "content": heard[CITIES[place]][1]}
        )


def test_failed_environments_are_no_success_and_are_counted(run):
    rows = [
        {"city": city, "score": 1.0, "fails": fails}
        for city, fails in zip(CITIES, (0, 1, 2, 0, 0, 0), strict=True)
    ]
    write_rows(Path("rows.jsonl"), rows)
    notes: list[str] = []
    found = measured(environment="shops:Scored", on_note=notes.append)
    for system in ("base", "adapter"):
        counts = {"ended": {"done": 4, "error": 2}, "without_reward": 2}
        assert found["conversations"][system] == counts
        assert found["measures"]["success"][system]["value"] == pytest.approx(4 / 6)
        assert found["measures"]["unfinished"][system]["value"] == pytest.approx(2 / 6)
        assert found["measures"]["reward"][system]["value"] == pytest.approx(1.25)
    assert len([n for n in notes if "2 of 6 conversations" in n and "out of stock" in n]) == 2
    assert not hosts()


def test_more_failures_than_a_run_may_have_end_nothing(run, monkeypatch):
    monkeypatch.setattr(policies, "MOST_KEPT", 1)
    write_rows(Path("rows.jsonl"), [{"city": c, "score": 1.0, "fails": 1} for c in CITIES])
    found = measured(environment="shops:Scored")
    assert found["conversations"]["adapter"] == {"ended": {"error": 6}, "without_reward": 6}
    assert found["measures"]["success"]["adapter"]["value"] == 0
    assert "reward" not in found["measures"]


def test_few_conversations_in_memory_give_the_same_numbers(run, monkeypatch):
    whole = measured()
    monkeypatch.setattr(policies, "MOST_KEPT", 2)
    assert measured(batch_size=1) == whole


def test_conversations_stay_in_the_memory_limit(run, monkeypatch):
    """The least limit gives waves of one row, or weights that are read for each token."""
    asked = calls_of(monkeypatch, policies, "complete")
    trained = open_trained(str(run.path))
    sizes = RolloutSizes(128, 1, 1, len(CITIES), converses=True)
    _, least = waves_within(facts_of(trained.base, 4), sizes, 1, can_stream=True)
    measured(max_memory=2 * least / 1e9)
    assert {call.given[5] for call in asked} == {len(CITIES)}
    asked.clear()
    measured(max_memory=(least + 1e5) / 1e9)
    assert {call.given[5] for call in asked} == {1}
    with pytest.raises(UserError, match="--max-memory"):
        measured(max_memory=(least - 1e6) / 1e9)
    assert not hosts()


def test_an_interrupt_keeps_nothing_and_leaves_no_process(run):
    def interrupt(at: Any) -> None:
        if at.doing == "adapter: conversations" and at.done:
            assert hosts()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(on_progress=interrupt)
    assert not hosts()
    assert record.read_evaluation(run) is None


def test_the_environment_ends_with_a_killed_process(run):
    (Path("shops.py")).write_text(
        SHOPS.replace("self.asked += 1", "os.kill(int(os.environ['EVALUATION']), 9)")
    )
    code = f"import os, sys\nos.environ['EVALUATION'] = str(os.getpid())\n{COMMAND}"
    options = ["eval", "r", "--data", "rows.jsonl", "--environment", "shops:Scored"]
    done = subprocess.run([sys.executable, "-c", code, *options], capture_output=True, check=False)
    assert done.returncode == -9  # its output is read to the end: no process keeps it open
    assert record.read_evaluation(run) is None


# -- other environments than the run's


def test_tools_for_a_run_without_rewards_compare_with_the_expected_answer(configure, own_folder):
    (own_folder / "shops.py").write_text(SHOPS)
    rows = [chat(f"Question {i}", f"Answer {i}") for i in range(3)]
    data = write_rows(own_folder / "train.jsonl", rows)
    train_once(configure(model="demo", data=str(data), valid="none", max_steps=1))
    found = measured(data=str(data), tools=["shops:lamps"])
    assert found["conversations"]["with"] == "--tools shops:lamps"
    assert found["measures"]["success"]["base"]["value"] == 0
    prompts = write_rows(own_folder / "prompts.jsonl", [{"prompt": "Question"}])
    with pytest.raises(UserError, match=r"prompts.jsonl:1: has no expected answer.*answer"):
        measured(data=str(prompts), tools=["shops:lamps"])


def test_rewards_that_another_environment_keeps(configure):
    def rewards_of(given: dict[str, Any], **settings: Any) -> tuple[str, ...]:
        rewarded = {"objective": "grpo", "model": "demo", **settings}
        return acting(configure(**rewarded), EvaluateRequest("r", **given)).reward

    environment, tools = {"environment": "a:B"}, {"tools": ["python"]}
    both = ("environment=2", "length:9")
    assert rewards_of(environment, environment="c:D", reward=both) == both
    assert rewards_of(environment, reward=("length:9",)) == ()
    assert rewards_of(tools, reward=("length:9",)) == ("length:9",)
    assert rewards_of(tools, environment="c:D", reward=both) == ("length:9",)
    assert rewards_of(tools, environment="c:D") == ("exact_match",)
    assert rewards_of({}, tools=("python",), reward=("length:9",)) == ("length:9",)


@pytest.mark.parametrize(
    ("request_of", "wanted"),
    [
        ({"environment": "nowhere:Shop"}, "nowhere"),
        ({"environment": "shops:Stepless"}, "has no method step"),
        ({"environment": "shops:Unready"}, "the shop is closed"),
        ({"environment": "shops:Scored", "tools": ["python"]}, "cannot be combined"),
        ({"metric": "m:f"}, "--metric: conversations are measured by their rewards"),
        ({"teacher": "demo"}, "--teacher: conversations"),
        ({"max_tokens": 120}, "with --max-new-tokens 120"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, request_of, wanted):
    with pytest.raises(UserError, match=wanted):
        measured(**request_of)
    assert not hosts()


def test_a_share_of_successes_needs_conversations(configure, own_folder):
    config = configure()
    with pytest.raises(UserError, match="--success-reward: only works with --environment"):
        acting(config, EvaluateRequest("r", success_reward=0.5))
    assert acting(config, EvaluateRequest("r")) is config
