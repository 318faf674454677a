"""The formats that `--qat` trains for, as text and as facts. No MLX here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

OPTION = "qat"  # in `lora_parameters` of adapter_config.json: the format
SAME = "same"
AFFINE = "affine"
GGML_TYPES = {"q4_0": (4, 32), "q8_0": (8, 32)}  # llama.cpp's types: bits, and weights of a scale
BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
GROUP = 64  # MLX's default
FORMAT = re.compile(r"(?P<bits>[0-9])(:(?P<group>[0-9]{2,3}))?")
KNOWN = f"{SAME}, BITS or BITS:GROUP (such as 4:64), {' or '.join(GGML_TYPES)}"


@dataclass(frozen=True)
class Rounding:
    """The format that weights are rounded to."""

    bits: int
    group_size: int
    """Weights of a row that share a scale."""
    mode: str = AFFINE
    """MLX's mode, or the name of llama.cpp's type."""

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of MLX's functions, which are also the entries of a config.json."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


def rounding_of(text: str) -> Rounding | None:
    """The format of `--qat`; None for that of each layer, `same`.

    Raises ValueError, which says what is known, if there is no such format.
    """
    if text == SAME:
        return None
    if text in GGML_TYPES:
        return Rounding(*GGML_TYPES[text], text)
    found = FORMAT.fullmatch(text)
    if found is not None:
        rounding = Rounding(int(found["bits"]), int(found["group"] or GROUP))
        if rounding.bits in BITS and rounding.group_size in GROUPS:
            return rounding
    bits, groups = (", ".join(map(str, known)) for known in (BITS, GROUPS))
    raise ValueError(f"give {KNOWN}; BITS of {bits}, GROUP of {groups}")
