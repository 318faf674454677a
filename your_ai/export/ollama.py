"""Export a run for Ollama: a folder with a Modelfile and the weights that it names.

The weights are a GGUF file where the GGUF export knows the architecture. Ollama imports every GGUF
file of an architecture that llama.cpp knows, and of safetensors only the architectures that it
converts itself. For those of them that the GGUF export does not know, the weights are safetensors.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from your_ai.data.look import common_form
from your_ai.errors import UserError
from your_ai.export import gguf, gguf_convert, gguf_folder, gguf_quantize
from your_ai.export.go_template import PLAIN, drops_reasoning, is_kept, shape_of
from your_ai.generation.generate import context_tokens
from your_ai.modelfiles.shards import WriteProgress
from your_ai.modelfiles.targets import MODELFILE
from your_ai.nets.saved_adapter import Trained, check_generates, check_no_vocabulary

# The text of Ollama's Modelfile


QUOTES = '"""'


@dataclass(frozen=True)
class Modelfile:
    """Settings of a model in Ollama."""

    weights: str
    """FROM: a path relative to the Modelfile, or a model of Ollama."""
    adapter: str | None = None
    """ADAPTER: a path relative to the Modelfile."""
    template: str | None = None
    """TEMPLATE; None leaves it to Ollama."""
    system: str = ""
    parameters: Sequence[tuple[str, str]] = ()
    """PARAMETER lines; a name may occur several times."""

    @property
    def text(self) -> str:
        """The file. Raises UserError for a value that a Modelfile cannot hold."""
        lines = [f"FROM {one_line(self.weights)}"]
        if self.adapter is not None:
            lines.append(f"ADAPTER {one_line(self.adapter)}")
        if self.template is not None:
            lines.append(f"TEMPLATE {quoted_value('TEMPLATE', self.template)}")
        if self.system:
            lines.append(f"SYSTEM {quoted_value('SYSTEM', self.system)}")
        for name, value in self.parameters:
            lines.append(f"PARAMETER {name} {quoted_value(name, value)}")
        return "\n".join(lines) + "\n"


def one_line(value: str) -> str:
    """A value without quotes. Raises UserError if it has a character that would end it."""
    fits = is_kept(value) and not any(c in "\n\r\t" for c in value)
    if not value or value != value.strip() or '"' in value or not fits:
        raise UserError(f"{value!r}: cannot be written in a Modelfile; choose another name")
    return value


def quoted_value(name: str, value: str) -> str:
    """A value in quotes; numbers without. Raises UserError if it cannot be written."""
    if fault := fault_of(value):
        raise UserError(f"{name}: has {fault}, which a Modelfile cannot hold")
    return value if value.replace(".", "", 1).isdigit() else f"{QUOTES}{value}{QUOTES}"


def fault_of(value: str) -> str:
    """The part of a value that a Modelfile cannot hold, in words; "" if it can hold all."""
    if QUOTES in value:
        return "three quotes in a row"
    dropped = next((c for c in value if not is_kept(c)), None)
    return "" if dropped is None else f"the character U+{ord(dropped):04X}"


LEAST_CONTEXT = 4096  # tokens; a short training context would cut conversations
OLLAMA_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,349}")
ADAPTER = "adapter.gguf"


@dataclass(frozen=True)
class OllamaExport:
    """The files to write, decided before any is."""

    kind: str
    """The type of the weights; "" for an adapter."""
    way: gguf_quantize.Way
    """How the GGUF file is made."""
    modelfile: Modelfile
    notes: tuple[str, ...]
    """What the user should know, one line each."""


def decide(
    trained: Trained,
    dtype: str | None,
    default_kind: str,
    tool: Path | None = None,
    adapter_for: str | None = None,
    converter: str = gguf_convert.AUTO,
    llama_cpp: Path | None = None,
) -> OllamaExport:
    """Decide what to write for a run.

    dtype: of the weights, one of gguf.KINDS or TOOL_KINDS; None: `default_kind`.
    tool: the program llama-quantize, if the user named it.
    adapter_for: write only the adapter, for this model of Ollama.
    converter, llama_cpp: as for `gguf_convert.script_for`.
    Raises UserError if Ollama cannot run the model, or a type cannot be computed.
    """
    check_generates(trained.adapter)
    script_named = partial(gguf_convert.script_for, trained.base, converter, llama_cpp)
    tokenizer = trained.tokenizer()
    settings, notes = settings_of(trained, tokenizer)
    if adapter_for is not None:
        check_no_vocabulary(trained.adapter, "an adapter of Ollama")
        if not trained.adapter.kind.is_sum:
            raise UserError(
                f"{trained.adapter.folder}: is {trained.adapter.kind.title}, which Ollama cannot "
                "add to a model; leave --adapter-for out"
            )
        gguf.require_library()
        weights = base_weights(adapter_for)
        modelfile = replace(settings, weights=weights, adapter=f"./{ADAPTER}")
        way = gguf_quantize.Way(None, script_named(gguf_convert.OF_ADAPTERS))
        return OllamaExport("", way, modelfile, notes)
    gguf.require_library()
    kind = dtype or default_kind
    way = gguf_quantize.way_of(kind, tool, script_named(gguf_convert.OF_MODELS))
    weights = f"./{gguf_folder.model_file(trained.folder.name, kind)}"
    return OllamaExport(kind, way, replace(settings, weights=weights), notes)


