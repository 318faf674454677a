"""Pools of the modules that tests write, in processes of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import HostOptions, Observation


class Conversations:
    """A pool, and short ways to use it."""

    def __init__(self, pool: EnvironmentPool, log: Path) -> None:
        self.pool, self.log = pool, log

    def start(self, key: object = 0, seed: int = 0, **row: Any) -> Observation:
        return self.pool.start(key, {"prompt": "p", **row}, seed).result()

    def say(self, text: str, key: object = 0) -> Observation:
        return self.pool.step(key, {"role": "assistant", "content": text}).result()

    def call(self, name: str, key: object = 0, /, **arguments: Any) -> str:
        """The text that a tool's message has after one call."""
        (message,) = self.calls((name, arguments), key=key).messages
        return message["content"]

    def calls(self, *calls: tuple[str, Any], key: object = 0) -> Observation:
        return self.pool.step(key, message_with(*calls)).result()


def message_with(*calls: tuple[str, Any]) -> dict[str, Any]:
    tool_calls = [
        {"type": "function", "id": f"call-{i}", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


@pytest.fixture
def pool_of(own_folder) -> Iterator[Callable[..., Conversations]]:
    """A function that writes a module `own`, and starts a pool for it."""
    with contextlib.ExitStack() as stack:

        def begin(text: str, at_once: int = 16, **options: Any) -> Conversations:
            Path("own.py").write_text(text)
            log = own_folder / "log"
            file = stack.enter_context(log.open("wb"))
            chosen = HostOptions(**({"tools": ("own",), "timeout_s": 20.0} | options))
            pool = EnvironmentPool(chosen, at_once, file.fileno())
            stack.callback(pool.shutdown)
            return Conversations(pool, log)

        yield begin
