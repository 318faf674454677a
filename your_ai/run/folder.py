"""The folder runs/<name>/: its files, and locks so that only one process writes them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import re
import shlex
import shutil
import tempfile
import time
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from your_ai.config import (
    ADDED,
    DEMO,
    DEMO_DATA,
    FOLDER,
    NONE,
    TrainConfig,
    build,
    nearest,
    to_yaml,
)
from your_ai.errors import UserError, named_errors
from your_ai.files import TEMPORARY, clean, open_regular, open_to_append, read_text, sync
from your_ai.gates.text import shortened
from your_ai.gates.yaml_files import read_yaml

RUNS = Path("runs")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
LOCK = "lock"  # locked by the training process
SUPERVISOR_LOCK = "supervisor.lock"  # locked by the supervisor
CONFIG_BYTES = 1 << 20
PID_BYTES = 32  # maximum size of a lock file
Untrained = Literal["imported", "merged"]
RESTART_S = 3.0  # a run may have no process for so long while it restarts
LOCK_WAIT_S = 5.0  # a killed process takes a moment to release its lock


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.path)).name  # works for `.` too

    @property
    def reference(self) -> str:
        """The argument of --resume and --run for this run, quoted for a shell."""
        return shlex.quote(self.name if self.path.parent == RUNS else str(self.path))

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def answers(self) -> Path:
        """The answers that a teacher wrote, which the run trains, as data: only of such a run."""
        return self.path / "answers"

    @property
    def has_work(self) -> bool:
        """True if the run did something that takes long to do again, before its first step too."""
        return self.checkpoints.exists() or self.answers.exists()

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    @property
    def model(self) -> Path:
        """The result of a run that trains whole weights."""
        return self.path / "model"

    @property
    def costs(self) -> Path:
        """The file with what the work of the run needs in memory, as measured before it began."""
        return self.path / "costs.json"

    @property
    def start(self) -> Path:
        """The adapter that the run starts from. This folder exists only with --from or --init."""
        return self.path / "start"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer with the tokens that the run added. This folder exists only if it did."""
        return self.path / "tokenizer"

    @property
    def base(self) -> Path:
        """The base model with weights that --init adjusted, if it did."""
        return self.path / "base"

    @property
    def subtracted(self) -> Path:
        """The adapter whose product the weights in `base` lack, if it is not that in `start`."""
        return self.path / "subtracted"

    @property
    def exported(self) -> Path:
        """The adapter as the base needs it, where --init changed what it is added to."""
        return self.path / "exported"

    def origin(self, kind: Untrained) -> Path:
        """The file that says where the adapter of an imported or merged run came from."""
        return self.path / f"{kind}.json"

    @property
    def untrained(self) -> Untrained | None:
        """The kind of a run whose adapter was not trained here; None for other runs."""
        kinds = typing.get_args(Untrained)
        return next((kind for kind in kinds if os.path.isfile(self.origin(kind))), None)

    def read_config(self) -> TrainConfig:
        """The settings of the run. Raises UserError if the file is damaged."""
        if not self.config_text().endswith("...\n"):
            # Defaults for the missing settings would describe a different run.
            raise UserError(f"{self.config}: is cut short")
        return build(ADDED | read_yaml(self.config), str(self.config))

    def settings(self) -> TrainConfig | None:
        """The settings of the run; None if they cannot be read."""
        try:
            return self.read_config()
        except UserError:
            return None

    def config_text(self, errors: str = "strict") -> str:
        """The text of config.yaml. Raises UserError if it cannot be read or is too large."""
        try:
            return read_text(self.config, CONFIG_BYTES, errors)
        except UnicodeDecodeError as error:
            raise UserError(f"{self.config}: cannot be read (it is not UTF-8)") from error
        except OSError as error:
            raise UserError(f"{self.config}: cannot be read ({error.strerror})") from error

    def write_config(self, config: TrainConfig) -> None:
        """Write config.yaml. If that fails, raise OSError and keep the old file."""
        temporary = self.config.with_suffix(".tmp")
        try:
            temporary.write_text(to_yaml(config), encoding="utf-8")
            sync(temporary)
            os.replace(temporary, self.config)
        finally:
            temporary.unlink(missing_ok=True)

    def change_config(self, config: TrainConfig) -> None:
        """Write the settings of a resumed run if they have changed."""
        if with_absolute_paths(config) == self.read_config():
            return
        with named_errors(self.config, "written"):
            self.write_config(with_absolute_paths(config))


def default_name(config: TrainConfig) -> str:
    """A name made from model, data and time, which no run in runs/ has."""
    model, data = Path(config.model).name, Path(config.data).stem
    parts = [data] if config.data in DEMO_DATA and config.model == DEMO else [model, data]
    parts = list(dict.fromkeys(re.sub(r"[^A-Za-z0-9.]+", "-", p).strip("-.") for p in parts))
    name = "-".join([*filter(None, parts), time.strftime("%Y%m%d-%H%M%S")])
    names = (name, *(f"{name}-{number}" for number in range(2, 100)))
    return next((free for free in names if not (RUNS / free).exists()), name)


def create(config: TrainConfig) -> RunFolder:
    """Create the folder of a new run with its config.yaml, in which paths are absolute.

    Raises UserError if the name is taken or the folder cannot be written.
    """
    name = config.run or default_name(config)
    with creating(name, config):
        return place_of(name)