def write(
    trained: Trained,
    target: Path,
    export: OllamaExport,
    max_memory_gb: float | None = None,
    force: bool = False,
) -> Iterator[WriteProgress]:
    """Write the folder. Raises UserError if memory or disk is too small."""
    texts = {MODELFILE: export.modelfile.text}
    if export.modelfile.adapter is not None:
        script = export.way.script
        yield from gguf_folder.write_adapter(trained, target, ADAPTER, force, texts, script)
        return
    name = Path(export.modelfile.weights).name
    yield from gguf_folder.write_model(
        trained, target, name, export.kind, export.way, max_memory_gb, force, texts
    )


def settings_of(trained: Trained, tokenizer: Any) -> tuple[Modelfile, tuple[str, ...]]:
    """The Modelfile of a run without its weights, and notes for the user."""
    template, notes = template_of(trained, tokenizer)
    system = common_form(trained.config).system
    if fault := fault_of(system):
        notes.append(f"the system prompt of the training rows has {fault}: it is left out")
        system = ""
    parameters = [("num_ctx", str(context_of(trained)))]
    if trained.config.generates:
        parameters.append(("temperature", f"{trained.config.temperature:g}"))
    for end in sorted(tokenizer.eos_token_ids):
        text = tokenizer.decode([end])
        if text.strip() and not fault_of(text):
            parameters.append(("stop", text))
    modelfile = Modelfile("", template=template, system=system, parameters=tuple(parameters))
    return modelfile, tuple(notes)


def context_of(trained: Trained) -> int:
    """The context window in tokens: the run's rows, or LEAST_CONTEXT, at most the model's."""
    wanted = max(LEAST_CONTEXT, trained.config.max_seq_length)
    return min(wanted, context_tokens(trained.base) or wanted)


def template_of(trained: Trained, tokenizer: Any) -> tuple[str | None, list[str]]:
    """The Go template of a model, None if none says the same; and notes."""
    if not tokenizer.has_chat_template:
        return PLAIN, [
            "the model has no chat template; TEMPLATE gives the texts of a chat one per line, as "
            "your_ai generate does"
        ]
    shape = shape_of(tokenizer)
    if shape is None:
        return None, [
            "no Go template says the same as the model's chat template, so there is no TEMPLATE; "
            "Ollama uses the chat template in the weights, if your version can"
        ]
    notes = []
    if shape.system_place == "none":
        notes.append(
            "the model's chat template takes no system message; Ollama will put one before the "
            "first question"
        )
    if drops_reasoning(tokenizer, shape):
        notes.append(
            "the model's chat template leaves the reasoning (<think>) of earlier answers out of a "
            "chat; TEMPLATE keeps it"
        )
    if "strftime_now" in str(tokenizer.chat_template):
        notes.append("the chat template writes the date; TEMPLATE has the date of this export")
    begins = tokenizer.encode("a", add_special_tokens=True)[:1] == [tokenizer.bos_token_id]
    bos = tokenizer.bos_token if begins else ""
    if bos and shape.begin.startswith(bos):  # Ollama adds it too
        shape = replace(shape, begin=shape.begin.removeprefix(bos))
    elif bos:
        notes.append(f"Ollama will begin a chat with {bos}, which the chat template does not write")
    return shape.go_template, notes


def base_weights(name: str) -> str:
    """FROM, of a base that the user named: a model of Ollama or a GGUF file."""
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise UserError(f"--adapter-for {name}: is not a file")
        return str(Path(name).absolute())
    if not OLLAMA_NAME.fullmatch(name):
        raise UserError(
            f"--adapter-for {name}: give a model of Ollama, such as llama3.2:1b, or a .gguf file"
        )
    return name


def next_commands(trained: Trained, target: Path) -> list[str]:
    """The commands with which the user goes on."""
    name = gguf_folder.plain_name(trained.folder.name).lower()
    modelfile = shlex.quote(str(target / MODELFILE))
    return [f"ollama create {name} -f {modelfile}", f"ollama run {name}"]
