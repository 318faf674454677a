"""Checks requests before mlx-lm's server gets them.

That server generates for all clients in one thread, and an error there ends the server. `parse`
reads a request body and `check` checks it. Both are pure, and raise ValueError with a reason for
the client.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

from mlx_lm.server import CompletionRequest, convert_chat, process_message_content

from your_ai.gates.text import shortened
from your_ai.gates.untrusted import is_number
from your_ai.generation.generate import SEEDS

LARGEST = 1 << 31  # bound of all numbers in a request, except seeds
DEPTH = 64  # of nested lists and objects
VALUES = 50_000  # in a request: a list of empty values takes 24 times the memory of its text
STOP_WORDS, STOP_CHARACTERS = 64, 1000
NAME_CHARACTERS = 1000
LOGIT_BIASES = 10_000
XTC_THRESHOLD = 0.5  # the maximum in mlx-lm
MOST_TOKENS = 1 << 20  # of a prompt, if the model has no maximum
PIECE_CHARACTERS = 1 << 15  # a long prompt is counted in pieces of this size
WHOLE = (
    *("max_tokens", "max_completion_tokens", "top_k", "num_draft_tokens", "n", "seed"),
    *("repetition_context_size", "presence_context_size", "frequency_context_size"),
    "top_logprobs",
)
NUMBERS = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "xtc_probability", "xtc_threshold"),
)
BOOLEANS = ("stream", "logprobs")
NAMES = ("model", "adapters", "draft_model")
OBJECTS = ("stream_options", "response_format", "logit_bias", "chat_template_kwargs")
STEERING = (  # arguments of the tokenizer's call that are not for the template
    *("chat_template", "continue_final_message", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("add_generation_prompt", "tokenizer_kwargs", "conversation", "tools", "documents"),
)


def parse(data: bytes, most: int = VALUES) -> dict[str, Any]:
    """Return the JSON object in a request body, without the fields that are null.

    most: values that it may have.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each " begins or ends a string
    if plain.count(b'"') > 4 * most:
        raise ValueError(f"the request has more than {most} values")
    outside = b"".join(plain.split(b'"')[::2])
    if sum(map(outside.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"the request has more than {most} values")
    try:
        body = json.loads(
            data.decode(), parse_constant=no_number, object_pairs_hook=without_duplicates
        )
    except RecursionError:
        raise ValueError("the request is nested too deeply") from None
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise ValueError(f"the request is not valid JSON ({error})") from None
    if not isinstance(body, dict):
        raise ValueError("the request must be a JSON object")
    return {name: value for name, value in body.items() if value is not None}


def no_number(text: str) -> None:
    raise ValueError(f"{text} is not a valid number")


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def check(body: dict[str, Any], vocabulary: int, is_chat: bool | None = None) -> None:
    """Raise ValueError for values that mlx-lm accepts, but which then end its one thread.

    A field that is null counts as missing.
    vocabulary: the model's number of logits.
    is_chat: True if `messages` is required, False if `prompt` is, None if neither is.
    """
    body = {name: value for name, value in body.items() if value is not None}
    check_values(body)
    if is_chat or "messages" in body:
        check_messages(body.get("messages"))
    if (is_chat is False or "prompt" in body) and not isinstance(body.get("prompt"), str):
        raise ValueError("prompt must be a string")
    check_kinds(body)
    check_numbers(body, vocabulary)
    check_stop(body.get("stop", []))
    check_bias(body.get("logit_bias", {}), vocabulary)
    check_tools(body)
    if any(key in STEERING for key in body.get("chat_template_kwargs", {})):
        raise ValueError(f"chat_template_kwargs must be an object without {', '.join(STEERING)}")
    if not isinstance(body.get("stream_options", {}).get("include_usage", False), bool | None):
        raise ValueError("stream_options: include_usage must be true or false")
    if not isinstance(body.get("response_format", {"type": ""}).get("type"), str):
        raise ValueError("response_format must have a type")


def check_kinds(body: dict[str, Any]) -> None:
    """Raise ValueError for a value of another kind than its field has."""
    for names, is_good, kind in (
        (WHOLE, is_whole, "a whole number"),
        (NUMBERS, is_number, "a number"),
        (BOOLEANS, lambda value: isinstance(value, bool), "true or false"),
        (NAMES, is_name, f"a string of at most {NAME_CHARACTERS} characters"),
        (OBJECTS, lambda value: isinstance(value, dict), "an object"),
    ):
        for name in names:
            if name in body and not is_good(body[name]):
                raise ValueError(f"{name} must be {kind}")


def check_numbers(body: dict[str, Any], vocabulary: int) -> None:
    """Raise ValueError for numbers that are too large."""
    for name in (*WHOLE, *NUMBERS):
        if name != "seed" and abs(body.get(name, 0)) >= LARGEST:
            raise ValueError(f"{name} must be a number below {LARGEST}")
    for name, most in (
        ("top_k", vocabulary - 1),
        ("xtc_threshold", XTC_THRESHOLD),
        ("n", 1),
        ("top_logprobs", min(11, vocabulary)),
    ):
        if body.get(name, 0) > most:
            raise ValueError(f"{name} must be at most {most}")
    if not 0 <= body.get("seed", 0) < SEEDS:
        raise ValueError("seed must be at least 0 and below 2^64")


def check_values(body: dict[str, Any]) -> None:
    """Raise ValueError for numbers and strings that a tokenizer or template cannot process."""
    waiting: list[tuple[str, Any, int]] = [("a name", name, 0) for name in body]
    waiting += [(name, value, 1) for name, value in body.items()]
    while waiting:
        name, value, depth = waiting.pop()
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{shortened(name)} contains half a surrogate pair") from None
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{shortened(name)} contains a number that is not finite")
        elif isinstance(value, dict | list):
            if depth == DEPTH:
                raise ValueError(f"{shortened(name)} is nested more than {DEPTH} deep")
            inner = (*value.keys(), *value.values()) if isinstance(value, dict) else value
            waiting += ((name, each, depth + 1) for each in inner)


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= NAME_CHARACTERS


def check_stop(stop: Any) -> None:
    words = [stop] if isinstance(stop, str) else stop
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ValueError("stop must be a string, or a list of strings")
    if len(words) > STOP_WORDS or any(len(word) > STOP_CHARACTERS for word in words):
        raise ValueError(
            f"stop must be at most {STOP_WORDS} strings of at most {STOP_CHARACTERS} characters"
        )


def check_bias(bias: dict[str, Any], vocabulary: int) -> None:
    if len(bias) > LOGIT_BIASES:
        raise ValueError(f"logit_bias must have at most {LOGIT_BIASES} tokens")
    if not all(key.isascii() and key.isdecimal() and len(key) < 10 for key in bias):
        raise ValueError("logit_bias must have token ids as keys")
    if any(int(key) >= vocabulary for key in bias):
        raise ValueError(f"logit_bias must have token ids below {vocabulary} as keys")
    if not all(is_number(value) and abs(value) < LARGEST for value in bias.values()):
        raise ValueError(f"logit_bias must have numbers below {LARGEST} as values")


def check_messages(messages: Any) -> None:
    """Raise ValueError for a conversation without messages, or a message without content."""
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} must be an object")
        if not is_name(message.get("role")) or not message["role"]:
            raise ValueError(f"{where}: role must be a string")
        calls = message.get("tool_calls")
        if calls is not None:
            check_calls(calls, where)
        check_content(message.get("content"), bool(calls) and message["role"] == "assistant", where)


