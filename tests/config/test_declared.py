"""A setting, or a field of a request, is declared in one place; all that needs it knows it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import your_ai

PLACE = '    PANEL: ClassVar[str] = "Adapters"\n'
ADDED = """
    new_width: int = setting(
        7, "Width of something new.", bounds=Bounds(1, 9), objectives=("dpo",), resumes=True,
        before=3, in_card=True, mlxlm="thing_width",
    )
    new_file: str = setting("", "File of something new.", agents="file")
"""
REQUEST_PLACE = "    _: KW_ONLY\n    columns"  # first in `EvaluateRequest`
REQUEST_ADDED = """    _: KW_ONLY
    new_share: float = setting(
        0.5, "Share of something new.", bounds=Bounds(0, 1), tool=Tool("A new share.", Bounds(0, 1))
    )
    new_switch: bool = setting(False, "Something new, or not.")
    columns"""
ASK = """
import dataclasses, inspect, json, typing
from pathlib import Path
import your_ai
from your_ai import cli, config
from your_ai.config.reading import commented_yaml
from your_ai.config.other_programs import option_hint
from your_ai.config.reading import resumed, to_yaml
from your_ai.commands.options import PANEL_OF, setting_option
from your_ai.errors import UserError
from your_ai.gates.yaml_files import read_yaml
from your_ai.publish import card
from your_ai.serving import mcp_gate
from your_ai.run.folder import RunFolder

def refused(**settings):
    try:
        config.resolve({"data": "d", **settings}, None)
    except UserError as error:
        return str(error)

def outside():
    try:
        your_ai.evaluate("r", new_share=2)
    except UserError as error:
        return str(error)

def tool(name):
    from your_ai.serving.mcp_tools import AgentTools
    _, *found = inspect.signature(getattr(AgentTools, name)).parameters.values()
    return {p.name: typing.get_args(p.annotation)[-1].description for p in found}

run = config.TrainConfig(data="d", objective="dpo", new_width=8)
Path("c.yaml").write_text(to_yaml(run))
old = {n: v for n, v in dataclasses.asdict(run).items() if not n.startswith("new_")}
print(json.dumps({
    "help": typing.get_args(setting_option("new_width").annotation)[1].help,
    "panel": PANEL_OF["new_width"],
    "yaml": read_yaml(Path("c.yaml"))["new_width"],
    "init": commented_yaml({"data": "d", "objective": "dpo", "new_width": 8}),
    "bounds": refused(new_width="10", objective="dpo"),
    "objective": refused(new_width="8"),
    "resumed": resumed(run, {"new_width": "9"}).new_width,
    "fixed": "new_file" in run.fixed_on_resume() and "new_width" not in run.fixed_on_resume(),
    "old": config.build(config.ADDED | old, "x").new_width,
    "card": "new_width" in card.SETTINGS,
    "agents": mcp_gate.decision_of("new_file").__name__,
    "mlxlm": option_hint("train", "--thing-width", ["--new-width"]),
    "options": {
        o: p.help for p in cli.parser("eval").commands["eval"].params for o in p.opts
    },
    "python": {
        place: {n: repr(p.default) for n, p in inspect.signature(place_of).parameters.items()}
        for place, place_of in {"f": your_ai.evaluate, "m": your_ai.Run(Path("r")).evaluate}.items()
    },
    "documentation": your_ai.evaluate.__doc__,
    "out": outside(),
    "tool": tool("evaluate"),
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a package with two more settings knows of them."""
    folder = tmp_path_factory.mktemp("package")
    package = Path(your_ai.__file__).parent
    shutil.copytree(package, folder / "your_ai", ignore=shutil.ignore_patterns("__pycache__"))
    edit(folder / "your_ai" / "config" / "settings.py", PLACE, PLACE + ADDED)
    edit(folder / "your_ai" / "config" / "requests.py", REQUEST_PLACE, REQUEST_ADDED)
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def edit(path: Path, before: str, after: str) -> None:
    source = path.read_text()
    assert before in source
    path.write_text(source.replace(before, after, 1))


def test_it_is_in_the_help_in_the_panel_of_its_component(found):
    assert "Width of something new. [default: 7]" in found["help"]
    assert found["panel"] == "Adapters"


def test_it_is_in_files_of_settings(found):
    assert found["yaml"] == 8
    assert "# Width of something new.\nnew_width: 8\n" in found["init"]


def test_its_bounds_and_objectives_are_checked(found):
    assert found["bounds"] == "--new-width 10: must be at most 9"
    assert found["objective"].startswith("--new-width: --objective sft does not use it")


def test_it_is_known_to_runs_that_are_resumed(found):
    assert found["resumed"] == 9
    assert found["fixed"]
    assert found["old"] == 3


def test_cards_agents_and_users_of_mlx_lm_know_it(found):
    assert found["card"]
    assert found["agents"] == "check_path"
    assert found["mlxlm"] == "; here it is --new-width"


def test_what_a_command_is_asked_for_is_an_option_a_parameter_and_documentation(found):
    assert found["options"]["--new-share"] == "Share of something new."
    assert found["options"]["--new-switch"] == "Something new, or not."
    assert found["python"]["f"]["new_share"] == found["python"]["m"]["new_share"] == "0.5"
    assert "run" in found["python"]["f"]
    assert "run" not in found["python"]["m"]  # it is the run itself
    assert "    new_share: Share of something new.\n" in found["documentation"]
    assert found["out"] == "--new-share 2: must be at most 1"


def test_agents_give_what_is_offered_to_them(found):
    pytest.importorskip("mcp")
    assert found["tool"]["new_share"] == "A new share."
    assert "new_switch" not in found["tool"]
