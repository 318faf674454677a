"""GGUF files by llama.cpp's own converters, for the architectures that `gguf_model` does not have.

The model is written in the form of transformers, and the adapter in that of PEFT, to a folder
beside the target. The script runs in that folder, so it sees no name of the user's.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.export import gguf, huggingface, peft
from your_ai.export.fused_weights import base_of
from your_ai.export.gguf_architectures import known_of
from your_ai.export.llama_cpp import ProgramFailed, read_back, run_program, value_in
from your_ai.export.names import check_known
from your_ai.export.started import on_the_base
from your_ai.export.transformers_weights import config_for
from your_ai.gates.untrusted import read_json
from your_ai.memory.budget import limit_of
from your_ai.modelfiles.shards import WriteProgress, hold_memory
from your_ai.modelfiles.shards import write_model as write_shards_of
from your_ai.modelfiles.targets import GGUF, Work, check_disk, clear, locked
from your_ai.nets.saved_adapter import Trained, check_generates

AUTO, LLAMA_CPP = "auto", "llama.cpp"  # the converters that the user may choose
OF_MODELS, OF_ADAPTERS = "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"
# The types that the script makes -> the dtype of the weights that it reads.
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "q8_0": "float16"}
CHECKOUT = "https://github.com/ggml-org/llama.cpp"
HOMEBREW = ("/opt/homebrew", "/usr/local")  # on Macs, if the shell does not know it
CLASSES = {"PhimoeForCausalLM": "PhiMoEForCausalLM"}  # that the script knows by another name
# mlx-lm leaves out the layers that predict several tokens, so the file has none.
NO_MTP = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
NO_MTP_OPTION = "--no-mtp"
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
PIECES = "tokenizer.model"  # SentencePiece's file, which the script reads before tokenizer.json
NEEDS = ("torch", "transformers", "gguf")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
# Tensors that the script computes from settings.
ADDED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
OWN_MODULE = "conversion"  # llama.cpp's, which lies beside its script in a checkout
MODEL, ADAPTER, BASE, RESULT = "model", "adapter", "base", f"result{GGUF}"
VALUE_BYTES = 4  # of a float32; the script converts a tensor to float32, and then from it


def script_for(base: Path, converter: str, folder: Path | None, name: str) -> Path | None:
    """Find llama.cpp's script if it is needed for `base`; None if our own writer has the model.

    converter: AUTO, or LLAMA_CPP if the user wants it always.
    folder: of llama.cpp, if the user named it.
    name: OF_MODELS or OF_ADAPTERS.
    Raises UserError if it is needed and missing, or if
    transformers does not know the model.
    """
    config = read_json(base / "config.json", "a model folder has one")
    kind, is_own = config.get("model_type"), known_of(config) is not None
    if is_own and converter != LLAMA_CPP:
        if folder is not None:
            raise UserError(
                f"--llama-cpp: {kind} does not need it; leave it out, or add --converter "
                f"{LLAMA_CPP}"
            )
        return None
    check_known(base)
    if folder is not None:
        for place in (folder, folder / "bin"):
            if (place / name).is_file():
                return (place / name).absolute()
        raise UserError(f"--llama-cpp {folder}: has no {name}; give a checkout of llama.cpp")
    prefixes = filter(None, (os.environ.get("HOMEBREW_PREFIX"), *HOMEBREW))
    places = [os.environ.get("PATH", os.defpath), *(f"{prefix}/bin" for prefix in prefixes)]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        needed = f"--converter {LLAMA_CPP}"
        if not is_own:
            needed = f"{base}: architecture {kind}"
        raise UserError(
            f"{needed}: needs llama.cpp's {name}, which is not on PATH; name a checkout with "
            f"--llama-cpp (git clone {CHECKOUT}), or, where it has the script, install "
            "llama.cpp (on a Mac: brew install llama.cpp)"
        )
    return Path(found).absolute()


def write_model(
    trained: Trained,
    target: Path,
    kind: str,
    max_memory_gb: float | None = None,
    draft: Path | None = None,
    disk_share: float = 1.0,
    *,
    script: Path,
) -> Iterator[WriteProgress]:
    """Write the model with the adapter fused in to the file `target`, as `gguf.write_model` does.

    kind: one of DTYPES. script: OF_MODELS. Raises UserError, too, if the script fails, hangs, or
    writes another thing than the model.
    """
    gguf.require_library()
    check_generates(trained.adapter)
    limit = limit_of(max_memory_gb)
    lazy = huggingface.in_transformers(trained, DTYPES[kind], max_memory_gb)
    lazy = replace(lazy, config=for_script(lazy.config))
    total, numbers = (
        sum(getattr(array, size) for array in lazy.arrays.values()) for size in ("nbytes", "size")
    )
    largest = max(array.size for array in lazy.arrays.values())
    hold_memory("converting", 2 * VALUE_BYTES * largest, limit)
    check_disk(target, int((1 + disk_share) * total))
    source, name = base_of(trained, max_memory_gb), gguf.public_name(trained)
    with gguf.replacing(target, draft) as result, beside(draft or target) as place:
        work = Work(place / MODEL, "exporting", huggingface.RECORD)
        yield from write_shards_of(lazy, source, work, [], limit)
        for code in (place / MODEL).glob("*.py"):  # the script would run it
            code.unlink()
        if (source / PIECES).is_file():
            shutil.copyfile(source / PIECES, place / MODEL / PIECES)
        options = ["--outtype", kind, f"--model-name={name}", MODEL]
        if lazy.config["architectures"][0] in NO_MTP and NO_MTP_OPTION in script.read_text():
            options.insert(0, NO_MTP_OPTION)
        yield from converted(script, place, options, total)
        check_result(script, place / RESULT, MODEL, gguf.KINDS[kind][1], numbers)
        put(place / RESULT, result)


def write_adapter(trained: Trained, target: Path, script: Path | None) -> Iterator[WriteProgress]:
    """Write the run's adapter in float32 to the file `target`.

    script: OF_ADAPTERS; None for our own writer. Raises UserError if PEFT or llama.cpp cannot
    apply the adapter, and as `write_model`.
    """
    if script is None:
        gguf.write_adapter(trained, target)
        return
    gguf.require_library()
    gguf.check_adapter(trained)
    trained = on_the_base(trained)
    config = read_json(trained.base / "config.json", "a model folder has one")
    config = {key: value for key, value in config.items() if not key.startswith("quantization")}
    theirs = config_for(config, check_known(trained.base), has_head=True)
    with gguf.replacing(target) as result, beside(target) as place:
        peft.write(trained, place / ADAPTER)
        (place / BASE).mkdir()
        (place / BASE / "config.json").write_text(json.dumps(for_script(theirs)), encoding="utf-8")
        numbers = sum(a.size for parts in trained.adapter.layers.values() for a in parts.values())
        options = ["--outtype", "f32", "--base", BASE, ADAPTER]
        yield from converted(script, place, options, VALUE_BYTES * numbers)
        check_result(script, place / RESULT, ADAPTER, None, numbers)
        put(place / RESULT, result)


def for_script(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json with the class by the name that the script knows."""
    [head] = config["architectures"]
    without = {key: 0 for key in MTP_LAYERS if config.get(key)}
    return {**config, **without, "architectures": [CLASSES.get(head, head)]}


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """Yield an empty locked folder next to `target`; delete it at the end, and what it holds.

    What a killed process left there is deleted first.
    """
    place = Work(target.absolute(), "converting", "").folder
    with locked(place, waits=False, creates=True):
        clear(place)
        try:
            yield place
        finally:
            clear(place)


