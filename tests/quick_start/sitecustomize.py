"""Spare the processes that tests start what transformers does at each import: read all its models.

The first process keeps what it found in $YOUR_AI_TESTS_CACHE for the others. That halves the time
that a training process needs to start, and the suite starts more than a hundred.
"""

import importlib.abc
import importlib.machinery
import os
import pickle
import sys
import zlib
from pathlib import Path

SLOW = "transformers.utils.import_utils"


class Finder(importlib.abc.MetaPathFinder):
    """Finds the slow module as usual, and changes its function once the module is loaded."""

    def find_spec(self, name, path, target=None):
        if name != SLOW:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def load_and_change(module):
            load(module)
            module.create_import_structure_from_path = kept(
                module.create_import_structure_from_path
            )

        spec.loader.exec_module = load_and_change
        return spec


def kept(function):
    """The function, with what it finds in the folder of all models kept in a file."""

    def found(path):
        place = Path(path)
        folder = place.parent if place.is_file() else place
        if folder.name != "models":
            return function(path)
        name = f"{zlib.crc32(os.fsencode(place))}.pickle"
        file = Path(os.environ["YOUR_AI_TESTS_CACHE"], name)
        try:
            return pickle.loads(file.read_bytes())
        except (OSError, EOFError):
            result = function(path)
            partial = file.with_suffix(f".{os.getpid()}")
            partial.write_bytes(pickle.dumps(result))
            partial.replace(file)
            return result

    return found


if "YOUR_AI_TESTS_CACHE" in os.environ:
    sys.meta_path.insert(0, Finder())
