"""The events of a run, as typed objects: one JSON line each, appended to events.jsonl.

The training process writes them, and everything that shows a run reads them. A line is
`{"event": name, "time": seconds since 1970, ...fields}`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import stat
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from your_ai.errors import RESUME, RunError, UserError
from your_ai.files import open_regular, remedy_of
from your_ai.memory.sample import MemorySample


@dataclass(frozen=True, kw_only=True)
class Event:
    """The base of all that are below."""


@dataclass(frozen=True, kw_only=True)
class Stage(Event):
    """The activity of a run when it is not training, e.g. `loading the model`."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Waiting(Event):
    """The run waits for memory that other runs use. Written by the supervisor."""

    text: str
    """What it waits for, in words; empty when the wait is over."""
    since: float
    """Time when it began to wait, in seconds since 1970."""
    pid: int
    """Of the supervisor that waits."""
    needed_bytes: int | None
    """What all its processes may use; None for all that the machine has."""


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """A message for the user, shown once."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Limit(Event):
    """The memory limit of this process, and the reason for it."""

    limit_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Planned(Event):
    """The memory plan of the steps from here on."""

    plan: str
    micro_tokens: int
    spill: bool
    level: int
    """How many plans were skipped because they proved too large, though the estimates fit."""
    estimate_bytes: int
    """Estimated peak memory of the process."""
    text: str
    """The plan in words."""
    asked: str = ""
    """The settings that the plan was chosen for."""
    wave: int = 0
    """Completions that are generated together; 0 if the run generates none."""
    kept: int = 0
    """Blocks, from the last, that keep the outputs of their linear layers for the backward pass."""
    kept_attention: int = 0
    """Blocks that keep the outputs of attention; 0 in events of older versions."""
    kept_activations: int = 0
    """Blocks that keep the activations of their MLP; 0 in events of older versions."""
    resident: int = 0
    """Blocks, from the last, whose weights stay in memory under the streamed plan."""
    blocks_ahead: int = 1
    """Blocks that the streamed plan reads while the block before them runs."""
    teacher_blocks: int = 0
    """Blocks of a teacher whose weights stay in memory."""
    teacher_ahead: int = 1
    """Blocks of a teacher that are read while the block before them runs."""
    needed_bytes: int = 0
    """`estimate_bytes` with the safety margin: what must fit; 0 in events of older versions."""
    seconds: float | None = None
    """Predicted, of a step on average; None if this machine's speed was not measured."""
    front: list[list[float]] = field(default_factory=list)
    """The plans that no other beats in both: bytes that must fit, and predicted seconds."""


@dataclass(frozen=True, kw_only=True)
class Corrected(Event):
    """A step with rows of `tokens` tokens used `ratio` times its estimated activation memory.

    Written if that is more than in any earlier step with such rows under the same plan.
    """

    step: int
    tokens: int
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Action(Event):
    """An action of the memory governor between two steps, and its effect."""

    step: int
    kind: str
    """The name of the action in memory.governor."""
    cause: str
    before_bytes: int
    """Memory of the process before the action."""
    after_bytes: int
    """Memory of the process after the action."""
    seconds: float
    read_bytes: int = 0
    """Bytes that were read again from the model's files."""


RAN_OUT = "ran out of memory"


