"""The terminal of `your_ai chat`: lines in, answers out, and two answers side by side."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from your_ai.commands.rollouts import call_text
from your_ai.config.requests import ChatRequest
from your_ai.data.turns import TOOL
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import HostOptions
from your_ai.errors import RunError, UserError
from your_ai.gates.console import echo, echo_error, open_console
from your_ai.gates.text import counted, printable, shown
from your_ai.generation.chat import COMMANDS, ChatSession, Conversation, Pieces, parse
from your_ai.generation.generate import Message
from your_ai.generation.tool_calls import NO_TURNS, AnswerPiece

WIDE = 72  # columns; a terminal this wide shows two answers side by side
FRAMES_S = 0.1
ADAPTER, BASE = "with the adapter", "base model"
STOPPED = "stopped"
NOTE_CHARACTERS = 200  # of a call, or of its result
RELAY_S = 1.0  # for what tools printed last
HINT = "/help lists the commands, Ctrl-D leaves"


@dataclass
class Answer:
    """An answer: the text so far, and the pieces still to come."""

    name: str
    pieces: Pieces | None = None
    text: str = ""
    """After the last call of a tool."""
    shown: str = ""
    """The whole text, with calls and results."""
    tokens: int = 0
    """Of `text`."""
    between: list[Message] = field(default_factory=list)
    """Calls and results, before `text`."""
    ended: str = ""
    """`stop`, `length`, NO_TURNS, or `stopped` by Ctrl-C; "" while there is more."""

    def add(self, piece: AnswerPiece) -> None:
        if piece.between is not None:
            self.between.append(piece.between)
            self.text, self.tokens = "", 0
        self.text += piece.text
        self.tokens += piece.tokens
        self.ended = piece.ended or self.ended
        notes = "".join(f"{note}\n" for note in notes_of(piece))
        begins_line = not self.shown or self.shown.endswith("\n")
        self.shown += piece.text + ("\n" if notes and not begins_line else "") + notes


@dataclass
class Interrupts:
    """Counts a user's Ctrl-C, so that none ends the process between two lines."""

    count: int = 0
    """Number of Ctrl-C since it was last set to 0."""
    patience: int | None = None
    """Number of Ctrl-C to count before the next one raises; None: never raise."""

    def note(self, number: int, frame: object) -> None:
        self.count += 1
        if self.patience is not None and self.count > self.patience:
            self.patience = None
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised_after(self, patience: int) -> Iterator[None]:
        self.patience = patience
        try:
            yield
        finally:
            self.patience = None


@dataclass(frozen=True)
class Screen:
    console: Console
    interactive: bool
    """Whether a user types and reads, rather than a program."""
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def is_wide(self) -> bool:
        live = self.interactive and not self.console.is_dumb_terminal
        return live and self.console.width >= WIDE

    def note(self, text: str) -> None:
        """Show a message that is not from a model."""
        if self.interactive:
            self.console.print(text, style="dim")
        else:
            echo_error(text)

    def write(self, text: str) -> None:
        echo(text, nl=False)
        sys.stdout.flush()


@contextlib.contextmanager
def started_tools(request: ChatRequest) -> Iterator[EnvironmentPool | None]:
    """Start the tools of a request, and end them with the `with` block; None for none.

    What they print goes to stderr, without what would steer a terminal. Raises UserError, RunError.
    """
    if not request.tools:
        yield None
        return
    options = HostOptions(
        tools=request.tools,
        timeout_s=request.tool_timeout_s,
        output_characters=request.tool_output_characters,
        trust_code=request.trust_code,
    )
    reader, writer = os.pipe()
    relay = threading.Thread(target=echo_errors, args=(reader,), daemon=True)
    relay.start()
    try:
        with open(writer, "wb"):
            pool = EnvironmentPool(options, log=writer)
        try:
            yield pool
        finally:
            pool.shutdown()
    finally:
        relay.join(RELAY_S)


