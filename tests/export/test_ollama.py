"""Folders for Ollama, read by a stand-in for the program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TINY, call, change_json, make_model, write_rows
from tests.export import ollama_program
from tests.export.gguf_files import fields, tensors
from tests.export.ollama_program import parse
from tests.export.programs import QUANTIZE
from tests.export.runs import make_run, make_trained, printed
from tests.export.transformers_bases import write_base
from tests.programs import program
from your_ai.data.look import common_form
from your_ai.data.template import render
from your_ai.errors import UserError
from your_ai.export import gguf, gguf_convert, ollama
from your_ai.export.gguf_folder import plain_name
from your_ai.export.ollama import Modelfile
from your_ai.generation.generate import TEMPLATE_BYTES
from your_ai.nets.tokenizer import open_tokenizer

CHAT = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Two lamps"},
]


def exported(trained, target="out", dtype=None, **options):
    export = ollama.decide(trained, dtype, "f16", **options)
    list(ollama.write(trained, Path(target), export))
    return ollama_program.create("m", Path(target) / "Modelfile")


def test_ollama_reads_the_folder_and_renders_chats_as_the_model_does(trained, tmp_path):
    found = exported(trained, dtype="q8_0")
    tokenizer = open_tokenizer(trained.base)
    wanted = render(tokenizer, CHAT, "x", TEMPLATE_BYTES, add_generation_prompt=True)
    assert ollama_program.rendered(found["template"], CHAT) == wanted
    assert found["parameters"] == {"num_ctx": 2048, "stop": ["<|end|>"]}
    assert "system" not in found
    assert sorted(path.name for path in Path("out").iterdir()) == ["Modelfile", "r-Q8_0.gguf"]
    list(gguf.write_model(trained, tmp_path / "exact.gguf", "f32"))
    exact = tensors(tmp_path / "exact.gguf")
    for name, values in tensors(Path("out/r-Q8_0.gguf")).items():
        assert np.allclose(values, exact[name], atol=np.abs(exact[name]).max() / 200), name
    assert fields(Path("out/r-Q8_0.gguf"))["tokenizer.chat_template"] == tokenizer.chat_template


def test_the_token_that_ends_a_turn_is_a_stop_if_the_model_does_not_know_it(tmp_path):
    trained = make_trained(make_model(tmp_path / "m", **TINY))
    change_json(trained.base, "config.json", eos_token_id=0)
    change_json(trained.base, "tokenizer_config.json", eos_token="<|pad|>", pad_token=None)
    modelfile, _ = ollama.settings_of(trained, open_tokenizer(trained.base))
    assert [value for name, value in modelfile.parameters if name == "stop"] == [
        "<|pad|>",
        "<|end|>",
    ]


def test_the_commands_that_follow_are_printed(trained, capsys):
    assert call("export", "r", "--to", "ollama") == 0
    out, error = capsys.readouterr()
    assert out.splitlines() == ["r-ollama", "ollama create r -f r-ollama/Modelfile", "ollama run r"]
    assert error == ""


@pytest.mark.parametrize(
    ("seq", "context", "wanted"), [(64, 2048, 2048), (64, 8192, 4096), (6000, 8192, 6000)]
)
def test_the_context_holds_the_rows_and_a_conversation(tmp_path, seq, context, wanted):
    base = make_model(tmp_path / "m", max_position_embeddings=context, num_hidden_layers=2)
    assert ollama.context_of(make_trained(base, max_seq_length=seq)) == wanted


def test_a_run_that_samples_gives_its_temperature(tiny_model):
    trained = make_trained(
        tiny_model, objective="grpo", reward=["length"], temperature=0.7, mask_prompt=True
    )
    export = ollama.decide(trained, None, "f16")
    assert ("temperature", "0.7") in export.modelfile.parameters


def test_another_chat_template_is_left_to_the_weights_and_told(tmp_path, capsys):
    base = make_model(tmp_path / "m", num_hidden_layers=2)
    odd = "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}"
    (base / "chat_template.jinja").write_text(odd)
    make_run(base)
    assert call("export", "r", "--to", "ollama") == 0
    assert "note: no Go template says the same as the model's chat template" in printed(capsys)
    assert "template" not in ollama_program.parse(Path("r-ollama/Modelfile").read_text())
    assert fields(Path("r-ollama/r-F16.gguf"))["tokenizer.chat_template"] == odd


def test_reasoning_that_the_chat_template_leaves_out_is_told(tmp_path, capsys):
    base = make_model(tmp_path / "m", num_hidden_layers=2)
    cuts = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}{% endfor %}"
    (base / "chat_template.jinja").write_text(cuts + "<assistant>")
    make_run(base)
    assert call("export", "r", "--to", "ollama") == 0
    assert "leaves the reasoning (<think>) of earlier answers out" in printed(capsys)


def test_without_a_chat_template_the_texts_are_joined(tmp_path):
    base = make_model(tmp_path / "m", num_hidden_layers=2)
    (base / "chat_template.jinja").unlink()
    export = ollama.decide(make_trained(base), None, "f16")
    assert "has no chat template" in export.notes[0]
    assert ollama_program.rendered(export.modelfile.template, CHAT) == "HelloYes?\nTwo lamps"


class Begins:
    """The demo's tokenizer, but with a token that it puts before a text."""

    def __init__(self, tokenizer, template):
        self.tokenizer, self.chat_template, self.has_chat_template = tokenizer, template, True
        self.bos_token, self.bos_token_id = "<|bos|>", 5

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def encode(self, text, add_special_tokens=True):
        return [5] * add_special_tokens + self.tokenizer.encode(text, add_special_tokens=False)

    def apply_chat_template(self, messages, **options):
        text = self.tokenizer.apply_chat_template(messages, **options)
        return ("<|bos|>" if "bos" in self.chat_template else "") + text


