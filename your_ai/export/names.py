"""What others call the layers of a model.

mlx-lm takes the layers' names from transformers for most architectures; TRANSFORMERS lists
those where a test has loaded the same weights in both and compared their logits.
"""

from __future__ import annotations

from pathlib import Path

from your_ai.errors import UserError
from your_ai.gates.foreign import read_json
from your_ai.memory.facts import BLOCK, entries_of
from your_ai.nets.saved_adapter import Trained

# The model_type of a config.json, and transformers' class for it. gemma is not among them: the
# two compute its activation differently, and logits differ by 1e-2.
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
STACKS_EXPERTS = ("qwen3_moe",)  # mlx-lm joins their weights under names of its own
EMBEDDINGS = ("embed_tokens",)


def check_names(base: Path) -> str:
    """The model_type of `base`. Raises UserError where transformers may name its layers otherwise.

    What it does name otherwise is the experts of a mixture.
    """
    kind = read_json(base / "config.json", "a model folder has one").get("model_type")
    if kind not in TRANSFORMERS:
        raise UserError(
            f"{base}: the architecture {kind} is not known to have the same layer names in "
            f"transformers; of these it is: {', '.join(TRANSFORMERS)}"
        )
    return kind


def check_dense(trained: Trained, what: str) -> None:
    """Raise UserError for layers that others do not have as mlx-lm has them.

    what: the format that cannot hold them, as the error names it.
    """
    for path, parts in trained.adapter.layers.items():
        if parts["lora_a"].ndim > 2:
            raise UserError(
                f"{trained.adapter.folder}: {path} adapts the experts of a mixture, which "
                f"{what} cannot hold; use --to mlx"
            )
        if path.rpartition(".")[2] in EMBEDDINGS:
            raise UserError(
                f"{trained.adapter.folder}: {path} is an embedding, which mlx-lm adapts in "
                f"another way than {what}; use --to mlx"
            )


def modules_of(base: Path) -> set[str]:
    """The layers of a model that have weights, by their names in its files."""
    names = (entry.name for entry in entries_of(base))
    return {name.removesuffix(".weight") for name in names if name.endswith(".weight")}


def block_of(path: str) -> int | None:
    """The index of the block that a layer is in, None where it is in none."""
    match = BLOCK.search(path)
    return None if match is None else int(match[1])


def name_in_block(path: str) -> str:
    """`self_attn.q_proj` for `model.layers.2.self_attn.q_proj`; the path itself in no block."""
    match = BLOCK.search(path)
    return path if match is None else match[2]
