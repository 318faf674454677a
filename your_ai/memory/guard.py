"""The last line of defense: a process that is about to pass its limit ends, and goes on smaller.

Plans are chosen so that this does not happen. Where one holds more than it should all the same,
no step is lost: the supervisor goes on from the checkpoint, under the next smaller plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from your_ai.memory import allocator, probe

EVERY_S = 0.004  # a process gets a few MB in that time
CALM_S = 0.05  # the same while it holds less than CALM of the limit
CALM = 0.5
HEADROOM = 0.01  # share of the limit below it at which the process ends,
HEADROOM_BYTES = 3_000_000  # or this much where that is more


@contextlib.contextmanager
def guarded(limit_bytes: int, end: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call `end` with the bytes held, from a thread, once the process is about to pass the limit.

    It begins to watch when what it gives is called. Before the end it gives back what MLX keeps
    of freed buffers.
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
