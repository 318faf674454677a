"""The recipe, on a tiny model: exact resume, exact accumulation, and what stops a run."""

from __future__ import annotations

import pytest

from tests.conftest import losses_of, resume, train
from your_ai.run import checkpoint
from your_ai.run.folder import RunFolder


def final_files(run: RunFolder) -> dict[str, bytes]:
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    return {
        "adapter": (run.adapter / checkpoint.ADAPTERS).read_bytes(),
        "optimizer": (newest / checkpoint.OPTIMIZER).read_bytes(),
    }


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_is_bit_identical(configure, optimizer):
    settings = {
        "optimizer": optimizer,
        "lora_dropout": 0.2,
        "batch_size": 2,
        "grad_accumulation": 2,  # three steps an epoch: the run is cut in mid-epoch
        "lora_targets": "all-linear",
    }
    whole = train(configure(run="whole", max_steps=7, **settings))
    cut = train(configure(run="cut", max_steps=4, **settings))
    assert resume(cut, max_steps=7) == 0
    assert losses_of(cut) == losses_of(whole)
    assert final_files(cut) == final_files(whole)