@pytest.mark.parametrize("writes", [True, False])
def test_the_token_that_the_tokenizer_puts_first_is_not_written_twice(trained, writes):
    tokenizer = open_tokenizer(trained.base)
    begins = Begins(tokenizer, "bos" if writes else "")
    template, notes = ollama.template_of(trained, begins)
    assert "<|bos|>" not in template
    assert notes == (
        []
        if writes
        else ["Ollama will begin a chat with <|bos|>, which the chat template does not write"]
    )


# The system prompt


def rows(*systems):
    return [{"prompt": "a", "completion": "b", **({"system": s} if s else {})} for s in systems]


@pytest.mark.parametrize(
    ("systems", "wanted"),
    [
        (["Be brief."] * 3, "Be brief."),
        (["Be brief.", "Be kind."], ""),
        (["Be brief.", ""], ""),
        (["", "Be brief."], ""),
        (["", ""], ""),
    ],
)
def test_the_system_prompt_is_that_of_all_training_rows(trained, own_folder, systems, wanted):
    write_rows(own_folder / "d" / "train.jsonl", rows(*systems))
    write_rows(own_folder / "d" / "valid.jsonl", rows("Another"))
    config = make_trained(trained.base, "s", data=str(own_folder / "d")).config
    assert common_form(config).system == wanted


@pytest.mark.parametrize("data", ["", "gone.jsonl", "hf:someone/dataset", "-"])
def test_data_that_cannot_be_read_gives_no_system_prompt(trained, data):
    config = make_trained(trained.base, "s", data=data).config
    assert common_form(config).system == ""


def test_a_system_prompt_that_a_modelfile_would_change_is_left_out_and_told(trained, own_folder):
    write_rows(own_folder / "d" / "train.jsonl", rows("a\u00a0b", "a\u00a0b"))
    write_rows(own_folder / "d" / "valid.jsonl", rows(""))
    trained = make_trained(trained.base, "s", data=str(own_folder / "d"))
    export = ollama.decide(trained, None, "f16")
    assert export.modelfile.system == ""
    assert export.notes == (
        "the system prompt of the training rows has the character U+00A0: it is left out",
    )


# Weights


def test_an_architecture_that_needs_the_converter_is_refused_without_it(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gguf_convert, "HOMEBREW", ())
    make_run(write_base(tmp_path / "m", "phimoe"), lora_targets=["q_proj"])
    assert call("export", "r", "--to", "ollama") == 2
    assert "architecture phimoe: needs llama.cpp's convert_hf_to_gguf.py" in printed(capsys)
    assert not list(Path().glob("*ollama*"))


def test_only_the_adapter_for_a_model_of_ollama(trained, capsys):
    given = ("--to", "ollama", "--adapter-for", "llama3.2:1b")
    assert call("export", "r", *given) == 0
    found = ollama_program.create("m", Path("r-ollama/Modelfile"))
    assert (found["from"], found["adapter"]) == ("llama3.2:1b", "./adapter.gguf")
    assert fields(Path("r-ollama/adapter.gguf"))["general.type"] == "adapter"
    assert call("export", "r", *given) == 2
    assert "r-ollama: exists" in printed(capsys)
    assert call("export", "r", *given, "--force") == 0


@pytest.mark.parametrize("name", ["a b", "-x", "", "a\nFROM b", "../x", "no.gguf", 'a"b'])
def test_a_base_that_is_no_name_in_ollama_is_refused(trained, name):
    with pytest.raises(UserError, match="--adapter-for"):
        ollama.decide(trained, None, "f16", adapter_for=name)


def test_a_gguf_file_as_base_is_named_by_its_path(trained, own_folder):
    Path("base.gguf").touch()
    export = ollama.decide(trained, None, "f16", adapter_for="base.gguf")
    assert export.modelfile.weights == str(own_folder / "base.gguf")


