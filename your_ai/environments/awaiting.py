"""Results of the user's functions, which may be async."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop


def finished(result: Any) -> Any:
    """A result, awaited if it is awaitable: in the one loop of this process, so that what an async
    function opened can be used in the next."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return loop().run_until_complete(wait())


@cache
def loop() -> AbstractEventLoop:
    import asyncio  # 9 MB

    return asyncio.new_event_loop()
