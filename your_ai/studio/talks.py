"""Conversations with a run and its base, whose answers grow in threads while pages show them."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from your_ai.errors import RunError, UserError
from your_ai.gates.text import message_line

MOST_TALKS = 50
SYSTEMS = ("adapter", "base")  # in the order in which they answer
STOPPED = "stopped"

Ask = Callable[..., Any]  # as `Worker.ask`


@dataclass
class GrowingAnswer:
    """An answer that grows."""

    text: str = ""
    ended: str = ""
    """stop, length or STOPPED; empty until it ends."""


@dataclass
class Exchange:
    """A question, and the answers of both systems."""

    question: str
    replies: dict[str, GrowingAnswer] = field(
        default_factory=lambda: {name: GrowingAnswer() for name in SYSTEMS}
    )
    asked: dict[str, Any] = field(default_factory=dict)
    """The whole prompt, with the columns of a row of preferences."""
    step: int | None = None
    """Of the adapter."""
    notes: list[str] = field(default_factory=list)
    fault: str = ""
    is_done: bool = False


@dataclass
class Talk:
    """The questions to a run. Both systems see the answers of the run before a question, so that
    two answers to one question can be compared."""

    name: str
    run: str
    sampling: dict[str, Any] = field(default_factory=dict)
    exchanges: list[Exchange] = field(default_factory=list)
    stops: bool = False

    @property
    def is_busy(self) -> bool:
        return bool(self.exchanges) and not self.exchanges[-1].is_done

    def messages(self) -> list[dict[str, str]]:
        """The turns so far, and the last question."""
        said = []
        for each in self.exchanges[:-1]:
            answer = each.replies["adapter"].text
            if answer and not each.fault:
                said += [("user", each.question), ("assistant", answer)]
        said.append(("user", self.exchanges[-1].question))
        return [{"role": role, "content": content} for role, content in said]


class Talks:
    """The conversations of a studio. One answer at a time: the model is there once."""

    def __init__(self) -> None:
        self.known: dict[str, Talk] = {}
        self.lock = threading.Lock()
        self.turn = threading.Lock()
        self.count = 0  # of questions; each has its own seed

    def named(self, name: str) -> Talk | None:
        return self.known.get(name)

    def ask(self, ask: Ask, talk: Talk | None, run: str, question: str, **sampling: Any) -> Talk:
        """Ask in a conversation, or in a new one. Raises UserError while it is answered."""
        with self.lock:
            if talk is None:
                talk = Talk(secrets.token_hex(8), run)
                done = [name for name, each in self.known.items() if not each.is_busy]
                for name in done[: max(0, len(self.known) + 1 - MOST_TALKS)]:
                    del self.known[name]
                self.known[talk.name] = talk
            elif talk.is_busy:
                raise UserError("the last question is still being answered; stop it, or wait")
            self.count += 1
            talk.sampling, talk.stops = sampling, False
            talk.exchanges.append(Exchange(question))
            given = (ask, talk, {**sampling, "seed": self.count})
        threading.Thread(target=self.answer, args=given, daemon=True).start()
        return talk

    def answer(self, ask: Ask, talk: Talk, sampling: dict[str, Any]) -> None:
        """Let both systems answer the last question, a piece at a time."""
        exchange, messages = talk.exchanges[-1], talk.messages()
        try:
            with self.turn:
                for name, reply in exchange.replies.items():
                    if talk.stops:
                        reply.ended = STOPPED
                        continue
                    about = ask(
                        "begin_answer", run=talk.run, messages=messages,
                        adapted=name == "adapter", **sampling,
                    )  # fmt: skip
                    exchange.asked, exchange.step = about["asked"], about["step"]
                    exchange.notes = about["notes"]
                    while not reply.ended:
                        piece = {"ended": STOPPED} if talk.stops else ask("more_of_answer")
                        reply.text += piece.get("text", "")
                        reply.ended = piece["ended"]
        except (UserError, RunError, OSError) as error:
            exchange.fault = message_line(error)
        finally:
            exchange.is_done = True
