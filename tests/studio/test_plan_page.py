from __future__ import annotations

import re
import shlex
from html import unescape
from urllib.parse import parse_qsl, urlsplit

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import wait_until
from tests.studio.client import Client
from your_ai.config import FIELDS, TrainConfig, build
from your_ai.config.reading import commented_yaml
from your_ai.errors import UserError
from your_ai.session import new_run
from your_ai.studio import plan_page
from your_ai.studio.plan_page import address_of, command_of, settings_of_form

GIVEN = {
    "model": st.sampled_from(["demo", "a model's name", "--x"]),
    "data": st.sampled_from(["demo", "my data.csv", "$(rm -rf)"]),
    "columns": st.sampled_from(["prompt=a,completion=b c"]),
    "epochs": st.integers(1, 9).map(str),
    "lora_rank": st.sampled_from(["8", "16,mlp=32"]),
    "learning_rate": st.sampled_from(["1e-4", "0.5"]),
    "packing": st.sampled_from(["true", "false"]),
    "system_prompt": st.just("x"),
}


@given(st.fixed_dictionaries({}, optional={n: v for n, v in GIVEN.items() if n in FIELDS}))
def test_form_file_and_command_say_the_same(form):
    try:
        wanted = build(settings_of_form(form), "settings")
    except UserError:
        return
    given_settings = settings_of_form(form)
    read = yaml.safe_load(commented_yaml(given_settings)) or {}
    assert build(read, "file") == wanted
    words = shlex.split(command_of(given_settings))
    assert words[:2] == ["your_ai", "train"]
    link = urlsplit(address_of(wanted))
    assert build(settings_of_form(dict(parse_qsl(link.query))), "link") == wanted
    assert len(words) == 2 + sum(1 if isinstance(v, bool) else 2 for v in given_settings.values())


def test_every_setting_is_in_the_form(client: Client):
    text = client.get("plan").text
    missing = [name for name in FIELDS if f'name="{name}"' not in text]
    assert not missing


def test_what_came_from_a_link_is_filled_in_and_escaped(client: Client):
    text = client.get("plan?data=%22><script>x</script>&epochs=3").text
    assert "<script>x" not in text
    assert 'value="3"' in text


def test_a_plan_follows_from_the_form(client: Client):
    got = client.post("plan/preview", model="demo", max_memory="1")
    assert got.status == 200
    assert "1.00 GB" in got.text
    assert "your_ai train --model demo --max-memory 1" in got.text
    fault = client.post("plan/preview", model="demo", max_memory="0.01").fault
    assert "fit" in fault or "least" in fault


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("lora_rank", "x", "lora-rank"),
        ("max_memory", "-3", ""),
        ("max_memory", "abc", "max-memory"),
        ("run", "../x", "letters"),
        ("hidden", "1", "no setting"),
    ],
)
def test_what_is_wrong_is_one_line(client: Client, name, value, words):
    got = client.post("plan/preview", **{name: value})
    assert words in got.fault
    assert "\n" not in got.fault.strip()


@pytest.mark.parametrize("asked", ["0.25", "0.3", "1.25", "2", "7.123"])
def test_a_limit_of_a_link_is_the_one_that_is_planned(asked, monkeypatch):
    """Browsers move a value that the step of a slider does not reach."""
    monkeypatch.setattr(plan_page, "most_gb", lambda: 20.0)
    slider = plan_page.memory_slider(asked)
    assert slider["value"] == float(asked) >= slider["least"]
    assert slider["step"] == "any" or abs(float(asked) * 10 % 1) < 1e-9


@pytest.mark.parametrize("asked", ["", "x", "nan", "-1", "0", "inf", "1e9"])
def test_other_limits_of_links_are_all_that_is_free(asked, monkeypatch):
    monkeypatch.setattr(plan_page, "most_gb", lambda: 20.0)
    assert plan_page.memory_slider(asked)["value"] == 20.0


def test_the_right_end_of_the_slider_is_no_limit():
    assert "max_memory" not in settings_of_form({"max_memory": "100000"})
    assert TrainConfig(**settings_of_form({"max_memory": "0.5"})).max_memory == 0.5


def test_a_refused_start_keeps_what_was_typed(client: Client):
    got = client.post("runs", run="a/b", epochs="3", seed="77", max_memory="0.5")
    assert got.status == 422
    assert "a/b" in got.fault
    for value in ("a/b", "3", "77", "0.5"):
        assert f'value="{value}"' in got.text


def test_a_run_starts_and_ends_as_asked(client: Client):
    place = client.post("runs", run="r", max_steps="2").place
    assert place == "runs/r"
    wait_until(lambda: "finished" in client.part("runs/r").text)
    (again,) = re.findall(r'href="[^"]*plan[?]([^"]*)"', client.get("runs/r").text)
    again = dict(parse_qsl(unescape(again)))
    assert again["max_steps"] == "2"
    assert "run" not in again
    assert client.get("runs/r/live/").status == 200
    assert client.post("runs/r/resume", row="{}").fault == "row: is no setting"
    assert client.post("runs/r/resume").fault.startswith("runs/r: already finished")
    assert client.post("runs/r/remove").status == 200
    assert not new_run.folder.RUNS.joinpath("r").exists()
