"""tools/device_check.sh: what it installs and calls, with a stand-in for Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Writes its arguments to `called`, and the size of each wheel that it is told to install. Like
# venv, it puts itself into a new environment.
STAND_IN = """#!/bin/sh
echo "$@" >>"$CALLED"
for given in "$@"; do
    case $given in
        */environment) mkdir -p "$given/bin" && cp "$0" "$given/bin/python" ;;
        *.whl) echo "$(basename "$given") $(wc -c <"$given")" >>"$CALLED" ;;
    esac
done
[ "$3" != doctor ] || exit "${DOCTOR:-0}"
"""


@pytest.fixture
def script(own_folder: Path) -> Path:
    """A copy of the script in a checkout with nothing else, and a stand-in for Python."""
    (own_folder / "checkout" / "tools").mkdir(parents=True)
    stand_in = own_folder / "python"
    stand_in.write_text(STAND_IN)
    stand_in.chmod(0o755)
    return Path(shutil.copy(ROOT / "tools" / "device_check.sh", own_folder / "checkout" / "tools"))


def check(script: Path, *arguments: str, **more: str) -> tuple[int, str, list[str]]:
    """Run it; return its status, its errors, and the lines that the stand-in wrote."""
    place = script.parents[2]
    environment = {**os.environ, "PYTHON": str(place / "python"), "TMPDIR": str(place)}
    done = subprocess.run(
        [script, *arguments], cwd=place, capture_output=True, text=True, check=False,
        env={**environment, "CALLED": str(place / "called"), **more},
    )  # fmt: skip
    called = place / "called"
    return done.returncode, done.stderr, called.read_text().split("\n") if called.exists() else []


def test_without_wheels_the_current_python_writes_the_report(script):
    status, _, called = check(script)
    assert status == 0
    found = re.fullmatch(
        r"-m your_ai doctor --report device-check.json --yes --minutes ([\d.]+)", called[0]
    )
    assert 7 < float(found[1]) < 8
    assert check(script, DOCTOR="1")[0] == 1


def test_carried_wheels_are_joined_and_installed(script, own_folder):
    wheels = own_folder / "carried wheels"
    wheels.mkdir()
    (wheels / "small-1-py3-none-any.whl").write_bytes(b"x" * 5)
    for part in ("aa", "ab", "ac"):
        (wheels / f"large-1-py3-none-any.whl.part-{part}").write_bytes(b"x" * 100)
    status, error, called = check(script, str(wheels), "out.json")
    assert (status, error) == (0, "")
    assert {"small-1-py3-none-any.whl 5", "large-1-py3-none-any.whl 300"} <= {*called}
    assert any("--no-index --no-deps" in line for line in called)
    assert any("doctor --report out.json" in line for line in called)
    assert sorted(path.name for path in own_folder.iterdir()) == [
        "called", "carried wheels", "checkout", "python",
    ]  # fmt: skip


def test_wheels_beside_the_script_are_found(script):
    (script.parent / "wheels").mkdir()
    (script.parent / "wheels" / "small-1-py3-none-any.whl").write_bytes(b"x" * 7)
    assert "small-1-py3-none-any.whl 7" in check(script)[2]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["no-such-folder"], "error: no-such-folder: there is no such folder of wheels\n"),
        (["empty"], "error: empty: has no wheels\n"),
        (["", "there.json"], "error: there.json: exists already; remove it, or name another"),
        (["a", "b", "c"], "error: c: is one argument too many"),
    ],
)
def test_wrong_arguments_are_one_line(script, own_folder, arguments, error):
    (own_folder / "there.json").touch()
    (own_folder / "empty").mkdir()
    status, told, called = check(script, *arguments)
    assert (status, told.count("\n"), called) == (2, 1, [])
    assert told.startswith(error)
