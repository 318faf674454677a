"""Adapters in bfloat16 are exported as float32 adapters with the same values are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from tests.export.runs import make_trained
from your_ai.export import gguf
from your_ai.export.fused_weights import fuse
from your_ai.nets.saved_adapter import Trained


def write_gguf(trained: Trained, target: Path) -> None:
    list(gguf.write_model(trained, target, "f32"))


def write_fused(trained: Trained, target: Path) -> None:
    folder = target.with_suffix(".folder")
    list(fuse(trained, folder, to="dequantized"))
    (found,) = folder.glob("model*.safetensors")
    found.rename(target)


@pytest.mark.parametrize(
    ("write", "use_dora"),
    [(gguf.write_adapter, False), (write_gguf, True), (write_fused, True)],
)
def test_the_export_is_that_of_a_float32_adapter_with_the_same_values(
    tiny_model, tmp_path, write, use_dora
):
    trained = make_trained(tiny_model, use_dora=use_dora, adapter_dtype="bfloat16")
    arrays = trained.adapter.arrays
    assert {a.dtype for n, a in arrays.items() if not n.endswith(".m")} == {mx.bfloat16}
    same = replace(trained.adapter, arrays={n: a.astype(mx.float32) for n, a in arrays.items()})
    write(trained, tmp_path / "rounded")
    write(replace(trained, adapter=same), tmp_path / "same")
    assert (tmp_path / "rounded").read_bytes() == (tmp_path / "same").read_bytes()
