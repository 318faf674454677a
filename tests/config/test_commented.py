"""The file that `your_ai init` writes means what was chosen, and its comments change nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from your_ai.config import ABOUT, FIELDS, resolve
from your_ai.config.reading import COMMON, commented_yaml
from your_ai.gates.yaml_files import read_yaml

SETTING = re.compile(r"^#(?=\w+:)", re.MULTILINE)
HARD = "a b: c #d 'e' \"f\" é 名 😀 - [g, {h}] %i &j *k !l |m >n @o `p` ~q \\ 1e5"
printable = st.text(st.characters(exclude_categories=("C", "Z")) | st.just(" "), min_size=1)


def read(text: str) -> dict:
    path = Path("c.yaml")
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


@pytest.mark.parametrize("objective", ["sft", "dpo", "simpo", "kto", "grpo", "reward"])
def test_comments_are_defaults(objective):
    chosen = {"model": "llama-8b", "data": "d", "objective": objective}
    text = commented_yaml(chosen)
    Path("a.yaml").write_text(text)
    Path("b.yaml").write_text(SETTING.sub("", text))
    whole = read_yaml(Path("b.yaml"))
    assert len(whole) > len(chosen) + 10
    assert resolve({}, "b.yaml") == resolve({}, "a.yaml")


def test_each_setting_has_its_own_help_above_it():
    chosen = {"model": "m", "data": "d", "objective": "dpo", "max_memory": 12.5, "run": "r"}
    lines = commented_yaml(chosen).splitlines()
    found = [n for n, line in enumerate(lines) if re.match(r"#?\w+:", line)]
    names = [lines[n].lstrip("#").partition(":")[0] for n in found]
    assert names[:5] == [*chosen]
    assert len(names) == len(set(names))
    for at, name in zip(found, names, strict=True):
        assert lines[at - 1] == f"# {ABOUT[name].help}"


def test_common_settings_exist():
    assert set(COMMON) <= FIELDS.keys()


@given(printable)
@example(HARD)
@example("on")
@example("null")
@example("2024-01-01")
@example("1_000")
@example("0x10")
@example("x" * 4000)
@example(" spaces ")
def test_texts_are_read_back(text):
    chosen = {"model": text, "data": text, "reward": (text, "b, c")}
    found = read(commented_yaml(chosen))
    assert found == {"model": text, "data": text, "reward": [text, "b, c"]}


def test_texts_that_some_readers_take_for_numbers_are_quoted():
    assert '\nrun: "1e5"\n' in commented_yaml({"run": "1e5"})
