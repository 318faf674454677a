"""Model files that are deleted or truncated while a run streams from them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.conftest import make_model, resume, train
from your_ai.errors import RunError
from your_ai.files import sha256
from your_ai.run import folder
from your_ai.run.stopping import Stop
from your_ai.training import process
from your_ai.training import train as recipe


@pytest.fixture
def own_model(tmp_path: Path) -> Path:
    """A model that a test may damage."""
    return make_model(tmp_path / "model")


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 3)


@pytest.mark.parametrize("spoil", [Path.unlink, cut], ids=["gone", "cut"])
def test_run_with_a_missing_or_cut_model_file_ends_and_resumes(
    configure, own_model, monkeypatch, spoil
):
    settings = {"model": str(own_model), "plan": "streamed", "save_every": 1}
    whole = train(configure(run="whole", **settings))
    file = own_model / "model.safetensors"
    shutil.copy(file, own_model / "copy")
    run, step = folder.create(configure(**settings)), recipe.train_step

    def spoiled_after_step_2(loop, state):
        if state.step == 2:
            spoil(file)
        return step(loop, state)

    with monkeypatch.context() as patch:
        patch.setattr(recipe, "train_step", spoiled_after_step_2)
        with pytest.raises(RunError, match="then resume the run") as caught:
            process.train_until_done(run, run.read_config(), Stop())
    assert "\n" not in str(caught.value)
    shutil.move(own_model / "copy", file)
    assert resume(run) == 0
    for path in whole.adapter.iterdir():
        assert sha256(run.adapter / path.name) == sha256(path)