@dataclass(frozen=True, kw_only=True)
class Died(Event):
    """The training process ended before it finished. Written by the supervisor."""

    step: int
    reason: str
    level: int | None
    """The level of the plan with which training restarts; None if it does not restart."""

    @property
    def of_memory(self) -> bool:
        """True if the process ran out of memory."""
        return RAN_OUT in self.reason


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """Everything is checked and loaded. Training starts at `step`: 0, or the resumed step."""

    step: int
    steps: int
    steps_per_epoch: int
    model: str
    rows: int
    trainable_parameters: int
    dtype: str
    plan: str
    more: str = ""
    """In words, what would make this run learn more."""
    has_answers: bool = True
    """Whether the rows have answers, which an evaluation compares."""
    is_reward_model: bool = False
    """Whether the run scores answers, and gives none."""
    trains_weights: bool = False
    """Whether the run trains the weights themselves, so that its result is a model."""


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """An optimizer update: step `step` (from 1) of `steps`."""

    step: int
    steps: int
    epoch: int
    loss: float
    """The mean that is minimized."""
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    tokens: int
    """Without padding."""
    padded_tokens: int
    trained_tokens: int
    """The targets among `tokens`."""
    seconds: float
    highest_bytes: int | None = None
    """Peak memory of the process since the previous step."""
    active_bytes: int | None = None
    peak_bytes: int | None = None
    """MLX's peak memory in this step."""
    cache_bytes: int | None = None
    process_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    pressure: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Other values of the objective, by name."""
    read_wait_s: float | None = None
    """Seconds in which it waited for weights from files; None if those of all blocks are in memory,
    and in events of older versions."""


@dataclass(frozen=True, kw_only=True)
class Ranks(Event):
    """The processes of a run on several, in step `step`; the lists have an entry for each."""

    step: int
    hosts: list[str]
    tokens: list[float]
    """Tokens that it trained, without padding."""
    seconds: list[float]
    """What it computed for the step."""
    waited: list[float]
    """Seconds in collective operations: the transfer, and the wait for slower processes."""
    process_bytes: list[float]
    """Its memory; 0 if unknown."""
    limit_bytes: list[float]
    sent_bytes: float
    """What each gave to the collective operations of the step."""


@dataclass(frozen=True, kw_only=True)
class Shares(Event):
    """From the step after `step` on, the rows of a step are dealt to the hosts by these speeds."""

    step: int
    hosts: list[str]
    shares: list[float]
    """Of each rank, relative to the fastest."""


@dataclass(frozen=True, kw_only=True)
class Gauges(Event, MemorySample):
    """Memory readings during a long step or while loading."""


@dataclass(frozen=True, kw_only=True)
class Host(Event):
    """Power and heat of the computer, written when they change. Only macOS tells them."""

    source: str = ""
    """mains, battery or UPS; empty if unknown."""
    percent: int | None = None
    """Charge of the battery."""
    thermal: str = ""
    """Thermal pressure: nominal, fair, serious or critical; empty if unknown."""


@dataclass(frozen=True, kw_only=True)
class Phase(Event):
    """The training process begins something that may take long. It lasts until another event."""

    text: str
    """What it does, e.g. `validating`."""
    in_step: bool = False
    """Whether it is a part of a step, e.g. `generating completions`; else it is between two."""


@dataclass(frozen=True, kw_only=True)
class Stopping(Event):
    """A signal asked the run to stop; it stops at the next place where nothing is lost."""

    text: str
    """When it stops, in words."""


@dataclass(frozen=True, kw_only=True)
class Paused(Event):
    """The run is paused after `step`, at the user's request."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Continued(Event):
    """The run continues after a pause of `seconds`."""

    step: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Skipped(Event):
    """A step that changed no weights, and why."""

    step: int
    reason: str
    in_a_row: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Validation(Event):
    step: int
    loss: float
    trained_tokens: int
    seconds: float
    best: bool = False
    """Whether it is better than every validation before it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The value of --best-metric by its name, if that is not the loss."""

    @property
    def reward(self) -> float | None:
        """The mean reward, if that is what was measured; the loss is then the negative."""
        reward = self.metrics.get("reward")
        return reward if reward is not None and self.loss == -reward else None


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Event):
    step: int
    folder: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Samples(Event):
    """Answers to held-out prompts, before or after training."""

    when: str
    """before or after."""
    prompts: list[str]
    """As users typed them."""
    answers: list[str]
    expected: list[str]
    """The answers in the data; empty for one with the label false."""


@dataclass(frozen=True, kw_only=True)
class Rollout(Event):
    """The best completion of a step that trains on rewards, shortened."""

    step: int
    prompt: str
    completion: str
    reward: float | None = None
    expected: str = ""


@dataclass(frozen=True, kw_only=True)
class ExactMatch(Event):
    """The number of answers to held-out prompts that are exactly the expected ones."""

    when: str
    """before or after training."""
    correct: int
    rows: int
    reward: float | None = None
    """The mean reward of these answers, in a run that trains on rewards."""


