"""The modules of this folder need torch. Where it is missing, each is skipped with this reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NoReturn

import pytest

MISSING = [name for name in ("torch", "peft") if importlib.util.find_spec(name) is None]


class WithoutTorch(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip("needs torch and peft: pip install -e '.[dev,interop]'")


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Take the modules of this folder, but not those of llamacpp."""
    if MISSING and module_path.parent == Path(__file__).parent:
        return WithoutTorch.from_parent(parent, path=module_path)
    return None
