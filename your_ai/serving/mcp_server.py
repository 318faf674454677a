"""The tools of `your_ai mcp` over stdio, with the official SDK.

Standard output belongs to the protocol: while the SDK serves, everything else that is written
there goes to standard error.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import threading
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, TextContent, ToolAnnotations
from pydantic import ValidationError

from your_ai import __version__
from your_ai.config import FIELDS
from your_ai.errors import RunError, UserError
from your_ai.gates.text import message_line, nearest, shown
from your_ai.serving.mcp_gate import AgentGate, Permissions, check_runs
from your_ai.serving.mcp_tools import AgentTools

INSTRUCTIONS = """\
Fine-tunes language models with LoRA on this machine, inside a memory limit. All runs, data and
models are in one folder: give paths relative to it. Typical: train (returns at once), watch with
wait_s until the state is finished, evaluate, report. Sizes are bytes, or GB where the name says so.
"""
READS = ToolAnnotations(read_only_hint=True)
WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=False)
EXIT_WAIT_S = 5.0  # for a run that is just being started


class AgentServer(MCPServer):
    """A server whose tools fail with one line, and never end it."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        tools = {tool.name: tool for tool in await self.list_tools()}
        try:
            if name in tools:  # the SDK drops what it does not know
                check_names(arguments, tools[name].input_schema["properties"])
            return await super().call_tool(name, arguments, context)
        except (ToolError, UserError) as error:
            return failure(name, list(tools), error)


def check_names(arguments: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise UserError for an argument that the tool does not have."""
    for name in arguments:
        if name in known:
            continue
        if name in FIELDS and "settings" in known:
            raise UserError(f"{name}: is a setting; give it in settings: {{'{name}': ...}}")
        names = ", ".join(known) or "none"
        raise UserError(f"no argument {shown(name)}; there are: {names}{nearest(name, known)}")


def failure(tool: str, tools: list[str], error: ToolError | UserError) -> CallToolResult:
    """The result of a call that failed: a line, and its kind for programs."""
    cause = error if isinstance(error, UserError) else error.__cause__
    if tool not in tools:
        kind = "user"
        text = f"no tool {shown(tool)}; tools: {', '.join(tools)}{nearest(tool, tools)}"
    elif isinstance(cause, ValidationError):
        kind, text = "user", "; ".join(map(fault_text, cause.errors()))
    elif isinstance(cause, UserError | RunError):
        kind, text = "user" if isinstance(cause, UserError) else "run", str(cause)
    else:
        named = type(cause).__name__ if cause is not None else "error"
        kind, text = "bug", f"{named}: {cause or error}; this is a bug in your_ai"
    text = message_line(text)
    return CallToolResult(
        is_error=True,
        content=[TextContent(type="text", text=text)],
        structured_content={"error": text, "kind": kind},
    )


def fault_text(fault: Any) -> str:
    """`max_memory: Input should be a valid number, found 'much'`."""
    where = ".".join(map(str, fault["loc"])) or "arguments"
    return f"{where}: {fault['msg']}, found {shown(fault.get('input'))}"


def make_server(gate: AgentGate) -> tuple[AgentServer, AgentTools]:
    """The server of a folder, which must be the current folder. Raises UserError."""
    check_runs(gate)
    tools = AgentTools(gate)
    server = AgentServer(
        "your_ai", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR"
    )
    for tool in (tools.train, tools.watch, tools.stop, tools.evaluate, tools.report, tools.runs):
        hints = READS if tool in (tools.watch, tools.runs) else WRITES
        server.add_tool(tool, description=inspect.getdoc(tool), annotations=hints)
    return server, tools


def serve(folder: Path, allowed: Permissions) -> None:
    """Serve the folder over stdio until the client closes the input, or a signal comes.

    The process then ends at once, without waiting for calls in progress; runs go on.
    Raises UserError if the folder cannot be used.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise UserError(f"--folder {folder}: cannot be used ({error.strerror})") from error
    # Files in the folder must not replace modules of the processes that are started.
    os.environ["PYTHONSAFEPATH"] = "1"
    server, tools = make_server(AgentGate(Path.cwd().resolve(), allowed))

    def on_signal(number: int, frame: object) -> None:
        # In a thread: the main thread may have the lock that `leave` waits for.
        threading.Thread(target=leave, args=(tools,), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    try:
        server.run("stdio")
    finally:
        leave(tools)


def leave(tools: AgentTools) -> None:
    """End this process, with the commands that it started."""
    done = threading.Event()

    def wait() -> None:
        with contextlib.suppress(UserError, OSError), tools.starting():
            done.set()

    threading.Thread(target=wait, daemon=True).start()
    done.wait(EXIT_WAIT_S)  # a run that is being started is then on its own
    for process in list(tools.children):
        with contextlib.suppress(OSError):
            process.kill()
    os._exit(0)
