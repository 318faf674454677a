"""Quantize models shard by shard: same result as mlx-lm, little memory, safe to interrupt."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest

from tests.conftest import EXTRA, TINY, TOKENIZER_FILES, Killed, flip, make_model
from tests.export.fused_runs import assert_same_bytes, weights_of
from tests.modelfiles.large import MB, make_large, watched
from your_ai.errors import RunError, UserError
from your_ai.files import sha256
from your_ai.hub.check import check_model
from your_ai.modelfiles import shards, targets
from your_ai.modelfiles.quantize import RECORD, quantize, work_of
from your_ai.modelfiles.shards import INDEX
from your_ai.modelfiles.targets import locked


def written(source: Path, target: Path, bits: int = 4, **options: Any) -> Path:
    """Quantize a model completely."""
    progress = list(quantize(source, target, bits, **options))
    assert progress[-1].done_bytes == progress[-1].total_bytes
    return target


def converted(source: Path, target: Path, bits: int = 4, group_size: int = 64) -> Path:
    """Quantize a model with mlx-lm."""
    mlx_lm.convert(str(source), str(target), True, q_bits=bits, q_group_size=group_size)
    return target


def assert_same(ours: Path, theirs: Path) -> None:
    """Assert that the tensors are equal bit for bit, and the other files too."""
    assert_same_bytes(weights_of(ours), weights_of(theirs))
    indexes = [json.loads((folder / INDEX).read_text()) for folder in (ours, theirs)]
    assert indexes[0]["metadata"] == indexes[1]["metadata"]
    beside = [sums_of(folder) for folder in (ours, theirs)]
    del beside[0][RECORD]
    assert beside[0] == beside[1]


def sums_of(folder: Path) -> dict[str, str]:
    """The checksums of all files except the shards and their index."""
    others = [p for p in folder.iterdir() if p.suffix != ".safetensors" and p.name != INDEX]
    return {path.name: sha256(path) for path in others}


def all_sums(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model that is not quantized."""
    return make_model(tmp_path / "source", bits=None)


# -- same result as mlx-lm


CHANGES: dict[str, dict[str, Any]] = {
    "a layer that is not divisible": {"intermediate_size": 96},
    "a dtype different from the files": {"torch_dtype": "bfloat16"},
    "a dtype that is ignored": {"torch_dtype": "float64"},
    "only a dtype of the text model": {"text_config": {"dtype": "float16"}},
    "keys that are dropped": {
        "_name_or_path": "x",
        "vision_config": {},
        "quantization_config": None,
    },
}


@pytest.mark.parametrize("kind", [*EXTRA, *CHANGES])
def test_result_equals_mlx_lm_convert(tmp_path, kind):
    architecture = kind if kind in EXTRA else "llama"
    source = make_model(tmp_path / "source", architecture, None, **CHANGES.get(kind, {}))
    assert_same(written(source, tmp_path / "ours"), converted(source, tmp_path / "theirs"))


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (6, 32), (8, 64), (8, 128)])
def test_quantizes_with_the_given_bits_and_group_size(tmp_path, bits, group_size):
    source = make_model(tmp_path / "source", bits=None, hidden_size=128)
    ours = written(source, tmp_path / "ours", bits, group_size=group_size)
    assert_same(ours, converted(source, tmp_path / "theirs", bits, group_size))


def test_separate_expert_tensors_are_stacked(tmp_path):
    source = make_model(tmp_path / "source", "qwen3_moe", bits=None)
    apart: dict[str, mx.array] = {}
    for name, array in weights_of(source).items():
        if ".switch_mlp." not in name:
            apart[name] = array
        else:
            for index, expert in enumerate(array):
                apart[name.replace("switch_mlp", f"experts.{index}")] = expert
    mx.save_safetensors(str(source / "model.safetensors"), apart)
    assert_same(written(source, tmp_path / "ours"), converted(source, tmp_path / "theirs"))


