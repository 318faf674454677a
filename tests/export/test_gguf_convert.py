"""What llama.cpp's converters make. They are stand-ins here, or ones that go wrong."""

from __future__ import annotations

import errno
import json
import sys
import time
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import call, change_json
from tests.export.gguf_files import fields, kinds, tensors
from tests.export.programs import CONVERT, QUANTIZE
from tests.export.runs import make_trained, printed
from tests.export.transformers_bases import write_base
from tests.programs import program, script
from your_ai.errors import UserError
from your_ai.export import gguf_architectures, gguf_convert, llama_cpp
from your_ai.export.gguf_convert import OF_ADAPTERS, OF_MODELS, python_for, script_for

KIND = "stablelm"  # which our own writer does not have in these tests
LAYER = "model.layers.1.mlp.up_proj"


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.delitem(gguf_architectures.KNOWN, KIND)
    folder = write_base(tmp_path / "base", KIND)
    (folder / "code.py").write_text("raise SystemExit('the base was run')")
    (folder / "tokenizer.model").write_text("pieces")
    return folder


@pytest.fixture
def run(base):
    return make_trained(base, lora_layers="all", lora_targets=["all-linear"])


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder of llama.cpp, of which nothing else is on this machine."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setattr(gguf_convert, "HOMEBREW", ())
    monkeypatch.delenv("HOMEBREW_PREFIX", raising=False)
    folder = tmp_path / "llama cpp ü{x}"
    for name in (OF_MODELS, OF_ADAPTERS):
        program(folder, name, CONVERT)
    return folder


def left(folder: Path) -> set[str]:
    kept = ("base", "runs", "programs", "llama cpp ü{x}")
    return {path.name for path in folder.iterdir() if path.name not in kept}


def written(trained, target, tool, kind="f32", **options):
    list(gguf_convert.write_model(trained, target, kind, script=tool, **options))
    return target


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
def test_the_script_gets_the_fused_model_of_transformers(run, tmp_path, checkout, kind, capsys):
    given = ("--to", "gguf", "--fused", "--dtype", kind, "--llama-cpp", checkout, "--out", "m.gguf")
    assert call("export", "r", *given) == 0
    assert capsys.readouterr().err == f"converted by {checkout / OF_MODELS}\n"
    assert left(tmp_path) == {"m.gguf"}
    assert Path("m.gguf").stat().st_mode & 0o777 == 0o644
    settings = fields(Path("m.gguf"))
    assert settings["general.name"] == "base fine-tuned"
    assert settings["test.architecture"] == "StableLmForCausalLM"
    assert settings["test.files"].split() == [
        *("README.md", "chat_template.jinja", "config.json", "exported.json", "model.safetensors"),
        *("model.safetensors.index.json", "tokenizer.json", "tokenizer.model"),
        "tokenizer_config.json",
    ]
    assert kinds(Path("m.gguf"))[f"{LAYER}.weight"] == kind.upper()
    [weight] = [mx.load(str(run.base / "model.safetensors"))[f"{LAYER}.weight"]]
    parts = run.adapter.layers[LAYER]
    fused = np.array(weight + run.adapter.scale * (parts["lora_a"] @ parts["lora_b"]).T)
    close = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2, "q8_0": 1e-2}[kind]
    found = tensors(Path("m.gguf"))[f"{LAYER}.weight"]
    assert np.abs(found - fused).max() <= close * np.abs(fused).max()


def test_the_script_gets_the_adapter_of_peft(run, tmp_path, checkout):
    assert call("export", "r", "--to", "gguf", "--llama-cpp", checkout) == 0
    assert left(tmp_path) == {"r-lora.gguf"}
    found = tensors(Path("r-lora.gguf"))[f"base_model.model.{LAYER}.lora_A.weight"]
    assert np.array_equal(found, np.array(run.adapter.layers[LAYER]["lora_a"].T))