@dataclass(frozen=True, kw_only=True)
class Finished(Event):
    """The end of the run."""

    step: int
    reason: str
    """done, or what stopped the run."""
    adapter: str
    seconds: float
    adapter_step: int | None = None
    """The step of the adapter: the best or the last; None if none was written."""


# Written beside the work of the run, so they do not say that it goes on.
BESIDE_THE_WORK = (Gauges, Host, Notice, Ranks, Shares, Stopping)
E = TypeVar("E")
KINDS = {kind.__name__.lower(): kind for kind in Event.__subclasses__()}
KNOWN = {"str": str, "bool": bool, "int": int, "float": (int, float), "None": type(None)}
KNOWN |= {"list[str]": list, "list[float]": list, "list[list[float]]": list}
KNOWN |= {"dict[str, float]": dict}


def allowed(annotation: str) -> tuple[type, ...]:
    """The types that JSON may give for a field with an annotation like `int | None`."""
    kinds = [KNOWN[name] for name in annotation.split(" | ")]
    return tuple(t for kind in kinds for t in (kind if isinstance(kind, tuple) else (kind,)))


# Per kind of event, the names and types of its fields.
FIELDS = {
    kind: {field.name: allowed(str(field.type)) for field in dataclasses.fields(kind)}
    for kind in KINDS.values()
}


@dataclass(frozen=True)
class Record:
    """An event and the time when it was written, in seconds since 1970."""

    time: float
    event: Event


def to_line(record: Record) -> str:
    name = type(record.event).__name__.lower()
    fields = {"event": name, "time": record.time, **dataclasses.asdict(record.event)}
    return json.dumps(fields) + "\n"


def is_pair(value: object) -> bool:
    """Return whether it is a list of two numbers."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(isinstance(each, int | float) for each in value)


def from_line(line: str | bytes) -> Record | None:
    """Parse a line; None if this version does not know the line's kind or shape."""
    try:
        fields = json.loads(line)
        kind = KINDS[fields["event"]]
        known = FIELDS[kind]
        found = {name: value for name, value in fields.items() if name in known}
        if not all(isinstance(value, known[name]) for name, value in found.items()):
            return None
        if not all(isinstance(value, int | float) for value in found.get("metrics", {}).values()):
            return None
        if not all(is_pair(value) for value in found.get("front", [])):
            return None
        return Record(float(fields["time"]), kind(**found))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


def of(kind: type[E], written: Iterable[Event]) -> list[E]:
    """The events of a kind."""
    return [event for event in written if isinstance(event, kind)]


LINE_BYTES = 1 << 24  # maximum length of an event; samples are the longest
STRANGE_BYTES = 1 << 26  # a file with more bytes of unknown lines is not an events file


class EventLog:
    """Append events to a file, each in one write, so that readers see complete lines."""

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
                os.write(self.file, b"\n")  # end the half line that a killed run left
        except OSError as error:
            raise self._failure(error) from error

    def write(self, event: Event) -> None:
        """Append an event. Raises RunError if the disk is full or gone."""
        line = to_line(Record(time.time(), event)).encode()
        line, self.is_torn = b"\n" * self.is_torn + line, True  # end a line that a full disk cut
        self.written_at = time.monotonic()
        try:
            while line:  # a nearly full disk accepts a part, then reports that it is full
                line = line[os.write(self.file, line) :]
            self.is_torn = False
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> RunError:
        return RunError(
            f"{self.path}: cannot be written ({error.strerror}); {remedy_of(error)}, {RESUME}"
        )

    def close(self) -> None:
        os.close(self.file)


def write_event(path: Path, event: Event) -> None:
    """Append an event to a file. Raises RunError as `EventLog` does."""
    with contextlib.closing(EventLog(path)) as log:
        log.write(event)


def tail(
    path: Path, offset: int = 0, only: tuple[type[Event], ...] = ()
) -> tuple[list[Record], int]:
    """Return the records from byte `offset` on, and the offset for the next call.

    only: kinds to return; () for all. A missing file has no events. Raises UserError if the file
    is not an events file.
    """
    rest = EventsTail(path, offset, only)
    return rest.read(), rest.offset


