"""What happens in a run, as typed events: one JSON line each, appended to events.jsonl.

The training process writes them and everything that shows a run reads them. A line is
`{"event": name, "time": seconds since 1970, ...fields}`.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import time
import typing
from dataclasses import dataclass, field
from pathlib import Path

from your_ai.errors import RunError, UserError
from your_ai.files import open_regular


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the run is busy with when it is not training, e.g. `loading the model`."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Something the user should know, once."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The memory that this process may hold, and why so much."""

    limit_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Planned:
    """How steps are computed from here on: `text` says it in words.

    level: how many plans were passed over that the estimates allow, since they proved too
    large; estimate_bytes: the most the process should hold; asked: the settings that it was
    chosen for.
    """

    plan: str
    micro_tokens: int
    spill: bool
    level: int
    estimate_bytes: int
    text: str
    asked: str = ""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """A step with rows of `tokens` tokens held `ratio` times the activations expected of it.

    More than any step with such rows before, under the same plan.
    """

    step: int
    tokens: int
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A micro-batch of `rows` x `tokens` was tried before training, by this run or an earlier one.

    engine: fused, or staged for all others; work_bytes: of its activations; ratio: these over
    what was estimated.
    """

    engine: str
    rows: int
    tokens: int
    work_bytes: int
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the memory governor did between two steps, and what that changed.

    kind: as memory.governor names it; before and after: of the process; read_bytes: what
    was read back from the model's files.
    """

    step: int
    kind: str
    cause: str
    before_bytes: int
    after_bytes: int
    seconds: float
    read_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Died:
    """The training process ended without having finished: written by who restarts it.

    level: of the plan under which it goes on, None where it does not.
    """

    step: int
    reason: str
    level: int | None


@dataclass(frozen=True, kw_only=True)
class Started:
    """Everything is checked and loaded: training begins at `step` (0, or where it resumes)."""

    step: int
    steps: int
    steps_per_epoch: int
    model: str
    rows: int
    trainable_parameters: int
    dtype: str
    plan: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """An optimizer update: step `step` (from 1) of `steps`.

    loss: the mean that is minimized; metrics: further figures of the objective, by name;
    grad_norm: before clipping; tokens: without padding; trained_tokens: the targets among
    them; highest_bytes: the most that the process held since the step before; peak_bytes:
    MLX's, of this step.
    """

    step: int
    steps: int
    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    padded_tokens: int
    trained_tokens: int
    seconds: float
    highest_bytes: int | None = None
    active_bytes: int | None = None
    peak_bytes: int | None = None
    cache_bytes: int | None = None
    process_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    pressure: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gauges:
    """What the process holds while a long step goes on, or while it loads.

    In bytes, as memory.sample has them; None where a gauge cannot be read.
    """

    active_bytes: int | None = None
    peak_bytes: int | None = None
    cache_bytes: int | None = None
    process_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    pressure: int | None = None


@dataclass(frozen=True, kw_only=True)
class Paused:
    """The run waits after `step`, as the user asked."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Continued:
    """It goes on after a pause of so many seconds."""

    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A step that changed no weight, with the reason."""

    step: int
    reason: str
    in_a_row: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Validation:
    step: int
    loss: float
    trained_tokens: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    step: int
    folder: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Answers to held-out prompts: `when` is before or after; prompts as users typed them."""

    when: str
    prompts: list[str]
    answers: list[str]
    expected: list[str]


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    when: str
    correct: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of the run: `reason` is done, or what stopped it."""

    step: int
    reason: str
    adapter: str
    seconds: float


Event = (
    Stage
    | Notice
    | Limit
    | Planned
    | Measured
    | Corrected
    | Action
    | Died
    | Started
    | Step
    | Gauges
    | Paused
    | Continued
    | Skipped
    | Validation
    | Checkpoint
    | Samples
    | ExactMatch
    | Finished
)
KINDS = {kind.__name__.lower(): kind for kind in typing.get_args(Event)}
KNOWN = {"str": str, "bool": bool, "int": int, "float": (int, float), "None": type(None)}
KNOWN |= {"list[str]": list, "dict[str, float]": dict}


def allowed(annotation: str) -> tuple[type, ...]:
    """The types of a field, as JSON has them, for `int | None` and the like."""
    kinds = [KNOWN[name] for name in annotation.split(" | ")]
    return tuple(t for kind in kinds for t in (kind if isinstance(kind, tuple) else (kind,)))


# By kind of event: the names of its fields, with their types.
FIELDS = {
    kind: {field.name: allowed(str(field.type)) for field in dataclasses.fields(kind)}
    for kind in KINDS.values()
}


@dataclass(frozen=True)
class Record:
    """An event and when it was written, in seconds since 1970."""

    time: float
    event: Event


def to_line(record: Record) -> str:
    name = type(record.event).__name__.lower()
    fields = {"event": name, "time": record.time, **dataclasses.asdict(record.event)}
    return json.dumps(fields) + "\n"


def from_line(line: str | bytes) -> Record | None:
    """The record, or None for a line, kind or shape that this version does not know."""
    try:
        fields = json.loads(line)
        kind = KINDS[fields["event"]]
        known = FIELDS[kind]
        told = {name: value for name, value in fields.items() if name in known}
        if not all(isinstance(value, known[name]) for name, value in told.items()):
            return None
        if not all(isinstance(value, int | float) for value in told.get("metrics", {}).values()):
            return None
        return Record(float(fields["time"]), kind(**told))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


LINE_BYTES = 1 << 24  # of an event; samples are the longest
STRANGE_BYTES = 1 << 26  # of lines that are no events, before the file is none of events


class EventLog:
    """Appends events to a file, each in one write, so that a reader sees whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written_at = time.monotonic()
        self.is_torn = False
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
            self.file = os.open(path, flags, 0o644)
            if not stat.S_ISREG(os.fstat(self.file).st_mode):
                os.close(self.file)
                raise OSError(errno.EINVAL, "is not a file")
            size = os.fstat(self.file).st_size
            if size and os.pread(self.file, 1, size - 1) != b"\n":
                os.write(self.file, b"\n")  # a killed run left half a line: end it
        except OSError as error:
            raise self._failure(error) from error

    def write(self, event: Event) -> None:
        """Raises RunError where the disk is full or gone."""
        line = to_line(Record(time.time(), event)).encode()
        line, self.is_torn = b"\n" * self.is_torn + line, True  # ends what a full disk cut
        self.written_at = time.monotonic()
        try:
            while line:  # a nearly full disk takes a part, then says that it is full
                line = line[os.write(self.file, line) :]
            self.is_torn = False
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path}: cannot be written ({error.strerror}); make room, then resume the run"
        )

    def close(self) -> None:
        os.close(self.file)


def tail(path: Path, offset: int = 0) -> tuple[list[Record], int]:
    """The records from byte `offset` on, and the offset to go on from.

    A half-written last line is left for the next call; lines that cannot be understood, or
    are longer than LINE_BYTES, are passed over. A missing file holds no events. Raises
    UserError for what is no file of events.
    """
    records: list[Record] = []
    strange_bytes = 0
    try:
        with open_regular(path) as file:
            file.seek(offset)
            while line := file.readline(LINE_BYTES):
                if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                    break
                offset += len(line)
                record = from_line(line)
                if record is not None:
                    records.append(record)
                    continue
                strange_bytes += 0 if line.startswith(b"{") else len(line)
                if strange_bytes > STRANGE_BYTES:
                    raise UserError(f"{path}: is not a file of events; move it away")
    except FileNotFoundError:
        return [], offset
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return records, offset
