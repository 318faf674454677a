"""Runs with adapters in bfloat16, in all kinds of runs: as in float32, and resumed exactly."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.conftest import chat, losses_of, train, train_once, whole_and_resumed, write_rows
from tests.training.test_from_adapter import WHOLE, train_from
from tests.training.test_preferences import LABELED, PAIRS
from tests.training.test_train import final_files
from your_ai.run import checkpoint

PROMPTS = [{"prompt": text} for text in ("Ask", "Ask please", "Ask for more, please")]
ROWS = [chat(f"Ask {i}" + " please" * (i % 4), f"Answer {i}") for i in range(8)]
FILES = {"sft": ROWS, "dpo": PAIRS, "kto": LABELED, "reward": PAIRS, "grpo": PROMPTS}
GRPO = {"reward": ["length:3"], "rollouts": 3, "prompts_per_step": 2, "max_new_tokens": 6}
SMALL = {"optimizer_bits": 8, "spill": True}


def dtypes_of(run) -> set[str]:
    arrays = mx.load(str(run.adapter / checkpoint.ADAPTERS))
    return {f"{n.rpartition('.')[2]} {a.dtype}".replace("mlx.core.", "") for n, a in arrays.items()}


@pytest.mark.parametrize(
    ("objective", "settings"),
    [
        ("sft", {"packing": True, "lora_dropout": 0.1, "plan": "fused"}),
        ("sft", {"prefix_cache": "disk", "use_dora": True, "plan": "streamed", **SMALL}),
        ("sft", {"grad_accumulation": 2, "dtype": "float16", "plan": "staged", **SMALL}),
        ("sft", {"qat": "4:32", "plan": "streamed", **SMALL}),
        ("dpo", {"qat": "same", "plan": "fused"}),
        ("dpo", {"packing": True, "use_dora": True, "plan": "staged", **SMALL}),
        ("kto", {"plan": "streamed", **SMALL}),
        ("reward", {"use_dora": True, "plan": "staged", **SMALL}),
        ("grpo", {"kl_beta": 0.1, "plan": "streamed", **SMALL}),
    ],
)
def test_every_kind_of_run_follows_float32_and_resumes_bit_for_bit(
    configure, own_folder, monkeypatch, objective, settings
):
    monkeypatch.setattr("your_ai.training.optimizer_states.FEWEST_QUANTIZED", 64)
    data = write_rows(own_folder / "rows.jsonl", FILES[objective])
    more: dict[str, Any] = {**settings, **(GRPO if objective == "grpo" else {})}
    first = {"data": str(data), "objective": objective, "valid": "none", **more}
    full = train(configure(run="full", **first, max_steps=2))
    first["adapter_dtype"] = "bfloat16"
    whole, cut = whole_and_resumed(configure, 2, 3, **first)
    assert final_files(cut) == final_files(whole)
    followed = losses_of(whole)
    followed.pop(3)
    assert followed == pytest.approx(losses_of(full), rel=1e-2, abs=1e-2)
    dtypes = {"lora_a bfloat16", "lora_b bfloat16"}
    dtypes |= {"m float32"} if "use_dora" in settings else set()
    assert dtypes_of(whole) == dtypes


@pytest.mark.parametrize(("first", "then"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_run_starts_from_an_adapter_of_the_other_dtype(configure, first, then):
    source = train_once(configure(**WHOLE, run="source", max_steps=1, adapter_dtype=first))
    run = train_from("source", configure, adapter_dtype=then)
    start, found = (
        mx.load(str(folder / checkpoint.ADAPTERS))
        for folder in (source.adapter, run.checkpoints / "step-000000")
    )
    for name, array in start.items():
        assert found[name].dtype == getattr(mx, then)
        assert mx.array_equal(found[name], array.astype(found[name].dtype)), name
    assert {text.partition(" ")[2] for text in dtypes_of(run)} == {then}
