"""Read untrusted YAML files with settings, in bounded time and memory."""

from __future__ import annotations

from copy import deepcopy
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from your_ai.errors import UserError
from your_ai.gates.paths import unreadable_text
from your_ai.gates.text import shortened

if TYPE_CHECKING:
    import yaml

YAML_BYTES = 1 << 17  # maximum file size; a file with every setting has 3,000 bytes
YAML_DEPTH = 8  # maximum nesting of lists and mappings


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file. Raises UserError with the line for anything else.

    Duplicate keys are rejected, and aliases too: a few lines of them can expand to gigabytes.
    """
    import yaml

    try:
        with path.open("rb") as file:
            data = file.read(YAML_BYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {unreadable_text(path, error)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text") from error
    if len(data) > YAML_BYTES:
        raise UserError(f"{path}: has more than {YAML_BYTES:,} bytes, too many for settings")
    try:
        content = deepcopy(parsed(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = error.problem if type(error) is yaml.MarkedYAMLError else "is not valid YAML"
        raise UserError(f"{where}: {problem}") from error
    except (ValueError, OverflowError, RecursionError) as error:  # a number of 5,000 digits
        reason = shortened(str(error).partition(":")[0], 100)
        raise UserError(f"{path}: contains a value that cannot be read ({reason})") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected `key: value` lines, found a {type(content).__name__}")
    return content


@lru_cache(maxsize=8)
def parsed(text: str) -> Any:
    """The content of a YAML text. A run reads its config.yaml several times, and PyYAML is slow."""
    return strict_loader()(text).get_single_data()


@cache
def strict_loader() -> type[yaml.SafeLoader]:
    """Return a loader that raises yaml.MarkedYAMLError for valid YAML that is not allowed here."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            if self.check_event(yaml.AliasEvent):
                self.refuse("an alias; write the value itself", event.start_mark)
            if self.depth == YAML_DEPTH:
                self.refuse(f"more than {YAML_DEPTH} levels", event.start_mark)
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        self.refuse(f"the key {shortened(key.value)} twice", key.start_mark)
                    seen.add(key.value)
            return node

        def refuse(self, what: str, mark: yaml.Mark) -> None:
            raise yaml.MarkedYAMLError(problem=f"has {what}", problem_mark=mark)

    return StrictLoader
