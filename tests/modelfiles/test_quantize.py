"""Models quantized shard by shard: as mlx-lm does it, in little memory, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
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

from tests.conftest import EXTRA, TOKENIZER_FILES, make_model
from tests.modelfiles.large import MB, make_large, watched
from your_ai.errors import RunError, UserError
from your_ai.files import sha256
from your_ai.hub.check import check_model
from your_ai.modelfiles import shards, unfinished
from your_ai.modelfiles.quantize import RECORD, left_behind, quantize, work_of
from your_ai.modelfiles.shards import INDEX
from your_ai.modelfiles.unfinished import locked
from your_ai.nets.model import load_base


def written(source: Path, target: Path, bits: int = 4, **options: Any) -> Path:
    """A model quantized to its end."""
    progress = list(quantize(source, target, bits, **options))
    assert progress[-1].done_bytes == progress[-1].total_bytes
    return target


def converted(source: Path, target: Path, bits: int = 4, group_size: int = 64) -> Path:
    """The same model as mlx-lm quantizes it."""
    mlx_lm.convert(str(source), str(target), True, q_bits=bits, q_group_size=group_size)
    return target


def weights_of(folder: Path) -> dict[str, mx.array]:
    return {n: a for p in folder.glob("model*.safetensors") for n, a in mx.load(str(p)).items()}


def assert_same(ours: Path, theirs: Path) -> None:
    """The same tensors, bit for bit, and the same files beside them."""
    found, wanted = weights_of(ours), weights_of(theirs)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert mx.array_equal(found[name].view(mx.uint8), array.view(mx.uint8)), name
    indexes = [json.loads((folder / INDEX).read_text()) for folder in (ours, theirs)]
    assert indexes[0]["metadata"] == indexes[1]["metadata"]
    beside = [sums_of(folder) for folder in (ours, theirs)]
    del beside[0][RECORD]
    assert beside[0] == beside[1]


def sums_of(folder: Path) -> dict[str, str]:
    """The checksums of all files but the shards and their index."""
    others = [p for p in folder.iterdir() if p.suffix != ".safetensors" and p.name != INDEX]
    return {path.name: sha256(path) for path in others}


def all_sums(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small model that is not quantized."""
    return make_model(tmp_path / "source", bits=None)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model then has several."""
    monkeypatch.setattr(shards, "SHARD_LEAST_BYTES", 30_000)
    monkeypatch.setattr(shards, "SHARDS", 4)


# As mlx-lm does it


@pytest.mark.parametrize("architecture", EXTRA)
def test_the_result_is_that_of_mlx_lm(tmp_path, architecture):
    source = make_model(tmp_path / "source", architecture, bits=None)
    assert_same(written(source, tmp_path / "ours"), converted(source, tmp_path / "theirs"))


CHANGES: dict[str, dict[str, Any]] = {
    "a layer that is not divisible": {"intermediate_size": 96},
    "another type than the files'": {"torch_dtype": "bfloat16"},
    "a type that is not cast to": {"torch_dtype": "float64"},
    "no type, but one of the text model": {"text_config": {"dtype": "float16"}},
    "what is not kept": {"_name_or_path": "x", "vision_config": {}, "quantization_config": None},
}


@pytest.mark.parametrize("change", CHANGES)
def test_so_it_is_with(tmp_path, change):
    source = make_model(tmp_path / "source", bits=None, **CHANGES[change])
    assert_same(written(source, tmp_path / "ours"), converted(source, tmp_path / "theirs"))


@pytest.mark.parametrize(("bits", "group_size"), [(2, 32), (3, 64), (6, 32), (8, 64), (8, 128)])
def test_bits_and_groups_are_those_asked_for(tmp_path, bits, group_size):
    source = make_model(tmp_path / "source", bits=None, hidden_size=128)
    ours = written(source, tmp_path / "ours", bits, group_size=group_size)
    assert_same(ours, converted(source, tmp_path / "theirs", bits, group_size))


def test_experts_in_files_of_their_own_are_stacked(tmp_path):
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


def test_several_shards_hold_the_same_and_are_listed(tmp_path, source, small_shards):
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


def test_the_result_loads(tmp_path, source, small_shards):
    ours, theirs = written(source, tmp_path / "ours"), converted(source, tmp_path / "theirs")
    check_model(ours)
    tokens = mx.arange(8)[None]
    logits = [load_base(folder, mx.float32)[0](tokens) for folder in (ours, theirs)]
    assert mx.array_equal(*logits)


def test_progress_is_told_in_bytes_and_at_once(tmp_path, source, small_shards):
    told = list(quantize(source, tmp_path / "ours", 4))
    total = sum(array.nbytes for array in weights_of(tmp_path / "ours").values())
    assert {(p.total_bytes, p.kept_bytes) for p in told} == {(total, 0)}
    done = [p.done_bytes for p in told]
    assert done == sorted(set(done))
    assert (done[0], done[-1]) == (0, total)


# In little memory

QUANTIZE = """
import sys
from pathlib import Path
from your_ai.errors import UserError
from your_ai.modelfiles.quantize import quantize

