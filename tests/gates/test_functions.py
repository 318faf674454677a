from __future__ import annotations

import os
import sys
from asyncio import CancelledError
from pathlib import Path

import pytest

from your_ai.errors import Interrupted, UserError
from your_ai.gates.functions import UsersCodeFailed, described, load_function, running_users_code


def test_a_function_of_a_module_in_the_current_folder_is_found(own_folder, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_functions.py").write_text("print('loading')\ndef f(): return 3")
    assert load_function("own_functions:f", "--metric own_functions:f", "m:f")() == 3
    assert capsys.readouterr() == ("", "loading\n")


@pytest.mark.parametrize("name", ["", "a", "a:", ":f", "a:b c"])
def test_a_malformed_name_is_an_error_with_an_example(name):
    with pytest.raises(UserError, match=r"^--x: give module:function, e.g. m:f for `def f\(\)`$"):
        load_function(name, "--x", "m:f for `def f()`")


def test_an_error_is_described_by_its_class_and_first_line():
    assert described(ValueError("\none\ntwo")) == "ValueError: one"
    assert described(KeyError()) == "KeyError"
    assert described(Unspeakable()) == "Unspeakable"


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "error", [Unspeakable(), SystemExit(), GeneratorExit(), StopIteration(), CancelledError()]
)
def test_whatever_the_users_code_raises_is_its_error(error):
    with pytest.raises(UsersCodeFailed, match=f"^{type(error).__name__}$"), running_users_code():
        raise error


@pytest.mark.parametrize("request_to_stop", [KeyboardInterrupt(), Interrupted(15)])
def test_a_request_to_stop_is_no_error_of_the_users_code(request_to_stop):
    with pytest.raises(type(request_to_stop)), running_users_code():
        raise request_to_stop


def test_the_users_code_does_not_move_the_run_to_another_folder(own_folder):
    with running_users_code():
        os.chdir("/")
    assert Path.cwd() == own_folder
