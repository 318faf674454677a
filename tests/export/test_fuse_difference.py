"""The measured difference of fusing, compared with plain forward passes of whole models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

from tests.conftest import chat, make_model, write_rows
from tests.export.fused_runs import drawn_run
from your_ai.data.encode import Encoder
from your_ai.data.rows import read_rows
from your_ai.errors import UserError
from your_ai.export import fuse_difference as measuring
from your_ai.export.fuse_difference import Difference, DifferenceRoom, difference
from your_ai.export.fused_weights import fuse
from your_ai.generation import generate
from your_ai.nets.saved_adapter import Trained


@pytest.fixture(params=["llama", "gemma2"])
def trained(tmp_path: Path, data_folder: Path, request: pytest.FixtureRequest) -> Trained:
    return drawn_run(make_model(tmp_path / "model", request.param), data_folder, strength=0.02)


def written(trained: Trained, to: str) -> Path:
    list(fuse(trained, Path(to), to))
    return Path(to)


def reference_numbers(trained: Trained, fused: Path) -> dict[str, float]:
    """The same numbers, computed from one row at a time with all its logits."""
    adapted, tokenizer = generate.load_run(trained)
    networks = (generate.load_run(trained, adapted=False)[0], adapted, mlx_lm.load(str(fused))[0])
    encoder = Encoder(tokenizer)
    found: list[list[np.ndarray]] = [[], [], []]
    targets: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for row in read_rows(Path(trained.config.data) / "valid.jsonl"):
        encoded = encoder.encode(row)
        places = np.flatnonzero(encoded.trained[1:])
        targets.append(encoded.tokens[1:][places].astype(int))
        weights.append(np.full(len(places), row.weight))
        for network, logits in zip(networks, found, strict=True):
            tokens = mx.array(encoded.tokens[None, :-1].astype(np.int32))
            logits.append(np.array(network(tokens)[0], np.float64)[places])
    base, adapted, fused = (np.concatenate(logits) for logits in found)
    target, weight = np.concatenate(targets), np.concatenate(weights)

    def loss(logits: np.ndarray) -> float:
        mass = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        losses = mass - logits[np.arange(len(target)), target]
        return float((weight * losses).sum() / weight.sum())

    effect = adapted - base
    return {
        "positions": len(target),
        "mean": np.abs(fused - adapted).mean(),
        "largest": np.abs(fused - adapted).max(),
        "effect": np.abs(effect).mean(),
        "kept": ((fused - base) * effect).sum() / (effect**2).sum(),
        "agreement": (fused.argmax(-1) == adapted.argmax(-1)).mean(),
        "base_loss": loss(base),
        "adapted_loss": loss(adapted),
        "fused_loss": loss(fused),
    }


def assert_close(found: Difference, wanted: dict[str, float]) -> None:
    for name, value in wanted.items():
        assert getattr(found, name) == pytest.approx(value, rel=2e-3, abs=2e-6), name


@pytest.mark.parametrize("to", ["same", "8"])
def test_the_numbers_agree_with_whole_forward_passes(trained, to):
    write_rows(
        Path(trained.config.data) / "valid.jsonl",
        [chat(f"Say {i}" * i, f"{i} it is" * i, weight=i / 2) for i in range(1, 5)],
    )
    out = written(trained, to)
    found = difference(trained, out)
    assert (found.file, found.rows) == ("valid.jsonl", 4)
    assert_close(found, reference_numbers(trained, out))


def test_the_numbers_do_not_depend_on_streaming_or_slice_sizes(trained, monkeypatch):
    out = written(trained, "same")
    numbers = dataclasses.asdict(difference(trained, out))
    del numbers["file"]
    for streams, rows, positions, tokens in ((True, 2, 7, 256), (False, 1, 512, 20)):
        room = DifferenceRoom(streams, rows, positions)
        monkeypatch.setattr(measuring, "hold", lambda *_, room=room: room)
        monkeypatch.setattr(measuring, "PREFILL_TOKENS", tokens)
        assert_close(difference(trained, out), numbers)


def test_a_dequantized_model_differs_only_by_rounding(trained):
    found = difference(trained, written(trained, "dequantized"))
    assert found.largest < 1e-4 < found.effect
    assert found.kept == pytest.approx(1, abs=1e-5)
    assert found.fused_loss == pytest.approx(found.adapted_loss, abs=1e-5)
    assert not found.erased


def test_an_adapter_that_4_bits_erase_is_reported_as_erased(tmp_path, data_folder):
    trained = drawn_run(make_model(tmp_path / "model"), data_folder, strength=0.002)
    assert difference(trained, written(trained, "same")).erased
    assert not difference(trained, written(trained, "8")).erased


def test_an_adapter_without_effect_is_not_called_erased(tmp_path, data_folder):
    trained = drawn_run(make_model(tmp_path / "model"), data_folder, strength=0.0)
    found = difference(trained, written(trained, "same"))
    assert (found.effect, found.kept, found.erased) == (0, 1, False)


def test_few_rows_are_used_and_always_the_same_ones(tmp_path, data_folder, monkeypatch):
    rows = [chat(f"Question {i}", "yes", weight=i % 2) for i in range(50)]
    write_rows(data_folder / "valid.jsonl", rows)
    trained = drawn_run(make_model(tmp_path / "model"), data_folder)
    out = written(trained, "8")
    monkeypatch.setattr(measuring, "ROWS", 10)
    found = difference(trained, out)
    assert found.rows == 10
    assert difference(trained, out) == found
    monkeypatch.setattr(measuring, "TOKENS", 60)
    assert 1 <= difference(trained, out).rows < 5


@pytest.mark.parametrize(
    ("there", "wanted"), [(("train", "test"), "test.jsonl"), (("train",), "train.jsonl")]
)
def test_without_a_validation_file_test_or_train_rows_are_used(
    tmp_path, data_folder, there, wanted
):
    trained = drawn_run(make_model(tmp_path / "model"), data_folder)
    for path in data_folder.iterdir():
        if path.stem not in there:
            path.unlink()
    assert difference(trained, written(trained, "8")).file == wanted


def test_missing_data_is_an_error(tmp_path, data_folder):
    trained = drawn_run(make_model(tmp_path / "model"), data_folder)
    out = written(trained, "8")
    data_folder.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="no such file or folder"):
        difference(trained, out)
    without = dataclasses.replace(trained, config=dataclasses.replace(trained.config, data=""))
    with pytest.raises(UserError, match="drawn: has no data"):
        difference(without, out)


def test_a_too_small_memory_limit_names_a_limit_that_works(tmp_path, data_folder):
    trained = drawn_run(make_model(tmp_path / "model"), data_folder)
    out = written(trained, "8")
    with pytest.raises(UserError, match="measuring the difference needs at least") as caught:
        difference(trained, out, max_memory_gb=0.05)
    least = float(str(caught.value).split("needs at least ")[1].split()[0])
    difference(trained, out, max_memory_gb=least)