def test_llama_quantize_makes_other_types_of_what_the_script_wrote(run, checkout, tmp_path, capsys):
    given = ("--to", "gguf", "--fused", "--dtype", "q4_k_m", "--llama-cpp", checkout)
    assert call("export", "r", *given) == 2
    assert "take a type that needs no program: f32, f16, bf16, q8_0\n" in printed(capsys)
    tool = program(tmp_path / "programs", "llama-quantize", QUANTIZE)
    assert call("export", "r", *given) == 0
    assert printed(capsys) == (
        f"r-q4_k_m.gguf\nconverted by {checkout / OF_MODELS}\nq4_k_m: quantized by {tool}\n"
    )
    assert fields(Path("r-q4_k_m.gguf"))["general.file_type"] == 15
    assert left(tmp_path) == {"r-q4_k_m.gguf"}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--to", "ollama"), {"Modelfile", "r-F16.gguf"}),
        (("--to", "ollama", "--adapter-for", "stablelm2"), {"Modelfile", "adapter.gguf"}),
        (("--to", "lmstudio", "--dtype", "q8_0"), {"r-Q8_0.gguf"}),
    ],
)
def test_ollama_and_lm_studio_get_it_too(run, checkout, tmp_path, options, names):
    assert call("export", "r", *options, "--llama-cpp", checkout, "--out", "out") == 0
    assert {path.name for path in Path("out").iterdir()} == names
    assert left(tmp_path) == {"out"}


def test_the_script_is_found_on_path_and_in_homebrew(base, checkout, tmp_path, monkeypatch):
    with pytest.raises(UserError) as missing:
        script_for(base, "auto", None, OF_MODELS)
    assert str(missing.value) == (
        f"{base}: architecture stablelm: needs llama.cpp's convert_hf_to_gguf.py, which is not on "
        "PATH; name a checkout with --llama-cpp (git clone https://github.com/ggml-org/llama.cpp), "
        "or, where it has the script, install llama.cpp (on a Mac: brew install llama.cpp)"
    )
    brewed = script(tmp_path / "brew", "unused", "").parent / "bin"
    monkeypatch.setattr(gguf_convert, "HOMEBREW", (str(tmp_path / "brew"),))
    tool = script(brewed, OF_MODELS, "")
    assert script_for(base, "auto", None, OF_MODELS) == tool
    assert script_for(base, "auto", brewed.parent, OF_MODELS) == tool
    first = script(tmp_path / "programs", OF_MODELS, "")
    assert script_for(base, "auto", None, OF_MODELS) == first
    with pytest.raises(UserError, match=r"has no convert_lora_to_gguf\.py; give a checkout"):
        script_for(base, "auto", brewed, OF_ADAPTERS)


def test_a_model_that_we_write_ourselves_needs_no_script(tiny_model, base, checkout):
    assert script_for(tiny_model, "auto", None, OF_MODELS) is None
    found = script_for(tiny_model, "llama.cpp", checkout, OF_MODELS)
    assert found == checkout / OF_MODELS
    with pytest.raises(UserError, match="--llama-cpp: llama does not need it"):
        script_for(tiny_model, "auto", checkout, OF_MODELS)
    (base / "config.json").write_text(json.dumps({"model_type": "rwkv7"}))
    with pytest.raises(UserError, match="architecture rwkv7 is not supported"):
        script_for(base, "auto", checkout, OF_MODELS)


def test_options_of_the_converter_need_a_gguf_file(run, capsys):
    for options in (("--to", "hf"), ("--to", "peft"), ("--to", "lmstudio", "--dtype", "mlx")):
        assert call("export", "r", *options, "--converter", "llama.cpp") == 2
        assert "--converter: --to" in printed(capsys)


def test_python_is_that_of_the_script_or_one_that_has_what_it_needs(tmp_path, monkeypatch):
    assert python_for(program(tmp_path, "a", "")) == sys.executable
    plain = program(tmp_path, "b", "", "/usr/bin/env python3")
    found = program(tmp_path / "programs", "python3", "")
    monkeypatch.setenv("PATH", str(found.parent))
    monkeypatch.setattr(gguf_convert, "NEEDS", ("json", "no_such_module"))
    assert python_for(plain) == str(found)
    monkeypatch.setattr(gguf_convert, "NEEDS", ("json",))
    assert python_for(plain) == sys.executable


