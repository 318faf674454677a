"""Untrusted YAML files with settings."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.errors import UserError
from your_ai.gates.yaml_files import YAML_BYTES, read_yaml

BOMB = "a: &a [x]\n" + "".join(
    f"{here}: &{here} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, here in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nmodel: a\nseed: 2\n", r"c.yaml:3: has the key seed twice"),
        (BOMB, r"c.yaml:2: has an alias; write the value itself"),
        ("data: a\nmodel: " + "[" * 3000, r"c.yaml:2: has more than 8 levels"),
        ("\n".join(" " * i + "a:" for i in range(300)), r"c.yaml:\d+: has more than 8 levels"),
        ("# " + "x" * YAML_BYTES, r"c.yaml: has more than 131,072 bytes"),
        ("seed: " + "9" * 5000, r"c.yaml: contains a value that cannot be read"),
        ("run: 2024-13-45", r"c.yaml: contains a value that cannot be read"),
        ("a: !!python/object/apply:os.system [x]", r"c.yaml:1: is not valid YAML"),
        ("? [1]\n: 2", r"c.yaml:1: is not valid YAML"),
    ],
)
def test_an_invalid_file_is_refused_with_the_line(own_folder, text, message):
    path = own_folder / "c.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 500


def test_a_file_that_is_not_utf8_is_refused(own_folder):
    path = own_folder / "c.yaml"
    path.write_bytes("seed: 1".encode("utf-16"))
    with pytest.raises(UserError, match="not UTF-8"):
        read_yaml(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(own_folder)


def test_a_byte_order_mark_is_skipped(own_folder):
    (own_folder / "c.yaml").write_bytes(b"\xef\xbb\xbfseed: 1")
    assert read_yaml(own_folder / "c.yaml") == {"seed": 1}


YAML = st.text(st.sampled_from("ab:- []{}&*!?|>'\"\n\t#,%@`0.~<"), max_size=60)


@given(text=YAML | st.text(max_size=40))
def test_any_text_is_a_mapping_or_raises_UserError(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    began = time.process_time()
    with contextlib.suppress(UserError):
        assert isinstance(read_yaml(path), dict)
    assert time.process_time() - began < 5
