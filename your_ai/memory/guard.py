"""The last line of defense: end the process when it is about to exceed its limit.

Plans are chosen so that this does not happen. If a plan uses more memory than estimated after
all, the supervisor continues from the checkpoint under the next smaller plan.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from your_ai.memory import allocator, probe
from your_ai.memory.limit import headroom_bytes

# MLX fills new arrays at 2.4 GB/s on a core of a CPU. A plain fill of memory reaches 10; a GPU was
# not measured.
FASTEST_BYTES_S = 4e9
MOST_WAIT_S, LEAST_WAIT_S = 0.05, 0.001  # between two readings
SOON = 0.9  # share of the limit from which no freed memory is kept


def wait_s(room_bytes: int) -> float:
    """Seconds until the next reading, in which MLX does not fill `room_bytes`."""
    return min(MOST_WAIT_S, max(LEAST_WAIT_S, room_bytes / FASTEST_BYTES_S))


@contextlib.contextmanager
def guarded(
    limit_bytes: int,
    end: Callable[[int], None],
    ready: Callable[[int], bool] = lambda most_bytes: True,
) -> Iterator[None]:
    """Call `end` with the bytes in use, from a thread, when the process nears its limit.

    ready: whether to watch already, given the bytes at which the process ends.

    Before that, from SOON on, neither MLX nor the C library keeps freed memory. What they kept is
    freed in another thread: MLX frees nothing before running work is done, which takes up to half
    a second, in which memory grows on.
    """
    most = limit_bytes - headroom_bytes(limit_bytes)
    soon = min(most, int(SOON * limit_bytes))
    over = threading.Event()

    def watch() -> None:
        wait, freeing = LEAST_WAIT_S, None
        while not over.wait(wait):
            held = probe.process_bytes() or 0
            wait = wait_s((soon if held < soon else most) - held)
            if held >= most and ready(most):
                end(held)
                return
            kept = freeing is None or probe.mlx_bytes("get_cache_memory")
            if held >= soon and kept and not (freeing and freeing.is_alive()):
                freeing = threading.Thread(target=allocator.keep_nothing, daemon=True)
                freeing.start()

    thread = threading.Thread(target=watch, name="guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
