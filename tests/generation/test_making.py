"""Rows made of documents: what is kept and dropped, and that a process that is killed goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import your_ai
from tests.conftest import Killed, call, change_json, refused, train, working_in
from your_ai.data.questions import ask_for_questions
from your_ai.errors import RunError, UserError
from your_ai.generation import making
from your_ai.generation.generate import prompt_tokens
from your_ai.generation.making import TextReply
from your_ai.nets.tokenizer import open_tokenizer

CHUNKS = 12
KEPT = "What does lamp number {n} weigh in all, with its box?"
REASONS = {
    "a number of the answer is not in the text": CHUNKS // 2,
    "the model does not find the answer supported by the text": 3,
    "near-duplicate of another question": CHUNKS // 2 - 1,
    "questions that the reply does not have": CHUNKS,
}


def write_document(folder: Path) -> None:
    text = "\n\n".join(
        f"Lamp number {n} weighs {n + 100} kg. " + "It is big. " * 9 for n in range(CHUNKS)
    )
    (folder / "lamps.md").write_text(text)


def scripted(found, chunks, request, progress):
    """A model that asks two questions for each chunk, and finds every fourth answer unsupported."""
    progress.begin(wave=5)

    def reply(prompt: str) -> TextReply:
        n = int(prompt.split("Lamp number ")[1].split()[0])
        if "Reply with one word" in prompt:
            return TextReply("No." if KEPT.format(n=n) in prompt and n % 4 == 3 else "Yes.", True)
        second = (KEPT.format(n=n), "It weighs 7 kg.")
        if n % 2:
            second = ("Is a lamp big, whatever its number?", "It is big.")
        pairs = [(KEPT.format(n=n), f"It weighs {n + 100} kg."), second]
        return TextReply(json.dumps([{"question": q, "answer": a} for q, a in pairs]), True)

    return lambda prompts, is_verdict: [reply(prompt) for prompt, _ in prompts]


@pytest.fixture
def documents(own_folder, monkeypatch):
    monkeypatch.setattr(making, "loaded", scripted)
    write_document(own_folder)


def make(**settings) -> your_ai.api.MadeData:
    given = {"model": "demo", "out": "qa.jsonl", "chunk_tokens": 96, "questions": 3} | settings
    return your_ai.make_data("lamps.md", **given)


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_rows_are_kept_and_dropped_for_their_reasons(documents):
    made = make()
    assert (made.rows, made.chunks, made.documents) == (CHUNKS - 3 + 1, CHUNKS, 1)
    assert made.dropped == REASONS
    first, second = rows_of("qa.jsonl")[:2]
    assert first["messages"] == [
        {"role": "user", "content": KEPT.format(n=0)},
        {"role": "assistant", "content": "It weighs 100 kg."},
    ]
    assert first["source"].startswith("lamps.md: beginning, characters 1 to ")
    assert second["messages"][0]["content"] == KEPT.format(n=1)
    dropped = rows_of("qa.dropped.jsonl")
    assert len(dropped) == sum(REASONS.values())
    assert {(row["reason"], row["detail"]) for row in dropped if row["answer"] == "It is big."} == {
        ("near-duplicate of another question", "row 3")
    }
    assert not Path("qa.jsonl.unfinished").exists()


def test_without_the_check_the_model_gives_no_verdicts(documents):
    made = make(check=False)
    assert made.rows == CHUNKS + 1
    assert "the model does not find the answer supported by the text" not in made.dropped


def test_the_command_says_what_it_made_and_what_is_next(documents, capsys):
    arguments = "lamps.md", "--with", "demo", "--out", "qa.jsonl", "--chunk-tokens", 96
    assert call("data", "make", *arguments) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("qa.jsonl: 10 rows made of 12 chunks of 1 document\n")
    assert "qa.dropped.jsonl: 26 dropped\n  12 questions that the reply does not have\n" in out
    assert out.endswith("  your_ai data look qa.jsonl\n  your_ai train --data qa.jsonl\n")
    assert call("data", "look", "qa.jsonl", "--model", "demo") == 0
    look, _ = capsys.readouterr()
    assert "training: 10 chat" in look
    assert "the column source is not used" in look
    assert "qa.jsonl: exists; give another name, or --force" in refused(
        capsys, "data", "make", *arguments
    )
    assert call("data", "make", *arguments, "--force", "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 10
    assert call("data", "qa.jsonl", "--model", "demo") == 0


CHANGES = ("write_all", "replace_text", "os.replace", "shutil.rmtree", "os.fsync")


@example([("shutil.rmtree", 0, 1.0), ("write_all", 0, 0.0)])
@given(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 4), st.floats(0, 1)), max_size=4)
)
def test_killed_at_any_points_it_ends_with_the_same_bytes(tmp_path_factory, kills):
    ends = [finished_in(tmp_path_factory.mktemp("whole"), [])]
    ends.append(finished_in(tmp_path_factory.mktemp("killed"), kills))
    assert ends[0] == ends[1]


def finished_in(folder: Path, kills: list[tuple[str, int, float]]) -> dict[str, bytes]:
    """What is in a folder after processes that are killed, and one that is not.

    kills: of each process: the call of which function, after that many, ends it; and the share of
    its work that is done.
    """
    with working_in(folder):
        write_document(folder)
        for name, after, share in kills:
            if is_finished():
                break
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(making, "loaded", scripted)
                owner, _, function = name.rpartition(".")
                module = {"os": os, "shutil": shutil, "": making}[owner]
                patch.setattr(module, function, dying(getattr(module, function), after, share))
                try:
                    make()
                except Killed:
                    continue
                break  # it was not called so often
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(making, "loaded", scripted)
            if not is_finished():
                make()
        found = [path for path in Path().iterdir() if path.name != "home"]
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


def is_finished() -> bool:
    """Say whether the file is whole: the same command then refuses to write it again."""
    return Path("qa.jsonl").exists() and not Path("qa.jsonl.unfinished").exists()


def dying(function, after: int, share: float):
    calls = 0

    def called(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls <= after:
            return function(*arguments, **named)
        if function.__name__ == "write_all":
            file, line = arguments
            function(file, line[: int(share * len(line))])
        elif share > 0.5:
            function(*arguments, **named)
        raise Killed

    return called


def test_a_process_that_goes_on_asks_nothing_again(documents, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(making, "write_all", dying(making.write_all, 2, 0.9))
        with pytest.raises(Killed):
            make()
    asked = []

    def counting(*given):
        ask = scripted(*given)
        return lambda prompts, is_verdict: asked.extend(prompts) or ask(prompts, is_verdict)

    monkeypatch.setattr(making, "loaded", counting)
    make(max_memory=3.0)
    assert sum("Reply with one word" not in prompt for prompt, _ in asked) == CHUNKS - 10


def test_unfinished_progress_of_other_arguments_is_refused(documents, monkeypatch):
    monkeypatch.setattr(making, "write_all", dying(making.write_all, 0, 0.0))
    with pytest.raises(Killed):
        make()
    with pytest.raises(UserError, match=r"other arguments or files \(seed\); give the same, or"):
        make(seed=1)
    Path("lamps.md").write_text("Something else.")
    with pytest.raises(UserError, match=r"other arguments or files \(lamps.md\)"):
        make()
    Path("qa.jsonl.unfinished", "made-of.json").write_text("{")
    with pytest.raises(UserError, match="is damaged; delete the folder"):
        make()


def test_a_second_process_is_refused(documents, monkeypatch):
    def meanwhile(*given):
        ask = scripted(*given)
        with pytest.raises(UserError, match="another process is making these rows"):
            make()
        return ask

    monkeypatch.setattr(making, "loaded", meanwhile)
    assert make().rows == 10


def test_a_file_that_appeared_meanwhile_is_not_overwritten(documents, monkeypatch):
    def meanwhile(*given):
        Path("qa.jsonl").write_text("{}\n")
        return scripted(*given)

    monkeypatch.setattr(making, "loaded", meanwhile)
    with pytest.raises(UserError, match=r"qa\.jsonl: exists; move it"):
        make()
    assert Path("qa.jsonl").read_text() == "{}\n"
    Path("qa.jsonl").unlink()
    assert make().rows == 10  # nothing is asked again


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"out": "qa.csv"}, r"--out qa.csv: give the name of a .jsonl file"),
        ({"out": "no/qa.jsonl"}, "there is no folder no"),
        ({"model": "nothing-here"}, "--with nothing-here: "),
        ({"questions": 0}, "--questions 0: must be at least 1"),
        ({"documents": "nowhere.md"}, "nowhere.md: no such file"),
        ({"documents": "."}, "no documents there"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(own_folder, settings, message):
    given = {"documents": "lamps.md", "model": "demo", "out": "qa.jsonl"} | settings
    if given["documents"] == "lamps.md":
        write_document(own_folder)
    with pytest.raises(UserError, match=message):
        your_ai.make_data(**given)


def test_a_full_disk_is_named_and_what_was_done_is_kept(documents, monkeypatch):
    full = OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(making, "write_all", Mock(side_effect=full))
        with pytest.raises(RunError, match="free some disk space, then run the same command again"):
            make()
    assert make().rows == 10


def test_documents_of_a_folder_that_cannot_be_read_are_named(documents):
    Path("d").mkdir()
    shutil.move("lamps.md", "d/lamps.md")
    Path("d", "old.txt").write_bytes(b"\xff\xfe\xff")
    notes: list[str] = []
    made = your_ai.make_data(["d"], model="demo", out="qa.jsonl", on_note=notes.append)
    assert made.documents == 1
    assert [note for note in notes if note.startswith("left out: d/old.txt")]


# With a model


def any_reply(text: str, is_whole: bool) -> tuple[list[making.Answered], bool]:
    """The words of a reply of a model that cannot ask, as a question and an answer."""
    return [making.Answered(f"What is {text.lower()}?", "it is")], not is_whole


@pytest.mark.parametrize("kind", ["folder", "run"])
def test_a_model_that_is_killed_goes_on_with_the_same_samples(
    kind, tiny_model, configure, own_folder, monkeypatch
):
    monkeypatch.setattr(making, "parse_answered", any_reply)
    monkeypatch.setattr(making, "MOST_CHUNKS", 2)
    write_document(own_folder)
    model = str(tiny_model) if kind == "folder" else f"run:{train(configure()).name}"
    settings = {"model": model, "questions": 1, "max_tokens": 6, "check": False, "max_memory": 2.0}
    first = make(**settings)
    assert first.rows > CHUNKS // 2
    expected = Path("qa.jsonl").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(making, "write_all", dying(making.write_all, 3, 0.5))
        with pytest.raises(Killed):
            make(**settings, force=True)
    make(**settings, force=True)
    assert Path("qa.jsonl").read_bytes() == expected
    make(**settings, force=True, seed=1)
    assert Path("qa.jsonl").read_bytes() != expected


def test_a_model_that_finds_nothing_supported_makes_no_rows(tiny_model, own_folder, monkeypatch):
    monkeypatch.setattr(making, "parse_answered", any_reply)
    write_document(own_folder)
    with pytest.raises(UserError, match=r"qa\.jsonl: no row was made of 12 chunks"):
        make(model=str(tiny_model), max_tokens=6, questions=1)
    assert {row["reason"] for row in rows_of("qa.dropped.jsonl")} == {making.UNSUPPORTED}
    assert not Path("qa.jsonl").exists()


@pytest.mark.parametrize("questions", [1, 3, 5])
def test_chunks_fit_the_context_unless_their_size_is_given(
    tiny_model, own_folder, monkeypatch, questions
):
    model = shutil.copytree(tiny_model, own_folder / "model")
    change_json(model, "config.json", max_position_embeddings=1500)
    found = []

    def loaded(model, chunks, *rest):
        found.extend(chunks)
        raise Killed

    monkeypatch.setattr(making, "loaded", loaded)
    Path("long.md").write_text("Lamps are lit at night. " * 400)
    with pytest.raises(Killed):
        your_ai.make_data("long.md", model=str(model), out="qa.jsonl", questions=questions)
    tokenizer = open_tokenizer(model)
    for chunk in found:
        prompt = [{"role": "user", "content": ask_for_questions(chunk, questions)}]
        assert len(prompt_tokens(tokenizer, prompt)) + 160 * questions <= 1500
    assert len(found) < 100


def test_chunks_beyond_the_context_are_refused_before_the_model_is_loaded(
    tiny_model, own_folder, monkeypatch
):
    monkeypatch.setattr(making, "load", None)
    write_document(own_folder)
    with pytest.raises(UserError, match="the model's context is 2,048; lower it"):
        make(model=str(tiny_model), chunk_tokens=2000, questions=9)
