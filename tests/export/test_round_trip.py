"""What a user does: a CSV file, a run on the demo, and the result in another program."""

from __future__ import annotations

import csv
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import DEMO_FOLDER, call, wait_until
from tests.export.gguf_files import fields, tensors
from tests.export.ollama_program import parse
from tests.export.programs import CONVERT
from tests.export.runs import make_run
from tests.export.transformers_bases import write_base
from tests.programs import program
from your_ai.export.gguf_convert import OF_MODELS
from your_ai.nets.model import load_network
from your_ai.nets.saved_adapter import open_trained, put_adapter
from your_ai.nets.tokenizer import open_tokenizer


@pytest.fixture
def run(small_demo, monkeypatch):
    """A run on the rows of a CSV file, with a home in which LM Studio was opened once."""
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("home/.lmstudio").mkdir(parents=True)
    with open("orders, öre.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer"])
        for number in range(24):
            rows.writerow([f"{number} shirts to Oslo, please", f"We will send {number} shirts."])
    given = ("--model", "demo", "--data", "orders, öre.csv", "--run", "orders")
    assert call("train", *given, "--max-steps", 2, "--learning-rate", 1e-3) == 0
    return open_trained("orders")


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (("gguf", "--fused"), "orders-f16.gguf"),
        (("ollama",), "orders-ollama/orders-F16.gguf"),
        (("lmstudio", "--dtype=f16"), "home/.lmstudio/models/your_ai/orders/orders-F16.gguf"),
    ],
)
def test_a_run_on_a_csv_file_becomes_a_model_of_another_program(run, options, place):
    assert call("export", "--to", *options) == 0
    file, tokenizer = Path(place), open_tokenizer(DEMO_FOLDER)
    found = fields(file)
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    ends = {found.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")} - {None}
    assert ends == set(tokenizer.eos_token_ids)
    kinds = found["tokenizer.ggml.token_type"]
    added = {kinds[index] for index in tokenizer.added_tokens_decoder}
    assert added <= {gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED}
    network, _ = load_network(run.base, mx.float32)
    put_adapter(network, run.adapter)
    layer = network.model.layers[0].mlp.up_proj
    learned = np.array(layer(mx.eye(network.args.hidden_size)).T)
    assert np.abs(tensors(file)["blk.0.ffn_up.weight"] - learned).max() < 1e-3
    if options[0] == "ollama":
        modelfile = parse(Path("orders-ollama/Modelfile").read_text())
        assert modelfile["from"] == "./orders-F16.gguf"
        assert modelfile["parameters"]["stop"]
        assert "template" in modelfile
    assert not list(Path().glob(".*")) + list(file.parent.glob(".*"))


def test_an_adapter_of_a_csv_file_changes_what_the_run_has_learned(run):
    assert call("export", "--to", "gguf") == 0
    found = tensors(Path("orders-lora.gguf"))
    assert len(found) == 2 * len(run.adapter.layers)
    assert all(np.abs(array).max() > 0 for array in found.values())


def test_a_killed_export_leaves_nothing_after_the_next(tmp_path, monkeypatch):
    make_run(write_base(tmp_path / "base", "phimoe"))
    folder = tmp_path / "llama cpp"
    slow = "import time, pathlib\npathlib.Path('began').touch()\ntime.sleep(30)"
    program(folder, OF_MODELS, slow)
    options = ["export", "r", "--to", "gguf", "--fused", "--llama-cpp", str(folder)]
    process = subprocess.Popen([sys.executable, "-m", "your_ai", *options])
    place = Path(".r-f16.gguf.converting")
    try:
        wait_until((place / "began").exists)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (place / "model/model.safetensors").exists()
    assert not Path("r-f16.gguf").exists()
    program(folder, OF_MODELS, CONVERT)
    assert call(*options) == 0
    assert fields(Path("r-f16.gguf"))["general.type"] == "model"
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []
