"""What is checked of all runs that train something of the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest

from tests.conftest import call, losses_of, train, whole_and_resumed
from your_ai.config import TrainConfig
from your_ai.export import peft
from your_ai.export.fused_weights import fuse
from your_ai.export.untrained_run import import_adapter
from your_ai.memory.estimate_adapters import adapter_bytes, optimizer_bytes
from your_ai.memory.workload import Workload
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.saved_adapter import Trained, open_trained
from your_ai.run.checkpoint import load_adapters
from your_ai.run.folder import RunFolder
from your_ai.training.planned import planned_budget


def arrays(run: RunFolder) -> dict[str, bytes]:
    found = load_adapters(run.adapter)
    mx.eval(found)
    return {name: bytes(memoryview(array)) for name, array in found.items()}


def assert_resumes_exactly(config: Callable[..., TrainConfig], **settings: Any) -> RunFolder:
    """A run that is resumed ends with the bytes of the whole one, which is returned."""
    whole, cut = whole_and_resumed(config, 2, 4, save_every=2, **settings)
    assert arrays(cut) == arrays(whole)
    assert losses_of(cut) == losses_of(whole)
    return whole


def assert_evaluation_shows_that_it_learned(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert call("eval", "r", "--json") == 0
    found = json.loads(capsys.readouterr().out)["measures"]["loss"]
    assert found["adapter"]["value"] < found["base"]["value"]


def assert_plan_counts_what_is_trained(config: TrainConfig) -> Workload:
    """The plan of a run of 4 steps, which is trained, has the sizes of its files."""
    run = train(config)
    workload = planned_budget(config, Path(config.model)).workload
    trained = load_adapters(run.adapter).values()
    assert adapter_bytes(workload.facts, workload.training) == sum(a.nbytes for a in trained)
    states = load_arrays(run.checkpoints / "step-000004" / "optimizer.safetensors")
    of_states = sum(array.nbytes for array in states.values() if array.ndim)
    assert optimizer_bytes(workload.facts, workload.training) == of_states
    return workload


def fused(folder: Path, to: str = "auto") -> tuple[nn.Module, Any]:
    """The model, and its tokenizer, of the run `r`."""
    for _ in fuse(open_trained("r"), folder, to):
        pass
    return mlx_lm.load(str(folder))


def imported_from_peft(folder: Path) -> Trained:
    """The run `r`, written as PEFT's files to a folder, and read from there as another run."""
    trained = open_trained("r")
    peft.write(trained, folder)
    import_adapter(folder, trained.config.model, "back")
    return open_trained("back")
