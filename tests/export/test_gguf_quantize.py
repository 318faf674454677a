"""The types that llama-quantize makes. The program is a stand-in, or one that goes wrong."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.export.gguf_files import fields, kinds, tensors
from tests.export.programs import QUANTIZE
from tests.programs import program, script
from your_ai.errors import UserError
from your_ai.export import gguf, gguf_quantize, llama_cpp
from your_ai.export.gguf_quantize import TOOL_KINDS, Way, way_of

MADE = {"q4_k_m": ("Q5_0", 15), "q5_k_m": ("Q5_1", 17), "q6_k": ("Q8_0", 18), "q4_0": ("Q4_0", 2)}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder that is all of PATH, for programs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def written(trained, target, kind, tool, **options):
    list(gguf_quantize.write_model(trained, target, kind, Way(tool), **options))
    return target


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if "gguf" in path.name}


@pytest.mark.parametrize("kind", TOOL_KINDS)
def test_the_program_makes_a_file_close_to_the_fused_weights(trained, tmp_path, programs, kind):
    tool = program(programs, "llama-quantize", QUANTIZE)
    exact = tmp_path / "exact.gguf"
    list(gguf.write_model(trained, exact, "f32"))
    found = written(trained, tmp_path / "m.gguf", kind, tool)
    made, number = MADE[kind]
    assert fields(found)["general.file_type"] == number
    assert kinds(found)["blk.0.ffn_up.weight"] == made
    wanted = tensors(exact)
    for name, values in tensors(found).items():
        scale = np.abs(wanted[name]).max()
        assert np.abs(values - wanted[name]).max() <= scale * (1 / 8 + 1e-3), name
    own = {name: value for name, value in fields(exact).items() if name != "general.file_type"}
    assert {name: fields(found)[name] for name in own if not name.startswith("GGUF.")} == {
        name: value for name, value in own.items() if not name.startswith("GGUF.")
    }
    assert "tokenizer.chat_template" in own
    assert left(tmp_path) == {"exact.gguf", "m.gguf"}


def test_the_program_on_path_is_found(programs):
    assert way_of("q4_0") == Way(None)
    tool = script(programs, "llama-quantize", "true")
    assert way_of("q4_k_m") == way_of("q4_0") == Way(tool)
    assert way_of("q8_0") == way_of("f16") == Way(None)
    other = script(programs / "other", "quantize", "true")
    assert way_of("q6_k", other) == Way(other)


def test_without_the_program_the_types_that_need_none_are_named(programs):
    with pytest.raises(UserError) as refused:
        way_of("q4_k_m")
    assert str(refused.value) == (
        "--dtype q4_k_m: needs llama.cpp's llama-quantize, which is not on PATH; install llama.cpp "
        "(on a Mac: brew install llama.cpp), name it with --llama-quantize, or take a type that "
        "needs no program: f32, f16, bf16, q8_0, q4_0"
    )


@pytest.mark.parametrize(("kind", "text"), [("q4_k_m", "is not a program"), ("f16", "is not a")])
def test_a_named_program_must_exist(tmp_path, kind, text):
    with pytest.raises(UserError, match=text):
        way_of(kind, tmp_path / "nothing")


def test_a_program_that_is_not_needed_is_refused(programs):
    with pytest.raises(UserError, match="q8_0 does not need it"):
        way_of("q8_0", script(programs, "q", "true"))


LOUD = 'i=0; while [ $i -lt 3000 ]; do echo "$i xxxxxxxxxxxxxxxxxxxxxxx"; i=$((i+1)); done; exit 2'
WRONG = {
    "fails": ('echo a; echo "\033[31mout of $3" >&2; exit 3', r"exit status 3: .*out of Q6_K"),
    "silent": ("exit 1", r"failed \(exit status 1\)$"),
    "crashes": ("kill -SEGV $$", r"killed by signal 11"),
    "garbage": ('echo nonsense > "$2"', r"did not write a GGUF file"),
    "nothing": ("true", r"did not write a GGUF file"),
    "copies": ('/bin/cp "$1" "$2"', r"type 1, not MOSTLY_Q6_K"),
    "loud": (LOUD, r"exit status 2: 2999 x+\)$"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_program_that_goes_wrong_is_reported_in_one_line(trained, tmp_path, programs, wrong):
    lines, text = WRONG[wrong]
    tool = script(programs, "llama-quantize", lines)
    (tmp_path / "m.gguf").write_text("the file before")
    with pytest.raises(UserError, match=text) as failed:
        written(trained, tmp_path / "m.gguf", "q6_k", tool)
    assert str(failed.value).startswith(f"{tool}: ")
    assert "\033" not in str(failed.value)
    assert "\n" not in str(failed.value)
    assert (tmp_path / "m.gguf").read_text() == "the file before"
    assert left(tmp_path) == {"m.gguf"}


LOST = (
    "writer.add_key_value(name, value",
    "name == 'tokenizer.chat_template' or writer.add_key_value(name, value",
)
CUT = (
    "rows = quants.dequantize(tensor.data, tensor.tensor_type)",
    "rows = quants.dequantize(tensor.data, tensor.tensor_type)[:1]",
)


@pytest.mark.parametrize("change", [LOST, CUT], ids=["settings", "rows"])
def test_a_program_that_loses_a_part_of_the_model_is_noticed(trained, tmp_path, programs, change):
    assert change[0] in QUANTIZE
    tool = program(programs, "llama-quantize", QUANTIZE.replace(*change))
    with pytest.raises(UserError, match="wrote other tensors or settings"):
        written(trained, tmp_path / "m.gguf", "q6_k", tool)
    assert left(tmp_path) == set()


@pytest.mark.parametrize("lines", ["sleep 60", "exec >&- 2>&-; sleep 60"])
def test_a_program_that_hangs_is_stopped_with_its_children(
    trained, tmp_path, programs, monkeypatch, lines
):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(llama_cpp, "IDLE_S", 0.3)
    child = f"(sleep 1; touch {tmp_path}/alive) >&- 2>&- &"
    tool = script(programs, "llama-quantize", f"{child} {lines}")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"made no progress for 0\.3 s and was stopped"):
        written(trained, tmp_path / "m.gguf", "q6_k", tool)
    assert time.monotonic() - began < 20
    assert left(tmp_path) == set()
    time.sleep(1)
    assert not (tmp_path / "alive").exists()


def test_a_program_that_cannot_start_is_reported(trained, tmp_path):
    tool = tmp_path / "program"
    tool.write_bytes(b"\x7fELF nonsense")
    tool.chmod(0o755)
    with pytest.raises(UserError, match="program: cannot be started"):
        written(trained, tmp_path / "m.gguf", "q6_k", tool)


def test_disk_space_for_both_files_is_checked_first(trained, tmp_path, programs, monkeypatch):
    asked = []
    monkeypatch.setattr(gguf, "check_disk", lambda target, needed: asked.append((target, needed)))
    tool = program(programs, "llama-quantize", QUANTIZE)
    written(trained, tmp_path / "m.gguf", "q6_k", tool)
    list(gguf.write_model(trained, tmp_path / "f16.gguf", "f16"))
    (target, both), (_, one) = asked
    assert target == tmp_path / "m.gguf"
    assert both == int(1.6 * one)


def test_the_memory_of_the_program_is_part_of_the_limit(trained, tmp_path, programs, monkeypatch):
    given = []
    monkeypatch.setattr(gguf_quantize, "hold_memory", lambda *a, **_: given.append(a))
    tool = script(programs, "llama-quantize", "exit 1")
    with pytest.raises(UserError, match="exit status 1"):
        written(trained, tmp_path / "m.gguf", "q6_k", tool, max_memory_gb=2.0)
    [(doing, size_bytes, limit)] = given
    assert (doing, limit.limit_bytes) == ("quantizing", 2 * 10**9)
    assert size_bytes == 8 * 768 * 32  # the embedding, twice in float32
