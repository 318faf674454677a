from __future__ import annotations

import os
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from tests.conftest import call
from tests.export.runs import make_run, printed
from your_ai.commands import exporting
from your_ai.config.requests import GGUF_KINDS
from your_ai.errors import UserError
from your_ai.export import gguf, gguf_quantize, huggingface
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint


@pytest.fixture
def run(tiny_model):
    return make_run(tiny_model)


@pytest.mark.parametrize(
    ("to", "file"), [("mlx", "adapters.safetensors"), ("peft", "adapter_model.safetensors")]
)
def test_default_folder_is_named_after_run_and_format(run, capsys, to, file):
    assert call("export", "r", "--to", to) == 0
    assert capsys.readouterr().out == f"r-{to}\n"
    assert Path(f"r-{to}", file).is_file()
    assert Path(f"r-{to}", "README.md").read_text().startswith("---\nlibrary_name: ")


def test_without_a_name_the_newest_run_with_an_adapter_is_exported(run, capsys):
    shutil.copytree(run.path, run.path.with_name("s"), ignore=shutil.ignore_patterns("adapter"))
    os.utime("runs/s/config.yaml")
    assert call("export", "--to", "peft") == 0
    out, error = capsys.readouterr()
    assert out == "r-peft\n"
    assert error == "run: r (the newest with an adapter or a checkpoint)\n"


def test_run_given_by_path_is_exported_under_its_name(run, capsys):
    assert call("export", run.path, "--to", "peft") == 0
    assert capsys.readouterr().out == "r-peft\n"


def test_existing_adapter_is_replaced_only_with_force(run, capsys):
    Path("out").mkdir()
    for name in ("adapter_config.json", "adapters.safetensors"):
        Path("out", name).write_text("{}")
    assert call("export", "r", "--to", "peft", "--out", "out") == 2
    assert "out: exists; choose another name, or replace it with --force" in printed(capsys)
    assert call("export", "r", "--to", "peft", "--out", "out", "--force") == 0
    assert Path("out", "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(("to", "kind"), [("peft", "file"), ("hf", "file"), ("gguf", "folder")])
def test_file_is_not_replaced_by_a_folder_or_the_reverse(run, capsys, to, kind):
    if kind == "file":
        Path("out").write_text("a file")
    else:
        Path("out").mkdir()
    assert call("export", "r", "--to", to, "--out", "out", "--force") == 2
    assert f"out: is a {kind}, the result is a " in printed(capsys)


@pytest.mark.parametrize("of", ["adapter", "base", "inside the base"])
def test_files_of_the_run_itself_are_never_replaced(run, tiny_model, tmp_path, capsys, of):
    base = shutil.copytree(tiny_model, tmp_path / "base")
    out = {"adapter": run.adapter, "base": base, "inside the base": base / "out"}[of]
    before = (run.adapter / checkpoint.ADAPTERS).read_bytes()
    given = ("--to", "peft", "--out", out, "--force", "--model", base)
    assert call("export", "r", *given) == 2
    assert "belongs to the run itself" in printed(capsys)
    assert (run.adapter / checkpoint.ADAPTERS).read_bytes() == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--to", "onnx"), "'onnx' is not one of"),
        (
            ("--to", "peft", "--fused"),
            "--fused only works with --to gguf; --to peft is the adapter",
        ),
        (("--to", "hf", "--fused"), "--to hf is fused always"),
        (("--to", "peft", "--dtype", "float16"), "--dtype needs a fused model"),
        (("--to", "gguf", "--dtype", "f16"), "--dtype needs a fused model"),
        (("--to", "mlx", "--max-memory", 4), "--max-memory needs a fused model"),
        (("--to", "hf", "--dtype", "q8_0"), "--to hf takes float32, bfloat16, float16"),
        (("--to", "gguf", "--fused", "--dtype", "float16"), "--to gguf takes f32, f16, bf16"),
        (("--to", "peft", "--out", "no/such/place"), "is not a folder; create it first"),
        (("--to", "peft", "--checkpoint", "7"), "has no such checkpoint"),
        (("--to", "peft", "--model", "nowhere"), "nowhere"),
    ],
)
def test_invalid_options_are_reported_and_nothing_is_written(run, tmp_path, capsys, options, text):
    before = sorted(tmp_path.iterdir())
    assert call("export", "r", *options) == 2
    output = printed(capsys)
    assert output.startswith("error: ")
    assert text in output
    assert output.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "name", "kind"),
    [
        ((), "r-lora.gguf", None),
        (("--fused",), "r-f16.gguf", "f16"),
        (("--fused", "--dtype", "q8_0"), "r-q8_0.gguf", "q8_0"),
    ],
)
def test_gguf_export_writes_one_file(run, monkeypatch, capsys, options, name, kind):
    given = []

    def note(_, target, kind=None, *__):
        given.append((target, kind))
        return []

    monkeypatch.setattr(gguf, "write_adapter", note)
    monkeypatch.setattr(gguf_quantize, "write_model", note)
    assert call("export", "r", "--to", "gguf", *options) == 0
    assert given == [(Path(name), kind)]
    assert capsys.readouterr().out.split() == [name]


def test_interrupted_export_says_that_the_same_command_restarts_it(run, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "show_bytes", interrupted)
    assert call("export", "r", "--to", "hf") == 130
    assert capsys.readouterr().err == "r-hf: stopped; run the same command to start again\n"


def test_hf_export_writes_a_fused_model_in_the_given_dtype(run, capsys):
    assert call("export", "r", "--to", "hf", "--dtype", "float16", "--max-memory", 2) == 0
    arrays = mx.load("r-hf/model.safetensors")
    assert arrays["model.layers.0.mlp.up_proj.weight"].dtype == mx.float16
    assert not any(name.endswith("scales") for name in arrays)
    assert not Path(huggingface.work_of(Path("r-hf")).folder).exists()


def test_model_created_meanwhile_is_replaced_only_with_force(run, tiny_model):
    out, trained = Path(shutil.copytree(tiny_model, "out")), open_trained("r")
    with pytest.raises(UserError, match="out: exists"):
        list(huggingface.write(trained, out))
    assert (out / "model.safetensors").read_bytes() == (
        tiny_model / "model.safetensors"
    ).read_bytes()
    list(huggingface.write(trained, out, force=True))
    assert (out / "exported.json").is_file()


def test_imported_adapter_gives_the_same_answer(run, tiny_model, capsys):
    assert call("export", "r", "--to", "peft") == 0
    assert call("import", "r-peft", "--model", tiny_model, "--run", "back") == 0
    assert "your_ai generate back" in capsys.readouterr().out
    given = ("--prompt", "Hello", "--max-tokens", 4)
    assert call("generate", "back", *given) == 0
    answer = capsys.readouterr().out
    assert call("generate", "r", *given) == 0
    assert capsys.readouterr().out == answer


def test_failed_import_is_reported_in_one_line(run, tiny_model, capsys):
    assert call("import", "nowhere", "--model", tiny_model) == 2
    output = printed(capsys)
    assert output.startswith("error: nowhere: no such folder: /")
    assert output.count("\n") == 1


def test_the_type_may_be_in_capitals_as_llama_cpp_writes_it(run, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert call("export", "r", "--to", "ollama", "--dtype", "Q4_K_M") == 2
    assert "--dtype q4_k_m: needs llama.cpp's llama-quantize" in printed(capsys)


def test_the_command_takes_every_type_of_gguf_file():
    kinds = {**gguf.KINDS, **gguf_quantize.TOOL_KINDS}  # written twice: these load MLX
    assert tuple(kinds) == GGUF_KINDS
