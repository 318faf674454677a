"""What agents may name: paths in the folder, names of models, and settings that run no code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import chat, write_rows
from your_ai.config import ABOUT, FIELDS, TYPES, TrainConfig, to_yaml
from your_ai.config import settings as declared
from your_ai.config.requests import EvaluateRequest, ReportRequest
from your_ai.config.setting import About, settings_of
from your_ai.errors import UserError
from your_ai.serving import mcp_gate as gates
from your_ai.serving.mcp_gate import AgentGate, Permissions

EVERYTHING = Permissions(code=True, network=True)
# Settings that are paths, and how a path is written in each.
PATHS = {
    "model": "{}", "data": "{}", "valid": "{}", "prompt_template": "{}", "from_adapter": "{}",
    "judge_rubric": "{}", "prefix_cache_folder": "{}", "reward": "run:{}", "reward_model": "run:{}",
}  # fmt: skip
CODE = {"reward": "rewards:mine", "best_metric": "metrics:mine"}
NETWORK = {
    "reward": "judge", "judge_model": "gpt", "judge_url": "http://127.0.0.1:1", "push_to": "me/it",
    "report_to": "wandb",
}  # fmt: skip


@pytest.fixture
def gate(own_folder) -> AgentGate:
    write_rows(own_folder / "in" / "rows.jsonl", [chat("a", "b")])
    return AgentGate(own_folder.resolve())


@pytest.fixture
def outside(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("outside")
    write_rows(place / "rows.jsonl", [chat("a", "b")])
    return place


def fault(gate: AgentGate, name: str, value: object) -> str:
    """Why a setting is refused; empty if it is not."""
    try:
        for text in [value] if isinstance(value, str) else value:
            gates.decision_of(name)(gate, name, text)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_lead_out_are_refused(gate, outside, name):
    os.symlink(outside, "link")
    os.symlink(outside / "rows.jsonl", "file")
    os.makedirs("deep/er")
    os.symlink(outside / "rows.jsonl", "deep/er/train.jsonl")
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    for place in (
        *(str(outside), str(outside / "rows.jsonl"), "..", "in/../..", "in/../in/rows.jsonl"),
        *("~", "~root", "~/x", "link", "link/rows.jsonl", "file", "deep", "deep/er", "loop"),
        *("/dev/zero", "/dev/stdin", "/proc/self/environ", "pipe", "in\0", "in\n", "/", "./.."),
        f"{gate.folder}/../x",
    ):
        assert len(fault(gate, name, PATHS[name].format(place)).splitlines()) == 1, place


PARTS = st.sampled_from([*".. . / // ~ in rows.jsonl out back up =1 , hf:".split(), "\0", " "])


@given(st.lists(PARTS | st.text(max_size=3), max_size=6).map("/".join), st.booleans())
def test_whatever_passes_is_inside(tmp_path_factory, text, absolute):
    """With links out, up, and out and back again."""
    place = tmp_path_factory.mktemp("place").resolve()
    home = place / "home"
    write_rows(home / "in" / "rows.jsonl", [])
    (home / "out").symlink_to(place)
    (home / "up").symlink_to("..")
    (home / "back").symlink_to(home / "in")
    gate = AgentGate(home)
    text = f"{home}/{text}" if absolute else text
    try:
        found = gates.check_path(gate, "data", text)
    except UserError:
        return
    assert found.is_relative_to(home)
    assert Path(os.path.realpath(home / text)).is_relative_to(home)


@pytest.mark.parametrize("name", PATHS)
def test_paths_inside_are_allowed(gate, name):
    os.symlink("in/rows.jsonl", "link")
    for place in ("in/rows.jsonl", "./in", "link", str(gate.folder / "in"), "not-there"):
        assert not fault(gate, name, PATHS[name].format(place)), place


def test_each_part_of_the_data_is_checked(gate, outside):
    for data in (f"in,{outside}", f"in=0.5,{outside}=2", "in, ../x", "in,~/x=1", f"{outside}=1"):
        assert "leads out of" in fault(gate, "data", data)
    for data in ("demo", "demo-pairs", "hf:a/b", "hf:a/b:train[:80%],in=0.5", "in,in/rows.jsonl"):
        assert not fault(gate, "data", data)
    assert "belongs to the protocol" in fault(gate, "data", "-")
    assert not fault(gate, "valid", "none")
    assert fault(gate, "data", "hf:../../x")


def test_models_are_named_by_alias_by_id_or_by_a_folder_inside(gate, outside):
    for model in ("demo", "llama-8b", "mlx-community/Some-Model-4bit", "mine", "in"):
        assert not fault(gate, "model", model)
    os.symlink(outside, "llama-8b")
    os.makedirs("owner")
    os.symlink(outside, "owner/name")
    for model in ("llama-8b", "owner/name", "a/../b", "../a", "/a/b"):
        assert "leads out of" in fault(gate, "model", model)


def test_runs_of_settings_are_names(gate, outside):
    os.mkdir("runs")
    os.symlink(outside, "runs/linked")
    for name in ("../x", "a/b", "/x", "", "linked", "a" * 200):
        assert fault(gate, "run", name)
    assert not fault(gate, "run", "new-run.1")
    for name in ("reward", "reward_model", "from_adapter"):
        assert fault(gate, name, PATHS[name].format("linked"))


@pytest.mark.parametrize(
    ("named", "flag", "allowed"),
    [
        (CODE, "--allow-code", Permissions(code=True)),
        (NETWORK, "--allow-network", Permissions(network=True)),
    ],
)
def test_code_and_network_need_their_permission(gate, named, flag, allowed):
    other = Permissions(code=not allowed.code, network=not allowed.network)
    for name, value in named.items():
        for permissions in (Permissions(), other):
            assert flag in fault(AgentGate(gate.folder, permissions), name, value)
        assert not fault(AgentGate(gate.folder, allowed), name, value)


def test_settings_without_reach_are_allowed(gate):
    for name, value in {
        "reward": ["exact_match", "regex:[a-z]+", "length:20=0.1", "contains:/etc"],
        "report_to": ["tensorboard"],
        "best_metric": "exact_match",
        "lora_targets": ["q_proj"],
        "columns": ["prompt=a"],
    }.items():
        assert not fault(gate, name, value)


def test_every_setting_that_is_a_text_is_decided():
    """A new setting that is a text must say what it names, after thinking about its reach."""
    texts = {name for name, kind in TYPES.items() if gates.is_text(kind)}
    decided = {name for name, about in ABOUT.items() if about.agents is not None}
    assert texts == decided - {"force", "supervise", "wired", "heavy_writes", "trust_code"}
    known = [*ABOUT.values(), *settings_of(EvaluateRequest).values()]
    known += settings_of(ReportRequest).values()
    assert {about.agents for about in known} - {None} == gates.DECISIONS.keys()


def test_new_setting_that_nobody_decided_is_refused(gate, monkeypatch):
    for kind in (str, str | None, tuple[str, ...], dict[str, str], Path, object):
        monkeypatch.setitem(declared.ABOUT, "new", About(""))
        monkeypatch.setitem(declared.TYPES, "new", kind)
        assert fault(gate, "new", "x"), kind
    monkeypatch.setitem(declared.TYPES, "new", int | None)
    assert not fault(gate, "new", "1")


@pytest.mark.parametrize("name", ["force", "supervise", "wired"])
def test_safeguards_cannot_be_turned_off(gate, name):
    value = not FIELDS[name].default
    with pytest.raises(UserError, match=name):
        gates.check_settings(AgentGate(gate.folder, EVERYTHING), {name: value}, "settings")
    gates.check_settings(gate, {name: FIELDS[name].default}, "settings")


@pytest.mark.parametrize(
    "text",
    [
        "data: /etc/passwd\n",
        "objective: grpo\nreward: [mine:mine]\n",
        "push_to: a/b\n",
        "supervise: false\n",
        "model: m\ntrain: true\ndata: ../d\niters: 10\n",  # of mlx-lm
        "unknown: 1\n",
    ],
)
def test_settings_in_a_file_are_checked_too(gate, text):
    Path("c.yaml").write_text(text)
    with pytest.raises(UserError):
        gates.check_file_of_settings(gate, "c.yaml")


def test_files_of_settings_are_inside_or_presets(gate, outside):
    (outside / "c.yaml").write_text("seed: 1\n")
    os.symlink(outside / "c.yaml", "demo-dpo")
    for text in (str(outside / "c.yaml"), "../c.yaml", "demo-dpo", "/dev/null", "none"):
        with pytest.raises(UserError):
            gates.check_file_of_settings(gate, text)
    for text in ("demo", "demo-grpo"):
        gates.check_file_of_settings(gate, text)


def test_pages_are_html_files_in_folders_that_exist(gate, outside):
    os.mkdir("d.html")
    for out in (str(outside / "a.html"), "in/rows.jsonl", "none/a.html", "d.html", "../a.html"):
        with pytest.raises(UserError):
            gates.check_page(gate, "out", out)
    assert gates.check_page(gate, "out", "in/a.html") == gate.folder / "in" / "a.html"


def test_folder_of_runs_may_not_be_elsewhere(gate, outside):
    gates.check_runs(gate)
    os.symlink(outside, "runs")
    with pytest.raises(UserError, match="leads out"):
        gates.check_runs(gate)


@pytest.mark.parametrize("code", [{"environment": "a:B"}, {"tools": ["a", "b"]}])
def test_agents_may_not_name_code_of_conversations(gate, code):
    config, request = TrainConfig(), EvaluateRequest("r", **code)
    place = gate.folder / "runs" / "r" / "config.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(to_yaml(config))
    with pytest.raises(UserError, match="runs Python code"):
        gates.check_evaluated(gate, config, request)
    gates.check_evaluated(AgentGate(gate.folder, EVERYTHING), config, request)
