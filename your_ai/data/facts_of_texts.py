"""Numbers and names in texts, and whether another text has them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

WORD = re.compile(r"[^\W_]+")
# A number may have separators of thousands; a word signs inside, as GPT-4 and O'Neill have.
NUMBER = r"\d{1,3}(?:[,\u00a0\u202f ']\d{3})+(?:\.\d+)?(?!\d)|\d+(?:[.,]\d+)*"
TOKEN = re.compile(
    rf"(?P<number>(?<![^\W\d_]){NUMBER})|(?P<word>[^\W_]+(?:[-'’.&][^\W_]+)*)|(?P<end>[.!?:\n\"“(])"
)
LIST_MARK = re.compile(r"^\s*(?:[-*•]|\(?\d{1,3}[.)])\s+", re.MULTILINE)
WORDS_OF_NUMBERS = {
    word: str(number)
    for number, word in enumerate(
        "zero one two three four five six seven eight nine ten eleven twelve".split()
    )
}
ENDINGS = 2  # letters that a name may have more or fewer, as in a plural or a genitive


def normalized(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def as_number(text: str) -> str:
    """A number without separators of thousands and outer zeros: `1,200.50` is `1200.5`."""
    text = re.sub(r"[\u00a0\u202f ']|,(?=\d{3}(?!\d))", "", text).replace(",", ".")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.lstrip("0") or "0"


def facts_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield (`number` or `name`, as it is written) of the numbers and names of a text."""
    text = unicodedata.normalize("NFKC", LIST_MARK.sub("", text))
    begins = True  # a sentence, whose first word has a capital letter
    for found in TOKEN.finditer(text):
        if found["end"]:
            begins = True
            continue
        if found["number"]:
            yield "number", found["number"]
        elif is_name(found["word"], begins):
            yield "name", found["word"]
        begins = False


def is_name(word: str, begins: bool) -> bool:
    """Return whether a word is a name. begins: it is the first of a sentence."""
    if len(word) < 2 or not word[0].isalpha():
        return any(c.isalpha() for c in word) and any(c.isdecimal() for c in word)
    capitals = sum(c.isupper() for c in word)
    return any(c.isdecimal() for c in word) or capitals >= (2 if begins else 1)


def numbers_and_names(text: str) -> set[str]:
    return {as_number(t) if kind == "number" else normalized(t) for kind, t in facts_in(text)}


def missing_facts(text: str, source: str) -> list[tuple[str, str]]:
    """The numbers and names of a text that do not stand in another: (`number` or `name`, text)."""
    plain = unicodedata.normalize("NFKC", source)
    words = set(WORD.findall(plain.casefold()))
    numbers = {as_number(found[0]) for found in re.finditer(NUMBER, plain)}
    numbers |= {WORDS_OF_NUMBERS[word] for word in words & WORDS_OF_NUMBERS.keys()}
    return [
        (kind, fact)
        for kind, fact in facts_in(text)
        if (
            as_number(fact) not in numbers
            if kind == "number"
            else not all(stands_in(word, words) for word in WORD.findall(fact.casefold()))
        )
    ]


def stands_in(word: str, words: set[str]) -> bool:
    """Return whether a word is among others, also with another ending."""
    if word in words or len(word) == 1:
        return True
    if word.isdecimal() or len(word) < 4:
        return False
    shorter = {word[: len(word) - cut] for cut in range(1, ENDINGS + 1) if len(word) - cut > 2}
    return bool(shorter & words) or any(
        other.startswith(word) and len(other) - len(word) <= ENDINGS for other in words
    )
