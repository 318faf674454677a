from __future__ import annotations

import contextlib
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import call, wait_until
from tests.generation.test_tool_calls import train_caller
from tests.terminal import on_terminal
from your_ai.gates.text import printable
from your_ai.generation import chat as chatting
from your_ai.generation.chat import Conversation
from your_ai.generation.generate import Sampling
from your_ai.nets.saved_adapter import open_trained
from your_ai.run.folder import RunFolder


@pytest.fixture
def chat(run, monkeypatch):
    """A function that runs `your_ai chat` with a text on standard input; its exit status."""

    def talk(text: str, *options: object) -> int:
        stdin = io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8", newline="")
        monkeypatch.setattr(sys, "stdin", stdin)
        return call("chat", run.path, "--max-tokens", 5, *options)

    return talk


def answers_of(run: RunFolder, *questions: str, adapted: bool = True) -> list[str]:
    talker = chatting.open_talker(open_trained(str(run.path)), Sampling(max_tokens=5))
    conversation, answers = Conversation(), []
    for question in questions:
        said = "".join(r.text for r in talker.answer(conversation, question))
        base = "".join(r.text for r in talker.answer(conversation, question, adapted=False))
        answers.append(printable(said if adapted else base))
        conversation = conversation.followed_by(question, said)
    return answers


def test_each_input_line_gets_an_answer(run, chat, capsys):
    assert chat("Question 1\n\nand\\\nmore") == 0
    first, second = answers_of(run, "Question 1", "and\nmore")
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_reset_starts_a_new_conversation(run, chat, capsys):
    assert chat("Question 1\n/reset\nQuestion 1\n/exit\nQuestion 1\n") == 0
    (first,) = answers_of(run, "Question 1")
    assert capsys.readouterr().out == f"{first}\n{first}\n"


def test_base_command_answers_the_last_question_only(run, chat, capsys):
    assert chat("Question 1\nx\n/base\nQuestion 2\n") == 0
    ours = answers_of(run, "Question 1", "x", "Question 2")
    base = answers_of(run, "Question 1", "x", adapted=False)
    assert capsys.readouterr().out.rstrip("\n") == "\n".join([*ours[:2], base[1], ours[2]])


def test_base_on_answers_every_question_until_base_off(run, chat, capsys):
    assert chat("/base on\nQuestion 1\n/base off\nx\n") == 0
    out, error = capsys.readouterr()
    ours = answers_of(run, "Question 1", "x")
    base = answers_of(run, "Question 1", adapted=False)
    assert out.rstrip("\n") == "\n".join([ours[0], base[0], ours[1]])
    assert "with the adapter:\ncut at" not in error
    assert "with the adapter:\nbase model:" in error


def test_system_command_equals_the_system_option(run, chat, capsys):
    assert chat("Question 1\n/system Be brief.\n/reset\nQuestion 1\n") == 0
    once = capsys.readouterr().out.splitlines()
    assert chat("Question 1\n", "--system", "Be brief.") == 0
    assert capsys.readouterr().out.splitlines() == once[1:] != once[:1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("/rest\n", "/rest: no such command; did you mean reset?"),
        ("/base\n", "/base: ask a question first"),
        ("word " * 3000, "and the limit is 2048; /reset"),
    ],
)
def test_invalid_line_ends_a_piped_chat_with_an_error(chat, capsys, text, message):
    assert chat(text) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_sampling_out_of_range_is_refused(chat, capsys):
    assert chat("", "--top-p", "2") == 2
    assert capsys.readouterr().err.startswith("error: --top-p 2.0: must be")


def insist(terminal, keys: str, done) -> None:
    """Press keys until they have an effect: between two prompts readline misses them."""
    terminal.wait_for(lambda: done() or terminal.press(keys))


def test_wide_terminal_shows_two_answers_side_by_side(run):
    with on_terminal("chat", str(run.path), "--max-tokens", "5", width=100) as terminal:
        terminal.wait_for("Ctrl-D leaves")
        terminal.press("Question 1\n")
        terminal.wait_for("cut at 5 tokens")
        terminal.press("/base\n")
        terminal.wait_for("with the adapter")
        line = terminal.written.split(b"with the adapter")[-1].split(b"\n")[0]
        assert b"base model" in line
        terminal.wait_for(lambda: terminal.written.endswith(b"> "))
        terminal.press("/nope\n")
        terminal.wait_for("no such command")
        insist(terminal, "\x03", lambda: terminal.written.count(b"Ctrl-D leaves") > 1)
        insist(terminal, "\x04", lambda: terminal.process.poll() is not None)
        assert terminal.end() == 0
        assert terminal.is_as_it_was


def test_ctrl_c_stops_the_answer_but_not_the_conversation(run):
    with on_terminal("chat", str(run.path), "--max-tokens", "2000", width=40) as terminal:
        terminal.wait_for("Ctrl-D leaves")
        terminal.press("Question 1\n")
        terminal.wait_for(lambda: len(terminal.written) > 300)
        terminal.press("\x03")
        terminal.wait_for("stopped")
        terminal.press("/base\n")
        terminal.wait_for("base model:")
        terminal.press("\x03")
        terminal.wait_for("> ")
        terminal.press("/exit\n")
        assert terminal.end() == 0
        assert terminal.is_as_it_was