def end_of(path: Path) -> int:
    """Return the offset at which `tail` would end, without reading all. Raises UserError as it."""
    size = 0
    try:
        size = os.stat(path).st_size
        with open_regular(path) as file:
            file.seek(max(0, size - LINE_BYTES))
            last = file.read(LINE_BYTES)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error) from error
    return size - len(last) + last.rfind(b"\n") + 1


START = b'{"event": "'  # of each line that `to_line` makes, before the name of its kind


def kind_in(line: bytes) -> bytes:
    """The kind that a line begins with, without parsing it; empty if it begins otherwise."""
    if not line.startswith(START):
        return b""
    return line[len(START) : line.find(b'"', len(START))]


@dataclass
class EventsTail:
    """The part of an events file that is still to be read."""

    path: Path
    offset: int = 0
    only: tuple[type[Event], ...] = ()
    """Kinds to return; () for all."""
    strange_bytes: int = 0
    """Bytes of lines that are no events."""
    identity: tuple[int, int, bytes] | None = None
    """Of the file, with its first line: another is that of a new run with the same name, whose
    file may have the inode of the old one."""

    def read(self, most_bytes: float = math.inf) -> list[Record]:
        """Read so many bytes and the line in which they end, or all; return their records.

        A half-written last line is left for the next call. Unknown lines and lines longer than
        LINE_BYTES are skipped. Raises UserError as `tail`.
        """
        records: list[Record] = []
        end = self.offset + most_bytes
        others = {n.encode() for n, kind in KINDS.items() if self.only and kind not in self.only}
        self.check()
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                while self.offset < end and (line := file.readline(LINE_BYTES)):
                    if not line.endswith(b"\n") and len(line) < LINE_BYTES:
                        break
                    self.offset += len(line)
                    if others and kind_in(line) in others:
                        continue
                    record = from_line(line)
                    if record is not None:
                        records.append(record)
                        continue
                    self.strange_bytes += 0 if line.startswith(b"{") else len(line)
                    self.check()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.path, error) from error
        return [each for each in records if isinstance(each.event, self.only or Event)]

    def check(self) -> None:
        if self.strange_bytes > STRANGE_BYTES:
            raise UserError(f"{self.path}: is not an events file; move it away")

    def followed(self) -> EventsTail:
        """Return itself; or the whole file, if that is now of another run."""
        try:
            with open_regular(self.path) as file:
                status, first = os.fstat(file.fileno()), file.readline(FIRST_BYTES)
        except OSError:
            return self
        identity = status.st_dev, status.st_ino, first
        if self.identity not in (None, identity) or status.st_size < self.offset:
            return EventsTail(self.path, only=self.only, identity=identity)
        self.identity = identity
        return self


def unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror})")


# Long files, of which a part of the lines shows enough

FIRST_BYTES = 4096  # of the first line of an events file, which has its time
SKIMMED = 600  # lines of a kind, evenly spread
LAST_LINES = 100  # of each kind, which are all read
MOST_LINES = 5_000_000  # what is after them is not seen at the first look


def skim(path: Path, most: int = SKIMMED) -> list[Record]:
    """Read a long file in little time: of each kind `most` lines, and the last ones.

    Of a kind with no more lines, there are all, each with the line before it, so that times
    between events are right where something happened. Raises UserError as `tail`.
    """
    places = array("q")  # of all lines, their offsets
    by_kind = {name.encode(): array("q") for name in ("", *KINDS)}  # the numbers of its lines
    try:
        with open_regular(path) as file:
            offset, width = 0, len(START)
            lines = itertools.islice(iter(partial(file.readline, LINE_BYTES), b""), MOST_LINES)
            for number, line in enumerate(lines):
                # As `kind_in`, without a call for each of 100,000 lines.
                kind = line[width : line.find(b'"', width)] if line.startswith(START) else b""
                by_kind[kind if kind in by_kind else b""].append(number)
                places.append(offset)
                offset += len(line)
            kept: set[int] = set()
            for found in by_kind.values():
                if len(found) <= most:
                    kept.update(found, (max(0, number - 1) for number in found))
                else:
                    kept.update(found[:: len(found) // most], found[-LAST_LINES:])
            records = []
            for number in sorted(kept):
                file.seek(places[number])
                if (record := from_line(file.readline(LINE_BYTES))) is not None:
                    records.append(record)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise unreadable(path, error) from error
    return records