OTHER = CONVERT.replace("mx.load(str(file)).items()", "list(mx.load(str(file)).items())[:-1]")
LARGE = CONVERT.replace("array.astype(mx.float32)", "array.astype(mx.float32) * 1e9")
WRONG = {
    "fails": (
        "print('a')\nraise SystemExit('out of \\033[31mluck')",
        r"exit status 1: out of .*luck",
    ),
    "needs torch": ("import no_torch", r"has no module no_torch; install it there: .* -m pip"),
    "stands alone": ("import conversion.x", "works only in a checkout of llama.cpp"),
    "writes nothing": ("", "did not write a GGUF file"),
    "writes nonsense": ("open('result.gguf', 'w').write('x')", "did not write a GGUF file"),
    "leaves a tensor out": (OTHER, "wrote another model than it was given"),
    "writes infinities": (LARGE, r"has weights too large for float16; use --dtype bf16"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_script_that_goes_wrong_is_reported_in_one_line(run, tmp_path, checkout, wrong):
    source, text = WRONG[wrong]
    tool = program(checkout, OF_MODELS, source)
    (tmp_path / "m.gguf").write_text("the file before")
    with pytest.raises(UserError, match=text) as failed:
        written(run, tmp_path / "m.gguf", tool, "f16")
    assert str(failed.value).startswith(f"{tool}: ")
    assert "\n" not in str(failed.value)
    assert (tmp_path / "m.gguf").read_text() == "the file before"
    assert left(tmp_path) == {"m.gguf"}


def test_a_script_that_hangs_is_stopped(run, tmp_path, checkout, monkeypatch):
    monkeypatch.setattr(llama_cpp, "IDLE_S", 0.5)
    tool = program(checkout, OF_MODELS, "import time\ntime.sleep(60)")
    began = time.monotonic()
    with pytest.raises(UserError, match=r"made no progress for 0\.5 s and was stopped"):
        written(run, tmp_path / "m.gguf", tool)
    assert time.monotonic() - began < 20
    assert left(tmp_path) == set()


def test_an_interrupted_export_leaves_nothing(run, tmp_path, checkout):
    steps = gguf_convert.write_model(run, tmp_path / "m.gguf", "f32", script=checkout / OF_MODELS)
    for _ in range(3):
        next(steps)
    assert left(tmp_path) != set()
    with pytest.raises(KeyboardInterrupt):
        steps.throw(KeyboardInterrupt)
    assert left(tmp_path) == set()


def test_what_a_killed_export_left_is_deleted_by_the_next(run, tmp_path, checkout):
    place = tmp_path / ".m.gguf.converting"
    (place / "model").mkdir(parents=True)
    (place / "result.gguf").write_text("half")
    written(run, tmp_path / "m.gguf", checkout / OF_MODELS)
    assert left(tmp_path) == {"m.gguf"}


def test_disk_space_for_the_folder_and_the_file_is_checked_first(
    run, tmp_path, checkout, monkeypatch
):
    asked = []
    monkeypatch.setattr(gguf_convert, "check_disk", lambda target, size: asked.append(size))
    file = written(run, tmp_path / "m.gguf", checkout / OF_MODELS)
    [needed] = asked
    assert 0 <= 2 * file.stat().st_size - needed < 20_000

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_convert, "put", full)
    with pytest.raises(UserError, match=r"No space left on device.; free some disk space"):
        written(run, tmp_path / "n.gguf", checkout / OF_MODELS)
    assert left(tmp_path) == {"m.gguf"}


def test_adapters_that_llama_cpp_cannot_apply_are_refused(base, tmp_path, checkout):
    dora = make_trained(base, "d", use_dora=True)
    with pytest.raises(UserError, match="fuse it with --fused"):
        list(gguf_convert.write_adapter(dora, tmp_path / "a.gguf", checkout / OF_ADAPTERS))
    assert left(tmp_path) == set()


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_next"])
def test_layers_that_mlx_lm_leaves_out_are_not_announced(checkout, tmp_path, kind):
    base = write_base(tmp_path / "base", kind)
    change_json(base, "config.json", num_nextn_predict_layers=1)
    asks = "parser.add_argument("
    option = f'{asks}"--no-mtp", action="store_true", required=True)\n{asks}"folder"'
    source = CONVERT if kind == "glm4_moe" else CONVERT.replace(f'{asks}"folder"', option)
    tool = program(checkout, OF_MODELS, source)
    assert written(make_trained(base, lora_targets=["q_proj"]), tmp_path / "m.gguf", tool)
