"""Which columns of unknown names are probably meant, for messages and questions. A guess only."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from your_ai.config import joined_parts
from your_ai.data.lines import ROLE_NAMES
from your_ai.errors import UserError
from your_ai.gates.text import shortened

PAIR = ("prompt", "chosen", "rejected")
# The roles that rows need, by their kind. Of two ways, `roles_of` chooses one.
ROLES_OF = {
    "answers": ("prompt", "completion"),
    "pairs": PAIR,
    "labels": ("prompt", "completion", "label"),
    "prompts": ("prompt",),
    "tasks": ("prompt",),
    "rated": ("prompt", "completion", "score"),
}
# Parts of the names that columns of a role often have. The first role that fits a column wins.
WORDS = {
    "rejected": (
        *("reject", "bad", "worse", "worst", "loser", "negativ", "non_pref", "dispref"),
        *("schlecht", "falsch", "mauvais", "malo", "mala", "peor"),
    ),
    "chosen": (
        *("chosen", "good", "better", "best", "winner", "positiv", "prefer", "accept"),
        *("gut", "besser", "richtig", "bonne", "meilleur", "buen", "mejor"),
    ),
    "label": ("label", "liked", "thumb", "is_", "ok", "correct", "rating", "helpful"),
    "score": ("score", "rating", "stars", "points", "grade"),
    "completion": (
        *("completion", "answer", "response", "output", "repl", "solution", "target"),
        *("antwort", "réponse", "reponse", "respuesta"),
    ),
    "prompt": (
        *("prompt", "question", "ask", "instruction", "query", "input", "request"),
        *("frage", "pregunta"),
    ),
}
ANSWERS_OF_PAIR = ("chosen", "rejected")
# Columns that are about a row, and not in it, by their plain names.
ABOUT_ROWS = (
    *("id", "source", "url", "lang", "language", "category", "type", "topic", "split", "model"),
    *("date", "title", "license", "author", "dataset", "task", "tag", "tags"),
)
OWN_MEANING = ("system", "tools", "functions")  # columns that need no role
TRUTHS = ("true", "false", "yes", "no", "0", "1", "-1", "good", "bad")
MISSING = "COLUMN"
SPECIAL = " \"'"  # to a shell
MEANINGS = {
    "messages": "the conversation",
    "prompt": "the question",
    "completion": "the answer",
    "chosen": "the good answer",
    "rejected": "the bad answer",
    "label": "true for a good answer and false for a bad one",
    "score": "the score of the answer",
}


class UnknownColumns(UserError):
    """The columns of a row do not tell what they are."""

    def __init__(self, message: str, where: str, record: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.where, self.record = where, record


def opened(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the parts of objects as columns, such as `translation.en`, and also the first
    of a list of texts, such as `answers.text.0`."""
    columns: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict) and value:
            columns |= {f"{name}.{part}": inner for part, inner in opened(value).items()}
        elif isinstance(value, list) and value and all(isinstance(each, str) for each in value):
            columns |= {f"{name}.0": value[0], name: value}
        else:
            columns[name] = value
    return columns


def likely_columns(kind: str, record: Mapping[str, Any]) -> dict[str, str]:
    """Role -> the column that probably has it, for the roles that rows of this kind need.

    kind: a value of `TrainConfig.row_kind`. By the words in the names, and else by what is in the
    columns: the longest texts, in their order. Roles for which no column is left are not in it.
    """
    roles = roles_of(kind, record)
    names = {name: plain(name) for name in record if plain(name) not in OWN_MEANING}
    if "rejected" not in roles:  # an answer that is called bad is not one to imitate
        bad = [name for name in names if says(names[name], WORDS["rejected"])]
        names = {n: word for n, word in names.items() if len(names) == len(bad) or n not in bad}
    found: dict[str, str] = {}
    for role in (role for role in WORDS if role in roles):
        left = {name: word for name, word in names.items() if name not in found.values()}
        if column := column_named(role, record, left):
            found[role] = column
    for role in roles:
        if role not in found and (column := longest_left(role, roles, record, names, found)):
            found[role] = column
    return {role: found[role] for role in roles if role in found}


def column_named(role: str, record: Mapping[str, Any], names: Mapping[str, str]) -> str | None:
    """The first column whose name tells that it has this role, or None. names: column -> plain."""
    fits = [name for name in names if fits_role(role, record[name])]
    named = [name for name in fits if names[name] == role]
    named += [name for name in fits if says(names[name], WORDS[role])]
    return named[0] if named else None


def says(name: str, words: Collection[str]) -> bool:
    return any(word in name for word in words)


