"""Typed Python functions -> JSON schemas of tools, in OpenAI's form; and a check of arguments.

Not from a library: pydantic is no dependency of this package, and what transformers has imports
50 MB into a process that is copied for each conversation.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from your_ai.errors import UserError
from your_ai.gates.functions import described
from your_ai.gates.text import nearest, quoted, shown
from your_ai.gates.untrusted import is_number

PLAIN_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object"}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "object": (dict,), "array": (list,), "null": (type(None),)
}  # fmt: skip
EXPECTED = "str, int, float, bool, list[...], dict, Literal or Optional of these"
MOST_DEEP = 16  # nested lists and unions in the type of a parameter
SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
ARGUMENT = re.compile(r"^(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")  # `name (type): what it is`


def tool_schema(function: Callable[..., Any], name: str, where: str) -> dict[str, Any]:
    """The schema of a function: types and defaults of its signature, texts of its docstring.

    where: names the function, for messages. Raises UserError if it cannot be a tool.
    """
    description, texts = parse_docstring(function, where)
    try:
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters
    except Exception as error:  # names in annotations are the user's code
        raise UserError(f"{where}: its types cannot be read ({described(error)})") from error
    if unknown := sorted(set(texts) - set(parameters)):
        hint = nearest(unknown[0], parameters)
        raise UserError(
            f"{where}: its docstring describes {shown(unknown[0])}, which is no parameter{hint}"
        )
    properties, required = dict[str, Any](), list[str]()
    for parameter in parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"{where}: parameter {parameter.name} cannot be given by its name")
        if parameter.name not in hints:
            raise UserError(f"{where}: parameter {parameter.name} has no type; expected {EXPECTED}")
        schema = type_schema(hints[parameter.name], f"{where}: parameter {parameter.name}")
        if parameter.name in texts:
            schema["description"] = texts[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif problem := fault_of(parameter.default, schema, "its default"):
            if parameter.default is not None:  # `x: int = None` is common
                raise UserError(f"{where}: parameter {parameter.name}: {problem}")
        else:
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    inputs = {"type": "object", "properties": properties, "required": required}
    function_schema = {"name": name, "description": description, "parameters": inputs}
    return {"type": "function", "function": function_schema}


def parse_docstring(function: Callable[..., Any], where: str) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and its descriptions of arguments (Google's style)."""
    lines = (inspect.getdoc(function) or "").splitlines()
    first: list[str] = []
    for line in lines:
        if not line.strip() or SECTION.match(line):
            break
        first.append(line.strip())
    if not first:
        raise UserError(f"{where}: has no docstring, from which the model learns what it does")
    texts, name, section, indent = dict[str, str](), "", "", 0
    for line in lines:
        if found := SECTION.match(line):
            section, name, indent = found[1], "", 0
        elif line.strip() and not line.startswith(" "):
            section = ""
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            depth = len(line) - len(line.lstrip())
            indent = indent or depth
            if depth == indent and (argument := ARGUMENT.match(line.strip())):
                name = argument[1]
                texts[name] = argument[2]
            elif name:
                texts[name] = f"{texts[name]} {line.strip()}".strip()
    return " ".join(first), texts


def type_schema(kind: Any, where: str, depth: int = 0) -> dict[str, Any]:
    """The JSON schema of a Python type. Raises UserError for types that JSON does not have."""
    origin, inner = get_origin(kind), get_args(kind)
    if depth > MOST_DEEP:
        raise UserError(f"{where}: its type is nested deeper than {MOST_DEEP}")
    if kind in PLAIN_TYPES:
        return {"type": PLAIN_TYPES[kind]}
    if kind is type(None):
        return {"type": "null"}
    if kind is list:
        return {"type": "array"}
    if origin is list:
        return {"type": "array", "items": type_schema(inner[0], where, depth + 1)}
    if origin is dict and inner[0] is str:
        values = {} if inner[1] is Any else type_schema(inner[1], where, depth + 1)
        return {"type": "object", **({"additionalProperties": values} if values else {})}
    if origin is Literal and all(isinstance(v, str | int | None) for v in inner):
        kinds = {PLAIN_TYPES.get(type(value)) for value in inner}
        kind_name = kinds.pop() if len(kinds) == 1 else None
        return {**({"type": kind_name} if kind_name else {}), "enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(each, where, depth + 1) for each in inner]}
    raise UserError(f"{where}: type {quoted(kind, 80)} has no JSON schema; expected {EXPECTED}")


def fault_of_arguments(arguments: Any, tool: Mapping[str, Any]) -> str | None:
    """Say why arguments of the model do not fit the schema of a tool; None if they do."""
    if not isinstance(arguments, dict):
        return "arguments: expected an object"
    schema = tool["function"]["parameters"]
    for name in schema["required"]:
        if name not in arguments:
            return f"argument {name} is missing"
    for name, value in arguments.items():
        if name not in schema["properties"]:
            return f"there is no argument {shown(name, 80)}{nearest(name, schema['properties'])}"
        if fault := fault_of(value, schema["properties"][name], f"argument {name}"):
            return fault
    return None


def fault_of(value: Any, schema: Mapping[str, Any], where: str) -> str | None:
    """Say why a value does not fit a schema of this module; None if it does.

    As in JSON Schema, except that 3.0 is no integer: the function would get a float.
    """
    if "anyOf" in schema:
        fits = any(fault_of(value, each, where) is None for each in schema["anyOf"])
        return None if fits else f"{where}: {quoted(value, 80)} fits none of its types"
    kind = schema.get("type")
    if kind is not None and not is_of(value, kind):
        return f"{where}: expected {kind}, found {quoted(value, 80)}"
    if "enum" in schema and not any(type(v) is type(value) and v == value for v in schema["enum"]):
        known = ", ".join(repr(each) for each in schema["enum"])
        return f"{where}: {quoted(value, 80)} is none of {known}"
    items = schema.get("items") or schema.get("additionalProperties")
    if items is None:
        return None
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    faults = (fault_of(each, items, f"{where}[{shown(key, 40)}]") for key, each in pairs)
    return next((fault for fault in faults if fault), None)


def is_of(value: Any, kind: str) -> bool:
    """Return whether a value has a type of JSON Schema."""
    if kind == "number":
        return is_number(value)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, PYTHON_TYPES[kind])
