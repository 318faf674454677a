from __future__ import annotations

import sys
from pathlib import Path

import pytest

from your_ai.errors import UserError
from your_ai.gates.functions import described, load_function


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