source, target = map(Path, sys.argv[1:])
try:
    next(quantize(source, target, 4, max_memory_gb=0.01))
except UserError as refusal:
    least = float(str(refusal).split("takes ")[1].split()[0])
print(least, flush=True)
for progress in quantize(source, target, 4, max_memory_gb=least):
    pass
"""


def test_a_model_larger_than_the_budget_is_quantized_inside_it(tmp_path):
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


# Whatever happens


class Killed(BaseException):
    """Stands for the end of the process."""


STAGES = ((os, "replace"), (os, "rename"), (mx, "save_safetensors"), (shards, "sync"),
          (unfinished, "sync"), (Path, "write_text"), (shards, "save_tokenizer"))  # fmt: skip


def die_at(patch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[str]:
    """`error` comes of the call with this number that writes; the names of all calls so far."""
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


def test_what_is_cut_off_goes_on_to_the_same_bytes(tmp_path, source, small_shards, monkeypatch):
    monkeypatch.setattr(shards, "SHARDS", 2)
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
    """The folder of work that was cut off after so many shards."""
    progress = quantize(source, target, 4)
    while len(list(work_of(target).folder.glob("model*.safetensors"))) < count:
        next(progress)
    progress.close()
    return work_of(target).folder


KILLED = """
import os, signal, sys
from pathlib import Path
import mlx.core as mx
from your_ai.modelfiles.quantize import quantize
from your_ai.modelfiles import shards

shards.SHARD_LEAST_BYTES, shards.SHARDS = 30_000, 4
whole, saved = shards.save_shard, []


def save_shard(path, arrays):
    saved.append(path)
    if len(saved) == 3:
        mx.save_safetensors(str(path.with_name("part.safetensors")), arrays)
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(path, arrays)


