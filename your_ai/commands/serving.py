"""`your_ai studio`, `your_ai serve`, `your_ai tinker` and `your_ai mcp`."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from your_ai.commands.options import echo_note, opened, with_options
from your_ai.config.requests import ServeRequest, TinkerRequest
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error
from your_ai.gates.programs import python_module
from your_ai.gates.text import quoted


def studio(
    port: Annotated[
        int | None, typer.Option(help="Port; default: a free one from 8780.", min=1, max=65535)
    ] = None,
    opens: Annotated[bool, typer.Option("--open/--no-open", help="Open the browser.")] = True,
) -> None:
    """Open a local page on which all of this can be done: data, plan, train, try, ship."""
    # The server stays for days, so it is a program of its own: what reads a command line takes
    # 10 MB.
    words = python_module("your_ai.studio.server", str(port or 0), str(int(opens)))
    sys.stdout.flush()
    os.execv(words[0], words)


@with_options
def serve(request: ServeRequest) -> None:
    """Serve a run over the OpenAI API, with mlx-lm's server."""
    from your_ai.generation.generate import Sampling, form_of_prompts
    from your_ai.nets.saved_adapter import check_generates
    from your_ai.run.stopping import recorded_signals
    from your_ai.serving import server as serving
    from your_ai.serving import web
    from your_ai.serving.web import Origins

    sampling = Sampling(
        max_tokens=request.max_tokens, temperature=request.temperature, top_p=request.top_p
    )
    origins = Origins(tuple(request.allowed_origins))
    trained = opened(request)
    check_generates(trained.adapter)
    if system := form_of_prompts(trained.config, None)[0].system:
        echo_note(
            f"the training rows have the system prompt {quoted(system, 60)}: requests should begin "
            "with it"
        )
    log_to_stderr(request.log_level)
    with recorded_signals() as received, serving.listen(request.host, request.port) as listener:
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


TINKER_MISSING = (
    "tinker: needs the Python packages protobuf and zstandard: in the checkout of your_ai, run: "
    "pip install '.[tinker]'"
)


@with_options
def tinker(request: TinkerRequest) -> None:
    """Serve Tinker's training API to other people's training loops (docs/tinker.md)."""
    if not all(map(is_installed, ("google.protobuf", "zstandard"))):
        raise UserError(TINKER_MISSING)
    from your_ai.run.folder import RUNS
    from your_ai.run.stopping import recorded_signals
    from your_ai.serving import server as serving
    from your_ai.serving import tinker_server, web
    from your_ai.serving.tinker_jobs import Jobs
    from your_ai.training.outside import Outside, outside_config

    log_to_stderr(request.log_level)
    with recorded_signals() as received, serving.listen(request.host, request.port) as listener:
        if not web.is_local(listener) and not request.token:
            raise UserError(f"--host {request.host}: other machines could use it; give --token")
        outside = Outside(outside_config(request), tinker_server.HELD_BYTES, echo_note)
        service = tinker_server.Service(outside, Jobs(), RUNS, request.name)
        url = web.url_of(listener)
        echo(f"serving {service.name} to loops at {url}; Ctrl-C stops it")
        echo(f"use it: TINKER_BASE_URL={url} TINKER_API_KEY=tml-local python YOUR_LOOP.py")
        sys.stdout.flush()
        with outside.guarded():
            tinker_server.serve(listener, service, request.token, received)


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


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
        bool, typer.Option("--allow-network", help="Allow judges, trackers and pushing to the hub.")
    ] = False,
) -> None:
    """Serve training to agents over stdio, with the Model Context Protocol (docs/agents.md)."""
    from your_ai.serving.mcp_gate import Permissions

    try:
        if importlib.util.find_spec("mcp.server.mcpserver") is None:
            raise UserError(MISSING)  # another version of the SDK
    except ModuleNotFoundError as error:
        raise UserError(MISSING) from error
    from your_ai.serving.mcp_server import serve

    serve(folder, Permissions(code=allow_code, network=allow_network))
