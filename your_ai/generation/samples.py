"""Answer many prompts, each once or several times, many answers at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn
import numpy as np

from your_ai.errors import UserError
from your_ai.gates.token_ids import check_ids, vocabulary_of
from your_ai.generation.generate import Prompt, Sampling, memory_explained
from your_ai.generation.rollouts import Completion, RolloutPrompt, complete
from your_ai.memory.workload import RolloutSizes

MOST_TOGETHER = 64  # more answers together save little time, and the first ones come later


@dataclass(frozen=True)
class SampledAnswer:
    """One of the answers to a prompt."""

    prompt: int
    """The index of the prompt."""
    sample: int
    """From 0."""
    text: str
    tokens: int
    """With the stop token, if there is one."""
    finish_reason: str
    """As mlx-lm's: stop or length."""


def check_num_samples(num_samples: int, sampling: Sampling) -> None:
    """Raise UserError if there cannot be so many different answers to a prompt."""
    if num_samples < 1:
        raise UserError(f"--num-samples {num_samples}: must be at least 1")
    if num_samples > 1 and sampling.temperature == 0:
        raise UserError(
            f"--num-samples {num_samples}: at temperature 0 all samples are the same; set a "
            "--temperature above 0"
        )


def sizes_of(prompts: Sequence[Prompt], max_tokens: int, num_samples: int) -> RolloutSizes:
    """The answers to prompts that are not tokenized yet; max_tokens: of each answer."""
    longest = max(prompt.most_tokens for prompt in prompts)
    rows = min(MOST_TOGETHER, num_samples * len(prompts))
    return RolloutSizes(longest, max_tokens, num_samples, rows)


def sampled(
    network: nn.Module,
    tokenizer: Any,
    prompts: Sequence[tuple[Sequence[int], Sampling]],
    num_samples: int = 1,
    rows_at_once: int = 1,
) -> Iterator[SampledAnswer]:
    """Yield the answers to each prompt: in the order of the prompts, then of the samples.

    prompts: the tokens of each, and its sampling; these may differ in max_tokens only.
    rows_at_once: answers that are generated together.

    A sample is a pure function of the model, the prompt, the seed and its index, unless rounding
    decides between two tokens. Raises UserError for a token id outside the vocabulary, RunError
    if memory runs out.
    """
    if not prompts:
        return
    vocabulary = vocabulary_of(network)
    for tokens, _ in prompts:
        check_ids(list(tokens), vocabulary, tokenizer, "the prompt")
    sampling = prompts[0][1]
    seeds = tuple(sampling.seed_of(sample) for sample in range(num_samples))
    asked = [RolloutPrompt(np.array(tokens), seeds, own.max_tokens) for tokens, own in prompts]
    most = max(own.max_tokens for _, own in prompts)
    stops = tokenizer.eos_token_ids
    order = iter([(p, s) for p in range(len(prompts)) for s in range(num_samples)])
    following, early = next(order), {}
    with memory_explained():
        for found in complete(network, asked, sampling.sampler, stops, most, rows_at_once):
            early[found.prompt, found.sample] = found
            while following in early:
                yield answer_of(tokenizer, early.pop(following))
                following = next(order, (-1, -1))


def answer_of(tokenizer: Any, found: Completion) -> SampledAnswer:
    """A completion as text, as mlx-lm would stream it."""
    detokenizer, text = tokenizer.detokenizer, ""
    for token in found.tokens[: -1 if found.stopped else None]:
        detokenizer.add_token(token)
        text += detokenizer.last_segment
    detokenizer.finalize()
    text += detokenizer.last_segment
    reason = "stop" if found.stopped else "length"
    return SampledAnswer(found.prompt, found.sample, text, len(found.tokens), reason)
