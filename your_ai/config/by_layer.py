"""A number for each adapted layer, as in `--lora-rank 16,mlp=32,block.0-3=8`. No mlx here.

The first value is that of all layers; of the PATTERN=VALUE after it, the last that selects a layer
counts. A pattern is `block.3` or `block.0-3` (the index of a block in the model), a name that is a
part of the layer's path in its block (`q_proj`, `mlp`, `self_attn.q_proj`), or both, as in
`block.0-3.mlp`.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NewType

from your_ai.config.names import AUTO
from your_ai.config.setting import LARGEST
from your_ai.errors import UserError
from your_ai.gates.text import nearest, quoted

LayerText = NewType("LayerText", str)  # the type of a setting that has patterns: their text
Place = tuple[int, str]  # a layer: the index of its block in the model, and its path in the block
OUTSIDE = -1  # in place of the index, of layers outside of the blocks, with their path in the model
PATTERN = re.compile(
    r"(?P<blocks>block\.(?P<first>\d{1,6})(?:-(?P<last>\d{1,6}))?(?:\.(?=.)|$))?"
    r"(?P<name>\w+(?:\.\w+)*)?",
    re.ASCII,
)
MOST_PATTERNS, MOST_CHARACTERS = 100_000, 10_000_000
FORM = "DEFAULT,PATTERN=VALUE,... such as 16,mlp=32,block.0-3=8"


@dataclass(frozen=True)
class LayerPattern:
    """The value of the layers that a pattern selects."""

    value: float
    name: str = ""
    """A part of their paths; "" for all of a block."""
    blocks: tuple[int, int] | None = None
    """The first and the last of their blocks; None for all."""

    @property
    def text(self) -> str:
        """The pattern without its value."""
        first, last = self.blocks or (0, 0)
        end = f"-{last}" if last > first else ""
        parts = [f"block.{first}{end}"] * (self.blocks is not None) + [self.name] * bool(self.name)
        return ".".join(parts)

    def selects(self, block: int, name: str) -> bool:
        """Return whether the layer at the path `name` in a block has this value."""
        first, last = self.blocks or (block, block)
        return first <= block <= last and f".{self.name or name}." in f".{name}."


@dataclass(frozen=True)
class ByLayer:
    """A number for each layer."""

    default: float | Literal["auto"]
    patterns: tuple[LayerPattern, ...] = ()

    @staticmethod
    def of(setting: object) -> ByLayer:
        """Read the value of a setting: a number, a text, or a mapping with a default.

        Raises ValueError with the fault if it is none of them.
        """
        if isinstance(setting, Mapping):
            pairs = [(str(name), value) for name, value in setting.items() if name != "default"]
            if "default" not in setting:
                raise ValueError("the default is missing")
        else:
            if isinstance(setting, str) and len(setting) > MOST_CHARACTERS:
                raise ValueError("is too long")
            first, *parts = str(setting).split(",")
            pairs = [(name, value) for name, _, value in (part.rpartition("=") for part in parts)]
            setting = {"default": first}
        if len(pairs) > MOST_PATTERNS:
            raise ValueError(f"has more than {MOST_PATTERNS:,} patterns")
        default = setting["default"]
        is_auto = isinstance(default, str) and default.strip() == AUTO
        patterns = tuple(pattern_of(name, value) for name, value in pairs)
        return ByLayer("auto" if is_auto else number_of(default), patterns)

    @property
    def number(self) -> float:
        """The default, which is not automatic."""
        assert not isinstance(self.default, str)
        return self.default

    @property
    def text(self) -> str:
        values = [text_of(self.default)]
        return ",".join(values + [f"{p.text}={text_of(p.value)}" for p in self.patterns])

    @property
    def setting(self) -> Any:
        """The value of the setting: a number or `auto`, or the text if there are patterns."""
        return LayerText(self.text) if self.patterns else self.default

    def at(self, place: Place) -> float:
        """The value of a layer, where the default is not automatic."""
        found = (p.value for p in reversed(self.patterns) if p.selects(*place))
        return next(found, self.number)

    def with_default(self, default: float) -> ByLayer:
        return replace(self, default=default)

    def from_block(self, first: int) -> ByLayer:
        """The same values, without patterns that only select blocks before `first`."""
        kept = (p for p in self.patterns if p.blocks is None or p.blocks[1] >= first)
        return replace(self, patterns=tuple(kept))

    def check(self, option: str, layers: Iterable[Place]) -> None:
        """Raise UserError, beginning with the option, for a pattern that selects none of these."""
        layers = list(layers)
        for pattern in self.patterns:
            if any(pattern.selects(*place) for place in layers):
                continue
            given = f"{option} {pattern.text}={text_of(pattern.value)}"
            names = sorted({name for _, name in layers})
            ends = {part for name in names for part in (name, *name.split("."))}
            if pattern.name and not any(replace(pattern, blocks=None).selects(*p) for p in layers):
                near = nearest(pattern.name, ends)
                raise UserError(
                    f"{given}: no adapted layer has {pattern.name} in its path{near}; the layers "
                    f"are {', '.join(names)}"
                )
            blocks = [block for block, _ in layers if block != OUTSIDE]
            raise UserError(
                f"{given}: selects no adapted layer; adapted are blocks {min(blocks, default=0)} "
                f"to {max(blocks, default=0)}"
            )


def pattern_of(text: str, value: object) -> LayerPattern:
    """Read a pattern. Raises ValueError if it is none."""
    match = PATTERN.fullmatch(text.strip())
    if match is None or not match[0]:
        raise ValueError(f"{quoted(text or value)} is no PATTERN=VALUE; give {FORM}")
    blocks = None
    if match["blocks"]:
        blocks = int(match["first"]), int(match["last"] or match["first"])
        if blocks[0] > blocks[1]:
            raise ValueError(f"{quoted(text)}: the first block is after the last")
    return LayerPattern(number_of(value), match["name"] or "", blocks)


def number_of(value: object) -> float:
    """A number that a setting may have, whole ones as an int. Raises ValueError for others."""
    if isinstance(value, str):
        text = value.strip()
        with contextlib.suppress(ValueError):
            value = int(text) if text.isdecimal() else float(text)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return value
    raise ValueError(f"{quoted(value)} is no number; give {FORM}")


def text_of(value: float | str) -> str:
    """A number as text that is read back exactly; whole ones without a point."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def values_by_layer(values: Mapping[Place, float]) -> ByLayer:
    """The shortest patterns that a simple search finds for the values of all adapted layers.

    Names come in the order of their length, so that a name which is a part of another is before it
    and does not change its value.
    """
    default = Counter(values.values()).most_common(1)[0][0]
    found = ByLayer(default)
    for name in sorted({name for _, name in values}, key=lambda name: (len(name), name)):
        blocks = sorted(block for block, other in values if other == name)
        counts = Counter(values[block, name] for block in blocks)
        usual = max(counts, key=lambda value: (counts[value], value == default))
        if any(found.at((block, name)) != usual for block in blocks):
            usually = LayerPattern(usual, name)
            found = replace(found, patterns=(*found.patterns, usually))
        others: list[LayerPattern] = []
        before = None  # the value of the block before
        for block in blocks:
            value = values[block, name]
            if value == before and value != usual:
                first, _ = others[-1].blocks or (block, block)
                others[-1] = replace(others[-1], blocks=(first, block))
            elif value != usual:
                others.append(LayerPattern(value, name, (block, block)))
            before = value
        found = replace(found, patterns=(*found.patterns, *others))
    return found
