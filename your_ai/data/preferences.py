"""Rows of preferences: a prompt with a chosen and a rejected answer, or an answer with a label.

The formats are TRL's. Both answers of a pair have the same prompt. In lists of messages without a
prompt, and in texts without one, it is what both have in common at their beginning.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from your_ai.data.column_hints import columns_option, likely_columns
from your_ai.data.lines import Fields, fields_of, text_field
from your_ai.data.prompts import parse_prompts, parse_task
from your_ai.data.rows import (
    FORMATS,
    Chat,
    Labeled,
    Pair,
    ParseRow,
    Preference,
    Row,
    Scored,
    Text,
    alpaca_prompt,
    as_chat,
    parse_history,
    parse_row,
    parse_weight,
)
from your_ai.data.turns import (
    ASSISTANT,
    is_transcript,
    parse_tools,
    parse_turns,
    turns_of_transcript,
    with_system,
)
from your_ai.errors import UserError
from your_ai.gates.text import quoted, shortened

# What the rows are: for an objective; or, to measure a model, pairs of which only the chosen
# answers are used, or rows in any of these forms.
Kind = Literal["answers", "pairs", "labels", "rated", "prompts", "tasks", "chosen", "any"]
PAIR_KEYS = (("chosen", "rejected"), ("preferred_output", "non_preferred_output"))
# Columns that may have the question of two texts, the most telling first.
QUESTIONS = ("messages", "conversations", "history", "context", "input")
LABEL_KEYS = (("prompt", "completion", "label"), ("messages", "label"))
OBJECTIVES = {"answers": "sft", "pairs": "dpo", "labels": "kto"}  # one that trains such rows
SCORE, MARGIN = "score", "margin"  # columns of the rows of a reward model
MOST_RATING = 1e6
# Labels as text; tables have numbers, with a decimal point where a row has none.
LABELS = dict.fromkeys(("true", "1", "1.0"), True) | dict.fromkeys(("false", "0", "0.0"), False)
MOST_WAITING = 256  # rows at the beginning of a file that may wait for another prompt


def parser_of(kind: Kind) -> ParseRow:
    """The function that parses rows of one kind."""
    return {
        "answers": parse_answers,
        "pairs": parse_pairs,
        "labels": parse_labels,
        "rated": parse_rated,
        "chosen": parse_chosen,
        "prompts": parse_prompts,
        "tasks": parse_task,
        "any": parse_any,
    }[kind]


def kind_of(row: Mapping[str, Any]) -> Kind | None:
    """The kind of a row, by its keys; None if it has no known format."""
    if any(all(key in row for key in keys) for keys in PAIR_KEYS):
        return "pairs"
    if any(all(key in row for key in keys) for keys in LABEL_KEYS):
        return "labels"
    return "answers" if any(all(key in row for key in keys) for keys in FORMATS) else None


def parse_answers(row: dict[str, Any], where: str) -> Row:
    """Rows of supervised fine-tuning. Refused are rows that are only a pair of answers, and answers
    that may be bad.
    """
    known = any(all(key in row for key in keys) for keys in FORMATS)
    kind = kind_of(row)
    if not known and kind == "pairs":
        raise refused(where, "an answer", "a chosen and a rejected answer", "pairs")
    label = dict.get(row, "label")
    says_bad = label is False and kind == "answers" and "text" not in row
    if says_bad or (kind == "labels" and label_of(row) is not None):
        raise UserError(
            f"{where}: has a label, which says whether the answer is good; train such rows with "
            "--objective kto, or remove label to imitate all of them"
        )
    return parse_row(row, where)


def parse_pairs(row: dict[str, Any], where: str, alone: bool = False) -> Row:
    """`chosen` and `rejected`: texts, or lists of messages; with or without `prompt`.

    alone: as in `preference_of`.
    """
    kind = kind_of(row)
    if kind != "pairs":
        if kind is None:
            keys = shortened(", ".join(row)) or "none"
            raise UserError(
                f"{where}: unknown row format; keys found: {keys}; expected chosen + rejected, or "
                "prompt + chosen + rejected"
            )
        text = "a label" if kind == "labels" else "one answer"
        raise refused(where, "chosen + rejected", text, kind)
    content = preference_of(row, where, alone)
    if content.chosen == content.rejected:
        raise UserError(f"{where}: chosen equals rejected: nothing is preferred")
    return Row(where, content, parse_weight(row, where))


def parse_chosen(row: dict[str, Any], where: str) -> Row:
    """Rows with answers; of a pair, the chosen one."""
    if kind_of(row) != "pairs":
        return parse_answers(row, where)
    return Row(where, preference_of(row, where).chosen, parse_weight(row, where))


def parse_any(row: dict[str, Any], where: str) -> Row:
    """Rows of pairs, of answers with a label, and of answers without one."""
    kind = kind_of(row)
    if kind is None:
        keys = shortened(", ".join(row)) or "none"
        if "prompt" in row and not any(key in row for key in PAIR_KEYS[0]):
            raise UserError(
                f"{where}: has a prompt and no answer to measure; keys found: {keys}; add the "
                "answer as completion, or give other rows with --data"
            )
        raise UserError(
            f"{where}: unknown row format; keys found: {keys}; expected a prompt with chosen + "
            "rejected, with completion + label, or with an answer"
        )
    return parser_of(kind)(row, where)


def parse_labels(row: dict[str, Any], where: str) -> Row:
    """An answer with a `label`: true for good, false for bad."""
    kind = kind_of(row)
    if kind != "labels":
        if "label" in row and kind != "pairs":
            raise without_answer(row, where)
        if kind is None or "completion" in row or "messages" in row:
            hint = f"; say which column it is with {columns_option('labels', row)}"
            has_it = "label" in likely_columns("labels", row)
            raise UserError(
                f"{where}: label is missing: true for a good answer, false for a bad one"
                f"{hint if has_it else ''}"
            )
        text = "a chosen and a rejected answer" if kind == "pairs" else "no label"
        raise refused(where, "prompt + completion + label", text, kind)
    good = label_of(row)
    if good is None:
        raise UserError(f"{where}: label: expected true or false, found {quoted(row['label'])}")
    row["label"]
    parsed = parse_row(answer_without(row, ("label",)), where)
    if not isinstance(parsed.content, Chat | Pair):
        raise UserError(f"{where}: a label needs a prompt and an answer")
    return Row(where, Labeled(judged(parsed.content, where), good), parsed.weight)


def parse_rated(row: dict[str, Any], where: str) -> Row:
    """Rows of a reward model: pairs, maybe with a `margin`; or an answer with a `score`."""
    kind, score = kind_of(row), rating_of(row, SCORE, where)
    if kind == "pairs":
        found = parse_pairs(row, where, alone=True)
        assert isinstance(found.content, Preference)
        margin = rating_of(row, MARGIN, where) or 0.0
        if margin < 0:
            raise UserError(f"{where}: margin {margin:g}: must be at least 0; swap the answers")
        return replace(found, content=replace(found.content, margin=margin))
    if score is None:
        keys = shortened(", ".join(row)) or "none"
        raise UserError(
            f"{where}: expected chosen + rejected, or prompt + completion + score; keys found: "
            f"{keys}"
        )
    rest = answer_without(row, ("label",))
    parsed = parse_row(rest, where)
    if not isinstance(parsed.content, Chat | Pair):
        raise UserError(f"{where}: a score needs a prompt and an answer")
    return Row(where, Scored(judged(parsed.content, where), score), parsed.weight)


def parse_to_score(row: dict[str, Any], where: str) -> Row:
    """Rows that a reward model scores: pairs, or rows with an answer."""
    if kind_of(row) == "pairs":
        return Row(where, preference_of(row, where, alone=True), parse_weight(row, where))
    parsed = parse_row(answer_without(row, ("label",)), where)
    content = parsed.content
    if isinstance(content, Chat):
        content = judged(content, where)
    return replace(parsed, content=content)


def rating_of(row: dict[str, Any], name: str, where: str) -> float | None:
    """The number in the column `name`, in any case; None if there is no such column."""
    key = next((key for key in row if key.strip().lower() == name), None)
    if key is None:
        return None
    value, number = row[key], math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    if not abs(number) <= MOST_RATING:  # also true for NaN
        text = quoted(value)
        raise UserError(
            f"{where}: {name}: expected a number up to {MOST_RATING:,.0f}, found {text}"
        )
    return number


def answer_without(row: dict[str, Any], keys: tuple[str, ...]) -> Fields:
    """The row without some keys."""
    return fields_of(row).without(*keys)


def form_of_rated(row: Row) -> Literal["pairs", "scores"]:
    """The form of a parsed row of a reward model."""
    return "pairs" if isinstance(row.content, Preference) else "scores"


def of_one_form(rows: Iterator[Row]) -> Iterator[Row]:
    """The rows of a reward model; raises UserError if they are not all pairs or all scored."""
    first: Row | None = None
    for row in rows:
        first = first or row
        if form_of_rated(row) != form_of_rated(first):
            forms = {"pairs": "a pair", "scores": "an answer with a score"}
            raise UserError(
                f"{row.where}: is {forms[form_of_rated(row)]}, but {first.where} is "
                f"{forms[form_of_rated(first)]}; train on one kind of rows"
            )
        yield row


def without_answer(row: dict[str, Any], where: str) -> UserError:
    """A row has a label, but not the keys of a prompt and its answer."""
    keys = f"keys found: {shortened(', '.join(row))}"
    missing = [key for key in ("prompt", "completion") if key not in row]
    if len(missing) == 1:
        return UserError(f"{where}: {missing[0]} is missing; {keys}")
    return UserError(
        f"{where}: a label needs a prompt and an answer; {keys}; expected prompt + completion + "
        "label, or messages + label"
    )


def label_of(row: dict[str, Any]) -> bool | None:
    """Return whether the label of a row says good or bad; None if it says neither."""
    label = dict.get(row, "label")  # whoever asks may not use it
    return LABELS.get(str(label).lower()) if isinstance(label, bool | int | float | str) else None


def judged(content: Chat | Pair, where: str) -> Chat | Pair:
    """The content with the answer that its label or score is about: what follows the last
    question.
    """
    if isinstance(content, Pair):
        return content
    asked = [at for at, turn in enumerate(content.messages) if turn["role"] == "user"]
    first = max([content.first_trained, *(at + 1 for at in asked)])
    if not any(turn["role"] == "assistant" for turn in content.messages[first:]):
        raise UserError(f"{where}: has no answer of the assistant after the last question")
    return replace(content, first_trained=first)


def with_other_answers(rows: Iterator[Row]) -> Iterator[Row]:
    """Labeled rows, each with the answer of another row to its own prompt, for the baseline of KTO.

    It is that of the last row before it that has another prompt, or of the first one after it.
    Raises UserError if there is only one row.
    """
    waiting: list[Row] = []  # rows at the beginning, all with the same prompt
    before: Row | None = None  # the last row
    differs: Row | None = None  # the last one whose prompt differs from its prompt
    for row in rows:
        if before is not None and prompt_of(row) != prompt_of(before):
            differs = before
        if before is None or (differs is None and len(waiting) < MOST_WAITING):
            waiting.append(row)
        else:
            for early in waiting:
                yield with_other(early, row)
            waiting = []
            yield with_other(row, differs or before)
        before = row
    if len(waiting) == 1:
        raise UserError(
            f"{waiting[0].where}: the only row; --objective kto compares it with others"
        )
    for row, other in zip(waiting, [*waiting[1:], *waiting[:1]], strict=True):
        yield with_other(row, other)


def labeled(row: Row) -> Labeled:
    assert isinstance(row.content, Labeled)
    return row.content


def prompt_of(row: Row) -> Any:
    """The prompt that a labeled answer answers."""
    content = labeled(row).answer
    return (
        content.prompt if isinstance(content, Pair) else content.messages[: content.first_trained]
    )


def with_other(row: Row, other: Row) -> Row:
    """A labeled row, with the answer of `other` to its own prompt."""
    own, given = labeled(row).answer, labeled(other).answer
    mismatched: Chat | Pair
    if isinstance(given, Pair):
        turns = [{"role": "assistant", "content": given.completion}]
    else:
        turns = given.messages[given.first_trained :]
    if isinstance(own, Chat):
        asked = own.messages[: own.first_trained]
        mismatched = replace(own, messages=asked + turns)
    else:
        text = next((t["content"] for t in reversed(turns) if t["content"].strip()), "")
        mismatched = Pair(own.prompt, text or own.completion)
    return replace(row, content=replace(labeled(row), other=mismatched))


def refused(where: str, wanted: str, found: str, kind: Kind) -> UserError:
    return UserError(
        f"{where}: expected {wanted}, found {found}; such rows train with --objective "
        f"{OBJECTIVES[kind]}"
    )


def preference_of(row: dict[str, Any], where: str, alone: bool = False) -> Preference:
    """Both answers with their prompt.

    alone: texts without a prompt and without a common beginning are compared as they are.
    """
    row = pair_of(row, where)
    chosen, rejected, prompt = row["chosen"], row["rejected"], dict.get(row, "prompt")
    if isinstance(chosen, list) != isinstance(rejected, list):
        raise UserError(f"{where}: chosen and rejected: expected two texts or two lists")
    if isinstance(chosen, list):
        return chats_of(row, prompt, where, alone)
    chosen, rejected = text_field(row, "chosen", where), text_field(row, "rejected", where)
    if "prompt" in row:
        row["prompt"]
    else:
        different = alone and not beginning_of(chosen, rejected).strip()
        if different and chosen.strip() and rejected.strip():
            return Preference(Text(chosen), Text(rejected))
        prompt, chosen, rejected = shared_text(chosen, rejected, where)
    for key, text in (("chosen", chosen), ("rejected", rejected)):
        if not text.strip():
            raise UserError(f"{where}: {key}: is empty")
    if not isinstance(prompt, str | int | list):
        raise UserError(f"{where}: prompt: expected text, found {type(prompt).__name__}")
    prompt = str(prompt) if isinstance(prompt, int) else prompt
    return Preference(as_chat(row, prompt, chosen, where), as_chat(row, prompt, rejected, where))


def pair_of(row: dict[str, Any], where: str) -> Fields:
    """The row with `chosen`, `rejected` and, if it has a question, `prompt`, whatever their names
    in other programs' files: OpenAI's, LLaMA-Factory's, HH-RLHF's.
    """
    row = fields_of(row)
    found = {} if all(key in row for key in PAIR_KEYS[0]) else openai_pair(row, where)
    for key in PAIR_KEYS[0]:
        value = found.get(key, dict.get(row, key))
        if isinstance(value, dict):  # one message, beside the conversation before it
            row[key]
            found[key] = [value]
    if "prompt" not in row and "prompt" not in found:
        found |= question_beside(row, where)
    row = row.without(*found, **found)
    texts = [row[key] for key in PAIR_KEYS[0]]
    if all(isinstance(text, str) for text in texts):
        before = row.get("prompt")
        whole = [(before if isinstance(before, str) else "") + text for text in texts]
        if not isinstance(before, list) and all(map(is_transcript, whole)):
            return row.without("prompt", *PAIR_KEYS[0], **dict(
                zip(PAIR_KEYS[0], map(turns_of_transcript, whole), strict=True)))  # fmt: skip
    return row


def openai_pair(row: Fields, where: str) -> dict[str, Any]:
    """The fields of a pair in OpenAI's form, with those of its `input` that have no effect."""
    asked = row.get("input")
    if not isinstance(asked, dict) or "messages" not in asked:
        raise UserError(f"{where}: input: expected an object with messages")
    answers = dict(zip(PAIR_KEYS[0], (row[key] for key in PAIR_KEYS[1]), strict=True))
    names = {"messages": "prompt", "tools": "tools"}
    row.update({f"input.{name}": asked[name] for name in asked.keys() - names})  # named as unused
    return answers | {names[name]: value for name, value in asked.items() if name in names}


