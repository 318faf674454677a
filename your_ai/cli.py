"""The command line: parse, build a config, call. What is heavy is imported when needed."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import os
import sys
import traceback
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai import __version__
from your_ai.config import (
    DEMO,
    FIELDS,
    TYPES,
    TrainConfig,
    default_text,
    describe,
    flag,
    resolve,
    resumed,
)
from your_ai.errors import RunError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.dashboard.live import Follower
    from your_ai.run.folder import RunFolder

DEMO_NOTE = """\
The embedded demo: a small model learns to turn orders into JSON records.
A real model on your own data: your_ai train --model llama-8b --data my-data/"""

TEMPLATE_TOKENS = 200  # of a chat template, generously

METAVARS = {
    "a whole number": "N",
    "a number": "X",
    "a text": "TEXT",
    "a list of names": "NAMES",
    " or ": "|",
}

app = typer.Typer(
    name="your_ai",
    help="Fine-tune LLMs with LoRA on Apple Silicon, inside a memory budget.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        typer.echo(f"your_ai {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def train(config: str | None, resume: str | None, **flags: Any) -> None:
    """Train LoRA adapters. Without a model and without data, trains the embedded demo."""
    from your_ai.hub import find_model
    from your_ai.run import folder as folders

    console = open_console()
    flags = {name: value for name, value in flags.items() if value is not None}
    if resume is not None:
        for other, given in (("--config", config is not None), ("--run", "run" in flags)):
            if given:
                raise UserError(f"--resume {resume}: goes without {other}; the run has its own")
        folder = folders.find(resume)
        settings = resumed(folder.read_config(), flags)
        find_model(settings.model)
    else:
        settings = resolve(flags, config)
        find_model(settings.model)  # may fetch it, with progress bars of its own
        folder = folders.create(settings)
        if settings.model == settings.data == DEMO and settings.exact_match:
            console.print(DEMO_NOTE, markup=False)
    raise typer.Exit(train_and_show(folder, settings, console, new=resume is None))


def train_and_show(folder: RunFolder, settings: TrainConfig, console: Console, new: bool) -> int:
    """Train while a thread shows the run's events; the exit status."""
    from your_ai.dashboard.live import following
    from your_ai.run.folder import discard
    from your_ai.supervisor import Lost, supervise

    try:
        with following(folder.events, console) as follower:
            if settings.supervise:
                as_text = json.dumps(dataclasses.asdict(settings))
                status = supervise(folder, follower, settings=as_text)
            else:
                status = train_here(folder, settings, follower)
    except Lost:
        raise  # its folder says why
    except BaseException:
        if new and not folder.checkpoints.exists():  # the first is written before any step
            discard(folder)
        raise
    if follower.failure is None:
        follower.print_summary(folder.reference)
    else:
        reason = f"{type(follower.failure).__name__}: {follower.failure}"
        print(f"note: the run went on when its display failed ({reason})", file=sys.stderr)
    return status


def train_here(folder: RunFolder, settings: TrainConfig, follower: Follower) -> int:
    """Train in this process, as a debugger wants it; the exit status."""
    from your_ai.run.stopping import stop_signals

    with stop_signals() as stop:
        from your_ai.train import carry_out  # mlx takes a second: shown as starting

        stop.on_second = lambda: follower.leave(folder.reference)
        return carry_out(folder, settings, stop)


