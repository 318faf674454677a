"""Folders of fused models: written atomically, resumable, and in little memory."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from tests.conftest import change_json, make_model, write_rows
from tests.export.fused_runs import drawn_run
from tests.modelfiles.large import MB, make_large, watched
from your_ai.errors import UserError
from your_ai.export.fused_weights import fuse, fused_lazily, with_turn_end, work_of
from your_ai.files import sha256
from your_ai.hub.check import check_model
from your_ai.nets.saved_adapter import Trained, open_trained
from your_ai.nets.tokenizer import open_tokenizer


@pytest.fixture
def trained(tmp_path: Path, data_folder: Path) -> Trained:
    return drawn_run(make_model(tmp_path / "base" / "model"), data_folder)


def written(trained: Trained, target: Path, to: str = "auto", force: bool = False) -> Path:
    steps = list(fuse(trained, target, to, force=force))
    assert steps[-1].done_bytes == steps[-1].total_bytes
    return target


def sums_of(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


# Contents


def test_the_card_names_base_and_run_but_no_path(tmp_path, trained):
    out = written(trained, tmp_path / "out")
    card = (out / "README.md").read_text()
    assert "A model with a LoRA adapter (rank 4, alpha " in card
    assert "in its weights, made from the " in card
    assert "model `model`" in card
    assert "from step 3 of the run `drawn`" in card
    assert "The adapted layers have 8 bits; the others are as they were." in card
    for path in out.iterdir():
        if path.suffix != ".safetensors":
            assert str(tmp_path) not in path.read_text(), path.name


def test_the_card_links_to_a_base_on_the_hub(tmp_path, data_folder, monkeypatch):
    make_model(tmp_path / "models" / "Small-1B", bits=None)
    trained = drawn_run(tmp_path / "models" / "Small-1B", data_folder)
    named = trained.config.__class__(**{**vars(trained.config), "model": "someone/Small-1B"})
    trained.folder.write_config(named)
    card = (written(open_trained("drawn"), tmp_path / "out") / "README.md").read_text()
    assert card.startswith("---\nbase_model: someone/Small-1B\n")
    assert "[someone/Small-1B](https://huggingface.co/someone/Small-1B)." in card
    assert card.count("quantized") == 0


def test_the_tokenizer_of_the_base_is_copied(tmp_path, trained):
    out = written(trained, tmp_path / "out")
    ours, base = open_tokenizer(out), open_tokenizer(trained.base)
    text = "Wie viel? 12 + 30"
    assert ours.encode(text) == base.encode(text)
    assert ours.chat_template == base.chat_template
    assert mlx_lm.load(str(out))[1].eos_token_ids == {1}


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 0, "top_k": 3}])
def test_the_token_that_ends_a_turn_is_an_end_token_of_the_fused_model(trained, generation):
    """If the base has another one, as base models do that are trained as chat models."""
    change_json(trained.base, "config.json", eos_token_id=0)
    change_json(trained.base, "tokenizer_config.json", eos_token="<|pad|>")
    if generation is not None:
        (trained.base / "generation_config.json").write_text(json.dumps(generation))
    lazy = with_turn_end(fused_lazily(trained), trained.base)
    assert lazy.config["eos_token_id"] == [0, 1]
    texts = {name: json.loads(text) for name, text in lazy.texts.items()}
    wanted = {} if generation is None else {**generation, "eos_token_id": [0, 1]}
    assert texts.get("generation_config.json", {}) == wanted


# The target folder


def test_an_existing_folder_is_replaced_only_with_force(tmp_path, trained):
    out = make_model(tmp_path / "out", bits=None)
    before = sums_of(out)
    with pytest.raises(UserError, match="out: exists; choose another name, or replace"):
        written(trained, out)
    assert sums_of(out) == before
    written(trained, out, force=True)
    assert "fused.json" in sums_of(out)
    assert not list(tmp_path.glob(".out*"))


def test_an_existing_folder_stays_until_the_new_one_is_complete(tmp_path, trained, small_shards):
    out = make_model(tmp_path / "out", bits=None)
    before = sums_of(out)
    steps = fuse(trained, out, "dequantized", force=True)
    for progress in steps:
        assert sums_of(out) == before
        if progress.done_bytes == progress.total_bytes:
            break
    steps.close()
    written(trained, out, "dequantized", force=True)
    assert "fused.json" in sums_of(out)


@pytest.mark.parametrize("needed", ["base", "adapter", "inside the adapter", "checkpoint"])
def test_files_of_the_run_are_never_overwritten(tmp_path, trained, needed):
    shutil.copytree(trained.adapter.folder, trained.folder.checkpoints / "step-000003")
    targets = {
        "base": trained.base,
        "adapter": trained.folder.adapter,
        "inside the adapter": trained.folder.adapter / "new",
        "checkpoint": trained.folder.checkpoints / "step-000003",
    }
    with pytest.raises(UserError, match="belongs to the run itself"):
        written(trained, targets[needed], force=True)
    check_model(trained.base)
    assert open_trained("drawn").adapter.arrays


# Interruptions and full disks


@pytest.mark.parametrize("change", ["nothing", "form", "adapter"])
def test_fusing_continues_unless_the_form_or_the_adapter_changed(
    tmp_path, trained, small_shards, change
):
    work = work_of(tmp_path / "out")
    steps = fuse(trained, tmp_path / "out", "dequantized")
    while len(list(work.folder.glob("model*.safetensors"))) < 2:
        next(steps)
    steps.close()
    told = r"run the same command to continue from \d+ kB, or remove"
    assert re.search(told, work.interrupted_message)
    if change == "adapter":
        path = trained.adapter.folder / "adapters.safetensors"
        arrays = {name: 2 * array for name, array in mx.load(str(path)).items()}
        mx.save_safetensors(str(path), arrays)
    to = "same" if change == "form" else "dequantized"
    assert (next(fuse(trained, tmp_path / "out", to)).kept_bytes > 0) == (change == "nothing")
    written(trained, tmp_path / "out", to)
    assert sums_of(tmp_path / "out") == sums_of(written(trained, tmp_path / "whole", to))


# In little memory


FUSE = """
import contextlib, io, sys
from your_ai import cli
from your_ai.data import batches