def check_content(content: Any, may_lack: bool, where: str) -> None:
    if isinstance(content, str) or (content is None and may_lack):
        return
    if not isinstance(content, list) or not content:
        raise ValueError(f"{where}: content must be a string, or a list of text parts")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise ValueError(f"{where}: content: this model only accepts text")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where}: content: the text of a text part must be a string")


def check_calls(calls: Any, where: str) -> None:
    if not isinstance(calls, list):
        raise ValueError(f"{where}: tool_calls must be a list")
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not is_name(function.get("name")):
            raise ValueError(f"{where}: tool_calls must be functions with names")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str) and arguments:
            try:
                check_values(parse(arguments.encode()))  # as mlx-lm will read it
            except ValueError as error:
                raise ValueError(f"{where}: tool_calls: arguments: {error}") from None
        elif not isinstance(arguments, dict | str):
            raise ValueError(f"{where}: tool_calls: arguments must be a JSON object")


def check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools", [])
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools must be a list of objects")
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not is_name(function.get("name")):
            raise ValueError("tools must be functions with names")
    choice = body.get("tool_choice", "auto")
    if not isinstance(choice, dict) and choice not in ("auto", "none", "required"):
        raise ValueError("tool_choice must be auto, none, required or an object")
    roles = body.get("role_mapping", {})
    if not isinstance(roles, dict) or not all(isinstance(text, str) for text in roles.values()):
        raise ValueError("role_mapping must map roles to strings")


def prompt_text(tokenizer: Any, request: CompletionRequest, given: dict[str, Any]) -> str:
    """Render the prompt of a request as one text. Passes on the errors of the chat template.

    given: additional arguments for the template.
    """
    if request.request_type != "chat":
        return request.prompt
    messages = copy.deepcopy(request.messages)  # process_message_content changes them
    if not tokenizer.has_chat_template:
        text: str = convert_chat(messages, request.role_mapping)
        return text
    process_message_content(messages)
    text = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tools=request.tools, tokenize=False, **given
    )
    return text


def prompt_ids(
    tokenizer: Any, request: CompletionRequest, given: dict[str, Any], most: int | None
) -> list[int]:
    """Tokenize the prompt of a request as mlx-lm does.

    Raises ValueError if it has no tokens, or `most` or more. If the text is much too long, only
    its beginning is tokenized, to save memory and time.
    """
    text = prompt_text(tokenizer, request, given)
    is_rendered = request.request_type == "chat" and tokenizer.has_chat_template
    bound = MOST_TOKENS if most is None else most
    counted = 0
    if len(text) > PIECE_CHARACTERS:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            # A token may be split between two pieces, which adds at least one token.
            counted += max(0, len(tokenizer.encode(piece, add_special_tokens=False)) - 2)
            if counted > 1.01 * bound + 16:
                raise ValueError(
                    f"the prompt has more than {bound} tokens; the model's maximum is {bound}"
                )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not is_rendered)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if len(ids) >= bound:
        raise ValueError(f"the prompt has {len(ids)} tokens; the model's maximum is {bound}")
    return ids
