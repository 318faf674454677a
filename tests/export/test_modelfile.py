from __future__ import annotations

import pytest

from tests.export.ollama_program import parse
from your_ai.errors import UserError
from your_ai.export.ollama import Modelfile


def read(**values):
    return parse(Modelfile("./m.gguf", **values).text)


TEXTS = [
    *('a "quoted" word', '"', '""', '"starts', 'ends"', "two\nlines\n", "\n\n", "\ttabs\t"),
    *("  spaces  ", "# no comment", "FROM other", 'PARAMETER stop "x"\nFROM y', "日本 é 🚀"),
    *("a\r\nb", "{{ .Prompt }}"),
]


@pytest.mark.parametrize("text", TEXTS)
def test_values_are_read_as_they_were_written(text):
    found = read(template=text, system=text, parameters=[("stop", text), ("stop", "b")])
    assert found["from"] == "./m.gguf"
    assert found["template"] == found["system"] == text
    assert found["parameters"] == {"stop": [text, "b"]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('a """ b', "three quotes in a row"),
        ('"""', "three quotes"),
        ("no\u00a0break", r"U\+00A0"),
        ("\u200d", r"U\+200D"),
        ("\x00", r"U\+0000"),
        ("\x1b[31m", r"U\+001B"),
        ("\ufeff", r"U\+FEFF"),
    ],
)
def test_what_a_modelfile_would_change_is_refused(text, fault):
    with pytest.raises(UserError, match=f"SYSTEM: has .*{fault}"):
        read(system=text)


def test_numbers_are_written_without_quotes():
    text = Modelfile("m", parameters=[("num_ctx", "4096"), ("temperature", "0.7")]).text
    assert text == "FROM m\nPARAMETER num_ctx 4096\nPARAMETER temperature 0.7\n"


@pytest.mark.parametrize("name", ["", " a", "a\nFROM b", 'a"b', "a\u00a0b"])
def test_paths_that_would_not_be_read_back_are_refused(name):
    with pytest.raises(UserError, match="cannot be written in a Modelfile"):
        read(adapter=name)
