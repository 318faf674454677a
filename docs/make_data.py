"""Write the tables of formats and names in docs/data.md from the code: python docs/make_data.py"""

from __future__ import annotations

from pathlib import Path

from your_ai.data.columns import NAMES
from your_ai.data.lines import ROLE_NAMES
from your_ai.data.preferences import LABEL_KEYS, MARGIN, PAIR_KEYS, QUESTIONS, SCORE
from your_ai.data.rows import FORMATS
from your_ai.data.turns import (
    ASSISTANT,
    CALL_ROLES,
    CONTENT_NAMES,
    MASKED_FLAGS,
    MEANINGS,
    REASONING,
    ROLES,
    SYSTEM,
    TOOL,
    TRAINED_FLAGS,
    USER,
)

BEGIN, END = "<!-- from docs/make_data.py -->", "<!-- end -->"
PAGE = Path(__file__).parent / "data.md"


def listed(names: object) -> str:
    return ", ".join(f"`{name}`" for name in names)  # type: ignore[attr-defined]


def joined(keys: tuple[str, ...]) -> str:
    return " + ".join(f"`{key}`" for key in keys)


def called(role: str) -> str:
    found = [name for names in (ROLES, MEANINGS) for name, meant in names.items() if meant == role]
    return listed([role, *(name for name in found if name != role)])


def tables() -> str:
    rows = [
        *((joined(keys), "an answer, or a text") for keys in FORMATS),
        *(
            (joined(keys), "a pair, for `dpo` and others, and for reward models")
            for keys in PAIR_KEYS
        ),
        *((joined(keys), "an answer that is good or bad, for `kto`") for keys in LABEL_KEYS),
        (f"an answer + `{SCORE}`; a pair + `{MARGIN}`", "for reward models"),
        ("`prompt`, or any of the above", "for `grpo` and `soft`; rewards get all columns"),
    ]
    names = [
        (
            "the system prompt",
            f"`system` beside any of these; messages of the role {called(SYSTEM)}",
        ),
        ("the person", f"messages of the role {called(USER)}"),
        ("the model", f"messages of the role {called(ASSISTANT)}"),
        (
            "a message",
            f"{listed(ROLE_NAMES)} with {listed(CONTENT_NAMES)}; a text for each role, as in "
            '`{"user": "..", "assistant": ".."}`; or texts alone, of which a person has the first',
        ),
        (
            "a call of a tool",
            f"`tool_calls`, `function_call`; messages of the role {listed(CALL_ROLES)}; an answer "
            "that is a call of the row's `tools` as JSON",
        ),
        ("the result of a tool", f"messages of the role {called(TOOL)}"),
        ("the tools", "`tools`, `functions` of a row"),
        ("reasoning", f"{listed(REASONING)} of a message; `<think>` in its content"),
        ("earlier turns", "`history` of a row"),
        ("the question of a pair", f"`prompt`, `instruction` (and `input`), {listed(QUESTIONS)}"),
        ("not trained", f"`weight` 0, {listed(TRAINED_FLAGS)} false, {listed(MASKED_FLAGS)} true"),
    ]
    guessed = [(f"`{role}`", ", ".join(known)) for role, known in NAMES.items()]
    return "\n".join(
        [
            *table("a row has", "it is", rows), "", *table("what", "its names", names), "",
            "A role in other capitals is the same. Other columns are guessed by their names:", "",
            *table("it is", "if it is called", guessed),
        ]
    )  # fmt: skip


def table(first: str, second: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {first} | {second} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
