"""`your_ai generate` and `your_ai chat`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from your_ai.commands.options import (
    about_option,
    columns_of,
    echo_note,
    opened,
    run_or_newest,
    with_options,
)
from your_ai.config.requests import COLUMNS, ChatRequest, GenerateRequest
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_json
from your_ai.gates.paths import unreadable_text
from your_ai.gates.text import quoted, shortened

if TYPE_CHECKING:
    from your_ai.config import TrainConfig
    from your_ai.generation.generate import Answerer, Prompt, Sampling

PROMPTS_BYTES = 1 << 26


@with_options
def generate(
    *,
    named: Annotated[
        str | None, typer.Option("--run", help="Same as RUN; kept for older scripts.")
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Prompt; may be given several times; default: standard input."),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            help="A file with one prompt per line, or a .jsonl file or a table with prompt or "
            "messages in each row; - is standard input.",
            metavar="FILE",
        ),
    ] = None,
    columns: Annotated[list[str] | None, about_option(COLUMNS)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line for each answer.")
    ] = False,
    request: GenerateRequest,
    num_samples: Annotated[
        int,
        typer.Option(
            help="Different answers to each prompt, for a temperature above 0. Many answers are "
            "generated together, as far as memory allows."
        ),
    ] = 1,
) -> None:
    """Answer prompts with a run's model."""
    from your_ai.generation import generate as generation
    from your_ai.generation import samples
    from your_ai.run import folder as folders

    sampling = generation.sampling_of(request)
    samples.check_num_samples(num_samples, sampling)
    if request.run is not None and named is not None and request.run != named:
        raise UserError(f"--run {named}: RUN says {request.run}; give one of them")
    name = run_or_newest(request.run if request.run is not None else named)
    config = folders.find(name).read_config()
    form, note = generation.form_of_prompts(config, request.system)
    given = gather(prompt, prompts, columns_of(columns), config)
    asked = [generation.asked_with(each, form) for each in given]
    streamed = num_samples == len(asked) == 1 and not as_json
    answerer = generation.open_answerer(
        name,
        asked[0].most_tokens + request.max_tokens
        if streamed
        else samples.sizes_of(asked, request.max_tokens, num_samples),
        request,
    )
    is_told = asked != given or not form.is_known
    typed = "" if prompts else generation.note_on_template(config)
    for each in filter(None, (answerer.note, note if is_told else "", typed)):
        echo_note(each)
    fitted = answerer.fit(asked, sampling)  # all of them, before the first answer
    try:
        if streamed:
            show(answerer.respond(*fitted[0]))
        else:
            show_all(answerer, asked, fitted, num_samples, as_json)
    except BrokenPipeError:  # the reader has seen enough
        raise typer.Exit(0) from None


def gather(
    prompt: Sequence[str] | None, prompts: str | None, columns: Sequence[str], config: TrainConfig
) -> list[Prompt]:
    """The prompts to answer, from the one place that was given, or else standard input.

    config: of the run, whose rows tell how rows become prompts.
    """
    from your_ai.data.sources import STDIN
    from your_ai.generation import generate as generation

    if prompt is not None and prompts is not None:
        raise UserError("--prompt and --prompts: give one of them")
    if prompt is not None:
        return [generation.text_prompt(text, "--prompt") for text in prompt]
    if prompts is None and sys.stdin.isatty():
        raise UserError("nothing to answer: give --prompt TEXT, --prompts FILE, or text on stdin")
    if columns and (prompts is None or not generation.has_columns(prompts)):
        raise UserError("--columns: is for tables; give one with --prompts, such as FILE.csv")
    read = generation.prompt_reader(config, columns)
    if prompts is not None and generation.is_table(prompts):
        return generation.read_table(Path(prompts), read)
    if prompts is not None and prompts != STDIN:
        return generation.read_prompts(prompts, read_file(prompts), read)
    data = read_most(sys.stdin.buffer, "stdin")
    if prompts is not None:
        return generation.read_prompts("stdin", data, read)
    return [generation.text_prompt(generation.decoded(data, "stdin").rstrip("\n"), "stdin")]


def read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return read_most(file, path)
    except OSError as error:
        raise UserError(f"--prompts {shortened(path)}: {unreadable_text(path, error)}") from error
    except ValueError as error:  # a null character
        raise UserError(f"--prompts {quoted(path)}: is no path") from error


def read_most(file: BinaryIO, where: str) -> bytes:
    """All of a file. Raises UserError where that is more than any number of prompts."""
    data = file.read(PROMPTS_BYTES + 1)
    if len(data) > PROMPTS_BYTES:
        raise UserError(f"{where}: has more than {PROMPTS_BYTES:,} bytes; give fewer prompts")
    return data


def show_all(
    answerer: Answerer,
    prompts: Sequence[Prompt],
    fitted: Sequence[tuple[list[int], Sampling]],
    num_samples: int,
    as_json: bool,
) -> None:
    """The answers in their order, each when it and all before it are finished.

    fitted: the tokens and the sampling of each prompt.
    """
    from your_ai.generation.samples import sampled

    began, several = time.perf_counter(), num_samples > 1
    found = sampled(
        answerer.network, answerer.tokenizer, fitted, num_samples, answerer.rows_at_once
    )
    for number, each in enumerate(found):
        prompt = prompts[each.prompt]
        if as_json:
            echo_json(
                {
                    "prompt": prompt.text,
                    **({"sample": each.sample + 1} if several else {}),
                    "answer": each.text,
                    "tokens": each.tokens,
                    "prompt_tokens": len(fitted[each.prompt][0]),
                    "finish_reason": each.finish_reason,
                    "seconds": round(time.perf_counter() - began, 3),
                }
            )
        else:
            echo("\n" if number else "", nl=False)
            if several:
                where = f"{prompt.where}, " if len(prompts) > 1 else ""
                echo(f"{where}sample {each.sample + 1} of {num_samples}:")
            echo(each.text)
        sys.stdout.flush()


def show(responses: Any) -> None:
    """An answer as it comes, without what would steer a terminal; --json has it as it is."""
    for response in responses:
        echo(response.text, nl=False)
        sys.stdout.flush()
    echo()


@with_options
def chat(request: ChatRequest) -> None:
    """Chat with a run's model, and compare it with its base model; /help lists the commands."""
    from your_ai.commands import talking
    from your_ai.generation import chat as chatting
    from your_ai.generation.generate import (
        form_of_prompts,
        note_on_template,
        note_on_tools,
        sampling_of,
    )

    sampling = sampling_of(request)
    trained = opened(request)
    with talking.started_tools(request) as pool:
        talker = chatting.open_talker(
            trained, sampling, request.max_memory, pool, request.max_turns
        )
        tools = None if pool is None else [dict(tool) for tool in pool.tools]
        form, note = form_of_prompts(trained.config, request.system, tools)
        if form.is_text:
            note = "the training rows are plain texts, which your_ai generate continues"
        on_tools = "" if pool else note_on_tools(trained.config)
        for each in filter(None, (note, note_on_template(trained.config), on_tools)):
            echo_note(each)
        conversation = chatting.Conversation(form.system, tools=form.tools)
        talker.check(conversation)
        greeting = f"{trained.folder.name}, step {trained.adapter.step}; {talking.HINT}"
        talking.talk(talker, conversation, greeting)