def option(name: str, declaration: str, kind: Any, help: str, **more: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(declaration, help=help, **more)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def with_settings(*first: inspect.Parameter) -> inspect.Signature:
    """The parameters of a command that takes every setting: one option for each."""
    config = option(
        "config",
        "--config",
        str | None,
        "YAML file, or the name of a preset; flags win over it.",
        metavar="FILE",
    )
    parameters = [config, *first]
    for name, field in FIELDS.items():
        help = f"{field.metadata['help']}{default_text(name)}"
        if TYPES[name] is bool:
            names = f"{flag(name)}/--no-{flag(name)[2:]}"
            parameters.append(option(name, names, bool | None, help))
        else:
            metavar = describe(TYPES[name])
            for words, short in METAVARS.items():
                metavar = metavar.replace(words, short)
            parameters.append(option(name, flag(name), str | None, help, metavar=metavar))
    return inspect.Signature(parameters)


train.__signature__ = with_settings(  # type: ignore[attr-defined]
    option(
        "resume",
        "--resume",
        str | None,
        "Go on with this run from its last checkpoint.",
        metavar="RUN",
    )
)
app.command()(train)


def plan(
    config: str | None,
    shape: str | None,
    bits: int | None,
    seq_len: int | None,
    as_json: bool | None,
    **flags: Any,
) -> None:
    """Show what a run would hold, by component, and the plan it would take; loads nothing."""
    flags = {name: value for name, value in flags.items() if value is not None}
    named = {"model": shape} if shape is not None else {}  # else the demo's preset is meant
    settings = resolve(flags | named, config, needs_data=False)
    from your_ai import preview
    from your_ai.hub import find_model

    if shape is None:
        if bits is not None:
            raise UserError(f"--bits {bits}: is of a --shape; a model has its own")
        folder = find_model(settings.model)
    else:
        if "model" in flags:
            raise UserError(f"--shape {shape}: goes without --model")
        from your_ai.bench import weights_of

        dtype = "float32" if settings.dtype == "auto" else settings.dtype
        folder = weights_of(shape, None, 4 if bits is None else bits, dtype)
    budget = preview.preview(settings, folder, seq_len)
    if as_json:
        typer.echo(json.dumps(preview.as_json(budget)))
    else:
        open_console().print(preview.table(budget))


plan.__signature__ = with_settings(  # type: ignore[attr-defined]
    option(
        "shape",
        "--shape",
        str | None,
        "A shape of `bench` instead of a model, made on the spot.",
        metavar="NAME",
    ),
    option("bits", "--bits", int | None, "Of the shape: 4 or 8, or 0 for not quantized."),
    option("seq_len", "--seq-len", int | None, "Tokens of every row, without looking at data."),
    option("as_json", "--json", bool | None, "One JSON object for programs."),
)
app.command()(plan)


@app.command()
def generate(
    run: Annotated[str, typer.Option("--run", help="The run whose adapter to use.")],
    prompt: Annotated[str, typer.Option("--prompt", help="What to ask.")],
    adapter: Annotated[bool, typer.Option(help="Use the adapter, or the base model alone.")] = True,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", min=1)] = 256,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token each time.", min=0.0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    max_memory: Annotated[
        float | None, typer.Option(help="Most memory of this process, in GB.", min=0.0)
    ] = None,
) -> None:
    """Answer a prompt with what a run has learned."""
    from your_ai.run import folder as folders

    folder = folders.find(run)
    from your_ai import generate as generation

    path = generation.find_adapter(folder) if adapter else None
    if path is not None and path != folder.adapter:
        typer.echo(f"note: no finished adapter, or an older one; using {path}", err=True)
    room = max_tokens + len(prompt) + TEMPLATE_TOKENS  # no prompt has more tokens than letters
    model, tokenizer = generation.load_run(folder, path, max_memory, room)
    tokens = generation.chat_prompt(tokenizer, prompt)
    for piece in generation.stream(model, tokenizer, tokens, max_tokens, temperature, seed):
        typer.echo(piece, nl=False)
        sys.stdout.flush()
    typer.echo()


@app.command()
def bench(
    shape: Annotated[
        str | None, typer.Option(help="A shape with random weights, made on the spot.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A model to measure instead of a shape.")
    ] = None,
    bits: Annotated[int, typer.Option(help="Quantize the shape to 4 or 8 bits; 0 = not.")] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seq_len: Annotated[int, typer.Option(help="Tokens of a row.", min=2)] = 256,
    batch_size: Annotated[int, typer.Option(help="Rows of a step.", min=1)] = 1,
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.", min=1)] = 16,
    lora_layers: Annotated[str, typer.Option(help="How many of the last blocks, or all.")] = "4",
    lora_targets: Annotated[str, typer.Option(help="As for train.")] = "q_proj",
    plan: Annotated[str, typer.Option(help="Our plans, separated by commas.")] = "fused",
    supervised: Annotated[
        float, typer.Option(help="Share of the tokens that are trained.", min=0.0, max=1.0)
    ] = 1.0,
    steps: Annotated[int, typer.Option(help="Steps of each of two rounds.", min=2)] = 4,
    against: Annotated[
        str, typer.Option(help="Peers, separated by commas: mlx-lm, mlx-lm-checkpoint; or none.")
    ] = "mlx-lm,mlx-lm-checkpoint",
    max_memory: Annotated[
        float | None, typer.Option(help="Most memory of each process, in GB.", min=0.0)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """Measure memory and speed beside mlx-lm on this machine, with the same weights and tokens."""
    from your_ai import bench as benching

    contenders = benching.contenders_of(plan, against)
    contest = benching.Contest(
        folder=str(benching.weights_of(shape, model, bits, dtype)),
        dtype=dtype,
        seq_len=seq_len,
        batch_size=batch_size,
        lora_rank=lora_rank,
        lora_layers=lora_layers,
        lora_targets=lora_targets,
        supervised=supervised,
        steps=steps,
        max_memory=max_memory,
    )
    contest.train_config()  # whose faults are the user's
    rows = benching.compare(contest, contenders)
    if as_json:
        typer.echo(json.dumps({"rows": [dataclasses.asdict(row) for row in rows]}))
    else:
        open_console().print(benching.table(rows), *benching.over_limit(contest, rows), sep="\n")


def open_console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors are one line on stderr, tracebacks only with --debug."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a question mark beats an end in mid-run
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its notes are about torch
    try:
        status = app(args=arguments, standalone_mode=False, prog_name="your_ai")
    except BaseException as error:
        if debug and not isinstance(error, SystemExit):
            traceback.print_exc()
        status = report(error)
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left: what was not read is nobody's loss
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status or 0)


def report(error: BaseException) -> int:
    """Say in one line on stderr what went wrong; the exit status."""
    if isinstance(error, SystemExit):
        raise error
    if type(error).__name__ == "Interrupted":  # run.stopping's, not imported for --help's sake
        print("stopped before the first step; nothing was changed", file=sys.stderr)
        return 128 + error.number  # type: ignore[attr-defined]
    if isinstance(error, UserError):
        status, text = 2, str(error)
    elif isinstance(error, RunError):
        status, text = 1, str(error)
    elif hasattr(error, "format_message") and hasattr(error, "exit_code"):  # the parser's own
        status, text = 2, f"{error.format_message()} (see your_ai --help)"
    else:
        status = 1
        text = f"{type(error).__name__}: {error}; this is a fault of your_ai: --debug shows where"
    print("error: " + " ".join(text.split()), file=sys.stderr)
    return status
