"""An option that takes a list may be given several times: no value is dropped."""

from __future__ import annotations

import pytest

from tests.commands.test_help_page import ALL
from tests.conftest import call
from your_ai.commands.options import given_settings, is_listed
from your_ai.config import FIELDS, flag
from your_ai.errors import UserError


def test_every_option_with_values_separated_by_commas_can_be_repeated():
    lists = {flag(name) for name in FIELDS if is_listed(name)}
    assert lists == {
        *("--reward", "--report-to", "--data", "--lora-targets", "--columns", "--hosts", "--tools")
    }
    lost = []
    for command, found in ALL.items():
        for each in found.params:
            is_list = "separated by commas" in (each.help or "") or lists & set(each.opts)
            is_one_set = command == ("eval",)  # of rows to measure
            if is_list and each.param_type_name == "option" and not each.multiple | is_one_set:
                lost.append((*command, each.name))
    assert lost == []


@pytest.mark.parametrize(
    ("name", "texts", "value"),
    [
        ("reward", ["judge", "regex:[a,b]=2,f:g"], ["judge", "regex:[a,b]=2", "f:g"]),
        ("reward", ["regex:(", "contains:)"], ["regex:(", "contains:)"]),
        ("report_to", ["wandb", "swanlab,tensorboard"], ["wandb", "swanlab", "tensorboard"]),
        ("report_to", [""], [""]),
        ("data", ["a.csv=2", "b.csv,c.csv"], "a.csv=2,b.csv,c.csv"),
    ],
)
def test_the_values_of_a_repeated_option_are_one_list(name, texts, value):
    assert given_settings({name: texts, "seed": None, "run": "r"}) == {name: value, "run": "r"}


def test_a_value_of_each_repetition_is_read(own_folder, capsys):
    rewards = ("--reward", "exact_matsch", "--reward", "exact_match")
    assert call("plan", "--objective", "grpo", *rewards) == 2
    assert "exact_matsch" in capsys.readouterr().err
    assert call("bench", "--plan", "fusd", "--plan", "fused") == 2
    assert "fusd" in capsys.readouterr().err
    assert call("runs", "prune", "--states", "dead", "--states", "died") == 2
    assert "dead" in capsys.readouterr().err


def test_an_empty_hostfile_is_not_taken_for_none():
    with pytest.raises(UserError, match="--hostfile: is empty"):
        given_settings({"hostfile": ""})
