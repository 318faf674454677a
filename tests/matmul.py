"""Let MLX multiply matrices on the CPU with the OpenBLAS that NumPy brings, where there is one.

MLX's wheel for Linux brings the reference BLAS, which made the tests take half as long again. A
small library, compiled here, has MLX's one function for float32, and calls NumPy's of the other
name. It has to be loaded before MLX is, so that MLX finds it first.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VARIABLE = "YOUR_AI_TESTS_BLAS"  # the path of the library, for the processes that tests start
SOURCE = """
extern "C" void scipy_cblas_sgemm64_(int, int, int, long, long, long, float, const float *, long,
                                     const float *, long, float, float *, long);

extern "C" void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha,
                            const float *a, int lda, const float *b, int ldb, float beta,
                            float *c, int ldc) {
  scipy_cblas_sgemm64_(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
"""


def use_openblas() -> None:
    """Load the library, in one thread; the first process compiles it."""
    threads = int(os.environ.setdefault("OPENBLAS_NUM_THREADS", "1"))  # the suite uses all cores
    loaded = getattr(ctypes.CDLL(None), "openblas_set_num_threads", None)
    if loaded is not None:  # LD_PRELOAD has it: other threads would give this process other sums
        loaded(threads)
    if sys.platform != "linux" or "mlx.core" in sys.modules:
        return
    if VARIABLE not in os.environ:
        folder = tempfile.mkdtemp(prefix="your_ai-tests-blas-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[VARIABLE] = compiled(Path(folder, "libsgemm.so"))
    if os.environ[VARIABLE]:
        ctypes.CDLL(os.environ[VARIABLE], ctypes.RTLD_GLOBAL)


def compiled(target: Path) -> str:
    """Compile the library; return its path, or nothing if this machine cannot."""
    numpy = importlib.util.find_spec("numpy")
    if numpy is None or numpy.origin is None:
        return ""
    for blas in Path(numpy.origin).parents[1].glob("numpy.libs/libscipy_openblas64_*.so"):
        command = ["g++", "-shared", "-fPIC", "-O1", "-x", "c++", "-", "-x", "none", blas]
        command += [f"-Wl,-rpath,{blas.parent}", "-Wl,--no-undefined", "-o", target]
        with contextlib.suppress(OSError):
            done = subprocess.run(command, input=SOURCE.encode(), capture_output=True, check=False)
            if done.returncode == 0:
                return str(target)
    return ""
