"""Records -> rows in a known format: which column is the prompt, which the answer.

--columns says so; what it does not say is guessed from the names of the columns, and the guess is
reported. --prompt-template renders the prompt from all columns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from your_ai.config import nearest
from your_ai.data.column_hints import (
    UnknownColumns,
    columns_option,
    names_pair,
    opened,
    plain,
    roles_in_words,
)
from your_ai.data.lines import JSON_LIST, kind_in_words, looks_like_messages, parsed_texts
from your_ai.data.preferences import SCORE, kind_of
from your_ai.data.prompts import is_prompt_row
from your_ai.data.rows import FORMATS
from your_ai.data.template import TooSlow, limited_memory, limited_time
from your_ai.errors import UserError
from your_ai.files import read_text
from your_ai.gates.paths import unreadable_text
from your_ai.gates.text import shortened

# What a column can be, and the names that it often has, the most telling first.
NAMES: dict[str, tuple[str, ...]] = {
    "messages": (
        *("messages", "conversations", "conversation", "contents", "dialogue", "dialog", "chat"),
    ),
    "prompt": ("prompt", "question", "instruction", "query", "input", "user", "human", "request"),
    "completion": (
        *("completion", "answer", "response", "output", "reply", "assistant", "target"),
        *("solution", "expected", "label"),
    ),
    "text": ("text", "content", "document", "body"),
}
PAIR = ("chosen", "rejected")
NUMBERS = ("score", "margin")  # of the rows of a reward model
ROLES = (*NAMES, *PAIR, "label", *NUMBERS, "system", "weight")
COMPLETE = ({"messages"}, {"prompt", "completion"}, {"text"})  # what a row needs, or:
COMPLETE_PREFERENCES = (
    *({"prompt", *PAIR}, {*PAIR}, {"prompt", "completion", "label"}),
    *({"prompt", "completion", "score"}, {"messages", "score"}),
)
LEFT_OUT = {*(key for keys in FORMATS for key in keys), "weight", "label"}
NOTHING: tuple[Any, ...] = (None, "", [], {})
TEMPLATE_BYTES = 1 << 20
TEMPLATE_SECONDS = 3.0
# In a template: of the length of a text or list and a number, and an exponent.
LARGEST_PRODUCT = 1 << 20
TEMPLATE_ROOM_BYTES = 1 << 28


@dataclass
class Layout:
    """The rule by which records become rows."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Role -> column, as given by --columns."""
    render_prompt: Callable[[Mapping[str, Any], str], str] | None = None
    """(record, where) -> prompt, of --prompt-template."""
    kind: str = "answers"
    """Of the rows, as `TrainConfig.row_kind`."""
    rendered: frozenset[str] = frozenset()
    """The columns that --prompt-template uses."""
    unused: bool = True
    """Whether no record had the columns so far."""
    guesses: dict[tuple[str, ...], dict[str, str]] = field(default_factory=dict)
    """The roles that were guessed, by the columns of the records."""
    left: dict[str, None] = field(default_factory=dict)
    """Columns that are in no row, because they would be taken for its format."""

    @property
    def labeled(self) -> bool:
        """True if the rows train with labels, so that a column called label is one."""
        return self.kind == "labels"

    @property
    def prompts(self) -> bool:
        """True if a row needs only a prompt, and keeps all its columns, for rewards."""
        return self.kind in ("prompts", "tasks")

    @property
    def asks_texts(self) -> bool:
        """True if texts are prompts themselves, and not what a template makes them of."""
        return self.prompts and self.render_prompt is None and not self.columns

    def row_of(self, record: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The record as a row in one of the known formats, with its other columns kept.

        A record in a known format that lacks the columns of --columns is used as it is, since
        files may be mixed. Of others, a column called weight does not weigh the loss unless
        --columns says so: it may be the weight of a parcel.
        Raises UserError if the record has not the columns for it.
        """
        whole, wanted = record, {*self.columns.values()}
        missing = wanted - record.keys()
        if missing and missing & (parts := opened(record)).keys():
            record = parts
        has_columns = self.columns and wanted <= record.keys()
        if self.render_prompt is None and not has_columns and self.is_known(whole):
            return parsed_texts(whole, where)
        self.unused = False
        roles = self.roles_in(record, where)
        row = self.others_of(whole if self.prompts else record, {*roles.values()})
        for role, column in roles.items():
            if column not in record:
                raise UserError(
                    f"{where}: has no column {shortened(column)}, which is to be the {role}; "
                    f"columns: {listed(whole)}; say what they are with "
                    f"{columns_option(self.kind, record, self.render_prompt is not None)}"
                )
            value = record[column]
            row[role] = as_text(value, column, where) if self.is_text(role, value) else value
        if more := row.get("input", "") if "input" in roles else "":
            row["prompt"] += f"\n\n{more}"
        if "input" in roles and not self.prompts:  # rewards get all columns
            del row["input"]
        if self.render_prompt is not None:
            row["prompt"] = self.render_prompt(record, where)
        if "system" in roles and "text" in roles:
            raise UserError(f"{where}: --columns system: a text has no system prompt")
        return parsed_texts(row, where)

    def roles_in(self, record: Mapping[str, Any], where: str) -> dict[str, str]:
        """Role -> column, as given or guessed; what is given may also only add to what is guessed,
        such as a system prompt."""
        given = dict(self.columns)
        if not given or not {*given} <= {"system", "weight", "margin"}:
            return given or self.guessed(record, where)
        others = {name: value for name, value in record.items() if name not in given.values()}
        return {**self.guessed(others, where), **given}

    def others_of(self, record: Mapping[str, Any], used: set[str]) -> dict[str, Any]:
        """The columns that a row keeps beside those `used` for its roles; notes what is left out
        because it would be taken for another format."""
        if self.prompts:  # rewards may read any column, also one that is used
            taken, out = {"messages", "conversations", "text"}, set[str]()
        else:
            taken, used = LEFT_OUT, used | self.rendered
            out = used
        first = {name.removesuffix(".0") for name in used if name.endswith(".0")}
        out |= {n for n in first if isinstance(texts := record.get(n), list) and len(texts) == 1}
        left = {
            name
            for name in taken & record.keys() - used - self.rendered
            if record[name] not in NOTHING
        }
        self.left.update(dict.fromkeys(sorted(left)))
        return {name: value for name, value in record.items() if name not in taken | out}

    def is_text(self, role: str, value: Any) -> bool:
        """Return whether the value of a column for this role is to be a text."""
        if role in ("messages", "label", *NUMBERS) or isinstance(value, list):
            return False
        if role == "system" and isinstance(value, dict):
            return False  # Google's, which has parts
        if self.prompts and role in ("completion", "system"):
            return False  # they may be missing; `parse_prompts` takes what is there
        return value is not None or role not in ("input", "system")

    def is_known(self, record: Mapping[str, Any]) -> bool:
        """Return whether the record is in a known format, with all that belongs to it."""
        if self.labeled and lacks_label(record):
            return False
        if self.prompts:
            return is_prompt_row(record)
        return kind_of(record) is not None and not lacks_prompt(record)

    def guessed(self, record: Mapping[str, Any], where: str) -> dict[str, str]:
        """The roles of the record's columns by their names; raises UserError if they do not tell.

        With a template, only the completion is wanted.
        """
        key = tuple(record)
        if key not in self.guesses:
            answer_only = self.render_prompt is not None
            self.guesses[key] = guess(record, where, answer_only, self.kind)
        return self.guesses[key]

    def notes(self) -> list[str]:
        """The guesses, a line for each kind of record."""
        said = dict.fromkeys(
            ", ".join(f"{role} = {column}" for role, column in found.items())
            for found in self.guesses.values()
        )
        notes = [f"guessed from the names of the columns: {text}" for text in said if text]
        if self.left:  # the others are named when rows are read
            ways = "see --columns and --prompt-template"
            notes.append(f"columns that are not used: {listed(sorted(self.left))}; {ways}")
        return notes


def layout_of(columns: Sequence[str], prompt_template: str, kind: str = "answers") -> Layout:
    """The layout of --columns and --prompt-template. Raises UserError if they are wrong.

    kind: of the rows, as `TrainConfig.row_kind`.
    """
    roles = parse_columns(columns, kind)
    if not prompt_template:
        if set(roles) - {"system", "weight", *NUMBERS} == {"completion"}:
            raise UserError("--columns: names no prompt; add prompt=COLUMN")
        return Layout(roles, kind=kind)
    if taken := {"prompt", "messages", "text"} & set(roles):
        raise UserError(
            f"--columns {min(taken)}=...: cannot be combined with --prompt-template, which makes "
            "the prompt"
        )
    render, rendered = template_of(prompt_template)
    return Layout(roles, render, kind, rendered)


def parse_columns(columns: Sequence[str], kind: str = "answers") -> dict[str, str]:
    """Parse ("prompt=question", "completion=answer"). Raises UserError.

    kind: of the rows, as `TrainConfig.row_kind`.
    """
    roles: dict[str, str] = {}
    for part in columns:
        role, separator, column = (text.strip() for text in part.partition("="))
        if not separator or not column:
            raise UserError(
                f"--columns {shortened(part)}: expected ROLE=COLUMN, like prompt=question; "
                "a part with a comma goes in quotes"
            )
        if role not in ROLES:
            hint = nearest(role, ROLES) or f"; expected one of: {', '.join(ROLES)}"
            raise UserError(f"--columns {shortened(part)}: unknown role {shortened(role)}{hint}")
        if role in roles:
            raise UserError(f"--columns: names the {role} twice")
        roles[role] = column
    needed = set(roles) - {"system", "weight", "margin"}
    complete = (
        *COMPLETE,
        *COMPLETE_PREFERENCES,
        *([{"prompt"}] if kind in ("prompts", "tasks") else ()),
    )
    if roles and needed not in complete:
        if not needed or needed == {"completion"}:
            return roles  # the others are guessed, or --prompt-template makes the prompt
        raise UserError(
            f"--columns: names {' and '.join(roles)}; name {roles_in_words(kind)} (system and "
            "weight may be added)"
        )
    return roles


def guess(
    record: Mapping[str, Any], where: str, answer_only: bool = False, kind: str = "answers"
) -> dict[str, str]:
    """Guess which columns make a row, from their names, whatever their case.

    kind: of the rows, as `TrainConfig.row_kind`. With labels, a column called label says whether
    the answer is good; else it may be the answer.
    Raises UnknownColumns if there is no column for it, naming those that are there.
    """
    by_name = {plain(name): name for name in record}
    is_label = kind == "labels" and "label" in by_name
    label = {"label": by_name.pop("label")} if is_label else {}
    hint = f"say what they are with {columns_option(kind, record, answer_only)}"
    found = usual_columns(record, by_name)

    def refused(reason: str, keys: str = "columns") -> UnknownColumns:
        text = f"{where}: {reason}; {keys}: {listed(record)}; {hint}"
        return UnknownColumns(text, where, record)

    if kind in ("prompts", "tasks"):
        roles = guessed_prompt({**found, "system": by_name.get("system")}, answer_only)
        if not (roles or answer_only or kind == "tasks"):
            raise refused("has no prompt", "keys found")
        return {**roles, **further_input(by_name, roles)}
    if any(name in by_name for name in PAIR):
        return guessed_pair(by_name, found["prompt"], where, record, hint)
    if kind == "pairs" and names_pair(record):
        raise refused("has no columns chosen and rejected")
    if kind == "rated" and SCORE not in by_name:
        raise refused(f"{SCORE} is missing")
    roles = complete_roles(found, ({"completion"},) if answer_only else COMPLETE)
    if not roles:
        if label and found["prompt"]:
            raise refused("completion is missing")
        raise refused("unknown row format", "keys found")
    has_system = "system" in by_name and "text" not in roles
    system = {"system": by_name["system"]} if has_system else {}
    return {**roles, **label, **further_input(by_name, roles), **system}


def usual_columns(record: Mapping[str, Any], by_name: Mapping[str, str]) -> dict[str, str | None]:
    """The column of each role that has a usual name. by_name: plain name -> column."""
    found = {
        role: next((by_name[known] for known in usual if known in by_name), None)
        for role, usual in NAMES.items()
    }
    messages = record[found["messages"]] if found["messages"] else None
    if isinstance(messages, str) and messages.strip() and not JSON_LIST.match(messages):
        found["messages"] = None  # a text that is no list as JSON
    return found


def complete_roles(found: Mapping[str, str | None], choices: Sequence[set[str]]) -> dict[str, str]:
    """The columns of the first of some sets of roles of which all are found; none if none is."""
    for wanted in choices:
        roles = {role: name for role in NAMES if role in wanted and (name := found[role])}
        if roles.keys() == wanted:
            return roles
    return {}


def guessed_prompt(found: Mapping[str, str | None], answer_only: bool) -> dict[str, str]:
    """The columns of a prompt, among those found for each role; none if it would have no text.

    answer_only: the prompt itself is rendered of the record.
    """
    wanted = ("messages",) if found["messages"] else ("prompt", "completion", "system")
    roles = {role: name for role in wanted if (name := found[role]) is not None}
    if answer_only:
        return {role: name for role, name in roles.items() if role != "prompt"}
    return roles if {"messages", "prompt"} & roles.keys() else {}


def guessed_pair(
    by_name: Mapping[str, str], prompt: str | None, where: str, record: Mapping[str, Any], hint: str
) -> dict[str, str]:
    """The roles of the columns of a pair. Raises UnknownColumns if one of its answers is missing.

    by_name: plain name -> column; hint: the end of the error.
    """
    for name in PAIR:
        if name not in by_name:
            text = f"{where}: {name} is missing; columns: {listed(record)}; {hint}"
            raise UnknownColumns(text, where, record)
    roles = {name: by_name[name] for name in PAIR}
    roles |= {"prompt": prompt} if prompt else {}
    roles |= further_input(by_name, roles)
    return roles | ({"system": by_name["system"]} if "system" in by_name else {})


def further_input(by_name: Mapping[str, str], roles: Mapping[str, str | None]) -> dict[str, str]:
    """Alpaca's input, which follows the instruction."""
    asked = roles.get("prompt")
    is_alpaca = asked is not None and plain(asked) == "instruction"
    return {"input": by_name["input"]} if is_alpaca and "input" in by_name else {}


def lacks_prompt(record: Mapping[str, Any]) -> bool:
    """Return whether a pair of texts has its prompt in a column with another name."""
    if kind_of(record) != "pairs" or "prompt" in record:
        return False
    texts = all(isinstance(record.get(name), str) for name in PAIR)
    names = {plain(name) for name in record}
    return texts and not looks_like_messages(record[PAIR[0]]) and bool(names & {*NAMES["prompt"]})


def listed(names: Collection[str]) -> str:
    return shortened(", ".join(names)) or "none"


def as_text(value: Any, column: str, where: str) -> str:
    """A cell as text. Raises UserError for what has no obvious text."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    found = kind_in_words(value)
    raise UserError(f"{where}: column {shortened(column)}: expected text, found {found}")


def lacks_label(record: Mapping[str, Any]) -> bool:
    """Return whether the label of an answer is in a column whose name is in another case."""
    return kind_of(record) == "answers" and "label" in {*map(plain, record)} - {*record}


def cell_text(value: Any) -> Any:
    """A value in a prompt as a table has it: nothing for null, and JSON for all but texts and
    numbers."""
    if value is None:
        return ""
    is_json = isinstance(value, bool | dict | list)
    return json.dumps(value, ensure_ascii=False, default=str) if is_json else value


def template_of(name: str) -> tuple[Callable[[Mapping[str, Any], str], str], frozenset[str]]:
    """Read a Jinja template, which runs in a sandbox, and the columns that it uses.

    Raises UserError if it is not valid.
    """
    import jinja2
    import jinja2.meta
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    path = Path(name).expanduser()
    label = f"--prompt-template {shortened(name)}"
    try:
        source = read_text(path, TEMPLATE_BYTES)
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: is not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{label}: {unreadable_text(path, error)}") from error
    except ValueError as error:
        raise UserError(f"{label}: cannot be read ({error})") from error

    class Environment(ImmutableSandboxedEnvironment):
        """Limits products, which could take all memory at once, also while it compiles."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            for value, other in ((left, right), (right, left)):
                size = len(value) if hasattr(value, "__len__") else operator == "**"
                if isinstance(other, int) and size * abs(other) > LARGEST_PRODUCT:
                    raise SecurityError(f"{operator} {other} is too large")
            return super().call_binop(context, operator, left, right)

    environment = Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=cell_text
    )
    try:
        with limited_time(TEMPLATE_SECONDS), limited_memory(TEMPLATE_ROOM_BYTES):
            template = environment.from_string(source)  # it computes constants
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{label}: line {error.lineno}: {error.message}") from error
    except TooSlow:
        raise UserError(f"{label}: takes more than {TEMPLATE_SECONDS:g} s") from None
    except Exception as error:  # filters of constants may raise anything
        reason = shortened(" ".join(str(error).split())) or type(error).__name__
        raise UserError(f"{label}: {reason}") from error

    def render(record: Mapping[str, Any], where: str) -> str:
        try:
            with limited_time(TEMPLATE_SECONDS), limited_memory(TEMPLATE_ROOM_BYTES):
                text = template.render(dict(record))
        except TooSlow:
            raise UserError(f"{where}: {label}: takes more than {TEMPLATE_SECONDS:g} s") from None
        except jinja2.UndefinedError as error:
            raise UserError(
                f"{where}: {label}: {error.message}; columns: {listed(record)}"
            ) from error
        except Exception as error:  # templates may raise anything
            reason = shortened(" ".join(str(error).split()) or type(error).__name__)
            raise UserError(f"{where}: {label}: {reason}") from error
        if not text.strip():
            raise UserError(f"{where}: {label}: renders an empty prompt")
        return text

    return render, frozenset(used)
