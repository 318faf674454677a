"""The README.md of a fused model: of what it was made. It names no place on this machine."""

from __future__ import annotations

from your_ai import __version__
from your_ai.nets.saved_adapter import Trained

FORMS = {
    None: "",
    "same": " The adapted layers are quantized as they were.",
    "dequantized": " Nothing is quantized any more.",
}


def card_of(trained: Trained, to: str | None) -> str:
    """to: what became of a quantized base, as `weights.fused_lazily` has it."""
    known = trained.hub_name
    name = trained.base.absolute().name if known is None else known.repo
    base = f"`{name}`" if known is None else f"[{name}](https://huggingface.co/{name})"
    adapter, bits = trained.adapter, trained.config.quantize
    copied = f", quantized to {bits} bits," if bits else ""
    step = f" after step {adapter.step}" if adapter.step is not None else ""
    form = FORMS.get(to, f" The adapted layers have {to} bits; the others are as they were.")
    return "\n".join(
        [
            "---",
            *([f"base_model: {name}"] if known is not None else []),
            "library_name: mlx",
            "pipeline_tag: text-generation",
            "tags:",
            "- mlx",
            "---",
            "",
            f"# {trained.folder.name}",
            "",
            f"{base}{copied} with the {'DoRA' if adapter.is_dora else 'LoRA'} adapter (rank "
            f"{adapter.rank}) of the run `{trained.folder.name}`{step} in its weights.{form}",
            "",
            f"Fused by your_ai {__version__}. The licence is that of the base.",
            "",
        ]
    )
