"""The wheel, installed in a new venv and run from another folder."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from hatchling.build import build_wheel

CHECKOUT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:  # pip and build call the backend like this
        patch.chdir(CHECKOUT)
        return out / build_wheel(str(out))


def test_wheel_contains_presets_and_demo_but_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "your_ai/_packaged/configs/demo.yaml" in names
    assert "your_ai/_packaged/models/demo/model.safetensors" in names
    assert "your_ai/_packaged/models/demo/data/test.jsonl" in names
    pages = {f"your_ai/dashboard/{name}.html.j2" for name in ("report", "trials", "style")}
    data = (
        "your_ai/hub/registry.yaml",
        "your_ai/hub/known_tensors.json",
        "your_ai/rewards/default_rubric.yaml",
        "your_ai/dashboard/live_page.js",
    )
    assert {*data, *pages} <= set(names)
    assert not [n for n in names if n.startswith(("tests", "docs", "runs"))]


@pytest.mark.slow
def test_installed_wheel_trains_the_demo_from_another_folder(wheel, own_folder):
    home = own_folder / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    # The dependencies of this environment, but not its editable install of the checkout.
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    where = [python, "-c", "import your_ai; print(your_ai.__file__)"]
    found = subprocess.run(where, check=True, capture_output=True, text=True).stdout
    assert found.startswith(site)
    for path in Path(found.strip()).parent.glob("_packaged/models/demo/data/*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:16]))
    done = subprocess.run(
        [home / "bin" / "your_ai", "train", "--run", "r", "--max-steps", "1",
         "--samples", "0", "--batch-size", "2"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.splitlines()[-1].startswith("exact match: ")
