"""Layer names in transformers and PEFT.

For most architectures mlx-lm uses the layer names of transformers. TRANSFORMERS lists the
architectures for which a test loads the same weights in both and compares the logits.
"""

from __future__ import annotations

from pathlib import Path

from your_ai.errors import UserError
from your_ai.gates.untrusted import BLOCK, read_json
from your_ai.hub.awq_gptq import as_in_mlx
from your_ai.memory.facts import entries_of
from your_ai.nets.saved_adapter import Trained

# The model_type of config.json -> the class in transformers. gemma is missing because the two
# libraries compute its activation function differently, and logits differ by 1e-2.
TRANSFORMERS = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
# The classes with a score head, where transformers does not name them as it names the others.
CLASSIFIERS = {"gemma3_text": "Gemma3TextForSequenceClassification"}
STACKS_EXPERTS = ("qwen3_moe",)  # mlx-lm stacks the experts' weights under other names
EMBEDDINGS = ("embed_tokens",)


def check_names(base: Path) -> str:
    """Return the model_type of `base`. Raises UserError if it is not in TRANSFORMERS.

    The experts of a mixture-of-experts model still have other names in transformers.
    """
    kind = read_json(base / "config.json", "a model folder has one").get("model_type")
    if kind not in TRANSFORMERS:
        raise UserError(
            f"{base}: architecture {kind} is not supported, because its layer names in "
            f"transformers may differ; supported: {', '.join(TRANSFORMERS)}"
        )
    return str(kind)


def classifier_of(kind: str) -> str:
    """The class in transformers that gives one score, for a model_type in TRANSFORMERS."""
    named = TRANSFORMERS[kind].replace("ForCausalLM", "ForSequenceClassification")
    return CLASSIFIERS.get(kind, named)


def check_dense(trained: Trained, what: str) -> None:
    """Raise UserError if the adapter has layers that exist only in mlx-lm's form.

    what: the name of the format that cannot store them, for the error message.
    """
    for path, parts in trained.adapter.layers.items():
        if parts["lora_a"].ndim > 2:
            raise UserError(
                f"{trained.adapter.folder}: {path} adapts stacked experts of a "
                f"mixture-of-experts model, which {what} cannot store; use --to mlx"
            )
        if path.rpartition(".")[2] in EMBEDDINGS:
            raise UserError(
                f"{trained.adapter.folder}: {path} is an embedding, which mlx-lm and {what} "
                "adapt in different ways; use --to mlx"
            )


def modules_of(base: Path) -> set[str]:
    """The paths of all layers with weights, from the tensor names in the model's files."""
    config = read_json(base / "config.json", "a model folder has one")
    names = (entry.name for entry in as_in_mlx(base, config, list(entries_of(base)))[0])
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight")}


def block_of(path: str) -> int | None:
    """The index of the block that contains a layer; None if it is outside all blocks."""
    match = BLOCK.search(path)
    return None if match is None else int(match[1])


def name_in_block(path: str) -> str:
    """`self_attn.q_proj` for `model.layers.2.self_attn.q_proj`; the path itself outside blocks."""
    match = BLOCK.search(path)
    return path if match is None else match[2]