shards.save_shard = save_shard
list(quantize(Path(sys.argv[1]), Path(sys.argv[2]), 4))
"""


def test_a_killed_process_goes_on_to_the_same_bytes(tmp_path, source, small_shards):
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
    save = shards.save_shard
    monkeypatch.setattr(
        shards, "save_shard", lambda path, arrays: saved.append(path.name) or save(path, arrays)
    )
    written(source, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert saved == names[2:]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


SPOILS: dict[str, Callable[[Path, Path], None]] = {
    "a shard was changed": lambda source, work: flip(sorted(work.glob("model*"))[0]),
    "a shard was cut": lambda source, work: os.truncate(sorted(work.glob("model*"))[1], 9),
    "a shard is gone": lambda source, work: sorted(work.glob("model*"))[0].unlink(),
    "the record is gone": lambda source, work: (work / RECORD).unlink(),
    "the record is damaged": lambda source, work: (work / RECORD).write_text('{"shards": {'),
    "the record is of another kind": lambda source, work: (work / RECORD).write_text("[]"),
    "the source was changed": lambda source, work: flip(source / "model.safetensors"),
    "something else lies there": lambda source, work: (work / "model-9.safetensors").mkdir(),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_only_what_is_whole_and_of_the_same_model_is_kept(tmp_path, source, small_shards, spoil):
    work = cut_off(source, tmp_path / "out")
    SPOILS[spoil](source, work)
    written(source, tmp_path / "out")
    assert all_sums(tmp_path / "out") == all_sums(written(source, tmp_path / "whole"))


def test_work_of_other_bits_is_begun_anew(tmp_path, source, small_shards):
    cut_off(source, tmp_path / "out")
    told = list(quantize(source, tmp_path / "out", 8))
    assert told[0].kept_bytes == 0
    assert all_sums(tmp_path / "out") == all_sums(written(source, tmp_path / "whole", 8))


def test_who_interrupts_is_told_how_to_go_on(tmp_path, source, small_shards, monkeypatch):
    target = tmp_path / "out"
    assert left_behind(target).endswith("the same command begins again")
    evaluate, calls = mx.eval, iter(range(1000))

    def interrupted(*arrays: mx.array) -> None:
        if next(calls) == 60:
            raise KeyboardInterrupt
        evaluate(*arrays)

    monkeypatch.setattr(shards.mx, "eval", interrupted)
    with pytest.raises(KeyboardInterrupt):
        written(source, target)
    assert "the same command goes on from 0.00 GB, or remove" in left_behind(target)
    monkeypatch.setattr(shards.mx, "eval", evaluate)
    assert next(quantize(source, target, 4)).kept_bytes > 0


def test_a_disk_that_fills_up_keeps_what_is_finished(tmp_path, source, small_shards):
    wanted = all_sums(written(source, tmp_path / "whole"))
    full = RuntimeError("[write] Unable to write 8 bytes to file.")
    with pytest.MonkeyPatch.context() as patch:
        called = die_at(patch, 7, full)
        with pytest.raises(UserError, match=r"out: cannot be written .*then goes on"):
            written(source, tmp_path / "out")
    assert called[-1] == "save_safetensors"
    assert next(quantize(source, tmp_path / "out", 4)).kept_bytes > 0
    assert all_sums(written(source, tmp_path / "out")) == wanted


def test_a_source_that_goes_is_one_line(tmp_path, source, small_shards):
    progress = quantize(source, tmp_path / "out", 4)
    next(progress)
    os.truncate(source / "model.safetensors", 9000)
    with pytest.raises(RunError, match="source: cannot be read any more") as caught:
        list(progress)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


# Refusals


@pytest.fixture
def nothing_left(tmp_path: Path, source: Path) -> Iterator[None]:
    """A refusal leaves the folder as it was."""
    before = {path.name for path in tmp_path.iterdir()}
    yield
    assert {path.name for path in tmp_path.iterdir()} - {"home"} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 7}, "7 bits: MLX quantizes to 2, 3, 4, 5, 6 or 8"),
        ({"group_size": 50}, "groups of 50: MLX quantizes groups of 32, 64 or 128"),
        ({"group_size": 128}, "no layer can be quantized: none has a multiple of 128 inputs"),
        ({"max_memory_gb": 0.05}, r"quantizing this model takes 0\.\d\d GB, more than 0\.05 GB"),
        ({"max_memory_gb": 1e6}, "this machine has"),
    ],
)
def test_settings_that_cannot_be(tmp_path, nothing_left, monkeypatch, options, message):
    source = tmp_path / "source"
    if options == {"group_size": 128}:
        config = json.loads((source / "config.json").read_text())
        shutil.rmtree(source)
        make_model(source, bits=None, **{**config, "intermediate_size": 192})
    with pytest.raises(UserError, match=message) as caught:
        written(source, tmp_path / "out", **{"bits": 4, **options})
    assert "\n" not in str(caught.value)


def test_the_least_budget_that_is_named_is_enough(tmp_path, source):
    with pytest.raises(UserError) as caught:
        written(source, tmp_path / "out", max_memory_gb=0.05)
    least = float(str(caught.value).split("takes ")[1].split()[0])
    written(source, tmp_path / "out", max_memory_gb=least)


@pytest.mark.parametrize("made", ["by mlx-lm", "by us"])
def test_a_quantized_model_is_not_quantized_again(tmp_path, source, made):
    make = converted if made == "by mlx-lm" else written
    folder = make(source, tmp_path / "quantized", 8)
    with pytest.raises(UserError, match="quantized: is quantized to 8 bits already"):
        written(folder, tmp_path / "out")


def test_a_source_that_is_no_model(tmp_path, source, nothing_left):
    with pytest.raises(UserError, match=r"nowhere/config\.json: is missing"):
        written(tmp_path / "nowhere", tmp_path / "out")


def test_a_source_of_an_unknown_architecture(tmp_path, source, nothing_left):
    config = source / "config.json"
    config.write_text(config.read_text().replace('"llama"', '"lama9"'))
    with pytest.raises(UserError, match=r"source: mlx-lm cannot load this model .*lama9"):
        written(source, tmp_path / "out")


def test_a_source_without_a_tokenizer(tmp_path, source, nothing_left):
    for name in TOKENIZER_FILES:
        (source / name).unlink()
    with pytest.raises(UserError, match="source: its tokenizer cannot be loaded"):
        written(source, tmp_path / "out")


def test_a_source_with_a_name_that_mlx_lm_cannot_read(tmp_path, source):
    with pytest.raises(UserError, match=r"with \*, \? or \["):
        written(source.rename(tmp_path / "a[b]"), tmp_path / "out")


@pytest.mark.parametrize("there", ["a folder", "a file", "a link to nothing"])
def test_a_target_that_is_there_is_left_alone(tmp_path, source, there):
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


def test_a_target_that_comes_meanwhile_is_left_alone(tmp_path, source):
    target = tmp_path / "out"
    progress = quantize(source, target, 4)
    next(progress)
    (target / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match="out: cannot be written"):
        list(progress)
    assert [path.name for path in target.iterdir()] == ["inside"]


def test_a_target_that_cannot_be_written(tmp_path, source):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"out: cannot be written .*choose another place"):
        written(source, tmp_path / "file" / "out")


def test_a_disk_that_is_too_small(tmp_path, source, nothing_left, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20 * MB))
    with pytest.raises(UserError, match=r"out: needs 0\.06 GB on the disk, 0\.0\d GB are free"):
        written(source, tmp_path / "out")


def test_a_target_that_another_process_writes(tmp_path, source):
    work = work_of(tmp_path / "out").folder
    with (
        locked(work, waits=False, creates=True),
        pytest.raises(UserError, match="another process is at work on it"),
    ):
        written(source, tmp_path / "out")
    written(source, tmp_path / "out")
