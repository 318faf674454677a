"""The README.md of what is exported: what it is, of which model, and how it is used."""

from __future__ import annotations

from typing import Any

from your_ai import __version__
from your_ai.gates.foreign import read_json
from your_ai.hub.names import HubName
from your_ai.nets.saved_adapter import Adapter, Trained

README = "README.md"
PEFT_USE = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(model, "PATH/OF/THIS/FOLDER")
```
"""
MLX_USE = """\
```sh
mlx_lm.generate --model {base} --adapter-path PATH/OF/THIS/FOLDER --prompt "..."
```
"""
MODEL_USE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH/OF/THIS/FOLDER")
model = AutoModelForCausalLM.from_pretrained("PATH/OF/THIS/FOLDER")
```
"""
UNKNOWN_BASE = "PATH/OF/THE/BASE"


def of_peft(trained: Trained, base: HubName | None) -> str:
    bits = bits_of(trained)
    own = trained.config.quantize is None and bits is not None  # the base's own, in its files
    name = UNKNOWN_BASE if base is None or own else base.repo
    note = ""
    if bits is not None:
        note = f"It was trained on weights of {bits} bits. PEFT puts it on weights that are not "
        note += "quantized, so that answers may differ a little.\n\n"
    return head(base, "peft") + about(trained, base) + note + PEFT_USE.format(base=name)


def of_mlx(trained: Trained, base: HubName | None) -> str:
    name = UNKNOWN_BASE if base is None else base.repo
    bits, note = trained.config.quantize, ""
    if bits is not None:
        note = f"It was trained on a copy of the model with weights of {bits} bits.\n\n"
    return head(base, "mlx") + about(trained, base) + note + MLX_USE.format(base=name)


def of_model(trained: Trained, base: HubName | None) -> str:
    adapter, bits = trained.adapter, bits_of(trained)
    dense = f" It was trained on weights of {bits} bits; here none are quantized." if bits else ""
    return head(base, "transformers") + (
        f"# {trained.folder.name}\n\nThis is {model_of(trained, base)}, with the "
        f"{kind_of(adapter)} adapter (rank {adapter.rank}) of the run `{trained.folder.name}` in "
        f"its weights, written by your_ai {__version__}.{dense}\n\n{MODEL_USE}"
    )


def head(base: HubName | None, library: str) -> str:
    """What the hub reads of a model card."""
    lines = [f"library_name: {library}", "pipeline_tag: text-generation"]
    if library != "transformers":  # an adapter
        lines += ["tags:", "- lora"]
    if base is not None:
        lines.insert(0, f"base_model: {base.repo}")
    return "\n".join(["---", *lines, "---", "", ""])


def about(trained: Trained, base: HubName | None) -> str:
    adapter = trained.adapter
    return (
        f"# {trained.folder.name}\n\nA {kind_of(adapter)} adapter (rank {adapter.rank}, alpha "
        f"{adapter.scale * adapter.rank:g}) for {model_of(trained, base)}, written by your_ai "
        f"{__version__}.\n\n"
    )


def kind_of(adapter: Adapter) -> str:
    return "DoRA" if adapter.is_dora else "LoRA"


def model_of(trained: Trained, base: HubName | None) -> str:
    """The model in words, without the place of its folder."""
    if base is not None:
        return f"`{base.repo}`"
    return f"the {config_of(trained).get('model_type')} model `{trained.base.absolute().name}`"


def bits_of(trained: Trained) -> int | None:
    """Of the weights that the adapter was trained on, None where they were not quantized."""
    if trained.config.quantize is not None:
        return trained.config.quantize
    found = config_of(trained).get("quantization")
    return found.get("bits") if isinstance(found, dict) else None


def config_of(trained: Trained) -> dict[str, Any]:
    return read_json(trained.base / "config.json", "a model folder has one")
