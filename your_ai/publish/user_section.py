"""The section of a card that belongs to the user, between two marks. Pure.

Pushes keep this section and replace the rest. A checksum of the rest shows if it was edited.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

BEGIN = "<!-- yours: a push keeps what you write between this mark and the next -->"
END = "<!-- end of yours -->"
YOURS = re.compile(f"{re.escape(BEGIN)}(.*){re.escape(END)}", re.DOTALL)
SEAL = re.compile(r"<!-- made by your_ai ([0-9a-f]{16}); [^\n]*-->")
FRONT = re.compile(r"\A\s*---\n(.*?)\n---[ \t]*(?:\n|\Z)", re.DOTALL)  # as on the hub


def merged(old: str, new: str) -> tuple[str, str]:
    """The new card with the user's section of the old one, and a note for the user.

    The note is empty if nothing of the user's is lost. A card without such a section is the
    user's own and stays unchanged.
    """
    front, body = split(old.replace("\r\n", "\n"))
    own = YOURS.search(body)
    if own is None or front is None:
        return (
            old,
            "README.md was not made by your_ai and stays; delete it there to get a model card",
        )
    fresh, rest = split(new)
    assert fresh is not None
    tags = [
        *fresh.get("tags", []),
        *(tag for tag in listed(front.get("tags")) if isinstance(tag, str)),
    ]
    data = {**front, **fresh, "tags": list(dict.fromkeys(tags))}
    text = front_matter(data) + YOURS.sub(lambda _: own[0], rest)
    seal = SEAL.search(body)
    if seal is None or seal[1] != checksum(body):
        return text, "edits of README.md outside of the marked section were replaced"
    return text, ""


def split(text: str) -> tuple[dict[str, Any] | None, str]:
    """The front matter of a card and its body; None if the front matter cannot be read."""
    found = FRONT.match(text)
    if found is None:
        return {}, text
    try:
        data = yaml.safe_load(found[1])
    except (yaml.YAMLError, RecursionError, ValueError):
        return None, text
    return (data or {}) if isinstance(data, dict | None) else None, text[found.end() :].lstrip("\n")


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value else []


def sealed(body: str) -> str:
    """The body with a checksum of everything outside of the user's section."""
    kept = "a push replaces everything outside of your section"
    seal = f"<!-- made by your_ai {checksum(body)}; {kept} -->"
    return f"{seal}\n\n{body}"


def checksum(body: str) -> str:
    """A checksum of everything outside of the user's section, without spaces at line ends."""
    text = YOURS.sub("", SEAL.sub("", body))
    lines = [line.rstrip() for line in text.strip().splitlines()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def front_matter(data: Mapping[str, Any]) -> str:
    text = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True)
    return f"---\n{text}---\n\n"
