"""The model that is tried, in the studio's process for it: one for the run and its base.

An answer is generated a piece at a time, as it is asked for: so it can be stopped, and no thread
shares the model.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_lm.generate import GenerationResponse

from your_ai.data.look import CommonForm
from your_ai.errors import RunError
from your_ai.generation.chat import ChatSession, open_talker
from your_ai.generation.generate import Prompt, Sampling, asked_with, fit, form_of_prompts
from your_ai.memory import allocator
from your_ai.nets.saved_adapter import Trained, open_trained
from your_ai.run.folder import RUNS, find, is_running
from your_ai.session.room import trial_gb

PIECE_S = 0.2


@dataclass
class TriedModel:
    """A run whose model is loaded."""

    key: tuple[Path, int]
    """The adapter that it has, and the time when that was written, in ns."""
    talker: ChatSession
    form: CommonForm
    """The form of its prompts."""
    about: dict[str, Any]
    """What the page shows of it."""


loaded: list[TriedModel] = []  # one at most
answers: list[Generator[GenerationResponse, None, None]] = []  # the one in progress, or none


def begin_answer(
    run: str, messages: list[dict[str, Any]], adapted: bool, **sampling: Any
) -> dict[str, Any]:
    """Begin the answer of a run, or of its base if not `adapted`, to the last of the messages.

    The base is asked after the run, and answers with the same weights even if the run trains on.
    Returns the prompt, with the columns of a row of preferences, and what the model is. Raises
    UserError, RunError.
    """
    for answer in answers:
        answer.close()
    answers.clear()
    asked = Sampling(**sampling)
    tried = loaded[0] if loaded and not adapted else open_tried(run, asked)
    if tried.form.is_text:  # what is continued has no conversation before it
        messages = messages[-1:]
    is_text = len(messages) == 1
    prompt = Prompt("the question", messages, None if is_text else tried.form.tools, is_text)
    prompt = asked_with(prompt, tried.form)
    tokens, limited = fit(tried.talker.tokenizer, prompt, asked, tried.talker.most_tokens)
    answers.append(tried.talker.read_on(tokens, limited, adapted))
    columns = {"prompt": prompt.text if prompt.as_is else prompt.messages}
    return {"asked": columns | ({"tools": prompt.tools} if prompt.tools else {}), **tried.about}


def more_of_answer() -> dict[str, Any]:
    """The next piece of the answer, and why it ended: stop or length; "" if it has not."""
    if not answers:
        raise RunError("the process that answered has ended; ask again")
    text, ended, until = "", "stop", time.monotonic() + PIECE_S
    for response in answers[0]:
        text, ended = text + response.text, response.finish_reason or ""
        if ended or time.monotonic() > until:
            break
    return {"text": text, "ended": ended}


def open_tried(run: str, sampling: Sampling) -> TriedModel:
    """Load the model of a run within the memory that other runs leave, unless it is loaded."""
    trained = open_latest(run)
    key = (trained.adapter.folder.absolute(), trained.adapter.folder.stat().st_mtime_ns)
    if not loaded or loaded[0].key != key:
        loaded.clear()
        allocator.free()
        talker = open_talker(trained, sampling, trial_gb(RUNS))
        form, note = form_of_prompts(trained.config, None)
        notes = [text for text in (trained.note, note) if text]
        about = {"step": trained.adapter.step, "notes": notes, "goes_on": not form.is_text}
        loaded.append(TriedModel(key, talker, form, about))
    return loaded[0]


def open_latest(run: str) -> Trained:
    """The run with its finished adapter, or with its last checkpoint until it has one."""
    folder = find(run)
    return open_trained(
        run, "latest" if is_running(folder) or not folder.adapter.is_dir() else None
    )
