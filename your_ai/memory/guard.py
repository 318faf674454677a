"""The last line of defense: end the process when it is about to exceed its limit.

Plans are chosen so that this does not happen. If a plan uses more memory than estimated after
all, the supervisor continues from the checkpoint under the next smaller plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from your_ai.memory import allocator, probe

EVERY_S = 0.004  # a process can allocate a few MB in that time
CALM_S = 0.05  # the interval while the process uses less than CALM of the limit
CALM = 0.5
HEADROOM = 0.01  # the process ends this share of the limit below it,
HEADROOM_BYTES = 3_000_000  # or this many bytes below it, if that is more


@contextlib.contextmanager
def guarded(limit_bytes: int, end: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call `end` with the bytes in use, from a thread, when the process nears its limit.

    Yields a function that starts watching. Before it calls `end`, it frees MLX's cache, and
    continues if that helps.
    """
    most = limit_bytes - max(HEADROOM_BYTES, int(HEADROOM * limit_bytes))
    over, armed = threading.Event(), threading.Event()

    def watch() -> None:
        armed.wait()
        wait = CALM_S
        while not over.wait(wait):
            held = probe.process_bytes() or 0
            wait = CALM_S if held < CALM * limit_bytes else EVERY_S
            if held < most:
                continue
            allocator.free(collect=False)
            held = probe.process_bytes() or 0
            if held >= most:
                end(held)
                return

    thread = threading.Thread(target=watch, name="guard", daemon=True)
    thread.start()
    try:
        yield armed.set
    finally:
        over.set()
        armed.set()
        thread.join()
