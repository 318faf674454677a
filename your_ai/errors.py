"""The errors a command can end with, which are shown as one line, and a stop signal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

# The end of an error: of a run that can be resumed, and of one that never began.
RESUME, AGAIN = "then resume the run", "then run the same command again"
# The end of a message about a fault that is not the user's.
REPORT = "please report it, with the file that this command writes: your_ai doctor --report FILE"


class UserError(Exception):
    """Something the user can fix: what is wrong, where, and what to do. Exit status 2."""


class Unsplittable(UserError):
    """A model that cannot run block by block; the message says what it does instead."""


class RunError(Exception):
    """A run that cannot continue although its input was valid. Exit status 1."""


def without_run(error: RunError) -> RunError:
    """The error of a run that never began, and whose folder was removed: nothing can be resumed."""
    return RunError(str(error).replace(RESUME, AGAIN))


class Interrupted(BaseException):
    """A stop signal arrived when there was no step to finish. Exit status 128 + signal."""

    def __init__(self, number: int, rest: str = "nothing was changed") -> None:
        """rest: what the user should know of the run."""
        super().__init__(number)
        self.number, self.rest = number, rest


UNREADABLE = "[read]"  # the beginning of MLX's message
OUT_OF_MEMORY = (
    "Insufficient Memory",
    "maximum allowed buffer size",
    "Resource limit",
    "Unable to allocate",
    "bad_alloc",
    "MemoryError",
)


def is_out_of_memory(reason: str) -> bool:
    """Return whether a message from MLX means that there was not enough memory."""
    return any(text in reason for text in OUT_OF_MEMORY)


def is_memory_error(error: BaseException) -> bool:
    """Return whether an error means that there was not enough memory."""
    mlx = type(error) is RuntimeError and is_out_of_memory(str(error))
    return mlx or isinstance(error, MemoryError)


def is_read_error(error: BaseException) -> bool:
    """Return whether MLX could not read a file whose arrays are lazy."""
    return type(error) is RuntimeError and str(error).startswith(UNREADABLE)


def is_of_model_code(error: Exception) -> bool:
    """Return whether an error may be a fault of a model's code: not of memory, a file or a user."""
    given = isinstance(error, RunError | UserError)
    return not (given or is_memory_error(error) or is_read_error(error))


@contextlib.contextmanager
def suppress_model_errors() -> Iterator[None]:
    """Suppress errors from a model's code, which may raise anything, and no others."""
    try:
        yield
    except Exception as error:
        if not is_of_model_code(error):
            raise


@contextlib.contextmanager
def suppress_memory_errors() -> Iterator[None]:
    """Suppress errors that mean that there was not enough memory, and no others."""
    try:
        yield
    except Exception as error:
        if not is_memory_error(error):
            raise


@contextlib.contextmanager
def named_errors(path: object, what: str, kind: type[Exception] = UserError) -> Iterator[None]:
    """In the block, raise an OSError as a `kind` that names the path. what: `read` or `written`."""
    try:
        yield
    except OSError as error:
        raise kind(f"{path}: cannot be {what} ({error.strerror})") from error


def explain(reason: str) -> str:
    """Turn a message from MLX into one that says what failed and what the user can do."""
    if reason.startswith(UNREADABLE):
        return f"the model's files can no longer be read; put them back, {RESUME}"
    if is_out_of_memory(reason):
        return f"out of memory ({reason}); lower --batch-size or --max-seq-length"
    return f"MLX failed ({reason}); --dtype float32 may help"


def class_names(error: BaseException) -> set[str]:
    """The names of an error's classes. Packages use httpx or, in later versions, httpx2."""
    return {kind.__name__ for kind in type(error).__mro__}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
