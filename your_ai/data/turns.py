"""Messages of chats in the forms of the field -> the one form that chat templates expect.

A message has a `role` and a `content`, which is text. It may have `reasoning_content`, which is
text; `tool_calls`, each {"type": "function", "function": {"name", "arguments"}} whose arguments are
an object; and `weight`, 0 if it is not trained. Any further keys stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from your_ai.data.lines import ROLE_NAMES, read_json, text_field
from your_ai.errors import UserError
from your_ai.gates.text import quoted, shortened

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
# Names of roles in other programs' files. What the model says and what a person says has the same
# meaning in every template.
ROLES = {
    **dict.fromkeys((USER, "human", "prompter"), USER),
    **dict.fromkeys((ASSISTANT, "gpt", "chatgpt", "chatbot", "bing", "bard", "bot"), ASSISTANT),
    **dict.fromkeys(("model", "ai"), ASSISTANT),
}
CALL_ROLES = ("function_call", "tool_call")  # a turn of the assistant that is a call, as JSON
# These mean another role too, but a template may know them by their own names.
MEANINGS = {
    "developer": SYSTEM,
    **dict.fromkeys(("function", "ipython", "observation", "tool_response", "tool_result"), TOOL),
}
KNOWN_ROLES = {
    name: ROLES.get(name, name) for name in (*ROLES, *MEANINGS, *CALL_ROLES, SYSTEM, TOOL)
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # the names of a message's reasoning
TRAINED_FLAGS = ("training", "train", "trained", "trainable", "loss")  # false: not to be trained
MASKED_FLAGS = ("masked", "mask")  # true: not to be trained
# Of a message, the most telling first: one with `content` may have another `text`.
CONTENT_NAMES = ("content", "value", "text", "message", "parts")
# Names of a turn's texts where one object has both question and answer; no roles of messages.
TEXTS_OF_TURN = {
    **dict.fromkeys(("input", "question", "query", "prompt"), USER),
    **dict.fromkeys(("output", "answer", "response"), ASSISTANT),
}
TEXT_PARTS = ("text", "input_text", "output_text")
CALL_PARTS = ("tool_use", "tool_call", "functionCall", "function_call")  # Anthropic's, Google's
DECLARATIONS = ("functionDeclarations", "function_declarations")
RESULT_PARTS = ("tool_result", "functionResponse", "function_response")
SPEAKERS = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")  # of a transcript, as HH-RLHF has them
DEEPEST_QUOTES = 3  # arguments that are quoted more often are no arguments


def parse_turns(turns: Any, key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(turns, list) or not turns:
        found = "; write it as JSON" if isinstance(turns, str) and turns.strip() else ""
        raise UserError(f"{where}: {key}: expected a list of messages{found}")
    return [
        parse_message(message, f"{where}: {key}[{i}]")
        for i, turn in enumerate(turns)
        for message in messages_in(turn)
    ]


def messages_in(turn: Any) -> list[Any]:
    """The messages of an item of a list: one, or an object with a text for each of its roles.

    Objects have no order (Parquet and sorted JSON have "answer" first): the question comes first.
    """
    if not isinstance(turn, dict) or not turn:
        return [turn]
    name = content_name(turn)
    if isinstance(turn.get(name), list) and (results := results_in(turn[name])):
        rest = [part for part in turn[name] if kind_of_part(part) not in RESULT_PARTS]
        return [*results, *([{**turn, name: rest}] if rest else [])]
    roles = {name: TEXTS_OF_TURN.get(plain_role(name)) or name for name in turn}
    if not all(isinstance(turn[name], str) and is_role(role) for name, role in roles.items()):
        return [turn]
    first = (SYSTEM, USER, TOOL, ASSISTANT)
    meant = {name: MEANINGS.get(role_of(role), role_of(role)) for name, role in roles.items()}
    order = sorted(turn, key=lambda n: first.index(meant[n]) if meant[n] in first else len(first))
    return [{"role": roles[name], "content": turn[name]} for name in order]


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """Convert a message to the form of this module. Raises UserError."""
    given = dict(message) if isinstance(message, dict) else {}
    role = given.pop(next((name for name in ROLE_NAMES if name in given), ""), None)
    if not isinstance(role, str):
        raise UserError(f'{where}: expected an object with "role" and "content"{keys_of(message)}')
    role = role_of(role)
    if len(given) == 1 and isinstance(given.get("content"), str) and role not in CALL_ROLES:
        return {"role": role, **given}
    content, part_calls = without_calls(given.pop(content_name(given), None))
    if MEANINGS.get(role, role) == TOOL and is_object(content):
        content = json.dumps(content, ensure_ascii=False)
    given |= keys_of_parts(content)
    content, reasoning = parse_content(content, where)
    reasoning = parse_reasoning(given, reasoning, where)
    calls = [*(parse_call(call, where) for call in part_calls), *parse_calls(given, where)]
    if role in CALL_ROLES:
        calls += calls_in_text(content or "", where)
        role, content = ASSISTANT, ""
    if content is None and not (calls or reasoning):
        raise UserError(f"{where}: content: expected text, found nothing{keys_of(message)}")
    weight = parse_message_weight(message, where)
    for name in ("weight", *TRAINED_FLAGS, *MASKED_FLAGS):
        given.pop(name, None)
    optional = {**given, REASONING[0]: reasoning, "tool_calls": calls, "weight": weight}
    there = {key: value for key, value in optional.items() if value not in (None, "", [], {})}
    return {"role": role, "content": content or "", **there}


def calls_in_text(text: str, where: str) -> list[dict[str, Any]]:
    """The calls of a text that is one call, or a list of them, as JSON. Raises UserError."""
    found = read_json(text, f"{where}: a call", "; expected a call as JSON")
    return [parse_call(call, where) for call in (found if isinstance(found, list) else [found])]


def content_name(message: dict[str, Any]) -> str:
    return next((name for name in CONTENT_NAMES if message.get(name) is not None), "content")


def without_calls(content: Any) -> tuple[Any, list[Any]]:
    """A content without the parts that are calls, which is None if there is no other; and those
    calls."""
    if not isinstance(content, list):
        return content, []
    calls = [inner_part(part) for part in content if kind_of_part(part) in CALL_PARTS]
    rest = [part for part in content if kind_of_part(part) not in CALL_PARTS]
    return (rest or None if calls else content), calls


def inner_part(part: dict[str, Any]) -> dict[str, Any]:
    """A call or a result in a part of a content: under the name of its kind, or the part itself."""
    inner = part.get(str(kind_of_part(part)))
    inner = inner if isinstance(inner, dict) else part
    return {key: value for key, value in inner.items() if key != "type"}


def results_in(parts: list[Any]) -> list[dict[str, Any]]:
    """The messages of those parts of a content that are results of tools."""
    names = {"tool_use_id": "tool_call_id", "response": "content"}
    results = [inner_part(part) for part in parts if kind_of_part(part) in RESULT_PARTS]
    return [
        {"role": TOOL, "content": "", **{names.get(key, key): result[key] for key in result}}
        for result in results
    ]


def is_transcript(text: str) -> bool:
    """Return whether a text is a conversation that begins with a question and ends in an answer."""
    speakers = SPEAKERS.findall(text)
    begins = SPEAKERS.match(text) is not None
    return begins and speakers[:1] == ["Human"] and speakers[-1:] == ["Assistant"]


def turns_of_transcript(text: str) -> list[dict[str, Any]]:
    _, *parts = SPEAKERS.split(text)
    roles = {"Human": USER, "Assistant": ASSISTANT}
    return [
        {"role": roles[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def turns_of_pairs(pairs: list[Any], key: str, where: str) -> list[dict[str, Any]]:
    """The messages of lists of a question and an answer, or of a role and a text.

    Raises UserError if they are others.
    """
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise UserError(f"{where}: {key}: expected messages, or lists of a question and an answer")
    if all(isinstance(role, str) and is_role(role) for role, _ in pairs):
        turns = [{"role": role, "content": text} for role, text in pairs]
    else:
        turns = [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip((USER, ASSISTANT), pair, strict=True)
        ]
    return parse_turns(turns, key, where)


def role_of(name: str) -> str:
    """A role by any of its names, in any case; an unknown one as it is."""
    return KNOWN_ROLES.get(name) or KNOWN_ROLES.get(plain_role(name), name)


def is_role(name: str) -> bool:
    return plain_role(name) in KNOWN_ROLES


def plain_role(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def keys_of(message: Any) -> str:
    """The keys of an object that is no message, for an error."""
    keys = shortened(", ".join(message)) if isinstance(message, dict) else ""
    return f"; keys found: {keys}" if keys else ""


def is_object(content: Any) -> bool:
    """Return whether the result of a tool is an object or a list, and not parts of a text."""
    if isinstance(content, list):
        return not all(isinstance(part, dict) and part.get("type") for part in content)
    return isinstance(content, dict)


def parse_content(content: Any, where: str) -> tuple[str | None, str]:
    """The text of a content, None without one, and the reasoning in its parts."""
    if content is None or isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        return text_field({"content": content}, "content", where), ""
    kinds = [kind_of_part(part) for part in content]
    if any(kind not in (*TEXT_PARTS, *REASONING) for kind in kinds):
        named = dict.fromkeys("an object" if kind is None else str(kind) for kind in kinds)
        others = shortened(", ".join(kind for kind in named if kind not in TEXT_PARTS))
        raise UserError(
            f"{where}: content: has parts that are no text and cannot be trained: {others}; remove "
            "them, or write what they say as text"
        )
    texts, reasoning = list[str](), list[str]()
    for kind, part in zip(kinds, content, strict=True):
        key = "text" if kind in TEXT_PARTS or kind not in part else str(kind)
        (texts if kind in TEXT_PARTS else reasoning).append(
            text_field(part, key, f"{where}: content")
        )
    return "".join(texts), "".join(reasoning)


def keys_of_parts(content: Any) -> dict[str, Any]:
    """Return what parts of a content have beside their text, such as citations, as keys of the
    message, so that they are named if they have no effect."""
    items = content if isinstance(content, list) else []
    parts = [part for part in items if isinstance(part, dict)]
    own = {"type", *TEXT_PARTS, *REASONING}
    return {f"content.{key}": part[key] for part in parts for key in part if key not in own}


def kind_of_part(part: Any) -> Any:
    """The `type` of a part of a content; of one without, its only key, as in `{"text": ...}`."""
    if not isinstance(part, dict):
        return type(part).__name__
    return part.get("type", next(iter(part)) if len(part) == 1 else None)


def parse_reasoning(message: dict[str, Any], found: str, where: str) -> str:
    """Take the reasoning out of a message, whatever its name.

    found: the reasoning in the parts of its content.
    """
    texts = {"": found} if found else {}
    for name in REASONING:
        value = message.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise UserError(f"{where}: {name}: expected text, found {type(value).__name__}")
        if value and value.strip():
            texts[name] = value
    if len({text.strip() for text in texts.values()}) > 1:
        raise UserError(f"{where}: {' and '.join(filter(None, texts))} differ; keep one of them")
    return next(iter(texts.values()), "")


def parse_message_weight(message: dict[str, Any], where: str) -> int | None:
    """0 for a message that is not to be trained, 1 for one that is; None if it does not say."""
    said = []
    for name in ("weight", *TRAINED_FLAGS, *MASKED_FLAGS):
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1):  # as at OpenAI: 0 excludes an answer
            raise UserError(f"{where}: {name} {quoted(value)}: must be 0 or 1 in a message")
        said.append(1 - int(value) if name in MASKED_FLAGS else int(value))
    return min(said, default=None)


def parse_calls(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Take the tool calls out of a message: `tool_calls`, or OpenAI's older `function_call`."""
    calls, older = message.pop("tool_calls", None), message.pop("function_call", None)
    if isinstance(calls, str):  # tables store the list as JSON text
        calls = read_json(calls, f"{where}: tool_calls") if calls.strip() else None
    if not isinstance(calls, list | None):
        raise UserError(f"{where}: tool_calls: expected a list")
    parsed = [parse_call(call, where) for call in calls or ()]
    if older is None or (parsed and isinstance(older, dict) and not any(older.values())):
        return parsed
    single = parse_call(older, where)
    if parsed and single["function"] not in [call["function"] for call in parsed]:
        raise UserError(f"{where}: tool_calls and function_call differ; keep one of them")
    return parsed or [single]