def echo_errors(reader: int) -> None:
    """Print the lines of a pipe to stderr until it is closed."""
    with open(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            echo_error(line.rstrip("\n"))


def talk(talker: ChatSession, conversation: Conversation, greeting: str) -> None:
    """Answer the lines of standard input until it ends, or until /exit."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    screen = Screen(open_console(), interactive)
    if interactive:
        screen.note(greeting)
    with signals(screen):
        try:
            for line in typed(screen.interrupts) if interactive else read():
                try:
                    after = take(talker, conversation, line, screen)
                except (UserError, RunError) as error:
                    if not interactive:
                        raise
                    screen.note(str(error))
                    continue
                if after is None:
                    break
                conversation = after
        except BrokenPipeError:  # the reader closed the pipe
            raise typer.Exit(0) from None


def typed(interrupts: Interrupts) -> Iterator[str]:
    """Yield the lines that a user types, with editing, and history within this process.

    A line that ends with a backslash continues on the next line.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits with it; no history is written to a file)
    while True:
        interrupts.count = 0
        try:
            with interrupts.raised_after(0):
                line = input("> ")
                while line.endswith("\\"):
                    line = f"{line[:-1]}\n{input('. ')}"
        except EOFError:
            echo()
            return
        except KeyboardInterrupt:
            echo(f"\n{HINT}")
            continue
        yield line


def read() -> Iterator[str]:
    """Yield the lines of a pipe or a file, continued as in `typed`."""
    whole = ""
    for line in sys.stdin:
        whole += line.removesuffix("\n")
        if whole.endswith("\\"):
            whole = f"{whole[:-1]}\n"
            continue
        yield whole
        whole = ""
    if whole:
        yield whole


def take(
    talker: ChatSession, conversation: Conversation, line: str, screen: Screen
) -> Conversation | None:
    """Return the conversation after a line; None if the line ends it."""
    typed = parse(line)
    if typed.command == "exit":
        return None
    if typed.command == "help":
        for command, meaning in COMMANDS.items():
            screen.note(f"/{command}: {meaning}")
        screen.note("Ctrl-C stops an answer; a \\ at the end continues the line on the next")
    elif typed.command == "reset":
        talker.forget()
        screen.note("new conversation")
        return replace(conversation, turns=())
    elif typed.command == "system":
        changed = replace(conversation, system=typed.text)
        talker.check(replace(changed, turns=()))
        screen.note(f"system prompt: {typed.text or 'none'}")
        return changed
    elif typed.command == "base" and typed.text:
        screen.note(f"the base model {'also' if typed.text == 'on' else 'no longer'} answers")
        return replace(conversation, compares=typed.text == "on")
    elif typed.command == "base":
        if not conversation.turns:
            raise UserError("/base: ask a question first")
        before, last = conversation.before_the_last(), conversation.turns[-1]
        base = Answer(BASE, talker.converse(before, last.question, adapted=False))
        compare(Answer(ADAPTER, shown=last.answer, ended="stop"), base, screen)
    elif typed.text:
        return ask(talker, conversation, typed.text, screen)
    return conversation


def ask(
    talker: ChatSession, conversation: Conversation, question: str, screen: Screen
) -> Conversation:
    """Show the answer while it is generated; return the conversation with it."""
    talker.asked += 1
    answer = Answer(ADAPTER, talker.converse(conversation, question))
    if conversation.compares:
        compare(answer, Answer(BASE, talker.converse(conversation, question, False)), screen)
    else:
        show(answer, screen)
    if answer.ended == "length" and talker.is_full(answer.tokens):
        limit = counted(talker.most_tokens or 0, "token")
        screen.note(f"the conversation has reached its limit of {limit}")
    elif answer.ended == "length":
        cut_at = counted(answer.tokens, "token")
        screen.note(f"cut at {cut_at}; raise --max-tokens for longer answers")
    elif answer.ended == STOPPED:
        screen.note("stopped" if answer.text else "stopped before the answer began; not kept")
    if answer.text and answer.ended != NO_TURNS:
        return conversation.followed_by(question, answer.text, answer.between)
    return conversation


