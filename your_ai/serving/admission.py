"""Which requests mlx-lm's server may be given: it generates for everybody in one thread.

What fails in there ends the server, so it is refused before.
"""

from __future__ import annotations

import copy
from typing import Any

from mlx_lm.server import (
    CompletionRequest,
    GenerationArguments,
    convert_chat,
    process_message_content,
)

from your_ai.generate import SEEDS

LARGEST = 1 << 31  # of a request's numbers, but for seeds
XTC_THRESHOLD = 0.5  # the highest that mlx-lm takes
STEERING = (  # how a tokenizer is called, beside what a template is given
    *("chat_template", "continue_final_message", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("add_generation_prompt", "tokenizer_kwargs"),
)


def check_body(body: dict[str, Any], vocabulary: int) -> None:
    """Raise ValueError for what mlx-lm lets through, and then ends its one thread at.

    vocabulary: how many logits the model gives.
    """
    if not isinstance(body.get("prompt", ""), str):
        raise ValueError("prompt must be a text")
    for name, value in body.items():
        too_large = isinstance(value, int | float) and not abs(value) < LARGEST  # nor is NaN
        if too_large and name != "seed":
            raise ValueError(f"{name} must be a number below {LARGEST}")
    stop = body.get("stop") or []
    if not isinstance(stop, str | list) or not all(isinstance(word, str) for word in stop):
        raise ValueError("stop must be a text, or a list of texts")
    bias = body.get("logit_bias") or {}
    if not isinstance(bias, dict) or not all(key.isdecimal() for key in bias):
        raise ValueError("logit_bias must be of tokens, by their numbers")
    if any(int(key) >= vocabulary for key in bias):
        raise ValueError(f"logit_bias must be of tokens below {vocabulary}")
    if not all(isinstance(value, int | float) and abs(value) < LARGEST for value in bias.values()):
        raise ValueError(f"logit_bias must give numbers below {LARGEST}")
    for name, most in (("top_k", vocabulary - 1), ("xtc_threshold", XTC_THRESHOLD), ("n", 1)):
        if isinstance(value := body.get(name), int | float) and value > most:
            raise ValueError(f"{name} must be at most {most}")
    if isinstance(seed := body.get("seed"), int) and not 0 <= seed < SEEDS:
        raise ValueError("seed must be at least 0 and below 2^64")
    given = body.get("chat_template_kwargs")
    if given is not None and (not isinstance(given, dict) or any(key in STEERING for key in given)):
        raise ValueError(f"chat_template_kwargs must be an object without {', '.join(STEERING)}")
    if not isinstance(body.get("stream_options"), dict | None):
        raise ValueError("stream_options must be an object")


def prompt_of(
    tokenizer: Any, request: CompletionRequest, arguments: GenerationArguments
) -> list[int]:
    """The tokens of a request as mlx-lm reads it. Raises what tokenizers and templates raise."""
    if request.request_type != "chat":
        return tokenizer.encode(request.prompt)
    messages = copy.deepcopy(request.messages)  # they are changed on the way
    if not tokenizer.has_chat_template:
        return tokenizer.encode(convert_chat(messages, request.role_mapping))
    process_message_content(messages)
    return tokenizer.apply_chat_template(
        messages,
        add_generation_prompt=True,
        tools=request.tools,
        tokenize=True,
        **(arguments.chat_template_kwargs or {}),
    )
