"""Files of blocks that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from your_ai.engine.block_files import BlockFiles, Like, file_of, write_arrays
from your_ai.errors import RunError

LIKES = {
    "model.layers.2.a": Like((3, 4), mx.float32),
    "model.layers.2.b": Like((5,), mx.bfloat16),
    "model.layers.10.a": Like((2,), mx.float32),
}
SECOND, TENTH = "weights-00002.safetensors", "weights-00010.safetensors"


def arrays(value: float) -> dict[str, mx.array]:
    return {name: mx.full(like.shape, value, like.dtype) for name, like in LIKES.items()}


def made(folder: Path, news: list[str] | None = None) -> BlockFiles:
    names = [] if news is None else news
    return BlockFiles(folder, "weights", LIKES, lambda path, own: names.append(path.name))


def test_a_block_is_replaced_when_all_of_its_arrays_are_there(tmp_path):
    news: list[str] = []
    files, first, second = made(tmp_path, news), arrays(1), arrays(2)
    files.put(first)
    assert news == [SECOND, TENTH]
    files.put({"model.layers.2.b": second["model.layers.2.b"]})
    assert files.get("model.layers.2.b").tolist() == [1.0] * 5
    files.put({"model.layers.2.a": second["model.layers.2.a"]})
    assert files.get("model.layers.2.b").tolist() == [2.0] * 5
    assert files.get("model.layers.10.a").tolist() == [1.0] * 2
    assert news[2:] == [SECOND]


def test_a_link_keeps_what_was_in_the_file(tmp_path):
    files = made(tmp_path / "working")
    files.put(arrays(1))
    for name, write in files.saved().items():
        write(tmp_path / name)
    files.put(arrays(2))
    assert mx.load(str(tmp_path / SECOND))["model.layers.2.a"].tolist() == [[1.0] * 4] * 3
    again = made(tmp_path / "again")
    again.restore(tmp_path)
    assert again.get("model.layers.10.a").tolist() == [1.0, 1.0]
    assert (tmp_path / "again" / TENTH).samefile(tmp_path / TENTH)


def test_files_are_those_that_are_written_at_once(tmp_path):
    files, whole = made(tmp_path / "working"), arrays(1.5)
    files.put(whole)
    write_arrays(
        {n: a for n, a in whole.items() if file_of("weights", n) == SECOND}, tmp_path / "f"
    )
    assert (tmp_path / "f").read_bytes() == (tmp_path / "working" / SECOND).read_bytes()


def test_files_with_other_arrays_are_refused(tmp_path):
    write_arrays({"model.layers.10.a": mx.zeros((3,))}, tmp_path / TENTH)
    with pytest.raises(ValueError, match=f"{TENTH}: has other arrays than the model"):
        made(tmp_path / "working").restore(tmp_path)


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "working").write_text("a file, no folder")
    with pytest.raises(RunError, match=r"weights-00002.safetensors: cannot be written"):
        made(tmp_path / "working").put(arrays(1))