def compare(ours: Answer, base: Answer, screen: Screen) -> None:
    """Show two answers side by side, or one below the other if the terminal is narrow."""
    if screen.is_wide:
        show_beside(ours, base, screen)
        return
    for answer in (ours, base):
        if not answer.ended and ours.ended != STOPPED:  # an answer that has ended is shown above
            screen.note(f"{answer.name}:")
            show(answer, screen)


def notes_of(piece: AnswerPiece) -> list[str]:
    """The lines that show calls of tools, a result, or the lack of an answer."""
    message = piece.between
    if message is None:
        return [NO_TURNS] if piece.ended == NO_TURNS else []
    if message["role"] == TOOL:
        return [f"{shown(message.get('name'))}: {shown(message['content'], NOTE_CHARACTERS)}"]
    return [shown(call_text(call), NOTE_CHARACTERS) for call in message["tool_calls"]]


def collect(answer: Answer, interrupts: Interrupts) -> Iterator[AnswerPiece]:
    """Yield the pieces of an answer until it ends or the user stops it; add them to `answer`."""
    if answer.ended or answer.pieces is None:
        return
    interrupts.count = 0
    with contextlib.closing(answer.pieces):
        while not answer.ended:
            try:
                with interrupts.raised_after(1):  # e.g. during the prefill of a long prompt
                    piece = next(answer.pieces, None)
            except KeyboardInterrupt:
                if not interrupts.count:  # `note` did not raise it: there is no user
                    raise
                piece = None
            if piece is None or interrupts.count:
                answer.ended = STOPPED
            if piece is not None:
                answer.add(piece)
                yield piece


def show(answer: Answer, screen: Screen) -> None:
    """Show an answer while it is generated."""
    begins_line = True
    try:
        for piece in collect(answer, screen.interrupts):
            notes = notes_of(piece)
            if notes and not begins_line:
                echo()
            for note in notes:
                screen.note(note)
            screen.write(piece.text)
            begins_line = piece.text.endswith("\n") if piece.text else begins_line or bool(notes)
    finally:
        echo()


def show_beside(ours: Answer, base: Answer, screen: Screen) -> None:
    """Show what fits on the screen of two growing answers; then show both completely."""
    console = screen.console
    shown_at = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for answer in (ours, base):
            for _ in collect(answer, screen.interrupts) if ours.ended != STOPPED else ():
                if time.monotonic() - shown_at > FRAMES_S:
                    shown_at = time.monotonic()
                    height = console.height - 3  # the table's header, and the line below
                    live.update(beside(ours, base, console, height), refresh=True)
    console.print(beside(ours, base, console))


def beside(ours: Answer, base: Answer, console: Console, height: int | None = None) -> Table:
    """Lay out two answers in columns; only the last `height` lines of each, if given."""
    width = (console.width - 5) // 2  # leaves room for the ^C that a terminal echoes
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    cells = []
    for answer in (ours, base):
        table.add_column(answer.name, width=width, header_style="dim")
        lines = Text(printable(answer.shown).expandtabs(4)).wrap(console, width)
        cells.append(Text("\n").join(lines[-max(1, height) :] if height is not None else lines))
    table.add_row(*cells)
    return table


@contextlib.contextmanager
def signals(screen: Screen) -> Iterator[None]:
    """Count a user's Ctrl-C, and raise SystemExit on SIGTERM and SIGHUP.

    The exception lets readline restore the terminal. Without a user, Ctrl-C is not handled here.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Callable[[int, FrameType | None], object]]
    handlers = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), leave)
    if screen.interactive:
        handlers[signal.SIGINT] = screen.interrupts.note
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
