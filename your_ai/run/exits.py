"""Exit statuses of the training process for its supervisor, and of the supervisor for its parent.

128 + n: stopped by signal n after saving everything. For a process that was killed by signal n,
Popen shows -n.
"""

from __future__ import annotations

DONE = 0
FAILED = 1  # a RunError; its text is the last line `error: ...` of the log
USER = 2  # a UserError; its text is there too
CRASHED = 70  # an exception that is a bug of this program; its traceback is in the log
OUT_OF_MEMORY = 71  # an out-of-memory error that the process could not recover from
RESTART = 75  # the memory governor asks for a restart; everything is saved
LOST = 76  # only of the supervisor: training died, and the supervisor gave up
PEER_LOST = 77  # only of a run on several ranks: another rank died; the log has a line LOST
