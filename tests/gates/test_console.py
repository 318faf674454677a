"""Output to the terminal: text from untrusted sources never controls the terminal."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import logging
import shutil
import threading
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

import your_ai
from tests.conftest import call, chat, write_rows
from your_ai import cli
from your_ai.errors import RunError, UserError
from your_ai.gates import console
from your_ai.gates.text import LINE_CHARACTERS, printable, shortened
from your_ai.run import events
from your_ai.run.folder import RunFolder

HOSTILE = "evil\x1b[2J\x1b]52;c;aGk=\x07\x9b31m\x85\u202eb\u2066\x7f\x08\r\x00\ud800"
TEXTS = st.text(st.characters() | st.sampled_from(HOSTILE)) | st.just(HOSTILE)
PACKAGE = Path(your_ai.__file__).parent


def controls_terminal(text: str) -> bool:
    """Whether a text has characters that control a terminal."""
    return any(
        (ord(c) < 32 and c not in "\n\t")
        or 0x7F <= ord(c) < 0xA0
        or 0x202A <= ord(c) <= 0x202E
        or 0x2066 <= ord(c) <= 0x2069
        or 0xD800 <= ord(c) < 0xE000
        for c in text
    )


@contextlib.contextmanager
def captured():
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as error,
    ):
        yield out, error


@given(TEXTS)
def test_no_output_function_prints_control_characters(text):
    with captured() as (out, error):
        console.echo(text)
        console.echo(text, nl=False)
        console.echo_error(text)
        shown = console.open_console()
        shown.print(text)
        shown.print(Text(text), soft_wrap=True)
        table = Table(text, box=None)
        table.add_row(text, style="bold")
        shown.print(table)
        console.open_console(stderr=True).print(text)
        console.echo_json({text: text})
    assert not controls_terminal(out.getvalue())
    assert not controls_terminal(error.getvalue())
    assert json.loads(out.getvalue().splitlines()[-1]) == {text: text}


@given(TEXTS)
def test_an_error_is_one_line_without_control_characters(text):
    for error in (UserError(text), RunError(text), ValueError(text)):
        with captured() as (_, shown):
            assert cli.report(error) in (1, 2)
        assert shown.getvalue().count("\n") == 1
        assert not controls_terminal(shown.getvalue())


@given(TEXTS)
def test_harmless_text_is_printed_unchanged(text):
    if not controls_terminal(text):
        assert printable(text) == text


def test_control_characters_are_replaced_by_visible_ones():
    text = "a\x1b[2J\x9b1m\rb\n\té世\u200d😀\u202e"
    assert printable(text) == "a␛[2J\ufffd1mb\n\té世\u200d😀\ufffd"
    assert printable("a\r\n\tb", one_line=True) == "a␍␊␉b"


def test_markup_in_text_is_printed_literally():
    with captured() as (out, _):
        shown = console.open_console()
        shown.print("[bold]a[/nothing] :smile: [link=file:///]b[/link]")
    assert out.getvalue() == "[bold]a[/nothing] :smile: [link=file:///]b[/link]\n"


def test_a_terminal_gets_only_the_escape_codes_of_styles(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = io.StringIO()
    shown = console.open_console(file=file)
    shown.print(Text("red \x1b[2J", style="red"))
    assert "\x1b[31mred ␛[2J\x1b[0m" in file.getvalue()


@given(st.text(), st.integers(1, 300))
def test_a_shortened_text_keeps_its_beginning_and_end(text, most):
    short = shortened(text, most)
    assert len(short) <= most
    assert short == text or (short[0] in (text[0], "\u2026") and "\u2026" in short)


def test_a_long_error_keeps_its_beginning_and_end():
    with captured() as (_, error):
        cli.report(UserError(f"rows.jsonl:7: unknown key {'k' * 3_000_000}; remove it"))
    assert error.getvalue().startswith("error: rows.jsonl:7: unknown key kkk")
    assert error.getvalue().endswith("; remove it\n")
    assert len(error.getvalue()) < 600


@settings(max_examples=20)
@given(st.text(min_size=3000, max_size=5000) | st.just("a b " * 1_000_000))
def test_the_length_of_every_error_is_bounded(text):
    with captured() as (_, error):
        cli.report(UserError(text))
    assert len(error.getvalue()) <= LINE_CHARACTERS + 1


def test_output_of_libraries_and_threads_is_printable(monkeypatch):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    before = logging.getLogRecordFactory()
    with captured() as (_, error):
        try:
            console.guard_libraries()
            logging.getLogger("foreign").warning("a file says %s", HOSTILE)
            handler = logging.StreamHandler(error)
            handler.emit(logging.getLogger("foreign").makeRecord(
                "foreign", logging.WARNING, "f", 1, "a file says %s", (HOSTILE,), None
            ))  # fmt: skip
            error.write(warnings.formatwarning(HOSTILE, UserWarning, "f", 1))
            thread = threading.Thread(target=lambda: int(HOSTILE))
            thread.start()
            thread.join()
        finally:
            logging.setLogRecordFactory(before)
    text = error.getvalue()
    assert text.count("evil") >= 3
    assert not controls_terminal(text)


def test_a_traceback_is_printable(monkeypatch, capsys):
    def fail(**_: object) -> None:
        raise ValueError(HOSTILE)

    monkeypatch.setattr(cli, "parser", lambda: fail)
    assert call("--debug") == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert not controls_terminal(error)


PRINTING = {"print", "print_exc", "print_exception", "secho", "Console", "pprint"}


WRITING = ("sys.stdout.write", "sys.stderr.write", "typer.echo", "click.echo", "typer.confirm")


def test_no_other_module_prints():
    """Text printed elsewhere would not be made printable."""
    for path in sorted({*PACKAGE.rglob("*.py")} - {Path(console.__file__)}):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            allowed = last == "print" and "console" in name  # a console of open_console
            assert last not in PRINTING or allowed, f"{path}:{node.lineno}: {name}"
            assert name not in WRITING, f"{path}:{node.lineno}: {name}"
            assert ".file.write" not in name, f"{path}:{node.lineno}: {name}"


# Whole commands: from the files that they read to the terminal


def shown_by(capfd: pytest.CaptureFixture, *arguments: object) -> str:
    """What a command shows, which does not control the terminal."""
    call(*arguments)
    out, error = capfd.readouterr()
    assert not controls_terminal(out + error)
    return out + error


@pytest.fixture
def hostile_run(own_folder: Path) -> RunFolder:
    """A run whose files contain control characters, as a downloaded run may."""
    run = RunFolder(Path("runs/r"))
    run.path.mkdir(parents=True)
    run.config.write_text(f"model: {json.dumps(HOSTILE[:-1])}\ndata: x\n...\n", encoding="utf-8")
    started = events.Started(
        step=0, steps=2, steps_per_epoch=2, model=HOSTILE, rows=1, trainable_parameters=1,
        dtype=HOSTILE, plan=HOSTILE,
    )  # fmt: skip
    samples = events.Samples(when="after", prompts=[HOSTILE], answers=[HOSTILE], expected=[HOSTILE])
    texts = (events.Stage(text=HOSTILE), events.Notice(text=HOSTILE), started, samples)
    ended = events.Finished(step=2, reason=HOSTILE, adapter=HOSTILE, seconds=1.0)
    records = [events.Record(1e9 + n, event) for n, event in enumerate((*texts, ended))]
    run.events.write_text("".join(map(events.to_line, records)))
    return run


@pytest.mark.parametrize(
    "arguments",
    [
        ("runs",), ("runs", "--json"), ("watch", "r"),
        ("watch", "r", "--replay", "--speed", "1000", "--json"),
        ("watch", "r", "--replay", "--speed", "1000"), ("report", "r"),
        ("generate", "r", "--prompt", "a"), ("eval", "r"), ("train", "--resume", "r"),
        ("runs", "prune", "--states", "finished", "--yes"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_hostile_run_folder_prints_no_control_characters(hostile_run, capfd, arguments):
    assert shown_by(capfd, *arguments)


def test_a_hostile_run_folder_gives_a_report_without_control_characters(hostile_run, capfd):
    shown_by(capfd, "report", "r")
    assert not controls_terminal((hostile_run.path / "report.html").read_text())


@pytest.mark.parametrize("command", ["train --no-supervise", "plan"])
@pytest.mark.parametrize(
    "row", [{HOSTILE: 1}, {"messages": HOSTILE}, {"messages": [{"role": HOSTILE, "content": "a"}]}]
)
def test_hostile_data_prints_no_control_characters(
    configure, data_folder, capfd, tiny_model, command, row
):
    write_rows(data_folder / "train.jsonl", [row])
    options = ("--model", tiny_model, "--data", data_folder)
    assert "error: " in shown_by(capfd, *command.split(), *options)


def test_a_hostile_chat_template_error_is_printable(tiny_model, data_folder, capfd):
    folder = shutil.copytree(tiny_model, Path("copy"))
    (folder / "chat_template.jinja").write_text(
        "{{ raise_exception('" + HOSTILE[:-1].replace("\r", "") + "') }}"
    )
    assert "evil" in shown_by(capfd, "plan", "--model", folder, "--data", data_folder)


def test_hostile_file_names_are_printable(own_folder, tiny_model, data_folder, capfd):
    name = "a\x1b[2J\u202eb.jsonl"
    path = write_rows(own_folder / "more" / name, [chat("a", "b"), "{"])
    shown_by(capfd, "plan", "--model", tiny_model, "--data", path)
    folder = own_folder / "models" / "m\x1b[2J\x9b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": HOSTILE[:-1]}))
    shown_by(capfd, "models")
    shown_by(capfd, "models", "verify", folder)


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"COLUMNS": "1"}])
def test_every_kind_of_terminal_gets_printable_output(hostile_run, capfd, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for arguments in (("runs",), ("watch", "r", "--replay", "--speed", "1000"), ("models",)):
        assert shown_by(capfd, *arguments)
