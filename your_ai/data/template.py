"""A chat rendered by the model's own chat template, in bounded time and memory.

A template is a program that comes with the model's files, which are not trusted. transformers
runs it in Jinja's sandbox: no attribute of Python's own, no file, no `range` beyond 100,000.
The sandbox bounds neither nested loops nor the size of a text: that is done here.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import shortened

SECONDS = 3.0  # most time of one rendering
TEMPLATE_CHARACTERS = 1_000_000  # of a template itself; long ones have 20,000
LEAST_BYTES = 1 << 26  # of address space that it may always take
PAGE_BYTES = resource.getpagesize()


class TooSlow(BaseException):
    """A rendering takes too long. No Exception, which Jinja's compiler would swallow."""


class TemplateRefused(UserError):
    """The template itself raises an error."""


def render(
    tokenizer: Any,
    messages: list[dict],
    where: str,
    room_bytes: int,
    most_characters: int | None = None,
    **options: Any,
) -> str:
    """The text that the tokenizer's template makes of messages.

    room_bytes: how much memory it may take; most_characters: of the text; options: given to
    the template. Raises Refused or another UserError, which begins with `where`.
    """
    template = str(options.get("chat_template", tokenizer.chat_template))
    if len(template) > TEMPLATE_CHARACTERS:
        raise UserError(
            f"{where}: the model's chat template has {len(template):,} characters; "
            f"{TEMPLATE_CHARACTERS:,} are the most"
        )
    room_bytes = max(room_bytes, LEAST_BYTES)
    try:
        with limited_time(SECONDS), limited_memory(room_bytes):
            text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except TooSlow:
        raise UserError(
            f"{where}: the model's chat template takes more than {SECONDS:g} s; give a shorter "
            "row, or another model"
        ) from None
    except MemoryError as error:
        raise UserError(
            f"{where}: the model's chat template takes more than {room_bytes / 1e6:,.0f} MB; "
            "give a shorter row, or another model"
        ) from error
    except Exception as error:  # templates raise what they like
        reason = shortened(" ".join(str(error).split()) or type(error).__name__)
        raise TemplateRefused(
            f"{where}: the model's chat template refuses it ({reason})"
        ) from error
    if not isinstance(text, str):
        raise UserError(f"{where}: the model's chat template gives {type(text).__name__}, no text")
    if most_characters is not None and len(text) > most_characters:
        raise UserError(
            f"{where}: the model's chat template makes {len(text):,} characters of the row; "
            f"{most_characters:,} are the most (--max-row-bytes)"
        )
    return text


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after so long. Only the main thread is interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    running = True

    def interrupt(*_: object) -> None:
        if running:
            raise TooSlow

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, interrupt)
    others, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        running = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if others:  # somebody else's timer goes on
            left = others - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))


@contextlib.contextmanager
def limited_memory(room_bytes: int) -> Iterator[None]:
    """Let allocations of the block fail, as MemoryError, beyond so many bytes. Linux alone."""
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = address_space() + room_bytes
    if soft != resource.RLIM_INFINITY and soft <= most:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def address_space() -> int:
    """The bytes that this process has mapped."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[0]) * PAGE_BYTES
    finally:
        os.close(file)