def test_dora_has_no_adapter_form_but_is_fused(tiny_model):
    trained = make_trained(tiny_model, use_dora=True)
    with pytest.raises(UserError, match="is DoRA, which Ollama cannot add to a model"):
        ollama.decide(trained, None, "f16", adapter_for="llama3")
    assert exported(trained)["from"] == "./r-F16.gguf"


def test_a_reward_model_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr("your_ai.nets.saved_adapter.has_score_head", lambda _: True)
    with pytest.raises(UserError, match="is a reward model, which scores answers and gives none"):
        ollama.decide(make_trained(tiny_model), None, "f16")


# Failures


def test_llama_quantize_on_path_makes_k_types(trained, tmp_path, monkeypatch, capsys):
    tool = program(tmp_path / "programs", "llama-quantize", QUANTIZE)
    given = ("--to", "ollama", "--dtype", "q4_k_m")
    monkeypatch.setenv("PATH", "/nowhere")
    assert call("export", "r", *given) == 2
    assert "needs llama.cpp's llama-quantize, which is not on PATH" in printed(capsys)
    assert call("export", "r", *given, "--llama-quantize", tool) == 0
    assert f"q4_k_m: quantized by {tool}\n" in printed(capsys)
    assert fields(Path("r-ollama/r-Q4_K_M.gguf"))["general.file_type"] == 15


def test_a_failed_export_leaves_nothing_and_keeps_the_model_before(trained, monkeypatch, capsys):
    assert call("export", "r", "--to", "ollama") == 0
    before = {p.name: p.read_bytes() for p in Path("r-ollama").iterdir()}

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf, "write_tensors", full)
    for options in (("--force",), ("--out", "new")):
        assert call("export", "r", "--to", "ollama", *options) == 2
        assert "No space left on device); free some disk space, then try again" in printed(capsys)
    assert {p.name: p.read_bytes() for p in Path("r-ollama").iterdir()} == before
    assert {p.name for p in Path().iterdir()} == {"runs", "r-ollama"}


def test_a_folder_with_other_files_is_never_replaced(trained, capsys):
    assert call("export", "r", "--to", "ollama") == 0
    Path("r-ollama/other.gguf").touch()
    assert call("export", "r", "--to", "ollama", "--force") == 2
    assert "contains files that do not belong to a model" in printed(capsys)


def test_what_a_killed_export_left_is_deleted(trained):
    left = Path(".out.exporting")
    left.mkdir()
    (left / "old-Q8_0.gguf").touch()
    exported(trained)
    assert not left.exists()
    assert sorted(path.name for path in Path("out").iterdir()) == ["Modelfile", "r-F16.gguf"]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("run 1", "run-1"), ("..x", "x"), ("Ünïcode", "n-code"), ("---", "model"),
     ("a" * 99, "a" * 80)],
)  # fmt: skip
def test_names_of_runs_are_made_names_of_models(name, wanted):
    assert plain_name(name) == wanted


def read(**values):
    return parse(Modelfile("./m.gguf", **values).text)


TEXTS = [
    *('a "quoted" word', '"', '""', '"starts', 'ends"', "two\nlines\n", "\n\n", "\ttabs\t"),
    *("  spaces  ", "# no comment", "FROM other", 'PARAMETER stop "x"\nFROM y', "日本 é 🚀"),
    *("a\r\nb", "{{ .Prompt }}"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_values_are_read_as_they_were_written(text):
    found = read(template=text, system=text, parameters=[("stop", text), ("stop", "b")])
    assert found["from"] == "./m.gguf"
    assert found["template"] == found["system"] == text
    assert found["parameters"] == {"stop": [text, "b"]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('a """ b', "three quotes in a row"),
        ('"""', "three quotes"),
        ("no\u00a0break", r"U\+00A0"),
        ("\u200d", r"U\+200D"),
        ("\x00", r"U\+0000"),
        ("\x1b[31m", r"U\+001B"),
        ("\ufeff", r"U\+FEFF"),
    ],
)
def test_what_a_modelfile_would_change_is_refused(text, fault):
    with pytest.raises(UserError, match=f"SYSTEM: has .*{fault}"):
        read(system=text)


def test_numbers_are_written_without_quotes():
    text = Modelfile("m", parameters=[("num_ctx", "4096"), ("temperature", "0.7")]).text
    assert text == "FROM m\nPARAMETER num_ctx 4096\nPARAMETER temperature 0.7\n"


@pytest.mark.parametrize("name", ["", " a", "a\nFROM b", 'a"b', "a\u00a0b"])
def test_paths_that_would_not_be_read_back_are_refused(name):
    with pytest.raises(UserError, match="cannot be written in a Modelfile"):
        read(adapter=name)
