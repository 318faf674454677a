"""A setting is declared in one place, and everything that has settings knows it."""

from __future__ import annotations

import json
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
ASK = """
import dataclasses, json, typing
from pathlib import Path
from your_ai import config
from your_ai.config.reading import commented_yaml
from your_ai.config.other_programs import option_hint
from your_ai.config.reading import resumed, to_yaml
from your_ai.commands.options import PANEL_OF, with_settings
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

run = config.TrainConfig(data="d", objective="dpo", new_width=8)
Path("c.yaml").write_text(to_yaml(run))
old = {n: v for n, v in dataclasses.asdict(run).items() if not n.startswith("new_")}
print(json.dumps({
    "help": typing.get_args(with_settings().parameters["new_width"].annotation)[1].help,
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
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What a package with two more settings knows of them."""
    folder = tmp_path_factory.mktemp("package")
    package = Path(your_ai.__file__).parent
    shutil.copytree(package, folder / "your_ai", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "your_ai" / "config" / "settings.py"
    source = path.read_text()
    assert source.count(PLACE) == 1
    path.write_text(source.replace(PLACE, PLACE + ADDED))
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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
    assert found["agents"] == "check_file"
    assert found["mlxlm"] == "; here it is --new-width"
