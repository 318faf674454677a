"""Exit statuses by which the training process tells its supervisor how it ended, and that its
own parent.

128 + n: stopped by signal n, and everything is saved. A process that a signal killed has no
status of its own: Popen shows -n.
"""

from __future__ import annotations

DONE = 0
FAILED = 1  # a RunError: its text is the last line `error: ...` of the log
USER = 2  # a UserError, told likewise
CRASHED = 70  # an exception that is a fault of ours: its traceback is in the log
OUT_OF_MEMORY = 71  # an error of memory that the process could not mend inside
RESTART = 75  # asked for by the memory governor: everything is saved, start me again
LOST = 76  # the supervisor's: training died, and it gave up
