"""Layer names in transformers and PEFT."""

from __future__ import annotations

from pathlib import Path

from your_ai.errors import UserError
from your_ai.export.transformers_names import (
    KNOWN,
    TransformersModel,
    is_in_peft,
    kind_of,
    known_of,
)
from your_ai.gates.untrusted import BLOCK, read_json
from your_ai.hub.awq_gptq import as_in_mlx
from your_ai.memory.facts import entries_of
from your_ai.nets.saved_adapter import Trained

# The architectures whose layers PEFT adapts by the names in mlx-lm.
SAME_LAYERS = tuple(kind for kind, known in KNOWN.items() if known.peft and not known.inner)
EMBEDDINGS = ("embed_tokens",)


def check_known(base: Path) -> TransformersModel:
    """Return the form of the model in transformers. Raises UserError if it is not known."""
    config = read_json(base / "config.json", "a model folder has one")
    known = known_of(config)
    if known is None:
        raise UserError(
            f"{base}: architecture {kind_of(config)} is not supported, because its layers in "
            f"transformers are not known; supported: {', '.join(KNOWN)}"
        )
    return known


def check_names(base: Path) -> str:
    """Return the model_type of `base`. Raises UserError if PEFT cannot adapt it.

    PEFT must know the layers by the names that they have in mlx-lm.
    """
    config = read_json(base / "config.json", "a model folder has one")
    kind = config.get("model_type")
    if kind not in SAME_LAYERS:
        raise UserError(
            f"{base}: architecture {kind} is not supported, because its layer names in "
            f"transformers may differ; supported: {', '.join(SAME_LAYERS)}"
        )
    return str(kind)


def check_layers(trained: Trained, kind: str) -> None:
    """Raise UserError if the adapter has layers that PEFT cannot adapt in transformers."""
    for path, parts in trained.adapter.layers.items():
        if parts["lora_a"].ndim == 2 and not is_in_peft(KNOWN[kind], path):
            raise UserError(
                f"{trained.adapter.folder}: PEFT cannot adapt {path} of this architecture, "
                "because it is another layer in transformers; use --to mlx or --to hf"
            )


def check_scorer(base: Path, known: TransformersModel) -> str:
    """Return the class in transformers that gives one score. Raises UserError without one."""
    if not known.scorer:
        kinds = ", ".join(kind for kind, other in KNOWN.items() if other.scorer)
        raise UserError(
            f"{base}: reward models of this architecture cannot be exported for transformers; "
            f"supported: {kinds}"
        )
    return known.scorer


def check_dense(trained: Trained, what: str, experts: bool = False) -> None:
    """Raise UserError if the adapter has layers that exist only in mlx-lm's form.

    what: the name of the format that cannot store them, for the error message.
    experts: it can store stacked experts.
    """
    for path, parts in trained.adapter.layers.items():
        if parts["lora_a"].ndim > 2 and not experts:
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
