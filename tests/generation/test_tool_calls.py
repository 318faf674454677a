from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import (
    DEMO_FOLDER,
    load_tokenizer,
    make_model,
    train_once,
    wait_until,
    working_in,
    write_rows,
)
from your_ai.config import build
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import HostOptions
from your_ai.errors import RunError, UserError
from your_ai.generation.tool_calls import ToolCaller, check_can_call, shown_characters
from your_ai.run.folder import RunFolder

SHOP = '''
import os, time
asked = 0

def price(item: str) -> str:
    """Look up what an item costs."""
    global asked
    asked += 1
    if item == "crash": os.killpg(0, 9)
    if item == "wait": time.sleep(600)
    return f"{asked} for {item}"
'''
PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up what an item costs.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}},
    },
}
UNREAD = 'So <tool_call>{"name": 3}</tool_call>.'


def calling(item: str) -> dict:
    function = {"name": "price", "arguments": {"item": item}}
    return {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"type": "function", "function": function, "id": "c1"}],
    }


def train_caller(folder: Path) -> RunFolder:
    """Train a run whose model asks for the price of a hat, and then says that it is 7.

    Asked for a cap, it writes a call that cannot be read.
    """
    found = {"role": "tool", "name": "price", "content": "7"}
    asked = [{"role": "user", "content": "A hat?"}, calling("hat"), found]
    turns = [*asked, {"role": "assistant", "content": "It is 7."}]
    unread = [{"role": "user", "content": "A cap?"}, {"role": "assistant", "content": UNREAD}]
    rows = [{"messages": each, "tools": [PRICE]} for each in (2 * turns, unread)]
    write_rows(folder / "data" / "train.jsonl", rows)
    values = {
        "model": str(make_model(folder / "model", bits=None, factor=1)),
        "data": str(folder / "data"), "run": "r", "max_steps": 100, "learning_rate": 0.003,
        "batch_size": 2, "lora_rank": 16, "lora_targets": "all-linear", "warmup_steps": 0,
        "supervise": False, "samples": 0,
    }  # fmt: skip
    with working_in(folder):
        return RunFolder(train_once(build(values, "test")).path.absolute())


@pytest.fixture
def pool(own_folder) -> Iterator[EnvironmentPool]:
    Path("own.py").write_text(SHOP)
    found = EnvironmentPool(HostOptions(tools=("own",)))
    yield found
    found.shutdown()


def ask(caller: ToolCaller, item: str) -> str:
    """The result of a call, which takes a while."""
    running = caller.results(calling(item))
    while True:
        try:
            next(running)
        except StopIteration as stopped:
            (message,) = stopped.value
            assert (message["role"], message["tool_call_id"]) == ("tool", "c1")
            return message["content"]


def test_state_of_tools_lasts_until_it_is_forgotten(pool):
    ours, theirs = ToolCaller(pool), ToolCaller(pool)
    assert [ask(ours, "hat"), ask(theirs, "hat"), ask(ours, "cap")] == [
        "1 for hat", "1 for hat", "2 for cap",
    ]  # fmt: skip
    ours.forget()
    assert ask(ours, "hat") == "1 for hat"
    assert ask(theirs, "hat") == "2 for hat"


def test_failed_conversation_is_a_result_and_begins_anew(pool):
    caller = ToolCaller(pool)
    ask(caller, "hat")
    assert ask(caller, "crash") == "error: its process ended"
    assert ask(caller, "hat") == "1 for hat"


def test_tool_that_is_stopped_ends(pool):
    caller = ToolCaller(pool)
    ask(caller, "hat")
    running = caller.results(calling("wait"))
    next(running)
    host = psutil.Process(pool.process.pid)
    assert host.children(recursive=True)
    running.close()
    wait_until(lambda: not host.children(recursive=True), 20)
    assert ask(caller, "hat") == "1 for hat"


def test_end_of_the_host_is_an_error(pool):
    pool.process.kill()
    pool.process.wait()
    with pytest.raises(RunError, match="process of the environments ended"):
        ask(ToolCaller(pool), "hat")


def test_model_that_shows_and_writes_calls_is_accepted(demo_tokenizer):
    check_can_call(demo_tokenizer, [PRICE])


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def replaced(old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "chat_template.jinja"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_template, "no chat template; use an instruct model"),
        (replaced("<tool_call>", "<call>"), "does not know how models of this family write calls"),
        (replaced("tool.function.name", "''"), "does not show tools to the model"),
    ],
)
def test_model_without_tools_is_refused(tmp_path, change, message):
    folder = shutil.copytree(
        DEMO_FOLDER, tmp_path / "m", ignore=shutil.ignore_patterns("data", "*-start", "start")
    )
    change(folder)
    with pytest.raises(UserError, match=rf"^--tools: .*{message}"):
        check_can_call(load_tokenizer(folder), [PRICE])


PARTS = st.sampled_from(["a", "<", "<tool", "_call>", "<tool_call>", "</tool_call>", "t"])


@given(st.lists(PARTS))
def test_text_is_shown_up_to_the_first_call(demo_tokenizer, parts):
    shown = ""
    for number in range(1, len(parts) + 1):
        text = "".join(parts[:number])
        ready = shown_characters(demo_tokenizer, text)
        assert text[:ready].startswith(shown)
        shown = text[:ready]
    whole = "".join(parts).partition("<tool_call>")[0]
    assert whole.startswith(shown)
    assert "<tool_call>".startswith(whole[len(shown) :])
