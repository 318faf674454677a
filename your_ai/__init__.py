"""LoRA fine-tuning of LLMs on Apple Silicon with MLX, inside a memory budget."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from your_ai.gates.open_files import keep_limit

if TYPE_CHECKING:
    from your_ai.api import (
        PlannedRun,
        Run,
        RunMemory,
        evaluate,
        generate,
        load_run,
        make_data,
        plan,
        score,
        train,
    )
    from your_ai.config import TrainConfig
    from your_ai.errors import RunError, UserError

__version__ = "0.1.1"
__all__ = [
    "PlannedRun",
    "Run",
    "RunError",
    "RunMemory",
    "TrainConfig",
    "UserError",
    "evaluate",
    "generate",
    "load_run",
    "make_data",
    "plan",
    "score",
    "train",
]
_MODULES = {"TrainConfig": "config", "RunError": "errors", "UserError": "errors"}

keep_limit()  # before anything imports mlx-lm


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the command line starts quickly."""
    if name not in __all__:
        raise AttributeError(f"module 'your_ai' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"your_ai.{_MODULES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
