"""The generated file with the tensors of the registry's models."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from your_ai.gates.untrusted import Entry
from your_ai.hub.built_tensors import tensors_built
from your_ai.hub.registry import TENSORS, config_of, known, numbers, quantization_of, unpacked

TOOL = Path(__file__).parents[2] / "tools" / "make_known_tensors.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location(TOOL.stem, TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_is_what_the_tool_writes(tool):
    """From mlx-lm's own models: so the tensors are exactly those that it loads."""
    assert (
        tool.written({m.alias: tool.parts_of(m) for m in known().values()}) == TENSORS.read_text()
    )


@pytest.mark.parametrize("alias", ["qwen3.5-35b-a3b", "gemma4-e2b", "gpt-oss-20b", "smollm2-135m"])
def test_unpacked_tensors_are_those_of_the_model(alias):
    model = known()[alias]
    entries, _ = tensors_built(config_of(model))
    assert {e.name: e.shape for e in entries} == {e.name: e.shape for e in model.tensors}


def test_packing_keeps_shapes_dtypes_and_quantization(tool):
    entries = [
        Entry("model.embed_tokens.weight", "BF16", (100, 64)),
        *(entry for i in (0, 1, 3) for entry in block(i)),
        Entry("model.scale", "BF16", ()),
        Entry("model.ids", "I32", (3,)),
    ]
    own = {f"model.layers.{i}.up": {"bits": 8, "group_size": 32} for i in (0, 1, 3)}
    parts = tool.packed(entries, {"bits": 4, "group_size": 64, "mode": "mxfp4", **own})
    assert parts[1][:2] == ("model.layers.", "0-1,3")
    assert sorted(unpacked(parts), key=str) == sorted(entries, key=str)
    settings = quantization_of(parts)
    assert settings["model.layers.3.up"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert settings["model.layers.0.down"] == {"bits": 4, "group_size": 32, "mode": "mxfp4"}


def block(index: int) -> list[Entry]:
    at = f"model.layers.{index}"
    return [
        Entry(f"{at}.up.weight", "U32", (16, 16)),
        Entry(f"{at}.up.scales", "BF16", (16, 2)),
        Entry(f"{at}.up.biases", "BF16", (16, 2)),
        Entry(f"{at}.down.weight", "U32", (8, 64, 8)),
        Entry(f"{at}.down.scales", "U8", (8, 64, 2)),
        Entry(f"{at}.norm.weight", "BF16", (64,)),
    ]


@pytest.mark.parametrize("text", ["0", "0-31", "0,2,4-6"])
def test_ranges_are_the_reverse_of_numbers(tool, text):
    assert tool.ranges(list(numbers(text))) == text


def test_no_mlx_is_needed():
    code = (
        "import sys\n"
        "from your_ai.hub.registry import known\n"
        "from your_ai.memory.facts import facts_of_known\n"
        "assert all(facts_of_known(model, 2).blocks for model in known().values())\n"
        "sys.exit('mlx' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_file_is_small_and_valid():
    assert TENSORS.stat().st_size < 100_000
    assert json.loads(TENSORS.read_text()).keys() == known().keys()
