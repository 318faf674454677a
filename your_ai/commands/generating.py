"""`your_ai generate`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from your_ai.commands.options import CHECKPOINT, MODEL

TEMPLATE_TOKENS = 200  # of a chat template, generously


def generate(
    run: Annotated[str, typer.Option("--run", help="The run whose adapter to use.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")],
    adapter: Annotated[bool, typer.Option(help="Use the adapter, or the base model alone.")] = True,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    max_memory: Annotated[
        float | None, typer.Option(help="Most memory of this process, in GB.", min=0.0)
    ] = None,
) -> None:
    """Answer a prompt with what a run has learned."""
    from your_ai import generate as generation
    from your_ai.trained import open_trained

    trained = open_trained(run, checkpoint, model)
    if trained.note:
        typer.echo(f"note: {trained.note}", err=True)
    room = max_tokens + len(prompt) + TEMPLATE_TOKENS  # no prompt has more tokens than letters
    network, tokenizer = generation.load_run(trained, adapter, max_memory, room)
    tokens = generation.chat_prompt(tokenizer, prompt)
    for piece in generation.stream(network, tokenizer, tokens, max_tokens, temperature, seed):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()
