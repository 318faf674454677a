from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_cli_md_is_up_to_date():
    document = runpy.run_path(str(DOCS / "make_cli.py"))["document"]
    message = "run: python docs/make_cli.py > docs/cli.md"
    assert (DOCS / "cli.md").read_text(encoding="utf-8") == document(), message


def test_files_named_in_the_docs_exist():
    checkout, package = DOCS.parent, DOCS.parent / "your_ai"
    named = set()
    for page in (*DOCS.glob("*.md"), checkout / "README.md", checkout / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        named |= set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|json))", text))
    assert len(named) > 30
    missing = {n for n in named if not (checkout / n).exists() and not (package / n).exists()}
    assert not missing


@pytest.mark.parametrize("name", ["data", "exports", "tinker"])
def test_tables_of_a_page_are_those_of_the_code(name):
    made = runpy.run_path(str(DOCS / f"make_{name}.py"))
    text = made["PAGE"].read_text(encoding="utf-8")
    assert text == made["page"](text), f"run: python docs/make_{name}.py"
