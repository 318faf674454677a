"""What is exported, read by those it is for, and their adapters imported: with torch.

The modules here are skipped, each with this reason, where the extra `interop` is not installed.
"""

import pytest

for name in ("torch", "peft"):
    pytest.importorskip(name, reason="needs torch and peft: pip install -e '.[dev,interop]'")
