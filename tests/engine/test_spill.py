"""The stack of block inputs on disk."""

from __future__ import annotations

import errno
import os

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import peak_of
from your_ai.engine.spill import Spilled, bytes_of
from your_ai.errors import RunError


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_pop_returns_the_appended_arrays(tmp_path, dtype):
    stack = Spilled(tmp_path / "new" / "spill")
    arrays = [mx.random.normal((2, n, 8)).astype(dtype) for n in (3, 5, 1)]
    for array in arrays:
        stack.append(array.swapaxes(0, 1))  # not contiguous
    for array in reversed(arrays):
        back = stack.pop()
        assert back.dtype == dtype
        assert mx.array_equal(back, array.swapaxes(0, 1))
    assert len(stack) == 0


def test_disk_space_is_reused_and_no_file_is_left(tmp_path):
    stack = Spilled(tmp_path)
    for _ in range(3):
        stack.append(mx.zeros((1, 4, 4)))
        stack.append(mx.ones((1, 4, 4)))
        assert stack.pop().sum().item() == 16
        stack.clear()  # as after a failed step
    assert len(stack) == 0
    assert list(tmp_path.iterdir()) == []  # the file has no name: a killed process leaves nothing


@pytest.mark.memory
def test_appended_arrays_use_no_memory(tmp_path):
    stack = Spilled(tmp_path)
    before = mx.get_active_memory()
    for _ in range(4):
        stack.append(mx.ones((1, 256, 256)))
    assert mx.get_active_memory() - before < 2 * 256 * 256 * 4


@pytest.mark.parametrize(
    ("call", "done", "number", "remedy"),
    [
        ("pwrite", "written", errno.ENOSPC, "free some disk space"),
        ("pwrite", "written", errno.EIO, "check the disk"),
        ("preadv", "read", errno.EIO, "check the disk"),
    ],
)
def test_disk_errors_are_reported(tmp_path, monkeypatch, call, done, number, remedy):
    stack = Spilled(tmp_path)
    if call == "preadv":
        stack.append(mx.ones((1, 4, 4)))

    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, fail)
    reason = os.strerror(number)
    with pytest.raises(RunError, match=rf"{done} \({reason}\); {remedy}, then resume the run"):
        stack.pop() if call == "preadv" else stack.append(mx.ones((1, 4, 4)))


def test_folder_that_cannot_be_created_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="block inputs cannot be written"):
        Spilled(tmp_path / "file" / "spill").append(mx.ones((1, 4, 4)))


def test_file_that_ended_early_is_reported(tmp_path):
    stack = Spilled(tmp_path)
    stack.append(mx.ones((1, 4, 4)))
    stack._file.truncate()
    with pytest.raises(RunError, match=r"cannot be read \(the file ended early\)"):
        stack.pop()


@pytest.mark.memory
def test_popped_arrays_are_in_memory_once(tmp_path):
    stack = Spilled(tmp_path)
    stack.append(mx.ones((1, 256, 256)))
    assert peak_of(lambda: stack.pop() + 0) <= 2 * 4 * 256 * 256


PARTS = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "columns": lambda x: x[:, 1:],
    "strided": lambda x: x.reshape(-1)[::2],
    "scalar": lambda x: x[0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize("of", PARTS.values(), ids=PARTS)
def test_bytes_of_an_array_are_those_of_its_values_in_order(dtype, of):
    array = of((mx.random.normal((3, 4), key=mx.random.key(0)) * 100).astype(dtype))
    values = np.array(array.astype(mx.float32)).reshape(-1)
    found = mx.array(np.frombuffer(bytes_of(array), np.uint8)).view(dtype)
    assert np.array_equal(np.array(found.astype(mx.float32)), values)
