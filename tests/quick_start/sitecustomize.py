"""Spare the processes that tests start some slow work.

At each start these are transformers' reading of all its models, and the compilation of the methods
of a thousand dataclasses. The first process keeps what it found in $YOUR_AI_TESTS_CACHE for the
others. That makes a training process start in less than half the time, and the suite starts more
than a hundred. They also compile and multiply in MLX as the test that started them does.
"""

import atexit
import contextlib
import importlib.machinery
import marshal
import os
import sys

METHODS = "methods.marshal"
VARIABLE = "YOUR_AI_TESTS_COMPILE_MODE"  # of MLX
BLAS = "YOUR_AI_TESTS_BLAS"  # see tests/matmul.py
INDICES = "YOUR_AI_CHECK_INDICES"  # see tests/indices.py
SET_MODE = "_ZN3mlx4core16set_compile_modeENS0_11CompileModeE"


class Finder:
    """Finds a module as usual, and changes it once it is loaded."""

    def __init__(self, name, change, before=None):
        self.name, self.change, self.before = name, change, before

    def find_spec(self, name, path, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        if self.before:
            self.before()
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            self.change(module)

        spec.loader.exec_module = load_and_change
        return spec


def read_models_once(module):
    module.define_import_structure = kept(module.define_import_structure)


def load_blas():
    if os.environ.get(BLAS):
        import ctypes

        ctypes.CDLL(os.environ[BLAS], ctypes.RTLD_GLOBAL)


def prepare_mlx(module):
    fuse_as_the_test(module)
    check_indices(module)


def fuse_as_the_test(module):
    if VARIABLE not in os.environ:
        return
    with contextlib.suppress(OSError, AttributeError, ValueError):
        library_of(os.path.dirname(module.__file__))[SET_MODE](int(os.environ[VARIABLE]))


def check_indices(module):
    """Check them in this process, too. MLX is loaded by now, and `module` is mlx.core."""
    if os.environ.get(INDICES):
        import importlib.util

        name = "tests.indices"  # a worker of the suite imports the same module later
        file = os.path.join(os.path.dirname(os.path.dirname(__file__)), "indices.py")
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = indices = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(indices)
        indices.check(True)
        module.disable_compile()


def library_of(folder):
    """MLX's library, below the folder of its package. Raises OSError or ValueError without one."""
    import ctypes

    libraries = os.path.join(folder, "lib")
    (name,) = (name for name in os.listdir(libraries) if name.startswith("libmlx."))
    return ctypes.CDLL(os.path.join(libraries, name))


def kept(function):
    """The function, with what it finds in the folder of all models kept in a file."""
    import pickle
    import zlib
    from pathlib import Path

    def found(path, prefix=None):
        place = Path(path)
        folder = place.parent if place.is_file() else place
        if folder.name != "models":
            return function(path, prefix)
        name = f"{zlib.crc32(os.fsencode(place))}-{prefix}.pickle"
        file = Path(os.environ["YOUR_AI_TESTS_CACHE"], name)
        try:
            return pickle.loads(file.read_bytes())
        except (OSError, EOFError):
            result = function(path, prefix)
            replace(str(file), pickle.dumps(result))
            return result

    return found


def replace(path, content):
    partial = f"{path}.{os.getpid()}"
    with open(partial, "wb") as file:
        file.write(content)
    os.replace(partial, path)


def read_methods():
    """The compiled methods of dataclasses, by their source."""
    path = os.path.join(os.environ["YOUR_AI_TESTS_CACHE"], METHODS)
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError), open(path, "rb") as file:
        return marshal.load(file)
    return {}


def keep_methods():
    """Let dataclasses compile each source once: its module calls `exec` by that name."""
    import dataclasses

    known = read_methods()
    new = {}

    def quick_exec(source, *places):
        code = known.get(source)
        if code is None:
            code = new[source] = compile(source, "<string>", "exec")
        else:
            code = marshal.loads(code)
        exec(code, *places)

    def write():
        if new:
            path = os.path.join(os.environ["YOUR_AI_TESTS_CACHE"], METHODS)
            added = {source: marshal.dumps(code) for source, code in new.items()}
            with contextlib.suppress(OSError):  # the suite has ended
                replace(path, marshal.dumps({**read_methods(), **added}))

    dataclasses.exec = quick_exec
    atexit.register(write)


def be_ordinary():
    """Use all cores, unlike the test that started this process; see tests/scheduling.py."""
    with contextlib.suppress(OSError, AttributeError):
        if os.sched_getscheduler(0) == os.SCHED_BATCH:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


if "YOUR_AI_TESTS_CACHE" in os.environ and not __name__.startswith("tests."):
    be_ordinary()
    sys.meta_path.insert(0, Finder("transformers.utils.import_utils", read_models_once))
    sys.meta_path.insert(0, Finder("mlx.core", prepare_mlx, before=load_blas))
    keep_methods()
