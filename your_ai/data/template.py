"""Render a chat with the model's chat template, in bounded time and memory.

A template is a program in the model's files, which are not trusted. transformers runs it in
Jinja's sandbox: no access to Python internals, no files, no `range` beyond 100,000. The sandbox
does not limit nested loops or the size of the text. This module does.
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

SECONDS = 3.0  # maximum time for one rendering
TEMPLATE_CHARACTERS = 1_000_000  # maximum size of the template; long ones have 20,000
# Address space that a rendering may always use. Less ends the process: other threads reserve some
# meanwhile, an arena of the C library 64 MB.
LEAST_BYTES = 1 << 30
PAGE_BYTES = resource.getpagesize()


class TooSlow(BaseException):
    """A rendering takes too long. Not an Exception, because Jinja's compiler would catch it."""


class TemplateRefused(UserError):
    """The template raised an error."""


def render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    where: str,
    room_bytes: int,
    most_characters: int | None = None,
    **options: Any,
) -> str:
    """Render messages with the tokenizer's chat template.

    room_bytes: the maximum memory that the rendering may use.
    most_characters: the maximum length of the text.
    options: passed to the template.
    Raises TemplateRefused or another UserError, whose message begins with `where`.
    """
    text = applied(tokenizer, messages, where, room_bytes, **options)
    if not isinstance(text, str):
        raise UserError(f"{where}: the model's chat template gave {type(text).__name__}, not text")
    if most_characters is not None and len(text) > most_characters:
        raise UserError(
            f"{where}: the model's chat template renders {len(text):,} characters; the maximum is "
            f"{most_characters:,}; raise --max-row-bytes"
        )
    return text


def render_all(
    tokenizer: Any, chats: list[list[dict[str, Any]]], room_bytes: int, **options: Any
) -> list[str] | None:
    """Render many chats at once, within the limits of one, in half the time.

    None if that is not possible; rendering each alone says why, or succeeds.
    """
    try:
        texts = applied(tokenizer, chats, "", room_bytes, **options)
    except UserError:
        return None
    # A template that is a function of mlx-lm takes one chat, so it may give anything.
    is_text = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
    return texts if is_text and len(texts) == len(chats) else None


def applied(
    tokenizer: Any, messages: list[Any], where: str, room_bytes: int, **options: Any
) -> Any:
    """Apply the chat template to messages, in bounded time and memory."""
    template = str(options.get("chat_template", tokenizer.chat_template))
    if len(template) > TEMPLATE_CHARACTERS:
        raise UserError(
            f"{where}: the model's chat template has {len(template):,} characters; the maximum is "
            f"{TEMPLATE_CHARACTERS:,}"
        )
    room_bytes = max(room_bytes, LEAST_BYTES)
    try:
        with limited_time(SECONDS), limited_memory(room_bytes):
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)
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
    except Exception as error:  # templates may raise anything
        reason = shortened(" ".join(str(error).split()) or type(error).__name__)
        raise TemplateRefused(
            f"{where}: the model's chat template rejects the messages ({reason})"
        ) from error


@contextlib.contextmanager
def limited_time(seconds: float) -> Iterator[None]:
    """Raise TooSlow in the block after this time. Works only in the main thread."""
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
        if others:  # restart the timer that was running before
            left = others - (time.monotonic() - began)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3))


@contextlib.contextmanager
def limited_memory(room_bytes: int) -> Iterator[None]:
    """Raise MemoryError if the block allocates more than `room_bytes`. Works only on Linux."""
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
    """The size of this process's address space, in bytes."""
    file = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(file, 128).split()[0]) * PAGE_BYTES
    finally:
        os.close(file)
