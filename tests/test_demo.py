"""The embedded demo's rows, and what its preferences do to generated answers."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
from jinja2 import Template

from tests.conftest import DEMO_FOLDER, call, events_of
from your_ai.config import DEMO_DATA
from your_ai.environments.demo_shop import price
from your_ai.run import events
from your_ai.run.folder import find

SPLITS = ("train", "valid", "test")
CONFIRMATIONS = (
    r"We will send (?P<number>\w+) (?P<goods>.+) to (?P<city>\w+)\.",
    r"(?P<number>\w+) (?P<goods>.+) will go to (?P<city>\w+)\.",
    r"(?P<city>\w+) will get (?P<number>\w+) (?P<goods>.+)\.",
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script that makes the demo."""
    spec = importlib.util.spec_from_file_location("make_demo", DEMO_FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows_of(data: str, *splits: str) -> list[dict]:
    paths = [DEMO_FOLDER / data / f"{split}.jsonl" for split in splits or SPLITS]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def confirmed(answer: str) -> tuple[str, str, str]:
    """The number, goods and city that an answer names."""
    found = next(filter(None, (re.fullmatch(form, answer) for form in CONFIRMATIONS)))
    return found["number"].lower(), found["goods"], found["city"]


def is_preferred(answer: str) -> bool:
    return answer.startswith("We will send ")


@pytest.mark.parametrize("data", DEMO_DATA.values())
def test_the_script_writes_the_rows_of_the_demo(tmp_path, script, data):
    script.write_rows(tmp_path, seed=7)
    for split in SPLITS:
        name = Path(data, f"{split}.jsonl")
        assert (tmp_path / name).read_bytes() == (DEMO_FOLDER / name).read_bytes()


def test_both_answers_of_a_pair_are_right_and_one_is_preferred():
    for row in rows_of("pairs"):
        number, goods, city = confirmed(row["chosen"])
        assert confirmed(row["rejected"]) == (number, goods, city)
        assert all(part in row["prompt"].lower() for part in (number, goods, city.lower()))
        assert is_preferred(row["chosen"])
        assert not is_preferred(row["rejected"])


@pytest.mark.parametrize("split", SPLITS)
def test_labels_judge_one_answer_of_each_pair(split):
    judged, pairs = rows_of("labels", split), rows_of("pairs", split)
    for row, pair in zip(judged, pairs, strict=True):
        answer = pair["chosen" if row["label"] else "rejected"]
        assert (row["prompt"], row["completion"]) == (pair["prompt"], answer)
    assert {row["label"] for row in judged} == {True, False}


def test_no_order_stands_in_two_files(script):
    orders = []
    for row in rows_of("data"):
        order = json.loads(row["messages"][1]["content"])
        goods = f"{order['colour']} {script.plural(order['count'], order['item'])}"
        orders.append((order["count"], goods, order["city"]))
    for row in rows_of("pairs"):
        number, goods, city = confirmed(row["chosen"])
        count = int(number) if number.isdigit() else 1 + script.NUMBERS.index(number)
        orders.append((count, goods, city))
    assert len(set(orders)) == len(orders) == 768 + 288


def test_no_question_for_a_price_is_about_an_order_of_another_file(script, tmp_path):
    script.write_rows(tmp_path, seed=7, start=tmp_path / "start")
    asked = [row["prompt"] for row in rows_of("tools")]
    started = (tmp_path / "start" / "train.jsonl").read_text().splitlines()
    asked += [json.loads(line)["messages"][0]["content"] for line in started]
    known = [row["messages"][0]["content"] for row in rows_of("data")]
    known += [row["prompt"] for row in rows_of("pairs")]
    orders = [order_in(text, script) for text in (*asked, *known)]
    assert len(set(orders)) == len(orders) == 352 + script.START_ROWS + 768 + 288


def order_in(text: str, script: ModuleType) -> tuple[str, ...]:
    """The count, colour, item and city that a question names."""
    said = re.findall(r"\w+", text)
    low = [word.lower() for word in said]
    counts = {word: str(n) for n, word in enumerate(script.NUMBERS, start=1)}
    (count,) = {counts.get(word, word) for word in low if word in counts or word.isdigit()}
    (colour,) = set(low) & set(script.COLOURS)
    (item,) = {each for each in script.ITEMS if {each, f"{each}s"} & set(low)}
    (city,) = set(said) & set(script.CITIES)
    return count, colour, item, city


def test_prices_are_those_of_the_tool(script):
    for row in rows_of("tools"):
        _, colour, item, _ = order_in(row["prompt"], script)
        assert row["answer"] == str(price(colour, item))


def test_chat_template_is_that_of_the_script_and_shows_calls(script):
    template = (DEMO_FOLDER / "chat_template.jinja").read_text()
    assert template == script.TEMPLATE
    row = script.start_row((3, "red", "lamp", "Oslo"), random.Random(1))
    assert Template(template).render(row) == (
        f"<|system|>Tools: price<|end|><|user|>{row['messages'][0]['content']}"
        '<|end|><|assistant|>We will ask.<tool_call>{"name": "price", "arguments": '
        f'{{"colour": "red", "item": "lamp"}}}}</tool_call><|end|><|tool|>{price("red", "lamp")}'
        f"<|end|><|assistant|>{price('red', 'lamp')}<|end|>"
    )


@pytest.mark.parametrize("preset", ["demo-dpo", "demo-kto"])
def test_generated_answers_become_those_that_are_preferred(small_demo, preset):
    for path in small_demo.glob("*/train.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:16]))
    less = ["--max-steps", 4, "--batch-size", 4, "--lora-layers", 2, "--eval-every", 0]
    faster = ["--learning-rate", 5e-3]
    assert call("train", "--config", preset, "--run", "r", *less, *faster) == 0
    before, after = events_of(find("r"), events.Samples)
    wanted = [row["chosen"] for row in rows_of("pairs", "test")[:2]]
    assert [confirmed(answer) for answer in before.answers] == list(map(confirmed, wanted))
    assert before.answers != wanted
    assert after.answers == wanted
    (end,) = events_of(find("r"), events.Validation)
    assert end.metrics["rewards/margins"] > 0.05


def test_rewards_make_more_fields_of_the_records_right(small_demo):
    """Fewer steps than in the demo, and without its answers before and after."""
    less = ["--max-steps", 4, "--prompts-per-step", 3, "--eval-every", 0, "--no-exact-match"]
    assert call("train", "--config", "demo-grpo", "--run", "r", "--samples", 0, *less) == 0
    first, *_ = events_of(find("r"), events.Step)
    (end,) = events_of(find("r"), events.Validation)
    assert end.metrics["reward"] > first.metrics["reward"] + 0.3


def test_prices_come_to_be_looked_up(small_demo):
    """Fewer steps than in the demo, and without its answers before and after."""
    less = ["--max-steps", 5, "--learning-rate", 1.2e-3, "--no-exact-match", "--samples", 0]
    assert (
        call("train", "--config", "demo-tools", "--run", "r", "--lr-schedule", "constant", *less)
        == 0
    )
    first, *_, last = events_of(find("r"), events.Step)
    assert last.metrics["reward"] > first.metrics["reward"] + 0.2
    assert last.metrics["conversation/tool_calls"] > first.metrics["conversation/tool_calls"] + 0.2


def test_a_reward_model_tells_pairs_apart_and_moves_a_policy_through_its_tokens(small_demo):
    """Fewer steps than in both demos."""
    less = ["--max-steps", 8, "--batch-size", 4, "--learning-rate", 2e-3, "--eval-every", 0]
    assert call("train", "--config", "demo-reward", "--run", "rm", *less) == 0
    (end,) = events_of(find("rm"), events.Validation)
    assert end.metrics["rewards/accuracies"] > 0.9
    few = ["--max-steps", 2, "--prompts-per-step", 2, "--eval-every", 0, "--learning-rate", 4e-3]
    assert call("train", "--config", "demo-soft", "--run", "softly", *few) == 0
    first, *_, last = events_of(find("softly"), events.Step)
    assert first.metrics["kl"] < 1e-6 < last.metrics["kl"]
    assert any(name.startswith("rewards/regex") for name in last.metrics)


def test_a_student_comes_nearer_to_its_teacher_on_its_own_answers(small_demo):
    """Fewer steps than in the demo, and a teacher that was trained for less."""
    less = ["--eval-every", 0, "--samples", 0, "--no-exact-match"]
    teacher = ["--model", "demo", "--data", "demo", "--from", "demo", "--learning-rate", 3e-3]
    longer = ["--max-steps", 8, "--batch-size", 4]
    assert call("train", *teacher, *longer, "--run", "orders", *less) == 0
    few = ["--max-steps", 6, "--prompts-per-step", 4]
    assert call("train", "--config", "demo-distill-student", "--run", "s", *few, *less) == 0
    first, *_ = events_of(find("s"), events.Step)
    (end,) = events_of(find("s"), events.Validation)
    assert end.metrics["divergence"] < 0.7 * first.metrics["divergence"]
