from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from your_ai.errors import UserError
from your_ai.studio import thumbs

ASKED = {"prompt": [{"role": "user", "content": "Which?"}]}


def test_pairs_are_of_one_question(own_folder):
    rows = {
        "a": (thumbs.row_of(ASKED, "good"), True),
        "b": (thumbs.row_of(ASKED, "bad"), False),
        "c": (thumbs.row_of({"prompt": "Which?"}, "other"), False),
        "d": (thumbs.row_of({**ASKED, "tools": [{}]}, "with tools"), False),
    }
    with ThreadPoolExecutor() as pool:  # of several windows
        list(pool.map(lambda each: thumbs.judge("r", *each), rows.values()))
    judged = thumbs.judged_rows("r")
    assert len(judged) == 4
    assert list(thumbs.pairs_of(judged)) == [
        {**ASKED, "chosen": rows["a"][0]["completion"], "rejected": rows["b"][0]["completion"]}
    ]


def test_another_thumb_replaces_the_first(own_folder):
    row = thumbs.row_of(ASKED, "x")
    for label in (True, False):
        thumbs.judge("r", row, label)
    assert thumbs.judged_rows("r") == [{**row, "label": False}]


@pytest.mark.parametrize("text", ["{", "1\n", '{"label": 1}\n', "[" * 100_000])
def test_a_damaged_file_is_kept(own_folder, text):
    thumbs.ANSWERS.mkdir(parents=True)
    thumbs.labels_file("r").write_text(text)
    with pytest.raises(UserError, match=r"r\.jsonl"):
        thumbs.judge("r", thumbs.row_of(ASKED, "x"), True)
    assert thumbs.labels_file("r").read_text() == text


def test_pairs_never_replace_the_thumbs_of_another_run(own_folder):
    thumbs.judge("r-pairs", thumbs.row_of(ASKED, "x"), True)
    with pytest.raises(UserError, match="r-pairs"):
        thumbs.judge("r", thumbs.row_of(ASKED, "x"), True)
    assert len(thumbs.judged_rows("r-pairs")) == 1
