"""The text of Ollama's Modelfile.

Ollama's parser has no escapes. A value ends at a line that ends with three quotes, and characters
that Go does not call printable are dropped. What cannot be written is refused, never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from your_ai.errors import UserError
from your_ai.export.go_template import is_kept

QUOTES = '"""'


@dataclass(frozen=True)
class Modelfile:
    """Settings of a model in Ollama."""

    weights: str
    """FROM: a path relative to the Modelfile, or a model of Ollama."""
    adapter: str | None = None
    """ADAPTER: a path relative to the Modelfile."""
    template: str | None = None
    """TEMPLATE; None leaves it to Ollama."""
    system: str = ""
    parameters: Sequence[tuple[str, str]] = ()
    """PARAMETER lines; a name may occur several times."""

    @property
    def text(self) -> str:
        """The file. Raises UserError for a value that a Modelfile cannot hold."""
        lines = [f"FROM {one_line(self.weights)}"]
        if self.adapter is not None:
            lines.append(f"ADAPTER {one_line(self.adapter)}")
        if self.template is not None:
            lines.append(f"TEMPLATE {quoted_value('TEMPLATE', self.template)}")
        if self.system:
            lines.append(f"SYSTEM {quoted_value('SYSTEM', self.system)}")
        for name, value in self.parameters:
            lines.append(f"PARAMETER {name} {quoted_value(name, value)}")
        return "\n".join(lines) + "\n"


def one_line(value: str) -> str:
    """A value without quotes. Raises UserError if it has a character that would end it."""
    if not value or value != value.strip() or '"' in value or not fits_line(value):
        raise UserError(f"{value!r}: cannot be written in a Modelfile; choose another name")
    return value


def fits_line(value: str) -> bool:
    return is_kept(value) and not any(c in "\n\r\t" for c in value)


def quoted_value(name: str, value: str) -> str:
    """A value in quotes; numbers without. Raises UserError if it cannot be written."""
    if fault := fault_of(value):
        raise UserError(f"{name}: has {fault}, which a Modelfile cannot hold")
    return value if value.replace(".", "", 1).isdigit() else f"{QUOTES}{value}{QUOTES}"


def fault_of(value: str) -> str:
    """What a Modelfile cannot hold of a value; "" if it can."""
    if QUOTES in value:
        return "three quotes in a row"
    dropped = next((c for c in value if not is_kept(c)), None)
    return "" if dropped is None else f"the character U+{ord(dropped):04X}"