batches.MULTIPLE = 4  # so that the short row is little work
refusal = io.StringIO()
with contextlib.redirect_stderr(refusal), contextlib.suppress(SystemExit):
    cli.main([*sys.argv[1:], "--max-memory", "0.05"])
budget = float(refusal.getvalue().split("needs at least ")[1].split()[0])
budget += 0.13  # measuring takes more, two blocks of each model
print(budget, flush=True)
cli.main([*sys.argv[1:], "--max-memory", str(budget), "--json"])
"""


def test_fuse_writes_and_measures_a_model_larger_than_its_memory_limit(tmp_path, data_folder):
    write_rows(data_folder / "valid.jsonl", [{"text": "42"}])
    model = make_large(tmp_path / "large", bits=4, blocks=7)
    drawn_run(model, data_folder, strength=0.01, lora_layers=6, max_seq_length=256)
    line = [sys.executable, "-c", FUSE, "fuse", "drawn", "out", "--to", "dequantized"]
    line += ["--dtype", "float32"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        budget = float(process.stdout.readline())
        peak = watched(process)
        found = json.loads(process.stdout.read())["difference"]
    assert process.returncode == 0
    size = sum(path.stat().st_size for path in Path("out").glob("*.safetensors"))
    assert 50 * MB < peak < budget * 1e9 < size / 1.2
    assert found["kept"] == pytest.approx(1, abs=1e-3)


def test_the_memory_limit_named_in_the_error_is_enough(tmp_path, trained):
    with pytest.raises(UserError) as caught:
        list(fuse(trained, tmp_path / "out", max_memory_gb=0.05))
    least = float(str(caught.value).split("fusing this model needs at least ")[1].split()[0])
    list(fuse(trained, tmp_path / "out", max_memory_gb=least))
    assert (tmp_path / "out").is_dir()
