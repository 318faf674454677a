"""Write the table of architectures in docs/after-training.md from the code, and from the tests that
compare each with another program:  python docs/make_exports.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.export.transformers_bases import KINDS  # noqa: E402
from tests.interop.llamacpp import bases  # noqa: E402
from your_ai.export.names import SAME_LAYERS  # noqa: E402
from your_ai.export.peft_experts import CONVERTED  # noqa: E402

BEGIN, END = "<!-- from docs/make_exports.py -->", "<!-- end -->"
PAGE = ROOT / "docs/after-training.md"
IN_TORCH = "1e-4"  # tests/interop/bases.py


def table() -> str:
    """Of each architecture, to what difference the other program's results are the same."""
    lines = [
        "| architecture | `hf`: transformers | `peft`: PEFT | `gguf`: llama.cpp |",
        "|---|---|---|---|",
    ]
    for kind in sorted(KINDS):
        in_peft = f"{IN_TORCH}{', experts too' if kind in CONVERTED else ''}"
        name = kind.removesuffix("_text")
        in_gguf = f"{bases.tolerance_of(name):.0e}".replace("e-0", "e-")
        lines.append(
            f"| {kind} | {IN_TORCH} | {in_peft if kind in SAME_LAYERS else '-'} "
            f"| {in_gguf if name in bases.KINDS else 'its converter'} |"
        )
    return "\n".join(lines)


def page(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
