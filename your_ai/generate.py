"""Text from a model, with or without a run's adapter, through mlx-lm's generation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import stream_generate
from mlx_lm.sample_utils import make_sampler

from your_ai.budget import hold_generation
from your_ai.engine.weights import can_stream, tensors_of
from your_ai.engine.weights import stream as stream_weights
from your_ai.memory.estimate import PREFILL_TOKENS
from your_ai.memory.facts import facts_of
from your_ai.model import compute_dtype, load_base
from your_ai.quantize.copies import quantized_copy
from your_ai.trained import Trained, put_adapter


def load_run(
    trained: Trained, adapted: bool = True, max_memory_gb: float | None = None, tokens: int = 2048
) -> tuple[nn.Module, Any]:
    """The model of a run and its tokenizer, with its adapter or, not `adapted`, without.

    max_memory_gb: of the process, with `tokens` of prompt and answer; a model that is larger
    is read from its files block by block, for every token. Raises UserError where that does
    not fit either.
    """
    config = trained.config
    dtype, base = compute_dtype(config.dtype), trained.base
    if config.quantize is not None:
        base = quantized_copy(base, config.quantize, max_memory_gb)
    model, tokenizer = load_base(base, dtype)
    tensors = tensors_of(model, base)
    streams = False
    if max_memory_gb is not None:
        facts = facts_of(base, dtype.size)
        streams = hold_generation(facts, tokens, max_memory_gb, can_stream(model, tensors))
    if adapted:
        put_adapter(model, trained.adapter)
    model.eval()
    if streams:
        stream_weights(model, tensors)
    return model, tokenizer


def chat_prompt(tokenizer: Any, text: str) -> str | list[int]:
    """`text` as the user's turn of a chat, or as it is where there is no template."""
    if not tokenizer.has_chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def stream(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | list[int],
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
) -> Iterator[str]:
    """Pieces of the answer as they come; temperature 0 takes the likeliest token."""
    mx.random.seed(seed)
    sampler = make_sampler(temp=temperature)
    pieces = stream_generate(
        model, tokenizer, prompt, max_tokens=max_tokens, sampler=sampler,
        prefill_step_size=PREFILL_TOKENS,
    )  # fmt: skip
    for piece in pieces:
        if piece.text:
            yield piece.text


def answer(model: nn.Module, tokenizer: Any, prompt: str, max_tokens: int) -> str:
    """The whole answer to a rendered prompt."""
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    return "".join(stream(model, tokenizer, tokens, max_tokens)).strip()
