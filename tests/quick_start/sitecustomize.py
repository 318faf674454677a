"""Spare the processes that tests start some slow work of each start.

These are transformers' reading of all its models, and the compilation of the methods of a
thousand dataclasses. The first process keeps what it found in $YOUR_AI_TESTS_CACHE for the others.
That makes a training process start in less than half the time, and the suite starts more than a
hundred.
"""

import atexit
import contextlib
import importlib.machinery
import marshal
import os
import sys

SLOW = "transformers.utils.import_utils"
METHODS = "methods.marshal"


class Finder:
    """Finds the slow module as usual, and changes its function once the module is loaded."""

    def find_spec(self, name, path, target=None):
        if name != SLOW:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            module.define_import_structure = kept(module.define_import_structure)

        spec.loader.exec_module = load_and_change
        return spec


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


if "YOUR_AI_TESTS_CACHE" in os.environ:
    sys.meta_path.insert(0, Finder())
    keep_methods()
