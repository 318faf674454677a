"""In processes of their own: an attempt may go on in another process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import is_alive, wait_until

BEGINNING = """
import os, sys, time
from your_ai.environments.attempts import CallDied, attempt
state = []
def change(value): state.append(value); return len(state)
def hang(): state.append("lost"); time.sleep(99)
def leave(): state.append("lost"); os._exit(3)
def fail(): state.append("kept"); raise ValueError("no")
def try_(call, seconds=20):
    try: return attempt(call, seconds)
    except (CallDied, ValueError) as error: return str(error)
"""


def printed(script: str) -> str:
    """What a script prints in all processes that continue it."""
    command = [sys.executable, "-c", BEGINNING + script]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=False, timeout=60
    ).stdout


def test_changes_of_a_call_stay():
    text = printed("print(try_(lambda: change(1)), try_(lambda: change(2)), state)")
    assert text == "1 2 [1, 2]\n"


def test_an_error_is_raised_and_changes_stay():
    assert printed("print(try_(fail), state)") == "no ['kept']\n"


@pytest.mark.parametrize(
    ("call", "text"), [("hang", "took more than 0.2 s"), ("leave", "its process ended")]
)
def test_a_call_that_dies_changes_nothing(call, text):
    script = (
        f"try_(lambda: change(1)); print(try_({call}, 0.2), str(state), try_(lambda: change(2)))"
    )
    assert printed(script) == f"{text} [1] 2\n"


def test_calls_die_one_after_the_other():
    assert printed("print([try_(leave) for _ in range(5)], state)") == (
        f"{['its process ended'] * 5} []\n"
    )


def test_one_process_goes_on():
    """Neither both nor none, where a call ends at the moment at which its time does."""
    text = printed("for n in range(40): try_(lambda: time.sleep(0.02), 0.02)\nprint('end')")
    assert text == "end\n"


def test_what_a_hanging_call_started_is_killed():
    script = """
import subprocess
def start():
    print(subprocess.Popen(["sleep", "99"], stdout=2, start_new_session=True).pid, flush=True)
    time.sleep(99)
print(try_(start, 1))
"""
    number, _, text = printed(script).partition("\n")
    assert text == "took more than 1 s\n"
    wait_until(lambda: not is_alive(int(number)), 10)
