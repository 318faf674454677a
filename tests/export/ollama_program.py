"""A stand-in for the program `ollama`: create NAME -f Modelfile, and run NAME.

It reads a Modelfile by the rules of Ollama's parser: a value ends with its line, unless it began
with quotes that are still open; characters that Go does not print are dropped. It refuses commands,
parameters and architectures that Ollama refuses. `run NAME PROMPT` has no model to answer: it shows
the text that the model would be given, as JSON. Of Go's templates it knows what your_ai writes, and
refuses the rest.
"""

from __future__ import annotations

import json
import os
import re
import sys
import unicodedata
from pathlib import Path
from typing import Any

COMMANDS = (
    *("from", "license", "template", "system", "adapter", "draft", "renderer"),
    *("parser", "parameter", "message", "requires"),
)
PARAMETERS = {
    **dict.fromkeys(("num_ctx", "num_predict", "repeat_last_n", "seed", "top_k"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repeat_penalty"), float),
    "stop": str,
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")
CONVERTS = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM",
            "Qwen2ForCausalLM")  # fmt: skip


class Refused(Exception):
    pass


def printed(text: str) -> str:
    return "".join(c for c in text if c in " \n\r\t" or unicodedata.category(c)[0] in "LMNPS")


def unquoted(text: str) -> str | None:
    """The value, or None while its quotes are open."""
    for quotes in ('"""', '"'):
        if text.startswith(quotes):
            if len(text) >= 2 * len(quotes) and text.endswith(quotes):
                return text[len(quotes) : -len(quotes)]
            return None
    return text


def parse(text: str) -> dict[str, Any]:
    """The commands of a Modelfile; `parameters` has those of PARAMETER."""
    found: dict[str, Any] = {"parameters": {}}
    lines = re.split(r"(?<=[\n\r])", text)
    while lines:
        line = lines.pop(0)
        if not line.strip() or line.startswith("#"):
            continue
        name, _, value = line.strip(" \t").partition(" ")
        name = name.lower()
        if name not in COMMANDS:
            raise Refused(f"command must be one of {COMMANDS}, not {name!r}")
        if name == "parameter":
            parameter, _, value = value.partition(" ")
        value = printed(value)
        while (end := unquoted(value.strip())) is None:
            if not lines:
                raise Refused("unexpected EOF")
            value += printed(lines.pop(0))
        if name == "parameter":
            add_parameter(found["parameters"], parameter, end)
        else:
            found[name] = end
    if "from" not in found:
        raise Refused("no FROM line")
    return found


def add_parameter(found: dict[str, Any], name: str, value: str) -> None:
    if name not in PARAMETERS:
        raise Refused(f"unknown parameter '{name}'")
    if PARAMETERS[name] is str:
        found.setdefault(name, []).append(value)
    else:
        found[name] = PARAMETERS[name](value)


# Go's templates

ACTION = re.compile(r'\{\{ ((?:"(?:\\.|[^"\\])*"|[^"])*?) \}\}', re.S)
GO_ESCAPE = re.compile(r"\\(U[0-9a-f]{8}|.)", re.S)
PLAIN_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\"}


def constant(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        code = match[1]
        return chr(int(code[1:], 16)) if code[0] == "U" else PLAIN_ESCAPES[code]

    return GO_ESCAPE.sub(character, text[1:-1])


def nodes(template: str) -> list[Any]:
    """The tree of a template: texts, actions, and blocks (kind, condition, body, else-body)."""
    parts, at = [], 0
    for match in ACTION.finditer(template):
        parts += [("text", template[at : match.start()]), ("action", match[1])]
        at = match.end()
    parts.append(("text", template[at:]))
    for kind, text in parts:
        if kind == "text" and "{{" in text:
            raise Refused(f"template: {text!r}")
    tree, rest = block(parts)
    if rest:
        raise Refused("template: unexpected end")
    return tree


def block(parts: list[tuple[str, str]]) -> tuple[list[Any], list[tuple[str, str]]]:
    """Nodes up to an end or an else, which is left."""
    found: list[Any] = []
    while parts:
        kind, text = parts[0]
        if kind == "action" and (text == "end" or text.startswith("else")):
            return found, parts
        parts = parts[1:]
        if kind == "action" and text.startswith(("if ", "range ")):
            node, parts = opened(text, parts)
            found.append(node)
        else:
            found.append((kind, text))
    return found, []


def opened(text: str, parts: list[tuple[str, str]]) -> tuple[Any, list[tuple[str, str]]]:
    kind, _, condition = text.partition(" ")
    body, parts = block(parts)
    if not parts:
        raise Refused("template: unexpected EOF")
    (_, end), parts = parts[0], parts[1:]
    if end == "end":
        return (kind, condition, body, []), parts
    if end.startswith("else if "):
        other, parts = opened(end.removeprefix("else "), parts)
        return (kind, condition, body, [other]), parts
    raise Refused(f"template: {end}")


def rendered(template: str, messages: list[dict[str, str]]) -> str:
    """What Ollama sends to the model for a chat."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    names: dict[str, Any] = {"$": {"System": system, "Messages": messages}}
    return executed(nodes(template), names["$"], names)


def executed(tree: list[Any], dot: Any, names: dict[str, Any]) -> str:
    text = ""
    for node in tree:
        if node[0] == "text":
            text += node[1]
        elif node[0] == "action":
            text += acted(node[1], dot, names)
        elif node[0] == "if":
            _, condition, body, other = node
            text += executed(body if truth(condition, dot, names) else other, dot, names)
        elif match := re.fullmatch(r"(?:\$i, \$m := )?\.Messages", node[1]):
            for index, message in enumerate(dot["Messages"]):
                if match[0] != ".Messages":
                    names |= {"$i": index, "$m": message}
                given = {"Role": message["role"], "Content": message["content"]}
                text += executed(node[2], given, names)
        else:
            raise Refused(f"template: range {node[1]}")
    return text


def acted(action: str, dot: Any, names: dict[str, Any]) -> str:
    if action.startswith('"'):
        return constant(action)
    if match := re.fullmatch(r'(\$\w+) (:?=) (\.System|"")', action):
        if match[2] == "=" and match[1] not in names:
            raise Refused(f"template: undefined variable {match[1]}")
        names[match[1]] = dot["System"] if match[3] == ".System" else ""
        return ""
    return value_of(action, dot, names)


def value_of(text: str, dot: Any, names: dict[str, Any]) -> Any:
    if text.startswith("."):
        return dot[text[1:]]
    name, _, field = text.partition(".")
    if name not in names:
        raise Refused(f"template: {text}")
    return names[name] if not field else names[name][field.lower()]


def truth(text: str, dot: Any, names: dict[str, Any]) -> bool:
    if match := re.fullmatch(r'(eq|ne) (\S+) "(\w+)"', text):
        return (value_of(match[2], dot, names) == match[3]) == (match[1] == "eq")
    if text.startswith("not "):
        return not value_of(text[4:], dot, names)
    if match := re.fullmatch(r"and (\$\w+) \((.*)\)", text):
        return bool(value_of(match[1], dot, names)) and truth(match[2], dot, names)
    if text == "eq (len (slice $.Messages $i)) 1":
        return names["$i"] == len(names["$"]["Messages"]) - 1
    return bool(value_of(text, dot, names))


# The program


def check_weights(path: Path) -> None:
    if path.is_dir():
        if not list(path.glob("model*.safetensors")):
            raise Refused("no Modelfile or safetensors files found")
        named = json.loads((path / "config.json").read_text())["architectures"][0]
        if named not in CONVERTS:
            raise Refused(f"unsupported architecture {named!r}")
        return
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    if fields["general.architecture"].contents() not in ARCHITECTURES:
        raise Refused("unknown model architecture")


def create(name: str, modelfile: Path) -> dict[str, Any]:
    if not re.fullmatch(r"[a-z0-9_][a-z0-9_.-]{0,79}", name):
        raise Refused(f"invalid model name: {name}")
    found = parse(modelfile.read_text(encoding="utf-8"))
    weights = modelfile.parent / found["from"]
    if weights.exists():
        check_weights(weights)
    elif "/" in found["from"].removeprefix("./") or found["from"].startswith("."):
        raise Refused(f"no such file {found['from']}")
    if "adapter" in found:
        check_weights(modelfile.parent / found["adapter"])
    if "template" in found:
        nodes(found["template"])
    return found


def main(arguments: list[str]) -> None:
    store = Path(os.environ["OLLAMA_MODELS"])
    match arguments:
        case ["create", name, "-f", modelfile]:
            (store / name).write_text(json.dumps(create(name, Path(modelfile))))
            print("success")
        case ["run", name, prompt]:
            found = json.loads((store / name).read_text())
            messages = [{"role": "user", "content": prompt}]
            if found.get("system"):
                messages = [{"role": "system", "content": found["system"]}, *messages]
            print(json.dumps(rendered(found["template"], messages)))
        case _:
            raise Refused(f"unknown command {arguments}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refused as error:
        sys.exit(f"Error: {error}")
