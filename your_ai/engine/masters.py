"""The trained parameters, as the optimizer updates them: in memory, or in files.

Adapters are updated in the model itself. Of whole weights (`--adapter full`), the model computes
with its own dtype, and what is updated are *masters*: in float32, or in bfloat16 with
`--adapter-dtype`. Where both dtypes are the same, they are the model's arrays. A streamed plan has
neither in memory: the masters are in a working copy, one file for each block that was changed
(`block_files.py`), from which the engine reads that block, too. The other blocks are still those of
the model's files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.engine.block_files import (
    BlockFiles,
    Like,
    Writer,
    by_file,
    file_of,
    linking,
    write_arrays,
)
from your_ai.engine.weights import FileTensor
from your_ai.errors import UserError
from your_ai.nets.mlx_types import Arrays, load_arrays
from your_ai.nets.parts import node_at, put

KIND = "weights"  # the beginning of the names of their files
Moved = Callable[[Mapping[str, FileTensor]], None]


class Masters(Protocol):
    """The trained parameters of a model, by name."""

    def dtypes(self) -> set[mx.Dtype]:
        """Those in which they are updated."""

    def get(self, name: str) -> mx.array: ...

    def put(self, arrays: Arrays) -> None:
        """Replace parameters, which are evaluated after this."""

    def keep(self, arrays: Arrays) -> None:
        """Keep those that were put, which are evaluated now."""


class ModelArrays:
    """The parameters that a model has in memory, such as adapters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def dtypes(self) -> set[mx.Dtype]:
        return {array.dtype for _, array in tree_flatten(self.model.trainable_parameters())}

    def get(self, name: str) -> mx.array:
        parent, _, leaf = name.rpartition(".")
        node: Any = node_at(self.model, parent)
        array: mx.array = node[int(leaf) if isinstance(node, list) else leaf]
        return array

    def put(self, arrays: Arrays) -> None:
        put(self.model, arrays)

    def keep(self, arrays: Arrays) -> None:
        pass


class WholeWeights(Masters, Protocol):
    """The same of whole weights, which are saved file by file."""

    likes: dict[str, Like]
    """All of them, in the order of the model's."""

    def saved(self, target: Path) -> dict[str, Writer]:
        """Functions that write the files of the checkpoint `target`, by name, or make links to
        those of the last one that did not change; blocks that never changed have none."""

    def restore(self, folder: Path) -> None:
        """Set them to those in a checkpoint; blocks without a file to those of the model's files.

        Raises UserError if they do not fit.
        """


class HeldWeights:
    """Whole weights in memory: the model's own arrays, and masters where these have another
    dtype."""

    def __init__(
        self, model: nn.Module, tensors: dict[str, FileTensor], adapter_dtype: mx.Dtype
    ) -> None:
        self.model, self.tensors = ModelArrays(model), tensors
        self.likes = likes_of(model, tensors, adapter_dtype)
        self._masters: Arrays = {}
        self._changed: set[str] = set()
        """The files that the next checkpoint has, and no earlier one."""
        self._there: set[str] = set()
        """The files that the last checkpoint has,"""
        self._last: Path | None = None
        """which was saved or restored."""
        for name, like in self.likes.items():
            array = self.model.get(name)
            if array.dtype != like.dtype:
                self._masters[name] = self._from_file(name)
                mx.eval(self._masters[name])

    def dtypes(self) -> set[mx.Dtype]:
        return {like.dtype for like in self.likes.values()}

    def get(self, name: str) -> mx.array:
        return self._masters[name] if name in self._masters else self.model.get(name)

    def put(self, arrays: Arrays) -> None:
        for name, array in arrays.items():
            self._changed.add(file_of(KIND, name))
            if name in self._masters:
                self._masters[name] = array
            self.model.put({name: array.astype(self.model.get(name).dtype)})

    def keep(self, arrays: Arrays) -> None:
        mx.eval([self.model.get(name) for name in arrays])

    def saved(self, target: Path) -> dict[str, Writer]:
        found: dict[str, Writer] = {}
        for file, own in by_file(KIND, self.likes).items():
            if file in self._changed:
                found[file] = partial(write_arrays, {name: self.get(name) for name in own})
            elif file in self._there and self._last is not None:
                found[file] = linking(self._last / file)
        self._there |= self._changed
        self._changed, self._last = set(), target
        return found

    def restore(self, folder: Path) -> None:
        for file, own in by_file(KIND, self.likes).items():
            path = folder / file
            found = load_arrays(path) if path.exists() else {}
            if found and {name: Like.of(array) for name, array in found.items()} != own:
                raise UserError(f"{path}: has other arrays than the model")
            for name in own:
                array = found.pop(name) if found else self._from_file(name)
                self.put({name: array})
                mx.eval(self.get(name), self.model.get(name))
        self._changed, self._last = set(), folder
        self._there = {path.name for path in folder.glob(f"{KIND}-*")}

    def _from_file(self, name: str) -> mx.array:
        return base_array(self.tensors[name], self.likes[name].dtype)


class FileWeights:
    """Whole weights in a working copy on disk, in `folder`; unchanged blocks are those of the
    model's files.

    moved: tells the engine from where it is to read parameters, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        tensors: dict[str, FileTensor],
        adapter_dtype: mx.Dtype,
        folder: Path,
        moved: Moved,
    ) -> None:
        self.tensors, self.moved = tensors, moved
        self.likes = likes_of(model, tensors, adapter_dtype)
        self.files = BlockFiles(folder, KIND, self.likes, self._read_from)
        self.files.clear()

    def _read_from(self, path: Path, names: list[str]) -> None:
        self.moved({name: FileTensor(path, name, self.tensors[name].dtype) for name in names})

    def dtypes(self) -> set[mx.Dtype]:
        return {like.dtype for like in self.likes.values()}

    def get(self, name: str) -> mx.array:
        if self.files.has(name):
            return self.files.get(name)
        return base_array(self.tensors[name], self.likes[name].dtype)

    def put(self, arrays: Arrays) -> None:
        pass

    def keep(self, arrays: Arrays) -> None:
        self.files.put(arrays)

    def saved(self, target: Path) -> dict[str, Writer]:
        return self.files.saved()

    def restore(self, folder: Path) -> None:
        self.moved({name: self.tensors[name] for name in self.likes})
        try:
            self.files.restore(folder)
        except ValueError as error:
            raise UserError(str(error)) from error


def base_array(tensor: FileTensor, dtype: mx.Dtype) -> mx.array:
    """A parameter of the model's files, in the dtype in which it is updated."""
    from_file = FileTensor(tensor.file, tensor.name, dtype)
    return from_file.rows(0, from_file.shape[0])


def likes_of(
    model: nn.Module, tensors: dict[str, FileTensor], adapter_dtype: mx.Dtype
) -> dict[str, Like]:
    """The kinds of the masters of a model, by name.

    Raises UserError if one is stored in another form than it is used in, or if they are to be in
    bfloat16 and the model is not.
    """
    found = {}
    for name, array in tree_flatten(model.trainable_parameters()):
        if name not in tensors or not array.ndim:
            raise UserError(
                f"--adapter full: {name} is stored in another form than the model uses; choose the "
                "layers to train with --lora-targets"
            )
        is_half = adapter_dtype == mx.bfloat16
        found[name] = Like(array.shape, array.dtype if is_half else mx.float32)
    if adapter_dtype not in {like.dtype for like in found.values()}:
        raise UserError("--adapter-dtype bfloat16: needs --dtype bfloat16 with --adapter full")
    return found
