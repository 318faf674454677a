"""The process that holds the user's module: `python -m your_ai.environments.host FD OPTIONS`.

It imports the module once, and then forks a process for each conversation: their state is their
own, their memory is shared until they write to it, and each can be killed alone. `pool` starts it.

FD is a socket to the pool. The host writes one line of JSON: what the module offers, or an error.
Then it reads messages of `MESSAGE_BYTES`: one begins a conversation, whose socket comes with it,
or ends one by force. It ends, with all its conversations, when the socket is closed.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import random
import resource
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from your_ai.environments.awaiting import finished
from your_ai.environments.protocol import (
    MB,
    Environment,
    EnvironmentFailed,
    HostOptions,
    line_of,
    observation_of,
)
from your_ai.environments.sandbox import choose_sandbox
from your_ai.environments.tools import ToolEnvironment, load_tools
from your_ai.errors import UserError
from your_ai.gates.functions import UsersCodeFailed, described, load_function, running_users_code
from your_ai.gates.text import printable

VERIFIERS = "verifiers:"  # before the name of an environment of that package
MESSAGE_BYTES = 16
BEGIN, END = b"b", b"e"
LOGGED_BYTES = 1 << 16  # of what the code of one conversation prints
POLL_S = 0.2  # between two looks at the memory of conversations
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def message_of(kind: bytes, number: int) -> bytes:
    return kind + str(number).zfill(MESSAGE_BYTES - 1).encode()


@dataclass
class HostedConversation:
    """A conversation's process, and what it printed."""

    pid: int
    """Of its first process, and of its process group. Not waited for until the conversation ends,
    so that no other process gets this number."""
    output: int
    folder: str
    """For its temporary files."""
    room: int = LOGGED_BYTES
    """Bytes of output that are still logged."""


@dataclass
class ConversationHost:
    """The conversations, and the limits of each."""

    control: socket.socket
    make: Callable[[], Environment]
    options: HostOptions
    folder: str
    conversations: dict[int, HostedConversation] = field(default_factory=dict)
    ended: list[HostedConversation] = field(default_factory=list)
    """Those killed whose processes are not all gone yet."""
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def serve(self) -> None:
        """Do what the pool says until it closes the socket."""
        self.selector.register(self.control, selectors.EVENT_READ)
        most_bytes = own_bytes() + self.options.memory_mb * MB if self.options.watches else 0
        looked_at = 0.0
        while True:
            waits = self.ended or (self.options.watches and self.conversations)
            for key, _ in self.selector.select(POLL_S if waits else None):
                if key.fileobj is self.control:
                    message, connections = receive(self.control)
                    if not message:
                        return
                    self.follow(message, connections)
                elif conversation := self.conversations.get(key.data):
                    self.log(conversation)
            self.ended = [each for each in self.ended if not is_gone(each)]
            if most_bytes and time.monotonic() - looked_at > POLL_S:
                looked_at = time.monotonic()
                kill_large(most_bytes)

    def follow(self, message: bytes, connections: list[int]) -> None:
        kind, number = message[:1], int(message[1:])
        if kind == BEGIN:
            self.begin(number, socket.socket(fileno=connections[0]))
        elif conversation := self.conversations.pop(number, None):
            self.end(conversation)

    def begin(self, number: int, connection: socket.socket) -> None:
        """Start the process of a conversation. Where that fails, the pool finds it closed."""
        reader, writer = os.pipe()
        folder = os.path.join(self.folder, str(number))
        with connection, contextlib.suppress(OSError):
            os.mkdir(folder)
            pid = os.fork()
            if pid == 0:
                self.become(connection, writer, folder)
            with contextlib.suppress(OSError):  # the child does it too: neither can be late
                os.setpgid(pid, pid)
            os.set_blocking(reader, False)
            self.conversations[number] = HostedConversation(pid, reader, folder)
            self.selector.register(reader, selectors.EVENT_READ, number)
        os.close(writer)
        if number not in self.conversations:
            os.close(reader)

    def become(self, connection: socket.socket, output: int, folder: str) -> None:
        """Be the process of a conversation."""
        try:
            os.setpgid(0, 0)
            self.control.close()
            self.selector.close()
            for other in self.conversations.values():
                os.close(other.output)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            limit_memory(self.options.memory_mb * MB)
            converse(self.make, connection, self.options.most_bytes)
        finally:
            os._exit(0)

    def log(self, conversation: HostedConversation) -> None:
        """Copy what a conversation printed to this process's stderr, but not too much of it."""
        try:
            part = os.read(conversation.output, 1 << 16)
        except BlockingIOError:
            return
        if not part:
            with contextlib.suppress(KeyError):
                self.selector.unregister(conversation.output)
            return
        if conversation.room > 0:
            part = part[: conversation.room]
            conversation.room -= len(part)
            if conversation.room == 0:
                part += b"\n[the rest of its output is not logged]"
            text = printable(part.decode("utf-8", "replace"))
            # The end of a line may come alone, after its text.
            lines = (f"environment: {line}\n" for line in text.splitlines() if line)
            with contextlib.suppress(OSError):  # a full disk
                os.write(2, "".join(lines).encode())

    def end(self, conversation: HostedConversation) -> None:
        """Kill all processes of a conversation, and remove its temporary files."""
        for _ in range(2):  # what it printed until now
            self.log(conversation)
        with contextlib.suppress(KeyError):
            self.selector.unregister(conversation.output)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(conversation.pid, signal.SIGKILL)
        os.close(conversation.output)
        shutil.rmtree(conversation.folder, ignore_errors=True)
        self.ended.append(conversation)