def converted(script: Path, place: Path, options: list[str], total: int) -> Iterator[WriteProgress]:
    """Run a script in the folder `place`, where it writes RESULT, without the network."""
    python = python_for(script)
    command = [python, str(script), "--outfile", RESULT, *options]
    instead = "try it by hand"
    env = {**os.environ, **OFFLINE}
    try:
        yield from run_program(script, command, place / RESULT, total, instead, place, env)
    except ProgramFailed as error:
        missing = MISSING.search(error.last_line)
        if missing is None:
            raise
        then = f"install it there: {python} -m pip install {missing[1]}"
        if missing[1].startswith(OWN_MODULE):
            then = "it works only in a checkout of llama.cpp; name one with --llama-cpp"
        raise UserError(f"{script}: {python} has no module {missing[1]}; {then}") from error


def python_for(script: Path) -> str:
    """The Python that a script names in its first line; else ours if it has what the scripts
    need, else the one on PATH."""
    with script.open("rb") as file:
        first = file.readline(1024).decode("utf-8", "replace").strip()
    named = first.removeprefix("#!").strip() if first.startswith("#!") else ""
    if Path(named).name.startswith("python") and os.access(named, os.X_OK):
        return named
    if all(importlib.util.find_spec(module) for module in NEEDS):
        return sys.executable
    return shutil.which("python3") or sys.executable


def check_result(
    script: Path, result: Path, kind: str, file_type: str | None, numbers: int
) -> None:
    """Raise UserError if `result` is not the model or adapter that the script was given.

    kind: MODEL or ADAPTER. file_type: as for `read_back`. numbers: how many its tensors hold.
    """
    import numpy as np
    from gguf import GGMLQuantizationType

    found = read_back(script, result, file_type)
    given = [tensor for tensor in found.tensors if tensor.name not in ADDED]
    if value_in(found, "general.type") != kind or sum(t.n_elements for t in given) != numbers:
        raise UserError(f"{script}: wrote another {kind} than it was given")
    for tensor in given:
        if tensor.tensor_type != GGMLQuantizationType.F16:
            continue
        if not all(np.isfinite(row).all() for row in tensor.data):
            raise UserError(
                f"{script}: {tensor.name} has weights too large for float16; use --dtype bf16"
            )


def put(made: Path, result: Path) -> None:
    made.chmod(0o644)
    os.replace(made, result)
