"""Spare g++ the slow part of each kernel that MLX compiles for the CPU: reading MLX's headers.

MLX writes each kernel to the folder for temporary files and compiles it there, once per machine;
the suite needs about 600. g++ takes a precompiled header (50 MB) that lies beside the including
file, and reads the header itself if it cannot use that. The kernels are the same, byte for byte.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import mlx.core as mx

from tests import indices
from tests.quick_start.sitecustomize import SET_MODE, VARIABLE, library_of

HEADER = "mlx/backend/cpu/compiled_preamble.h"
CACHE = "_ZN3mlx4core6detail13compile_cacheEv"
CLEAR = "_ZN3mlx4core6detail19compile_clear_cacheERKSt8weak_ptrINS1_12CompileCacheEE"
UNCOMPILED, NO_FUSE, FUSE = 0, 2, 3  # of MLX's modes of compilation
MODE: int | None = None  # of this process
FLAGS = ("-std=c++17", "-O3", "-Wall", "-fPIC")  # as MLX calls g++


def precompile_header() -> None:
    """Precompile the header of all kernels, unless that was done for this version of MLX."""
    target = Path(tempfile.gettempdir(), "mlx", mx.__version__, "cpu", f"{HEADER}.gch")
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None or target.exists():
        return
    include = Path(mx.__file__).parent / "include"
    partial = target.with_suffix(f".{os.getpid()}")
    command = [compiler, *FLAGS, f"-I{include}", "-x", "c++-header", include / HEADER]
    with contextlib.suppress(OSError):  # each kernel then takes longer
        target.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([*command, "-o", partial], capture_output=True, check=False)
        if done.returncode == 0:
            partial.replace(target)


class WeakPointer(ctypes.Structure):
    """std::weak_ptr; a third word makes ctypes expect it in memory, as C++ returns it."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("object", "count", "unused")]


def fuse(on: bool) -> None:
    """Let `mx.compile` fuse operations into kernels, or only trace and simplify.

    That also holds for the processes that tests start; see quick_start/sitecustomize.py. What was
    compiled before in this thread is compiled again when it is next called. Where MLX has no such
    switch, kernels are compiled; `mx.disable_compile` would not even trace. It is used where all
    tests run under the checker of indices.
    """
    mode = FUSE if on else NO_FUSE
    os.environ[VARIABLE] = str(mode)
    set_mode(UNCOMPILED if os.environ.get(indices.VARIABLE) else mode)


def set_mode(mode: int) -> None:
    global MODE
    if mode == MODE:
        return
    MODE = mode
    (mx.disable_compile if mode == UNCOMPILED else mx.enable_compile)()
    with contextlib.suppress(OSError, AttributeError, ValueError):
        library = library_of(Path(mx.__file__).parent)
        switch, cache, clear = (library[name] for name in (SET_MODE, CACHE, CLEAR))
        cache.argtypes, cache.restype = [], WeakPointer
        switch(mode)
        clear(ctypes.byref(cache()))
