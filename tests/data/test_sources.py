"""--data becomes one JSONL file per split: the same rows whatever form they come in."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import chat, write_rows
from tests.data.test_records import ROWS, write_csv, written
from your_ai.config import DEMO, TrainConfig
from your_ai.data import sources
from your_ai.data.lines import ORIGIN, file_of_first_row
from your_ai.data.preferences import parser_of
from your_ai.data.rows import Chat, read_rows
from your_ai.data.sources import (
    LEAST_HELD_OUT,
    MOST_HELD_OUT,
    Splits,
    checked_settings,
    find_splits,
    held_out_count,
    save_stdin,
    sources_of,
)
from your_ai.errors import UserError


def found(data: str, valid: str = "none", **settings: Any) -> Splits:
    return find_splits(TrainConfig(data=data, valid=valid, **settings))


def contents(path: Path) -> list[Any]:
    return [row.content for row in read_rows(path)]


def places(path: Path) -> list[str]:
    return [row.where for row in read_rows(path)]


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    numbers = range(start, start + count)
    return [{"prompt": f"question {i}", "completion": f"answer {i}"} for i in numbers]


def bytes_of(splits: Splits) -> dict[str, bytes]:
    return {split: path.read_bytes() for split, path in splits.files.items()}


# JSON lines are used as they are


def test_json_lines_in_a_known_format_are_not_copied(data_folder):
    splits = {name: data_folder / f"{name}.jsonl" for name in ("train", "valid", "test")}
    assert find_splits(TrainConfig(data="data")).files == {
        name: Path("data") / path.name for name, path in splits.items()
    }
    assert found("data/train.jsonl").files == {"train": Path("data/train.jsonl")}
    assert not Path("home").exists()


def test_valid_none_leaves_out_the_validation_rows(data_folder):
    assert set(found("data").files) == {"train", "test"}


def test_valid_folder_holds_nothing_out(data_folder):
    assert set(found("data", "folder").files) == {"train", "valid", "test"}
    write_rows(data_folder / "train.jsonl", pairs(60))
    (data_folder / "valid.jsonl").unlink()
    assert set(found("data", "folder").files) == {"train", "test"}


def test_home_directory_is_expanded(data_folder, monkeypatch):
    monkeypatch.setenv("HOME", str(data_folder.parent))
    assert found("~/data/train.jsonl").files == {"train": data_folder / "train.jsonl"}


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_demo_has_every_split(split):
    files = find_splits(TrainConfig(data=DEMO)).files
    assert all(isinstance(row.content, Chat) for row in read_rows(files[split]))


@pytest.mark.parametrize(("name", "keys"), [
    ("demo-pairs", {"prompt", "chosen", "rejected"}),
    ("demo-labels", {"prompt", "completion", "label"}),
])  # fmt: skip
def test_preferences_of_the_demo_have_every_split(name, keys):
    files = find_splits(TrainConfig(data=name)).files
    assert files.keys() == {"train", "valid", "test"}
    for path in files.values():
        assert json.loads(path.read_text().splitlines()[0]).keys() == keys


# Every form


@pytest.mark.parametrize(
    "name", ["a.json", "a.csv", "a.tsv", "a.parquet", "a.arrow", "a.feather", "a.jsonl.gz"]
)
def test_every_form_gives_the_rows_of_its_jsonl_twin(name):
    twin = found(str(written("twin.jsonl", ROWS)))
    splits = found(str(written(name, ROWS)))
    assert contents(splits.files["train"]) == contents(twin.files["train"])
    assert splits.notes == twin.notes
    assert splits.notes == (
        "guessed from the names of the columns: prompt = question, completion = answer",
    )


def test_a_row_remembers_its_place():
    write_csv(Path("a.csv"), pairs(1))
    with Path("a.csv").open("a") as file:
        file.write('"two\nlines",x\nlast,y\n')
    assert places(found("a.csv").files["train"]) == ["a.csv:2", "a.csv:4", "a.csv:5"]
    assert file_of_first_row(found("a.csv").files["train"]) == "a.csv"
    splits = found(f"{written('b.parquet', pairs(2))},a.csv")
    assert places(splits.files["train"])[:3] == ["b.parquet: row 1", "b.parquet: row 2", "a.csv:2"]


def test_rows_do_not_depend_on_where_their_files_are(tmp_path, monkeypatch):
    """A run that resumes from another folder, or without its cache, finds the same bytes."""
    written("one.csv", pairs(50))
    Path("d").mkdir()
    for name in ("train.csv", "valid.csv"):
        written(name, pairs(3)).rename(Path("d", name))
    made = [bytes_of(find_splits(TrainConfig(data=data))) for data in ("one.csv", "d", "d,one.csv")]
    monkeypatch.setenv("YOUR_AI_HOME", "elsewhere")
    Path("moved").mkdir()
    for name in ("one.csv", "d"):
        Path(name).rename(Path("moved", name))
    moved = tmp_path / "moved"
    for data, before in zip(
        (f"{moved}/one.csv", f"{moved}/d", f"{moved}/d,{moved}/one.csv"), made, strict=True
    ):
        splits = find_splits(TrainConfig(data=data))
        assert bytes_of(splits) == before
        assert places(splits.files["train"])[0] in ("one.csv:2", "train.csv:2", "one.csv:3")


def test_other_columns_are_kept_with_a_row():
    write_csv(Path("a.csv"), [{"question": "q", "answer": "a", "level": "3"}])
    (line,) = found("a.csv").files["train"].read_text().splitlines()
    assert json.loads(line)["level"] == "3"


def test_a_folder_of_texts_gives_paragraphs_in_order_of_files():
    for name, text in (("b/two.md", "three"), ("a.txt", "one\n\ntwo"), (".hidden/x.txt", "no")):
        Path("texts", name).parent.mkdir(parents=True, exist_ok=True)
        Path("texts", name).write_text(text)
    rows = contents(found("texts").files["train"])
    assert [row.text for row in rows] == ["one", "two", "three"]


def test_splits_of_a_folder_are_found_by_the_beginning_of_their_names():
    Path("d").mkdir()
    for name, start in (
        ("train-00000-of-00002.parquet", 0),
        ("train-00001-of-00002.parquet", 2),
        ("validation-00000-of-00001.parquet", 4),
        ("TEST.csv", 6),
        ("other.csv", 8),
    ):
        written("x" + Path(name).suffix.lower(), pairs(2, start)).rename(Path("d", name))
    files = find_splits(TrainConfig(data="d")).files
    prompts = {split: [row.prompt for row in contents(path)] for split, path in files.items()}
    assert prompts == {
        "train": [f"question {i}" for i in range(4)],
        "valid": ["question 4", "question 5"],
        "test": ["question 6", "question 7"],
    }


def test_several_files_are_joined_and_rows_repeated_by_their_share():
    written("a.csv", pairs(40))
    written("b.jsonl", pairs(10, 100))
    rows = [row.prompt for row in contents(found("a.csv=0.5, b.jsonl=2").files["train"])]
    assert all(rows.count(f"question {i}") == 2 for i in range(100, 110))
    drawn = [row for row in rows if int(row.split()[1]) < 100]
    assert len(set(drawn)) == len(drawn)
    assert 10 <= len(drawn) <= 30


def test_a_file_whose_name_has_commas_and_equal_signs_is_one_file():
    written("plain.csv", pairs(2)).rename("a,b=2.csv")
    assert len(contents(found("a,b=2.csv").files["train"])) == 2
    written("plain.csv", pairs(3)).rename("c=3")
    assert len(contents(found("c=3").files["train"])) == 3


# Validation rows


@pytest.mark.parametrize(
    ("rows", "count"), [(39, 0), (40, 20), (999, 20), (1500, 30), (24_900, 498), (99_999, 500)]
)
def test_two_percent_are_held_out_within_bounds(rows, count):
    assert held_out_count(rows) == count
    assert LEAST_HELD_OUT <= 20 <= MOST_HELD_OUT


def test_rows_are_held_out_by_their_hash():
    rows = pairs(60)
    first = find_splits(TrainConfig(data=str(write_rows(Path("a.jsonl"), rows))))
    held = contents(first.files["valid"])
    assert len(held) == 20
    kept = contents(first.files["train"])
    assert len(kept) == 40
    assert {row.prompt for row in [*held, *kept]} == {row["prompt"] for row in rows}
    assert [row.prompt for row in kept] == sorted(
        (r.prompt for r in kept), key=lambda p: int(p[9:])
    )
    assert first.notes == ("20 of 60 rows are held out for validation; --valid none trains on all",)
    turned = find_splits(TrainConfig(data=str(write_rows(Path("b.jsonl"), rows[::-1]))))
    assert {row.prompt for row in contents(turned.files["valid"])} == {row.prompt for row in held}


def test_equal_rows_are_not_divided():
    rows = pairs(30) * 3
    splits = find_splits(TrainConfig(data=str(write_rows(Path("a.jsonl"), rows))))
    held = {row.prompt for row in contents(splits.files["valid"])}
    assert held.isdisjoint(row.prompt for row in contents(splits.files["train"]))


def test_too_few_rows_are_not_divided(data_folder):
    (data_folder / "valid.jsonl").unlink()
    splits = find_splits(TrainConfig(data="data"))
    assert set(splits.files) == {"train", "test"}
    assert splits.notes == (
        "no validation rows: 10 rows are too few to hold some out; give --valid FILE",
    )


def test_validation_rows_of_ones_own_replace_those_of_the_folder(data_folder):
    written("mine.csv", ROWS)
    splits = find_splits(TrainConfig(data="data", valid="mine.csv"))
    assert len(contents(splits.files["valid"])) == 3
    assert len(contents(splits.files["train"])) == 10


# The cache


def test_rows_are_converted_once(monkeypatch):
    name = str(written("a.csv", ROWS))
    first = found(name)
    monkeypatch.setattr(sources, "convert", None)
    again = found(name)
    assert again == first
    with pytest.raises(TypeError):
        found(name, columns=("prompt=answer", "completion=question"))


def test_a_changed_or_damaged_file_is_converted_again():
    name = str(written("a.csv", ROWS))
    first = found(name)
    train = first.files["train"]
    whole = train.read_bytes()
    train.write_bytes(whole[:-5] + b"xxxx\n")
    assert found(name).files["train"].read_bytes() == whole
    (train.parent / "about.json").write_text("[")
    assert found(name).files["train"].read_bytes() == whole
    written("a.csv", ROWS[:2])
    assert len(contents(found(name).files["train"])) == 2


def test_copies_that_are_not_used_are_deleted(monkeypatch):
    old = found(str(written("a.csv", ROWS))).files["train"].parent
    later = time.time() + 40 * 86400
    monkeypatch.setattr("your_ai.data.examples.time.time", lambda: later)
    found(str(written("b.csv", ROWS[:2])))
    assert not old.exists()


def test_a_bad_row_leaves_nothing():
    write_rows(Path("a.jsonl"), [*pairs(50), {"prompt": "x", "completion": 0.5}])
    with pytest.raises(UserError, match=r"a\.jsonl:51: completion: expected text, found float"):
        find_splits(TrainConfig(data="a.jsonl"))
    assert list(Path("home/cache/data").iterdir()) == []


def test_a_full_disk_is_one_line(monkeypatch):
    name = str(written("a.csv", ROWS))
    Path("home/cache").mkdir(parents=True)
    Path("home/cache/data").write_text("")
    with pytest.raises(UserError, match="cannot write the rows there"):
        found(name)


# Standard input


def test_standard_input_is_kept_for_a_resume(own_folder, monkeypatch):
    class Input:
        buffer = io.BytesIO(b"question,answer\nq,a\n")

    monkeypatch.setattr("sys.stdin", Input)
    settings = checked_settings(TrainConfig(data="-", valid="none"), every_row=False)
    path = Path(settings.data)
    assert path.is_relative_to(own_folder / "home")
    path_of_rows = find_splits(settings).files["train"]
    assert [(row.prompt, row.completion) for row in contents(path_of_rows)] == [("q", "a")]


def test_empty_standard_input_is_refused(own_folder):
    with pytest.raises(UserError, match="standard input is empty"):
        save_stdin(own_folder, io.BytesIO())
    assert list((own_folder / "stdin").iterdir()) == []


# What is refused


@pytest.mark.parametrize(
    ("data", "settings", "reason"),
    [
        ("nowhere", {}, "--data nowhere: no such file or folder"),
        ("a.csv,nowhere", {}, "--data nowhere: no such file or folder"),
        ("a.csv,,a.csv", {}, "names nothing between two commas"),
        ("a.csv=0", {}, "0 times the rows of a.csv"),
        ("a.csv=nan", {}, "nan times the rows"),
        ("a.csv=1e9", {}, "use a number above 0, up to 100"),
        ("empty", {}, "the folder has no train.jsonl"),
        ("a.csv", {"valid": "nowhere"}, "--valid nowhere: no such file"),
        ("a.csv", {"valid": "empty"}, "the folder has no data"),
        ("a.csv", {"columns": ("prompt=nope", "completion=answer")}, r"a\.csv:2: has no column"),
        ("b.csv", {"columns": ("text=c",)}, "--columns: no row has c; all have a known format"),
        ("odd.csv", {}, r"odd\.csv:2: unknown row format; keys found: x, y"),
    ],
)
def test_data_that_cannot_be_used_is_refused(data, settings, reason):
    written("a.csv", ROWS)
    write_csv(Path("odd.csv"), [{"x": "1", "y": "2"}])
    write_csv(Path("b.csv"), pairs(2))
    Path("empty").mkdir()
    with pytest.raises(UserError, match=reason):
        found(data, **{"valid": "none", **settings})


def test_invalid_data_paths_are_refused(own_folder):
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    Path("d/train.jsonl").mkdir(parents=True)
    long, home = "a" * 5000, "~nobody-is-here/x"
    for data in (
        "fifo",
        "loop",
        "d",
        "/dev/zero",
        "/dev/null",
        long,
        "a\0b",
        home,
        "/proc/1/mem/x",
    ):
        with pytest.raises(UserError, match=r"^--data ") as caught:
            found(data)
        assert len(str(caught.value)) < 500


ASKED = "Why?\nHow so?\n\n  When?\n"


@pytest.mark.parametrize(
    ("name", "template", "prompts", "lines"),
    [
        ("a.txt", "", ["Why?", "How so?", "When?"], [1, 2, 4]),
        ("a.md", "", ["Why?\nHow so?", "When?"], [1, 4]),
        ("a.txt", "Q: {{ text }}", ["Q: Why?\nHow so?", "Q: When?"], [1, 4]),
    ],
)
def test_texts_are_prompts_where_answers_are_not_in_the_data(name, template, prompts, lines):
    Path(name).write_text(ASKED)
    Path("template").write_text(template)
    splits = found(name, objective="grpo", prompt_template="template" if template else "")
    rows = list(read_rows(splits.files["train"], parse=parser_of("prompts")))
    assert [row.content.prompt for row in rows] == prompts
    assert [row.where for row in rows] == [f"{name}:{line}" for line in lines]
    assert splits.notes == ()


@pytest.mark.parametrize(
    ("objective", "row"),
    [
        ("sft", {"messages": json.dumps(chat("Why?", "So.")["messages"])}),
        ("sft", {"prompt": "Why?", "completion": "So.", "weight": "0.5"}),
        ("sft", {"prompt": "Why?", "completion": "So.", "history": "[]"}),
        ("grpo", {"prompt": '[ {"role": "user", "content": "Why?"}]'}),
        ("dpo", {"prompt": "Why?", "chosen": '[{"role": "assistant", "content": "So."}]',
                 "rejected": '[{"role": "assistant", "content": "No."}]'}),
        ("dpo", {"input": {"messages": [{"role": "user", "content": "Why?"}]},
                 "preferred_output": [{"role": "assistant", "content": "So."}],
                 "non_preferred_output": [{"role": "assistant", "content": "No."}]}),
        ("dpo", {"system": "Be brief", "question": "Why?", "chosen": "So.", "rejected": "No."}),
    ],
    ids=str,
)  # fmt: skip
def test_a_row_is_the_same_in_every_form(objective, row):
    write_rows(Path("a.jsonl"), [row])
    Path("b.json").write_text(json.dumps([row]))
    found = []
    for name in ("a.jsonl", "b.json"):
        config = TrainConfig(data=name, objective=objective, valid="none")
        path = find_splits(config).files["train"]
        (parsed,) = read_rows(path, parse=parser_of(config.row_kind))
        found.append((parsed.content, parsed.weight, parsed.unused))
    assert found[0] == found[1]
    assert "'Why?'" in repr(found[0][0])


def test_every_row_is_checked_before_a_model_is_downloaded():
    write_rows(Path("a.jsonl"), [chat("a", "b"), {"messages": "nonsense"}])
    settings = TrainConfig(data="a.jsonl", valid="none", too_long="error")
    assert checked_settings(settings, every_row=False) == settings
    with pytest.raises(UserError, match=r"a\.jsonl:2: messages: expected a list"):
        checked_settings(settings, every_row=True)


@given(rows=st.lists(st.integers(0, 30), min_size=1, max_size=120), share=st.floats(0.01, 5))
def test_any_rows_are_either_trained_or_held_out(rows, share):
    content = [{"prompt": str(i), "completion": "x"} for i in rows]
    write_rows(Path("any.jsonl"), content)
    with contextlib.suppress(UserError):
        splits = None
        splits = find_splits(TrainConfig(data=f"any.jsonl={share!r}"))
    if splits is None:
        assert share < 1  # no row is left
        return
    train = [row.prompt for row in contents(splits.files["train"])]
    held = [row.prompt for row in contents(splits.files["valid"])] if len(splits.files) > 1 else []
    assert set(train).isdisjoint(held)
    assert all(held.count(row) in (0, rows.count(int(row))) for row in held)
    if share == int(share):
        assert len(train) + share * len(held) == share * len(rows)


def test_columns_that_are_not_used_are_named():
    Path("t.csv").write_text("context,question,answer,weight\nc,q,a,2\n")
    found = find_splits(TrainConfig(data="t.csv"))
    guessed, unused, *_ = found.notes
    assert guessed.startswith("guessed from the names")
    assert unused.startswith("columns that are not used: weight; see --columns")
    (row,) = read_rows(found.files["train"])
    assert row.unused == ("context",)


def keys_of(splits: Splits) -> dict[str, str]:
    """The only training row, as converted."""
    row = json.loads(splits.files["train"].read_text())
    return {key: value for key, value in row.items() if key != ORIGIN}


@pytest.mark.parametrize(
    ("objective", "record"),
    [
        ("sft", {"Prompt": "p", "Completion": "c"}),
        ("dpo", {"Prompt": "p", "Chosen": "a", "Rejected": "b"}),
        ("kto", {"Prompt": "p", "Completion": "c", "Label": "true"}),
        ("kto", {"prompt": "p", "completion": "c", "Label": "false"}),
    ],
)
@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_columns_may_be_in_capitals_for_every_objective(objective, record, name):
    splits = find_splits(TrainConfig(data=str(written(name, [record])), objective=objective))
    assert keys_of(splits) == {column.lower(): value for column, value in record.items()}
    assert any("Prompt" in note for note in splits.notes) == ("Prompt" in record)


@pytest.mark.parametrize("row", [{"prompt": "p", "label": "1"}, {"Question": "p", "Label": "1"}])
@pytest.mark.parametrize("name", ["t.jsonl", "t.csv"])
def test_a_label_without_an_answer_names_the_completion(row, name):
    with pytest.raises(UserError, match=r"completion is missing; columns: \w+, [Ll]abel;"):
        find_splits(TrainConfig(data=str(written(name, [row])), objective="kto"))
    assert find_splits(TrainConfig(data=name)).files  # a label may be the answer


def test_rows_of_equal_files_in_different_folders_name_their_own():
    for folder in ("one/sub", "two"):
        Path(folder).mkdir(parents=True)
        Path(folder, "train.csv").write_text("question,answer\nq,a\n")
    found = [find_splits(TrainConfig(data=name)).files["train"] for name in ("one", "two")]
    places = [json.loads(path.read_text())[ORIGIN] for path in found]
    assert places == ["sub/train.csv:2", "train.csv:2"]


def test_a_link_to_nothing_is_refused():
    Path("d").mkdir()
    Path("d/train.csv").write_text("question,answer\nq,a\n")
    Path("d/valid.csv").symlink_to("gone.csv")
    with pytest.raises(UserError, match=r"d/valid\.csv: is a link to a file that does not exist"):
        find_splits(TrainConfig(data="d"))


@pytest.mark.parametrize("data", [" ", ""])
def test_an_empty_name_is_refused(data):
    with pytest.raises(UserError, match="--data: is empty"):
        sources_of(data)


def test_a_folder_of_documents_has_rows_that_know_their_place(tmp_path):
    (tmp_path / "a.html").write_text("<h1>One</h1><p>first")
    (tmp_path / "b.md").write_text("second\n")
    config = TrainConfig(data=str(tmp_path), valid="none")
    rows = find_splits(config).files["train"].read_text().splitlines()
    assert [json.loads(row) for row in rows] == [
        {"text": "One\n\nfirst", "your_ai: from": "a.html: row 1 (One)"},
        {"text": "second", "your_ai: from": "b.md:1"},
    ]
