"""Conversations with environments, which run in other processes; futures of what they see next.

    EnvironmentPool -- control --> host                 (imports the user's module)
          |                          | fork
          +------- a socket ---> a conversation's process

No code of the user runs here, and nothing from there is trusted: an answer is a line of JSON of
bounded length, which comes in time or ends the conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Coroutine, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from your_ai.environments.host import BEGIN, END, message_of
from your_ai.environments.protocol import (
    MB,
    EnvironmentFailed,
    HostOptions,
    Observation,
    answer_of,
    line_of,
)
from your_ai.errors import AGAIN, RunError, UserError
from your_ai.gates.programs import python_module
from your_ai.gates.text import shown
from your_ai.gates.untrusted import parse_json

T = TypeVar("T")

START_S = 300.0  # to import the user's module
OFFER_BYTES = 4 * MB
CLOSE_S = 5.0  # for `close` of an environment, at most; then it is killed


@dataclass(frozen=True)
class PooledConversation:
    """A conversation, as the pool sees it."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class EnvironmentPool:
    """Conversations by their keys.

    The methods may be called in any thread. A future raises EnvironmentFailed if its conversation
    failed, which ended it, and RunError if the host is gone. Canceling it ends the conversation.
    """

    def __init__(self, options: HostOptions, at_once: int = 16, log: int | None = None) -> None:
        """Start the host, and wait until it has imported the user's module.

        at_once: requests that are worked on at the same time; others wait, and their time does not
            count yet.
        log: a file for what the user's code prints; default: stderr.
        Raises UserError if it cannot be used, RunError if the host cannot be started.
        """
        self.options = options
        self.conversations: dict[Hashable, PooledConversation] = {}
        self.numbers = itertools.count(1)
        self.control, theirs = socket.socketpair()
        environment = {
            "PYTHONHASHSEED": "0",  # sets have the same order after a restart
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS: let it fork
        }
        output = sys.__stderr__.fileno() if log is None and sys.__stderr__ else log
        try:
            with theirs:
                options_text = json.dumps(asdict(options))
                self.process = subprocess.Popen(
                    python_module(f"{__package__}.host", str(theirs.fileno()), options_text),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                    env={**environment, **os.environ},
                )
        except OSError as error:
            self.control.close()
            raise RunError(f"environments cannot be started ({error.strerror}); {AGAIN}") from error
        try:
            offer = self.read_offer()
        except BaseException:
            self.end_host()
            raise
        self.is_pure: bool = offer.get("is_pure") is True
        """Whether the same calls always give the same results, as the user's code says."""
        self.tools: list[Mapping[str, Any]] = offer["tools"]
        """The schemas of `--tools`; empty for an environment, whose `reset` gives them."""
        self.rows: int | None = offer.get("rows")
        """How many examples an environment of `verifiers` has."""
        self.loop = asyncio.new_event_loop()
        self.slots = asyncio.Semaphore(at_once)
        self.thread = threading.Thread(target=self.loop.run_forever, name="pool", daemon=True)
        self.thread.start()

    def start(self, key: Hashable, row: Mapping[str, Any], seed: int) -> Future[Observation]:
        """Begin a conversation with a new environment's `reset`. The key must not be in use."""
        return self.submit(self.begin(key, line_of({"reset": [row, seed]})))

    def step(self, key: Hashable, message: Mapping[str, Any]) -> Future[Observation]:
        """Give an assistant's message to a conversation, whose last future has its result."""
        seconds = self.options.seconds_of(message)
        return self.submit(self.ask(key, line_of({"step": [message]}), seconds))

    def close(self, key: Hashable) -> Future[None]:
        """End a conversation, if it has not ended: by `close` of its environment."""
        return self.submit(self.leave(key))

    def shutdown(self) -> None:
        """End all conversations, and the host, by force. May be called again."""
        if self.loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self.stop(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.end_host()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    # In the pool's thread

    async def begin(self, key: Hashable, request: bytes) -> Observation:
        if key in self.conversations:
            raise ValueError(f"conversation {key} has begun already")
        number = next(self.numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_unix_connection(
                sock=ours, limit=self.options.most_bytes
            )
            self.conversations[key] = PooledConversation(number, reader, writer)
            try:
                self.tell(BEGIN, number, theirs)
            except RunError:
                self.end(key)
                raise
        return await self.ask(key, request, self.options.seconds_of({}))

    async def ask(self, key: Hashable, request: bytes, seconds: float) -> Observation:
        """Send a request, and wait for its answer. Whatever goes wrong ends the conversation."""
        conversation = self.conversations.get(key)
        if conversation is None:
            raise EnvironmentFailed("the conversation has ended")
        try:
            async with self.slots:
                conversation.writer.write(request)
                line = await asyncio.wait_for(conversation.reader.readuntil(b"\n"), seconds)
            return answer_of(line)
        except BaseException as error:
            self.end(key)
            if isinstance(error, asyncio.TimeoutError | TimeoutError):
                raise EnvironmentFailed(f"took more than {seconds:g} s") from None
            if isinstance(error, asyncio.LimitOverrunError):
                raise EnvironmentFailed("its answer is too long") from None
            if isinstance(error, asyncio.IncompleteReadError | OSError):
                raise EnvironmentFailed("its process ended") from None
            raise

    async def leave(self, key: Hashable) -> None:
        conversation = self.conversations.get(key)
        if conversation is None:
            return
        waits = min(CLOSE_S, self.options.timeout_s)
        with contextlib.suppress(
            OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError
        ):
            conversation.writer.write(line_of({"close": []}))
            await asyncio.wait_for(conversation.reader.readuntil(b"\n"), waits)
        self.end(key)

    async def stop(self) -> None:
        for key in list(self.conversations):
            self.end(key)
        own = asyncio.current_task()
        waiting = [task for task in asyncio.all_tasks() if task is not own]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    def end(self, key: Hashable) -> None:
        """Kill the processes of a conversation, if it has not ended."""
        if conversation := self.conversations.pop(key, None):
            conversation.writer.transport.abort()
            with contextlib.suppress(RunError):  # they end without their host
                self.tell(END, conversation.number)

    def tell(self, kind: bytes, number: int, connection: socket.socket | None = None) -> None:
        """Send a message to the host, with a socket. Raises RunError if the host is gone."""
        given = [] if connection is None else [connection.fileno()]
        try:
            socket.send_fds(self.control, [message_of(kind, number)], given)
        except OSError as error:
            raise RunError(
                f"the process of the environments ended; see its output, {AGAIN}"
            ) from error

    # Around the host

    def read_offer(self) -> dict[str, Any]:
        """The line that the host writes at its start. Raises UserError."""
        options = self.options
        name = options.environment or ",".join(options.tools)
        where = f"--{'environment' if options.environment else 'tools'} {name}"
        line = bytearray()
        self.control.settimeout(START_S)
        try:
            while not line.endswith(b"\n") and len(line) < OFFER_BYTES:
                part = self.control.recv(1 << 16)
                if not part:
                    raise UserError(f"{where}: the process that imports it ended; see its output")
                line += part
            offer = parse_json(bytes(line), standard=True)
        except TimeoutError as error:
            raise UserError(f"{where}: cannot be imported within {START_S:g} s") from error
        except ValueError as error:
            raise UserError(f"{where}: its offer cannot be read ({shown(str(error))})") from error
        self.control.settimeout(None)
        if not isinstance(offer, dict) or "error" in offer:
            raise UserError(shown(offer["error"] if isinstance(offer, dict) else offer, 1000))
        return offer

    def end_host(self) -> None:
        self.control.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