def question_beside(row: Fields, where: str) -> dict[str, Any]:
    """The question of a pair in a column that is not called prompt, as `prompt`."""
    if "instruction" in row:
        return {"prompt": alpaca_prompt(row, where)}
    both = all(isinstance(dict.get(row, key), list) for key in PAIR_KEYS[0])
    for name in QUESTIONS:
        value = dict.get(row, name)
        if not value or not isinstance(value, list | str) or (both and name != "conversations"):
            continue
        row[name]
        if isinstance(value, list) and all(isinstance(turn, list) for turn in value):
            return {"prompt": parse_history(row.without(history=value), where)}
        return {"prompt": value}
    return {}


def chats_of(row: dict[str, Any], prompt: Any, where: str, alone: bool = False) -> Preference:
    """Both answers as chats. The lists may repeat the prompt."""
    tools = parse_tools(row, where)
    answers = [parse_turns(row[key], key, where) for key in ("chosen", "rejected")]
    shared = common_beginning(*answers)
    if not isinstance(prompt, str) or answers[0][0]["role"] == ASSISTANT:
        row.get("prompt")
    elif any(prompt.strip() in turn["content"] for turn in answers[0][:shared]):
        row.get("prompt")  # some data sets repeat the question; another text is not used
    if isinstance(prompt, str) and answers[0][0]["role"] == "assistant":
        asked = [{"role": "user", "content": prompt}]
        shared = 0
    elif isinstance(prompt, list):
        asked = parse_turns(prompt, "prompt", where)
        if answers[0][: len(asked)] == asked and answers[1][: len(asked)] == asked:
            asked, shared = [], len(asked)
        else:
            shared = 0
    elif prompt is None or isinstance(prompt, str):
        asked = []
        if not (shared or alone):
            raise UserError(f"{where}: chosen and rejected have no common beginning, and no prompt")
    else:
        raise UserError(f"{where}: prompt: expected text or messages")
    chats = []
    for turns in answers:
        whole = with_system(row, asked + turns, where)
        first = len(whole) - len(turns) + shared
        chats.append(Chat(whole, tools, first))
    for key, chat in zip(("chosen", "rejected"), chats, strict=True):
        turns = chat.messages[chat.first_trained :]
        if not any(turn["role"] == "assistant" for turn in turns):
            raise UserError(f"{where}: {key}: has no answer of the assistant after the prompt")
    chosen, rejected = chats
    return Preference(chosen, rejected)


def common_beginning(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> int:
    """The number of messages that both begin with; never all of the shorter one."""
    most = min(len(first), len(second)) - 1
    same = (a == b for a, b in zip(first[:most], second[:most], strict=True))
    return next((at for at, equal in enumerate(same) if not equal), max(most, 0))


def shared_text(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """Split two texts into the prompt that both begin with, and their answers.

    No word is cut, and a space before the answers belongs to them, as in TRL.
    """
    prompt = beginning_of(chosen, rejected)
    if not prompt.strip():
        raise UserError(f"{where}: chosen and rejected have no common beginning, and no prompt")
    return prompt, chosen[len(prompt) :], rejected[len(prompt) :]


def beginning_of(chosen: str, rejected: str) -> str:
    """The whole words that both texts begin with, without the space after them."""
    end = len(os.path.commonprefix([chosen, rejected]))  # noqa: RUF071 (characters, as wanted)
    while end and not chosen[end - 1].isspace():
        end -= 1
    return chosen[:end].removesuffix(" ")
