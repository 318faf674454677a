"""`your_ai serve`."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from your_ai.commands.generating import TEMPERATURE, TOP_P
from your_ai.commands.options import CHECKPOINT, MODEL, RUN, joined, open_trained_with_note
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error


def serve(
    run: Annotated[str, RUN],
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 = any free one.", min=0, max=65535)] = 8080,
    max_tokens: Annotated[
        int, typer.Option(help="Maximum tokens per answer, if a request does not set it.")
    ] = 512,
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    top_p: Annotated[float, TOP_P] = 1.0,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages that may use the server, in addition to this machine's own: "
            "http://HOST:PORT, separated by commas, or * for all.",
            metavar="ORIGINS",
        ),
    ] = None,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="info logs each request; debug also logs its contents."),
    ] = "warning",
) -> None:
    """Serve a run over the OpenAI API, with mlx-lm's server."""
    from your_ai.generation.generate import Sampling
    from your_ai.nets.saved_adapter import check_generates
    from your_ai.run.stopping import recorded_signals
    from your_ai.serving import server as serving
    from your_ai.serving import web
    from your_ai.serving.web import Origins

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p)
    named = joined(allowed_origins or ()).split(",")
    origins = Origins(tuple(o.strip() for o in named if o.strip()))
    trained = open_trained_with_note(run, checkpoint, model)
    check_generates(trained.adapter)
    log_to_stderr(log_level)
    with recorded_signals() as received, serving.listen(host, port) as listener:
        provider = serving.RunProvider(trained, serving.options(sampling, origins))
        if not web.is_local(listener):
            echo_error("warning: other machines can reach the model; anyone may use it")
        url = web.url_of(listener)
        echo(f"serving {provider.name} at {url}/v1; Ctrl-C stops it")
        echo(f"try it: {serving.example(url, provider.name)}")
        sys.stdout.flush()
        ended = serving.serve(listener, serving.Answers(provider), received)
    if not ended:  # a thread that generates would delay the exit; one inside MLX would crash it
        sys.stdout.flush()
        os._exit(0)


def log_to_stderr(level: str) -> None:
    from your_ai.serving.server import LogLines

    handler = logging.StreamHandler()
    handler.setFormatter(LogLines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


# `your_ai mcp`


MISSING = "mcp: needs the Python package mcp: in the checkout of your_ai, run: pip install '.[mcp]'"


def mcp(
    folder: Annotated[
        Path, typer.Option(help="The only folder that agents can use; its runs are in runs/.")
    ] = Path("."),
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Allow rewards and metrics that are Python functions."),
    ] = False,
    allow_network: Annotated[
        bool,
        typer.Option("--allow-network", help="Allow judges, trackers and pushing to the hub."),
    ] = False,
) -> None:
    """Serve training to agents over stdio, with the Model Context Protocol (docs/agents.md)."""
    from your_ai.serving.mcp_gate import Permissions

    check_installed()
    from your_ai.serving.mcp_server import serve

    serve(folder, Permissions(code=allow_code, network=allow_network))


def check_installed() -> None:
    """Raise UserError if the SDK is missing, or has another interface."""
    try:
        if importlib.util.find_spec("mcp.server.mcpserver") is None:
            raise UserError(MISSING)
    except ModuleNotFoundError as error:
        raise UserError(MISSING) from error
