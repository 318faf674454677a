"""The terminal of `your_ai chat`: lines in, answers out, and two answers side by side."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from your_ai.errors import RunError, UserError
from your_ai.gates.console import echo, echo_error, open_console
from your_ai.gates.text import printable
from your_ai.generation.chat import COMMANDS, Conversation, Responses, Talker, parse
from your_ai.nets.saved_adapter import Trained

WIDE = 72  # columns, from which on two answers stand side by side
FRAMES_S = 0.1
ADAPTER, BASE = "with the adapter", "base model"
STOPPED = "stopped"
HINT = "/help lists the commands, Ctrl-D leaves"


@dataclass
class Answer:
    """An answer as far as it went, and what is still to come of it.

    ended: `stop`, `length`, or `stopped` by Ctrl-C; "" while there is more.
    """

    name: str
    responses: Responses | None = None
    text: str = ""
    tokens: int = 0
    ended: str = ""


@dataclass
class Interrupts:
    """The Ctrl-C's of a user: noted, so that none ends the process between two lines.

    count: since it was last set to 0; patience: so many are noted before one is raised, None:
    all.
    """

    count: int = 0
    patience: int | None = None

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
    """Where answers are shown. interactive: a user types and reads."""

    console: Console
    interactive: bool
    interrupts: Interrupts = field(default_factory=Interrupts)

    @property
    def is_wide(self) -> bool:
        live = self.interactive and not self.console.is_dumb_terminal
        return live and self.console.width >= WIDE

    def note(self, text: str) -> None:
        """Something that no model said."""
        if self.interactive:
            self.console.print(text, style="dim")
        else:
            echo_error(text)

    def write(self, text: str) -> None:
        echo(text, nl=False)
        sys.stdout.flush()


def banner(trained: Trained) -> str:
    return f"{trained.folder.name}, step {trained.adapter.step}; {HINT}"


def talk(talker: Talker, conversation: Conversation, greeting: str) -> None:
    """Answer the lines of standard input until they end, or /exit."""
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
        except BrokenPipeError:  # the reader has seen enough
            raise typer.Exit(0) from None


def typed(interrupts: Interrupts) -> Iterator[str]:
    """The lines that a user types, with editing and, while this process lives, history.

    A line that ends with a backslash goes on with the next.
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
    """The lines of a pipe or a file, joined as those of `typed` are."""
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
    talker: Talker, conversation: Conversation, line: str, screen: Screen
) -> Conversation | None:
    """What the conversation is after a line; None where that is its end."""
    typed = parse(line)
    if typed.command == "exit":
        return None
    if typed.command == "help":
        for command, meaning in COMMANDS.items():
            screen.note(f"/{command}: {meaning}")
        screen.note("Ctrl-C stops an answer; a \\ at the end of a line goes on with the next")
    elif typed.command == "reset":
        screen.note("a new conversation")
        return Conversation(conversation.system, compares=conversation.compares)
    elif typed.command == "system":
        changed = replace(conversation, system=typed.text)
        talker.check(replace(changed, turns=()))
        screen.note(f"system prompt: {typed.text or 'none'}")
        return changed
    elif typed.command == "base" and typed.text:
        screen.note(f"the base model answers {'too' if typed.text == 'on' else 'no more'}")
        return replace(conversation, compares=typed.text == "on")
    elif typed.command == "base":
        if not conversation.turns:
            raise UserError("/base: nothing was asked yet")
        before, last = conversation.before_the_last(), conversation.turns[-1]
        base = Answer(BASE, talker.answer(before, last.question, adapted=False))
        compare(Answer(ADAPTER, text=last.answer, ended="stop"), base, screen)
    elif typed.text:
        return ask(talker, conversation, typed.text, screen)
    return conversation


def ask(talker: Talker, conversation: Conversation, question: str, screen: Screen) -> Conversation:
    """The conversation with the answer, which is shown as it comes."""
    talker.asked += 1
    answer = Answer(ADAPTER, talker.answer(conversation, question))
    if conversation.compares:
        compare(answer, Answer(BASE, talker.answer(conversation, question, False)), screen)
    else:
        show(answer, screen)
    if answer.ended == "length" and talker.is_full(answer.tokens):
        screen.note(f"the conversation fills the {talker.most_tokens} tokens there is room for")
    elif answer.ended == "length":
        screen.note(f"cut at {answer.tokens} tokens; --max-tokens gives more")
    elif answer.ended == STOPPED:
        screen.note("stopped" if answer.text else "stopped before it began; not kept")
    return conversation.followed_by(question, answer.text) if answer.text else conversation


def compare(ours: Answer, base: Answer, screen: Screen) -> None:
    """Two answers beside each other, or one below the other where the terminal is narrow."""
    if screen.is_wide:
        show_beside(ours, base, screen)
        return
    for answer in (ours, base):
        if not answer.ended and ours.ended != STOPPED:  # one that was given stands above
            screen.note(f"{answer.name}:")
            show(answer, screen)


def collect(answer: Answer, interrupts: Interrupts) -> Iterator[str]:
    """The pieces of an answer until it ends or the user ends it; it is given what they say."""
    if answer.ended:
        return
    interrupts.count = 0
    with contextlib.closing(answer.responses):
        while not answer.ended:
            try:
                with interrupts.raised_after(1):  # while a long prompt is read, say
                    response = next(answer.responses, None)
            except KeyboardInterrupt:
                if not interrupts.count:  # not by us: nobody is at the keyboard
                    raise
                response = None
            if response is None or interrupts.count:
                answer.ended = STOPPED
            if response is not None:
                answer.text += response.text
                answer.tokens += 1
                answer.ended = response.finish_reason or answer.ended
                yield response.text


def show(answer: Answer, screen: Screen) -> None:
    """An answer as it comes."""
    try:
        for piece in collect(answer, screen.interrupts):
            screen.write(piece)
    finally:
        echo()


def show_beside(ours: Answer, base: Answer, screen: Screen) -> None:
    """Two answers while they grow, as much as fits on the screen; then the whole of them."""
    console = screen.console
    shown_at = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for answer in (ours, base):
            for _ in collect(answer, screen.interrupts) if ours.ended != STOPPED else ():
                if time.monotonic() - shown_at > FRAMES_S:
                    shown_at = time.monotonic()
                    height = console.height - 3  # its head, and the line below
                    live.update(beside(ours, base, console, height), refresh=True)
    console.print(beside(ours, base, console))


def beside(ours: Answer, base: Answer, console: Console, height: int | None = None) -> Table:
    """Two answers in columns; of their lines the last `height`."""
    width = (console.width - 5) // 2  # so that the ^C which a terminal shows wraps no line
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    cells = []
    for answer in (ours, base):
        table.add_column(answer.name, width=width, header_style="dim")
        lines = Text(printable(answer.text).expandtabs(4)).wrap(console, width)
        cells.append(Text("\n").join(lines[-max(1, height) :] if height is not None else lines))
    table.add_row(*cells)
    return table


@contextlib.contextmanager
def signals(screen: Screen) -> Iterator[None]:
    """Note the Ctrl-C's of a user, and end on SIGTERM and SIGHUP by an exception.

    So readline sets the terminal back. Without a user Ctrl-C is what it is elsewhere.
    """

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    handlers: dict[int, Callable] = dict.fromkeys((signal.SIGTERM, signal.SIGHUP), leave)
    if screen.interactive:
        handlers[signal.SIGINT] = screen.interrupts.note
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