def longest_left(
    role: str,
    roles: Collection[str],
    record: Mapping[str, Any],
    names: Mapping[str, str],
    found: Mapping[str, str],
) -> str | None:
    """The column for a role that no name tells, or None.

    Of the columns without a role, as many as there are roles of texts left are taken, the longest
    ones; the first of these is the one. Which of two answers is better, only a name can tell.
    """
    if role in ANSWERS_OF_PAIR:
        return None
    left = [name for name in names if name not in found.values()]
    fits = [n for n in left if fits_role(role, record[n]) and not is_about(names[n], role)]
    wanted = sum(fits_role(each, "text") for each in roles if each not in found)
    longest = sorted(fits, key=lambda name: -len(str(record[name])))[: max(wanted, 1)]
    if not longest and role == "completion":  # an answer may be a number
        longest = [name for name in left if is_number(record[name])][-1:]
    return min(longest, key=list(names).index) if longest else None


def is_about(name: str, role: str) -> bool:
    """Return whether a column does not have this role by its plain name: it is about the row, such
    as its source, or, for a prompt, says which of two answers it is."""
    others = (words for other, words in WORDS.items() if other in ANSWERS_OF_PAIR)
    is_answer = role == "prompt" and any(says(name, words) for words in others)
    return name in ABOUT_ROWS or name.endswith("_id") or is_answer


def roles_of(kind: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    """The roles that a record of this kind probably has."""
    if kind in ("answers", "prompts", "tasks"):
        lists = [value for value in record.values() if fits_role("messages", value)]
        texts = [name for name in record if fits_role("prompt", record[name])]
        texts = [name for name in texts if not is_about(plain(name), "prompt")]
        if any(not isinstance(value[0], str) for value in lists) or (lists and not texts):
            return ("messages",)  # a list of texts is a dialogue if there is no other
    may_be_scored = kind == "rated" and any(map(is_number, record.values()))
    if kind in ("labels", "rated") and names_pair(record):
        return PAIR
    return PAIR if kind == "rated" and not may_be_scored else ROLES_OF[kind]


def names_pair(record: Mapping[str, Any]) -> bool:
    """Return whether the names of the columns tell of a bad answer beside a good one."""
    bad = [name for name in record if any(word in plain(name) for word in WORDS["rejected"])]
    return bool(bad) and isinstance(record[bad[0]], str | list) and len(record) > 1


def plain(name: str) -> str:
    return name.strip().lower().replace(" ", "_")


def fits_role(role: str, value: Any) -> bool:
    """Return whether a value may be that of a column with this role."""
    if role == "label":
        return isinstance(value, bool) or str(value).strip().lower() in TRUTHS
    if role == "score":
        return is_number(value)
    if isinstance(value, list):
        if role == "messages" and len(value) > 1 and all(isinstance(t, str) for t in value):
            return len(value[0].split()) > 1  # the texts of a dialogue, not words
        turns = (turn for turn in value if isinstance(turn, dict))
        keys = {key for turn in turns for key in turn}
        return bool(keys & {*ROLE_NAMES}) or (role == "completion" and "name" in keys)  # calls
    return role != "messages" and isinstance(value, str) and not is_number(value)


def is_number(value: Any) -> bool:
    if isinstance(value, str):
        try:
            float(value)
        except ValueError:
            return False
        return True
    return isinstance(value, int | float) and not isinstance(value, bool)


def columns_option(kind: str, record: Mapping[str, Any], answer_only: bool = False) -> str:
    """`--columns prompt=asked,completion=replied`, with the columns of the record.

    answer_only: the prompt is made by --prompt-template.
    """
    if roles_of(kind, record) != ("messages",):
        record = opened(record)
    likely, roles = likely_columns(kind, record), roles_of(kind, record)
    wanted = [role for role in roles if not (answer_only and role == "prompt")] or roles
    text = joined_parts(f"{role}={shortened(likely.get(role, MISSING), 60)}" for role in wanted)
    return f"--columns {shlex.quote(text) if set(text) & set(SPECIAL) else text}"


def roles_in_words(kind: str) -> str:
    """The roles that --columns may name for rows of this kind: `prompt and completion, or ...`."""
    ways = {
        "answers": "prompt and completion, or text, or messages",
        "pairs": "prompt, chosen and rejected, or chosen and rejected",
        "labels": "prompt, completion and label, or prompt, chosen and rejected",
        "prompts": "prompt, or prompt and completion, or messages",
        "tasks": "prompt, or prompt and completion, or messages",
        "rated": "prompt, chosen and rejected, or prompt, completion and score, or messages and "
        "score",
    }
    return ways[kind]