def test_several_shards_have_the_same_tensors_and_an_index(tmp_path, source, small_shards):
    (source / "generation_config.json").write_text("{}")
    (source / "tokenization.py").write_text("")
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    ours = written(source, tmp_path / "a" / "b" / "ours")
    assert_same(ours, converted(source, tmp_path / "theirs"))
    names = sorted(path.name for path in ours.glob("*.safetensors"))
    assert len(names) > 3
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    listed = json.loads((ours / INDEX).read_text())["weight_map"]
    assert listed == {n: s for s in names for n in mx.load(str(ours / s))}


def test_progress_is_reported_in_bytes_from_the_start(tmp_path, source, small_shards):
    told = list(quantize(source, tmp_path / "ours", 4))
    total = sum(array.nbytes for array in weights_of(tmp_path / "ours").values())
    assert {(p.total_bytes, p.kept_bytes) for p in told} == {(total, 0)}
    done = [p.done_bytes for p in told]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, total)


# -- memory

QUANTIZE = """
import sys
from pathlib import Path
from your_ai.errors import UserError
from your_ai.modelfiles.quantize import quantize

source, target = map(Path, sys.argv[1:])
try:
    next(quantize(source, target, 4, max_memory_gb=0.01))
except UserError as refusal:
    least = float(str(refusal).split("needs at least ")[1].split()[0])
print(least, flush=True)
for progress in quantize(source, target, 4, max_memory_gb=least):
    pass
"""


