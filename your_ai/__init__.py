"""LoRA fine-tuning of LLMs on Apple Silicon with MLX, inside a memory budget."""

__version__ = "0.1.0"
