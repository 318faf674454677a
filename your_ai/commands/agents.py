"""`your_ai mcp`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from your_ai.errors import UserError

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
    from your_ai.serving.agent_gate import Permissions

    check_installed()
    from your_ai.serving.agent_server import serve

    serve(folder, Permissions(code=allow_code, network=allow_network))


def check_installed() -> None:
    """Raise UserError if the SDK is missing, or has another interface."""
    try:
        if importlib.util.find_spec("mcp.server.mcpserver") is None:
            raise UserError(MISSING)
    except ModuleNotFoundError as error:
        raise UserError(MISSING) from error
