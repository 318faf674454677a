"""Import mlx-lm without changing how many files this process may open.

When `mlx_lm.utils` is imported, it sets the limit to 2,048 and the hard limit to 4,096. Where the
hard limit is lower (launchd, containers, `ulimit -n`), that raises; where it is higher, it lowers
it for the whole process.
"""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

MODULE = "mlx_lm.utils"
WANTED_FILES = 2048  # what mlx-lm wants for models with many files


class KeepingLoader(SourceFileLoader):
    """Runs a module that may not change the limit of open files."""

    def exec_module(self, module: ModuleType) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < WANTED_FILES:
            most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        with limit_kept():
            super().exec_module(module)


class KeepingFinder:
    """Finds `mlx_lm.utils` for KeepingLoader; leaves all other modules to Python."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != MODULE:
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and isinstance(found.loader, SourceFileLoader):
            found.loader = KeepingLoader(name, found.loader.path)
        return found


@contextlib.contextmanager
def limit_kept() -> Iterator[None]:
    """In the block, setting the limit of open files has no effect."""
    given = resource.setrlimit

    def set_others(kind: int, limits: tuple[int, int]) -> None:
        if kind != resource.RLIMIT_NOFILE:
            given(kind, limits)

    resource.setrlimit = set_others
    try:
        yield
    finally:
        resource.setrlimit = given


def keep_limit() -> None:
    """Import mlx-lm so from now on."""
    if KeepingFinder not in sys.meta_path:
        sys.meta_path.insert(0, KeepingFinder)