def parse_call(call: Any, where: str) -> dict[str, Any]:
    """Convert a call to {"type", "function": {"name", "arguments"}}, with arguments as an object.

    Arguments may be JSON text, which a template would quote again, and a tool without any may be
    called with nothing.
    """
    if not isinstance(call, dict):
        raise UserError(f"{where}: tool_calls: expected objects, found {type(call).__name__}")
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f"{where}: tool_calls: a call has no name")
    rest = {} if function is call else {k: v for k, v in call.items() if k != "function"}
    flat = {**function}
    arguments = flat.pop("arguments", None)
    objects = ["parameters"] if "parameters" in flat else []
    objects += [key for key, value in flat.items() if isinstance(value, dict)]
    if arguments is None and objects:  # `input`, `args`: an object is nothing else
        arguments = flat.pop(objects[0])
    if function is call:  # a flat call keeps what is about the call beside the function
        rest = {name: flat.pop(name) for name in ("id", "type") if name in flat}
    rest["type"] = rest.get("type") or "function"
    return {**rest, "function": {**flat, "arguments": parse_arguments(arguments, where)}}


def parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    for _ in range(DEEPEST_QUOTES):
        if not isinstance(arguments, str):
            break
        text = arguments.strip()
        arguments = read_json(text, f"{where}: tool_calls: arguments") if text else None
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        found = type(arguments).__name__
        raise UserError(f"{where}: tool_calls: arguments: expected an object, found {found}")
    return arguments


