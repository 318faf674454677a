"""Hints for options of other programs."""

from __future__ import annotations

import re

import pytest
from mlx_lm import lora

from tests.conftest import call
from your_ai import cli
from your_ai.config.other_programs import HINTS, option_hint


def options_of(command: str) -> set[str]:
    group = cli.parser(command)
    found = group.get_command(group.make_context("your_ai", [command]), command)
    return {text for p in found.params for text in (*p.opts, *p.secondary_opts)}


@pytest.mark.parametrize("command", HINTS)
def test_every_option_in_a_hint_is_one_of_the_command(command):
    known = options_of(command)
    assert not known & HINTS[command].keys()
    for theirs in HINTS[command]:
        _, _, ours = option_hint(command, theirs, known).partition("here it is ")
        assert not ours or re.split(r"[ ,:]", ours)[0] in known, theirs


def test_every_option_of_mlx_lm_lora_has_a_hint_or_is_one_of_train():
    theirs = {text for action in lora.build_parser()._actions for text in action.option_strings}
    ours = options_of("train") | {"--help", "-h"}
    assert [name for name in theirs - ours if not option_hint("train", name, ours)] == []


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("--iters", "; here it is --max-steps"),
        ("--per_device_train_batch_size", "; here it is --batch-size"),
        ("--learning_rate", "; did you mean --learning-rate?"),
        ("--lerning-rate", "; did you mean --learning-rate?"),
        ("--grad-checkpoint", "; not needed: the memory plan decides what is computed again"),
        ("--xyz", ""),
    ],
)
def test_a_hint_names_what_is_meant_or_nothing(name, hint):
    assert option_hint("train", name, options_of("train")) == hint


def test_charts_as_files_are_gone_and_the_page_is_named(capsys):
    assert call("report", "--png") == 2
    assert capsys.readouterr().err == (
        "error: no such option: --png; charts are in the page: `your_ai report -o page.html` "
        "(see your_ai report --help)\n"
    )
