"""Make untrusted text safe for messages: bounded length, no terminal control characters."""

from __future__ import annotations

import difflib
import math
import time
from collections.abc import Callable, Iterable

VALUE_CHARACTERS = 200  # maximum length of an untrusted value in a message
WORD_CHARACTERS = 400  # maximum length without a space, such as a path
LINE_CHARACTERS = 2000  # maximum length of a message
NEAR = 0.5  # least similarity of a known name to what was given, from 0 to 1
PROGRESS_EVERY_S = 5.0  # between two texts that say how far something is

UNSAFE = (
    *range(0x20),  # C0, with ESC and BEL
    *range(0x7F, 0xA0),  # DEL and C1, which has the 8-bit forms of escape sequences
    *range(0x202A, 0x202F),  # characters that change the direction of text
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # surrogates; also bytes of file names that are not UTF-8
)
SEEN: dict[int, str | None] = {
    **dict.fromkeys(UNSAFE, "\ufffd"),
    **{code: chr(0x2400 + code) for code in range(0x20)},  # Unicode control pictures
    0x7F: "\u2421",
    ord("\r"): None,
    ord("\n"): "\n",
    ord("\t"): "\t",
}
IN_ONE_LINE = {**SEEN, ord("\r"): "\u240d", ord("\n"): "\u240a", ord("\t"): "\u2409"}


def printable(text: object, *, one_line: bool = False) -> str:
    """Replace terminal control characters by Unicode control pictures.

    Newlines and tabs stay, unless `one_line` is set.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return text.translate(IN_ONE_LINE if one_line else SEEN)


def shortened(text: object, most: int = VALUE_CHARACTERS) -> str:
    """Shorten a text to at most `most` characters: its beginning and its end."""
    text = str(text)
    if len(text) <= most:
        return text
    end = (most - 1) // 3
    return f"{text[: most - 1 - end]}\u2026{text[len(text) - end :]}"


def shown(value: object, most: int = VALUE_CHARACTERS) -> str:
    """Format an untrusted value as one short line. Shows only the type of a list or mapping."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * most:
        return "a huge number"
    if value is None or isinstance(value, str | bool | int | float):
        return printable(shortened(value, most), one_line=True)
    return f"a {type(value).__name__}"


def quoted(value: object, most: int = VALUE_CHARACTERS) -> str:
    """Format the repr of an untrusted value as one short line."""
    try:
        return printable(shortened(repr(value), most), one_line=True)
    except Exception:  # an int with more digits than Python converts, or a class of the user
        return f"{type(value).__name__} that cannot be shown"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Format a count and its noun: `1 row`, `2,000 rows`. plural: default: the noun with an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def size_text(size_bytes: float, decimals: int = 2) -> str:
    """Format bytes as `4.73 GB`, `412 MB`, `2.1 MB` or `30 kB`: powers of ten, as MLX and macOS do.

    decimals: of a size in GB.
    """
    size = abs(size_bytes)
    if size >= 999.5e6:
        return f"{size_bytes / 1e9:.{decimals}f} GB"
    if size >= 999.5e3 or size < 0.5e3:
        return f"{size_bytes / 1e6:.{0 if size >= 99.95e6 or size < 0.5e3 else 1}f} MB"
    return f"{size_bytes / 1e3:.0f} kB"


def model_name(model: str) -> str:
    """A model as users call it: the last part of an absolute path, or the name as it is."""
    return (model.rstrip("/").rpartition("/")[2] or model) if model.startswith("/") else model


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the closest known name, or an empty string."""
    close = closest(name, known, NEAR)
    return f"; did you mean {close}?" if close else ""


def closest(name: str, known: Iterable[str], likeness: float) -> str:
    """The known name that is most similar, or an empty string. likeness: the least, 0 to 1."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return found[0] if found else ""


def loss_text(loss: float | None, decimals: int = 4) -> str:
    """Format a loss or perplexity: `decimals` from 0.1 up, or else three significant digits.

    `1.2500`, `0.0412`, `0.000400`, `35945`; `?` for None. Only values below 1e-6, and from 1e6
    on, have an exponent.
    """
    if loss is None:
        return "?"
    size = abs(loss)
    if size == 0 or 0.1 <= size < 1e4:
        return f"{loss:.{decimals}f}"
    if 1e-6 <= size < 0.1:
        return f"{loss:.{2 - math.floor(math.log10(size))}f}"
    return f"{loss:.0f}" if 1e4 <= size < 1e6 else f"{loss:.3g}"


def message_line(text: object) -> str:
    """Format a message as one line of bounded length. Long values in it lose their middle."""
    text = shortened(text, 100 * LINE_CHARACTERS)  # bounds the time of the next lines
    words = (shortened(word, WORD_CHARACTERS) for word in text.split())
    return shortened(printable(" ".join(words), one_line=True), LINE_CHARACTERS)


BRACKETS = {"(": ")", "[": "]", "{": "}"}


def split_outside_brackets(text: str) -> list[str]:
    r"""Split a list at its commas: `exact_match=1,regex:[a,b]{1,2}=0.5` has two parts.

    A comma inside (), [] or {} does not split, nor one after a backslash, which is removed: `\,`.
    A bracket without its partner is an ordinary character.
    """
    parts, part, closers, at = [], "", list[str](), 0
    while at < len(text):
        mark = text[at]
        if mark == "\\" and at + 1 < len(text):
            part += text[at + 1] if text[at + 1] == "," else text[at : at + 2]
            at += 2
            continue
        if mark == "," and not closers:
            parts.append(part.strip())
            part = ""
        else:
            if closers and mark == closers[-1]:
                closers.pop()
            elif mark in BRACKETS and closers[-1:] != ["]"] and closes(text, at):
                closers.append(BRACKETS[mark])
            part += mark
        at += 1
    return [*parts, part.strip()]


def closes(text: str, start: int) -> bool:
    """Return whether the bracket at `start` has a partner. In [], other brackets do not count."""
    expected, at = [BRACKETS[text[start]]], start + 1
    while at < len(text):
        mark = text[at]
        if mark == "\\":
            at += 1
        elif mark == expected[-1]:
            expected.pop()
            if not expected:
                return True
        elif mark in BRACKETS and expected[-1] != "]":
            expected.append(BRACKETS[mark])
        at += 1
    return False


def share_text(done: int, total: int, width: int = 20) -> str:
    """The share that is done, as a bar and as a number: `[#####...............] 25%`."""
    share = min(1.0, done / total) if total else 0.0
    full = int(share * width)
    return f"[{'#' * full}{'.' * (width - full)}] {int(100 * share)}%"


def now_and_then(
    write: Callable[[str], object], text_of: Callable[..., str]
) -> Callable[..., None]:
    """A function that writes the text of its arguments, unless it did so a few seconds ago."""
    written_at = time.monotonic()

    def report(*arguments: object) -> None:
        nonlocal written_at
        if time.monotonic() - written_at > PROGRESS_EVERY_S:
            write(text_of(*arguments))
            written_at = time.monotonic()

    return report