def place_of(name: str, option: str = "--run") -> RunFolder:
    """The folder of the run with this name. Raises UserError if the name is invalid.

    option: what gave the name.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"{option} {shortened(name)}: use at most 100 letters, digits, dots, dashes and "
            "underscores"
        )
    return RunFolder(RUNS / name)


@contextlib.contextmanager
def creating(name: str, config: TrainConfig) -> Iterator[RunFolder]:
    """Yield the folder of a new run for more files; rename it to `name` if the block succeeds.

    Raises UserError if the name is taken or the folder cannot be written.
    """
    path = place_of(name).path
    taken = f"--run {name}: {path} exists; choose another name, or continue it: your_ai train"
    with new_folder(path, f"{taken} --resume {name}") as temporary:
        RunFolder(temporary).write_config(with_absolute_paths(config))
        yield RunFolder(temporary)


@contextlib.contextmanager
def new_folder(path: Path, taken: str) -> Iterator[Path]:
    """Yield a folder for files; rename it to `path` if the block succeeds, else remove it.

    taken: the message of the UserError if `path` exists.
    Raises UserError also if the folder cannot be written.
    """
    if os.path.lexists(path):
        raise UserError(taken)
    temporary = None
    try:
        path.parent.mkdir(exist_ok=True)
        clean(path.parent, older_than_s=3600)
        temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent))
        temporary.chmod(0o755)
        yield temporary
        os.rename(temporary, path)
    except OSError as error:
        lost = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        if temporary is not None and lost:  # another process took the name in the meantime
            raise UserError(taken) from error
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        if temporary is not None and temporary.exists():
            discard(temporary)


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Make the paths of model and data absolute, so that they work from any folder."""
    names = ("model", "data", "prompt_template", "hostfile", "teacher", "teacher_prompt")
    paths: dict[str, Any] = {name: absolute(getattr(config, name)) for name in names}
    if config.valid not in (NONE, FOLDER):  # words, whatever files are there
        paths["valid"] = absolute(config.valid)
    if config.prefix_cache_folder:  # it may not exist yet
        paths["prefix_cache_folder"] = os.path.realpath(
            os.path.expanduser(config.prefix_cache_folder)
        )
    parts = config.data.split(",")
    if paths["data"] == config.data and len(parts) > 1:
        found = [absolute_part(part.strip()) for part in parts]
        if not any("," in part for part in found):  # it would be read as two parts
            paths["data"] = ",".join(found)
    return dataclasses.replace(config, **paths)


def absolute(value: str) -> str:
    """The absolute path of what exists; anything else unchanged."""
    path = os.path.expanduser(value)
    is_path = value not in ("", *DEMO_DATA) and os.path.exists(path)
    return os.path.realpath(path) if is_path else value


def absolute_part(part: str) -> str:
    """Make one of several parts of --data absolute, as `absolute` does; it may end in =SHARE."""
    if (found := absolute(part)) != part:
        return found
    name, equals, share = part.rpartition("=")
    return absolute(name) + equals + share


def check_resumable(folder: RunFolder) -> None:
    """Raise UserError for an imported or merged run."""
    if folder.untrained is not None:
        raise UserError(
            f"{folder.path}: was {folder.untrained} and cannot be resumed; start a new run with "
            f"--from {folder.reference}"
        )


def find(run: str) -> RunFolder:
    """Find an existing run by its name or path. Raises UserError if there is none."""
    for path in (RUNS / run, Path(run)):
        folder = RunFolder(path)
        if os.path.isfile(folder.config):
            return folder
    names = [p.parent.name for p in RUNS.glob("*/config.yaml")]
    run = shortened(run)
    raise UserError(f"no run named {run} in {RUNS.absolute()}{nearest(run, names)}")


def discard(path: Path) -> None:
    """Remove a run or tune that never started, and also `runs` or `tunes` if that is then empty."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.parent.rmdir()


@contextlib.contextmanager
def locked(folder: RunFolder, name: str = LOCK, what: str = "run") -> Iterator[None]:
    """Lock the run for this process. Raises UserError if another process has locked it.

    what: the folder is one of, for the message.
    """
    with named_errors(folder.path, "written"):
        file = open_to_append(folder.path / name)
    with file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    pid = file.read(PID_BYTES).decode(errors="replace").strip() or "unknown"
                    raise UserError(
                        f"{folder.path}: process {pid} is working on this {what}; wait for it, "
                        "or stop it"
                    ) from None
                time.sleep(0.1)
        with contextlib.suppress(OSError):  # on a full disk the lock works without the pid in it
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # remove the pid, which may be reused
                os.ftruncate(file.fileno(), 0)


def owner(folder: RunFolder, locks: Sequence[str] = (SUPERVISOR_LOCK, LOCK)) -> int | None:
    """The pid of the supervisor or training process of the run; None if there is none.

    locks: whose owner; LOCK alone is the training process's, of several that of rank 0.
    0 if the pid is unknown. This takes a shared lock for a moment, which is harmless because
    `locked` tries several times.
    """
    for name in locks:
        try:
            file = open_regular(folder.path / name)
        except OSError:
            continue
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                text = file.read(PID_BYTES).strip()
                return int(text) if text.isdigit() else 0
    return None


def is_running(folder: RunFolder) -> bool:
    return owner(folder) is not None
