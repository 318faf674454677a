"""Functions of mlx.core, with the types that its stubs leave out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import mlx.core as mx

Arrays = dict[str, mx.array]  # by name
# The names of dtypes in safetensors files.
DTYPE_NAMES = {
    mx.float64: "F64", mx.float32: "F32", mx.float16: "F16", mx.bfloat16: "BF16",
    mx.int64: "I64", mx.int32: "I32", mx.int16: "I16", mx.int8: "I8",
    mx.uint64: "U64", mx.uint32: "U32", mx.uint16: "U16", mx.uint8: "U8", mx.bool_: "BOOL",
}  # fmt: skip
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class CustomFunction(Protocol[P, R_co]):
    """A function whose gradients are those of the function that `vjp` is given."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def vjp(self, gradients: Callable[..., Any]) -> Any: ...


def custom_function(function: Callable[P, R_co]) -> CustomFunction[P, R_co]:
    """mx.custom_function"""
    return cast(CustomFunction[P, R_co], mx.custom_function(function))


def load_arrays(file: Path, stream: mx.Stream | mx.Device | mx.DeviceType | None = None) -> Arrays:
    """mx.load, of a file with names."""
    return cast(Arrays, mx.load(str(file), stream=stream))


def memory_of(array: mx.array) -> memoryview:
    """memoryview(array)"""
    return memoryview(array)  # type: ignore[arg-type]
