from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.gates import text as texts
from your_ai.gates.text import counted, loss_text, size_text, split_outside_brackets

WITHOUT_MARKS = st.text(st.characters(blacklist_characters="\\()[]{}")).map(str.strip)


@pytest.mark.parametrize(
    ("count", "noun", "plural", "text"),
    [
        (0, "row", "", "0 rows"), (1, "row", "", "1 row"), (2, "row", "", "2 rows"),
        (2000, "row", "", "2,000 rows"), (1, "batch", "batches", "1 batch"),
        (3, "batch", "batches", "3 batches"), (1, "byte does", "bytes do", "1 byte does"),
        (12, "byte does", "bytes do", "12 bytes do"),
    ],
)  # fmt: skip
def test_one_is_singular_and_thousands_are_separated(count, noun, plural, text):
    assert counted(count, noun, plural) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (1.25, "1.2500"), (0.1, "0.1000"), (0.04123, "0.0412"), (0.0004, "0.000400"),
        (-0.0004, "-0.000400"), (0.00000123, "0.00000123"), (1e-6, "0.00000100"),
        (1.23e-7, "1.23e-07"), (0.0, "0.0000"), (9999.5, "9999.5000"), (35944.865, "35945"),
        (1.5e9, "1.5e+09"), (float("nan"), "nan"), (float("inf"), "inf"), (None, "?"),
    ],
)  # fmt: skip
def test_losses_keep_enough_digits(loss, text):
    assert loss_text(loss) == text


@given(st.floats(1e-6, 1e4), st.integers(3, 4))
def test_a_shown_loss_is_right_to_half_a_percent_and_has_no_exponent(loss, decimals):
    text = loss_text(loss, decimals)
    assert "e" not in text
    assert abs(float(text) - loss) <= 0.00501 * loss


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("exact_match=1,length:200=0.1", ["exact_match=1", "length:200=0.1"]),
        ("exact_match", ["exact_match"]),
        ("json_valid , judge", ["json_valid", "judge"]),
        ("regex:[a,b]{1,2}=0.5,judge", ["regex:[a,b]{1,2}=0.5", "judge"]),
        ("regex:(a,(b,c)),judge", ["regex:(a,(b,c))", "judge"]),
        (r"contains:a\,b,judge", ["contains:a,b", "judge"]),
        (r"regex:\(,judge", [r"regex:\(", "judge"]),
        ("contains::(,judge", ["contains::(", "judge"]),
        ("contains::),judge", ["contains::)", "judge"]),
        ("regex:[(,],judge", ["regex:[(,]", "judge"]),
        (r"regex:a\\,judge", [r"regex:a\\", "judge"]),
        ("a,,b", ["a", "", "b"]),
        ("", [""]),
    ],
)
def test_commas_inside_brackets_or_after_a_backslash_do_not_split(text, parts):
    assert split_outside_brackets(text) == parts


@given(st.lists(WITHOUT_MARKS, min_size=1))
def test_escaped_commas_give_each_text_back(texts):
    assert split_outside_brackets(",".join(text.replace(",", r"\,") for text in texts)) == texts


@given(st.text())
def test_splitting_loses_only_commas_backslashes_and_spaces(text):
    def kept(each):
        return [c for c in each if c not in ",\\" and not c.isspace()]

    assert kept("".join(split_outside_brackets(text))) == kept(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        *((0, "0 MB"), (499, "0 MB"), (2_600, "3 kB"), (999_400, "999 kB"), (999_600, "1.0 MB")),
        *((2_100_000, "2.1 MB"), (12_300_000, "12.3 MB"), (99_960_000, "100 MB")),
        *((412_300_000, "412 MB"), (999_400_000, "999 MB"), (999_600_000, "1.00 GB")),
        *((4_734_000_000, "4.73 GB"), (-203_000_000, "-203 MB")),
    ],
)
def test_sizes_have_the_unit_that_fits(size_bytes, text):
    assert size_text(size_bytes) == text


def test_progress_is_written_every_few_seconds(monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(texts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    report = texts.now_and_then(written.append, lambda done: f"{done} done")
    for seconds in (1, 4, 6, 8, 10, 11.5, 20):
        now[0] = seconds
        report(seconds)
    assert written == ["6 done", "11.5 done", "20 done"]


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [(0, 8, "[....] 0%"), (3, 8, "[#...] 37%"), (8, 8, "[####] 100%"), (9, 8, "[####] 100%")],
)
def test_a_share_is_a_bar_and_a_number(done, total, text):
    assert texts.share_text(done, total, 4) == text
