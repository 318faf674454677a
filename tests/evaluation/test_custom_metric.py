from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from your_ai.errors import UserError
from your_ai.evaluation.custom_metric import Metric, load_metric


@pytest.fixture
def module(own_folder, monkeypatch):
    """A function that writes a module of the given name into the current folder."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str, name: str) -> str:
        Path(f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_a_function_of_the_current_folder_is_found(module):
    name = module("def score(answer, expected, row): return row['x'] + len(answer)", "here_1")
    assert load_metric(f"{name}:score").score("ab", "", {"x": 1.5}, "f:1") == 3.5


def test_the_function_may_import_modules_of_the_current_folder_when_called(module):
    module("VALUE = 7", "neighbour_1")
    name = module("def f(a, b, c):\n import neighbour_1\n return neighbour_1.VALUE", "here_2")
    assert load_metric(f"{name}:f").score("", "", {}, "f:1") == 7


def test_the_current_folder_does_not_hide_installed_modules(module):
    """A file next to the metric may have the name of a standard library module."""
    name = module("def f(a, b, c): return 1", "here_3")
    load_metric(f"{name}:f")
    module("raise SystemExit('the wrong one')", "colorsys")
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import absent_module", "cannot be imported .ModuleNotFoundError: No module named"),
        ("def f(:", "cannot be imported .SyntaxError"),
        ("raise SystemExit(3)", "cannot be imported .SystemExit: 3"),
        ("def score(a, b, c): pass", "has no function f; did you mean"),
        ("f = 3", "has no function f"),
    ],
)
def test_a_metric_that_cannot_be_loaded_is_an_error(module, text, message):
    name = module(text + "\ndef ff(a, b, c): pass", f"broken_{abs(hash(text))}")
    with pytest.raises(UserError, match=message):
        load_metric(f"{name}:f")


@pytest.mark.parametrize("name", ["", ":", "a", "a:", ":f", "a:b:c", "a:not a name", "absent_9:f"])
def test_a_malformed_metric_name_is_an_error(module, name):
    with pytest.raises(UserError, match="--metric "):
        load_metric(name)


@pytest.mark.parametrize(
    ("value", "score"),
    [(True, 1), (False, 0), (3, 3), (0.5, 0.5), (Fraction(1, 4), 0.25), (np.float32(2), 2),
     (np.bool_(True), 1), (np.int64(4), 4)],
)  # fmt: skip
def test_numbers_and_bools_are_accepted_as_scores(value, score):
    assert Metric("m:f", lambda *_: value).score("", "", {}, "f:1") == score


@pytest.mark.parametrize(
    ("value", "message"),
    [(None, "None, not a number"), ("0.5", "str '0.5', not a number"), ([1], "list"),
     (float("nan"), "nan, not a finite"), (float("-inf"), "-inf"), (10**400, "inf, not a finite"),
     (mx.array(1.0), "array")],
)  # fmt: skip
def test_a_result_that_is_not_a_finite_number_is_an_error_naming_the_row(value, message):
    with pytest.raises(UserError, match=rf"^t.jsonl:7: --metric m:f returned {message}"):
        Metric("m:f", lambda *_: value).score("", "", {}, "t.jsonl:7")


def raising(error: BaseException) -> Metric:
    def fail(answer, expected, row):
        raise error

    return Metric("m:f", fail)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "ValueError: one"),
        (SystemExit(0), "SystemExit: 0"),  # else the evaluation would seem to have succeeded
    ],
)
def test_an_exception_of_the_metric_is_reported_on_one_line_with_the_row(error, said):
    with pytest.raises(UserError, match=rf"^t.jsonl:7: --metric m:f raised {said}$"):
        raising(error).score("", "", {}, "t.jsonl:7")


def test_prints_of_the_metric_go_to_stderr(module, capsys):
    name = module("print('once')\ndef f(a, b, c):\n print('each')\n return 1", "here_4")
    assert load_metric(f"{name}:f").score("", "", {}, "f:1") == 1
    assert capsys.readouterr() == ("", "once\neach\n")


def test_ctrl_c_is_not_reported_as_an_error_of_the_metric():
    with pytest.raises(KeyboardInterrupt):
        raising(KeyboardInterrupt()).score("", "", {}, "t.jsonl:7")
