from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import call
from tests.export.runs import make_run
from your_ai.commands.fusing import parse
from your_ai.errors import UserError
from your_ai.nets.saved_adapter import open_trained


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (["a=0.7", "b=0.3"], [("a", 0.7), ("b", 0.3)]),
        (["a", "b"], [("a", 0.5), ("b", 0.5)]),
        (["x=y/a=2"], [("x=y/a", 2.0)]),
        (["there=1"], [("there=1", 1.0)]),
    ],
)
def test_weights_follow_the_names(given, wanted):
    Path("there=1").mkdir()
    assert parse(given) == wanted


@pytest.mark.parametrize(
    ("given", "pattern"),
    [(["a=0.7", "b"], "^b: has no weight; give one to all"), (["a=x"], "^a=x: expected a number")],
)
def test_weights_that_cannot_be_read_are_refused(given, pattern):
    with pytest.raises(UserError, match=pattern):
        parse(given)


def test_command_makes_a_run(tiny_model, capsys):
    make_run(tiny_model, "a")
    make_run(tiny_model, "b", lora_rank=2)
    assert call("merge", "a=0.7", "b=0.3", "--to", "m", "--rank", 5) == 0
    out, error = capsys.readouterr()
    assert out == "runs/m: rank 5; try it: your_ai generate m --prompt ...\n"
    assert "note: rank 5 loses " in error
    assert open_trained("m").adapter.rank == 5
    assert call("merge", "a", "--density", 0.1) == 2
    assert "--density 0.1: only works with --method ties" in capsys.readouterr().err