def test_quantizes_a_model_larger_than_the_memory_limit(tmp_path):
    source, target = make_large(tmp_path / "large"), tmp_path / "out"
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    command = [sys.executable, "-c", QUANTIZE, str(source), str(target)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        budget = float(process.stdout.readline()) * 1e9
        most = watched(process)
    assert process.returncode == 0
    assert 50 * MB < most < budget < size / 1.3
    check_model(target)
    assert sum(array.nbytes for array in weights_of(target).values()) < 0.29 * size


# -- interruptions


STAGES = ((os, "replace"), (os, "rename"), (shards, "write_array"), (shards, "sync"),
          (targets, "sync"), (Path, "write_text"), (shards, "save_tokenizer"))  # fmt: skip


def die_at(patch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[str]:
    """Raise `error` in writing call number `at`; returns the growing list of all calls."""
    called: list[str] = []

    def limited(module: Any, name: str) -> None:
        whole = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            if len(called) == at:
                raise error
            return whole(*arguments, **options)

        patch.setattr(module, name, call)

    for module, name in STAGES:
        limited(module, name)
    return called


def test_interrupted_work_continues_to_the_same_bytes(tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(shards, "SHARDS", 2)
    source = make_model(tmp_path / "source", bits=None, **TINY, num_hidden_layers=1)
    wanted = all_sums(written(source, tmp_path / "whole"))
    target = tmp_path / "out"
    stage = 0
    while True:
        stage += 1
        with pytest.MonkeyPatch.context() as patch:
            called = die_at(patch, stage, Killed())
            with contextlib.suppress(Killed):
                written(source, target)
        if len(called) < stage:
            break
        work = work_of(target).folder
        if not target.exists() and not (work / "config.json").exists():
            with pytest.raises(UserError, match=r"config\.json: is missing"):
                check_model(work)
        if not target.exists():
            written(source, target)
        assert all_sums(target) == wanted, f"{called[-1]}, call {stage}"
        assert not work.exists()
        shutil.rmtree(target)
    assert stage > 20  # 2 or 3 shards with 2 files, 2 syncs and 2 renames each; the rest
    assert all_sums(target) == wanted


def cut_off(source: Path, target: Path, count: int = 2) -> Path:
    """The folder of work that was interrupted after `count` shards."""
    progress = quantize(source, target, 4)
    while len(list(work_of(target).folder.glob("model*.safetensors"))) < count:
        next(progress)
    progress.close()
    return work_of(target).folder


KILLED = """
import os, signal, sys
from pathlib import Path
from your_ai.modelfiles.quantize import quantize
from your_ai.modelfiles import shards

shards.SHARD_LEAST_BYTES, shards.SHARDS = 30_000, 4
whole, synced = shards.sync, []


def sync(path):
    synced.append(path)
    if len(synced) == 3:  # the third shard is written, and has not its name
        os.kill(os.getpid(), signal.SIGKILL)
    whole(path)


shards.sync = sync
list(quantize(Path(sys.argv[1]), Path(sys.argv[2]), 4))
"""


def test_work_of_a_killed_process_continues_to_the_same_bytes(tmp_path, source, small_shards):
    wanted = all_sums(written(source, tmp_path / "whole"))
    target = tmp_path / "out"
    done = subprocess.run([sys.executable, "-c", KILLED, str(source), str(target)])
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    told = list(quantize(source, target, 4))
    assert 0 < told[0].kept_bytes == told[0].done_bytes < told[0].total_bytes
    assert all_sums(target) == wanted


def test_finished_shards_are_not_written_again(tmp_path, source, small_shards, monkeypatch):
    cut_off(source, tmp_path / "out")
    saved: list[str] = []
    opened = shards.open_shard
    monkeypatch.setattr(
        shards, "open_shard", lambda path, arrays: saved.append(path.name) or opened(path, arrays)
    )
    written(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert saved == names[2:]


SPOILS: dict[str, Callable[[Path, Path], None]] = {
    "a shard was changed": lambda source, work: flip(sorted(work.glob("model*"))[0]),
    "a shard was cut": lambda source, work: os.truncate(sorted(work.glob("model*"))[1], 9),
    "a shard is gone": lambda source, work: sorted(work.glob("model*"))[0].unlink(),
    "the record is gone": lambda source, work: (work / RECORD).unlink(),
    "the record is damaged": lambda source, work: (work / RECORD).write_text('{"shards": {'),
    "the record is not an object": lambda source, work: (work / RECORD).write_text("[]"),
    "the source was changed": lambda source, work: flip(source / "model.safetensors"),
    "a folder has the name of a shard": lambda source, work: (work / "model-9.safetensors").mkdir(),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_damaged_work_does_not_change_the_result(tmp_path, source, small_shards, spoil):
    work = cut_off(source, tmp_path / "out")
    SPOILS[spoil](source, work)
    written(source, tmp_path / "out")
    assert all_sums(tmp_path / "out") == all_sums(written(source, tmp_path / "whole"))


def test_work_with_other_bits_starts_over(tmp_path, source, small_shards):
    cut_off(source, tmp_path / "out")
    told = list(quantize(source, tmp_path / "out", 8))
    assert told[0].kept_bytes == 0
    assert all_sums(tmp_path / "out") == all_sums(written(source, tmp_path / "whole", 8))


def test_interrupted_user_is_told_how_to_continue(tmp_path, source, small_shards, monkeypatch):
    target = tmp_path / "out"
    assert work_of(target).interrupted_message.endswith("run the same command to start again")
    evaluate, calls = mx.eval, iter(range(1000))

    def interrupted(*arrays: mx.array) -> None:
        if next(calls) == 60:
            raise KeyboardInterrupt
        evaluate(*arrays)

    monkeypatch.setattr(shards.mx, "eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(source, target)
    assert re.search(
        r"run the same command to continue from \d+ kB, or remove",
        work_of(target).interrupted_message,
    )
    monkeypatch.setattr(shards.mx, "eval", evaluate)
    assert next(quantize(source, target, 4)).kept_bytes > 0


def test_full_disk_keeps_the_finished_shards(tmp_path, source, small_shards):
    wanted = all_sums(written(source, tmp_path / "whole"))
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.MonkeyPatch.context() as patch:
        called = die_at(patch, 30, full)
        with pytest.raises(UserError, match=r"out: cannot be written .*to continue"):
            written(source, tmp_path / "out")
    assert called[-1] == "write_array"
    assert next(quantize(source, tmp_path / "out", 4)).kept_bytes > 0
    assert all_sums(written(source, tmp_path / "out")) == wanted


def test_truncated_source_gives_a_one_line_error(tmp_path, source, small_shards):
    progress = quantize(source, tmp_path / "out", 4)
    next(progress)
    os.truncate(source / "model.safetensors", 9000)
    with pytest.raises(RunError, match="source: can no longer be read") as caught:
        list(progress)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


# -- refusals


@pytest.fixture
def nothing_left(tmp_path: Path, source: Path) -> Iterator[None]:
    """Check that a refusal leaves no file."""
    before = {path.name for path in tmp_path.iterdir()}
    yield
    assert {path.name for path in tmp_path.iterdir()} - {"home"} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "7 bits: MLX can quantize to 2, 3, 4, 5, 6 or 8 bits"),
        ({"group_size": 50}, "group size 50: MLX can use 32, 64 or 128"),
        ({"group_size": 128}, "no layer can be quantized: no input size is a multiple of 128"),
        (
            {"max_memory_gb": 0.05},
            r"quantizing this model needs at least 0\.\d+ GB, more than 0\.05 GB",
        ),
        ({"max_memory_gb": 1e6}, "this machine has"),
    ],
)
def test_impossible_settings_are_refused(tmp_path, nothing_left, monkeypatch, options, message):
    source = tmp_path / "source"
    if options == {"group_size": 128}:
        config = json.loads((source / "config.json").read_text())
        shutil.rmtree(source)
        make_model(source, bits=None, **{**config, "intermediate_size": 192})
    with pytest.raises(UserError, match=message) as caught:
        written(source, tmp_path / "out", **{"bits": 4, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("made", ["by mlx-lm", "by us"])
def test_quantized_model_is_refused(tmp_path, source, made):
    make = converted if made == "by mlx-lm" else written
    folder = make(source, tmp_path / "quantized", 8)
    with pytest.raises(UserError, match="quantized: is already quantized to 8 bits"):
        written(folder, tmp_path / "out")


def test_source_with_unknown_architecture_is_refused(tmp_path, source, nothing_left):
    config = source / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama9"'))
    with pytest.raises(UserError, match=r"source: mlx-lm cannot load this model .*lama9"):
        written(source, tmp_path / "out")


def test_source_without_a_tokenizer_is_refused(tmp_path, source, nothing_left):
    for name in TOKENIZER_FILES:
        (source / name).unlink()
    with pytest.raises(UserError, match="source: its tokenizer cannot be loaded"):
        written(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", r"nowhere/config\.json: is missing"), ("a[b]", r"with \*, \? or \[")],
)
def test_source_without_files_or_with_glob_characters_is_refused(tmp_path, source, name, message):
    place = tmp_path / name
    with pytest.raises(UserError, match=message):
        written(place if name == "nowhere" else source.rename(place), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "source", name}


@pytest.mark.parametrize("there", ["a folder", "a file", "a link to nothing"])
def test_existing_target_is_not_touched(tmp_path, source, there):
    target = tmp_path / "out"
    if there == "a folder":
        (target / "inside").mkdir(parents=True)
    elif there == "a file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match="out: exists; choose another name"):
        written(source, target)
    assert not work_of(target).folder.exists()
    assert os.path.lexists(target)


def test_target_created_during_the_work_is_not_touched(tmp_path, source):
    target = tmp_path / "out"
    progress = quantize(source, target, 4)
    next(progress)
    (target / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match="out: cannot be written"):
        list(progress)
    assert [path.name for path in target.iterdir()] == ["inside"]


def test_unwritable_target_is_refused(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out: cannot be written .*choose another place"):
        written(source, tmp_path / "file" / "out")


def test_too_small_disk_is_refused(tmp_path, source, nothing_left, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20 * MB))
    with pytest.raises(UserError, match=r"out: needs 52\.\d MB of disk space, only 15\.0 MB free"):
        written(source, tmp_path / "out")


def test_target_written_by_another_process_is_refused(tmp_path, source):
    work = work_of(tmp_path / "out").folder
    with (
        locked(work, waits=False, creates=True),
        pytest.raises(UserError, match="another process is working on it"),
    ):
        written(source, tmp_path / "out")
    written(source, tmp_path / "out")
