"""Text from outside in messages: of bounded length, and nothing in it that steers a terminal."""

from __future__ import annotations

VALUE_CHARACTERS = 200  # of a value from outside in a message
WORD_CHARACTERS = 400  # of a run of characters without a space; a path is one
LINE_CHARACTERS = 2000  # of a message

UNSAFE = (
    *range(0x20),  # C0, with ESC and BEL
    *range(0x7F, 0xA0),  # DEL and C1, which holds the 8-bit forms of escape sequences
    *range(0x202A, 0x202F),  # characters that show a text in another order than it has
    *range(0x2066, 0x206A),
    *range(0xD800, 0xE000),  # halves of characters; bytes of file names that are no UTF-8
)
SEEN: dict[int, str | None] = {
    **dict.fromkeys(UNSAFE, "\ufffd"),
    **{code: chr(0x2400 + code) for code in range(0x20)},  # Unicode's pictures of them
    0x7F: "\u2421",
    ord("\r"): None,
    ord("\n"): "\n",
    ord("\t"): "\t",
}
IN_ONE_LINE = {**SEEN, ord("\r"): "\u240d", ord("\n"): "\u240a", ord("\t"): "\u2409"}


def printable(text: object, *, one_line: bool = False) -> str:
    """A text with pictures in place of what would steer a terminal.

    Line ends and tabs stay, unless it must be `one_line`.
    """
    text = str(text)
    if text.isascii() and text.isprintable():
        return text
    return text.translate(IN_ONE_LINE if one_line else SEEN)


def shortened(text: object, most: int = VALUE_CHARACTERS) -> str:
    """At most `most` characters of a text: its begin and its end."""
    text = str(text)
    if len(text) <= most:
        return text
    end = (most - 1) // 3
    return f"{text[: most - 1 - end]}\u2026{text[len(text) - end :]}"


def shown(value: object, most: int = VALUE_CHARACTERS) -> str:
    """A value from outside as one line of bounded length; a list or a mapping by its kind."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 4 * most:
        return "a huge number"
    if value is None or isinstance(value, str | bool | int | float):
        return printable(shortened(value, most), one_line=True)
    return f"a {type(value).__name__}"


def quoted(value: object, most: int = VALUE_CHARACTERS) -> str:
    """A value from outside as Python writes it, in one line of bounded length."""
    try:
        return printable(shortened(repr(value), most), one_line=True)
    except (ValueError, RecursionError):  # an int of more digits than Python writes
        return f"{type(value).__name__} of a size that cannot be shown"


def message_line(text: object) -> str:
    """A message as one line of bounded length; long values in it lose their middle."""
    text = shortened(text, 100 * LINE_CHARACTERS)  # so that what follows is quick
    words = (shortened(word, WORD_CHARACTERS) for word in text.split())
    return shortened(printable(" ".join(words), one_line=True), LINE_CHARACTERS)