def parse_tools(row: dict[str, Any], where: str) -> list[Any] | None:
    """The tools of a row: `tools`, or OpenAI's older `functions`; None without any."""
    key = "tools" if row.get("tools") is not None else "functions"
    tools = row.get(key)
    if isinstance(tools, str):  # some datasets store the list as JSON text
        tools = read_json(tools, f"{where}: {key}") if tools.strip() else None
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: {key}: expected a list, found {type(tools).__name__}")
    tools = [read_json(t, f"{where}: {key}") if isinstance(t, str) else t for t in tools or ()]
    return [whole_tool(each) for tool in tools for each in declared(tool)] or None


def declared(tool: Any) -> list[Any]:
    """The tools of an item of a list: one, or Google's list of declarations."""
    for name in DECLARATIONS:
        if isinstance(tool, dict) and isinstance(tool.get(name), list):
            return list(tool[name])
    return [tool]


def whole_tool(tool: Any) -> Any:
    """A tool as templates expect it: {"type": "function", "function": {"name", ...}}."""
    if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
        names = {} if "parameters" in tool else {"input_schema": "parameters"}  # Anthropic's
        function = {names.get(name, name): value for name, value in tool.items()}
        return {"type": "function", "function": function}
    return tool


def name_of_tool(tool: Any) -> str | None:
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def calls_as_json(content: Any, tools: list[Any] | None) -> list[Any]:
    """The calls of the given tools that a content is, as objects or as JSON text; empty if it is
    anything else."""
    names = [name for tool in tools or () if (name := name_of_tool(tool))]
    if names and isinstance(content, str) and content.strip()[:1] in ("[", "{"):
        with contextlib.suppress(UserError):
            content = read_json(content, "")
    calls = content if isinstance(content, list) else [content]
    is_calls = all(isinstance(call, dict) and call.get("name") in names for call in calls)
    return calls if is_calls else []


def with_system(
    row: dict[str, Any], turns: list[dict[str, Any]], where: str
) -> list[dict[str, Any]]:
    """The turns after the system prompt in `system`, unless they begin with one themselves."""
    begins = turns[:1] and MEANINGS.get(turns[0]["role"], turns[0]["role"]) == SYSTEM
    if begins and turns[0]["content"] != dict.get(row, "system"):
        return turns  # so the column is named as one that is not used
    if not row.get("system") or begins:
        return turns
    content = row["system"]
    content = content.get(content_name(content)) if isinstance(content, dict) else content
    return [parse_message({"role": SYSTEM, "content": content}, f"{where}: system"), *turns]
