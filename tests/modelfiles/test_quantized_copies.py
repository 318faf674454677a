"""The quantized copies that `train --quantize` keeps."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.conftest import call, events_of, flip, load_base, losses_of, make_model, train
from your_ai.engine.weights import can_stream, tensors_of
from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.hub.find import store
from your_ai.modelfiles import quantize, quantized_copies
from your_ai.modelfiles.quantized_copies import KEEP_DAYS, make_copy, model_folder, place_of_copy
from your_ai.modelfiles.targets import locked
from your_ai.run import events

DAY_S = 86_400


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_model(tmp_path / "source", bits=None)


def make_older(folder: Path, days: float) -> None:
    then = time.time() - days * DAY_S
    os.utime(folder, (then, then))


def all_copies() -> set[Path]:
    return set((store() / "quantized").iterdir())


def test_copy_is_made_once(source):
    assert len(list(make_copy(source, 4))) > 2
    assert list(make_copy(source, 4)) == []
    assert model_folder(source, 4) == place_of_copy(source, 4)


def test_copy_depends_on_file_contents_not_on_location(tmp_path, source):
    found = model_folder(source, 4)
    assert model_folder(shutil.copytree(source, tmp_path / "other"), 4) == found
    assert model_folder(source, 8) != found
    config = source / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    assert model_folder(source, 4) != found
    assert len(all_copies()) == 3


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "qwen3_moe"])
def test_copy_can_be_streamed(tmp_path, architecture):
    folder = model_folder(make_model(tmp_path / "m", architecture, bits=None), 4)
    network, _ = load_base(folder, mx.float32)
    assert can_stream(network, tensors_of(network, folder))


def test_copy_equals_quantizing_on_load(source):
    tokens = mx.arange(8)[None]
    copied, _ = load_base(model_folder(source, 4), mx.float32)
    loaded, _ = quantize.quantized_lazily(source, 4)[:2]
    assert mx.array_equal(copied(tokens), loaded(tokens))
    assert {n for n, _ in tree_flatten(copied.parameters())} == {
        n for n, _ in tree_flatten(loaded.parameters())
    }


@pytest.mark.parametrize("spoil", ["a byte is changed", "cut", "no config", "no record"])
def test_damaged_copy_is_made_again(source, spoil):
    folder = model_folder(source, 4)
    weights = folder / "model.safetensors"
    before = sha256(weights)
    if spoil == "a byte is changed":
        flip(weights, -1)
    elif spoil == "cut":
        os.truncate(weights, 1000)
    else:
        (folder / ("config.json" if spoil == "no config" else "quantized.json")).unlink()
    assert list(make_copy(source, 4)) != []
    assert sha256(weights) == before


def test_unused_copies_are_deleted_after_a_month(tmp_path, source):
    old, used = model_folder(source, 2), model_folder(source, 3)
    broken = quantize.work_of(place_of_copy(source, 5)).folder
    busy = quantize.work_of(place_of_copy(source, 6)).folder
    for folder in (broken, busy):
        folder.mkdir()
    for folder in (old, used, broken, busy):
        make_older(folder, KEEP_DAYS + 1)
    with locked(busy, waits=False):
        model_folder(source, 3)  # marks it as used
        model_folder(source, 8)
    assert all_copies() == {used, place_of_copy(source, 8), busy}


def test_interrupted_deletion_leaves_no_valid_model(source, monkeypatch):
    folder = model_folder(source, 4)
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if interrupted before it
    quantized_copies.discard(folder)
    assert not (folder / "config.json").exists()


COPY = """
import sys
from pathlib import Path
from your_ai.modelfiles.quantized_copies import make_copy
for _ in make_copy(Path(sys.argv[1]), 4):
    print("made", flush=True)
"""


def test_two_simultaneous_runs_make_one_copy(source):
    started = [
        subprocess.Popen([sys.executable, "-c", COPY, str(source)], stdout=-1, stderr=-1, text=True)
        for _ in range(2)
    ]
    done = [(*process.communicate(), process.returncode) for process in started]
    assert [(error, status) for _, error, status in done] == [("", 0), ("", 0)]
    assert all_copies() == {place_of_copy(source, 4)}
    assert list(make_copy(source, 4)) == []


def test_waiting_run_uses_the_copy_of_the_other_run(source, monkeypatch):
    target = place_of_copy(source, 4)
    ready = model_folder(source, 4).rename(store() / "ready")
    work = quantize.work_of(target).folder
    work.mkdir()
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        """Let the other run finish during the wait."""
        slept.append(seconds)
        ready.rename(target)
        other.__exit__(None, None, None)

    other = locked(work, waits=False)
    other.__enter__()
    monkeypatch.setattr(time, "sleep", sleep)
    assert list(make_copy(source, 4)) == []
    assert len(slept) == 1
    assert all_copies() == {target}


def test_unwritable_store_is_refused(tmp_path, source, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("YOUR_AI_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written"):
        model_folder(source, 4)


def test_run_with_quantize_trains_streams_and_generates(configure, source):
    written = quantize.quantize(source, source.with_name("written"), 4)
    for _ in written:
        pass
    kept = train(configure(run="kept", model=str(source.with_name("written"))))
    settings = {"model": str(source), "quantize": 4}
    assert losses_of(train(configure(run="fused", plan="fused", **settings))) == losses_of(kept)
    streamed = train(configure(run="streamed", plan="streamed", **settings))
    assert losses_of(streamed) == pytest.approx(losses_of(kept), rel=1e-4)
    assert len(all_copies()) == 1
    assert events_of(streamed, events.Started)[0].plan == "streamed"
    assert call("generate", "--run", "streamed", "--prompt", "Hi", "--max-tokens", 2) == 0
