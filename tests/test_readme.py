"""Every command in the README runs unchanged; CI runs the first two in new venvs."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TINY, call, chat, copy_demo, make_model, write_rows
from tests.export import ollama_program
from tests.export.gguf_files import tensors
from tests.programs import script
from your_ai.export import gguf
from your_ai.nets.saved_adapter import open_trained
from your_ai.nets.tokenizer import open_tokenizer
from your_ai.session import attach

CHECKOUT = Path(__file__).parent.parent
README = (CHECKOUT / "README.md").read_text(encoding="utf-8")

# Runs commands one after the other in this process, with the demo and its preset that are below
# the working folder; ends with the first that fails. What trains does so in this process, too.
RUN_COMMANDS = """
import importlib, json, sys
from pathlib import Path

from your_ai import cli
from your_ai.config import reading
from your_ai.data import sources
from your_ai.doctor import bench
from your_ai.doctor.shapes import llama
from your_ai.hub import find
from your_ai.session import attach


reading.packaged = sources.packaged = find.packaged = lambda *parts: Path(*parts).resolve()
attach.train = lambda folder, settings, console, detach=False, as_json=False: (
    attach.train_here(folder, settings, console, as_json)
)
bench.ROUNDS = 1
bench.SHAPES["tiny"] = llama(64, 2, 4, 2, 128, 512)
for program, *arguments in json.loads(sys.argv[1]):
    sys.argv = [program, *arguments]
    main = cli.main if program == "your_ai" else importlib.import_module(program).main
    print("$", *sys.argv, flush=True)
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.S)
    return [line for block in blocks for line in block.replace("\\\n", "").splitlines()]


def test_first_two_commands_install_and_test():
    first, second, *rest = commands()
    assert first.startswith("python3 -m venv .venv && source .venv/bin/activate && ")
    assert first.endswith("&& your_ai train")
    assert second.endswith("-m pytest")
    assert all(command.startswith(("your_ai ", "mlx_lm.generate ")) for command in rest)
    screen = README.splitlines()[:30]
    assert first in screen
    assert second in screen


@pytest.mark.slow
def test_other_commands_run(own_folder):
    # A small substitute in the place of the real model, and the demo model as in a checkout.
    make_model(own_folder / "models/Meta-Llama-3.1-8B-Instruct-4bit", num_hidden_layers=4)
    copy_demo(own_folder, train=24, valid=2, test=1)  # the longest run takes 20
    preset = (CHECKOUT / "configs/demo.yaml").read_text()
    smaller = {
        "size: 16\n": "size: 1\n",
        "samples: 4\n": "samples: 1\n",
        "layers: all\n": "layers: 1\n",
    }
    for found, less in smaller.items():
        assert found in preset
        preset = preset.replace(found, less)
    (own_folder / "configs").mkdir()
    (own_folder / "configs/demo.yaml").write_text(preset)
    write_rows(own_folder / "my-data/train.jsonl", [chat("a", "b"), chat("c", "d")])
    (own_folder / "my-run.yaml").write_text("data: my-data\nmax_steps: 1\nrun: mine\nsamples: 0\n")
    rest = json.dumps([shlex.split(command) for command in commands()[2:]])
    done = subprocess.run(
        [sys.executable, "-c", RUN_COMMANDS, rest], stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 0  # the last command that was printed


def test_walk_to_ollama_runs(own_folder, monkeypatch, capfd):
    """The five commands, with a small model and a stand-in for Ollama that has none."""
    base = own_folder / "models/Meta-Llama-3.1-8B-Instruct-4bit"
    make_model(base, num_hidden_layers=2, **TINY)
    lines = [f'"Question {i}, please?","{i} lamps"' for i in range(12)]
    Path("orders.csv").write_text("\n".join(["question,answer", *lines, ""]))
    script(own_folder / "bin", "ollama", f'exec {sys.executable} {ollama_program.__file__} "$@"')
    monkeypatch.setenv("PATH", f"{own_folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("OLLAMA_MODELS", str(own_folder))
    here = attach.train_here
    monkeypatch.setattr(
        attach,
        "train",
        lambda folder, settings, console, detach=False, as_json=False: here(
            folder, settings, console, as_json
        ),
    )
    walk = README.split("### From a CSV file to Ollama")[1].split("```shell\n")[1].split("```")[0]
    assert len(walk.splitlines()) == 5
    for line in walk.splitlines():
        program, *arguments = shlex.split(line)
        if program == "your_ai":
            assert call(*arguments) == 0, line
        else:
            subprocess.run([program, *arguments], check=True)
    out = capfd.readouterr().out.splitlines()
    assert "ollama create orders -f orders-ollama/Modelfile" in out  # as in the README
    asked = [{"role": "user", "content": shlex.split(walk)[-1]}]
    wanted = open_tokenizer(base).apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert json.loads(out[-1]) == wanted
    trained = open_trained("orders")
    list(gguf.write_model(trained, Path("exact.gguf"), "f32"))
    exact = tensors(Path("exact.gguf"))
    for name, values in tensors(Path("orders-ollama/orders-Q8_0.gguf")).items():
        assert np.allclose(values, exact[name], atol=np.abs(exact[name]).max() / 200), name


def test_architecture_doc_names_every_package():
    block = (CHECKOUT / "docs" / "architecture.md").read_text().split("```")[1]
    named = set(re.findall(r"^  ([a-z]+/)", block, re.M))
    named |= set(re.findall(r"\b[a-z]+\.py\b", block))
    package = CHECKOUT / "your_ai"
    there = {p.name for p in package.glob("*.py") if not p.name.startswith("__")}
    there |= {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    assert named == there


def test_links_point_to_existing_files():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if not target.startswith("http"):
            assert (CHECKOUT / target).exists(), target
