"""These modules need Tinker's SDK and cookbook. Where one is missing, each is skipped."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.conftest import DEMO_FOLDER, make_model
from tests.interop.tinker.served import Served, put_tokenizer, serving

NEEDED = ("tinker", "tinker_cookbook", "torch", "datasets")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
# Qwen2.5-0.5B, but for its vocabulary; where tests are to be quick, a quarter of its width, and
# three blocks.
WHOLE = {"hidden_size": 896, "num_hidden_layers": 24, "intermediate_size": 4864, "head_dim": 64}
NARROW = {"hidden_size": 224, "num_hidden_layers": 3, "intermediate_size": 1216, "head_dim": 16}
QWEN: dict[str, Any] = {
    "num_attention_heads": 14, "num_key_value_heads": 2, "factor": 1,
    **(WHOLE if os.environ.get("YOUR_AI_SLOW") else NARROW),
}  # fmt: skip


class WithoutTinker(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip(
            f"needs {', '.join(MISSING)}: on Python 3.11, pip install -e '.[dev,interop]', then "
            "pip install --no-deps tinker-cookbook==0.6.1"
        )


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return WithoutTinker.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="module")
def demo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(DEMO_FOLDER, tmp_path_factory.mktemp("demo")) as server:
        yield server


@pytest.fixture(scope="module")
def qwen_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("qwen")
    with serving(make_model(folder / "model", "qwen2-tied", **QWEN), folder) as server:
        yield server


@pytest.fixture(scope="module", params=["demo", "qwen"])
def server(request: pytest.FixtureRequest) -> Served:
    """Both models, one after the other."""
    return request.getfixturevalue(f"{request.param}_server")


@pytest.fixture(autouse=True)
def named(own_folder: Path) -> None:
    """The base by its name, for loops that look for its tokenizer."""
    put_tokenizer(own_folder)
