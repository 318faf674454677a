from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_cli_md_is_up_to_date():
    document = runpy.run_path(str(DOCS / "make_cli.py"))["document"]
    message = "run: python docs/make_cli.py > docs/cli.md"
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == document(), message


def test_tests_named_in_the_docs_exist():
    for name in (
        "tests/engine/test_fused.py",
        "tests/training/test_train.py",
        "tests/evaluation/test_dataset_scores.py",
    ):
        assert name in (DOCS / "exactness.md").read_text(encoding="utf-8")
        assert (DOCS.parent / name).exists()