def receive(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next message, and what comes with it; nothing if the socket was closed."""
    message, connections = b"", list[int]()
    while len(message) < MESSAGE_BYTES:
        part, found, _, _ = socket.recv_fds(control, MESSAGE_BYTES - len(message), 1)
        if not part:
            return b"", []
        message += part
        connections += found
    return message, connections


def is_gone(conversation: HostedConversation) -> bool:
    """Take note of the processes of a group that have ended; return whether all have."""
    try:
        while os.waitpid(-conversation.pid, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def converse(make: Callable[[], Environment], connection: socket.socket, most_bytes: int) -> None:
    """Answer the requests of the pool until it closes the socket, or something fails.

    A request is a line of JSON, {"reset": [row, seed]}, {"step": [message]} or {"close": []}; an
    answer {"observation": {...}} or {"error": text}, or an empty line after `close`.
    """
    environment: Environment | None = None
    for line in connection.makefile("rb"):
        ((name, given),) = json.loads(line).items()
        try:
            with running_users_code():
                if environment is None:
                    random.seed(given[-1])
                    environment = make()
                result = finished(getattr(environment, name)(*given))
            if name == "close":
                connection.sendall(b"\n")
                return
            answer = line_of({"observation": asdict(observation_of(result))})
            if len(answer) > most_bytes:
                raise EnvironmentFailed(f"returned more than {most_bytes:,} bytes")
        except UsersCodeFailed as error:
            text = "".join(traceback.format_exception(error.__cause__))
            os.write(2, text.encode("utf-8", "replace"))  # which the host logs
            answer = line_of({"error": f"{name}: {error}"})
        except EnvironmentFailed as error:
            answer = line_of({"error": f"{name}: {error}"})
        except (MemoryError, RecursionError) as error:
            answer = line_of({"error": f"{name}: {described(error)}"})
        connection.sendall(answer)


def limit_memory(size: int) -> None:
    """Let this process take `size` bytes more than it has. Without effect on a Mac."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            size += int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def own_bytes() -> int:
    import psutil  # only where memory is watched

    return int(psutil.Process().memory_info().rss)


def kill_large(most_bytes: int) -> None:
    """Kill the processes that this one started, or they, whose resident memory is larger."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.memory_info().rss > most_bytes:
                process.kill()


def offered(options: HostOptions) -> tuple[Callable[[], Environment], dict[str, Any]]:
    """A maker of environments, and the offer that the pool is told. Raises UserError."""
    limits = (options.timeout_s, options.memory_mb, options.output_characters)
    if options.environment.startswith(VERIFIERS):
        # imports asyncio, which other conversations may not need
        from your_ai.environments.from_verifiers import VerifiersEnvironment, load_verifiers

        loaded = load_verifiers(options.environment)
        rows = len(loaded.get_dataset())
        return lambda: VerifiersEnvironment(loaded), {"is_pure": False, "tools": [], "rows": rows}
    if options.environment:
        where = f"--environment {options.environment}"
        made = load_function(
            options.environment, where, "prices:Shop for `class Shop` in prices.py"
        )
        for name in ("reset", "step", "close"):
            if not callable(getattr(made, name, None)):
                raise UserError(f"{where}: has no method {name}")
        return made, {"is_pure": getattr(made, "is_pure", False) is True, "tools": []}
    tools, is_pure = load_tools(
        options.tools, lambda: choose_sandbox(*limits, options.trust_code).python
    )

    def make() -> Environment:
        return ToolEnvironment(tools, options.timeout_s, options.output_characters)

    return make, {"is_pure": is_pure, "tools": [tool.schema for tool in tools.values()]}


def main(control: socket.socket, given: Mapping[str, Any]) -> None:
    """Offer what the options name, and serve the pool."""
    options = HostOptions(**given)
    faulthandler.enable()
    with contextlib.suppress(AttributeError):  # Linux: processes whose parents ended are ours
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        make, offer = offered(options)
        control.sendall(line_of(offer))
    except UserError as error:
        control.sendall(line_of({"error": str(error)}))
        return
    gc.collect()
    gc.freeze()  # later collections leave these objects alone, whose memory is shared
    with tempfile.TemporaryDirectory(prefix="your_ai-", ignore_cleanup_errors=True) as folder:
        host = ConversationHost(control, make, options, folder)
        try:
            host.serve()
        finally:
            for conversation in host.conversations.values():
                host.end(conversation)
            kill_large(most_bytes=-1)  # those that left their conversation's group


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
