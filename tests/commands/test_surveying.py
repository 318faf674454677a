"""`your_ai data` shows what training would see, and refuses nothing that it can count."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import call, calls_of, chat, refused, train, write_rows
from tests.data.test_records import write_csv
from your_ai.data import batches


def shown(capsys, *arguments: object) -> dict:
    capsys.readouterr()
    assert call("data", *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_rows_are_counted_by_what_training_would_do_with_them(capsys, tiny_model):
    rows = [
        chat("Ask", "Yes"),
        chat("Ask", "Yes"),
        chat("Ask", " "),
        {"prompt": "Ask", "completion": "No"},
        {"text": "word " * 40},
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "because"}]},
    ]
    write_rows(Path("d/train.jsonl"), rows)
    write_rows(Path("d/valid.jsonl"), [chat("Ask", "Yes"), chat("Ask", "Maybe")])
    found = shown(capsys, "d", "--model", tiny_model, "--max-seq-length", 32)
    split = found["splits"]["train"]
    assert split["kinds"] == {"chat": 4, "prompt + completion": 1, "text": 1}
    assert (split["rows"], split["duplicates"], split["empty"]) == (6, 1, 1)
    assert (split["refused"], split["too_long"]) == (1, 1)
    assert split["problem"].endswith("train.jsonl:3: no answer or no text")
    assert found["splits"]["valid"]["in_training"] == 1
    assert sum(count for *_, count in split["histogram"]) == 4
    assert split["lengths"]["most"] > 40
    assert split["trained_tokens"] < split["total"]


def test_drawn_rows_mark_what_is_trained(capsys, tiny_model):
    write_csv(Path("a.csv"), [{"question": f"Ask {i}", "answer": f"Yes {i}"} for i in range(9)])
    found = shown(capsys, "a.csv", "--model", tiny_model, "--draw", 2)
    assert [row["where"] for row in found["drawn"]] == ["a.csv:2", "a.csv:10"]
    parts = found["drawn"][0]["parts"]
    assert [part["trained"] for part in parts] == [False, True]
    assert "Ask 0" in parts[0]["text"]
    assert parts[1]["text"] == "Yes 0<|end|>"
    assert call("data", "a.csv", "--model", tiny_model, "--draw", 1) == 0
    text = capsys.readouterr().out
    assert "guessed from the names of the columns: prompt = question" in text
    assert "[[Yes 0<|end|>]]" in text
    assert "an epoch: 3 steps of 4 rows\n" in text


TURNS = [{"from": "human", "value": "1?"}, {"from": "gpt", "value": "2!"}]
CHATS = [
    chat("Ask", "Yes"),
    chat("Ask please", "No", system="Be brief."),
    {"messages": 2 * chat("Ask", "Yes, and a longer answer than that")["messages"]},
    {"messages": [*chat("Ask", "Yes")["messages"], {"role": "user", "content": "Why?"},
                  {"role": "assistant", "content": "So", "weight": 0}]},
    {"conversations": TURNS},
    {"prompt": "Ask", "completion": "Because it is, and some more words", "history": [["a", "b"]]},
    {"prompt": [{"role": "user", "content": "Ask"}], "completion": "So"},
    {"instruction": "Add", "input": "1 and 1", "output": "2"},
    {"text": "Some text\n of its own, which is rather longer than the other rows are"},
]  # fmt: skip
PAIRS = [
    {"prompt": "Ask", "chosen": "Yes", "rejected": "No, not at all"},
    {"chosen": chat("Ask", "Yes")["messages"], "rejected": chat("Ask", "Or no")["messages"]},
    {"chosen": "\n\nHuman: Ask\n\nAssistant: Yes", "rejected": "\n\nHuman: Ask\n\nAssistant: No"},
]
LABELED = [
    {"prompt": f"Ask {i}", "completion": answer, "label": i % 2 == 0}
    for i, answer in enumerate(["Yes", "Yes", "No", "Maybe, and rather not"])
]
SCORED = [{"prompt": "Ask", "completion": text, "score": len(text)} for text in ("Yes", "No")]


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (CHATS, {}),
        (CHATS, {"mask_prompt": False}),
        (CHATS, {"max_seq_length": 14, "too_long": "truncate"}),
        (CHATS, {"max_seq_length": 14, "too_long": "split"}),
        (PAIRS, {"objective": "dpo"}),
        (PAIRS, {"objective": "dpo", "max_seq_length": 10, "too_long": "truncate"}),
        (LABELED, {"objective": "kto"}),
        (PAIRS, {"objective": "reward"}),
        (SCORED, {"objective": "reward"}),
    ],
    ids=["chats", "unmasked", "truncated", "split", "pairs", "truncated pairs", "labels",
         "pairs with scores", "scores"],
)  # fmt: skip
def test_what_is_shown_is_what_is_trained(capsys, configure, monkeypatch, rows, settings):
    data = write_rows(Path("rows.jsonl"), rows)
    made = calls_of(monkeypatch, batches, "make_batch")
    model = configure().model
    train(configure(data=str(data), valid="none", max_steps=30, batch_size=1, **settings))
    options = [option for name, value in settings.items() for option in as_option(name, value)]
    found = shown(capsys, data, "--model", model, "--valid", "none", "--draw", 99, *options)
    drawn = [row for row in found["drawn"] if not row["problem"]]
    assert len(drawn) >= len(rows) // 2
    assert {trained_in(row) for row in drawn} == {
        text for batch in made for text in texts(batch.result)
    }


def as_option(name: str, value: object) -> list[object]:
    flag = name.replace("_", "-")
    return [f"--no-{flag}"] if value is False else [f"--{flag}", value]


def trained_in(row: dict) -> tuple:
    """The tokens that a model reads of a row, and the places and tokens of its targets."""
    tokens, trained = row["tokens"], row["trained"]
    targets = [(at, tokens[at + 1]) for at in range(len(tokens) - 1) if trained[at + 1]]
    assert not trained[0]
    return tuple(tokens[:-1]), tuple(targets)


def texts(batch) -> list[tuple]:
    """Each row of a batch that has text, as `trained_in`."""
    places = batch.positions[: batch.trained_tokens].tolist()
    targets = batch.targets[: batch.trained_tokens].tolist()
    width = batch.tokens.shape[1]
    return [
        (
            tuple(tokens[:length].tolist()),
            tuple((at % width, t) for at, t in zip(places, targets, strict=True)
                  if at // width == row),
        )
        for row, (tokens, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True))
        if length
    ]  # fmt: skip


def test_the_prompts_of_rollouts_are_shown_untrained(capsys, tiny_model):
    write_rows(Path("p.jsonl"), [{"prompt": "Ask"}])
    found = shown(capsys, "p.jsonl", "--model", tiny_model, "--objective", "grpo")
    assert [part["trained"] for part in found["drawn"][0]["parts"]] == [False]
    assert not any(found["drawn"][0]["trained"])
    assert found["splits"]["train"]["trained_tokens"] == 0


def test_an_answer_that_the_other_row_gives_too_is_named(capsys, tiny_model):
    rows = [{"prompt": f"Ask {i}", "completion": "Yes", "label": i == 0} for i in range(2)]
    write_rows(Path("l.jsonl"), rows)
    options = ("--model", tiny_model, "--objective", "kto", "--valid", "none")
    found = shown(capsys, "l.jsonl", *options)
    assert found["notes"] == [
        "answers that another row gives, too, are not trained: 2 rows, the first in l.jsonl:1"
    ]
    assert [row["problem"] for row in found["drawn"]] == [
        f"l.jsonl:{line}: nothing is left to train" for line in (1, 1, 2, 2)
    ]


def test_without_a_model_lengths_are_in_characters(capsys):
    write_rows(Path("a.jsonl"), [{"prompt": "123", "completion": "45"}, chat("1", "2")])
    assert shown(capsys, "a.jsonl")["splits"]["train"]["lengths"]["most"] == 5
    assert call("data", "a.jsonl") == 0
    output = capsys.readouterr()
    assert "characters per row: 2 to 5" in output.out
    assert "llama-8b is not on this machine" in output.err


def test_rows_are_shown_without_a_model(capsys):
    turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2!"}]
    write_rows(Path("a.jsonl"), [{"prompt": "Ask", "completion": "Yes"}, {"messages": turns}])
    assert call("data", "a.jsonl") == 0
    out = capsys.readouterr().out
    assert "a.jsonl:1 (in [[ ]]: trained)\nAsk\n[[Yes]]\n" in out
    assert "a.jsonl:2 (in [[ ]]: trained)\nuser: 1?\nassistant: [[2!]]\n" in out


def test_rows_that_the_template_refuses_are_shown_with_the_reason(capsys, tiny_model):
    turns = [*chat("Ask", "Yes")["messages"]]
    turns[-1]["reasoning_content"] = "because"
    write_rows(Path("a.jsonl"), [{"messages": turns}])
    (drawn,) = shown(capsys, "a.jsonl", "--model", tiny_model)["drawn"]
    assert "omits its reasoning" in drawn["problem"]
    assert call("data", "a.jsonl", "--model", tiny_model) == 0
    out = capsys.readouterr().out
    assert "training refuses it: a.jsonl:1: messages[1]" in out
    assert 'assistant: Yes{"reasoning_content": "because"}' in out  # nothing of it is trained


@pytest.mark.parametrize("model", [(), ("--model", "demo")])
def test_chosen_and_rejected_answers_look_different(capsys, model):
    write_rows(Path("p.jsonl"), [{"prompt": "Ask", "chosen": "Yes", "rejected": "No"}])
    assert call("data", "p.jsonl", "--objective", "dpo", *model) == 0
    out = capsys.readouterr().out
    assert "p.jsonl:1, chosen (in [[ ]]: trained)" in out
    assert "p.jsonl:1, rejected (in [- -]: made less likely)" in out
    assert "[[Yes" in out
    assert "[-No" in out
    rows = [{"prompt": "Ask", "completion": text, "label": text == "Yes"} for text in ("Yes", "No")]
    write_rows(Path("l.jsonl"), rows)
    assert call("data", "l.jsonl", "--objective", "kto", *model) == 0
    out = capsys.readouterr().out
    assert "l.jsonl:1, good" in out
    assert "l.jsonl:2, bad (in [- -]" in out


def test_rows_with_unknown_columns_are_shown_as_they_are(capsys):
    write_csv(Path("a.csv"), [{"they": f"Ask {i}?", "we": f"Yes {i}"} for i in range(9)])
    assert call("data", "a.csv") == 2
    output = capsys.readouterr()
    assert "a.csv:2\n  they: Ask 0?\n  we: Yes 0\n" in output.out
    assert output.out.count("they:") == 3
    assert output.err.endswith("--columns prompt=they,completion=we\n")


def test_embedded_rows_are_measured_with_the_demo_model(capsys):
    assert call("data", "demo-pairs", "--objective", "dpo") == 0
    output = capsys.readouterr()
    assert "tokens per row" in output.out
    assert "is not on this machine" not in output.err


def test_an_epoch_is_timed_by_the_newest_run_of_the_model(capsys, configure, tiny_model):
    train(configure())
    assert call("data", "data", "--model", tiny_model) == 0
    assert "at the speed of the newest run" in capsys.readouterr().out
    assert call("data", "data", "--model", "demo") == 0
    assert "at the speed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "--data nowhere: no such file"),
        (("a.csv", "--columns", "promt=q"), "did you mean prompt"),
        (("a.csv", "--model", "nothing-here"), "--model nothing-here"),
        (("a.csv", "--max-seq-length", "1"), "must be at least 2"),
        (("a.csv", "--prompt-template", "none.jinja"), "no such file: /"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, message):
    write_csv(Path("a.csv"), [{"question": "q", "answer": "a"}])
    assert message in refused(capsys, "data", *arguments)


@pytest.mark.parametrize(
    ("objective", "row", "kind"),
    [
        ("grpo", {"prompt": "Ask", "answer": "4"}, "1 prompt"),
        ("grpo", {"messages": [{"role": "user", "content": "Ask"}]}, "1 prompt"),
        ("reward", {"prompt": "Ask", "completion": "Yes", "score": 2}, "1 answer + score"),
        ("reward", {"prompt": "Ask", "chosen": "Yes", "rejected": "No"}, "1 chosen + rejected"),
    ],
)
@pytest.mark.parametrize("model", [None, "demo"])
def test_rows_of_every_objective_are_counted(own_folder, capsys, objective, row, kind, model):
    file = write_rows(own_folder / "rows.jsonl", [row])
    with_model = () if model is None else ("--model", model)
    assert call("data", file, "--objective", objective, "--valid", "none", *with_model) == 0
    assert kind in capsys.readouterr().out