def test_without_a_name_the_newest_run_chats(run, capsys, own_folder, monkeypatch):
    (own_folder / "runs").mkdir()
    (own_folder / "runs" / "r").symlink_to(run.path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Question 1\n"))
    assert call("chat", "--max-tokens", 5) == 0
    out, error = capsys.readouterr()
    assert out == answers_of(run, "Question 1")[0] + "\n"
    assert error.splitlines()[0] == "run: r (the newest)"


# Tools

SHOP = '''
import time
asked = 0

def price(item: str) -> str:
    """Look up what an item costs."""
    global asked
    asked += 1
    print(f"\x1b[2Jasked {asked}", flush=True)
    return "7"
'''
HOSTILE = SHOP.replace('"7"', '"7\\x1b[2J\\n" * 100')
WAITING = SHOP.replace("    return", "    time.sleep(600)\n    return")


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> RunFolder:
    """A run whose model calls a tool once, and then answers."""
    return train_caller(tmp_path_factory.mktemp("caller"))


@pytest.fixture
def ask_caller(caller, own_folder, monkeypatch):
    """A function that chats with `caller`, which has the tools of a module; its exit status."""

    def talk(text: str, *options: object, tools: str = SHOP) -> int:
        Path("own.py").write_text(tools)
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return call("chat", caller.path, "--max-tokens", 60, "--tools", "own", *options)

    return talk


def test_answers_are_on_stdout_and_calls_on_stderr(ask_caller, capsys):
    assert ask_caller("A hat?\n") == 0
    out, error = capsys.readouterr()
    assert out == "I look.\nIt is 7.\n"
    first, *others = error.splitlines()  # what a tool prints comes when it does
    assert first == "price(item='hat')"
    assert sorted(others) == ["environment: \u241b[2Jasked 1", "price: 7"]


def test_long_and_hostile_result_is_one_short_line(ask_caller, capsys):
    assert ask_caller("A hat?\n", tools=HOSTILE) == 0
    result = next(line for line in capsys.readouterr().err.splitlines() if "price: " in line)
    assert "\x1b" not in result
    assert 100 < len(result) < 300


def test_reset_lets_the_tools_begin_anew(ask_caller, capsys):
    assert ask_caller("A hat?\nA hat?\n/reset\nA hat?\n") == 0
    out, error = capsys.readouterr()
    assert out == 3 * "I look.\nIt is 7.\n"
    assert re.findall(r"asked (\d)", error) == ["1", "2", "1"]


def test_last_turn_may_not_call(ask_caller, capsys):
    assert ask_caller("A hat?\n", "--max-turns", 1) == 0
    out, error = capsys.readouterr()
    assert out == "I look.\n\n"
    assert error.splitlines() == ["price(item='hat')", "no answer within --max-turns"]


def test_base_model_calls_tools_of_its_own(ask_caller, capsys, monkeypatch):
    monkeypatch.setattr(chatting, "without_adapter", lambda _: contextlib.nullcontext())
    assert ask_caller("A hat?\n/base\n") == 0
    out, error = capsys.readouterr()
    assert out == 2 * "I look.\nIt is 7.\n"
    assert re.findall(r"asked (\d)", error) == ["1", "1"]


@pytest.mark.parametrize(
    ("tools", "message"),
    [("1 / 0", "--tools own: "), ("def price(item): pass", "--tools own: price")],
)
def test_unusable_tools_are_an_error_in_one_line(ask_caller, capsys, tools, message):
    assert ask_caller("A hat?\n", tools=tools) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]


def started_by(process: subprocess.Popen) -> list[psutil.Process]:
    found = psutil.Process(process.pid).children(recursive=True)
    assert found
    return found


def test_ctrl_c_stops_a_tool_but_not_the_conversation(caller, own_folder):
    Path("own.py").write_text(WAITING)
    with on_terminal("chat", str(caller.path), "--tools", "own") as terminal:
        terminal.wait_for("Ctrl-D leaves")
        terminal.press("A hat?\n")
        terminal.wait_for("asked 1")
        terminal.press("\x03")
        terminal.wait_for("stopped before the answer began; not kept")
        others = started_by(terminal.process)
        insist(terminal, "/exit\n", lambda: terminal.process.poll() is not None)
        assert terminal.end() == 0
        assert terminal.is_as_it_was
        assert b"\x1b[2J" not in terminal.written
    wait_until(lambda: not any(each.is_running() for each in others))


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_no_process_outlives_a_chat(caller, own_folder, end):
    Path("own.py").write_text(WAITING)
    command = [sys.executable, "-m", "your_ai", "chat", str(caller.path), "--tools", "own"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            process.stdin.write(b"A hat?\n")
            process.stdin.flush()
            while b"asked 1" not in process.stderr.readline():
                assert process.poll() is None
            others = started_by(process)
            process.send_signal(getattr(signal, end))
            process.wait(60)
            wait_until(lambda: not any(each.is_running() for each in others))
        finally:
            process.kill()
